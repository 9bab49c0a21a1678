"""Stand-ins for values that stayed in the replicas: their names there, and what the notebook had in their place.

Knows names and the replicas' ids; fetches nothing.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, MutableMapping
from typing import Any, final

from mirror_nb.notebook.shared import SharedNames
from mirror_nb.values import Remote


@final
class StandIns:
    """The names of stand-ins' values in the replicas. `user_ns` is the dictionary of ordinary cells."""

    def __init__(self, user_ns: MutableMapping[str, Any], shared: SharedNames) -> None:
        self._user_ns = user_ns
        self._shared = shared
        self._count = itertools.count()
        self._given_names: dict[str, weakref.ref[Remote]] = {}
        # Names of ours in the replicas, by which stand-ins mean their values.
        self._renamed: dict[int, dict[str, str]] = {}
        # By replica: those that it is yet to give, and the names that have the values until then.
        self._earlier: dict[str, tuple[Remote, object]] = {}
        # By name: a stand-in, and what the notebook had, and has sent, before cells changed it.

    def forget_replica(self, replica_id: int) -> None:
        """The replica starts anew and has nothing."""
        self._renamed.pop(replica_id, None)

    def restored(self, replica_id: int, source: int) -> None:
        """The replica took over everything that `source` has."""
        self._renamed[replica_id] = dict(self._renamed.get(source, {}))

    def give_a_name(self, stand_in: Remote) -> None:
        """Have the replicas keep the value of a stand-in under a name that no cell will bind anew."""
        if stand_in.name in self._given_names:
            return
        name = f"_mirror_nb_{next(self._count)}"
        self._given_names[name] = weakref.ref(stand_in)
        for replica_id in self._shared.replicas:
            self._renamed.setdefault(replica_id, {})[name] = stand_in.name
            self._shared.keep(replica_id, name)
        stand_in.name = name

    def lies_under(self, name: str, replica_id: int) -> str:
        """Return the name that the replica has for a stand-in's name by now."""
        return self._renamed.get(replica_id, {}).get(name, name)

    def renamed(self, replica_id: int) -> tuple[tuple[str, str], ...]:
        """Return the names that the replica is to give, each after the one that has the value until then."""
        return tuple((old, new) for new, old in self._renamed.get(replica_id, {}).items())

    def told(self, replica_id: int) -> None:
        """The replica has given the names."""
        self._renamed.pop(replica_id, None)

    def lives(self, name: str) -> bool:
        """Whether the notebook has the name, or the stand-in to which it was given."""
        stand_in = self._given_names.get(name)
        return name in self._user_ns if stand_in is None else stand_in() is not None

    def keep_earlier(self, name: str, stand_in: Remote, before: object, replicas: Iterable[int]) -> None:
        """Keep what the notebook had in the place of a stand-in: should the replicas end, there is nothing else."""
        known, earlier = self._earlier.pop(name, (None, None))
        if known is not before and any(self._shared.shares(r, name, before) for r in replicas):
            earlier = before
        if type(earlier).__name__ == stand_in.type_name:
            self._earlier[name] = stand_in, earlier

    def prune(self) -> None:
        """Let go of what the notebook had under names that have something else by now."""
        for name in [n for n, (stand_in, _) in self._earlier.items() if self._user_ns.get(n) is not stand_in]:
            del self._earlier[name]

    def put_back(self) -> list[str]:
        """Give names what the notebook had before cells changed it; return those names."""
        self.prune()
        earlier, self._earlier = self._earlier, {}
        self._user_ns.update((name, value) for name, (_, value) in earlier.items())
        return sorted(earlier)
