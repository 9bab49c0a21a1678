"""`python -m mirror_nb watch`: finds strategies that run, reads their rings, and shows how they go.

Asks neither controllers nor replicas, so that stuck ones are seen; changes nothing of them. Knows no command line.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TextIO, final

from mirror_nb.errors import UsageError
from mirror_nb.notebook.dashboard import words
from mirror_nb.notebook.dashboard.frame import Frame, Phase
from mirror_nb.telemetry.findings import findings
from mirror_nb.telemetry.machine import Machine, Reading, machine_of
from mirror_nb.telemetry.notice import Notice, find, open_rings
from mirror_nb.telemetry.timeline import Timeline
from mirror_nb.watch.lines import Line, lines, printable, quiet
from mirror_nb.watch.screen import Screen

OK, NOTHING, WRONG_CALL = 0, 1, 2
HISTORY_SECONDS = 30
# Of the devices' readings.
SEARCH_SECONDS = 2.0
# Between two searches: one takes some milliseconds with hundreds of processes.
FASTEST, SLOWEST = 0.1, 86400.0
# Seconds between two pictures.
NONE_YET = (
    "no strategy of yours trains on this machine; one is seen from its start on (%mirror start in a notebook, "
    "strategy.run in a script, or python -m mirror_nb demo)"
)


@final
@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for."""

    pid: int | None = None
    # The controller to watch; None: all of this user's.
    once: bool = False
    # One picture, then end.
    every: float = 1.0
    # Seconds between two pictures.


@final
class Watched:
    """One strategy: its rings, read since they were found, and its devices' readings."""

    def __init__(self, notice: Notice) -> None:
        self.notice = notice
        self._readers = open_rings(notice)
        self._timeline = Timeline(self._readers)
        self._machine, self._without = _machine(notice)
        self._readings: deque[Reading] = deque()

    def changed(self, notice: Notice) -> None:
        """Go on with another notice of the same rings: a replica has another process."""
        if notice != self.notice:
            self.notice = notice
            self._close_machine()
            self._machine, self._without = _machine(notice)

    def frame(self) -> Frame:
        """Read what is new and return what there is to show."""
        self._timeline.update()
        shot = self._timeline.snapshot()
        if self._machine is not None:
            self._readings.extend(self._machine.read())
        while self._readings and self._readings[-1].at - self._readings[0].at > HISTORY_SECONDS * 1e9:
            self._readings.popleft()
        readings = tuple(self._readings)
        return Frame(
            snapshot=shot,
            findings=findings(shot, readings),
            readings=readings,
            devices=self.notice.devices,
            title=self.notice.title,
            operation=self.notice.operation,
            phase=Phase.of(shot),
        )

    def lines(self) -> list[Line]:
        """Return the frame as lines, and why there are no readings if there are none."""
        without: list[Line] = [((self._without, "faint"),)] if self._without else []
        return lines(self.frame(), self.notice.pid) + without

    def sentence(self) -> str:
        """Return the frame in one line."""
        frame = self.frame()
        since = quiet(frame) if frame.phase is Phase.RUNNING else None
        silence = f" Nothing was written for {since:.0f} s." if since is not None else ""
        return printable(f"process {self.notice.pid}: {words.alternative(frame)}{silence}")

    def close(self) -> None:
        """Let go of rings and drivers."""
        self._close_machine()
        for reader in self._readers:
            reader.close()

    def _close_machine(self) -> None:
        if self._machine is not None:
            self._machine.close()


def run(
    options: Options,
    out: TextIO = sys.stdout,
    err: TextIO = sys.stderr,
    *,
    wait: Callable[[float], object] = time.sleep,
) -> int:
    """Watch until Ctrl-C, or until the given process has ended, and return the exit code.

    0: seen. 1: `once`, and there is nothing. 2: the call was wrong. `wait(seconds)` is called between two pictures.
    """
    try:
        _check(options)
    except UsageError as error:
        print(f"mirror_nb watch: {error}", file=err)
        return WRONG_CALL
    watched: dict[tuple[int, tuple[int, ...]], Watched] = {}
    try:
        return _run(options, watched, Screen(out), wait)
    except KeyboardInterrupt:
        return OK
    finally:
        for its in watched.values():
            its.close()


def _check(options: Options) -> None:
    if not FASTEST <= options.every <= SLOWEST:
        raise UsageError(
            f"--every {options.every:g}: at least {FASTEST:g} seconds are needed, and at most {SLOWEST:g} are waited"
        )
    pids = sorted({notice.pid for notice in find()})
    if options.pid is not None and options.pid not in pids:
        there = f"these have one: {', '.join(map(str, pids))}" if pids else NONE_YET
        raise UsageError(f"process {options.pid} has no strategy that trains; {there}")


def _run(
    options: Options,
    watched: dict[tuple[int, tuple[int, ...]], Watched],
    screen: Screen,
    wait: Callable[[float], object],
) -> int:
    searched = -SEARCH_SECONDS
    told = False
    while True:
        if time.monotonic() - searched >= SEARCH_SECONDS:
            _search(options.pid, watched, screen)
            searched = time.monotonic()
        if watched:
            told = False
            _show(list(watched.values()), screen, whole=options.once)
        elif not told and options.pid is None:
            told = True
            screen.say(NONE_YET)
        if options.once or (options.pid is not None and not watched):
            return OK if watched or options.pid is not None else NOTHING
        wait(options.every)


def _search(pid: int | None, watched: dict[tuple[int, tuple[int, ...]], Watched], screen: Screen) -> None:
    """Take up what is new, and let go of what has ended."""
    there = {(notice.pid, notice.rings): notice for notice in find() if pid in (None, notice.pid)}
    for key in watched.keys() - there.keys():
        # Its last lines stay on the screen above this one.
        screen.say(f"{watched[key].sentence()} Its replicas were stopped, or the process has ended.")
        watched.pop(key).close()
    for key, notice in there.items():
        if key in watched:
            watched[key].changed(notice)
            continue
        try:
            watched[key] = Watched(notice)
        except UsageError:
            # It ended between the two looks; the next search knows.
            continue


def _show(watched: Sequence[Watched], screen: Screen, whole: bool) -> None:
    if not screen.live and not whole:
        for its in watched:
            screen.say(its.sentence())
        return
    shown: list[Line] = []
    for number, its in enumerate(watched):
        shown += [*([()] if number else []), *its.lines()]
    screen.draw(shown)


def _machine(notice: Notice) -> tuple[Machine | None, str]:
    """Return who reads the devices; or None, and why."""
    try:
        return machine_of(notice.devices, notice.places), ""
    except UsageError as error:
        return None, f"no readings of the devices: {error}"
