"""What every cross-device op promises, run over each of them that works on CPU replicas."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable

import pytest
from driving import run_cell

from mirror_nb.collectives.base import CrossDeviceOps
from mirror_nb.collectives.compressed import Compressed
from mirror_nb.collectives.gloo import GlooAllReduce
from mirror_nb.collectives.hierarchical_copy import HierarchicalCopyAllReduce
from mirror_nb.collectives.one_device import ReductionToOneDevice
from mirror_nb.collectives.shared_memory import SharedMemoryAllReduce
from mirror_nb.devices import Device
from mirror_nb.pool import following
from mirror_nb.pool.local import LocalPool


def _stacked(parts):
    import torch

    return torch.stack(parts).sum(0)


OPS: dict[str, Callable[[], CrossDeviceOps]] = {
    "shared memory": SharedMemoryAllReduce,
    "gloo": GlooAllReduce,
    "hierarchical copy": HierarchicalCopyAllReduce,
    "one device": ReductionToOneDevice,
}
OURS = ("shared memory", "hierarchical copy")
# Those whose way of adding is this project's own.
PLACES = [(n, name) for n in (1, 2, 3) for name in OPS] + [(4, name) for name in OURS]
# Four are two groups of two; the others hand their tensors to torch's group, whatever its size.

BOUND = """
import torch, torch.distributed as dist
from mirror_nb.collectives.base import Member

timings = []
ops.bind(Member(replica_id, num_replicas, device, dist.group.WORLD, timings.append))

def parts_of(numel, dtype, seed=0):
    "What every replica brings; each knows all of them."
    made = torch.Generator().manual_seed(numel + seed)
    drawn = torch.float64 if dtype is torch.float64 else torch.float32
    return [(torch.randn(numel, generator=made, dtype=drawn) * 8).to(dtype) for _ in range(num_replicas)]

def reduced(tensor, op="sum"):
    ops.all_reduce(op, tensor).wait()
    return tensor
"""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    asked = {"pool", "name"} & set(metafunc.fixturenames)
    if len(asked) == 2:
        ids = [f"{n} replicas-{name}" for n, name in PLACES]
        metafunc.parametrize(("pool", "name"), PLACES, ids=ids, indirect=["pool"])
    elif "pool" in asked:
        metafunc.parametrize("pool", [1, 2, 3, 4], ids=lambda n: f"{n} replicas", indirect=True)
    elif "name" in asked:
        metafunc.parametrize("name", OPS)


@pytest.fixture
def pool(request: pytest.FixtureRequest, replicas: Callable[[int], LocalPool]) -> LocalPool:
    return replicas(request.param)


def run(pool: LocalPool, ops: CrossDeviceOps, source: str, *, after: str = "ops.unbind()") -> dict[int, dict]:
    """Run the source with `ops` bound; it has to end well."""
    ran = run_cell(pool, f"{BOUND}\n{source}\n{after}", {"ops": ops}, timeout=60)
    assert ran.report.clean, {r: (f.type_name, f.message) for r, f in ran.report.failures.items()}
    return ran.values


# Results

SIZES = "(0, 1, 7, 256, 16_383, 2**18 + 3)"


def test_every_size_and_dtype_is_summed(pool, name):
    run(
        pool,
        OPS[name](),
        f"""
for numel in {SIZES}:
    drawn = parts_of(numel, torch.float64)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64):
        parts = [part.to(dtype) for part in drawn]
        exact = torch.stack([part.double() for part in parts]).sum(0)
        total = reduced(parts[replica_id].clone())
        rounding = torch.finfo(dtype).eps if dtype.is_floating_point else 0
        # A carrier may round at every replica, of which each has at most a few times 8.
        bound = rounding * 8 * 5 * num_replicas ** 2
        assert total.dtype is dtype
        assert not numel or (total.double() - exact).abs().max() <= bound, (numel, dtype)
