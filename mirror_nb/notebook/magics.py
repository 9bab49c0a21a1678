"""`%mirror` and `%%mirrored`: parse the line, hand it to the session, show what comes back."""

from __future__ import annotations

import contextlib
import keyword
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError as MagicUsageError
from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.utils.process import arg_split

from mirror_nb.bench.collectives import AllReduceTable
from mirror_nb.bench.command import Options
from mirror_nb.bench.steps import StepTable
from mirror_nb.errors import MirrorError, UsageError
from mirror_nb.notebook import completing
from mirror_nb.notebook.names import RESERVED
from mirror_nb.notebook.options import CellOptions, GradientFlags
from mirror_nb.notebook.picker.driven_session import DrivenSession
from mirror_nb.notebook.session import Session
from mirror_nb.notebook.view import is_closed

if TYPE_CHECKING:
    from mirror_nb.notebook.picker.widget import Picker


_WHAT = ["start", "stop", "restart", "status", "dashboard", "compare", "push", "pull", "bench"]
_WITH_NAMES = ("push", "pull", "start", "restart")
_TAKEN_BY = {
    "devices": ("start", "restart", "bench"),
    "ops": ("start", "restart", "bench"),
    "bucket_mb": ("start", "restart"),
    "compression": ("start", "restart"),
    "seed": ("start",),
    "in_process": ("start",),
    "dashboard": ("start",),
    "replica": ("pull",),
    "largest": ("bench",),
    "seconds": ("bench",),
    "model": ("bench",),
    "shape": ("bench",),
    "batch": ("bench",),
    "optimizer": ("bench",),
}
# Each option of `%mirror`, and what it can stand behind.


