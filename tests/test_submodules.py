"""cloudpickle's question which submodules a function uses: answered faster, and with the same."""

from __future__ import annotations

import concurrent.futures
import os
import sys
import types
import xml.dom.minidom
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cloudpickle import cloudpickle

from mirror_nb.transfer import pickler
from mirror_nb.transfer.submodules import find_imported_submodules, reached


def as_cloudpickle_does(code: types.CodeType, modules: list[Any]) -> set[str]:
    """The rule itself: of what is loaded below a module, all whose path the code can spell."""
    return {
        name
        for module in modules
        for name in list(sys.modules)
        if name.startswith(f"{module.__name__}.")
        and set(name[len(module.__name__) + 1 :].split(".")) <= set(code.co_names)
    }


@pytest.mark.parametrize(
    ("function", "modules"),
    [
        (lambda: torch.nn.functional.relu, [torch]),
        (lambda: torch.nn.utils.rnn.pad_sequence, [torch, F]),
        (lambda: (torch.optim.lr_scheduler, torch.utils.data.dataloader), [torch]),
        (lambda: concurrent.futures.thread.ThreadPoolExecutor, [concurrent]),
        (lambda: xml.dom.minidom.parse, [xml]),
        (lambda: np.linalg.norm, [np]),
        (lambda: 1, [torch, np]),
    ],
)
def test_the_same_submodules_are_found(function: Callable[[], object], modules: list[Any]) -> None:
    found = find_imported_submodules(function.__code__, [*modules, 1, None])
    wanted = as_cloudpickle_does(function.__code__, modules)
    assert {module.__name__ for module in found} == {sys.modules[name].__name__ for name in wanted}
    assert wanted or not function.__code__.co_names


def test_paths_lead_through_submodules_as_far_as_there_are_some():
    here = types.ModuleType("somewhere")
    names = {"torch": torch, "F": F, "xml": xml, "os": os, "here": here, "number": 1}
    here.minidom = xml.dom.minidom  # type: ignore[attr-defined]
    paths = [("torch", "nn", "Linear", "forward"), ("F", "relu"), ("xml", "dom", "minidom"), ("os", "path", "join")]
    paths += [("number", "real"), ("missing", "part"), ("here", "minidom"), ("torch", "not_there")]
    assert reached(paths, names) == ("torch.nn", "xml.dom", "xml.dom.minidom", "os.path")


def test_cloudpickle_asks_here():
    assert pickler.submodules.find_imported_submodules is cloudpickle._find_imported_submodules


def test_a_cloudpickle_without_that_function_stays_as_it_is(monkeypatch):
    monkeypatch.delattr(cloudpickle, "_find_imported_submodules")
    pickler.submodules.install()
    assert not hasattr(cloudpickle, "_find_imported_submodules")
