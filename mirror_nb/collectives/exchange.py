"""One collective under way through shared memory, and what is said where the replicas have met in different ones.

Knows no memory and no waiting: the fabric carries it on.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Generator, Sequence
from typing import final

from torch import Tensor

from mirror_nb.collectives.barrier import Counter
from mirror_nb.collectives.headers import MERGE_CALL, UNEVEN_MERGE_CALLS, Kind, for_purpose, label
from mirror_nb.errors import PeerFailed, ReplicaError, UsageError

Need = tuple[int, int]
# A counter, and what the others have to have come to.
Steps = Generator[Need, None, None]


class Differs(Exception):
    """The replicas have met in different collectives: every one sees it, and none has read or written anything."""

    def __init__(self, error: Exception) -> None:
        self.error = error


@final
class Exchange:
    """One collective under way."""

    # What most of them never set belongs to the class: to set it takes a tenth of a small collective's time.
    needs: Need = (Counter.DONE, 0)
    posted = False
    ended = False
    error: BaseException | None = None
    called: tuple[Callable[[], None], ...] = ()
    # Run once it has ended, in the thread that saw it end.
    started_ns = 0
    # When all replicas had come to it; time.perf_counter_ns.
    ended_ns = 0

    def __init__(self, number: int, kind: Kind, what: Tensor | str, steps: Steps | None, purpose: str) -> None:
        self.number = number
        self.kind = kind
        self.what: Tensor | str | None = what
        # For messages: the tensor as its owner knows it; of what is announced or named, what it is.
        self.steps = steps
        self.purpose = purpose

    @property
    def label(self) -> str:
        """What it is, as a user would say it."""
        # In words only when something went wrong: they would take a fifth of a small collective's time.
        # Up to the comma it says what, then why.
        return label(self.kind, self.what) + for_purpose(self.purpose.partition(",")[0])

    def outcome(self) -> None:
        """Raise its error, if it ended with one."""
        if self.error is not None:
            raise fresh(self.error)


def different(said: Sequence[str]) -> Exception:
    """Return the error where the replicas have met in what they `said`."""
    if _by_other_ops(said):
        each = ", ".join(f"replica {r}: {text.partition(' for gradients')[0]}" for r, text in enumerate(said))
        return UsageError(
            f"`cross_device_ops` differs between the replicas, which reduce the same gradients in other ways: "
            f"{each}; assign it alike on every replica, between the same steps (not under `if replica_id == ...`)"
        )
    each = ", ".join(f"replica {r}: {text}" for r, text in enumerate(said))
    if MERGE_CALL in said:
        return ReplicaError(f"{UNEVEN_MERGE_CALLS} The replicas are at different calls: {each}")
    return UsageError(
        f"the replicas ran different collectives: {each}; run the same ones in the same order, on tensors of the "
        "same shape and dtype, on every replica"
    )


def _by_other_ops(said: Sequence[str]) -> bool:
    """Whether it is for gradients on every replica, which other ops, or new ones on some of them, reduce."""
    gradients = [re.search(r"^(\w+).* of (\w+\[[\d, ]*\]).* for gradients", text) for text in said]
    if None in gradients:
        return False
    kinds, tensors = zip(*(found.groups() for found in gradients if found), strict=True)
    # Whose op is new gathers where its buckets lie before it reduces them.
    return len(set(tensors)) == 1 or len({kind == "all_gather" for kind in kinds}) > 1


def fresh(error: BaseException) -> BaseException:
    """Return a copy of `error`, so that each raise has a traceback of its own."""
    try:
        copied = copy.copy(error)
    except Exception:
        copied = PeerFailed(f"{type(error).__name__}: {error}")
    copied.__cause__ = error.__cause__
    return copied.with_traceback(None)