""",
    )


def test_the_mean_is_the_sum_over_the_replicas(pool, name):
    run(
        pool,
        OPS[name](),
        """
for numel in (1, 300, 40_000):
    for dtype in (torch.float32, torch.float64):
        parts = parts_of(numel, dtype)
        torch.testing.assert_close(reduced(parts[replica_id].clone(), "mean"), sum(parts) / num_replicas)
""",
    )


def test_every_replica_has_the_same_bits(pool, name):
    values = run(
        pool,
        OPS[name](),
        """
import zlib
sums = [zlib.crc32(reduced(parts_of(n, torch.float32)[replica_id]).numpy().tobytes()) for n in (9, 5000, 70_001)]
""",
    )
    assert len({tuple(found["sums"]) for found in values.values()}) == 1


@pytest.mark.parametrize("ours", OURS)
def test_our_own_sums_do_not_depend_on_how_a_tensor_is_cut(pool, ours):
    run(
        pool,
        OPS[ours](),
        """
for dtype in (torch.float32, torch.bfloat16):
    for numel in (100, 33_000, 300_000):
        mine = parts_of(numel, dtype)[replica_id]
        whole = reduced(mine.clone())
        pieces = torch.cat([reduced(piece.clone()) for piece in mine.split(7001)])
        lies = ops.allocate(numel, dtype)
        lies.copy_(mine)
        assert torch.equal(whole, pieces) and torch.equal(whole, reduced(lies))
        ops.release(lies)
""",
    )


def test_shared_memory_adds_in_the_order_of_the_replicas(pool):
    run(
        pool,
        SharedMemoryAllReduce(),
        """
for numel in (100, 300_000):
    parts = parts_of(numel, torch.float32)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    assert torch.equal(reduced(parts[replica_id].clone()), total)
""",
    )


@pytest.mark.parametrize("ours", OURS)
def test_our_own_sums_of_half_precision_round_once(pool, ours):
    run(
        pool,
        OPS[ours](),
        """
for dtype in (torch.bfloat16, torch.float16):
    for numel in (50, 100_000):
        parts = parts_of(numel, dtype)
        exact = sum(part.double() for part in parts)
        assert torch.equal(reduced(parts[replica_id].clone()), exact.float().to(dtype))
""",
    )


def test_a_mean_of_fp16_needs_no_sum_that_fits_in_it(pool, name):
    run(
        pool,
        OPS[name](),
        """
x = torch.full((5,), 60000.0, dtype=torch.float16)
found = ops.reduce("mean", x, 0)
assert found is None or found.tolist() == x.tolist()
assert reduced(x.clone(), "mean").tolist() == x.tolist()
""",
    )


def test_complex_numbers_are_summed(pool, name):
    run(
        pool,
        OPS[name](),
        """
x = torch.complex(torch.full((5,), float(replica_id)), torch.ones(5))
ops.all_reduce("sum", x).wait()
assert torch.equal(x, torch.full((5,), complex(num_replicas * (num_replicas - 1) / 2, num_replicas)))
""",
    )


DTYPES = ("int8", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex32", "complex64", "complex128")


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_method_takes_every_dtype(pool, name):
    run(
        pool,
        OPS[name](),
        f"""
import warnings
warnings.simplefilter("ignore")
last = num_replicas - 1
ids = last * num_replicas / 2
for name in {DTYPES + COMPLEX}:
    dtype = getattr(torch, name)
    mine = torch.full((2, 3), replica_id).to(dtype)
    for op in ("sum",) if name in {DTYPES[:5]} else ("sum", "mean"):
        expected = torch.full((6,), ids / (num_replicas if op == "mean" else 1)).to(dtype).tolist()
        flat = mine.clone().view(-1)
        assert reduced(flat, op).tolist() == expected, (name, op)
        total = ops.reduce(op, mine, last)
        assert total is None or (total.dtype, total.view(-1).tolist()) == (dtype, expected), (name, op)
    parts = ops.gather(mine, last)
    assert (parts is None) == (replica_id != last)
    assert parts is None or [part.tolist() for part in parts] == [
        torch.full((2, 3), r).to(dtype).tolist() for r in range(num_replicas)]
    column = mine[:1, 1]
    ops.broadcast(column, last)
    assert column.tolist() == torch.full((1,), last).to(dtype).tolist(), name
    ops.broadcast(mine, last)
    assert mine.tolist() == torch.full((2, 3), last).to(dtype).tolist()
