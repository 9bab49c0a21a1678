"""A seeded chaos run: rounds that train, are struck by faults, and must go on as if nothing had been.

    make chaos ROUNDS=500 SEED=1                             goes on where an interrupted one stopped
    python tests/faults/chaos.py --rounds 50 --seed 1        without a log or a report
    python tests/faults/chaos.py --seed 1 --only 37          round 37 alone, as it was drawn

Each round draws a front (cells of a notebook session, a strategy in a script, or `fit`), a number of replicas, and
faults: who is struck, where, by what, and sometimes once more while the session recovers. After it: the next cell is
right, the weights are equal on all replicas, bit for bit, and those of an undisturbed training after as many steps,
names are kept, and nothing is left behind. `fit` has to go on by itself if a replica survives, with the very bits of
a fit that nothing struck. What a fault meets depends on the system's timing too, so a round that failed may need a
few repetitions (--times) to fail again.

With `--log` every round is written down as it ends, with a digest of the code; those that are there, of the same
seed and code, are not run again, and a report tells of all of them. SCENES says which faults were met how often. The
rest that is asked of a session is in tests of its own:

    the kernel killed while replicas hold the GIL, are stopped, have loaders' workers    tests/test_local_pool.py
    different collectives on the replicas                                    tests/test_process_group_memory.py
    interrupts in a DDP loop, in steps, in the first import, during the start     tests/faults/test_interrupts.py
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import io
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

# ruff: noqa: E402
import scenes
from IPython.core.interactiveshell import InteractiveShell
from scenes import POINTS, VISITS, Plan, Strike

import mirror_nb as mnb
from mirror_nb.notebook.options import CellOptions
from mirror_nb.notebook.session import Session
from mirror_nb.pool.local import LocalPool, stop_forkserver
from mirror_nb.pool.report import Death

STEPS = 3
# Of training in a round.
BLOCK = 10
LONGEST = 400
# Steps until a network starts anew: the undisturbed training is known up to there.
CELL_SECONDS = 1.5
# For a cell with a replica that is stopped; then it is ended.
HANG_SECONDS = 90
DESCRIPTORS, THREADS = 120, 60
# More than a sound replica ever has: parked groups of a few failures count.
OUTSIDE = ("interrupt", "kill", "segv", "stop", "pause")
INSIDE = ("kill", "segv", "exit", "raise", "sys.exit", "unpicklable", "stop", "delay")
FATAL = ("kill", "segv", "exit")


class Broken(AssertionError):
    """A promise that a round found broken."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What one round does, drawn from its seed alone."""

    front: str
    replicas: int
    strikes: tuple[Strike, ...]
    outside: str | None
    # What somebody else does to the victims once one of them has come to the point.
    victims: tuple[int, ...]
    delay: float
    # Seconds from that moment.
    recovery: str | None
    # What strikes while the session recovers: "kill", "interrupt" or None.
    recovery_victims: tuple[int, ...]
    recovery_delay: float
    spare: str | None
    # What befalls the process that waits to take a dead replica's place, before anything else: "kill" or "stop".

    @property
    def act(self) -> str:
        """What befalls the victims."""
        return self.outside or self.strikes[0].act

    @property
    def fatal(self) -> bool:
        """Whether it ends them."""
        return self.act in FATAL

    def __str__(self) -> str:
        strikes = ", ".join(f"{s.act} at {s.point} {s.step} on {s.victims}" for s in self.strikes)
        outside = f"; {self.outside} {self.victims} after {self.delay:.3f} s" if self.outside else ""
        again = f"; {self.recovery} {self.recovery_victims} in the recovery" if self.recovery else ""
        spare = f"; {self.spare} the spare" if self.spare else ""
        return f"{self.front} × {self.replicas}: {strikes}{outside}{again}{spare}"


