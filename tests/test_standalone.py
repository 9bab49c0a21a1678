"""Scripts that a launcher started: how they end, and groups that they have made themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mirror_nb as mnb

SCRIPT = """
import torch
import torch.distributed as dist
from mirror_nb.strategies import standalone

assert standalone._at_work() is None
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
standalone._let_gloo_rest()
before = standalone._at_work()
print(len(before or {}), standalone._at_work() == before)
"""


def printed(script: str) -> str:
    here = str(Path(mnb.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": here, "GLOO_SOCKET_IFNAME": "lo"}
    ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="threads are looked at in /proc")
def test_gloos_threads_are_found_and_asleep_when_it_has_waited_for_them():
    threads, asleep = printed(SCRIPT).split()
    assert int(threads) > 0, "torch names them otherwise"
    assert asleep == "True"


GROUPS = """
import torch
import torch.distributed as dist
from mirror_nb.collectives.base import word_device

for backend in ("gloo", "cpu:gloo,cuda:gloo", "cuda:gloo"):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    print(word_device(torch.device("cuda", 0)))
    dist.destroy_process_group()
"""


def test_words_go_by_the_gpu_where_the_scripts_group_is_for_gpus_alone():
    assert printed(GROUPS).split() == ["cpu", "cpu", "cuda:0"]
