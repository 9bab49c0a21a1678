"""The weights after `fit` on any number of replicas are those of a plain PyTorch loop on one device."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, TensorDataset

import mirror_nb as mnb
from mirror_nb.training.feeds import feed

X = torch.arange(23 * 4, dtype=torch.float32).reshape(23, 4).sin()
CLASSES = (X.sum(1) > 0).long() + (X[:, 0] > 0.5).long()
VALUES = X.sum(1, keepdim=True).cos()


@pytest.fixture(scope="module", params=[1, 3])
# Of two, each of which has examples of most batches, test_training_places and test_fit_recovery tell.
def strategy(request: pytest.FixtureRequest) -> Iterator[mnb.MirroredStrategy]:
    with mnb.MirroredStrategy([f"cpu:{i}" for i in range(request.param)]) as made:
        yield made


@pytest.fixture(scope="module")
def three() -> Iterator[mnb.MirroredStrategy]:
    with mnb.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as made:
        yield made


def mlp(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, outputs))


def made(strategy: Any, make: Callable[[], nn.Module] = mlp, **compiled: Any) -> tuple[mnb.Model, nn.Module]:
    """Return a compiled model in the strategy's scope, and the same network for a plain loop."""
    torch.manual_seed(3)
    with strategy.scope():
        model = mnb.Model(make())
        model.compile(**compiled)
    return model, copy.deepcopy(model.network)


def same(model: mnb.Model, network: nn.Module, atol: float = 2e-6) -> None:
    mine, theirs = model.state_dict(), network.state_dict()
    assert list(mine) == list(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


def batches(*columns: Tensor, size: int, epochs: int = 2) -> Iterator[tuple[Tensor, ...]]:
    """The global batches of so many epochs, in order."""
    for _ in range(epochs):
        for start in range(0, len(columns[0]), size):
            yield tuple(column[start : start + size] for column in columns)


def train(network: nn.Module, optimizer: Any, loss: Callable[..., Tensor], every: Any, clip: Any = None) -> None:
    """A hand-written loop."""
    network.train()
    for batch in every:
        optimizer.zero_grad()
        loss(network, *batch).backward()
        if clip is not None:
            clip(network.parameters())
        optimizer.step()


def cross_entropy(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(network(x), y)


OPTIMIZERS = {
    "sgd": {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    "adam": {"lr": 0.02},
    "adamw": {"lr": 0.02},
    "rmsprop": {"lr": 0.01},
}


# Every size with one that has a state from its first step on and one that divides by it; the others with one.
@pytest.mark.parametrize(
    ("name", "size"),
    [*((name, size) for name in ("sgd", "adam") for size in (23, 7, 2)), ("adamw", 7), ("rmsprop", 2)],
)
def test_any_optimizer_and_batch_size(strategy, name, size):
    model, network = made(strategy, optimizer=(name, OPTIMIZERS[name]), loss="cross_entropy")
    model.fit(X, CLASSES, batch_size=size, epochs=2, shuffle=False, verbose=0)
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    optimizer = kinds.get(name, torch.optim.RMSprop)(network.parameters(), **OPTIMIZERS[name])
    train(network, optimizer, cross_entropy, batches(X, CLASSES, size=size))
    # Adam divides by small numbers in the first steps.
    same(model, network, atol=2e-6 if name == "sgd" else 1e-4)


def test_batches_of_one_example_on_three_replicas(three):
    model, network = made(three, optimizer=("sgd", {"lr": 0.1, "momentum": 0.9}), loss="cross_entropy")
    model.fit(X[:5], CLASSES[:5], batch_size=1, epochs=2, shuffle=False, verbose=0)
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    train(network, optimizer, cross_entropy, batches(X[:5], CLASSES[:5], size=1))
    same(model, network)


@pytest.mark.parametrize("limit", ["clip_norm", "clip_value"])
def test_gradients_are_clipped_as_one_device_has_them(strategy, limit):
    model, network = made(strategy, optimizer=("sgd", {"lr": 0.5}), loss="cross_entropy", **{limit: 0.05})
    model.fit(X, CLASSES, batch_size=5, epochs=2, shuffle=False, verbose=0)
    clips = {"clip_norm": nn.utils.clip_grad_norm_, "clip_value": nn.utils.clip_grad_value_}
    optimizer = torch.optim.SGD(network.parameters(), 0.5)
    clip = lambda parameters: clips[limit](list(parameters), 0.05)  # noqa: E731
    train(network, optimizer, cross_entropy, batches(X, CLASSES, size=5), clip)
    same(model, network)


@pytest.mark.parametrize("size", [4, 1])
def test_accumulated_steps_are_the_mean_of_their_batches(strategy, size):
    model, network = made(strategy, optimizer=("sgd", {"lr": 0.3}), loss="cross_entropy", accumulate_steps=4)
    model.fit(X, CLASSES, batch_size=size, epochs=2, shuffle=False, verbose=0)
    optimizer = torch.optim.SGD(network.parameters(), 0.3)
    for _ in range(2):
        epoch = list(batches(X, CLASSES, size=size, epochs=1))
        for start in range(0, len(epoch), 4):
            group = epoch[start : start + 4]
            optimizer.zero_grad()
            for x, y in group:
                # The last group of an epoch is shorter.
                (F.cross_entropy(network(x), y) / len(group)).backward()
            optimizer.step()
    same(model, network)


def test_class_weights_and_sample_weights_multiply_the_losses(strategy):
    weights = torch.linspace(0.2, 2, 23)
    by_class = {0: 0.5, 2: 3.0}
    model, network = made(strategy, optimizer=("sgd", {"lr": 0.3}), loss="cross_entropy")
    arguments: dict[str, Any] = {"class_weight": by_class, "sample_weight": weights}
    model.fit(X, CLASSES, batch_size=5, epochs=2, shuffle=False, verbose=0, **arguments)
    factor = torch.tensor([by_class.get(c, 1.0) for c in range(3)])

    def loss(net: nn.Module, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        # Keras's rule: the weighted sum over the number of examples.
        return (F.cross_entropy(net(x), y, reduction="none") * w * factor[y]).sum() / len(y)

    train(network, torch.optim.SGD(network.parameters(), 0.3), loss, batches(X, CLASSES, weights, size=5))
    same(model, network)


def test_ignored_targets_and_torch_class_weights_divide_over_all_replicas(strategy):
    # A replica's share may hold ignored targets only.
    targets = CLASSES.clone()
    targets[::2] = -100
    targets[10:14] = -100
    targets[12] = 1
    rule = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]), ignore_index=-100)
    model, network = made(strategy, optimizer=("sgd", {"lr": 0.3}), loss=rule)
    model.fit(X, targets, batch_size=7, epochs=2, shuffle=False, verbose=0)

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return rule(net(x), y)

    train(network, torch.optim.SGD(network.parameters(), 0.3), loss, batches(X, targets, size=7))
    same(model, network)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.kind = nn.Linear(6, 3)
        self.value = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.body(x))
        return {"kind": self.kind(hidden), "value": self.value(hidden)}


