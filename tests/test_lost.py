"""Which of the copies that a function captured it has changed, by the names that its code has for them."""

from __future__ import annotations

import functools
import io
import itertools
import logging
import math
import random
import types
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import networkx
import numpy as np
import pandas
import pytest
import torch

from mirror_nb.replica.lost import Copies


class Thing:
    def __init__(self) -> None:
        self.count = 0
        self.inner: dict[str, Any] = {"seen": [], "name": "a"}
        self._cache = 0
        self.tensor = torch.ones(2)

    def method(self) -> None:
        self.count += 1


class Called:
    def __init__(self, numbers: list[int]) -> None:
        self.count, self.numbers = 0, numbers

    def __call__(self) -> None:
        self.count += 1
        self.numbers.append(1)


class Stubborn:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise LookupError


def changes(change: Callable[[], object], stays: Callable[[object], bool] = lambda obj: False) -> set[str]:
    copies = Copies(change, stays)
    assert copies.changed() == ()
    change()
    return set(copies.changed())


def test_nothing_is_told_of_loggers_which_travel_by_name():
    log = logging.getLogger("mirror_nb_test_lost")

    def says() -> None:
        log.warning("once")
        logging.getLogger("mirror_nb_test_lost.another")

    assert changes(says) == set()


_calls: list[int] = []


def test_nothing_is_told_of_the_module_of_a_decorator():
    """`functools.wraps` gives its function the decorated one's module, and it writes to globals of its own."""

    @functools.wraps(torch.relu)
    def counted() -> None:
        _calls.append(1)

    counted.__module__ = "torch"
    assert changes(lambda: counted()) == set()
    assert _calls == [1]


def test_nothing_is_told_of_what_a_function_of_a_module_closes_over(monkeypatch):
    """Such hear of seeds in replicas: `from random import seed`."""
    heard: list[int] = []

    def seed(number: int) -> None:
        heard.append(number)

    seed.__module__, seed.__qualname__ = "random", "seed"
    monkeypatch.setattr(random, "seed", seed)
    assert changes(lambda: seed(1)) == set()
    assert heard == [1]


class Numbered:
    made = 0

    def make(self) -> None:
        Numbered.made += 1


def test_nothing_is_told_of_classes_that_travel_by_name():
    numbered = Numbered()
    assert changes(numbered.make) == set()
    assert Numbered.made == 1


def test_nothing_is_told_of_what_is_only_read():
    thing, numbers = Thing(), [1, 2, 3]
    with torch.inference_mode():
        # Which keeps no count of what is written to it.
        unwatched = torch.ones(2)
    assert changes(lambda: (sum(numbers), thing.count, list(thing.inner.items()), thing.tensor.sum())) == set()
    assert changes(lambda: unwatched.sum()) == set()
    objects = np.array([[1], None], dtype=object)
    assert changes(lambda: objects[0]) == set()


@pytest.mark.parametrize(
    ("held", "change"),
    [
        ([], lambda held: held.append(1)),
        ([1], lambda held: held.clear()),
        ([1000], lambda held: held.__setitem__(0, 2000)),
        ([torch.ones(2)], lambda held: held.__setitem__(0, torch.ones(2))),
        ({"a": torch.ones(2)}, lambda held: held.update(a=torch.ones(2))),
        (deque([torch.ones(2)]), lambda held: held.__setitem__(0, torch.ones(2))),
        ({}, lambda held: held.update(a=1)),
        ({"a": 1}, lambda held: held.update(a=2)),
        (Counter(), lambda held: held.update("a")),
        (defaultdict(list), lambda held: held["a"]),
        (set(), lambda held: held.add(1)),
        (deque(maxlen=2), lambda held: held.append(1)),
        (list(range(5000)), lambda held: held.append(1)),
        (list(range(5000)), lambda held: held.__setitem__(4000, -1)),
        (dict.fromkeys(range(5000), 0), lambda held: held.update({4000: 1})),
        (Counter(range(5000)), lambda held: held.update([4000])),
        (deque(range(5000)), lambda held: held.rotate()),
        (bytearray(b"a"), lambda held: held.append(1)),
        (io.StringIO(), lambda held: held.write("a")),
        (array("d", [1]), lambda held: held.append(1)),
        (pandas.DataFrame({"a": [1]}), lambda held: held.__setitem__("b", 2)),
        (pandas.Series([1, 2]), lambda held: held.__setitem__(0, 3)),
        (pandas.DataFrame({"a": range(50_000)}), lambda held: held.__setitem__("b", 0)),
        (networkx.Graph(), lambda held: held.add_edge(0, 1)),
    ],
    ids=lambda value: type(value).__name__ if not callable(value) else "",
)
def test_containers_that_hold_something_else_are_told(held, change):
    assert changes(lambda: change(held)) == {"held"}


def test_libraries_data_are_told_where_their_users_find_it():
    graph, ragged = networkx.path_graph(3), np.array([[1], [2]], dtype=object)[:, 0]
    ragged[0] = []
    assert changes(lambda: graph[0][1].update(weight=2)) == {"graph[0][1]"}
    assert changes(lambda: ragged[0].append(1)) == {"ragged[0]"}


