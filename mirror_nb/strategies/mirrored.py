"""MirroredStrategy: every replica has a copy of everything, and all learn from the whole global batch."""

from __future__ import annotations

import functools
import operator
import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import torch

from mirror_nb import devices as device_names
from mirror_nb.collectives.base import CrossDeviceOps
from mirror_nb.collectives.options import AUTO, Communication, CommunicationOptions, chosen
from mirror_nb.errors import UsageError, users_level
from mirror_nb.strategies import input
from mirror_nb.strategies.base import Strategy
from mirror_nb.strategies.context import ReplicaContext, entered, stand_on
from mirror_nb.strategies.controller import ControllerPlace
from mirror_nb.strategies.in_replica import ReplicaPlace
from mirror_nb.strategies.place import Place
from mirror_nb.strategies.standalone import standalone
from mirror_nb.values import ReduceOp

if TYPE_CHECKING:
    from mirror_nb.replica.runtime import Replica


@final
class MirroredStrategy(Strategy):
    """Trains one model on several devices of this machine, in step.

    `devices`: None means every visible GPU, else one CPU replica; or names such as `["cuda:0", "cuda:1"]`, `"GPU:0"`,
    0, `"cpu:1"`. `gradient_reduction`: ReduceOp.MEAN, the default, gives the gradient of a mean loss over the whole
    global batch, as one device would compute it; ReduceOp.SUM adds the replicas' gradients up, TensorFlow's rule, for
    losses scaled by the global batch size. `seed` is that of the replicas' random numbers, until this process seeds
    its own. `cross_device_ops`: the algorithm that reduces over the replicas, such as `SharedMemoryAllReduce()`, or
    its name; None takes the `implementation` of the `communication_options`, else the one that is fastest on the
    devices as a rule.

    In the controller (a notebook cell or a script) it starts one process a device, with the first call. In a
    `%%mirrored` cell, and in a script that torchrun starts once per device, it is the place it stands in, on the
    devices that who started the processes has given; where `devices` names others, a warning says so.

    Raises DeviceError for devices that are not there or named twice and for ops that cannot work on them, UsageError
    for another reduction and for a seed that is no whole number.
    """

    def __init__(
        self,
        devices: Sequence[object] | str | int | None = None,
        cross_device_ops: CrossDeviceOps | str | None = None,
        *,
        gradient_reduction: ReduceOp | str | None = None,
        communication_options: CommunicationOptions | None = None,
        seed: int = 0,
    ) -> None:
        reduction = None
        if gradient_reduction is not None:
            reduction = ReduceOp.of(gradient_reduction, "gradient_reduction").value.lower()
        super().__init__(_place(devices, reduction, _whole(seed), cross_device_ops, communication_options))
        if not _here and self._place.replica_id is not None:
            stand_on(self, ReplicaContext(self, self._place.replica_id))

    @property
    def cross_device_ops(self) -> CrossDeviceOps:
        """The algorithm that reduces over the replicas.

        Another one, or its name, may be assigned between steps (in a cell: on every replica). Raises DeviceError for
        one that cannot work on the devices.
        """
        return self._place.communication.ops

    @cross_device_ops.setter
    def cross_device_ops(self, ops: CrossDeviceOps | str) -> None:
        place = self._place
        place.communicate(_chosen(ops, place.communication.options, place))

    def __reduce__(self) -> Any:
        if _of_cells and self._place is _of_cells[0]._place:
            return strategy_here, ()
        return super().__reduce__()

    def __repr__(self) -> str:
        closed = ", closed" if self._place.closed else ""
        return f"<MirroredStrategy: {', '.join(self._place.devices)}{closed}>"


@final
class StrategyThere:
    """What the notebook has in the place of its cells' strategy: in an object that keeps it, say."""

    def __reduce__(self) -> Any:
        return strategy_here, ()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"`{name}` of a strategy that a replica gave back: it is there, not here; use it in a %%mirrored cell, or "
            "in a function given to `run`"
        )

    def __repr__(self) -> str:
        return "<MirroredStrategy of the replicas>"


