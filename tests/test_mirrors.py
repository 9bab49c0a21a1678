"""Networks that both sides have: handles, changes, and values that travel alone."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mirror_nb.errors import TransferError
from mirror_nb.mirroring.grafting import graft
from mirror_nb.mirroring.mirrors import Mirrors
from mirror_nb.mirroring.networks import averaged_statistics, load, structure, tensors
from mirror_nb.strategies.reading import Reading
from mirror_nb.tensors.checksums import bits
from mirror_nb.transfer.opening import unpack
from mirror_nb.transfer.packing import pack
from mirror_nb.transfer.told import Told, take_told, told_of


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def sent(module: nn.Module) -> tuple[Mirrors, Mirrors, nn.Module]:
    """Both sides' mirrors after the network travelled, and the copy."""
    here, there = Mirrors("k"), Mirrors("r")
    packed = pack(module, reference=here.reference, handle=here.handle)
    arrived, arrivals = unpack(packed.payload, packed.slab, resolve=there.resolve)
    there.take(arrivals)
    here.gave([module])
    return here, there, arrived


def reference_to(obj: object, here: Mirrors, there: Mirrors) -> object:
    packed = pack([obj], reference=here.reference, handle=here.handle)
    return unpack(packed.payload, packed.slab, resolve=there.resolve)[0][0]


def test_a_network_that_travelled_is_only_referred_to():
    module = net()
    here, there, arrived = sent(module)
    assert reference_to(module, here, there) is arrived
    assert pack([module], reference=here.reference).payload.nbytes < 500


def test_a_part_of_a_network_that_travelled_is_referred_to_as_well():
    module = net()
    here, there, arrived = sent(module)
    assert reference_to(module[0], here, there) is arrived[0]


def test_an_optimizer_sent_later_holds_the_very_parameters_of_the_network_there():
    module = net()
    here, there, arrived = sent(module)
    optimizer = reference_to(torch.optim.SGD(module.parameters(), lr=0.1), here, there)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in arrived.parameters()]


def test_all_networks_are_gone_through_once_for_all_parameters_that_are_asked_for(monkeypatch):
    module = nn.ModuleList(net() for _ in range(5))
    here, _, _ = sent(module)
    gone_through = []
    every = Mirrors.all
    monkeypatch.setattr(Mirrors, "all", lambda self: gone_through.append(self) or every(self))
    tokens = [here.reference(parameter) for parameter in module.parameters()]
    assert None not in tokens
    assert len(set(tokens)) == len(tokens)
    assert [here.reference(nn.Parameter(torch.ones(1))) for _ in range(5)] == [None] * 5
    assert len(gone_through) == 1
    other = net()
    pack(other, reference=here.reference, handle=here.handle)
    here.gave([other])
    assert here.reference(other[0].weight) is not None


def test_the_others_are_not_gone_through_for_each_part_of_a_network_that_is_sent(monkeypatch):
    here, _, _ = sent(net())
    gone_through = []
    every = Mirrors.all
    monkeypatch.setattr(Mirrors, "all", lambda self: gone_through.append(self) or every(self))
    pack(nn.ModuleList(net() for _ in range(5)), reference=here.reference, handle=here.handle)
    # Of fifteen.
    assert len(gone_through) < 5


def test_a_network_with_a_new_part_is_another_network():
    module = net()
    here, there, arrived = sent(module)
    module[2] = nn.Linear(4, 7)
    assert here.known(module) is None
    again = reference_to(module, here, there)
    assert again is not arrived
    assert again[2].out_features == 7


def test_a_network_that_got_its_memory_is_another_network():
    with torch.device("meta"):
        module = net()
    here, _, _ = sent(module)
    module.to_empty(device="cpu")
    assert here.known(module) is None


def test_a_converted_network_of_buffers_alone_is_written_to():
    module = nn.BatchNorm1d(2, affine=False)
    here, _, _ = sent(module)
    module.float()
    assert not here.changed(module)
    module.double()
    assert here.changed(module)
    assert {"running_mean", "running_var"} <= here.written(module)
    here.mark(module)
    assert not here.changed(module)