def drawn(seed: int, number: int) -> Draw:
    """Return the round of this number."""
    # Replicas are kept for a block of rounds: what one leaves behind, the next ones meet.
    dice = random.Random(f"{seed}/block {number // BLOCK}")
    n, front = dice.choice((2, 2, 3, 4)), dice.choice(("notebook", "notebook", "script"))
    if number // BLOCK % 4 == 2:
        front = "fit"
    dice = random.Random(f"{seed}/{number}")
    victims = tuple(sorted(dice.sample(range(n), dice.choice((1, 1, 1, 1, 2, n)))))
    point, step = dice.choice(POINTS), dice.randrange(STEPS)
    outside = dice.choice(OUTSIDE) if dice.random() < 0.4 else None
    act = "mark" if outside else dice.choice(INSIDE)
    halves = ("before step", "in step", "after step") if front == "fit" else ("in step",)
    if point in halves and act in ("raise", "sys.exit", "unpicklable"):
        # Half a step on all of them is what the user's own code asked for.
        victims = victims[:1]
    recovery = dice.choice(("kill", "kill", "interrupt")) if dice.random() < 0.25 else None
    again = tuple(sorted(dice.sample(range(n), dice.choice((1, 1, 2)))))
    return Draw(
        front=front,
        replicas=n,
        strikes=(Strike(act, point, step, victims),),
        outside=outside,
        victims=victims,
        delay=dice.choice((0.0, 0.0, dice.uniform(0, 0.12))),
        recovery=recovery,
        recovery_victims=again,
        recovery_delay=dice.uniform(0, 0.15),
        spare=dice.choice(("kill", "stop")) if dice.random() < 0.2 else None,
    )


# ---------------------------------------------------------------------- the two fronts


class Front(ABC):
    """Replicas with a network, through one of the ways in which users have them."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.fresh = True
        # Nothing has been made in the replicas yet, or all of it was lost.

    @property
    @abstractmethod
    def pool(self) -> LocalPool:
        """The replicas."""

    @abstractmethod
    def make(self, token: int) -> None:
        """Make a network, an optimizer and a name that holds the token."""

    @abstractmethod
    def train(self, plan: Plan, timeout: float | None) -> None:
        """Run the plan; raises what the user would see raised."""

    @abstractmethod
    def look(self) -> list[tuple[Any, ...]]:
        """Return what `scenes.look` gives, and the token, of each replica."""

    def compare(self, step: int, weights: list[torch.Tensor]) -> None:
        """Raise Broken if there is more to ask of weights after so many steps."""
        return

    @abstractmethod
    def resources(self) -> list[tuple[int, int, int]]:
        """Return what `scenes.resources` gives, of each replica."""

    @abstractmethod
    def close(self) -> None:
        """End the replicas."""


class NotebookFront(Front):
    """Cells of a session, in a shell of this process."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self._shell = InteractiveShell.instance()
        self._session = Session(self._shell)
        self._session.start(",".join(f"cpu:{i}" for i in range(n)))

    @property
    def pool(self) -> LocalPool:
        pool = self._session.pool
        assert isinstance(pool, LocalPool)
        return pool

    def _cell(self, source: str, timeout: float | None = None) -> Any:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return self._session.run_cell(source, CellOptions(quiet=True, timeout=timeout))

    def make(self, token: int) -> None:
        self._cell(f"import scenes\nmodel, optimizer = scenes.make()\nkept = {{'token': {token}}}")

    def train(self, plan: Plan, timeout: float | None) -> None:
        self._shell.user_ns["plan"] = plan
        self._cell("scenes.train(strategy, replica_id, model, optimizer, plan)", timeout)

    def look(self) -> list[tuple[Any, ...]]:
        source = "[*scenes.look(strategy, replica_id, model, optimizer), kept['token']], replica_id"
        return [value[0] for value in self._each(source)]

    def resources(self) -> list[tuple[int, int, int]]:
        return self._each("scenes.resources()")

    def _each(self, source: str) -> list[Any]:
        found = self._cell(source, timeout=20.0)
        return list(found.values) if isinstance(found, mnb.PerReplica) else [found] * self.n

    def close(self) -> None:
        self._session.stop()


