"""Plain attributes of networks: what has changed in them, and how it comes to another process."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import gc
import sys
import types
import warnings
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mirror_nb.mirroring.attributes import (
    TENSOR_BYTES,
    TENSORS,
    Attributes,
    names_by_id,
    names_in,
    of_one_side,
    set_attributes,
)
from mirror_nb.plain import FEW, FLAT_ITEMS, ITEMS


def network() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Sequential(nn.Conv2d(1, 1, 3), nn.ReLU()))
    made.losses, made.settings, made.kind = [1.0], {"a": (1, {2})}, torch.float32  # type: ignore[assignment]
    made.window, made.counts, made.order = deque([1.0], 2), Counter("a"), OrderedDict(x=1, y=2)  # type: ignore[assignment]
    made.lists = defaultdict(list)  # type: ignore[assignment]
    return made


def attributes(module: nn.Module) -> Attributes:
    return Attributes(module.modules())


def plain(module: nn.Module) -> list[dict[str, Any]]:
    internal = vars(nn.Module())
    return [{name: value for name, value in vars(part).items() if name not in internal} for part in module.modules()]


CHANGES: dict[str, Callable[[Any], object]] = {
    "a number of a part": lambda net: setattr(net[1], "p", 0.1),
    "a tuple": lambda net: setattr(net[2][0], "padding", (1, 1)),
    "a new one": lambda net: setattr(net, "temperature", 2.0),
    "a new one of a part that has none": lambda net: setattr(net[2], "name", "inner"),
    "a list in place": lambda net: net.losses.append(2.0),
    "a number for each of many steps": lambda net: net.losses.extend([0.5] * (ITEMS + 1)),
    "a tuple for each of many steps": lambda net: net.losses.extend((i, 0.5) for i in range(2 * FEW)),
    "a list for each of many steps": lambda net: net.lists["x"].extend([i, np.float32(i)] for i in range(2 * FEW)),
    "deep inside": lambda net: net.settings["a"][1].add(3),
    "a number of NumPy's": lambda net: setattr(net, "best", np.mean([1.0, 2.0])),
    "the last ones": lambda net: net.window.append(np.float32(2)),
    "counts": lambda net: net.counts.update("ab"),
    "an order": lambda net: net.order.move_to_end("x"),
    "a default": lambda net: net.lists["x"].append(1),
    "a list that becomes a number": lambda net: setattr(net, "losses", 3),
    "an object that becomes plain": lambda net: setattr(net, "kind", None),
    "a function of a module": lambda net: setattr(net, "activation", torch.relu),
    "a function of another module in C": lambda net: setattr(net, "activation", F.gelu),
    "a function that Python wrote": lambda net: setattr(net[2], "activation", F.silu),
    "a class": lambda net: setattr(net, "norm", nn.LayerNorm),
    "a size": lambda net: setattr(net, "kind", torch.Size([2])),
    "a layout": lambda net: setattr(net, "kind", torch.channels_last),
    "a file": lambda net: setattr(net, "kind", Path("model.pt")),
    "one that is deleted": lambda net: delattr(net, "kind"),
    "a list that is deleted": lambda net: delattr(net, "losses"),
    "one that takes the place of another": lambda net: [delattr(net[1], "p"), setattr(net[1], "q", 1)],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_has_changed_is_noticed_and_comes_to_a_copy(change: Callable[[Any], object]) -> None:
    here, there = network(), network()
    before = attributes(here)
    assert not before.changed()
    assert before.since() is None
    change(here)
    assert before.changed()
    told = before.since()
    assert told is not None
    set_attributes(list(there.modules()), told)
    assert plain(there) == plain(here)
    assert there.window.maxlen == 2  # type: ignore[union-attr]
    assert there.lists["new"] == []  # type: ignore[index]
    assert not attributes(here).changed()


def test_only_what_has_changed_comes_or_everything() -> None:
    here, there = network(), network()
    here.seen = torch.ones(2)
    before = attributes(here)
    here[1].p, there.losses = 0.25, [7.0]
    told = before.since()
    assert told is not None
    set_attributes(list(there.modules()), told)
    assert (there[1].p, there.losses, hasattr(there, "seen")) == (0.25, [7.0], False)
    everything = before.since(everything=True)
    assert everything is not None
    set_attributes(list(there.modules()), everything)
    assert there.losses == [1.0]
    assert there.seen.tolist() == [1, 1]


class Odd:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")


@dataclasses.dataclass(slots=True)
class Slotted:
    rate: float = 0.5


LEFT_ALONE: dict[str, Callable[[Any], object]] = {
    "an object": lambda net: setattr(net, "odd", Odd()),
    "settings with slots": lambda net: setattr(net, "config", Slotted()),
    "a large tensor": lambda net: setattr(net, "cache", torch.ones(TENSOR_BYTES // 4 + 1)),
    "a tensor that may be trained": lambda net: setattr(net, "scale", torch.ones(2, requires_grad=True)),
    "a sparse tensor": lambda net: setattr(net, "graph", torch.eye(2).to_sparse()),
    "a function of the notebook": lambda net: setattr(net, "act", lambda x: x),
    "a method": lambda net: setattr(net, "act", net.losses.append),
    "a partial call of a function of the notebook": lambda net: setattr(net, "act", functools.partial(lambda x: x)),
    "a partial call with an object": lambda net: setattr(net, "act", functools.partial(torch.relu, Odd())),
    "a class of the notebook": lambda net: setattr(net, "norm", type("Mine", (nn.LayerNorm,), {})),
    "a device, which is each process's own": lambda net: setattr(net, "device", torch.device("cpu")),
    "a list with a tensor that may be trained": lambda net: setattr(net, "losses", [net[0].weight]),
    "a list of too large tensors": lambda net: setattr(net, "losses", [torch.ones(TENSOR_BYTES // 8)] * 3),
    "a list with an object": lambda net: setattr(net, "losses", [Odd()]),
    "an object put into a list": lambda net: net.losses.append(Odd()),
    "a large list": lambda net: setattr(net, "losses", [0] * (FLAT_ITEMS + 100)),
    "a large list of lists": lambda net: setattr(net, "losses", [[]] * (ITEMS + 1)),
    "a large list with an object": lambda net: setattr(net, "losses", [*([i] for i in range(2 * FEW)), [Odd()]]),
    "one that has itself": lambda net: net.losses.append(net.losses),
    "a hook": lambda net: net.register_forward_hook(lambda *_: None),
    "the mode": lambda net: net.eval(),
}


@pytest.mark.parametrize("change", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_what_is_not_plain_is_left_alone(change: Callable[[Any], object]) -> None:
    here = network()
    before = attributes(here)
    change(here)
    before.changed()
    assert before.since() is None
    assert not attributes(here).changed()


COMPUTED: dict[str, Callable[[Any], torch.Tensor]] = {
    "of a forward pass": lambda net: torch.softmax(net[0].weight, 1),
    "a part of a large one": lambda net: torch.arange(TENSOR_BYTES)[3:9:2],
    "transposed": lambda net: torch.arange(6.0).reshape(2, 3).t(),
    "bfloat16": lambda net: torch.ones(2, dtype=torch.bfloat16),
    "complex, conjugated": lambda net: torch.tensor([1 + 2j]).conj(),
    "bool": lambda net: torch.tensor(True),
    "empty": lambda net: torch.empty(0, 3),
    "made in inference mode": lambda net: torch.inference_mode()(torch.ones)(2),
}


@pytest.mark.parametrize("make", COMPUTED.values(), ids=COMPUTED)
def test_a_tensor_that_is_no_parameter_comes_as_it_is(make: Callable[[Any], torch.Tensor]) -> None:
    here, there = network(), network()
    before = attributes(here)
    here[2].seen = made = make(here)
    assert before.changed()
    told = before.since()
    assert told is not None
    assert len(told) < 1000
    set_attributes(list(there.modules()), told)
    seen = there[2].seen
    assert torch.equal(seen, made)  # type: ignore[arg-type]
    assert (seen.dtype, seen.requires_grad) == (made.dtype, False)
    assert not attributes(here).changed()


def test_a_tensor_that_is_written_to_comes_again_and_none_is_kept_alive() -> None:
    here = network()
    here.seen = torch.zeros(2)
    before = attributes(here)
    assert before.since() is None
    here.seen.add_(1)  # type: ignore[operator]
    assert before.changed()
    reference = weakref.ref(here.seen)
    before.settle()
    del here.seen
    assert reference() is None
    there = network()
    there.seen = torch.zeros(2)
    told = before.since()
    assert told is not None
    set_attributes(list(there.modules()), told)
    assert not hasattr(there, "seen")


def test_a_tensor_that_is_written_to_stays_itself_and_one_in_its_place_is_another() -> None:
    here, there = network(), network()
    here.seen, there.seen = torch.zeros(2), torch.zeros(2)
    before, seen = attributes(here), there.seen
    here.seen += 1
    told = before.since()
    assert told is not None
    set_attributes(list(there.modules()), told)
    assert there.seen is seen
    assert seen.tolist() == [1, 1]
    here.seen = torch.full((2,), 2.0)
    told = before.since()
    assert told is not None
    set_attributes(list(there.modules()), told)
    assert there.seen.tolist() == [2, 2]
    assert seen.tolist() == [1, 1]
    before.settle()
    del there.seen
    here.seen += 1
    _tell(before, there)
    assert there.seen.tolist() == [3, 3]
    before.settle()
    here.seen = None
    assert before.changed()
    _tell(before, there)
    assert there.seen is None


def test_a_tensor_comes_with_its_values_where_parts_have_none_or_are_gone() -> None:
    here = nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.ReLU(), nn.Linear(2, 2, device="meta"))
    there = copy.deepcopy(here)
    before = attributes(here)
    here.seen = torch.ones(2)
    told = before.since()
    assert told is not None
    set_attributes([there, there[0], None, there[2]], told)
    assert there.seen.tolist() == [1, 1]


HELD: dict[str, Callable[[torch.Tensor], Any]] = {
    "a list": lambda x: [x],
    "a tuple": lambda x: (1, x),
    "a dict": lambda x: {0: x, "name": "x"},
    "lists in a dict": lambda x: {"x": [1, [x]]},
    "a default": lambda x: defaultdict(list, x=[x]),
    "the last ones": lambda x: deque([x], 1),
    "an order": lambda x: OrderedDict(x=x),
}


def _tensor_in(value: Any) -> torch.Tensor:
    found: list[torch.Tensor] = []
    torch.utils._pytree.tree_map_only(torch.Tensor, found.append, value)
    return found[0]


@pytest.mark.parametrize("make", HELD.values(), ids=HELD)
def test_a_tensor_in_a_collection_comes_as_an_attribute_does(make: Callable[[torch.Tensor], Any]) -> None:
    here, there = network(), network()
    before = attributes(here)
    here.seen = make(torch.softmax(here[0].weight, 1))
    assert before.changed()
    _tell(before, there)
    assert type(there.seen) is type(here.seen)
    seen = _tensor_in(there.seen)
    assert torch.equal(seen, _tensor_in(here.seen))
    assert not seen.requires_grad
    before.settle()
    assert not before.changed()
    assert before.since() is None
    with torch.no_grad():
        _tensor_in(here.seen).add_(1)
    assert before.changed()
    _tell(before, there)
    assert _tensor_in(there.seen) is seen
    assert torch.equal(seen, _tensor_in(here.seen))
    before.settle()
    here.seen = make(torch.ones(3))
    assert before.changed()
    _tell(before, there)
    assert _tensor_in(there.seen).tolist() == [1, 1, 1]
    assert len(seen) == 2
    reference = weakref.ref(_tensor_in(here.seen))
    before.settle()
    del here.seen
    assert reference() is None


def _tell(before: Attributes, there: nn.Module) -> None:
    told = before.since()
    assert told is not None
    set_attributes(list(there.modules()), told)


def test_a_buffer_that_a_list_has_too_stays_one_on_both_sides() -> None:
    here, there = network(), network()
    for net in (here, there):
        net.register_buffer("steps", torch.zeros(1))
        net.counts = [net.steps]  # type: ignore[assignment]
    before = attributes(here)
    here.steps += 1
    _tell(before, there)
    assert there.counts[0] is there.steps  # type: ignore[index]


@pytest.mark.parametrize("make", [lambda x: {x: "x"}, lambda x: {x}], ids=["keys", "a set"])
def test_a_tensor_that_a_collection_finds_by_its_identity_stays_that(make: Callable[[torch.Tensor], Any]) -> None:
    here, there = network(), network()
    for net in (here, there):
        net.register_buffer("steps", torch.zeros(1))
        net.names = make(net.steps)  # type: ignore[assignment, arg-type]
    before = attributes(here)
    here.names = make(here.steps)  # type: ignore[assignment, arg-type]
    here.best = 0.5
    _tell(before, there)
    assert there.steps in there.names  # type: ignore[operator]


def test_of_tensors_that_become_too_many_one_is_told_once() -> None:
    here = network()
    here.seen, here._cache = {}, {}  # type: ignore[assignment]
    before = attributes(here)
    for held in (here.seen, here._cache):
        held.update({i: torch.ones(TENSOR_BYTES // 8) for i in range(3)})  # type: ignore[operator]
    with pytest.warns(UserWarning, match=r"`seen` of a network has more than 1 MiB of tensors") as told:
        assert before.since() is None
    assert len(told) == 1
    assert not before.changed()
    assert before.since() is None
    before.settle()
    assert before.since() is None


def test_losses_of_many_steps_are_not_copied_after_each_read() -> None:
    here = network()
    here.losses = [torch.ones(()) for _ in range(TENSORS)]  # type: ignore[assignment]
    before = attributes(here)
    here.losses.append(torch.ones(()))  # type: ignore[operator]
    with pytest.warns(UserWarning, match=r"`losses` of a network has more than 1 MiB of tensors, or 1,024 of them"):
        assert before.since() is None
    here.losses[:2] = [torch.zeros(())]  # type: ignore[index]
    assert before.since() is not None


def test_of_an_object_in_a_list_no_size_is_told() -> None:
    here = network()
    before = attributes(here)
    here.losses.append(Odd())  # type: ignore[operator]
    with warnings.catch_warnings(action="error"):
        assert before.since() is None


def test_a_tensor_that_has_no_memory_costs_no_other_attribute_its_value() -> None:
    here, there = network(), network()
    before = attributes(here)
    here.tangent = torch._efficientzerotensor((2,))  # type: ignore[attr-defined]
    here.best = 0.5
    told = before.since()
    assert told is not None
    set_attributes(list(there.modules()), told)
    assert (there.best, hasattr(there, "tangent")) == (0.5, False)


@pytest.mark.parametrize("keep", [lambda tensor: tensor, lambda tensor: [tensor]], ids=["alone", "in a list"])
def test_a_tensor_that_vmap_has_left_behind_costs_no_other_attribute_its_value(keep: Any) -> None:
    here, there = network(), network()
    before = attributes(here)

    def forward(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = here[0](x)
        here.seen = keep(found)
        return found

    torch.vmap(forward)(torch.ones(3, 2))
    here.best = 0.5
    told = before.since()
    assert told is not None
    set_attributes(list(there.modules()), told)
    assert there.best == 0.5
    assert not hasattr(there, "seen")
    assert not attributes(here).changed()


@dataclasses.dataclass
class Settings:
    dropout: float = 0.5
    sizes: list[int] = dataclasses.field(default_factory=list)
    other: Any = None


@pytest.mark.parametrize("make", [Settings, lambda: argparse.Namespace(**vars(Settings()))])
def test_what_is_plain_in_settings_comes_into_those_that_are_there(make: Callable[[], Any]) -> None:
    here, there = network(), network()
    for net in (here, there):
        net[0].config = net.config = net[2][1].config = make()  # type: ignore[assignment]
    kept: Any = there.config
    before = attributes(here)
    assert not before.changed()
    here.config.dropout, here.config.new, here.config.other = 0.1, "x", Odd()  # type: ignore[union-attr]
    here.config.sizes.append(3)  # type: ignore[union-attr, operator]
    assert before.changed()
    told = before.since()
    assert told is not None
    set_attributes(list(there.modules()), told)
    assert there.config is there[0].config is there[2][1].config is kept
    assert (kept.dropout, kept.sizes, kept.new, kept.other) == (0.1, [3], "x", None)
    before.settle()
    assert before.since() is None
    here.config = make()  # type: ignore[assignment]
    before.settle()
    here.config.dropout = 0.2  # type: ignore[assignment, union-attr]
    assert before.since() is not None


def test_settings_that_another_process_has_not_are_left_out() -> None:
    here, there = network(), network()
    here.config, there.config = Settings(), Odd()  # type: ignore[assignment]
    before = attributes(here)
    here.config.dropout = here.temperature = 0.1  # type: ignore[assignment, union-attr]
    told = before.since()
    assert told is not None
    set_attributes(list(there.modules()), told)
    assert there.temperature == 0.1
    assert not vars(there.config)


def test_a_partial_call_comes_with_what_it_gives() -> None:
    here, there = network(), network()
    before = attributes(here)
    here.activation = functools.partial(functools.partial(F.leaky_relu, inplace=False), negative_slope=0.5)  # type: ignore[assignment]
    told = before.since()
    assert told is not None
    set_attributes(list(there.modules()), told)
    activation: Any = there.activation
    assert activation(torch.tensor([-1.0, 1.0])).tolist() == [-0.5, 1.0]


@pytest.mark.parametrize("gone", ["the module", "the function"])
def test_what_cannot_be_imported_is_an_error_where_it_is_called(monkeypatch: pytest.MonkeyPatch, gone: str) -> None:
    here, there = network(), network()
    before = attributes(here)
    module = types.ModuleType("mirror_nb_gone")
    exec("def f(x): return x", vars(module))
    monkeypatch.setitem(sys.modules, "mirror_nb_gone", module)
    here.activation, here.temperature = module.f, 2.0
    told = before.since()
    assert told is not None
    monkeypatch.delitem(sys.modules, "mirror_nb_gone") if gone == "the module" else monkeypatch.delattr(module, "f")
    set_attributes(list(there.modules()), told)
    assert there.temperature == 2.0
    activation: Any = there.activation
    with pytest.raises(ImportError, match=r"mirror_nb_gone\.f, an attribute of a network, cannot be imported"):
        activation(1)
    assert attributes(there).since(everything=True) is not None


def test_a_network_whose_attributes_lead_back_to_it_ends_when_nobody_has_it() -> None:
    made = network()
    made.step, made.back, made[2].parent = made.extra_repr, [made], (made,)  # type: ignore[assignment]
    then, gone = attributes(made), weakref.ref(made)
    assert not then.other_functions()
    made.step = made.extra_repr  # type: ignore[assignment]
    assert then.other_functions()
    then.settle()
    del made
    gc.collect()
    assert gone() is None
    assert not then.changed()


def test_of_a_list_that_has_grown_too_long_to_follow_the_user_is_told() -> None:
    here = network()
    before = attributes(here)
    here.losses.append(2.0)
    assert before.since() is not None
    before.settle()
    here.losses.extend([[]] * ITEMS)
    with pytest.warns(UserWarning, match="`losses` of a network has more than some 100,000 items"):
        assert before.since() is None


def test_networks_that_keep_their_own_state_there_and_gone_ones_are_left_alone() -> None:
    kind = type("Layer", (nn.Module,), {"__module__": "keras.src.layers"})
    here = nn.Sequential(type("Mine", (kind,), {})(), nn.Linear(1, 1))
    before = attributes(here)
    here[0].built = True
    assert not before.changed()
    del here[1]
    assert not before.changed()
    assert before.since() is None


class Keeps(nn.Module):
    _OF_ONE_PROCESS = frozenset({"strategy", "steps"})

    def __init__(self) -> None:
        super().__init__()
        self.strategy, self.steps, self.scale = Odd(), 0, 1.0


def test_what_a_class_keeps_in_one_process_stays_there() -> None:
    here, there = Keeps(), Keeps()
    before = attributes(here)
    here.steps += 1
    assert not before.changed()
    here.scale = 2.0
    told = before.since()
    assert told is not None
    set_attributes([there], told)
    assert (there.scale, there.steps) == (2.0, 0)
    named = names_by_id([("strategy", here.strategy), ("odd", odd := Odd())])
    assert names_in(here, named) == set()
    here.odd = odd
    assert names_in(here, named) == {"odd"}


def test_parts_that_another_process_has_not_are_skipped() -> None:
    here = network()
    before = attributes(here)
    here[2][1].own = 1
    here[2][1].config = Settings(0.1)
    before.settle()
    here[2][1].own, here[2][1].config.dropout = 2, 0.2
    told = before.since()
    assert told is not None
    set_attributes(list((other := nn.Sequential(nn.ReLU())).modules()), told)
    assert not hasattr(other, "own")


@pytest.mark.parametrize("became", ["_parameters", "_buffers", "_modules"])
def test_where_a_part_is_made_anew_it_keeps_what_the_other_side_was_not_told_of(became: str) -> None:
    told = {"rate": 0.5, "seen": torch.ones(2), "act": lambda x: x, "act_in_place": F.relu_}
    has = vars(nn.Module())
    assert of_one_side({**has, **told, "odd": Odd()}, has).keys() == {"odd"}
    has[became]["odd"] = None
    assert not of_one_side({**has, **told, "odd": Odd()}, has)
