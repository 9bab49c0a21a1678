"""What the replicas are given of a fit's data: shares of global batches, by a feed that travels to them.

Knows how an epoch's order is drawn, and what has to be the same when an epoch goes on. Knows neither arrays nor
DataLoaders.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from mirror_nb.data.sampling import Agree
from mirror_nb.errors import UsageError


@final
@dataclass(frozen=True, slots=True)
class Share:
    """One replica's part of one global batch, on its device."""

    inputs: Any
    """What the network is called with: a tensor or a nest of them."""
    targets: Any
    """What its outputs are compared with; None where the batches hold inputs alone."""
    sample_weight: Any
    """A weight for each example, or a dict or list of such weights by output; None: all count the same."""
    examples: int
    """Number of examples here; with 0 the tensors are there, with their dtypes and trailing shapes."""
    global_examples: int
    """Number of examples of the global batch, over all replicas."""
    batch: Any
    """The same as it was given: the nest of the DataLoader, or (x, y) or (x, y, weight) or x."""


class Feed(ABC):
    """Global batches of one fit, evaluate or predict; pickled to the replicas."""

    batch_size: int | None
    """Examples of a full global batch; None where a DataLoader does not say."""
    num_batches: int | None
    """Global batches of an epoch; None where the source does not know."""
    num_examples: int | None
    """Examples of an epoch; None where the source does not know."""

    @abstractmethod
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
        """Yield this replica's share of each global batch of an epoch, from the one numbered `start`.

        `agree(mine)` returns replica 0's bytes on every replica, and is called once, before the first share; give
        it where each replica made its feed by itself. Raises UsageError where these differ.
        """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What the order is drawn from besides the epoch: tensors and plain values.

        While `shares` is in the middle of an epoch, as it was at its start: `load_state`, then `shares` with the
        same epoch and `start` the number of batches seen, give the remaining ones. After its end (or after
        `shares` was closed), as it is now: for the next epoch.
        """

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Take what `state()` gave. Raises UsageError for what another kind of feed gave.

        In the middle of an epoch only a feed of the same batches goes on; at its beginning they may be others.
        """

    def generators(self) -> list[torch.Generator]:
        """Return what it draws from and others may too: the user's own."""
        return []

    def sizes(self) -> dict[str, int | None]:
        return {"batch_size": self.batch_size, "num_batches": self.num_batches, "num_examples": self.num_examples}


# ---- the order of an epoch ----------------------------------------------------------------------------


def epoch_seeds(seed: int, epoch: int) -> list[int]:
    """Four independent numbers of 64 bits, the same on every machine."""
    mixed = np.random.SeedSequence([seed % 2**64, epoch]).generate_state(4, np.uint64)
    return [int(number) for number in mixed]


def permutation(length: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(epoch_seeds(seed, epoch)[0]), device="cpu")


# ---- checks -------------------------------------------------------------------------------------------


def check_state(own: Feed, state: dict[str, Any], names: set[str]) -> None:
    """Raise UsageError where a position is not of these names: another kind of feed's."""
    if state.keys() != names:
        raise UsageError(
            f"the position belongs to another kind of data: it has {sorted(state)}, but {type(own).__name__} needs "
            f"{sorted(names)}; go on with the data that the training was begun with, or compile() to begin anew"
        )


def check_begun(begun: dict[str, Any] | None, now: dict[str, Any], start: int) -> None:
    """Raise UsageError where an epoch begun with some sizes would go on, in its middle, with others."""
    if start and begun is not None and begun != now:
        raise UsageError(
            f"an epoch of {begun} cannot go on, after {start} of its batches, with {now}; give the data and the batch "
            "size that the training was begun with, or compile() to begin anew"
        )