class StrategyFront(Front):
    """A strategy of a script."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self._strategy = mnb.MirroredStrategy([f"cpu:{i}" for i in range(n)])
        self._strategy.run(scenes.resources)

    @property
    def pool(self) -> LocalPool:
        pool: LocalPool = self._strategy._place._pool
        return pool

    @abstractmethod
    def _made(self) -> tuple[Any, Any]:
        """Return a network and its optimizer."""

    @abstractmethod
    def _train(self, plan: Plan) -> None:
        """Run the plan."""

    def make(self, token: int) -> None:
        with self._strategy.scope():
            self._model, self._optimizer = self._made()
            self._token = mnb.Variable(torch.tensor(float(token)))
        self.look()

    def train(self, plan: Plan, timeout: float | None) -> None:
        silent = io.StringIO()
        with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent), _pressed_after(timeout):
            self._train(plan)

    def look(self) -> list[tuple[Any, ...]]:
        model, optimizer, token = self._model, self._optimizer, self._token

        def see() -> Any:
            context = mnb.get_replica_context()
            return *scenes.look(context.strategy, context.replica_id_in_sync_group, model, optimizer), int(token)

        return self._each(see)

    def resources(self) -> list[tuple[int, int, int]]:
        return self._each(scenes.resources)

    def _each(self, function: Callable[[], Any]) -> list[Any]:
        # As `run`, before the results are regrouped.
        found: list[Any] = self._strategy._place._call(function, (), {}, plain=False)
        return found

    def close(self) -> None:
        self._strategy.close()


class ScriptFront(StrategyFront):
    """Its `run` is called."""

    def _made(self) -> tuple[Any, Any]:
        return scenes.make()

    def _train(self, plan: Plan) -> None:
        model, optimizer = self._model, self._optimizer

        def step() -> int:
            context = mnb.get_replica_context()
            return scenes.train(context.strategy, context.replica_id_in_sync_group, model, optimizer, plan)

        self._strategy.run(step)


class FitFront(StrategyFront):
    """A model of it is fitted; another one, that nothing strikes, is fitted as far."""

    def _made(self) -> tuple[Any, Any]:
        self._calm, _ = scenes.learner(struck=False)
        self._calm_steps = 0
        return scenes.learner(struck=True)

    def _train(self, plan: Plan) -> None:
        self._each(lambda: scenes.take_orders(plan, mnb.get_replica_context().replica_id_in_sync_group))
        self._fit(self._model, _steps(self), plan.steps)

    def _fit(self, model: Any, first: int, steps: int) -> None:
        x, y = scenes.batches(self.n, first, steps)
        model.fit(x, y, batch_size=self.n * scenes.EXAMPLES, shuffle=False, verbose=0)

    def compare(self, step: int, weights: list[torch.Tensor]) -> None:
        if step > self._calm_steps:
            self._fit(self._calm, self._calm_steps, step - self._calm_steps)
            self._calm_steps = step
        same = [torch.equal(a, b) for a, b in zip(weights, self._calm.parameters(), strict=True)]
        _promise(all(same), f"the weights are not those of a fit of {step} steps that nothing struck, bit for bit")


@contextlib.contextmanager
def _pressed_after(seconds: float | None) -> Iterator[None]:
    """Press Ctrl-C after so long, as a user does who sees that nothing comes."""
    if seconds is None:
        yield
        return
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


# ---------------------------------------------------------------------- a round


@dataclass(slots=True)
class Record:
    """What was seen of a round."""

    outcome: str = "nothing"
    # Name of the exception that the user saw, or "no error".
    replaced: int = 0
    by_a_spare: bool = False
    # One of them: by the process that waited for it.
    all_lost: bool = False
    # No replica survived, so that all began anew.
    recovery_seconds: float | None = None
    # From the fault's end, as the user sees it, to the end of the next cell; None where that was struck too.
    descriptors: int = 0
    threads: int = 0
    # The most in one replica.
    broken: str | None = None
    # The promise that was not kept.


class Round:
    """One draw, carried out on a front."""

    def __init__(self, front: Front, draw: Draw, number: int, record: Record, notes: Path) -> None:
        self._front = front
        self._draw = draw
        self._number = number
        self._record = record
        self._notes = notes
        self._before = _steps(front) if not front.fresh else 0
        self._pids = [line.pid for line in front.pool.status()]
        self._spare = front.pool.spare()
        _ends.clear()

    def run(self) -> None:
        """Carry it out; raises Broken with what was promised and not kept."""
        if self._spare is not None and self._draw.spare is not None:
            os.kill(self._spare, signal.SIGKILL if self._draw.spare == "kill" else signal.SIGSTOP)
        raised = self._train()
        shown = "" if raised is None else "\n".join(getattr(raised, "_render_traceback_", list)())
        self._shown = f"; the user saw {shown[-4000:]}"
        self._record.outcome = type(raised).__name__ if raised is not None else "no error"
        self._least = self._before + (STEPS if raised is None else 0)
        self._expect(raised)
        began = time.perf_counter()
        seen = self._recovered()
        if raised is not None and self._draw.recovery is None:
            self._record.recovery_seconds = time.perf_counter() - began
        self._check_survivors()
        now = {line.pid for line in self._front.pool.status()}
        self._record.replaced, self._record.by_a_spare = len(set(self._pids) - now), self._spare in now
        _promise(self._draw.spare is None or self._spare not in now, "a spare that was struck became a replica")
        if seen is None:
            self._record.all_lost = True
            self._front.fresh = True
        else:
            self._check(seen)
        self._check_resources()

    def _check_survivors(self) -> None:
        """Only who was struck may have been replaced."""
        struck = set(self._draw.victims) | (
            set(self._draw.recovery_victims) if self._draw.recovery == "kill" else set()
        )
        now = {line.replica_id: line.pid for line in self._front.pool.status()}
        lost = [r for r, pid in enumerate(self._pids) if r not in struck and now[r] != pid]
        _promise(not lost, f"replicas {lost} were replaced, though nothing struck them: {_ends}{self._shown}")

    def _train(self) -> BaseException | None:
        draw = self._draw
        place = draw.strikes[0].point
        notes = self._notes / str(self._number)
        notes.mkdir()
        plan = Plan(STEPS, draw.strikes, (place,) if place in VISITS else (), str(notes))
        stops = "stop" in (draw.outside, draw.strikes[0].act)
        over = threading.Event()
        strikers = [self._strike_from_outside] if draw.outside else []
        if draw.recovery and draw.front == "fit":
            # The recovery is in it.
            strikers.append(self._strike_the_recovery)
        threads = [threading.Thread(target=self._when_struck, args=(strike, notes, over)) for strike in strikers]
        for thread in threads:
            thread.start()
        try:
            self._front.train(plan, CELL_SECONDS if stops else None)
        except BaseException as error:
            return error
        finally:
            over.set()
            while any(thread.is_alive() for thread in threads):
                # An interrupt that came too late for the cell.
                with contextlib.suppress(KeyboardInterrupt):
                    for thread in threads:
                        thread.join()
        return None

    def _when_struck(self, strike: Callable[[threading.Event], None], notes: Path, over: threading.Event) -> None:
        while not any(notes.glob("[0-9]")):
            if over.wait(0.002):
                return
        strike(over)

    def _strike_from_outside(self, over: threading.Event) -> None:
        over.wait(self._draw.delay)
        numbers = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP, "pause": signal.SIGSTOP}
        if self._draw.outside == "interrupt":
            if not over.is_set():
                os.kill(os.getpid(), signal.SIGINT)
            return
        self._signal(self._draw.victims, numbers[self._draw.outside or ""])
        if self._draw.outside == "pause":
            time.sleep(0.3)
            self._signal(self._draw.victims, signal.SIGCONT)

    def _signal(self, victims: tuple[int, ...], number: int) -> None:
        for line in self._front.pool.status():
            if line.replica_id in victims and line.state == "ready":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(line.pid, number)

    def _expect(self, raised: BaseException | None) -> None:
        """Whether the user was told what happened, and nothing else."""
        draw = self._draw
        died, stopped = ("ReplicaDied",), ("ReplicaTimeout", "KeyboardInterrupt")
        expected = {
            "kill": died,
            "segv": died,
            "exit": died,
            "stop": stopped,
            "interrupt": ("KeyboardInterrupt",),
            "raise": ("Mishap",),
            "unpicklable": ("Local",),
            "sys.exit": ("SystemExit", "NoneType", "PeerFailed"),
        }.get(draw.act, ())
        goes_on = draw.front == "fit" and (draw.fatal or draw.recovery == "kill")
        if draw.front == "fit":
            # A death shows where nobody is left.
            expected = tuple(name for name in expected if name != "ReplicaDied")
            expected += died if self._may_all_be_lost() else ()
            expected += stopped if draw.recovery == "interrupt" else ()
        if raised is None and (draw.outside or not expected or goes_on):
            # It came when the cell was over, or does no harm.
            if draw.outside == "stop":
                self._signal(draw.victims, signal.SIGCONT)
            return
        if type(raised).__name__ not in expected:
            raise Broken(f"the user saw {type(raised).__name__}: {raised}, not one of {expected}") from raised

    def _recovered(self) -> list[tuple[Any, ...]] | None:
        """Look at the replicas, with a strike meanwhile if one was drawn; None if no replica survived all this."""
        for attempt in range(3):
            over = threading.Event()
            thread = threading.Thread(target=self._strike_the_recovery, args=(over,))
            if self._draw.recovery and self._draw.front != "fit" and not attempt:
                thread.start()
            try:
                try:
                    seen = self._look()
                finally:
                    over.set()
                    while thread.is_alive():
                        thread.join()
                # A strike at the very end is found by what comes next.
                return self._look() if self._draw.recovery and not attempt and seen is not None else seen
            except (mnb.ReplicaDied, KeyboardInterrupt) as error:
                if attempt and not isinstance(error, KeyboardInterrupt):
                    late = self._draw.outside in ("kill", "segv")
                    if attempt == 2 or not (late or self._draw.recovery):
                        raise Broken(f"not recovered after {attempt + 1} cells: {error}") from error
            except Exception as error:
                if self._may_all_be_lost():
                    return None
                raise Broken(f"the next cell raised {type(error).__name__}: {error}") from error
        raise Broken("not recovered after three cells")

    def _look(self) -> list[tuple[Any, ...]] | None:
        seen = self._front.look()
        alive = {line.pid for line in self._front.pool.status()} & set(self._pids)
        # Of step 0, too: an optimizer without a state may be one that was never looked at here before all were lost.
        if self._may_all_be_lost() and not alive and min(row[1] for row in seen) < max(self._least, 1):
            self._check_remains([row[2] for row in seen])
            return None
        return seen

    def _check_remains(self, weights: list[list[torch.Tensor]]) -> None:
        """No replica survived: the network has the values that were last read here, on all replicas."""
        known = trajectory(self._front.n)[: self._before + STEPS + 1]
        for r, own in enumerate(weights):
            read = any(all(map(_near, own, at)) for at in known)
            _promise(read, f"all were lost, and the weights of replica {r} are those after no step that was read")

    def _strike_the_recovery(self, over: threading.Event) -> None:
        if over.wait(self._draw.recovery_delay):
            return
        if self._draw.recovery == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            return
        for replica_id in self._draw.recovery_victims:
            member = self._front.pool._members.get(replica_id)
            if member is not None and member.death is None:
                with contextlib.suppress(ProcessLookupError, ValueError):
                    os.kill(member.process.pid, signal.SIGKILL)

    def _may_all_be_lost(self) -> bool:
        draw = self._draw
        killed = set(draw.victims) if draw.fatal or draw.act == "stop" else set()
        if draw.recovery == "kill":
            killed |= set(draw.recovery_victims)
        return len(killed) == self._front.n

    def _check(self, seen: list[tuple[Any, ...]]) -> None:
        n = self._front.n
        totals, steps, weights, states, tokens = (list(column) for column in zip(*seen, strict=True))
        _promise(totals == [n * (n + 1) / 2] * n, f"an all-reduce gave {totals}")
        _promise(len(set(steps)) == 1 and steps[0] >= 0, f"the replicas stand at steps {steps}")
        _promise(len(set(states)) == 1, f"the optimizers' states differ: {states}")
        _promise(len(set(tokens)) == 1 and tokens[0] == TOKEN, f"the name holds {tokens}, not {TOKEN}")
        for r in range(1, n):
            same = all(torch.equal(a, b) for a, b in zip(weights[0], weights[r], strict=True))
            _promise(same, f"the weights of replicas 0 and {r} differ")
        step = steps[0]
        _promise(self._least <= step <= self._before + STEPS, f"step {step} after {self._before} + at most {STEPS}")
        near = all(map(_near, weights[0], trajectory(n)[step]))
        _promise(near, f"the weights are not those after {step} undisturbed steps")
        self._front.compare(step, weights[0])

    def _check_resources(self) -> None:
        found = self._front.resources()
        pids = {pid for pid, *_ in found}
        _promise(pids == {line.pid for line in self._front.pool.status()}, "the replicas are not those of the table")
        for _, descriptors, threads in found:
            self._record.descriptors = max(self._record.descriptors, descriptors)
            self._record.threads = max(self._record.threads, threads)
            _promise(descriptors < DESCRIPTORS, f"a replica has {descriptors} descriptors")
            _promise(threads < THREADS, f"a replica has {threads} threads")
        deadline = time.monotonic() + 3
        while strangers := _strangers(pids):
            _promise(time.monotonic() < deadline, f"processes are left: {strangers}")
            time.sleep(0.02)


def _near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(found, wanted, atol=1e-5)


def _promise(kept: bool, otherwise: str) -> None:
    if not kept:
        raise Broken(otherwise)


def _steps(front: Front) -> int:
    return int(front.look()[0][1])


def _strangers(replicas: set[int]) -> list[str]:
    """Return processes below this one that are neither replicas nor what keeps them."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            line = " ".join(child.cmdline())
            ours = child.pid in replicas or any(word in line for word in ("nanny", "forkserver", "resource_tracker"))
            parent = child.ppid()
            # Replicas have the forkserver's command line; what they started is told by its parent.
            if child.status() != psutil.STATUS_ZOMBIE and (not ours or parent in replicas):
                found.append(f"{child.pid} of {parent}: {line[:80]}")
    return found


