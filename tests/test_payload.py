"""Objects to bytes and back: what arrives equals what was sent, shares what it shared, and owns its pages."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import os
import socket
import sys
import threading
import types
from collections import OrderedDict
from typing import Any

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_gpu import OnMadeGpu
from torch import nn

from mirror_nb.channel import Channel
from mirror_nb.errors import TransferError
from mirror_nb.transfer import packing
from mirror_nb.transfer.nest import DEPTH
from mirror_nb.transfer.opening import NotRebuilt, unpack
from mirror_nb.transfer.packing import IN_BAND_BYTES, Begins, SearchPath, pack
from mirror_nb.transfer.pickler import TooLarge, dumps, global_names
from mirror_nb.transfer.slab import anonymous_file
from mirror_nb.values import same

# As in a notebook, whose classes the other side cannot import.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

LARGE = IN_BAND_BYTES
# float32 elements: four times what stays in the pickle.


def travel(obj: Any, **options: Any) -> Any:
    packed = pack(obj, **options)
    return unpack(packed.payload, packed.slab)[0]


def test_a_loader_whose_workers_persist_travels_without_them():
    data = torch.utils.data.TensorDataset(torch.arange(4.0))
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=1, persistent_workers=True)
    workers = iter(loader)
    next(workers)
    arrived = travel(loader)
    assert arrived._iterator is None
    assert loader._iterator is workers
    assert [batch.tolist() for (batch,) in torch.utils.data.DataLoader(arrived.dataset, 2)] == [[0, 1], [2, 3]]
    workers._shutdown_workers()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("n", [0, 1, 5, LARGE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_a_tensor_arrives_with_its_values(n, dtype):
    tensor = torch.arange(n).to(dtype)
    arrived = travel(tensor)
    assert arrived.dtype == dtype
    assert torch.equal(arrived, tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24).reshape(2, 3, 4).transpose(0, 2),
        torch.arange(100.0)[10:90:3],
        torch.ones(1).expand(3, 4),
        torch.tensor(3.5),
        torch.zeros(0, 3),
        torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.arange(LARGE * 2).reshape(2, -1).t(),
        torch.randn(4, 4).to_sparse(),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
    ],
    ids=[
        "transposed",
        "sliced",
        "expanded",
        "scalar",
        "empty",
        "channels last",
        "large",
        "sparse",
        "quantized",
        "conj",
        "negative",
    ],
)
def test_a_tensor_keeps_its_shape_and_layout(tensor):
    arrived = travel(tensor)
    assert (arrived.shape, arrived.dtype, arrived.layout) == (tensor.shape, tensor.dtype, tensor.layout)
    if tensor.layout is torch.strided and not tensor.is_quantized:
        assert arrived.stride() == tensor.stride()
    if tensor.is_quantized:
        tensor, arrived = tensor.dequantize(), arrived.dequantize()
    assert torch.equal(arrived.to_dense(), tensor.to_dense())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=3), st.permutations(range(3)), st.integers(0, 3), st.booleans())
def test_any_view_arrives_as_the_same_view(shape, order, offset, reverse_last):
    base = torch.arange(offset + 200.0)[offset:]
    tensor = base[: int(np.prod(shape))].reshape(shape)
    tensor = tensor.permute([i for i in order if i < len(shape)])
    arrived = travel(tensor)
    assert torch.equal(arrived, tensor)
    assert arrived.stride() == tensor.stride()


@pytest.mark.parametrize("nested", [False, True])
def test_what_hangs_on_a_tensor_arrives_with_it(nested):
    tensor: Any = nn.Buffer(torch.ones(2))
    tensor.tag, tensor.me = "x", tensor
    arrived = travel([tensor, {1}] if nested else tensor)
    arrived = arrived[0] if nested else arrived
    assert isinstance(arrived, nn.Buffer)
    assert (arrived.tolist(), arrived.tag, arrived.persistent) == ([1, 1], "x", True)
    assert arrived.me is arrived


def test_only_the_part_that_a_view_shows_travels():
    whole = torch.zeros(1_000_000)
    assert pack(whole[:10]).payload.nbytes < 5000


@pytest.mark.parametrize("n", [3, LARGE])
def test_tensors_that_share_memory_share_it_on_arrival(n):
    first = torch.zeros(n)
    a, b = travel([first, first.view(-1)])
    a[0] = 5
    assert b[0] == 5


@pytest.mark.parametrize("n", [100, 10 * LARGE])
@pytest.mark.parametrize("head_first", [False, True])
def test_views_of_parts_of_a_tensor_share_its_memory_on_arrival(n, head_first):
    flat = torch.zeros(n)
    views = {"head": flat[:10], "flat": flat, "column": flat.view(-1, 10)[:, 3], "bytes": flat[5:7].view(torch.uint8)}
    names = sorted(views, reverse=not head_first)
    arrived = dict(zip(names, travel([views[name] for name in names]), strict=True))
    arrived["flat"] += 1
    assert (arrived["head"].tolist(), arrived["column"].sum()) == ([1.0] * 10, n // 10)
    assert torch.equal(arrived["bytes"], torch.ones(2).view(torch.uint8))
    arrived["head"][3] = 7
    assert arrived["column"][0] == arrived["flat"][3] == 7
    if not head_first:
        assert pack({**views, "function": abs}, namespace={}).payload.nbytes < 4 * n + 5000


def test_a_view_whose_bytes_begin_within_an_element_of_another_shares_its_memory_on_arrival():
    flat = torch.zeros(6)
    raw, last = travel((flat.view(torch.uint8)[3:20], flat[4:]))
    last[0] = 1.0
    assert torch.equal(raw[13:], torch.ones(1).view(torch.uint8))


@pytest.mark.parametrize("part_first", [False, True])
def test_tensors_of_an_array_and_of_the_part_that_it_begins_with_share_its_memory_on_arrival(part_first):
    array = np.zeros(10)
    tensors = [torch.from_numpy(array), torch.from_numpy(array[:5])]
    arrived = travel(sorted(tensors, key=len, reverse=not part_first))
    part, whole = sorted(arrived, key=len)
    whole += 1
    assert (part.tolist(), whole.tolist()) == ([1.0] * 5, [1.0] * 10)


def test_views_of_a_large_tensor_that_have_nothing_in_common_travel_small():
    whole = torch.zeros(1_000_000)
    assert pack([whole[:10], whole[5:20], whole[-10:], whole[:0]], namespace={}).payload.nbytes < 5000
    a, b = travel((whole[:10], whole[5:20]))
    b += 1
    assert a.tolist() == [0.0] * 5 + [1.0] * 5


def test_tensors_of_nothing_arrive_as_several_that_may_grow():
    first, second = travel((torch.zeros(0), nn.Parameter(torch.zeros(0), requires_grad=False)))
    first.resize_(2).fill_(1)
    second.resize_(2).fill_(2)
    assert (first.tolist(), second.tolist()) == ([1, 1], [2, 2])


def test_packing_lets_a_tensor_grow_and_on_arrival_a_small_one():
    held = {"a": torch.ones(3), "b": torch.ones(LARGE)}
    arrived = travel(held, namespace={})
    assert [tensor.resize_(2 * LARGE).numel() for tensor in (*held.values(), arrived["a"])] == [2 * LARGE] * 3


def test_the_same_object_twice_arrives_as_one():
    x, array = torch.ones(3), np.ones(3)
    a, b, c, d = travel([x, x, array, array])
    assert a is b
    assert c is d


@pytest.mark.parametrize(
    "array",
    [
        np.arange(LARGE, dtype=np.float64),
        np.arange(12).reshape(3, 4)[:, ::2],
        np.asfortranarray(np.arange(LARGE, dtype=np.float32).reshape(2, -1)),
        np.array(["a", "bc"]),
        np.array([{"a": 1}, None], dtype=object),
        np.zeros(0),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    ],
)
def test_an_array_arrives_with_its_values(array):
    arrived = travel(array)
    assert arrived.dtype == array.dtype
    assert arrived.flags.f_contiguous == array.flags.f_contiguous
    assert np.array_equal(arrived, array)


def test_a_data_frame_arrives():
    frame = pd.DataFrame({"a": np.arange(LARGE), "b": ["x"] * LARGE})
    pd.testing.assert_frame_equal(travel(frame), frame)


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
        max_leaves=20,
    )
)
def test_plain_data_arrives_equal(value):
    assert same(travel(value), value)


@pytest.mark.parametrize("numel", [3, LARGE], ids=["in the message", "in a slab"])
def test_tensors_keep_their_places_among_bytes_and_numbers(numel):
    nest = {
        "a": [b"not a tensor", torch.arange(numel), (1.5, None)],
        3: torch.tensor(True),
        "b": {"c": torch.ones(1, 2)},
    }
    arrived = travel(nest)
    assert list(arrived) == ["a", 3, "b"]
    text, numbers, rest = arrived["a"]
    assert (text, rest) == (b"not a tensor", (1.5, None))
    assert torch.equal(numbers, torch.arange(numel))
    assert arrived[3].dtype is torch.bool
    assert arrived[3].shape == ()
    assert torch.equal(arrived["b"]["c"], torch.ones(1, 2))


@pytest.mark.parametrize("depth", [DEPTH, DEPTH + 1, 10 * DEPTH])
def test_a_nest_arrives_however_deep(depth):
    nest = functools.reduce(lambda inner, _: [inner], range(depth), torch.ones(2))
    assert torch.equal(functools.reduce(lambda outer, _: outer[0], range(depth), travel(nest)), torch.ones(2))


def test_whoever_writes_to_what_arrived_changes_nobody_elses():
    tensor = torch.zeros(LARGE)
    packed = pack([tensor, np.zeros(LARGE)])
    first = unpack(packed.payload, os.dup(packed.slab))[0]
    second = unpack(packed.payload, packed.slab)[0]
    for part in first:
        part[:] = 1
    assert all((part == 0).all() for part in second)
    assert (tensor == 0).all()


def test_what_arrived_outlives_its_descriptor_and_the_senders_object():
    arrived = travel(torch.full((LARGE,), 7.0))
    assert (arrived == 7).all()


def test_no_descriptor_is_left_when_what_arrived_is_gone():
    before = descriptors()
    for _ in range(5):
        assert len(travel(torch.zeros(LARGE))) == LARGE
    assert descriptors() == before


def test_no_descriptor_is_left_when_packing_fails(monkeypatch):
    before = descriptors()
    with pytest.raises(TransferError):
        pack([torch.zeros(LARGE), threading.Lock()])

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TransferError, match=r"no shared memory for 1 MiB.*No space left"):
        anonymous_file(2**20)
    assert descriptors() == before


# ---------------------------------------------------------------------- gradients and parameters


def test_requires_grad_travels_with_a_leaf_and_the_graph_stays():
    leaf = torch.ones(3, requires_grad=True)
    arrived, computed = travel([leaf, leaf * 2])
    assert arrived.requires_grad
    assert arrived.is_leaf
    assert not computed.requires_grad
    assert torch.equal(computed, torch.full((3,), 2.0))


def test_a_parameter_stays_a_parameter():
    arrived = travel(nn.Parameter(torch.ones(3), requires_grad=False))
    assert type(arrived) is nn.Parameter
    assert not arrived.requires_grad


class Tagged(nn.Parameter):
    def __new__(cls, data, tag):
        made = super().__new__(cls, data)
        made.tag = tag
        return made


class Labelled(torch.Tensor):
    """Of which `nn.Parameter` makes a parameter that is one of these."""


@pytest.mark.parametrize(
    "parameter", [Tagged(torch.ones(2), "first"), nn.Parameter(torch.ones(2).as_subclass(Labelled))]
)
def test_a_parameter_of_the_users_own_class_stays_one_and_can_be_trained(parameter):
    arrived, again = travel([parameter, parameter])
    assert again is arrived
    assert type(arrived) is type(parameter)
    assert vars(arrived) == vars(parameter)
    assert isinstance(arrived, nn.Parameter)
    (arrived * 2).sum().backward()
    assert arrived.grad.tolist() == [2, 2]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.inner.weight
        self.note = ["plain"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.norm(self.inner(x)))


def test_a_network_arrives_whole_with_its_ties_and_flags():
    net = Net().eval()
    net.inner.weight.requires_grad_(False)
    arrived = travel(net)
    x = torch.randn(4, 3)
    assert torch.equal(arrived(x), net(x))
    assert arrived.tied.weight is arrived.inner.weight
    assert not arrived.training
    assert not arrived.inner.weight.requires_grad
    assert arrived.note == ["plain"]


def test_every_network_that_arrives_is_told_with_its_handle():
    net = Net()
    packed = pack({"net": net}, handle=lambda module: type(module).__name__)
    opened, arrivals = unpack(packed.payload, packed.slab)
    assert len(arrivals.modules) == 4
    assert arrivals.handles["Net"] is opened["net"]


def test_an_optimizer_arrives_over_the_parameters_that_arrive_with_it():
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    arrived_net, arrived_optimizer = travel([net, optimizer])
    held = {id(p) for group in arrived_optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in arrived_net.parameters()}
    assert all("exp_avg" in state for state in arrived_optimizer.state.values())


class Odd(nn.Linear):
    """A network that says itself how it is rebuilt, in the short form."""

    def __reduce__(self) -> Any:
        return Odd, (self.in_features, self.out_features)


def test_a_network_that_says_itself_how_it_is_rebuilt_travels():
    arrived = travel(Odd(2, 3))
    assert (type(arrived).__name__, arrived.in_features) == ("Odd", 2)
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    x = torch.randn(3, 2)
    assert torch.equal(travel(traced)(x), traced(x))


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.T


class Average(nn.Module):
    """As ema_pytorch's EMA is made."""

    def __new__(cls, network: nn.Module) -> Average:
        return super().__new__(cls)

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network


