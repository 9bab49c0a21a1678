"""The picker: what can be ticked, what the buttons do, and the line of code that does the same."""

from __future__ import annotations

import html
import os
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic_arguments import parse_argstring
from made_devices import GB, MadeMachine, MadeSession
from traitlets.config import Config

import mirror_nb
from mirror_nb.collectives.options import Communication
from mirror_nb.errors import DeviceError, UsageError
from mirror_nb.notebook.magics import MirrorMagics, _exchange
from mirror_nb.notebook.measuring import QUICK_SIZES
from mirror_nb.notebook.options import GradientFlags
from mirror_nb.notebook.picker import page, widget
from mirror_nb.notebook.picker.choice import Choice, Standing
from mirror_nb.notebook.picker.driven_session import DrivenSession
from mirror_nb.notebook.picker.inventory import Machine, places
from mirror_nb.notebook.picker.widget import Picker
from mirror_nb.notebook.session import Session

Made = Callable[..., tuple[Picker, MadeSession]]


@pytest.fixture
def made() -> Iterator[Made]:
    """Make a picker of so many GPUs, and the session that it drives."""
    pickers = []

    def make(gpus: int = 4, **options: Any) -> tuple[Picker, MadeSession]:
        session = MadeSession(gpus, offers=options.pop("offers", True))
        session.runs = options.pop("runs", Standing())
        machine = options.pop("machine", MadeMachine(gpus))
        pickers.append(Picker(session, machine=machine, **options))
        return pickers[-1], session

    yield make
    for picker in pickers:
        picker.close()


def shown(picker: Picker) -> str:
    """Return all texts of the picker's pieces."""
    found = [picker.board]
    for each in found:
        found += getattr(each, "children", ())
    return "\n".join(w.value for w in found if isinstance(w, widget.HTML) and "<style>" not in w.value)


def enabled(picker: Picker) -> list[str]:
    return [b.description for b in (picker.start, picker.restart, picker.stop) if not b.disabled]


# --------------------------------------------------------------------------- the line of code


@pytest.mark.parametrize(
    ("choice", "running", "line"),
    [
        (Choice(("cpu:0", "cpu:1")), False, "%mirror start --devices cpu:0,cpu:1"),
        (Choice(("cuda:0",)), True, "%mirror restart --devices cuda:0"),
        (
            Choice(("cuda:0", "cuda:1"), "nccl", 4 * 2**20, "bf16"),
            False,
            "%mirror start --devices cuda:0,cuda:1 --ops nccl --bucket-mb 4 --compression bf16",
        ),
        (Choice(("cpu:0",), bucket_size=2**19), False, "%mirror start --devices cpu:0 --bucket-mb 0.5"),
    ],
)
def test_the_line_says_what_was_picked_and_no_defaults(choice, running, line):
    assert choice.line(running) == line


def test_buckets_of_less_than_a_byte_are_the_smallest_and_not_the_usual_ones():
    assert GradientFlags(bucket_mb=1e-7).options().bytes_per_pack == 1
    assert GradientFlags(bucket_mb=4).options().bytes_per_pack == 4 * 2**20
    assert GradientFlags().options().bytes_per_pack == 25 * 2**20


def test_the_line_follows_the_boxes(made):
    picker, session = made(2)
    assert "%mirror start --devices cuda:0,cuda:1<" in shown(picker)
    picker.boxes["cuda:0"].value = False
    assert "%mirror start --devices cuda:1<" in shown(picker)
    picker.compressions.value = "bf16"
    picker.bucket_sizes.value = 4 * 2**20
    assert "%mirror start --devices cuda:1 --bucket-mb 4 --compression bf16<" in shown(picker)
    session.runs = Standing(("cuda:1",), (7,))
    picker.look_at_replicas()
    # Without a name a restart keeps the ops that run.
    assert "%mirror restart --devices cuda:1 --ops nccl --bucket-mb 4 --compression bf16<" in shown(picker)


