"""A model's training step, timed with each cross-device op, without synchronisation, and on one device alone.

Knows strategies, ops and optimizers. What is trained is a copy, which is thrown away.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from mirror_nb import advice, readable
from mirror_nb.bench import table
from mirror_nb.bench.collectives import check_seconds, chosen_ops
from mirror_nb.bench.replicas import of
from mirror_nb.collectives.base import CrossDeviceOps
from mirror_nb.collectives.options import Communication, CommunicationOptions
from mirror_nb.data.batches import to_device
from mirror_nb.errors import UsageError
from mirror_nb.fused import step_times
from mirror_nb.machine.cores import cores
from mirror_nb.strategies.place import Place
from mirror_nb.tensors.sharded import has_sharded

if TYPE_CHECKING:
    from mirror_nb.pool.base import Pool
    from mirror_nb.strategies.base import Strategy

SECONDS = 8.0
ROUNDS = 3
_WARM_UP = 2
# Steps after every change: the first one allocates buckets, the second one is the first that uses them.
_LEAST, _MOST = 3, 60
UNSYNCHRONISED = "no synchronisation"
_NO_INPUTS = (
    "what does the model take? Give the shape of one example (`shape=(1, 28, 28)`, --shape 1,28,28), or a function "
    "that returns (module, inputs)"
)

Make = nn.Module | Callable[[], Any]


@final
@dataclass(frozen=True, slots=True)
class StepRow:
    """One way to train the model."""

    way: str
    # An op's name, or what else was done.
    p50_ms: float
    p95_ms: float
    # Of a step on the global batch, on the replica where it took longest, ms.
    examples_per_second: float
    # Of the global batch.


@final
@dataclass(frozen=True, slots=True)
class StepTable:
    """What `steps` measured. It shows itself as a table, with advice where there is any."""

    rows: tuple[StepRow, ...]
    devices: tuple[str, ...]
    # One a replica.
    batch: int
    # Examples of the global batch.
    ops: tuple[str, ...]
    # Those rows that are cross-device ops.
    advice: tuple[str, ...] = ()

    def fastest(self) -> StepRow:
        """Return the row of the op with the least median."""
        return min((row for row in self.rows if row.way in self.ops), key=lambda row: row.p50_ms)

    def to_pandas(self) -> Any:
        """Return a DataFrame with the fields of StepRow. Raises MirrorError where pandas is not installed."""
        return table.as_frame([asdict(row) for row in self.rows])

    def plot(self) -> Any:
        """Draw the median of each way as a bar; return the matplotlib figure, which a notebook shows."""
        # By name: what draws lives above.
        return importlib.import_module("mirror_nb.notebook.charts").draw_steps(self)

    def __repr__(self) -> str:
        return table.as_text(self._headline(), _HEADER, self._cells(), self.advice, names=1, best="the fastest op")

    def _repr_html_(self) -> str:
        return table.as_html(self._headline(), _HEADER, self._cells(), self.advice, names=1, best="the fastest op")

    def _headline(self) -> str:
        return f"a training step on {self.batch} examples, {len(self.devices)} replicas ({', '.join(self.devices)})"

    def _cells(self) -> list[table.Cells]:
        best = self.fastest().way
        return [
            [
                (row.way, False),
                (readable.number(row.p50_ms), row.way == best),
                (readable.number(row.p95_ms), False),
                (f"{row.examples_per_second:.0f}", False),
            ]
            for row in self.rows
        ]


_HEADER = ("", "p50 ms", "p95 ms", "examples/s")


@final
@dataclass(frozen=True, slots=True)
class _Task:
    """What every replica measures."""

    make: Any
    shape: tuple[int, ...] | None
    batch: int
    optimizer: str
    ops: Mapping[str, CrossDeviceOps]
    seconds: float


@final
@dataclass(frozen=True, slots=True)
class _Found:
    """What was measured, the same on every replica."""

    ways: dict[str, list[float]]
    # Of each way the steps' times, ms.
    batch: int
    alone: str
    # The way of one device alone.
    in_use: str
    # The op that the strategy reduces by.
    bytes_per_pack: int
    optimizer_ms: Sequence[float] | None
    # Of optimizer.step() as it is, and fused; None where torch has no fused one.


def steps(
    strategy: Strategy | Pool,
    model: Make,
    *,
    shape: Sequence[int] | None = None,
    batch: int = 64,
    optimizer: str = "SGD",
    ops: CrossDeviceOps | str | Sequence[CrossDeviceOps | str] | None = None,
    seconds: float = SECONDS,
) -> StepTable:
    """Time a training step of `model` with each op, without synchronisation, and on one device with all examples.

    `model`: a module, or a function without arguments that makes one; a copy of it is trained. It may return
    `(module, inputs)` with the inputs of a global batch, or `(module, inputs, loss)`, where `loss(outputs)` gives the
    number to minimise; without it, that is the mean of the squared outputs. `shape`: that of one example, for random
    inputs of `batch` examples, in the dtype of the weights, where the function gives none. `optimizer`: the name of
    one in torch.optim. `ops`: as for `all_reduce`. `seconds`: about so long altogether. One device is replica 0's, on
    the CPU with all threads. In a `%%mirrored` cell every replica has to call it.

    Raises UsageError for what cannot be, and for a batch that is smaller than the number of replicas; and whatever
    the model raises.
    """
    replicas = of(strategy)
    if not callable(model):
        raise UsageError(f"`model` is {model!r}; pass an nn.Module, or a function that makes one")
    _check_call(model, shape)
    check_task(optimizer, batch, len(replicas.devices))
    check_seconds(seconds)
    chosen = chosen_ops(ops, replicas.devices)
    task = _Task(model, _checked(shape), batch, optimizer, chosen, seconds)
    found: _Found = replicas.call(_measure, task)[0]
    rows = tuple(_row(way, times, found.batch) for way, times in found.ways.items())
    names = tuple(map(str, replicas.devices))
    return StepTable(rows, names, found.batch, tuple(chosen), _advice(found, tuple(chosen), len(names), optimizer))


def _check_call(model: Make, shape: Sequence[int] | None) -> None:
    if isinstance(model, nn.Module):
        if shape is None:
            raise UsageError(_NO_INPUTS)
        return
    try:
        inspect.signature(model).bind()
    except TypeError as reason:
        name = getattr(model, "__qualname__", repr(model))
        raise UsageError(f"`model` is {name}, which cannot be called without arguments: {reason}") from None
    except ValueError:
        # Of some functions that are written in C nobody knows.
        pass


def _checked(shape: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return the shape of an example. Raises UsageError for what is none."""
    if shape is None:
        return None
    sizes = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    if not all(isinstance(size, int | Integral) and size > 0 for size in sizes):
        raise UsageError(f"`shape` is {shape!r}; it is that of one example, such as (1, 28, 28)")
    return sizes


