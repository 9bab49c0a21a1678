"""One replica as functions given to `Place.command` see it: sums over its peers, its random numbers, what it keeps.

    add_up, collect, hand_out    all replicas ask alike; nothing is agreed on before, since the same function of ours
                                 runs on each
    note                         goes to whoever called `command`

Knows the default process group and the replica's scope and gradients; knows no strategy and no job.
"""

from __future__ import annotations

import contextlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import numpy as np
import torch
import torch.distributed as dist

from mirror_nb.collectives.base import as_sent, gathered, word_device
from mirror_nb.gradients.synchronizer import GradientSynchronizer
from mirror_nb.replica.scope import Scope
from mirror_nb.steps.recorder import Recorder
from mirror_nb.steps.steering import Steering
from mirror_nb.tensors.checksums import checksums
from mirror_nb.tensors.layouts import is_block


class Seat(ABC):
    """What a replica offers to a function that runs on all of them."""

    def __init__(self, replica_id: int, num_replicas: int, device: torch.device) -> None:
        self.replica_id = replica_id
        self.num_replicas = num_replicas
        self.device = device
        self.recorder = Recorder(device)
        self.steering = Steering(self.recorder.mark)
        self.jobs: dict[str, Any] = {}
        # What functions keep here from one call to the next, under names of their own.

    @abstractmethod
    def note(self, value: Any) -> None:
        """Tell the caller of `command` a small value while its function still runs."""

    @abstractmethod
    def heed(self) -> None:
        """Raise the KeyboardInterrupt that came inside a function that must end first (replica/whole.py)."""

    @abstractmethod
    def check(self) -> dict[str, int]:
        """Record checksums of the parameters that are synchronised, and return them by name; nobody is waited for."""

    @abstractmethod
    def averaging(self) -> AbstractContextManager[None]:
        """Return a context in which gradients are plain means over the replicas and random numbers this one's own."""

    @abstractmethod
    def weighed(self, local_examples: int, global_examples: int) -> AbstractContextManager[None]:
        """Return a context in which a backward pass weighs in by this replica's part of the global batch."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward() accumulates local gradients; the first one after it reduces all."""

    @abstractmethod
    def take_part(self) -> None:
        """Join the synchronisation of the others' backward pass without a gradient of this replica's own."""

    @abstractmethod
    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the replicas of a tensor of equal shapes, in its place; autograd sees nothing of it."""

    @abstractmethod
    def collect(self, value: Any) -> list[Any]:
        """Return every replica's value, in order; values are pickled."""

    @abstractmethod
    def hand_out(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """Overwrite the tensors with those of replica `source`."""

    @abstractmethod
    def shared_randomness(self) -> AbstractContextManager[None]:
        """Return a context that draws from the stream that is equal on all replicas."""

    @abstractmethod
    def plant(self, seed: int) -> None:
        """Let this replica's own random numbers begin anew at a place that `seed` and its id give."""

    def random_state(self) -> dict[str, Any]:
        """Return the states of this replica's own random generators: tensors and plain values."""
        legacy: Any = np.random.get_state(legacy=True)
        name, keys, position, has_gauss, gauss = legacy
        version, words, spare = random.getstate()
        state = {
            "torch": torch.get_rng_state(),
            "numpy": (str(name), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)),
            "python": (version, torch.tensor(words, dtype=torch.int64, device="cpu"), spare),
        }
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def set_random_state(self, state: dict[str, Any]) -> None:
        """Go on with random numbers from a `random_state`; a kind that it lacks goes on as it was."""
        torch.set_rng_state(state["torch"])
        name, keys, position, has_gauss, gauss = state["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
        version, words, spare = state["python"]
        random.setstate((version, tuple(words.tolist()), spare))
        if self.device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.device)


