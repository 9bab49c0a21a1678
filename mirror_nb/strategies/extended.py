"""`strategy.extended`: what libraries on top of a strategy call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, final

from torch import Tensor

from mirror_nb.collectives.options import CommunicationOptions
from mirror_nb.devices import parse
from mirror_nb.errors import DeviceError, UsageError, lacking
from mirror_nb.strategies.context import check_call, check_options, require_cross_replica, update_in
from mirror_nb.strategies.reductions import regroup
from mirror_nb.values import DistributedValues, ReduceOp

if TYPE_CHECKING:
    from mirror_nb.strategies.base import Strategy


_OLDER_NAMES = {"call_for_each_replica": "strategy.run(fn, args, kwargs)", "read_var": "variable.read_value()"}
# What tf.distribute's has for TensorFlow 1 only.


@final
class StrategyExtended:
    """tf.distribute's StrategyExtended: updates, reductions to a destination, devices."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    if not TYPE_CHECKING:
        # Type checkers would take every name for there.

        def __getattr__(self, name: str) -> Any:
            raise lacking(self, name, _OLDER_NAMES)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices that replicas compute on, one a replica."""
        return self._strategy._place.devices

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices that hold Variables: those that compute."""
        return self._strategy._place.devices

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether replicas need tensors of sizes that are known before: no, as everywhere in torch."""
        return False

    def non_slot_devices(self, var_list: Any) -> tuple[str, ...]:
        """Return the devices of what belongs to a training but to no Variable, an optimizer's count of steps for one.

        They are those of all replicas, whatever the Variables.
        """
        return self.parameter_devices

    def colocate_vars_with(self, colocate_with_variable: Any) -> AbstractContextManager[None]:
        """Return a context in which Variables are made on the devices of another one, which are those of all.

        Raises UsageError for a Variable of another strategy.
        """
        self._check_created_in_scope("colocate_vars_with", colocate_with_variable)
        return contextlib.nullcontext()

    def variable_created_in_scope(self, v: Any) -> bool:
        """Whether this strategy mirrors a Variable, module or optimizer."""
        return self._strategy._place.mirrors(v)

    def _check_created_in_scope(self, what: str, v: Any) -> None:
        if not self.variable_created_in_scope(v):
            raise UsageError(
                f"`{what}` must only be passed a Variable created in this strategy's scope, not: {v!r}; make it with "
                "Variable(...) inside `with strategy.scope():`, or in a cell"
            )

    def value_container(self, value: Any) -> Any:
        """Return what a replica's value is a part of: itself, since a component that is read here is a copy."""
        return value

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call `fn(component, *args, **kwargs)` for every replica's component of `var`, in cross-replica context.

        In `fn` get_replica_context() is None, and other Variables are that replica's components too. A PerReplica in
        the arguments gives each its part. Returns the results as one grouped value, or with `group=False` as a list,
        one entry a replica; on a replica its own alone. Raises UsageError where `fn` is async or no function, where
        `args` is no tuple or list, for a PerReplica of another number of replicas, and for a Variable of another
        strategy.
        """
        instead = "use get_replica_context().merge_call() around it"
        require_cross_replica("StrategyExtended.update", instead, self._strategy)
        check_call("fn", fn, args, kwargs)
        self._strategy._place.check_open()
        self._check_created_in_scope("update", var)
        results = self._strategy._place.update(var, update_in(self._strategy, fn), tuple(args), kwargs or {})
        return regroup(results) if group else results

    def reduce_to(
        self, reduce_op: ReduceOp | str, value: Any, destinations: Any, options: CommunicationOptions | None = None
    ) -> Any:
        """Return `value`, a nest, reduced over the replicas; destinations hold the same, so they make no difference.

        `destinations`: a device of the strategy's or the CPU, or a Variable, a tensor or a PerReplica, for where that
        is. `options` are tf.distribute's CommunicationOptions; those of the strategy hold for all of its calls. Raises
        DeviceError for another device, UsageError for no destination.
        """
        check_options(options)
        instead = "use get_replica_context().all_reduce() instead"
        require_cross_replica("StrategyExtended.reduce_to", instead, self._strategy)
        self._strategy._place.check_open()
        self._check_destination(destinations)
        return self._strategy.reduce(reduce_op, value)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[Any],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Return the reduced value of each (value, destination) pair; see `reduce_to`."""
        check_options(options)
        given = value_destination_pairs
        pairs = list(given) if isinstance(given, Iterable) else [given]
        for pair in pairs:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise UsageError(
                    f"`value_destination_pairs` must hold pairs of a value and its destination; {pair!r:.80} is none"
                )
            self._check_destination(pair[1])
        return [self.reduce_to(reduce_op, value, destination) for value, destination in pairs]

    def _check_destination(self, destination: Any) -> None:
        if isinstance(destination, (DistributedValues, Tensor)):
            return
        if destination is None or isinstance(destination, (list, tuple)):
            # Source: tf.distribute's `_validate_destinations`.
            raise UsageError(
                f'`destinations` is {destination!r}; it must be one of a device, as in "cpu:0", a Variable, a tensor '
                "or a PerReplica"
            )
        device, there = parse(destination), self._strategy._place.devices
        if device.kind != "cpu" and str(device) not in there:
            raise DeviceError(
                f"`destinations` is {device}, which is none of this strategy's devices: {', '.join(there)}"
            )
