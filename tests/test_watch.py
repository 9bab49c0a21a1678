"""`python -m mirror_nb watch`: what it finds, what it shows, and that it asks nobody."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
from driving import eventually
from made_rings import MadeRings

from mirror_nb.__main__ import main
from mirror_nb.errors import UsageError
from mirror_nb.notebook.dashboard.frame import Frame, Phase
from mirror_nb.telemetry import notice as notices
from mirror_nb.telemetry.findings import findings
from mirror_nb.telemetry.notice import Notice, Posted, open_rings
from mirror_nb.telemetry.samples import Mark
from mirror_nb.watch import command
from mirror_nb.watch.command import Options, run
from mirror_nb.watch.lines import lines
from mirror_nb.watch.screen import Screen

HOLD = """
import os, sys
from mirror_nb.telemetry.notice import Notice, Posted
from mirror_nb.telemetry.ring import Ring
with Ring.create() as ring, Posted(Notice(os.getpid(), (ring.descriptor,), ("cpu:0",), (os.getpid(),), "held")):
    print("up", flush=True)
    sys.stdin.read()
"""


def notice_of(made: MadeRings, **changed: object) -> Notice:
    n = made.num_replicas
    told = Notice(
        pid=os.getpid(),
        rings=tuple(ring.descriptor for ring in made.rings),
        devices=tuple(f"cpu:{i}" for i in range(n)),
        places=(os.getpid(),) * n,
        title="Made",
        operation="shared_memory",
    )
    return replace(told, **changed)


@pytest.fixture
def made() -> Iterator[MadeRings]:
    # From the machine's first second on: what was written then is quiet now, however lately the machine was started.
    with MadeRings(2, begin=1_000_000_000) as rings:
        for _ in range(60):
            rings.step()
            rings.log_loss()
        yield rings


@pytest.fixture
def post() -> Iterator[Callable[[Notice], Posted]]:
    with ExitStack() as stack:
        yield lambda notice: stack.enter_context(Posted(notice))


@pytest.fixture
def controller() -> Iterator[subprocess.Popen[str]]:
    """Another process of this user that has posted a notice."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)


_others: list[Notice] = []


@pytest.fixture(autouse=True)
def _without_the_pools_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    _others[:] = notices.find()
    monkeypatch.setattr(command, "find", find)


def find() -> tuple[Notice, ...]:
    return tuple(notice for notice in notices.find() if notice not in _others)


def mine() -> list[Notice]:
    return [notice for notice in find() if notice.pid == os.getpid()]


def text_of(frame: Frame) -> str:
    return "\n".join("".join(text for text, _ in line) for line in lines(frame, 4711))


def frame_of(made: MadeRings, **changed: object) -> Frame:
    made.timeline.update(made.now)
    shot = made.timeline.snapshot(now=made.now)
    told = Frame(shot, findings(shot), devices=tuple(f"cpu:{i}" for i in range(made.num_replicas)), title="Made")
    return replace(told, **changed)


# --------------------------------------------------------------------------- finding


def test_a_notice_is_found_while_it_is_posted_and_not_after(made):
    posted = Posted(notice_of(made))
    assert mine() == [notice_of(made)]
    posted.close()
    posted.close()
    assert mine() == []


def test_a_changed_notice_takes_the_place_of_the_one_before(made, post):
    posted = post(notice_of(made))
    posted.change(notice_of(made, places=(1, 2)))
    assert [notice.places for notice in mine()] == [(1, 2)]


def test_another_process_is_found_though_it_is_stopped_and_its_rings_can_be_read(controller):
    os.kill(controller.pid, signal.SIGSTOP)
    (found,) = [notice for notice in find() if notice.pid == controller.pid]
    assert (found.title, found.devices) == ("held", ("cpu:0",))
    (reader,) = open_rings(found)
    assert len(reader.read()) == 0
    reader.close()


def test_a_controller_that_was_killed_leaves_no_notice_and_its_rings_are_gone(controller):
    (found,) = [notice for notice in find() if notice.pid == controller.pid]
    controller.kill()
    controller.wait(20)
    assert [notice for notice in find() if notice.pid == controller.pid] == []
    with pytest.raises(UsageError, match=f"the rings of process {controller.pid} are gone .* look for its notice"):
        open_rings(found)


def test_a_child_that_inherited_the_descriptors_is_not_taken_for_a_controller(made, post):
    post(notice_of(made))
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        assert [notice.pid for notice in find() if notice.pid in (child, os.getpid())] == [os.getpid()]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_descriptor_that_means_something_else_by_now_is_not_opened(made):
    reading, writing = os.pipe()
    try:
        # To open a pipe would wait for ever.
        with pytest.raises(UsageError, match=f"descriptor {reading} is no ring any more"):
            open_rings(notice_of(made, rings=(made.rings[0].descriptor, reading)))
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"pid": 1}, "the notice is of process 1, but this is process"),
        ({"devices": ("cpu:0",)}, "2 rings for 1 devices"),
        ({"rings": (), "devices": ()}, "0 rings for 0 devices"),
    ],
)
def test_a_wrong_notice_is_not_posted(made, changed, says):
    with pytest.raises(UsageError, match=says):
        Posted(notice_of(made, **changed))


