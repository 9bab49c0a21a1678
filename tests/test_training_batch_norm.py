"""BatchNorm of shares against one device's BatchNorm of the global batch: outputs, gradients, running statistics."""

from __future__ import annotations

import copy
import threading
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from mirror_nb.training.batch_norm import exact_batch_norm

SECONDS = 20.0


class Together:
    """Replicas as threads: each adds a tensor up with the others', or all fail within the deadline."""

    def __init__(self, n):
        self.barrier = threading.Barrier(n, timeout=SECONDS)
        self.given = [None] * n
        self.calls = [0] * n

    def all_reduce(self, replica_id):
        def add_up(tensor):
            assert tensor.dtype == torch.float64
            assert tensor.ndim == 1
            self.calls[replica_id] += 1
            self.given[replica_id] = tensor
            self.barrier.wait()
            total = sum(self.given[1:], self.given[0].clone())
            self.barrier.wait()
            return total

        return add_up

    def run(self, work):
        """Run work(replica_id) on every replica and return what they give."""
        results, problems = [None] * len(self.given), []

        def one(replica_id):
            try:
                results[replica_id] = work(replica_id)
            except BaseException as problem:
                problems.append(problem)
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(self.given))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS * 2)
        if problems:
            raise problems[0]
        return results


def network(kind=nn.BatchNorm2d, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), kind(4, **settings), nn.ReLU(), nn.Conv2d(4, 3, 2), kind(3, **settings))
    for module in model.modules():
        if isinstance(module, kind) and module.weight is not None:
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias)
    return model


def images(n):
    torch.manual_seed(1)
    # Far from 0, where a variance by the difference of squares loses most.
    return torch.randn(n, 2, 5, 5) * 3 + 50


def loss_of(outputs):
    weights = torch.linspace(-1, 2, outputs[0].numel()).reshape(outputs.shape[1:]) if len(outputs) else 0
    return (outputs * weights + outputs.square() * 0.1).sum()


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def buffers(model):
    return {name: value.clone() for name, value in model.named_buffers()}


def assert_like_one_device(model, shares, absent=()):
    """Two steps on `shares` give one device's outputs, gradients and running statistics."""
    together = Together(len(shares))
    copies = [copy.deepcopy(model) for _ in shares]
    x = torch.cat([share for i, share in enumerate(shares) if i not in absent]).requires_grad_(True)
    before = list(model.state_dict())
    for _ in range(2):
        expected = model(x)
        loss_of(expected).backward()

    def work(replica_id):
        mine = copies[replica_id]
        ghost = replica_id in absent
        share = shares[replica_id].clone().requires_grad_(True)
        all_reduce = together.all_reduce(replica_id)
        with exact_batch_norm(mine, synchronize=True, all_reduce=all_reduce) as held, ExitStack() as stack:
            assert held.synchronizes
            if ghost:
                stack.enter_context(held.absent())
            for _ in range(2):
                outputs = mine(share)
                (loss_of(outputs) * (0 if ghost else 1)).backward()
        return outputs.detach(), share.grad

    results = together.run(work)
    real = [result for i, result in enumerate(results) if i not in absent]
    torch.testing.assert_close(torch.cat([outputs for outputs, _ in real]), expected.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in real]), x.grad, rtol=1e-3, atol=1e-4)
    for name, wanted in gradients(model).items():
        added = sum(gradients(replica)[name] for replica in copies)
        torch.testing.assert_close(added, wanted, rtol=1e-3, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}")
    for replica in copies:
        assert list(replica.state_dict()) == before
        torch.testing.assert_close(buffers(replica), buffers(model), rtol=1e-4, atol=1e-5)
    assert len(set(together.calls)) == 1


@pytest.mark.parametrize(
    "settings",
    [
        *({}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"momentum": 0.3}),
        {"track_running_stats": False, "momentum": None},
    ],
)
def test_shares_are_normalised_as_one_device_does(settings):
    x = images(7)
    assert_like_one_device(network(**settings), [x[:4], x[4:5], x[5:]])


def test_a_share_without_examples_leaves_the_statistics_of_batch_norms_that_are_not_synchronised():
    # In a network with nn.SyncBatchNorm it goes through these, too.
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.BatchNorm1d(36), nn.SyncBatchNorm(36)
    )
    before = buffers(model[:4])
    with exact_batch_norm(model, synchronize=False, all_reduce=lambda flat: flat) as held, held.absent():
        model(images(1)).sum().backward()
    torch.testing.assert_close(buffers(model[:4]), before, rtol=0, atol=0)


def test_a_share_without_examples_takes_part():
    x = images(3)
    assert_like_one_device(network(), [x[:2], x[2:], x[3:]])


def test_an_absent_replica_counts_for_nothing_whatever_it_computes():
    x = images(3)
    assert_like_one_device(network(), [x[:2], torch.full((1, 2, 5, 5), 1e3), x[2:]], absent=(1,))


def test_one_example_a_replica_is_normalised_with_the_others():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    x = torch.randn(2, 3)
    assert_like_one_device(model, [x[:1], x[1:]])


def test_sequences_are_normalised_over_their_positions():
    x = torch.randn(5, 3, 6)
    assert_like_one_device(nn.Sequential(nn.BatchNorm1d(3)), [x[:2], x[2:]])


def test_a_network_may_name_what_it_gives_to_a_batch_norm():
    norm = nn.BatchNorm1d(3)
    with exact_batch_norm(norm, synchronize=False):
        assert norm(input=torch.ones(1, 3)).tolist() == [[0.0] * 3]