""",
    )


def test_a_function_accumulates_every_dtype(pool):
    run(
        pool,
        ReductionToOneDevice(accumulation_fn=_stacked),
        """
for dtype in (torch.int16, torch.int64, torch.float16, torch.complex64):
    assert reduced(torch.ones(3, dtype=dtype)).tolist() == [num_replicas] * 3
""",
    )


def test_one_replica_reduces_what_several_do(pool):
    run(
        pool,
        SharedMemoryAllReduce(),
        """
for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
    x = torch.full((3,), 2, dtype=torch.int16)
    dist.all_reduce(x, op)
    dist.broadcast(x, 0)
    assert x.tolist() == [{"SUM": 2 * num_replicas, "MAX": 2, "PRODUCT": 2 ** num_replicas}[op.name]] * 3
""",
    )


def test_whole_numbers_that_the_group_does_not_add_are_reduced(pool, name):
    run(
        pool,
        OPS[name](),
        """
for dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64):
    mine = torch.full((3,), 2 + replica_id).to(dtype)
    total = ops.reduce("sum", mine, 0)
    expected = sum(2 + i for i in range(num_replicas))
    assert total is None or (total.dtype, total.tolist()) == (dtype, [expected] * 3), total
    assert reduced(mine).tolist() == [expected] * 3
""",
    )


def test_what_a_view_shows_is_gathered_and_reduced_to_one(pool, name):
    run(
        pool,
        OPS[name](),
        """
conjugate = torch.tensor([1 + 2j, 3j]).conj()
negative = torch.tensor([1 + 2j, 3j]).conj().imag
assert conjugate.is_conj() and negative.is_neg()
for view in (conjugate, negative):
    parts, total = ops.gather(view, 0), ops.reduce("sum", view, 0)
    assert parts is None or [part.tolist() for part in parts] == [view.tolist()] * num_replicas
    assert total is None or total.tolist() == (view * num_replicas).tolist()
""",
    )


def test_what_inference_mode_made_is_reduced_inside_and_outside_of_it(pool, name):
    run(
        pool,
        OPS[name](),
        """
for numel in (3, 100_003):
    for dtype in (torch.float32, torch.int16, torch.uint16, torch.complex64):
        with torch.inference_mode():
            made, later = torch.ones(numel, dtype=dtype), torch.ones(numel, dtype=dtype)
            assert reduced(made)[-1] == num_replicas
            under_way = ops.all_reduce("sum", later)
            room = ops.allocate(numel, dtype)
        under_way.wait()
        assert reduced(room.fill_(1))[-1] == num_replicas
        ops.release(room)
        assert later[-1] == num_replicas and reduced(made)[-1] == num_replicas ** 2
""",
    )


def test_many_may_be_under_way_at_once(pool, name):
    run(
        pool,
        OPS[name](),
        """
tensors = [torch.full((size,), replica_id + i, dtype=torch.float64)
           for i, size in enumerate([1, 70_000, 3] * 20)]
handles = [ops.all_reduce("sum", tensor, bucket=i) for i, tensor in enumerate(tensors)]
ops.progress()
for handle in reversed(handles):
    handle.wait()
assert all(handle.done() for handle in handles)
ids = num_replicas * (num_replicas - 1) / 2
assert all((tensor == ids + num_replicas * i).all() for i, tensor in enumerate(tensors))
""",
    )


def test_tensors_are_batched_reduced_broadcast_and_gathered(pool, name):
    run(
        pool,
        OPS[name](),
        """
