"""The IPython shell that runs cells inside a replica, without a kernel. Everything it shows goes to `emit`.

Knows IPython, which no other module below the demo does; knows no channel.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import inspect
import io
import linecache
import numbers
import os
import sys
import threading
import tokenize
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import IPython
from IPython.core import interactiveshell
from IPython.core.compilerop import code_name
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import StdinNotImplementedError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.pylabtools import print_figure
from traitlets import Any as AnyTrait
from traitlets.config import Config

from mirror_nb.environment import sources
from mirror_nb.errors import MirrorError, PeerFailed, UsageError, users_frames, without_hidden
from mirror_nb.messages import ClearOutput, CommMessage, CommSent, Display, HeldBack, Source
from mirror_nb.replica.whole import SAY_SECONDS, whole


@dataclass(slots=True)
class CellEnd:
    """How a cell ended."""

    error: BaseException | None = None
    traceback: tuple[str, ...] = ()
    value: Any = None
    # Of the last expression.
    bundle: dict[str, Any] | None = None
    # That value as MIME types; None when there is none to show.


def for_front_end(value: Any) -> Any:
    """Return what of a value comes to a front end, as JSON: of plain classes, which the controller has, too."""
    match value:
        case None | bool() | datetime.date():
            return value
        case str():
            return str.__str__(value)
        case numbers.Integral():
            return int(value)
        case numbers.Real():
            return float(value)
        case bytes() | bytearray() | memoryview():
            return bytes(value)
        case Mapping():
            return {for_front_end(key): for_front_end(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return list(map(for_front_end, value))
    return repr(value)


class _Publisher(DisplayPublisher):
    emit: Any = AnyTrait()

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        source: str | None = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **kwargs: Any,
    ) -> None:
        self.emit(Display(for_front_end(data), for_front_end(metadata or {}), for_front_end(transient or {}), update))

    def clear_output(self, wait: bool = False) -> None:
        self.emit(ClearOutput(wait))


class _Hook(DisplayHook):
    """Keeps the last value instead of printing it: the controller shows it, merged over the replicas."""

    end: Any = AnyTrait()

    def __call__(self, result: Any = None) -> None:
        if result is None or self.end is None:
            return
        self.end.value = result
        bundle, _ = self.compute_format_data(result)
        self.end.bundle = for_front_end(bundle)
        if self.shell is not None:
            self.shell.user_ns["_"] = result


class ReplicaShell(InteractiveShell):
    """A full shell (magics, `!commands`, top-level await), whose output is messages."""

    displayhook: _Hook
    display_pub: _Publisher

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._traceback: tuple[str, ...] = ()
        self._shown: BaseException | None = None

    def init_prompts(self) -> None:
        """Leave `sys.ps1` unset, as in torchrun's workers: Lightning starts no processes of its own without it."""

    def init_magics(self) -> None:
        super().init_magics()
        for kind, name in (("line", "mirror"), ("cell", "mirrored")):
            self.magics_manager.register_function(_refuse_magic, kind, name)

    def enable_gui(self, gui: Any = None) -> None:
        """No event loop runs in a replica; matplotlib's inline backend asks for none."""

    def ask_exit(self) -> None:
        """What `exit()` and `quit()` in a cell call. Raises UsageError."""
        raise UsageError(
            "exit() ends the notebook's kernel, so it belongs to an ordinary cell; %mirror stop ends the replicas"
        )

    def show_usage_error(self, exc: BaseException) -> None:
        """Keep what a magic says of its call, which the notebook's shell shows."""
        self._showtraceback(type(exc), exc, [f"UsageError: {exc}"])

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """Render an exception without the frames of mirror_nb that a deliberate error ends in."""
        shown: Any = exc_tuple or sys.exc_info()
        kind, error, trace = shown
        if isinstance(error, PeerFailed) or getattr(error, "unseen", False):
            # It only tells of another replica's failure. Rendering it may take longer than the others wait.
            self._traceback, self._shown = (f"{kind.__name__}: {error}",), error
            return
        deliberate = isinstance(error, KeyboardInterrupt | MirrorError | StdinNotImplementedError)
        shown = (kind, error, users_frames(trace) if deliberate else without_hidden(trace))
        self._render(shown, *args, **kwargs)

    @whole
    def _render(self, *args: Any, **kwargs: Any) -> None:
        """Render an exception: interrupted, IPython would show that it was, and not the exception."""
        self._place_cells()
        rendered = threading.Event()
        # A first traceback takes seconds on a machine that is busy.
        saying = threading.Thread(
            target=self._say_held_back, args=(rendered,), name="mirror_nb held back", daemon=True
        )
        saying.start()
        try:
            super().showtraceback(*args, **kwargs)
        finally:
            rendered.set()
            saying.join()

    def _say_held_back(self, rendered: threading.Event) -> None:
        self.display_pub.emit(HeldBack())
        while not rendered.wait(SAY_SECONDS):
            self.display_pub.emit(HeldBack())

    def _place_cells(self) -> None:
        """Tell `inspect` which module cells belong to.

        It would ask all two thousand of the process, for each of the thousand frames of a recursion without end.
        """
        known = getattr(inspect, "modulesbyfile", {})
        for file in cell_numbers(self):
            known[file] = known[os.path.abspath(file)] = self.user_module.__name__

    def _showtraceback(self, etype: Any, evalue: Any, stb: list[str]) -> None:
        self._traceback, self._shown = tuple(stb), evalue

    def forget_failure(self) -> None:
        """Let go of the traceback that was shown last; IPython keeps it, and the frames keep what they held."""
        for holder in (self.InteractiveTB, self.SyntaxTB):
            for name in ("etype", "value", "tb"):
                if hasattr(holder, name):
                    setattr(holder, name, None)

    def run(self, source: str, count: int) -> CellEnd:
        """Run one cell and return how it ended; `count` is its number in tracebacks."""
        self.execution_count = count
        self._traceback, self._shown = (), None
        end = CellEnd()
        self.displayhook.end = end
        try:
            # What `%run` shows of a failed script is a failure of the cell too, though IPython goes on after it.
            result = self.run_cell(source, store_history=False, cell_id=None)
            end.error = result.error_before_exec or result.error_in_exec or self._shown
        except KeyboardInterrupt:
            # Too late, if the cell has failed by itself.
            end.error = self._shown
            if end.error is None:
                raise
        finally:
            self.displayhook.end = self._shown = None
        end.traceback = self._traceback
        if _ends_in_a_semicolon(source):
            end.bundle = None
        return end


