"""Names between a notebook and its replicas: which travel, when, and what is there of them afterwards."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
from two_sides import Notebook

from mirror_nb import PerReplica, Remote
from mirror_nb.errors import TransferError
from mirror_nb.notebook.lent import Lent
from mirror_nb.notebook.names import Names


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# ---------------------------------------------------------------------- out


def test_a_name_that_the_cell_reads_is_there(notebook):
    notebook.here("x = 3")
    notebook.cell("y = x + 1")
    assert notebook.sent == ["x"]
    assert notebook.user_ns["y"] == 4


def test_a_name_is_sent_once(notebook):
    notebook.here("x = [1]")
    notebook.cell("y = x")
    notebook.cell("z = x")
    assert notebook.sent == []


def test_a_name_that_was_rebound_is_sent_anew(notebook):
    notebook.here("x = 1")
    notebook.cell("y = x")
    notebook.here("x = 2")
    notebook.cell("y = x")
    assert notebook.user_ns["y"] == 2


def test_a_cell_may_derive_from_a_dataclass_of_the_notebook(notebook):
    notebook.here("from dataclasses import dataclass\n@dataclass\nclass Base:\n    rate: float")
    notebook.cell("@dataclass\nclass Derived(Base):\n    size: int\nmade = Derived(0.1, 2)")
    assert notebook.user_ns["made"].size == 2
    with pytest.raises(TypeError, match="'rate' and 'size'"):
        notebook.user_ns["Derived"]()


class Counted(dict[str, object]):
    """The names of a notebook, which tell how often somebody has gone through all of them."""

    walks = 0

    def items(self):
        self.walks += 1
        return super().items()


def test_all_names_are_gone_through_as_often_for_many_that_a_cell_reads_as_for_one():
    walks = []
    for read in (["x1"], [f"x{i}" for i in range(100)]):
        held = Counted({f"x{i}": [i] for i in range(100)})
        names = Names(held, lambda name, replica_id: None, Lent(lambda: None))
        for parcel in names.prepare(read, [0]):
            parcel.packed.close()
        walks.append(held.walks)
    assert walks[0] == walks[1]


def test_nothing_is_sent_that_the_cell_does_not_read(notebook):
    notebook.here("import threading\nx = 1\nlock = threading.Lock()")
    notebook.cell("y = x")
    assert notebook.sent == ["x"]
    assert "lock" not in notebook.replicas[0].names


def test_a_name_of_the_notebooks_own_is_not_sent_over_the_replicas(notebook):
    notebook.here("device = 'mine'; replica_id = 77; In = [1]")
    notebook.cell("d, r = device, replica_id")
    assert notebook.user_ns["d"] == "cpu"
    assert notebook.user_ns["r"].values == (0, 1)
    assert notebook.user_ns["device"] == "mine"


@pytest.mark.parametrize("name", ["_x", "_private_helper", "__x"])
def test_a_name_with_an_underscore_travels_as_any_other(notebook, name):
    notebook.here(f"def {name}(): return 5")
    notebook.cell(f"y = {name}()\n{name}_2 = y + 1")
    assert notebook.user_ns["y"] == 5
    assert notebook.user_ns[f"{name}_2"] == 6


@pytest.mark.parametrize(
    "name", ["_", "__", "___", "_i", "_ii", "_iii", "_i3", "_12", "_oh", "_ih", "_dh", "_exit_code"]
)
def test_ipythons_own_names_stay_where_they_are(notebook, name):
    notebook.here(f"{name} = 'notebook'")
    notebook.cell(f"{name} = 'replica'")
    assert notebook.user_ns[name] == "notebook"
    notebook.cell(f"y = {name}")
    assert notebook.user_ns["y"] == "replica"


def test_a_function_brings_the_names_that_it_needs(notebook):
    notebook.here("import math\nk = 2\ndef inner(x): return math.floor(x) * k\ndef f(x): return inner(x) + 1\n")
    notebook.cell("y = f(3.5)")
    assert set(notebook.sent) == {"f", "inner", "k", "math"}
    assert notebook.user_ns["y"] == 7


def test_a_name_that_a_sent_function_needs_is_sent_when_it_was_rebound(notebook):
    notebook.here("k = 2\ndef f(): return k")
    notebook.cell("y = f()")
    notebook.here("k = 3")
    notebook.cell("y = f()")
    assert notebook.user_ns["y"] == 3
    assert notebook.sent == ["k"]


CLASS = "k = 2\nclass Base:\n    def value(self): return k\nclass C(Base):\n    pass\n"


def test_a_class_brings_its_base_and_the_names_of_its_methods(notebook):
    notebook.here(CLASS)
    notebook.cell("y = C().value()")
    assert notebook.user_ns["y"] == 2


def test_an_object_of_a_class_brings_the_names_of_its_methods(notebook):
    notebook.here(CLASS + "c = [C()]")
    notebook.cell("y = c[0].value()")
    assert notebook.user_ns["y"] == 2


@pytest.mark.parametrize("make", ["c = C()", "c = [C()]", "c = (lambda: C().value()).__call__"])
def test_a_name_that_an_object_needs_is_sent_when_it_was_rebound(notebook, make):
    look = "c.value()" if make == "c = C()" else "c[0].value()" if "[" in make else "c()"
    notebook.here(CLASS + make)
    notebook.cell(f"y = {look}")
    notebook.here("k = 3")
    notebook.cell(f"y = {look}")
    assert notebook.user_ns["y"] == 3


HOLDERS = {
    "list": "held = [f]; call = lambda: held[0]()",
    "dict": "held = {'f': {'g': f}}; call = lambda: held['f']['g']()",
    "partial": "import functools\nheld = [functools.partial(f)]; call = lambda: held[0]()",
    "object": "held = Holder(f); call = lambda: held.f()",
    "objects": "held = [Caller()]; call = lambda: held[0].go()",
    "method": "held = {'go': Caller().go}; call = lambda: held['go']()",
    "default": "def held(f=f): return f()\ncall = lambda: held()",
    "network": "held = nn.Linear(1, 1); held.f = f; call = lambda: held.f()",
    "hook": "held = nn.ReLU(); hook = held.register_forward_hook(lambda *a: f()); call = lambda: held(torch.ones(1))",
}
CALLED = """
k, seen = 2, []
def f():
    seen.append(k)
    return k
