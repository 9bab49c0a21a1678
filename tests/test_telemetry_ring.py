"""Rings: what one process writes, another reads, whatever becomes of the writer."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from made_rings import MadeRings

from mirror_nb.errors import UsageError
from mirror_nb.telemetry import ring as ring_module
from mirror_nb.telemetry.ring import NAME_BYTES, NAMES, OVERALL, Reader, Ring, Writer
from mirror_nb.telemetry.samples import BLOCKING, DTYPE, RECORD, Kind, Mark, Operation, clock, decode

DEADLINE = 60.0
# Seconds that a child of a test may take.


@pytest.fixture
def ring():
    with Ring.create(64) as made:
        yield made


def child(ring: Ring, body: str) -> subprocess.Popen[str]:
    """Run `body` in a process that was given the ring's descriptor, with `writer` on it."""
    head = "import sys\nfrom mirror_nb.telemetry.ring import Writer\nfrom mirror_nb.telemetry.samples import *\n"
    code = f"{head}writer = Writer({ring.descriptor})\n{body}"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        pass_fds=[ring.descriptor],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_what_is_written_is_read_once_and_in_order(ring):
    writer, reader = Writer(ring.descriptor), Reader(ring.descriptor)
    writer.step_begun(7, 100)
    writer.span(Kind.FORWARD, 7, 110, 120)
    writer.collective(Operation.ALL_REDUCE, 7, 3, 1 << 20, 5 << 32, 130, 140, 150, blocking=True)
    writer.scalar("loss", 0.5, 7, at=155)
    writer.memory(7, 1000, 2000, at=160)
    writer.step_ended(7, 64, 100, 170)
    writer.checksums(7, {"weight": -1}, at=180)
    writer.mark(Mark.EPOCH, 7, 2)
    begun, forward, collective, scalar, memory, ended, checksum, overall, mark = decode(reader.read())
    assert (begun.kind, begun.step, begun.began) == (Kind.STEP_BEGUN, 7, 100)
    assert (forward.kind, forward.began, forward.ended) == (Kind.FORWARD, 110, 120)
    assert (collective.code, collective.number, collective.amount) == (Operation.ALL_REDUCE | BLOCKING, 3, 1 << 20)
    assert (collective.serial, collective.queued, collective.began, collective.ended) == (5 << 32, 130, 140, 150)
    assert (scalar.value, scalar.began, reader.names()[scalar.number]) == (0.5, 155, "loss")
    assert (memory.amount, memory.queued) == (1000, 2000)
    assert (ended.amount, ended.ended) == (64, 170)
    assert (checksum.amount, reader.names()[checksum.number]) == ((1 << 63) - 1, "weight")
    assert overall.number == OVERALL
    assert (mark.code, mark.amount) == (Mark.EPOCH, 2)
    assert 0 < mark.began <= clock()
    assert len(reader.read()) == 0
    assert (reader.overwritten, reader.torn) == (0, 0)


def test_a_record_is_64_bytes_and_its_sequence_number_lies_last():
    assert RECORD.size == DTYPE.itemsize == 64
    assert DTYPE.fields["sequence"][1] == 56


def test_a_full_ring_loses_its_oldest_records_and_counts_them(ring):
    writer, reader = Writer(ring.descriptor), Reader(ring.descriptor)
    for step in range(1, 201):
        writer.step_begun(step, step)
    rows = reader.read()
    # One place is never trusted: the writer may be in it.
    assert rows["step"].tolist() == list(range(200 - 62, 201))
    assert reader.overwritten == 200 - 63
    writer.step_begun(201, 201)
    assert reader.read()["step"].tolist() == [201]
    assert reader.overwritten == 200 - 63


def test_a_reader_that_comes_late_still_gets_what_is_there(ring):
    writer = Writer(ring.descriptor)
    writer.step_begun(1, 1)
    assert Reader(ring.descriptor).read()["step"].tolist() == [1]