@pytest.mark.parametrize("handle", [None, "average"])
def test_a_network_whose_class_asks_for_arguments_before_it_is_made_travels(handle):
    packed = pack(Average(nn.Linear(2, 1)), handle=lambda module: handle if type(module) is Average else None)
    average, arrivals = unpack(packed.payload, packed.slab)
    assert type(average) is Average
    assert average.network(torch.ones(2)).shape == (1,)
    assert [type(module) for module in arrivals.modules] == [nn.Linear, Average]


class Recording(nn.Linear):
    """As transformers' models say what they can give besides."""

    _can_record_outputs = "its layers"


def test_a_model_of_transformers_is_registered_where_it_arrives(monkeypatch):
    library: Any = types.ModuleType("transformers.modeling_utils")
    library._CAN_RECORD_REGISTRY = {}
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", library)
    arrived = travel(nn.Sequential(Recording(1, 1), nn.Linear(1, 1)))
    assert list(library._CAN_RECORD_REGISTRY.items()) == [(arrived[0], "its layers")]
    del library._CAN_RECORD_REGISTRY
    assert type(travel(Recording(1, 1))) is Recording


@pytest.mark.parametrize(
    "parametrized",
    [
        lambda layer: nn.utils.parametrizations.weight_norm(layer),
        lambda layer: nn.utils.parametrizations.spectral_norm(layer),
        lambda layer: nn.utils.parametrizations.orthogonal(layer),
        lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric()),
        lambda layer: nn.utils.parametrizations.weight_norm(nn.utils.parametrizations.weight_norm(layer), "bias", 0),
    ],
    ids=["weight_norm", "spectral_norm", "orthogonal", "own", "two"],
)
def test_a_parametrized_network_travels(parametrized):
    network = nn.Sequential(parametrized(nn.Linear(3, 3)), nn.ReLU())
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    arrived, its_optimizer = travel((network, optimizer))
    assert type(arrived[0]).__name__ == "ParametrizedLinear"
    x = torch.randn(2, 3)
    for here, optimized in ((network, optimizer), (arrived, its_optimizer)):
        here(x).sum().backward()
        optimized.step()
    assert torch.equal(arrived.eval()(x), network.eval()(x))
    assert arrived.state_dict().keys() == network.state_dict().keys()
    for name in list(arrived[0].parametrizations):
        nn.utils.parametrize.remove_parametrizations(arrived[0], name)
    assert type(arrived[0]) is nn.Linear