class Holder:
    def __init__(self, f): self.f = f
class Caller:
    def go(self): return f()
"""


@pytest.mark.parametrize("side", ["here", "cell"])
@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_functions_and_objects_that_a_value_holds_read_and_change_names_as_if_they_had_one(notebook, holder, side):
    made, call = holder.split("call = lambda: ")
    getattr(notebook, side)(f"{CALLED}{made}")
    notebook.cell(f"_ = {call}")
    assert notebook.user_ns["seen"] == [2]
    notebook.here("k = 3")
    notebook.cell(f"_ = {call}")
    assert notebook.user_ns["seen"] == [2, 3]


def test_a_closure_keeps_what_it_closed_over(notebook):
    notebook.here("def make(k):\n    def f(x): return x * k\n    return f\nf = make(5)")
    notebook.cell("y = f(2)")
    assert notebook.user_ns["y"] == 10
    assert "make" not in notebook.sent


def test_a_decorated_function_brings_the_names_of_the_inner_one(notebook):
    notebook.here(
        "import functools\nk = 4\n"
        "def twice(g):\n    @functools.wraps(g)\n    def f(*a): return g(*a) * 2\n    return f\n"
        "@twice\ndef f(x): return x + k\n"
    )
    notebook.cell("y = f(1)")
    assert notebook.user_ns["y"] == 10


def test_a_module_travels_as_an_import(notebook):
    notebook.here("import os.path as p, numpy as np")
    notebook.cell("a, b = p.__name__, np.float32(2)")
    assert notebook.there("p") is os.path
    assert notebook.user_ns["b"] == np.float32(2)


def test_what_cannot_be_sent_is_named_before_anything_was_sent(notebook):
    before = descriptors()
    notebook.here("import threading\nbig = torch.zeros(100_000)\nlock = threading.Lock()\nx = 1")
    with pytest.raises(TransferError, match=r"`lock` \(lock\) cannot be sent to the replicas: .*Make it inside the"):
        notebook.cell("x, big, lock")
    assert "x" not in notebook.replicas[0].names
    assert descriptors() == before
    notebook.cell("y = x")
    assert notebook.user_ns["y"] == 1


def test_what_the_cell_binds_itself_where_it_needs_it_need_not_be_sent(notebook):
    notebook.here("f = open('/dev/null'); f.close(); x = 1")
    notebook.cell("for f in (1, 2): pass\ny = f + x")
    assert (notebook.user_ns["f"], notebook.user_ns["y"]) == (2, 3)


def test_what_a_cell_asks_for_by_its_name_is_sent_or_named_though_the_cell_may_bind_it(notebook):
    notebook.here("import threading\nmodel = [threading.Lock()]")
    with pytest.raises(TransferError, match=r"`model` \(list\)"):
        notebook.cell("if 'model' not in globals(): model = []\nmodel")
    assert notebook.user_ns["model"]


def test_what_another_value_needs_is_sent_or_named_though_the_cell_may_bind_it(notebook):
    notebook.here("import threading\nlock = threading.Lock()\ndef f():\n    with lock: return 1")
    with pytest.raises(TransferError, match=r"`lock` \(lock\)"):
        notebook.cell("if f: lock = None\nlock, f()")


def test_what_a_function_needs_and_cannot_be_sent_is_named(notebook):
    notebook.here("import threading\nlock = threading.Lock()\ndef f():\n    with lock: return 1")
    with pytest.raises(TransferError, match=r"`lock` \(lock\)"):
        notebook.cell("f()")


def test_two_names_for_one_object_stay_one_object(notebook):
    notebook.here("a = [1]; b = a")
    notebook.cell("same = a is b")
    assert notebook.user_ns["same"] is True


def test_replicas_that_lack_different_names_get_what_each_lacks(notebook):
    notebook.here("a = 1; b = 2")
    notebook.cell("a", [0])
    notebook.cell("c = a + b + replica_id")
    assert notebook.user_ns["c"].values == (3, 4)


def test_a_replica_that_starts_anew_is_sent_everything_again(notebook):
    notebook.here("a = 1")
    notebook.cell("a")
    notebook.names.forget_replica(1)
    del notebook.replicas[1].names["a"]
    notebook.cell("b = a")
    assert notebook.sent == ["a"]
    assert notebook.user_ns["b"] == 1


def test_a_name_that_was_deleted_in_the_notebook_is_not_kept_alive(notebook):
    notebook.here("class Big: pass\nbig = Big()")
    alive = weakref.ref(notebook.user_ns["big"])
    notebook.cell("big")
    notebook.here("del big")
    notebook.cell("1")
    gc.collect()
    assert alive() is None


def test_tensors_travel_without_a_copy_for_each_replica(notebook):
    notebook.here("x = torch.zeros(1_000_000)")
    notebook.cell("y = float(x.sum())")
    assert notebook.sent_bytes < 2 * 4_100_000
    assert notebook.user_ns["y"] == 0


# ---------------------------------------------------------------------- back


def test_one_value_comes_back_where_all_replicas_agree(notebook):
    returned = notebook.cell("a = [1, {'b': torch.ones(2)}]")
    assert returned.bound == ["a"]
    assert torch.equal(notebook.user_ns["a"][1]["b"], torch.ones(2))


def test_weak_references_come_back_as_such_to_what_the_notebook_has(notebook):
    # Lightning's trainers have a proxy of the network that they train, torch's schedulers references.
    notebook.here("import weakref\nfrom torch import nn\nclass Holder: pass")
    notebook.cell(
        "model, holder = nn.Linear(1, 1), Holder()\nholder.of_model = proxy = weakref.proxy(model)\n"
        "holder.of_itself = weakref.proxy(holder)\nholder.reference = weakref.ref(model)\n"
        "holder.to_none = weakref.ref(Holder())"
    )
    model, holder, proxy = (notebook.user_ns[name] for name in ("model", "holder", "proxy"))
    assert {type(proxy), type(holder.of_model)} == {weakref.CallableProxyType}
    assert proxy.weight is model.weight is holder.of_model.weight
    assert holder.of_itself.of_model is holder.of_model
    assert (holder.reference(), holder.to_none()) == (model, None)
    notebook.cell("same = proxy.weight is model.weight is holder.of_model.weight")
    assert notebook.user_ns["same"] is True


def test_a_container_that_holds_itself_comes_back_where_they_differ(notebook):
    notebook.cell("ring = {'n': replica_id}\nring['next'] = [ring]\nother = 1")
    ring = notebook.user_ns["ring"]
    assert [one["n"] for one in ring.values] == [0, 1]
    assert all(one["next"][0] is one for one in ring.values)
    assert notebook.user_ns["other"] == 1
    notebook.cell("ring['n'] += 1")
    assert [one["n"] for one in ring.values] == [1, 2]


def test_a_per_replica_comes_back_where_they_differ(notebook):
    notebook.cell("a = torch.tensor(float(replica_id))")
    assert isinstance(notebook.user_ns["a"], PerReplica)
    assert notebook.user_ns["a"][1] == 1


def test_a_per_replica_read_by_a_cell_is_each_ones_own_value(notebook):
    notebook.cell("a = replica_id * 10")
    notebook.cell("b = a + 1")
    assert notebook.sent == []
    assert notebook.user_ns["b"].values == (1, 11)


def test_a_list_that_the_cell_changed_in_place_comes_back(notebook):
    notebook.here("losses = []")
    notebook.cell("losses.append(1.5)")
    assert notebook.user_ns["losses"] == [1.5]
    notebook.cell("losses.append(2.5)")
    assert notebook.user_ns["losses"] == [1.5, 2.5]


def test_a_large_list_that_the_cell_changed_in_place_comes_back(notebook):
    notebook.here("losses = [0.5] * 50_000")
    notebook.cell("losses.append(1.5)")
    assert len(notebook.user_ns["losses"]) == 50_001


def test_what_was_only_read_does_not_come_back(notebook):
    notebook.here("xs = [1]")
    before = notebook.user_ns["xs"]
    returned = notebook.cell("y = sum(xs)")
    assert returned.bound == ["y"]
    assert notebook.user_ns["xs"] is before


def test_names_that_only_one_replica_binds_come_back(notebook):
    notebook.cell("if replica_id == 1:\n    only = 5")
    assert notebook.user_ns["only"] == 5


def test_a_cell_on_one_replica_gives_plain_values(notebook):
    notebook.cell("a = replica_id", [1])
    assert notebook.user_ns["a"] == 1
    notebook.cell("b = a + replica_id")
    assert notebook.user_ns["b"].values == (1, 2)


def test_functions_and_classes_of_the_cell_are_usable_in_the_notebook(notebook):
    notebook.cell("k = 3\ndef f(x): return x + k\nclass C:\n    def g(self): return k\nc = C()")
    assert notebook.user_ns["f"](1) == 4
    assert notebook.user_ns["c"].g() == 3
    assert isinstance(notebook.user_ns["c"], notebook.user_ns["C"])
    notebook.here("k = 30")
    assert notebook.user_ns["f"](1) == 31


def test_a_class_of_the_notebook_is_still_itself_when_its_objects_come_back(notebook):
    notebook.here("class C: pass")
    notebook.cell("c = C()")
    assert type(notebook.user_ns["c"]) is notebook.user_ns["C"]


def test_objects_of_classes_that_a_function_of_a_module_makes_are_the_same_on_all_replicas(
    notebook, tmp_path, monkeypatch
):
    (tmp_path / "makes_classes.py").write_text(
        "import collections\n"
        "def pair(): return collections.namedtuple('Pair', 'x y')(1, 2)\n"
        "def local():\n"
        "    class Local:\n"
        "        def f(self): return 3\n"
        "    return Local()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    notebook.here("import makes_classes")
    notebook.cell("a = makes_classes.pair(); b = [makes_classes.local()]")
    assert notebook.user_ns["a"] == (1, 2)
    assert notebook.user_ns["b"][0].f() == 3
    sys.modules.pop("makes_classes")


def test_an_import_in_the_cell_is_an_import_here(notebook):
    notebook.cell("import os.path as p")
    assert notebook.user_ns["p"] is os.path


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            "a = torch.zeros(1_000_000)",
            r"<a: Tensor \(1000000,\) float32 on cpu, in the replicas \(it is larger",
        ),
        (
            "import threading\na = threading.Lock()",
            r"<a: lock, in the replicas \(lock cannot be sent: .*pickle",
        ),
        (
            "a = torch.optim.SGD([torch.ones(1)])",
            r"<a: SGD over 1 tensors, in the replicas \(it belongs to",
        ),
        ("a = (i for i in ())", r"<a: generator, in the replicas"),
        ("a = 'x' * 2_000_000", r"<a: str of 2000000, in the replicas"),
    ],
)
def test_what_cannot_or_should_not_travel_leaves_a_stand_in_that_says_so(notebook, source, says):
    returned = notebook.cell(source)
    assert "a" in returned.stayed
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(repr(notebook.user_ns["a"]))


def test_a_stand_in_is_the_value_itself_in_a_cell_under_any_name(notebook):
    notebook.cell("a = torch.full((1_000_000,), float(replica_id))")
    notebook.here("held = {'it': a}; other = a")
    notebook.cell("s = [float(a[0]), float(held['it'][1]), float(other[2])]")
    assert notebook.user_ns["s"].values == ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0])


def test_a_stand_in_whose_value_is_gone_says_which_name(notebook):
    notebook.cell("a = torch.zeros(1_000_000)")
    notebook.here("other = a")
    for replica in notebook.replicas:
        del replica.names["a"]
    with pytest.raises(TransferError, match="`a` no longer exists in this replica; run the cell that makes it again"):
        notebook.cell("other")


def test_fetching_brings_the_value_and_leaves_the_stand_in(notebook):
    notebook.cell("a = torch.ones(1_000_000)")
    stand_in = notebook.user_ns["a"]
    assert float(stand_in.fetch().sum()) == 1_000_000
    assert notebook.user_ns["a"] is stand_in
    assert isinstance(stand_in, Remote)


def test_fetching_brings_the_value_of_the_replica_that_has_it(notebook):
    notebook.cell("a = torch.full((1_000_000,), float(replica_id))", [1])
    assert "brings replica 1's" in repr(notebook.user_ns["a"])
    assert float(notebook.user_ns["a"].fetch()[0]) == 1
    notebook.cell("import threading\nb = threading.Lock() if replica_id else torch.ones(1)\nc = b")
    assert notebook.user_ns["b"][1].replica_id == 1


def test_a_value_that_cannot_be_rebuilt_here_leaves_a_stand_in(notebook):
    notebook.cell(
        "class Picky:\n    def __reduce__(self): return (Picky._make, ())\n"
        "    @staticmethod\n    def _make(): return nowhere\n"
        "p = Picky()"
    )
    assert "cannot be rebuilt here" in repr(notebook.user_ns["p"])


# ---------------------------------------------------------------------- networks


def test_threads_and_locks_of_the_test_itself_cannot_be_sent():
    made = Notebook(1)
    made.user_ns["thread"] = threading.current_thread()
    with pytest.raises(TransferError, match="`thread`"):
        made.cell("thread")


def test_what_differs_by_replica_is_each_ones_own_value_wherever_it_is_sent(notebook):
    notebook.cell("mine = {'r': replica_id}")
    notebook.here("kept = alias = mine; pair = [mine, 1]")
    notebook.cell("seen = mine['r'], alias['r'], pair[0]['r']")
    assert notebook.user_ns["seen"].values == ((0, 0, 0), (1, 1, 1))
    for replica_id, replica in enumerate(notebook.replicas):
        # As after a restart.
        notebook.names.forget_replica(replica_id)
        del replica.names["mine"]
    returned = notebook.cell("seen = mine['r']")
    assert notebook.sent == ["mine"]
    assert (returned.bound, notebook.user_ns["seen"].values) == (["seen"], (0, 1))
    notebook.cell("mine['r']")
    assert notebook.sent == []
    notebook.cell("mine['n'] = 5")
    assert notebook.user_ns["mine"] is notebook.user_ns["kept"]
    assert [value["n"] for value in notebook.user_ns["mine"]] == [5, 5]


def test_values_of_another_number_of_replicas_stay_together(notebook):
    notebook.user_ns["three"] = PerReplica((1, 2, 3))
    notebook.cell("seen = three[2]")
    assert notebook.user_ns["seen"] == 3
