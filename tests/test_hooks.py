"""Hooks and functions that networks get after the replicas have them: there is one network, wherever it got them."""

from __future__ import annotations

import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from driving import running
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import mirror_nb as mnb
from mirror_nb.mirroring.mirrors import Mirrors
from mirror_nb.transfer.opening import unpack
from mirror_nb.transfer.packing import pack

Run = Callable[[str], Any]
X = torch.ones(2, 4)


@pytest.fixture
def run(shell: InteractiveShell) -> Run:
    """Run a cell; notebook and replicas have a network, `forward` gives what it makes of ones."""
    run_cell = running(shell)
    run_cell("""%%mirrored
import functools, threading, types, torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
def forward(): return net(torch.ones(2, 4)).sum().item()
""")
    return run_cell


SIDES = pytest.mark.parametrize(
    ("one", "other"), [("", "%%mirrored\n"), ("%%mirrored\n", "")], ids=["in the notebook", "in the replicas"]
)
MADE: dict[str, str] = {
    "a hook": "handle = net[2].register_forward_hook(lambda m, i, o: o * 3)",
    "a hook of the whole": "handle = net.register_forward_hook(lambda m, i, o: o * 3)",
    "a hook before": "handle = net[2].register_forward_pre_hook(lambda m, i: (i[0] * 3,))",
    "one with keywords": "handle = net.register_forward_hook(lambda m, i, kw, o: o * 3, with_kwargs=True)",
    "one that is called always": "handle = net.register_forward_hook(lambda m, i, o: o * 3, always_call=True)",
    "a partial one": "handle = net.register_forward_hook(functools.partial(lambda by, m, i, o: o * by, 3))",
}


@SIDES
@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_a_hook_is_there_on_both_sides_until_either_removes_it(run, one, other, made):
    before = run("forward()")
    run(one + made)
    after = run(one + "forward()")
    assert after != pytest.approx(before)
    assert run(other + "forward()") == after
    run(other + "handle.remove()")
    assert run(other + "forward()") == run(one + "forward()") == before
    assert run(one + "[len(part._forward_hooks_with_kwargs) for part in net.modules()]") == [0] * 4


@SIDES
def test_hooks_that_are_cleared_are_gone_on_both_sides(run, one, other):
    before = run("forward()")
    run(one + MADE["a hook"] + "\nnet[0].register_forward_hook(lambda m, i, o: -o)")
    assert run(other + "forward()") != before
    run(other + "for part in net.modules(): part._forward_hooks.clear()")
    assert run(one + "forward()") == before


@SIDES
def test_hooks_of_the_backward_pass_and_of_the_state_run_on_the_other_side(run, one, other):
    run(one + "told = []\ndef tell(what): return lambda *_: told.append(what)")
    run(one + "net[2].register_full_backward_hook(tell('back')); net.register_state_dict_post_hook(tell('state'))")
    assert run(other + "net(torch.ones(2, 4, requires_grad=True)).sum().backward(); net.state_dict(); told") == [
        "back",
        "state",
    ]


WATCH = """
class Watch:
    def __init__(self, part):
        self.seen = 0
        self.handle = part.register_forward_hook(self.see)
    def see(self, part, given, made):
        self.seen += 1
watch = Watch(net[0])
"""


@SIDES
def test_a_method_of_an_object_that_has_a_name_is_that_objects_on_both_sides(run, one, other):
    run(one + WATCH)
    run(one + "forward()")
    assert run(other + "forward(); watch.seen") == 2
    assert run(one + "forward(); watch.seen") == 3
    run(other + "watch.handle.remove(); forward()")
    assert run(one + "forward(); watch.seen") == 3


@SIDES
@pytest.mark.parametrize(
    "made",
    [
        "def add(to): net[0].register_forward_hook(lambda m, i, o: to.append(len(o)))\nadd(seen)",
        "net[0].register_forward_hook(functools.partial(lambda to, m, i, o: to.append(len(o)), seen))",
        "net[0].register_forward_hook(functools.partial(lambda by, to, m, i, o: to.append(len(o) * by), 1, seen))",
        "net[0].register_forward_hook(lambda m, i, o: seen.append(len(o)))",
        "def add(to):\n"
        " net[0].register_forward_hook(lambda m, i, o: to.append(len(o) if to is seen else later))\n"
        " if net is None: later = 0\n"
        "add(seen)",
    ],
    ids=["captured", "given", "given behind another", "by its name", "captured beside what is not there yet"],
)
def test_what_a_hook_adds_to_is_the_list_that_has_a_name(run, one, other, made):
    run(f"{one}seen = []\n{made}\nforward()")
    assert run(other + "forward(); seen") == [2, 2]
    assert run(one + "forward(); seen") == [2, 2, 2]