_ends: list[str] = []
# How the replicas that were replaced in this round had ended.


def _noting(replace: Callable[[LocalPool, list[Death]], None]) -> Callable[[LocalPool, list[Death]], None]:
    def note(pool: LocalPool, gone: list[Death]) -> None:
        _ends.extend("; ".join([str(death), *death.last_words]) for death in gone)
        replace(pool, gone)

    return note


LocalPool._replace = _noting(LocalPool._replace)  # type: ignore[method-assign]
TOKEN = 4711
SPARE_DESCRIPTORS = 6
# A channel, a sentinel and its other end, an end by pidfd, a file and a pipe for last words.
_trajectories: dict[int, list[list[torch.Tensor]]] = {}


def trajectory(n: int) -> list[list[torch.Tensor]]:
    """Return the weights by step of an undisturbed training over n replicas' examples."""
    if n not in _trajectories:
        _trajectories[n] = scenes.undisturbed(n, LONGEST + STEPS)
    return _trajectories[n]


# ---------------------------------------------------------------------- many rounds

FRONTS: dict[str, Callable[[int], Front]] = {"notebook": NotebookFront, "script": ScriptFront, "fit": FitFront}


class Chaos:
    """Rounds in a row, which share the fronts that are there."""

    def __init__(self, seed: int, say: Callable[[str], None] = lambda line: None) -> None:
        self.records: dict[int, Record] = {}
        # By the round's number.
        self.failures: list[str] = []
        self._seed = seed
        self._say = say
        self._fronts: dict[tuple[str, int], Front] = {}
        self._descriptors: dict[str, int] = {}

    def run(self, numbers: Iterable[int], note: Callable[[int, Record], None] = lambda number, record: None) -> None:
        """Run these rounds and note each; failures are collected, each with how to run it again."""
        shared = _shared_memory()
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            for count, number in enumerate(numbers):
                draw = drawn(self._seed, number)
                notes = Path(folder, str(count))
                notes.mkdir()
                faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
                began = time.perf_counter()
                record = self.records[number] = Record()
                try:
                    self._round(draw, number, notes, record)
                except Exception as error:
                    trace = "".join(traceback.format_exception(error))
                    again = f"python {Path(__file__).name} --seed {self._seed} --only {number} --times 20"
                    self.failures.append(f"round {number} ({draw}): {error}\nagain: {again}\n{trace}")
                    # Without stacks and what the user saw: those name folders of this machine.
                    record.broken = str(error).partition("\n")[0].partition(": [")[0]
                    self._say(f"FAILED: {error}")
                    self._forget(draw)
                note(number, record)
                self._say(f"{number} ({time.perf_counter() - began:.1f} s): {draw}")
            self.close()
            faulthandler.cancel_dump_traceback_later()
        left = _shared_memory() - shared
        if left:
            self.failures.append(f"left in /dev/shm: {sorted(left)}")

    def _round(self, draw: Draw, number: int, notes: Path, record: Record) -> None:
        key = (draw.front, draw.replicas)
        for other in [k for k in self._fronts if k != key and k[0] == draw.front == "notebook"]:
            # A shell has one session: two would take each other's names for their own.
            self._forget_key(other)
        if key not in self._fronts and len(self._fronts) >= 2:
            # Two at once: no more than six or eight replicas for a small machine.
            self._forget_key(next(iter(self._fronts)))
        if key not in self._fronts:
            self._fronts[key] = FRONTS[draw.front](draw.replicas)
        front = self._fronts[key]
        if not front.fresh and _steps(front) > LONGEST - STEPS:
            front.fresh = True
        if front.fresh:
            front.make(TOKEN)
        round_ = Round(front, draw, number, record, notes)
        front.fresh = False
        round_.run()
        self._check_controller()

    def _check_controller(self) -> None:
        key = tuple(sorted(self._fronts))
        spares = sum(front.pool._spare is not None for front in self._fronts.values())
        now = len(os.listdir("/proc/self/fd")) - spares * SPARE_DESCRIPTORS
        least = self._descriptors.setdefault(str(key), now)
        _promise(now <= least + 6, f"the controller has {now} descriptors, {least} when these were new")

    def _forget(self, draw: Draw) -> None:
        self._forget_key((draw.front, draw.replicas))

    def _forget_key(self, key: tuple[str, int]) -> None:
        front = self._fronts.pop(key, None)
        if front is not None:
            with contextlib.suppress(Exception):
                front.close()

    def close(self) -> None:
        """End all replicas."""
        for key in list(self._fronts):
            self._forget_key(key)


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


