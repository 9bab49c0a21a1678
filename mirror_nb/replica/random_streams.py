"""The two streams of a replica's random generators.

The *shared* one is equal on all replicas: it makes initial values and orders of examples. The *own* one differs by
replica (seed + replica id): dropout, noise. One of the two is live in the generators, the other one waits.

A state that was taken from a generator and is given back, as by `torch.random.fork_rng`, goes to the stream that it
was taken from, and the other one goes back with it.

Knows torch's, Python's and NumPy's generators, and where users seed them; knows no module and no other replica.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from mirror_nb.environment import seeds
from mirror_nb.environment.replaced import called_by_us
from mirror_nb.replica.whole import whole

TAKEN_STATES = 64
# So many states of generators that were taken are known when they are given back.
_TORCH = frozenset({"torch", "cuda"})  # what torch.manual_seed seeds


@final
@dataclass(frozen=True, slots=True)
class RandomStreams:
    """The shared stream of one replica, which is equal on all while they do the same."""

    running: bool
    # Whether the own stream is live.
    shared: dict[str, Any]
    # States of the generators, by name.
    seeded: dict[str, tuple[int, int]]
    # How the controller had seeded its own by then.


@final
class Streams:
    """The two streams of every generator: one is live in the generators, the other one waits."""

    def __init__(
        self, replica_id: int, device: torch.device, seed: int, script: Callable[[], dict[str, tuple[int, int]]]
    ) -> None:
        self.running = False
        self._replica_id = replica_id
        self._generators = _generators(device)
        # How to go on with the other stream, generator by generator.
        self._other: list[Callable[[], object]] = []
        self._script = script
        self._known = script()
        for generator in self._generators:
            _, seeded = self._known.get(generator.seeded_as, (0, None))
            if seeded is None:
                generator.plant(seed)
            self._other.append(functools.partial(generator.plant, seed if seeded is None else seeded, replica_id))
        self._torch_seed = torch.initial_seed()
        self._taken: dict[tuple[int, int], tuple[bool, Callable[[], object]]] = {}
        # States that somebody took, by generator and key: whether the own stream was live, and the other one of then.

    # What our own code takes and gives is that of the stream that is live, and of no other.

    def taken(self, number: int, key: Callable[[Any], int], *_: object, **__: object) -> None:
        """Somebody has just taken the state of a generator."""
        if called_by_us(1):
            return
        while len(self._taken) >= TAKEN_STATES:
            del self._taken[next(iter(self._taken))]
        self._taken[number, key(self._generators[number].state())] = self.running, self._other[number]

    def giving(self, number: int, key: Callable[[Any], int], *args: object, **kwargs: object) -> None:
        """Somebody gives a generator a state: make the stream live that it was taken from, if it was."""
        taken = None if called_by_us(1) else self._find_taken(number, key, args, kwargs)
        if taken is not None and taken[0] != self.running:
            self._swap()

    def given(self, number: int, key: Callable[[Any], int], *args: object, **kwargs: object) -> None:
        """A generator has got a state."""
        taken = None if called_by_us(1) else self._find_taken(number, key, args, kwargs)
        if taken is not None:
            self._other[number] = taken[1]
            self.took_state()

    def _find_taken(
        self, number: int, key: Callable[[Any], int], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[bool, Callable[[], object]] | None:
        # What is no state is an error of the function itself.
        with contextlib.suppress(Exception):
            return self._taken.get((number, key(next(iter((*args, *kwargs.values()))))))
        return None

    def build(self) -> None:
        """Go on with the shared stream."""
        if self.running:
            # Before the swap: a script's seed, were it that of before, would be left to the own stream alone.
            self.notice()
            self._swap()

    def run(self) -> None:
        """Go on with this replica's own stream."""
        if not self.running:
            self._swap()

    def seeded(self, names: frozenset[str], *args: object, **kwargs: object) -> None:
        """The user seeded these generators while the shared stream was live: the own one follows suit."""
        seed = seeds.number_of(next(iter((*args, *kwargs.values())), None), torchs=names <= _TORCH)
        for i, generator in enumerate(self._generators):
            if generator.name in names and seed is not None:
                self._other[i] = functools.partial(generator.plant, seed, self._replica_id)
        self._torch_seed = torch.initial_seed()

    def notice(self) -> None:
        """Let the own streams begin anew of generators that the script has seeded outside the scope."""
        before, self._known = self._known, self._script()
        if self._known == before:
            return
        for i, generator in enumerate(self._generators):
            name = generator.seeded_as
            if self._known.get(name) == before.get(name):
                continue
            plant = functools.partial(generator.plant, self._known[name][1], self._replica_id)
            self._other[i] = functools.partial(generator.put, generator.take()) if self.running else plant
            if self.running:
                plant()
        self._torch_seed = torch.initial_seed()

    def plant(self, seed: int) -> None:
        """Let the live streams begin anew."""
        for generator in self._generators:
            generator.again(seed + self._replica_id)
        self._torch_seed = torch.initial_seed()

    def took_state(self) -> None:
        """The live stream goes on from a state of its own."""
        self._torch_seed = torch.initial_seed()

    def shared(self) -> RandomStreams:
        """Return the shared stream; nothing changes."""
        running = self.running
        self.build()
        states = {generator.name: copy.deepcopy(generator.take()) for generator in self._generators}
        if running:
            self.run()
        return RandomStreams(running, states, dict(seeds.followed))

    def follow(self, streams: RandomStreams) -> None:
        """Go on from another replica's shared stream, building or running as it is."""
        self.build()
        seeds.followed.update(streams.seeded)
        for generator in self._generators:
            generator.put(streams.shared[generator.name])
        seed = torch.initial_seed()
        self._other = [functools.partial(generator.plant, seed, self._replica_id) for generator in self._generators]
        self._torch_seed = seed
        if streams.running:
            self.run()

    @whole
    def _swap(self) -> None:
        live: list[Callable[[], object]] = [
            functools.partial(generator.put, generator.take()) for generator in self._generators
        ]
        if torch.initial_seed() != self._torch_seed:
            self._notice_seed(live)
        for go_on in self._other:
            go_on()
        self._other, self.running = live, not self.running
        self._torch_seed = torch.initial_seed()

    def _notice_seed(self, live: list[Callable[[], object]]) -> None:
        """Somebody seeded torch by a function that was taken hold of outside the scope."""
        plant = (torch.initial_seed(), self._replica_id)
        for i, generator in enumerate(self._generators):
            if generator.name not in _TORCH:
                continue
            if self.running:
                self._other[i] = live[i]
                live[i] = functools.partial(generator.plant, *plant)
            else:
                self._other[i] = functools.partial(generator.plant, *plant)


