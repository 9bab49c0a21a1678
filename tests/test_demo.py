"""The demo: what it trains, shows, leaves and says when something is wrong."""

from __future__ import annotations

import io
import math
import os
import signal
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mirror_nb.__main__ import main
from mirror_nb.demo import command, picture, progress
from mirror_nb.demo.command import Options, run
from mirror_nb.demo.datasets import digits
from mirror_nb.demo.progress import Evaluated, History, Meter, Predicted, Stepped
from mirror_nb.demo.terminal import Terminal
from mirror_nb.devices import Device
from mirror_nb.errors import UsageError

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
TWO = "cpu:0,cpu:1"


@pytest.fixture
def few_images(tmp_path) -> Path:
    """A folder with the four files, and 150 and 30 random images: nothing to learn from."""
    random = np.random.default_rng(0)
    for part, count in (("train", 150), ("t10k", 30)):
        images = random.integers(0, 256, (count, 8, 8), dtype=np.uint8)
        labels = random.integers(0, 10, count, dtype=np.uint8)
        for name, array in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            (tmp_path / name).write_bytes(header + array.tobytes())
    return tmp_path


def told(options: Options) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = run(options, out, err)
    return code, out.getvalue(), err.getvalue()


def test_the_digits_are_learned_as_promised_and_a_picture_is_left(tmp_path):
    path = tmp_path / "demo.png"
    code, out, err = told(Options(devices=TWO, picture=str(path)))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "handwritten digits: 1437 images to train on, 360 to test on"
    assert [line[:11] for line in lines if line.startswith("epoch")] == [f"epoch {n:2}/20" for n in range(1, 21)]
    accuracy = float(next(line for line in lines if line.startswith("test accuracy")).split()[-1].rstrip("%"))
    assert accuracy >= 97
    for replica_id in (0, 1):
        line = next(line for line in lines if line.startswith(f"replica {replica_id} on cpu:{replica_id}"))
        assert float(line.split()[-2]) > 0
    assert lines[-1] == f"picture  {path}"
    assert path.read_bytes().startswith(b"\x89PNG")
    # A log has no bars.
    assert "\r" not in out


@pytest.mark.skipif(not FASHION_MNIST.exists(), reason="needs Debian's package dataset-fashion-mnist")
def test_fashion_mnist_is_learned_as_promised(tmp_path):
    code, out, err = told(Options(devices=TWO, data=str(FASHION_MNIST), picture=str(tmp_path / "demo.png")))
    assert (code, err) == (0, "")
    accuracy = float(
        next(line for line in out.splitlines() if line.startswith("test accuracy")).split()[-1].rstrip("%")
    )
    assert accuracy >= 88


def test_accuracy_below_the_promise_is_said_and_is_the_exit_code(few_images):
    path = few_images / "demo.png"
    code, out, err = told(Options(devices=TWO, data=str(few_images), picture=str(path)))
    assert code == 1
    assert "2 replicas (cpu:0, cpu:1), global batch 128, 3 epochs\n" in out
    assert err.startswith("mirror_nb demo: ")
    assert "less than the 88% that are expected; the data is another" in err
    assert path.exists()
    # Nothing was promised of fewer epochs than the usual ones.
    code, out, err = told(Options(devices=TWO, data=str(few_images), epochs=1, picture=str(path)))
    assert code == 0
    assert "2 replicas (cpu:0, cpu:1), global batch 128, 1 epoch\n" in out
    assert err.endswith("of the test images right; 88% are expected after the usual --epochs 3\n")


def test_without_a_command_the_commands_are_told(capsys):
    with pytest.raises(SystemExit, match="2"):
        main([])
    told = capsys.readouterr().err
    assert all(f"\n    {name} " in told for name in ("watch", "demo", "bench"))
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "Time the cross-device ops, alone or under a model's training step." in told
    assert "e.g. 4M; default: 256M, or what memory allows" in told