def test_float64_stays_float64():
    model = nn.Sequential(nn.BatchNorm1d(3)).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    assert_like_one_device(model, [x[:1], x[1:]])


def test_a_sync_batch_norm_is_synchronised_without_being_asked_to():
    x = images(5)
    reference = network()
    model = nn.SyncBatchNorm.convert_sync_batchnorm(network())
    together = Together(2)
    copies = [copy.deepcopy(model) for _ in range(2)]

    def work(replica_id):
        with exact_batch_norm(copies[replica_id], synchronize=False, all_reduce=together.all_reduce(replica_id)):
            return copies[replica_id](x[:2] if replica_id == 0 else x[2:])

    outputs = together.run(work)
    torch.testing.assert_close(torch.cat(outputs), reference(x), rtol=1e-4, atol=1e-4)
    assert all(isinstance(m, nn.SyncBatchNorm) for m in (copies[0][1], copies[0][4]))


def test_without_synchronisation_it_is_torchs_own():
    x, ours, theirs = images(6), network(), network()
    with exact_batch_norm(ours, synchronize=False) as held:
        assert not held.synchronizes
        outputs = ours(x)
    assert torch.equal(outputs, theirs(x))
    assert all(torch.equal(a, b) for a, b in zip(buffers(ours).values(), buffers(theirs).values(), strict=True))


def test_one_example_alone_is_normalised_to_the_bias_where_torch_refuses():
    model = nn.BatchNorm1d(3)
    nn.init.constant_(model.bias, 2.0)
    x = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    with pytest.raises(ValueError, match="more than 1 value"):
        model(x)
    before = int(model.num_batches_tracked)
    with exact_batch_norm(model, synchronize=False):
        y = model(x)
    y.sum().backward()
    assert torch.equal(y, torch.full((1, 3), 2.0))
    assert torch.equal(x.grad, torch.zeros(1, 3))
    # Not none: weight decay goes on.
    assert torch.equal(model.weight.grad, torch.zeros(3))
    torch.testing.assert_close(model.running_mean, x.detach()[0] * 0.1)
    assert torch.equal(model.running_var, torch.ones(3))
    assert int(model.num_batches_tracked) == before + 1


def test_one_example_in_all_replicas_together_leaves_the_running_variance():
    model = nn.BatchNorm1d(3)
    with exact_batch_norm(model, synchronize=True, all_reduce=lambda tensor: tensor):
        y = model(torch.randn(1, 3))
    torch.testing.assert_close(y, torch.zeros(1, 3), rtol=0, atol=1e-3)
    assert torch.equal(model.running_var, torch.ones(3))


def test_evaluation_takes_the_running_statistics_and_asks_nobody():
    def nobody(tensor):
        raise AssertionError("nobody is there")

    model = network().eval()
    x = images(1)
    expected = model(x)
    with exact_batch_norm(model, synchronize=True, all_reduce=nobody):
        assert torch.equal(model(x), expected)


def test_afterwards_the_network_is_as_it_was_after_an_error_too():
    model = network()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(KeyError), exact_batch_norm(model, synchronize=True, all_reduce=lambda tensor: tensor):
        raise KeyError
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    with pytest.raises(ValueError, match="expected 4D"), exact_batch_norm(model, synchronize=False):
        model[1](torch.ones(2, 4))


def test_a_forward_of_ones_own_is_left_alone():
    class Doubling(nn.BatchNorm1d):
        def forward(self, x):
            return x * 2

    model = nn.Sequential(Doubling(2), nn.BatchNorm1d(2))
    model[1].forward = mine = lambda x: x
    with exact_batch_norm(model, synchronize=True, all_reduce=lambda tensor: tensor) as held:
        assert not held.synchronizes
        assert torch.equal(model(torch.ones(1, 2)), torch.full((1, 2), 2.0))
    assert model[1].forward is mine


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_goes_in_and_out_and_statistics_are_float32(dtype):
    x = images(6).to(dtype).requires_grad_(True)
    model = nn.BatchNorm2d(2)
    with exact_batch_norm(model, synchronize=True, all_reduce=lambda tensor: tensor):
        y = model(x)
    y.float().square().sum().backward()
    assert y.dtype == x.grad.dtype == dtype
    assert model.weight.grad.dtype == torch.float32
    wanted = nn.functional.batch_norm(x.detach().float(), None, None, training=True)
    torch.testing.assert_close(y.detach().float(), wanted, rtol=2e-2, atol=2e-2)


def test_a_compiled_network_is_synchronised():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    plain = copy.deepcopy(model)
    x = torch.randn(6, 3)
    asked = []

    def twice(tensor):
        # Two replicas with the same data.
        asked.append(tensor.shape)
        return tensor * 2

    compiled = torch.compile(model, backend="eager")
    with exact_batch_norm(model, synchronize=True, all_reduce=twice):
        y = compiled(x)
        y.square().sum().backward()
    torch.testing.assert_close(y, plain(x))
    assert len(asked) == 2


@pytest.mark.gpu
def test_on_a_gpu_it_is_the_cpus():
    x = images(6)
    there = network().cuda()
    with exact_batch_norm(there, synchronize=True, all_reduce=lambda tensor: tensor):
        y = there(x.cuda())
    loss_of(y.cpu()).backward()
    here = network()
    wanted = here(x)
    loss_of(wanted).backward()
    torch.testing.assert_close(y.cpu(), wanted, rtol=1e-3, atol=1e-3)
    for name, gradient in gradients(here).items():
        torch.testing.assert_close(gradients(there)[name].cpu(), gradient, rtol=1e-2, atol=1e-2)
