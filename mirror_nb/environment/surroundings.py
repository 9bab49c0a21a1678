"""What a process has set for all of its code: the controller's holds in its replicas too.

    sys.path, the environment, the working folder, how it warns, logs and prints, seeds, what it has set in modules of
    the user's and which of these it has loaded anew, of torch dtype, precision, determinism, cuDNN, Keras's own,
    matplotlib's and pandas's

Plain values; knows no replicas and no channel.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch

from mirror_nb.environment import (
    keras_settings,
    module_variables,
    plot_settings,
    reporting,
    seeds,
    sources,
    table_settings,
)

_OF_REPLICAS = re.compile(
    r"(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|CUDA_VISIBLE_DEVICES"
)
# Variables that each replica has its own of.

_FUNCTIONS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    "determinism": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0),
    "anomalies": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, False),
    "precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
}
# How to read a setting and to change it, and its value in a new process.
_ATTRIBUTES: dict[str, Any] = {
    "cudnn.enabled": True,
    "cudnn.benchmark": False,
    "cudnn.deterministic": False,
    "cudnn.allow_tf32": True,
    "fp32_precision": "none",
    "cuda.matmul.fp32_precision": "none",
    "cuda.matmul.allow_fp16_reduced_precision_reduction": True,
    "cuda.matmul.allow_bf16_reduced_precision_reduction": True,
    "cudnn.conv.fp32_precision": "tf32",
    "cudnn.rnn.fp32_precision": "tf32",
}
# Of torch.backends, and their values in a new process.
_OTHERS: dict[str, tuple[Callable[[], Any], Callable[[Any], None], Any]] = {
    "warnings": (reporting.filters, reporting.set_filters, ()),
    "logging": (reporting.loggers, reporting.set_loggers, ()),
    "levels": (reporting.level_names, reporting.set_level_names, {}),
    "logged warnings": (reporting.logs_warnings, logging.captureWarnings, False),
    "tensors": (reporting.tensor_options, reporting.set_tensor_options, (4, 1000, 3, 80, None)),
    "seeds": (seeds.seeded, seeds.seed_alike, {}),
    # Before those that are loaded anew: their variables begin anew with that.
    "variables": (module_variables.changed, module_variables.take, {}),
    "sources": (sources.changed, sources.load_anew, {}),
    "keras": (keras_settings.settings, keras_settings.set_settings, {}),
    "plots": (plot_settings.settings, plot_settings.set_settings, {}),
    "tables": (table_settings.settings, table_settings.set_settings, {}),
    "arrays": (reporting.array_options, reporting.set_array_options, reporting.array_options()),
}
# Likewise of how the process warns, logs, prints and shows, of seeds, modules, Keras; NumPy's is that of the import.


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a process has set."""

    folder: str
    # Empty: it is gone.
    path: tuple[str, ...]
    environment: dict[str, str]
    settings: dict[str, Any]
    # Of torch, by name; what torch refuses to tell is left out.
    others: dict[str, Any]
    # By name; each is told by itself.


@dataclass(frozen=True, slots=True)
class Changes:
    """What is to be set elsewhere too."""

    folder: str
    # Empty: the same.
    path: tuple[str, ...]
    # The whole of it; empty: the same.
    environment: dict[str, str | None]
    # None: the variable is gone.
    settings: dict[str, Any]
    # All of torch's, if one has changed: some change others.
    others: dict[str, Any]
    # Those that have changed.


def current(signs: Signs | None = None) -> Surroundings:
    """Return what this process has set; of modules' variables what `signs` have just seen."""
    return Surroundings(_folder(), tuple(sys.path), dict(os.environ), _settings(), _others(signs))


def at_start(seed: int = 0) -> Surroundings:
    """Return what a process that this one starts now has set; `seed` is its own, if it is not 0."""
    fresh = {name: value for name, (_, _, value) in _FUNCTIONS.items()} | _ATTRIBUTES
    others = {name: value for name, (_, _, value) in _OTHERS.items()}
    if seed:
        others["seeds"] = seeds.seeded()
    return Surroundings(_folder(), tuple(sys.path), dict(os.environ), fresh, others)


def changes(before: Surroundings, now: Surroundings) -> Changes | None:
    """Return what has changed, None if nothing has."""
    if before == now:
        return None
    told, environment = before.environment, now.environment
    changed: dict[str, str | None] = {name: None for name in told if name not in environment}
    changed.update({name: value for name, value in environment.items() if told.get(name) != value})
    return Changes(
        now.folder if now.folder != before.folder else "",
        now.path if now.path != before.path else (),
        {name: value for name, value in changed.items() if not _OF_REPLICAS.fullmatch(name)},
        now.settings if now.settings != before.settings else {},
        {name: value for name, value in now.others.items() if before.others.get(name) != value},
    )


