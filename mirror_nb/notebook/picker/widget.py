"""The picker in a notebook: boxes to tick, three buttons, and the line of code that does the same. Starts no thread.

Buttons and boxes are heard in whatever thread the front end's messages arrive in. Only texts are changed there; what
is done to replicas is done in the kernel's main thread, after the cell that runs: replicas end with the thread that
started them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, final

from IPython.core.getipython import get_ipython
from ipywidgets import HTML, BoundedIntText, Box, Button, Checkbox, Dropdown, RadioButtons, VBox

from mirror_nb import readable
from mirror_nb.notebook.picker import page
from mirror_nb.notebook.picker.choice import Choice, Driven, Offers
from mirror_nb.notebook.picker.inventory import Machine
from mirror_nb.notebook.view import let_go, view_of

READING_SECONDS = 2.0
# Between two readings of the devices.
FRESH_SECONDS = 60.0
# After the last touch they are left alone: a notebook that is closed would gather messages over night.
SUGGESTED = 2
# CPU replicas, where there is no GPU and nothing runs.
_TRAVEL = {"none": "they are", "bf16": "bf16, half the bytes"}


@final
class Picker:
    """Boxes and buttons for the replicas that `driven` starts. For one kernel; showing it twice shows the same.

    `machine` reads the devices. `later` is given what is to be done in the main thread; if left out, the event loop of
    the thread that makes the picker, or nobody: then it is done at once.
    """

    def __init__(
        self,
        driven: Driven,
        *,
        machine: Machine | None = None,
        later: Callable[[Callable[[], None]], object] | None = None,
        shell: Any = None,
    ) -> None:
        self._driven = driven
        self._shell: Any = shell if shell is not None else get_ipython()
        self._loop = _running_loop()
        self._later = later if later is not None else self._in_main_thread
        self._machine = machine if machine is not None else Machine(driven.gpus())
        self._lock = threading.RLock()
        # Boxes are ticked in one thread while readings come in another.
        self._standing = driven.standing()
        self._inventory = self._machine.look()
        self._offers = Offers()
        self._offered_for: tuple[str, ...] = ()
        self._busy = False
        self._touched = -FRESH_SECONDS
        self._ticking = False
        self._make()
        self._first_choice()
        self._offer()
        self._draw()

    # ------------------------------------------------------------------ in the notebook

    def show(self) -> None:
        """Display it below the running cell. Where widgets are not shown, a text says what to do instead."""
        if self._shell is None:
            return
        if getattr(self._shell, "kernel", None) is None:
            self._shell.display_pub.publish({"text/plain": page.TEXT})
            return
        self.refresh()
        self._shell.display_pub.publish(self.bundle())
        self._touch()

    def bundle(self) -> dict[str, Any]:
        """Return what is displayed: the widgets, and a text for who cannot show them."""
        return {"text/plain": page.TEXT, **view_of(self.board)}

    def refresh(self) -> None:
        """Read the devices anew, and see which replicas run."""
        with self._lock:
            self._inventory = self._machine.look()
            self._see()

    def look_at_replicas(self) -> None:
        """See which replicas run: a cell may have started or stopped some."""
        if self._driven.standing() != self._standing:
            self._see()

    def choice(self) -> Choice:
        """Return what is picked; for a restart all is named, since what is not would stay as it runs."""
        running = bool(self._standing.devices)
        chosen = tuple(device for device, box in self.boxes.items() if box.value)
        devices = chosen or tuple(f"cpu:{i}" for i in range(self.cpus.value))
        return Choice(
            devices=devices,
            operation=_picked(self.operations, running),
            bucket_size=_picked(self.bucket_sizes, running),
            compression=_picked(self.compressions, running),
        )

    def close(self) -> None:
        """Let go of widgets and drivers."""
        self._touched = -FRESH_SECONDS
        let_go(self.board)
        self._machine.close()

    # ------------------------------------------------------------------ the widgets

    def _make(self) -> None:
        self._state, self._links, self._line, self._said = HTML(), HTML(), HTML(), HTML()
        self.boxes = {card.device: Checkbox(description=card.device, indent=False) for card in self._inventory.gpus}
        self._bodies = {device: HTML() for device in self.boxes}
        most = max(8, 2 * self._inventory.cores)
        self.cpus = BoundedIntText(description="CPU replicas", min=0, max=most)
        self._cpu_body = HTML()
        cards = [VBox([box, self._bodies[device]]) for device, box in self.boxes.items()]
        cards.append(VBox([self.cpus, self._cpu_body]))
        self.operations = RadioButtons(description="Cross-device ops")
        self.bucket_sizes = Dropdown(description="Bucket size")
        self.compressions = Dropdown(description="Gradients travel as", style={"description_width": "initial"})
        self.measure = Button(description="Measure", tooltip="Time all-reduces on the picked devices")
        self.start = Button(description="Start", icon="play", button_style="primary")
        self.restart = Button(description="Restart", icon="refresh", tooltip="Names in the replicas are lost")
        self.stop = Button(description="Stop", icon="stop", tooltip="End the replicas; names in them are lost")
        self._fields = [VBox([self.operations, self.measure]), VBox([self.bucket_sizes]), VBox([self.compressions])]
        self._options = _classed(Box(self._fields), "mnb-options")
        self.board = VBox(
            [
                _classed(HTML(page.STYLE), "mnb-style"),
                _classed(HTML(page.GONE), "mnb-gone"),
                _classed(self._state, "mnb-state"),
                _classed(Box([_classed(card, "mnb-card") for card in cards]), "mnb-cards"),
                self._links,
                self._options,
                _classed(self._line, "mnb-line"),
                _classed(Box([self.start, self.restart, self.stop]), "mnb-go"),
                self._said,
            ]
        )
        _classed(_classed(self.board, "mnb"), "mnb-picker")
        for field in self._fields:
            _classed(field, "mnb-field")
        self._listen()

    def _listen(self) -> None:
        for box in self.boxes.values():
            box.observe(self._gpu_ticked, "value")
        self.cpus.observe(self._cpus_changed, "value")
        for widget in (self.operations, self.bucket_sizes, self.compressions):
            widget.observe(self._option_changed, "value")
        self.start.on_click(lambda _: self._press("starting", self._driven.start))
        self.restart.on_click(lambda _: self._press("restarting", self._driven.restart))
        self.stop.on_click(lambda _: self._press("stopping", lambda choice: self._driven.stop()))
        self.measure.on_click(lambda _: self._press("measuring", self._driven.measure))

    def _first_choice(self) -> None:
        """Tick what runs; else all GPUs, as the strategy would take; else a few CPU replicas."""
        running = self._standing.devices
        for device, box in self.boxes.items():
            box.value = device in running if running else True
        on_cpu = sum(device.startswith("cpu") for device in running)
        if on_cpu or not self.boxes:
            self.cpus.value = on_cpu or min(SUGGESTED, self._inventory.cores)

    # ------------------------------------------------------------------ what a person does

    def _gpu_ticked(self, change: Any) -> None:
        with self._lock:
            # Replicas are of one kind: no cross-device ops span both.
            if change["new"]:
                self.cpus.value = 0
            self._chosen()

    def _cpus_changed(self, change: Any) -> None:
        with self._lock:
            if change["new"]:
                for box in self.boxes.values():
                    box.value = False
            self._chosen()

    def _option_changed(self, change: Any) -> None:
        with self._lock:
            self._draw_choice()
        self._touch()

    def _chosen(self) -> None:
        self._draw()
        self._touch()
        # What fits is known to the session, which is the main thread's.
        self._later(self._offer)

    def _press(self, doing: str, act: Callable[[Choice], str]) -> None:
        with self._lock:
            if self._busy:
                return
            self._busy = True
            self._say(f"{doing} … (after the cell that runs, if one does)")
            self._draw_buttons()
        self._touch()
        choice = self.choice()
        self._later(lambda: self._act(act, choice))

    def _act(self, act: Callable[[Choice], str], choice: Choice) -> None:
        """Do what a button stands for, in the main thread, and say what came of it."""
        try:
            said, bad = act(choice), False
        except Exception as error:
            # Whatever it is, there is no cell to show it: its message belongs where the button was pressed.
            said, bad = f"{type(error).__name__}: {error}", True
        finally:
            # An interrupt passes on, and leaves the buttons usable.
            self._busy = False
        with self._lock:
            self._offered_for = ()
            self._offer()
            self.refresh()
            self._say(said, bad)

    # ------------------------------------------------------------------ what is on the screen

    def _see(self) -> None:
        with self._lock:
            before, self._standing = self._standing, self._driven.standing()
            if self._standing != before and not self._busy:
                # What a button was said to have done is undone by now.
                self._say("")
            self._draw()

    def _offer(self) -> None:
        """Show what can be picked for these devices; what was picked stays picked where it still is offered."""
        with self._lock:
            devices = self.choice().devices
            if devices == self._offered_for:
                return
            self._offered_for = devices
            offers = self._offers = self._driven.offers(devices) if devices else Offers()
            labels = [(page.operation(its, i == 0), its.name) for i, its in enumerate(offers.operations)]
            _fill(self.operations, labels)
            _fill(self.bucket_sizes, [(readable.size(size), size) for size in offers.bucket_sizes])
            _fill(self.compressions, [(_TRAVEL[name], name) for name in offers.compressions])
            self._draw()

    def _draw(self) -> None:
        with self._lock:
            chosen = self.choice().devices
            ids = {device: i for i, device in enumerate(chosen)}
            self._state.value = page.state(self._standing)
            for card in self._inventory.gpus:
                body = page.gpu(card, ids.get(card.device), self._standing.pids)
                self._bodies[card.device].value = body
            self._cpu_body.value = page.cpu(self._inventory, self.cpus.value)
            _put(self._links, page.links(self._inventory, chosen) + page.note(self._inventory.note))
            self._draw_choice()
            self._draw_buttons()

    def _draw_choice(self) -> None:
        choice = self.choice()
        self._line.value = page.line(choice.line(bool(self._standing.devices)) if choice.devices else "")

    def _draw_buttons(self) -> None:
        running, chosen = bool(self._standing.devices), bool(self.choice().devices)
        self.start.disabled = self._busy or running or not chosen
        self.restart.disabled = self._busy or not running or not chosen
        self.stop.disabled = self._busy or not running
        self.measure.disabled = self._busy or not chosen
        offers = self._offers
        shown = (bool(offers.operations), bool(offers.bucket_sizes), bool(offers.compressions))
        for field, there in zip(self._fields, shown, strict=True):
            field.layout.display = None if there else "none"
        self.measure.layout.display = None if offers.measurable else "none"
        self._options.layout.display = None if any(shown) else "none"

    def _say(self, text: str, bad: bool = False) -> None:
        self._said.value = page.said(text, bad)

    # ------------------------------------------------------------------ in the main thread

    def _in_main_thread(self, act: Callable[[], None]) -> None:
        if self._loop is None or self._loop.is_closed():
            act()
        else:
            self._loop.call_soon_threadsafe(act)

    def _touch(self) -> None:
        self._touched = time.monotonic()
        if self._loop is not None and not self._ticking:
            self._ticking = True
            self._loop.call_soon_threadsafe(self._tick_later)

    def _tick_later(self) -> None:
        assert self._loop is not None
        self._loop.call_later(READING_SECONDS, self._tick)

    def _tick(self) -> None:
        """Read the devices, while somebody looks, as far as is known."""
        if time.monotonic() - self._touched > FRESH_SECONDS:
            self._ticking = False
            return
        self.refresh()
        self._tick_later()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        # As in a terminal: there are no other threads that a press could come in.
        return None


def _classed(widget: Any, name: str) -> Any:
    widget.add_class(name)
    return widget


def _fill(widget: Any, options: list[tuple[str, Any]]) -> None:
    before, values = widget.value, [value for _, value in options]
    if list(widget.options) != options:
        widget.options = options
        widget.value = before if before in values else values[0] if values else None


def _put(widget: Any, value: str) -> None:
    """Set a text; an empty one takes no room."""
    widget.value = value
    widget.layout.display = None if value else "none"


def _picked(widget: Any, running: bool) -> Any:
    default = widget.options[0][1] if widget.options and not running else None
    return None if widget.value == default else widget.value
