"""Gradients that somebody else looks at: views, arrays, optimizers' flat buffers, what is saved."""

from __future__ import annotations

import gc
import io
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from crew import Crew, Replica
from driving import run_cell
from torch import Tensor, nn

from mirror_nb.gradients import buckets
from mirror_nb.gradients.buckets import PATIENCE
from mirror_nb.pool.local import LocalPool

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def two(crews: dict[int, Crew]) -> Crew:
    return crews[2]


def test_a_gradient_that_the_user_holds_is_not_overwritten(two: Crew) -> None:
    def look(r: Replica) -> None:
        with r.scope:
            model = nn.Linear(4, 4)
            held = []
            for i in range(4):
                model.zero_grad()
                (model(torch.ones(2, 4)) * (i + 1 + r.id)).sum().backward()
                held.append((model.weight.grad, torch.full((4, 4), 2 * (i + 1.5))))
            for gradient, expected in held:
                torch.testing.assert_close(gradient, expected)

    two.run(look)


KEPT: dict[str, Callable[[Tensor], Any]] = {
    "detach": lambda gradient: gradient.detach(),
    "data": lambda gradient: gradient.data,
    "flatten": lambda gradient: gradient.flatten(),
    "T": lambda gradient: gradient.T,
    "a row": lambda gradient: gradient[0],
    "numpy": lambda gradient: gradient.numpy(),
    "detach and numpy": lambda gradient: gradient.detach().numpy(),
    "a view and itself": lambda gradient: (gradient, gradient.view(-1))[1],
}


@pytest.mark.parametrize("look", KEPT)
def test_what_the_user_keeps_of_a_gradient_by_a_view_is_not_overwritten(two: Crew, look: str) -> None:
    def train(r: Replica) -> None:
        with r.scope:
            model = nn.Linear(4, 4)
            kept = []
            for i in range(6):
                model.zero_grad()
                (model(torch.ones(2, 4)) * (i + 1 + r.id)).sum().backward()
                torch.testing.assert_close(model.weight.grad, torch.full((4, 4), 2 * (i + 1.5)))
                # Not of every step: and what is kept of one is let go of.
                if i != 3:
                    kept.append((KEPT[look](model.weight.grad), 2 * (i + 1.5)))
                if i == 4:
                    del kept[0]
            for values, expected in kept:
                assert (values == expected).all(), (values, expected)

    two.run(train)


def test_what_one_replica_alone_keeps_of_large_gradients_is_not_overwritten(
    replicas: Callable[[int], LocalPool],
) -> None:
    cell = """
import torch
model = torch.nn.Linear(300, 200)
kept, total = [], []
for step in range(8):
    model.zero_grad()
    (model(torch.ones(1, 300)) * (step + replica_id)).sum().backward()
    total.append(float(model.weight.grad.mean()))
    if replica_id == 0 and step in (2, 3):
        kept.append(model.weight.grad.detach().numpy())
    if step == 5:
        seen = [float(values.mean()) for values in kept]
        kept.clear()
"""
    ran = run_cell(replicas(2), cell)
    assert ran.report.clean, ran.report.failures
    assert [values["total"] for values in ran.values.values()] == [[step + 0.5 for step in range(8)]] * 2
    assert ran.values[0]["seen"] == [2.5, 3.5]


def test_gradients_that_nobody_else_keeps_lie_where_they_are_reduced(two: Crew) -> None:
    def train(r: Replica) -> None:
        with r.scope:
            model = nn.Linear(4, 4)
            places = set()
            for i in range(5):
                model.zero_grad(set_to_none=i % 2 == 0)
                model(torch.ones(2, 4)).sum().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                # A look that is over by the next pass.
                assert model.weight.grad.detach().numpy().shape == (4, 4)
                # The first pass has no plan yet: the second takes memory that has room for what is told as well.
                if i:
                    places.add(model.weight.grad.data_ptr())
            assert len(places) == 1
            held = model.weight.grad.detach()
            for _ in range(2):
                model.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
                places.add(model.weight.grad.data_ptr())
            assert len(places) > 1
            assert held.data_ptr() in places

    two.run(train)


