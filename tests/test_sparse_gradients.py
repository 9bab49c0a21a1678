"""Gradients of some rows only, over two and three real processes, against plain PyTorch on the whole batch."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from crew import SIZES, Crew, Replica, check_as_plain, values
from torch import Tensor, nn

import mirror_nb as mnb

ROWS = 11

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def words() -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of three words an example, some of them more than once, and a target."""
    generator = torch.Generator().manual_seed(3)
    for size in SIZES:
        yield torch.randint(0, ROWS, (size, 3), generator=generator), torch.randn(size, 4, generator=generator)


class Bag(nn.Module):
    """Embeddings with sparse gradients beside a layer with dense ones."""

    def __init__(self, table: nn.Module | None = None) -> None:
        super().__init__()
        self.table = table or nn.Embedding(ROWS, 4, sparse=True)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found = self.table(x)
        return self.last(found.mean(1) if found.dim() == 3 else found)


def train(r: Replica, model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[Tensor]:
    for x, y in words():
        x, y = r.share(x, y)
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
    return values(model)


def descent(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    model = Bag()
    return train(r, model, torch.optim.SGD(model.parameters(), lr=0.5))


def sparse_adam(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    model = Bag()
    return train(
        r,
        model,
        torch.optim.SparseAdam(model.table.parameters(), lr=0.1),
        torch.optim.Adam(model.last.parameters(), lr=0.1),
    )


def bags(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    model = Bag(nn.EmbeddingBag(ROWS, 4, sparse=True, mode="mean"))
    return train(r, model, torch.optim.Adagrad(model.parameters(), lr=0.1))


def tables_alone(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    tables = nn.ModuleList(nn.Embedding(ROWS, 4, sparse=True, dtype=torch.float64) for _ in range(2))
    optimizer = torch.optim.SGD(tables.parameters(), lr=0.5)
    for x, y in words():
        x, y = r.share(x, y)
        optimizer.zero_grad()
        F.mse_loss(tables[0](x).mean(1) + tables[1](x[:, 0]), y.double()).backward()
        optimizer.step()
    return values(tables)


def never_cleared(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    model = Bag()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in words():
        x, y = r.share(x, y)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return values(model)


def accumulated(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    model = Bag()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(words()):
        x, y = r.share(x, y)
        if i % 2 == 0:
            with r.gradients.no_sync():
                F.mse_loss(model(x), y).backward()
        else:
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return values(model)


def used_as_a_matrix_too(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    model = Bag()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate([*words(), *words()]):
        x, y = r.share(x, y)
        loss = F.mse_loss(model(x), y)
        if i in (2, 3, 6):
            loss = loss + (y @ model.table.weight.T).pow(2).mean()
        loss.backward()
        optimizer.step()
        if i != 6:
            optimizer.zero_grad()
    return values(model)


def a_matrix_first(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    model = Bag()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate([*words(), *words()]):
        x, y = r.share(x, y)
        loss = F.mse_loss(model(x), y) if i % 3 else (y @ model.table.weight.T).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def a_matrix_on_top_of_rows(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    model = Bag()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate([*words(), *words()]):
        x, y = r.share(x, y)
        loss = (y @ model.table.weight.T).pow(2).mean() if i % 2 else F.mse_loss(model(x), y)
        loss.backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    return values(model)


def single_numbers(r: Replica) -> list[Tensor]:
    """Gradients whose indices name more than the row."""
    torch.manual_seed(0)
    weight = nn.ParameterList([torch.randn(ROWS, 4)])
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.5)
    for x, y in words():
        x, y = r.share(x, y)
        optimizer.zero_grad()
        found = torch.gather(weight[0], 0, torch.cat([x, x[:, :1]], 1), sparse_grad=True)
        F.mse_loss(found, y).backward()
        optimizer.step()
    return values(weight)


class Branches(nn.Module):
    """Looks a word up only where the first one is small, so that replicas differ in whether they use the table."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = Bag()
        self.rare = nn.Embedding(ROWS, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bag(x)
        rare = x[:, 0] < 2
        return out + torch.where(rare[:, None], self.rare(x[:, 1]), 0.0) if rare.any() else out


def used_by_some(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    model = Branches()
    return train(r, model, torch.optim.SGD(model.parameters(), lr=0.5))


def with_a_graph(r: Replica) -> list[Tensor]:
    torch.manual_seed(0)
    model = Bag()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for x, y in words():
        x, y = r.share(x, y)
        optimizer.zero_grad()
        with warnings.catch_warnings():
            # Of a cycle, which `zero_grad` ends.
            warnings.simplefilter("ignore")
            F.mse_loss(model(x), y).backward(create_graph=True)
        optimizer.step()
    optimizer.zero_grad()
    return values(model)


RECIPES = [
    descent,
    sparse_adam,
    bags,
    tables_alone,
    never_cleared,
    accumulated,
    used_as_a_matrix_too,
    a_matrix_first,
    a_matrix_on_top_of_rows,
    single_numbers,
    used_by_some,
    with_a_graph,
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_training_gives_the_weights_of_plain_pytorch_on_the_whole_batch(
    crews: dict[int, Crew], recipe: Callable[[Replica], list[Tensor]]
) -> None:
    check_as_plain(crews, recipe)


def test_the_gradient_stays_sparse_and_has_the_rows_of_all_replicas(crews: dict[int, Crew]) -> None:
    def look(r: Replica) -> tuple[bool, list[int], list[float]]:
        with r.scope:
            table = nn.Embedding(1_000_000, 2, sparse=True)
            for _ in range(2):
                table.zero_grad()
                table(torch.tensor([r.id, 7])).sum().backward()
            gradient = table.weight.grad
            return gradient.is_coalesced(), gradient.indices()[0].tolist(), gradient.values()[:, 0].tolist()

    assert crews[2].run(look) == [(True, [0, 1, 7], [0.5, 0.5, 1.0])] * 2


def test_gradients_that_name_elements_on_one_replica_and_rows_on_the_other_are_added(crews: dict[int, Crew]) -> None:
    def look(r: Replica) -> list[Tensor]:
        found = []
        with r.scope:
            table = nn.Embedding(5, 2, sparse=True)
            for elements in (r.id == 0, True):
                table.zero_grad()
                if elements:
                    table.weight.gather(1, torch.tensor([[1], [0]]), sparse_grad=True).sum().backward()
                else:
                    table(torch.tensor([1, 4])).sum().backward()
                found.append(table.weight.grad.to_dense())
        return found

    elements, rows = torch.zeros(5, 2), torch.zeros(5, 2)
    elements[0, 1] = elements[1, 0] = 1
    rows[1] = rows[4] = 1
    for found in crews[2].run(look):
        torch.testing.assert_close(found, [(elements + rows) / 2, elements])


def test_a_strategy_trains_embeddings_with_sparse_gradients() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    torch.manual_seed(0)
    alone = Bag()
    alone_optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            torch.manual_seed(0)
            model = Bag()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for x, y in words():
            each = strategy.distribute_dataset((x, y), batch_size=len(x))
            for batch in each:
                strategy.run(step, args=tuple(batch))
            alone_optimizer.zero_grad()
            F.mse_loss(alone(x), y).backward()
            alone_optimizer.step()
        torch.testing.assert_close(values(model), values(alone))