def check_task(optimizer: str, batch: int, num_replicas: int, called: str = "`batch`") -> None:
    """Raise UsageError for an optimizer that is none, and for a batch that some replicas would get nothing of."""
    if optimizer not in _optimizers():
        raise UsageError(f"torch.optim has no {optimizer!r} to try; it has: {', '.join(_optimizers())}")
    if not isinstance(batch, int | Integral):
        raise UsageError(f"{called} is {batch!r}; it must be a whole number of examples")
    if batch < num_replicas:
        raise UsageError(f"{called} is {batch}, fewer examples than the {num_replicas} replicas")


def _row(way: str, times: Sequence[float], batch: int) -> StepRow:
    p50 = statistics.median(times)
    p95 = float(torch.tensor(times, dtype=torch.float64).quantile(0.95))
    return StepRow(way, p50, p95, batch / p50 * 1000)


def _advice(found: _Found, ops: Sequence[str], num_replicas: int, optimizer: str) -> tuple[str, ...]:
    median = {way: statistics.median(times) for way, times in found.ways.items()}
    best = min(ops, key=lambda op: median[op])
    used = found.in_use if found.in_use in median else best
    said = [advice.slower_than_alone(median[best], median[found.alone], num_replicas, found.alone)]
    said.append(advice.other_ops(used, median[used], best, median[best]))
    larger = _larger_buckets(used)
    if larger in median:
        default = CommunicationOptions().bytes_per_pack
        said.append(advice.buckets_too_small(found.bytes_per_pack, median[used], default, median[larger]))
    if found.optimizer_ms is not None:
        plain, fused = found.optimizer_ms
        said.append(advice.could_be_fused(optimizer, plain, fused, median[used]))
    return tuple(each for each in said if each is not None)


def _larger_buckets(op: str) -> str:
    return f"{op}, buckets of {readable.size(CommunicationOptions().bytes_per_pack)}"


def _optimizers() -> list[str]:
    """Names of those that step without being given a closure or a rank."""
    kinds = {name: kind for name, kind in vars(torch.optim).items() if inspect.isclass(kind)}
    return [
        name
        for name, kind in kinds.items()
        if issubclass(kind, torch.optim.Optimizer) and name not in ("Optimizer", "LBFGS", "SparseAdam", "Muon")
    ]


