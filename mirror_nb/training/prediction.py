"""Predictions of one replica: the network's outputs for its shares. Who joins them knows the order of replicas."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mirror_nb.errors import UsageError
from mirror_nb.tensors.layouts import joined_rows, sizes
from mirror_nb.training.loop import Advanced, Job, Totals, told
from mirror_nb.training.shares import Share


@final
class Prediction(Job):
    """The network's outputs."""

    def _begin_sums(self) -> None:
        self._leaves: list[list[Tensor]] = []
        self._structure: Any = None
        self._counts: list[int] = []

    def _conditions(self) -> AbstractContextManager[Any]:
        return self._evaluating()

    def _take(self, share: Share, last: bool) -> None:
        if share.examples:
            leaves, self._structure = pytree.tree_flatten(self._outputs(share))
            for leaf in leaves:
                if not isinstance(leaf, Tensor) or sizes(leaf)[:1] != (share.examples,):
                    raise UsageError(
                        f"predict got {told(leaf)} from the network for {share.examples} examples; every output has "
                        "to have one row an example in dimension 0"
                    )
            self._leaves.append([_whole_precision(leaf).cpu() for leaf in leaves])
        self._counts.append(share.examples)
        self.step += 1

    def _totals(self) -> Totals:
        return Totals(examples=self.examples)

    def _advanced(self) -> Advanced:
        outputs = None
        if self._ended and self._leaves:
            joined = [joined_rows(column) for column in zip(*self._leaves, strict=True)]
            outputs = pytree.tree_unflatten(joined, self._structure)
        counts = tuple(self._counts) if self._ended else ()
        return Advanced(self.step, self._ended, self.examples, self._totals(), False, outputs, counts)


def _whole_precision(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
