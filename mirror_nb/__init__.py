"""TensorFlow's MirroredStrategy for PyTorch and the notebook: `%load_ext mirror_nb`, then `%%mirrored`."""

from __future__ import annotations

from typing import Any

from mirror_nb.errors import (
    ContextError,
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
from mirror_nb.losses import compute_average_loss, scale_regularization_loss
from mirror_nb.strategies.base import Strategy
from mirror_nb.strategies.context import (
    ReplicaContext,
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
    set_strategy,
)
from mirror_nb.strategies.input import InputContext, InputOptions, InputReplicationMode, ValueContext
from mirror_nb.strategies.mirrored import MirroredStrategy
from mirror_nb.strategies.one_device import OneDeviceStrategy
from mirror_nb.values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    ReduceOp,
    Remote,
    VariableAggregation,
    VariableSynchronization,
)
from mirror_nb.variables import MirroredVariable, SyncOnReadVariable, Variable

__all__ = [
    "ContextError",
    "DeviceError",
    "DistributedValues",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "MirrorError",
    "Mirrored",
    "MirroredStrategy",
    "MirroredVariable",
    "OneDeviceStrategy",
    "PeerFailed",
    "PerReplica",
    "PoolClosed",
    "ReduceOp",
    "Remote",
    "RemoteException",
    "ReplicaContext",
    "ReplicaDied",
    "ReplicaError",
    "ReplicaTimeout",
    "Strategy",
    "SyncOnReadVariable",
    "TransferError",
    "UsageError",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "__version__",
    "compute_average_loss",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "scale_regularization_loss",
    "set_strategy",
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