def test_nothing_is_told_of_what_an_object_has_found_out_of_itself():
    class Known:
        @functools.cached_property
        def answer(self) -> int:
            return 42

    graph, known, index = networkx.path_graph(3), Known(), pandas.Index([1, 2])
    assert changes(lambda: (len(graph.edges), graph.adj, graph.degree, known.answer)) == set()
    assert changes(lambda: (index.is_unique, index.get_loc(2), index.view(), index.join(index))) == set()


def test_objects_are_told_by_their_attributes_a_few_levels_deep():
    thing = Thing()

    def change() -> None:
        thing.count += 1
        thing.inner["seen"].append(1)
        thing.new = 1  # type: ignore[attr-defined]
        del thing.tensor
        thing._cache = 5

    assert changes(change) == {"thing.count", "thing.inner['seen']", "thing.new", "thing.tensor"}


class Slotted:
    __slots__ = ("_mean", "count", "late", "losses")

    def __init__(self) -> None:
        self.count, self.losses, self._mean = 0, [0.0], torch.zeros(2)


def test_objects_with_slots_are_told_by_these():
    total = Slotted()

    def change() -> None:
        total.count += 1
        total.losses.append(1.0)
        total._mean.add_(1)
        total.late = 1

    assert changes(change) == {"total.count", "total.losses", "total._mean", "total.late"}


class Averages:
    def __init__(self) -> None:
        self._mean = torch.zeros(2)
        self._shadow = [torch.zeros(2)]
        self._by_name = {"weight": (torch.zeros(2), torch.zeros(2))[0]}
        self._pair = (0, torch.zeros(2))
        self._latest: Any = torch.zeros(2)
        self._count = 0


def test_tensors_of_private_attributes_are_told_where_they_are_written_to_in_place():
    averages, network = Averages(), torch.nn.Linear(2, 2)
    network.register_buffer("seen", torch.zeros(1), persistent=False)

    def change() -> None:
        for tensor in (averages._mean, *averages._shadow, *averages._by_name.values(), averages._pair[1]):
            tensor.lerp_(torch.ones(2), 0.5)
        # What an object can do without is told of neither.
        averages._latest = torch.ones(2)
        averages._count += 1
        averages._shadow.append(torch.ones(2))

    told = {f"averages.{name}" for name in ("_mean", "_shadow[0]", "_by_name['weight']", "_pair[1]")}
    assert changes(change) == told
    given = Copies(lambda one: None, lambda obj: False, ((averages,), {}))
    change()
    assert given.changed() == ()
    # Nor of a network's buffers that are not saved.
    assert changes(lambda: network.seen.add_(1)) == set()


def test_methods_partials_and_helpers_are_looked_into():
    thing, numbers = Thing(), [1]

    def helper(to: list[int]) -> None:
        to.append(1)
        numbers.append(2)

    assert changes(thing.method) == {"self.count"}
    assert changes(Called(numbers)) == {"self.count", "self.numbers"}
    assert changes(functools.partial(Called(numbers))) == {"self.count", "self.numbers"}
    assert changes(functools.partial(helper, [])) == {"args[0]", "numbers"}
    assert changes(functools.partial(helper, to=[])) == {"to", "numbers"}
    assert changes(types.MethodType(helper, [])) == {"to", "numbers"}
    method, partial, window = thing.method, functools.partial(helper, []), deque([[1]])
    assert changes(lambda: method()) == {"self.count"}
    assert changes(lambda: partial()) == {"args[0]", "numbers"}
    assert changes(lambda: window[0].append(2)) == {"window[0]"}
    assert changes(lambda: helper([])) == {"numbers"}


class Pair(NamedTuple):
    losses: list[float]
    rest: Any


def test_what_a_tuple_holds_is_told_by_its_place_or_name():
    pair, plain = Pair([], ([],)), (torch.ones(1), [])
    assert changes(lambda: (pair.losses.append(1), pair.rest[0].append(1), plain[1].append(1), plain[0].add_(1))) == {
        *("pair.losses", "pair.rest[0]", "plain[0]", "plain[1]")
    }


class Steps:
    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> int:
        self.count += 1
        return self.count


def test_what_is_gone_through_is_told_where_it_goes_on():
    numbers, counted, steps = iter([1, 2, 3]), itertools.count(), Steps()
    assert changes(lambda: next(steps)) == {"steps.count"}
    assert changes(lambda: next(numbers)) == {"numbers"}
    assert changes(lambda: next(counted)) == {"counted"}


def test_a_method_of_a_list_is_told_where_the_list_changes():
    numbers: list[int] = []
    record, measure = numbers.append, math.sqrt
    assert changes(lambda: record(1)) == {"record"}
    assert changes(lambda: measure(4)) == set()


def test_names_that_are_bound_anew_are_told():
    count = 0

    def counts() -> None:
        nonlocal count
        count += 1

    assert changes(counts) == {"count"}


def test_what_is_no_copy_is_left_alone():
    thing = Thing()
    assert changes(thing.method, stays=lambda obj: obj is thing) == set()


