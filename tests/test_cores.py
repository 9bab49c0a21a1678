"""How many cores a process may keep busy: those that it may run on, or what its container is given."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mirror_nb import cores

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Write what the system says of this process's control groups: its own, and the files of each."""
    monkeypatch.setattr(cores, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(cores, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)

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
def test_a_container_with_a_limit_has_no_more_than_that(groups, text, found):
    groups("0::/\n", {"cpu.max": text})
    assert cores.cores() == found


def test_the_narrowest_of_the_groups_around_a_process_counts(groups):
    groups(
        "0::/user.slice/jupyter.service\n",
        {
            "user.slice/cpu.max": "400000 100000\n",
            "user.slice/jupyter.service/cpu.max": "max 100000\n",
            "other.slice/cpu.max": "100000 100000\n",
        },
    )
    assert cores.cores() == 4


@pytest.mark.parametrize(("quota", "found"), [("-1\n", 64), ("300000\n", 3)])
@pytest.mark.parametrize("inside", ["", "docker/f00/"])
def test_the_first_version_of_control_groups_says_it_in_two_files(groups, quota, found, inside):
    groups(
        "5:memory:/docker/f00\n4:cpu,cpuacct:/docker/f00\n0::/\n",
        {f"cpu/{inside}cpu.cfs_quota_us": quota, f"cpu/{inside}cpu.cfs_period_us": "100000\n"},
    )
    assert cores.cores() == found


def test_a_system_without_control_groups_has_the_cores_that_the_process_may_run_on(tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "OWN_GROUPS", tmp_path / "own")
    assert cores.cores() == CORES
