"""One dashboard and the replicas that it shows: live while they work, a picture when the cell has ended.

    whoever waits for replicas ─ tick, ended ─▶ LiveDashboard ─▶ Dashboard
    the buttons ─ Stop, Pause, Compare ─▶ LiveDashboard ─▶ pool.steer

Between two cells a notebook shows the picture, so that it is what is saved; the next cell that trains makes it live
again in the same place. Knows pools and dashboards; knows not how anything is drawn.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

from IPython.core.getipython import get_ipython

from mirror_nb.errors import PoolClosed, TrainingStopped, UsageError
from mirror_nb.messages import Word
from mirror_nb.notebook.dashboard.frame import Phase
from mirror_nb.notebook.dashboard.widget import Dashboard
from mirror_nb.pool.base import Pool
from mirror_nb.pool.report import Report
from mirror_nb.telemetry.machine import Machine, machine_of
from mirror_nb.telemetry.samples import clock
from mirror_nb.telemetry.snapshot import State

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOOK_SECONDS = 0.2
# Between two looks whether a step has ended, while a picture stands there.
HOLD_SECONDS = 0.02
# Between two looks at the buttons while a loop is held between two calls.


@final
class LiveDashboard:
    """A dashboard of a pool's replicas, which follows them from one cell to the next.

    `fresh`: it begins with what is recorded from now on, not with what was so far. `title` tells what is trained, as
    far as that is known. For the main thread; what happens in others is not drawn.

    Raises UsageError for replicas that record nothing.
    """

    def __init__(
        self, pool: Pool, *, operation: str, title: Callable[[], str], shell: Any = None, fresh: bool = False
    ) -> None:
        timeline = pool.timeline()
        if timeline is None:
            raise UsageError(
                "a replica in this very process records nothing that a dashboard could show; "
                "%mirror stop and %mirror start, or a MirroredStrategy, start some that do"
            )
        if fresh:
            timeline.forget()
        self._pool = pool
        self._timeline = timeline
        self._shell: Any = shell if shell is not None else get_ipython()
        self._title = title
        self._buttons = _Buttons(pool)
        self._machine: Machine | None = None
        self._generation = -1
        # Of the pool, when the machine was last looked for: replicas that were replaced have other processes.
        self._board = Dashboard(
            timeline,
            controls=self._buttons,
            title=title(),
            operation=operation,
            devices=tuple(map(str, pool.devices)),
            shell=self._shell,
        )
        self._shown, self._shown_in = False, -1
        # The number of the cell that shows it.
        self._waits_in = ""
        # The id of an empty display, where it is shown once a step has ended.
        self._seen = 0
        # The last step of the picture that stands there.
        self._asked = 0
        # The last step when `_news` was asked.
        self._outcome: tuple[Phase, str] | None = None
        # How the latest call of this cell ended.
        self._raised = False
        # Whether by an error of the user's code.
        self._latest: Phase | None = None
        # How the latest call of any cell ended.
        self._rested = self._woken = 0
        # When the last cell that trained had ended, and when the next call began; nanoseconds of `clock`.
        self._due = 0.0
        self._follows_cells = False

    # ------------------------------------------------------------------ for users

    def show(self) -> LiveDashboard:
        """Display it below the running cell, live while replicas work; again, the same once more."""
        self._follow_cells()
        self._prepare()
        self._timeline.update()
        if self._timeline.last_step and not self._board.live and not self._buttons.working:
            # What there is to see is over.
            self._board.finish()
            self._note_rest()
        self._shown_in = self._cell()
        self._shown = True
        self._board.show()
        return self

    def figure(self) -> Figure:
        """Return its panels as a matplotlib figure, 13 × 8.5 inches, on white."""
        self._prepare()
        return self._board.figure(self._phase())

    def text(self) -> str:
        """Return the key numbers and the findings in sentences."""
        return self._board.text(self._phase())

    def _phase(self) -> Phase | None:
        return None if self._buttons.working else self._latest

    def _ipython_display_(self) -> None:
        # Where it is the value of a cell that has shown it already, once is enough.
        if not self._shown or self._shown_in != self._cell():
            self.show()

    def _cell(self) -> int:
        return getattr(self._shell, "execution_count", 0)

    # ------------------------------------------------------------------ for whoever waits for replicas

    def show_above(self, place: str) -> None:
        """Wait for the first step that ends, then be displayed in the empty display of this id."""
        self._timeline.update()
        self._seen, self._waits_in, self._shown = self._timeline.last_step, place, True

    def reduces_by(self, operation: str) -> None:
        """The replicas reduce by these cross-device ops from now on."""
        self._board.operation = operation

    def tick(self, pending: object = None) -> None:
        """Draw, if it is time to: called many times a second while replicas work."""
        if not self._shown or threading.current_thread() is not threading.main_thread():
            return
        if not self._buttons.working:
            self._buttons.working = self._buttons.armed = True
            self._woken = clock()
            self._prepare()
        if self._board.live:
            self._board.tick()
        elif time.monotonic() >= self._due:
            self._due = time.monotonic() + LOOK_SECONDS
            self._timeline.update()
            if self._timeline.last_step > self._seen:
                self._wake()

    def ended(self, report: Report) -> None:
        """A call has ended like this."""
        self._acknowledge()
        self._buttons.working = False
        outcome = _outcome(report)
        if self._buttons.state is Phase.STOPPING and (outcome[0] is Phase.STOPPED or self._obeyed()):
            outcome = (Phase.STOPPED, "")
            self._buttons.rest()
        if outcome[0] is Phase.FINISHED and self._outcome == (Phase.STOPPED, "") and not self._news():
            # What fit asks for after it was stopped is no training.
            outcome = self._outcome
        elif outcome[0] is Phase.STOPPED:
            self._news()
        self._outcome = outcome
        self._raised = outcome[0] is Phase.FAILED and not report.crashes and not report.timed_out
        self._latest, self._board.note = self._outcome

    def between_calls(self) -> None:
        """In a loop that calls the replicas step by step: hold here, or end it, if a button was pressed.

        Raises TrainingStopped.
        """
        while self._buttons.state is Phase.PAUSING:
            self._board.tick()
            time.sleep(HOLD_SECONDS)
        if self._buttons.state is Phase.STOPPING:
            self._acknowledge()
            self._buttons.rest()
            self._latest, self._board.note = self._outcome = (Phase.STOPPED, "")
            raise TrainingStopped(
                "stopped between two calls, by the Stop button; the variables are those of that step"
            )

    def cell_ended(self, result: object = None) -> None:
        """The cell has ended: leave the picture, if there is something new on it."""
        outcome, self._outcome = self._outcome, None
        self._buttons.rest()
        self._buttons.armed = False
        if not self._shown or outcome is None:
            return
        self._timeline.update()
        phase, note = outcome
        # Of replicas that hung or died there is something to see before any step; an error says all by itself.
        untrained = self._raised and not self._timeline.last_step
        ended_early = phase in (Phase.FAILED, Phase.INTERRUPTED) and not untrained
        if self._timeline.last_step <= self._seen and not (ended_early and self._board.live):
            # The buttons have nothing to do any more.
            self._board.tick()
            return
        if not self._board.live:
            self._wake()
        self._board.title = self._title()
        self._board.finish(phase, note)
        self._note_rest()

    def close(self) -> None:
        """The replicas are stopped: leave the picture."""
        self._buttons.rest()
        if self._board.live and self._timeline.last_step:
            self._board.finish(Phase.FINISHED)
        elif self._board.live:
            self._board.leave()
        self._shown = False
        if self._follows_cells:
            self._shell.events.unregister("post_run_cell", self.cell_ended)
            self._follows_cells = False
        self._use(None)

    # ------------------------------------------------------------------ how

    def _follow_cells(self) -> None:
        if not self._follows_cells and hasattr(self._shell, "events"):
            self._shell.events.register("post_run_cell", self.cell_ended)
            self._follows_cells = True

    def _prepare(self) -> None:
        self._board.title = self._title()
        if self._generation != self._pool.generation:
            self._generation = self._pool.generation
            notice = self._pool.notice()
            try:
                self._use(None if notice is None else machine_of(notice.devices, notice.places))
            except UsageError:
                # Without a driver that answers, the rest is shown.
                self._use(None)

    def _use(self, machine: Machine | None) -> None:
        before, self._machine = self._machine, machine
        self._board.read_from(machine)
        if before is not None:
            before.close()

    def _acknowledge(self) -> None:
        """Let the screen say what was pressed, if replicas have obeyed before a tick has."""
        held = self._buttons.state is not Phase.RUNNING
        if held and self._shown and threading.current_thread() is threading.main_thread():
            self._board.tick()

    def _wake(self) -> None:
        if self._rested:
            self._timeline.idle(self._rested, self._woken)
        if self._waits_in:
            place, self._waits_in = self._waits_in, ""
            self._board.show(place)
        else:
            self._board.revive()

    def _note_rest(self) -> None:
        self._seen, self._rested = self._timeline.last_step, clock()

    def _news(self) -> bool:
        """Whether a step has ended since this was asked last."""
        self._timeline.update()
        before, self._asked = self._asked, self._timeline.last_step
        return self._asked > before

    def _obeyed(self) -> bool:
        self._timeline.update()
        return all(replica.state is State.STOPPED for replica in self._timeline.snapshot(steps=1).replicas)


@final
class _Buttons:
    """Stop, Pause and Compare: word for the replicas, and what was said last. Called from any thread.

    A word holds over the calls of a cell until it is obeyed or `rest` takes it back.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.state = Phase.RUNNING
        self.working = False
        # Whether a call is under way.
        self.armed = False
        # Whether there was one in this cell: without, there is nothing to end.
        self._said = False
        # Whether the replicas were told anything that may still hold.

    def stop(self) -> None:
        self._say(Phase.STOPPING, Word.STOP)

    def pause(self) -> None:
        self._say(Phase.PAUSING, Word.PAUSE)

    def resume(self) -> None:
        self._say(Phase.RUNNING, Word.GO)

    def compare(self) -> None:
        self._say(self.state, Word.COMPARE)

    def rest(self) -> None:
        """Nothing is wanted any more: what was not obeyed yet is not for what comes later."""
        self._say(Phase.RUNNING, Word.GO)
        self._said = False

    def _say(self, phase: Phase, word: Word) -> None:
        if not self.armed or (word is Word.GO and not self._said):
            return
        self.state, self._said = phase, True
        try:
            self._pool.steer(word)
        except PoolClosed:
            # Nobody works any more.
            self.state = Phase.RUNNING


def _outcome(report: Report) -> tuple[Phase, str]:
    if report.crashes:
        return Phase.FAILED, "; ".join(map(str, report.crashes))
    names = {failure.type_name for failure in report.failures.values()}
    if TrainingStopped.__name__ in names:
        return Phase.STOPPED, ""
    if report.timed_out:
        return Phase.FAILED, "stopped after its --timeout"
    if report.interrupted:
        return Phase.INTERRUPTED, ""
    if names:
        # Others only tell that they waited for it.
        first = {r: f for r, f in report.failures.items() if not f.secondary and not f.interrupted}
        replica_id, failure = next(iter((first or report.failures).items()))
        return Phase.FAILED, f"replica {replica_id} raised {failure.type_name}: {failure.message}"
    return Phase.FINISHED, ""
