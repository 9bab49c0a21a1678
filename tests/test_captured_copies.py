"""What a function captures that is not mirrored travels by value; what would be lost of it is told."""

from __future__ import annotations

import copy
import functools
import itertools
import re
import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from trained import Net, X, Y, replica_id, step_of, trained

import mirror_nb as mnb
from mirror_nb.environment import surroundings
from mirror_nb.values import same

CAPTURED = {
    "an operator": lambda p: p + 1,
    "an operator from the right": lambda p: 1 + p,
    "a function of torch": lambda p: torch.cat([p, p]),
    "a method": lambda p: p.sum(),
    "an attribute": lambda p: p.data.clone(),
    "a function of NumPy": lambda p: torch.from_numpy(np.asarray(p)) * 2,
    "another one": lambda p: p * p,
    "its length": lambda p: torch.tensor(len(p)),
    "an index": lambda p: p[0],
    "a slice": lambda p: p[1:, None],
    "its members": lambda p: torch.stack([one + 1 for one in p]),
    "a comparison": lambda p: p == 2.0,
    "its type": lambda p: torch.tensor(isinstance(p, torch.Tensor)),
}


@pytest.mark.parametrize("use", CAPTURED.values(), ids=CAPTURED)
def test_a_per_replica_that_a_function_captures_is_the_replicas_own_value_in_it(two, use):
    value = two.run(lambda: torch.tensor([1.0 + replica_id(), 2.0]))
    held = {"in": [value]}
    expected = [use(part) for part in value]
    for call in (lambda: use(value), functools.partial(use, value), lambda: use(held["in"][0])):
        assert same(two.local_results(two.run(call)), tuple(expected))


def test_what_is_not_mirrored_travels_by_value_each_time(two):
    scale = [1.0]
    assert two.run(lambda: scale[0]) == 1.0
    scale[0] = 3.0
    assert two.run(lambda: scale[0]) == 3.0
    with pytest.warns(UserWarning, match="changed `scale` in the replicas, on a copy that is gone"):
        two.run(lambda: scale.append(0.0))
    assert scale == [3.0]


Lost = tuple[Callable[..., object], tuple[Any, ...]]
# A function that changes a copy, and its arguments.


def counts() -> Lost:
    counts = torch.zeros(3)
    return lambda: counts.add_(1.0), ()


def totals() -> Lost:
    totals = np.zeros(3)

    def add() -> None:
        totals[0] += 1.0

    return add, ()


def predictions() -> Lost:
    predictions = np.zeros(1_000_000)

    def predict() -> None:
        predictions[9] = 1.0

    return predict, ()


def plain() -> Lost:
    plain = mnb.Variable(1.0, trainable=False)
    return lambda: plain.assign_add(torch.tensor(1.0)), ()


def passed() -> Lost:
    return lambda passed: passed.assign_add(torch.tensor(1.0)), (mnb.Variable(1.0, trainable=False),)


def dice() -> Lost:
    dice = torch.Generator()
    return lambda: torch.rand(1, generator=dice), ()


def losses() -> Lost:
    return lambda losses: losses.append(1.0), ([],)


def held() -> Lost:
    held: tuple[list[float], list[float]] = ([], [])
    return lambda: held[0].append(1.0), ()


def pair() -> Lost:
    pair = Pair([], [])
    return lambda: pair.second.append(1.0), ()


class Pair(NamedTuple):
    first: list[float]
    second: list[float]


def totals_of_a_class() -> Lost:
    class Totals:
        steps = 0

    def add() -> None:
        Totals.steps += 1

    return add, ()


def counted_by_a_method() -> Lost:
    class Counted:
        steps: ClassVar[list[float]] = []

        def add(self) -> None:
            self.steps.append(1.0)

    counted = Counted()
    return lambda: counted.add(), ()


def called() -> Lost:
    def called() -> None:
        called.times += 1

    called.times = 0
    return called, ()


