"""Evaluate and predict as whoever calls them sees them: callbacks, the progress line, what is returned.

Knows a model and what jobs return; knows no shares.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils import _pytree as pytree

from mirror_nb.errors import MirrorError, UsageError
from mirror_nb.tensors.layouts import joined_rows, rows_of
from mirror_nb.training import job
from mirror_nb.training.callbacks import CallbackList
from mirror_nb.training.loop import Advanced, Note, Task
from mirror_nb.training.progress import Progress
from mirror_nb.training.running import Guard, Logs, Running, known_steps, task_of
from mirror_nb.training.shares import Feed

if TYPE_CHECKING:
    from mirror_nb.training.model import Model


def evaluate(model: Model, feed: Feed, *, steps: int | None, verbose: int | str, callbacks: Any) -> dict[str, Any]:
    """Return the loss and the metrics over all of the feed, or so many of its batches."""
    return _show_and_run(model, feed, "evaluate", steps, verbose, callbacks, _evaluated_alone)


def predict(model: Model, feed: Feed, *, steps: int | None, verbose: int | str, callbacks: Any) -> Any:
    """Return the network's outputs, on the CPU, in the order of the feed's examples."""
    return _show_and_run(model, feed, "predict", steps, verbose, callbacks, _predicted)


def _show_and_run(
    model: Model,
    feed: Feed,
    title: str,
    steps: int | None,
    verbose: int | str,
    callbacks: Any,
    work: Callable[..., tuple[Any, dict[str, Any]]],
) -> Any:
    place = model.strategy._place
    leads = place.replica_id in (None, 0)
    known = known_steps(feed, steps)
    called = callbacks
    if not isinstance(callbacks, CallbackList):
        called = CallbackList(callbacks, model=model, params={"steps": known, "verbose": verbose}, leads=leads)
    progress = Progress(verbose, leads=leads)
    try:
        progress.begin(title, known)
        watched = verbose in (1, "auto") and leads
        guard = Guard(model.strategy, progress.say)
        result, logs = work(model, guard, task_of(model, feed, steps, watched=watched), called, progress)
        progress.end(logs)
    finally:
        progress.close()
        if called is not callbacks:
            called.close()
    return result


def _evaluated_alone(
    model: Model, guard: Guard, task: Task, callbacks: CallbackList, progress: Progress
) -> tuple[dict[str, Any], dict[str, Any]]:
    running = Running(guard, job.begin_evaluation, model, task)
    try:
        logs = evaluated(running, 0, callbacks, Logs(model.compiled_settings), progress)
    finally:
        _end(running, task)
    if not logs:
        raise UsageError("evaluate was given no examples")
    return logs, logs


def evaluated(
    running: Running, epoch: int, callbacks: CallbackList, made: Logs, progress: Progress | None = None
) -> dict[str, Any]:
    """Carry an Evaluation out, its callbacks' hooks called."""

    def show(note: Note) -> None:
        if progress is not None:
            progress.update(note.step, {} if note.loss is None else {"loss": note.loss}, note.examples)

    every = running.every(callbacks.every_test)
    logs: dict[str, Any] = {}
    step, ended = 0, False
    callbacks.on_test_begin()
    while not ended:
        if every is not None:
            callbacks.on_test_batch_begin(step)
        begun, until = step, None if every is None else step + every
        advanced = running.advance(epoch, until, changes=False, on_note=show)
        step, ended = advanced[0].step, advanced[0].ended
        if ended or every is not None:
            logs = made.of([each.totals for each in advanced])
        if every is not None and step > begun:
            callbacks.on_test_batch_end(step - 1, logs)
        if progress is not None:
            progress.update(step, logs, advanced[0].examples)
    callbacks.on_test_end(logs)
    return logs


def _predicted(
    model: Model, guard: Guard, task: Task, callbacks: CallbackList, progress: Progress
) -> tuple[Any, dict[str, Any]]:
    running = Running(guard, job.begin_prediction, model, task)
    every = running.every(callbacks.every_predict)
    step = 0
    advanced: list[Advanced] = []
    try:
        callbacks.on_predict_begin()
        while not advanced or not advanced[0].ended:
            if every is not None:
                callbacks.on_predict_batch_begin(step)
            begun, until = step, None if every is None else step + every
            advanced = running.advance(
                0, until, changes=False, on_note=lambda note: progress.update(note.step, {}, note.examples)
            )
            step = advanced[0].step
            progress.update(step, {}, advanced[0].examples)
            if every is not None and step > begun:
                callbacks.on_predict_batch_end(step - 1)
        callbacks.on_predict_end()
    finally:
        _end(running, task)
    return _in_order(advanced), {}


def _end(running: Running, task: Task) -> None:
    """Let the replicas forget it; what a loader's generators have drawn there they have drawn here."""
    with contextlib.suppress(MirrorError):
        kept = running.end()
        if kept and task.feed is not None:
            task.feed.load_state(kept["feed"])


def _in_order(advanced: list[Advanced]) -> Any:
    """Join the replicas' outputs: of each global batch the first replica's share, then the second's, and so on."""
    replicas = [each for each in advanced if each.outputs is not None]
    if not replicas:
        raise UsageError("predict was given no examples")
    if len(replicas) == 1:
        return replicas[0].outputs
    columns = [[_parted(leaf, each.counts) for leaf in pytree.tree_leaves(each.outputs)] for each in replicas]
    joined = [
        joined_rows([part for batch in zip(*shares, strict=True) for part in batch])
        for shares in zip(*columns, strict=True)
    ]
    return pytree.tree_unflatten(joined, pytree.tree_structure(replicas[0].outputs))


def _parted(tensor: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Return so many rows of a tensor, so many of those below, and so on."""
    ends = itertools.accumulate(counts, initial=0)
    return [rows_of(tensor, slice(begin, end)) for begin, end in itertools.pairwise(ends)]
