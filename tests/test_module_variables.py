"""Variables of the user's own modules: what is set from outside is told, and set elsewhere."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from mirror_nb.environment import module_variables, surroundings
from mirror_nb.environment.module_variables import Signs, changed, put, take
from mirror_nb.noticing.insides import inside

NAME = "mirror_nb_config"
TEXT = """
import os, types
PID = os.getpid()
LR = 0.5
LONG = list(range(20_000))
OPTIONS = {"depth": 1}
ALIAS = OPTIONS
_private = 1
space = types.SimpleNamespace(epochs=2)
class Net:
    width = 8
class Args:
    def __init__(self): self.batch = 4
args = Args()
def lr(): return LR
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / f"{NAME}.py").write_text(TEXT)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME, None)
    for known in (module_variables._imported, module_variables._set, module_variables._taken):
        known.pop(NAME, None)
    take({})


def test_what_a_module_has_by_itself_is_not_told(config):
    assert NAME not in changed()


CHANGES: dict[str, tuple[Callable[[ModuleType], object], dict[tuple[str, ...], object]]] = {
    "a number": (lambda c: setattr(c, "LR", 0.1), {("LR",): 0.1}),
    "an equal number of another type": (lambda c: setattr(c.args, "batch", 4.0), {("args", "batch"): 4.0}),
    "another variable": (lambda c: setattr(c, "NEW", "n"), {("NEW",): "n"}),
    "in place": (
        lambda c: c.OPTIONS.update(width=2),
        {("OPTIONS",): {"depth": 1, "width": 2}, ("ALIAS",): {"depth": 1, "width": 2}},
    ),
    "of a namespace": (lambda c: setattr(c.space, "epochs", 3), {("space", "epochs"): 3}),
    "of an object": (lambda c: setattr(c.args, "batch", 5), {("args", "batch"): 5}),
    "of a class": (lambda c: setattr(c.Net, "width", 64), {("Net", "width"): 64}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_set_is_told_shows_by_its_sign_and_is_set_elsewhere(config, change):
    before = Signs()
    assert before.hold()
    CHANGES[change][0](config)
    assert not before.hold()
    assert Signs().hold()
    told = changed()[NAME]
    assert told == CHANGES[change][1]
    # Another process, as it were: it imports the module only then.
    del sys.modules[NAME]
    take({NAME: told})
    other = importlib.import_module(NAME)
    assert other is not config
    for path, value in told.items():
        held: object = other
        for name in path:
            held = getattr(held, name)
        assert held == value
    assert other.ALIAS is other.OPTIONS
    assert other.lr() == other.LR


@pytest.mark.parametrize("name", ["_private", "LONG"])
def test_what_is_private_or_long_is_left_alone(config, name):
    setattr(config, name, [0] * 20_000 if name == "LONG" else 2)
    assert NAME not in changed()


def test_an_object_that_a_module_had_not_is_left_alone(config):
    config.other = type(config.args)()
    assert NAME not in changed()


def test_what_is_again_what_it_was_is_told_still(config):
    config.LR = 0.1
    assert changed()[NAME] == {("LR",): 0.1}
    config.LR = 0.5
    assert changed()[NAME] == {("LR",): 0.5}
    importlib.reload(config)
    assert NAME not in changed()


def test_a_module_that_is_there_under_another_name_too_is_told_under_both(config, monkeypatch):
    """A package's shared code, compiled by Cython, is there under a name that is not its own."""
    monkeypatch.setitem(sys.modules, "_mirror_nb_shared", config)
    assert NAME not in changed()
    config.LR = 0.1
    found = changed()
    assert found[NAME] == found["_mirror_nb_shared"] == {("LR",): 0.1}
    monkeypatch.delitem(module_variables._imported, "_mirror_nb_shared")
    monkeypatch.delitem(module_variables._set, "_mirror_nb_shared")


def test_what_a_process_has_set_for_itself_stays_until_another_one_sets_it_anew(config):
    take({NAME: {("LR",): 0.1}})
    config.LR = 7.0
    take({NAME: {("LR",): 0.1, ("PID",): 1}})
    assert (config.LR, config.PID) == (7.0, 1)
    take({NAME: {("LR",): 0.2, ("PID",): 1}})
    assert config.LR == 0.2


@pytest.mark.parametrize(("set_there", "who"), [(take, "a replica"), (put, "the notebook")])
def test_what_cannot_be_set_is_told(config, set_there, who):
    with pytest.warns(UserWarning, match=rf"{who} could not set `{NAME}\.gone\.lr`: AttributeError"):
        set_there({NAME: {("gone", "lr"): 0.1, ("LR",): 0.2}})
    assert config.LR == 0.2


def test_of_many_variables_none_is_looked_at_between_two_calls(config, monkeypatch):
    monkeypatch.setattr(module_variables, "WATCHED", 1)
    signs = Signs()
    config.LR = 0.1
    assert signs.hold()
    assert changed()[NAME] == {("LR",): 0.1}


def test_what_a_strategy_remembers_of_modules_is_not_gone_through_with_it(config):
    config.held = object()
    assert inside([surroundings.Signs()], lambda obj: obj is config.held) == []