def test_modes_of_modules_and_objects_that_do_not_tell_are_left_alone():
    module, stubborn = torch.nn.Dropout(), Stubborn()
    module.total = 0  # type: ignore[assignment]

    def change() -> None:
        module.eval()
        module.total += 1  # type: ignore[operator]
        assert stubborn is not None

    assert changes(change) == {"module.total"}
    # Not bound yet.
    copies = Copies(lambda: later, lambda obj: False)
    assert copies.changed() == ()
    later = 1
    assert copies.changed() == ("later",)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda net: net(torch.ones(2, 3)), "net.1.num_batches_tracked"),
        (lambda net: net[0].weight.detach().zero_(), "net.0.weight"),
        (lambda net: setattr(net[1], "running_mean", torch.ones(3)), "net.1.running_mean"),
        (lambda net: setattr(net[1], "momentum", 0.5), "net.1.momentum"),
        (lambda net: net.append(torch.nn.Linear(3, 3)), "net.2.weight"),
    ],
)
def test_networks_are_told_by_the_names_of_their_parts(change, told):
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    many = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(200)))

    def step() -> None:
        len(many)
        with torch.no_grad():
            change(net)

    assert told in changes(step)


def test_nothing_is_told_of_parts_of_a_copied_network_that_are_no_copies():
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Dropout())

    def change() -> None:
        net[0].momentum = net[1].p = 0.5

    net[0].momentum = net[1].p = 0.1
    assert changes(change, stays=lambda obj: obj is net[0]) == {"net.1.p"}


def test_a_network_that_has_no_values_yet_is_looked_at():
    net = torch.nn.LazyLinear(2)
    assert "net.in_features" in changes(lambda: net(torch.ones(1, 3)))


def test_nothing_is_told_of_a_network_that_is_only_used():
    """Nor of what it does not save: tables that it made for itself."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).eval()
    net[0].register_buffer("table", torch.zeros(1), persistent=False)
    assert changes(lambda: (net(torch.ones(2, 3)), net[0].table.add_(1))) == set()


def test_a_function_of_a_module_is_not_asked_for_all_that_its_module_has():
    GLOBAL.clear()
    assert changes(appends) == set()


GLOBAL: list[int] = []


def appends() -> None:
    GLOBAL.append(1)


class Counts:
    def __init__(self) -> None:
        self.steps = 0

    def add(self, losses: list[float]) -> None:
        losses.append(1.0)


def count(counts: Counts, *rest: list[float], names: set[str]) -> None:
    counts.steps += 1
    rest[1].append(1.0)
    names.add("b")


def test_arguments_are_told_of_by_the_names_that_the_function_has_for_them():
    given = (Counts(), [], []), {"names": {"a"}}
    copies = Copies(count, lambda obj: False, given, unchanging=True)
    assert copies.changed() == ()
    count(*given[0], **given[1])
    assert copies.changed() == ("counts.steps", "args[2]", "names")
    add, losses = Counts().add, []
    copies = Copies(add, lambda obj: False, ((losses,), {}))
    add(losses)
    assert copies.changed() == ("losses",)
    copies = Copies(lambda record: None, lambda obj: False, ((losses.append,), {}))
    losses.append(2.0)
    assert copies.changed() == ("record",)


def test_defaults_of_arguments_are_told_by_the_names_of_these():
    names: dict[str, Any] = {"__name__": "a_notebook"}
    exec("def step(number=1, to=[], *, seen=set()): to.append(number), seen.add(number)", names)
    assert changes(names["step"]) == {"to", "seen"}


def test_names_of_the_notebook_that_a_function_uses_are_told():
    names: dict[str, Any] = {"__name__": "a_notebook", "losses": []}
    exec("def step(): losses.append(1)", names)
    assert changes(names["step"]) == {"losses"}


def test_batches_are_taken_apart():
    x = torch.ones(2)
    batch, pair, lists, deep = {"x": x, "y": x}, [x, x], {"ids": [1, 2], "x": x}, {"inputs": {"x": x, "y": x}}
    copies = Copies(count, lambda obj: False, ((batch, pair, lists, deep, x), {"names": x}))
    batch.pop("y")
    deep["inputs"].pop("y")
    pair[0] = x.double()
    lists["ids"] = []
    x.add_(1)
    assert copies.changed() == ()


class Dice(random.Random):
    pass


@pytest.mark.parametrize(
    "make",
    [torch.Generator, np.random.default_rng, np.random.RandomState, random.Random, Dice],
    ids=["torch", "numpy", "numpy's legacy", "Python", "one's own"],
)
def test_random_numbers_that_begin_anew_with_each_call_are_told_of(make):
    dice = make()

    def draw() -> object:
        return torch.rand(1, generator=dice) if isinstance(dice, torch.Generator) else dice.random()

    assert changes(draw) == {"dice"}
    assert changes(lambda: dice) == set()


def test_nothing_is_told_of_what_functions_of_random_draw_from():
    draw, old, system = random.randint, np.random.rand, random.SystemRandom()
    assert changes(system.random) == set()
    assert changes(lambda: (draw(0, 9), old())) == set()
