"""A replica's exception, raised in the controller: its own type, the user's own lines, and who raised it."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Sequence
from typing import NoReturn

from mirror_nb.devices import Device
from mirror_nb.errors import RemoteException, ReplicaDied, ReplicaTimeout, TrainingStopped
from mirror_nb.messages import Failure
from mirror_nb.pool import hangs
from mirror_nb.pool.cells import cell_of, text_of, told
from mirror_nb.pool.report import Report, together

_PLACE = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+)')
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"


def raise_for(report: Report, devices: Sequence[Device], timeout: float | None = None) -> None:
    """Raise what the replicas raised, if they did; else what happened to them; else nothing.

    One exception stands for all: the first that does not merely tell of another's. Equal ones are grouped, the
    others are told in a line each. An interrupt that the user's code caught everywhere is none, as in a kernel.
    """
    if report.clean and not report.timed_out and (not report.interrupted or report.handled):
        return
    failures = report.failures
    among = len(report.answers)
    if report.interrupted:
        stopped = sorted(failures) or sorted(report.answers)
        notes = [f"interrupted on {_who(stopped, devices, among)}", *together(report.deaths)]
        _raise(KeyboardInterrupt(), _lines(failures), notes, _where(report, devices))
    if report.timed_out:
        late = sorted({*failures, *(d.replica_id for d in report.deaths)}) or sorted(report.answers)
        slow = ReplicaTimeout(_unfinished(late, devices, among, timeout or 0))
        _raise(slow, _lines(failures)[:-1], [_last_line(slow), *together(report.deaths)], _where(report, devices))
    stop = next((f for f in failures.values() if f.type_name == TrainingStopped.__name__), None)
    if stop is not None:
        _raise(TrainingStopped(stop.message), [], [stop.message, *together(report.deaths)])
    users = [f for f in failures.values() if not f.secondary and not f.interrupted]
    crashes = report.crashes
    if crashes and not (users and all(death.by_us for death in crashes)):
        died = _died(report)
        _raise(died, _last_words(report), [_last_line(died)])
    if failures:
        _raise_users(failures, devices, among, together(crashes), _where(report, devices))


def settle(report: Report, devices: Sequence[Device], timeout: float | None = None) -> None:
    """As `raise_for`; what other replicas answered is closed then, since nobody will open it."""
    try:
        raise_for(report, devices, timeout)
    except BaseException:
        report.close()
        raise


def _where(report: Report, devices: Sequence[Device]) -> list[str]:
    """Return where the replicas were, if that explains why they did not come to an end."""
    found = report.standings
    several = len(report.answers) > 1
    if not found or not (report.uneven or hangs.hangs(found) or (report.timed_out and several)):
        return []
    return hangs.explain(found, set(report.answers), devices)


def _raise_users(
    failures: dict[int, Failure], devices: Sequence[Device], among: int, deaths: list[str], where: list[str]
) -> NoReturn:
    own = {r: f for r, f in failures.items() if not f.secondary}
    # Where nobody has pressed the button and nothing else has failed, the user's code has raised it.
    primary = {r: f for r, f in own.items() if not f.interrupted} or own
    groups: dict[tuple[str, str], list[int]] = {}
    for replica_id, failure in (primary or failures).items():
        groups.setdefault((failure.type_name, failure.message), []).append(replica_id)
    first, *others = groups.values()
    failure = failures[first[0]]
    notes = [f"raised by {_who(first, devices, among)}", *_at_other_lines(first, failures, devices)]
    for ids in others:
        other = failures[ids[0]]
        notes.append(f"{_who(ids, devices, among)} raised {other.type_name}: {other.message}")
    notes += [
        f"replica {r} ({devices[r]}) was out of memory: {f.memory}; what the failed code held is free again"
        for r, f in failures.items()
        if f.memory
    ]
    notes += [
        f"replica {r} ({devices[r]}) can use its GPU no more: CUDA does nothing for a process after such an error. "
        "It has ended, and the next %%mirrored cell, or strategy.run, starts it anew"
        for r, f in failures.items()
        if f.gpu_lost
    ]
    if failure.grown:
        notes.append("a tensor from the controller lies in memory that cannot grow: make another in its place")
    notes += _short_of_examples(primary, devices, among)
    freed = [r for r in failures if primary and r not in primary]
    if freed:
        notes.append(f"{_who(freed, devices, among)} waited for it and {_was(freed)} freed")
    # A replica that would not stop for another's error was ended: the error is what the user has to know.
    _raise(rebuilt(failure), _with_text(failure.traceback), notes + deaths, where)


def _at_other_lines(ids: Sequence[int], failures: dict[int, Failure], devices: Sequence[Device]) -> list[str]:
    """Say who raised the same at another line than the first, whose traceback stands for all."""
    shown = failures[ids[0]].line
    others = [r for r in ids if failures[r].line not in ("", shown)]
    return [f"replica {r} ({devices[r]}) at {told(failures[r].line)}" for r in others]


def _short_of_examples(failures: dict[int, Failure], devices: Sequence[Device], among: int) -> list[str]:
    """Say that who failed, and they alone, had one example or none, which much code does not expect of a batch."""
    short: dict[tuple[int, int], list[int]] = {}
    for replica_id, failure in failures.items():
        own, whole = failure.shares or (0, 0)
        if own > 1 or own * among >= whole:
            return []
        short.setdefault((own, whole), []).append(replica_id)
    return [
        f"{_who(ids, devices, among)} had {own or 'none'} of the batch's {whole} examples: make batches larger, or "
        "leave a smaller last one out (drop_last=True)"
        for (own, whole), ids in short.items()
    ]


def rebuilt(failure: Failure) -> BaseException:
    """Return the exception itself, or one of the same name when its class cannot be rebuilt here."""
    if failure.pickled is not None:
        try:
            error = pickle.loads(failure.pickled)
            # IPython renders a SyntaxError by itself, with the frames of this process.
            if isinstance(error, BaseException) and not isinstance(error, SyntaxError):
                return error
        except Exception:
            # Its class is not importable here, or takes other arguments: the name and the message still tell.
            pass
    kind = type(failure.type_name, (RemoteException,), {"__module__": "replica"})
    error = kind(failure.message)
    assert isinstance(error, BaseException)
    return error


def spans(ids: Iterable[int]) -> str:
    """Return `0–2, 5` for [0, 1, 2, 5]."""
    runs: list[list[int]] = []
    for i in sorted(ids):
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return ", ".join(f"{a}–{b}" if a != b else str(a) for a, b in runs)


def _raise(error: BaseException, lines: list[str], notes: list[str], table: Sequence[str] = ()) -> NoReturn:
    told = [*(f"{_BOLD}{note}{_PLAIN}" for note in notes), *table]
    shown = [*lines, *told]
    # IPython shows these lines in the place of the frames of this process, which the user did not write.
    error._render_traceback_ = lambda: shown  # type: ignore[attr-defined]
    # Plain Python shows notes below its own traceback, and IPython below a SystemExit, of which it renders the rest.
    error.add_note(_COLOURS.sub("", "\n".join(told if isinstance(error, SystemExit) else shown)))
    raise error


def _lines(failures: dict[int, Failure]) -> list[str]:
    """Return the traceback of the first replica."""
    return _with_text(failures[min(failures)].traceback) if failures else []


def _with_text(lines: Sequence[str]) -> list[str]:
    """Name plain cells as the notebook does, and put their text below: both are known here alone."""
    found: list[str] = []
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        place = _PLACE.match(line)
        cell = cell_of(place["file"]) if place is not None else ""
        found.append(line.replace(f'File "{place["file"]}"', cell, 1) if place is not None and cell else line)
        if place is not None and not below.startswith("    "):
            text = text_of(place["file"], place["line"])
            found += [f"    {text}"] if text else []
    return found


def _last_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _died(report: Report) -> ReplicaDied:
    dead = [d.replica_id for d in report.deaths]
    living = sorted(set(report.answers) - set(dead))
    kept = (
        f"Replica{_s(living)} {spans(living)} kept {'their' if len(living) > 1 else 'its'} names. " if living else ""
    )
    again = "them" if len(dead) > 1 else "it"
    died = ReplicaDied(
        f"{'; '.join(together(report.deaths))}. {kept}"
        f"The next %%mirrored cell, or strategy.run, starts {again} anew (%mirror restart: all)."
    )
    died.replica_ids = tuple(dead)
    return died


def _last_words(report: Report) -> list[str]:
    lines: list[str] = []
    for death in report.deaths:
        if death.last_words:
            lines += [f"replica {death.replica_id}'s last words:", *(f"  {line}" for line in death.last_words)]
    return lines


def _who(ids: list[int], devices: Sequence[Device], among: int) -> str:
    if len(ids) == among and among > 1:
        return f"all {among} replicas"
    return f"replica{_s(ids)} {spans(ids)} ({', '.join(str(devices[i]) for i in ids)})"


def _unfinished(late: list[int], devices: Sequence[Device], among: int, timeout: float) -> str:
    stopped = f"{_was(late)} stopped"
    if len(late) == among and among > 1:
        who = "neither of the 2" if among == 2 else f"none of the {among}"
        return f"{who} replicas finished within {timeout:g} s; they {stopped}"
    return f"{_who(late, devices, among)} did not finish within {timeout:g} s and {stopped}"


def _was(ids: list[int]) -> str:
    return "were" if len(ids) > 1 else "was"


def _s(ids: list[int]) -> str:
    return "s" if len(ids) > 1 else ""
