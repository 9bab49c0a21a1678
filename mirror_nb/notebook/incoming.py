"""What replicas' names hold, rebuilt in the notebook: the value, a PerReplica of them, or a stand-in.

Knows payloads, networks and optimizers; binds no name.
"""

from __future__ import annotations

import contextlib
import importlib
import types
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, final

import numpy as np
from IPython.display import DisplayHandle

from mirror_nb.errors import TransferError
from mirror_nb.held_variables import read_together
from mirror_nb.messages import Export, Imported, KnownModule, NewModule, Plain, Stayed
from mirror_nb.mirroring.mirrors import Mirrors
from mirror_nb.notebook.lent import Lent
from mirror_nb.noticing.drawn import at
from mirror_nb.noticing.refilling import is_trained, refill
from mirror_nb.transfer.opening import unpack
from mirror_nb.transfer.payload import Payload
from mirror_nb.transfer.told import parameters_of
from mirror_nb.values import PerReplica, Remote, merged

MOST_DRAWN = 1000
# Members of a container that are looked at.


@final
class Incoming:
    """Rebuilds what comes; `fetch(name, replica_id)` brings what stands for itself later.

    `held(name, replica_id)` gives what is here of a name whose value another one of that replica holds; it raises
    Undelivered.
    """

    def __init__(
        self,
        user_ns: MutableMapping[str, Any],
        mirrors: Mirrors,
        lent: Lent,
        fetch: Callable[[str, int], Any],
        held: Callable[[str, int], Any],
    ) -> None:
        self._user_ns = user_ns
        self._mirrors = mirrors
        self._lent = lent
        self._fetch = fetch
        self._held = held
        self.stand_ins: weakref.WeakSet[Remote] = weakref.WeakSet()
        self.lacking: dict[str, str] = {}
        # By handle of a network that could not be rebuilt here: why.
        self.undelivered: set[str] = set()
        # Handles of networks that a replica takes for known here: they were not the owner's.

    def value(self, name: str, exports: dict[int, Export], owner: int) -> Any:
        """Return what a name holds, of what the replicas tell of it; of figures and the like the owner's alone."""
        chosen = owner if owner in exports else min(exports)
        match exports[chosen]:
            case Imported(path):
                return self._imported(name, path, chosen)
            case KnownModule(handle) | NewModule(handle):
                lacking = self.lacking.get(handle)
                why = "it did not travel" if lacking is None else f"it cannot be rebuilt here: {lacking}"
                stayed = Stayed("Module", "network", why, for_good=lacking is not None)
                network = self._mirrors.find(handle)
                if network is None:
                    self.undelivered.add(handle)
                return network if network is not None else self._remote(name, stayed, chosen)
            case Stayed() as stayed:
                return self._remote(name, stayed, chosen)
            case Plain(payload) if self.is_one(exports):
                value = self._open(payload, name, chosen, one=True)
                whole = read_together([value] * len(exports))
                return value if whole is None else whole
        first = self.told(name, exports[chosen], chosen)
        if _is_drawn(first):
            # As of output.
            return first
        values = [first if r == chosen else self.told(name, export, r) for r, export in sorted(exports.items())]
        if all(isinstance(value, Remote) for value in values):
            return values[0]
        whole = read_together(values)
        return merged(values) if whole is None else whole

    def _imported(self, name: str, path: str, replica_id: int) -> types.ModuleType | Remote:
        try:
            return importlib.import_module(path)
        except (Exception, SystemExit) as reason:
            # It may look for what replicas alone have: os.environ["LOCAL_RANK"], a process group.
            why = f"it cannot be imported here: {type(reason).__name__}: {reason}"
            return self._remote(name, Stayed("module", f"module {path}", why, for_good=True), replica_id)

    def is_one(self, exports: Mapping[int, Export]) -> bool:
        """Whether all replicas tell of the same value, and what that holds of other names is the same, too."""
        holds = {name for export in exports.values() if isinstance(export, Plain) for name in export.holds}
        return all_alike(exports) and not any(isinstance(self._user_ns.get(name), PerReplica) for name in holds)

    def told(self, name: str, export: Export, replica_id: int, one: bool = False) -> Any:
        """Return what one replica tells of a name's value: that, or a stand-in; `one`: see `unpacked`."""
        if isinstance(export, Plain):
            return self._open(export.payload, name, replica_id, one)
        return self._remote(name, _stand_in(export), replica_id)

    def _open(self, payload: Payload, name: str, replica_id: int, one: bool = False) -> Any:
        try:
            return self.unpacked(payload, replica_id, one)
        except Undelivered:
            stayed = Stayed("object", "value", "it has a network, an optimizer or another value that did not travel")
        except Exception as reason:
            why = f"it cannot be rebuilt here: {type(reason).__name__}: {reason}"
            stayed = Stayed("object", "value", why, for_good=True)
        return self._remote(name, stayed, replica_id)

    def unpacked(self, payload: Payload, replica_id: int, one: bool = False) -> Any:
        """Rebuild a value of a replica, and remember the networks in it. Raises what rebuilding raised.

        `one`: it is the same on all, and so what optimizers here train is in it, with its values; else copies are.
        """

        def resolve(token: Any) -> object:
            if token[0] == "trained" and token[3:]:
                if not one:
                    return token[3]
                refill(self.resolve(token), token[3])
            if token[0] in ("held", "drawn"):
                held = self._held(token[1], replica_id)
                return held if token[0] == "held" else at(held, token[2])
            return self.resolve(token)

        value, arrivals = unpack(payload, None, namespace=self._user_ns, resolve=resolve)
        self._mirrors.take(arrivals)
        return value

    def resolve(self, token: Any) -> object:
        """For `unpack`: the object here that a replica's token means. Raises Undelivered where there is none."""
        if token[0] in ("object", "trained"):
            with contextlib.suppress(TransferError, IndexError):
                found: Any = self._lent.resolve(token)
                return found if token[0] == "object" else parameters_of(found)[token[2]]
            self.undelivered.add(token[1])
            raise Undelivered
        if token[0] == "name":
            if not is_trained(self._user_ns.get(token[1])):
                raise Undelivered
            return self._user_ns[token[1]]
        if self._mirrors.find(token[1]) is None and token[1].partition("/")[0] not in self.lacking:
            self.undelivered.add(token[1])
            raise Undelivered
        return self._mirrors.resolve(token)

    def _remote(self, name: str, stayed: Stayed, replica_id: int) -> Remote:
        kept = stayed.name or name
        made = Remote(kept, stayed.type_name, stayed.text, stayed.why, self._fetch, replica_id, stayed.for_good)
        self.stand_ins.add(made)
        return made


def _is_drawn(value: Any, deep: int = 3) -> bool:
    """Whether it is a figure, or what else matplotlib draws, a display's handle, or a small container of such."""
    if type(value) in (list, tuple):
        members: Any = value
    elif type(value) is dict:
        members = value.values()
    elif isinstance(value, np.ndarray) and value.dtype == object:
        members = value.flat
    else:
        drawn = any(kind.__module__.partition(".")[0] == "matplotlib" for kind in type(value).__mro__)
        return drawn or isinstance(value, DisplayHandle)
    return deep > 0 and len(members) <= MOST_DRAWN and any(_is_drawn(member, deep - 1) for member in members)


class Undelivered(Exception):
    """A network, an optimizer or a name's value that was to be known here is not."""


def _stand_in(export: Export) -> Stayed:
    return export if isinstance(export, Stayed) else Stayed("object", type(export).__name__, "it differs by replica")


def all_alike(exports: Mapping[int, Export]) -> bool:
    """Whether the replicas tell of one and the same value that travels by itself."""
    pickled = {export.payload.pickled if isinstance(export, Plain) else None for export in exports.values()}
    return len(pickled) == 1 and None not in pickled
