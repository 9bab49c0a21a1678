"""Timelines: the numbers of the dashboard, checked against what was put into made rings."""

from __future__ import annotations

import dataclasses
import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_rings import KB, MB, MadeRings

from mirror_nb.errors import UsageError
from mirror_nb.telemetry import timeline as timeline_module
from mirror_nb.telemetry.findings import stuck
from mirror_nb.telemetry.ring import NAMES, REST, Reader
from mirror_nb.telemetry.samples import Kind, Mark, Operation
from mirror_nb.telemetry.snapshot import BREAKDOWN, Half, Snapshot, State
from mirror_nb.telemetry.tables import Cover
from mirror_nb.telemetry.timeline import POINTS, Timeline

S = 1e-9


def snapshot(made: MadeRings, steps: int = 240) -> Snapshot:
    made.timeline.update(now=made.now)
    return made.timeline.snapshot(steps, now=made.now)


def part(of: Snapshot, name: str) -> np.ndarray:
    return of.breakdown[:, BREAKDOWN.index(name)] * 1e3


@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_throughput_is_that_of_the_wall_clock(replicas):
    with MadeRings(replicas) as made:
        made.step()
        began = made.now
        made.step(49)
        seen = snapshot(made)
        assert seen.throughput == pytest.approx(49 * 64 * replicas / ((made.now - began) * S))
        assert seen.step_seconds == pytest.approx((made.now - began) * S / 49)
        assert (seen.examples, seen.step) == (50 * 64 * replicas, 50)


def test_a_single_step_has_a_throughput():
    with MadeRings(2) as made:
        began = made.now
        made.step()
        assert snapshot(made).throughput == pytest.approx(2 * 64 / ((made.now - began) * S))


def test_a_step_of_replicas_that_are_read_one_after_the_other_is_one_of_all():
    with MadeRings(2) as made:
        began, ended = made.now, made.now + 50_000_000
        made.now = ended
        for writer in made.writers:
            writer.step_begun(1, began)
            writer.step_ended(1, 8, began, ended)
            made.timeline.update(now=ended)
        assert snapshot(made).throughput == pytest.approx(16 / 0.05)


def test_throughput_of_a_replica_leaves_waits_out_so_that_a_straggler_shows():
    # Buckets that take no time: with larger ones, those that a straggler made late are hidden by nothing any more.
    with MadeRings(4, jitter=0, data=5, latency=0, buckets=[4] * 4) as made:
        made.slowness[2] = 1.5
        made.step(60)
        seen = snapshot(made)
        fast, slow = 64 / 0.063, 64 / 0.093
        assert seen.throughputs[:, -1] == pytest.approx([fast, fast, slow, fast], rel=1e-3)
        assert [state.throughput for state in seen.replicas] == pytest.approx([fast, fast, slow, fast], rel=1e-3)
        # By the wall clock they are all equally fast.
        assert [state.step_seconds for state in seen.replicas] == pytest.approx([0.098] * 4, rel=1e-3)


def test_where_a_step_goes_adds_up_to_the_step():
    with MadeRings(2, jitter=0, data=5, overlap=False, buckets=[20 * MB, 20 * MB]) as made:
        made.step(60)
        seen = snapshot(made)
        own = 2 * (20 * MB / 20e9 * 1e3 + 0.02)
        for name, length in {"data": 5, "forward": 20, "backward": 40, "exposed": own, "optimizer": 3}.items():
            assert part(seen, name) == pytest.approx([length] * 2, rel=1e-3), name
        assert part(seen, "other") == pytest.approx([0, 0], abs=1e-3)
        assert seen.breakdown.sum(axis=1) == pytest.approx([state.step_seconds for state in seen.replicas])
        assert seen.exposed == pytest.approx(own / (68 + own), rel=1e-3)
        assert seen.hidden == 0


def test_collectives_beside_the_backward_pass_are_hidden():
    with MadeRings(2, jitter=0, buckets=[20 * MB, 4], latency=0) as made:
        made.step(60)
        seen = snapshot(made)
        assert part(seen, "exposed") == pytest.approx([0, 0], abs=1e-3)
        assert seen.hidden == pytest.approx(1, abs=1e-3)