def test_several_outputs_with_weights(strategy):
    model, network = made(
        strategy,
        TwoHeads,
        optimizer=("sgd", {"lr": 0.2}),
        loss={"kind": "cross_entropy", "value": "mse"},
        loss_weights={"value": 0.3},
        metrics={"kind": ["accuracy"]},
    )
    history = model.fit(
        X, {"kind": CLASSES, "value": VALUES}, batch_size=6, epochs=2, shuffle=False, verbose=0
    ).history

    def loss(net: nn.Module, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        out = net(x)
        return F.cross_entropy(out["kind"], y) + 0.3 * F.mse_loss(out["value"], v)

    train(network, torch.optim.SGD(network.parameters(), 0.2), loss, batches(X, CLASSES, VALUES, size=6))
    same(model, network)
    assert set(history) == {"loss", "kind_loss", "value_loss", "kind_accuracy"}
    for total, kind, value in zip(history["loss"], history["kind_loss"], history["value_loss"], strict=True):
        assert total == pytest.approx(kind + 0.3 * value)


@pytest.mark.parametrize("source", ["arrays", "loader"])
def test_sample_weights_by_output_multiply_the_losses_of_theirs(strategy, source):
    weights = torch.linspace(0.2, 2, 23)
    model, network = made(
        strategy,
        TwoHeads,
        optimizer=("sgd", {"lr": 0.2}),
        loss={"kind": "cross_entropy", "value": "mse"},
        weighted_metrics={"kind": ["accuracy"], "value": ["mae"]},
    )
    targets = {"kind": CLASSES, "value": VALUES}
    data: Any = (X, targets, {"kind": weights})
    if source == "loader":
        each = zip(X, CLASSES, VALUES, weights, strict=True)
        listed = [(x, {"kind": k, "value": v}, {"kind": w}) for x, k, v, w in each]
        data = DataLoader(cast(Any, listed), batch_size=6)
        fit: dict[str, Any] = {"x": data}
    else:
        fit = {"x": X, "y": targets, "sample_weight": {"kind": weights}, "batch_size": 6}
    history = model.fit(**fit, epochs=2, shuffle=False, verbose=0, validation_data=data).history

    def loss(net: nn.Module, x: Tensor, y: Tensor, v: Tensor, w: Tensor) -> Tensor:
        out = net(x)
        return (F.cross_entropy(out["kind"], y, reduction="none") * w).mean() + F.mse_loss(out["value"], v)

    train(network, torch.optim.SGD(network.parameters(), 0.2), loss, batches(X, CLASSES, VALUES, weights, size=6))
    same(model, network)
    out = {name: output.detach() for name, output in network(X).items()}
    kind = (F.cross_entropy(out["kind"], CLASSES, reduction="none") * weights).mean()
    right = (out["kind"].argmax(1) == CLASSES).float()
    wanted = {
        "loss": kind + F.mse_loss(out["value"], VALUES),
        "kind_loss": kind,
        "value_loss": F.mse_loss(out["value"], VALUES),
        "kind_accuracy": (right * weights).sum() / weights.sum(),
        "value_mae": F.l1_loss(out["value"], VALUES),
    }
    wanted = {name: pytest.approx(float(value), rel=1e-4) for name, value in wanted.items()}
    del fit["x"]
    evaluated = model.evaluate(data if source == "loader" else X, **fit, verbose=0, return_dict=True)
    assert evaluated == wanted
    assert {name: history[f"val_{name}"][-1] for name in wanted} == wanted


SCHEDULERS: dict[str, tuple[dict[str, Any], str]] = {
    "ExponentialLR": ({"gamma": 0.7}, "epoch"),
    "OneCycleLR": ({"max_lr": 0.5, "total_steps": 12}, "step"),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_by_epoch_and_by_step(strategy, name):
    arguments, interval = SCHEDULERS[name]
    model, network = made(
        strategy,
        optimizer=("sgd", {"lr": 0.4}),
        loss="cross_entropy",
        scheduler=(name, arguments),
        scheduler_interval=interval,
    )
    model.fit(X, CLASSES, batch_size=6, epochs=3, shuffle=False, verbose=0)
    optimizer = torch.optim.SGD(network.parameters(), 0.4)
    scheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, **arguments)
    for _ in range(3):
        for batch in batches(X, CLASSES, size=6, epochs=1):
            train(network, optimizer, cross_entropy, [batch])
            if interval == "step":
                scheduler.step()
        if interval == "epoch":
            scheduler.step()
    same(model, network)
    assert model.learning_rate == pytest.approx(optimizer.param_groups[0]["lr"])


def test_a_plateau_is_seen_in_the_validation_loss(strategy):
    arguments = {"factor": 0.5, "patience": 0, "threshold": 10.0, "threshold_mode": "abs"}
    model, _ = made(
        strategy, optimizer=("sgd", {"lr": 0.4}), loss="cross_entropy", scheduler=("ReduceLROnPlateau", arguments)
    )
    history = model.fit(X, CLASSES, batch_size=6, epochs=3, validation_data=(X, CLASSES), verbose=0)
    # The first epoch is the best; no other is better by 10.
    assert history.history["learning_rate"] == [0.4, 0.4, 0.2]
    assert model.learning_rate == pytest.approx(0.1)


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
    )


