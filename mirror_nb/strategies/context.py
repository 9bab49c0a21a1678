"""Which strategy is current, and whether code runs once for all replicas or on one of them.

tf.distribute's functions of the same names. Knows strategies by their interface only.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import reprlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from mirror_nb.collectives.options import CommunicationOptions
from mirror_nb.errors import ContextError, UsageError
from mirror_nb.values import ReduceOp
from mirror_nb.variables import provide_replica, provide_scope

if TYPE_CHECKING:
    from mirror_nb.strategies.base import Strategy
    from mirror_nb.strategies.place import Place


@final
class ReplicaContext:
    """What one replica knows of itself inside `strategy.run`, and how it talks to the others.

    The others have to make the same calls in the same order.
    """

    def __init__(self, strategy: Strategy, replica_id: int) -> None:
        self._strategy = strategy
        self._replica_id = replica_id

    @property
    def strategy(self) -> Strategy:
        """The strategy that runs this replica."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """This replica's id, from 0."""
        return self._replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that gradients are aggregated over."""
        return self._strategy.num_replicas_in_sync

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None) -> Any:
        """Return `value`, a nest of tensors, reduced over all replicas; differentiable.

        `reduce_op`: ReduceOp.SUM or MEAN, or their names. Every replica gives the same structure, shapes and dtypes.
        The gradient of a sum over replicas is the sum of the gradients (of a mean: their mean); in an uneven batch
        each counts by its replica's examples, so that parameters get one device's. NaN of a replica that has no
        examples, the mean of none, does not count. `options` are tf.distribute's CommunicationOptions; those of the
        strategy hold for all of its calls.

        Raises UsageError where the replicas' structures, shapes or dtypes differ, on every replica.
        """
        check_options(options)
        return self._strategy._place.all_reduce(ReduceOp.of(reduce_op, "reduce_op"), value)

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Return the replicas' tensors joined along `axis`, a nest at a time; differentiable.

        Sizes may differ along `axis` alone. `options`: see `all_reduce`. Raises UsageError where others differ, on
        every replica.
        """
        check_options(options)
        return self._strategy._place.all_gather(value, axis)

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `merge_fn(strategy, *args, **kwargs)` in cross-replica context, PerReplica values as arguments.

        Every replica calls it and gets its part of the result; of a value that it assigns to a Variable and that
        differs between them replica 0's is taken. Raises RuntimeError where the replicas make different numbers of
        calls, UsageError where they give different functions, or what is none, and where `args` is no tuple or list.
        """
        check_call("merge_fn", merge_fn, args, kwargs)
        return self._strategy._place.merge_call(self._strategy, merge_fn, tuple(args), kwargs or {})

    def __repr__(self) -> str:
        # A strategy that a replica gave back does not know it here.
        many = getattr(self._strategy, "num_replicas_in_sync", None)
        return f"<ReplicaContext: replica {self._replica_id}{'' if many is None else f' of {many}'}>"


@dataclass(slots=True)
class _Frame:
    strategy: Strategy
    replica: ReplicaContext | None
    # None: cross-replica context.
    cross: bool
    # A %%mirrored cell is both: every replica runs it, and it may call what belongs to all.
    updates: bool = False
    # In `extended.update`: cross-replica context, but Variables are the components of the replica that it is for.
    making: AbstractContextManager[Any] | None = None
    # In which what is created is mirrored: left with it.

    @property
    def is_scope(self) -> bool:
        """Whether somebody has entered it, and does not just stand there: in a cell, in a script under torchrun."""
        return not self.cross or self.replica is None


class _Stack:
    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        self.chosen: Strategy | None = None
        self.chosen_scope: AbstractContextManager[Any] | None = None
        # In which what is created is mirrored, as in the chosen strategy's `scope()`.
        self.ground: _Frame | None = None
        # Of a script that a launcher started once per device: below every scope.

    def top(self) -> _Frame | None:
        if self.frames:
            return self.frames[-1]
        if self.chosen is not None:
            return _Frame(self.chosen, None, True)
        return self.ground


_main = _Stack()


class _OfThread(threading.local):
    def __init__(self) -> None:
        thread = threading.current_thread()
        self.stack = _main if thread is threading.main_thread() else _Stack()
        # No code in Python started it, but torch: hooks, `backward` functions and checkpoints of what is on a GPU run
        # in such a thread, while the main one waits in `backward()`.
        self.is_of_torch = isinstance(thread, threading._DummyThread)


_here = _OfThread()


def _top() -> _Frame | None:
    top = _here.stack.top()
    return _main.top() if top is None and _here.is_of_torch else top


@final
class entered:  # noqa: N801
    """Make `strategy` current in a `with` block; `replica` is its context there, if the code is one replica's.

    Not a generator, as most such blocks are: those take five times as long, and each small call enters one.
    """

    __slots__ = ("_depth", "_frame")

    def __init__(
        self, strategy: Strategy, replica: ReplicaContext | None, *, cross: bool, updates: bool = False
    ) -> None:
        self._frame = _Frame(strategy, replica, cross, updates)

    def __enter__(self) -> Strategy:
        top, strategy = _top(), self._frame.strategy
        if top is not None and top.is_scope and top.strategy._place is not strategy._place:
            raise _mixed(top.strategy, strategy)
        self._depth = len(_here.stack.frames)
        _here.stack.frames.append(self._frame)
        return strategy

    def __exit__(self, *exception: object) -> None:
        # With what was entered inside and never left, `strategy.scope().__enter__()` alone: the next cell or call of
        # this process would find it instead of its own.
        frames, left = _here.stack.frames, [self._frame]
        # It is not there where it went with one that it had been entered in, or in another thread.
        if len(frames) > self._depth and frames[self._depth] is self._frame:
            left = frames[self._depth :]
            del frames[self._depth :]
        if any(frame.making for frame in left):
            with ExitStack() as leaving:
                for frame in left:
                    if frame.making is not None:
                        leaving.push(frame.making)
                        frame.making = None

    def making(self, making: AbstractContextManager[Any]) -> None:
        """Enter this one too, and leave it with the block."""
        making.__enter__()
        self._frame.making = making


@final
class StrategyScope(ContextDecorator):
    """What `strategy.scope()` returns. Whoever calls its `__enter__` alone, as notebooks do, stays in it.

    Raises RuntimeError inside the scope of another strategy, and in a function given to `strategy.run`.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._entered: list[entered] = []

    def __enter__(self) -> Strategy:
        if self._strategy in _defaults:
            # As in tf.distribute: code in it stands where code outside every scope stands.
            if has_strategy():
                raise ContextError(
                    f"Must not nest Strategy scopes: {get_strategy()!r} is current; leave its scope, or {_INSIDE}"
                )
            return self._strategy
        require_cross_replica("Strategy.scope", "enter it around strategy.run, not in the function given to it")
        current = entered(self._strategy, None, cross=True)
        current.__enter__()
        try:
            current.making(self._strategy._place.scope())
        except BaseException:
            current.__exit__()
            raise
        self._entered.append(current)
        return self._strategy

    def __exit__(self, *exception: object) -> None:
        if self._strategy in _defaults:
            return
        if not self._entered:
            raise ContextError(
                "this scope was not entered, or was left already; keep the one that is: scope = strategy.scope(); "
                "scope.__enter__(); and later scope.__exit__(None, None, None)"
            )
        self._entered.pop().__exit__()


