"""The dashboard in a notebook: widgets, a rate, three buttons, and the picture that stays. Starts no thread.

`tick()` is called by whoever waits for the cell, many times a second; it draws when it is time to: the header, and one
half of the panels in turns. Drawing takes two percent of the time at most, so that a busy machine gets fewer frames.
"""

from __future__ import annotations

import base64
import io
import time
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, final

from IPython.core.getipython import get_ipython

from mirror_nb.notebook.dashboard import page, routes, words
from mirror_nb.notebook.dashboard.frame import Frame, Phase
from mirror_nb.notebook.view import is_closed, let_go, view_of
from mirror_nb.telemetry.findings import findings
from mirror_nb.telemetry.machine import SHORTEST, Machine, Reading
from mirror_nb.telemetry.snapshot import Half, Snapshot
from mirror_nb.telemetry.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FASTEST = 0.2
# Seconds between two frames.
SHARE = 0.02
# Of the time, that drawing may take.
OBEYING_SECONDS = 0.1
# Between two frames after Pause was pressed, until the replicas hold: whoever pressed it looks for that.
READING_SECONDS = 1.0
# Between two readings of the devices; drivers take up to a millisecond for one.
HISTORY_SECONDS = 30
DPI = 76
# CSS pixels an inch of the still picture: it is as wide as a cell. Each has one and a half pixels.
TEXT = (
    "mirror_nb dashboard. If nothing is drawn here, this front end shows no widgets: open the notebook in JupyterLab, "
    "Notebook 7 or VS Code (pip install ipywidgets), or run `python -m mirror_nb watch` in a terminal."
)
# The same in every run, so that notebooks can be compared. Seen only where widgets and pictures are not.
NOTHING = "mirror_nb dashboard: no step was trained, so there is nothing to show."


class Controls(Protocol):
    """What the buttons do. Called from any thread, so each only leaves word; `state` follows when it is heard."""

    def stop(self) -> None:
        """End the training after the current step, at the same step on all replicas."""

    def pause(self) -> None:
        """Hold after the current step."""

    def resume(self) -> None:
        """Go on."""

    def compare(self) -> None:
        """After the current step, see whether all replicas have equal parameters; the training goes on."""

    @property
    def state(self) -> Phase:
        """Where the training stands."""

    @property
    def armed(self) -> bool:
        """Whether there is anything to end or to hold."""


