"""Which pickle of a function may be used again: one of the very things that it captures now."""

from __future__ import annotations

import os
import random
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mirror_nb.strategies.functions import Functions
from mirror_nb.transfer.payload import Payload

PICKLE = Payload(b"p")


class Mirrored:
    """Stands for what the replicas have."""


@pytest.fixture
def functions() -> Functions:
    return Functions(lambda obj: isinstance(obj, Mirrored))


def reads(a: Any, b: Any = 0) -> Callable[[], Any]:
    return lambda: (a, b)


def rebind(function: Any, *contents: Any) -> None:
    for cell, content in zip(function.__closure__, contents, strict=True):
        cell.cell_contents = content


def double(x: int) -> int:
    return 2 * x


@pytest.mark.parametrize("captured", [1, "a", None, Mirrored(), double, types, Callable, Payload, len])
def test_a_pickle_serves_again_while_its_function_captures_the_same(functions, captured):
    function = reads(captured)
    assert functions.get(function) is None
    functions.keep(function, PICKLE)
    assert functions.get(function) is PICKLE


class Local:
    """Stands for a class of a notebook or a script."""


Local.__module__ = "__main__"


@pytest.mark.parametrize(
    "captured",
    [[], {}, object(), (1,), {"rate": 0.1}.get, Local, type("Made", (), {}), types.ModuleType("no_such_module")],
)
def test_what_may_change_in_place_is_pickled_each_time(functions, captured):
    function = reads(captured)
    functions.keep(function, PICKLE)
    assert functions.get(function) is None


@pytest.mark.parametrize(
    ("before", "after"),
    [((1, 2), (2, 1)), ((1, double), (double, 1)), ((1, 1), (1, Mirrored())), ((Mirrored(), 1), (Mirrored(), 1))],
    ids=["swapped", "a function elsewhere", "another kind", "another object"],
)
def test_other_contents_need_another_pickle(functions, before, after):
    function = reads(*before)
    functions.keep(function, PICKLE)
    rebind(function, *after)
    assert functions.get(function) is None
    rebind(function, *before)
    assert functions.get(function) is PICKLE


def test_what_a_called_function_captures_counts_too(functions):
    inner = reads(1, 2)
    outer = reads(inner, inner)
    functions.keep(outer, PICKLE)
    assert functions.get(outer) is PICKLE
    rebind(inner, 1, 3)
    assert functions.get(outer) is None


def test_what_each_process_has_of_its_own_needs_no_new_pickle(functions):
    for own in (random.random, random.randint, np.random.rand, os.environ, os.environ.get):
        function = reads(own)
        functions.keep(function, PICKLE)
        assert functions.get(function) is PICKLE
    dice = reads(random.Random(1).random)
    functions.keep(dice, PICKLE)
    assert functions.get(dice) is None


def test_functions_that_call_each_other_come_to_an_end(functions):
    one, two = reads(0, 1), reads(0, 2)
    rebind(one, two, 1)
    rebind(two, one, 2)
    functions.keep(one, PICKLE)
    assert functions.get(one) is PICKLE


COUNTS = {
    "a global name": "def step():\n    global count\n    count += 1",
    "one inside": "def step():\n    def inner():\n        global count\n        count = 1\n    inner()",
    "one that goes": "def step():\n    global count\n    del count",
    "an attribute": "def step(): pass\nstep.calls = 0",
    "another's": "def helper(): helper.calls += 1\nhelper.calls = 0\ndef step(): helper()",
    "what it closes over": "def make(n=0):\n    def step(): nonlocal n; n += 1\n    return step\nstep = make()",
}


@pytest.mark.parametrize("source", COUNTS.values(), ids=COUNTS)
def test_a_function_that_counts_its_calls_begins_anew_with_each(functions, source):
    names: dict[str, Any] = {"count": 0}
    exec(source, names)
    functions.keep(names["step"], PICKLE)
    assert functions.get(names["step"]) is None


def test_a_name_bound_anew_and_one_not_bound_yet_count(functions):
    names: dict[str, Any] = {}
    exec("def step(x=1, *, y=2): return a", names)
    step = names["step"]
    functions.keep(step, PICKLE)
    assert functions.get(step) is PICKLE
    names["a"] = 3
    assert functions.get(step) is None
    functions.keep(step, PICKLE)
    step.__defaults__ = (5,)
    assert functions.get(step) is None
    functions.keep(step, PICKLE)
    step.__kwdefaults__ = {"y": 6}
    assert functions.get(step) is None
    functions.keep(step, PICKLE)
    step._rate = 0.1
    assert functions.get(step) is None


def test_a_loss_with_no_tensors_counts_by_its_attributes(functions):
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    function = reads(loss)
    functions.keep(function, PICKLE)
    assert functions.get(function) is PICKLE
    loss.label_smoothing = 0.2
    assert functions.get(function) is None
    functions.keep(function, PICKLE)
    loss.temperature = 2
    assert functions.get(function) is None
    functions.keep(function, PICKLE)
    assert functions.get(function) is PICKLE
    loss.weight = torch.ones(2)
    assert functions.get(function) is None
    loss.weight = None
    assert functions.get(function) is PICKLE
    loss.register_forward_hook(lambda *_: None)
    assert functions.get(function) is None
    functions.keep(function, PICKLE)
    assert functions.get(function) is None


@pytest.mark.parametrize(
    "module",
    [nn.Linear(1, 1), nn.BatchNorm1d(1, affine=False), nn.Sequential(nn.ReLU()), nn.CrossEntropyLoss(torch.ones(2))],
    ids=repr,
)
def test_modules_with_tensors_or_parts_are_pickled_each_time(functions, module):
    function = reads(module)
    functions.keep(function, PICKLE)
    assert functions.get(function) is None


def test_a_loss_with_a_list_or_a_class_of_the_notebook_is_pickled_each_time(functions):
    class Own(nn.Module):
        pass

    listing, having = nn.MSELoss(), nn.MSELoss()
    listing.seen, having.seen = [], {1}
    for loss in (Own(), listing, having):
        function = reads(loss)
        functions.keep(function, PICKLE)
        assert functions.get(function) is None


def test_a_pickle_keeps_nothing_that_the_replicas_have(functions):
    captured = Mirrored()
    function, gone = reads(captured), weakref.ref(captured)
    functions.keep(function, PICKLE)
    rebind(function, None, 0)
    del captured
    assert gone() is None
    assert functions.get(function) is None


def test_an_object_that_the_replicas_have_no_more_needs_another_pickle():
    held = {"yes"}
    functions = Functions(lambda obj: bool(held))
    function = reads(Mirrored())
    functions.keep(function, PICKLE)
    assert functions.get(function) is PICKLE
    held.clear()
    assert functions.get(function) is None
