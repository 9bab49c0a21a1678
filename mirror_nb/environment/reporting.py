"""How a process tells of things: what it warns of, what it logs and where to, how it prints arrays and tensors.

Each is read as plain values, and set from them in another process. Knows no replicas and no channel.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import operator
import os
import sys
import warnings
import weakref
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch

from mirror_nb.environment import log_lines
from mirror_nb.environment.imported import when_imported

# --------------------------------------------------------------------------- warnings


class Filter(NamedTuple):
    """An entry of `warnings.filters`."""

    action: Any
    message: str
    category: str
    # `module:name`
    module: str
    line: int


_EVERYWHERE = frozenset(
    {
        ("default", "", "builtins:DeprecationWarning"),
        ("ignore", "", "builtins:DeprecationWarning"),
        ("ignore", "", "builtins:PendingDeprecationWarning"),
        ("ignore", "", "builtins:ImportWarning"),
        ("ignore", "", "builtins:ResourceWarning"),
        ("ignore", "torch::jit::fuser::cuda", "builtins:Warning"),
        ("ignore", "", "torch.jit._trace:TracerWarning"),
        ("ignore", "numpy.ndarray size changed", "builtins:Warning"),
        ("ignore", "numpy.ufunc size changed", "builtins:Warning"),
        ("ignore", "numpy.dtype size changed", "builtins:Warning"),
        ("always", "", "numpy.exceptions:RankWarning"),
        # Its name before NumPy 2.
        ("always", "", "numpy:RankWarning"),
        ("ignore", ".*Trio's signal handling code might have collided.*", "builtins:RuntimeWarning"),
        ("error", "", "IPython.core.completer:ProvisionalCompleterWarning"),
    }
)
# What Python, NumPy, torch and IPython set in each process by themselves; where one is not listed, it is told.

_followed: list[Any] = []
# Entries of `warnings.filters` that another process has.
_waiting: dict[str, tuple[Filter, ...]] = {}
# By module that is not imported here and has the category of one of them: all of them.


_warned: dict[str, dict[Any, Any]] = {}
# By module: what functions of it have warned of here that arrived from another process.
_moment: int | None = None


def warned_of(module: str) -> dict[Any, Any]:
    """Return what functions of a module have warned of that arrive here: their `__warningregistry__`."""
    return _warned.setdefault(module, {})


def forget_warned(moment: int | None) -> None:
    """Let them warn again, once, in another moment than the last one: in the notebook's next cell, as IPython does."""
    global _moment
    if moment is not None and moment != _moment:
        _moment = moment
        for known in _warned.values():
            known.clear()


def filters() -> tuple[Filter, ...]:
    """Return what was set besides what each process sets by itself, the first to be asked first."""
    found = [
        Filter(action, _pattern(message), _path(category), _pattern(module), line)
        for action, message, category, module, line in warnings.filters
    ]
    return tuple(one for one in found if one[:3] not in _EVERYWHERE or one.line)


def set_filters(wanted: tuple[Filter, ...]) -> None:
    """Have these come first, in the place of those that were set so before."""
    for one in _followed:
        with contextlib.suppress(ValueError):
            warnings.filters.remove(one)  # type: ignore[attr-defined]
    _followed.clear()
    _waiting.clear()
    for one in reversed(wanted):
        module, _, name = one.category.partition(":")
        if module not in sys.modules:
            # Nobody warns so before that is imported, which may take long.
            _waiting[module] = wanted
            continue
        # A class of a notebook is not there.
        with contextlib.suppress(AttributeError):
            category = operator.attrgetter(name)(sys.modules[module])
            warnings.filterwarnings(one.action, one.message, category, one.module, one.line)
            _followed.append(warnings.filters[0])


def settle() -> None:
    """User code is about to run: set the filters, and loggers, whose modules have been imported since."""
    global _users_turn
    _users_turn = True
    imported()
    for module in _waiting:
        if module in sys.modules:
            set_filters(_waiting[module])
            return


def rest() -> None:
    """User code has ended."""
    global _users_turn
    _users_turn = False


def imported() -> None:
    """Set loggers of packages that have just been imported: a package sets its own then."""
    for package in [package for package in _unset if package in sys.modules]:
        # What user code sets after that stays. Before it is its turn more of the package may be imported.
        for one in _unset.pop(package) if _users_turn else _unset[package]:
            _set_level(one)


def _path(category: Any) -> str:
    return f"{category.__module__}:{category.__qualname__}"