def test_where_torch_makes_parametrized_networks_in_another_way_they_are_an_error(monkeypatch):
    network = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    monkeypatch.delattr(nn.utils.parametrize, "_inject_property")
    with pytest.raises(TransferError, match="cannot be sent"):
        travel(network)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_network_that_torch_itself_does_not_pickle_is_an_error():
    with pytest.raises(TransferError, match="cannot be sent"):
        travel(torch.jit.script(nn.Linear(2, 2)))


# ---------------------------------------------------------------------- functions of a namespace


def namespace(source: str) -> dict[str, Any]:
    module = types.ModuleType("__main__")
    exec(source, module.__dict__)
    return module.__dict__


def land(obj: Any, here: dict[str, Any], there: dict[str, Any]) -> tuple[Any, set[str]]:
    packed = pack(obj, namespace=here)
    return unpack(packed.payload, packed.slab, namespace=there)[0], set(packed.global_names)


def test_a_function_reads_the_names_of_where_it_lands():
    here = namespace("scale = 2\ndef f(x): return x * scale")
    there = namespace("scale = 10")
    f, read = land(here["f"], here, there)
    assert f(1) == 10
    there["scale"] = 11
    assert f(1) == 11
    assert read == {"scale"}


def test_a_global_that_a_function_reads_is_no_part_of_what_travels():
    here = namespace("import threading\nlock = threading.Lock()\nbig = 'x' * 10**6\ndef f(): return big, lock")
    assert pack(here["f"], namespace=here).payload.nbytes < 5000


