"""Findings: each rule speaks on a made timeline that has the trouble, and is silent on one that has not."""

from __future__ import annotations

import dataclasses

import pytest
from made_rings import KB, MB, MadeRings

from mirror_nb.telemetry import findings as rules
from mirror_nb.telemetry.findings import AT_MOST, Finding, Weight, findings
from mirror_nb.telemetry.machine import Reading
from mirror_nb.telemetry.samples import Operation


def found(made: MadeRings, *readings: Reading) -> tuple[Finding, ...]:
    made.timeline.update(now=made.now)
    return findings(made.timeline.snapshot(now=made.now), readings)


def reading(**changed) -> Reading:
    cool = Reading("cuda:2", "Made GPU", 1, 0.98, 61, 80, 60.0, 640.0, 700.0, 1980.0, 1980.0, ())
    return dataclasses.replace(cool, **changed)


HOT = reading(temperature=83.0, clock_rate=1544.0, slowed=("too hot (software)",))


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_a_healthy_training_has_no_findings(replicas):
    with MadeRings(replicas, jitter=0.03) as made:
        made.step(100)
        made.log_checksums([5] * replicas)
        assert found(made, *[reading()] * 10) == ()


def test_a_training_that_began_has_no_findings_yet():
    with MadeRings(4, data=50, overlap=False) as made:
        assert found(made) == ()
        made.slowness[1] = 2.0
        made.step(10)
        assert found(made) == ()


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_a_slow_replica_is_named_with_its_excess_and_its_begin(replicas):
    with MadeRings(replicas, jitter=0.005) as made:
        made.step(60)
        made.slowness[1] = 1.2
        made.step(60)
        (finding,) = found(made)
        assert (finding.replica_id, finding.weight) == (1, Weight.SLOW)
        assert finding.title == "r1 is slow: +19 % time an example"
        assert finding.detail.startswith("since step 61; the others wait 1")
        assert finding.lost == pytest.approx(0.16, abs=0.01)


def test_a_slow_replica_is_named_where_no_examples_are_told_too():
    with MadeRings(2, examples=0) as made:
        made.slowness[1] = 1.5
        made.step(40)
        (finding,) = found(made)
        assert finding.title.endswith(" % time a step")
        assert finding.replica_id == 1


def test_a_replica_that_was_slow_once_is_not_named():
    with MadeRings(4) as made:
        made.step(40)
        made.slowness[1] = 3.0
        made.step(3)
        made.slowness[1] = 1.0
        made.step(40)
        assert found(made) == ()


def test_a_replica_with_more_examples_is_not_slow():
    with MadeRings(2) as made:
        made.examples = [64, 96]
        made.slowness[1] = 1.5
        made.step(60)
        assert found(made) == ()


def test_a_starved_loader_is_told_with_its_share():
    with MadeRings(2, data=20, jitter=0) as made:
        made.step(60)
        (finding,) = found(made)
        assert finding.title == "Data comes too slowly: 24 % of a step is spent waiting for it"
        assert finding.detail.startswith("all replicas, 20.0 ms a step: more loader workers")


def test_a_loader_of_one_replica_is_named():
    with MadeRings(2, jitter=0) as made:
        made.data[1] = 15
        made.step(60)
        finding = rules.starved(made.timeline.snapshot()) if made.timeline.update(made.now) else None
        assert (finding.replica_id, finding.detail[:4]) == (1, "r1, ")


def test_a_single_long_wait_for_data_is_not_told():
    with MadeRings(2) as made:
        made.step(59)
        made.data = [2000.0, 2000.0]
        made.step()
        assert found(made) == ()


def test_small_buckets_are_told_with_size_and_bandwidth():
    with MadeRings(4, buckets=[64 * KB] * 160, overlap=False) as made:
        made.step(60)
        finding = next(f for f in found(made) if "small" in f.title)
        assert finding.title == "160 small all-reduces a step"
        assert finding.detail == "mostly of 64 KiB, at 3.9 GB/s: larger buckets would cost less"


def test_small_buckets_that_cost_nothing_are_not_told():
    with MadeRings(4, buckets=[64 * KB] * 20) as made:
        made.step(60)
        assert found(made) == ()


def test_communication_that_nothing_hides_is_told():
    with MadeRings(2, overlap=False, buckets=[100 * MB] * 4) as made:
        made.step(60)
        (finding,) = found(made)
        assert finding.title == "25 % of a step is exposed communication, waits left out"
        assert finding.detail.startswith("0 % of all communication is hidden: larger batches")


def test_waiting_for_a_straggler_is_not_taken_for_communication():
    with MadeRings(2, overlap=False, buckets=[4 * KB]) as made:
        made.slowness[0] = 1.5
        made.step(60)
        assert [finding.replica_id for finding in found(made)] == [0]


def test_a_device_that_throttles_is_told_with_its_temperature():
    with MadeRings(2) as made:
        (finding,) = found(made, *[HOT] * 8, *[reading()] * 4)
        assert finding.title == "cuda:2 throttles"
        assert finding.detail == "too hot (software), at 83 °C, clock 22 % under its limit"


@pytest.mark.parametrize(
    "readings",
    [[HOT] * 4, [HOT] * 5 + [reading()] * 5, [reading(slowed=("power cap",), clock_rate=1500.0)] * 10],
    ids=["too few", "now and then", "a power cap"],
)
def test_a_device_that_may_be_well_is_not_said_to_throttle(readings):
    with MadeRings(2) as made:
        assert found(made, *readings) == ()