last = num_replicas - 1
ids = last * num_replicas / 2
tensors = [torch.full((n,), float(replica_id)) for n in (3, 0, 40_000)]
ops.batch_reduce("sum", tensors)
assert all((tensor == ids).all() for tensor in tensors)
mine = torch.full((2, 3), float(replica_id))
for op, expected in (("sum", ids), ("mean", ids / num_replicas)):
    total = ops.reduce(op, mine, last)
    assert (total is None) == (replica_id != last)
    assert total is None or (total.shape == (2, 3) and (total == expected).all())
assert (mine == replica_id).all()
for strided in (mine[:, 0], mine[0].expand(2, 3), mine.T):
    total = ops.reduce("sum", strided, last)
    assert total is None or (total.shape == strided.shape and (total == ids).all())
gathered = ops.gather(mine, last)
assert (gathered is None) == (replica_id != last)
assert gathered is None or [part[0, 0].item() for part in gathered] == list(range(num_replicas))
ops.broadcast(mine, last)
assert (mine == last).all()
trained = torch.full((3,), float(replica_id), requires_grad=True)
ops.all_reduce("sum", trained).wait()
assert (trained == ids).all()
try:
    ops.broadcast(mine[:, ::2], last)
except Exception as error:
    assert "must be contiguous" in str(error)
else:
    raise AssertionError("a tensor that is not contiguous was taken")
""",
    )


def test_every_collective_is_timed(pool, name):
    values = run(
        pool,
        OPS[name](),
        """
reduced(torch.ones(1000))
ops.all_reduce("mean", torch.ones(10), bucket=3).wait()
ops.broadcast(torch.ones(4), 0)
ops.gather(torch.ones(5), 0)
ops.reduce("sum", torch.ones(6), 0)
# Its bytes, not those of what it is added up in.
ops.reduce("mean", torch.ones(7, dtype=torch.bfloat16), 0)
ops.reduce("sum", torch.ones(8, dtype=torch.int16), 0)
seen = [(t.op, t.nbytes, t.bucket, t.queued <= t.started <= t.ended or num_replicas == 1) for t in timings]
""",
    )
    expected = [
        ("all_reduce", 4000, -1, True),
        ("all_reduce", 40, 3, True),
        ("broadcast", 16, -1, True),
        ("gather", 20, -1, True),
        ("reduce", 24, -1, True),
        ("reduce", 14, -1, True),
        ("reduce", 16, -1, True),
    ]
    assert all(found["seen"] == expected for found in values.values())


def test_an_op_is_bound_again_after_it_was_unbound(pool, name):
    run(
        pool,
        OPS[name](),
        """
for _ in range(3):
    ops.unbind()
    ops.bind(Member(replica_id, num_replicas, device, dist.group.WORLD))
    assert reduced(torch.ones(3)).tolist() == [num_replicas] * 3
""",
    )


def test_a_function_may_accumulate_in_place_of_the_sum(pool):
    run(
        pool,
        ReductionToOneDevice(accumulation_fn=_stacked),
        "assert (reduced(torch.full((5,), replica_id + 1.0)) == num_replicas * (num_replicas + 1) / 2).all()",
    )


def test_users_write_ops_of_their_own(pool):
    values = run_cell(
        pool,
        """
import torch
from mirror_nb.collectives.base import CrossDeviceOps, Finished

class Largest(CrossDeviceOps):
    def start(self, op, flat):
        parts = self.gather(flat, 0)
        if parts is not None:
            flat.copy_(torch.stack(parts).amax(0))
        self.broadcast(flat, 0)
        return Finished()

    def unfit_for(self, devices):
        return None

