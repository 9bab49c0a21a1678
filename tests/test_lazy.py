"""Lazy modules: made on one side, shaped by a forward pass on the other, and then the same on both."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.nn.functional as F
from driving import running
from torch import nn

import mirror_nb as mnb
from mirror_nb.mirroring.lazy import kind_of

X = torch.arange(88.0).reshape(22, 4).sin()
Y = X.sum(1, keepdim=True)


def lazy_net() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1))


def classes(module: nn.Module) -> list[str]:
    return [type(part).__name__ for part in module]


def test_one_that_takes_shape_in_the_replicas_does_so_here_and_trains_as_on_one_device(two):
    with two.scope():
        model = lazy_net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    assert two.run(lambda: len(list(model.parameters()))) == 4
    assert classes(model) == ["LazyLinear", "Tanh", "LazyLinear"]

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    two.run(lambda: model(X[:2]))
    alone = copy.deepcopy(model)
    assert classes(model) == classes(alone) == two.run(lambda: classes(model)) == ["Linear", "Tanh", "Linear"]
    assert (model[0].in_features, model[2].in_features) == (4, 8)
    alone_optimizer = torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9)
    for x, y in two.distribute_dataset((X, Y), batch_size=8):
        two.run(step, args=(x, y))
    for start in range(0, 22, 8):
        alone_optimizer.zero_grad()
        F.mse_loss(alone(X[start : start + 8]), Y[start : start + 8]).backward()
        alone_optimizer.step()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
    assert len(optimizer.state_dict()["state"]) == 4
    # Replicas name parameters by their module's class: one that is started anew never saw the lazy one.
    with pytest.raises(mnb.ReplicaDied):
        two.run(lambda: mnb.get_replica_context().replica_id_in_sync_group and os._exit(7))
    two.run(step, args=(X, Y))
    assert torch.equal(*two.run(lambda: model[0].weight.sum()))


def test_one_that_takes_shape_in_the_replicas_and_gets_a_layer_behind_it_has_both_here(two):
    with two.scope():
        model = nn.Sequential(nn.LazyLinear(3))
    two.run(lambda: bool(model))
    two.run(lambda: model.append(nn.Tanh()) and model(X).sum().item())
    assert torch.equal(model(X), two.run(lambda: model(X).detach())[0])
    assert classes(model) == ["Linear", "Tanh"]


@pytest.mark.parametrize("how", ["a forward pass", "load_state_dict"])
def test_one_that_takes_shape_here_does_so_in_the_replicas(two, how):
    with two.scope():
        model = nn.LazyLinear(3)
    assert two.run(lambda: type(model).__name__) == "LazyLinear"
    if how == "a forward pass":
        model(X)
    else:
        model.load_state_dict(nn.Linear(4, 3).state_dict())
    assert torch.equal(two.run(lambda: model.weight.detach().clone())[1], model.weight)
    assert two.run(lambda: (model(X).shape, type(model).__name__, model.in_features)) == ((22, 3), "Linear", 4)
    assert (model.weight.shape, type(model), model.in_features) == ((3, 4), nn.Linear, 4)


def test_buffers_and_what_is_frozen(two):
    with two.scope():
        model = nn.Sequential(nn.LazyConv2d(3, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2))
        model[0].bias.requires_grad = False
    images = torch.arange(128.0).reshape(2, 1, 8, 8).sin()
    two.run(lambda: model(images).mean().backward())
    assert [p.requires_grad for p in model.parameters()] == [True, False, *[True] * 4]
    assert two.run(lambda: [p.grad is None for p in model.parameters()]) == [False, True, *[False] * 4]
    assert torch.equal(model[1].running_mean, two.run(lambda: model[1].running_mean)[0])
    assert classes(model) == ["Conv2d", "BatchNorm2d", "Flatten", "Linear"]


@pytest.mark.parametrize("size", [8, 1])
def test_fit_takes_one(two, size):
    # Of a first batch of one example the second replica has none.
    with two.scope():
        model = mnb.Model(lazy_net())
        model.compile(optimizer="sgd", loss="mse")
    assert len(model.fit(X, Y, epochs=2, batch_size=size, verbose=0).history["loss"]) == 2
    assert [p.shape for p in model.parameters()] == [(8, 4), (8,), (1, 8), (1,)]


@pytest.mark.parametrize("size", [8, 2, 1])
@pytest.mark.parametrize("synchronized", [True, False])
def test_fit_takes_lazy_batch_norms_also_in_first_shares_of_one_example(two, size, synchronized):
    def fitted(norm: nn.Module) -> mnb.Model:
        torch.manual_seed(0)
        with two.scope():
            model = mnb.Model(nn.Sequential(nn.Linear(4, 6), norm, nn.Tanh(), nn.Linear(6, 1)))
            model.compile(optimizer=("sgd", {"lr": 0.1}), loss="mse", sync_batch_norm=synchronized)
        model.fit(X, Y, epochs=2, batch_size=size, shuffle=False, verbose=0)
        return model

    found, wanted = fitted(nn.LazyBatchNorm1d()), fitted(nn.BatchNorm1d(6)).state_dict()
    assert classes(found.network) == ["Linear", "BatchNorm1d", "Tanh", "Linear"]
    for name, value in found.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=0)


@pytest.mark.parametrize("first", ["predict", "evaluate"])
def test_a_lazy_network_that_one_example_was_shown_to_predicts_and_trains(two, first, capfd):
    with two.scope():
        model = mnb.Model(nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(affine=False), nn.LazyLinear(1)))
        model.compile(optimizer="sgd", loss="mse")
    # The second replica has no example.
    model.predict(X[:1], verbose=0) if first == "predict" else model.evaluate(X[:1], Y[:1], verbose=0)
    torch.testing.assert_close(model.predict(X, verbose=0), model.eval()(X).detach())
    assert len(model.fit(X, Y, verbose=0).history["loss"]) == 1
    assert "different values" not in capfd.readouterr().err


def test_a_first_share_of_one_example_is_normalised_by_a_lazy_batch_norm_as_by_another(two):
    with two.scope():
        norm = nn.LazyBatchNorm1d()
    outputs = two.run(lambda batch: norm(batch[0]), args=(next(iter(two.distribute_dataset((X, Y), batch_size=2))),))
    assert [output.tolist() for output in outputs] == [[[0.0] * 4]] * 2


@pytest.mark.parametrize("made", ["", "%%mirrored\n"], ids=["in an ordinary cell", "in a mirrored cell"])
def test_one_of_a_notebook_takes_shape_in_a_mirrored_cell(shell, made):
    run = running(shell)
    run("import torch\nfrom torch import nn\nx = torch.arange(12.0).reshape(3, 4)")
    run(
        f"{made}net = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1))\n"
        "sgd = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)"
    )
    assert classes(shell.user_ns["net"]) == ["LazyLinear", "Tanh", "LazyLinear"]
    run("%%mirrored\nnet(x).mean().backward()\nsgd.step()\nsums = [p.sum().item() for p in net.parameters()]")
    assert classes(shell.user_ns["net"]) == ["Linear", "Tanh", "Linear"]
    assert [p.sum().item() for p in shell.user_ns["net"].parameters()] == shell.user_ns["sums"]
    assert len(run("sgd.state_dict()['state']")) == 4


def test_the_class_that_a_lazy_module_becomes():
    assert [kind_of(module) for module in (nn.LazyConv2d(1, 1), nn.Conv2d(1, 1, 1), nn.ReLU())] == [
        "Conv2d",
        "Conv2d",
        "ReLU",
    ]
