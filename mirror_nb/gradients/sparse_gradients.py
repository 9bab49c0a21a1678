"""Gradients that name the rows they are of: the replicas' are put together, and only those rows travel.

Knows the default process group. Knows no hooks, rounds and buckets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mirror_nb.collectives.base import word_device
from mirror_nb.gradients.matching import is_sparse

_NONE, _DENSE = 0, -1
# In the place of the number of sparse dimensions.


def averaged(gradients: Sequence[Tensor | None], like: Sequence[Tensor], num_replicas: int) -> list[Tensor]:
    """Return the mean over the replicas of each gradient, where None is zero; every replica calls it alike.

    Sparse and coalesced, its sums in the order of the replicas; dense where one replica's is: of a table that is also
    used as a matrix. `like`: tensors of their shapes, dtypes and devices. Source: DistributedDataParallel and
    tf.IndexedSlices gather rows in the same way.
    """
    own = [gradient.coalesce() if gradient is not None and is_sparse(gradient) else gradient for gradient in gradients]
    mine = torch.tensor([_form(gradient) for gradient in own], device=word_device(like[0].device))
    columns = torch.stack(_gathered(mine, num_replicas), 1).tolist()
    return [_mean(*each) for each in zip(own, like, columns, strict=True)]


def _form(gradient: Tensor | None) -> tuple[int, int]:
    """Tell how many dimensions its indices name, and how many there are."""
    if gradient is None:
        return _NONE, 0
    return (gradient.sparse_dim(), gradient._nnz()) if is_sparse(gradient) else (_DENSE, 0)


def _mean(gradient: Tensor | None, like: Tensor, forms: list[list[int]]) -> Tensor:
    dimensions = {named for named, _ in forms} - {_NONE}
    if len(dimensions) > 1 or _DENSE in dimensions:
        return _dense_mean(gradient, like, len(forms))
    return _sparse_mean(gradient, like, dimensions.pop(), [count for _, count in forms])


def _dense_mean(gradient: Tensor | None, like: Tensor, num_replicas: int) -> Tensor:
    own = torch.zeros_like(like) if gradient is None else gradient.to_dense() if is_sparse(gradient) else gradient
    mean = own / num_replicas
    dist.all_reduce(mean)
    return mean


def _sparse_mean(gradient: Tensor | None, like: Tensor, named: int, counts: list[int]) -> Tensor:
    # Of equal length, since not every backend gathers others.
    indices = torch.zeros((max(counts), named), dtype=torch.int64, device=like.device)
    values = torch.zeros((max(counts), *like.shape[named:]), dtype=like.dtype, device=like.device)
    if gradient is not None:
        indices[: gradient._nnz()] = gradient.indices().T
        values[: gradient._nnz()] = gradient.values()
    rows, means = torch.cat(_present(indices, counts)), torch.cat(_present(values, counts)) / len(counts)
    # Or torch warns that it does not check them.
    return torch.sparse_coo_tensor(rows.T, means, like.shape, check_invariants=False).coalesce()


def _present(rows: Tensor, counts: list[int]) -> list[Tensor]:
    return [found[:count] for found, count in zip(_gathered(rows, len(counts)), counts, strict=True)]


def _gathered(tensor: Tensor, num_replicas: int) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(num_replicas)]
    dist.all_gather(found, tensor)
    return found