@magics_class
class MirrorMagics(Magics):
    """The magics of mirror_nb."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self.session = Session(shell)
        self._shell = shell
        self._picker: Picker | None = None
        # One: shown again, it is the same.
        shell.events.register("post_run_cell", _tell_where_bound)
        of_cells = re.findall(r"--[\w-]+", self.mirrored.parser.format_usage())
        completing.offer(shell, _WHAT, _TAKEN_BY, of_cells)

    @no_var_expand
    @magic_arguments(name="%mirrored")
    @argument("--replicas", default=None, metavar="IDS", help="run on these replicas only, e.g. 0,2-3")
    @argument("--no-sync", action="store_true", help="do not synchronise gradients in this cell")
    @argument("--out", default=None, metavar="NAME", help="bind the result to NAME instead of showing it")
    @argument("--quiet", action="store_true", help="no status lines, no closing line, nothing of other replicas")
    @argument("--timeout", type=float, default=None, metavar="SECONDS", help="stop the cell after so long")
    @argument("--dashboard", action="store_true", help="show what the replicas do, live, above the cell's output")
    @cell_magic
    def mirrored(self, line: str, cell: str) -> Any:
        """Run the cell on every replica, each with its device.

        `strategy`, `replica_id`, `num_replicas` and `device` are bound there. Names of the notebook that the cell
        reads are sent; names that it binds come back. Gradients of modules made in it are synchronised.
        """
        given = _parsed(self.mirrored, line)
        if given.timeout is not None and not given.timeout > 0:
            raise MagicUsageError(f"--timeout is {given.timeout:g}; it must be more than 0 seconds")
        if given.out is not None and (not given.out.isidentifier() or keyword.iskeyword(given.out)):
            raise MagicUsageError(f"--out {given.out!r} is no name")
        with _short_tracebacks():
            replicas = _ids(given.replicas)
        options = CellOptions(
            replicas=replicas,
            synchronize=not given.no_sync,
            out=given.out,
            quiet=given.quiet,
            timeout=given.timeout,
            dashboard=given.dashboard,
        )
        with _short_tracebacks():
            return self.session.run_cell(cell, options)

    @no_var_expand
    @magic_arguments()
    @argument("what", nargs="?", metavar=f"{{{','.join(_WHAT)}}}", help="what to do")
    @argument("names", nargs="*", help="names to push or pull; start, restart: as --devices")
    @argument("--devices", default=None, help="start, restart, bench: e.g. cpu:0,cpu:1; default: all GPUs")
    @argument(
        "--ops", default=None, metavar="NAME", help="start, restart: cross-device ops; bench: several, with commas"
    )
    @argument("--bucket-mb", type=float, default=None, metavar="MB", help="start, restart: size of a gradient bucket")
    @argument(
        "--compression",
        default=None,
        choices=["none", "bf16"],
        help="start, restart: gradients travel in half the bytes",
    )
    @argument(
        "--seed", type=int, default=None, help="start: seed of the replicas' random numbers, until the notebook seeds"
    )
    @argument("--in-process", action="store_true", help="start: one replica in this very process, for debugging")
    @argument("--dashboard", action="store_true", help="start: show a dashboard above every mirrored cell that trains")
    @argument("--replica", type=int, default=None, help="pull: from this replica only")
    @argument("--largest", default=None, metavar="SIZE", help="bench: tensors from 1K up to this")
    @argument("--seconds", type=float, default=None, help="bench: for each size, or for the model")
    @argument("--model", default=None, metavar="NAME", help="bench: the steps of this module, or of what makes one")
    @argument("--shape", default=None, help="bench: of one example for the model, e.g. 1,28,28")
    @argument("--batch", type=int, default=None, help="bench: examples of the global batch; default: 64")
    @argument("--optimizer", default=None, help="bench: one of torch.optim; default: SGD")
    @line_magic
    def mirror(self, line: str) -> Any:
        """Start, stop and look at the replicas; compare their parameters; push names to them and pull names; measure.

        `bench` returns its table, the others print a line.
        `%mirror dashboard` shows what they do, live while the cells below it run.
        Alone it shows the picker: devices to tick, and buttons. In a terminal it says what runs.
        """
        given = _parsed(self.mirror, line, intermixed=True)
        if given.what not in (None, *_WHAT):
            there = f"{', '.join(_WHAT)}; %mirror? tells all of it"
            raise MagicUsageError(f"there is no `%mirror {given.what}`; there are {there}")
        if given.names and given.what not in _WITH_NAMES:
            raise MagicUsageError(f"`%mirror {given.what}` takes no names, but was given {' '.join(given.names)}")
        _check_options(given)
        with _short_tracebacks():
            if given.what is None and getattr(self._shell, "kernel", None) is not None:
                self.show_picker()
            elif given.what == "bench":
                return self._bench(given)
            elif given.what == "dashboard":
                self.session.dashboard()
            else:
                print(self._mirror(given))
        return None

    def show_picker(self) -> None:
        """Show the picker below the running cell."""
        # Imported here: ipywidgets takes a while, which a notebook that never picks need not wait for.
        from mirror_nb.notebook.picker.widget import Picker

        picker = self._picker
        if picker is None or is_closed(picker.board):
            if picker is None:
                self._shell.events.register("post_run_cell", self._have_picker_look)
            picker = self._picker = Picker(DrivenSession(self.session), shell=self._shell)
        picker.show()

    def _have_picker_look(self, result: object) -> None:
        if self._picker is not None:
            self._picker.look_at_replicas()

    def _bench(self, given: Any) -> AllReduceTable | StepTable:
        names = ("devices", "ops", "largest", "seconds", "shape", "batch", "optimizer")
        said = {name: value for name in names if (value := getattr(given, name)) is not None}
        return self.session.measuring.bench(self.session.pool, Options(**said), given.model)

    def _mirror(self, given: Any) -> str:
        session = self.session
        match given.what:
            case "start":
                started = session.start(_devices(given), given.seed, given.in_process, _exchange(given))
                session.dashboards_above_cells |= given.dashboard
                return started
            case "restart":
                return session.restart(_devices(given), _exchange(given))
            case "stop":
                return session.stop()
            case "compare":
                return session.compare()
            case "push":
                return session.push(given.names)
            case "pull":
                return session.pull(given.names, given.replica)
            case _:
                return session.status()


def _tell_where_bound(ran: ExecutionResult) -> None:
    """Say below the NameError of an ordinary cell that its name is one of a mirrored cell's."""
    error = ran.error_in_exec
    if isinstance(error, NameError) and error.name in RESERVED:
        print(f"{error.name!r} is bound in mirrored cells: begin the cell with %%mirrored.", file=sys.stderr)
        if error.name == "strategy":
            print("`strategy = mirror_nb.MirroredStrategy(...)` makes one for cells without it.", file=sys.stderr)