def test_a_write_to_what_was_made_in_inference_mode_is_noticed_and_followed():
    module = net()
    with torch.inference_mode():
        module.register_buffer("cache", torch.zeros(2))
    here, there, arrived = sent(module)
    assert not here.changed(module)
    with torch.inference_mode():
        module.cache += 1
    assert here.changed(module)
    assert here.written(module) == {"cache"}
    load(arrived, here.given(module))
    assert arrived.cache.tolist() == [1, 1]
    assert not here.changed(module)
    # And the other way round.
    arrived.cache += 1
    load(module, there.given(arrived))
    assert module.cache.tolist() == [2, 2]


def test_a_reference_to_a_network_that_is_gone_says_so():
    module = net()
    here, there, arrived = sent(module)
    del arrived
    gc.collect()
    with pytest.raises(TransferError, match="no longer exists here; bind it anew"):
        reference_to(module, here, there)


@pytest.mark.parametrize(
    "write",
    [
        lambda m: m.load_state_dict(net().state_dict()),
        lambda m: m[0].weight.data.fill_(3),
        lambda m: m[0].bias.detach().numpy().fill(3),
        lambda m: nn.init.zeros_(m[0].bias),
        lambda m: m.eval(),
        lambda m: m(torch.randn(4, 3)),
        lambda m: setattr(m[0].weight, "data", torch.zeros(4, 3)),
        lambda m: torch.nn.utils.vector_to_parameters(
            torch.zeros(sum(p.numel() for p in m.parameters())), m.parameters()
        ),
    ],
    ids=["load_state_dict", "data", "an array", "init", "eval", "statistics", "another data", "vector"],
)
def test_a_write_to_a_network_is_noticed(write):
    module = net()
    here, _, _ = sent(module)
    here.remember()
    assert not here.changed(module)
    write(module)
    assert here.changed(module)
    assert here.written(module)
    here.mark(module)
    assert not here.changed(module)


def test_reading_a_network_is_no_change():
    module = net().eval()
    here, _, _ = sent(module)
    module(torch.randn(4, 3)).sum().backward()
    module.state_dict()
    copy.deepcopy(module)
    assert not here.changed(module)


def test_only_networks_that_travelled_as_such_are_roots():
    module = net()
    here, there, _ = sent(module)
    assert [m for _, m in here.roots()] == [module]
    assert len(there.roots()) == 1


def test_a_network_that_is_gone_is_no_root_any_more():
    module = net()
    here, _, _ = sent(module)
    del module
    gc.collect()
    assert here.roots() == []
    assert here.all() == {}


def test_a_network_that_is_gone_takes_its_tensors_along_and_is_told_of_once():
    module = net()
    here, _, _ = sent(module)
    handles, weight = set(here.all()), weakref.ref(module[0].weight)
    del module
    gc.collect()
    assert weight() is None
    assert set(here.gone()) == handles
    assert here.gone() == ()


def test_a_network_that_came_again_is_not_gone():
    module = net()
    here, _, _ = sent(module)
    (handle,) = (handle for handle, other in here.all().items() if other is module)
    del module
    gc.collect()
    again = net()
    here.learn(handle, again)
    assert handle not in here.gone()
    assert here.find(handle) is again


def test_networks_that_their_class_takes_for_equal_are_told_apart():
    class Alike(nn.Linear):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Alike)

        def __hash__(self) -> int:
            return 0

    first, second = Alike(1, 1), Alike(1, 1)
    here, there, arrived = sent(first)
    assert here.known(second) is None
    assert reference_to(first, here, there) is arrived
    assert reference_to(second, here, there) is not arrived


def test_a_networks_values_are_loaded_in_place():
    module, other = net(), net()
    parameter, optimizer = module[0].weight, torch.optim.SGD(module.parameters(), lr=0.1)
    load(module, dict(tensors(other)))
    assert module[0].weight is parameter
    assert optimizer.param_groups[0]["params"][0] is parameter
    assert bits(module.state_dict().values()) == bits(other.state_dict().values())


def test_handles_that_the_replicas_give_are_the_same_on_each():
    first, second = Mirrors("r"), Mirrors("r")
    for mirrors in (first, second):
        assert mirrors.name(net(), "r7.model") == "r7.model"
    kept = net()
    assert first.name(kept, "r8.model") == "r8.model"
    # Another name for the same network.
    assert first.name(kept, "r9.again") == "r8.model"
    assert first.find("r8.model/0") is kept[0]


def test_shared_weights_are_loaded_once_and_stay_shared():
    module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    module[1].weight = module[0].weight
    assert len(list(tensors(module))) == 3
    assert len(structure(module)) == 6


