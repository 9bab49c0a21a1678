"""Stages of torch.distributed.pipelining: each replica has another one, whose gradients are its own.

Knows torch's stages and tracked parameters. Called once somebody imports torch's module, never importing it before.
"""

from __future__ import annotations

import importlib
import weakref
from typing import Any

from mirror_nb.environment.replaced import Replaced
from mirror_nb.gradients.tracked import Tracked


def install() -> None:
    """Have every stage that is made keep its parameters to itself, for as long as the stage is alive."""
    stage = getattr(importlib.import_module("torch.distributed.pipelining.stage"), "_PipelineStageBase", None)
    if stage is not None:
        Replaced(stage, "__init__", after=_keep)


def _keep(stage: Any, *_: object, **__: object) -> None:
    # The other stages wait for what this one sends, and not in an all-reduce.
    for parameter in stage.submod.parameters():
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            tracked = getattr(hook, "__self__", None)
            if isinstance(tracked, Tracked):
                tracked.owner = weakref.ref(stage)