def _check_options(given: Any) -> None:
    """Refuse an option that would have no effect behind this word."""
    for name, words in _TAKEN_BY.items():
        value = getattr(given, name)
        # 0 was given, where False is a flag that was not.
        if value is not None and value is not False and given.what not in words:
            first, *others = (f"`%mirror {words[0]}`", *(f"`{word}`" for word in words[1:]))
            who = f"{', '.join([first, *others[:-1]])} and {others[-1]} do" if others else f"{first} does"
            option = f"--{name.replace('_', '-')}"
            behind = f"`%mirror {given.what}`" if given.what else "`%mirror` alone"
            raise MagicUsageError(f"{behind} takes no {option}; {who}")


def _devices(given: Any) -> str | None:
    """Return the devices that were named, by `--devices`, by words alone, or by both: `--devices cpu:0, cpu:1`."""
    named = [name for name in (given.devices, *given.names) if name is not None]
    return ",".join(named) if named else None


def _exchange(given: Any) -> GradientFlags:
    return GradientFlags(given.ops, given.bucket_mb, given.compression)


MOST_IDS = 1024


def _parsed(magic: Any, line: str, *, intermixed: bool = False) -> Any:
    """Return what a line gives; with `intermixed`, which takes 0.1 ms, options may also stand between other words."""
    parser = magic.parser
    parse = parser.parse_intermixed_args if intermixed else parser.parse_args
    try:
        return parse(_words(line))
    except ValueError as reason:
        # A quotation mark without its other half.
        raise MagicUsageError(f"{line!r} cannot be read: {reason}") from None
    except MagicUsageError as error:
        if "unrecognized" not in str(error):
            raise
        raise MagicUsageError(f"{error}; {_instead(magic, line)}") from None


def _words(line: str) -> list[str]:
    """Return the words of a line, as a shell has them: `"cpu:0, cpu:1"` is one, without its quotation marks."""
    words: list[str] = arg_split(line, posix=True)
    return words


def _instead(magic: Any, line: str) -> str:
    """Return what a line with arguments that the magic does not have could have meant."""
    own, mirrors = _options(magic), _options(MirrorMagics.mirror)
    given = [word.partition("=")[0] for word in _words(line)]
    if "--help" in given or "-h" in given:
        return f"{'%' if magic.__name__ == 'mirror' else '%%'}{magic.__name__}? tells all of it"
    for word in given:
        if word in mirrors and word not in own:
            # Its help begins with what it belongs to: "start, restart: …".
            return f"{word} belongs to `%mirror {re.split('[,:]', mirrors[word])[0]}`"
    return f"there are {', '.join(sorted(own))}"


def _options(magic: Any) -> dict[str, str]:
    """Return the options of a magic, and what their help says."""
    actions = magic.parser._actions
    return {option: action.help for action in actions for option in action.option_strings if option.startswith("--")}


@contextlib.contextmanager
def _short_tracebacks() -> Iterator[None]:
    """Show our own errors by their message, and an interrupt as one: the frames of the magics help nobody."""
    try:
        yield
    except (MirrorError, KeyboardInterrupt) as error:
        if "_render_traceback_" not in vars(error):
            line = f"{type(error).__name__}: {error}".removesuffix(": ")
            error._render_traceback_ = lambda: [line]  # type: ignore[method-assign, union-attr]
        raise


def _ids(text: str | None) -> tuple[int, ...] | None:
    """Return the ids that `0,2-3` means."""
    if text is None:
        return None
    ids: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            span = range(int(first), int(last if dash else first) + 1)
            if not span:
                raise ValueError
            # Not a billion ids for a slip of the finger.
            ids += span if len(span) <= MOST_IDS else [span[0], span[-1]]
        except (ValueError, OverflowError):
            raise UsageError(f"--replicas {text!r}: {part!r} is no replica id; write 0,2-3, say") from None
    return tuple(ids)


def picker() -> None:
    """Show the picker below the running cell: devices to tick, buttons, and the line of code that does the same.

    Where widgets are not shown, a text says what to write instead. Loads the extension if that was not done.

    Raises UsageError outside of IPython, and in a mirrored cell.
    """
    shell: Any = get_ipython()
    if shell is None:
        raise UsageError("the picker needs a notebook; in a script write mirror_nb.MirroredStrategy(devices=[...])")
    shell.extension_manager.load_extension("mirror_nb")
    magics = shell.magics_manager.registry.get("MirrorMagics")
    if magics is None:
        raise UsageError("the picker belongs to an ordinary cell: this one runs in the replicas")
    magics.show_picker()
