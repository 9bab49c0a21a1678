"""Scripts that a launcher started: how they end, and groups that they have made themselves."""

from __future__ import annotations

import ast
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driving import launch

import mirror_nb as mnb
from mirror_nb.errors import UsageError
from mirror_nb.strategies.standalone import standalone

SCRIPT = """
import torch
import torch.distributed as dist
from mirror_nb.strategies import standalone

assert standalone._at_work() is None
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
standalone._let_gloo_rest()
before = standalone._at_work()
print(len(before or {}), standalone._at_work() == before)
"""


def printed(script: str) -> str:
    here = str(Path(mnb.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": here, "GLOO_SOCKET_IFNAME": "lo"}
    ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="threads are looked at in /proc")
def test_gloos_threads_are_found_and_asleep_when_it_has_waited_for_them():
    threads, asleep = printed(SCRIPT).split()
    assert int(threads) > 0, "torch names them otherwise"
    assert asleep == "True"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"RANK": "first"}, "variable RANK is 'first', not a number; start the script with torchrun, or unset RANK"),
        ({"RANK": "2"}, "RANK is 2, but WORLD_SIZE 2: ranks count from 0 to WORLD_SIZE - 1; start the script with"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK is 0, but WORLD_SIZE 0"),
        ({"RANK": "-1"}, "RANK is -1, but WORLD_SIZE 2"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK is '', not a number"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK is 1, but 1 GPUs are visible; start one process a GPU"),
    ],
)
def test_an_environment_that_is_no_launchers_is_refused_before_anybody_is_waited_for(monkeypatch, given, said):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", **given}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=said):
        standalone()


GROUPS = """
import torch
import torch.distributed as dist
from mirror_nb.collectives.base import word_device

for backend in ("gloo", "cpu:gloo,cuda:gloo", "cuda:gloo"):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    print(word_device(torch.device("cuda", 0)))
    dist.destroy_process_group()
"""


def test_words_go_by_the_gpu_where_the_scripts_group_is_for_gpus_alone():
    assert printed(GROUPS).split() == ["cpu", "cpu", "cuda:0"]


TWO_STRATEGIES = """
import multiprocessing, os, sys
import torch
import mirror_nb as mnb
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

first, second, alone = mnb.MirroredStrategy(), mnb.MirroredStrategy(), mnb.OneDeviceStrategy("cpu:0")
found = [first.run(lambda: 1), second.run(lambda: 2), alone.run(lambda: 3)]
for strategy in (first, second):
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
    model(torch.full((1, 1), 1.0 + strategy.replica_id)).sum().backward()
    found.append(model.weight.grad.item())
with alone.scope():
    model = nn.Linear(1, 1, bias=False)
model(torch.full((1, 1), 3.0)).sum().backward()
found.append(model.weight.grad.item())
try:
    with first.scope(), alone.scope():
        pass
except RuntimeError as error:
    found.append(str(error).partition(":")[0])
summed = mnb.MirroredStrategy(gradient_reduction="sum")
with summed.scope():
    model = nn.Linear(1, 1, bias=False)
model(torch.ones(1, 1)).sum().backward()
found.append(model.weight.grad.item())
loader = DataLoader(
    TensorDataset(torch.arange(4)), 2, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
)
list(first.distribute_dataset(loader))
found.append(len(multiprocessing.active_children()))
second.close()
found.append(len(multiprocessing.active_children()))
found.append(mnb.has_strategy())
try:
    first.run(lambda: 1)
except mnb.PoolClosed:
    found.append("closed")
print(found)
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    file.write(repr(found))
sys.stdout.flush()
os._exit(0)
"""


def test_several_strategies_in_a_script_have_one_place_and_another_kind_may_stand_beside_them(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TWO_STRATEGIES)
    launch([sys.executable, str(script), str(tmp_path)], 2, {})
    mixing = "Mixing different mirror_nb Strategy objects"
    for rank in "01":
        found = ast.literal_eval((tmp_path / rank).read_text())
        assert found == [1, 2, 3, 1.5, 1.5, 3.0, mixing, 2.0, 1, 0, False, "closed"]


ONE_AFTER_THE_OTHER = """
import os, sys
import torch
import torch.distributed as dist
import mirror_nb as mnb

found = []
for i in range(4):
    with mnb.MirroredStrategy() as strategy:
        found.append(strategy.reduce("sum", torch.tensor(i + strategy.replica_id)).item())
dist.init_process_group("gloo")
found.append(dist.get_world_size())
print(found)
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    file.write(repr(found))
sys.stdout.flush()
os._exit(0)
"""


def test_a_script_may_close_its_strategy_and_make_another_one_and_then_a_group_of_its_own(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ONE_AFTER_THE_OTHER)
    launch([sys.executable, str(script), str(tmp_path)], 2, {})
    for rank in "01":
        assert ast.literal_eval((tmp_path / rank).read_text()) == [1, 3, 5, 7, 2]


SUMS = """
import json, os, sys
import torch
import mirror_nb as mnb
from mirror_nb.values import same

strategy = mnb.MirroredStrategy()
found = []
for dtype in (torch.bfloat16, torch.float32):
    drawn = torch.randn(3, 1000, generator=torch.Generator().manual_seed(1)).to(dtype)
    total = drawn[0].double() + drawn[1].double() + drawn[2].double()
    expected = total.to(dtype) if dtype is torch.bfloat16 else drawn[0] + drawn[1] + drawn[2]
    mine = drawn[strategy.replica_id]
    inside = strategy.run(lambda: mnb.get_replica_context().all_reduce("sum", mine))
    found += [same(strategy.reduce("sum", mine), expected), same(inside, expected)]
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    json.dump(found, file)
strategy.close()
sys.stdout.flush()
os._exit(0)
"""


