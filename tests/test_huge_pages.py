"""Huge pages: replicas have them where they are to be had, and nobody else hears of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mirror_nb.pool import huge_pages

TUNED = "glibc.malloc.check=0"
SCRIPT = """
import os, subprocess, sys, torch
import mirror_nb as mnb
from mirror_nb.pool.local import stop_forkserver

def told():
    held = torch.ones(32 * 2**20)
    rollup = open("/proc/self/smaps_rollup").read()
    child = subprocess.run(["printenv", "GLIBC_TUNABLES"], capture_output=True, text=True).stdout.strip()
    return int(rollup.split("AnonHugePages:")[1].split()[0]), os.environ.get("GLIBC_TUNABLES", ""), child

for own in sys.argv[1:]:
    if own:
        os.environ["GLIBC_TUNABLES"] = own
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        for each in zip(*map(strategy.local_results, strategy.run(told))):
            print(*each, sep=";")
    print(os.environ.get("GLIBC_TUNABLES", ""), end="\f")
    # The next replicas come from another one.
    stop_forkserver()
"""


@pytest.fixture
def on_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Linux' folder where huge pages are for those who ask."""
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    (tmp_path / "hpage_pmd_size").write_text("2097152\n")
    monkeypatch.setattr(huge_pages, "_FOLDER", tmp_path)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    return tmp_path


def asked() -> str | None:
    with huge_pages.asked_for():
        return os.environ.get("GLIBC_TUNABLES")


def test_the_process_that_is_started_asks_and_this_one_has_its_environment_again(on_request):
    assert asked() == "glibc.malloc.hugetlb=1"
    assert "GLIBC_TUNABLES" not in os.environ


def test_what_the_user_tunes_is_kept(on_request, monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", TUNED)
    assert asked() == f"{TUNED}:glibc.malloc.hugetlb=1"
    assert os.environ["GLIBC_TUNABLES"] == TUNED


def test_who_says_what_glibc_is_to_do_about_huge_pages_is_heard(on_request, monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    assert asked() == "glibc.malloc.hugetlb=0"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("enabled", "[always] madvise never\n"),
        ("enabled", "always madvise [never]\n"),
        ("hpage_pmd_size", f"{512 * 2**20}\n"),
        ("hpage_pmd_size", "?\n"),
    ],
)
def test_nobody_asks_where_there_are_none_or_too_large_ones(on_request, file, text):
    (on_request / file).write_text(text)
    assert asked() is None


def test_nobody_asks_where_linux_does_not_say(on_request):
    (on_request / "enabled").unlink()
    assert asked() is None


def test_replicas_have_them_and_what_they_start_has_the_users_environment():
    if not huge_pages._to_be_had():
        pytest.skip("Linux gives huge pages here to all or to nobody")
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    command = [sys.executable, "-c", SCRIPT, "", TUNED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for own, told in zip(("", TUNED), done.stdout.removesuffix("\f").split("\f"), strict=True):
        # What is equal on both replicas is told once.
        *replicas, controller = told.split("\n")
        assert controller == own
        assert replicas
        for line in replicas:
            kib, *seen = line.split(";")
            assert seen == [own, own]
            # Of 128 MiB; the kernel may lack a few.
            assert int(kib) > 64 * 1024