@pytest.mark.parametrize("size", [23, 9, 4])
def test_synchronised_batch_norm_is_one_devices(strategy, size):
    # The last batches are of 23, 5 and 3 examples: on three replicas an empty share, and shares of one.
    model, network = made(
        strategy, convolution, optimizer=("sgd", {"lr": 0.1}), loss="cross_entropy", sync_batch_norm=True
    )
    x, y = (X[:19], CLASSES[:19]) if size == 4 else (X, CLASSES)
    model.fit(x, y, batch_size=size, epochs=2, shuffle=False, verbose=0)
    train(network, torch.optim.SGD(network.parameters(), 0.1), cross_entropy, batches(x, y, size=size))
    same(model, network, atol=1e-5)


class Logarithm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.log()


def logarithmic() -> nn.Module:
    return nn.Sequential(Logarithm(), nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def test_synchronised_batch_norm_of_a_network_that_makes_no_numbers_of_zeros(three):
    # The last batch is of two examples: the third replica has none, and goes through the network all the same.
    model, network = made(
        three, logarithmic, optimizer=("sgd", {"lr": 0.1}), loss="cross_entropy", sync_batch_norm=True
    )
    x, y = X[:8].exp(), CLASSES[:8]
    model.fit(x, y, batch_size=6, epochs=2, shuffle=False, verbose=0)
    train(network, torch.optim.SGD(network.parameters(), 0.1), cross_entropy, batches(x, y, size=6))
    same(model, network, atol=1e-5)


class Named(nn.Module):
    """Gives a mapping that torch's pytrees do not open, as they do no dataclass."""

    def forward(self, x: Tensor) -> Any:
        return UserDict(logits=x)


def test_synchronised_batch_norm_of_a_network_whose_outputs_have_names(three):
    # The third replica has no examples of the last batch, and goes through the network and back all the same.
    model, network = made(
        three,
        lambda: nn.Sequential(convolution(), Named()),
        optimizer=("sgd", {"lr": 0.1}),
        loss=lambda outputs, y: F.cross_entropy(outputs["logits"], y),
        sync_batch_norm=True,
    )
    x, y = X[:8], CLASSES[:8]
    model.fit(x, y, batch_size=6, epochs=2, shuffle=False, verbose=0)
    plain = network[0]
    train(plain, torch.optim.SGD(plain.parameters(), 0.1), cross_entropy, batches(x, y, size=6))
    same(model, network, atol=1e-5)


class Squeezed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze()


def squeezed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1), Squeezed())