# ---------------------------------------------------------------------- on a replica


def _measure(strategy: Strategy, task: _Task) -> _Found:
    place = strategy._place
    before = place.communication
    assert place.seat is not None
    try:
        # Replica 0 makes more steps than the others: counted, all that follow would be known by other numbers there.
        with place.seat.recorder.silent():
            return _Measurement(strategy, task).run()
    finally:
        # Replicas that failed are mended by whoever called.
        if dist.is_initialized():
            place.communicate(before)


@final
class _Measurement:
    """One replica's part: its share of the batch, its copy of the model."""

    def __init__(self, strategy: Strategy, task: _Task) -> None:
        self._place: Place = strategy._place
        self._before = self._place.communication
        self._task = task
        seat = self._place.seat
        assert seat is not None
        with seat.shared_randomness():
            self._model, self._inputs, self._loss = _made(task, seat.device)
        self._model.train()
        self._alone = copy.deepcopy(self._model)
        self._seat = seat
        self.batch = _examples(self._inputs)
        each = -(-self.batch // seat.num_replicas)
        low = each * seat.replica_id
        if low >= self.batch:
            raise UsageError(f"the model's inputs are {self.batch} examples, too few for {seat.num_replicas} replicas")
        self._share = pytree.tree_map(
            lambda leaf: leaf[low : low + each] if isinstance(leaf, Tensor) and leaf.ndim else leaf, self._inputs
        )
        self._optimizer = self._new_optimizer(self._model)

    def run(self) -> _Found:
        """Time all ways, in turns."""
        ways = self._ways()
        count = self._count(ways)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, train in ways.items():
                times[way] += train(count)
        device = self._seat.device
        alone = advice.one_process(cores()) if device.type == "cpu" else f"{device} alone"
        times[alone] = self._train_alone(count * ROUNDS)
        tried = step_times(self._optimizer, largest=math.inf)
        plain_and_fused = None if tried is None else self._largest(tried)
        in_use = _name_of(self._before.ops, self._task.ops)
        return _Found(times, self.batch, alone, in_use, self._before.options.bytes_per_pack, plain_and_fused)

    def _ways(self) -> dict[str, Callable[[int], list[float]]]:
        before = self._before
        ways: dict[str, Callable[[int], list[float]]] = {
            name: functools.partial(self._train, Communication(ops, before.options))
            for name, ops in self._task.ops.items()
        }
        ways[UNSYNCHRONISED] = self._train_unsynchronised
        default = CommunicationOptions().bytes_per_pack
        nbytes = sum(p.numel() * p.element_size() for p in self._model.parameters() if p.requires_grad)
        if before.options.bytes_per_pack < min(default, nbytes):
            used = _name_of(before.ops, self._task.ops)
            larger = Communication(before.ops, replace(before.options, bytes_per_pack=default))
            ways[_larger_buckets(used)] = functools.partial(self._train, larger)
        return ways

    def _count(self, ways: Mapping[str, Callable[[int], list[float]]]) -> int:
        """Return how many steps of each way fill the time, the same number on every replica."""
        begun = time.perf_counter()
        for train in ways.values():
            train(1)
        took = self._largest([(time.perf_counter() - begun) / (_WARM_UP + 1)])[0]
        fitting = int(self._task.seconds / max(took, 1e-6) / ROUNDS) - _WARM_UP
        return max(_LEAST, min(_MOST, fitting))

    # ------------------------------------------------------------------ ways

    def _train(self, by: Communication, count: int) -> list[float]:
        self._place.communicate(by)
        return self._largest(self._steps(self._model, self._optimizer, self._share, count))

    def _train_unsynchronised(self, count: int) -> list[float]:
        with self._place.no_sync():
            return self._largest(self._steps(self._model, self._optimizer, self._share, count))

    def _train_alone(self, count: int) -> list[float]:
        """Replica 0 trains by itself on all examples; the others sleep meanwhile."""
        times = [0.0] * count
        if self._seat.replica_id == 0:
            # Copies, and what optimizers hold, are tracked like all that is made on a replica.
            with _all_threads(), self._place.no_sync():
                optimizer = self._new_optimizer(self._alone)
                times = self._steps(self._alone, optimizer, self._inputs, count)
                # What is left in a parameter would be reduced with the next pass.
                optimizer.zero_grad()
        return self._largest(times)

    def _steps(self, model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any, count: int) -> list[float]:
        def step() -> None:
            optimizer.zero_grad()
            self._loss(_called(model, inputs)).backward()
            optimizer.step()

        return self._timed(step, count)

    def _timed(self, step: Callable[[], object], count: int) -> list[float]:
        """Return how long a step takes, ms, `count` times, when it is warm."""
        times = []
        for i in range(_WARM_UP + count):
            _synchronize(self._seat.device)
            begun = time.perf_counter()
            step()
            _synchronize(self._seat.device)
            if i >= _WARM_UP:
                times.append((time.perf_counter() - begun) * 1000)
        return times

    def _new_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        kind: Any = getattr(torch.optim, self._task.optimizer)
        # Small, so that the copy stays a model with numbers, and not zero, so that every step does its work.
        return cast(torch.optim.Optimizer, kind(model.parameters(), lr=1e-4))

    def _largest(self, times: Sequence[float]) -> list[float]:
        """Return the largest of all replicas' times, one by one: a step is over when it is over everywhere."""
        shared = torch.tensor(times, dtype=torch.float64, device=self._seat.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return cast("list[float]", shared.tolist())


def _made(task: _Task, device: torch.device) -> tuple[nn.Module, Any, Callable[[Any], Tensor]]:
    """Return the model, the inputs of a global batch, and the loss of its outputs."""
    made = task.make if isinstance(task.make, nn.Module) else task.make()
    model, *given = made if isinstance(made, tuple) else (made,)
    if not isinstance(model, nn.Module) or len(given) > 2:
        raise UsageError(f"the model's function returned {made!r}; it may return a module, its inputs and a loss")
    if has_sharded(model) or any(isinstance(part, DistributedDataParallel) for part in model.modules()):
        # It would wait for the other replicas where one trains alone.
        raise UsageError("the model is synchronised by DistributedDataParallel or FSDP; return the network without it")
    if len(given) == 2 and not callable(given[1]):
        raise UsageError(f"the model's function returned the loss {given[1]!r}; it must be a function of the outputs")
    if given:
        inputs = given[0]
    elif task.shape is not None:
        inputs = torch.randn(task.batch, *task.shape, dtype=_dtype_of(model))
    else:
        raise UsageError(_NO_INPUTS)
    # What a function returned may be somebody's network, too.
    model, inputs = copy.deepcopy(model).to(device), to_device(inputs, device)
    if given and any(map(is_lazy, model.parameters())):
        with torch.no_grad():
            _called(model, inputs)
    elif not given:
        _try(model, inputs)
    parameters = list(model.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        raise UsageError("the model's parameters are all frozen; leave some of them to train: requires_grad_(True)")
    return model, inputs, given[1] if len(given) == 2 else _squares


def _dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of the numbers that a model takes: that of its first weights, as a rule."""
    kinds = (parameter.dtype for parameter in model.parameters())
    return next((kind for kind in kinds if kind.is_floating_point or kind.is_complex), torch.float32)


def _try(model: nn.Module, drawn: Tensor) -> None:
    """Call a model with two of the examples that were drawn for it; an error of its own says what these were."""
    try:
        with torch.no_grad():
            _called(model, drawn[:2])
    except Exception as error:
        error.add_note(
            f"the model was given random {str(drawn.dtype).removeprefix('torch.')} numbers of shape "
            f"{tuple(drawn[:2].shape)}; for others pass a function that returns (module, inputs), as --model "
            "MODULE:FUNCTION or `model`"
        )
        raise


def _squares(outputs: Any) -> Tensor:
    """The loss that a model gives itself, or the mean of its squared outputs: it costs next to nothing."""
    own = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(own, Tensor):
        return own
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not leaves:
        raise UsageError(f"the model's outputs hold no tensor to train on: {type(outputs).__name__}; pass a loss, too")
    return torch.stack([leaf.float().square().mean() for leaf in leaves]).sum()


def _called(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def _examples(inputs: Any) -> int:
    lengths = {len(leaf) for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim}
    if len(lengths) != 1:
        raise UsageError(f"the model's inputs have {sorted(lengths)} examples; all tensors need the same first size")
    return lengths.pop()


def _name_of(ops: CrossDeviceOps, known: Mapping[str, CrossDeviceOps]) -> str:
    """Return the name that the table gives an op: that of its kind there."""
    return next((name for name, other in known.items() if type(other) is type(ops)), type(ops).__name__)


@contextlib.contextmanager
def _all_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(cores())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
