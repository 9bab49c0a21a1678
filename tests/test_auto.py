"""The op that measures: what it takes, what it keeps, and what it does not trust."""

from __future__ import annotations

import json
import os
import pickle
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from driving import eventually, run_cell

from mirror_nb.collectives import auto
from mirror_nb.collectives.auto import SIZES, AutoAllReduce, load, pick, save, surroundings
from mirror_nb.collectives.base import Member
from mirror_nb.collectives.gloo import GlooAllReduce
from mirror_nb.collectives.measuring import Trial
from mirror_nb.collectives.nccl import NcclAllReduce
from mirror_nb.collectives.options import chosen
from mirror_nb.collectives.shared_memory import SharedMemoryAllReduce
from mirror_nb.devices import Device
from mirror_nb.errors import UsageError
from mirror_nb.pool.local import LocalPool

CPUS = (Device("cpu", 0), Device("cpu", 1))
CANDIDATES = (SharedMemoryAllReduce(), GlooAllReduce())
WHAT = surroundings(Member(0, 2, torch.device("cpu"), object()), CANDIDATES)  # type: ignore[arg-type]
TIMES = {size: [(10.0, 1.0), (20.0, 2.0)] for size in SIZES}
# Gloo twice as slow everywhere.


# Which one


@pytest.mark.parametrize(
    ("times", "taken"),
    [
        ([(100.0, 5.0), (50.0, 5.0)], 1),
        # Not 10 % better.
        ([(100.0, 0.0), (91.0, 0.0)], 0),
        # Better by less than the default's times, or its own, spread.
        ([(100.0, 60.0), (50.0, 1.0)], 0),
        ([(100.0, 1.0), (50.0, 60.0)], 0),
        # The best of several.
        ([(100.0, 1.0), (50.0, 1.0), (40.0, 1.0)], 2),
        ([(100.0, 1.0)], 0),
    ],
)
def test_another_op_than_the_default_is_taken_only_where_it_is_surely_better(times, taken):
    assert pick(times) == taken


def test_auto_chooses_among_the_ops_that_fit_the_default_first():
    ops = chosen("auto", None, CPUS).ops
    assert isinstance(ops, AutoAllReduce)
    assert [type(part).__name__ for part in ops.parts()] == [
        "SharedMemoryAllReduce",
        "HierarchicalCopyAllReduce",
        "ReductionToOneDevice",
        "GlooAllReduce",
    ]
    assert ops.unfit_for(CPUS) is None
    assert AutoAllReduce([NcclAllReduce()]).unfit_for(CPUS) == "NcclAllReduce: it is for GPUs"
    with pytest.raises(UsageError, match="`candidates` is empty"):
        AutoAllReduce([])
    for wrong in (["gloo"], GlooAllReduce):
        with pytest.raises(
            UsageError, match=r"`candidates` holds .*; it takes cross-device ops, such as GlooAllReduce"
        ):
            AutoAllReduce(wrong)


def test_it_travels_without_what_was_decided():
    ops = AutoAllReduce(CANDIDATES, cache="/somewhere")
    ops._decided = (None, {})  # type: ignore[assignment]
    again = pickle.loads(pickle.dumps(ops))
    assert again._decided is None
    assert (again.cache, len(again.candidates)) == ("/somewhere", 2)


def test_it_says_what_it_chose(capsys, tmp_path):
    ops = AutoAllReduce(CANDIDATES, cache=tmp_path)
    assert repr(ops) == "<AutoAllReduce: the fastest of shared_memory, gloo>"
    ops._times = lambda member: TIMES  # type: ignore[method-assign]
    ops._member = Member(0, 2, torch.device("cpu"), object())  # type: ignore[arg-type]
    ops.choices()
    ops.choices()
    said = "auto chose shared_memory for all sizes: 25 MiB in 0.010 ms against 0.020 ms of gloo\n"
    assert capsys.readouterr().out == said
    assert repr(ops) == "<AutoAllReduce: shared_memory for all sizes>"
    other = AutoAllReduce(CANDIDATES)
    other._times = lambda member: {**TIMES, 2**12: [(20.0, 0.0), (10.0, 0.0)]}  # type: ignore[method-assign]
    other._member = ops._member
    other.choices()
    said = "auto chose gloo for 4 KiB, shared_memory for 64 KiB and 1 MiB and 4 MiB and 25 MiB: "
    assert capsys.readouterr().out.startswith(said)