def inner() -> Lost:
    inner = 0

    def add() -> None:
        nonlocal inner
        inner += 1

    return lambda: add(), ()


def default() -> Lost:
    def add(*, default: dict[str, float] = {}) -> None:  # noqa: B006
        default["a"] = 1.0

    return add, ()


def in_a_dict() -> Lost:
    variable = mnb.Variable(1.0, trainable=False)
    return lambda given: given["total"].assign_add(torch.tensor(1.0)), ({"total": variable},)


def number() -> Lost:
    number = itertools.count()
    return lambda: next(number), ()


def rates() -> Lost:
    rates = iter([0.1, 0.2])
    return lambda: next(rates), ()


PATHS = {
    "held[0]": held,
    "pair.second": pair,
    "Totals.steps": totals_of_a_class,
    "Counted.steps": counted_by_a_method,
    "called.times": called,
    "inner": inner,
    "default": default,
    "given['total']": in_a_dict,
    # Python 3.14 pickles none any more.
    **({"number": number} if sys.version_info < (3, 14) else {}),
    "rates": rates,
}


@pytest.mark.parametrize("path", PATHS)
def test_changes_in_containers_classes_functions_and_iterators_are_told_of(two, path):
    function, args = PATHS[path]()
    with pytest.warns(UserWarning, match=re.escape(f"changed `{path}` in the replicas, on a copy that is gone")):
        two.run(function, args)


@pytest.mark.parametrize("make", [counts, totals, predictions, plain, passed, dice, losses])
def test_changes_of_copies_are_told_of(two, make):
    function, args = make()
    with pytest.warns(UserWarning, match=f"changed `{make.__name__}` in the replicas, on a copy that is gone"):
        two.run(function, args=args)


class Locked:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def step(self) -> int:
        return 1


lock = threading.Lock()
NOT_PICKLED: dict[str, tuple[Callable[..., object], tuple[Any, ...]]] = {
    "`lock`: lock": (lambda: lock, ()),
    "`self`: Locked": (Locked().step, ()),
    "`given`: lock": (functools.partial(lambda given: 1, given=lock), ()),
    "`args[1]`: list": (lambda first, second: 1, (torch.ones(1), [lock])),
    "`result['a']`: list": (lambda: {"loss": 1.0, "a": [threading.Lock()]}, ()),
    "`result`: generator": (lambda: (n for n in [1]), ()),
}


@pytest.mark.parametrize("named", NOT_PICKLED)
def test_what_cannot_travel_is_named(two, named):
    function, args = NOT_PICKLED[named]
    cannot = re.escape(f"{named} cannot be sent: TypeError: cannot pickle")
    with pytest.raises(mnb.TransferError, match=cannot) as told:
        two.run(function, args)
    assert ("return what can be pickled" if "result" in named else "make it in the function") in str(told.value)
    assert two.run(lambda: 1) == 1


def test_what_says_itself_why_it_stays_is_left_to_say_it(two):
    with pytest.raises(mnb.TransferError, match=r"^it stays(\n|$)"):
        two.run(lambda staying: 1, (Staying(),))


class Staying:
    def __reduce__(self) -> Any:
        raise mnb.TransferError("it stays")


def test_batches_may_be_changed(two):
    batch = {"x": torch.ones(2), "y": torch.ones(2)}

    def step(batch: dict[str, torch.Tensor], x: torch.Tensor) -> float:
        x.mul_(2.0)
        return float((batch.pop("x") + x).sum())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert two.run(step, args=(batch, torch.ones(2))) == 6.0


def test_a_scaler_made_outside_the_scope_is_refused_unless_it_does_nothing(two):
    off, on = torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu")
    assert two.run(lambda: off.scale(torch.ones(())).item()) == 1.0
    with pytest.raises(mnb.UsageError, match="a GradScaler that was made outside"):
        two.run(lambda: on.scale(torch.ones(())).item())