@final
class Dashboard:
    """A picture of a timeline, live while it grows and still at its end.

    `devices`: the names of the replicas' devices, as `machine` calls them. `machine` and `timeline` stay the caller's.
    For one thread, that of the cell.
    """

    def __init__(
        self,
        timeline: Timeline,
        *,
        controls: Controls | None = None,
        title: str = "",
        operation: str = "",
        devices: Sequence[str] = (),
        machine: Machine | None = None,
        shell: Any = None,
    ) -> None:
        self.title, self.operation = title, operation
        self.speed_up: float | None = None
        # Throughput against one replica's, when somebody has measured that.
        self.note = ""
        # A sentence above all panels, as that a replica has died; empty: none.
        self._timeline = timeline
        self._controls = controls
        self._devices = tuple(devices)
        self._machine = machine
        self._shell: Any = shell if shell is not None else get_ipython()
        self._readings: deque[Reading] = deque()
        self._view: _View | None = None
        self._places: dict[str, str] = {}
        # Ids of the displays that show it, and the text that each has.
        self._latest: Frame | None = None
        self._half = Half.MEETINGS
        # What was drawn last, and which half of it anew.
        self._ended: Phase | None = None
        self._due = self._read_at = 0.0
        self._cost = 0.0
        # Seconds of processor that a frame takes, smoothed.

    # ------------------------------------------------------------------ in the notebook

    def show(self, into: str = "") -> None:
        """Display it below the running cell; again, display the same once more; after its end, the still picture.

        `into`: the id of a display that is there already, whose text is empty. Where nothing can be drawn, as in a
        terminal, a text says what to do.
        """
        if self._shell is None:
            return
        if getattr(self._shell, "kernel", None) is None:
            self._shell.display_pub.publish({"text/plain": TEXT})
            return
        place = into or uuid.uuid4().hex
        # An update whose text is another one would make a notebook differ from its saved self.
        self._places[place] = "" if into else TEXT
        if self._ended is not None:
            self._publish(place, *_still(self.frame()), update=bool(into))
            return
        if self._view is None or is_closed(self._view.board):
            self._view = _View(self._shell.kernel, self._controls)
            self._draw()
        self._publish(place, self._view.mime(), update=bool(into))

    @property
    def live(self) -> bool:
        """Whether it is on a screen and follows the rings."""
        return self._view is not None and self._ended is None

    def revive(self) -> None:
        """After its end: other work has begun, so follow the rings again, wherever it is shown."""
        self._ended, self.note = None, ""
        if self._places:
            self._view = _View(self._shell.kernel, self._controls)
            self._draw()
            for place in self._places:
                self._publish(place, self._view.mime(), update=True)

    def read_from(self, machine: Machine | None) -> None:
        """Take readings of the devices from there; the one before stays its owner's."""
        self._machine = machine

    def tick(self, now: float | None = None) -> bool:
        """Draw if it is time to; return whether it did. `now`: seconds of `time.monotonic`."""
        if self._view is None or self._ended is not None:
            return False
        routes.pump(self._shell.kernel)
        now = time.monotonic() if now is None else now
        if now < self._due and not self._view.outdated():
            return False
        began = time.thread_time()
        self._half = Half.MEETINGS if self._half is Half.COURSE else Half.COURSE
        phase = self._draw(now, self._half).phase
        took = time.thread_time() - began
        self._cost = took if not self._cost else 0.8 * self._cost + 0.2 * took
        self._due = now + (OBEYING_SECONDS if phase is Phase.PAUSING else max(FASTEST, self._cost / SHARE))
        return True

    def finish(self, phase: Phase = Phase.FINISHED, note: str = "") -> None:
        """Put the still picture in the place of the live one: it is what a saved notebook shows."""
        if self._ended is not None:
            return
        self._ended = phase
        self.note = note or self.note
        if not self._places:
            return
        # A short cell may have ended before any reading told what its devices did.
        self._read(time.monotonic(), SHORTEST)
        # A stop may be obeyed before anybody has seen that it was heard: the page goes on to say so until the picture,
        # which takes a second to draw, says how it ended.
        still = _still(self.frame() if phase is Phase.STOPPED else self._draw())
        # Not beside the widget: JupyterLab would choose that, and show an error when its kernel is gone.
        for place in self._places:
            self._publish(place, *still, update=True)
        self._close_view()

    def leave(self) -> None:
        """Put a line in the place of the live one: there was nothing to see."""
        self._ended = Phase.WAITING
        for place in self._places:
            self._places[place] = NOTHING
            self._publish(place, {}, update=True)
        self._close_view()

    def _close_view(self) -> None:
        if self._view is not None:
            self._view.close()
            self._view = None

    # ------------------------------------------------------------------ anywhere

    def frame(self, half: Half | None = None) -> Frame:
        """Read the rings and return what there is to show now; of one half, what is not shown is that of the last."""
        self._timeline.update()
        last = self._latest
        shot = self._timeline.snapshot(half=half, earlier=None if last is None else last.snapshot)
        readings = tuple(self._readings)
        found = findings(shot, readings) if last is None or half is not Half.COURSE else last.findings
        self._latest = Frame(
            snapshot=shot,
            findings=found,
            readings=readings,
            devices=self._devices,
            title=self.title,
            operation=self.operation,
            speed_up=self.speed_up,
            phase=self._phase(shot),
            note=self.note,
            since=self._timeline.forgotten,
        )
        return self._latest

    def figure(self, phase: Phase | None = None) -> Figure:
        """Return the same panels as a matplotlib figure, 13 × 8.5 inches, on white; `phase`: as in `finish`."""
        from mirror_nb.notebook.dashboard.still import draw

        self._read(time.monotonic())
        return draw(_in(phase, self.frame()))

    def text(self, phase: Phase | None = None) -> str:
        """Return the key numbers and the findings in sentences."""
        return words.alternative(_in(phase, self.frame()))

    # ------------------------------------------------------------------ how

    def _draw(self, now: float | None = None, half: Half | None = None) -> Frame:
        self._read(time.monotonic() if now is None else now)
        if self._view is not None:
            # Before the frame asks for the same: what is pressed while it is drawn is for the next one.
            self._view.hear()
        frame = self.frame(half)
        if self._view is not None:
            self._view.draw(frame, half)
        return frame

    def _read(self, now: float, apart: float = READING_SECONDS) -> None:
        """Ask the devices, if the last time was so many seconds ago."""
        if self._machine is None or (self._readings and now - self._read_at < apart):
            return
        self._read_at = now
        self._readings.extend(self._machine.read())
        while self._readings[-1].at - self._readings[0].at > HISTORY_SECONDS * 1e9:
            self._readings.popleft()

    def _phase(self, shot: Snapshot) -> Phase:
        if self._ended is not None:
            return self._ended
        said = self._controls.state if self._controls is not None else Phase.RUNNING
        told = Phase.of(shot)
        return told if said is Phase.RUNNING or (said is Phase.PAUSING and told is Phase.PAUSED) else said

    def _publish(
        self, place: str, bundle: dict[str, Any], metadata: dict[str, Any] | None = None, update: bool = False
    ) -> None:
        with_text = {"text/plain": self._places[place], **bundle}
        self._shell.display_pub.publish(with_text, metadata, transient={"display_id": place}, update=update)