def test_a_dead_replicas_last_samples_are_read(ring):
    process = child(ring, "writer.step_begun(41, 1)\nprint('there', flush=True)\nsys.stdin.read()")
    with process:
        assert process.stdout.readline() == "there\n"
        process.kill()
        process.wait(DEADLINE)
    assert Reader(ring.descriptor).read()["step"].tolist() == [41]


def test_no_record_is_torn_while_another_process_overwrites_the_ring():
    total = 200_000
    body = f"for i in range(1, {total} + 1):\n    writer.span(Kind.FORWARD, i, i, i)\nprint('done', flush=True)"
    with Ring.create(256) as ring, child(ring, body) as process:
        reader, seen = Reader(ring.descriptor), []
        while process.poll() is None:
            seen.append(reader.read())
        process.wait(DEADLINE)
        seen.extend([reader.read(), reader.read()])
        rows = np.concatenate(seen)
        assert process.returncode == 0
        assert (rows["began"] == rows["step"]).all()
        assert (rows["ended"] == rows["step"]).all()
        assert (rows["sequence"] == rows["step"]).all()
        assert (np.diff(rows["step"]) > 0).all()
        assert len(rows) + reader.overwritten + reader.torn == total
        assert len(rows) > 256


def test_threads_of_a_replica_write_without_losing_records():
    with Ring.create(8192) as ring:
        writer, reader = Writer(ring.descriptor), Reader(ring.descriptor)

        def write(thread: int) -> None:
            for i in range(1000):
                writer.span(Kind.FORWARD, thread * 1000 + i, 1, 2)

        threads = [threading.Thread(target=write, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
        assert sorted(reader.read()["step"].tolist()) == list(range(4000))


def test_a_record_whose_thread_is_behind_is_waited_for_once(ring):
    writer, reader = Writer(ring.descriptor), Reader(ring.descriptor)
    writer.step_begun(1, 1)
    behind = next(writer._sequence)
    writer.step_begun(3, 3)
    assert reader.read()["step"].tolist() == [1]
    place = ring_module._RECORDS_AT + behind % 64 * 64
    RECORD.pack_into(writer._memory, place, Kind.STEP_BEGUN, 0, 0, 2, 0, 0, 2, 0, 0.0, behind)
    assert reader.read()["step"].tolist() == [2, 3]
    assert reader.torn == 0


def test_a_record_that_was_interrupted_is_dropped_and_counted(ring):
    writer, reader = Writer(ring.descriptor), Reader(ring.descriptor)
    next(writer._sequence)
    writer.step_begun(2, 2)
    assert reader.read()["step"].tolist() == []
    assert reader.read()["step"].tolist() == [2]
    assert (reader.torn, reader.overwritten) == (1, 0)


def test_where_stores_may_be_seen_out_of_order_the_newest_record_waits(ring, monkeypatch):
    monkeypatch.setattr(ring_module, "_ORDERED", False)
    writer, reader = Writer(ring.descriptor), Reader(ring.descriptor)
    writer.step_begun(1, 1)
    writer.step_begun(2, 2)
    assert reader.read()["step"].tolist() == [1]
    assert reader.read()["step"].tolist() == [2]
    assert reader.read()["step"].tolist() == []


def test_a_replica_that_takes_a_ring_over_goes_on_after_a_mark(ring):
    first, reader = Writer(ring.descriptor), Reader(ring.descriptor)
    first.scalar("loss", 1.0, 1)
    first.close()
    second = Writer(ring.descriptor)
    second.scalar("loss", 2.0, 2)
    second.scalar("accuracy", 0.5, 2)
    loss, mark, again, accuracy = decode(reader.read())
    assert (mark.kind, mark.code) == (Kind.MARK, Mark.RESTARTED)
    assert loss.number == again.number == 0
    assert reader.names() == ("loss", "accuracy")
    assert accuracy.number == 1


def test_the_descriptor_may_be_closed_once_a_ring_is_open():
    ring = Ring.create(8)
    writer, reader = Writer(ring.descriptor), Reader(ring.descriptor)
    ring.close()
    ring.close()
    writer.step_begun(1, 1)
    assert len(reader.read()) == 1
    writer.close()
    reader.close()


def test_the_controller_cannot_write_into_a_ring(ring):
    reader = Reader(ring.descriptor)
    assert not reader._records.flags.writeable


def test_made_rings_leave_no_descriptor_open():
    before = len(os.listdir("/proc/self/fd"))
    with MadeRings(2) as made:
        made.step(3)
        made.timeline.update()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("capacity", [0, 4, 100, -8])
def test_a_capacity_that_is_no_power_of_two_is_refused(capacity):
    with pytest.raises(UsageError, match=f"`capacity` is {capacity}; it must be a power of two"):
        Ring.create(capacity)


@pytest.mark.parametrize("make", [Writer, Reader])
def test_a_descriptor_that_is_no_ring_is_refused(make, tmp_path):
    with pytest.raises(UsageError, match="descriptor -1 is no telemetry ring"):
        make(-1)
    path = tmp_path / "file"
    path.write_bytes(b"x" * 4096)
    with path.open("r+b") as file, pytest.raises(UsageError, match=r"no telemetry ring of this version.*Ring\.create"):
        make(file.fileno())


def test_names_are_interned_up_to_a_limit_that_the_error_tells(ring):
    writer, reader = Writer(ring.descriptor), Reader(ring.descriptor)
    with pytest.raises(UsageError, match=f"has {NAME_BYTES + 1} bytes; at most {NAME_BYTES}"):
        writer.scalar("x" * (NAME_BYTES + 1), 0.0, 1)
    names = ["é" * (NAME_BYTES // 2), *(f"loss of layer {i}" for i in range(1, NAMES))]
    for name in names:
        writer.scalar(name, 0.0, 1)
    assert list(reader.names()) == names
    with pytest.raises(UsageError, match=rf"'another' would be name number {NAMES + 1}; a ring keeps {NAMES}: log"):
        writer.scalar("another", 0.0, 1)


def test_of_a_name_that_is_too_long_the_end_is_known_and_of_one_too_many_nothing(ring):
    writer, reader = Writer(ring.descriptor), Reader(ring.descriptor)
    assert writer.known_as("loss") == "loss"
    long = writer.known_as("x" * NAME_BYTES + "accuracy")
    assert long is not None
    assert long.endswith("xaccuracy")
    for i in range(2, NAMES):
        assert writer.known_as(f"of part {i}") == f"of part {i}"
    assert writer.known_as("another") is None
    assert writer.known_as("loss") == "loss"
    writer.scalar(long, 0.0, 1)
    assert len(reader.names()) == NAMES


@pytest.fixture
def hasty_threads():
    """Python goes from thread to thread as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_names_that_several_threads_log_first_at_once_are_not_mixed_up(hasty_threads):
    def log(writer: Writer, thread: int, together: threading.Barrier) -> None:
        together.wait()
        for i in range(100):
            writer.scalar(f"{100 * thread + i}", 100 * thread + i, 1)

    for _ in range(20):
        with Ring.create(512) as ring:
            writer, reader, together = Writer(ring.descriptor), Reader(ring.descriptor), threading.Barrier(4)
        threads = [threading.Thread(target=log, args=(writer, thread, together)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rows, names = reader.read(), reader.names()
        told = {names[number]: value for number, value in zip(rows["number"], rows["value"], strict=True)}
        assert told == {str(i): i for i in range(400)}


def test_a_ring_needs_no_memfd(monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    with Ring.create(8) as ring:
        Writer(ring.descriptor).step_begun(3, clock())
        reader = Reader(ring.descriptor)
        steps = reader.read()["step"].tolist()
        reader.close()
    assert steps == [3]