@pytest.mark.parametrize("change", ["in place", "an entry", "emptied", "replaced", "a copy in its place"])
def test_what_is_written_to_an_optimizers_state_here_the_replicas_have(two, change):
    model = trained(two)
    with two.scope():
        optimizer = torch.optim.Adam(model.parameters(), 0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    two.run(step)
    match change:
        case "in place":
            optimizer.state[model.weight]["exp_avg"].fill_(5.0)
        case "an entry":
            optimizer.state[model.weight]["exp_avg"] = torch.full((1, 2), 5.0)
        case "emptied":
            optimizer.state.clear()
        case "replaced":
            optimizer.state = defaultdict(dict)
        case "a copy in its place":
            optimizer.state = optimizer.state.copy()
            optimizer.state[model.weight]["exp_avg"] = torch.full((1, 2), 5.0)
    there = two.run(lambda: {i: s["exp_avg"].tolist() for i, s in optimizer.state_dict()["state"].items()})
    assert there.get(0) == (None if change in ("emptied", "replaced") else [[5.0, 5.0]])
    two.run(step)
    assert float(optimizer.state[model.weight]["step"]) == (2.0 if there else 1.0)


def test_a_copy_of_an_optimizers_state_has_the_replicas_moments_and_keeps_them(two):
    model = trained(two)
    with two.scope():
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
    step = step_of(model, optimizer)
    for i, made in enumerate((copy.copy, lambda s: s.copy(), lambda s: s | {}, lambda s: {} | s)):
        two.run(step)
        copied = made(optimizer.state)
        two.run(step)
        assert float(optimizer.state[model.weight]["step"]) == 2 * i + 2
        assert float(copied[model.weight]["step"]) == 2 * i + 1


def test_an_optimizer_made_outside_the_scope_is_refused_before_anything_runs(two):
    model = trained(two)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(mnb.UsageError, match=r"an SGD that was made outside.*strategy\.mirror"):
        two.run(lambda: optimizer.step())
    two.mirror(optimizer)
    two.run(lambda: optimizer.step())


def test_a_module_made_outside_the_scope_may_be_used_but_not_trained(two):
    teacher = nn.Linear(2, 1)
    assert two.run(lambda: teacher(torch.ones(1, 2)).shape) == (1, 1)
    with pytest.raises(mnb.UsageError, match=r"a Linear the function captured got gradients"):
        two.run(lambda: teacher(torch.ones(1, 2)).sum().backward())


def test_a_module_made_outside_the_scope_around_a_mirrored_one_trains_it(two):
    class Distance(nn.Module):
        def __init__(self, network: nn.Module, *more: nn.Module) -> None:
            super().__init__()
            self.network, self.more = network, nn.Sequential(*more)

        def forward(self, x):
            return self.more(self.network(x)).abs().sum()

    model = trained(two)
    loss = Distance(model)
    initial = model.weight.tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert two.run(lambda: loss(torch.ones(1, 2)).backward()) is None
        two.run(lambda: loss.network.weight.detach().add_(1.0))
        assert two.run(lambda: model.weight.grad.tolist()) in ([[1.0, 1.0]], [[-1.0, -1.0]])
    assert model.weight.tolist() == [[value + 1.0 for value in initial[0]]]
    more = Distance(model, nn.Linear(1, 1))
    with pytest.raises(mnb.UsageError, match="got gradients"):
        two.run(lambda: more(torch.ones(1, 2)).backward())


def test_a_warning_names_the_part_of_a_network_made_outside_the_scope_that_a_call_changed(two):
    teacher = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).requires_grad_(False)
    for _ in range(3):
        with pytest.warns(UserWarning, match=r"changed `teacher\.1\.num_batches_tracked` in the replicas"):
            two.run(lambda: teacher(torch.ones(2, 2)).shape)