def test_a_network_that_squeezes_takes_shares_of_one_example(strategy):
    # The last batch is of two: one device squeezes none of them away.
    options: dict[str, Any] = {"loss": "binary_cross_entropy", "metrics": ["accuracy"]}
    model, network = made(strategy, squeezed, optimizer=("sgd", {"lr": 0.3}), **options)
    targets = (CLASSES > 0).float()
    model.fit(X, targets, batch_size=7, epochs=2, shuffle=False, verbose=0)
    loss = lambda network, x, y: F.binary_cross_entropy_with_logits(network(x), y)  # noqa: E731
    train(network, torch.optim.SGD(network.parameters(), 0.3), loss, batches(X, targets, size=7))
    same(model, network)
    with torch.no_grad():
        outputs = network.eval()(X)
    torch.testing.assert_close(model.predict(X, batch_size=7, verbose=0), outputs, rtol=1e-4, atol=1e-5)
    accuracy = model.evaluate(X, targets, batch_size=7, verbose=0)[1]
    assert accuracy == pytest.approx(float(((outputs > 0) == (targets > 0)).float().mean()))


class Refusing(OrderedDict[str, Tensor]):
    """As the outputs of transformers' models."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("You cannot use ``update`` on a Refusing instance.")


pytree.register_pytree_node(
    Refusing,
    lambda outputs: (list(outputs.values()), list(outputs)),
    lambda values, names: Refusing(zip(names, values, strict=True)),
)


class TwoSqueezed(nn.Module):
    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second, self.kind = nn.Linear(4, 1), nn.Linear(4, 1), kind

    def forward(self, x: Tensor) -> Any:
        return self.kind([("first", self.first(x).squeeze()), ("second", self.second(x).squeeze())])


@pytest.mark.parametrize("kind", [dict, Refusing])
def test_several_outputs_that_are_squeezed_take_shares_of_one_example(strategy, kind):
    losses = {"first": "binary_cross_entropy", "second": "mse"}
    metrics = {"first": "accuracy", "second": "mae"}
    model, network = made(
        strategy, lambda: TwoSqueezed(kind), optimizer=("sgd", {"lr": 0.3}), loss=losses, metrics=metrics
    )
    targets = {"first": (CLASSES > 0).float(), "second": X[:, 0]}
    model.fit(X, targets, batch_size=7, epochs=1, shuffle=False, verbose=0)

    def loss(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        outputs = network(x)
        return F.binary_cross_entropy_with_logits(outputs["first"], (y > 0).float()) + F.mse_loss(
            outputs["second"], x[:, 0]
        )

    train(network, torch.optim.SGD(network.parameters(), 0.3), loss, batches(X, CLASSES, size=7, epochs=1))
    same(model, network)
    with torch.no_grad():
        outputs = network(X)
    found = model.predict(X, batch_size=7, verbose=0)
    assert type(found) is kind
    torch.testing.assert_close(found["second"], outputs["second"], rtol=1e-4, atol=1e-5)
    logs = model.evaluate(X, targets, batch_size=7, verbose=0, return_dict=True)
    assert logs["second_mae"] == pytest.approx(float((outputs["second"] - X[:, 0]).abs().mean()), rel=1e-4)


def test_batch_norm_of_shares_is_averaged_where_it_is_read(three):
    model, _ = made(three, convolution, optimizer=("sgd", {"lr": 0.1}), loss="cross_entropy")
    model.fit(X, CLASSES, batch_size=7, epochs=2, verbose=0)
    model.network.eval()
    with torch.no_grad():
        here = model.network(X)
    torch.testing.assert_close(model.predict(X, verbose=0), here, rtol=1e-5, atol=1e-6)


def test_metrics_and_losses_are_those_of_all_data(strategy):
    model, network = made(
        strategy, optimizer=("sgd", {"lr": 0.0}), loss="cross_entropy", metrics=["accuracy", "top2_accuracy"]
    )
    history = model.fit(X, CLASSES, batch_size=6, epochs=1, validation_split=0.3, verbose=0).history
    at = int(23 * 0.7)
    with torch.no_grad():
        logits = network(X)
    for prefix, part in (("", slice(0, at)), ("val_", slice(at, 23))):
        right = (logits[part].argmax(1) == CLASSES[part]).float().mean()
        top = (logits[part].topk(2).indices == CLASSES[part][:, None]).any(1).float().mean()
        assert history[f"{prefix}loss"][0] == pytest.approx(float(F.cross_entropy(logits[part], CLASSES[part])))
        assert history[f"{prefix}accuracy"][0] == pytest.approx(float(right))
        assert history[f"{prefix}top2_accuracy"][0] == pytest.approx(float(top))
    loss, accuracy, _ = model.evaluate(X, CLASSES, batch_size=5, verbose=0)
    assert loss == pytest.approx(float(F.cross_entropy(logits, CLASSES)))
    assert accuracy == pytest.approx(float((logits.argmax(1) == CLASSES).float().mean()))


@pytest.mark.parametrize("examples", [1, 2, 3, 4, 7, 23])
def test_predictions_come_in_order_for_every_size(strategy, examples):
    model, network = made(strategy)
    with torch.no_grad():
        expected = network(X[:examples])
    for size in (None, 1, 2, 5):
        found = model.predict(X[:examples], batch_size=size, verbose=0)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_predictions_keep_the_structure_of_the_outputs(strategy):
    model, network = made(strategy, TwoHeads)
    with torch.no_grad():
        expected = network(X)
    found = model.predict(X, batch_size=7, verbose=0)
    assert list(found) == ["kind", "value"]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


class Positives(nn.Module):
    """Of each row the numbers above 0: as many tensors of other lengths, and a sparse one."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        rows = [row[row > 0] for row in x]
        made = {layout: torch.nested.nested_tensor(rows, layout=layout) for layout in (torch.strided, torch.jagged)}
        return {"nested": made[torch.strided], "jagged": made[torch.jagged], "sparse": x.relu().to_sparse()}