def test_nothing_is_measured_where_there_is_nothing_to_choose_from(monkeypatch):
    monkeypatch.setattr(auto, "compare", lambda *args, **kwargs: pytest.fail("it measures"))
    ops = AutoAllReduce([GlooAllReduce()])
    ops._member = Member(0, 2, torch.device("cpu"), object())  # type: ignore[arg-type]
    assert ops.chosen(100) is ops.candidates[0]


def test_an_op_whose_sums_are_wrong_is_not_taken_and_measured_anew(capsys, tmp_path, monkeypatch):
    trials = {"0": Trial((20.0,), True), "1": Trial((1.0,), False)}
    monkeypatch.setattr(auto, "compare", lambda ops, numel, seconds: trials)
    ops = AutoAllReduce(CANDIDATES, cache=tmp_path)
    ops._member = Member(0, 2, torch.device("cpu"), object())  # type: ignore[arg-type]
    monkeypatch.setattr(AutoAllReduce, "broadcast", lambda self, tensor, source: None)
    ops.choices()
    assert capsys.readouterr().out == "auto chose shared_memory for all sizes; sums of gloo were wrong\n"
    assert list(tmp_path.iterdir()) == []


# The cache


def test_a_measurement_is_kept_for_the_user_alone(tmp_path: Path):
    folder = tmp_path / "below" / "mirror_nb"
    save(folder, WHAT, TIMES)
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert load(folder, WHAT) == TIMES


def test_it_is_kept_in_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert auto.cache_folder() == tmp_path / "mirror_nb"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert auto.cache_folder() == Path.home() / ".cache" / "mirror_nb"


def test_without_a_home_nothing_is_kept(monkeypatch):
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    folder = auto.cache_folder()
    save(folder, WHAT, TIMES)
    assert load(folder, WHAT) is None


def test_it_counts_for_the_same_surroundings_only(tmp_path):
    save(tmp_path, WHAT, TIMES)
    for name in ("machine", "cores", "torch", "replicas", "candidates", "threads", "format"):
        assert load(tmp_path, {**WHAT, name: "another"}) is None
    # A file under another's name does not help.
    (path,) = tmp_path.iterdir()
    other = {**WHAT, "replicas": 3}
    path.rename(auto._file(tmp_path, other))
    assert load(tmp_path, other) is None


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs /proc")
def test_the_machine_is_told_by_its_processor():
    assert WHAT["machine"] in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")


def _with(content: dict, size: str, pairs: object) -> str:
    return json.dumps({**content, "microseconds": {**content["microseconds"], size: pairs}})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[:50],
        lambda text: "[]",
        lambda text: "[" * 100_000,
        lambda text: "\xff\xfe",
        lambda text: _with(json.loads(text), "4096", [[1.0, 2.0]]),
        lambda text: _with(json.loads(text), "4096", [[1.0, float("nan")], [1.0, 1.0]]),
        lambda text: _with(json.loads(text), "4096", [[-1.0, 1.0], [1.0, 1.0]]),
        lambda text: _with(json.loads(text), "4096", [[10**400, 1.0], [1.0, 1.0]]),
        lambda text: _with(json.loads(text), "4096", "quick"),
        lambda text: json.dumps({"what": json.loads(text)["what"]}),
    ],
)
def test_a_spoilt_file_is_passed_over(tmp_path, spoil):
    save(tmp_path, WHAT, TIMES)
    (path,) = tmp_path.iterdir()
    path.write_text(spoil(path.read_text()), encoding="latin-1")
    assert load(tmp_path, WHAT) is None
    save(tmp_path, WHAT, TIMES)
    assert load(tmp_path, WHAT) == TIMES


def test_a_pipe_in_the_place_of_the_file_is_waited_for_by_nobody(tmp_path):
    save(tmp_path, WHAT, TIMES)
    (path,) = tmp_path.iterdir()
    path.unlink()
    os.mkfifo(path, 0o600)
    assert load(tmp_path, WHAT) is None
    save(tmp_path, WHAT, TIMES)
    assert load(tmp_path, WHAT) == TIMES


def test_a_file_that_others_may_write_or_a_link_is_passed_over(tmp_path):
    save(tmp_path, WHAT, TIMES)
    (path,) = tmp_path.iterdir()
    path.chmod(0o620)
    assert load(tmp_path, WHAT) is None
    path.chmod(0o600)
    moved = path.rename(tmp_path / "elsewhere")
    path.symlink_to(moved)
    assert load(tmp_path, WHAT) is None


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    save(tmp_path / "file" / "below", WHAT, TIMES)
    assert load(tmp_path / "file" / "below", WHAT) is None
    # What stands in the file's place stays there, and nothing else comes beside it.
    auto._file(tmp_path, WHAT).mkdir()
    before = set(tmp_path.iterdir())
    save(tmp_path, WHAT, TIMES)
    assert set(tmp_path.iterdir()) == before