def test_a_function_keeps_all_that_is_written_on_it():
    here = namespace(
        "def outer(k):\n"
        "    def f(a: int, b=2, *, c: str = 'c') -> str:\n"
        "        'doc'\n"
        "        return f'{a}{b}{c}{k}'\n"
        "    f.mark = 'm'\n"
        "    return f\n"
        "f = outer('k')"
    )
    f, _ = land(here["f"], here, {})
    assert f(1) == "12ck"
    assert (f.__doc__, f.mark, f.__name__, f.__qualname__) == ("doc", "m", "f", "outer.<locals>.f")
    assert f.__annotations__["return"] in (str, "str")


PACKAGE = """
import contextvars
_now = contextvars.ContextVar("now", default=0)

def install(module, key):
    def hook(module, args, output):
        return _now.get() + key + half(2)
    half = lambda n: n / 2
    module.register_forward_hook(hook)
"""


def test_a_function_in_a_function_of_a_package_reads_what_the_package_has_where_it_lands(tmp_path, monkeypatch):
    """As transformers' models have hooks from their first call that asks for hidden states on."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "mirror_nb_package.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(folder)
    package = importlib.import_module("mirror_nb_package")
    monkeypatch.setitem(sys.modules, "mirror_nb_package", package)
    network = nn.Identity()
    package.install(network, 10)
    (hook,) = travel(network)._forward_hooks.values()
    assert hook is not next(iter(network._forward_hooks.values()))
    token = package._now.set(100)
    assert hook(None, (), None) == 111
    package._now.reset(token)


def test_a_function_that_calls_itself_or_its_neighbour_travels():
    here = namespace("def even(n): return n == 0 or odd(n - 1)\ndef odd(n): return n != 0 and even(n - 1)")
    there: dict[str, Any] = {}
    functions, read = land({"even": here["even"], "odd": here["odd"]}, here, there)
    there.update(functions)
    assert there["even"](10)
    assert read == {"even", "odd"}


def test_a_class_of_the_notebook_travels_with_its_methods_reading_the_new_names():
    here = namespace(
        "class Base:\n    def who(self): return name\n"
        "class C(Base):\n"
        "    def __init__(self): super().__init__(); self.x = 1\n"
        "    @property\n    def p(self): return name\n"
        "    @staticmethod\n    def s(): return name\n"
        "    @classmethod\n    def c(cls): return cls.__name__ + name\n"
        "value = C()\n"
    )
    there = {"name": "there", "__name__": "__main__"}
    value, read = land(here["value"], here, there)
    assert (value.who(), value.p, value.s(), value.c(), value.x) == ("there", "there", "there", "Cthere", 1)
    assert "name" in read


def test_the_namespace_itself_travels_as_a_reference():
    here = namespace("def f(): return globals()")
    there: dict[str, Any] = {}
    f, _ = land(here["f"], here, there)
    assert f() is there
    assert land(here, here, there)[0] is there


def test_global_names_are_found_in_functions_inside_functions():
    code = compile(
        "def f():\n    a = one\n    return [two for _ in a] + [lambda: three]\nclass C:\n    x = four", "", "exec"
    )
    assert {"one", "two", "three", "four"} <= global_names(code)
    assert "a" not in global_names(code)


# ---------------------------------------------------------------------- limits and errors


def test_too_large_is_said_before_all_of_it_was_packed():
    with pytest.raises(TooLarge):
        pack("x" * 3_000_000, limit=1 << 20)
    with pytest.raises(TooLarge):
        pack(torch.zeros(1 << 20), limit=1 << 20)
    with pytest.raises(TooLarge):
        pack(torch.zeros(1 << 20), limit=1 << 20, in_band=True)
    with pytest.raises(TooLarge):
        pack([torch.zeros(1 << 17) for _ in range(4)], limit=1 << 20)
    assert pack(torch.zeros(1000), limit=1 << 20).payload.nbytes < 1 << 20


def test_a_long_pickle_lies_in_the_slab_so_that_the_message_is_short():
    value = ["x" * 1_000_000, torch.arange(LARGE)]
    packed = pack(value)
    assert packed.payload.pickled == b""
    assert packed.payload.nbytes > 1_000_000
    text, tensor = unpack(packed.payload, packed.slab)[0]
    assert text == value[0]
    assert torch.equal(tensor, value[1])


@pytest.mark.parametrize("n", [500, 2000])
def test_a_nest_of_many_tensors_goes_through_a_socket(n):
    """Which takes 1024 pieces at most."""
    writing, reading = map(Channel, socket.socketpair())
    packed = pack([torch.tensor(float(i)) for i in range(n)])
    writing.send(packed.payload, packed.slab)
    arrived = unpack(*reading.receive())[0]
    assert torch.stack(arrived).tolist() == [*map(float, range(n))]
    packed.close()
    writing.close(), reading.close()


def test_in_band_there_is_no_slab():
    packed = pack([torch.arange(LARGE), np.arange(LARGE)], in_band=True)
    assert packed.slab is None
    tensor, array = unpack(packed.payload, None)[0]
    tensor[0], array[0] = 9, 9
    assert (tensor[0], array[0], tensor[-1]) == (9, 9, LARGE - 1)


@pytest.mark.parametrize("value", [threading.Lock(), (i for i in ()), {"a": [threading.Lock()]}])
def test_what_cannot_be_pickled_is_an_error_that_says_its_type_and_why(value):
    with pytest.raises(TransferError, match=f"{type(value).__name__} cannot be sent: .*cannot pickle"):
        pack(value)


def test_a_reference_that_is_not_known_here_is_an_error():
    marker = object()
    packed = pack([marker], reference=lambda obj: ("module", "k7") if obj is marker else None)
    with pytest.raises(TransferError, match=r"refers to .*k7.* not known here"):
        unpack(packed.payload, None)


def test_a_reference_becomes_what_the_receiver_says():
    marker = object()
    packed = pack([marker], reference=lambda obj: "token" if obj is marker else None)
    assert unpack(packed.payload, None, resolve=lambda token: token.upper())[0] == ["TOKEN"]


class Picky:
    """Cannot be rebuilt."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_a_payload_that_says_what_begins_says_what_could_not_be_rebuilt():
    packed = pack([Begins("good"), 1, Begins("bad"), Picky()])
    with pytest.raises(NotRebuilt, match=r"`bad` cannot be rebuilt here: ValueError: .*no number") as raised:
        unpack(packed.payload, None)
    assert raised.value.name == "bad"
    with pytest.raises(ValueError, match="no number"):
        unpack(pack([Begins("good"), 1, Begins(""), Picky()]).payload, None)