def follow(changes: Changes) -> None:
    """Set the same here."""
    for name, value in changes.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    look_in(changes.path)
    if changes.folder:
        # It may be gone by now.
        with contextlib.suppress(OSError):
            os.chdir(changes.folder)
    for name, value in changes.settings.items():
        if _read(name) != value:
            _set(name, value)
    for name, value in changes.others.items():
        _OTHERS[name][1](value)


def begin_with(environment: dict[str, str]) -> None:
    """Set these variables, and drop those that this process was started with: they may be gone since."""
    with contextlib.suppress(OSError):
        # As it was when its program began, also in a fork.
        for variable in Path("/proc/self/environ").read_bytes().split(b"\0"):
            name = os.fsdecode(variable.partition(b"=")[0])
            if name not in environment:
                os.environ.pop(name, None)
    os.environ.update(environment)


@final
class Standing:
    """How things stand for the user's code: folder, environment, variables of its modules, and settings of torch."""

    def __init__(self) -> None:
        self._now = _standing()
        self._variables = module_variables.Signs()

    def since(self, source: str) -> Changes | None:
        """Return what has been set since, for `settle` elsewhere; of the environment what `source` names alone.

        Libraries set other variables, for the process that they are in.
        """
        now, variables = _standing(), self._variables.since()
        if now == self._now and not variables:
            return None
        told = changes(
            _surroundings(*self._now, {}), _surroundings(*now, {"variables": variables} if variables else {})
        )
        named = {} if told is None else {name: v for name, v in told.environment.items() if name in source}
        return None if told is None else replace(told, environment=named)


def _standing() -> tuple[str, dict[Any, Any], dict[str, Any]]:
    return _folder(), dict(_environment()), {name: _read(name) for name in _FUNCTIONS}


def _surroundings(
    folder: str, environment: dict[Any, Any], settings: dict[str, Any], others: dict[str, Any]
) -> Surroundings:
    decoded = {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}
    return Surroundings(folder, (), decoded, settings, others)


def settle(changes: Changes) -> None:
    """Set what a cell has set in the replicas, where the notebook is."""
    follow(replace(changes, others={}))
    module_variables.put(changes.others.get("variables", {}))


def look_in(paths: Iterable[str]) -> None:
    """Have Python look for modules in these folders too, before or after the others as they stand among them."""
    here, paths = set(sys.path), list(paths)
    before = list(itertools.takewhile(lambda path: path not in here, paths))
    behind = [path for path in paths[len(before) :] if path not in here]
    sys.path[:] = [*before, *sys.path, *behind]


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _others(signs: Signs | None = None) -> dict[str, Any]:
    found = {}
    for name, (read, _, _) in _OTHERS.items():
        # How torch prints, it does not tell in every version.
        with contextlib.suppress(AttributeError):
            found[name] = signs.variables if signs is not None and name == "variables" else read()
    return found


def _settings() -> dict[str, Any]:
    read = {name: _read(name) for name in (*_FUNCTIONS, *_ATTRIBUTES)}
    return {name: value for name, value in read.items() if value is not None}


def _read(name: str) -> Any:
    # Torch tells a precision by the old names or by the new ones, as it was set last; not every version knows all.
    try:
        return _FUNCTIONS[name][0]() if name in _FUNCTIONS else operator.attrgetter(name)(torch.backends)
    except (RuntimeError, AttributeError):
        return None


def _set(name: str, value: Any) -> None:
    if name in _FUNCTIONS:
        _FUNCTIONS[name][1](value)
    else:
        owner, _, attribute = name.rpartition(".")
        setattr(operator.attrgetter(owner)(torch.backends) if owner else torch.backends, attribute, value)


@final
class Signs:
    """Tells, in some µs, of what a program sets between two calls: all but loggers, ways to print and backends' flags.

    `current` asks for everything, which takes 0.1 ms.
    """

    def __init__(self) -> None:
        self._environment = dict(_environment())
        self._path = list(sys.path)
        self._filters = list(warnings.filters)
        self._others = _signs()
        self._variables = module_variables.Signs()
        self.variables = self._variables.changed

    def hold(self) -> bool:
        """Whether nothing of that has changed since."""
        return (
            self._path == sys.path
            and self._filters == warnings.filters
            and self._environment == _environment()
            and self._others == _signs()
            and self._variables.hold()
        )


def _signs() -> tuple[Any, ...]:
    return (_folder(), *(_read(name) for name in _FUNCTIONS), seeds.seeded())


def _environment() -> Any:
    # Encoded, as the process has it: to decode it takes 25 µs.
    return getattr(os.environ, "_data", os.environ)


moment = 0
# Another number means: ask again whether something was changed.


def follow_cells() -> None:
    """Have a moment begin with each cell, if this process is a notebook's; again is once."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None:
        shell.events.register("pre_run_cell", new_moment)


def new_moment(cell: object = None) -> None:
    """Say that somebody may have changed something: a cell of the notebook begins."""
    global moment
    moment += 1
