"""Classes of the user's that torch's pytrees take apart: they do so where such a class arrives, too.

Knows torch's registry. Knows no payload and no replica.
"""

from __future__ import annotations

from typing import Any

from torch.utils import _pytree as pytree


def reduce_registered(kind: type, reduced: Any) -> Any:
    """Return how pickle is to send a class: as `reduced`, by itself, and with the functions that take it apart."""
    # Torch calls it private; without it a class travels as one that nobody has registered.
    node = getattr(pytree, "SUPPORTED_NODES", {}).get(kind)
    if node is None or not isinstance(reduced, tuple) or len(reduced) != _WITH_SETTER:
        # Most often it travels by its name, and whoever imports its module registers it.
        return reduced
    make, args, state, items, pairs, put = reduced
    return make, args, (put, state, tuple(node)[1:]), items, pairs, _set_registered


_WITH_SETTER = 6


def _set_registered(kind: type, state: tuple[Any, ...]) -> None:
    put, own, (flatten, unflatten, flatten_with_keys) = state
    put(kind, own)
    # One that has come before keeps what it had then.
    if kind not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(kind, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys)