ops = Largest()
"""
        + BOUND
        + "found = reduced(torch.full((2,), float(replica_id))).tolist()",
        timeout=60,
    ).values
    assert all(found["found"] == [pool.size - 1] * 2 for found in values.values())


class Chained(CrossDeviceOps):
    """Has another op do it, by the method that anybody calls."""

    def __init__(self, inner: CrossDeviceOps) -> None:
        self.inner = inner

    def parts(self) -> list[CrossDeviceOps]:
        return [self.inner]

    def start(self, op, flat):
        return self.inner.all_reduce(op, flat)

    def unfit_for(self, devices):
        return None


def test_a_collective_is_timed_once_whatever_ops_it_is_made_of(pool, name):
    values = run(
        pool,
        Chained(Chained(OPS[name]())),
        """
ops.all_reduce("sum", torch.ones(1000), bucket=2).wait()
seen = [(t.op, t.nbytes, t.bucket) for t in timings]
""",
    )
    assert all(found["seen"] == [("all_reduce", 4000, 2)] for found in values.values())


def test_what_goes_past_the_compression_is_timed_too(pool, name):
    values = run(
        pool,
        Compressed(OPS[name]()),
        """
ops.all_reduce("mean", torch.ones(1000), bucket=2).wait()
# As what replicas tell each other beside their gradients.
ops.ops.all_reduce("sum", torch.ones(10)).wait()
ops.ops.broadcast(torch.ones(4), 0)
seen = [(t.op, t.nbytes, t.bucket) for t in timings]
""",
    )
    expected = [("all_reduce", 4000, 2), ("all_reduce", 40, -1), ("broadcast", 16, -1)]
    assert all(found["seen"] == expected for found in values.values())


WRAPS = """
import torch
from mirror_nb import CrossDeviceOps, SharedMemoryAllReduce

class Wraps(CrossDeviceOps):
    def __init__(self):
        self.inner = SharedMemoryAllReduce()

    def start(self, op, flat):
        return self.inner.start(op, flat)

    def unfit_for(self, devices):
        return None

before = strategy.cross_device_ops
strategy.cross_device_ops = Wraps()
"""


@pytest.mark.parametrize("op", ["strategy.cross_device_ops", "before"])
def test_an_op_that_is_not_the_strategys_is_told_so_in_a_replica(replicas, op):
    ran = run_cell(replicas(2), f"{WRAPS}\n{op}.all_reduce('sum', torch.ones(2))")
    run_cell(replicas(2), "strategy.cross_device_ops = before")
    assert set(ran.errors.values()) == {"ReplicaError"}
    assert "not, or no longer, what a strategy has as its `cross_device_ops`" in ran.report.failures[0].message
    assert "among those that the other's `parts()` returns" in ran.report.failures[0].message


# Ends


@pytest.fixture
def peers(replicas: Callable[[int], LocalPool]) -> LocalPool:
    """Three, since the two that are left are not to wait for each other either."""
    return replicas(3)


@pytest.fixture
def by_aborts_alone(monkeypatch):
    """On a busy machine an interrupt comes before a replica has begun to wait; here all are freed from their waits."""
    for name in ("INTERRUPT_AFTER", "INTERRUPT_AFTER_DEATH"):
        monkeypatch.setattr(following, name, 30.0)


LAST_FAILS = """
tensor = torch.ones({numel})
if replica_id == num_replicas - 1:
    {end}
