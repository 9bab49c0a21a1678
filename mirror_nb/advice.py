"""What measurements suggest, in a sentence each, with their numbers.

Knows numbers; knows no replicas, optimizers or tables, and does not say it itself. A function returns None where there
is nothing worth saying.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mirror_nb.readable import milliseconds, size

WORTH = 0.9
# What is less than 10 % better is not worth a change: two measurements may differ by that.
_NOTICEABLE = 0.03
# Part of a step that somebody would notice.
_MOSTLY = 0.4
# Part of a step without which a single process might be as fast as two.


def one_process(threads: int) -> str:
    """Return how that is called which replicas are compared with."""
    return f"one process with {threads} thread{'s' if threads > 1 else ''}"


def slower_than_alone(replicas_ms: float, alone_ms: float, num_replicas: int, alone: str) -> str | None:
    """Say that one process is faster than the replicas; times are of a step on the same global batch.

    `alone` says how it computed, as `one_process` does.
    """
    if alone_ms >= WORTH * replicas_ms:
        return None
    return (
        f"{num_replicas} replicas are slower than {alone}: {_ms(replicas_ms)} a step against {_ms(alone_ms)}. The "
        "model or the batch is too small to share: train with OneDeviceStrategy, or on larger batches"
    )


def mostly_communication(exposed_ms: float, step_ms: float, measured_by: str) -> str | None:
    """Say that replicas wait for each other as much as they compute; `measured_by` tells whether one alone is faster.

    The first time is what of a step nothing is computed beside.
    """
    if exposed_ms < _MOSTLY * step_ms:
        return None
    return (
        f"communication takes {_ms(exposed_ms)} of each step of {_ms(step_ms)}: a model or a batch as small as this "
        f"may train faster in one process; {measured_by} measures both"
    )


def could_be_fused(name: str, plain_ms: float, fused_ms: float, step_ms: float) -> str | None:
    """Say that an optimizer is faster with `fused=True`; the first two times are of `optimizer.step()` alone."""
    if fused_ms >= WORTH * plain_ms or plain_ms - fused_ms < _NOTICEABLE * step_ms:
        return None
    return (
        f"optimizer.step() takes {_ms(plain_ms)} of a step's {_ms(step_ms)}, and {_ms(fused_ms)} when it is fused: "
        f"torch.optim.{name}(..., fused=True)"
    )


def buckets_too_small(bytes_per_pack: int, step_ms: float, larger: int, larger_ms: float) -> str | None:
    """Say that larger gradient buckets are faster; sizes in bytes, times of a step."""
    if larger_ms >= WORTH * step_ms:
        return None
    return (
        f"gradient buckets of {size(bytes_per_pack)} are too small: a step takes {_ms(step_ms)}, and "
        f"{_ms(larger_ms)} with {size(larger)}: CommunicationOptions(bytes_per_pack={larger})"
    )


def other_ops(ops: str, ops_ms: float, better: str, better_ms: float) -> str | None:
    """Say that another cross-device op is faster than the one in use; times of a step."""
    if better == ops or better_ms >= WORTH * ops_ms:
        return None
    return f"a step takes {_ms(ops_ms)} by {ops}, and {_ms(better_ms)} with cross_device_ops={better!r}"


def fastest_ops(found: Sequence[tuple[str, str]], argument: Callable[[str], str], auto: str, default: str) -> str:
    """Say which cross-device op is the fastest for which tensors, and what to write to have it.

    `found`: ops and "small tensors (1 KiB to 64 KiB)", say, one or several. `argument` gives how one chooses an op,
    `auto` what takes the fastest for each size.
    """
    (first, where), *others = found
    said = f"{first} is the fastest op for {where}"
    if all(op == first for op, _ in others):
        said += "".join(f" and for {where}" for _, where in others)
        return f"{said}: {argument(first)}" + (", the default here" if first == default else "")
    said += "".join(f", {op} for {where}" for op, where in others)
    named = " or ".join(argument(op) for op in dict.fromkeys(op for op, _ in found))
    return f"{said}: {named}; {auto} takes the fastest for each size"


def _ms(value: float) -> str:
    return milliseconds(value / 1e3)
