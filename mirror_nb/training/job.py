"""What a replica is asked to do for fit, evaluate and predict: the functions that `Place.command` calls.

    begin_… ─▶ a job in the replica's seat ─▶ advance, an epoch or some steps at a time ─▶ end

A job lives in the seat under its token between the messages. Knows which jobs there are; knows not how they work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from mirror_nb.errors import JobLost, ReplicaError
from mirror_nb.mirroring import networks
from mirror_nb.strategies.base import Strategy
from mirror_nb.strategies.seat import Seat
from mirror_nb.training import offer, trials
from mirror_nb.training.learning import Training, Whereabouts, load_states, states_of
from mirror_nb.training.loop import Advanced, Task
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
    training = Training(seat, token, model, task, optimizer, scheduler)
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


def reaches(strategy: Strategy, paths: list[str]) -> bool:
    """Whether this replica can open all that the controller offers it."""
    return all(map(offer.reaches, paths))


def whereabouts(strategy: Strategy, token: str) -> Whereabouts | None:
    """Return where a Training stands after a failure; None if it is not here."""
    training = _seat(strategy).jobs.get(token)
    return training.whereabouts() if isinstance(training, Training) else None


def rejoin(
    strategy: Strategy,
    token: str,
    before: str,
    model: Model,
    optimizer: Optimizer | None,
    scheduler: Any,
    task: Task,
    resume: Kept | None,
    source: int,
    updates: int,
    scheduled: str,
    buffers: dict[int, torch.Tensor],
) -> None:
    """Make a Training that goes on from `resume`, in the place of the job `before`, which replica `source` has.

    That one stands at step `updates` of the optimizer, its scheduler at the end of the epoch `scheduled`, and then
    all do. `buffers`: what this replica's were, or those of the one that died in its place, by their number. The job
    before stays until this one advances: who dies meanwhile is replaced, and all of this is done again.
    """
    seat = _seat(strategy)
    left = seat.jobs.get(before)
    if isinstance(left, Training):
        left.step_back(updates)
    if task.feed is None:
        if left is None:
            # It was there when the others were asked, and has died since.
            raise _lost(seat, before)
        task = dataclasses.replace(task, feed=left.task.feed)
    if task.seed is not None:
        _plant(task.seed)
    own = {} if left is None else {i: b.clone() for i, b in enumerate(model.buffers()) if not is_lazy(b)}
    # One may lack a step that the furthest has done; who filled the replacement may be that one.
    _align(seat, model, optimizer, scheduler)
    _share_buffers(seat, model, source, own | buffers)
    model._updates, model._scheduled = updates, scheduled
    if isinstance(left, Training):
        left.keep()
    training = Training(seat, token, model, task, optimizer, scheduler)
    training.follows = before
    if resume is not None:
        training.load_state(resume.state)
    seat.jobs[token] = training


def advance(strategy: Strategy, token: str, epoch: int, until: int | None, *trained: object) -> Advanced:
    """Go on with a job to the end of this epoch, or to a step of it. Raises JobLost if it is not here.

    `trained`: the model and its optimizer, which are by now as they are where this was asked for.
    """
    job = _job(strategy, token)
    if job.follows is not None:
        _forget(_seat(strategy), job.follows)
        job.follows = None
    advanced: Advanced = strategy._place.run(strategy, job.advance, (epoch, until), {})
    return advanced


def end_epoch(strategy: Strategy, token: str, mark: str, monitored: float | None) -> None:
    """Let a scheduler that goes by epochs go on; `monitored`: what one that waits for a plateau looks at, if known.

    A second call with the same `mark` does nothing: a replica that died meanwhile makes the others be asked again.
    """
    _job(strategy, token).end_epoch(mark, monitored)


def advise(strategy: Strategy, token: str) -> tuple[str, ...]:
    """Try what might make a Training's steps faster, and return what to say of it."""
    return trials.advise(strategy._place, _job(strategy, token))


def export(strategy: Strategy, token: str, with_optimizer: bool) -> dict[str, Any]:
    """Return what a Training needs to go on elsewhere: see `Training.state`."""
    return _job(strategy, token).state(with_optimizer)


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


def _job(strategy: Strategy, token: str) -> Any:
    seat = _seat(strategy)
    job = seat.jobs.get(token)
    if job is None:
        raise _lost(seat, token)
    return job


def _lost(seat: Seat, token: str) -> JobLost:
    return JobLost(
        f"replica {seat.replica_id} does not know the job {token!r}: it was started anew meanwhile; the next fit, "
        "evaluate or predict begins again"
    )


def _forget(seat: Seat, token: str) -> None:
    left = seat.jobs.pop(token, None)
    if left is not None:
        # What its loader says of being left belongs to a step that is done again.
        with contextlib.suppress(Exception):
            left.close()


def _share_buffers(seat: Seat, model: Model, source: int, own: dict[int, torch.Tensor]) -> None:
    """Give every replica the buffers of replica `source`, but for its `own`, by their number: all take part."""
    buffers = list(model.buffers())
    with torch.no_grad():
        seat.hand_out([buffer for buffer in buffers if not is_lazy(buffer)], source)
        for number, mine in own.items():
            buffers[number].copy_(mine)


def _plant(seed: int) -> None:
    """Seed as a user would: in the replica's scope each replica's own numbers then begin at its own place."""
    if torch.accelerator.current_accelerator() is None:
        # Not torch.manual_seed, which keeps a stack for a GPU that may come: 5 ms in a new replica.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _align(seat: Seat, model: Model, optimizer: Optimizer | None, scheduler: Any) -> None:
    """Give replicas that lag behind the weights, the optimizer and the scheduler of the most advanced one."""
    if seat.num_replicas == 1:
        return
    steps = torch.zeros(seat.num_replicas, dtype=torch.int64, device="cpu")
    steps[seat.replica_id] = model._updates
    counts = seat.add_up(steps).tolist()
    if len(set(counts)) == 1:
        return
    source = counts.index(max(counts))
    with torch.no_grad():
        seat.hand_out([tensor for _, tensor in networks.tensors(model)], source)
    mine = states_of(optimizer, scheduler) if seat.replica_id == source else None
    states = seat.collect(mine)[source]
    if seat.replica_id != source:
        load_states(optimizer, scheduler, states)
        model._updates = counts[source]
