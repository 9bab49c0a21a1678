"""The tensors that a backward pass gives gradients, in an order that is the same wherever the same was computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def leaves_of(outputs: Iterable[Any]) -> list[Tensor]:
    """Return the leaves below what ``backward()`` was called for: tensors, or torch's GradientEdges."""
    found, seen = [], set()
    queue: list[Any] = []
    for output in outputs:
        if isinstance(output, Tensor) and output.grad_fn is None:
            found.append(output)
        else:
            queue.append(output.grad_fn if isinstance(output, Tensor) else output.node)
    while queue:
        node = queue.pop()
        if node is not None and node not in seen:
            seen.add(node)
            # A function of the user's own may have such an attribute, too.
            if type(node).__name__ == "AccumulateGrad":
                found.append(node.variable)
            queue += [following for following, _ in node.next_functions]
    return found