def test_the_help_tells_the_usual_epochs(few_images, capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    digits_, fashion = (command._lesson(Options(data=data)).usual_epochs for data in (None, str(few_images)))
    told = " ".join(capsys.readouterr().out.split())
    assert f"default: {digits_} for the digits, {fashion} for Fashion-MNIST" in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(devices="cuda:99"), "cuda:99 not found"),
        (Options(devices="toaster"), "'toaster' names no device"),
        (Options(devices="cpu:0,cpu:0"), "cpu:0 named twice"),
        (Options(data="/nowhere"), "/nowhere has no train-images-idx3-ubyte"),
        (Options(epochs=0), "--epochs 0: at least 1"),
        (Options(picture="/nowhere/demo.png"), "--picture /nowhere/demo.png cannot be written"),
        (Options(picture="demo.docx"), "--picture demo.docx: its name must end in .png"),
    ],
)
def test_a_wrong_call_is_one_line_before_anything_runs(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "LocalPool", None)
    code, out, err = told(options)
    assert (code, out) == (2, "")
    assert err.startswith(f"mirror_nb demo: {message}")
    assert err.count("\n") == 1


def test_without_scikit_learn_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    code, _, err = told(Options(devices=TWO, picture=str(tmp_path / "demo.png")))
    assert (code, err.count("\n")) == (2, 1)
    assert "pip install 'mirror_nb[demo]'" in err


def test_the_command_line_hands_over_what_was_written(monkeypatch):
    taken = []
    monkeypatch.setattr(command, "run", lambda options: taken.append(options) or 7)
    words = ["--devices", "cpu:0", "--data", "d", "--epochs", "3", "--picture", "p.png", "--seed", "5"]
    assert [main(["demo"]), main(["demo", *words])] == [7, 7]
    assert taken == [Options(), Options("cpu:0", "d", 3, "p.png", 5)]


def test_no_command_is_a_wrong_call(capsys):
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_what_a_replica_raises_is_shown_with_the_replica(few_images, monkeypatch):
    monkeypatch.setattr(command, "_CELL", "if replica_id == 1:\n    raise ValueError('too warm')")
    code, _, err = told(Options(devices=TWO, data=str(few_images), picture=str(few_images / "demo.png")))
    assert code == 1
    assert "Traceback" in err
    assert err.endswith("mirror_nb demo: replica 1 raised ValueError: too warm\n")


def test_what_training_needs_is_loaded_once_for_all_replicas(few_images, monkeypatch):
    asked = []

    def none(*_: object, **__: object) -> None:
        raise UsageError("none here")

    monkeypatch.setattr(command, "warm_up_to_train", lambda: asked.append("all"))
    monkeypatch.setattr(command, "LocalPool", none)
    assert told(Options(devices=TWO, data=str(few_images), picture=str(few_images / "demo.png")))[0] == 2
    assert asked == ["all"]


def test_a_replica_that_dies_is_named(few_images, monkeypatch):
    monkeypatch.setattr(command, "_CELL", "import os\nif replica_id == 1:\n    os.kill(os.getpid(), 9)")
    code, _, err = told(Options(devices=TWO, data=str(few_images), picture=str(few_images / "demo.png")))
    assert code == 1
    assert "replica 1 (cpu:1, pid" in err
    assert "killed by signal 9" in err


class InterruptedAtTheFirstEpoch(io.StringIO):
    """The user reads the first epoch's line and presses Ctrl-C."""

    def write(self, text: str) -> int:
        if text.startswith("epoch"):
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


