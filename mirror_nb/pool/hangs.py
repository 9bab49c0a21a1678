"""Why replicas do not come to an end: what each of them said of where it is, as a table, and what differs.

Knows messages. Knows no process and no exception; whoever raises one puts these lines below it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeGuard

from mirror_nb.devices import Device
from mirror_nb.messages import Collectives, Wait, Whereabouts
from mirror_nb.pool.cells import told
from mirror_nb.readable import aligned

HANG_SECONDS = 0.5
# A wait in a collective that is longer may be one for a replica that does not come.
DECIDED_ALONE = (
    "where a `break` or an `if` goes by a value that each replica has of its own, a loss for instance, let it go by "
    '`strategy.reduce("mean", value)`'
)
UNUSED = (
    "a backward pass that uses no parameter of a mirrored module takes no part in the all-reduce of gradients "
    "that the others wait in"
)
_IN_PAIRS = "see that there is a `recv` on one replica for every `send` on the other"


@dataclass(frozen=True, slots=True)
class Silent:
    """A replica that does not answer."""

    how: str
    # In words: it is stopped, or native code holds Python's lock.
    stack: tuple[str, ...]
    # Its frames, the latest call first, as far as they could be had.
    last: str
    # The last that it recorded; empty: nothing.


Found = Whereabouts | Silent


def hangs(found: Mapping[int, Found]) -> bool:
    """Whether this looks like a hang: a long wait in a collective, or a replica that does not answer."""
    return any(
        isinstance(one, Silent) or any(wait.seconds >= HANG_SECONDS for _, wait in _waits(one))
        for one in found.values()
    )


def explain(found: Mapping[int, Found], asked: Set[int], devices: Sequence[Device]) -> list[str]:
    """Return a table of where the replicas are, and what differs; `asked`: those that were to run the request."""
    rows = [("replica", "device", "where", "at")]
    below: list[str] = []
    for r in sorted({*found, *asked}):
        one = found.get(r)
        where, at = _row(one) if r in asked else ("not in this cell", "")
        rows.append((str(r), str(devices[r]), where, at))
        if isinstance(one, Silent):
            below += [f"replica {r} {one.how}" + (":" if one.stack else ""), *(f"  {line}" for line in one.stack)]
            below += [f"replica {r}'s last record: {one.last}"] if one.last else []
    return ["where the replicas were:", *aligned(rows), *below, *_differences(found, asked)]


def uneven(found: Mapping[int, Found], idle: Set[int], running: Set[int], asked: Set[int]) -> str | None:
    """Say that a replica waits in a collective for one that is done and will never come; None if none does.

    `idle`: replicas that have ended the request, or are not among those that were `asked` to run it.
    """
    for r in sorted(running):
        one = found.get(r)
        for group, wait in _waits(one):
            if wait.partner is not None:
                lacking = _without_its_half(found.get(wait.partner), group.group, r, wait)
                if lacking and wait.partner in idle and isinstance(one, Whereabouts):
                    if wait.partner not in asked:
                        return _left_out(r, one, wait, [wait.partner])
                    return f"replica {r} waits in {wait.collective}{_at(one)}, but {lacking}"
                continue
            if wait.collective.startswith("recv"):
                lacking = _sent_by_nobody({p: found.get(p) for p in group.replicas if p != r}, group, r)
                if lacking and {*group.replicas} - {r} <= idle and isinstance(one, Whereabouts):
                    return f"replica {r} waits in {wait.collective}{_at(one)}, but {lacking}"
                continue
            gone = [p for p in group.replicas if p in idle and _will_not_come(found.get(p), group.group, wait.number)]
            if gone and isinstance(one, Whereabouts):
                left_out = [p for p in gone if p not in asked]
                return _left_out(r, one, wait, left_out) if left_out else _uneven(r, one, wait, gone)
    return None


def _will_not_come(one: Found | None, group: str, number: int) -> bool:
    """Whether a replica that runs nothing has begun fewer collectives, and nothing there may begin more."""
    if not _rests(one):
        return False
    return any(g.group == group and g.issued < number and not g.under_way for g in one.groups)


def _rests(one: Found | None) -> TypeGuard[Whereabouts]:
    """Whether a replica has said that it runs nothing."""
    return isinstance(one, Whereabouts) and one.request is None and not one.threads


def _without_its_half(one: Found | None, group: str, replica: int, wait: Wait) -> str:
    """Say that a replica that runs nothing has not begun the other half of a send or receive; empty: it may have."""
    if not _rests(one):
        return ""
    sends = wait.collective.startswith("send")
    half = "recv" if sends else "send"
    begun = next(({(kind, r): n for kind, r, n in g.between} for g in one.groups if g.group == group), None)
    if begun is None:
        return ""
    # What it received from any of them may all have come from this replica, and no more than that.
    count = begun.get((half, replica), 0) + begun.get((half, None), 0)
    if count >= wait.number:
        return ""
    has = f"has come to the end and {'received' if sends else 'sent'} {count or 'none'} of {wait.number}"
    return f"replica {wait.partner}, {'to which it sends' if sends else 'from which it receives'}, {has}; {_IN_PAIRS}"


def _sent_by_nobody(others: Mapping[int, Found | None], group: Collectives, replica: int) -> str:
    """Say that others, which run nothing, sent less than a replica receives from them or any; empty: one may send."""
    sent = 0
    for one in others.values():
        if not _rests(one):
            return ""
        begun = [entry for its in one.groups if its.group == group.group for entry in its.between]
        sent += sum(n for kind, r, n in begun if kind == "send" and r == replica)
    received = sum(n for kind, _, n in group.between if kind == "recv")
    if sent >= received:
        return ""
    have = f"{_replicas(sorted(others))} {'have' if len(others) > 1 else 'has'} come to the end"
    return f"{have} and sent {sent or 'none'} of {received}; {_IN_PAIRS}"


def _at(one: Whereabouts) -> str:
    return f" at {told(one.line)}" if one.line else ""


def _uneven(r: int, one: Whereabouts, wait: Wait, gone: Sequence[int]) -> str:
    # What each has begun, and what else may be the cause, stands below the table of where they are.
    gone_without = f"{_replicas(gone)} {'have' if gone[1:] else 'has'} come to the end without it"
    why = f"see that every replica runs the same number of steps: {DECIDED_ALONE}"
    return f"replica {r} waits in {wait.collective}{_at(one)}, but {gone_without}; {why}"


def _left_out(r: int, one: Whereabouts, wait: Wait, others: Sequence[int]) -> str:
    # Nothing but a cell is run by some of the replicas alone.
    out = f"needs {_replicas(others)}, but --replicas leaves {'them' if others[1:] else 'it'} out of this cell"
    return f"replica {r} waits in {wait.collective}{_at(one)}, which {out}"


def _waits(one: Found | None) -> list[tuple[Collectives, Wait]]:
    return [(group, wait) for group in one.groups for wait in group.waits] if isinstance(one, Whereabouts) else []


def _row(one: Found | None) -> tuple[str, str]:
    if one is None:
        return "has ended", ""
    if isinstance(one, Silent):
        return one.how, one.stack[0].strip() if one.stack else ""
    if one.request is None:
        return "has ended", ""
    waits = _waits(one)
    if waits:
        longest = max((wait for _, wait in waits), key=lambda wait: wait.seconds)
        for_whom = f" for {_replicas(longest.late)}" if longest.late else ""
        return f"waits {longest.seconds:.1f} s in {longest.collective}{for_whom}", told(one.line)
    return (f"in {one.inside}" if one.inside else "runs"), told(one.line)


def _differences(found: Mapping[int, Found], asked: Set[int]) -> list[str]:
    """Return what some of those `asked` have begun and others have not, by the first that waits for others."""
    counts = _counts({r: one for r, one in found.items() if r in asked})
    lines = [f"in this cell or call, {counts}"] if counts else []
    for one in found.values():
        for group, wait in _waits(one):
            for late in [r for r in wait.late if r in asked]:
                last = _last(group, late)
                lines.append(
                    f"replica {late} has not come to {wait.collective}" + (f"; its last was {last}" if last else "")
                )
            if wait.late:
                return [*lines, f"perhaps {UNUSED}"] if _for_gradients(one) else lines
    return lines


def _for_gradients(one: Found) -> bool:
    return isinstance(one, Whereabouts) and one.gradients


def _last(group: Collectives, replica: int) -> str:
    """Return the last collective of a replica in words, as shared memory tells; empty if it does not."""
    place = group.replicas.index(replica) if replica in group.replicas else len(group.seen)
    return group.seen[place] if place < len(group.seen) else ""


def _counts(found: Mapping[int, Found]) -> str:
    """Say how many collectives of each kind they have begun, where that differs."""
    begun: dict[int, dict[str, int]] = {}
    for r, one in sorted(found.items()):
        if isinstance(one, Whereabouts):
            begun[r] = {}
            for group in one.groups:
                for kind, count in group.begun:
                    begun[r][kind] = begun[r].get(kind, 0) + count
    said = []
    for kind in sorted({kind for counts in begun.values() for kind in counts}):
        by_count: dict[int, list[str]] = {}
        for r, counts in begun.items():
            by_count.setdefault(counts.get(kind, 0), []).append(str(r))
        if len(by_count) > 1:
            (fewest, first), *others = sorted(by_count.items())
            has = f"{_replicas(first)} {'have' if first[1:] else 'has'}"
            said.append(f"{has} begun {kind} {_times(fewest)}" if fewest else f"{has} never begun {kind}")
            said[-1] += "".join(f", {_replicas(ids)} {_times(count)}" for count, ids in others)
    return "; ".join(said)


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _replicas(ids: Sequence[object]) -> str:
    return f"replica{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"
