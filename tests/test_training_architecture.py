"""A network's structure as plain values: there and back without running a line from a file."""

from __future__ import annotations

import copy
import io
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mirror_nb.errors import CheckpointError, UsageError
from mirror_nb.training.architecture import decode, describe, encode, missing, rebuild
from mirror_nb.training.files import plain


def through_a_file(network: nn.Module, **given: Any) -> nn.Module:
    """The network made of what `torch.load(weights_only=True)` gives."""
    file = io.BytesIO()
    torch.save(plain({"architecture": describe(network), "state_dict": network.state_dict()}), file)
    file.seek(0)
    content = torch.load(file, weights_only=True)
    again = rebuild(content["architecture"], content["state_dict"], **given)
    again.load_state_dict(content["state_dict"])
    return again


def assert_same(network: nn.Module, again: nn.Module, *inputs: torch.Tensor) -> None:
    assert repr(again) == repr(network)
    assert [type(part) for part in again.modules()] == [type(part) for part in network.modules()]
    torch.manual_seed(7)
    expected = network(*inputs)
    torch.manual_seed(7)
    torch.testing.assert_close(again(*inputs), expected, rtol=0, atol=0)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = 0.5
        self.after = F.relu
        # Not registered, but parts all the same.
        self.order = [self.inner]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(x + self.scale * self.order[0](x))


class WithLambda(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.after = lambda x: x + 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.layer(x))


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.rand(4, 3), persistent=False)
        self.constant = torch.rand(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table + self.constant


# ---- there and back -----------------------------------------------------------------------------------

_SIZE = 6


def layers() -> st.SearchStrategy[Any]:
    """Layers that take [N, 6] and give [N, 6], by the function that makes them."""
    simple = st.sampled_from(
        [
            lambda: nn.Linear(_SIZE, _SIZE),
            lambda: nn.Linear(_SIZE, _SIZE, bias=False, dtype=torch.float32),
            lambda: nn.BatchNorm1d(_SIZE, eps=1e-3, momentum=None),
            lambda: nn.BatchNorm1d(_SIZE, affine=False, track_running_stats=False),
            lambda: nn.LayerNorm(_SIZE),
            lambda: nn.GroupNorm(2, _SIZE),
            lambda: nn.Dropout(0.3),
            lambda: nn.LeakyReLU(0.2),
            lambda: nn.GELU("tanh"),
            lambda: nn.Softmax(dim=1),
            lambda: nn.PReLU(),
            lambda: nn.Hardtanh(-2.0, 2.0),
            lambda: nn.Identity(),
            lambda: nn.Sequential(nn.Unflatten(1, (1, _SIZE)), nn.Conv1d(1, 2, 3, padding="same"), nn.Flatten(),
                                  nn.Linear(2 * _SIZE, _SIZE)),
            lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2, padding=1, padding_mode="circular"),
                                  nn.AdaptiveAvgPool2d((1, None)), nn.Flatten(), nn.LazyLinear(_SIZE)),
            lambda: nn.Sequential(nn.Unflatten(1, (2, 3)),
                                  nn.TransformerEncoderLayer(3, 1, 4, activation=F.gelu, batch_first=True),
                                  nn.Flatten()),
        ]
    )  # fmt: skip
    return st.recursive(
        simple,
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map(lambda makes: lambda: nn.Sequential(*[m() for m in makes])),
            inner.map(lambda make: lambda: nn.Sequential(*[make()] * 2)),
            inner.map(lambda make: lambda: Residual(make())),
        ),
        max_leaves=6,
    )


@settings(max_examples=60, deadline=None)
@given(makes=st.lists(layers(), min_size=1, max_size=4), training=st.booleans())
def test_random_networks_give_the_same_outputs_again(makes, training):
    torch.manual_seed(0)
    network = nn.Sequential(*[make() for make in makes])
    x = torch.rand(5, _SIZE)
    network(x)
    network.train(training)
    assert_same(network, through_a_file(network, custom_objects={"Residual": Residual}), x)


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda: nn.Transformer(4, 2, 1, 1, 8, batch_first=True), [(2, 3, 4), (2, 5, 4)]),
        (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2), [(2, 3, 4)]),
        (lambda: nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2, dropout=0.1), [(5, 2, 3)]),
        (lambda: nn.GRU(3, 4, batch_first=True), [(2, 5, 3)]),
        (lambda: nn.RNN(3, 4, nonlinearity="relu", bias=False), [(2, 5, 3)]),
        (lambda: nn.LSTMCell(3, 4), [(2, 3)]),
        (lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=5), [(2, 1, 4), (2, 1, 3), (2, 1, 5)]),
        (lambda: nn.Bilinear(2, 3, 4), [(2, 2), (2, 3)]),
        (lambda: nn.ConvTranspose2d(1, 2, 3, stride=2, output_padding=1), [(1, 1, 4, 4)]),
        (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), [(1, 1, 3, 3)]),
        (lambda: nn.InstanceNorm2d(2, affine=True, track_running_stats=True), [(2, 2, 3, 3)]),
        (lambda: nn.AdaptiveMaxPool2d((None, 2)), [(1, 1, 3, 3)]),
        (lambda: nn.FractionalMaxPool2d(2, output_ratio=0.5), [(1, 1, 8, 8)]),
    ],
)  # fmt: skip
def test_networks_of_torch_give_the_same_outputs_again(make, inputs):
    network = make()
    again = through_a_file(network)
    assert_same(network, again, *(torch.rand(shape) for shape in inputs))
    assert {p.requires_grad for p in again.parameters()} <= {True}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_all_of_torchs_layers_that_need_no_arguments_come_back():
    for name in dir(nn):
        kind = getattr(nn, name)
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)) or name.startswith(
            ("Lazy", "DataP", "Container")
        ):
            continue
        try:
            network = kind()
        except TypeError:
            continue
        again = through_a_file(network)
        assert type(again) is kind
        assert repr(again) == repr(network)
        if not network.state_dict():
            assert describe(again) == describe(network), name


