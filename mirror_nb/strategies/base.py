"""What every strategy promises, whether it is held in the controller or in a replica."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


class Strategy(ABC):
    """A way to spread a computation over devices. tf.distribute's names (see DESIGN decision 1)."""

    @property
    @abstractmethod
    def num_replicas_in_sync(self) -> int:
        """Number of replicas over which gradients are aggregated."""

    @abstractmethod
    def scope(self) -> AbstractContextManager[Any]:
        """Return the context in which what is created is mirrored."""

    @abstractmethod
    def run(self, fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call `fn(*args, **kwargs)` on every replica and return its results."""

    @abstractmethod
    def distribute_dataset(
        self, source: Any, *, batch_size: int | None = None, shuffle: bool = False, drop_last: bool = False
    ) -> Any:
        """Return an iterable of this place's shares of the global batches of `source`."""