@final
class PeerSeat(Seat):
    """A replica of several, in the default process group; or of one, where all of it is quick."""

    def __init__(
        self,
        replica_id: int,
        num_replicas: int,
        device: torch.device,
        *,
        gradients: GradientSynchronizer,
        scope: Scope,
        recorder: Recorder,
        steering: Steering,
        send: Callable[[Any], None],
        named: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    ) -> None:
        super().__init__(replica_id, num_replicas, device)
        self.recorder = recorder
        self.steering = steering
        steering.compare = self.check
        self._gradients = gradients
        self._scope = scope
        self._send = send
        self._named = named
        # Parameters by the names of those who hold them.

    def note(self, value: Any) -> None:
        self._send(value)

    def heed(self) -> None:
        """Nothing: the replica's process insists by itself."""

    def check(self) -> dict[str, int]:
        parameters = self._gradients.synchronized()
        own: dict[int, str] = {}
        borne: set[str] = set()
        # The user's name where there is one, and no other bears it: `model.0.weight` says more than `Linear.weight`.
        for name, parameter in self._named() if parameters else ():
            if name not in borne and id(parameter) not in own:
                own[id(parameter)] = name
                borne.add(name)
        names = [own.get(id(parameter), name) for name, parameter in parameters.items()]
        sums = dict(zip(names, checksums(parameters.values()), strict=True))
        if sums:
            self.recorder.checksums(sums)
        return sums

    @contextlib.contextmanager
    def averaging(self) -> Iterator[None]:
        gradients = self._gradients
        before = gradients.reduction, gradients.enabled
        gradients.reduction, gradients.enabled = "mean", True
        gradients.clear_shares()
        self._scope.start_running()
        try:
            yield
        finally:
            gradients.reduction, gradients.enabled = before
            gradients.clear_shares()

    @contextlib.contextmanager
    def weighed(self, local_examples: int, global_examples: int) -> Iterator[None]:
        self._gradients.set_shares(local_examples, global_examples)
        try:
            yield
        finally:
            self._gradients.clear_shares()

    def no_sync(self) -> AbstractContextManager[None]:
        return self._gradients.no_sync()

    def take_part(self) -> None:
        self._gradients.take_part()

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.num_replicas > 1:
            carried = self._carried(tensor)
            dist.all_reduce(carried)
            if carried is not tensor:
                tensor.copy_(carried)
        return tensor

    def _carried(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself, or its copy on a device that the default group reaches."""
        return tensor.to(word_device(self.device)) if tensor.device.type == "cpu" else tensor

    def collect(self, value: Any) -> list[Any]:
        return gathered(value, self.num_replicas) if self.num_replicas > 1 else [value]

    def hand_out(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        if self.num_replicas == 1:
            return
        for tensor in tensors:
            if not is_block(tensor):
                # Sparse, say: its parts may be of another length on each replica.
                whole = self.collect(tensor.detach() if self.replica_id == source else None)[source]
            else:
                whole = self._carried(tensor.detach()).contiguous()
                dist.broadcast(as_sent(whole), source)
            if self.replica_id != source:
                tensor.detach().copy_(whole)

    def shared_randomness(self) -> AbstractContextManager[None]:
        return self._scope.shared_randomness()

    def plant(self, seed: int) -> None:
        self._scope.plant(seed)

    def set_random_state(self, state: dict[str, Any]) -> None:
        super().set_random_state(state)
        self._scope.took_random_state()


@final
class AloneSeat(Seat):
    """The only replica, in the caller's own process."""

    def __init__(self, device: torch.device, heed: Callable[[], None], note: Callable[[Any], None]) -> None:
        super().__init__(0, 1, device)
        self._heed = heed
        self._note = note

    def note(self, value: Any) -> None:
        self._note(value)

    def heed(self) -> None:
        self._heed()

    def check(self) -> dict[str, int]:
        return {}

    def averaging(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def weighed(self, local_examples: int, global_examples: int) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def no_sync(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def take_part(self) -> None:
        """There are no others."""

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def collect(self, value: Any) -> list[Any]:
        return [value]

    def hand_out(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """There is nobody to give them to."""

    def shared_randomness(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def plant(self, seed: int) -> None:
        """Random numbers are the process's own and go on as they are."""