def test_ctrl_c_ends_the_training_and_closes_the_pool(few_images, monkeypatch):
    pools = []

    class Seen(command.LocalPool):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            pools.append(self)

    monkeypatch.setattr(command, "LocalPool", Seen)
    out, err = InterruptedAtTheFirstEpoch(), io.StringIO()
    options = Options(devices=TWO, data=str(few_images), epochs=10**6, picture=str(few_images / "demo.png"))
    assert run(options, out, err) == 130
    assert err.getvalue() == "mirror_nb demo: interrupted; the replicas are stopped\n"
    assert [pool.closed for pool in pools] == [True]


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_with_steps_loss_and_the_rate_of_each_replica():
    history, out = History(2), Tty()
    with Terminal(history, epochs=2, steps_per_epoch=4, out=out) as terminal:
        for replica_id, examples in ((0, 30), (1, 20)):
            record = Stepped(1, (0.5, 0.5), (examples, examples), seconds=0.5, until=1.0)
            history.take(replica_id, record)
            terminal.take(record)
        terminal._bar.refresh()
    assert "step 2/8 · epoch 1/2 · loss 0.500 · 120 + 80 examples/s" in out.getvalue()


def test_an_epoch_is_told_once_when_every_replica_has_done_it():
    history, out = History(2), io.StringIO()
    with Terminal(history, epochs=10, steps_per_epoch=1, out=out) as terminal:
        for replica_id in (1, 0):
            for record in (Stepped(1, (2.0,), (4,), 1.0, 1.0), Evaluated(1, 0.875)):
                history.take(replica_id, record)
                terminal.take(record)
            assert out.getvalue().count("epoch") == (replica_id == 0)
    assert out.getvalue().startswith("epoch  1/10  loss 2.000  test  87.5%  4 + 4 examples/s  ")


def test_records_travel_as_displays_of_their_own_type(monkeypatch):
    shown = []
    monkeypatch.setattr(progress, "publish_display_data", shown.append)
    records = [Stepped(1, (0.5,), (3,), 0.1, 0.2), Evaluated(1, 0.9), Predicted(((1, 2), (3,)))]
    for record in records:
        progress.publish(record)
    assert [list(data) for data in shown] == [["application/vnd.mirror_nb.progress+json"]] * 3
    assert [progress.read(data) for data in shown] == records
    assert progress.read({"text/plain": "5"}) is None


def test_the_meter_reports_every_step_once():
    records = []
    meter = Meter(records.append)
    meter.begin(3)
    for loss in (1.0, 2.0):
        meter.step(torch.tensor(loss, requires_grad=True), 8)
    meter.end()
    meter.end()
    (record,) = records
    assert (record.epoch, record.losses, record.examples) == (3, (1.0, 2.0), (8, 8))
    assert record.seconds > 0


def test_the_loss_of_a_step_is_that_of_the_whole_global_batch():
    history = History(2)
    # In the second step the other replica had no examples, and so no loss.
    history.take(0, Stepped(1, (1.0, 3.0), (30, 7), 1.0, 1.0))
    history.take(1, Stepped(1, (4.0, math.nan), (10, 0), 1.0, 1.0))
    assert history.mean_losses() == [1.75, 3.0]
    assert history.steps_done == 2


def test_predictions_come_in_the_order_of_the_test_images():
    history = History(2)
    history.take(1, Predicted(((2, 3), (6,))))
    assert history.predictions() == []
    history.take(0, Predicted(((0, 1), (4, 5))))
    assert history.predictions() == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("replicas", [1, 8])
def test_a_picture_is_drawn_for_any_number_of_replicas_with_and_without_mistakes(tmp_path, replicas):
    data, history = digits(), History(replicas)
    right = data.test_labels.tolist()
    for r in range(replicas):
        for step in range(100):
            history.take(r, Stepped(1, (1 / (step + 1),) * 3, (4,) * 3, 0.1, 0.1 * (step + 1)))
        history.take(r, Evaluated(1, 1.0))
        history.take(r, Predicted((tuple(right if replicas == 1 else [9] * len(right)) if r == 0 else (),)))
    path = tmp_path / "picture.png"
    picture.draw(history, data, [Device("cpu", r) for r in range(replicas)], path)
    assert path.stat().st_size > 10_000
