"""Training by each cross-device op: the losses of one device, ops of one's own, and changing ops on the way."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from driving import eventually, run_cell
from torch import nn

import mirror_nb as mnb
from mirror_nb.collectives.auto import AutoAllReduce
from mirror_nb.collectives.base import CrossDeviceOps
from mirror_nb.collectives.handles import Handle
from mirror_nb.collectives.options import CommunicationOptions
from mirror_nb.errors import DeviceError, ReplicaDied, UsageError
from mirror_nb.pool.local import LocalPool

OPS = ("shared_memory", "hierarchical_copy", "one_device", "gloo", "auto")
X = torch.randn(52, 8, generator=torch.Generator().manual_seed(1))
Y = X.sin().sum(1, keepdim=True)
BATCH, EPOCHS = 17, 3
# No batch can be shared evenly by two, three or four; the last of an epoch holds one example: one replica has any.


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 150), nn.Tanh(), nn.Linear(150, 150), nn.Tanh(), nn.Linear(150, 1))


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """The loss of every step on one device."""
    model, losses = net(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for _ in range(EPOCHS):
        for start in range(0, len(X), BATCH):
            loss = F.mse_loss(model(X[start : start + BATCH]), Y[start : start + BATCH])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    return losses


TRAINING = """
import torch, torch.nn.functional as F
from mirror_nb import MirroredStrategy
from mirror_nb.collectives import auto
from mirror_nb.collectives.options import CommunicationOptions
auto.SECONDS_A_SIZE = 0.01

def train(model, chosen):
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    losses = []
    for epoch in range(epochs):
        for x, y in strategy.distribute_dataset((X, Y), batch_size=batch):
            op = chosen(len(losses))
            if op is not None:
                strategy.cross_device_ops = op
            optimizer.zero_grad()
            # Every example counts once; the mean of an empty share is no number.
            loss = F.mse_loss(model(x), y) if len(x) else model(x).sum()
            loss.backward()
            optimizer.step()
            total = strategy.reduce("sum", loss.detach() * len(x))
            losses.append(float(total / strategy.reduce("sum", float(len(x)))))
    return losses
"""


@pytest.fixture(params=[1, 2, 3, 4], ids=lambda n: f"{n} replicas")
def pool(request: pytest.FixtureRequest, replicas: Callable[[int], LocalPool]) -> Iterator[LocalPool]:
    pool = replicas(request.param)
    yield pool
    pool.mend()
    assert run_cell(pool, 'strategy.cross_device_ops = "shared_memory"').report.clean


def trained(pool: LocalPool, cell: str, **names: Any) -> list[list[float]]:
    """Run a cell that binds `losses`; return those of each replica."""
    given = {"X": X, "Y": Y, "batch": BATCH, "epochs": EPOCHS, "net": net, **names}
    ran = run_cell(pool, TRAINING + cell, given, timeout=60)
    assert ran.report.clean, {r: (f.type_name, f.message) for r, f in ran.report.failures.items()}
    return [values["losses"] for values in ran.values.values()]


@pytest.mark.parametrize("ops", OPS)
def test_whole_epochs_by_each_op_have_the_losses_of_one_device(pool, alone, ops, tmp_path, monkeypatch):
    # Larger ones than its gradients need not be timed.
    cell = f"""
every, auto.SIZES = auto.SIZES, auto.SIZES[:3]
strategy.cross_device_ops = ops
if hasattr(strategy.cross_device_ops, "cache"):
    strategy.cross_device_ops.cache = {str(tmp_path)!r}
losses = train(net(), lambda step: None)
auto.SIZES = every
"""
    for losses in trained(pool, cell, ops=ops):
        assert losses == pytest.approx(alone, rel=0, abs=1e-5)


def test_ops_may_change_between_any_two_steps(pool, alone):
    cell = """
names = ["gloo", "shared_memory", "one_device", "hierarchical_copy"]
losses = train(net(), lambda step: names[step % 4])
"""
    for losses in trained(pool, cell):
        assert losses == pytest.approx(alone, rel=0, abs=1e-5)


class Averaging(CrossDeviceOps):
    """A user's own: gathers everything on replica 0, sums there, and sends the sum to all."""

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    def start(self, op, flat):
        from mirror_nb.collectives.handles import Finished

        parts = self.gather(flat, 0)
        if parts is not None:
            flat.copy_(torch.stack(parts).sum(0) * self.weight)
            if op is mnb.ReduceOp.MEAN:
                flat.div_(len(parts))
        self.broadcast(flat, 0)
        return Finished()

    def unfit_for(self, devices):
        return "it is for at most 4 replicas" if len(devices) > 4 else None


