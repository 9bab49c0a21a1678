"""Handles on collectives, as torch.distributed gives them, whose waits end with a signal or an `abort`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist

from mirror_nb.collectives.exchange import Exchange
from mirror_nb.collectives.fabric import Fabric
from mirror_nb.collectives.waiting import Operation, state
from mirror_nb.errors import ReplicaTimeout

# C++ cannot be told to carry an exchange on, so whoever asks for a future waits here so long for peers that are about
# to come: DDP's buckets. After that a thread carries on.
_FUTURE_SECONDS = 0.05


@final
class InterruptibleWork(dist._Work):
    """A handle on a collective, as torch.distributed's own, whose wait ends with a signal or an `abort`."""

    def __init__(self, operation: Operation, work: dist.Work | None, meet: Callable[[float], None] | None) -> None:
        super().__init__()
        self._operation = operation
        self._work = work
        # None where all replicas have to come to it before it begins: those have no single source either.
        self._meet = meet
        # Waits until all replicas have come to this collective, or raises where they came to different ones.

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._meet is not None and not self._operation.done.is_set():
            self._meet(timeout.total_seconds() if timeout else self._operation.seconds)
        self._operation.wait(timeout.total_seconds() if timeout else None)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._operation.done.is_set()

    def is_success(self) -> bool:
        return self._operation.done.is_set() and self._operation.error is None

    def exception(self) -> BaseException | None:
        return self._operation.error

    def result(self) -> Any:
        return self._operation.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._operation.make_future()

    def source_rank(self) -> int:
        return self._source_rank()

    def _source_rank(self) -> int:
        if self._work is None:
            raise RuntimeError("sourceRank() may only be called on work objects that correspond to a recv call")
        return self._work._source_rank()


@final
class SharedWork(dist._Work):
    """A handle on a collective through shared memory; whoever waits carries it on."""

    def __init__(
        self, fabric: Fabric, exchange: Exchange, result: list[torch.Tensor], seconds: float, owner: object
    ) -> None:
        super().__init__()
        self._fabric = fabric
        self.exchange = exchange
        self._result = result
        self._seconds = seconds
        self.owner = id(owner)
        self.since = 0.0

    def wait(self, timeout: timedelta | None = None) -> bool:
        exchange = self.exchange
        if not exchange.ended:
            state.begin(self)
            try:
                self._fabric.wait(exchange, timeout.total_seconds() if timeout else self._seconds)
            finally:
                state.end(self)
        exchange.outcome()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self.exchange.ended:
            self._fabric.progress()
        return self.exchange.ended

    def is_success(self) -> bool:
        return self.exchange.ended and self.exchange.error is None

    def exception(self) -> BaseException | None:
        return self.exchange.error

    def result(self) -> Any:
        self.wait()
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        exchange, fabric = self.exchange, self._fabric
        future: torch.futures.Future[Any] = torch.futures.Future()
        with contextlib.suppress(ReplicaTimeout):
            if not exchange.ended:
                self.wait(timedelta(seconds=min(_FUTURE_SECONDS, self._seconds)))
        if exchange.ended and exchange.error is None:
            future.set_result(self._result)
            return future
        chained = future.then(lambda _: self._outcome())
        state.begin(self)
        fabric.when_ended(exchange, lambda: self._tell(future))
        fabric.go_on_by_itself(at_once=True)
        return chained

    def _outcome(self) -> list[torch.Tensor]:
        self.exchange.outcome()
        return self._result

    def _tell(self, future: torch.futures.Future[Any]) -> None:
        state.end(self)
        future.set_result(None)

    def fail(self, error: BaseException) -> None:
        """End it, and with it all of its fabric: the replicas are out of step."""
        self._fabric.abort(error)