def test_only_running_statistics_are_averaged():
    module = nn.ModuleList([nn.BatchNorm1d(2), nn.BatchNorm2d(2, track_running_stats=False), nn.InstanceNorm1d(2)])
    assert set(averaged_statistics(module)) == {"0.running_mean", "0.running_var"}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64]
)
def test_equal_tensors_have_equal_checksums(dtype):
    tensor = (torch.randn(50) * 3).to(dtype)
    assert bits([tensor]) == bits([tensor.clone()])
    assert bits([tensor.reshape(5, 10).t()]) == bits([tensor.reshape(5, 10).t().contiguous()])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(width=32), min_size=2, max_size=40, unique=True), st.randoms(use_true_random=False))
def test_values_in_another_order_have_another_checksum(values, random):
    order = list(values)
    random.shuffle(order)
    first, second = torch.tensor(values), torch.tensor(order)
    equal = torch.equal(first.view(torch.int32), second.view(torch.int32))
    assert (bits([first]) == bits([second])) == equal


@pytest.mark.parametrize("count", [1, 2, 3, 5000, 8190, 8192, 70_000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.complex128, torch.int64])
def test_values_of_the_other_sign_have_another_checksum(dtype, count):
    tensor = torch.arange(1, count + 1, dtype=torch.float64).sqrt().mul(7).to(dtype)
    turned, last, ends = -tensor, tensor.clone(), tensor.clone()
    last[-1] *= -1
    ends[[0, -1]] *= -1
    assert bits([tensor]) not in {bits([other]) for other in (turned, last, ends)}


def test_each_number_has_a_checksum_of_its_own():
    numbers = [float(n) for n in range(-300, 300)] + [2.0**n for n in range(9, 500)]
    assert len({bits([torch.tensor(number, dtype=torch.float64)]) for number in numbers}) == len(numbers)


def test_the_work_of_checksums_grows_with_the_number_of_tensors_and_no_faster():
    asked = []

    class Counted(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            asked.append(function)
            return super().__torch_function__(function, types, args, kwargs)

    def work(n: int) -> int:
        asked.clear()
        bits([torch.ones(3).as_subclass(Counted) for _ in range(n)])
        return len(asked)

    assert 0 < work(80) <= 2 * work(40)


def test_values_swapped_between_tensors_or_far_apart_change_the_checksum():
    a, b = torch.zeros(5000), torch.ones(5000)
    assert bits([a, b]) != bits([b, a])
    far = a.clone()
    far[0] = 1
    near = a.clone()
    near[4097] = 1
    assert bits([far]) != bits([near])
    assert bits([torch.zeros(0)]) == bits([torch.zeros(0)])


# ------------------------------------------------------------------ what is told of optimizers and schedulers


def an_optimizer(**settings: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], **settings)


@pytest.mark.parametrize(
    "change",
    [
        lambda o: o.param_groups[0].update(lr=0.5),
        lambda o: o.param_groups[0].update(betas=(0.5, 0.6)),
        lambda o: o.param_groups[0].update(mine=[1]),
        lambda o: o.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]}),
        lambda o: setattr(o, "_opt_called", True),
    ],
    ids=["a number", "a tuple", "a setting of one's own", "a group", "its first step"],
)
def test_what_changes_in_an_optimizer_is_told_once(change):
    told, optimizer = Told(), an_optimizer()
    told.know("o", optimizer)
    find = {"o": optimizer}.get
    assert told.changes(find) == ()
    change(optimizer)
    ((handle, (*settings, own, deleted)),) = told.changes(find)
    assert handle == "o"
    assert tuple(settings) == told_of(optimizer)[:2]
    assert own == ({"_opt_called": True} if hasattr(optimizer, "_opt_called") else {})
    assert not deleted
    assert told.changes(find) == ()


def test_what_an_optimizer_has_of_its_own_is_told_where_it_is_not_sure_what_the_other_side_has():
    told, here, there = Told(), an_optimizer(), an_optimizer()
    told.know("o", here)
    here.rho = 0.5
    told.unsettle("o")
    ((_, now),) = told.changes({"o": here}.get)
    take_told(there, now)
    assert there.rho == 0.5
    assert told.changes({"o": here}.get) == ()


