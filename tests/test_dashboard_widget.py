"""The live dashboard without a front end: what is displayed, how often it draws, and what the buttons do."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import itertools
import types
from typing import Any

import pytest
from ipywidgets.widgets.widget import _instances as widgets_that_live
from made_rings import MadeRings, readings

from mirror_nb.notebook.dashboard import page, routes, widget
from mirror_nb.notebook.dashboard.frame import Phase
from mirror_nb.notebook.dashboard.widget import TEXT, Dashboard
from mirror_nb.telemetry.samples import Mark

VIEW = "application/vnd.jupyter.widget-view+json"


class Publisher:
    """Keeps what a front end would be sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[dict[str, Any], Any, str, bool]] = []

    def publish(self, data, metadata=None, *, transient=None, update=False):
        self.sent.append((data, metadata, (transient or {}).get("display_id", ""), update))


class Shell:
    def __init__(self, kernel: Any = None) -> None:
        self.kernel = kernel
        self.display_pub = Publisher()


class Word:
    """Controls that keep what they were told."""

    def __init__(self) -> None:
        self.state, self.armed = Phase.RUNNING, True

    def stop(self) -> None:
        self.state = Phase.STOPPING

    def pause(self) -> None:
        self.state = Phase.PAUSING

    def resume(self) -> None:
        self.state = Phase.RUNNING

    def compare(self) -> None:
        self.compared = True


@pytest.fixture
def rings():
    with MadeRings(2) as made:
        made.step(30)
        made.log_loss()
        yield made


@pytest.fixture
def shell():
    return Shell(types.SimpleNamespace())


def buttons(dashboard) -> dict[str, Any]:
    return {button.description: button for button in dashboard._view._buttons.children}


def test_it_is_displayed_as_widgets_with_a_text_that_is_always_the_same(rings, shell):
    dashboard = Dashboard(rings.timeline, shell=shell, title="a network")
    dashboard.show()
    dashboard.show()
    assert [set(data) for data, *_ in shell.display_pub.sent] == [{VIEW, "text/plain"}] * 2
    assert {data["text/plain"] for data, *_ in shell.display_pub.sent} == {TEXT}
    assert len({place for *_, place, _ in shell.display_pub.sent}) == 2
    assert "a network" in dashboard._view._page.value


def test_in_a_terminal_a_text_says_what_to_do(rings):
    shell = Shell()
    dashboard = Dashboard(rings.timeline, shell=shell)
    dashboard.show()
    assert shell.display_pub.sent[0][0] == {"text/plain": TEXT}
    assert "python -m mirror_nb watch" in TEXT
    assert dashboard.tick() is False
    dashboard.finish()
    assert len(shell.display_pub.sent) == 1


def test_outside_of_ipython_nothing_is_displayed_and_the_figure_is_there(rings, monkeypatch):
    monkeypatch.setattr(widget, "get_ipython", lambda: None)
    dashboard = Dashboard(rings.timeline)
    dashboard.show()
    assert dashboard.tick() is False
    assert len(dashboard.figure().axes) == 8
    assert "running on 2 replicas" in dashboard.text().lower()


def test_it_draws_five_times_a_second_at_most(rings, shell, monkeypatch):
    monkeypatch.setattr(widget.time, "thread_time", lambda: 0.0)
    dashboard = Dashboard(rings.timeline, shell=shell)
    dashboard.show()
    drawn = [dashboard.tick(100 + i / 16) for i in range(21)]
    assert sum(drawn) == 6


def test_slow_frames_come_more_rarely(rings, shell, monkeypatch):
    clock = itertools.count(0.0, 0.049)
    monkeypatch.setattr(widget.time, "thread_time", lambda: next(clock))
    dashboard = Dashboard(rings.timeline, shell=shell)
    dashboard.show()
    # A frame of 49 ms, of which there is to be one in 2.45 seconds.
    assert [at / 8 for at in range(80) if dashboard.tick(100 + at / 8)] == [0.0, 2.5, 5.0, 7.5]


