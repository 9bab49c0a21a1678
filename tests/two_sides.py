"""A notebook and its replicas without processes: dictionaries, and what travels between them."""

from __future__ import annotations

import os
import types
import weakref
from typing import Any

import cloudpickle.cloudpickle as tracker
import torch
from torch import nn

from mirror_nb.notebook.absorbing import Returned
from mirror_nb.notebook.lent import Lent
from mirror_nb.notebook.names import Names
from mirror_nb.notebook.parcels import Parcel
from mirror_nb.notebook.source import CellNames, cell_names
from mirror_nb.replica.namespace import Namespace
from mirror_nb.transfer.packing import pack

NET = "net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))"
TRAIN = "with torch.no_grad():\n    for p in net.parameters(): p += 1 + 0 * replica_id\n"


class Scope:
    """Stands for the replica's scope: remembers what was adopted."""

    def __init__(self) -> None:
        self.adopted: list[nn.Module] = []

    def adopt(self, module: nn.Module) -> None:
        self.adopted.append(module)

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """There are no gradients to synchronise."""


class Classes:
    """One process's classes, as cloudpickle knows them: entered, this process knows no others."""

    def __init__(self) -> None:
        self.known = weakref.WeakKeyDictionary(), weakref.WeakValueDictionary()

    def __enter__(self) -> None:
        self.outside = tracker._DYNAMIC_CLASS_TRACKER_BY_CLASS, tracker._DYNAMIC_CLASS_TRACKER_BY_ID
        tracker._DYNAMIC_CLASS_TRACKER_BY_CLASS, tracker._DYNAMIC_CLASS_TRACKER_BY_ID = self.known

    def __exit__(self, *exception: object) -> None:
        tracker._DYNAMIC_CLASS_TRACKER_BY_CLASS, tracker._DYNAMIC_CLASS_TRACKER_BY_ID = self.outside


class Notebook:
    """A notebook with replicas that are dictionaries. `here` runs an ordinary cell, `cell` a mirrored one."""

    def __init__(self, n: int) -> None:
        self.main = types.ModuleType("__main__")
        self.user_ns = self.main.__dict__
        self.names = Names(self.user_ns, self.fetch, Lent(lambda: None))
        self.replicas = []
        self.scopes = []
        self.classes = [Classes() for _ in range(n)]
        for i in range(n):
            own = {"replica_id": i, "num_replicas": n, "strategy": object(), "device": "cpu"}
            names = {"__name__": "__main__", **own}
            self.scopes.append(Scope())
            self.replicas.append(Namespace(names, own, self.scopes[-1], torch.device("cpu")))
        self.number = 0
        self.sent: list[str] = []
        self.sent_bytes = 0

    def here(self, source: str) -> None:
        exec(source, self.user_ns)

    def cell(self, source: str, replicas: list[int] | None = None) -> Returned:
        self.number += 1
        ids = list(range(len(self.replicas))) if replicas is None else replicas
        names = cell_names(source)
        parcels = self.names.prepare(names.read, ids, names.unsure)
        self.sent, self.sent_bytes = [], 0
        changed = self.names.changed_modules()
        if changed:
            for replica in self.replicas:
                packed = pack(changed)
                replica.load(packed.payload, packed.slab)
        payloads = {}
        with self.names.stay():
            for i in ids:
                parcel = next((parcel for parcel in parcels if i in parcel.replicas), None)
                if parcel is not None:
                    self.sent += [name for name in parcel.names if name not in self.sent]
                    self.sent_bytes += parcel.packed.payload.nbytes
                with self.classes[i]:
                    payloads[i] = self._run(i, source, names, parcel, owner=i == ids[0])
            for parcel in parcels:
                parcel.packed.close()
                self.names.sent(parcel, parcel.replicas)
            return self.names.absorb(payloads, ids[0])

    def _run(self, i: int, source: str, names: CellNames, parcel: Parcel | None, owner: bool) -> Any:
        replica = self.replicas[i]
        holdings = self.names.holdings(i, names, () if parcel is None else parcel.names)
        self.names.told(i, holdings)
        replica.hold(holdings)
        if parcel is not None:
            slab = parcel.packed.slab
            replica.bind(parcel.packed.payload, os.dup(slab) if slab is not None else None)
        before = replica.before(names.mentioned, self.number, names.bound)
        exec(source, replica.names)
        bound = replica.changed(before, names.bound, names.mentioned)
        trained = any(name in replica.names for name in names.mentioned)
        packed = replica.export(bound, tag=self.number, owner=owner, trained=trained)
        return packed.payload, packed.slab

    def fetch(self, name: str, replica_id: int) -> Any:
        self.replicas[replica_id].forget_given(self.names.undelivered)
        standing = self.names.shared.alike([replica_id]) - {name}
        packed = self.replicas[replica_id].export(
            [name], tag=99, owner=True, trained=True, whole=True, standing=standing
        )
        before = self.user_ns.get(name)
        self.names.absorb({replica_id: (packed.payload, packed.slab)}, replica_id)
        value, self.user_ns[name] = self.user_ns[name], before
        return value

    def there(self, name: str, replica: int = 0) -> Any:
        return self.replicas[replica].names[name]


def with_torch() -> Notebook:
    """Return a notebook with two replicas that has imported what tests use."""
    made = Notebook(2)
    made.here("import torch\nfrom torch import nn")
    return made