reduced(tensor)
"""


@pytest.mark.parametrize("numel", [10, 300_000])
@pytest.mark.usefixtures("by_aborts_alone")
def test_a_replica_that_raises_frees_the_others(peers, name, numel):
    source = BOUND + LAST_FAILS.format(numel=numel, end="raise ValueError('not today')")
    ran = run_cell(peers, source, {"ops": OPS[name]()}, timeout=60)
    assert ran.errors[peers.size - 1] == "ValueError"
    assert {ran.errors[r] for r in range(peers.size - 1)} == {"PeerFailed"}


@pytest.mark.parametrize("numel", [10, 300_000])
@pytest.mark.usefixtures("by_aborts_alone")
def test_a_replica_that_dies_frees_the_others(peers, name, numel):
    source = BOUND + LAST_FAILS.format(numel=numel, end="import os; os.kill(os.getpid(), 9)")
    ran = run_cell(peers, source, {"ops": OPS[name]()}, timeout=60)
    assert {ran.errors[r] for r in range(peers.size - 1)} == {"PeerFailed"}


def test_a_replica_that_never_comes_is_not_waited_for_for_ever(peers, name):
    source = BOUND + LAST_FAILS.format(
        numel=10, end="import threading; [threading.Event().wait(0.05) for _ in range(10_000)]"
    )
    ran = run_cell(peers, source, {"ops": OPS[name]()}, timeout=0.3)
    assert not ran.report.clean
    peers.mend()
    assert run_cell(peers, "total = strategy.reduce('sum', 1.0).item()").values[0]["total"] == peers.size


@pytest.mark.parametrize("ours", OURS)
@pytest.mark.parametrize("sizes", [(10, 11), (300_000, 300_001), (10, 300_000)])
def test_tensors_of_different_shapes_are_an_error_on_every_replica(peers, ours, sizes):
    ran = run_cell(
        peers,
        BOUND
        + f"""
try:
    reduced(torch.ones({sizes}[replica_id == num_replicas - 1]))
except ValueError as error:
    said = str(error)
# Nothing was read or written: the replicas are in step.
assert reduced(torch.ones(3)).tolist() == [num_replicas] * 3
""",
        {"ops": OPS[ours]()},
        timeout=60,
    )
    assert ran.report.clean, ran.report.failures
    for found in ran.values.values():
        assert re.search(rf"replica 0: \w+ \(SUM\) of float32\[{sizes[0]}\]", found["said"])
        assert re.search(rf"replica {peers.size - 1}: \w+ \(SUM\) of float32\[{sizes[1]}\]", found["said"])


def test_tensors_of_different_dtypes_are_an_error_on_every_replica(peers):
    ran = run_cell(
        peers,
        BOUND + "reduced(torch.ones(5, dtype=torch.float64 if replica_id else torch.float32))",
        {"ops": SharedMemoryAllReduce()},
        timeout=60,
    )
    assert set(ran.errors.values()) <= {"UsageError", "PeerFailed"}
    assert "replica 0: all_reduce (SUM) of float32[5], replica 1: all_reduce (SUM) of float64[5]" in " ".join(
        failure.message for failure in ran.report.failures.values()
    )


# What is refused

REFUSED = {
    "torch.ones(2, 2)": "of one dimension",
    "torch.ones(4)[::2]": "contiguous",
    "torch.ones(3, dtype=torch.bool)": "tensor.int()",
    "torch.ones(3, dtype=torch.complex64).conj()": "`flat` shows the conjugate of what stands in its memory",
    "torch._neg_view(torch.ones(3))": "pass tensor.resolve_neg()",
    "[1.0, 2.0]": "`flat` is [1.0, 2.0]; it must be a tensor",
    "torch.ones(3).to_sparse()": "`flat` has the layout torch.sparse_coo; convert it first: tensor.to_dense()",
}


@pytest.mark.parametrize("tensor", REFUSED)
def test_a_tensor_that_cannot_be_reduced_is_refused_before_anything_is_sent(replicas, name, tensor):
    ran = run_cell(replicas(2), f"{BOUND}\nops.all_reduce('sum', {tensor})", {"ops": OPS[name]()}, timeout=60)
    assert set(ran.errors.values()) == {"UsageError"}
    assert REFUSED[tensor] in ran.report.failures[0].message


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("reduce('sum', 1.0, 0)", "`tensor` is 1.0; it must be a tensor"),
        ("broadcast([1.0], 0)", "`tensor` is [1.0]; it must be a tensor"),
        ("gather(torch.ones(3).to_sparse(), 0)", "`tensor` has the layout torch.sparse_coo"),
        ("gather(torch.ones(3), '0')", "`destination` is '0'; it is a replica id from 0 to 1"),
        ("broadcast(torch.ones(3), 2)", "`source` is 2; it is a replica id from 0 to 1"),
        ("allocate(-1, torch.float32)", "`numel` is -1; it must be a whole number, from 0 on"),
        ("allocate(2.5, torch.float32)", "`numel` is 2.5; it must be a whole number, from 0 on"),
    ],
)
def test_a_wrong_argument_is_told_apart_on_every_replica_which_stay_in_step(replicas, call, said):
    source = f"""
