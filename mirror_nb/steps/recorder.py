"""What a replica writes into its telemetry ring: steps, their parts, collectives, losses. Costs microseconds a step.

    dataset ─ wanted, arrived ─▶ ┐
    gradients ─ backward begins, is computed ─▶ ├─▶ Recorder ─▶ ring
    optimizer ─ begins, ends ─▶ │
    cross-device ops ─ timing ─▶ ┘

On a GPU the parts of steps and the collectives go through `gpu_steps`, which knows when they ran there.
A step is a batch of a distributed dataset, or, in a loop that has none, what lies between two optimizer steps. Knows
no network and no strategy. Without a ring it writes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, final

import torch

from mirror_nb.collectives.handles import Timing
from mirror_nb.errors import UsageError
from mirror_nb.steps.gpu_steps import GpuSteps
from mirror_nb.telemetry.ring import Writer
from mirror_nb.telemetry.samples import Kind, Mark, Operation, clock

MEMORY_EVERY = 20
# Steps between two looks at a GPU's memory.
_OPERATIONS = {
    "all_reduce": Operation.ALL_REDUCE,
    "reduce": Operation.REDUCE,
    "broadcast": Operation.BROADCAST,
    "gather": Operation.OTHER,
}


@final
class Recorder:
    """Writes one replica's samples; every method may be called at any time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gpu = GpuSteps(device) if device.type == "cuda" else None
        self._writer: Writer | None = None
        self.step = 0
        # The one at work, from 1; equal on all replicas.
        self._checked = 0
        # The step at which checksums were written last.
        self._serial = 0
        self._under_way: dict[int, tuple[Writer, int, int, int]] = {}
        # By serial, the gradients' collectives that have not ended: where they are written, step, bucket and bytes.
        self.record_ended: Callable[[], None] = lambda: None
        # Has the cross-device ops tell what a GPU has finished: only asking shows.
        self._examples = 0
        self._arrived = False
        # A batch has come in this step.
        self._fed = False
        # A dataset tells where steps begin.
        self._open = False
        # A step has begun and has not ended.
        self._began = self._forward_began = self._backward_began = self._optimizer_began = 0
        # Of the step, and of its latest parts; nanoseconds of `clock`.
        self._pending: list[tuple[str, torch.Tensor, int, Any]] = []
        # Scalars on their way from a GPU: name, host copy, step, event.

    @property
    def enabled(self) -> bool:
        """Whether there is a ring."""
        return self._writer is not None

    @property
    def fed(self) -> bool:
        """Whether a dataset tells where steps begin."""
        return self._fed

    def open(self, writer: Writer | None) -> None:
        """Write there from now on; None: nowhere."""
        self._writer = writer

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Write nothing of what happens meanwhile: it belongs to no step, and none ends with it."""
        before = self._writer, self._fed
        self._writer, self._fed = None, True
        try:
            yield
        finally:
            self._writer, self._fed = before

    def begin_generation(self, generation: int, step: int) -> None:
        """The process group was formed anew: serials go on above all earlier ones, steps from the replicas' last."""
        self._leave_what_is_under_way()
        self._serial = generation << 32
        if self._gpu is not None:
            self._gpu.forget()
        self.step, self._open = step, False

    def _leave_what_is_under_way(self) -> None:
        while self._under_way:
            serial, (writer, step, bucket, nbytes) = self._under_way.popitem()
            writer.collective_over(Operation.ALL_REDUCE, step, bucket, nbytes, serial, clock())

    @property
    def settled(self) -> int:
        """The number of the last step that is not at work: the next one has the number after it."""
        return self.step - self._open

    def go_on_from(self, step: int) -> None:
        """Others have done this step, and this replica has not: its next one is the one that follows."""
        if self.settled < step:
            self.step, self._open = step, False

    # ------------------------------------------------------------------ input

    def wanted(self) -> None:
        """A batch of a distributed dataset is asked for."""
        self._fed = True
        if self._writer is not None:
            self._begin_step(clock())
            if self._gpu is not None:
                self._gpu.begin()

    def arrived(self, examples: int) -> None:
        """The batch is here, with so many examples of this replica's."""
        if self._writer is not None:
            # More than one batch may go into a step.
            self._examples += examples
            self._arrived = True
            now = clock()
            if self._gpu is None:
                self._writer.span(Kind.DATA, self.step, self._forward_began, now)
            else:
                # Less than the host has waited, where the GPU had something left to do meanwhile.
                self._gpu.end(Kind.DATA, self._writer, self.step)
            self._forward_began = now

    def begin(self) -> None:
        """A request begins: whether a dataset is used will show."""
        self._fed = False

    def end(self, failed: bool = False) -> None:
        """A request ends: what a GPU has finished of its last steps is written, without waiting for more.

        What one that `failed` has under way will not end: it has left that, or was freed from it.
        """
        self._catch_up(self.step + 1)
        if failed:
            self._leave_what_is_under_way()

    def exhausted(self) -> None:
        """No batch came, or the loop was left: steps are the optimizer's again."""
        if self._open and not self._arrived:
            # Only asking tells that there is no batch: the step that was begun for it is none, and its number is free.
            self.step -= 1
        self._fed = self._open = False

    def _begin_step(self, now: int) -> None:
        self._forward_began, self._backward_began = now, 0
        if self._open or self._writer is None:
            return
        self.step += 1
        self._open, self._began, self._examples, self._arrived = True, now, 0, False
        self._writer.step_begun(self.step, now)

    # ------------------------------------------------------------------ gradients

    def backward_begun(self) -> None:
        """The first gradient of a backward pass is there."""
        if self._writer is None:
            return
        now = clock()
        if not self._open:
            self._begin_step(now)
            if self._gpu is not None:
                self._gpu.begin()
        if self._gpu is not None:
            if self._backward_began:
                self._gpu.begin()
            else:
                self._gpu.end(Kind.FORWARD, self._writer, self.step)
        elif not self._backward_began:
            self._writer.span(Kind.FORWARD, self.step, self._forward_began, now)
        self._backward_began = now

    def backward_computed(self) -> None:
        """The last gradient is there; what follows is waiting for the others."""
        if self._writer is None or not self._backward_began:
            return
        if self._gpu is None:
            self._writer.span(Kind.BACKWARD, self.step, self._backward_began, clock())
        else:
            self._gpu.end(Kind.BACKWARD, self._writer, self.step)

    def queued(self, bucket: int, nbytes: int) -> int:
        """This replica has come to an all-reduce of gradients; returns the serial that its timing has to bring."""
        if self._writer is None:
            return 0
        self._serial += 1
        self._under_way[self._serial] = self._writer, self.step, bucket, nbytes
        now = clock()
        self._writer.collective(
            Operation.ALL_REDUCE, self.step, bucket, nbytes, self._serial, now, 0, 0, blocking=True
        )
        return self._serial

    def collective(self, timing: Timing) -> None:
        """For `CrossDeviceOps.bind`: a collective has ended, on a GPU maybe one of an earlier step."""
        queued = self._under_way.pop(timing.serial, None)
        writer, step, *_ = queued or (self._writer, self.step)
        if writer is None:
            return
        serial = timing.serial
        if queued is None:
            self._serial += 1
            serial = self._serial
        if self._gpu is not None:
            about = _OPERATIONS[timing.op], step, timing.bucket, timing.nbytes, serial
            # That it is over is told at once: who waits for whom is seen by that.
            writer.collective_over(*about, timing.ended)
            times = timing.queued, timing.started, timing.ended
            self._gpu.hold(step, partial(writer.collective, *about, *times, timing.blocking))
            return
        writer.collective(
            _OPERATIONS[timing.op],
            step,
            timing.bucket,
            timing.nbytes,
            serial,
            timing.queued,
            # On the CPU an op tells when all had come to it; how long this replica waited there for its peers is what
            # a timeline makes of when each was ready.
            timing.queued if self._device.type == "cpu" else timing.started,
            timing.ended,
        )

    # ------------------------------------------------------------------ optimizer

    def optimizer_begun(self) -> None:
        """An optimizer's step begins."""
        self._optimizer_began = clock()
        if self._gpu is not None and self._writer is not None:
            self._gpu.begin()

    def optimizer_ended(self) -> None:
        """An optimizer's step has ended, and with it the step."""
        if self._writer is None:
            return
        now = clock()
        self._catch_up(self.step)
        if not self._open and not self._fed:
            self._begin_step(self._optimizer_began)
        if self._gpu is None:
            self._writer.span(Kind.OPTIMIZER, self.step, self._optimizer_began, now)
        else:
            self._gpu.end(Kind.OPTIMIZER, self._writer, self.step)
        if self._open:
            self._end_step(self._writer, self._examples, now)
            self._look_at_memory()
            if not self._fed:
                # The next one begins where this one ends.
                self._begin_step(now)

    def _end_step(self, writer: Writer, examples: int, now: int) -> None:
        self._open = False
        writer.step_ended(self.step, examples, self._began, now, on_gpu=self._gpu is not None)
        if self._gpu is not None:
            self._gpu.close(writer, self.step)

    def _look_at_memory(self) -> None:
        if self._writer is not None and self._device.type == "cuda" and self.step % MEMORY_EVERY == 1:
            self._writer.memory(
                self.step, torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)
            )

    # ------------------------------------------------------------------ what the user says

    def log(self, values: dict[str, Any]) -> None:
        """Write losses and metrics of this replica's examples; tensors on a GPU when they have come over."""
        if self._writer is None:
            return
        self._write_arrived(self._writer)
        for name, value in values.items():
            comes = isinstance(value, torch.Tensor) and value.device.type == "cuda"
            try:
                # Of several elements this raises here, and not in a later step.
                one = value.detach().reshape(()) if comes else float(value)
            except (TypeError, ValueError, RuntimeError) as reason:
                raise UsageError(
                    f"`{name}` cannot be recorded: {reason}; log a number, or a tensor of one element"
                ) from None
            if isinstance(one, torch.Tensor):
                self._bring(name, one)
            else:
                self._writer.scalar(name, one, self.step)

    def measured(self, values: dict[str, Any]) -> None:
        """Write what a fit has measured, under any names: what a ring has no room for is not kept, and ends no fit."""
        writer = self._writer
        if writer is not None:
            known = {writer.known_as(name): value for name, value in values.items()}
            self.log({name: value for name, value in known.items() if name is not None})

    def _catch_up(self, before: int) -> None:
        """Write what a GPU has finished since; its times in steps, of those below `before`."""
        self.record_ended()
        if self._gpu is not None:
            self._gpu.write_ended(before)
        if self._writer is not None:
            self._write_arrived(self._writer)

    def _write_arrived(self, writer: Writer) -> None:
        while self._pending and self._pending[0][3].query():
            name, copy, step, _ = self._pending.pop(0)
            writer.scalar(name, float(copy), step)

    def _bring(self, name: str, value: torch.Tensor) -> None:
        # float(value) would make the host wait for the GPU in every step.
        copy = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True).copy_(
            value, non_blocking=True
        )
        arrived = torch.cuda.Event()
        # Not of the device that is current, which the user may have changed.
        arrived.record(torch.cuda.current_stream(value.device))
        self._pending.append((name, copy, self.step, arrived))

    def told(self, examples: int | None) -> None:
        """The user says that a step ends here, with so many examples."""
        if self._writer is None:
            return
        now = clock()
        self._catch_up(self.step)
        if not self._open:
            self._begin_step(now)
        if self._gpu is not None:
            self._gpu.begin()
        self._end_step(self._writer, self._examples if examples is None else examples, now)

    def mark(self, mark: Mark, amount: int = 0) -> None:
        """Write a mark."""
        if self._writer is not None:
            self._writer.mark(mark, self.step, amount)

    def wants_checksums(self) -> bool:
        """Whether steps were done since the last ones were written, which somebody may read."""
        return self._writer is not None and self.step > self._checked

    def checksums(self, checksums: Mapping[str, int]) -> None:
        """Write the checksums of the parameters, by name."""
        self._checked = self.step
        if self._writer is not None:
            self._writer.checksums(self.step, checksums)
