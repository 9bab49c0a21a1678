"""The tensors that a backward pass gives gradients, in an order that is the same wherever the same was computed.

Knows autograd's graph. Knows no replicas, and not which tensors are tracked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

Place = tuple[int, int]
# In a pass, and of how many.


@final
class LeftOver:
    """The tensors that a backward pass gave gradients and that nobody tracked, by their places."""

    def __init__(self) -> None:
        self._places = WeakTensorKeyDictionary()

    def look(self, outputs: Iterable[Any], is_tracked: Callable[[Tensor], bool]) -> None:
        """Take those of the pass that ``backward()`` of these was."""
        found = [leaf for leaf in leaves_of(outputs) if not is_tracked(leaf)]
        self._places = WeakTensorKeyDictionary({leaf: (place, len(found)) for place, leaf in enumerate(found)})

    def place(self, tensor: Tensor) -> Place | None:
        """Where a tensor is that has its gradient still; None: nowhere."""
        place: Place | None = self._places.get(tensor)
        return None if tensor.grad is None else place

    def at(self, places: Iterable[Place | None]) -> list[nn.Parameter]:
        """Return what is there, in order, of passes like this one; nothing where a place is none."""
        wanted = set(places)
        return [] if None in wanted else [leaf for leaf, place in self._places.items() if place in wanted]

    def clear(self) -> None:
        """Forget all."""
        self._places.clear()


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
