"""What is written of steps on a GPU: when it computed them, not when it was asked to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from made_gpu import MadeGpu

from mirror_nb.collectives.handles import Timing
from mirror_nb.steps import gpu_steps
from mirror_nb.steps.recorder import Recorder
from mirror_nb.telemetry.findings import stuck
from mirror_nb.telemetry.ring import Reader, Ring, Writer
from mirror_nb.telemetry.samples import BLOCKING, OVER, Kind, Operation, Sample, decode, last_collective
from mirror_nb.telemetry.snapshot import BREAKDOWN
from mirror_nb.telemetry.timeline import Timeline

MS = 1_000_000
PARTS = (Kind.DATA, Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER, Kind.GPU_STEP)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> MadeGpu:
    made = MadeGpu(monkeypatch)
    monkeypatch.setattr("mirror_nb.steps.recorder.clock", lambda: made.now)
    return made


@pytest.fixture
def ring() -> Iterator[Ring]:
    with Ring.create(1024) as made:
        yield made


class Training:
    """Steps of 10 ms forward, 20 backward, 2 of the optimizer; 12 ms of all-reduce begin 8 before backward ends.

    The host takes no time for any of it.
    """

    def __init__(self, gpu: MadeGpu, ring: Ring, device: str = "cuda:0") -> None:
        self.gpu = gpu
        self.recorder = Recorder(torch.device(device))
        self.recorder.open(Writer(ring.descriptor))
        self.recorder.record_ended = self._record_ended
        self.under_way: list[Timing] = []

    def step(self, *, waits: int = 0, blocking: bool = False) -> None:
        """Do a step, for whose batch the host waits so many nanoseconds."""
        self.recorder.wanted()
        self.gpu.passes(waits)
        self.recorder.arrived(4)
        self.gpu.enqueue(10 * MS)
        self.backward(blocking)
        self.recorder.optimizer_begun()
        self.gpu.enqueue(2 * MS)
        self.recorder.optimizer_ended()

    def backward(self, blocking: bool = False) -> None:
        recorder, gpu = self.recorder, self.gpu
        recorder.backward_begun()
        gpu.enqueue(12 * MS)
        serial, began = recorder.queued(0, 1 << 20), gpu.now + gpu.lag
        self.under_way.append(Timing("all_reduce", 1 << 20, 0, gpu.now, began, began + 12 * MS, serial, blocking))
        gpu.enqueue((20 if blocking else 8) * MS)
        recorder.backward_computed()
        if not blocking:
            # The optimizer waits for it.
            gpu.enqueue(4 * MS)

    def _record_ended(self) -> None:
        while self.under_way and self.under_way[0].ended <= self.gpu.now:
            self.recorder.collective(self.under_way.pop(0))


def lengths(samples: list[Sample], step: int) -> dict[str, float]:
    """Milliseconds of the parts of a step, by name."""
    found = [s for s in samples if s.kind in PARTS and s.step == step]
    return {s.kind.name.lower(): (s.ended - s.began) / MS for s in found}


def read(ring: Ring) -> list[Sample]:
    return decode(Reader(ring.descriptor).read())


def test_parts_of_steps_last_as_long_as_the_gpu_takes_for_them(gpu, ring):
    training = Training(gpu, ring)
    training.step(waits=3 * MS)
    # The GPU has enough to do meanwhile.
    training.step(waits=3 * MS)
    assert not [s for s in read(ring) if s.kind in PARTS]
    gpu.passes(100 * MS)
    training.recorder.end()
    found = read(ring)
    each = {"forward": 10, "backward": 20, "optimizer": 2}
    assert lengths(found, 1) == pytest.approx({"data": 3, **each, "gpu_step": 39}, abs=1e-2)
    assert lengths(found, 2) == pytest.approx({"data": 0, **each, "gpu_step": 36}, abs=1e-2)


def test_a_step_is_written_whole_when_the_gpu_has_come_to_its_end(gpu, ring):
    training = Training(gpu, ring)
    training.step()
    gpu.passes(33 * MS)
    training.step()
    assert not [s for s in read(ring) if s.kind in PARTS or (s.kind is Kind.COLLECTIVE and s.ended)]
    gpu.passes(3 * MS)
    training.step()
    found = read(ring)
    assert {s.step for s in found if s.kind in PARTS} == {1}
    assert [s.step for s in found if s.kind is Kind.COLLECTIVE and s.ended] == [1]


def test_that_a_collective_is_over_is_told_at_once(gpu, ring):
    training = Training(gpu, ring)
    training.step()
    assert "begun and not ended" in last_collective(Reader(ring.descriptor).read())
    # It is over, and the optimizer's step is not.
    gpu.passes(35 * MS)
    training.recorder.record_ended()
    rows = Reader(ring.descriptor).read()
    assert [s.code for s in decode(rows) if s.kind is Kind.COLLECTIVE] == [
        Operation.ALL_REDUCE | BLOCKING,
        Operation.ALL_REDUCE | OVER,
    ]
    assert last_collective(rows).startswith("all_reduce of 1048576 bytes in step 1, ended")


def test_who_waits_for_whom_is_seen_though_times_are_still_to_come(gpu):
    with Ring.create(256) as first, Ring.create(256) as second:
        trainings = [Training(gpu, ring) for ring in (first, second)]
        for training in trainings:
            training.step()
        gpu.passes(71 * MS)
        for training in trainings:
            training.recorder.record_ended()
        trainings[0].recorder.wanted()
        trainings[0].backward()
        timeline = Timeline([Reader(ring.descriptor) for ring in (first, second)])
        gpu.passes(60_000 * MS)
        timeline.update(gpu.now)
        finding = stuck(timeline.snapshot(now=gpu.now))
        assert finding is not None
        assert finding.replica_id == 1


@pytest.mark.parametrize("blocking", [False, True])
def test_what_is_hidden_and_exposed_is_so_on_the_gpu(gpu, ring, blocking):
    training = Training(gpu, ring)
    training.step(blocking=blocking)
    gpu.passes(44 * MS)
    training.step(blocking=blocking)
    timeline = Timeline([Reader(ring.descriptor)])
    timeline.update(gpu.now)
    seen = timeline.snapshot(now=gpu.now)
    exposed = 12 if blocking else 4
    parts = {"data": 0, "forward": 10, "backward": 20, "exposed": exposed, "optimizer": 2, "other": 0}
    assert dict(zip(BREAKDOWN, seen.breakdown[0] * 1e3, strict=True)) == pytest.approx(parts, abs=1e-2)
    assert seen.step == 2
    # Of the second step the GPU has told nothing yet.
    assert seen.lane_step == 1
    assert seen.hidden == pytest.approx(0 if blocking else 8 / 12, abs=1e-3)
    assert seen.exposed == pytest.approx(exposed / (32 + exposed), abs=1e-3)
    arrays = timeline.arrays()
    assert list(arrays["step"]) == [1, 2]
    assert arrays["forward"][0] == pytest.approx([0.01, float("nan")], abs=1e-5, nan_ok=True)


def test_steps_without_a_dataset_last_from_one_optimizers_step_to_the_next(gpu, ring):
    training = Training(gpu, ring)
    for _ in range(2):
        gpu.enqueue(10 * MS)
        training.backward()
        training.recorder.optimizer_begun()
        gpu.enqueue(2 * MS)
        training.recorder.optimizer_ended()
    gpu.passes(100 * MS)
    training.recorder.end()
    expected = {"forward": 10, "backward": 20, "optimizer": 2, "gpu_step": 36}
    assert lengths(read(ring), 2) == pytest.approx(expected, abs=1e-2)


def test_a_step_that_the_user_ends_is_timed_too(gpu, ring):
    training = Training(gpu, ring)
    training.backward()
    training.recorder.told(8)
    gpu.passes(100 * MS)
    training.recorder.end()
    expected = {"forward": 0, "backward": 20, "gpu_step": 24}
    assert lengths(read(ring), 1) == pytest.approx(expected, abs=1e-2)


def test_what_goes_into_a_graph_of_cudas_has_no_times(gpu, ring):
    training = Training(gpu, ring)
    gpu.capturing = True
    training.step()
    training.recorder.end()
    assert not [s for s in read(ring) if s.kind in PARTS]
    timeline = Timeline([Reader(ring.descriptor)])
    timeline.update(gpu.now)
    seen = timeline.snapshot(now=gpu.now)
    assert (seen.step, seen.exposed, seen.hidden) == (1, None, None)


def test_of_a_step_without_an_end_little_is_kept_back(gpu, ring):
    recorder = Training(gpu, ring).recorder
    for _ in range(gpu_steps.AT_ONCE + 10):
        recorder.wanted()
        recorder.arrived(4)
    assert len([s for s in read(ring) if s.kind is Kind.DATA]) >= gpu_steps.AT_ONCE


def test_replicas_that_begin_anew_write_nothing_of_what_was_under_way(gpu, ring):
    training = Training(gpu, ring)
    training.step()
    training.recorder.begin_generation(1, 0)
    training.under_way.clear()
    training.step()
    gpu.passes(200 * MS)
    training.recorder.end()
    found = read(ring)
    assert [s.kind for s in found if s.kind in PARTS] == list(PARTS)


@pytest.mark.gpu
def test_a_real_gpu_tells_when_it_computed_the_parts_of_a_step(ring):
    torch.cuda.init()
    recorder = Recorder(torch.device("cuda:0"))
    recorder.open(Writer(ring.descriptor))

    def step() -> None:
        # 20 million cycles are some 10 ms.
        recorder.wanted()
        recorder.arrived(4)
        torch.cuda._sleep(20_000_000)
        recorder.backward_begun()
        torch.cuda._sleep(40_000_000)
        recorder.backward_computed()
        recorder.optimizer_begun()
        torch.cuda._sleep(20_000_000)
        recorder.optimizer_ended()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    recorder.end()
    found = read(ring)
    for number in (2, 3):
        its = lengths(found, number)
        assert its["data"] < 2 < its["forward"]
        assert its["backward"] == pytest.approx(2 * its["forward"], rel=0.2)
        assert its["gpu_step"] == pytest.approx(sum(its[name] for name in its if name != "gpu_step"), rel=0.1)