def test_blocking_collectives_hold_computing_up_wherever_they_lie():
    with MadeRings(2, jitter=0, buckets=[10 * MB], latency=0) as made:
        writer_times = (0, 10, 50, 60)
        for writer in made.writers:
            began, collective, done, ended = (made.now + t * 1_000_000 for t in writer_times)
            writer.step_begun(1, began)
            writer.collective(
                Operation.ALL_REDUCE, 1, 0, MB, 0, collective, collective, collective + 8_000_000, blocking=True
            )
            writer.span(Kind.BACKWARD, 1, began, done)
            writer.step_ended(1, 8, began, ended)
        made.now = ended
        seen = snapshot(made)
        assert part(seen, "exposed") == pytest.approx([8, 8])
        assert part(seen, "backward") == pytest.approx([42, 42])
        assert part(seen, "other") == pytest.approx([10, 10])
        assert seen.hidden == 0


def test_who_arrives_late_is_told_for_each_step():
    with MadeRings(4) as made:
        made.step(30)
        made.slowness[1] = 1.3
        made.step(30)
        seen = snapshot(made)
        assert seen.late_steps.tolist() == list(range(1, 61))
        assert pytest.approx(np.array(made.lateness)) == seen.lateness.T * 1e3


def test_waits_for_peers_are_what_the_fast_ones_lose():
    with MadeRings(3, jitter=0, latency=0) as made:
        made.slowness[0] = 1.2
        made.step(60)
        # Forward and backward take 12 ms more on replica 0.
        assert snapshot(made).waits * 1e3 == pytest.approx([0, 12, 12], abs=0.01)


@pytest.mark.parametrize("replicas", [2, 4])
def test_all_reduce_times_and_bandwidths_are_those_of_nccl_tests(replicas):
    with MadeRings(replicas, latency=0, buckets=[64 * KB, 64 * KB, 25 * MB], jitter=0.02) as made:
        made.step(100)
        small, large = snapshot(made).all_reduces
        assert (small.size, small.count, small.per_step) == (64 * KB, 200, 2.0)
        assert (large.size, large.count, large.per_step) == (25 * MB, 100, 1.0)
        traffic = 2 * (replicas - 1) / replicas
        for seen in (small, large):
            assert seen.p50 == pytest.approx(seen.size * traffic / 20e9, rel=0.02)
            assert seen.p50 < seen.p95 < seen.p50 * 1.1
            assert seen.bus_bandwidth == pytest.approx(20e9, rel=0.02)
        assert len(large.seconds) == 100


def test_a_pause_is_no_slowness():
    with MadeRings(2, jitter=0) as made:
        made.mark(Mark.RUNNING)
        made.step(20)
        before = snapshot(made).throughput
        made.pause(30.0)
        made.step(20)
        assert snapshot(made).throughput == pytest.approx(before)
        made.mark(Mark.PAUSED)
        made.now += 10**9
        seen = snapshot(made)
        assert [state.state for state in seen.replicas] == [State.PAUSED] * 2
        made.mark(Mark.STOPPED)
        assert snapshot(made).replicas[0].state is State.STOPPED


def test_a_stuck_replica_is_seen_up_to_its_last_sample():
    with MadeRings(3) as made:
        made.step(10)
        made.stall(1, seconds=12.0)
        seen = snapshot(made)
        assert [state.in_collective is None for state in seen.replicas] == [False, True, False]
        assert seen.replicas[0].in_collective.seconds == pytest.approx(12.0)
        assert seen.replicas[0].in_collective.operation == Operation.ALL_REDUCE
        assert seen.replicas[1].silent == pytest.approx(12.02)
        assert seen.step == 10
        assert seen.throughput is not None


def test_a_step_that_a_replica_died_in_counts_once():
    with MadeRings(3, jitter=0) as made:
        made.step(10)
        made.die(1, seconds=2.0)
        made.step(10)
        seen = snapshot(made)
        assert [state.restarts for state in seen.replicas] == [0, 1, 0]
        assert all(state.in_collective is None for state in seen.replicas)
        assert seen.examples == 3 * 20 * 64
        assert part(seen, "forward") == pytest.approx([20] * 3)


def test_a_replica_that_was_started_anew_is_seen_in_the_collective_that_it_has_come_to_since():
    with MadeRings(3, jitter=0) as made:
        made.step(10)
        made.die(1, seconds=2.0)
        made.stall(0, seconds=12.0)
        assert snapshot(made).replicas[1].in_collective.seconds == pytest.approx(12.0)


def test_a_loop_that_follows_a_training_with_a_plan_has_none_of_its_epochs_and_no_time_left():
    with MadeRings(2) as made:
        made.mark(Mark.EPOCH, 3)
        made.mark(Mark.PLANNED, 20)
        made.step(20)
        seen = snapshot(made)
        assert (seen.epoch, seen.steps_planned, seen.seconds_left) == (3, 20, 0.0)
        made.step(5)
        seen = snapshot(made)
        assert (seen.epoch, seen.steps_planned, seen.seconds_left) == (None, None, None)
        made.now += 1
        made.mark(Mark.EPOCH, 1)
        assert snapshot(made).epoch == 1