def test_what_a_button_said_goes_when_a_cell_has_changed_the_replicas(made):
    picker, session = made(2)
    picker.start.click()
    assert session.told
    said = picker._said.value
    assert "ready" in said
    picker.look_at_replicas()
    assert picker._said.value == said
    session.runs = Standing()
    picker.look_at_replicas()
    assert "ready" not in picker._said.value


# --------------------------------------------------------------------------- devices


def test_all_gpus_are_ticked_at_first_as_the_strategy_would_take_them(made):
    assert made(3)[0].choice() == Choice(("cuda:0", "cuda:1", "cuda:2"))


def test_without_gpus_a_few_cpu_replicas_are_suggested(made):
    assert made(0)[0].choice() == Choice(("cpu:0", "cpu:1"))
    assert made(0, machine=MadeMachine(0, cores=1))[0].choice() == Choice(("cpu:0",))


@pytest.mark.parametrize("devices", [("cuda:1",), ("cpu:0", "cpu:1", "cpu:2")])
def test_what_runs_is_ticked_at_first(made, devices):
    assert made(2, runs=Standing(devices, (1, 2, 3)))[0].choice().devices == devices


def test_gpus_and_cpu_replicas_cannot_be_picked_together(made):
    picker, _ = made(2)
    picker.cpus.value = 3
    assert picker.choice().devices == ("cpu:0", "cpu:1", "cpu:2")
    assert not any(box.value for box in picker.boxes.values())
    picker.boxes["cuda:1"].value = True
    assert picker.choice().devices == ("cuda:1",)
    assert picker.cpus.value == 0


def test_with_nothing_picked_nothing_can_be_started(made):
    picker, _ = made(0)
    picker.cpus.value = 0
    assert enabled(picker) == []
    assert "pick at least one device" in shown(picker)


def test_a_card_tells_memory_whose_it_is_and_the_replica_that_will_be_there(made):
    picker, session = made(2)
    session.runs = Standing(("cuda:0",), (100,))
    picker.refresh()
    busy = picker._bodies["cuda:1"].value
    for text in ("NVIDIA H100", "19 GiB free", "61 GiB of 80 GiB", "98 % busy", "642 of 700 W", "replica 1"):
        assert text in busy
    assert "<span class=hot>88 °C</span>" in busy
    assert "python3 of anna · 4711" in busy
    assert "40 GiB" in busy
    assert "and 1 more" in busy
    # A process may be called anything.
    assert "<b>ben</b>" not in busy
    assert "this notebook's replica · 100" in html.unescape(picker._bodies["cuda:0"].value)


def test_more_cpu_replicas_than_cores_are_warned_of(made):
    picker, _ = made(0, machine=MadeMachine(0, cores=2))
    assert "more replicas than cores" not in shown(picker)
    picker.cpus.value = 3
    assert "more replicas than cores" in shown(picker)


def test_links_are_a_matrix_where_there_are_several_gpus(made):
    links = made(4)[0]._links.value
    assert links.count("<td class=picked>NVLink</td>") == 4
    assert "between NUMA nodes" in links
    assert "PXB" not in links
    assert made(1)[0]._links.layout.display == "none"


def test_without_a_driver_devices_can_be_picked_and_the_reason_is_told():
    def fails() -> None:
        raise OSError

    nvml = SimpleNamespace(NVMLError=OSError, nvmlInit=fails)
    inventory = Machine(2, nvml, {}).look()
    assert [card.device for card in inventory.gpus] == ["cuda:0", "cuda:1"]
    assert "NVML does not start" in inventory.note
    assert "no readings" in page.gpu(inventory.gpus[0], None, ())
    assert page.links(inventory, ()) == ""


