"""Which names a cell needs besides those that it reads. Sends nothing, and binds no name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, final

from torch import nn
from torch.utils.hooks import RemovableHandle

from mirror_nb.messages import travels
from mirror_nb.mirroring.attributes import names_by_id, names_in
from mirror_nb.mirroring.mirrors import Mirrors
from mirror_nb.notebook.shared import SharedNames
from mirror_nb.noticing.data_sets import data_sets
from mirror_nb.noticing.insides import inside
from mirror_nb.noticing.reads import names_read
from mirror_nb.transfer.hooks import hook_dicts, owner


@final
class Needs:
    """Goes through the notebook's values. `user_ns` is the dictionary of ordinary cells."""

    def __init__(
        self, user_ns: MutableMapping[str, Any], mirrors: Mirrors, shared: SharedNames, travels: Callable[[str], bool]
    ) -> None:
        self._user_ns = user_ns
        self._mirrors = mirrors
        self._shared = shared
        self._travels = travels
        # Whether a name's value can be sent at all.

    def of(self, names: set[str], inside_of: Mapping[str, set[str]]) -> set[str]:
        """Return the names that functions, classes and objects among these read in turn.

        `inside_of` tells which handles of what the replicas have a name's value holds.
        """
        needed: set[str] = set()
        queue = list(names)
        anew = self._networks_anew()
        while queue:
            name = queue.pop()
            found = names_read(self._user_ns[name], self._user_ns)
            found |= self._shared.needs(name)
            found |= self._names_of(data_sets(self._user_ns[name]))
            found |= self._names_in_networks(name, inside_of) | self._wholes_of(name, anew, inside_of)
            for more in found:
                if more not in needed and more not in names and self._travels(more):
                    needed.add(more)
                    queue.append(more)
        return needed

    def _names_in_networks(self, name: str, inside_of: Mapping[str, set[str]]) -> set[str]:
        """Names that networks below this one have as attributes, by which it is noticed what has changed inside them.

        Of those that went with them alone: later ones stay here.
        """
        networks = [network for h in inside_of.get(name, ()) if (network := self._mirrors.find(h)) is not None]
        # Most names have none: for the others the names need not be gone through.
        named = names_by_id(list(self._user_ns.items())) if networks else {}
        found = {n for network in networks for n in names_in(network, named)}
        return {n for n in found if self._shared.is_there(n, self._user_ns[n])}

    def _networks_anew(self) -> dict[str, set[int]]:
        """Return the names of networks that go out whole, with the ids of their parts, here and there."""
        found = {}
        for name, network in list(self._user_ns.items()):
            # By their classes: a proxy may raise whatever it is asked.
            if issubclass(type(network), nn.Module) and travels(name) and self._mirrors.known(network) is None:
                # One that is half made has no parts, and says so.
                with contextlib.suppress(Exception):
                    parts = list(network.modules())
                    for part in parts:
                        # Now its hooks' handles can be told whose they are.
                        hook_dicts(part)
                    found[name] = set(map(id, parts)) | self._mirrors.parts_there(network)
        return found

    def _wholes_of(self, name: str, anew: Mapping[str, set[int]], inside_of: Mapping[str, set[str]]) -> set[str]:
        """Names of those networks, of which a value has a part that the replicas have too, or the handle of a hook.

        What a cell does to that part comes back with the whole; and a handle alone keeps no network.
        """
        if not anew:
            return set()
        value = self._user_ns[name]
        handles = inside(value, lambda obj: isinstance(obj, RemovableHandle))
        hooked = {id(owner(handle)[0]) for handle in handles}  # type: ignore[arg-type]
        parts = {id(self._mirrors.find(handle)) for handle in inside_of.get(name, ())}
        outgrown = (n for n in anew if not parts.isdisjoint(anew[n]) and self._mirrors.outgrown(self._user_ns[n]))
        return {*outgrown, *(n for n in anew if not hooked.isdisjoint(anew[n]))}

    def _names_of(self, objects: list[object]) -> set[str]:
        """Names of these objects, by which it is noticed that something has changed inside them."""
        # Few values have any: for the others the names need not be gone through.
        held = list(self._user_ns.items()) if objects else ()
        return {name for name, value in held for one in objects if value is one}
