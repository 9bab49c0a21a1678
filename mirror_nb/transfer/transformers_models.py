"""Models of transformers: what the library keeps of each class whose models are made in a process.

Knows transformers' registry; knows no payload.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

_OUTPUTS = "_can_record_outputs"
_REGISTRY = "_CAN_RECORD_REGISTRY"
# Private: where transformers has no such registry, its models need none.


def arrived(module: nn.Module) -> None:
    """Register a model that has arrived as its `__init__` does: else it gives no hidden states and attentions here."""
    registry: Any = getattr(sys.modules.get("transformers.modeling_utils"), _REGISTRY, None)
    outputs = vars(module).get(_OUTPUTS, getattr(type(module), _OUTPUTS, None))
    if registry is not None and outputs is not None:
        registry[module] = outputs
