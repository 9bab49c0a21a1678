"""What a replica is asked to do for fit, evaluate and predict: the functions that `Place.command` calls.

    begin_… ─▶ a job in the replica's seat ─▶ advance, an epoch or some steps at a time ─▶ end

A job lives in the seat under its token between the messages. Knows which jobs there are; knows not how they work.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, TypeVar, final

import numpy as np
import torch
from torch.optim import Optimizer

from mirror_nb import mirrors
from mirror_nb.errors import ReplicaError
from mirror_nb.strategies.base import Strategy
from mirror_nb.strategies.seat import Seat
from mirror_nb.training import trials
from mirror_nb.training.learning import Training, load_states, states_of
from mirror_nb.training.loop import Advanced, Job, Task
from mirror_nb.training.prediction import Prediction
from mirror_nb.training.scoring import Evaluation

if TYPE_CHECKING:
    from mirror_nb.training.model import Model


@final
class Kept:
    """A state on its way to the replicas, whose tensors stay on the CPU: a call's other tensors go to the device.

    Random generators and an optimizer's step counts want theirs there.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state


def begin_training(
    strategy: Strategy,
    token: str,
    model: Model,
    optimizer: Optimizer | None,
    scheduler: Any,
    task: Task,
    resume: Kept | None,
) -> None:
    """Make a Training, which goes on from `resume`: optimizer's state, position, random numbers; None: from anew."""
    seat = _seat(strategy)
    if task.seed is not None:
        _plant(task.seed)
    if task.uneven:
        _align(seat, model, optimizer, scheduler)
    training = Training(seat, model, task, optimizer, scheduler)
    if resume is not None:
        training.load_state(resume.state)
    seat.jobs[token] = training


def begin_evaluation(strategy: Strategy, token: str, model: Model, task: Task) -> None:
    """Make an Evaluation."""
    seat = _seat(strategy)
    seat.jobs[token] = Evaluation(seat, model, task)


def begin_prediction(strategy: Strategy, token: str, model: Model, task: Task) -> None:
    """Make a Prediction."""
    seat = _seat(strategy)
    seat.jobs[token] = Prediction(seat, model, task)


def advance(strategy: Strategy, token: str, epoch: int, steps: int | None) -> Advanced:
    """Go on with a job to the end of this epoch, or for so many steps. Raises ReplicaError if it is not here."""
    job = _job(strategy, token)
    advanced: Advanced = strategy._place.run(strategy, job.advance, (epoch, steps), {})
    return advanced


def end_epoch(strategy: Strategy, token: str, monitored: float | None) -> None:
    """Let a scheduler that goes by epochs go on; `monitored` is what one that waits for a plateau looks at."""
    _job(strategy, token, Training).end_epoch(monitored)


def advise(strategy: Strategy, token: str) -> tuple[str, ...]:
    """Try what might make a Training's steps faster, and return what to say of it."""
    return trials.advise(strategy._place, _job(strategy, token, Training))


def export(strategy: Strategy, token: str) -> dict[str, Any]:
    """Return what a Training needs to go on elsewhere: see `Training.state`."""
    return _job(strategy, token, Training).state()


def export_position(strategy: Strategy, token: str) -> dict[str, Any]:
    """Return the same without the states of the optimizer and the scheduler, which may be large."""
    return _job(strategy, token, Training).state(with_optimizer=False)


def end(strategy: Strategy, token: str) -> dict[str, Any]:
    """Let go of a job; return what the next one over the same feed and model goes on from."""
    job = _seat(strategy).jobs.pop(token, None)
    return {} if job is None else job.close()


def settle(strategy: Strategy, token: str, model: Model, optimizer: Optimizer | None, scheduler: Any) -> None:
    """After an error or an interrupt: let go of the job, and let all replicas stand where the most advanced one does.

    They may differ by a step, and a replica that was started anew may lack several.
    """
    seat = _seat(strategy)
    seat.jobs.pop(token, None)
    if optimizer is not None:
        optimizer.zero_grad()
    _align(seat, model, optimizer, scheduler)


def optimizer_state(strategy: Strategy, optimizer: Optimizer | None, scheduler: Any) -> dict[str, Any]:
    """Return the states of a model's optimizer and scheduler while nothing is trained; replica 0's, on the others {}.

    Both of the CPU.
    """
    seat = _seat(strategy)
    return {} if seat.replica_id else states_of(optimizer, scheduler)


def _seat(strategy: Strategy) -> Seat:
    seat = strategy._place.seat
    if seat is None:
        raise ReplicaError("a job was asked for in the controller, which is no replica; ask by Place.command")
    return seat


_J = TypeVar("_J", bound=Job)


def _job(strategy: Strategy, token: str, kind: type[_J] | None = None) -> Any:
    seat = _seat(strategy)
    job = seat.jobs.get(token)
    if job is None or (kind is not None and not isinstance(job, kind)):
        raise ReplicaError(
            f"replica {seat.replica_id} does not know the job {token!r}: it was started anew meanwhile; the next fit, "
            "evaluate or predict begins again"
        )
    return job


def _plant(seed: int) -> None:
    """Seed as a user would: in the replica's scope each replica's own numbers then begin at its own place."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _align(seat: Seat, model: Model, optimizer: Optimizer | None, scheduler: Any) -> None:
    """Give replicas that lag behind the weights, the optimizer and the scheduler of the most advanced one."""
    if seat.num_replicas == 1:
        return
    steps = torch.zeros(seat.num_replicas, dtype=torch.int64)
    steps[seat.replica_id] = model._updates
    counts = seat.add_up(steps).tolist()
    if len(set(counts)) == 1:
        return
    source = counts.index(max(counts))
    with torch.no_grad():
        seat.hand_out([tensor for _, tensor in mirrors.tensors(model)], source)
    mine = states_of(optimizer, scheduler) if seat.replica_id == source else None
    states = seat.collect(mine)[source]
    if seat.replica_id != source:
        load_states(optimizer, scheduler, states)
        model._updates = counts[source]