def _pattern(compiled: Any) -> str:
    return str(getattr(compiled, "pattern", compiled or ""))


# --------------------------------------------------------------------------- logging


class Handler(NamedTuple):
    """Where a logger writes to."""

    to: str
    # "stdout", "stderr" or a file's path; empty: to handlers that the other process alone has.
    level: int
    formatter: bytes | None
    # A pickle.
    filters: tuple[bytes, ...]
    # Likewise.


class Logger(NamedTuple):
    """How a logger is set up."""

    name: str
    level: int
    propagates: bool | None
    # None: as its package has set it.
    disabled: bool
    handlers: tuple[Handler, ...]
    filters: tuple[bytes, ...] = ()
    # Pickles.


_OTHERS = (
    *("torch", "tornado", "traitlets", "IPKernelApp", "asyncio", "parso", "c10d-NullHandler-default"),
    *("strobelight_function_profiler", "strobelight_compile_time_profiler"),
)
# Loggers that libraries and the kernel set up by themselves in each process, by the first part of their names.


def loggers() -> tuple[Logger, ...]:
    """Return those that were set up, with their handlers."""
    manager = logging.Logger.manager
    known = [("root", logging.root), *list(manager.loggerDict.items())]
    # Levels may be of a class of the user's, that of an enumeration.
    found = [Logger("", int(manager.disable), True, False, ())] if manager.disable else []
    for name, logger in known:
        if not isinstance(logger, logging.Logger):
            continue
        plain = logger.propagate and logger.level == logging.NOTSET and not logger.disabled
        if plain and not logger.handlers and not logger.filters:
            # Most of them, and there are hundreds.
            continue
        package = name.partition(".")[0]
        if package in _OTHERS:
            continue
        if package in sys.modules:
            # It makes its handlers wherever it is imported.
            if logger.level != logging.NOTSET or logger.disabled:
                found.append(Logger(name, int(logger.level), None, logger.disabled, ()))
            continue
        handlers, filters = _handlers_of(logger), _filters_of(logger)
        one = Logger(name, int(logger.level), logger.propagate, logger.disabled, handlers, filters)
        if one != _fresh(name):
            found.append(one)
    return tuple(found)


def set_loggers(wanted: tuple[Logger, ...]) -> None:
    """Set these up, and those that were set up so before as in a new process; handlers of others stay."""
    set_up = {one.name: one for one in wanted}
    logging.disable(set_up.pop("").level if "" in set_up else logging.NOTSET)
    first = os.environ.get("RANK", "0") == "0"
    _unset.clear()
    for name in sorted(_handlers.keys() | set_up.keys()):
        one = set_up.get(name, _fresh(name))
        logger = _set_level(one)
        package = name.partition(".")[0]
        if one.propagates is None and package not in sys.modules:
            # Imported here, it sets its own once more, which an import anew in the other process does not.
            _unset.setdefault(package, []).append(one)
            when_imported(package, f"{__name__}:{imported.__name__}")
        if one.propagates is not None:
            logger.propagate = one.propagates
        for handler in _handlers.pop(name, []):
            logger.removeHandler(handler)
            handler.close()
        for known in _filters.pop(name, []):
            logger.removeFilter(known)
        for known in _unpickled(one.filters):
            logger.addFilter(known)
            _filters.setdefault(name, []).append(known)
        if name in set_up:
            # User code that ran here and there may have added the same on both sides: lines would come twice.
            own = _handlers_of(logger)
            made = (_made(told, name, first) for told in one.handlers if told not in own)
            _handlers[name] = [handler for handler in made if handler is not None]
        for handler in _handlers.get(name, []):
            logger.addHandler(handler)


_handlers: dict[str, list[logging.Handler]] = {}
# Of loggers that were set up as in another process: those that were made for it.
_filters: dict[str, list[Any]] = {}
# Likewise.


_users_turn = False
_unset: dict[str, list[Logger]] = {}
# By package that is not imported here: loggers that it sets up.


def _set_level(one: Logger) -> logging.Logger:
    logger = logging.getLogger(None if one.name == "root" else one.name)
    logger.setLevel(one.level)
    logger.disabled = one.disabled
    return logger


def _fresh(name: str) -> Logger:
    return Logger(name, logging.WARNING if name == "root" else logging.NOTSET, True, False, ())


def _handlers_of(logger: logging.Logger) -> tuple[Handler, ...]:
    told = [told for handler in logger.handlers if (told := _told(handler)) is not None]
    levels = [int(handler.level) for handler in log_lines.handed_on(logger)]
    # One for all of them.
    return (*told, *([Handler("", min(levels), None, ())] if levels else []))