@final
@dataclass(frozen=True, slots=True)
class _Generator:
    """One of the process's random generators: take its state away, put one in, plant a fresh one by seed."""

    name: str
    take: Callable[[], Any]
    put: Callable[[Any], object]
    plant: Callable[..., object]
    # Takes a seed, and what to add to it for one replica's own stream.
    again: Callable[[int], object]
    # Takes a seed of 64 bits or more, for the state that is there: far cheaper than another one.
    state: Callable[[], Any]
    # As users take it.

    @property
    def seeded_as(self) -> str:
        """The generator that is seeded where this one is: torch seeds the GPU's too."""
        return "torch" if self.name in _TORCH else self.name


def _generators(device: torch.device) -> list[_Generator]:
    found = [
        _Generator("torch", torch.get_rng_state, torch.set_rng_state, _plant_torch, _again_torch, torch.get_rng_state),
        _Generator("random", random.getstate, random.setstate, _plant_random, _seed_random, random.getstate),
        # Exchanging the bit generators takes 0.2 µs, copying their states 50.
        _Generator(
            "numpy",
            _numpy.get_bit_generator,
            _numpy.set_bit_generator,
            _plant_numpy,
            _again_numpy,
            np.random.get_state,
        ),
    ]
    if device.type == "cuda":
        take = functools.partial(torch.cuda.get_rng_state, device)
        put = functools.partial(torch.cuda.set_rng_state, device=device)
        found.append(_Generator("cuda", take, put, plant := functools.partial(_plant_cuda, device), plant, take))
    return found


# NumPy's stubs lack two of its public functions.
_numpy: Any = np.random
# The functions as they were, since the scope replaces the modules' own.
_seed_random, _seed_numpy = random.seed, np.random.seed


def _plant_torch(seed: int, replica_id: int = 0) -> None:
    torch.default_generator.manual_seed((seed + replica_id) % 2**64)
    if replica_id:
        # Scripts written for torchrun derive orders from torch.initial_seed() and want it equal everywhere. The
        # first word of the state is that seed; the numbers come from the rest.
        state = torch.get_rng_state()
        state[:8].view(torch.int64)[0] = torch.tensor(seed % 2**64, dtype=torch.uint64, device="cpu").view(torch.int64)
        torch.set_rng_state(state)


def _again_torch(seed: int) -> None:
    torch.default_generator.manual_seed(seed % 2**64)


def _again_numpy(seed: int) -> None:
    _seed_numpy(seed % 2**32)


def _plant_cuda(device: torch.device, seed: int, replica_id: int = 0) -> None:
    # Before that there are no generators.
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.default_generators[index].manual_seed((seed + replica_id) % 2**64)


def _plant_random(seed: int, replica_id: int = 0) -> None:
    _seed_random(seed + replica_id)


def _plant_numpy(seed: int, replica_id: int = 0) -> None:
    # Of its own: the other stream keeps the bit generator that is there.
    _numpy.set_bit_generator(np.random.MT19937())
    _seed_numpy((seed + replica_id) % 2**32)


def seeding_functions(device: torch.device) -> Iterator[tuple[Any, str, frozenset[str]]]:
    """Where users seed, and which generators that seeds."""
    yield torch, "manual_seed", _TORCH
    yield torch.random, "manual_seed", _TORCH
    yield random, "seed", frozenset({"random"})
    yield np.random, "seed", frozenset({"numpy"})
    if device.type == "cuda":
        yield torch.cuda, "manual_seed", frozenset({"cuda"})
        yield torch.cuda, "manual_seed_all", frozenset({"cuda"})


def state_functions(device: torch.device) -> Iterator[tuple[Any, str, str, int, Callable[[Any], int]]]:
    """Where users take states and give them back, of which generator, and what is a state's key."""
    yield torch, "get_rng_state", "set_rng_state", 0, _key_of_tensor
    yield torch.random, "get_rng_state", "set_rng_state", 0, _key_of_tensor
    yield random, "getstate", "setstate", 1, hash
    yield np.random, "get_state", "set_state", 2, _key_of_numpy
    if device.type == "cuda":
        yield torch.cuda, "get_rng_state", "set_rng_state", 3, _key_of_tensor


def _key_of_tensor(state: Tensor) -> int:
    return hash(state.numpy().tobytes())


def _key_of_numpy(state: Any) -> int:
    if isinstance(state, dict):
        return hash((state["state"]["key"].tobytes(), state["state"]["pos"]))
    return hash((np.asarray(state[1]).tobytes(), state[2]))