def test_a_replica_that_has_died_in_a_collective_is_not_said_to_wait_for_those_that_were_freed():
    with MadeRings(2, jitter=0) as made:
        made.step(30)
        for writer in made.writers:
            writer.collective(Operation.ALL_REDUCE, 31, 0, 1000, made.serial, made.now, made.now, 0)
        made.writers[0].collective_over(Operation.ALL_REDUCE, 31, 0, 1000, made.serial, made.now)
        made.now += 12_000_000_000
        seen = snapshot(made)
        assert [state.in_collective for state in seen.replicas] == [None, None]
        assert stuck(seen) is None


def test_what_a_replica_died_in_is_not_where_the_one_in_its_place_is():
    with MadeRings(2, jitter=0) as made:
        made.step(30)
        writer = made.writers[1]
        writer.collective(Operation.ALL_REDUCE, 31, 0, 1000, made.serial, made.now, made.now, 0)
        writer.mark(Mark.RESTARTED, 0, at=made.now)
        made.now += 12_000_000_000
        # Both are read at once.
        assert snapshot(made).replicas[1].in_collective is None


def test_samples_of_an_abandoned_step_are_left_out():
    with MadeRings(2, jitter=0, buckets=[MB]) as made:
        for writer in made.writers:
            writer.step_begun(1, made.now)
            writer.span(Kind.FORWARD, 1, made.now, made.now + 500_000_000)
            writer.collective(Operation.ALL_REDUCE, 1, 0, MB, 900, *[made.now + 500_000_000] * 2, made.now + 10**9)
        made.now += 3_000_000_000
        made.timeline.update(now=made.now)
        made.step(2)
        seen = snapshot(made)
        assert part(seen, "forward") == pytest.approx([20, 20])
        assert [size.count for size in seen.all_reduces] == [2]


def test_loss_is_the_mean_over_all_examples_and_the_range_over_replicas():
    with MadeRings(2) as made:
        made.examples = [30, 10]
        made.step()
        made.log("loss", [1.0, 2.0])
        made.step()
        made.step()
        made.log("loss", [0.5, math.nan])
        curve = snapshot(made).curves["loss"]
        assert curve.mean.tolist() == pytest.approx([1.25, math.nan, 0.5], nan_ok=True)
        assert curve.low.tolist() == pytest.approx([1.0, math.nan, 0.5], nan_ok=True)
        assert curve.high.tolist() == pytest.approx([2.0, math.nan, 0.5], nan_ok=True)
        assert curve.last == 0.5


def test_a_name_is_one_curve_whatever_its_number_on_each_replica():
    with MadeRings(2) as made:
        made.step()
        made.writers[0].scalar("accuracy", 0.5, 1)
        made.log("loss", [1.0, 3.0])
        assert snapshot(made).curves["loss"].last == 2.0


def test_a_loss_is_seen_before_the_next_step_has_ended():
    with MadeRings(1) as made:
        made.step()
        made.log("loss", [4.0])
        assert snapshot(made).curves["loss"].last == 4.0


