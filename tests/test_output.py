"""What a cell shows: the first replica as if local, the others folded, in an order that no timing changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import comm
import ipykernel.comm.comm
import pytest
from comm.base_comm import CommManager
from hypothesis import given, settings
from hypothesis import strategies as st
from IPython.utils.capture import capture_output

from mirror_nb.devices import Device
from mirror_nb.messages import ClearOutput, CommMessage, Display, Stream
from mirror_nb.notebook.output import TAIL_CHARACTERS, TAIL_LINES, CellView, CommProxy, Folded, comms_of, spans
from mirror_nb.replica.shell import Comms

DEVICES = [Device("cpu", i) for i in range(4)]


class Publisher:
    def __init__(self) -> None:
        self.shown: list[tuple[Any, ...]] = []

    def publish(self, data: Any, metadata: Any = None, transient: Any = None, update: bool = False) -> None:
        self.shown.append(("update" if update else "display", data))

    def clear_output(self, wait: bool = False) -> None:
        self.shown.append(("clear", wait))


class Shell:
    """Takes what a notebook would show; it has no kernel, hence no widgets."""

    kernel: Any = None

    def __init__(self) -> None:
        self.display_pub = Publisher()


def view(n: int = 2, quiet: bool = False) -> tuple[CellView, Publisher]:
    shell: Any = Shell()
    return CellView(shell, range(n), DEVICES, quiet), shell.display_pub


def closing(*texts: str, parts: tuple[str, ...] = ("done",)) -> dict[str, str]:
    """What stands under a cell of which each replica printed such a text."""
    shown, publisher = view(len(texts))
    with capture_output():
        for replica_id, text in enumerate(texts):
            shown.take(replica_id, Stream("stdout", text))
    shown.close(parts)
    return publisher.shown[-1][1]


def text(message: str, name: str = "stdout") -> Stream:
    return Stream(name, message)


def test_the_first_replica_prints_as_if_it_were_here(capsys):
    shown, publisher = view()
    shown.take(0, text("out\n"))
    shown.take(1, text("never seen\n"))
    shown.take(0, text("err\n", "stderr"))
    assert capsys.readouterr() == ("out\n", "err\n")
    assert publisher.shown == []


def test_the_first_of_those_chosen_leads(capsys):
    shell: Any = Shell()
    shown = CellView(shell, [2, 3], DEVICES, False)
    shown.take(2, text("two\n"))
    shown.take(3, text("three\n"))
    assert capsys.readouterr().out == "two\n"


def test_displays_and_clearing_keep_their_order():
    shown, publisher = view()
    shown.take(0, Display({"text/html": "<b>"}, {}, {}, False))
    shown.take(1, Display({"text/html": "other"}, {}, {}, False))
    shown.take(0, ClearOutput(True))
    shown.take(0, Display({"text/html": "<i>"}, {}, {}, True))
    assert publisher.shown == [
        ("display", {"text/html": "<b>"}),
        ("clear", True),
        ("update", {"text/html": "<i>"}),
    ]


def test_the_closing_line_is_one_line():
    assert closing("", "", parts=("2 replicas", "1 ms"))["text/plain"] == "2 replicas · 1 ms"


def test_equal_output_of_the_others_is_one_line():
    assert closing("a\n", "a\n", "a\n")["text/plain"] == "done\nreplicas 1–2: the same output"


def test_output_that_differs_can_be_opened():
    shown = closing("a\n", "b <1>\nc\n", "a\n", "b <1>\nc\n")
    assert shown["text/plain"].splitlines() == [
        "done",
        "replicas 1, 3: 2 lines, differing from replica 0",
        "    b <1>",
        "    c",
        "replica 2: the same output",
    ]
    assert "<details>" in shown["text/html"]
    assert "b &lt;1&gt;" in shown["text/html"]


def test_a_replica_that_was_silent_while_the_first_spoke_says_so():
    assert closing("a\n", "")["text/plain"].splitlines()[1] == "replica 1: no output"


def test_progress_bars_do_not_make_outputs_differ():
    assert closing("\r 1%|#\r100%|##, 3.1 it/s\nloss\n", "\r100%|##, 2.9 it/s\nloss\n")["text/plain"].endswith(
        "replica 1: the same output"
    )


def test_a_replica_that_was_silent_while_the_first_drew_a_bar_says_so():
    # Of `fit` replica 0 alone shows how it goes: each of its lines is written over a bar.
    assert closing("\r50%|#\repoch 1/1\n", "", "")["text/plain"].splitlines()[1] == "replicas 1–2: no output"
    assert closing("", "\r50%|#", "")["text/plain"].splitlines()[1].startswith("replica 1: 1 line, differing")


def test_a_quiet_cell_adds_nothing(capsys):
    shown, publisher = view(2, quiet=True)
    shown.take(0, text("a"))
    shown.take(1, text("b"))
    shown.close(["done"])
    assert publisher.shown == []
    assert capsys.readouterr().out == "a"


def test_colours_are_left_out_of_folded_text():
    shown = closing("", "\x1b[31mred\x1b[0m\n")
    assert "\x1b" not in shown["text/plain"]
    assert "red" in shown["text/plain"]


def test_what_is_kept_of_a_long_output_is_bounded():
    folded = Folded()
    for i in range(3 * TAIL_LINES):
        folded.take(text(f"line {i}\n"))
    assert folded.lines == 3 * TAIL_LINES
    assert folded.tail().splitlines()[-1] == f"line {3 * TAIL_LINES - 1}"
    assert len(folded.tail().splitlines()) == TAIL_LINES
    folded.take(text("x" * 10 * TAIL_CHARACTERS))
    assert len(folded.tail()) <= TAIL_CHARACTERS


def test_clearing_forgets_what_was_shown():
    folded = Folded()
    folded.take(text("old\n"))
    folded.take(ClearOutput(False))
    assert folded.empty
    assert folded.digest == Folded().digest


def test_the_last_line_is_what_a_terminal_would_show():
    folded = Folded()
    folded.take(text("first\n 10%\r 20%\r 30%"))
    assert folded.last_line() == " 30%"
    folded.take(text("\n\n"))
    assert folded.last_line() == " 30%"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(alphabet="ab\n\r", max_size=8), max_size=8))
def test_output_is_the_same_however_it_was_cut_into_messages(pieces):
    cut, whole = Folded(), Folded()
    for piece in pieces:
        cut.take(text(piece))
    whole.take(text("".join(pieces)))
    assert (cut.digest, cut.tail(), cut.lines, cut.last_line()) == (
        whole.digest,
        whole.tail(),
        whole.lines,
        whole.last_line(),
    )


def test_a_long_line_is_the_same_however_it_was_cut():
    cut, whole = Folded(), Folded()
    for _ in range(3):
        cut.take(text("x" * TAIL_CHARACTERS))
    whole.take(text("x" * 3 * TAIL_CHARACTERS))
    for folded in (cut, whole):
        folded.take(text("\n"))
    assert cut.digest == whole.digest


def test_a_front_ends_message_reaches_the_widgets_replica():
    sent: list[CommMessage] = []
    CommProxy("c1", sent.append).handle_msg({"content": {"comm_id": "c1"}, "buffers": [memoryview(b"x")]})
    assert sent == [CommMessage({"comm_id": "c1"}, (b"x",))]


@pytest.fixture
def comm_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in (
        (comm, "create_comm"),
        (comm, "get_comm_manager"),
        (ipykernel.comm, "Comm"),
        (ipykernel.comm.comm, "Comm"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))


def test_a_kernels_widgets_are_those_that_it_knows(comm_restored):
    # Before ipykernel 6.18 it had them to itself.
    older, shell = CommManager(), Shell()
    assert comms_of(shell) is comm.get_comm_manager().comms
    shell.kernel = SimpleNamespace(comm_manager=older)
    assert comms_of(shell) is older.comms


@pytest.mark.parametrize("ipykernel_6_17", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda: ipykernel.comm.Comm(target_name="mine", data={"a": 1}),
        lambda: ipykernel.comm.Comm("mine", {"a": 1}, show_warning=False, kernel=None),
        lambda: comm.create_comm("mine", {"a": 1}),
    ],
    ids=["ipywidgets 7.7.1", "somebody", "ipywidgets 8"],
)
def test_widgets_of_either_ipykernel_reach_the_front_end(comm_restored, monkeypatch, ipykernel_6_17, make):
    if ipykernel_6_17:
        for module in (ipykernel.comm, ipykernel.comm.comm):
            monkeypatch.setattr(module, "Comm", type("Comm", (), {}))
    emitted: list[Any] = []
    comms = Comms(emitted.append)
    opened = make()
    heard: list[Any] = []
    opened.on_msg(heard.append)
    # Without one, ipywidgets 7 sends nothing.
    assert opened.kernel is not None
    comms.receive(CommMessage({"comm_id": opened.comm_id, "data": 5}, ()))
    assert [message["content"]["data"] for message in heard] == [5]
    assert [(sent.kind, sent.content["data"]) for sent in emitted] == [("comm_open", {"a": 1})]


def test_what_a_callback_raises_is_logged_and_ends_no_replica(comm_restored, caplog):
    emitted: list[Any] = []
    comms = Comms(emitted.append)
    opened = comm.create_comm("mine")

    def answer(message: Any) -> None:
        raise ValueError(f"no {message['content']['data']}, with {message['buffers']}")

    opened.on_msg(answer)
    comms.receive(CommMessage({"comm_id": opened.comm_id, "data": 5}, (b"x",)))
    assert "ValueError: no 5, with [b'x']" in caplog.text
    comms.receive(CommMessage({"comm_id": "another", "data": 5}, ()))
    assert "another" not in caplog.text
    assert [sent.kind for sent in emitted] == ["comm_open"]


@pytest.mark.parametrize(
    ("ids", "shown"), [([0], "0"), ([0, 1, 2, 5], "0–2, 5"), ([3, 1], "1, 3"), ([], ""), ({2, 3}, "2–3")]
)
def test_ids_are_written_as_spans(ids, shown):
    assert spans(ids) == shown