@pytest.mark.parametrize("size", [1, 5, 23])
def test_predictions_may_be_nested_and_sparse(strategy, size):
    with strategy.scope():
        model = mnb.Model(Positives())
    found = model.predict(X, batch_size=size, verbose=0)
    for name in ("nested", "jagged"):
        assert found[name].is_nested
        assert [row.tolist() for row in found[name].unbind()] == [row[row > 0].tolist() for row in X]
    assert found["sparse"].layout is torch.sparse_coo
    assert torch.equal(found["sparse"].to_dense(), X.relu())


def test_shuffling_depends_on_the_seed_alone(strategy):
    model, network = made(strategy, optimizer=("sgd", {"lr": 0.2}), loss="cross_entropy")
    torch.manual_seed(11)
    model.fit(X, CLASSES, batch_size=5, epochs=2, verbose=0)
    torch.manual_seed(11)
    seed = int(torch.randint(1 << 62, ()))
    shuffled = feed(X, CLASSES, batch_size=5, shuffle=True, seed=seed)
    optimizer = torch.optim.SGD(network.parameters(), 0.2)
    for epoch in range(2):
        shares = shuffled.shares(0, 1, torch.device("cpu"), epoch=epoch)
        train(network, optimizer, cross_entropy, [(share.inputs, share.targets) for share in shares])
    same(model, network)


