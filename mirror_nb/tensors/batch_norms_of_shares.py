"""Batch norms in loops of the users' own, where torch refuses what one device would have taken.

    nn.BatchNorm1d, 2d, 3d   a share of one example of a larger batch: one value a channel
    nn.SyncBatchNorm         on the CPU, for which torch has none

Knows torch's modules, and asks who weighs the gradients for shares. On a GPU `nn.SyncBatchNorm` is torch's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, final

import torch.distributed as dist
import torch.nn.functional as F  # noqa: F401
from torch import Tensor, nn

from mirror_nb.tensors.batch_norm import LAZY, OF_ONE_PROCESS, normalized, without_variance

# F: torch.jit.script compiles the text of torch's `forward` for ours, by the names of this module.

_Forward = Callable[[Any, Tensor], Tensor]


class Weights(Protocol):
    """How much this replica's examples count."""

    shares: tuple[int, int] | None
    # Of the batch in use: this replica's examples, and all replicas'.

    def times_an_equal_part(self) -> float:
        """Return how many times an equal part this replica's loss counts."""


@final
class BatchNormsOfShares:
    """In the place of torch's `forward` until it is removed."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._removed = False
        self._replaced: list[tuple[Any, _Forward, _Forward | None]] = []
        # Each with the one of its own that it had; None: that of its base class.
        for kind in (*OF_ONE_PROCESS, *LAZY):
            self._replace(kind, self._by_itself)
        self._replace(nn.SyncBatchNorm, self._by_all)

    def remove(self) -> None:
        self._removed = True
        while self._replaced:
            kind, ours, own = self._replaced.pop()
            # Who replaced ours meanwhile keeps theirs, and calls ours, which calls torch's by then.
            if vars(kind).get("forward") is not ours:
                continue
            if own is None:
                del kind.forward
            else:
                kind.forward = own

    def _replace(self, kind: Any, by: Callable[[_Forward, Any, Tensor], Tensor]) -> None:
        original: _Forward = kind.forward

        @functools.wraps(original)
        def forward(module: Any, input: Tensor) -> Tensor:
            # As torch calls it: users may name it.
            ours = module.training and not self._removed
            return by(original, module, input) if ours else original(module, input)

        self._replaced.append((kind, forward, vars(kind).get("forward")))
        kind.forward = forward

    def _by_itself(self, original: _Forward, module: Any, x: Tensor) -> Tensor:
        # The shape first: `torch.compile` looks at that anyway.
        if x.ndim > 1 and x.numel() == x.shape[1] and self._is_part_of_more():
            module._check_input_dim(x)
            return without_variance(module, x)
        return original(module, x)

    def _is_part_of_more(self) -> bool:
        shares = self._weights.shares
        return shares is not None and shares[0] < shares[1]

    def _by_all(self, original: _Forward, module: Any, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or not dist.is_initialized():
            return original(module, x)
        module._check_input_dim(x)
        group = module.process_group or dist.group.WORLD

        def add_up(flat: Tensor) -> Tensor:
            dist.all_reduce(flat, group=group)
            return flat

        return normalized(module, x, add_up, weight=self._weights.times_an_equal_part)