def test_what_is_no_notice_is_passed_over(made, post):
    post(notice_of(made))
    wrong = os.memfd_create("mirror_nb notice")
    try:
        for content in (b"no json", b"[]", b'{"pid": "x"}'):
            os.pwrite(wrong, content, 0)
            assert mine() == [notice_of(made)]
    finally:
        os.close(wrong)


# --------------------------------------------------------------------------- showing


def test_the_lines_have_the_dashboards_numbers(made):
    frame = frame_of(made, operation="nccl")
    shown = text_of(frame)
    head, facts = shown.splitlines()[:2]
    assert head == "Made  running  2 replicas · nccl · process 4711"
    assert f"{frame.snapshot.throughput:,.0f} examples/s together, waits included" in facts
    assert f"{frame.snapshot.curves['loss'].last:.2f} loss" in facts
    assert "60 steps" in shown
    assert "25 MiB" in shown
    for replica in frame.snapshot.replicas:
        (row,) = [line for line in shown.splitlines() if line.startswith(f"r{replica.replica_id} ")]
        assert f"{replica.throughput:,.0f}" in row
        assert f"cpu:{replica.replica_id}" in row


def test_no_line_is_longer_than_a_terminal_is_wide_with_eight_gpus():
    with MadeRings(8) as rings:
        rings.step(60)
        rings.log_memory(61 * 2**30)
        rings.log_loss()
        rings.mark(Mark.PLANNED, 1_000_000)
        shown = text_of(frame_of(rings, devices=tuple(f"cuda:{i}" for i in range(8)), operation="nccl"))
    table = shown[: shown.index("all-reduce")]
    assert max(map(len, map(str.rstrip, table.splitlines()))) <= 100
    assert "73.2 GiB" in shown


def test_a_slow_replica_is_named_with_its_numbers():
    with MadeRings(4) as rings:
        rings.slowness[2] = 1.3
        rings.step(60)
        shown = text_of(frame_of(rings))
    assert "r2 is slow" in shown
    assert "the others wait" in shown


def test_before_the_first_step_it_says_so():
    with MadeRings(2) as rings:
        assert "no step has ended yet" in text_of(frame_of(rings, phase=Phase.WAITING))


def test_a_replica_that_writes_nothing_is_said_to_be_quiet(made):
    made.timeline.update(made.now)
    later = made.now + 40_000_000_000
    frame = replace(frame_of(made), snapshot=made.timeline.snapshot(now=later), findings=())
    assert "quiet for 40 s" in text_of(frame)


def test_control_characters_of_another_process_do_not_reach_the_terminal(made):
    frame = frame_of(made, title="a\x1b[2Jb\n", operation="\x07", note="\x1bc")
    assert "\x1b" not in text_of(frame)
    assert "a�[2Jb�" in text_of(frame)


def test_a_picture_takes_the_place_of_the_one_before_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("LINES", "4")
    monkeypatch.setenv("NO_COLOR", "")
    out = Terminal()
    screen = Screen(out)
    screen.draw([(("x" * 50, 1),)] * 9)
    # Cut to its width and height: a line that wraps could not be taken back.
    assert out.getvalue() == f"\x1b[33m{'x' * 19}\x1b[0m\n" * 3
    out.truncate(0)
    screen.draw([(("y", "strong"),)])
    assert out.getvalue().lstrip("\0") == "\x1b[3F\x1b[J\x1b[1my\x1b[0m\n"
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    Screen(plain).draw([(("y", "trouble"),)])
    assert plain.getvalue() == "y\n"


# --------------------------------------------------------------------------- the command


class Watching:
    """Runs the watch with a wait that does what the test says, and then presses Ctrl-C."""

    def __init__(self, *acts: Callable[[], object]) -> None:
        self.acts = list(acts)
        self.out, self.err = io.StringIO(), io.StringIO()

    def wait(self, seconds: float) -> None:
        if not self.acts:
            raise KeyboardInterrupt
        self.acts.pop(0)()

    def __call__(self, **options: object) -> int:
        return run(Options(**options), self.out, self.err, wait=self.wait)


@pytest.fixture(autouse=True)
def searches_every_time(monkeypatch):
    monkeypatch.setattr(command, "SEARCH_SECONDS", 0.0)


def test_once_shows_everything_and_ends(made, post):
    post(notice_of(made))
    watching = Watching()
    assert watching(pid=os.getpid(), once=True) == 0
    assert "Made  quiet for" in watching.out.getvalue()
    assert "all-reduce" in watching.out.getvalue()


def test_once_with_nothing_to_see_says_how_to_start_something(monkeypatch):
    monkeypatch.setattr(command, "find", lambda: ())
    watching = Watching()
    assert watching(once=True) == 1
    assert "no strategy of yours trains on this machine" in watching.out.getvalue()
    assert "%mirror start" in watching.out.getvalue()