def test_an_op_of_ones_own_trains_like_the_others(pool, alone):
    cell = """
strategy.cross_device_ops = ops
losses = train(net(), lambda step: None)
"""
    for losses in trained(pool, cell, ops=Averaging()):
        assert losses == pytest.approx(alone, rel=0, abs=1e-5)


class Torchs(CrossDeviceOps):
    """A user's own, in the fewest words."""

    def __init__(self, waits: bool = False) -> None:
        self.waits = waits

    def start(self, op, flat):
        if op is mnb.ReduceOp.MEAN:
            flat.div_(torch.distributed.get_world_size())
        return torch.distributed.all_reduce(flat, async_op=not self.waits)

    def unfit_for(self, devices):
        return None


@pytest.mark.parametrize("ops", [Torchs(), Torchs(waits=True)], ids=["a work", "nothing"])
def test_an_op_may_return_torchs_work_or_nothing(pool, alone, ops):
    cell = """
strategy.cross_device_ops = ops
losses = train(net(), lambda step: None)
"""
    for losses in trained(pool, cell, ops=ops):
        assert losses == pytest.approx(alone, rel=0, abs=1e-5)


def test_an_op_that_returns_something_else_is_told_what_to_return(replicas):
    source = """
class Wrong(CrossDeviceOps):
    def start(self, op, flat): return flat
    def unfit_for(self, devices): return None
strategy.cross_device_ops = Wrong()
strategy.cross_device_ops.all_reduce("sum", torch.ones(2))
"""
    ran = run_cell(replicas(2), "import torch\nfrom mirror_nb import CrossDeviceOps\n" + source)
    said = str(ran.report.failures)
    assert "Wrong.start returned a Tensor; it has to return the work" in said
    assert f"a {Handle.__module__}.{Handle.__name__}, or None" in said


def test_a_class_that_a_cell_defines_is_an_op(replicas):
    pool = replicas(2)
    source = """
import torch
import mirror_nb as mnb
from mirror_nb.collectives.base import CrossDeviceOps, Finished

class Doubling(CrossDeviceOps):
    def start(self, op, flat):
        self.member.group.allreduce([flat]).wait()
        flat.mul_(2)
        return Finished()
    def unfit_for(self, devices):
        return None

strategy.cross_device_ops = Doubling()
model = torch.nn.Linear(1, 1, bias=False)
model(torch.ones(1, 1)).sum().backward()
gradient = float(model.weight.grad)
strategy.cross_device_ops = "shared_memory"
"""
    ran = run_cell(pool, source)
    assert ran.report.clean, ran.report.failures
    # Twice the sum of two ones, where the mean was asked for: it was this op that reduced.
    assert [values["gradient"] for values in ran.values.values()] == [4.0, 4.0]


WHOLE = """
import torch
import mirror_nb as mnb
from mirror_nb.collectives.base import CrossDeviceOps, Finished

{op}
torch.manual_seed(3)
first, second = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)
# The parameters that a pass uses are not those of the pass before, nor the same on every replica.
gradients = []
for step in range(8):
    torch.manual_seed(10 * step + replica_id)
    used = [first] if step < 3 else [first, second] if step % 2 or replica_id else [second]
    loss = sum(layer(torch.full((1, 2), replica_id + 1.0)).sum() for layer in used)
    for layer in (first, second):
        layer.zero_grad()
    loss.backward()
    gradients.append([None if p.grad is None else p.grad.tolist() for p in (first.weight, second.weight)])
strategy.cross_device_ops = "shared_memory"
"""


def of_ops(pool: LocalPool, op: str) -> Any:
    ran = run_cell(pool, WHOLE.format(op=op), timeout=60)
    if not ran.report.clean:
        pool.mend()
        run_cell(pool, 'strategy.cross_device_ops = "shared_memory"')
    return ran


IN_PLACE_OF_THE_SUM = {
    "noise": "sum(parts) + torch.randn_like(parts[0]) * 0.01",
    "the first": "parts[0] * 2",
    "no numbers": "parts[0] * float('nan')",
    "nothing": "parts[0] * 0",
}


