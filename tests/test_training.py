"""The promise: N replicas end on the weights that one process has after the same global batches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from driving import run_cell
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SOURCE = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(5)
features = torch.randn(EXAMPLES, 12)
labels = torch.randint(0, 4, (EXAMPLES,))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = OPTIMIZER
loader = DataLoader(TensorDataset(features, labels), batch_size=BATCH, shuffle=True)
for epoch in range(3):
    for x, y in BATCHES:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        CLIP
        optimizer.step()
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
"""
OPTIMIZERS = {
    "sgd": "torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-3)",
    "adam": "torch.optim.Adam(model.parameters(), 1e-2)",
}


def source(examples: int, batch: int, optimizer: str, batches: str, clip: bool) -> str:
    return (
        SOURCE.replace("EXAMPLES", str(examples))
        .replace("OPTIMIZER", OPTIMIZERS[optimizer])
        .replace("BATCHES", batches)
        .replace("BATCH", str(batch))
        .replace("CLIP", "nn.utils.clip_grad_norm_(model.parameters(), 0.2)" if clip else "")
    )


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize(
    ("examples", "batch", "optimizer", "clip"),
    [
        (48, 12, "sgd", False),
        # The last batch holds 5 of 15 (uneven), 1 of 7 (empty shares), and every batch is cut unevenly.
        (50, 15, "adam", False),
        (50, 7, "sgd", True),
    ],
)
def test_replicas_end_on_the_weights_of_one_process(replicas, n, examples, batch, optimizer, clip):
    alone: dict[str, object] = {}
    exec(source(examples, batch, optimizer, "loader", clip), alone)
    pool = replicas(n)
    ran = run_cell(pool, source(examples, batch, optimizer, "strategy.distribute_dataset(loader)", clip))
    assert ran.errors == {}
    for replica_id in range(n):
        weights = ran.values[replica_id]["weights"]
        torch.testing.assert_close(weights, alone["weights"], rtol=0, atol=1e-5)


def test_accumulation_under_no_sync_is_exact_for_uneven_batches(replicas):
    body = """
import torch, contextlib
import torch.nn.functional as F
from torch import nn
torch.manual_seed(1)
x, y = torch.randn(11, 6), torch.randn(11, 1)
torch.manual_seed(2)
model = nn.Linear(6, 1)
batches = BATCHES
for i, (a, b) in enumerate(batches):
    with strategy.no_sync() if i % 3 < 2 else contextlib.nullcontext():
        F.mse_loss(model(a), b).backward()
gradient = model.weight.grad.clone()
"""
    model_alone: dict[str, object] = {"strategy": _Alone()}
    exec(body.replace("BATCHES", "zip(x.split(4), y.split(4))"), model_alone)
    dataset = "strategy.distribute_dataset((x, y), batch_size=4)"
    ran = run_cell(replicas(3), body.replace("BATCHES", dataset))
    assert ran.errors == {}
    for replica_id in range(3):
        gradient = ran.values[replica_id]["gradient"]
        torch.testing.assert_close(gradient, model_alone["gradient"], rtol=0, atol=1e-6)


HELD = {
    "one ahead": """
def pairs():
    it = iter(batches)
    now = next(it)
    while now is not None:
        ahead = next(it, None)
        yield now
        now = ahead
""",
    "all": """
held = list(batches)
def pairs():
    return held
""",
    "two at once": """
def pairs():
    return (pair for pair, _ in zip(batches, more))
""",
    "twice": """
held = list(batches)
def pairs():
    return held[::-1] + held
""",
}
USED = {
    "a network": "F.mse_loss(model(a), b).backward()",
    "a part of a batch": "F.mse_loss(model(a.flatten(1)[:]), b).backward()",
    "run": "strategy.run(lambda pair: F.mse_loss(model(pair[0] * 1), pair[1]).backward(), ((a, b),))",
}


