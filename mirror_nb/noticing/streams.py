"""NumPy's and Python's random numbers, and files in memory: where one of them stands, and how to put it there.

A torch.Generator is told of, as optimizers are.
"""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from mirror_nb.transfer.pickler import OF_PROCESS


def is_stream(value: object) -> bool:
    """Whether it is one of these, and belongs to whoever made it."""
    return type(value) in _WAYS and not any(value is own for own in OF_PROCESS.values())


def place(value: Any) -> Any:
    """Return where a stream stands, for `move`: its state, or all that a file has and the place in it."""
    return _WAYS[type(value)][0](value)


def move(value: Any, where: Any) -> None:
    """Have a stream go on from where another of its kind stands."""
    _WAYS[type(value)][1](value, where)


def _state(generator: np.random.Generator) -> Any:
    return copy.deepcopy(generator.bit_generator.state)


def _set_state(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


def _written(file: io.StringIO | io.BytesIO) -> tuple[Any, int]:
    return file.getvalue(), file.tell()


def _write(file: Any, written: tuple[Any, int]) -> None:
    file.seek(0)
    file.truncate()
    file.write(written[0])
    file.seek(written[1])


_WAYS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    np.random.Generator: (_state, _set_state),
    np.random.RandomState: (lambda it: it.get_state(legacy=False), np.random.RandomState.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    io.StringIO: (_written, _write),
    io.BytesIO: (_written, _write),
}
