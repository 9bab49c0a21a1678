"""TensorFlow's MirroredStrategy for PyTorch and the notebook: `%load_ext mirror_nb`, then `%%mirrored`.

The public names are loaded when they are first used: the forkserver of the replicas wants to prepare before torch
is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mirror_nb.environment import module_variables
from mirror_nb.environment.imported import uninterrupted, when_imported

if TYPE_CHECKING:
    from mirror_nb import bench, callbacks
    from mirror_nb.collectives.auto import AutoAllReduce
    from mirror_nb.collectives.base import CrossDeviceOps
    from mirror_nb.collectives.gloo import GlooAllReduce
    from mirror_nb.collectives.hierarchical_copy import HierarchicalCopyAllReduce
    from mirror_nb.collectives.nccl import NcclAllReduce
    from mirror_nb.collectives.one_device import ReductionToOneDevice
    from mirror_nb.collectives.options import CommunicationOptions
    from mirror_nb.collectives.shared_memory import SharedMemoryAllReduce
    from mirror_nb.collectives.symmetric_memory import SymmetricMemoryAllReduce
    from mirror_nb.errors import (
        CheckpointError,
        ContextError,
        DeviceError,
        MirrorError,
        PeerFailed,
        PoolClosed,
        RemoteException,
        ReplicaDied,
        ReplicaError,
        ReplicaTimeout,
        TrainingStopped,
        TransferError,
        UsageError,
    )
    from mirror_nb.losses import compute_average_loss, scale_regularization_loss
    from mirror_nb.notebook.magics import picker
    from mirror_nb.strategies.base import Strategy
    from mirror_nb.strategies.context import (
        ReplicaContext,
        experimental_set_strategy,
        get_replica_context,
        get_strategy,
        has_strategy,
        in_cross_replica_context,
        log,
        set_strategy,
    )
    from mirror_nb.strategies.extended import StrategyExtended
    from mirror_nb.strategies.input import (
        DistributedDataset,
        DistributedIterator,
        InputContext,
        InputOptions,
        InputReplicationMode,
        ValueContext,
    )
    from mirror_nb.strategies.mirrored import MirroredStrategy
    from mirror_nb.strategies.one_device import OneDeviceStrategy
    from mirror_nb.training.history import History
    from mirror_nb.training.model import Model
    from mirror_nb.training.saving import load_model
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
    "AutoAllReduce",
    "CheckpointError",
    "CommunicationOptions",
    "ContextError",
    "CrossDeviceOps",
    "DeviceError",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "GlooAllReduce",
    "HierarchicalCopyAllReduce",
    "History",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "MirrorError",
    "Mirrored",
    "MirroredStrategy",
    "MirroredVariable",
    "Model",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "PeerFailed",
    "PerReplica",
    "PoolClosed",
    "ReduceOp",
    "ReductionToOneDevice",
    "Remote",
    "RemoteException",
    "ReplicaContext",
    "ReplicaDied",
    "ReplicaError",
    "ReplicaTimeout",
    "SharedMemoryAllReduce",
    "Strategy",
    "StrategyExtended",
    "SymmetricMemoryAllReduce",
    "SyncOnReadVariable",
    "TrainingStopped",
    "TransferError",
    "UsageError",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "__version__",
    "bench",
    "callbacks",
    "compute_average_loss",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "load_model",
    "log",
    "picker",
    "scale_regularization_loss",
    "set_strategy",
]

__version__ = "0.1.0"

_PLACES = {
    "mirror_nb.collectives.auto": ("AutoAllReduce",),
    "mirror_nb.collectives.base": ("CrossDeviceOps",),
    "mirror_nb.collectives.gloo": ("GlooAllReduce",),
    "mirror_nb.collectives.hierarchical_copy": ("HierarchicalCopyAllReduce",),
    "mirror_nb.collectives.nccl": ("NcclAllReduce",),
    "mirror_nb.collectives.one_device": ("ReductionToOneDevice",),
    "mirror_nb.collectives.options": ("CommunicationOptions",),
    "mirror_nb.collectives.shared_memory": ("SharedMemoryAllReduce",),
    "mirror_nb.collectives.symmetric_memory": ("SymmetricMemoryAllReduce",),
    "mirror_nb.errors": (
        "CheckpointError",
        "ContextError",
        "DeviceError",
        "MirrorError",
        "PeerFailed",
        "PoolClosed",
        "RemoteException",
        "ReplicaDied",
        "ReplicaError",
        "ReplicaTimeout",
        "TrainingStopped",
        "TransferError",
        "UsageError",
    ),
    "mirror_nb.losses": ("compute_average_loss", "scale_regularization_loss"),
    "mirror_nb.notebook.magics": ("picker",),
    "mirror_nb.strategies.base": ("Strategy",),
    "mirror_nb.strategies.context": (
        "ReplicaContext",
        "experimental_set_strategy",
        "get_replica_context",
        "get_strategy",
        "has_strategy",
        "in_cross_replica_context",
        "log",
        "set_strategy",
    ),
    "mirror_nb.strategies.extended": ("StrategyExtended",),
    "mirror_nb.strategies.input": (
        "DistributedDataset",
        "DistributedIterator",
        "InputContext",
        "InputOptions",
        "InputReplicationMode",
        "ValueContext",
    ),
    "mirror_nb.strategies.mirrored": ("MirroredStrategy",),
    "mirror_nb.strategies.one_device": ("OneDeviceStrategy",),
    "mirror_nb.training.history": ("History",),
    "mirror_nb.training.model": ("Model",),
    "mirror_nb.training.saving": ("load_model",),
    "mirror_nb.values": (
        "DistributedValues",
        "Mirrored",
        "PerReplica",
        "ReduceOp",
        "Remote",
        "VariableAggregation",
        "VariableSynchronization",
    ),
    "mirror_nb.variables": ("MirroredVariable", "SyncOnReadVariable", "Variable"),
}
# Where each public name is made.
_MODULES = {name: module for module, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> Any:
    submodule = name in ("bench", "callbacks")
    if not submodule and name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with uninterrupted():
        module = importlib.import_module(f"mirror_nb.{name}" if submodule else _MODULES[name])
    value = module if submodule else getattr(module, name)
    globals()[name] = value
    return value


# Scripts seed, and set variables of their modules, before they use the first name.
module_variables.watch()
when_imported("torch", "mirror_nb.environment.seeds:watch")
# Before anything is compiled.
when_imported("torch._dynamo", "mirror_nb.transfer.compiled:leave_us_out")


def __dir__() -> list[str]:
    # What Tab lists in a notebook: not the modules that this one imports.
    return sorted(__all__)


def load_ipython_extension(shell: Any) -> None:
    """Register `%mirror` and `%%mirrored`; torch begins to load for the replicas meanwhile.

    Nothing in the shell of a replica, where the two say that they belong to ordinary cells.
    """
    known = "mirrored" in shell.magics_manager.magics["cell"]
    if known and "MirrorMagics" not in shell.magics_manager.registry:
        return
    with uninterrupted():
        from mirror_nb.environment.surroundings import follow_cells
        from mirror_nb.notebook.magics import MirrorMagics
        from mirror_nb.pool.local import end_children, warm_up
        from mirror_nb.replica.shell import show_figures

    warm_up()
    if not known:
        shell.register_magics(MirrorMagics(shell))
        # Set by a kernel that was asked to shut down or to restart.
        shell.observe(lambda change: end_children(), "exit_now")
        follow_cells()
        # Those that come from a mirrored cell.
        show_figures(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Stop the replicas of the notebook, if there are any, and print a line that says so."""
    magics = shell.magics_manager.registry.get("MirrorMagics")
    if magics is not None and magics.session.pool is not None:
        print(magics.session.stop())
