"""BatchNorm for shares: of any size, and with the global batch's statistics where that is asked for.

Knows the batch norms of one network. Knows no process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch.nn.functional as F
from torch import Tensor, nn

from mirror_nb.tensors.batch_norm import (
    LAZY,
    OF_ONE_PROCESS,
    AllReduce,
    BatchNorm,
    count_batch,
    normalized,
    without_variance,
)


@final
class BatchNorms:
    """The batch norms of a network while `exact_batch_norm` holds them."""

    def __init__(self, network: nn.Module, synchronize: bool, all_reduce: AllReduce | None) -> None:
        self._all_reduce = all_reduce
        self._absent = False
        # A forward of its own, the class's or the module's, is the user's affair.
        kinds = (*OF_ONE_PROCESS, *LAZY, nn.SyncBatchNorm)
        torchs = [kind.forward for kind in kinds]
        modules: list[Any] = [m for m in network.modules() if isinstance(m, kinds) and "forward" not in vars(m)]
        self._modules: list[BatchNorm] = [m for m in modules if type(m).forward in torchs]
        self._synchronized = {
            module for module in self._modules if synchronize or isinstance(module, nn.SyncBatchNorm)
        }

    @property
    def synchronizes(self) -> bool:
        """Whether a forward pass in training needs all replicas: one without examples has to be `absent` then."""
        return self._all_reduce is not None and bool(self._synchronized)

    @contextmanager
    def absent(self) -> Iterator[None]:
        """While inside, what is normalised counts as no examples; statistics and gradients are the others'.

        For a replica whose share is empty: it runs its forward pass on any one example, takes part in every
        collective of it, and goes backward from 0 times the outputs.
        """
        self._absent = True
        try:
            yield
        finally:
            self._absent = False

    def _forward(self, module: BatchNorm, x: Tensor) -> Tensor:
        if not module.training:
            forward: Any = type(module).forward
            return forward(module, x)
        module._check_input_dim(x)
        if self._all_reduce is not None and module in self._synchronized:
            return normalized(module, x, self._all_reduce, absent=self._absent)
        if self._absent or x.numel() == x.shape[1] or x.numel() == 0:
            return without_variance(module, x, absent=self._absent)
        factor = count_batch(module)
        running = (module.running_mean, module.running_var) if module.track_running_stats else (None, None)
        return F.batch_norm(x, *running, module.weight, module.bias, True, factor, module.eps)


@contextmanager
def exact_batch_norm(
    network: nn.Module, *, synchronize: bool, all_reduce: AllReduce | None = None
) -> Iterator[BatchNorms]:
    """While inside, every BatchNorm of `network` takes shares of any size, in training.

    A single value for a channel, which torch refuses, is normalised to 0 and leaves the running variance as it is.
    With `synchronize`, and for `nn.SyncBatchNorm` always, the statistics, their gradients and the running ones are
    the global batch's, on any device: those of one device's BatchNorm. `all_reduce` adds a flat float64 tensor up
    over the replicas; without it there is one replica. A synchronised forward and backward pass takes one call
    each for every BatchNorm: all replicas have to make them, an empty share too (`BatchNorms.absent`).

    Evaluation, state dict and classes stay as they are. Gradients cannot be differentiated again.
    """
    held = BatchNorms(network, synchronize, all_reduce)
    for module in held._modules:
        # In the module's own __dict__, before its class: nothing that is saved or copied by class changes.
        module.__dict__["forward"] = _bound(held, module)
    try:
        yield held
    finally:
        for module in held._modules:
            module.__dict__.pop("forward", None)


def _bound(held: BatchNorms, module: BatchNorm) -> Callable[[Tensor], Tensor]:
    # As torch calls it: a network may name it.
    return lambda input: held._forward(module, input)
