"""nn.SyncBatchNorm on CPU replicas, for which torch has none.

Knows torch's module and how much a replica's loss counts. On a GPU it is torch's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import final

import torch.distributed as dist
from torch import Tensor, nn

from mirror_nb.tensors.batch_norm import normalized


@final
class SyncBatchNormOnCpu:
    """In the place of `nn.SyncBatchNorm.forward` until it is removed.

    `weight`: how many times an equal part the loss of this replica counts.
    """

    def __init__(self, weight: Callable[[], float]) -> None:
        self._weight = weight
        self._original = original = nn.SyncBatchNorm.forward

        @functools.wraps(original)
        def forward(module: nn.SyncBatchNorm, x: Tensor) -> Tensor:
            synchronizes = module.training and x.device.type == "cpu" and dist.is_initialized()
            return self._forward(module, x) if synchronizes else original(module, x)

        self._replacement = forward
        nn.SyncBatchNorm.forward = forward  # type: ignore[method-assign, assignment]

    def remove(self) -> None:
        if nn.SyncBatchNorm.forward is self._replacement:
            nn.SyncBatchNorm.forward = self._original  # type: ignore[method-assign]

    def _forward(self, module: nn.SyncBatchNorm, x: Tensor) -> Tensor:
        module._check_input_dim(x)
        group = module.process_group or dist.group.WORLD

        def add_up(flat: Tensor) -> Tensor:
            dist.all_reduce(flat, group=group)
            return flat

        return normalized(module, x, add_up, weight=self._weight)