def test_folders_to_import_from_are_added_where_the_sender_has_them(monkeypatch):
    monkeypatch.setattr(sys, "path", ["own", "both", "first"])
    packed = pack(SearchPath())
    monkeypatch.setattr(sys, "path", ["both", "mine"])
    unpack(packed.payload, None)
    assert sys.path == ["own", "both", "mine", "first"]


def test_what_cannot_be_imported_does_not_keep_the_rest_away(monkeypatch):
    away = types.ModuleType("away")
    away.Net = type("Net", (nn.Linear,), {"__module__": "away", "__qualname__": "Net"})
    monkeypatch.setitem(sys.modules, "away", away)
    packed = pack({"net": away.Net(2, 2), "module": away, "bare": nn.Linear(1, 1), "n": 3}, handle=lambda module: "k1")
    monkeypatch.delitem(sys.modules, "away")
    with pytest.raises(ModuleNotFoundError, match="away"):
        unpack(packed.payload, os.dup(packed.slab) if packed.slab is not None else None)
    value, arrivals = unpack(packed.payload, packed.slab, lenient=True)
    assert value["n"] == 3
    assert arrivals.lacking == "No module named 'away'"
    assert (arrivals.modules, arrivals.handles) == ([], {})


def test_a_module_of_python_travels_as_an_import():
    assert travel(OrderedDict(a=os.path))["a"] is os.path


