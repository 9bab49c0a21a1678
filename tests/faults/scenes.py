"""What replicas do in a round of chaos, and where in it a fault strikes them. Imported in the replicas.

Knows torch and the plan of a round; knows neither pools nor notebooks. The data of a step are a function of the
step and the replica, and the step is counted by the optimizer: whatever happened before, the weights after k steps
are known.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import mirror_nb as mnb

POINTS = (
    "start",
    "forward",
    "backward",
    "reduce",
    "before step",
    "in step",
    "after step",
    "loader",
    "sleep",
    "import",
    "shell",
    "C call",
    "output",
)
# Where a replica may be when a fault strikes; at "after step" the others have not stepped yet.
FEATURES = 6
EXAMPLES = 4
# In a replica's share of a step.
RATE = 0.02


class Mishap(Exception):
    """What a replica raises when the plan says so."""


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault that replicas bring on themselves."""

    act: str
    # "kill", "segv", "stop", "exit", "raise", "unpicklable", "delay"
    point: str
    step: int
    victims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What one cell, or one call, does."""

    steps: int
    strikes: tuple[Strike, ...]
    visits: tuple[str, ...]
    # Points that take time and are only passed when something shall happen there.
    notes: str
    # Folder where a replica leaves a file when it comes to a point with something to happen.


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the network and its optimizer as they begin."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1))
    return model, Halting([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=RATE)


class Halting(torch.optim.Adam):
    """Adam that steps one group after the other, and can be struck between them."""

    between: Any = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        groups = self.param_groups
        try:
            for group in groups:
                self.param_groups = [group]
                super().step()
                if self.between is not None:
                    self.between()
        finally:
            self.param_groups = groups


class Told(Halting):
    """The same where `fit` calls `step`: what happens around it is told to `at`, of this process."""

    at: Any = staticmethod(lambda point: None)

    def step(self, closure: Any = None) -> None:
        at = Told.at
        at("before step")
        self.between = lambda: at("in step")
        super().step()
        at("after step")


class Learner(mnb.Model):
    """The network for `fit`; the second column of a batch's targets is the number of the step in the plan."""

    def __init__(self, network: nn.Module, struck: bool) -> None:
        super().__init__(network)
        self.struck = struck
        # Otherwise nothing happens to it.

    def training_step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        struck, i = _orders if self.struck else CALM, int(y[0, 1])
        Told.at = staticmethod(lambda point: struck.around_a_step(point, i))
        struck("start", i)
        struck.visit(i)
        struck("reduce", i)
        if self.struck:
            # Always: one that was started anew has no orders, and has to take part.
            _reduce(None)
        struck("forward", i)
        loss = F.mse_loss(self(x), y[:, :1])
        loss.register_hook(lambda gradient: struck("backward", i))
        return loss


def learner(struck: bool) -> tuple[Learner, torch.optim.Optimizer]:
    """Return the network that `make` gives, for `fit`, and its optimizer."""
    network, made = make()
    model = Learner(network, struck)
    optimizer = Told([{"params": group["params"]} for group in made.param_groups], lr=RATE)
    model.compile(optimizer=optimizer)
    return model, optimizer