def test_who_did_not_come_to_a_collective_is_named():
    with MadeRings(4) as made:
        made.step(30)
        made.stall(2, seconds=12)
        finding, *_ = found(made)
        assert finding.weight is Weight.TROUBLE
        assert finding.title == "r2 did not come to the all-reduce that the others are in"
        assert finding.detail == "r0, r1 and r3 waiting for 12 s; r2 silent for 12 s"
        assert finding.replica_id == 2


def test_a_replica_that_never_came_is_said_to_have_written_nothing():
    with MadeRings(2, buckets=[MB]) as made:
        made.writers[0].step_begun(1, made.now)
        made.writers[0].collective(Operation.BARRIER, 1, 0, 0, 0, made.now, made.now, 0)
        made.now += 20 * 10**9
        (finding,) = found(made)
        assert finding.title == "r1 did not come to the barrier that the others are in"
        assert finding.detail == "r0 waiting for 20 s; r1 never wrote a sample"


def test_a_wait_of_some_steps_is_not_called_stuck():
    with MadeRings(4) as made:
        made.step(30)
        made.stall(2, seconds=3)
        assert found(made) == ()


def test_a_slow_collective_that_all_are_in_is_not_called_stuck():
    with MadeRings(2) as made:
        made.step(30)
        made.stall(-1, seconds=30)
        assert found(made) == ()


def test_parameters_that_differ_are_trouble():
    with MadeRings(2) as made:
        made.step(30)
        made.log_checksums([1, 2])
        (finding,) = found(made)
        assert (finding.weight, finding.title) == (Weight.TROUBLE, "weight differs on r1")
        assert "step 30" in finding.detail


def test_at_most_three_are_told_trouble_first():
    with MadeRings(2, overlap=False, buckets=[64 * KB] * 200 + [100 * MB] * 4, data=30) as made:
        made.slowness[1] = 1.5
        made.step(60)
        made.log_checksums([1, 2])
        told = found(made, *[HOT] * 10)
        assert len(told) == AT_MOST
        assert told[0].title == "weight differs on r1"
        assert [f.weight for f in told] == sorted((f.weight for f in told), reverse=True)
        assert told[1].lost >= told[2].lost


def test_more_replicas_than_cores_are_told():
    host = reading(device="host", name="2 CPUs", cores=2)
    with MadeRings(4) as made:
        made.step(30)
        (finding,) = found(made, host, *[reading(device=f"cpu:{r}") for r in range(4)])
        assert (finding.title, finding.weight) == ("4 replicas share 2 cores", Weight.HINT)
        assert found(made, dataclasses.replace(host, cores=4), *[reading(device=f"cpu:{r}") for r in range(4)]) == ()
        assert found(made, host, *[reading(device=f"cuda:{r}") for r in range(4)]) == ()


def test_much_exposed_communication_is_told_and_how_much_of_it_is_waiting():
    with MadeRings(2, jitter=0, data=0, buckets=[4 * KB]) as made:
        # In turns: neither is slow throughout.
        for step in range(60):
            made.slowness = [3.0, 1.0] if step % 2 else [1.0, 3.0]
            made.step()
        (finding,) = found(made)
        assert finding.title == "100 % of the exposed communication is waiting for peers"
        assert finding.detail.startswith("now for one and now for another")
        assert finding.replica_id is None


def test_much_exposed_communication_is_told_though_more_is_hidden():
    with MadeRings(2, jitter=0, buckets=[100 * MB] * 14) as made:
        made.step(60)
        shot = made.timeline.snapshot() if made.timeline.update(made.now) else None
        assert shot.hidden > 0.5
        assert "exposed communication, waits left out" in findings(shot)[0].title


def test_a_replica_that_is_slow_at_no_cost_to_the_others_is_not_named():
    with MadeRings(2, data=0, forward=0.05, backward=0.05, optimizer=0.01, buckets=[4 * KB], latency=0.001) as made:
        made.slowness[1] = 1.3
        made.step(60)
        # They wait 0.03 ms a step for it: the system's turns are longer.
        assert found(made) == ()


def test_taking_a_batch_from_memory_is_not_called_a_slow_loader():
    with MadeRings(2, jitter=0, data=0.1, forward=0.2, backward=0.2, optimizer=0.1) as made:
        made.step(60)
        assert rules.starved(made.timeline.snapshot()) is None


def test_time_between_steps_is_told():
    with MadeRings(2, jitter=0) as made:
        for _ in range(60):
            made.step()
            made.now += 100 * 10**6
        (finding,) = found(made)
        assert finding.title == "61 % of the time passes between steps"
        assert finding.detail.startswith("100 ms a step, which no panel shows")


def test_only_a_slow_or_a_stuck_replica_keeps_the_others_waiting():
    with MadeRings(2) as made:
        made.step(30)
        made.log_checksums([1, 2])
        (differs,) = found(made)
        made.slowness[1] = 1.5
        made.step(60)
        slow = next(finding for finding in found(made) if "slow" in finding.title)
    assert (differs.replica_id, differs.awaited) == (1, False)
    assert (slow.replica_id, slow.awaited) == (1, True)