def test_a_class_that_its_module_has_by_another_name_than_the_qualified_one_travels():
    from torch.nn.attention import SDPBackend

    assert travel(lambda: SDPBackend)() is SDPBackend
    assert travel([SDPBackend.MATH]) == [SDPBackend.MATH]


class Mark:
    """As dataclasses has it for what is missing."""


class Registered(dict):
    """Has more to it than who it is."""


BARE, MARK, REGISTERED = object(), Mark(), Registered(a=1)


def test_what_stands_for_no_value_is_the_same_where_it_arrives():
    holder = types.SimpleNamespace(bare=[BARE], mark=MARK, missing=dataclasses.MISSING)
    arrived = travel(holder)
    assert arrived.bare[0] is BARE
    assert arrived.mark is MARK
    assert arrived.missing is dataclasses.MISSING
    assert travel(REGISTERED) is not REGISTERED
    assert travel(REGISTERED) == {"a": 1}
    assert {type(travel(object())), type(travel(Mark()))} == {object, Mark}
    assert travel(Mark()) is not MARK


def test_packing_leaves_the_object_as_it_was():
    net = Net()
    before = copy.deepcopy(net.state_dict())
    pack(net)
    assert same(dict(before), dict(net.state_dict()))


@pytest.mark.parametrize(
    "pickled", [lambda f: travel(f), lambda f: cloudpickle.loads(dumps(f))], ids=["pack", "dumps"]
)
def test_code_keeps_the_file_where_it_was_written(pickled):
    # cloudpickle 3.1.3 leaves it out: tracebacks would have no lines.
    names: dict[str, Any] = {}
    source = (
        "def outer(x):\n    return [(lambda: x)() for _ in range(1)], (lambda: x)\nclass C:\n    def f(self): pass"
    )
    exec(compile(source, "<a cell>", "exec"), names)
    outer, kind = pickled((names["outer"], names["C"]))
    assert {code.co_filename for code in (outer.__code__, outer(1)[1].__code__, kind.f.__code__)} == {"<a cell>"}
    assert outer(2)[0] == [2]