def test_what_is_created_while_a_strategy_is_set_is_mirrored_as_in_its_scope(two):
    before = nn.Module.__init__, torch.Generator
    mnb.experimental_set_strategy(two)
    try:
        assert mnb.get_strategy() is two
        model, step = Net(), mnb.Variable(0.0)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with two.scope():
            later = nn.Linear(1, 1)
    finally:
        mnb.experimental_set_strategy(None)
    assert (nn.Module.__init__, torch.Generator) == before
    assert not mnb.has_strategy()
    initial = model.second.bias.item()

    def train() -> None:
        F.mse_loss(model(X), Y).backward()
        later(X[:, :1]).sum().backward()
        optimizer.step()
        step.assign_add(1.0)

    two.run(train)
    assert model.second.bias.item() != initial
    assert float(step) == 1
    outside = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(mnb.UsageError, match="made outside this strategy's scope"):
        two.run(lambda: outside.step())


class Meter:
    """As people write them."""

    def __init__(self) -> None:
        self.total = 0.0
        self.values: list[float] = []

    def update(self, value: float) -> None:
        self.total += value
        self.values.append(value)


def test_what_a_function_changes_in_its_copies_is_warned_of(two):
    meter, history = Meter(), []

    def step() -> None:
        meter.update(1.0)
        history.append(1.0)

    with pytest.warns(UserWarning, match=r"step changed `\w+(\.\w+)?`.*`meter\.total`.*Return from") as caught:
        two.run(step)
    assert caught[0].filename == __file__
    assert history == []
    with pytest.warns(UserWarning, match=r"Meter\.update changed `self\.total`, `self\.values` in the replicas"):
        two.run(meter.update, args=(1.0,))
    # The replicas keep this one.
    two.mirror(meter)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        two.run(meter.update, args=(1.0,))
        assert two.run(lambda: meter.total) == 1.0


def test_what_a_function_warns_of_is_said_once_however_often_it_travels_and_again_in_the_next_cell(two, capfd):
    factors = [2.0]

    def helper() -> None:
        warnings.warn("the factor is large", stacklevel=1)

    def step() -> float:
        helper()
        return factors[0]

    def said() -> int:
        return capfd.readouterr().err.count("UserWarning: the factor is large")

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        for _ in range(3):
            two.run(step)
        two.run(lambda: helper())
        assert said() == 2, "once for each replica"
        surroundings.new_moment()
        two.run(step)
        two.run(step)
        assert said() == 2


def test_who_makes_errors_of_warnings_has_what_the_call_did_all_the_same(two):
    with two.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    history: list[float] = []

    def step() -> None:
        optimizer.step()
        scheduler.step()
        history.append(1.0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="history"):
            two.run(step)
    assert scheduler.get_last_lr() == [0.5]


COUNT = 0


def test_what_a_function_counts_with_begins_anew_with_each_call(two):
    count = 0

    def closed_over() -> int:
        nonlocal count
        count += 1
        return count

    def in_a_function_of_it() -> int:
        def inner() -> int:
            nonlocal count
            count += 1
            return count

        return inner()

    def of_the_module() -> int:
        global COUNT
        COUNT += 1
        return COUNT

    def of_itself() -> int:
        of_itself.count += 1
        return of_itself.count

    of_itself.count = 0
    for function in (closed_over, in_a_function_of_it, of_the_module, of_itself, lambda: closed_over()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert [two.run(function) for _ in range(4)] == [1, 1, 1, 1]


def test_a_kept_pickle_is_not_used_when_what_the_function_captures_has_changed(two):
    factor = 1.0
    settings = {"scale": 2.0}
    with two.scope():
        model = nn.Linear(1, 1, bias=False)

    def scaled() -> float:
        return factor * settings["scale"]

    def through() -> float:
        return scaled() + factor

    assert [two.run(scaled), two.run(scaled), two.run(through)] == [2.0, 2.0, 3.0]
    factor = 10.0
    settings["scale"] = 3.0
    assert [two.run(scaled), two.run(through)] == [30.0, 40.0]

    def weight() -> float:
        return model.weight.item()

    first = two.run(weight)
    assert two.run(weight) == first
    with two.scope():
        model = nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 7.0)
    assert two.run(weight) == 7.0