@pytest.mark.parametrize("compressed", [False, True], ids=["as it is", "compressed"])
@pytest.mark.parametrize("made", IN_PLACE_OF_THE_SUM)
def test_whatever_a_function_makes_of_gradients_all_replicas_have_it(replicas, made, compressed):
    op = f"strategy.cross_device_ops = Compressed(ops) if {compressed} else ops"
    ran = of_ops(
        replicas(2),
        f"""
from mirror_nb.collectives.compressed import Compressed
def made(parts): return {IN_PLACE_OF_THE_SUM[made]}
ops = mnb.ReductionToOneDevice(accumulation_fn=made)
{op}
""",
    )
    assert ran.report.clean, ran.report.failures
    gradients = [str(values["gradients"]) for values in ran.values.values()]
    assert gradients[0] == gradients[1]
    # Of all passes but the first three, both layers: somebody used them.
    assert gradients[0].count("None") == 3
    if made == "the first":
        assert ran.values[0]["gradients"][0][0] == [[1.0, 1.0]]


NOISY = """
class Noisy(CrossDeviceOps):
    def start(self, op, flat):
        self.member.group.allreduce([flat]).wait()
        flat.add_(torch.randn(flat.shape, generator=torch.Generator().manual_seed({seed})))
    def unfit_for(self, devices):
        return None
strategy.cross_device_ops = Noisy()
"""


def test_an_op_that_adds_the_same_noise_everywhere_is_synchronised(replicas):
    ran = of_ops(replicas(2), NOISY.format(seed=7))
    assert ran.report.clean, ran.report.failures
    assert ran.values[0]["gradients"] == ran.values[1]["gradients"]


def test_an_op_that_gives_each_replica_something_else_is_an_error_that_names_it(replicas):
    ran = of_ops(replicas(2), NOISY.format(seed="replica_id"))
    assert ran.errors == {0: "UsageError", 1: "UsageError"}
    assert "Noisy() gave the replicas different gradients" in ran.report.failures[0].message


def test_an_op_that_gives_the_gradients_other_memory_has_reduced_nothing_and_is_named(replicas):
    op = """
class Elsewhere(CrossDeviceOps):
    def start(self, op, flat):
        total = flat.clone()
        self.member.group.allreduce([total]).wait()
        flat.data = total / self.member.num_replicas
    def unfit_for(self, devices):
        return None
strategy.cross_device_ops = Elsewhere()
"""
    ran = of_ops(replicas(2), op)
    assert ran.errors == {0: "UsageError", 1: "UsageError"}
    said = ran.report.failures[0].message
    assert "Elsewhere() gave the replicas different gradients; its `start` has to reduce `flat` in place" in said


ROTATED = """
import torch
import mirror_nb as mnb

class Rotated(mnb.CrossDeviceOps):
    def start(self, op, flat):
        torch.distributed.all_reduce(flat)
        flat.copy_(flat.div_(self.member.num_replicas).roll(self.member.replica_id))
    def unfit_for(self, devices):
        return None

strategy.cross_device_ops = Rotated()
torch.nn.Linear(3, 1)(torch.tensor([[1.0, 2.0, 3.0]])).sum().backward()
"""


def test_an_op_that_gives_the_replicas_the_same_numbers_in_other_places_is_an_error(replicas):
    pool = replicas(2)
    ran = run_cell(pool, ROTATED)
    pool.mend()
    run_cell(pool, 'strategy.cross_device_ops = "shared_memory"')
    assert ran.errors == {0: "UsageError", 1: "UsageError"}
    assert "Rotated() gave the replicas different gradients" in ran.report.failures[0].message


FORGETS = """
import warnings
import torch
import mirror_nb as mnb

class Forgets(mnb.CrossDeviceOps):
    def start(self, op, flat):
        return torch.distributed.all_reduce({given}, async_op=True)
    def unfit_for(self, devices):
        return None

strategy.cross_device_ops = Forgets()
model = torch.nn.Linear(2, 1)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for scale in (0.0, 1.0, 1.0):
        (scale * model(torch.full((1, 2), replica_id + 1.0))).sum().backward()
said = [str(one.message) for one in told if "Forgets" in str(one.message)]
strategy.cross_device_ops = "shared_memory"
"""