# On replicas

CELL = """
import torch
strategy.cross_device_ops = ops
x = torch.full((1000,), replica_id + 1.0)
strategy.cross_device_ops.all_reduce("sum", x).wait()
right = bool((x == sum(range(1, num_replicas + 1))).all())
taken = [type(op).__name__ for op in strategy.cross_device_ops.choices().values()]
strategy.cross_device_ops = "shared_memory"
"""


@pytest.fixture
def quick(replicas: Callable[[int], LocalPool]) -> Iterator[str]:
    """Source that makes a measurement on a replica short; the replicas are other tests', too."""
    settings = "from mirror_nb.collectives import auto; auto.SECONDS_A_SIZE, auto.SIZES = "
    yield f"{settings}0.01, {SIZES[:2]}\n"
    for n in (2, 3):
        run_cell(replicas(n), f"{settings}{auto.SECONDS_A_SIZE}, {SIZES}\n")


@pytest.mark.parametrize("n", [2, 3])
def test_all_replicas_take_the_same_ops_as_measured_once(replicas: Callable[[int], LocalPool], tmp_path, quick, n):
    ops = AutoAllReduce(CANDIDATES, cache=tmp_path)
    for _ in range(2):
        ran = run_cell(replicas(n), quick + CELL, {"ops": ops}, timeout=60)
        assert ran.report.clean, ran.report.failures
        assert {tuple(values["taken"]) for values in ran.values.values()} == {tuple(ran.values[0]["taken"])}
        assert all(values["right"] for values in ran.values.values())
        (path,) = tmp_path.iterdir()
        written = path.stat().st_mtime_ns, path.read_text()
    assert set(json.loads(written[1])["microseconds"]) == {"4096", "65536"}


def test_what_it_measures_is_no_part_of_the_training(replicas: Callable[[int], LocalPool], tmp_path, quick):
    source = """
import torch, torch.distributed as dist
from mirror_nb.collectives.base import Member

timings = []
ops.bind(Member(replica_id, num_replicas, device, dist.group.WORLD, timings.append))
ops.all_reduce("sum", torch.ones(1000)).wait()
ops.unbind()
summed = [(timing.op, timing.nbytes) for timing in timings if timing.op == "all_reduce"]
"""
    ran = run_cell(replicas(2), quick + source, {"ops": AutoAllReduce(CANDIDATES, cache=tmp_path)})
    assert all(found["summed"] == [("all_reduce", 4000)] for found in ran.values.values())


def test_what_is_in_the_cache_decides(replicas: Callable[[int], LocalPool], tmp_path, quick):
    pool = replicas(2)
    ops = AutoAllReduce(CANDIDATES, cache=tmp_path)
    assert run_cell(pool, quick + CELL, {"ops": ops}, timeout=60).report.clean
    (path,) = tmp_path.iterdir()
    content = json.loads(path.read_text())
    content["microseconds"] = {"4096": [[10.0, 1.0], [1.0, 0.1]], "65536": [[10.0, 1.0], [9.5, 0.1]]}
    path.write_text(json.dumps(content))
    ran = run_cell(pool, quick + CELL, {"ops": ops}, timeout=60)
    assert [values["taken"] for values in ran.values.values()] == [["GlooAllReduce", "SharedMemoryAllReduce"]] * 2


def test_after_a_replica_was_replaced_all_decide_anew(replicas: Callable[[int], LocalPool], tmp_path, quick):
    pool = replicas(2)
    ops = AutoAllReduce(CANDIDATES, cache=tmp_path)
    first = run_cell(pool, quick + CELL.replace('strategy.cross_device_ops = "shared_memory"', ""), {"ops": ops})
    assert first.report.clean, first.report.failures
    os.kill(pool.status()[0].pid, 9)
    eventually(pool.dead, "the death is seen")
    pool.mend()
    ran = run_cell(
        pool,
        quick
        + """
import torch
x = torch.ones(100_000)
strategy.cross_device_ops.all_reduce("mean", x).wait()
found = type(strategy.cross_device_ops).__name__, float(x.sum())
strategy.cross_device_ops = "shared_memory"
""",
        timeout=60,
    )
    assert ran.report.clean, ran.report.failures
    assert [values["found"] for values in ran.values.values()] == [("AutoAllReduce", 100_000.0)] * 2
