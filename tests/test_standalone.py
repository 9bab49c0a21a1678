"""A script that a launcher started ends only when gloo's threads have let go of what they did."""

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


@pytest.mark.skipif(sys.platform != "linux", reason="threads are looked at in /proc")
def test_gloos_threads_are_found_and_asleep_when_it_has_waited_for_them():
    here = str(Path(mnb.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": here, "GLOO_SOCKET_IFNAME": "lo"}
    ran = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    threads, asleep = ran.stdout.split()
    assert int(threads) > 0, "torch names them otherwise"
    assert asleep == "True"
