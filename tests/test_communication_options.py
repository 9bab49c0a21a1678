"""CommunicationOptions as they work on replicas: how long is waited, how large buckets are, what travels in bf16."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from driving import run_cell

from mirror_nb.collectives.base import CrossDeviceOps, Member
from mirror_nb.collectives.compressed import Compressed
from mirror_nb.collectives.gloo import GlooAllReduce
from mirror_nb.collectives.handles import Finished, Handle
from mirror_nb.collectives.options import Communication, CommunicationOptions, chosen
from mirror_nb.collectives.shared_memory import SharedMemoryAllReduce
from mirror_nb.devices import Device
from mirror_nb.errors import UsageError
from mirror_nb.pool import following
from mirror_nb.pool.local import LocalPool

CPUS = (Device("cpu", 0), Device("cpu", 1))
OPS = ("shared_memory", "hierarchical_copy", "one_device", "gloo")
STAY = "__import__('threading').Event().wait(60)"
# Until it is interrupted, since another one has failed: who ends is known to come no more, before any time is up.
USUAL = """
from mirror_nb import MirroredStrategy
from mirror_nb.collectives.options import CommunicationOptions
MirroredStrategy(cross_device_ops="shared_memory", communication_options=CommunicationOptions())
"""
MODEL = """
import torch
from torch import nn
from mirror_nb import MirroredStrategy
from mirror_nb.collectives.options import CommunicationOptions
MirroredStrategy(cross_device_ops=ops, communication_options=options)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 200), nn.Tanh(), nn.Linear(200, 100), nn.Tanh(), nn.Linear(100, 1))

def backward(seed=0):
    model.zero_grad()
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed + replica_id))
    model(x).square().mean().backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()]).clone()
"""


@pytest.fixture
def two(replicas: Callable[[int], LocalPool], monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalPool]:
    pool = replicas(2)
    # So long the one that has stayed away is left alone once the other has given up.
    monkeypatch.setattr(following, "INTERRUPT_AFTER", 0.1)
    yield pool
    pool.mend()
    assert run_cell(pool, USUAL).report.clean


def run(pool: LocalPool, source: str, ops: object, options: CommunicationOptions) -> dict[int, dict]:
    ran = run_cell(pool, MODEL + source, {"ops": ops, "options": options}, timeout=60)
    assert ran.report.clean, {r: (f.type_name, f.message) for r, f in ran.report.failures.items()}
    return ran.values


# Time


# In the first pass the replicas agree on what they train, in the second one buckets get their memory.
@pytest.mark.parametrize("passes_before", [0, 1, 3])
@pytest.mark.parametrize("ops", OPS)
def test_a_replica_that_does_not_come_is_waited_for_no_longer_than_asked(two, ops, passes_before):
    source = """
for _ in range(passes_before):
    backward()
if replica_id == 0:
    backward()
else:
    STAY
""".replace("STAY", STAY)
    options = CommunicationOptions(timeout_seconds=0.5)
    # The group itself would wait longer than this cell may run.
    given = {"ops": ops, "options": options, "passes_before": passes_before}
    ran = run_cell(two, MODEL + source, given, timeout=20)
    assert not ran.report.timed_out
    assert ran.errors == {0: "ReplicaTimeout", 1: "KeyboardInterrupt"}
    message = ran.report.failures[0].message
    assert "did not end within 0.5 s" in message
    assert message.endswith("CommunicationOptions(timeout_seconds=0.5); a replica that is only slow needs more")


@pytest.mark.parametrize(
    "call",
    [
        "strategy.reduce('sum', torch.ones(3), axis=None)",
        "strategy.gather(torch.ones(3), axis=0)",
        "strategy.run(lambda: mnb.get_replica_context().all_reduce('sum', torch.ones(3)))",
    ],
)
def test_values_too_are_waited_for_no_longer_than_asked(two, call):
    source = f"""
import mirror_nb as mnb
if replica_id == 0:
    {call}
else:
    {STAY}
"""
    given = {"ops": "shared_memory", "options": CommunicationOptions(timeout_seconds=0.5)}
    ran = run_cell(two, MODEL + source, given, timeout=20)
    assert not ran.report.timed_out
    assert ran.errors == {0: "ReplicaTimeout", 1: "KeyboardInterrupt"}
    assert "CommunicationOptions(timeout_seconds=0.5)" in ran.report.failures[0].message


def test_a_measurement_waits_no_longer_than_asked_either(two):
    source = """
from mirror_nb.collectives.measuring import compare
op = strategy.cross_device_ops
if replica_id == 0:
    compare({"shared_memory": op}, 1000, seconds=0.1)
else:
    # The tensor is made together; then this one does something else.
    op.allocate(1000, torch.float32)
    STAY
