"""Where a strategy's code stands: in the controller, in a replica, or alone. One interface, one class a place.

The public strategy checks its arguments and hands over to its place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch

from mirror_nb.collectives.options import Communication
from mirror_nb.errors import PoolClosed
from mirror_nb.strategies.input import ReplicaDataset, ReplicaInput, ValueContext
from mirror_nb.strategies.reductions import own_of
from mirror_nb.strategies.seat import Seat
from mirror_nb.telemetry.comparison import Comparison
from mirror_nb.values import ReduceOp
from mirror_nb.variables import update_component

if TYPE_CHECKING:
    from mirror_nb.strategies.base import Strategy


@final
@dataclass(frozen=True, slots=True)
class Mended:
    """What was done for replicas that had died."""

    replaced: dict[int, str]
    # How each of them had ended, by replica id.
    survived: bool
    # Whether some replica still had the networks, which all have now.


class Place(ABC):
    """What a strategy needs of the process that it is held in."""

    num_replicas: int
    devices: tuple[str, ...]
    # One a replica.
    replica_id: int | None
    # Of the replica that this is; None in the controller, which is none.
    device: torch.device | None
    # This process's, likewise.
    communication: Communication
    # What gradients are reduced by, and how.
    seat: Seat | None
    # Of the replica that this is, for functions given to `command`; None in the controller.
    reduction: str | None = None
    # How replicas' gradients become one where this is a replica: by "mean" or "sum".
    closed = False
    # Whether `close` has ended it.

    def check_open(self) -> None:
        """Raise PoolClosed if `close` has ended it."""
        if self.closed:
            raise PoolClosed("this strategy was closed; make a new one")

    @abstractmethod
    def scope(self) -> AbstractContextManager[Any]:
        """Return the context in which what is created is mirrored."""

    def label(self, kind: type) -> None:  # noqa: B027
        """Name the classes that `kind` is or derives from as all replicas do, before it travels from one of them."""

    @abstractmethod
    def communicate(self, by: Communication) -> None:
        """Reduce gradients by other cross-device ops from the next step on."""

    @abstractmethod
    def run(self, strategy: Strategy, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `fn` on every replica this place commands; return the results, regrouped."""

    # ------------------------------------------------------------------ for libraries on top: fit, for instance

    @abstractmethod
    def log(self, values: dict[str, Any]) -> None:
        """Record losses and metrics of this replica's examples; ContextError in the controller."""

    @abstractmethod
    def told(self, examples: int | None) -> None:
        """Record that a step ends here; ContextError in the controller."""

    @abstractmethod
    def timeline(self) -> Any:
        """Return what the replicas have recorded; ContextError in a replica."""

    @abstractmethod
    def dashboard(self) -> Any:
        """Show what the replicas record, live; ContextError in a replica."""

    @abstractmethod
    def compare_parameters(self) -> Comparison:
        """Return whether all replicas have equal parameters; in a replica all of them have to ask."""

    @abstractmethod
    def command(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        *,
        changes: bool = True,
        on_note: Callable[[Any], None] = lambda value: None,
    ) -> list[Any]:
        """Call `fn(*args)` on every replica this place commands, outside the user's context; return all results.

        `fn` is a function of a module of ours; a strategy and mirrored objects in `args` travel by reference. What
        a replica gives to its seat's `note` meanwhile comes to `on_note`, here, in this thread. `changes` tells
        whether networks and Variables may be other ones afterwards. On a replica, where every replica makes the
        call, it is called here and the result is this replica's alone.
        """

    @abstractmethod
    def ask(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        """As `command`, of what changes nothing, or may be called twice: again where a replica dies meanwhile."""

    @abstractmethod
    def mend(self) -> Mended:
        """Start dead replicas anew, with what a survivor has, and bring survivors to one step.

        Tells of all that were replaced since the last time. Raises ReplicaDied when one dies meanwhile: call again.
        On a replica there is nothing that could be done.
        """

    @abstractmethod
    def forget_deaths(self) -> None:
        """Let `mend` tell of those alone that die from now on: who is dead is replaced, as before any request."""

    @abstractmethod
    def every(self, results: list[Any]) -> list[Any]:
        """Return the results of `command` of all replicas, in order; on a replica all of them have to ask."""

    @abstractmethod
    def draw_seed(self) -> int:
        """Return a number from torch's generator that is the same wherever this is asked alike: below 2**62."""

    # ------------------------------------------------------------------ values

    @abstractmethod
    def reduce(self, op: ReduceOp, value: Any, axis: tuple[int, ...] | None, where: str) -> Any:
        """Reduce one leaf over the replicas, and over `axis` of each value; `where` it is in its nest."""

    @abstractmethod
    def gather(self, value: Any, axis: int, where: str) -> Any:
        """Join one leaf of all replicas along an axis; `where` it is in its nest."""

    @abstractmethod
    def all_reduce(self, op: ReduceOp, value: Any) -> Any:
        """Serve `ReplicaContext.all_reduce`."""

    @abstractmethod
    def all_gather(self, value: Any, axis: int) -> Any:
        """Serve `ReplicaContext.all_gather`."""

    @abstractmethod
    def merge_call(
        self, strategy: Strategy, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Serve `ReplicaContext.merge_call`."""

    @abstractmethod
    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the parts of a value that this place has."""

    @abstractmethod
    def distribute_dataset(self, source: Any, **options: Any) -> Any:
        """Return an iterable of the global batches of `source`, as this place sees them."""

    @abstractmethod
    def distribute_datasets_from_function(self, dataset_fn: Callable[[Any], Any], options: Any) -> Any:
        """Return an iterable over what `dataset_fn(InputContext)` gives."""

    @abstractmethod
    def values_from_function(self, value_fn: Callable[[Any], Any]) -> Any:
        """Return the value that `value_fn(ValueContext)` gives for each replica."""

    @abstractmethod
    def make_variable(self, value: Any, **options: Any) -> Any:
        """Make a Variable."""

    @abstractmethod
    def mirror(self, obj: Any) -> Any:
        """Treat an object as created in the scope, and return it."""

    @property
    @abstractmethod
    def takes_part(self) -> bool:
        """Whether this code runs on all replicas, in step, or commands them: not in a cell of some, or --no-sync."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward() accumulates local gradients; RuntimeError in the controller."""

    @abstractmethod
    def mirrors(self, obj: Any) -> bool:
        """Whether an object was created in the strategy's scope."""

    @abstractmethod
    def update(
        self, variable: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Call `fn(component, *args, **kwargs)` for every replica's component of a Variable that this place has."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the place started."""


class OwnPlace(Place):
    """A place whose code runs on a replica, this process: the only one, or one of several that do the same."""

    replica_id: int
    device: torch.device
    input: ReplicaInput

    def ask(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        return self.command(fn, args, changes=False)

    def mend(self) -> Mended:
        return Mended({}, True)

    def forget_deaths(self) -> None:
        """There were none: this process lives."""

    def distribute_dataset(self, source: Any, **options: Any) -> Any:
        return ReplicaDataset.of(source, self.input, **options)

    def distribute_datasets_from_function(self, dataset_fn: Callable[[Any], Any], options: Any) -> Any:
        return ReplicaDataset.from_function(dataset_fn, self.input, options)

    def values_from_function(self, value_fn: Callable[[Any], Any]) -> Any:
        return value_fn(ValueContext(self.replica_id, self.num_replicas))

    def update(
        self, variable: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        args, kwargs = own_of((args, kwargs), self.replica_id, self.num_replicas)
        return [update_component(variable, fn, args, kwargs)]