def test_constructors_do_not_run_and_no_random_number_is_drawn():
    network = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))
    before = torch.get_rng_state()
    through_a_file(network)
    assert torch.equal(torch.get_rng_state(), before)


def test_tied_parameters_and_shared_layers_stay_one():
    network = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    network["b"].weight = network["a"].weight
    network["c"] = network["a"]
    network.register_module("none", None)
    again: Any = through_a_file(network)
    assert again["b"].weight is again["a"].weight
    assert again["c"] is again["a"]
    assert again.none is None
    assert len(list(again.parameters())) == len(list(network.parameters())) == 3


def test_frozen_parameters_other_dtypes_and_what_trains_come_back():
    network = nn.Sequential(nn.Linear(2, 2, dtype=torch.bfloat16), nn.Dropout(), nn.Linear(2, 2, dtype=torch.float64))
    network[0].requires_grad_(False)
    network[1].eval()
    again: Any = through_a_file(network)
    assert [p.dtype for p in again.parameters()] == [torch.bfloat16] * 2 + [torch.float64] * 2
    assert [p.requires_grad for p in again.parameters()] == [False, False, True, True]
    assert [part.training for part in again] == [True, False, True]


def test_lists_and_dicts_of_parameters_come_back():
    listed = nn.ParameterList([nn.Parameter(torch.ones(1))])
    network = nn.ParameterDict({"a": nn.Parameter(torch.rand(2)), "b": listed})
    again: Any = through_a_file(network)
    assert torch.equal(again["a"], network["a"])
    assert torch.equal(again["b"][0], network["b"][0])
    assert list(again.keys()) == ["a", "b"]


def test_buffers_that_no_state_dict_holds_come_back_with_their_values():
    network = nn.Sequential(Positions())
    again: Any = through_a_file(network, custom_objects={"Positions": Positions})
    assert_same(network, again, torch.rand(4, 3))
    assert again.state_dict().keys() == network.state_dict().keys() == set()


def test_it_can_be_trained_copied_and_described_again():
    network = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))
    again = through_a_file(network)
    assert describe(again) == describe(network)
    copy.deepcopy(again)(torch.rand(3, 2))[0].sum().backward()


# ---- users' classes -----------------------------------------------------------------------------------


def test_a_users_class_has_to_be_given():
    network = nn.Sequential(nn.Linear(2, 2), Residual(nn.Linear(2, 2)))
    with pytest.raises(UsageError, match=r"Residual \(1\).*custom_objects=\{\"Residual\": Residual\}, or network="):
        through_a_file(network)
    assert_same(network, through_a_file(network, custom_objects={"Residual": Residual}), torch.rand(1, 2))


def test_what_cannot_be_described_is_named_when_the_network_is_made():
    told = r"`after` of WithLambda \(the network itself\), the function .*lambda.*network="
    with pytest.raises(UsageError, match=told):
        through_a_file(WithLambda(), custom_objects={"WithLambda": WithLambda})


def test_a_hook_is_not_forgotten_in_silence():
    network = nn.Sequential(nn.Linear(2, 2))
    network[0].register_forward_hook(lambda module, inputs, output: output + 1)
    with pytest.raises(UsageError, match=r"`_forward_hooks` of Linear \(0\), hooks"):
        through_a_file(network)


def test_a_parametrized_layer_needs_the_network():
    network = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="ParametrizedLinear"):
        through_a_file(network)


def test_a_lazy_layer_has_to_be_called_first():
    with pytest.raises(UsageError, match="call the network once"):
        through_a_file(nn.Sequential(nn.LazyLinear(3)))