@pytest.mark.parametrize("value", [3, [1], torch.tensor(1.0), None], ids=str)
def test_a_setting_that_one_side_deletes_is_deleted_on_the_other(value):
    told, here, there = Told(), an_optimizer(), an_optimizer()
    here.param_groups[0]["mine"] = there.param_groups[0]["mine"] = value
    there.param_groups[0]["its_own"] = 4
    told.know("o", here)
    del here.param_groups[0]["mine"]
    ((_, now),) = told.changes({"o": here}.get)
    take_told(there, now)
    assert there.param_groups[0].keys() - here.param_groups[0].keys() == {"its_own"}
    assert told.changes({"o": here}.get) == ()


def test_settings_that_do_not_travel_are_left_out():
    told, optimizer = Told(), an_optimizer()
    for _ in range(2):
        optimizer.param_groups[0] |= {"decay": lambda step: 0.9, "mask": torch.ones(3), "table": np.ones(2)}
        told.know("o", optimizer)
        optimizer.param_groups[0]["mask"] = torch.zeros(3)
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] / 2
        ((_, (settings, *_)),) = told.changes({"o": optimizer}.get)
        assert settings[0]["lr"] == optimizer.param_groups[0]["lr"]
        assert settings[0].keys().isdisjoint({"params", "decay", "mask", "table"})
        assert pickle.loads(pickle.dumps(settings)) == settings


def test_settings_that_change_in_place_are_told():
    told, optimizer = Told(), an_optimizer(lr=torch.tensor(0.1))
    optimizer.param_groups[0]["mine"] = []
    told.know("o", optimizer)
    optimizer.param_groups[0]["lr"].fill_(0.2)
    ((_, (settings, *_)),) = told.changes({"o": optimizer}.get)
    assert settings[0]["lr"] == pytest.approx(0.2)
    assert told.changes({"o": optimizer}.get) == ()


def test_a_scheduler_that_steps_is_told_with_its_optimizer():
    told, optimizer = Told(), an_optimizer()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    objects = {"o": optimizer, "s": scheduler, "other": object()}
    for handle, obj in objects.items():
        told.know(handle, obj)
    optimizer.step()
    scheduler.step()
    assert {handle for handle, _ in told.changes(objects.get)} == {"o", "s"}


class Warmup(torch.optim.lr_scheduler.LRScheduler):
    """Keeps more than numbers."""

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Any) -> None:
        self.factor, self.table = factor, np.linspace(0, 1, 3)
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        return [rate * self.factor(self.last_epoch) for rate in self.base_lrs]


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=np.int64(10)),  # type: ignore[arg-type]
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, np.arange(3), gamma=np.float32(0.5)),  # type: ignore[arg-type]
        lambda o: Warmup(o, lambda epoch: 1 / (epoch + 1)),
    ],
    ids=["a number of NumPy's", "an array's numbers", "a function and an array"],
)
def test_where_a_scheduler_stands_is_told_whatever_else_it_keeps(make):
    here, there = make(an_optimizer()), make(an_optimizer())
    told = Told()
    told.know("s", here)
    here.optimizer.step()
    here.step()
    ((_, now),) = told.changes({"s": here}.get)
    take_told(there, pickle.loads(pickle.dumps(now)))
    assert there.last_epoch == here.last_epoch == 1
    assert there.get_last_lr() == pytest.approx(here.get_last_lr())
    assert vars(there).keys() == vars(here).keys()


def test_nothing_is_told_of_what_is_gone_or_forgotten():
    told, optimizer = Told(), an_optimizer()
    told.know("o", optimizer)
    optimizer.param_groups[0]["lr"] = 0.7
    assert told.changes(lambda handle: None) == ()
    told.forget("o")
    assert told.changes({"o": optimizer}.get) == ()


class Source:
    """Has every network, once."""

    stale = True

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def holds(self, module: nn.Module) -> bool:
        return True

    def refresh(self) -> None:
        self.stale = False
        self._reading.remove(self)


def test_sources_may_go_while_a_network_is_read():
    reading = Reading()
    sources = [Source(reading) for _ in range(3)]
    for source in sources:
        reading.add(source)
    net().state_dict()
    assert not any(source.stale for source in sources)


def test_what_one_holder_grafts_another_one_does_not_take_for_known():
    network = nn.Sequential(nn.Linear(2, 2))
    other = Mirrors("k")
    other.handle(network)
    other.mark(network)
    grown = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    # Registered by now: what is grafted registers nothing.
    assert other.known(network) is not None
    graft([grown], lambda part: network if part is grown else None)
    assert len(network) == 2
    assert other.known(network) is None
