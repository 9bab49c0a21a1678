"""`torch.compile` and us: functions that it made travel, and what it compiles leaves our hooks out.

    f = torch.compile(step, ...)     travels as `step` and how it is compiled; each process compiles for itself
    f(batch)                         within it our hooks run as they are, in a backward pass for instance

Knows torch's compiler, and of mirror_nb names alone.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any, final

import torch

from mirror_nb.errors import TransferError

_ORIGINAL, _BACKEND, _MADE = "_torchdynamo_orig_callable", "_torchdynamo_orig_backend", "_torchdynamo_wrapper_id"
# Torch's marks: on what it made the function that it was given, on each layer of a backend the one inside, and the id
# of what it made, since `functools.wraps` copies marks.


def compiled_from(function: object) -> Callable[..., Any] | None:
    """Return the function that was given to `torch.compile` to make this one; None if this is no such function."""
    marks = function.__dict__ if type(function) is types.FunctionType else {}
    if _ORIGINAL not in marks or marks.get(_MADE, id(function)) != id(function) or "_torchdynamo_disable" in marks:
        return None
    original: Callable[..., Any] = marks[_ORIGINAL]
    return original


def reduce_compiled(function: object) -> tuple[Any, ...] | None:
    """Return how pickle shall take it, as `__reduce__` does; None: `torch.compile` did not make it.

    Raises TransferError where this torch keeps how it compiles in a way that is not known here.
    """
    original = compiled_from(function)
    return None if original is None else (_compiled, (original, _options(function)))


def _compiled(original: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    made: Callable[..., Any] = torch.compile(original, **options)
    return made


def _options(function: Any) -> dict[str, Any]:
    """Return the arguments of `torch.compile` that it was made with."""
    try:
        held = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
        context = held["self"].cell_contents
        backend: Any = context.callback
        while hasattr(backend, _BACKEND):
            backend = getattr(backend, _BACKEND)
        return {"fullgraph": context.fullgraph, "dynamic": backend.dynamic, **_backend_of(backend)}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TransferError(
            f"{getattr(function, '__name__', 'a function')} was compiled by torch.compile, and torch "
            f"{torch.__version__} does not tell how: compile it in the cell, or in the function given to strategy.run"
        ) from error


def _backend_of(backend: Any) -> dict[str, Any]:
    if isinstance(backend, torch._TorchCompileInductorWrapper):
        # Of a mode these are the options that it means.
        return {"backend": "inductor", "options": dict(backend.config)} if backend.config else {"backend": "inductor"}
    call = backend.compiler_fn
    # Torch's own by name: they need not be picklable.
    named = getattr(call, "__module__", "torch").partition(".")[0] == "torch"
    return {"backend": backend.compiler_name if named else call, **backend.kwargs}


# --------------------------------------------------------------------------- hooks

_OURS = (
    *("gradients", "steps", "telemetry", "collectives", "replica", "pool", "strategies"),
    *("tensors.checksums", "tensors.layouts", "environment.replaced", "mirroring"),
    *("transfer.told", "transfer.keras_objects"),
)
# Where code of ours is that runs within what users compile. Not training, nor batch norms of tensors: these are part
# of networks.


def leave_us_out() -> None:
    """Have torch._dynamo, which was imported, run our hooks as they are.

    It compiles each function that a compiled one calls, also those that autograd calls, and fails on process groups.
    """
    rules = importlib.import_module("torch._dynamo.trace_rules")
    if hasattr(rules, "add"):
        for name in _OURS:
            rules.add(f"mirror_nb.{name}")


def tracing() -> bool:
    """Whether torch.compile goes through code now; it may do so again, and must find the same hooks."""
    context = getattr(sys.modules.get("torch._guards"), "TracingContext", None)
    return context is not None and context.try_get() is not None


@final
class OutsideOfCompiled:
    """A hook on the forward pass of modules that calls `hook()` but where it is compiled: there it is left away."""

    def __init__(self, hook: Callable[[], None]) -> None:
        self._hook = hook

    def __call__(self, module: object, inputs: object) -> None:
        if not torch.compiler.is_compiling():
            self._hook()