@pytest.mark.parametrize("wrong", [{"Net": os.system}, {"Net": 3}, {"Net": dict}, [Residual]])
def test_custom_objects_are_classes_by_name(wrong):
    with pytest.raises(UsageError, match="custom_objects"):
        rebuild(describe(nn.Linear(1, 1)), {}, wrong)


# ---- what a file may not name -------------------------------------------------------------------------


def node(**changes: Any) -> dict[str, Any]:
    return {**describe(nn.ReLU()), **changes}


@pytest.mark.parametrize(
    "name",
    ["os.system", "system", "DataParallel", "Module.__init__", "linear.Linear", "torch.nn.Linear", "", None, 3],
)
def test_only_classes_of_torch_nn_modules_are_made(name):
    with pytest.raises(CheckpointError):
        rebuild(node(**{"class": name}), {})


def test_a_class_of_another_module_is_made_only_when_it_is_given():
    from torch.nn.parallel import DistributedDataParallel

    elsewhere = node(**{"class": "DistributedDataParallel", "of": DistributedDataParallel.__module__})
    with pytest.raises(UsageError, match="DistributedDataParallel"):
        rebuild(elsewhere, {})
    assert "DistributedDataParallel" not in rebuild(node(), {}).__class__.__name__


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("function", "os.system"),
        ("function", "torch.load"),
        ("function", "torch.from_file"),
        ("function", "torch.compile"),
        ("function", "torch.hub.load"),
        ("function", "torch.nn.functional._verify_batch_size"),
        ("function", "torch.nn.functional.importlib"),
        ("function", "builtins.eval"),
        ("class", "subprocess.Popen"),
        ("class", "torch.optim.Optimizer.__subclasses__"),
        ("class", ["torch.nn.Linear"]),
        ("constant", "load"),
        ("constant", "os"),
        ("device", "no such device"),
        ("nothing", "known"),
        (["list"], "x"),
    ],
)
def test_only_functions_and_classes_of_torch_are_found(kind, name):
    value = {"kind": kind, "name": name}
    with pytest.raises(CheckpointError):
        decode(value)
    with pytest.raises(CheckpointError):
        rebuild(node(attributes={"function": value}), {})


@pytest.mark.parametrize(
    "damage",
    [
        {"attributes": {"_forward_hooks": {"kind": "dict", "items": []}}},
        {"attributes": {"_parameters": 3}},
        {"attributes": {"x": {"kind": "part", "path": "nowhere"}}},
        {"attributes": {"x": [1, 2]}},
        {"attributes": {"x": {"kind": "tensor", "value": 3}}},
        {"parameters": {"weight": {"shape": [10**15], "dtype": "float32", "requires_grad": True}}},
        {"parameters": {"weight": {"same_as": "other"}}},
        {"buffers": {"a.b": None}},
        {"modules": {"a": {"same_as": "b"}}},
        {"modules": {"a": 3}},
        {"modules": None},
        {"modules": {"a": {"class": ["x"], "of": "torch"}}},
        {"modules": {"a": {"class": "ReLU", "of": "torch"}}},
        {"attributes": [1, 2]},
    ],
)
def test_a_damaged_description_is_an_error_that_names_the_way_out(damage):
    with pytest.raises(CheckpointError):
        rebuild(node(**damage), {})


def test_an_incomplete_description_is_an_error():
    with pytest.raises(CheckpointError, match="damaged"):
        rebuild({"class": "ReLU", "of": "torch"}, {})


def test_shapes_are_compared_before_memory_is_taken():
    description = describe(nn.Linear(2, 3))
    with pytest.raises(CheckpointError, match=r"`weight` should have shape \[3, 2\], but the file has \[3, 3\]"):
        rebuild(description, {"weight": torch.ones(3, 3), "bias": torch.ones(3)})


# ---- settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        "adam",
        ("adam", {"lr": 0.1, "betas": (0.9, 0.99)}),
        (torch.optim.SGD, {"lr": 0.1}),
        torch.optim.lr_scheduler.StepLR,
        {"a": "mse", "b": [F.l1_loss, torch.relu]},
        nn.CrossEntropyLoss,
        {1, 2},
        torch.float16,
        torch.device("cpu"),
        None,
    ],
)
def test_settings_come_back(value):
    assert decode(plain(encode(value))) == value
    assert missing(encode(value)) == []


def test_a_loss_module_comes_back_with_its_tensors():
    loss: Any = decode(plain(encode(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]), ignore_index=1))))
    assert loss.weight.tolist() == [1, 2]
    assert (loss.ignore_index, loss.reduction) == (1, "mean")


def test_what_cannot_be_stored_is_told():
    class Mine(nn.Module):
        pass

    encoded = encode({"a": [lambda x: x, "mse"], "b": Mine, "c": Mine(), "d": os.system})
    told = missing(encoded)
    assert len(told) == 4
    assert ["lambda" in told[0], "the class" in told[1], "class" in told[2], told[3]] == [
        True, True, True, "the function system",
    ]  # fmt: skip
    plain(encoded)
