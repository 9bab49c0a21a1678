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
├── ContextError (RuntimeError)   a method was called where it has no meaning: in a replica, or outside of a scope
└── PoolClosed (RuntimeError)     the replicas were stopped; start new ones

KeyboardInterrupt
└── TrainingStopped               the Stop button, or `%mirror` from elsewhere: the end of a step, variables kept
"""

from __future__ import annotations

import sys
import types

_WAITING = ("mirror_nb.collectives", "mirror_nb.gradients")
# They call nothing of the user's.
_OURS_OR_TORCH = ("mirror_nb.", "torch.", "contextlib")


class MirrorError(Exception):
    """Every error that mirror_nb raises by itself."""

    def _render_traceback_(self) -> list[str]:
        """For IPython, which asks for it: up to the caller's line. Ours tell where a mistake was found, not made."""
        shell = sys.modules["IPython"].get_ipython()
        trace = users_frames(self.__traceback__)
        if shell is None or trace is None:
            return [f"{type(self).__name__}: {self}"]
        lines: list[str] = shell.InteractiveTB.structured_traceback(type(self), self, trace)
        return lines


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


def users_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return the traceback without the frames of mirror_nb that it ends in, nor of a wait and what led to it."""
    frames = _frames(trace)
    modules = [frame.tb_frame.f_globals.get("__name__", "") for frame in frames]
    end = next((i for i, module in enumerate(modules) if module.startswith(_WAITING)), len(frames))
    # A backward pass waits inside of autograd.
    led_there = ("torch.distributed.", "torch.autograd", "torch._tensor")
    ours = ("mirror_nb.", "contextlib", "torch.utils._pytree", *(led_there if end < len(frames) else ()))
    while end and modules[end - 1].startswith(ours):
        end -= 1
    return _linked(frames[:end])


def without_hidden(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return the traceback without frames that hide themselves at its end, of which IPython would show the last."""
    frames = _frames(trace)
    while frames and frames[-1].tb_frame.f_locals.get("__tracebackhide__"):
        frames.pop()
    return _linked(frames) if frames else trace


def _frames(trace: types.TracebackType | None) -> list[types.TracebackType]:
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    return frames


def _linked(frames: list[types.TracebackType]) -> types.TracebackType | None:
    linked = None
    for frame in reversed(frames):
        linked = types.TracebackType(linked, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return linked


def lacking(obj: object, name: str, elsewhere: dict[str, str]) -> AttributeError:
    """Return the error of an attribute that is not there; `elsewhere`: what to write instead of some."""
    kind = type(obj).__name__
    if name in elsewhere:
        return AttributeError(f"'{kind}' has no `{name}`: write {elsewhere[name]}", name=name, obj=obj)
    return AttributeError(f"'{kind}' object has no attribute '{name}'", name=name, obj=obj)


def users_level() -> int:
    """Return the `stacklevel` by which a warning of the caller tells the user's line, past mirror_nb and torch."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_OURS_OR_TORCH):
        frame, level = frame.f_back, level + 1
    # What a replica says after the user's code has run is told where it is said: it began in no line of the user's.
    return 1 if frame.f_globals.get("__name__") == "multiprocessing.process" else level