def test_functions_that_remember_their_results_travel():
    source = """
import functools
import importlib

@functools.lru_cache(maxsize=7)
def twice(n):
    return 2 * n

class Circle:
    @functools.cached_property
    def area(self):
        return 3

    @functools.lru_cache
    def radius(self):
        return 1
"""
    main = types.ModuleType("__main__")
    exec(source, main.__dict__)
    packed = pack({"twice": main.twice, "circle": main.Circle()}, namespace=main.__dict__)
    there, _ = unpack(packed.payload, packed.slab)
    assert there["twice"](4) == 8
    assert there["twice"].cache_info()[:4] == (0, 1, 7, 1)
    assert (there["circle"].area, there["circle"].radius()) == (3, 1)


@pytest.mark.parametrize("mine", [None, {"__name__": "__main__"}])
def test_functions_that_choose_by_the_class_of_their_argument_travel(mine):
    names: dict[str, Any] = {"__name__": "__main__"} if mine is None else mine
    exec(
        "import functools\n@functools.singledispatch\ndef kind(value): return 'any'\n"
        "@kind.register\ndef _(value: int): return 'int'\n"
        "@kind.register\ndef _(value: list): return [kind(item) for item in value]",
        names,
    )
    packed = pack(names["kind"], namespace=mine)
    arrived = unpack(packed.payload, packed.slab, namespace=mine)[0]
    assert arrived is not names["kind"]
    assert arrived(["a", 1, [2]]) == ["any", "int", ["int"]]


