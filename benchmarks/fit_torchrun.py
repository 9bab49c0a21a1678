"""`fit`'s rival: the loop of fit_loop.py under torchrun over gloo. Started by benchmarks/fit.py, not by hand.

torchrun … benchmarks/fit_torchrun.py ADDRESS FILE     ADDRESS: a Unix socket that names a kind of network for
                                                       each epoch to train, and gets the seconds
"""

from __future__ import annotations

import sys
from contextlib import suppress
from multiprocessing.connection import Client

import torch
import torch.distributed as dist
from fit_loop import KINDS, Loop

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with Client(sys.argv[1], "AF_UNIX") as connection:
        loops = {kind: Loop(kind, sys.argv[2], wrapped=True) for kind in KINDS}
        with suppress(EOFError):
            while True:
                kind = connection.recv()
                connection.send(loops[kind].epoch())
    dist.destroy_process_group()
