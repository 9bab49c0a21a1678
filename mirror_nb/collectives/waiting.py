"""What this process waits for in its groups, and how all of it is ended at once. Knows no group and no collective.

A process has one default group, as in torch.distributed, so what is kept here belongs to the process too.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
import torch.distributed as dist

from mirror_nb.collectives.exchange import fresh
from mirror_nb.collectives.headers import shown
from mirror_nb.errors import PeerFailed, ReplicaTimeout, UsageError
from mirror_nb.messages import Rendezvous

if TYPE_CHECKING:
    from mirror_nb.collectives.interruptible import InterruptibleGroup
    from mirror_nb.collectives.opening import Client
    from mirror_nb.collectives.works import SharedWork

# Seconds beyond the group's timeout: gloo's own report of a timeout comes first, since it knows the peer.
_GRACE_SECONDS = 5.0

_LOOKED_AT = 16
# Tensors of one collective that are looked at for its name, which takes a microsecond each.
_NAMED = 3
# Those named besides the first that look unlike it.

_Value = TypeVar("_Value")

_NOT_COME = "failed to pass monitoredBarrier"
# Behind the ranks for which a monitored barrier has waited: it is there to name them.
_CLOSED = "caused pair closure"
# What gloo says of all that comes after a collective that has not ended in time.

_NOT_WITH = "gloo does not do this with {dtypes}; convert it first"
_REFUSALS = {
    "Invalid scalar type": _NOT_WITH,
    "does not support": _NOT_WITH,
    "not implemented for": _NOT_WITH,
    "can't be cast to": "the mean of {dtypes} is no {dtypes}; convert it first: tensor.float()",
    "Cannot use ReduceOp": "{said}; use another operation",
    "Inplace update to inference tensor": "gloo writes into no tensor made in inference mode; pass tensor.clone()",
    "that requires grad is being used in an in-place": "gloo writes into no tensor that requires a gradient here; run "
    "it in torch.no_grad()",
    "Split sizes doesn't match": "{said}",
    "doesn't match the broadcast shape": "{said}",
    "Number of tensor splits": "{said}",
}
# What gloo, and torch around it, say of what they cannot do, by words of it: nobody has left.


class State:
    """What this process has of groups: the generation, who is live, and whether all is aborted."""

    def __init__(self) -> None:
        # Reentrant: a signal handler that calls abort() may run while the main thread holds it.
        self.lock = threading.RLock()
        self.live: set[Operation | SharedWork] = set()
        self.groups: set[InterruptibleGroup] = set()
        self.aborted: BaseException | None = None
        self.severed = False
        # One over gloo has failed: there the default group may have lost its connections.
        self.rendezvous: Rendezvous | None = None
        self.device = torch.device("cpu")
        self.user_groups = 0
        self.offered = False
        # The default group is ours, and the request under way has not initialised one.
        self.world: InterruptibleGroup | None = None
        self.client: Client | None = None
        self.torch_init: Callable[..., None] | None = None
        self.makes_subgroups = False

    def start(self, rendezvous: Rendezvous, device: torch.device) -> None:
        with self.lock:
            self.rendezvous, self.device = rendezvous, device
            self.user_groups = 0
            self.offered = True
            self.aborted = None
            self.severed = False

    def check(self) -> None:
        if self.aborted is not None:
            raise fresh(self.aborted)

    def begin(self, operation: Operation | SharedWork) -> None:
        with self.lock:
            self.check()
            operation.since = time.monotonic()
            self.live.add(operation)

    def end(self, operation: Operation | SharedWork) -> None:
        with self.lock:
            self.live.discard(operation)

    def abort(self, error: BaseException) -> tuple[list[Operation | SharedWork], list[InterruptibleGroup]]:
        with self.lock:
            # A copy: the one that was given may hold the frames it was raised in.
            self.aborted = fresh(error)
            return list(self.live), list(self.groups)

    def take_groups(self) -> list[InterruptibleGroup]:
        with self.lock:
            groups = list(self.groups)
            self.groups.clear()
            return groups


@final
class Operation:
    """One collective under way, or one blocking call in a thread: what is waited for, and how it ended.

    It never refers to the inner group: gloo's callback holds it, and a group that is let go in a thread of
    its own ends the process.
    """

    __slots__ = (
        "arguments",
        "awaited",
        "cuda",
        "done",
        "error",
        "futures",
        "label",
        "number",
        "owner",
        "partner",
        "seconds",
        "since",
        "value",
    )

    def __init__(self, label: str, arguments: tuple[Any, ...], seconds: float, owner: object = None) -> None:
        self.label = label
        self.arguments = arguments
        tensor = next(tensors_in(arguments), None)
        self.cuda = tensor.device if tensor is not None and tensor.is_cuda else None
        self.seconds = seconds
        self.owner = id(owner)
        self.number = 0
        # Which one of its group this is, or of those between it and its partner; 0: not known.
        self.partner: int | None = None
        # The rank of the only other one that takes part.
        self.awaited = False
        # Whether its caller has begun to wait for it.
        self.since = 0.0
        self.done = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None
        self.futures: list[torch.futures.Future[Any]] = []

    def follow(self, work: dist.Work) -> None:
        """Finish when torch's own `work` does."""
        if self.cuda is not None:
            self.run(as_here(functools.partial(wait_for_the_device, work, self.cuda)))
            return
        try:
            future = work.get_future()
        except RuntimeError:
            # gloo's send, recv and reduce_scatter have no future, and the last one writes its result here.
            self.run(as_here(work.wait))
            return
        # The callback runs here if the work has ended already. An interrupt in that instant would be lost in
        # C++; the abort that follows an interrupt is not.
        future.add_done_callback(self._take)

    def run(self, call: Callable[[], Any]) -> None:
        """Run a blocking `call` in a thread of its own and finish with it."""
        threading.Thread(target=self._run, args=(call,), name=f"mirror_nb {self.label}", daemon=True).start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            value = call()
        except BaseException as error:
            failed = self._translate(error)
            if self.owner == id(state.world) and isinstance(failed, (PeerFailed, ReplicaTimeout)):
                state.severed = True
            self.fail(failed)
        else:
            self.finish(value)

    def _take(self, future: torch.futures.Future[Any]) -> None:
        self._run(future.value)

    def finish(self, value: Any) -> None:
        self._end(value, None)

    def fail(self, error: BaseException) -> None:
        self._end(None, error)

    def _end(self, value: Any, error: BaseException | None) -> None:
        with state.lock:
            state.live.discard(self)
            if self.done.is_set():
                return
            self.value, self.error = value, error
            self.arguments = ()
            futures, self.futures = self.futures, []
            self.done.set()
        for future in futures:
            future.set_result(None)

    def wait(self, seconds: float | None = None) -> Any:
        """The value; raises the error, or ReplicaTimeout after `seconds` (by default its own)."""
        self.awaited = True
        # A lock's wait: it lets other threads run, and a signal's handler may raise out of it.
        if not self.done.wait(self.seconds + _GRACE_SECONDS if seconds is None else seconds):
            raise self._timeout(self.seconds if seconds is None else seconds)
        return self.outcome()

    def outcome(self) -> Any:
        if self.error is not None:
            raise fresh(self.error)
        return self.value

    def make_future(self) -> torch.futures.Future[Any]:
        """A future that C++ may wait for; it carries a real error, unlike `Future.set_exception`."""
        devices: list[int | str | torch.device] | None = None if self.cuda is None else [self.cuda]
        future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        chained = future.then(lambda _: self.outcome())
        with state.lock:
            ended = self.done.is_set()
            if not ended:
                self.futures.append(future)
        if ended:
            future.set_result(None)
        return chained

    def _timeout(self, seconds: float) -> ReplicaTimeout:
        return ReplicaTimeout(
            f"{self.name()} did not end within {seconds:g} s: a peer may have left, or it runs another "
            "collective; see that every replica runs the same collectives in the same order"
        )

    def _translate(self, error: BaseException) -> BaseException:
        if not isinstance(error, RuntimeError):
            return error
        said = str(error)
        if _NOT_COME in said:
            late = said.strip().partition("\n")[0]
            translated: Exception = ReplicaTimeout(f"{self.name()}: {late}; see that every replica comes to it")
        elif _CLOSED in said:
            late = "an earlier collective did not end in time, and gloo has closed its connection to a peer since"
            translated = PeerFailed(f"{self.name()} failed: {late}")
        elif "timed out" in said.lower() or "timeout" in said.lower():
            translated = self._timeout(self.seconds)
        elif (refusal := next((how for words, how in _REFUSALS.items() if words in said), None)) is not None:
            dtypes = " and ".join(sorted({str(tensor.dtype) for tensor in tensors_in(self.arguments)}))
            translated = UsageError(f"{self.name()}: {refusal.format(dtypes=dtypes, said=said.strip())}")
        else:
            translated = PeerFailed(
                f"{self.name()} failed: a peer may have left, or it runs another collective or "
                f"another shape ({said.strip()})"
            )
        translated.__cause__ = error
        return translated

    def name(self) -> str:
        """What it is, as a user would say it."""
        tensors = list(tensors_in(self.arguments))
        if not tensors:
            return self.label
        first, *others = dict.fromkeys(shown(tensor) for tensor in tensors[:_LOOKED_AT])
        if len(tensors) == 2 and others:
            return f"{self.label} of {first} and {others[0]}"
        rest = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        return f"{self.label} of {first}{rest}" + (f", {', '.join(others[:_NAMED])} among them" if others else "")


def as_here(call: Callable[[], _Value]) -> Callable[[], _Value]:
    """Return `call` as it would run in this thread, in the modes of autograd that hold now, for any other one."""
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def run() -> _Value:
        # A function of autograd gives its result a graph once it has returned, and gloo writes into views of that.
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            return call()

    return run


def aside(label: str, call: Callable[[], _Value], seconds: float) -> _Value:
    """The result of a blocking call, waited for such that a signal or an `abort` ends the wait."""
    operation = Operation(label, (), seconds)
    state.begin(operation)
    operation.run(call)
    value: _Value = operation.wait()
    return value


def wait_for_the_device(work: dist.Work, device: torch.device) -> Any:
    """The result of a collective on CUDA tensors that gloo carried, once it is back on the device."""
    work.wait()
    torch.cuda.synchronize(device)
    return work.result()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


state = State()
