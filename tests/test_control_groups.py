"""The cores and the memory that a process may use: the machine's, or what its container is given."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from mirror_nb.machine import control_groups, memory
from mirror_nb.machine.cores import cores
from mirror_nb.machine.memory import Memory, ended, usable

GIB = 2**30


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Write what the system says of this process's control groups: its own, and the files of each."""
    monkeypatch.setattr(control_groups, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(control_groups, "OWN", tmp_path / "own")
    monkeypatch.setattr(memory, "MACHINE", tmp_path / "vmstat")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=32 * GIB, available=20 * GIB))

    def write(own: str, files: dict[str, str]) -> None:
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            file: Path = tmp_path / "cgroup" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    return write


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("max 100000\n", 64),
        ("200000 100000\n", 2),
        # Half a core more would stand still most of the time.
        ("350000 100000\n", 3),
        ("50000 100000\n", 1),
        ("12800000 100000\n", 64),
        ("nothing that the kernel writes", 64),
    ],
)
def test_a_container_with_a_limit_has_no_more_cores_than_that(groups, text, found):
    groups("0::/\n", {"cpu.max": text})
    assert cores() == found


def test_the_narrowest_of_the_groups_around_a_process_counts(groups):
    groups(
        "0::/user.slice/jupyter.service\n",
        {
            "user.slice/cpu.max": "400000 100000\n",
            "user.slice/jupyter.service/cpu.max": "max 100000\n",
            "other.slice/cpu.max": "100000 100000\n",
        },
    )
    assert cores() == 4


@pytest.mark.parametrize(("quota", "found"), [("-1\n", 64), ("300000\n", 3)])
@pytest.mark.parametrize("inside", ["", "docker/f00/"])
def test_the_first_version_of_control_groups_says_it_in_two_files(groups, quota, found, inside):
    groups(
        "5:memory:/docker/f00\n4:cpu,cpuacct:/docker/f00\n0::/\n",
        {f"cpu/{inside}cpu.cfs_quota_us": quota, f"cpu/{inside}cpu.cfs_period_us": "100000\n"},
    )
    assert cores() == found


@pytest.mark.parametrize(
    ("limit", "found"),
    [
        (f"{4 * GIB}\n", Memory(4 * GIB, 2 * GIB)),
        # Then the machine's own is what there is.
        (f"{30 * GIB}\n", Memory(30 * GIB, 20 * GIB)),
        (f"{2 * GIB}\n", Memory(2 * GIB, 0)),
        ("max\n", Memory(32 * GIB, 20 * GIB)),
        ("nothing that the kernel writes", Memory(32 * GIB, 20 * GIB)),
    ],
)
def test_a_container_has_the_memory_that_it_is_given_less_what_it_needs_of_it(groups, limit, found):
    # A GiB of what is used are files that were read and nobody has looked at since.
    files = {"memory.current": f"{3 * GIB}\n", "memory.stat": f"anon {2 * GIB}\ninactive_file {GIB}\n"}
    groups("0::/\n", {"memory.max": limit, **files})
    assert usable() == found


def test_a_group_around_that_of_the_process_limits_its_memory_too(groups):
    def group(limit: str) -> dict[str, str]:
        return {"memory.max": limit, "memory.current": f"{GIB}\n", "memory.stat": "inactive_file 0\n"}

    files = {"pod": group(f"{4 * GIB}\n"), "pod/notebook": group("max\n")}
    groups("0::/pod/notebook\n", {f"{at}/{name}": text for at, each in files.items() for name, text in each.items()})
    assert usable() == Memory(4 * GIB, 3 * GIB)


@pytest.mark.parametrize(("limit", "found"), [(4 * GIB, Memory(4 * GIB, 2 * GIB)), (2**63 - 4096, None)])
def test_the_first_version_of_control_groups_counts_the_files_of_groups_in_a_group(groups, limit, found):
    files = {
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.usage_in_bytes": f"{3 * GIB}\n",
        "memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB}\n",
    }
    groups("5:memory:/docker/f00\n0::/\n", {f"memory/{name}": text for name, text in files.items()})
    assert usable() == (found or Memory(32 * GIB, 20 * GIB))


def test_a_system_without_control_groups_has_what_the_machine_has(groups):
    assert cores() == 64
    assert usable() == Memory(32 * GIB, 20 * GIB)


EVENTS = "low 0\nhigh 0\nmax 70\noom 3\noom_kill {}\noom_group_kill 0\n"


@pytest.mark.parametrize(
    ("own", "files", "found"),
    [
        ("0::/", {"memory.events": EVENTS.format(2)}, 2),
        # Of another notebook in the pod nobody wants to hear.
        ("0::/pod/mine", {"pod/memory.events": EVENTS.format(7), "pod/mine/memory.events": EVENTS.format(1)}, 1),
        (
            "5:memory:/docker/f00",
            {"memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"},
            3,
        ),
        # Linux before 4.13.
        ("5:memory:/docker/f00", {"memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\n"}, 0),
        # The root of all groups has no such file.
        ("0::/", {}, 5),
    ],
)
def test_who_was_ended_for_want_of_memory_is_counted_as_near_as_can_be(groups, own, files, found):
    groups(own + "\n", files)
    memory.MACHINE.write_text("nr_free_pages 12\noom_kill 5\n")
    assert ended() == found


def test_a_system_that_counts_nobody_who_was_ended_for_want_of_memory_has_ended_none(groups):
    assert ended() == 0
