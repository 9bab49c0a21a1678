"""Which of the batches that were handed out is in use, where several of different weights are held at once.

    batches one by one       ─▶ the one handed out last
    one looked ahead, list(batches), zip(batches, others)
                             ─▶ the one whose memory a network, or a function given to `strategy.run`, is called with

Knows tensors and the sizes of shares; knows no gradients and no data sets.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree as pytree

Shares = tuple[int, int]
# This replica's examples and all replicas'.


@final
@dataclass(frozen=True, slots=True)
class _Batch:
    leaves: tuple[weakref.ref[Tensor], ...]
    shares: Shares

    def lives(self) -> bool:
        return any(leaf() is not None for leaf in self.leaves)

    def has(self, tensor: Tensor) -> bool:
        """Whether the tensor is one of its own, or looks at the memory of one."""
        return any((own := leaf()) is not None and _within(tensor, own) for leaf in self.leaves)


@final
class Weighing:
    """The batches of one replica that somebody still holds; `use(shares)` is called with the shares of one in use."""

    def __init__(self, num_replicas: int, use: Callable[[Shares], None]) -> None:
        self._num_replicas = num_replicas
        self._use = use
        self._batches: list[_Batch] = []
        self._hook: Any = None

    def handed_out(self, batch: Any, shares: Shares) -> None:
        """A batch is handed out, and in use as far as is known."""
        leaves = tuple(weakref.ref(leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))
        self._batches = [*(other for other in self._batches if other.lives()), _Batch(leaves, shares)]
        self._watch(self._weight(shares))
        self._use(shares)

    def exhausted(self) -> None:
        """There are no more: from now on all replicas weigh in alike, but for batches that somebody still uses."""
        self._batches = [batch for batch in self._batches if batch.lives()]
        self._watch(1.0)

    def called_with(self, values: Any) -> Shares | None:
        """Return the shares of the batch that is among these arguments; None: it cannot be told, or need not be."""
        return None if self._hook is None else self._found(pytree.tree_leaves(values))

    def _watch(self, latest: float) -> None:
        """Look at what networks are called with, as long as there is a batch of another weight than the latest."""
        apart = any(self._weight(batch.shares) != latest for batch in self._batches)
        if apart and self._hook is None:
            self._hook = register_module_forward_pre_hook(self._called)
        elif not apart and self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _called(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        shares = self._found(args)
        if shares is not None:
            self._use(shares)

    def _found(self, values: Iterable[Any]) -> Shares | None:
        for value in values:
            if isinstance(value, Tensor):
                for batch in self._batches:
                    if batch.has(value):
                        return batch.shares
        return None

    def _weight(self, shares: Shares) -> float:
        return self._num_replicas * shares[0] / shares[1]


def _within(tensor: Tensor, own: Tensor) -> bool:
    if tensor is own:
        return True
    if tensor.layout is not torch.strided or own.layout is not torch.strided:
        return False
    if not own.numel():
        # A share of no examples has no memory, and no weight, whichever batch it is of.
        return not tensor.numel()
    begins = own.data_ptr()
    return begins <= tensor.data_ptr() < begins + own.nbytes and bool(tensor.numel())