def source_of(shell: InteractiveShell, cell: str, number: int) -> Source:
    """Return what a replica makes of a cell that `shell` is given: its lines, and the file that its code names."""
    text = shell.transform_cell(cell)
    return Source(code_name(text, number), text, number)


def learn(shell: InteractiveShell, sources: Iterable[Source]) -> None:
    """Have `shell` know the lines of cells that another one has run, for tracebacks through their functions."""
    for source in sources:
        # Without a time of change, since there is no file to look at.
        lines = source.text.splitlines(keepends=True)
        linecache.cache[source.file] = (len(source.text), None, lines, source.file)
        if source.number is not None:
            cell_numbers(shell)[source.file] = source.number


def cell_numbers(shell: InteractiveShell) -> dict[str, int]:
    """Return the notebook's numbers of its cells, by the file that their code names."""
    return getattr(shell.compile, "_filename_map", {})


def _ends_in_a_semicolon(source: str) -> bool:
    # Some magics' cells are no Python.
    with contextlib.suppress(tokenize.TokenError, SyntaxError):
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        code = [token.string for token in tokens if token.type not in _NO_CODE]
        return code[-1:] == [";"]
    return False


_NO_CODE = frozenset({tokenize.ENDMARKER, tokenize.NEWLINE, tokenize.NL, tokenize.COMMENT})


_old_objects: dict[Any, Any] = {}
# What autoreload keeps of modules that it has loaded anew.


def _load_in_place(module: types.ModuleType) -> None:
    # Rarely needed: not imported before.
    from IPython.extensions.autoreload import superreload

    superreload(module, importlib.reload, _old_objects)


