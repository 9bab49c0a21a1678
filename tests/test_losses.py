"""Losses scaled by the global batch: TensorFlow's numbers."""

from __future__ import annotations

import pytest
import torch

from mirror_nb.devices import Device
from mirror_nb.losses import compute_average_loss, scale_regularization_loss
from mirror_nb.strategies.alone import AlonePlace
from mirror_nb.strategies.base import Strategy
from mirror_nb.strategies.context import ReplicaContext, entered
from mirror_nb.strategies.one_device import OneDeviceStrategy


class TwoReplicas(Strategy):
    """A strategy that only says how many replicas there are."""

    def __init__(self):
        super().__init__(AlonePlace(Device("cpu", 0)))

    num_replicas_in_sync = 2

    def __repr__(self):
        return "two replicas"


@pytest.fixture
def replica():
    """One of two replicas."""
    strategy = TwoReplicas()
    with entered(strategy, ReplicaContext(strategy, 0), cross=False):
        yield strategy


@pytest.mark.usefixtures("replica")
@pytest.mark.parametrize(
    ("losses", "weights", "size", "expected"),
    [
        ([1.0, 2.0], None, None, 0.75),
        ([4.0, 5.0], None, None, 2.25),
        ([], None, None, 0.0),
        ([1.0, 2.0], None, 8, 0.375),
        ([1.0, 2.0], [0.0, 1.0], 4, 0.5),
        ([1.0, 2.0], 2.0, 4, 1.5),
        ([[1.0, 2.0], [3.0, 4.0]], [1.0, 0.0], 2, 1.5),
        ([1.0, 2.0], [[2.0], [1.0]], 4, 1.0),
        ([1.0], None, 0, 0.0),
        ([1.0, 2.0], None, torch.tensor(6), 0.5),
    ],
)
def test_the_losses_of_all_replicas_add_up_to_the_mean(losses, weights, size, expected):
    assert compute_average_loss(torch.tensor(losses), weights, size).item() == expected


@pytest.mark.usefixtures("replica")
def test_no_examples_give_a_loss_of_0_and_gradients_of_0():
    weight = torch.ones(1, requires_grad=True)
    compute_average_loss(torch.ones(0) * weight).backward()
    assert weight.grad == 0


def test_a_mean_of_half_floats_is_one_although_their_sum_does_not_fit():
    losses = torch.full((100,), 1000.0, dtype=torch.float16, requires_grad=True)
    mean = compute_average_loss(losses, global_batch_size=100)
    mean.backward()
    assert mean.dtype is losses.grad.dtype is torch.float16
    torch.testing.assert_close((mean, losses.grad), (losses.detach().mean(), torch.full_like(losses, 0.01)))


@pytest.mark.usefixtures("replica")
def test_a_regularization_loss_is_divided_by_the_replicas():
    assert scale_regularization_loss(torch.tensor([1.0, 2.0])) == 1.5
    assert scale_regularization_loss(3.0) == 1.5
    assert scale_regularization_loss([1.0, [1.0, 1.0]]) == 1.5


@pytest.mark.usefixtures("replica")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_regularization_loss_keeps_its_dtype(dtype):
    assert scale_regularization_loss([torch.ones((), dtype=dtype)] * 2).dtype is dtype


@pytest.mark.usefixtures("replica")
def test_a_list_of_losses_keeps_its_gradients():
    weights = [torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor(3.0, requires_grad=True)]
    scale_regularization_loss([weight**2 for weight in weights]).backward()
    assert [weight.grad.tolist() for weight in weights] == [[1.0, 2.0], 3.0]
    one, other = (torch.tensor(2.0, requires_grad=True) for _ in range(2))
    compute_average_loss([one * 2, other * 3], global_batch_size=2).backward()
    assert (one.grad, other.grad) == (1, 1.5)


@pytest.mark.parametrize("function", [compute_average_loss, scale_regularization_loss])
def test_from_outside_of_a_replica_it_is_an_error(function):
    with OneDeviceStrategy("cpu:0").scope(), pytest.raises(RuntimeError, match=f"calling `{function.__name__}` in cr"):
        function(torch.ones(2))


def test_without_a_strategy_there_is_one_replica():
    assert compute_average_loss(torch.tensor([1.0, 2.0])) == 1.5
    assert scale_regularization_loss(3.0) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.tensor(1.0),), "one loss for each example"),
        (([1.0, 2.0], [1.0, 2.0, 3.0]), r"`sample_weight` of shape \(3,\) does not fit losses of shape \(2,\)"),
        ((None,), "`per_example_loss` must be a tensor or numbers, not None"),
        (([[1.0], [1.0, 2.0]],), "`per_example_loss` must be a tensor or numbers, not .*: expected sequence"),
        (([1.0, 2.0], "a"), "`sample_weight` must be a tensor or numbers, not 'a'"),
        (([1.0, 2.0], None, "a"), "`global_batch_size` must be a whole number of examples, not 'a'"),
        (([1.0, 2.0], None, 2.5), "`global_batch_size` must be a whole number of examples, not 2.5"),
        (([1.0, 2.0], None, -1), "`global_batch_size` must be a whole number"),
        (([1.0, 2.0], None, [2]), "`global_batch_size` must be a whole number"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        compute_average_loss(*arguments)


def test_a_regularization_that_is_no_number_is_named():
    with pytest.raises(ValueError, match="`regularization_loss` must be a tensor or numbers, not None"):
        scale_regularization_loss(None)