class Squares(Dataset):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return X[i], CLASSES[i]


@pytest.mark.parametrize("source", ["dataset", "loader"])
def test_datasets_and_loaders(strategy, source):
    data: Any = Squares() if source == "dataset" else DataLoader(TensorDataset(X, CLASSES), batch_size=6)
    model, network = made(strategy, optimizer=("sgd", {"lr": 0.2}), loss="cross_entropy")
    arguments = {"batch_size": 6, "shuffle": False} if source == "dataset" else {}
    model.fit(data, epochs=2, verbose=0, **arguments)
    train(network, torch.optim.SGD(network.parameters(), 0.2), cross_entropy, batches(X, CLASSES, size=6))
    same(model, network)
    torch.testing.assert_close(model.predict(data, verbose=0), network(X).detach(), rtol=1e-5, atol=1e-6)


class OwnStep(mnb.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 7)
        self.last = nn.Linear(7, 1)

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        error = self.last(torch.tanh(self.first(x))) - y
        return {"loss": error.square().mean(), "error": error.abs().mean()}


def test_a_training_step_of_ones_own_is_weighed_by_examples(strategy):
    torch.manual_seed(3)
    with strategy.scope():
        model = OwnStep()
        model.compile(optimizer=("sgd", {"lr": 0.2, "momentum": 0.9}))
    alone = copy.deepcopy(model)
    history = model.fit(X, VALUES, batch_size=4, epochs=2, shuffle=False, verbose=0, validation_data=(X, VALUES))
    optimizer = torch.optim.SGD(alone.parameters(), 0.2, momentum=0.9)
    errors = []
    for x, y in batches(X, VALUES, size=4):
        optimizer.zero_grad()
        result = alone.training_step((x, y))
        errors.append(float(result["error"].detach()) * len(x))
        result["loss"].backward()
        optimizer.step()
    same(model, alone)
    assert history.history["error"][1] == pytest.approx(sum(errors[6:]) / 23, rel=1e-4)
    with torch.no_grad():
        assert history.history["val_loss"][1] == pytest.approx(float(alone.training_step((X, VALUES))["loss"]))


class NowAndThen(mnb.Model):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        late = {"late": y.mean()} if bool((y >= 8).all()) else {}
        return {"loss": self.layer(x).square().mean(), "all": y.mean(), **late}


def test_a_number_that_a_training_step_tells_now_and_then_is_the_mean_of_those_batches(strategy):
    with strategy.scope():
        model = NowAndThen()
        model.compile(optimizer="sgd")
    targets = torch.arange(23.0)
    history = model.fit(X, targets, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    assert history["all"] == pytest.approx([11.0] * 2)
    assert history["late"] == pytest.approx([15.0] * 2)


def test_lbfgs_asks_for_the_loss_of_all_replicas(strategy):
    arguments = {"lr": 0.5, "max_iter": 5, "line_search_fn": "strong_wolfe"}
    model, network = made(strategy, optimizer=("lbfgs", arguments), loss="cross_entropy")
    model.fit(X, CLASSES, batch_size=8, epochs=1, shuffle=False, verbose=0)
    optimizer = torch.optim.LBFGS(network.parameters(), **arguments)
    for x, y in batches(X, CLASSES, size=8, epochs=1):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(network(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    # The line search multiplies differences of rounding.
    same(model, network, atol=2e-3)


def test_parameters_that_no_example_uses_stay_as_they_are(three):
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(4, 3)
            self.unused = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model, network = made(three, Unused, optimizer=("sgd", {"lr": 0.1, "weight_decay": 0.5}), loss="cross_entropy")
    # An empty share comes with the first step.
    model.fit(X[:1], CLASSES[:1], batch_size=1, epochs=2, shuffle=False, verbose=0)
    optimizer = torch.optim.SGD(network.parameters(), 0.1, weight_decay=0.5)
    train(network, optimizer, cross_entropy, batches(X[:1], CLASSES[:1], size=1))
    same(model, network)