def test_a_gradient_that_is_zeroed_in_place_shows_in_its_views_as_on_one_device(two: Crew) -> None:
    def train(r: Replica) -> None:
        with r.scope:
            first, second = nn.Linear(2, 2), nn.Linear(2, 2)
            view = kept = None
            for i in range(5):
                first.zero_grad(set_to_none=False)
                second.zero_grad()
                ((first(torch.ones(1, 2)) + second(torch.ones(1, 2))) * (i + r.id)).sum().backward()
                if i == 1:
                    view = first.weight.grad.view(-1)
                if i == 2:
                    # From here on the two lie in memory of their own.
                    kept = second.weight.grad.detach()
                assert view is None or view.tolist() == [i + 0.5] * 4
            assert kept.tolist() == [[2.5, 2.5]] * 2
            # Nor is it written to when of the two it is the only one that somebody looks at.
            del kept
            for _ in range(3):
                first.zero_grad()
                second.zero_grad()
                (first(torch.ones(1, 2)) + second(torch.ones(1, 2))).sum().backward()
            assert view.tolist() == [4.5] * 4

    two.run(train)


def test_a_saved_gradient_takes_its_own_bytes(two: Crew) -> None:
    def save(r: Replica) -> int:
        with r.scope:
            model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 100_000))
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()
            file = io.BytesIO()
            torch.save(model[0].weight.grad, file)
            return len(file.getvalue())

    assert max(two.run(save)) < 10_000


def test_without_a_count_of_who_looks_nothing_is_lent(two: Crew) -> None:
    def train(r: Replica) -> None:
        uses, buckets._uses = buckets._uses, None
        try:
            with r.scope:
                model = nn.Linear(4, 4)
                kept = []
                for i in range(4):
                    model.zero_grad()
                    (model(torch.ones(2, 4)) * (i + 1 + r.id)).sum().backward()
                    kept.append(model.weight.grad.detach())
                assert [float(values.mean()) for values in kept] == [2 * (i + 1.5) for i in range(4)]
        finally:
            buckets._uses = uses

    two.run(train)
    assert buckets._uses is not None


FLAT: dict[str, Callable[[Tensor], Tensor]] = {
    "a view": lambda flat: flat[:2].view(1, 2),
    "a view of all": lambda flat: flat[:2].view(1, 2),
    "a part without its base": lambda flat: flat[:2].view(1, 2).detach(),
}


@pytest.mark.parametrize("part", FLAT)
def test_gradients_in_a_flat_buffer_of_the_users_own_are_reduced_there(two: Crew, part: str) -> None:
    def train(r: Replica) -> None:
        with r.scope:
            model = nn.Linear(2, 1, bias=False)
            flat = torch.zeros(2 if part == "a view of all" else 5)
            model.weight.grad = FLAT[part](flat)
            for i in range(4):
                flat.zero_()
                (model(torch.ones(1, 2)) * (i + r.id)).sum().backward()
                assert flat[:2].tolist() == [i + 0.5] * 2
                assert model.weight.grad.tolist() == [[i + 0.5] * 2]

    two.run(train)


def test_a_gradient_tensor_stays_the_same_object_when_more_is_added(two: Crew) -> None:
    def look(r: Replica) -> None:
        with r.scope:
            model = nn.Linear(4, 4)
            model(torch.ones(2, 4)).sum().backward()
            held = model.weight.grad
            r.gradients.set_shares(1 + r.id, 3)
            model(torch.ones(2, 4)).sum().backward()
            assert model.weight.grad is held
            torch.testing.assert_close(held, torch.full((4, 4), 4.0))

    two.run(look)


def test_gradients_that_are_kept_stay_when_another_network_is_gone_and_a_third_is_trained(two: Crew) -> None:
    def look(r: Replica) -> tuple[float, float, float]:
        with r.scope:
            gone, kept, other = (nn.Linear(2, 2, bias=False) for _ in range(3))
            for network in (gone, kept, other, *[kept] * (PATIENCE + 2)):
                network.zero_grad()
                network(torch.full((1, 2), r.id + 1.0)).sum().backward()
            del gone, network
            gc.collect()
            new = nn.Linear(2, 2, bias=False).double()
            new(torch.full((1, 2), r.id + 2.0).double()).sum().backward()
            other.zero_grad()
            other(torch.full((1, 2), r.id + 3.0)).sum().backward()
            # Each network's are of its own examples: they have become known by other numbers.
            gradients = [network.weight.grad for network in (kept, new, other)]
            assert all(bool((gradient == gradient[0, 0]).all()) for gradient in gradients)
            return tuple(gradient[0, 0].item() for gradient in gradients)

    assert two.run(look) == [(1.5, 2.5, 3.5)] * 2
