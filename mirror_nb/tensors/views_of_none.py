"""Views of a share without examples, `x.view(len(x), -1)`, for which torch does not see what -1 stands for.

Each dimension may be any beside one of no elements; meant is what it is for every other share. Knows no replicas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

try:
    from torch._C import _len_torch_function_stack as _count
    from torch.overrides import _pop_mode as _pop
    from torch.overrides import _push_mode as _push
except ImportError:
    # Another torch: it refuses such views, and the error tells of the share.
    _push = None  # type: ignore[assignment]

_VIEWS = (Tensor.view, Tensor.reshape, torch.reshape)


@final
class ViewsOfNone(TorchFunctionMode):
    """Takes part in torch's calls of one thread as long as `on`: 1 µs each."""

    def __init__(self) -> None:
        super().__init__()
        self._on = False

    def follow(self, on: bool) -> None:
        """Begin or end to take part; what it is already it stays."""
        if on != self._on and _push is not None:
            self._on = on
            modes = [_pop() for _ in range(_count())]
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
        if func in _VIEWS and not kwargs:
            sizes = args[1] if len(args) == 2 and isinstance(args[1], Sequence) else args[1:]
            if -1 in sizes and 0 in sizes and 0 in args[0].shape:
                return func(args[0], _filled(args[0].shape, sizes))
        return func(*args, **(kwargs or {}))


def _filled(shape: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes with what -1 would be if there were an example; as they are where it would be nothing whole."""
    elements, others = (math.prod(size for size in given if size > 0) for given in (shape, sizes))
    return tuple(sizes) if elements % others else tuple(elements // others if n == -1 else n for n in sizes)