def test_exceptions_travel_whatever_their_constructors_take():
    class Own(Exception):
        def __init__(self, what: str, why: object) -> None:
            super().__init__(what)
            self.why = why

    arrived = travel({"error": Own("it", {"a": torch.ones(2)})})["error"]
    assert (arrived.args, arrived.why["a"].tolist()) == (("it",), [1, 1])


def test_a_generator_goes_on_where_it_stood():
    dice = torch.Generator().manual_seed(3)
    torch.rand(5, generator=dice)
    arrived = unpack(pack(dice).payload, None)[0]
    assert torch.equal(torch.rand(3, generator=arrived), torch.rand(3, generator=dice))


def test_what_is_too_large_to_travel_is_not_copied_from_its_gpu(monkeypatch):
    class There(OnMadeGpu):
        def cpu(self):
            pytest.fail("copied")

    monkeypatch.setattr(packing, "with_memory", lambda tensor: tensor.as_subclass(There))
    with pytest.raises(TooLarge):
        pack({"x": torch.zeros(1000)}, limit=3999, in_band=True)


@pytest.mark.gpu
def test_a_gpus_generator_is_that_of_the_replicas_gpu():
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    dice = torch.Generator("cuda:0").manual_seed(3)
    arrived = unpack(pack(dice).payload, None, device=last)[0]
    assert arrived.device == last
    assert torch.equal(arrived.get_state(), dice.get_state())


@pytest.mark.skipif(sys.platform != "linux", reason="where descriptors are to be counted in /proc")
def test_tensors_that_are_kept_hold_no_descriptors():
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def sent() -> torch.Tensor:
        packed = pack(torch.arange(100_000))
        return unpack(packed.payload, packed.slab)[0]

    before = descriptors()
    kept = [sent() for _ in range(10)]
    assert descriptors() == before
    assert all(torch.equal(tensor, torch.arange(100_000)) for tensor in kept)


def test_complex_numbers_travel_as_others_do():
    # By torch's own way they would arrive on the GPU that they come from, which the notebook goes without.
    packed = pack({"signal": torch.ones(100_000, dtype=torch.complex64)})
    assert b"open_tensor" in packed.payload.pickled
    assert torch.equal(unpack(packed.payload, packed.slab)[0]["signal"], torch.ones(100_000, dtype=torch.complex64))


def test_a_slab_that_is_closed_twice_is_closed_once():
    packed = pack(torch.zeros(1 << 20))
    slab = packed.slab
    with open(os.devnull) as other:
        packed.close()
        # Somebody else has the number by then.
        os.dup2(other.fileno(), slab)
    packed.close()
    os.close(slab)
