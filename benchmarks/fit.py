"""`fit` on two CPU replicas against a hand-written DDP loop, and against Keras 3 `fit` on one device.

    python benchmarks/fit.py [rounds [images [name of the cross-device op]]]

Fashion-MNIST's images where Debian's package dataset-fashion-mnist is installed, else random ones of that size. Same
networks, optimizer, data and metrics; all take turns, an epoch each. Two replicas with a thread each; Keras has all
cores. With a whole call the images travel to the replicas; the loops written by hand have them.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import torch
from fit_loop import BATCH, KINDS, network
from machine import report

import mirror_nb as mnb
from mirror_nb.demo.datasets import fashion_mnist

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 5
IMAGES = int(sys.argv[2]) if len(sys.argv) > 2 else 6400
OPS = sys.argv[3] if len(sys.argv) > 3 else None
HERE = Path(__file__).parent
FOLDER = Path("/usr/share/datasets/fashion-mnist")
DEVICES = ("cpu:0", "cpu:1")


class FirstStep(mnb.callbacks.Callback):
    """When the first step was done."""

    at: float | None = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note the time, once."""
        self.at = self.at or time.perf_counter()


class SecondEpoch(mnb.callbacks.Callback):
    """How long the second epoch took."""

    seconds = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the time."""
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keep that of the last epoch, which is the second."""
        self.seconds = time.perf_counter() - self._began


def main() -> None:
    """Measure in turns and report medians."""
    images, labels, name = _data()
    with ExitStack() as stack:
        file = str(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "images.pt")
        torch.save((images, labels), file)
        torchrun = stack.enter_context(closing(_torchrun(file)))
        has_keras = importlib.util.find_spec("keras") is not None
        keras = stack.enter_context(closing(_keras(file))) if has_keras else None
        strategy = stack.enter_context(mnb.MirroredStrategy(DEVICES, cross_device_ops=OPS))
        models = {kind: _model(strategy, kind) for kind in KINDS}
        rivals = {
            "fit": lambda kind: _epoch(models[kind], images, labels),
            "call": lambda kind: _call(models[kind], images, labels),
            "DDP, gloo": torchrun.ask,
            "DDP, ours": lambda kind: _by_hand(strategy, kind, file, wrapped=True),
            "loop": lambda kind: _by_hand(strategy, kind, file, wrapped=False),
        }
        firsts = {"fit": lambda kind: _first(models[kind], images, labels)}
        if keras is not None:
            rivals["Keras"] = keras.ask
            firsts["Keras"] = lambda kind: keras.ask(f"first {kind}")
        times = {kind: _in_turns(rivals, kind, ROUNDS) for kind in KINDS}
        first_times = {kind: _in_turns(firsts, kind, 2 * ROUNDS) for kind in KINDS}
    report("fit" if OPS is None else f"fit_{OPS}", [*_head(name), *_table(times), *_first_lines(first_times)])


def _data() -> tuple[torch.Tensor, torch.Tensor, str]:
    if FOLDER.exists():
        data = fashion_mnist(FOLDER)
        return data.train_images[:IMAGES].clone(), data.train_labels[:IMAGES].clone(), data.name
    return torch.rand(IMAGES, 1, 28, 28), torch.randint(0, 10, (IMAGES,)), "random"


def _in_turns(rivals: dict[str, Callable[[str], float]], kind: str, rounds: int) -> dict[str, float]:
    """Return each one's median of milliseconds; the first round, which warms up, is left out."""
    times = [{name: run(kind) * 1000 for name, run in rivals.items()} for _ in range(rounds + 1)][1:]
    return {name: statistics.median(each[name] for each in times) for name in rivals}


# ---- those that take part -------------------------------------------------------------------------------


def _model(strategy: mnb.Strategy, kind: str) -> mnb.Model:
    with strategy.scope():
        torch.manual_seed(0)
        model = mnb.Model(network(kind))
        model.compile("adam", "cross_entropy", metrics=["accuracy"])
    return model


def _epoch(model: mnb.Model, images: torch.Tensor, labels: torch.Tensor) -> float:
    second = SecondEpoch()
    model.fit(images, labels, batch_size=BATCH, epochs=2, verbose=0, callbacks=[second])
    return second.seconds