def make_shell(emit: Callable[[object], None], module: types.ModuleType | None) -> ReplicaShell:
    """Return a new shell whose displays go to `emit`.

    `module` is where its names live; None: a new `__main__` of this process, for which there must be no
    other shell.
    """
    sources.in_place = _load_in_place
    if module is None:
        # Of `sys.exit()`: the notebook's own shell says it too.
        warnings.filterwarnings("ignore", "To exit: use", UserWarning, r"IPython\.core\.interactiveshell")
    config = Config({"HistoryManager": {"enabled": False}, "HistoryAccessor": {"enabled": False}})
    make = ReplicaShell if module is not None else ReplicaShell.instance
    shell = make(
        config=config, display_pub_class=_Publisher, displayhook_class=_Hook, history_load_length=0, user_module=module
    )
    shell.display_pub.emit = emit
    shell.display_trap.hook = shell.displayhook
    show_figures(shell)
    return shell


def show_figures(shell: InteractiveShell) -> None:
    """Have figures of matplotlib shown as pictures, also in a process that has made none itself."""
    # By name, so that matplotlib is not imported for it. With a first figure of pyplot's it puts its own way in place.
    drawn = functools.partial(print_figure, fmt="png", base64=True)
    shows: Any = shell.display_formatter
    shows.formatters["image/png"].for_type_by_name("matplotlib.figure", "Figure", drawn)


def refuse_input(prompt: object = "") -> str:
    """Stand in for `input` in a replica."""
    raise StdinNotImplementedError(
        f"input({prompt!r}) cannot be asked in a replica: ask in an ordinary cell and use the answer here"
    )


def _refuse_magic(line: str, cell: str = "") -> None:
    """Stand in for `%mirror` and `%%mirrored` in a replica."""
    raise UsageError("%mirror and %%mirrored belong to ordinary cells: this one runs in the replicas already")


def refuse_breakpoint(*_: object, **__: object) -> None:
    """Stand in for `breakpoint` and `pdb.set_trace` in a replica, where nobody could answer the debugger."""
    raise StdinNotImplementedError(
        "a debugger cannot ask in a replica: use %mirror stop, then %mirror start --in-process, which has one replica "
        "in the kernel itself"
    )


def note_files(stands_for_open: Callable[..., Any]) -> None:
    """Have the `open` of cells, which IPython makes, be that of the process."""
    interactiveshell.io_open = stands_for_open


def use_notebook_figures() -> None:
    """Let matplotlib draw into the notebook, as it does in a kernel; it is not imported for that."""
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"


def be_no_kernel() -> None:
    """Let tqdm.auto and others that look for a kernel find none: nobody draws widgets, unless a cell says so."""
    global _kernel
    _kernel = sys.modules.pop(_KERNEL, _kernel)


_KERNEL = "ipykernel.zmqshell"
_kernel: types.ModuleType | None = None
# What the forkserver has loaded of it.


class Comms:
    """Widgets made in a replica: their messages go to the front end through the controller, and back."""

    def __init__(self, emit: Callable[[object], None]) -> None:
        import comm
        from comm.base_comm import BaseComm, CommManager

        class ReplicaComm(BaseComm):
            kernel = self
            # For ipywidgets 7, which sends nothing without one.

            def __init__(self, *args: Any, show_warning: bool = False, **options: Any) -> None:
                # What ipykernel's own takes beside.
                options.pop("kernel", None)
                super().__init__(*args, **options)

            def publish_msg(
                self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any
            ) -> None:
                content = for_front_end(dict(comm_id=self.comm_id, data=data or {}, **keys))
                sent = tuple(bytes(b) for b in buffers or ())
                emit(CommSent(msg_type, content, for_front_end(metadata or {}), sent))

        self._manager = CommManager()
        comm.create_comm = ReplicaComm
        comm.get_comm_manager = lambda: self._manager
        own: Any = importlib.import_module("ipykernel.comm")
        # Ipywidgets 7.7.1 knows no `comm`, and what it takes from ipykernel sends nothing without a kernel.
        own.Comm = own.comm.Comm = ReplicaComm
        if _kernel is not None:
            sys.modules[_KERNEL] = _kernel
        # tqdm.auto draws notebook bars only where this module is loaded, older ones where there are settings of it.
        importlib.import_module(_KERNEL)
        if (here := IPython.get_ipython()) is not None:
            here.config.setdefault("IPKernelApp", Config())

    def receive(self, message: CommMessage) -> None:
        """Hand a front end's message to its widget."""
        manager: Any = self._manager
        if message.content["comm_id"] in manager.comms:
            # As a kernel does: what a callback of the user's raises is logged, and ends nobody.
            manager.comm_msg(
                None, None, {"content": message.content, "buffers": list(message.buffers), "metadata": {}}
            )