def test_an_inventory_of_gpus_tells_tenants_and_links():
    class Error(Exception):
        pass

    def common(a: str, b: str) -> int:
        return 20 if {a, b} == {"h0", "h1"} else 50

    def link(a: str, b: str, what: int) -> int:
        if "h2" in (a, b):
            raise Error
        return 0 if {a, b} == {"h0", "h3"} else 1

    def processes(handle: str) -> list[SimpleNamespace]:
        if handle != "h0":
            raise Error
        return [
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=5),
            SimpleNamespace(pid=2**22 + 1, usedGpuMemory=9),
            SimpleNamespace(pid=2**22 + 2, usedGpuMemory=None),
        ]

    nvml = SimpleNamespace(
        NVMLError=Error,
        NVML_P2P_CAPS_INDEX_NVLINK=2,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: f"h{index}",
        nvmlDeviceGetHandleByUUID=lambda uuid: "h3",
        nvmlDeviceGetName=lambda handle: f"Made {handle}",
        nvmlDeviceGetComputeRunningProcesses=processes,
        nvmlDeviceGetTopologyCommonAncestor=common,
        nvmlDeviceGetP2PStatus=link,
    )
    machine = Machine(4, nvml, {"CUDA_VISIBLE_DEVICES": "0,1,2,GPU-x"})
    inventory = machine.look()
    machine.close()
    assert inventory.links[0] == ("", "PXB", "SYS", "NVLink")
    assert [card.reading.name for card in inventory.gpus] == ["Made h0", "Made h1", "Made h2", "Made h3"]
    tenants = inventory.gpus[0].tenants
    assert [tenant.memory for tenant in tenants] == [9, 5, None]
    assert tenants[0].who == "a process that is not visible here"
    assert " of " in tenants[1].who
    assert inventory.gpus[1].tenants == ()


@pytest.mark.parametrize(
    ("visible", "found"),
    [({}, [0, 1]), ({"CUDA_VISIBLE_DEVICES": "3, GPU-x"}, [3, "GPU-x"]), ({"CUDA_VISIBLE_DEVICES": "3"}, [0, 1])],
)
def test_gpus_are_looked_for_where_cuda_sees_them(visible, found):
    assert places(2, visible) == found


def test_this_machine_has_an_inventory():
    inventory = Machine(0).look()
    assert inventory.gpus == ()
    assert inventory.cores >= 1
    assert inventory.host.memory_total > GB // 8


# --------------------------------------------------------------------------- options


def test_ops_fit_the_devices_and_the_default_is_left_out_of_the_choice(made):
    picker, _ = made(2)
    assert [value for _, value in picker.operations.options] == ["nccl", "hierarchical_copy", "one_device"]
    assert picker.choice().operation is None
    picker.operations.value = "one_device"
    assert picker.choice().operation == "one_device"
    picker.cpus.value = 2
    assert [value for _, value in picker.operations.options] == ["shared_memory", "gloo"]
    assert picker.choice().operation is None


def test_a_measurement_shows_the_times_and_keeps_what_was_picked(made):
    picker, session = made(2)
    picker.operations.value = "one_device"
    picker.measure.click()
    assert session.told == [("measure", Choice(("cuda:0", "cuda:1"), "one_device"))]
    assert picker.operations.options[0][0] == "nccl (default)  ·  64 KiB 0.030 ms, 25 MiB 1.6 ms"
    assert picker.operations.value == "one_device"


def test_what_is_not_offered_is_not_shown(made):
    picker, _ = made(2, offers=False)
    assert picker._options.layout.display == "none"
    assert picker.measure.layout.display == "none"
    assert picker.choice() == Choice(("cuda:0", "cuda:1"))


# --------------------------------------------------------------------------- buttons