def test_memory_and_its_peak():
    with MadeRings(2) as made:
        made.step()
        assert snapshot(made).replicas[0].allocated is None
        made.log_memory(3 * MB)
        made.log_memory(MB)
        state = snapshot(made).replicas[1]
        assert (state.allocated, state.reserved, state.peak) == (MB, MB + MB // 5, 3 * MB)


def test_parameters_are_in_sync_or_not_by_their_last_common_checksum():
    with MadeRings(2) as made:
        made.step()
        assert snapshot(made).in_sync is None
        made.log_checksums([77, 77])
        seen = snapshot(made)
        assert (seen.in_sync, seen.checked_step) == (True, 1)
        made.step()
        made.log_checksums([77, 78])
        made.writers[0].checksums(3, {"weight": 1})
        seen = snapshot(made)
        assert (seen.in_sync, seen.checked_step) == (False, 2)
        assert dict(seen.differing) == {"weight": (1,)}


def test_parameters_without_a_name_of_their_own_are_told_together():
    with MadeRings(3) as made:
        made.step()
        made.log_checksums([77, 77, 77], others=2 * NAMES)
        assert snapshot(made).in_sync
        made.step()
        made.log_checksums([77, 78, 77], others=2 * NAMES)
        assert dict(snapshot(made).differing) == {"weight": (1,)}
        for replica_id, writer in enumerate(made.writers):
            last = {f"layer{NAMES}.bias": int(replica_id == 2) + 9}
            writer.checksums(3, {f"layer{i}.bias": i for i in range(NAMES)} | last)
        made.log("loss", [1.0] * 3)
        seen = snapshot(made)
        assert dict(seen.differing) == {REST: (2,)}
        assert seen.curves["loss"].last == 1.0


def test_epoch_and_time_left_come_from_marks():
    with MadeRings(2, jitter=0) as made:
        made.mark(Mark.PLANNED, 100)
        made.mark(Mark.EPOCH, 3)
        made.step(40)
        seen = snapshot(made)
        assert (seen.epoch, seen.steps_planned) == (3, 100)
        assert seen.seconds_left == pytest.approx(60 * seen.step_seconds)


def test_a_timeline_without_samples_has_nothing_to_say():
    with MadeRings(2) as made:
        seen = snapshot(made)
        assert seen.step == 0
        assert (seen.throughput, seen.epoch, seen.seconds_left, seen.lane_step) == (None, None, None, None)
        assert [state.state for state in seen.replicas] == [State.WAITING] * 2
        assert seen.replicas[0].silent is None
        assert seen.all_reduces == ()
        assert made.timeline.arrays()["step"].size == 0


def test_a_timeline_needs_a_ring():
    with pytest.raises(UsageError, match="`readers` is empty"):
        Timeline([])


@pytest.mark.parametrize("blocking", [False, True])
def test_each_replicas_numbers_are_those_that_it_would_have_alone(blocking):
    with MadeRings(3, jitter=0.3, overlap=not blocking, blocking=blocking) as made:
        made.data[1] = 900.0
        alone = [Timeline([Reader(ring.descriptor)]) for ring in made.rings]
        for pause in (0.0, 3.0, 0.0):
            made.step(7)
            made.pause(pause)
            for timeline in (made.timeline, *alone):
                timeline.update(now=made.now)
        together = made.timeline.arrays()
        for replica_id, timeline in enumerate(alone):
            for name, values in timeline.arrays().items():
                if name not in ("step", "wait", "late"):
                    np.testing.assert_array_equal(values[0], together[name][replica_id], err_msg=name)


def test_reading_often_or_rarely_gives_the_same_numbers():
    with MadeRings(3) as often, MadeRings(3) as rarely:
        for made in (often, rarely):
            for _ in range(40):
                made.step()
                made.log_loss()
                if made is often:
                    made.timeline.update(now=made.now)
        one, other = snapshot(often), snapshot(rarely)
        for field in dataclasses.fields(Snapshot):
            first, second = getattr(one, field.name), getattr(other, field.name)
            np.testing.assert_equal(
                dataclasses.asdict(first[0]) if field.name == "replicas" else str(first),
                dataclasses.asdict(second[0]) if field.name == "replicas" else str(second),
            )
        for name, values in often.timeline.arrays().items():
            np.testing.assert_array_equal(values, rarely.timeline.arrays()[name])


def test_a_ring_that_ran_over_is_told_and_does_not_stop_the_timeline():
    with MadeRings(2, capacity=64) as made:
        made.step(100)
        seen = snapshot(made)
        assert seen.overwritten > 0
        assert seen.step == 100


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(timeline_module, "SAMPLES", 300)
    monkeypatch.setattr(timeline_module, "STEPS", 64)
    monkeypatch.setattr(timeline_module, "COLLECTIVES", 256)
    with MadeRings(2) as made:
        for _ in range(50):
            made.step(4)
            made.log_loss()
            made.timeline.update(now=made.now)
        assert 300 <= len(made.timeline.samples(0)) < 300 + 50
        arrays = made.timeline.arrays()
        assert arrays["step"].tolist() == list(range(137, 201))
        assert not np.isnan(arrays["forward"]).any()
        assert snapshot(made, steps=1000).examples == 2 * 200 * 64


def test_curves_have_no_more_points_than_a_screen_shows():
    with MadeRings(2, jitter=0) as made:
        for _ in range(10):
            made.step(100)
            made.timeline.update(now=made.now)
        seen = snapshot(made, steps=1000)
        assert POINTS / 2 < len(seen.steps) <= POINTS
        assert seen.steps[-1] == 1000
        assert seen.throughputs.shape == (2, len(seen.steps))
        assert seen.throughputs.std() < 1e-6 * seen.throughputs.mean()


def test_collectives_without_steps_are_seen_after_a_moment():
    with MadeRings(2) as made:
        for serial in range(10):
            for writer in made.writers:
                writer.collective(Operation.ALL_REDUCE, 0, 0, MB, serial, made.now, made.now, made.now + 1000)
        made.timeline.update(now=made.now)
        assert made.timeline.snapshot(now=made.now).all_reduces == ()
        made.now += 2 * 10**9
        assert snapshot(made).all_reduces[0].count == 10


def test_samples_without_any_length_are_no_harm():
    with MadeRings(2) as made:
        made.mark(Mark.RUNNING)
        made.now += 5 * 10**9
        assert snapshot(made).replicas[0].state is State.RUNNING
        made.step(3)
        assert snapshot(made).step == 3


def test_lanes_show_the_last_step():
    with MadeRings(2, jitter=0, latency=0, buckets=[20 * MB, 20 * MB]) as made:
        made.step(5)
        seen = snapshot(made)
        assert seen.lane_step == 5
        lane = [(bar.part, round(bar.began * 1e3, 2), round(bar.ended * 1e3, 2)) for bar in seen.lanes[0]]
        took = round(20 * MB / 20e9 * 1e3, 2)
        assert lane == [
            ("data", 0, 1),
            ("forward", 1, 21),
            ("backward", 21, 61),
            ("collective", 41, 41 + took),
            ("exposed", 61, 61 + took),
            ("optimizer", 61 + took, 64 + took),
        ]
        assert seen.hidden == pytest.approx(0.5)


def test_hundreds_of_small_collectives_are_a_few_bars():
    with MadeRings(2, buckets=[4 * KB] * 200, overlap=False, latency=0) as made:
        made.step(2)
        assert len(snapshot(made).lanes[0]) < 10


def test_a_data_frame_has_a_row_for_each_replica_and_step():
    pytest.importorskip("pandas")
    with MadeRings(2, jitter=0) as made:
        made.step(5)
        made.log("loss", [1.0, 2.0])
        made.timeline.update(now=made.now)
        frame = made.timeline.frame()
        assert frame.index.names == ["replica", "step"]
        assert len(frame) == 10
        assert frame.loc[(1, 5), "loss"] == 2.0
        assert frame.loc[(0, 3), "forward"] == pytest.approx(0.020)


def test_without_pandas_the_arrays_are_named_instead(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with MadeRings(1) as made, pytest.raises(UsageError, match=r"pip install pandas, or use arrays\(\)"):
        made.timeline.frame()


@pytest.mark.parametrize("half", Half)
def test_half_a_snapshot_is_new_and_the_other_half_is_that_of_the_earlier_one(half):
    with MadeRings(2) as made:
        made.step(30)
        made.log_loss()
        earlier = snapshot(made)
        made.slowness[1] = 2.0
        made.step(30)
        made.log_loss()
        whole = snapshot(made)
        seen = made.timeline.snapshot(now=made.now, half=half, earlier=earlier)
    for field in dataclasses.fields(Snapshot):
        kept = any(field.name in other.value for other in Half if other is not half)
        got, expected = getattr(seen, field.name), getattr(earlier if kept else whole, field.name)
        assert got is expected if kept else repr(got) == repr(expected), field.name
    assert seen.step == 60


def test_without_an_earlier_one_half_a_snapshot_is_whole():
    with MadeRings(2) as made:
        made.step(30)
        whole = snapshot(made)
        assert repr(made.timeline.snapshot(now=made.now, half=Half.COURSE)) == repr(whole)


def test_replicas_number_the_names_of_their_scalars_each_by_itself():
    with MadeRings(2) as made:
        made.step(5)
        made.writers[0].scalar("loss", 1.0, 5, at=made.now)
        made.writers[0].scalar("accuracy", 0.5, 5, at=made.now)
        made.writers[1].scalar("accuracy", 0.7, 5, at=made.now)
        made.writers[1].scalar("loss", 3.0, 5, at=made.now)
        curves = snapshot(made).curves
        assert {name: curve.last for name, curve in curves.items()} == pytest.approx({"loss": 2.0, "accuracy": 0.6})
        assert made.timeline.arrays()["loss"][:, -1].tolist() == [1.0, 3.0]


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=8)


@given(spans, spans)
def test_a_cover_counts_what_a_count_of_moments_would(cover, asked):
    began, ended = (np.array([f(a, b) for a, b in cover], np.int64) for f in (lambda a, b: a, lambda a, b: a + b))
    moments = {t for a, b in cover for t in range(a, a + b)}
    found = Cover(began, ended).within(
        np.array([a for a, _ in asked], np.int64), np.array([a + b for a, b in asked], np.int64)
    )
    assert found.tolist() == [len(moments & set(range(a, a + b))) for a, b in asked]
