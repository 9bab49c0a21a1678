"""Torch's modes of a thread, no_grad, inference_mode and autocast: read on one side, entered on the other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_KINDS = ("cuda", "cpu")


def current() -> Any:
    """Return the modes that code runs in here, plain values but for dtypes; None for the usual ones."""
    gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in _KINDS if torch.is_autocast_enabled(kind)]
    return None if gradients and not inference and not casts else (gradients, inference, casts)


@contextlib.contextmanager
def entered(modes: Any) -> Iterator[None]:
    """Run a block in the modes that `current` returned elsewhere; what it sets ends with it."""
    gradients, inference, casts = modes or (True, False, [])
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(gradients))
        for kind, dtype in casts:
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        yield