def test_whoever_pressed_pause_sees_it_obeyed_at_once_also_where_frames_are_slow(rings, shell, monkeypatch):
    clock = itertools.count(0.0, 0.049)
    monkeypatch.setattr(widget.time, "thread_time", lambda: next(clock))
    word = Word()
    dashboard = Dashboard(rings.timeline, shell=shell, controls=word)
    dashboard.show()
    word.pause()
    assert dashboard.tick(100.0)
    assert "pausing" in dashboard._view._page.value
    # The other one has begun a step, in which it waits.
    rings.writers[0].mark(Mark.PAUSED, rings.steps, 0, at=rings.now)
    assert dashboard.tick(100.1)
    assert ">paused<" in dashboard._view._page.value
    assert not dashboard.tick(101.0)


def test_a_frame_shows_what_was_written_meanwhile(rings, shell):
    dashboard = Dashboard(rings.timeline, shell=shell)
    dashboard.show()
    rings.step(12)
    dashboard.tick(1e9)
    assert "<b>42</b> steps" in dashboard._view._page.value


def test_each_frame_draws_one_half_and_two_show_all_that_was_written_meanwhile(rings, shell):
    dashboard = Dashboard(rings.timeline, shell=shell)
    dashboard.show()
    rings.slowness[1] = 2.0
    rings.step(60)
    rings.log_loss()
    seen = []
    for i in range(2):
        dashboard.tick(100.0 + i)
        seen.append(dashboard._view._page.value)
    whole = page.Page().body(dashboard.frame())
    panels = [text[text.index('<div class="grid') :] for text in (*seen, whole)]
    # The second also marks the lines of whom a finding of it names.
    assert len(set(panels)) == 2
    assert panels[1] == panels[2]


def test_stop_tells_the_controls_and_the_screen_follows_at_once(rings, shell):
    word = Word()
    dashboard = Dashboard(rings.timeline, shell=shell, controls=word)
    dashboard.show()
    assert dashboard.tick(100.0)
    buttons(dashboard)["Stop"].click()
    assert word.state is Phase.STOPPING
    assert dashboard.tick(100.01)
    assert 'class="pill stopping"' in dashboard._view._page.value
    assert all(button.disabled for button in buttons(dashboard).values())


def test_what_is_pressed_while_a_frame_is_drawn_is_on_the_next_which_comes_at_once(rings, shell, monkeypatch):
    word = Word()
    dashboard = Dashboard(rings.timeline, shell=shell, controls=word)
    dashboard.show()
    body = dashboard._view._pages.body

    def pressed_meanwhile(*args):
        monkeypatch.setattr(dashboard._view._pages, "body", body)
        word.stop()
        return body(*args)

    monkeypatch.setattr(dashboard._view._pages, "body", pressed_meanwhile)
    assert dashboard.tick(100.0)
    assert 'class="pill running"' in dashboard._view._page.value
    assert dashboard.tick(100.01)
    assert 'class="pill stopping"' in dashboard._view._page.value


def test_without_buttons_one_replica_that_holds_is_enough_too():
    with MadeRings(2) as rings:
        rings.step(3)
        for mark, phase in ((Mark.PAUSED, Phase.PAUSED), (Mark.RUNNING, Phase.RUNNING), (Mark.STOPPED, Phase.RUNNING)):
            rings.writers[0].mark(mark, rings.steps, 0, at=rings.now)
            rings.timeline.update(now=rings.now)
            assert Phase.of(rings.timeline.snapshot(now=rings.now)) is phase
        rings.mark(Mark.STOPPED)
        rings.timeline.update(now=rings.now)
        assert Phase.of(rings.timeline.snapshot(now=rings.now)) is Phase.STOPPED


def test_buttons_that_would_do_nothing_cannot_be_pressed(rings, shell):
    word = Word()
    word.armed = False
    dashboard = Dashboard(rings.timeline, shell=shell, controls=word)
    dashboard.show()
    assert all(button.disabled for button in buttons(dashboard).values())
    word.armed = True
    assert dashboard.tick(100.0)
    assert not any(button.disabled for button in buttons(dashboard).values())
    word.armed = False
    assert dashboard.tick(100.01)
    assert all(button.disabled for button in buttons(dashboard).values())