@pytest.mark.parametrize("given", ["flat", "flat.mul_(0.5)"])
def test_an_op_that_leaves_the_sum_where_the_mean_was_asked_for_is_told_once(replicas, given):
    ran = run_cell(replicas(2), FORGETS.format(given=given))
    assert ran.report.clean, ran.report.failures
    assert ran.values[1]["said"] == []
    told = ran.values[0]["said"]
    if given == "flat":
        assert len(told) == 1
        assert "Forgets() left the sum of the gradients where its `start` was asked for their mean" in told[0]
        assert "they are 2 times as large" in told[0]
    else:
        assert told == []


def test_of_ops_only_those_of_this_library_are_taken_for_exact():
    class Own(mnb.SharedMemoryAllReduce):  # type: ignore[misc]
        def start(self, op, flat):
            return super().start(op, flat)

    class Promised(Own):
        exact = True

        def start(self, op, flat):
            return super().start(op, flat)

    exact = mnb.SharedMemoryAllReduce(), mnb.GlooAllReduce(), mnb.ReductionToOneDevice(), Promised()
    assert all(ops.exact for ops in exact)
    assert all(not ops.exact for ops in (Own(), Torchs(), mnb.ReductionToOneDevice(accumulation_fn=sum)))
    assert not AutoAllReduce([mnb.GlooAllReduce(), Own()]).exact


def test_after_a_death_the_new_replica_reduces_by_what_a_cell_chose(replicas, alone):
    pool = replicas(3)
    assert run_cell(pool, 'strategy.cross_device_ops = "one_device"').report.clean
    os.kill(pool.status()[1].pid, 9)
    eventually(pool.dead, "the death is seen")
    pool.mend()
    cell = """
assert type(strategy.cross_device_ops).__name__ == "ReductionToOneDevice"
losses = train(net(), lambda step: "gloo" if step == 5 else None)
assert type(strategy.cross_device_ops).__name__ == "GlooAllReduce"
strategy.cross_device_ops = "shared_memory"
"""
    for losses in trained(pool, cell):
        assert losses == pytest.approx(alone, rel=0, abs=1e-5)


KEEPING = """
import torch
import torch.distributed as dist
import mirror_nb as mnb

class Keeping(mnb.CrossDeviceOps):
    def start(self, op, flat):
        if not hasattr(self, "mine"):
            self.mine = dist.new_group([self.member.replica_id], use_local_synchronization=True)
        return dist.all_reduce(flat, dist.ReduceOp.AVG, async_op=True)
    def unfit_for(self, devices):
        return None

strategy.cross_device_ops = Keeping()
model = torch.nn.Linear(1, 1, bias=False)
model(torch.ones(1, 1)).sum().backward()
"""


@pytest.mark.parametrize("dies", [False, True], ids=["an error", "a death"])
def test_an_op_may_keep_what_does_not_travel_and_replicas_go_on_after(replicas, dies):
    pool = replicas(2)
    assert run_cell(pool, KEEPING).report.clean
    if dies:
        os.kill(pool.status()[1].pid, 9)
        eventually(pool.dead, "the death is seen")
    else:
        run_cell(pool, "if replica_id == 1: raise OSError('once')\nmodel(torch.ones(1, 1)).sum().backward()")
    pool.mend()
    ran = run_cell(
        pool, "kind = type(strategy.cross_device_ops).__name__\nstrategy.cross_device_ops = 'shared_memory'"
    )
    assert ran.report.clean, ran.report.failures
    assert [values["kind"] for values in ran.values.values()] == ["Keeping", "Keeping"]


# From the controller


def test_the_strategy_takes_ops_and_options_and_changes_them_between_steps(alone):
    options = CommunicationOptions(bytes_per_pack=50_000)
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"], "gloo", communication_options=options) as strategy:
        with strategy.scope():
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

        def step(batch):
            x, y = batch
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach() * len(x)

        losses = []
        for _ in range(EPOCHS):
            for batch in strategy.distribute_dataset((X, Y), batch_size=BATCH):
                n = sum(len(part) for part in strategy.experimental_local_results(batch[0]))
                losses.append(float(strategy.reduce("sum", strategy.run(step, args=(batch,)))) / n)
                if len(losses) == 4:
                    strategy.cross_device_ops = Averaging()
                if len(losses) == 8:
                    strategy.cross_device_ops = "shared_memory"
        assert type(strategy.cross_device_ops).__name__ == "SharedMemoryAllReduce"
    assert losses == pytest.approx(alone, rel=0, abs=1e-5)