from mirror_nb.errors import UsageError
message = ""
try:
    ops.{call}
except UsageError as error:
    message = str(error)
total = reduced(torch.ones(1)).item()
"""
    values = run(replicas(2), SharedMemoryAllReduce(), source)
    assert all(said in found["message"] and found["total"] == 2 for found in values.values())


def test_a_length_and_a_replica_id_may_be_numbers_of_numpys(replicas, name):
    source = """
import numpy as np
lies, root = ops.allocate(np.int64(9), torch.float32).fill_(replica_id), np.int64(1)
total, parts = ops.reduce("sum", lies, root), ops.gather(lies, root)
ops.broadcast(lies, root)
found = lies.sum().item(), None if total is None else total.sum().item(), None if parts is None else len(parts)
"""
    values = run(replicas(2), OPS[name](), source)
    assert [values[i]["found"] for i in range(2)] == [(9, None, None), (9, 9, 2)]


def test_a_view_is_not_broadcast_to(replicas, name):
    source = "ops.broadcast(torch.ones(2, dtype=torch.complex64).conj(), 0)"
    ran = run_cell(replicas(2), BOUND + source, {"ops": OPS[name]()})
    assert "pass tensor.resolve_conj()" in ran.report.failures[0].message


@pytest.mark.parametrize(
    ("made", "said"),
    [("None", "None"), ("list(parts)", "a list"), ("parts[0].numpy()", "a ndarray"), ("parts[0][:1]", "a tensor of")],
)
def test_what_a_function_accumulates_has_to_be_a_tensor_like_its_parts(replicas, made, said):
    source = f"ops = mnb.ReductionToOneDevice(accumulation_fn=lambda parts: {made})"
    ran = run_cell(replicas(2), f"import mirror_nb as mnb\n{source}\n{BOUND}\nreduced(torch.ones(3))", timeout=60)
    assert ran.errors[0] == "UsageError"
    assert f"`accumulation_fn` returned {said}" in ran.report.failures[0].message
    assert "it must return one tensor of shape (3,)" in ran.report.failures[0].message


def test_a_mean_of_integers_says_to_convert(replicas, name):
    ran = run_cell(replicas(2), BOUND + "reduced(torch.ones(3, dtype=torch.int64), 'mean')", {"ops": OPS[name]()})
    assert "tensor.float()" in ran.report.failures[0].message


def test_the_one_device_may_be_named(pool):
    run(
        pool,
        ReductionToOneDevice("cpu:0"),
        """
ids = num_replicas * (num_replicas + 1) / 2
mine = torch.full((40_000,), replica_id + 1.0)
total = ops.reduce("sum", mine, num_replicas - 1)
assert total is None or (total == ids).all()
assert (reduced(mine) == ids).all()
""",
    )


@pytest.mark.parametrize("made", [*OPS.values(), lambda: ReductionToOneDevice("cpu:0")])
def test_an_op_that_was_chosen_travels_by_its_arguments(made):
    ops = made()
    assert repr(pickle.loads(pickle.dumps(ops))) == repr(ops)


def test_an_op_in_the_controller_says_that_it_works_in_replicas(name):
    with pytest.raises(RuntimeError, match=r"works in replicas: call it in a function given to strategy\.run"):
        OPS[name]().member  # noqa: B018


@pytest.mark.parametrize("made", [*OPS.values(), lambda: ReductionToOneDevice("cpu:0")])
def test_cpu_replicas_suit_every_op_here(made):
    assert made().unfit_for([Device("cpu", 0), Device("cpu", 1)]) is None