def test_no_line_is_marked_without_a_finding(rings, shell):
    dashboard = Dashboard(rings.timeline, shell=shell)
    rings.slowness[1] = 2.0
    rings.step(40)
    dashboard.show()
    assert "r1 is slow" in dashboard._view._page.value
    rings.slowness[1] = 1.0
    rings.step(60)
    for i in range(4):
        dashboard.tick(100.0 + i)
        page = dashboard._view._page.value
        assert ("r1 is slow" in page) == ('r1 b"' in page)


def test_where_nothing_was_trained_a_line_is_left(shell):
    with MadeRings(2) as made:
        dashboard = Dashboard(made.timeline, shell=shell)
        dashboard.show()
        assert "no step has ended yet" in dashboard._view._page.value
        dashboard.leave()
    data, _, _, update = shell.display_pub.sent[-1]
    assert (data, update) == ({"text/plain": widget.NOTHING}, True)
    assert not dashboard.live


def test_pause_becomes_resume_and_back(rings, shell):
    word = Word()
    dashboard = Dashboard(rings.timeline, shell=shell, controls=word)
    dashboard.show()
    buttons(dashboard)["Pause"].click()
    assert word.state is Phase.PAUSING
    dashboard.tick(100.0)
    buttons(dashboard)["Resume"].click()
    assert word.state is Phase.RUNNING
    dashboard.tick(200.0)
    assert "Pause" in buttons(dashboard)


def test_compare_tells_the_controls_and_changes_nothing_else(rings, shell):
    dashboard = Dashboard(rings.timeline, controls=(word := Word()), shell=shell)
    dashboard.show()
    buttons(dashboard)["Compare"].click()
    assert (word.compared, word.state) == (True, Phase.RUNNING)
    word.stop()
    dashboard.tick()
    assert buttons(dashboard)["Compare"].disabled


def test_without_controls_there_are_no_buttons(rings, shell):
    dashboard = Dashboard(rings.timeline, shell=shell)
    dashboard.show()
    assert buttons(dashboard) == {}


def test_the_still_picture_takes_the_place_of_the_live_one(rings, shell):
    dashboard = Dashboard(rings.timeline, shell=shell, controls=Word())
    dashboard.show()
    dashboard.finish(Phase.FAILED, "replica 1 died (killed by signal 9)")
    (_, _, place, _), (data, metadata, updated, update) = shell.display_pub.sent
    assert (updated, update) == (place, True)
    # JupyterLab would prefer a widget view, and show an error for it once the kernel is gone.
    assert sorted(data) == ["image/png", "text/plain"]
    assert data["text/plain"] == TEXT
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert "failed on 2 replicas. replica 1 died (killed by signal 9)" in metadata["image/png"]["alt"].lower()
    dashboard.finish()
    assert dashboard.tick(1e9) is False
    assert len(shell.display_pub.sent) == 2
    dashboard.show()
    assert "image/png" in shell.display_pub.sent[2][0]


@pytest.mark.parametrize("controls", [None, Word()], ids=["without buttons", "with buttons"])
def test_nothing_of_it_stays_in_the_kernel_after_its_end(rings, shell, controls):
    """A layout and a style are made with each widget, and ipywidgets keeps what is not closed."""
    before = set(widgets_that_live)
    dashboard = Dashboard(rings.timeline, shell=shell, controls=controls)
    dashboard.show()
    assert set(widgets_that_live) - before
    dashboard.finish()
    assert not set(widgets_that_live) - before


def test_devices_are_read_once_a_second_and_half_a_minute_is_kept(rings, shell):
    # Made once: what reading takes counts as drawing, and slow frames come more rarely.
    made = readings(2, seconds=200)

    class Machine:
        reads = 0

        def read(self):
            self.reads += 1
            return tuple(r for r in made if r.at == self.reads * 1_000_000_000)

        def close(self):
            raise AssertionError("it is the caller's")

    machine = Machine()
    dashboard = Dashboard(rings.timeline, shell=shell, machine=machine, devices=["cuda:0", "cuda:1"])
    dashboard.show()
    for i in range(200):
        dashboard.tick(1e9 + i / 4)
    assert 50 <= machine.reads <= 52
    assert len({reading.at for reading in dashboard.frame().readings}) == 31
    dashboard.finish()


