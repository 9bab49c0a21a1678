"""A feed of arrays: rows of tensors that lie where they arrived, copied by the share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor

from mirror_nb.data.batches import leaves, map_leaves, share_of
from mirror_nb.data.sampling import Agree, agree_on
from mirror_nb.training.offer import Offer
from mirror_nb.training.shares import Feed, Share, check_begun, check_state, permutation

RESIDENT_PART = 8
# Arrays that take less than one part in so many of a GPU's free memory are kept on it: their batches are cut there.


@final
class ArrayFeed(Feed):
    """Tensors, cut along dimension 0; on a replica they stay where they arrived, and are copied by the share."""

    def __init__(
        self, columns: tuple[Any, Any, Any], *, batch_size: int, shuffle: bool, seed: int, listed: bool = False
    ) -> None:
        """`columns`: x, y and the sample weights; `listed`: their batch is a list, as a DataLoader would make it."""
        self._columns = columns
        self._listed = listed
        self._shuffle = shuffle
        self._seed = seed
        self.batch_size: int = batch_size
        self.num_examples: int = len(leaves(columns[0])[0])
        self.num_batches: int = -(-self.num_examples // batch_size)
        self._resident: tuple[torch.device, Any] | None = None
        self._begun: dict[str, Any] | None = None
        self._offer: Offer | None = None

    def offer(self) -> str | None:
        """Have replicas fetch the arrays from here, until `withdraw`; return the path that they have to reach.

        None where they are sent: few, and what lies on a GPU.
        """
        if not all(column is None or column.device.type == "cpu" for column in leaves(self._columns)):
            return None
        self._offer = self._offer or Offer(self._columns)
        if self._offer.path is None:
            self.withdraw()
        return None if self._offer is None else self._offer.path

    def withdraw(self) -> None:
        """Send the arrays from now on; who has fetched them keeps them."""
        offer, self._offer = self._offer, None
        if offer is not None:
            offer.withdraw()

    def shares(
        self,
        replica_id: int,
        num_replicas: int,
        device: torch.device,
        *,
        epoch: int,
        start: int = 0,
        agree: Agree | None = None,
    ) -> Iterator[Share]:
        check_begun(self._begun, self.sizes(), start)
        if agree is not None:
            agree_on(agree, replica_id, str(self), {})
        return self._shares(replica_id, num_replicas, device, epoch, start)

    def _shares(
        self, replica_id: int, num_replicas: int, device: torch.device, epoch: int, start: int
    ) -> Iterator[Share]:
        columns = self._near(device)
        order = permutation(self.num_examples, self._seed, epoch) if self._shuffle else None
        if order is not None and columns is not self._columns:
            order = order.to(device)
        for first in range(start * self.batch_size, self.num_examples, self.batch_size):
            total = min(self.batch_size, self.num_examples - first)
            part = share_of(total, replica_id, num_replicas)
            rows = slice(first + part.start, first + part.stop)
            x, y, weight = _taken(columns, rows if order is None else order[rows], device)
            y = _as_targets(y) if isinstance(y, Tensor) else map_leaves(y, _as_targets)
            yield Share(x, y, weight, part.stop - part.start, total, self._batch(x, y, weight))

    @property
    def targets(self) -> Any:
        """All that the outputs are compared with, in the order in which it was given; None without."""
        return self._columns[1]

    def _batch(self, x: Any, y: Any, weight: Any) -> Any:
        members = [member for member in (x, y, weight) if member is not None]
        if self._listed:
            return members
        return x if len(members) == 1 else tuple(members)

    def state(self) -> dict[str, Any]:
        return {"seed": self._seed, "sizes": self.sizes()}

    def load_state(self, state: dict[str, Any]) -> None:
        check_state(self, state, {"seed", "sizes"})
        self._seed, self._begun = state["seed"], state["sizes"]

    def _near(self, device: torch.device) -> Any:
        """The arrays on the GPU where they take little of it; where they are otherwise."""
        if device.type != "cuda":
            return self._columns
        if self._resident is None or self._resident[0] != device:
            nbytes = sum(column.nbytes for column in leaves(self._columns) if column is not None)
            free, _ = torch.cuda.mem_get_info(device)
            if nbytes * RESIDENT_PART > free:
                return self._columns
            self._resident = (device, map_leaves(self._columns, lambda c: None if c is None else c.to(device)))
        return self._resident[1]

    def __str__(self) -> str:
        shapes = [tuple(column.shape) for column in leaves(self._columns) if column is not None]
        order = f"shuffled from seed {self._seed}" if self._shuffle else "in order"
        return f"arrays of shapes {shapes}, batch_size={self.batch_size}, {order}"

    def __getstate__(self) -> dict[str, Any]:
        columns = self._columns if self._offer is None else self._offer
        return {**self.__dict__, "_resident": None, "_offer": None, "_columns": columns}


def _taken(columns: Any, rows: slice | Tensor, device: torch.device) -> Any:
    def take(column: Any) -> Any:
        return None if column is None else _take(column, rows, device)

    # Mostly tensors: a structure is looked into where there is one.
    return tuple(take(c) if c is None or isinstance(c, Tensor) else map_leaves(c, take) for c in columns)


def _take(column: Tensor, rows: slice | Tensor, device: torch.device) -> Tensor:
    """Rows as a tensor of their own: a network may write to its inputs, and the user's stay as they are."""
    if isinstance(rows, slice):
        part, fresh = column[rows], False
    else:
        part, fresh = column.index_select(0, rows.to(column.device)), True
    if part.device != device:
        # Pageable memory would make the copy wait for the device.
        pinned = device.type == "cuda" and part.device.type == "cpu"
        return part.pin_memory().to(device, non_blocking=True) if pinned else part.to(device)
    return part if fresh else part.clone()


def _as_targets(column: Any) -> Any:
    """Classes as the losses want them; by the share, since all as int64 would take eight times a mask's bytes."""
    whole = isinstance(column, Tensor) and not column.dtype.is_floating_point and not column.dtype.is_complex
    return column.long() if whole and column.dtype is not torch.bool else column