@pytest.mark.parametrize("use", USED.values(), ids=USED)
@pytest.mark.parametrize("pairs", HELD.values(), ids=HELD)
def test_gradients_are_weighed_by_the_batch_that_is_used_where_several_are_held(replicas, pairs, use):
    body = f"""
import torch
import torch.nn.functional as F
from torch import nn
torch.manual_seed(1)
x, y = torch.randn(10, 6), torch.randn(10, 1)
torch.manual_seed(2)
model = nn.Linear(6, 1)
batches, more = BATCHES
{pairs}
gradients = []
for a, b in pairs():
    model.zero_grad()
    {use}
    gradients.append(model.weight.grad.clone())
"""
    alone: dict[str, object] = {"strategy": _Alone()}
    exec(body.replace("BATCHES", "list(zip(x.split(4), y.split(4))), torch.ones(30).split(6)"), alone)
    made = (
        "strategy.distribute_dataset((x, y), batch_size=4), strategy.distribute_dataset(torch.ones(30), batch_size=6)"
    )
    ran = run_cell(replicas(3), body.replace("BATCHES", made))
    assert ran.errors == {}
    for replica_id in range(3):
        torch.testing.assert_close(ran.values[replica_id]["gradients"], alone["gradients"], rtol=0, atol=1e-6)
    run_cell(replicas(3), "a = b = held = None")
    loop = "for _ in strategy.distribute_dataset(torch.ones(3), batch_size=3): pass\n"
    count = "from torch.nn.modules import module\nn = len(module._global_forward_pre_hooks)"
    assert run_cell(replicas(3), loop + count).values[0]["n"] == 0


class _Alone:
    """Stands for the strategy where there is one process."""

    def run(self, fn, args):
        return fn(*args)

    def no_sync(self):
        import contextlib

        return contextlib.nullcontext()


STOCK_DDP = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 2, bias=False))
x = torch.full((3, 4), float(replica_id + 1))
model(x).sum().backward()
gradient = model.module.weight.grad.clone()
"""


def test_stock_ddp_in_a_cell_is_synchronised_once(replicas):
    ran = run_cell(replicas(2), STOCK_DDP)
    assert ran.errors == {}
    # The mean of 3 rows of ones and 3 rows of twos; synchronised twice it would still be the mean, but a
    # weight of examples applied on top of DDP's would show.
    for replica_id in range(2):
        assert torch.equal(ran.values[replica_id]["gradient"], torch.full((2, 4), 4.5))


def test_a_loop_that_sees_the_same_batches_needs_no_distributed_dataset(replicas):
    body = """
import torch
from torch import nn
torch.manual_seed(3)
model = nn.Linear(3, 1)
loss = model(torch.full((2, 3), float(replica_id))).mean()
loss.backward()
gradient = model.weight.grad.clone()
"""
    ran = run_cell(replicas(2), body)
    for replica_id in range(2):
        assert torch.equal(ran.values[replica_id]["gradient"], torch.full((1, 3), 0.5))


def test_the_peer_of_the_promise_is_plain_pytorch():
    # The comparison would be empty if the plain loop did not learn.
    alone: dict[str, object] = {}
    exec(source(48, 12, "adam", "loader", False), alone)
    dataset = TensorDataset(alone["features"], alone["labels"])
    x, y = next(iter(DataLoader(dataset, batch_size=48)))
    model = alone["model"]
    assert isinstance(model, nn.Module)
    torch.manual_seed(0)
    fresh = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))
    assert F.cross_entropy(model(x), y) < F.cross_entropy(fresh(x), y)


def test_a_tensor_that_only_an_optimizer_holds_is_synchronised(replicas):
    body = """
import torch
scale = torch.ones(2, requires_grad=True)
optimizer = torch.optim.SGD([scale], 0.5)
for _ in range(2):
    optimizer.zero_grad()
    (scale * (replica_id + 1)).sum().backward()
    optimizer.step()
value = scale.detach().clone()
"""
    ran = run_cell(replicas(2), body)
    assert ran.errors == {}
    for replica_id in range(2):
        # Gradients 1 and 2, mean 1.5; two steps of 0.75.
        assert torch.equal(ran.values[replica_id]["value"], torch.full((2,), -0.5))


def test_the_gradients_of_a_module_and_of_its_optimizer_are_one(replicas):
    body = """
import torch
from torch import nn
model = nn.Linear(2, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.full((1, 2), float(replica_id))).sum().backward()
gradient = model.weight.grad.clone()
"""
    ran = run_cell(replicas(2), body)
    for replica_id in range(2):
        assert torch.equal(ran.values[replica_id]["gradient"], torch.full((1, 2), 0.5))