def test_a_short_training_is_shown_with_what_its_devices_did_until_the_end(rings, shell):
    class Machine:
        told: Any = ((0, None), (1, 0.5), (2, 0.9))

        def read(self):
            (at, busy), *self.told = self.told
            made = readings(1, seconds=1)[0]
            return (dataclasses.replace(made, at=at, utilisation=busy),)

    dashboard = Dashboard(rings.timeline, shell=shell, machine=Machine(), devices=["cuda:0", "cuda:1"])
    dashboard.show()
    dashboard._read_at -= 0.2
    dashboard.finish()
    assert dashboard.frame().readings[-1].utilisation == 0.5


def test_nothing_written_is_waiting(shell):
    with MadeRings(2) as made:
        dashboard = Dashboard(made.timeline, shell=shell)
        dashboard.show()
        assert 'class="pill waiting"' in dashboard._view._page.value


# ------------------------------------------------------------------ the ways of a press


def test_a_comm_that_is_routed_by_its_last_shell_is_given_one_of_its_own():
    called = []
    thread = types.SimpleNamespace(
        manager=types.SimpleNamespace(_create_subshell=lambda: called.append(1) or "ours"),
        io_loop=types.SimpleNamespace(add_callback=lambda f: f()),
    )

    class Kernel:
        shell_channel_thread = thread

    kernel = Kernel()
    comms = [types.SimpleNamespace(_reply_subshell_for=lambda data, default: default) for _ in range(2)]
    assert [routes.free(kernel, comm) for comm in comms] == [True, True]
    assert called == [1]
    assert comms[0]._reply_subshell_for({}, None) == "ours"
    assert comms[0]._reply_subshell_for({}, "the front end's") == "the front end's"


def test_other_kernels_are_left_alone():
    comm = types.SimpleNamespace()
    assert routes.free(types.SimpleNamespace(), comm) is False
    assert routes.free(types.SimpleNamespace(), types.SimpleNamespace(_reply_subshell_for=None)) is False
    assert routes.pump(types.SimpleNamespace()) == 0


def test_on_ipykernel_6_only_widget_messages_overtake_the_running_cell():
    class Frame:
        def __init__(self, kind):
            self.bytes = kind

    handled, parents = [], ["the cell"]

    async def comm_msg(stream, identities, message):
        handled.append((message["header"]["msg_type"], parents[-1]["header"]["msg_type"]))

    queue: asyncio.Queue[Any] = asyncio.Queue()
    for i, kind in enumerate(("execute_request", "comm_msg", "comm_msg", "complete_request")):
        queue.put_nowait((i, "dispatch", ([b"id", Frame(kind)],)))
    queue.put_nowait((9, "its own", ()))
    kernel = types.SimpleNamespace(
        msg_queue=queue,
        shell_stream=types.SimpleNamespace(flush=lambda: None),
        session=types.SimpleNamespace(
            feed_identities=lambda message, copy: (message[:1], [b"signature", message[1]]),
            unpack=lambda kind: {"msg_type": kind},
            deserialize=lambda frames, content, copy: {"header": {"msg_type": frames[1].bytes}},
        ),
        shell_handlers={"comm_msg": comm_msg},
        _parent_ident={"shell": b"id"},
        get_parent=lambda channel: parents[-1],
        set_parent=lambda identities, parent, channel: parents.append(parent),
        _publish_status=lambda status, channel: None,
    )
    assert routes.pump(kernel) == 2
    assert handled == [("comm_msg", "comm_msg")] * 2
    assert parents[-1] == "the cell"
    assert [queue.get_nowait()[0] for _ in range(queue.qsize())] == [0, 3, 9]
