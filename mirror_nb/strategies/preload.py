"""What the forkserver loads once, before it forks replicas. To import it is its whole effect.

Not collecting garbage meanwhile saves an eighth of a second of the one that it takes, and objects that are frozen
then are not walked by the replicas' collectors, so that their pages stay shared.

torch._dynamo, which the first optimizer of a process imports, is left out: 2 s of CPU and 70 MB that the first
replicas would wait for. To import it later, between two forks, was tried: a death in those seconds is not reaped, and
nobody takes the dead one's place meanwhile.
"""

from __future__ import annotations

import gc
import importlib

gc.disable()

# A replica's shell imports them as it is made, which is half of the time that it takes. By name: of notebooks only the
# floors above know.
for _name in ("application", "completer", "completerlib", "oinspect"):
    importlib.import_module(f"IPython.core.{_name}")
importlib.import_module("ipykernel.zmqshell")

from mirror_nb.replica import worker  # noqa: E402, F401
from mirror_nb.strategies import mirrored  # noqa: E402, F401

gc.freeze()
gc.enable()
