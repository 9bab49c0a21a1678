"""What each replica has of the notebook's names: which values, and what they held as both sides had the same.

Knows names and values. Knows no payloads and no networks: what a value holds is told by whom it is given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from mirror_nb.messages import Setting
from mirror_nb.notebook.apart import Apart
from mirror_nb.noticing.contents import Content
from mirror_nb.noticing.insides import inside
from mirror_nb.noticing.kinds import has_an_identity

MISSING = object()
# What a name has that the notebook does not have.
_ELSE = Content(state=(object(),))
# No value holds this.


@dataclass(frozen=True, slots=True)
class Shared:
    """A value that a replica has too, as it was then. Kept, so that an id cannot be reused."""

    value: object
    content: Content | None
    needs: frozenset[str]
    # Names of the notebook that it looks up when it is used, as far as packing it has shown.
    altered: bool = False
    # The replica has changed it in place, which did not travel.
    apart: Apart | None = None
    # Of an object that was altered so, what became of its attributes; None where that is not known.
    tellers: tuple[int, ...] = ()
    # Whose values a PerReplica has, in its order; empty: all replicas'.

    def same(self, now: Content | None) -> bool:
        """Whether a value that holds `now` is to the replica what it was; where contents do not tell, it is."""
        return self.content is None or self.content.same(now)


@dataclass(frozen=True, slots=True)
class BothSides:
    """What one name is on both sides."""

    value: object
    # Of the notebook.
    sent: Mapping[int, Shared]
    # By replica: what it has of that.
    there: set[int]
    # Replicas that have the name.


class SharedNames:
    """The names that replicas have. `user_ns`: the dictionary of ordinary cells; `content` tells what one holds."""

    def __init__(self, user_ns: MutableMapping[str, Any], content: Callable[[object], Content | None]) -> None:
        self._user_ns = user_ns
        self._content = content
        self._sent: dict[int, dict[str, Shared]] = {}
        # By replica: what it was sent, or what came from it.
        self._there: dict[int, set[str]] = {}
        # By replica: names that it has, of whatever value, and that the notebook had, too.

    # ------------------------------------------------------------------ replicas

    def begin(self, replicas: Iterable[int]) -> None:
        """Know these replicas."""
        for replica_id in replicas:
            self._there.setdefault(replica_id, set())

    @property
    def replicas(self) -> list[int]:
        """Those that are known."""
        return list(self._there)

    def forget_replica(self, replica_id: int) -> None:
        """The replica starts anew and has nothing."""
        self._sent.pop(replica_id, None)
        self._there.pop(replica_id, None)

    def restored(self, replica_id: int, source: int) -> None:
        """The replica took over everything that `source` has."""
        self._sent[replica_id] = dict(self._sent.get(source, {}))
        self._there[replica_id] = set(self._there.get(source, ()))

    # ------------------------------------------------------------------ what they have

    def share(
        self,
        replicas: Iterable[int],
        values: Mapping[str, object],
        needs: frozenset[str] = frozenset(),
        tellers: tuple[int, ...] = (),
    ) -> None:
        """These replicas have these values from now on; for `needs` and `tellers` see `Shared`."""
        shared = {name: Shared(value, self._content(value), needs, tellers=tellers) for name, value in values.items()}
        for replica_id in replicas:
            self._sent.setdefault(replica_id, {}).update(shared)
            self._there.setdefault(replica_id, set()).update(shared)

    def copy(self, name: str, other: str) -> None:
        """Those that have what the notebook has by a name have it by the other name, too."""
        for has in self._sent.values():
            if name in has and has[name].value is self._user_ns.get(name, MISSING):
                has[other] = has[name]

    def keep(self, replica_id: int, name: str) -> None:
        """The replica has a name, of whatever value."""
        self._there.setdefault(replica_id, set()).add(name)

    def of(self, replica_id: int, name: str) -> Shared | None:
        """Return what the replica has by a name, as both sides had it."""
        return self._sent.get(replica_id, {}).get(name)

    def shares(self, replica_id: int, name: str, value: object) -> bool:
        """Whether this very value is the one that the replica has by the name."""
        shared = self.of(replica_id, name)
        return shared is not None and shared.value is value

    def is_there(self, name: str, value: object) -> bool:
        """Whether a replica has this very value by the name."""
        return any(self.shares(replica_id, name, value) for replica_id in self._sent)

    def there(self, replica_id: int) -> frozenset[str]:
        """Return the names that the replica has, of whatever value."""
        return frozenset(self._there.get(replica_id, ()))

    def untold(self, replica_id: int) -> frozenset[str]:
        """Return those of them whose values it does not have as they are here."""
        return self.there(replica_id).difference(self._sent.get(replica_id, ()))

    def needs(self, name: str) -> set[str]:
        """Return the names that the value looks up in the replicas that have it."""
        return {needed for has in self._sent.values() if name in has for needed in has[name].needs}

    def unaltered(self, name: str, replicas: Iterable[int]) -> bool:
        """Whether all of these replicas have the notebook's object, and none has changed it."""
        had = [self.of(replica_id, name) for replica_id in replicas]
        return all(it is not None and it.value is self._user_ns[name] and not it.altered for it in had)

    def alike(self, replicas: Sequence[int]) -> set[str]:
        """Return the names whose values all of these replicas have as they are here, as far as that can be told."""
        return {
            name
            for name, shared in (self._sent.get(replicas[0], {}) if replicas else {}).items()
            if shared.content is not None
            and shared.content.complete
            and has_an_identity(shared.value)
            and name in self._user_ns
            and self.unaltered(name, replicas)
        }

    def altered_in(self, names: Iterable[str], replicas: Sequence[int]) -> set[str]:
        """Return the names of objects that these replicas have altered, and that the values of `names` hold here."""
        altered = {
            id(shared.value): name
            for name, shared in self._sent.get(replicas[0], {}).items()
            if shared.altered and all(self.shares(r, name, self._user_ns.get(name, MISSING)) for r in replicas)
        }
        found: set[str] = set()

        def note(obj: object) -> bool:
            found.update({altered[id(obj)]} if id(obj) in altered else ())
            return False

        for name in names if altered else ():
            inside(self._user_ns.get(name), note)
        return found

    # ------------------------------------------------------------------ what they have no more

    def forget(self, replica_id: int, names: Iterable[str]) -> None:
        """Take it that the replica lacks these names."""
        for name in names:
            self._sent.get(replica_id, {}).pop(name, None)
        self._there.get(replica_id, set()).difference_update(names)

    def deleted(self, replica_id: int, names: Iterable[str]) -> None:
        """The replica has been told that the notebook lacks these names, and has deleted them."""
        self._there.get(replica_id, set()).difference_update(names)

    def outdate(self, replica_id: int, names: Iterable[str]) -> None:
        """Take it that what the replica has by these names holds something else than here."""
        has = self._sent.get(replica_id, {})
        has.update(
            (name, dataclasses.replace(has[name], content=_ELSE, altered=False, apart=None))
            for name in names
            if name in has
        )

    def alter(self, names: Iterable[str], left: Collection[str], settings: Mapping[str, frozenset[str]]) -> list[str]:
        """Replicas have changed these names' objects in place; return those of which that was not known.

        `left` are those that nobody has changed here; `settings` tells which attributes replicas have set.
        """
        first = []
        for name in sorted(names):
            has = [sent for sent in self._sent.values() if name in sent]
            if has and not any(sent[name].altered for sent in has):
                first.append(name)
            for sent in has:
                sent[name] = dataclasses.replace(
                    sent[name], altered=True, apart=self._apart(sent[name], name in left, settings.get(name))
                )
        return first

    def _apart(self, shared: Shared, left: bool, settings: frozenset[str] | None) -> Apart | None:
        if settings is None:
            return None
        if shared.altered:
            return None if shared.apart is None else shared.apart.set_there(settings)
        return Apart.of(shared.value, settings, self._content) if left else None

    def setting(self, name: str, replicas: Iterable[int]) -> Setting | None:
        """Return what was set in the name's object here alone, since all of these replicas have altered it.

        None where that is not all that was changed here, or one of them has not altered it.
        """
        obj = self._user_ns.get(name, MISSING)
        values: dict[str, object] = {}
        deleted: set[str] = set()
        for replica_id in replicas:
            shared = self.of(replica_id, name)
            apart = shared.apart if shared is not None and shared.value is obj else None
            setting = apart.setting(obj, self._content) if apart is not None else None
            if setting is None:
                return None
            values |= setting.values
            deleted |= setting.deleted
        return Setting(values, frozenset(deleted))

    def was_set(self, names: Iterable[str], replicas: Iterable[int]) -> None:
        """These replicas have what `setting` gave of the names' objects."""
        objects = [self._user_ns.get(name, MISSING) for name in names]
        for sent in (self._sent.get(replica_id, {}) for replica_id in replicas if objects):
            for name, shared in sent.items():
                if shared.apart is not None and any(shared.value is obj for obj in objects):
                    apart = Apart.of(shared.value, shared.apart.theirs, self._content)
                    sent[name] = dataclasses.replace(shared, content=self._content(shared.value), apart=apart)

    def renew(self, names: Iterable[str], replicas: Iterable[int]) -> None:
        """These replicas have what the names' objects hold now: it was changed by other names, or later than they."""
        has = [self._sent[replica_id] for replica_id in replicas if replica_id in self._sent]
        for name in names:
            obj = self._user_ns.get(name, MISSING)
            now = self._content(obj)
            for sent in has:
                if name in sent and sent[name].value is obj:
                    sent[name] = dataclasses.replace(sent[name], content=now)

    def prune(self) -> None:
        """Let go of objects that the notebook no longer has under their name."""
        for has in self._sent.values():
            for name in [n for n, shared in has.items() if self._user_ns.get(n, MISSING) is not shared.value]:
                del has[name]

    # ------------------------------------------------------------------ names that are read and put back

    def standing(self, names: Iterable[str]) -> dict[str, BothSides]:
        """Return what these names are on both sides, for `put_back`."""
        return {
            name: BothSides(
                self._user_ns.get(name, MISSING),
                {replica_id: sent[name] for replica_id, sent in self._sent.items() if name in sent},
                {replica_id for replica_id, there in self._there.items() if name in there},
            )
            for name in names
        }

    def put_back(self, names: Mapping[str, BothSides]) -> None:
        """Let names be what they were: what came since was not meant for them."""
        for name, standing in names.items():
            if standing.value is MISSING:
                self._user_ns.pop(name, None)
            else:
                self._user_ns[name] = standing.value
            for replica_id in self._sent:
                self.forget(replica_id, (name,))
            for replica_id, shared in standing.sent.items():
                self._sent[replica_id][name] = shared
            for replica_id in standing.there:
                self._there[replica_id].add(name)
