"""A share without examples in a loop of the users' own, where torch has no answer or one that spoils what it meets.

    x.view(len(x), -1)      beside no elements -1 may be anything: it is what it would be with an example
    loss.item() * len(x)    the mean of no examples, counted as often as there are examples, adds nothing to a total
    x.max()                 no number, as the mean of none, where torch has no answer; no rows have no maxima
    pack_padded_sequence    no sequences are packed as one step of none, which recurrent networks take
    F.instance_norm(x)      what torch refuses, and would give for each example, is none: fft, stft and others, too
    F.embedding_bag         words joined to one tensor, which nobody cuts, are in no bag: torch dies in backward()

Knows no replicas.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.functional import ctc_loss, embedding_bag
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

try:
    from torch.overrides import _get_current_function_mode_stack as _modes
    from torch.overrides import _pop_mode as _pop
    from torch.overrides import _push_mode as _push
except ImportError:
    # Another torch: it refuses such views, and the error tells of the share.
    _push = None  # type: ignore[assignment]

_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_ENGINE = "_engine_run_backward"
# Private: where torch has no such function, what a backward pass calls is torch's to refuse.
_VIEWS = (Tensor.view, Tensor.reshape, torch.reshape)
_PRODUCTS = (Tensor.mul, torch.mul)
_NAMES = (
    "max",
    "min",
    "amax",
    "amin",
    "aminmax",
    "argmax",
    "argmin",
    "median",
    "nanmedian",
    "quantile",
    "nanquantile",
)
_REDUCTIONS = tuple(getattr(owner, name) for owner in (Tensor, torch) for name in _NAMES)
# Those of no numbers are no number, which torch does not say.
_WEIGHTS = "per_sample_weights"
# Of words in bags.
_WITHOUT_BACKWARD = (torch.pixel_shuffle, torch.pixel_unshuffle, torch.pdist)
# Torch takes no examples there, and fails in the backward pass.
_PACK = getattr(torch._C._VariableFunctions, "_pack_padded_sequence", None)


class MeanOfNone(float):
    """What `item` gives of a mean of no numbers: no number either, and 0 times it is 0. It travels as any NaN."""

    def __mul__(self, other: Any) -> Any:
        return 0.0 if _is_zero(other) else float(self) * other

    __rmul__ = __mul__

    def __reduce__(self) -> tuple[Any, ...]:
        return float, ("nan",)


@final
class NoExamples(TorchFunctionMode):
    """Takes part in torch's calls of one thread from `follow(True)` to `follow(False)`: 1 µs each."""

    def follow(self, on: bool) -> None:
        """Begin or end to take part; what it is already it stays."""
        # Nobody else knows: the end of a backward pass takes back what was begun or ended in it.
        if _push is not None and on != any(mode is self for mode in _modes()):
            modes = [_pop() for _ in _modes()]
            here = [mode for mode in reversed(modes) if mode is not self]
            # Below those of the user's, which end by taking away whatever is on top. That of torch.set_default_device
            # has to be the lowest.
            default = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
            lowest = int(default is not None and here[:1] == [default])
            for mode in [*here[:lowest], self, *here[lowest:]] if on else here:
                _push(mode)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        __tracebackhide__ = True
        if func in _BACKWARD and hasattr(torch.autograd, _ENGINE):
            with self._in_the_engine():
                return func(*args, **(kwargs or {}))
        if func in _VIEWS and not kwargs:
            sizes = args[1] if len(args) == 2 and isinstance(args[1], Sequence) else args[1:]
            if -1 in sizes and 0 in sizes and 0 in args[0].shape:
                return func(args[0], _filled(args[0].shape, sizes))
        if func is _PACK and not len(args[1]):
            # One after another, of steps with so many sequences: there are none.
            return args[0].flatten(0, 1), torch.zeros(1, dtype=torch.int64)
        if func is ctc_loss and not args[0].numel():
            losses, how = args[0].sum((0, -1)), (kwargs or {})["reduction"]
            return losses if how == "none" else getattr(losses, how)()
        if func is embedding_bag and isinstance(kwargs, dict) and _is_empty(kwargs.get("offsets")):
            args, kwargs = (args[0][:0], *args[1:]), {**kwargs, _WEIGHTS: _none_of(kwargs.get(_WEIGHTS))}
        if func in _REDUCTIONS and args and not args[0].numel():
            found = _of_none(func, args, kwargs or {})
            if found is not None:
                return found
        try:
            result = _none_of_each(func, args, kwargs or {}) if func in _WITHOUT_BACKWARD else None
            if result is None:
                result = func(*args, **(kwargs or {}))
        except (RuntimeError, IndexError, ValueError):
            result = _none_of_each(func, args, kwargs or {})
            if result is None:
                raise
        if func is Tensor.item and isinstance(result, float) and math.isnan(result):
            return MeanOfNone(result)
        if func in _PRODUCTS and args and (_is_zero(args[0]) or _is_zero(args[-1])) and result.is_floating_point():
            return result.masked_fill(result.isnan(), 0)
        return result

    @contextlib.contextmanager
    def _in_the_engine(self) -> Iterator[None]:
        """Take part in what a backward pass calls, too: torch does without modes where one has been asked.

        In layers of which only the inputs were kept, say, that are computed once more.
        """
        run = getattr(torch.autograd, _ENGINE)

        def within(*args: Any, **kwargs: Any) -> Any:
            with self:
                return run(*args, **kwargs)

        # An interrupt may come anywhere.
        try:
            setattr(torch.autograd, _ENGINE, within)
            yield
        finally:
            setattr(torch.autograd, _ENGINE, run)