""".replace("STAY", STAY)
    given = {"ops": "shared_memory", "options": CommunicationOptions(timeout_seconds=0.5)}
    ran = run_cell(two, MODEL + source, given, timeout=20)
    assert not ran.report.timed_out
    assert ran.errors == {0: "ReplicaTimeout", 1: "KeyboardInterrupt"}


def test_a_wait_may_name_its_own_time():
    waited = []

    class Noted(Handle):
        def wait(self, seconds=None):
            waited.append(seconds)

        def done(self):
            return True

    class Op(CrossDeviceOps):
        def start(self, op, flat):
            return Noted()

        def unfit_for(self, devices):
            return None

    ops = Communication(Op(), CommunicationOptions(timeout_seconds=5))
    for device in ("cpu", "meta"):
        ops.bind(Member(0, 2, torch.device(device), type("Group", (), {"shared": None})()))
        handle = ops.ops.all_reduce("sum", torch.ones(3))
        handle.wait()
        handle.wait(1)
    # Nothing waits on this thread for another device.
    assert waited == [5, 1, None, 1]
    # What is put around an op promises no more than that does.
    assert [Compressed(each).exact for each in (Op(), SharedMemoryAllReduce())] == [False, True]


# Buckets


@pytest.mark.parametrize("bytes_per_pack", [1, 4096, 2**25])
def test_gradients_are_the_same_whatever_the_size_of_buckets(two, bytes_per_pack):
    found = run(two, "gradient = backward()", "shared_memory", CommunicationOptions(bytes_per_pack=bytes_per_pack))
    usual = run(two, "gradient = backward()", "shared_memory", CommunicationOptions())
    assert torch.equal(found[0]["gradient"], usual[0]["gradient"])
    assert torch.equal(found[0]["gradient"], found[1]["gradient"])


# bf16


@pytest.mark.parametrize("ops", OPS)
def test_compressed_gradients_are_the_mean_rounded_to_bf16(two, ops):
    source = "gradient = backward()"
    exact = run(two, source, ops, CommunicationOptions())[0]["gradient"]
    found = run(two, source, ops, CommunicationOptions(compression="bf16"))
    assert torch.equal(found[0]["gradient"], found[1]["gradient"])
    assert torch.equal(found[0]["gradient"], found[0]["gradient"].bfloat16().float())
    assert not torch.equal(found[0]["gradient"], exact)
    torch.testing.assert_close(found[0]["gradient"], exact, rtol=0.02, atol=1e-4)


def test_who_used_what_is_still_told_when_gradients_are_compressed(two):
    source = """
extra = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
for turn in range(6):
    extra.zero_grad()
    # Another one on each replica, and in turns; the third is never used.
    extra[(replica_id + turn) % 2](torch.ones(2, 3)).sum().backward()
used = [part.weight.grad is not None for part in extra]
equal = [float(part.weight.grad.sum()) for part in extra[:2]]
"""
    found = run(two, source, "shared_memory", CommunicationOptions(compression="bf16"))
    assert [values["used"] for values in found.values()] == [[True, True, False]] * 2
    # Two rows of ones, on one of two replicas.
    assert [values["equal"] for values in found.values()] == [[9.0, 9.0]] * 2


def test_compressed_training_learns_what_plain_training_does(two):
    source = """
optimizer = torch.optim.SGD(model.parameters(), 0.2)
for step in range(30):
    backward(step)
    optimizer.step()
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(99))
loss = float(model(x).square().mean())
"""
    plain = run(two, source, "shared_memory", CommunicationOptions())[0]["loss"]
    rounded = run(two, source, "shared_memory", CommunicationOptions(compression="bf16"))[0]["loss"]
    assert rounded == pytest.approx(plain, abs=5e-3)


def test_other_dtypes_than_fp32_travel_as_they_are():
    seen = []

    class Op(CrossDeviceOps):
        def start(self, op, flat):
            seen.append(flat.dtype)
            return Finished()

        def unfit_for(self, devices):
            return "it is for nothing"

    ops = Compressed(Op())
    ops.bind(Member(0, 2, torch.device("cpu"), type("Group", (), {"shared": None})()))
    for dtype in (torch.float32, torch.float64, torch.float16, torch.int32):
        handle = ops.all_reduce("sum", torch.ones(3).to(dtype))
        assert handle.done()
        handle.wait()
    assert seen == [torch.bfloat16, torch.float64, torch.float16, torch.int32]
    assert ops.unfit_for(CPUS) == "it is for nothing"


def test_the_op_that_was_chosen_is_the_one_that_is_shown():
    options = CommunicationOptions(compression="bf16")
    by = chosen("gloo", options, CPUS)
    assert isinstance(by.ops, GlooAllReduce)
    assert isinstance(by.reducer, Compressed)
    again: Communication = pickle.loads(by.pickled())
    assert again.reducer.parts()[0] is again.ops
    assert Communication(by.reducer, options).reducer is by.reducer
    plain = chosen(SharedMemoryAllReduce(), None, CPUS)
    assert plain.reducer is plain.ops


def test_another_compression_is_refused():
    with pytest.raises(UsageError, match=r"`compression` is 'fp8'; it is None or 'bf16'"):
        CommunicationOptions(compression="fp8")
