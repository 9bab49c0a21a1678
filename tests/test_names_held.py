"""What either side deletes, and what the other holds by other names."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from two_sides import NET

from mirror_nb.errors import TransferError

HELD = {
    "another name": ("other = net", "other"),
    "a list": ("held = [(1, net)]", "held[0][1]"),
    "an object": ("class Trainer: pass\ntrainer = Trainer(); trainer.net = net", "trainer.net"),
    "a part's name": ("part = net[0]", "part"),
    "a function": ("import functools\npredict = functools.partial(net.forward)", "predict.func.__self__"),
    "another network": ("around = nn.Sequential(net)", "around[0]"),
}


@pytest.mark.parametrize("gone", ["here", "in a cell", "bound anew"])
@pytest.mark.parametrize(("hold", "what"), HELD.values(), ids=HELD)
def test_a_network_that_the_notebook_still_has_lives_on_in_the_replicas(notebook, hold, what, gone):
    notebook.cell(f"from torch import nn\n{NET}\noptimizer = torch.optim.SGD(net.parameters(), 1.)")
    notebook.here(hold)
    if gone == "here":
        notebook.here("del net")
    else:
        notebook.cell("del net" if gone == "in a cell" else NET)
    gc.collect()
    notebook.cell("pass")
    notebook.cell(f"same = all(any(p is q for q in optimizer.param_groups[0]['params']) for p in {what}.parameters())")
    assert notebook.user_ns["same"] is True


def test_an_object_that_cannot_be_looked_into_ends_no_cell(notebook):
    notebook.here(
        "class Proxy:\n    def __getattribute__(self, name): raise RuntimeError('nothing is bound')\nproxy = Proxy()"
    )
    notebook.cell(f"from torch import nn\n{NET}")
    notebook.here("held = [proxy, net]; del net")
    notebook.cell("pass")
    notebook.cell("pass")
    gc.collect()
    assert len(notebook.replicas[0].mirrors.roots()) == 1


PROXIES = {
    "a reference that is dead": "import weakref\nclass C: pass\nproxy = weakref.proxy(C())",
    "one that is not bound": "class Proxy:\n"
    "    @property\n    def __class__(self): raise RuntimeError('nothing is bound')\nproxy = Proxy()",
}


@pytest.mark.parametrize("proxy", PROXIES.values(), ids=PROXIES)
def test_a_proxy_of_nothing_hinders_neither_an_optimizer_nor_the_end_of_the_replicas(notebook, proxy):
    notebook.here(f"{proxy}\nnet = nn.Linear(2, 2)\noptimizer = torch.optim.SGD(net.parameters(), 0.1)")
    notebook.cell("rate = optimizer.param_groups[0]['lr']")
    assert notebook.user_ns["rate"] == 0.1
    assert notebook.there("optimizer").param_groups[0]["params"][0] is notebook.there("net").weight
    notebook.cell("kept = (i for i in 'abc')")
    assert notebook.names.ended() == (["kept"], [])


def test_what_the_notebook_holds_no_more_is_free_in_the_replicas(notebook):
    notebook.cell(f"from torch import nn\n{NET}")
    notebook.here("held = [net]; del net")
    notebook.cell("pass")
    notebook.cell("pass")
    alive = [weakref.ref(replica.mirrors.roots()[0][1]) for replica in notebook.replicas]
    notebook.here("del held")
    gc.collect()
    notebook.cell("pass")
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_optimizers_of_a_list_keep_their_states(notebook):
    notebook.cell(
        f"from torch import nn\n{NET}\noptimizer = torch.optim.Adam(net.parameters())\n"
        "net(torch.ones(1, 2)).sum().backward(); optimizer.step()"
    )
    notebook.here("runs = [(net, optimizer)]; del net, optimizer")
    notebook.cell("pass")
    notebook.cell("n = len(runs[0][1].state)")
    assert notebook.user_ns["n"] == 4


def test_a_generator_under_another_name_is_the_same_one(notebook):
    notebook.cell("gen = torch.Generator().manual_seed(3); a = torch.rand(1, generator=gen)")
    notebook.here("other = gen; del gen")
    notebook.cell("pass")
    notebook.cell("b = torch.rand(1, generator=other)")
    expected = torch.rand(2, generator=torch.Generator().manual_seed(3))
    assert [float(notebook.user_ns[name]) for name in "ab"] == expected.tolist()


@pytest.mark.parametrize("anew", [True, False])
@pytest.mark.parametrize(("hold", "what"), [("other = a", "other"), ("held = [a]", "held[0]")])
def test_a_stand_in_means_the_value_that_its_name_had(notebook, hold, what, anew):
    notebook.cell("a = torch.full((1_000_000,), 1.)")
    notebook.here(hold)
    if anew:
        notebook.cell("a = torch.full((1_000_000,), 2.)")
    else:
        notebook.here("del a")
    notebook.cell("pass")
    notebook.cell(f"seen = float({what}[0])")
    assert notebook.user_ns["seen"] == 1
    notebook.here(f"brought = float({what}.fetch()[0]); text = repr({what})")
    assert notebook.user_ns["brought"] == 1
    assert notebook.user_ns["text"].startswith("<a: Tensor")


def test_a_stand_ins_value_is_free_once_the_notebook_holds_it_no_more(notebook):
    notebook.cell("a = torch.full((1_000_000,), 1.)")
    alive = [weakref.ref(replica.names["a"]) for replica in notebook.replicas]
    notebook.here("other = a; del a")
    notebook.cell("pass")
    assert None not in [ref() for ref in alive]
    notebook.here("del other")
    notebook.cell("pass")
    assert [ref() for ref in alive] == [None, None]


def test_a_name_that_the_notebook_deletes_is_deleted_in_the_replicas(notebook):
    notebook.here("k = 1")
    notebook.cell("made = k + replica_id\nnet = nn.Linear(2, 2)")
    notebook.here("del k, made, net")
    notebook.cell("pass")
    assert [set(replica.names) & {"k", "made", "net"} for replica in notebook.replicas] == [set(), set()]


def test_what_a_deleted_network_took_is_free_in_the_replicas(notebook):
    notebook.cell("net = nn.Linear(2, 2)\noptimizer = torch.optim.Adam(net.parameters())")
    alive = [weakref.ref(notebook.there("net", r).weight) for r in (0, 1)]
    notebook.here("del net, optimizer")
    notebook.cell("pass")
    gc.collect()
    notebook.cell("pass")
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_a_name_deleted_after_it_was_bound_anew_leaves_no_earlier_value(notebook):
    notebook.here("k = 1")
    notebook.cell("k")
    notebook.here("k = 2")
    notebook.cell("pass")
    notebook.here("del k")
    with pytest.raises(NameError):
        notebook.cell("k")


def test_a_name_deleted_and_bound_anew_is_there(notebook):
    notebook.here("k = 1")
    notebook.cell("k")
    notebook.here("del k")
    notebook.here("k = 2")
    notebook.cell("seen = k")
    assert notebook.user_ns["seen"] == 2


def test_a_deleted_name_is_deleted_in_replicas_that_had_no_part_in_the_next_cell(notebook):
    notebook.here("k = 1")
    notebook.cell("k")
    notebook.here("del k")
    notebook.cell("pass", replicas=[0])
    assert "k" in notebook.replicas[1].names
    notebook.cell("pass")
    assert "k" not in notebook.replicas[1].names


def test_names_that_mirror_nb_gives_each_replica_are_not_deleted(notebook):
    notebook.cell("device = 'mine'")
    notebook.user_ns.pop("device", None)
    notebook.cell("there = replica_id, num_replicas, strategy is not None, device")
    assert notebook.there("there", 1)[:3] == (1, 2, True)


def test_names_that_mirror_nb_gives_each_replica_are_there_again_after_a_cell_that_deletes_them(notebook):
    notebook.here("strategy, device = 'the notebook has', 'its own'")
    assert notebook.cell("del strategy, device, replica_id").deleted == []
    notebook.cell("there = strategy, device, replica_id")
    assert notebook.there("there", 1)[1:] == ("cpu", 1)
    assert (notebook.user_ns["strategy"], notebook.user_ns["device"]) == ("the notebook has", "its own")


def test_what_a_cell_has_given_such_a_name_is_deleted_with_it(notebook):
    notebook.cell("device = 'mine'")
    assert notebook.user_ns["device"] == "mine"
    assert notebook.cell("del device").deleted == ["device"]
    assert "device" not in notebook.user_ns
    notebook.cell("there = device")
    assert notebook.there("there") == "cpu"


def test_a_name_of_which_the_notebook_took_nothing_is_left_alone_in_the_replica(notebook):
    notebook.cell("kept = 5")
    notebook.here("del kept")
    notebook.names.shared.forget(0, ["kept"])
    notebook.cell("pass")
    assert ["kept" in replica.names for replica in notebook.replicas] == [True, False]


def test_a_name_that_a_cell_deletes_is_deleted_in_the_notebook(notebook):
    notebook.here("k, kept = 1, 2")
    notebook.cell("made = k + replica_id\nnet = nn.Linear(2, 2)")
    assert notebook.cell("del k, made, net").deleted == ["k", "made", "net"]
    assert notebook.user_ns.keys().isdisjoint({"k", "made", "net"})
    assert notebook.user_ns["kept"] == 2


def test_a_name_that_a_function_of_a_cell_deletes_is_deleted_in_the_notebook(notebook):
    notebook.here("k = 1")
    notebook.cell("def let_go():\n    global k\n    del k\nk\nlet_go()")
    assert "k" not in notebook.user_ns


def test_a_name_that_a_cell_deletes_and_binds_again_holds_what_it_was_bound_to(notebook):
    notebook.here("k = 1")
    assert notebook.cell("del k\nk = 2").deleted == []
    assert notebook.user_ns["k"] == 2


@pytest.mark.parametrize(
    "cell",
    ["k = 2\ndel k", "for k in range(3): pass\ndel k", "try:\n    1 / 0\nexcept ZeroDivisionError as k:\n    str(k)"],
)
@pytest.mark.parametrize("before", ["pass", "k"])
def test_a_name_that_a_cell_binds_anew_and_deletes_is_deleted_in_the_notebook(notebook, before, cell):
    notebook.here("k, kept = 0, 1")
    notebook.cell(before)
    notebook.here("k = 1")
    assert notebook.cell(cell).deleted == ["k"]
    assert "k" not in notebook.user_ns
    assert not any("k" in replica.names for replica in notebook.replicas)


@pytest.mark.parametrize("before", ["pass", "k"])
def test_a_name_that_a_cell_would_have_bound_and_deleted_but_did_not_stays(notebook, before):
    notebook.here("k = 0")
    notebook.cell(before)
    notebook.here("k = 1")
    cell = "try:\n    pass\nexcept ValueError as k:\n    pass\nif False:\n    k = 2\n    del k"
    assert notebook.cell(cell).deleted == []
    notebook.cell("seen = k")
    assert notebook.user_ns["k"] == notebook.user_ns["seen"] == 1


def test_a_name_that_one_replica_alone_binds_and_deletes_stays(notebook):
    notebook.here("k = 1")
    assert notebook.cell("if replica_id:\n    k = 2\n    del k").deleted == []
    notebook.cell("seen = k")
    assert notebook.user_ns["k"] == notebook.user_ns["seen"] == 1


def test_a_name_that_one_replica_deletes_stays_and_is_sent_to_it_again(notebook):
    notebook.here("k = 1")
    assert notebook.cell("k\nif replica_id: del k").deleted == []
    assert notebook.user_ns["k"] == 1
    notebook.cell("seen = k")
    assert notebook.user_ns["seen"] == 1
    assert notebook.sent == ["k"]


def test_a_name_that_a_cell_deletes_is_deleted_in_replicas_that_had_no_part_in_it(notebook):
    notebook.here("k = 1")
    notebook.cell("k")
    notebook.cell("del k", replicas=[0])
    assert "k" not in notebook.user_ns
    notebook.cell("pass")
    assert "k" not in notebook.replicas[1].names


def test_the_very_value_that_a_cell_let_go_of_can_be_bound_again(notebook):
    notebook.here("k = held = torch.ones(2)")
    notebook.cell("k\ndel k")
    notebook.here("k = held")
    notebook.cell("seen = float(k.sum())")
    assert notebook.user_ns["seen"] == 2


def test_a_name_that_a_cell_could_have_deleted_but_did_not_stays(notebook):
    notebook.here("k = 1")
    assert notebook.cell("if False: del k").deleted == []
    assert notebook.user_ns["k"] == 1


def test_a_name_that_one_replica_alone_had_and_deletes_is_deleted_in_the_notebook(notebook):
    notebook.cell("if replica_id: k = 1")
    assert notebook.cell("globals().pop('k', None)").deleted == ["k"]
    assert "k" not in notebook.user_ns


def test_a_name_whose_push_failed_is_deleted_in_the_replicas_with_the_notebooks(notebook):
    notebook.here("import threading\nk = [1]")
    notebook.cell("k")
    notebook.here("k.append(threading.Lock())")
    for replica in range(2):
        notebook.names.shared.outdate(replica, ["k"])
    with pytest.raises(TransferError):
        notebook.names.prepare(["k"], range(2))
    notebook.here("del k")
    notebook.cell("pass")
    assert ["k" in replica.names for replica in notebook.replicas] == [False, False]


def test_a_name_that_a_replica_took_over_from_another_is_deleted_with_the_notebooks(notebook):
    notebook.here("k = 1")
    notebook.cell("k")
    notebook.names.forget_replica(1)
    notebook.names.restored(1, 0, ())
    notebook.here("del k")
    notebook.cell("pass")
    assert ["k" in replica.names for replica in notebook.replicas] == [False, False]


def test_an_object_of_the_replicas_that_cannot_be_looked_into_ends_no_cell(notebook):
    notebook.here("x = [1]")
    notebook.cell("x")
    for replica in notebook.replicas:
        exec(
            "class Proxy:\n    def __getattribute__(self, name): raise RuntimeError('nothing is bound')\n"
            "proxy = Proxy()",
            replica.names,
        )
    notebook.cell("x.append(2)")
    notebook.here("assert x == [1, 2]")


def test_an_object_is_filled_though_what_it_holds_has_another_value_under_its_name_by_now(notebook):
    notebook.here("class Log:\n    pass\nlog, losses = Log(), [1]")
    notebook.cell("log.losses = losses")
    notebook.here("losses = [2]")
    returned = notebook.cell("log.best = 3")
    log = notebook.user_ns["log"]
    assert (log.best, log.losses) == (3, [1])
    assert returned.altered == []
    assert notebook.user_ns["losses"] == [2]


@pytest.mark.parametrize(
    ("make", "change", "inside"),
    [
        ("own = [1]; own.append(own)", "own.append(2)", "own[1]"),
        ("own = [1]", "own.append(own)", "own[1]"),
        ("own = {}; own['again'] = [own]", "own['best'] = 3", "own['again'][0]"),
        ("class Hook:\n    pass\none = Hook(); own = [one]; one.hooks = own; del one", "own[0].n = 3", "own[0].hooks"),
    ],
)
def test_a_container_that_holds_itself_does_so_after_a_cell_has_changed_it(notebook, make, change, inside):
    notebook.here(make)
    own = notebook.user_ns["own"]
    notebook.cell(change)
    notebook.here(f"inside = {inside}")
    assert notebook.user_ns["own"] is own
    assert notebook.user_ns["inside"] is own
    notebook.cell(f"there = {inside} is own, len(own)")
    assert notebook.user_ns["there"] == (True, len(own))


def test_a_method_that_a_cell_has_called_is_not_told_to_have_changed_where_its_object_has_followed(notebook):
    notebook.here(
        "class Trainer:\n    n = 0\n    def step(self):\n        self.n += 1\ntrainer = Trainer()\nstep = trainer.step"
    )
    returned = notebook.cell("step()")
    assert (returned.bound, returned.altered) == (["trainer"], [])
    assert notebook.user_ns["trainer"].n == 1
    returned = notebook.cell("step()\nsame = step.__self__ is trainer")
    assert notebook.sent == []
    assert notebook.user_ns["trainer"].n == 2
    assert notebook.user_ns["same"] is True
    # Without a name of its own the object is told of by its method's.
    notebook.here("trainer = None")
    assert notebook.cell("step()").altered == ["step"]


DATA = """
from torch.utils.data import DataLoader, Subset, TensorDataset
data = TensorDataset(torch.arange(6.))
chosen = Subset(data, [0, 1, 2])
"""


def test_a_data_set_with_a_name_stays_that_of_loaders_that_a_cell_goes_through(notebook):
    notebook.here(DATA + "loaders = {'train': DataLoader(chosen), 'test': DataLoader(data)}")
    notebook.cell("for name, loader in loaders.items(): len(loader)")
    look = "loaders['train'].dataset is chosen, loaders['test'].dataset is data, loader is loaders['test']"
    assert eval(look, notebook.user_ns) == (True, True, True)