@pytest.mark.parametrize("ops", ["shared_memory", "hierarchical_copy", "one_device", "gloo"])
def test_flags_that_replicas_assign_to_a_sum_are_joined_by_each_op(ops):
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"], ops) as strategy:
        with strategy.scope():
            seen = mnb.Variable([False, False, False], aggregation="sum", trainable=False)

        def see() -> None:
            mine = mnb.get_replica_context().replica_id_in_sync_group
            seen.assign(torch.tensor([False, mine == 1, True]))

        strategy.run(see)
        assert seen.numpy().tolist() == [False, True, True]


class Undecided(CrossDeviceOps):
    def start(self, op, flat):
        return None

    def unfit_for(self, devices):
        return False


class Partial(Averaging):
    """One whose methods say nothing of ops."""

    def __init__(self, on: Any, parts: Any = ()) -> None:
        self.given, self.listed = on, parts

    def on(self, devices):
        return self if self.given == "self" else self.given

    def parts(self):
        return self.listed


def test_an_op_that_cannot_work_is_refused_with_the_reason_and_what_can():
    expected = r"NcclAllReduce cannot work on cpu:0, cpu:1: it is for GPUs; these can: shared_memory, "
    with pytest.raises(DeviceError, match=expected):
        mnb.MirroredStrategy(["cpu:0", "cpu:1"], "nccl")
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        before = strategy.cross_device_ops
        with pytest.raises(DeviceError, match=expected):
            strategy.cross_device_ops = "nccl"
        with pytest.raises(UsageError, match=r"no cross-device op 'glue'; there are: shared_memory, .*, auto"):
            strategy.cross_device_ops = "glue"
        with pytest.raises(UsageError, match=r"is the class Averaging; pass an op: Averaging\(\)"):
            strategy.cross_device_ops = Averaging
        with pytest.raises(UsageError, match="must be a CrossDeviceOps, or one of the names"):
            strategy.cross_device_ops = 3
        assert strategy.cross_device_ops is before
    with pytest.raises(DeviceError, match="at most 4 replicas"):
        mnb.MirroredStrategy([f"cpu:{i}" for i in range(5)], Averaging())
    with pytest.raises(UsageError, match=r"Undecided\.unfit_for returned False; it has to return why .*, or None"):
        mnb.MirroredStrategy(["cpu:0", "cpu:1"], Undecided())
    with pytest.raises(UsageError, match=r"Partial\.on returned None; it has to return an op, `self` as a rule"):
        mnb.MirroredStrategy(["cpu:0", "cpu:1"], Partial(on=None))
    for parts in (["gloo"], None, Averaging()):
        with pytest.raises(UsageError, match=r"Partial\.parts returned .*; it has to return a list of ops"):
            mnb.MirroredStrategy(["cpu:0", "cpu:1"], Partial("self", parts))


class OnlyHere(Averaging):
    """One that cannot be made in a replica."""

    def __init__(self) -> None:
        super().__init__()
        self.process = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["process"] != os.getpid():
            raise OSError("its card is not here")
        vars(self).update(state)


def test_an_op_that_the_replicas_refuse_leaves_the_one_before_for_those_that_come_later_too():
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        pids = strategy.run(os.getpid)
        with pytest.raises(OSError, match="its card is not here"):
            strategy.cross_device_ops = OnlyHere()
        assert type(strategy.cross_device_ops).__name__ == "SharedMemoryAllReduce"
        os.kill(pids[1], 9)
        with contextlib.suppress(ReplicaDied):
            strategy.run(os.getpid)
        kinds = strategy.run(lambda: type(mnb.get_strategy().cross_device_ops).__name__)
        assert kinds == "SharedMemoryAllReduce"


def test_a_copy_of_an_op_knows_its_arguments_only():
    ops = copy.deepcopy(Averaging(0.5))
    assert (repr(ops), ops.weight) == ("Averaging(weight=0.5)", 0.5)


def test_ops_that_are_assigned_on_one_replica_only_are_named_as_the_reason():
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = nn.Linear(3, 1)

        def step(name: str) -> None:
            if mnb.get_replica_context().replica_id_in_sync_group == 0:
                mnb.get_strategy().cross_device_ops = name
            model(torch.ones(2, 3)).sum().backward()

        for name in ("gloo", "one_device"):
            with pytest.raises(UsageError, match=r"`cross_device_ops` differs between the replicas.*assign it alike"):
                strategy.run(step, args=(name,))
            strategy.cross_device_ops = "shared_memory"
            for _ in range(3):
                strategy.run(lambda: model(torch.ones(2, 3)).sum().backward())
