"""A default device that the user has set is for the tensors that they make: "meta" stands for a GPU here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror_nb as mnb

X = torch.randn(32, 4)
Y = X.sum(1, keepdim=True)


@pytest.fixture
def elsewhere() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def one() -> torch.Tensor:
    return torch.ones((), device="cpu")


@pytest.mark.usefixtures("elsewhere")
def test_training_from_the_controller_goes_on(two):
    with two.scope():
        model = nn.Linear(4, 1, device="cpu")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        count = mnb.Variable(one(), aggregation=mnb.VariableAggregation.SUM)

    def step(x, y):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        count.assign_add(one())
        return loss.detach()

    losses = []
    for batch in two.distribute_dataset((X, Y), batch_size=7):
        losses.append(two.reduce("mean", two.run(step, args=tuple(batch)), axis=None))
    assert torch.stack(losses).isfinite().all()
    assert float(count) == 1 + 2 * len(losses)
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    assert two.run(lambda: model.weight.sum().item()) == 0.0
    gathered = two.gather(two.run(lambda: torch.ones(2, device="cpu")), axis=0)
    assert gathered.tolist() == [1.0] * 4
    assert float(mnb.compute_average_loss(torch.ones(4, device="cpu"), global_batch_size=8)) == 0.5


@pytest.mark.usefixtures("elsewhere")
def test_fit_goes_on(two):
    with two.scope():
        model = mnb.Model(nn.Linear(4, 1, device="cpu"))
        model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
    history = model.fit(X, Y, epochs=2, batch_size=8, verbose=0).history
    assert history["loss"][1] < history["loss"][0]
    assert model.predict(X, verbose=0).shape == (32, 1)


def test_replicas_talk_to_each_other_as_before(two):
    def talk():
        torch.set_default_device("meta")
        try:
            context = mnb.get_replica_context()
            total = context.all_reduce("sum", torch.ones(3, device="cpu"))
            layer = nn.Linear(2, 1, device="cpu")
            layer(torch.ones(1, 2, device="cpu")).sum().backward()
            return total, context.all_gather(one()[None], 0), layer.weight.grad
        finally:
            torch.set_default_device(None)

    total, gathered, gradient = two.run(talk)
    assert [part.tolist() for part in two.local_results(total)] == [[2.0] * 3] * 2
    assert [part.tolist() for part in two.local_results(gathered)] == [[1.0] * 2] * 2
    assert [part.tolist() for part in two.local_results(gradient)] == [[[1.0, 1.0]]] * 2