def _call(model: mnb.Model, images: torch.Tensor, labels: torch.Tensor) -> float:
    began = time.perf_counter()
    model.fit(images, labels, batch_size=BATCH, verbose=0)
    return time.perf_counter() - began


def _first(model: mnb.Model, images: torch.Tensor, labels: torch.Tensor) -> float:
    first, began = FirstStep(), time.perf_counter()
    model.fit(images, labels, batch_size=BATCH, steps_per_epoch=1, verbose=0, callbacks=[first])
    assert first.at is not None
    return first.at - began


def _by_hand(strategy: mnb.Strategy, kind: str, file: str, *, wrapped: bool) -> float:
    """Run the loop on the very replicas that `fit` has: two processes more may lie better on the cores, or worse."""

    def epoch() -> float:
        if folder not in sys.path:
            sys.path.insert(0, folder)
        import fit_loop

        return fit_loop.kept(kind, file, wrapped=wrapped).epoch()

    folder = str(HERE)
    return max(strategy.experimental_local_results(strategy.run(epoch)))


class Rival:
    """Processes that train when they are asked to, each with a connection of its own; they start by themselves."""

    def __init__(self, command: list[str], file: str, count: int, environ: dict[str, str]) -> None:
        """`count`: processes that will connect."""
        self._folder = tempfile.TemporaryDirectory()
        address = f"{self._folder.name}/socket"
        self._listener = Listener(address, "AF_UNIX")
        self._count = count
        self._process = subprocess.Popen([*command, address, file], env={**os.environ, **environ})
        self._connections: list[Connection] = []

    def ask(self, what: str) -> float:
        """Return the seconds that the slowest one took."""
        while len(self._connections) < self._count:
            self._connections.append(self._listener.accept())
        for connection in self._connections:
            connection.send(what)
        return max(connection.recv() for connection in self._connections)

    def close(self) -> None:
        """Let them end; at the latest in 30 s."""
        for connection in self._connections:
            connection.close()
        self._listener.close()
        self._process.wait(30)
        self._folder.cleanup()


def _torchrun(file: str) -> Rival:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return Rival([*command, str(HERE / "fit_torchrun.py")], file, 2, {"OMP_NUM_THREADS": "1"})


def _keras(file: str) -> Rival:
    return Rival([sys.executable, str(HERE / "fit_keras.py")], file, 1, {"KERAS_BACKEND": "torch"})


# ---- words ----------------------------------------------------------------------------------------------


def _head(name: str) -> list[str]:
    return [
        f"one epoch of {IMAGES} images ({name}), global batch {BATCH}, Adam, loss and accuracy; medians of {ROUNDS} "
        "rounds in turns",
        "two CPU replicas of one thread each; Keras: one process, all cores",
        "",
    ]


def _table(times: dict[str, dict[str, float]]) -> list[str]:
    names = {
        "fit": "fit, one epoch of several",
        "call": "fit, the whole call with one epoch",
        "DDP, gloo": "DDP by hand, torchrun, gloo",
        "DDP, ours": "DDP by hand, mirror_nb's replicas",
        "loop": "loop by hand, mirror_nb's replicas",
        "Keras": "Keras 3 fit on one device",
    }
    lines = [f"{'':36}" + "".join(f"{kind:>10}{'of fit':>22}" for kind in times)]
    for name, words in names.items():
        cells = ""
        for kind in times:
            if name in times[kind]:
                ratio = times[kind][name] / times[kind]["fit"]
                cells += f"{times[kind][name]:7.0f} ms{ratio:22.2f}"
        if cells:
            lines.append(f"{words:36}{cells}")
    return [
        *lines,
        "of fit: how many times fit's time it takes (aim: 1 for DDP by the same op: with gloo, torchrun's)",
    ]


def _first_lines(times: dict[str, dict[str, float]]) -> list[str]:
    lines = ["", "warm, from the call of fit to the end of its first step"]
    for name, words in {"fit": "fit", "Keras": "Keras 3 fit on one device"}.items():
        cells = [f"{times[kind][name]:7.1f} ms ({kind})" for kind in times if name in times[kind]]
        if cells:
            lines.append(f"{words:36}" + "   ".join(cells))
    return lines


if __name__ == "__main__":
    main()