def strategy_here() -> MirroredStrategy | StrategyThere:
    """Return what a replica's strategy is in this process, which is that replica, another one, or their controller."""
    return _of_cells[0] if _of_cells else StrategyThere()


def _whole(seed: Any) -> int:
    try:
        return operator.index(seed)
    except TypeError:
        raise UsageError(f"`seed` must be a whole number, not {seed!r}") from None


def _place(devices: Any, reduction: str | None, seed: int, ops: Any, options: Any) -> Place:
    if _here or _started_by_a_launcher():
        asked = None if devices is None else device_names.named(devices)
        place = _place_in_replica(reduction, seed)
        if asked is not None:
            _tell_of_others(asked, place)
        if ops is not None or options is not None:
            if ops is None and getattr(options, "implementation", None) == AUTO:
                # The place has chosen, who knows whether all replicas are on this machine.
                ops = place.communication.ops
            place.communicate(_chosen(ops, options, place))
        return place
    resolved = device_names.resolve(devices, torch.cuda.device_count())
    by = chosen(ops, options, resolved)
    return ControllerPlace(resolved, setup=SETUP, seed=seed, reduction=reduction or "mean", communication=by)


def _chosen(ops: Any, options: Any, place: Place) -> Communication:
    # Before it is pickled to see whether it can travel, which would make its class one of this replica's alone.
    place.label(type(ops))
    return chosen(ops, options, tuple(map(device_names.parse, place.devices)))


def _tell_of_others(asked: Sequence[device_names.Device], place: Place) -> None:
    """Warn, on one replica, where the devices of this place are not those that a script asks for."""
    here = tuple(map(device_names.parse, place.devices))
    if place.replica_id == 0 and (len(asked), asked[0].kind) != (len(here), here[0].kind):
        who = "what started them, %mirror start for one," if _here else "the launcher, torchrun's --nproc_per_node,"
        warnings.warn(
            f"`devices` is {', '.join(map(str, asked))}, but the replicas are here already, on "
            f"{', '.join(place.devices)}, which are used: {who} says on which",
            stacklevel=users_level(),
        )


def _place_in_replica(reduction: str | None, seed: int) -> ReplicaPlace:
    place = _place_here(_here[-1]) if _here else _place_of_process(seed)
    if reduction is not None:
        place.reduce_by(reduction)
    return place


def _place_of_process(seed: int) -> ReplicaPlace:
    """Return the place of a process that a launcher started: one, until it is closed."""
    if not _alone or _alone[-1].closed:
        _alone[:] = [ReplicaPlace(standalone(seed=seed))]
    return _alone[-1]


@functools.cache
def _place_here(replica: Replica) -> ReplicaPlace:
    """Return the place of a replica: one, however many strategies its cells make."""
    return ReplicaPlace(replica)


def _started_by_a_launcher() -> bool:
    """Whether torchrun or the like started this process once per device."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


_here: list[Replica] = []
# The replica that this process is, if it is one.
_of_cells: list[MirroredStrategy] = []
# The strategy of this process's cells, if it is a replica.
_alone: list[ReplicaPlace] = []
# The place of this process, if a launcher started it.


def setup(replica: Replica) -> dict[str, Any]:
    """Return the names that a replica's cells find bound, besides its id and device; called once in each."""
    _here.append(replica)
    if replica.own_process:
        # Replicas speak torch: a notebook may choose Keras's backend after they have started.
        os.environ.setdefault("KERAS_BACKEND", "torch")
    try:
        strategy = MirroredStrategy()
    finally:
        if not replica.own_process:
            # The in-process twin lives in the controller, where strategies go on to be the controller's.
            _here.pop()
    if replica.own_process:
        _of_cells[:] = [strategy]
        input.here[:] = [_place_here(replica).input]
    context = ReplicaContext(strategy, replica.identity.replica_id)
    replica.invoke = lambda fn, args, kwargs: strategy._place.run(strategy, fn, args, kwargs)
    replica.weighing = _place_here(replica).weighing
    replica.cell_context = lambda: entered(strategy, context, cross=True)
    return {"strategy": strategy}


SETUP = f"{__name__}:{setup.__name__}"
# For a pool: what its replicas call to get these names.