def test_what_starts_later_is_seen_and_its_end_is_told(made, monkeypatch):
    monkeypatch.setattr(command, "find", lambda: tuple(mine()))
    posted: list[Posted] = []
    watching = Watching(
        lambda: posted.append(Posted(notice_of(made))),
        lambda: posted[0].change(notice_of(made, places=(os.getppid(),) * 2)),
        lambda: posted[0].close(),
    )
    # Not a terminal: a line each time, and Ctrl-C ends it.
    assert watching() == 0
    said = watching.out.getvalue().splitlines()
    assert len(said) == 5
    assert "no strategy of yours" in said[0]
    assert f"process {os.getpid()}: Made: running on 2 replicas" in said[1]
    assert said[3].endswith("Its replicas were stopped, or the process has ended.")
    assert "no strategy of yours" in said[4]


def test_it_ends_with_the_process_that_was_named(made):
    posted = Posted(notice_of(made))
    watching = Watching(posted.close)
    assert watching(pid=os.getpid()) == 0
    assert "has ended" in watching.out.getvalue().splitlines()[-1]


def test_a_strategy_that_ends_between_two_looks_is_passed_over(made, monkeypatch):
    monkeypatch.setattr(command, "find", lambda: (notice_of(made, rings=(9999, 9998)),))
    watching = Watching()
    assert watching() == 0
    assert "no strategy of yours" in watching.out.getvalue()


def test_wrong_calls_say_what_would_be_right(made, post, monkeypatch):
    monkeypatch.setattr(command, "find", lambda: tuple(mine()))
    post(notice_of(made))
    watching = Watching()
    assert watching(pid=1) == 2
    assert f"process 1 has no strategy that trains; these have one: {os.getpid()}" in watching.err.getvalue()
    for every, shown in ((0.0, "0"), (float("nan"), "nan"), (float("inf"), "inf")):
        assert watching(every=every) == 2
        assert f"--every {shown}: at least 0.1 seconds" in watching.err.getvalue()


def test_without_a_driver_the_rest_is_shown_and_the_reason(made, post, monkeypatch):
    def no_driver(devices: object, places: object) -> object:
        raise UsageError("readings of GPUs need nvidia-ml-py")

    monkeypatch.setattr(command, "machine_of", no_driver)
    post(notice_of(made, devices=("cuda:0", "cuda:1"), places=(0, 1)))
    watching = Watching()
    assert watching(pid=os.getpid(), once=True) == 0
    assert "no readings of the devices: readings of GPUs need nvidia-ml-py" in watching.out.getvalue()
    assert "all-reduce" in watching.out.getvalue()


def test_the_command_line_hands_over_what_was_written(monkeypatch):
    taken = []
    monkeypatch.setattr(command, "run", lambda options: taken.append(options) or 3)
    assert main(["watch", "12", "--once", "--every", "2.5"]) == 3
    assert taken == [Options(pid=12, once=True, every=2.5)]


def test_the_command_line_ends_well_on_a_terminal_that_lacks_some_signs(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(command, "run", lambda options: print("12 µs", flush=True) or 0)
    assert main(["watch"]) == 0
    assert terminal.buffer.getvalue() == b"12 ?s\n"  # type: ignore[attr-defined]


def test_the_command_line_ends_without_a_traceback_when_it_is_interrupted_while_it_loads(monkeypatch, capsys):
    def load(options: command.Options) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", load)
    assert main(["watch"]) == 130
    assert capsys.readouterr().err == "mirror_nb: interrupted\n"


def test_the_command_line_ends_without_a_traceback_when_nobody_reads_on(controller):
    line = [sys.executable, "-m", "mirror_nb", "watch", str(controller.pid), "--every", "0.1"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "no step has ended yet" in process.stdout.readline()
    process.stdout.close()
    assert process.communicate(timeout=20)[1] == ""
    assert process.returncode == 141


def test_on_a_terminal_it_draws_loads_no_torch_and_ends_with_ctrl_c(controller):
    ours, theirs = pty.openpty()
    source = (
        "import sys\nfrom mirror_nb.__main__ import main\n"
        f"code = main(['watch', '{controller.pid}', '--every', '0.1'])\n"
        "print('torch' in sys.modules, code)"
    )
    process = subprocess.Popen([sys.executable, "-c", source], stdout=theirs, stderr=theirs, close_fds=True)
    os.close(theirs)
    seen = bytearray()

    def drawn_again() -> bool:
        seen.extend(os.read(ours, 65536))
        return b"held" in seen and b"\x1b[2F\x1b[J" in seen

    try:
        eventually(drawn_again, "a second picture takes the place of the first")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        while b"False 0" not in seen:
            seen.extend(os.read(ours, 65536))
    finally:
        process.kill()
        process.wait(20)
        os.close(ours)
    assert b"no step has ended yet" in seen
