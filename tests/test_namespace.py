"""The names of one replica: what a cell changed, what is exported of it, and what a new replica takes over."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from two_sides import Scope

from mirror_nb.errors import TransferError
from mirror_nb.messages import Exports, Imported, KnownModule, NewModule, Plain, Stayed, travels
from mirror_nb.noticing import digests
from mirror_nb.noticing.contents import WATCHED_BYTES, content
from mirror_nb.replica import outgoing as outgoing_module
from mirror_nb.replica.exporting import describe
from mirror_nb.replica.namespace import Namespace
from mirror_nb.transfer.opening import unpack
from mirror_nb.transfer.packing import pack
from mirror_nb.transfer.payload import Packed
from mirror_nb.transfer.pickler import TooLarge


def replica() -> Namespace:
    own = {"replica_id": 0, "num_replicas": 1, "device": torch.device("cpu"), "strategy": object()}
    return Namespace({"__name__": "__main__", **own}, own, Scope(), torch.device("cpu"))


def run(here: Namespace, source: str, bound: str = "", mentioned: str = "") -> list[str]:
    before = here.before(mentioned.split(), 1)
    exec(source, here.names)
    return here.changed(before, bound.split(), mentioned.split())


def exported(packed: Packed, here: Namespace | None = None) -> Exports:
    resolve = here.mirrors.resolve if here is not None else lambda token: token
    return unpack(packed.payload, packed.slab, namespace={}, resolve=resolve)[0]


def export(here: Namespace, *names: str, owner: bool = True, **options: Any) -> Exports:
    return exported(here.export(names, tag=7, owner=owner, **options), here)


# ---------------------------------------------------------------------- what changed


def test_names_that_a_cell_bound_are_found_even_where_the_source_does_not_show_it():
    here = replica()
    assert run(here, "a = 1\nglobals()['b'] = 2") == ["a", "b"]


def test_a_name_bound_to_the_very_same_object_is_found_by_the_source():
    here = replica()
    here.names["a"] = None
    assert run(here, "a = None", bound="a") == ["a"]
    assert run(here, "a = None") == []


@pytest.mark.parametrize(
    ("make", "change"),
    [
        ("x = []", "x.append(1)"),
        ("x = list(range(100_000))", "x[5] = -1"),
        ("x = {}", "x['a'] = 1"),
        ("x = {i: i for i in range(50_000)}", "x[7] = 'b'"),
        ("x = set()", "x.add(1)"),
        ("x = bytearray(3)", "x[0] = 1"),
        ("x = [[], []]", "x[1].append(1)"),
        ("import torch; x = torch.zeros(3)", "x += 1"),
        ("import torch; x = torch.zeros(3)", "x.data[0] = 1"),
        ("import torch; x = torch.zeros(100_000)", "x[9] = 1"),
        ("import numpy as np; x = np.zeros(3)", "x[0] = 1"),
        ("import numpy as np; x = np.zeros(100_000)", "x[9] = 1"),
        ("import numpy as np; x = np.zeros(1_000_000)", "x[9] = 1"),
        ("import numpy as np; x = np.zeros((1000, 1000)).T[:, ::2]", "x[9, 9] = 1"),
        ("import numpy as np; x = np.zeros(100_000, dtype='i4, f8')", "x['f1'][9] = 1"),
        ("import numpy as np; x = np.full(100_000, None)", "x[9] = 1"),
        ("import numpy as np; x = np.ma.masked_array(np.zeros(100_000))", "x[9] = 1"),
        ("import numpy as np; x = {'a': np.zeros(100_000)}", "x['a'][9] = 1"),
    ],
)
def test_what_a_cell_changed_in_place_is_found(make, change):
    here = replica()
    exec(make, here.names)
    assert run(here, "x[:0] if hasattr(x, 'dtype') else len(x)", mentioned="x") == []
    assert run(here, change, mentioned="x") == ["x"]


def test_a_network_that_the_cell_mentions_may_have_been_trained():
    here = replica()
    here.names["net"] = nn.Linear(1, 1)
    assert run(here, "1", mentioned="net") == ["net"]
    assert run(here, "1") == []


def test_what_mirror_nb_binds_itself_is_no_change_unless_the_user_binds_it():
    here = replica()
    assert run(here, "1", bound="strategy replica_id", mentioned="device") == []
    assert run(here, "device = 'mine'", bound="device") == ["device"]


def test_ipythons_names_are_no_change():
    here = replica()
    assert run(here, "_ = 1; __ = 2; _i3 = 'x'; In = []; _own = 3") == ["_own"]


def test_which_names_are_the_users():
    assert all(map(travels, ["x", "_x", "__x", "_1x", "_iris", "display", "Input"]))
    assert not any(map(travels, ["_", "__", "___", "_1", "_i", "_i1", "_ih", "_oh", "_dh", "In", "Out", "__name__"]))


def no_token(obj: object) -> None:
    """Nothing is known on the other side."""


def test_only_what_can_be_compared_cheaply_is_watched():
    assert content(5, no_token) is None
    assert content("text", no_token) is None
    assert content(np.zeros(WATCHED_BYTES), no_token) is not None
    large = list(range(WATCHED_BYTES))
    held = content(large, no_token)
    assert held is not None
    assert held.same(content(large, no_token))
    assert not held.same(None)


def test_of_a_large_array_pages_here_and_there_are_looked_at(monkeypatch):
    monkeypatch.setattr(digests, "ARRAY_BYTES", 1 << 16)
    x = np.zeros(1 << 20)
    before, all_before = content(x, no_token), content(x, no_token, large=True)
    x[1000] = 1
    assert before.same(content(x, no_token))
    assert not all_before.same(content(x, no_token, large=True))
    x += 1
    assert not before.same(content(x, no_token))


def test_a_large_array_is_not_read_from_a_file_and_not_copied(monkeypatch, tmp_path):
    x = np.memmap(tmp_path / "x", np.uint8, "w+", shape=(1 << 20,))
    assert content(x, no_token) is not None
    monkeypatch.setattr(digests, "ARRAY_BYTES", 1 << 16)
    assert content(x, no_token) is None
    # More than there is memory.
    assert content(np.broadcast_to(np.zeros(2), (1 << 45, 2)), no_token) is None


# ---------------------------------------------------------------------- export


def test_every_kind_of_value_is_exported_as_what_it_is():
    here = replica()
    exec(
        "import os, threading, torch\nfrom torch import nn\n"
        "plain = [1]\nnet = nn.Linear(2, 2)\nlock = threading.Lock()\n"
        "opt = torch.optim.SGD(net.parameters())\nbig = torch.zeros(1_000_000)",
        here.names,
    )
    exports = export(here, "os", "plain", "net", "lock", "opt", "big")
    shown = exports.names
    assert shown["os"] == Imported("os")
    assert isinstance(shown["plain"], Plain)
    assert shown["net"] == NewModule("r7.net")
    assert isinstance(shown["lock"], Stayed)
    assert isinstance(shown["opt"], Plain)
    assert list(exports.objects) == ["r7.opt.1"]
    assert shown["big"].why == "it is larger than 1 MiB"


def test_only_the_owners_networks_travel_and_the_others_add_their_statistics():
    here = replica()
    here.names["net"] = nn.BatchNorm1d(2)
    shown = export(here, "net", owner=False)
    assert shown.modules == {}
    assert set(shown.states["r7.net"]) == {"running_mean", "running_var"}


def test_a_known_network_travels_as_its_changed_values():
    here = replica()
    here.names["net"] = nn.Linear(2, 2)
    export(here, "net")
    assert export(here, "net").states == {}
    with torch.no_grad():
        here.names["net"].bias.fill_(5)
    shown = export(here, "net")
    assert shown.names["net"] == KnownModule("r7.net")
    assert shown.states["r7.net"]["bias"].tolist() == [5, 5]


def test_a_network_above_the_limit_stays_and_what_trains_it_too(monkeypatch):
    monkeypatch.setattr(outgoing_module, "MODULE_BYTES", 10)
    here = replica()
    here.names["net"] = nn.Linear(20, 20)
    here.names["opt"] = torch.optim.SGD(here.names["net"].parameters())
    assert export(here, "net", "opt").names["opt"].text == "SGD over 2 tensors"
    assert isinstance(export(here, "net").names["net"], Stayed)
    assert isinstance(export(here, "net", whole=True).names["net"], NewModule)


def test_asked_for_a_large_value_travels_whole():
    here = replica()
    here.names["big"] = "x" * 3_000_000
    shown = export(here, "big", whole=True).names["big"]
    assert len(unpack(shown.payload, None)[0]) == 3_000_000


def test_results_that_stay_are_kept_for_a_while_to_be_fetched():
    here = replica()
    for tag in range(1, 12):
        shown = exported(here.export([], tag=tag, owner=True, result="x" * 3_000_000), here).result
        assert shown.name == f"_r{tag}"
    kept = [name for name in here.names if name.startswith("_r")]
    assert kept == [f"_r{tag}" for tag in range(4, 12)]
    assert run(here, "1") == []


def test_exporting_leaves_no_descriptor_open():
    here = replica()
    here.names["net"] = nn.Linear(200, 200)
    before = len(os.listdir("/proc/self/fd"))
    here.export(["net"], tag=1, owner=True).close()
    assert len(os.listdir("/proc/self/fd")) == before


# ---------------------------------------------------------------------- in


def test_networks_that_arrive_are_adopted_by_the_scope():
    here = replica()
    packed = pack({"net": nn.Sequential(nn.Linear(1, 1))}, handle=lambda module: f"k{id(module)}")
    here.bind(packed.payload, packed.slab)
    assert here.names["net"] in here._scope.adopted  # type: ignore[attr-defined]


def test_values_for_a_network_that_is_gone_are_ignored():
    here = replica()
    packed = pack({"k0": {"weight": torch.ones(1)}})
    here.load(packed.payload, packed.slab)


def test_a_snapshot_gives_a_new_replica_all_that_can_travel():
    old, new = replica(), replica()
    exec(
        "import torch, threading\nfrom torch import nn\n"
        "net = nn.Linear(2, 2)\nopt = torch.optim.Adam(net.parameters())\n"
        "_private = 1\ndef f(): return net\nlock = threading.Lock()\nboth = [lock, net]\nx = torch.zeros(100_000)\n"
        "temp = nn.Parameter(torch.ones(1))",
        old.names,
    )
    export(old, "net")
    packed, left = old.snapshot()
    assert sorted(left) == ["both", "lock"]
    new.restore(packed.payload, packed.slab)
    names = new.names
    assert names["opt"].param_groups[0]["params"][0] is names["net"].weight
    assert names["f"]() is names["net"]
    assert names["_private"] == 1
    assert names["device"] == torch.device("cpu")
    assert new.mirrors.find("r7.net") is names["net"]
    assert new.trained_by_name(names["temp"]) == ("name", "temp", "temp")


# ---------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(2, 3), "Tensor (2, 3) float32 on cpu"),
        ([1, 2], "list of 2"),
        ("abc", "str of 3"),
        (threading.Lock(), "lock"),
        (torch.optim.SGD(nn.Linear(1, 1).parameters()), "SGD over 2 tensors"),
        (object.__new__(torch.optim.SGD), "SGD over 0 tensors"),
    ],
)
def test_a_value_is_described_without_running_its_repr(value, words):
    assert describe(value) == words


def pickled(value: object, limit: int) -> bytes:
    return pack(value, limit=limit, in_band=True).payload.pickled


def test_the_limit_is_felt_before_everything_was_packed():
    with pytest.raises(TooLarge):
        pickled(list(range(10**6)), WATCHED_BYTES)
    with pytest.raises(TransferError):
        pickled(threading.Lock(), WATCHED_BYTES)
