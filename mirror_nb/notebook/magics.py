"""`%mirror` and `%%mirrored`: parse the line, hand it to the session, show what comes back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from IPython.core.error import UsageError as MagicUsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from mirror_nb.bench.collectives import AllReduceTable
from mirror_nb.bench.command import Options
from mirror_nb.bench.steps import StepTable
from mirror_nb.errors import MirrorError, UsageError
from mirror_nb.notebook.session import CellOptions, Session

_COMMANDS = ["start", "stop", "restart", "status", "push", "pull", "bench"]


@magics_class
class MirrorMagics(Magics):
    """The magics of mirror_nb."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self.session = Session(shell)

    @no_var_expand
    @magic_arguments()
    @argument("--replicas", default=None, metavar="IDS", help="run on these replicas only, e.g. 0,2-3")
    @argument("--no-sync", action="store_true", help="do not synchronise gradients in this cell")
    @argument("--out", default=None, metavar="NAME", help="bind the result to NAME instead of showing it")
    @argument("--quiet", action="store_true", help="no status lines, no closing line, nothing of other replicas")
    @argument("--timeout", type=float, default=None, metavar="SECONDS", help="stop the cell after so long")
    @cell_magic
    def mirrored(self, line: str, cell: str) -> Any:
        """Run the cell on every replica, each with its device.

        `strategy`, `replica_id`, `num_replicas` and `device` are bound there. Names of the notebook that the cell
        reads are sent; names that it binds come back. Gradients of modules made in it are synchronised.
        """
        given = parse_argstring(self.mirrored, line)
        if given.timeout is not None and given.timeout <= 0:
            raise MagicUsageError(f"--timeout is {given.timeout:g}; it must be more than 0 seconds")
        if given.out is not None and not given.out.isidentifier():
            raise MagicUsageError(f"--out {given.out!r} is no name")
        with _short_tracebacks():
            replicas = _ids(given.replicas)
        options = CellOptions(
            replicas=replicas,
            synchronize=not given.no_sync,
            out=given.out,
            quiet=given.quiet,
            timeout=given.timeout,
        )
        with _short_tracebacks():
            return self.session.run_cell(cell, options)

    @no_var_expand
    @magic_arguments()
    @argument("what", nargs="?", choices=_COMMANDS, help="what to do")
    @argument("names", nargs="*", help="names to push or pull")
    @argument("--devices", default=None, help="start, restart: e.g. cpu:0,cpu:1 or cuda:0,cuda:1; none: all GPUs")
    @argument(
        "--ops", default=None, metavar="NAME", help="start, restart: cross-device ops; bench: several, with commas"
    )
    @argument("--seed", type=int, default=0, help="start: seed of the replicas' random numbers")
    @argument("--in-process", action="store_true", help="start: one replica in this very process, for debugging")
    @argument("--replica", type=int, default=None, help="pull: from this replica only")
    @argument("--largest", default=None, metavar="SIZE", help="bench: tensors from 1K up to this")
    @argument("--seconds", type=float, default=None, help="bench: for each size, or for the model")
    @argument("--model", default=None, metavar="NAME", help="bench: the steps of this module, or of what makes one")
    @argument("--shape", default=None, help="bench: of one example for the model, e.g. 1,28,28")
    @argument("--batch", type=int, default=64, help="bench: examples of the global batch")
    @argument("--optimizer", default="SGD", help="bench: one of torch.optim")
    @line_magic
    def mirror(self, line: str) -> Any:
        """Start, stop and look at the replicas; push names to them and pull names from them; measure.

        `bench` returns its table, the others print a line.
        """
        given = parse_argstring(self.mirror, line)
        with _short_tracebacks():
            if given.what == "bench":
                return self._bench(given)
            print(self._mirror(given))

    def _bench(self, given: Any) -> AllReduceTable | StepTable:
        options = Options(
            ops=given.ops,
            largest=given.largest,
            seconds=given.seconds,
            shape=given.shape,
            batch=given.batch,
            optimizer=given.optimizer,
        )
        return self.session.bench(options, given.model)

    def _mirror(self, given: Any) -> str:
        session = self.session
        match given.what:
            case "start":
                return session.start(given.devices, given.seed, given.in_process, given.ops)
            case "restart":
                return session.restart(given.devices, given.ops)
            case "stop":
                return session.stop()
            case "push":
                return session.push(given.names)
            case "pull":
                return session.pull(given.names, given.replica)
            case _:
                return session.status()


@contextlib.contextmanager
def _short_tracebacks() -> Iterator[None]:
    """Show our own errors by their message: the frames of the magics help nobody."""
    try:
        yield
    except MirrorError as error:
        if not hasattr(error, "_render_traceback_"):
            line = f"{type(error).__name__}: {error}"
            error._render_traceback_ = lambda: [line]  # type: ignore[attr-defined]
        raise


def _ids(text: str | None) -> tuple[int, ...] | None:
    """Return the ids that `0,2-3` means."""
    if text is None:
        return None
    ids: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            ids += range(int(first), int(last if dash else first) + 1)
        except ValueError:
            raise UsageError(f"--replicas {text!r}: {part!r} is no replica id; write 0,2-3, say") from None
    return tuple(ids)