# ---------------------------------------------------------------------- what a run showed

SCENES: dict[str, Callable[[Draw], bool]] = {
    "killed in the forward pass": lambda d: d.fatal and d.strikes[0].point == "forward",
    "killed in an all-reduce of four": lambda d: (
        d.fatal and d.replicas == 4 and d.strikes[0].point in ("backward", "reduce", "before step")
    ),
    "killed when it had stepped and others had not": lambda d: (
        d.fatal and d.strikes[0].point == "after step" and len(d.victims) < d.replicas
    ),
    "killed in the middle of a step": lambda d: d.fatal and d.strikes[0].point == "in step",
    "replica 0 killed": lambda d: d.fatal and d.victims[0] == 0,
    "two killed at once": lambda d: d.fatal and len(d.victims) == 2 < d.replicas,
    "all killed": lambda d: d.fatal and len(d.victims) == d.replicas,
    "killed in the recovery": lambda d: d.recovery == "kill",
    "interrupted in the recovery": lambda d: d.recovery == "interrupt",
    "SIGSEGV": lambda d: d.act == "segv",
    "SIGSTOP for good": lambda d: d.act == "stop",
    "SIGSTOP for a while, or late": lambda d: d.act in ("pause", "delay"),
    "while C code holds the GIL": lambda d: d.strikes[0].point == "C call",
    "with a loader's workers or a shell": lambda d: d.strikes[0].point in ("loader", "shell"),
    "in an import": lambda d: d.strikes[0].point == "import",
    "interrupted": lambda d: d.act == "interrupt",
    "interrupted in a step": lambda d: d.act == "interrupt" and d.strikes[0].point == "in step",
    "fit goes on without one that was killed": lambda d: d.front == "fit" and d.fatal and len(d.victims) < d.replicas,
    "and another is killed meanwhile": lambda d: d.front == "fit" and d.fatal and d.recovery == "kill",
    "SIGSTOP for a while in fit": lambda d: d.front == "fit" and d.act == "pause",
    "raised, or left by sys.exit": lambda d: d.act in ("raise", "unpicklable", "sys.exit"),
}