def stand_on(strategy: Strategy, replica: ReplicaContext) -> None:
    """Say that this whole process is one replica: code outside every scope stands in both contexts."""
    _here.stack.ground = _Frame(strategy, replica, True)


def stand_nowhere(place: Place) -> None:
    """Take that back for strategies of this place."""
    if _here.stack.ground is not None and _here.stack.ground.strategy._place is place:
        _here.stack.ground = None


def get_strategy() -> Strategy:
    """Return the current strategy; outside every scope the default one, with one replica: this process."""
    top = _top()
    return top.strategy if top is not None else _default()


def has_strategy() -> bool:
    """Whether a strategy other than the default one is current."""
    top = _top()
    return top is not None and top.strategy not in _defaults


def in_cross_replica_context() -> bool:
    """Whether code runs once for all replicas: in a scope, or in a `merge_call`."""
    top = _top()
    return top is not None and top.replica is None


def get_replica_context() -> ReplicaContext | None:
    """Return the context of the replica that this code runs on; None in cross-replica context."""
    top = _top()
    return top.replica if top is not None else ReplicaContext(_default(), 0)


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Make a strategy current until further notice, for notebooks: all that is created is mirrored, as in its scope.

    None takes it back.
    Raises RuntimeError inside a scope, UsageError for what is no strategy.
    """
    if _here.stack.frames:
        raise ContextError("Must not be called inside a `Strategy` scope.")
    if strategy is not None and not hasattr(strategy, "_place"):
        given = reprlib.repr(strategy)
        raise UsageError(f"`strategy` must be a strategy, as MirroredStrategy(...) is, or None, not {given}")
    scope, _here.stack.chosen_scope, _here.stack.chosen = _here.stack.chosen_scope, None, None
    if scope is not None:
        scope.__exit__(None, None, None)
    if strategy is not None:
        scope = strategy._place.scope()
        scope.__enter__()
        _here.stack.chosen_scope, _here.stack.chosen = scope, strategy


set_strategy = experimental_set_strategy


def require_cross_replica(what: str, instead: str, strategy: Strategy | None = None) -> None:
    """Raise RuntimeError inside `strategy.run`, naming what serves there, and in a scope of another strategy."""
    top = _top()
    if top is None:
        return
    if top.replica is not None and not top.cross:
        raise ContextError(f"{what} requires being in cross-replica context; {instead}")
    if strategy is not None and top.is_scope and top.strategy._place is not strategy._place:
        raise _mixed(top.strategy, strategy)


_INSIDE = "make inside it what was made outside of every scope: a Model, say"


def _mixed(current: Strategy, other: Strategy) -> ContextError:
    if other in _defaults:
        instead = f"leave the scope, or {_INSIDE}"
    else:
        instead = "leave its scope first" if _here.stack.frames else "take it back first: set_strategy(None)"
    return ContextError(f"Mixing different mirror_nb Strategy objects: {current!r} is not {other!r}; {instead}")


def check_call(argument: str, fn: Any, args: Any, kwargs: Any) -> None:
    """Raise UsageError where `fn`, given as this argument, cannot be called with these."""
    if not callable(fn):
        raise UsageError(f"`{argument}` must be a function, not {type(fn).__name__}")
    if inspect.iscoroutinefunction(fn):
        raise UsageError(
            f"`{argument}` is an async function, which only makes a coroutine; give a plain one, which may await by "
            "asyncio.run(...)"
        )
    if not isinstance(args, (tuple, list)):
        raise UsageError(f"positional args must be a list or tuple, got {type(args)}; write args=(x,)")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise UsageError(f"keyword args must be a dict, got {type(kwargs)}")


def check_options(options: Any) -> None:
    """Raise UsageError for what is given as the options of a reduction and is none."""
    if options is not None and not isinstance(options, CommunicationOptions):
        raise UsageError(f"`options` must be CommunicationOptions(...) or None, not {reprlib.repr(options)}")


def updates_component() -> bool:
    """Whether code is a function's that `extended.update` calls for one replica's component."""
    top = _top()
    return top is not None and top.updates


def update_in(strategy: Strategy, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` in cross-replica context, where Variables are the components of the process that calls it."""
    return functools.partial(_updating, strategy, fn)