def test_start_restart_and_stop_do_what_they_say_and_are_there_when_they_can_be(made):
    picker, session = made(2)
    assert enabled(picker) == ["Start"]
    picker.start.click()
    assert enabled(picker) == ["Restart", "Stop"]
    assert "2 replicas on cuda:0, cuda:1" in shown(picker)
    assert "2 replicas ready in 0.9 s" in shown(picker)
    picker.boxes["cuda:1"].value = False
    picker.restart.click()
    picker.stop.click()
    assert enabled(picker) == ["Start"]
    assert "no replicas" in shown(picker)
    both, one = Choice(("cuda:0", "cuda:1")), Choice(("cuda:0",), "nccl", 25 * 2**20, "none")
    assert session.told == [("start", both), ("restart", one), ("stop", None)]


@pytest.mark.parametrize("error", [DeviceError("cuda:1 is <gone>"), RuntimeError("out of memory")])
def test_an_error_is_told_where_the_button_was_pressed_and_the_buttons_work_on(made, error):
    picker, session = made(2)
    session.fails = error
    picker.start.click()
    assert 'role="alert"' in picker._said.value
    assert type(error).__name__ in picker._said.value
    assert "<gone>" not in picker._said.value
    session.fails = None
    picker.start.click()
    assert "ready" in picker._said.value


def test_replicas_are_started_in_the_main_thread_whatever_thread_hears_the_button(made):
    waiting: list[Callable[[], None]] = []
    picker, session = made(2, later=waiting.append)
    waiting.clear()
    threads = []
    start = session.start
    session.start = lambda choice: (threads.append(threading.current_thread()), start(choice))[1]
    pressing = threading.Thread(target=picker.start.click)
    pressing.start()
    pressing.join(20)
    # A cell may be running: it says so, and is not pressed twice.
    assert session.told == []
    assert "starting … (after the cell that runs" in picker._said.value
    assert enabled(picker) == []
    picker.start.click()
    assert len(waiting) == 1
    waiting[0]()
    assert threads == [threading.main_thread()]
    assert enabled(picker) == ["Restart", "Stop"]


def test_an_interrupt_leaves_the_buttons_usable(made):
    picker, session = made(2)

    def interrupted(choice: Choice) -> str:
        raise KeyboardInterrupt

    session.start = interrupted
    with pytest.raises(KeyboardInterrupt):
        picker.start.click()
    picker.refresh()
    assert enabled(picker) == ["Start"]


# --------------------------------------------------------------------------- in a shell


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    config = Config({"HistoryManager": {"enabled": False}, "HistoryAccessor": {"enabled": False}})
    yield InteractiveShell.instance(config=config)
    InteractiveShell.clear_instance()


def test_a_real_session_starts_and_stops_replicas(shell):
    driven = DrivenSession(Session(shell))
    assert driven.standing() == Standing()
    fitting = [its.name for its in driven.offers(("cpu:0", "cpu:1")).operations]
    assert fitting[0] == "shared_memory"
    assert "nccl" not in fitting
    assert not torch.cuda.is_initialized()
    try:
        assert "1 replica (cpu:0) ready" in driven.start(Choice(("cpu:0",)))
        assert driven.standing().devices == ("cpu:0",)
        assert driven.standing().pids
        assert "2 replicas (cpu:0, cpu:1) ready" in driven.restart(Choice(("cpu:0", "cpu:1")))
        assert "1 replica (cpu:0) by gloo ready" in driven.restart(Choice(("cpu:0",), "gloo"))
        with pytest.raises(DeviceError, match="Nccl"):
            driven.restart(Choice(("cpu:0",), "nccl"))
        with pytest.raises(UsageError, match=r"one replica .* reduces with nobody"):
            driven.measure(Choice(("cpu:0",)))
        alone = driven.offers(("cpu:0",))
        assert (alone.measurable, alone.bucket_sizes, alone.compressions) == (False, (), ())
    finally:
        assert "stopped" in driven.stop()


def communication_of(session: Session) -> Communication:
    """What the replicas were told to reduce by."""
    return pickle.loads(session.pool.communication)


