"""How random generators were seeded: where one process seeds its own, others do likewise.

    torch.manual_seed(0), random.seed(0), numpy.random.seed(0)

Knows no replicas and no channel.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import operator
import random
from typing import Any, SupportsIndex

import numpy as np
import torch

from mirror_nb.environment.replaced import Replaced, called_by_us

_FUNCTIONS: dict[str, tuple[Any, str]] = {
    "torch": (torch, "manual_seed"),
    "random": (random, "seed"),
    "numpy": (np.random, "seed"),
}
_seeded: dict[str, tuple[int, int]] = {}
# By generator: the number of its latest seeding among all of this process, and the seed.
_count = itertools.count(1)
followed: dict[str, tuple[int, int]] = {}
# Of another process: what has been done here too.


def seeded() -> dict[str, tuple[int, int]]:
    """Return how this process was seeded, by generator; another number each time."""
    return dict(_seeded)


def seed_alike(wanted: dict[str, tuple[int, int]]) -> None:
    """Seed the generators here as another process has seeded its own since this was last called."""
    for name, (number, seed) in wanted.items():
        if followed.get(name) != (number, seed):
            followed[name] = number, seed
            owner, function = _FUNCTIONS[name]
            # By its name: a replica sees to its streams there.
            getattr(owner, function)(seed)


def watch() -> None:
    """Notice from now on how this process is seeded; again is once."""
    if _watched or multiprocessing.parent_process() is not None:
        # Replicas are not asked.
        return
    for name, (owner, function) in _FUNCTIONS.items():
        for place in (owner, torch.random) if owner is torch else (owner,):
            _watched.append(Replaced(place, function, after=functools.partial(_note, name)))


_watched: list[Replaced] = []


def _note(name: str, *args: Any, **kwargs: Any) -> None:
    seed = number_of(next(iter((*args, *kwargs.values())), None), torchs=name == "torch")
    # Others (None: by the clock) nobody can repeat; our own code puts back what it changes.
    if seed is not None and not called_by_us(1):
        _seeded[name] = next(_count), seed


def number_of(seed: Any, *, torchs: bool) -> int | None:
    """Return the whole number that a generator was seeded with, None where it was by something else."""
    # torch takes 3.0 for 3.
    return int(seed) if torchs else operator.index(seed) if isinstance(seed, SupportsIndex) else None
