"""TensorFlow's MirroredStrategy for PyTorch and the notebook: `%load_ext mirror_nb`, then `%%mirrored`."""

from __future__ import annotations

from typing import Any

from mirror_nb.errors import (
    DeviceError,
    MirrorError,
    PeerFailed,
    PoolClosed,
    RemoteException,
    ReplicaDied,
    ReplicaError,
    ReplicaTimeout,
    TransferError,
    UsageError,
)
from mirror_nb.values import DistributedValues, PerReplica, Remote

__all__ = [
    "DeviceError",
    "DistributedValues",
    "MirrorError",
    "PeerFailed",
    "PerReplica",
    "PoolClosed",
    "Remote",
    "RemoteException",
    "ReplicaDied",
    "ReplicaError",
    "ReplicaTimeout",
    "TransferError",
    "UsageError",
    "__version__",
]

__version__ = "0.1.0"


def load_ipython_extension(shell: Any) -> None:
    """Register `%mirror` and `%%mirrored`; torch begins to load for the replicas meanwhile."""
    from mirror_nb.notebook.magics import MirrorMagics
    from mirror_nb.pool.local import end_children, warm_up

    warm_up()
    if "mirrored" not in shell.magics_manager.magics["cell"]:
        shell.register_magics(MirrorMagics(shell))
        # Set by a kernel that was asked to shut down or to restart.
        shell.observe(lambda change: end_children(), "exit_now")


def unload_ipython_extension(shell: Any) -> None:
    """Stop the replicas of the notebook."""
    magics = shell.magics_manager.registry.get("MirrorMagics")
    if magics is not None:
        magics.session.stop()