@SIDES
def test_what_a_hook_writes_into_a_collection_of_the_network_is_on_both_sides(run, one, other):
    run(one + "net.seen, net.runs = {}, {0: torch.zeros(())}")
    run(one + "def keep(m, i, o):\n m.seen['out'] = o; m.runs[0] += 1\nnet.register_forward_hook(keep)")
    made = run(one + "forward()")
    assert run(other + "net.seen['out'].sum().item(), net.runs[0].item()") == (made, 1)
    assert run(other + "forward(); net.runs[0].item()") == 2
    assert run(one + "net.runs[0].item()") == 2


def test_a_hook_sets_its_item_here_though_what_it_writes_to_differs_by_replica(run):
    run("seen = {}\ndef keep(m, i, o): seen['out'] = len(o)\nnet[0].register_forward_hook(keep)")
    assert run("%%mirrored\nnet(torch.ones(replica_id + 1, 4)); len(seen)") == 1
    assert run("[one['out'] for one in seen]") == [1, 2]
    assert run("net(torch.ones(5, 4)); [one['out'] for one in seen]") == [5, 5]
    assert run("%%mirrored\nseen['out']") == 5


@SIDES
def test_functions_among_the_attributes_are_on_both_sides(run, one, other):
    before = run("forward()")
    run(one + "def twice(self, x): return 2 * nn.Sequential.forward(self, self.shift(x))")
    run(one + "net.shift = lambda x: x + 0\nnet.forward = types.MethodType(twice, net)")
    assert run(other + "forward(), net.forward.__self__ is net") == (2 * before, True)
    run(other + "net.shift = lambda x: x * 0")
    assert run(one + "forward()") == run(other + "forward()") != 2 * before
    run(other + "del net.forward, net.shift")
    assert run(one + "forward()") == before


@SIDES
def test_a_hook_that_cannot_travel_stays_where_it_is_and_is_told_of_once(shell, run, one, other):
    run(one + "lock = threading.Lock()\ndef stay(m, i, o, lock=lock): return o + 1")
    with warnings.catch_warnings(record=True) as told, capture_output() as shown:
        warnings.simplefilter("always")
        for cell in (
            one + "handle = net.register_forward_hook(stay)",
            other + "first = forward()",
            one + "second = forward()",
            other + "net[1] = nn.Sigmoid(); third = forward()",
            one + "fourth = forward()",
        ):
            shell.run_cell(cell).raise_error()
    first, second, third, fourth = run("first, second, third, fourth")
    assert (second, fourth) == (pytest.approx(first + 4, abs=1e-5), pytest.approx(third + 4, abs=1e-5))
    said = "".join(str(warning.message) for warning in told) + shown.stdout + shown.stderr
    assert said.count("`stay`, a network's hook or attribute, stays in the process that set it") == 1
    run(one + "handle.remove()")
    assert run(one + "forward()") == third


def test_a_hook_registered_in_the_replicas_takes_no_other_ones_place(run):
    run("net[0]._forward_hooks.clear()")
    for i in range(4):
        run(f"net[0].register_forward_hook(lambda m, i, o: o + 10 ** {i})")
        run(f"%%mirrored\nnet[0].register_forward_hook(lambda m, i, o: o + 10 ** {i})")
    assert run("len(net[0]._forward_hooks)") == run("%%mirrored\nlen(net[0]._forward_hooks)") == 8


def test_a_cell_that_has_a_part_alone_costs_the_network_here_nothing(run):
    run("""%%mirrored
layer = net[0]
handle = layer.register_forward_hook(lambda m, i, o: o * 0)
""")
    run("net[2] = nn.Linear(3, 7); keep = net[1].register_forward_hook(lambda m, i, o: o + 1)")
    run("%%mirrored\nlayer.register_forward_hook(lambda m, i, o: o + 1)")
    look = "len(net[0]._forward_hooks), len(net[1]._forward_hooks), net[2].out_features"
    assert run(look) == run("%%mirrored\n" + look) == (2, 1, 7)
    run("net[2] = nn.Linear(3, 5)")
    run("%%mirrored\nhandle.remove()")
    assert run(look) == run("%%mirrored\n" + look) == (1, 1, 5)


def test_networks_that_are_half_made_end_no_cell(run):
    run("""
class Bare(nn.Module):
    def __init__(self): pass
class Odd(nn.Module):
    def modules(self): raise ValueError('no parts')
bare, odd = Bare(), Odd()
handle = odd.register_forward_hook(print)
""")
    assert run("%%mirrored\nhandle.remove()\n1") == 1
    run("del bare, odd, handle")


