"""Which replicas have each of the notebook's networks, and which of them are yet to hear that one is no more.

Knows handles and the replicas' ids alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import final


@final
class Holders:
    """The replicas that have a network, by its handle."""

    def __init__(self) -> None:
        self._of: dict[str, set[int]] = {}
        self._lost: dict[int, set[str]] = {}
        # By replica: handles of networks that the notebook has no more, as it is yet to hear.

    def add(self, handle: str, replicas: Iterable[int]) -> None:
        """These replicas have the network."""
        self._of.setdefault(handle, set()).update(replicas)

    def of(self, handle: str) -> Set[int]:
        """Return the replicas that have the network."""
        return self._of.get(handle, frozenset())

    def let_go(self, handle: str, replica_id: int) -> None:
        """The replica has the network no more, and knows that."""
        self._lost.get(replica_id, set()).discard(handle)
        holders = self._of.get(handle, set())
        holders.discard(replica_id)
        if not holders:
            self._of.pop(handle, None)

    def forget_replica(self, replica_id: int) -> None:
        """The replica starts anew and has nothing."""
        self._lost.pop(replica_id, None)
        for holders in self._of.values():
            holders.discard(replica_id)

    def restored(self, replica_id: int, source: int) -> None:
        """The replica took over everything that `source` has."""
        self._lost[replica_id] = set(self._lost.get(source, ()))
        for holders in self._of.values():
            if source in holders:
                holders.add(replica_id)

    def gone(self, handles: Iterable[str]) -> None:
        """The notebook has these networks no more."""
        for handle in handles:
            for replica_id in self._of.pop(handle, ()):
                self._lost.setdefault(replica_id, set()).add(handle)

    def lost(self, replica_id: int) -> Set[str]:
        """Return the networks that the notebook has no more, and of which the replica has not heard."""
        return self._lost.get(replica_id, frozenset())

    def told(self, replica_id: int, handles: Iterable[str]) -> None:
        """The replica has heard that these are no more."""
        self._lost.get(replica_id, set()).difference_update(handles)