def batches(n: int, first: int, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the global batches of these steps, one after the other, for a Learner."""
    shares = [(i, *examples(first + i, r)) for i in range(steps) for r in range(n)]
    x = torch.cat([x for _, x, _ in shares])
    return x, torch.cat([torch.cat([y, torch.full_like(y, i)], 1) for i, _, y in shares])


def steps_of(optimizer: torch.optim.Optimizer) -> int:
    """Return how many steps the optimizer's state has behind it; -1 when its parameters do not agree on it."""
    counts = {
        int(optimizer.state[p]["step"]) for g in optimizer.param_groups for p in g["params"] if p in optimizer.state
    }
    return counts.pop() if len(counts) == 1 else (0 if not counts else -1)


def examples(step: int, replica_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a replica's share of a step."""
    generator = torch.Generator().manual_seed(1000 * step + replica_id)
    x = torch.randn(EXAMPLES, FEATURES, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


def undisturbed(n: int, steps: int) -> list[list[torch.Tensor]]:
    """Return the weights after 0, 1, … `steps` steps of one process over the whole global batches."""
    with torch.random.fork_rng():
        model, optimizer = make()
    found = []
    for step in range(steps + 1):
        found.append([p.detach().clone() for p in model.parameters()])
        x, y = (torch.cat(parts) for parts in zip(*[examples(step, r) for r in range(n)], strict=True))
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return found


# ---------------------------------------------------------------------- in a replica


def train(strategy: Any, replica_id: int, model: nn.Module, optimizer: Any, plan: Plan, kept: Any = None) -> int:
    """Train for the steps of the plan and pass its points; return the steps behind the optimizer."""
    struck = _Points(plan, replica_id)
    optimizer.between = None
    for i in range(plan.steps):
        struck("start", i)
        step = steps_of(optimizer)
        struck.visit(i)
        x, y = examples(step, replica_id)
        optimizer.zero_grad()
        struck("forward", i)
        loss = F.mse_loss(model(x), y)
        loss.register_hook(lambda gradient, i=i: struck("backward", i))
        loss.backward()
        struck("reduce", i)
        if struck.reduces:
            _reduce(strategy)
        struck("before step", i)
        struck.let_victims_step_first(i)
        optimizer.between = lambda i=i: struck("in step", i)
        optimizer.step()
        optimizer.between = None
        struck("after step", i)
    return steps_of(optimizer)


def take_orders(plan: Plan, replica_id: int) -> None:
    """The next `fit` of a Learner passes the points of this plan. One that is started anew meanwhile has no orders."""
    global _orders
    _orders = _Points(plan, replica_id)


def look(strategy: Any, replica_id: int, model: nn.Module, optimizer: Any) -> tuple[Any, ...]:
    """Return what is to be equal everywhere: a sum over the replicas, the steps, the weights, the state."""
    total = _reduce(strategy, float(replica_id + 1))
    state = [v for p in model.parameters() for v in optimizer.state.get(p, {}).values()]
    return total, steps_of(optimizer), [p.detach().clone() for p in model.parameters()], _digest(state)


def resources() -> tuple[int, int, int]:
    """Return this replica's pid, and how many descriptors and threads it has."""
    return os.getpid(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _reduce(strategy: Any, value: float = 1.0) -> float:
    # By torch.distributed: the same words in a cell and in a function given to `run`.
    tensor = torch.full((4,), value)
    torch.distributed.all_reduce(tensor)
    return float(tensor[0])


def _digest(tensors: list[Any]) -> str:
    return hashlib.sha256(b"".join(torch.as_tensor(t).numpy().tobytes() for t in tensors)).hexdigest()[:12]


class _Points:
    """Strikes this replica where the plan says so, once."""

    def __init__(self, plan: Plan, replica_id: int) -> None:
        self._plan = plan
        self._replica_id = replica_id
        self._left = [s for s in plan.strikes if replica_id in s.victims]
        self.reduces = any(s.point == "reduce" for s in plan.strikes)

    def __call__(self, point: str, i: int) -> None:
        for strike in [s for s in self._left if s.point == point and s.step == i]:
            self._left.remove(strike)
            Path(self._plan.notes, f"{self._replica_id}").touch()
            ACTS[strike.act]()

    def visit(self, i: int) -> None:
        """Pass the points that take time."""
        for place in self._plan.visits:
            self(place, i)
            VISITS[place](self._plan, self._replica_id)

    def around_a_step(self, point: str, i: int) -> None:
        """Pass a point of which the optimizer tells."""
        self(point, i)
        if point == "before step":
            self.let_victims_step_first(i)

    def let_victims_step_first(self, i: int) -> None:
        """Wait a little if somebody else is to be struck just after its step."""
        uneven = [s for s in self._plan.strikes if s.point == "after step" and s.step == i]
        if uneven and not any(self._replica_id in s.victims for s in uneven):
            time.sleep(0.1)


CALM = _Points(Plan(0, (), (), ""), 0)
_orders = CALM
# Of this replica, for `fit`.


def _die(number: int) -> None:
    os.kill(os.getpid(), number)
    # The signal may take a moment; nothing must be done in it.
    time.sleep(10)


def _raise() -> None:
    raise Mishap("as planned")


def _raise_unpicklable() -> None:
    class Local(Exception):
        def __reduce__(self) -> Any:
            raise TypeError("this exception cannot be pickled")

    raise Local("as planned")


ACTS = {
    "kill": lambda: _die(signal.SIGKILL),
    "segv": lambda: _die(signal.SIGSEGV),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(3),
    "raise": _raise,
    "unpicklable": _raise_unpicklable,
    "delay": lambda: time.sleep(0.2),
    "mark": lambda: None,
}


class _Slow(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        time.sleep(0.02)
        return index


def _load(plan: Plan, replica_id: int) -> None:
    assert sum(int(batch.sum()) for batch in DataLoader(_Slow(), batch_size=2, num_workers=1)) == 6


def _import(plan: Plan, replica_id: int) -> None:
    """Import a module that takes its time; interrupted, it must not be left half-made."""
    name = f"slow_{replica_id}"
    path = Path(plan.notes, f"{name}.py")
    path.write_text("import time\nbegun = True\ntime.sleep(0.1)\nwhole = True\n")
    sys.modules.pop(name, None)
    importlib.invalidate_caches()
    sys.path.insert(0, plan.notes)
    try:
        assert importlib.import_module(name).whole
    finally:
        sys.path.remove(plan.notes)


def _write(plan: Plan, replica_id: int) -> None:
    print("é" * 200_000)
    os.write(2, b"\xff\xfe\x00 binary" * 500)


VISITS = {
    "loader": _load,
    "sleep": lambda plan, replica_id: time.sleep(0.1),
    "import": _import,
    "shell": lambda plan, replica_id: subprocess.run(["sleep", "0.1"], check=False),
    # A C function that holds the GIL: no signal's handler runs meanwhile.
    "C call": lambda plan, replica_id: ctypes.PyDLL(None).usleep(100_000),
    "output": _write,
}
