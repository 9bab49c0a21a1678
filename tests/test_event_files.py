"""TensorBoard in notebook and replicas: one writer, one file, and everything in it once."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driving import running
from IPython.core.interactiveshell import InteractiveShell

import mirror_nb as mnb
from mirror_nb import event_files
from mirror_nb.event_files import EventFiles, HandedOn, Written
from mirror_nb.transfer.opening import unpack
from mirror_nb.transfer.packing import pack

pytest.importorskip("tensorboard")

Run = Callable[[str], Any]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard reads in a folder, by tag."""
    reader: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder))
    events.Reload()
    found = {tag: [(e.step, round(e.value, 3)) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    # TensorBoard reads files by their names, in which a process's tenth comes before its ninth of the same second.
    return {tag: sorted(found[tag], key=lambda event: event[0]) for tag in sorted(found)}


def files(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith("events.")]


@pytest.fixture
def run(shell: InteractiveShell, tmp_path: Path) -> Run:
    """Run a cell; the notebook has a folder `runs`."""
    run_cell = running(shell)
    run_cell(f"import torch\nfrom torch.utils.tensorboard import SummaryWriter\nruns = {str(tmp_path)!r}")
    return run_cell


# ---------------------------------------------------------------------- in a notebook


def test_a_writer_of_the_notebook_is_the_same_one_in_mirrored_cells(run, tmp_path):
    run("writer = SummaryWriter(runs + '/a')\nwriter.add_scalar('loss', -1.0, 0)")
    run("%%mirrored\nfor step in (1, 2): writer.add_scalar('loss', step + replica_id / 10, step)")
    assert scalars(tmp_path / "a") == {"loss": [(0, -1), (1, 1), (2, 2)]}
    run("%%mirrored\nwriter.close()")
    run("writer.add_scalar('loss', 9.0, 3)\nwriter.close()")
    assert scalars(tmp_path / "a") == {"loss": [(0, -1), (1, 1), (2, 2), (3, 9)]}
    assert len(files(tmp_path / "a")) == 1


def test_a_writer_that_the_notebook_has_closed_goes_on_in_its_folder(run, tmp_path):
    run("writer = SummaryWriter(runs + '/h')\nwriter.add_scalar('loss', 0.0, 0)")
    run("%%mirrored\nwriter.add_scalar('loss', 1.0, 1)")
    run("writer.close()")
    run("%%mirrored\nwriter.add_scalar('loss', 2.0, 2)\nwriter.add_scalar('loss', 3.0, 3)")
    run("writer.add_scalar('loss', 4.0, 4)\nwriter.close()")
    assert scalars(tmp_path / "h") == {"loss": [(step, step) for step in range(5)]}


def test_a_writer_of_a_mirrored_cell_is_there_in_the_next_ones(run, tmp_path):
    run("%%mirrored\nwriter = SummaryWriter(runs + '/b')\nwriter.add_scalar('loss', 1.0 + replica_id, 0)")
    assert run("type(writer).__name__") == "SummaryWriter"
    run("writer.add_scalar('loss', 5.0, 1)")
    run("%%mirrored\nwriter.add_scalar('loss', 7.0 + replica_id, 2)")
    assert scalars(tmp_path / "b") == {"loss": [(0, 1), (1, 5), (2, 7)]}
    assert len(files(tmp_path / "b")) == 1
    run("%%mirrored\nwriter.close()")
    run("writer.add_scalar('loss', 8.0, 3)\nwriter.close()\nwriter.add_scalar('loss', 9.0, 4)\nwriter.close()")
    assert scalars(tmp_path / "b")["loss"][-2:] == [(3, 8), (4, 9)]


def test_what_one_replica_alone_writes_is_kept(run, tmp_path):
    run(
        """%%mirrored
writer = SummaryWriter(runs + '/c')
for step in range(3):
    writer.add_scalar('all', replica_id, step)
    if replica_id == 1: writer.add_scalar('only', step, step)
writer.add_scalar('all', replica_id, 2)
with SummaryWriter(f'{runs}/own{replica_id}') as own: own.add_scalar('mine', replica_id, 0)
"""
    )
    assert scalars(tmp_path / "c") == {"all": [(0, 0), (1, 0), (2, 0), (2, 0)], "only": [(0, 0), (1, 1), (2, 2)]}
    assert [scalars(tmp_path / f"own{r}") for r in range(2)] == [{"mine": [(0, 0)]}, {"mine": [(0, 1)]}]


def test_a_replica_alone_writes_what_it_has(run, tmp_path):
    run("%%mirrored --replicas 1\nwith SummaryWriter(runs + '/d') as writer: writer.add_scalar('x', replica_id, 0)")
    assert scalars(tmp_path / "d") == {"x": [(0, 1)]}


def test_a_writer_of_one_replica_alone_is_opened_as_that_has_asked(run, tmp_path):
    run("%%mirrored\nif replica_id == 1: writer = SummaryWriter(runs + '/g', filename_suffix='.one')")
    run("%%mirrored\nif replica_id == 1: writer.add_scalar('x', 1.0, 0)")
    assert scalars(tmp_path / "g") == {"x": [(0, 1)]}
    assert [name[-4:] for name in files(tmp_path / "g")] == [".one"]


def test_folders_with_a_time_in_their_name_are_one(run, tmp_path):
    run("%%mirrored\nwriter = SummaryWriter(runs + '/e')\nwriter.add_hparams({'lr': 0.1}, {'accuracy': 0.5})")
    assert len([name for name in os.listdir(tmp_path / "e") if not name.startswith("events.")]) == 1


def test_images_and_graphs_arrive_too(run, tmp_path):
    run(
        """%%mirrored
writer = SummaryWriter(runs + '/f')
writer.add_image('picture', torch.rand(3, 8, 8), 0)
writer.add_graph(torch.nn.Linear(2, 1), torch.ones(1, 2))
writer.add_histogram('weights', torch.randn(20), 0)
writer.add_text('words', 'hello', 0)
"""
    )
    reader: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(tmp_path / "f"))
    events.Reload()
    tags = events.Tags()
    assert (tags["images"], tags["histograms"], tags["graph"]) == (["picture"], ["weights"], True)


def test_what_is_wrong_with_the_folder_is_said_at_the_line(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        run("%%mirrored\nSummaryWriter(runs + '/file/x')")


def test_processes_that_a_replica_starts_cannot_write(run):
    source = """%%mirrored
import os
writer = SummaryWriter(runs + '/g')
read, write = os.pipe()
if not os.fork():
    try:
        writer.add_scalar('x', 1.0, 0)
    except OSError as error:
        os.write(write, str(error).encode())
    os._exit(0)
os.wait()
said = os.read(read, 200)
"""
    run(source)
    assert b"log in the cell itself" in run("said")


# ---------------------------------------------------------------------- from plain Python


def test_a_function_writes_once(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))

    def step(at: int) -> None:
        writer.add_scalar("loss", float(mnb.get_replica_context().replica_id_in_sync_group), at)

    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        for at in range(3):
            strategy.run(step, args=(at,))
    assert scalars(tmp_path) == {"loss": [(0, 0), (1, 0), (2, 0)]}
    writer.close()


# ---------------------------------------------------------------------- who writes what


class Kept:
    """A writer that keeps the events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def add_event(self, event: Any) -> None:
        self.events.append(event.file_version)

    def flush(self) -> None:
        self.events.append("flush")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    writer = Kept()
    importlib.import_module(event_files._MODULE)
    monkeypatch.setitem(event_files._opened, "f", writer)
    return writer


def said(step: int, by: int, tag: str = "t") -> Written:
    protocol: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
    event = protocol.Event(file_version=f"{tag}{step} by {by}").SerializeToString()
    return Written("f", "", "event", event, (step, "summary", (tag,)))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_the_first_replicas_count_whoever_is_ahead(kept, order):
    writing = EventFiles((0, 1, 2))
    for replica_id in order:
        for step in (0, 1, 1):
            writing.take(replica_id, said(step, replica_id))
    writing.close()
    assert kept.events == ["t0 by 0", "t1 by 0", "t1 by 0", "flush"]
    assert not any(writing._ahead.values())


def test_what_the_first_has_not_written_the_next_one_does(kept):
    writing = EventFiles((3, 5, 7))
    for replica_id, steps in ((7, (0, 1, 2, 4)), (5, (0, 1, 1)), (3, (0, 1))):
        for step in steps:
            writing.take(replica_id, said(step, replica_id))
    writing.close()
    assert kept.events == ["t0 by 3", "t1 by 3", "t1 by 5", "t2 by 7", "t4 by 7", "flush"]


def test_a_full_disk_is_told_of_and_costs_nothing_else(kept, monkeypatch):
    def full(event: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(kept, "add_event", full)
    writing = EventFiles((0,))
    writing.take(0, said(0, 0))
    with pytest.warns(UserWarning, match="not all could be written .* No space left"):
        writing.close()


def test_a_writer_that_the_notebook_has_let_go_of_goes_on_in_its_folder(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(tmp_path))
    writer.add_scalar("x", 1.0, 0)
    writer.close()
    writer = SummaryWriter(str(tmp_path))
    writer._get_file_writer()
    handed = pack(writer.file_writer.event_writer)
    key = event_files.reduce_writer(writer.file_writer.event_writer)[1][1]  # type: ignore[index]
    assert unpack(handed.payload, None)[0] is writer.file_writer.event_writer
    writer.close()
    del writer
    stands = unpack(handed.payload, None)[0]
    assert type(stands) is HandedOn
    assert stands.get_logdir() == str(tmp_path)
    writing = EventFiles((0,))
    event = said(0, 0).event
    writing.take(0, Written(str(tmp_path), key, "event", event, (0, "summary", ("t",))))
    writing.close()
    assert str(tmp_path) in event_files._opened
    stands.close()
    assert str(tmp_path) not in event_files._opened
    with pytest.raises(OSError, match="closed"):
        stands.add_event(None)


def test_other_objects_are_none_of_these():
    class EventFileWriter:
        pass

    assert event_files.reduce_writer(EventFileWriter()) is None
    assert event_files.reduce_writer(torch.ones(1)) is None