@final
class _View:
    """The widgets: the style, sent once; the page, sent anew each frame; the buttons."""

    def __init__(self, kernel: Any, controls: Controls | None) -> None:
        from ipywidgets import HTML, Button, HBox, VBox

        self._controls = controls
        self._seen: tuple[Phase, bool] | None = None
        # What the buttons show.
        self._said = (Phase.RUNNING, False)
        # What the controls said before the page was drawn.
        self._pages, self._page = page.Page(), HTML()
        self._stop = Button(description="Stop", icon="stop", tooltip="End after this step; variables are kept")
        self._pause = Button(description="Pause", icon="pause", tooltip="Hold after this step")
        self._compare = Button(
            description="Compare",
            icon="check",
            tooltip="See after this step whether all replicas have equal parameters",
        )
        self._buttons = HBox([self._compare, self._pause, self._stop] if controls is not None else [])
        self._buttons.add_class("mnb-buttons")
        gone = HTML(page.GONE)
        gone.add_class("mnb-gone")
        self.board = VBox([HTML(page.STYLE), gone, self._buttons, self._page])
        self.board.add_class("mnb-board")
        if controls is not None:
            # In another thread: the controls are told, and the next tick shows it.
            self._stop.on_click(lambda _: controls.stop())
            self._pause.on_click(lambda _: (controls.resume if controls.state in _HELD else controls.pause)())
            self._compare.on_click(lambda _: controls.compare())
        for button in (self._stop, self._pause, self._compare):
            routes.free(kernel, button.comm)

    def mime(self) -> dict[str, Any]:
        """Return what tells a front end to show the widgets."""
        return view_of(self.board)

    def draw(self, frame: Frame, half: Half | None = None) -> None:
        """Show a frame, or half of it anew."""
        self._page.value = self._pages.body(frame, half)
        shown = frame.phase, self._said[1]
        if self._controls is not None and shown != self._seen:
            self._seen = shown
            self._label(*shown)

    def hear(self) -> None:
        """Note what the controls say: the page that is drawn next shows that, or what they say since."""
        if self._controls is not None:
            self._said = self._controls.state, self._controls.armed

    def outdated(self) -> bool:
        """Whether the screen does not say yet what a button did, or that there is something to press them for."""
        return self._controls is not None and (self._controls.state, self._controls.armed) != self._said

    def close(self) -> None:
        """Let go of all widgets, in the front end too."""
        let_go(self.board, self._stop, self._pause, self._compare)

    def _label(self, phase: Phase, armed: bool) -> None:
        self._pause.description, self._pause.icon = ("Resume", "play") if phase in _HELD else ("Pause", "pause")
        for button in (self._stop, self._pause, self._compare):
            button.disabled = phase is Phase.STOPPING or phase.over or not armed


_HELD = (Phase.PAUSING, Phase.PAUSED)


def _in(phase: Phase | None, frame: Frame) -> Frame:
    return frame if phase is None else replace(frame, phase=phase)


def _still(frame: Frame) -> tuple[dict[str, str], dict[str, Any]]:
    """Return a frame as what a notebook saves: a picture, and its size and text."""
    from mirror_nb.notebook.dashboard.still import draw

    figure = draw(frame)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=1.5 * DPI)
    width, height = (round(inches * DPI) for inches in figure.get_size_inches())
    picture = base64.b64encode(file.getvalue()).decode("ascii")
    about = {"width": width, "height": height, "alt": words.alternative(frame)}
    return {"image/png": picture}, {"image/png": about}
