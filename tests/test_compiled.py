"""What torch.compile makes: it travels, it is compiled once in each process, and our hooks are no part of it."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from driving import running
from torch import nn
from trained import Net, X, Y

from mirror_nb.errors import TransferError
from mirror_nb.messages import travels
from mirror_nb.strategies.functions import Functions
from mirror_nb.transfer import compiled
from mirror_nb.transfer.opening import unpack
from mirror_nb.transfer.packing import pack
from mirror_nb.transfer.payload import Payload


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def again(function: Any) -> Any:
    """What arrives of it elsewhere."""
    packed = pack(function)
    try:
        return unpack(packed.payload, packed.slab)[0]
    finally:
        packed.close()


def own_backend(graph: Any, inputs: Any) -> Any:
    return graph.forward


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"backend": "eager"},
        {"backend": "aot_eager", "fullgraph": True, "dynamic": True},
        {"backend": own_backend, "dynamic": False},
        {"mode": "max-autotune-no-cudagraphs"},
        {"options": {"max-autotune": True, "shape_padding": True}},
    ],
    ids=["usual", "eager", "aot_eager", "a function", "a mode", "options"],
)
def test_a_compiled_function_travels_with_how_it_is_compiled(options):
    function = torch.compile(double, **options)
    arrived = again(function)
    assert compiled.compiled_from(arrived) is double
    assert compiled._options(arrived) == compiled._options(function)
    found = compiled._options(arrived)
    assert (found["fullgraph"], found["dynamic"]) == (options.get("fullgraph", False), options.get("dynamic"))
    assert found["backend"] == options.get("backend", "inductor")
    if "max-autotune" in options.get("options", {}):
        assert found["options"]["max_autotune"] is True


def test_a_method_that_is_compiled_takes_its_object_along():
    class Scaled:
        def __init__(self) -> None:
            self.by = 3
            self.call = torch.compile(self._call, backend="eager")

        def _call(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.by

    arrived = again(Scaled())
    arrived.by = 5
    assert arrived.call(torch.ones(2)).tolist() == [5, 5]


def test_what_only_looks_compiled_is_left_as_it_is():
    made = torch.compile(double, backend="eager")

    @functools.wraps(made)
    def around(x: torch.Tensor) -> torch.Tensor:
        return made(x) + 1

    for function in (double, around, torch.compiler.disable(double), F.relu, len, None):
        assert compiled.compiled_from(function) is None
        assert compiled.reduce_compiled(function) is None
    assert again(around)(torch.ones(1)) == 3
    assert again(torch.compiler.disable(double))(torch.ones(1)) == 2


def test_the_pickle_of_a_compiled_function_serves_while_it_captures_the_same_and_counts_nothing():
    functions, pickled, rate = Functions(lambda obj: False), Payload(b"p"), 1

    def step() -> int:
        return rate

    def counts() -> None:
        nonlocal rate
        rate += 1

    compiled, counted = torch.compile(step), torch.compile(counts)
    for function in (compiled, counted):
        functions.keep(function, pickled)
    assert functions.get(compiled) is pickled
    assert functions.get(counted) is None
    rate = 2
    assert functions.get(compiled) is None


def test_a_torch_that_does_not_tell_how_is_named(monkeypatch):
    monkeypatch.setattr(compiled, "_BACKEND", "_not_known")
    with pytest.raises(TransferError, match=r"double was compiled by torch.compile, and torch .* does not tell how"):
        pack(torch.compile(double, backend="eager"))


@pytest.mark.parametrize(
    ("name", "users"),
    [
        ("__compiled_fn_3_1948c24e_a5ee_4163_8a4b_d18bbc3fd53f", False),
        ("__builtins_dict___2", False),
        ("__import_torch_dot__dynamo_dot_utils", False),
        ("__resume_at_30_1", False),
        ("___unnamed_scope_140210987654321_c0/0", False),
        ("_140210987654321_c0/0", False),
        ("__comprehension_<lambda>_at_3_1", False),
        ("__mine", True),
        ("__mine_2", True),
        ("_x_1", True),
        ("x_1", True),
    ],
)
def test_names_that_a_compiler_binds_do_not_travel(name, users):
    assert travels(name) is users


def graphs() -> int:
    import torch._dynamo.utils

    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("part", ["the forward pass", "the whole step"])
def test_a_compiled_step_trains_as_another_one_and_is_compiled_once(two, part):
    torch.manual_seed(0)
    with two.scope():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    alone = copy.deepcopy(model)
    alone_optimizer = torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x), y)

    if part == "the forward pass":
        # A whole graph: what is ours is no part of it, in the first pass either.
        loss_of = torch.compile(loss_of, backend="eager", fullgraph=True)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    if part == "the whole step":
        step = torch.compile(step, backend="eager")
    assert two.run(loss_of, args=(X[:4], Y[:4]))[0].ndim == 0
    counts = []
    for _ in range(5):
        # The last batch, of 6, is another shape.
        for x, y in two.distribute_dataset((X, Y), batch_size=8):
            two.run(step, args=(x, y))
        counts.append(two.run(graphs))
    # An equal number on both replicas comes as one.
    assert 0 < counts[0] <= counts[-2] == counts[-1]
    for _ in range(5):
        for start in range(0, 22, 8):
            loss = F.mse_loss(alone(X[start : start + 8]), Y[start : start + 8])
            alone_optimizer.zero_grad()
            loss.backward()
            alone_optimizer.step()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


def test_a_lazy_network_takes_shape_in_a_compiled_step(two):
    with two.scope():
        model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @torch.compile(backend="eager")
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for x, y in two.distribute_dataset((X, Y), batch_size=11):
        two.run(step, args=(x, y))
    assert [p.shape for p in model.parameters()] == [(8, 4), (8,), (1, 8), (1,)]
    weights = two.run(lambda: torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*weights)


def test_a_network_with_batch_norm_is_compiled_as_a_whole(two):
    with two.scope():
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU())

    def difference(x: torch.Tensor) -> torch.Tensor:
        found = torch.compile(model, backend="eager", fullgraph=True)(x)
        return (found - model(x)).detach().abs().max()

    # Of the last batch of 3 replica 1 has a single example.
    for x in two.distribute_dataset(X[:11], batch_size=4):
        assert torch.equal(torch.stack(two.local_results(two.run(difference, args=(x,)))), torch.zeros(2))


def test_functions_of_both_kinds_of_cells_are_compiled_in_both(shell):
    run = running(shell)
    run("import torch\n@torch.compile(backend='eager')\ndef outside(x):\n    return x * factor\nfactor = 2.0")
    known = set(shell.user_ns)
    run(
        "%%mirrored\n"
        "@torch.compile(backend='eager')\n"
        "def inside(x):\n"
        "    return x * factor + 1\n"
        "ones = torch.ones(2)\n"
        "found = outside(ones).tolist(), inside(ones).tolist()\n"
    )
    assert shell.user_ns["found"] == ([2, 2], [3, 3])
    assert set(shell.user_ns) - known == {"inside", "ones", "found"}
    # The notebook's own: a name that it binds anew is the one that is looked up.
    assert run("factor = 3.0\ninside(ones).tolist()") == [4, 4]
    assert compiled.compiled_from(shell.user_ns["inside"]) is not None
