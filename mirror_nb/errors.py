"""What can go wrong, as a tree. Knows no other module; every other module may raise from here.

MirrorError
├── UsageError (ValueError)       the call was wrong; nothing has been done
│   ├── DeviceError               a device that is not there, twice there, or cannot be used
│   └── TransferError             a name or a value that cannot travel between processes
├── ReplicaError (RuntimeError)   something happened in the replicas
│   ├── ReplicaDied               a process ended; its memory is gone, the others keep theirs
│   ├── JobLost                   a replica was started anew in the middle of a fit, and knows nothing of it
│   ├── ReplicaTimeout            a request passed its deadline and was ended
│   ├── PeerFailed                a collective was ended since another replica left it
│   └── RemoteException           an exception whose own class cannot be rebuilt here
├── CheckpointError (RuntimeError) a model's file cannot be written, or not be read
└── PoolClosed (RuntimeError)     the replicas were stopped; start new ones

KeyboardInterrupt
└── TrainingStopped               the Stop button, or `%mirror` from elsewhere: the end of a step, variables kept
"""

from __future__ import annotations


class MirrorError(Exception):
    """Every error that mirror_nb raises by itself."""


class UsageError(MirrorError, ValueError):
    """The call was wrong: the message says what was given and what would be right."""


class DeviceError(UsageError):
    """A device that is not there, that was named twice, or that cannot be used."""


class TransferError(UsageError):
    """A name or a value that cannot travel between the notebook and its replicas."""


class ReplicaError(MirrorError, RuntimeError):
    """Something happened in the replicas, not in the call."""


class ReplicaDied(ReplicaError):
    """A replica's process ended; what only it held is gone, the other replicas keep theirs."""

    replica_ids: tuple[int, ...] = ()
    # Which ended.
    survived: bool = True
    # Whether some replica still has the networks.


class JobLost(ReplicaError):
    """A replica was started anew between two messages of a fit, an evaluate or a predict, and knows nothing of it."""


class ReplicaTimeout(ReplicaError):
    """A request passed its deadline and was ended."""


class PeerFailed(ReplicaError):
    """A collective was ended since another replica failed, was interrupted or died."""


class RemoteException(ReplicaError):
    """A replica's exception whose own class cannot be rebuilt in this process."""


class CheckpointError(MirrorError, RuntimeError):
    """A model's file could not be written, or is none that can be read; what was there before is unchanged."""


class PoolClosed(MirrorError, RuntimeError):
    """The replicas were stopped; a new pool has to be started."""


class TrainingStopped(KeyboardInterrupt):
    """The user ended a training after a whole step; no error, and not to be caught by `except Exception`."""


class ContextError(MirrorError, RuntimeError):
    """A method of a strategy was called where it has no meaning: in a replica, in a scope, or outside one."""
