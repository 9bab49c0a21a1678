"""What the forkserver loads once, before it forks replicas. To import it is its whole effect.

Not collecting garbage meanwhile saves an eighth of a second of the one that it takes, and objects that are frozen
then are not walked by the replicas' collectors, so that their pages stay shared.
"""

from __future__ import annotations

import gc

gc.disable()

import ipykernel.zmqshell  # noqa: E402, F401

from mirror_nb.replica import worker  # noqa: E402, F401
from mirror_nb.strategies import mirrored  # noqa: E402, F401

gc.freeze()
gc.enable()
