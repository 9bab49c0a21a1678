"""What a replica writes of its steps: which step and which serial each timing of a GPU gets, and when."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from made_gpu import Slow

from mirror_nb.collectives.base import Member
from mirror_nb.errors import UsageError
from mirror_nb.steps.recorder import Recorder
from mirror_nb.telemetry.ring import Reader, Ring, Writer
from mirror_nb.telemetry.samples import Kind, decode


@pytest.fixture
def ring() -> Iterator[Ring]:
    with Ring.create(256) as made:
        yield made


def recording(ring: Ring, ops: Slow) -> Recorder:
    recorder = Recorder(torch.device("meta"))
    recorder.open(Writer(ring.descriptor))
    ops.bind(Member(0, 2, torch.device("meta"), SimpleNamespace(shared=None), recorder.collective))
    recorder.record_ended = ops.record_ended
    return recorder


def backward(recorder: Recorder, ops: Slow, buckets: int = 2) -> None:
    recorder.backward_begun()
    for bucket in range(buckets):
        serial = recorder.queued(bucket, 16)
        ops.all_reduce("mean", torch.ones(4), bucket=bucket, serial=serial).wait()
    recorder.backward_computed()


def optimizer(recorder: Recorder) -> None:
    recorder.optimizer_begun()
    recorder.optimizer_ended()


def collectives(ring: Ring) -> list[tuple[int, int, int, bool]]:
    """Bucket, step, serial and whether it has ended, in the order in which they were written."""
    found = decode(Reader(ring.descriptor).read())
    return [(s.number, s.step, s.serial, bool(s.ended)) for s in found if s.kind is Kind.COLLECTIVE]


def test_what_a_gpu_ends_in_the_next_step_is_a_timing_of_its_own_step(ring):
    ops = Slow()
    recorder = recording(ring, ops)
    backward(recorder, ops)
    optimizer(recorder)
    ops.finish()
    backward(recorder, ops)
    asked = [(0, 1, 1, False), (1, 1, 2, False), (0, 2, 3, False), (1, 2, 4, False)]
    found = collectives(ring)
    assert [each for each in found if not each[-1]] == asked
    assert [each for each in found if each[-1]] == [(0, 1, 1, True), (1, 1, 2, True)]


def test_a_step_that_ends_writes_what_the_gpu_has_ended(ring):
    ops = Slow()
    recorder = recording(ring, ops)
    backward(recorder, ops)
    ops.finish()
    optimizer(recorder)
    assert [each for each in collectives(ring) if each[-1]] == [(0, 1, 1, True), (1, 1, 2, True)]


def test_the_timings_of_the_last_step_are_written_when_the_request_ends(ring):
    ops = Slow()
    recorder = recording(ring, ops)
    backward(recorder, ops)
    optimizer(recorder)
    ops.finish()
    recorder.end()
    assert [each for each in collectives(ring) if each[-1]] == [(0, 1, 1, True), (1, 1, 2, True)]


def test_a_timing_that_nobody_queued_has_a_serial_of_its_own(ring):
    ops = Slow()
    recorder = recording(ring, ops)
    backward(recorder, ops, buckets=1)
    ops.all_reduce("mean", torch.ones(4), bucket=0).wait()
    ops.finish()
    recorder.end()
    assert [each[2] for each in collectives(ring) if each[-1]] == [1, 2]


def test_a_timing_is_written_though_nothing_is_while_it_ends(ring):
    ops = Slow()
    recorder = recording(ring, ops)
    backward(recorder, ops)
    ops.finish()
    with recorder.silent():
        ops.record_ended()
    assert [each for each in collectives(ring) if each[-1]] == [(0, 1, 1, True), (1, 1, 2, True)]


class Copied:
    """A CUDA event: whether what came before it is done."""

    def __init__(self) -> None:
        self.over = False

    def record(self) -> None:
        """Nothing is to be enqueued here."""

    def query(self) -> bool:
        return self.over


def test_the_last_losses_of_a_gpu_are_written_when_the_step_or_the_request_ends(ring):
    recorder = recording(ring, Slow())
    events = [Copied(), Copied()]
    for i, event in enumerate(events):
        backward(recorder, Slow(), buckets=0)
        recorder._pending.append(("loss", torch.tensor(float(i)), recorder.step, event))
        event.over = i == 0
        optimizer(recorder)
    losses = [(s.value, s.step) for s in decode(Reader(ring.descriptor).read()) if s.kind is Kind.SCALAR]
    assert losses == [(0.0, 1)]
    events[1].over = True
    recorder.end()
    losses = [(s.value, s.step) for s in decode(Reader(ring.descriptor).read()) if s.kind is Kind.SCALAR]
    assert losses == [(0.0, 1), (1.0, 2)]


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]


def test_a_loss_of_several_elements_is_an_error_at_the_users_line(ring):
    recorder = recording(ring, Slow())
    two = torch.ones(2)
    for wrong, said in ((two, "one element"), (two.as_subclass(OnGpu), "of size 2"), (None, "NoneType"), ("a", "'a'")):
        with pytest.raises(UsageError, match=f"`loss` cannot be recorded: .*{said}.*; log a number"):
            recorder.log({"loss": wrong})
    assert not recorder._pending