def test_a_real_session_is_measured_and_given_buckets_and_compression(shell):
    session = Session(shell)
    driven, devices = DrivenSession(session), ("cpu:0", "cpu:1")
    offers = driven.offers(devices)
    assert offers.measurable
    assert (offers.bucket_sizes[0], offers.compressions) == (25 * 2**20, ("none", "bf16"))
    assert all(not its.times for its in offers.operations)
    try:
        # No replicas run: it starts its own, and leaves none.
        said = driven.measure(Choice(devices)).partition("fastest: ")[2]
        # Each op is named once.
        assert re.fullmatch(r"\w+ for all sizes|\w+ for [^,]+(, \w+ for [^,]+)+", said)
        assert max(said.count(name) for name in ("shared_memory", "one_device", "gloo")) <= 1
        assert driven.standing() == Standing()
        *ops, auto = driven.offers(devices).operations
        assert (auto.name, auto.times) == ("auto", ())
        for its in ops:
            assert [size for size, _ in its.times] == list(QUICK_SIZES)
            assert all(0 < seconds < 30 for _, seconds in its.times)
        picked = Choice(devices, "one_device", 4 * 2**20, "bf16")
        driven.start(picked)
        # The line that is shown means the same.
        parsed = parse_argstring(MirrorMagics.mirror, picked.line().removeprefix("%mirror "))
        assert _exchange(parsed) == session._exchange == GradientFlags("one_device", 4, "bf16")
        options = communication_of(session)
        assert (options.options.bytes_per_pack, options.options.compression) == (4 * 2**20, "bf16")
        assert type(options.ops).__name__ == "ReductionToOneDevice"
        assert "running already" in session.start()
        with pytest.raises(UsageError, match=r"%mirror restart --bucket-mb 25 \("):
            session.start(exchange=GradientFlags(bucket_mb=25))
        with pytest.raises(UsageError, match="--bucket-mb is -1; it must be above 0"):
            session.restart(exchange=GradientFlags(bucket_mb=-1))
        # What is not named stays.
        session.restart("cpu:0,cpu:1", GradientFlags(compression="none"))
        assert communication_of(session).options.bytes_per_pack == 4 * 2**20
        assert communication_of(session).options.compression is None
    finally:
        session.stop()


def test_what_is_displayed_has_a_text_for_who_cannot_show_widgets(made):
    picker, _ = made(1)
    assert picker.bundle()["text/plain"] == page.TEXT
    assert picker.bundle()["application/vnd.jupyter.widget-view+json"]["model_id"] == picker.board.model_id
    for words in ("%mirror start --devices", "pip install ipywidgets", "run the cell again"):
        assert words in page.TEXT


def test_in_a_terminal_a_text_says_what_to_write(made):
    published = []
    publisher = SimpleNamespace(publish=lambda data, **_: published.append(data))
    picker, _ = made(1, shell=SimpleNamespace(display_pub=publisher))
    picker.show()
    assert published == [{"text/plain": page.TEXT}]


def test_in_a_notebook_the_widgets_are_shown_and_read_anew(made):
    published = []
    publisher = SimpleNamespace(publish=lambda data, **_: published.append(data))
    machine = MadeMachine(1)
    picker, _ = made(1, machine=machine, shell=SimpleNamespace(display_pub=publisher, kernel=object()))
    looks = machine.looks
    picker.show()
    assert published == [picker.bundle()]
    assert machine.looks == looks + 1


def test_outside_of_ipython_the_picker_says_what_to_write():
    with pytest.raises(UsageError, match=r"needs a notebook; in a script write mirror_nb\.MirroredStrategy"):
        mirror_nb.picker()


def test_the_picker_loads_the_extension(shell, capsys):
    shell.run_cell("import mirror_nb; mirror_nb.picker()")
    assert "%mirror start --devices" in capsys.readouterr().out
    assert "mirrored" in shell.magics_manager.magics["cell"]
    shell.extension_manager.unload_extension("mirror_nb")
