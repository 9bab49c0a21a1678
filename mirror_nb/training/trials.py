"""Short trials in the middle of a fit: what would make its steps faster, measured where it trains.

A trial leaves no trace: weights, statistics, random numbers, gradients and metrics are afterwards what they were.
Knows a Training, its optimizer and its replica's seat; knows no epochs, and says nothing itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch

from mirror_nb import advice
from mirror_nb.collectives.options import Communication, CommunicationOptions
from mirror_nb.fused import median_ms, step_times
from mirror_nb.machine.cores import cores
from mirror_nb.strategies.place import Place
from mirror_nb.training.learning import Training


def advise(place: Place, training: Training) -> tuple[str, ...]:
    """Return a sentence for each thing that would be faster, with its times; every replica calls it, for the same.

    Nothing on GPUs, where other things count, and where a step cannot be tried by itself: a `training_step` of the
    model's own, LBFGS, fp16, `compile`, `sync_batch_norm`, accumulated steps.
    """
    seat = training.seat
    step = training.typical_step_ms()
    if not all(seat.collect(step is not None)) or step is None:
        return ()
    step = max(seat.collect(step))
    with _undone(training):
        plain, fused = step_times(training.optimizer) or (None, None)
        alone = _alone(training) if seat.num_replicas > 1 and seat.replica_id == 0 else None
        larger = _with_larger_buckets(place, training)
    found: list[tuple[float | None, ...]] = seat.collect((plain, fused, alone, *larger))
    plain, fused, alone, small, large = (_largest(column) for column in zip(*found, strict=True))
    said: list[str | None] = []
    if alone is not None:
        # Its optimizer has the same work as each replica's.
        whole = alone + (plain or 0.0)
        said.append(advice.slower_than_alone(step, whole, seat.num_replicas, advice.one_process(cores())))
    if plain is not None and fused is not None:
        said.append(advice.could_be_fused(type(training.optimizer).__name__, plain, fused, step))
    if small is not None and large is not None:
        default, used = CommunicationOptions().bytes_per_pack, place.communication.options.bytes_per_pack
        said.append(advice.buckets_too_small(used, step, default, step - small + large))
    return tuple(each for each in said if each is not None)


def _largest(times: tuple[float | None, ...]) -> float | None:
    known = [each for each in times if each is not None]
    return max(known, default=None)


@contextlib.contextmanager
def _undone(training: Training) -> Iterator[None]:
    """Whatever is tried inside, training goes on as if nothing had been; no sample of it reaches the dashboard."""
    seat = training.seat
    buffers = [(buffer, buffer.detach().clone()) for buffer in training.model.buffers()]
    with seat.averaging(), seat.recorder.silent():
        random = seat.random_state()
        try:
            yield
        finally:
            seat.set_random_state(random)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


def _alone(training: Training) -> float:
    """The median time of forward and backward of a global batch in this process, with all threads; ms."""
    before = torch.get_num_threads()
    torch.set_num_threads(cores())
    try:
        with training.seat.no_sync():
            return median_ms(lambda: training.try_pass(training.seat.num_replicas))
    finally:
        torch.set_num_threads(before)


def _with_larger_buckets(place: Place, training: Training) -> tuple[float | None, float | None]:
    """The median times of a pass with the buckets in use, and with those of the usual size, where that differs; ms."""
    before, default = place.communication, CommunicationOptions().bytes_per_pack
    nbytes = sum(p.numel() * p.element_size() for p in training.model.parameters() if p.requires_grad)
    if training.seat.num_replicas == 1 or before.options.bytes_per_pack >= min(default, nbytes):
        return None, None
    found = []
    try:
        for nbytes in (before.options.bytes_per_pack, default):
            place.communicate(Communication(before.ops, replace(before.options, bytes_per_pack=nbytes)))
            found.append(median_ms(lambda: training.try_pass(1)))
    finally:
        place.communicate(before)
    return found[0], found[1]