def _is_empty(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.numel()


def _none_of(weights: Tensor | None) -> Tensor | None:
    return None if weights is None else weights[:0]


def _of_none(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what a reduction gives of no numbers, NaN; None where it gives integers, or there are other tensors."""
    x, *others = args
    if "out" in kwargs or any(isinstance(other, Tensor) for other in (*others, *kwargs.values())):
        return None
    # A size that is another with two examples than with one is the examples'. Their shapes are enough to tell.
    examples = (x.new_empty([size or n for size in x.shape], device="meta") for n in (1, 2))
    one, two = (func(example, *others, **kwargs) for example in examples)
    found = [_nothing(x, *pair) for pair in ([(one, two)] if isinstance(one, Tensor) else zip(one, two, strict=True))]
    if found[0].numel() and not found[0].is_floating_point():
        return None
    return found[0] if isinstance(one, Tensor) else type(one)(found)


def _none_of_each(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what a function that gives tensors with so many rows as there are examples gives of none; None: another.

    Or one that asks for values: shapes are all that is known of examples that are not there.
    """
    leaves, form = tree_flatten((args, kwargs))
    empty = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.numel()]
    if not empty:
        return None
    found = []
    for n in (1, 2):
        # Not each tensor can be a shape alone: not a nested one.
        with contextlib.suppress(Exception):
            filled, named = tree_unflatten([_with_examples(leaf, n) for leaf in leaves], form)
            found.append(tree_flatten(func(*filled, **named)))
    if len(found) < 2:
        return None
    (one, form), (two, _) = found
    pairs = list(zip(one, two, strict=True))
    # An attention that is not asked for its weights gives None beside its tensor.
    if not all(x is None or (isinstance(x, Tensor) and _has_rows_of_each(x, y)) for x, y in pairs):
        return None
    return tree_unflatten([None if x is None else _none(empty, x, y) for x, y in pairs], form)


def _has_rows_of_each(one: Tensor, two: Tensor) -> bool:
    """Tell whether all of the rows are examples', none another's."""
    both = list(zip(one.shape, two.shape, strict=True))
    return one.shape != two.shape and all(size == other or 2 * size <= other for size, other in both)


def _none(empty: Sequence[Tensor], one: Tensor, two: Tensor) -> Tensor:
    none = empty[0].new_zeros(_rows_of_none(one, two), dtype=one.dtype)
    if none.is_floating_point() or none.is_complex():
        # Made of them: what has made these takes part in the backward pass.
        for x in empty:
            none = none + (x.sum().real if x.is_complex() else x.sum())
    return none


def _with_examples(leaf: Any, n: int) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.new_empty([size or n for size in leaf.shape], device="meta") if not leaf.numel() else leaf.to("meta")


def _rows_of_none(one: Tensor, two: Tensor) -> list[int]:
    return [size if size == other else 0 for size, other in zip(one.shape, two.shape, strict=True)]


def _nothing(x: Tensor, one: Tensor, two: Tensor) -> Tensor:
    shape = _rows_of_none(one, two)
    if one.is_floating_point():
        # Made of x: what has made that takes part in the backward pass.
        return x.new_full(shape, math.nan) + x.sum()
    return x.new_zeros(shape, dtype=one.dtype)


def _is_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == 0


def _filled(shape: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return the sizes with what -1 would be if there were an example; as they are where it would be nothing whole."""
    elements, others = _elements(shape), _elements(sizes)
    return [elements // others if size == -1 and elements % others == 0 else size for size in sizes]


def _elements(sizes: Sequence[int]) -> int:
    # In such a loop `torch.compile` can follow it.
    product = 1
    for size in sizes:
        if size > 0:
            product *= size
    return product