class Log:
    """Rounds that were run, a line each, in a file that later runs go on with."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._code = _digest_of_code()

    def note(self, seed: int, number: int, record: Record) -> None:
        """Write a round down."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps({"code": self._code, "seed": seed, "round": number, **asdict(record)}) + "\n")

    def rounds(self, seed: int) -> dict[int, Record]:
        """Return what was seen with this seed and this very code; of one that was run again, what broke, if it did."""
        found: dict[int, Record] = {}
        for line in self._path.read_text().splitlines() if self._path is not None and self._path.exists() else []:
            entry = json.loads(line)
            code, its_seed, number = (entry.pop(key) for key in ("code", "seed", "round"))
            if code == self._code and its_seed == seed and not (number in found and found[number].broken):
                found[number] = Record(**entry)
        return found


def _digest_of_code() -> str:
    """Return a digest of the package and of these scenes."""
    root = Path(__file__).parents[2]
    files = sorted([*(root / "mirror_nb").rglob("*.py"), *Path(__file__).parent.glob("[cs]*.py")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def report_lines(records: dict[int, Record], seed: int) -> list[str]:
    """Return what rounds showed."""
    seen = list(records.values())
    waits = sorted(r.recovery_seconds for r in seen if r.recovery_seconds is not None) or [0.0]
    draws = [drawn(seed, number) for number in records]
    broken = [f"round {number} ({drawn(seed, number)}): {r.broken}" for number, r in records.items() if r.broken]
    outcomes = Counter(r.outcome for r in seen).most_common()
    return [
        f"{len(records)} rounds of chaos, seed {seed}: {len(broken)} promises broken",
        *broken,
        f"replicas replaced: {sum(r.replaced for r in seen)}, {sum(r.by_a_spare for r in seen)} of them by a process "
        f"that waited for it; rounds in which none survived: {sum(r.all_lost for r in seen)}",
        "what the user saw: " + ", ".join(f"{name} {count}" for name, count in outcomes),
        f"next cell after an error, recovery included: median {waits[len(waits) // 2]:.3f} s, worst {waits[-1]:.3f} s",
        f"most in one replica: {max((r.descriptors for r in seen), default=0)} descriptors, "
        f"{max((r.threads for r in seen), default=0)} threads",
        "replicas: " + ", ".join(f"{n}: {c} rounds" for n, c in sorted(Counter(d.replicas for d in draws).items())),
        "fronts: " + ", ".join(f"{f}: {c} rounds" for f, c in sorted(Counter(d.front for d in draws).items())),
        *(f"  {scene:<46} {sum(map(holds, draws)):>4}" for scene, holds in SCENES.items()),
    ]


def main() -> int:
    """Run from the command line; write the report where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="+", default=None, help="these rounds alone")
    parser.add_argument("--times", type=int, default=1, help="so often")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no round after this time")
    parser.add_argument("--log", type=Path, default=None, help="file to note rounds in, and to go on from")
    parser.add_argument("--report", type=Path, default=None, help="file to write the report to")
    given = parser.parse_args()
    log = Log(given.log)
    known = log.rounds(given.seed)
    numbers = [n for n in range(given.rounds) if n not in known] if given.only is None else given.only * given.times
    chaos = Chaos(given.seed, lambda line: print(line, flush=True))
    end = time.monotonic() + given.seconds
    chaos.run(
        itertools.takewhile(lambda number: time.monotonic() < end, numbers),
        lambda number, record: log.note(given.seed, number, record),
    )
    stop_forkserver()
    records = log.rounds(given.seed) or chaos.records
    lines = report_lines(dict(sorted(records.items())), given.seed)
    print("\n".join([*chaos.failures, *lines]))
    if given.report is not None:
        sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
        from machine import description

        given.report.write_text("\n".join([*lines, "", description(), ""]))
    return bool(chaos.failures) or any(record.broken for record in records.values())


if __name__ == "__main__":
    sys.exit(main())