def test_a_scripts_sums_are_those_of_a_notebook_in_every_bit(tmp_path):
    assert written_by(3, tmp_path, SUMS) == [[True] * 4] * 3


SEEDED = """
import json, os, random, sys
import numpy as np
import torch
import mirror_nb as mnb

def drawn(strategy):
    draw = lambda: torch.tensor([torch.rand(()), random.random(), np.random.rand()])[None]
    return strategy.gather(strategy.run(draw), 0).tolist()

def made(strategy):
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    with strategy.scope():
        found = [torch.nn.Linear(1, 1).weight.item(), random.random(), np.random.rand()]
    batches = strategy.distribute_dataset((torch.arange(6),), batch_size=3, shuffle=True)
    found.append([strategy.gather(batch[0], 0).tolist() for batch in batches])
    strategy.run(lambda: [torch.rand(()), random.random(), np.random.rand()])
    # Where the order of what is shuffled alone depends on it.
    torch.manual_seed(7)
    return [*found, [strategy.gather(batch[0], 0).tolist() for batch in batches]]

if __name__ == "__main__":
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    weights = torch.rand(2)
    strategy = mnb.MirroredStrategy()
    goes_on = torch.equal(torch.rand(2), torch.rand(4, generator=torch.Generator().manual_seed(7))[2:])
    first = drawn(strategy)
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
        json.dump([goes_on, first, drawn(strategy), made(strategy), made(strategy)], file)
    strategy.close()
    sys.stdout.flush()
    os._exit(0)
"""


def written_by(n: int, folder: Path, source: str) -> list[Any]:
    """Return what a script writes as JSON that n ranks run; its argument is the folder, each file is a rank's."""
    (folder / "script.py").write_text(source)
    launch([sys.executable, str(folder / "script.py"), str(folder)], n, {"TMPDIR": str(folder)})
    return [json.loads((folder / str(rank)).read_text()) for rank in range(n)]


def test_a_script_seeds_its_replicas_before_and_after_it_makes_the_strategy_and_the_same_seed_makes_the_same(tmp_path):
    found = written_by(2, tmp_path, SEEDED)
    expected = []
    for seed in (7, 8):
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
        expected.append([pytest.approx(each) for each in (torch.rand(()).item(), random.random(), np.random.rand())])
    names: dict[str, Any] = {"__name__": "script"}
    exec(SEEDED, names)
    alone = names["made"](mnb.OneDeviceStrategy("cpu:0"))
    assert found == [[True, expected, expected, alone, alone]] * 2


OUTSIDE = """
import json, os, sys, warnings
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
import mirror_nb as mnb

strategy = mnb.MirroredStrategy()
x = torch.arange(8.0).view(4, 2)

def made():
    torch.manual_seed(0)
    network = nn.Linear(2, 1)
    return network, torch.optim.SGD(network.parameters(), 0.01)

def train(network, optimizer, by_run):
    def step(x):
        optimizer.zero_grad()
        (network(x) ** 2).mean().backward()
        optimizer.step()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for (batch,) in strategy.distribute_dataset((x,), batch_size=2):
            strategy.run(step, args=(batch,)) if by_run else step(batch)
    return [str(one.message) for one in said if "outside this strategy's scope" in str(one.message)]

def compared(network, optimizer, by_run):
    said = train(network, optimizer, by_run)
    rows = strategy.gather(network.weight.detach(), 0)
    return said, torch.equal(rows[0], rows[1])

found = [compared(*made(), by_run) for by_run in (True, False)]
with strategy.scope():
    found.append(compared(*made(), True))
network, optimizer = made()
strategy.mirror(network)
found.append(compared(network, optimizer, False))
network, optimizer = made()
wrapped = DistributedDataParallel(network)
found.append(train(wrapped, optimizer, False))
sharded = FullyShardedDataParallel(made()[0], use_orig_params=True, device_id=torch.device("cpu"))
found.append(train(sharded, torch.optim.SGD(sharded.parameters(), 0.01), False))
network, optimizer = made()
with warnings.catch_warnings():
    warnings.simplefilter("error")
    network(x).sum().backward()
    optimizer.step()
total, own = mnb.Variable(0.0, aggregation="sum"), mnb.Variable(1.0)
try:
    strategy.run(lambda: total.assign_add(torch.tensor(1.0)))
except ValueError as error:
    found.append([str(error), strategy.run(lambda: own.assign(2.0)).item(), total.assign(3.0).item()])
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    json.dump(found, file)
strategy.close()
sys.stdout.flush()
os._exit(0)
"""


def test_a_script_that_trains_what_it_has_made_outside_the_scope_is_told_so_once(tmp_path):
    for rank, (by_run, by_loop, inside, mirrored, *wrapped, total) in enumerate(written_by(2, tmp_path, OUTSIDE)):
        for said, equal in (by_run, by_loop):
            assert (len(said), equal) == (1 - rank, False)
            assert all("the SGD trains a Parameter of shape (1, 2) that was made outside" in words for words in said)
        assert inside == mirrored == [[], True]
        assert wrapped == [[], []]
        assert "nothing makes their values one by SUM" in total[0]
        assert total[1:] == [2, 3]