def same(strategy: mnb.MirroredStrategy, value: object) -> Any:
    first, second = strategy.local_results(value) if isinstance(value, mnb.PerReplica) else (value, value)
    assert first == second
    return first


class Net(nn.Module):
    """It has hooks of its own: a method, and a function that has captured it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.seen = nn.Linear(4, 3), nn.Linear(3, 2), 0
        self.a.register_forward_hook(self.see)
        self.a.register_forward_pre_hook(lambda part, given: self.see(part, given, None))

    def see(self, part: nn.Module, given: Any, made: Tensor | None) -> None:
        self.seen += 1

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def test_calls_of_a_strategy_have_hooks_and_give_them_back(two):
    with two.scope():
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def forward() -> float:
        return net(X).sum().item()

    before = same(two, two.run(forward))
    handle = net.b.register_forward_hook(lambda m, i, o: o * 3)
    assert same(two, two.run(forward)) == net(X).sum().item() == pytest.approx(3 * before, abs=1e-5)
    handle.remove()
    assert same(two, two.run(forward)) == net(X).sum().item() == before

    def hook_and_train() -> None:
        net.b.register_forward_hook(lambda m, i, o: o * 3)
        optimizer.zero_grad()
        net(X).sum().backward()
        optimizer.step()

    two.run(hook_and_train)
    trained = net(X).sum().item()
    assert same(two, two.run(forward)) == trained != pytest.approx(3 * before)
    net.b._forward_hooks.clear()
    assert same(two, two.run(forward)) == pytest.approx(trained / 3, abs=1e-5)
    net.kept = {}
    two.run(lambda: net.kept.update(out=net(X).detach()))
    assert torch.equal(net(X), net.kept["out"])
    # The network's own hooks count in the one network that there is, with another part, too.
    net.seen = 0
    two.run(lambda: setattr(net, "b", nn.Linear(3, 5)))
    assert net(X).shape == (2, 5)
    assert net.seen == 2
    assert same(two, two.run(lambda: (net(X).shape, net.seen))) == ((2, 5), 4)


def test_a_handle_outlives_a_part_that_is_replaced(two):
    with two.scope():
        net: Any = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    two.run(lambda: net(X).shape)
    kept = net[0]
    handle = kept.register_forward_hook(lambda m, i, o: o * 0)
    two.run(lambda: net.append(nn.Linear(3, 2)))
    assert len(net)
    assert len(list(net.parameters())) == 4
    assert net[0] is kept
    assert list(kept._forward_hooks) == [handle.id]
    handle.remove()
    assert same(two, two.run(lambda: len(net[0]._forward_hooks))) == 0


def test_hooks_that_both_sides_register_or_remove_at_once_are_all_there():
    here, there = Mirrors("k"), Mirrors("r")
    net: Any = nn.Sequential(nn.Linear(4, 3))
    goes, stays = (net[0].register_forward_hook(hook) for hook in (_first, _second))
    packed = pack(net, reference=here.reference, handle=here.handle)
    other, arrivals = unpack(packed.payload, packed.slab, resolve=there.resolve)
    there.take(arrivals)
    here.gave([net])
    assert here.known(net)
    assert there.known(other)
    other[0].register_forward_hook(_third)
    net[0].register_forward_hook(_fourth)
    goes.remove()
    assert here.known(net) is None
    assert there.rebuilt(other)
    packed = pack(other, handle=there.handle)
    came, arrivals = unpack(packed.payload, packed.slab, resolve=here.resolve)
    assert here.graft({here.handle(net): came}, arrivals)[here.handle(net)] is net
    assert set(net[0]._forward_hooks.values()) == {_second, _third, _fourth}
    stays.remove()
    assert _second not in net[0]._forward_hooks.values()


def _first(*_: object) -> None: ...
def _second(*_: object) -> None: ...
def _third(*_: object) -> None: ...
def _fourth(*_: object) -> None: ...


def test_numbers_of_hooks_do_not_meet_those_of_the_other_side(run):
    look = "from torch.utils.hooks import RemovableHandle\nRemovableHandle.next_id"
    run("handle = torch.ones(1, requires_grad=True).register_hook(print)")
    assert run("%%mirrored\nhandle.remove()\nmade = torch.ones(1, requires_grad=True).register_hook(print)") is None
    assert run("made.id") > 1 << 40 > run(look)
    assert run("%%mirrored\n" + look) > 1 << 40
    # Torch calls hooks of all modules as those of one that has their number.
    run("net.register_forward_pre_hook(lambda m, a, k: None, with_kwargs=True)")
    run("numbers = range(64); net._forward_pre_hooks_with_kwargs.update(dict.fromkeys(numbers, True))")
    assert run("%%mirrored\nforward()") == run("forward()")


HALVES = "one = nn.Linear(1, 1)\none.weight.register_hook(lambda gradient: gradient / 2)"
LATER = "one.bias.register_post_accumulate_grad_hook(lambda bias: bias.grad.zero_())"


def test_that_hooks_of_parameters_stay_in_the_notebook_is_told_once_of_each(shell, run):
    with warnings.catch_warnings(record=True) as told, capture_output() as shown:
        warnings.simplefilter("always")
        for cell in (HALVES, "%%mirrored\none(X)", LATER, "%%mirrored\none(X)", "%%mirrored\none(X)"):
            shell.run_cell("X = torch.ones(2, 1)\n" + cell if "%%" not in cell else cell).raise_error()
    said = "".join(str(warning.message) for warning in told) + shown.stdout + shown.stderr
    for parameter in ("weight", "bias"):
        assert said.count(f"hooks of parameters (Linear.{parameter}) stay in this process") == 1


def test_that_hooks_of_parameters_stay_in_a_script_is_told_where_run_is_called(two):
    with two.scope():
        one = nn.Linear(1, 1)
    handle = one.weight.register_hook(lambda gradient: gradient / 2)
    with pytest.warns(
        UserWarning, match=r"hooks of parameters \(Linear.weight\) stay in this process.*after backward"
    ):
        two.run(lambda: one(torch.ones(2, 1)).sum().item())
    handle.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        two.run(lambda: one(torch.ones(2, 1)).sum().item())


def test_a_handle_that_its_own_hook_has_travels():
    layer = nn.Linear(1, 1)
    weight = layer.weight
    handle = weight.register_hook(lambda grad: handle.remove())
    packed = pack([weight, handle])
    arrived: Any = unpack(packed.payload, packed.slab)[0]
    assert arrived[1].id == handle.id


def test_a_handle_of_what_is_gone_travels_and_removes_nothing():
    layer = nn.Linear(1, 1)
    handle = layer.register_forward_hook(_first)
    del layer
    packed = pack([handle])
    arrived = unpack(packed.payload, packed.slab)[0][0]
    assert type(arrived) is RemovableHandle
    assert arrived.id == handle.id
    arrived.remove()


def test_rebuilding_that_fails_leaves_hooks_attributes_and_classes_as_they_were():
    here = Mirrors("k")
    net: Any = nn.Sequential(nn.Linear(4, 3))
    handle = net[0].register_forward_hook(_first)
    packed = pack(net, handle=here.handle)
    arrived: Any
    arrived, arrivals = unpack(packed.payload, packed.slab)
    there = Mirrors("r")
    there.take(arrivals)
    handle.remove()
    net[0].register_forward_hook(_second)
    net[0].seen, net[0].__class__ = 1, _Linear
    packed = pack([net, _Fails()], handle=here.handle)
    with pytest.raises(ZeroDivisionError):
        unpack(packed.payload, packed.slab, known=there.find)
    assert list(arrived[0]._forward_hooks.values()) == [_first]
    assert (type(arrived[0]), hasattr(arrived[0], "seen")) == (nn.Linear, False)


class _Linear(nn.Linear):
    """The same, of a class of one's own."""


class _Fails:
    def __reduce__(self) -> Any:
        return _fail, ()


def _fail() -> None:
    raise ZeroDivisionError


def test_a_hook_that_brings_very_much_along_stays():
    here = Mirrors("k")
    net = nn.Linear(1, 1)
    here.handle(net)
    here.gave([net])
    data = bytes(65 << 20)
    net.register_forward_hook(lambda *_: print(data))
    with pytest.warns(UserWarning, match=r"<lambda>`, a network's hook.*since it brings more than 64 MiB along"):
        known = here.known(net)
    assert known is not None


def test_a_hook_that_has_no_hash_is_asked_again_and_travels():
    class Odd:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, *_: object) -> None: ...

    here = Mirrors("k")
    net = nn.Linear(1, 1)
    here.handle(net)
    here.gave([net])
    net.register_forward_hook(Odd())
    assert here.known(net) is None
    here.gave([net])
    assert here.known(net) is not None
    lock = threading.Lock()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        net.register_forward_hook(types.MethodType(lambda self, *_: None, lock))
        assert here.known(net) is not None
    assert len(told) == 1