def _updating(strategy: Strategy, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with entered(strategy, None, cross=True, updates=True):
        return fn(*args, **kwargs)


def on_one_replica() -> bool:
    """Whether code is one replica's alone, in `strategy.run`: not a scope's, a `merge_call`'s or a cell's."""
    top = _top()
    return top is not None and top.replica is not None and not top.cross


def _maker_of_scope() -> Callable[..., Any] | None:
    """Return what makes a Variable where the caller stands; None outside every scope."""
    # To stand on a replica is not to be in a scope: a script under torchrun enters one, as elsewhere.
    top = _top()
    in_scope = has_strategy() and top is not _here.stack.ground and top is not _main.ground
    return get_strategy()._place.make_variable if in_scope else None


provide_scope(_maker_of_scope)
provide_replica(on_one_replica, lambda: get_strategy().num_replicas_in_sync)

_defaults: list[Strategy] = []


def _default() -> Strategy:
    if not _defaults:
        # By name: it is built upon this module.
        one_device = importlib.import_module("mirror_nb.strategies.one_device")
        _defaults.append(one_device.DefaultStrategy())
    return _defaults[0]


def log(**values: Any) -> None:
    """Record losses and metrics of this replica's examples at the present step: `mirror_nb.log(loss=loss)`.

    Numbers, or tensors of one element (on a GPU they are not waited for). They are drawn on the dashboard, mean and
    spread over the replicas; where there is none, outside of every strategy say, nothing is done. Raises ContextError
    in the scope of a controller's strategy, UsageError for what is no number.
    """
    get_strategy()._place.log(values)