def _told(handler: logging.Handler) -> Handler | None:
    if not log_lines.writes(handler):
        return None
    if isinstance(handler, logging.FileHandler):
        to = handler.baseFilename
        _append(handler.stream)
    else:
        to = log_lines.screen(handler)
    if to in ("", os.devnull):
        return None
    formatter = None if handler.formatter is None else _pickled(handler.formatter)
    return Handler(to, int(handler.level), formatter, _filters_of(handler))


def _append(stream: Any) -> None:
    """Have a file written to at its end: with mode "w" it would be where this process has written last."""
    with contextlib.suppress(TypeError, OSError, ValueError):
        fcntl.fcntl(stream, fcntl.F_SETFL, fcntl.fcntl(stream, fcntl.F_GETFL) | os.O_APPEND)


def _filters_of(filterer: logging.Filterer) -> tuple[bytes, ...]:
    return tuple(pickled for one in filterer.filters if (pickled := _pickled(one)) is not None)


def _pickled(part: Any) -> bytes | None:
    """Return the pickle of a formatter or a filter; None for one that cannot be pickled."""
    known, pickled = _pickles.get(id(part), (None, None))
    if known is None or known() is not part:
        pickled = None
        # It may hold anything.
        with contextlib.suppress(Exception):
            pickled = cloudpickle.dumps(part)
        with contextlib.suppress(TypeError):
            _pickles[id(part)] = weakref.ref(part), pickled
    return pickled


def _unpickled(pickles: tuple[bytes, ...]) -> list[Any]:
    found = []
    for pickled in pickles:
        with contextlib.suppress(Exception):
            found.append(cloudpickle.loads(pickled))
    return found


_pickles: dict[int, tuple[Any, bytes | None]] = {}
# Of formatters and filters: to make one takes longer than all else.


_SCREEN = ("stdout", "stderr")


def _made(told: Handler, logger: str, first: bool) -> logging.Handler | None:
    handler: logging.Handler
    try:
        if told.to in _SCREEN:
            handler = logging.StreamHandler(getattr(sys, told.to))
        elif not first:
            # Another replica writes the same lines there. Without a handler Python would show them.
            return logging.NullHandler()
        else:
            handler = logging.FileHandler(told.to) if told.to else log_lines.HandsOn(logger)
    except OSError as reason:
        warnings.warn(f"what replicas log does not go to {told.to}: {reason}", stacklevel=2)
        return None
    handler.setLevel(told.level)
    if told.formatter is not None:
        with contextlib.suppress(Exception):
            handler.setFormatter(cloudpickle.loads(told.formatter))
    for one in _unpickled(told.filters):
        handler.addFilter(one)
    return handler


_LEVELS = frozenset({"CRITICAL", "FATAL", "ERROR", "WARNING", "WARN", "INFO", "DEBUG", "NOTSET"})
# Their names by Python.


def level_names() -> dict[str, int]:
    """Return the levels that user code has given names."""
    return {name: level for name, level in logging.getLevelNamesMapping().items() if name not in _LEVELS}


def set_level_names(wanted: dict[str, int]) -> None:
    """Give levels these names, too."""
    for name, level in wanted.items():
        logging.addLevelName(level, name)


def logs_warnings() -> bool:
    """Whether warnings are logged, by `logging.captureWarnings`."""
    return getattr(logging, "_warnings_showwarning", None) is not None


# --------------------------------------------------------------------------- print options

_TENSORS = ("precision", "threshold", "edgeitems", "linewidth", "sci_mode")


def tensor_options() -> tuple[Any, ...]:
    """Return how torch prints tensors."""
    # Torch tells by this alone.
    options = torch._tensor_str.PRINT_OPTS
    return tuple(getattr(options, name) for name in _TENSORS)


def set_tensor_options(wanted: tuple[Any, ...]) -> None:
    """Have torch print tensors so."""
    torch.set_printoptions(**dict(zip(_TENSORS, wanted, strict=True)))


def array_options() -> dict[str, Any]:
    """Return how NumPy prints arrays; functions of the user's own are left out."""
    return {
        name: value for name, value in np.get_printoptions().items() if name != "formatter" and not callable(value)
    }


def set_array_options(wanted: dict[str, Any]) -> None:
    """Have NumPy print arrays so."""
    np.set_printoptions(**wanted)
