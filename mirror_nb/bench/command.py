"""`python -m mirror_nb bench`: starts replicas, measures, and says what was found.

Knows no arguments of a command line; what words in them mean is told here, for the magic as well.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, final

import torch

from mirror_nb import devices as device_names
from mirror_nb.bench.collectives import SECONDS_A_SIZE, AllReduceTable, all_reduce, check_seconds, chosen_ops, sizes_to
from mirror_nb.bench.replicas import check_several
from mirror_nb.bench.steps import SECONDS, StepTable, check_task, steps
from mirror_nb.devices import Device
from mirror_nb.errors import MirrorError, ReplicaError, UsageError
from mirror_nb.pool.base import Pool
from mirror_nb.pool.local import LocalPool, stop_forkserver, warm_up, warm_up_to_train
from mirror_nb.strategies.mirrored import SETUP

OK, FAILED, WRONG_CALL, INTERRUPTED = 0, 1, 2, 130
ENDINGS = (".png", ".svg", ".pdf")
_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30}


@final
@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for, in words."""

    devices: str | None = None
    # None: all GPUs, else two CPU replicas.
    ops: str | None = None
    # Names with commas between; None: all that fit.
    largest: str | None = None
    # Of the sizes: "64M"; None: 256 MiB, or what memory allows.
    seconds: float | None = None
    # For each size, or for the model; None: 0.4, or 8.
    model: str | None = None
    # "module:function"; None: all-reduces alone.
    shape: str | None = None
    # Of one example: "1,28,28".
    batch: int = 64
    optimizer: str = "SGD"
    picture: str | None = None


def run(options: Options, out: TextIO = sys.stdout, err: TextIO = sys.stderr) -> int:
    """Measure, print the table, draw it where asked, and return the exit code.

    0: measured. 1: replicas failed, or sums were wrong. 2: the call was wrong. 130: Ctrl-C.
    """
    try:
        return _run(options, out, err)
    except ReplicaError as error:
        print(f"mirror_nb bench: {error}", file=err)
        return FAILED
    except (MirrorError, ImportError) as error:
        print(f"mirror_nb bench: {error}", file=err)
        return WRONG_CALL
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        if not notes:
            raise
        # The model's own, raised in the replicas: its notes are their traceback, in the user's lines.
        on = "" if options.shape is None else f" on examples of shape {options.shape}"
        print(f"mirror_nb bench: the replicas failed{on}", *notes, sep="\n", file=err)
        return FAILED
    except KeyboardInterrupt:
        print("mirror_nb bench: interrupted; the replicas are stopped", file=err)
        return INTERRUPTED
    finally:
        stop_forkserver()


def _run(options: Options, out: TextIO, err: TextIO) -> int:
    devices = several(options.devices)
    picture = None if options.picture is None else _writable(options.picture)
    check(options, devices, options.model is not None)
    model = None if options.model is None else imported(options.model)
    if err.isatty():
        # Else a terminal shows nothing for some 15 s.
        print(f"measuring on {', '.join(map(str, devices))} …", file=err)
    # Once, in place of in each replica.
    warm_up() if model is None else warm_up_to_train()
    with LocalPool(devices, setup=SETUP) as pool:
        pool.start()
        table = measure(pool, options, model)
    print(table, file=out)
    if picture is not None:
        table.plot().savefig(picture)
        print(f"drawn in {picture}", file=out)
    return FAILED if isinstance(table, AllReduceTable) and not all(row.correct for row in table.rows) else OK


def several(names: str | None) -> tuple[Device, ...]:
    """Return the devices to measure on: those that are named, else all GPUs, else two CPU replicas.

    Raises DeviceError for devices that are not there, UsageError for a single one.
    """
    gpus = torch.cuda.device_count()
    return check_several(device_names.resolve(names if names is not None or gpus else "cpu:0,cpu:1", gpus))


def check(options: Options, devices: Sequence[Device], of_a_model: bool) -> None:
    """Raise UsageError, or DeviceError, for what cannot be measured on these devices: before replicas are started."""
    _check_together(options, of_a_model)
    chosen_ops(_names(options.ops), devices)
    check_seconds(_given(options.seconds, SECONDS), "--seconds")
    if options.largest is not None:
        sizes_to(nbytes_of(options.largest))
    if of_a_model:
        check_task(options.optimizer, options.batch, len(devices), "--batch")
        if options.shape is not None:
            shape_of(options.shape)


def measure(pool: Pool, options: Options, model: Any = None) -> AllReduceTable | StepTable:
    """Measure on a pool what the options ask for: a `model`, if there is one, else all-reduces.

    Raises UsageError for words that mean nothing, and what `all_reduce` and `steps` raise.
    """
    ops = _names(options.ops)
    if model is None:
        sizes = None if options.largest is None else sizes_to(nbytes_of(options.largest))
        return all_reduce(pool, sizes=sizes, ops=ops, seconds=_given(options.seconds, SECONDS_A_SIZE))
    return steps(
        pool,
        model,
        shape=None if options.shape is None else shape_of(options.shape),
        batch=options.batch,
        optimizer=options.optimizer,
        ops=ops,
        seconds=_given(options.seconds, SECONDS),
    )


def _check_together(options: Options, of_a_model: bool) -> None:
    """Refuse options that would have no effect: those of a model's steps without one, and the other way round."""
    usual = Options()
    names = ("largest",) if of_a_model else ("shape", "batch", "optimizer")
    useless = [f"--{name}" for name in names if getattr(options, name) != getattr(usual, name)]
    if useless:
        why = (
            "a model has tensors of its own sizes; leave it out"
            if of_a_model
            else "for the steps of a --model; name one"
        )
        raise UsageError(f"{' and '.join(useless)}: {why}")


def _names(ops: str | None) -> list[str] | None:
    return None if ops is None else [name.strip() for name in ops.split(",") if name.strip()]


def _given(seconds: float | None, otherwise: float) -> float:
    return otherwise if seconds is None else seconds


def imported(path: str) -> Callable[[], Any]:
    """Return what `module:function` names. Raises UsageError where there is no such thing."""
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        raise UsageError(f"--model {path}: write module:function, such as my_models:make")
    try:
        found: Callable[[], Any] = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise UsageError(f"--model {path}: {error}; run it in the folder of the module, or set PYTHONPATH") from error
    except AttributeError as error:
        raise UsageError(f"--model {path}: {error}") from error
    return found


def nbytes_of(words: str) -> int:
    """Return the bytes that `64M`, `64 MiB` or `67108864` means. Raises UsageError for other words."""
    text = words.strip().lower().removesuffix("ib").removesuffix("b").strip()
    unit = _UNITS.get(text[-1:], 1)
    try:
        return int(float(text[:-1] if unit > 1 else text) * unit)
    except (ValueError, OverflowError):
        raise UsageError(f"{words!r} is no size; write 64M or 512K, say") from None


def shape_of(words: str) -> tuple[int, ...]:
    """Return the shape that `1,28,28` means. Raises UsageError for other words."""
    try:
        shape = tuple(int(part) for part in words.strip("() ").split(",") if part.strip())
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise UsageError(f"--shape {words}: write the shape of one example, such as 1,28,28")
    return shape


def _writable(name: str) -> Path:
    path = Path(name)
    there = not path.is_dir() and os.access(path if path.exists() else path.absolute().parent, os.W_OK)
    if path.suffix.lower() not in ENDINGS or not there:
        raise UsageError(f"--picture {name}: name a file in a folder that is there, ending in {', '.join(ENDINGS)}")
    return path
