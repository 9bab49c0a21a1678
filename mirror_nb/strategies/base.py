"""The public strategy: tf.distribute's names, checks of what callers give, and the step to the place that works.

A strategy is the same object with the same methods wherever its code stands; only its place differs. Every
`experimental_x` of tf.distribute is also there as `x`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import torch

from mirror_nb.environment.imported import when_imported
from mirror_nb.errors import ContextError, TransferError, UsageError, lacking
from mirror_nb.strategies.context import StrategyScope, check_call, require_cross_replica
from mirror_nb.strategies.extended import StrategyExtended
from mirror_nb.strategies.input import check_count
from mirror_nb.strategies.place import Place
from mirror_nb.strategies.reductions import in_order
from mirror_nb.telemetry.comparison import Comparison
from mirror_nb.telemetry.timeline import Timeline
from mirror_nb.values import DistributedValues, ReduceOp

if TYPE_CHECKING:
    from mirror_nb.strategies.input import InputContext, InputOptions, ValueContext


_OLDER_NAMES = {
    "experimental_run_v2": "strategy.run(fn, args, kwargs)",
    "unwrap": "strategy.experimental_local_results(value)",
    "experimental_make_numpy_dataset": "strategy.distribute_dataset(arrays, batch_size=...)",
    "make_dataset_iterator": "iter(strategy.experimental_distribute_dataset(loader))",
}
# What tf.distribute.Strategy has had, in tutorials still, and what is there instead.


class Strategy(ABC):
    """A way to spread a computation over devices. Cannot be made itself; make one of its subclasses."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._extended = StrategyExtended(self)
        # Keras's models train on all replicas too; by name, since training lies above strategies.
        when_imported("keras.src.backend.torch.trainer", "mirror_nb.training.keras:install")

    @abstractmethod
    def __repr__(self) -> str: ...

    if not TYPE_CHECKING:
        # Type checkers would take every name for there.

        def __getattr__(self, name: str) -> Any:
            raise lacking(self, name, _OLDER_NAMES)

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        # What is copied trains on the same replicas.
        return self

    def __reduce__(self) -> Any:
        raise TransferError(
            "a strategy belongs to the process that made it; in mirrored cells and in functions given to its `run` it "
            "is there by itself"
        )

    # ------------------------------------------------------------------ what it is

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas over which gradients are aggregated."""
        return self._place.num_replicas

    @property
    def replica_id(self) -> int:
        """This replica's id, from 0. Raises RuntimeError in the controller, which is none."""
        if self._place.replica_id is None:
            raise ContextError("the controller is no replica; ask in the function given to strategy.run")
        return self._place.replica_id

    @property
    def device(self) -> torch.device:
        """This replica's device. Raises RuntimeError in the controller."""
        if self._place.device is None:
            raise ContextError("the controller has no device; ask in the function given to strategy.run")
        return self._place.device

    @property
    def extended(self) -> StrategyExtended:
        """Methods for those who write libraries on top of strategies."""
        return self._extended

    @property
    def cluster_resolver(self) -> Any:
        """What knows the cluster; None on a single host."""
        return None

    # ------------------------------------------------------------------ scope and run

    def scope(self) -> StrategyScope:
        """Make this strategy current in a `with` block; modules, optimizers and Variables created inside are mirrored.

        May be entered again, inside itself too. Raises RuntimeError inside the scope of another strategy, and inside a
        replica.
        """
        return StrategyScope(self)

    def mirror(self, obj: Any) -> Any:
        """Treat `obj` as created in this strategy's scope, and return it.

        The replicas keep it from the first call that uses it on, and a reference travels in its place. The values of a
        module, settings and state of an optimizer, a scheduler or a scaler come back here; what replicas change in any
        other object stays with them. With one replica in this process there is nothing to do.

        Raises UsageError for what cannot be told from its equals, a number or a list, for a single tensor that
        requires gradients, and for a Variable that was made elsewhere.
        """
        self._place.check_open()
        return self._place.mirror(obj)

    def no_sync(self) -> Any:
        """Return a context, on a replica, in which backward() accumulates local gradients.

        The first backward() after it reduces all of them. Raises ContextError in the controller.
        """
        return self._place.no_sync()

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Call `fn(*args, **kwargs)` on every replica and return its results.

        Of a PerReplica in the arguments, at any depth of tuples, lists and dicts, each replica gets its part. In the
        controller the results come back as a nest of PerReplica, one a leaf (a list of strings is one where they are
        more on one replica than on another), and a Variable that `fn` has made as one MirroredVariable or
        SyncOnReadVariable; in a replica as they are. With one replica there is no PerReplica.
        `options` are tf.distribute's, and change nothing.

        Raises UsageError where `fn` is async or `args` no tuple or list, and where the replicas' results differ in
        structure, RuntimeError inside a replica and in another strategy's scope, and what `fn` raised on a replica,
        with its own type.
        """
        require_cross_replica(
            "Strategy.run", "use get_replica_context().merge_call(), or call the function itself", self
        )
        check_call("fn", fn, args, kwargs)
        return self._place.run(self, fn, tuple(args), kwargs or {})

    # ------------------------------------------------------------------ from many values one

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | tuple[int, ...] | None = None) -> Any:
        """Return `value`, a nest, reduced over the replicas.

        `reduce_op`: ReduceOp.SUM or MEAN, or their names. With `axis` each replica's tensor is reduced over that axis
        (or those) too, and the mean divides by the true number of elements, empty replicas included; None: the
        tensors, of equal shapes, are added element by element, and the mean divides by the replicas. Of a Variable
        each replica's component counts. NaN of a replica that has no examples of the batch, the mean of none, does not
        count.

        Raises UsageError for shapes that differ or an axis that is not there, RuntimeError inside a replica and in
        another strategy's scope.
        """
        require_cross_replica("Strategy.reduce", "use get_replica_context().all_reduce() instead", self)
        self._place.check_open()
        which = ReduceOp.of(reduce_op, "reduce_op")
        axes = None if axis is None else tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
        return _map(lambda leaf, where: self._place.reduce(which, leaf, axes, where), value)

    def gather(self, value: Any, axis: int) -> Any:
        """Return the replicas' tensors of `value`, a nest, joined along `axis`; sizes may differ along it alone.

        A tensor that is one for all replicas is returned as it is. Gradients do not pass: ReplicaContext.all_gather
        is for those. Raises UsageError where other sizes differ, RuntimeError inside a replica.
        """
        require_cross_replica("Strategy.gather method", "use get_replica_context().all_gather() instead", self)
        self._place.check_open()
        return _map(lambda leaf, where: self._place.gather(leaf, axis, where), value)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the values of this place's replicas: a tuple, one entry a replica; a plain value alone in it.

        Of a nest there is one a replica, of numbers that are equal on all too. Of a Variable its components, copies of
        them; in a merge_call those of all replicas. Raises UsageError for a PerReplica of another number of replicas.
        """
        return self._place.local_results(value)

    # ------------------------------------------------------------------ input

    def distribute_dataset(
        self,
        dataset: Any,
        options: InputOptions | None = None,
        *,
        batch_size: int | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
    ) -> Any:
        """Return an iterable of the global batches of `dataset`, each cut into shares.

        `dataset`: a DataLoader, whose batch size is the global one, or tensors or arrays (one, or a tuple or dict of
        them, equally long) with `batch_size`, examples of a global batch; `shuffle` and `drop_last` are for those, as
        a DataLoader has them. `options`: InputOptions. Replica i of n gets examples [i*c, (i+1)*c) of a batch of b,
        c = ceil(b / n), on its device; late replicas may get none and still take part. In the controller a batch is a
        nest of PerReplica, in a replica its own share. What is returned has the DataLoader's attributes
        (`len(it.dataset)`, `it.batch_size`, `it.sampler`); distributed again, it is returned.
        Source: tf.distribute's rule for the last batch. Raises UsageError for anything else.
        """
        self._place.check_open()
        return self._place.distribute_dataset(
            dataset, options=options, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last
        )

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> Any:
        """Return an iterable over the batches of `dataset_fn(InputContext)`, which batches per replica itself.

        In a step replica 0 gets the next batch, replica 1 the one after it, and so on; where they run out, batches
        of no examples.
        """
        self._place.check_open()
        return self._place.distribute_datasets_from_function(dataset_fn, options)

    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Return a PerReplica of `value_fn(ValueContext)` for each replica, in a replica its own value.

        Raises UsageError for what is no function, and in the controller where the values differ in structure.
        """
        if not callable(value_fn):
            raise UsageError(f"`value_fn` must be a function of a ValueContext, not {type(value_fn).__name__}")
        self._place.check_open()
        return self._place.values_from_function(value_fn)

    experimental_distribute_dataset = distribute_dataset
    experimental_distribute_datasets_from_function = distribute_datasets_from_function
    experimental_distribute_values_from_function = distribute_values_from_function
    experimental_local_results = local_results

    # ------------------------------------------------------------------ what is recorded

    def step(self, *, examples: int | None = None, **values: Any) -> None:
        """Tell, on a replica, that a step ends here, for loops in which no distributed dataset and no optimizer does.

        `examples`: this replica's of the step. `values`: losses and metrics to record, as `mirror_nb.log` does.
        Raises ContextError in the controller, UsageError for what is no number.
        """
        if examples is not None:
            check_count("examples", examples, "examples")
        if values:
            self._place.log(values)
        self._place.told(examples)

    def timeline(self) -> Timeline:
        """Return what the replicas have recorded so far: steps, their parts, collectives, losses.

        As arrays (`arrays()`), a pandas DataFrame (`frame()`) or a trace for Perfetto (`save("trace.json")`).
        Raises ContextError in a replica.
        """
        found: Timeline = self._place.timeline()
        return found

    def dashboard(self) -> Any:
        """Show a dashboard below the running cell: live while `run`, `fit` and the like work, a picture afterwards.

        Return it; `.figure()` is its panels as a matplotlib figure, `.text()` its numbers in sentences, in a script
        too. Once for each strategy: a second call shows the same once more. Raises ContextError in a replica.
        """
        return self._place.dashboard()

    def compare_parameters(self) -> Comparison:
        """Compare checksums of the parameters that replicas have synchronised, or hold in networks: are all equal?

        The answer is true if they are, and prints as a sentence; `differing` names those that are not, and on which
        replicas. The dashboard shows it too, as it does by itself after each pass over a distributed dataset and each
        epoch of `fit`. In a replica all of them have to call it.
        """
        return self._place.compare_parameters()

    # ------------------------------------------------------------------ life

    def close(self) -> None:
        """Give back the replicas; a strategy that was closed raises PoolClosed from then on.

        What it has made stays readable here: networks, Variables, optimizers, results by `local_results`. Does nothing
        in a fork of this process, and on replicas that belong to somebody else: in a cell, in `run`. A strategy that
        is dropped gives them back with the last of what it has made.
        """
        self._place.close()

    def __enter__(self) -> Self:
        self._place.check_open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _map(change: Callable[[Any, str], Any], value: Any) -> Any:
    """Apply `change` to every leaf, and to where it is; a PerReplica, a Variable and the like are leaves."""
    leaves, places, made = in_order(value, is_leaf=lambda leaf: isinstance(leaf, DistributedValues))
    if len(places) > 1:
        # Replicas whose nests differ hear of it with the first leaf: one alone would wait with what it has besides.
        places[0] = f"{places[0]} of {', '.join(places)}"
    return made([change(leaf, where) for leaf, where in zip(leaves, places, strict=True)])
