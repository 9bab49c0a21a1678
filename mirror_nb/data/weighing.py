"""Which of the batches that were handed out is in use, where several of different weights are held at once.

    batches one by one       ─▶ the one handed out last
    one looked ahead, list(batches), zip(batches, others)
                             ─▶ the one whose memory a network, or a function given to `strategy.run`, is called with

Knows tensors and the sizes of shares; knows no gradients and no data sets.
"""

from __future__ import annotations

import inspect
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from mirror_nb.data.batches import in_memory, tensors_of
from mirror_nb.tensors.layouts import is_block, needed
from mirror_nb.values import Shares

_Held = tuple[weakref.ref[Tensor], Shares, int]
# A tensor of a batch, its batch's shares, and the address of its storage.


@final
class Weighing:
    """The batches of one replica that somebody still holds; `use(shares)` is called with the shares of one in use."""

    def __init__(self, num_replicas: int, use: Callable[[Shares], None]) -> None:
        self._num_replicas = num_replicas
        self._use = use
        self._held: dict[int, _Held] = {}
        # By id: the tensors of batches.
        self._in: defaultdict[int, dict[int, None]] = defaultdict(dict)
        # By the address of a storage: the ids of those that lie in it.
        self._weights: Counter[float] = Counter()
        # How many of them have each weight.
        self._looking = False
        self._hook: RemovableHandle | None = None

    def handed_out(self, batch: Any, shares: Shares) -> None:
        """A batch is handed out, and in use as far as is known."""
        for tensor in tensors_of(batch):
            self._hold(tensor, shares)
        self._watch(self._weight(shares))
        self._use(shares)

    def exhausted(self) -> None:
        """There are no more: from now on all replicas weigh in alike, but for batches that somebody still uses."""
        self._watch(1.0)

    def called_with(self, values: Any) -> Shares | None:
        """Return the shares of the batch that is among these arguments; None: it cannot be told, or need not be."""
        return self._found(tensors_of(values)) if self._looking else None

    def _hold(self, tensor: Tensor, shares: Shares) -> None:
        key = id(tensor)
        self._let_go(key)
        storage = _storage_of(tensor)
        self._held[key] = weakref.ref(tensor, lambda reference: self._let_go(key)), shares, storage
        weight = self._weight(shares)
        # Each in one step: any call of a function may collect garbage, batches among it.
        self._in[storage][key] = None
        self._weights[weight] += 1

    def _let_go(self, key: int) -> None:
        known = self._held.pop(key, None)
        if known is not None:
            _, shares, storage = known
            del self._in[storage][key]
            if not self._in[storage]:
                del self._in[storage]
            weight = self._weight(shares)
            self._weights[weight] -= 1
            if not self._weights[weight]:
                del self._weights[weight]

    def _watch(self, latest: float) -> None:
        """Look at what networks are called with, as long as there is a batch of another weight than the latest."""
        apart = any(weight != latest for weight in list(self._weights))
        if apart == self._looking:
            return
        self._looking = apart
        if self._hook is None:
            own = weakref.WeakMethod(self._called)

            def called(module: nn.Module, args: tuple[Any, ...]) -> None:
                if torch.compiler.is_compiling():
                    # No part of what is compiled, where no tensor has an address.
                    return
                if (look := own()) is not None:
                    look(args)
                else:
                    # Nothing of it stays in a notebook whose one replica, in its own process, has ended. Not where
                    # the collector comes by: torch.compile, if under way there, fails without a hook it has seen.
                    hook.remove()

            self._hook = hook = register_module_forward_pre_hook(called)
            self._look = called
        elif apart:
            # The same one in its own place: for another torch.compile compiles anew, after each epoch's last batch.
            hooks: Any = self._hook.hooks_dict_ref()
            hooks[self._hook.id] = self._look
        else:
            self._hook.remove()

    def _called(self, args: tuple[Any, ...]) -> None:
        shares = self._found(map(in_memory, args))
        if shares is not None:
            self._use(shares)

    def _found(self, values: Iterable[Any]) -> Shares | None:
        for value in values:
            if isinstance(value, Tensor) and (shares := self._shares_of(value)) is not None:
                return shares
        return None

    def _shares_of(self, tensor: Tensor) -> Shares | None:
        """Return the shares of the batch of which this is a tensor, or part of one."""
        for key in (id(tensor), *self._in.get(_storage_of(tensor), ())):
            # Any may go meanwhile, with the last who holds it.
            reference, shares, _ = self._held.get(key, _NONE)
            own = reference()
            if own is not None and (own is tensor or _within(tensor, own)):
                return shares
        return None

    def _weight(self, shares: Shares) -> float:
        return self._num_replicas * shares[0] / shares[1]


_NONE: tuple[Callable[[], Tensor | None], Shares | None, int] = (lambda: None), None, 0


def _storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; 0 for one that is empty, -1 for one that has none."""
    try:
        # The first raises for what has none, jagged say. Of the slice that a share of no examples is it is not empty.
        storage = tensor.untyped_storage().data_ptr()
        return storage if tensor.data_ptr() else 0
    except RuntimeError:
        # Sparse, or what stands for a tensor while something is traced, exported or mapped.
        return -1


def _within(tensor: Tensor, own: Tensor) -> bool:
    """Whether a tensor, of the same storage as a batch's own one, is part of that."""
    storage = _storage_of(own)
    if storage in (0, -1):
        # A share of no examples has no memory, and no weight, whichever batch it is of.
        return storage == 0 and not tensor.numel() and (not _in_a_network() or _cut_from_one(tensor, own))
    begins = own.data_ptr()
    # There may be gaps in it: of padded sequences a collate_fn takes the columns that are needed.
    extent = needed(own) - own.storage_offset() * own.itemsize if is_block(own) else own.nbytes
    return begins <= tensor.data_ptr() < begins + extent


def _cut_from_one(tensor: Tensor, own: Tensor) -> bool:
    """Whether two tensors without elements were cut from the same memory, or one from the other."""
    one, other = tensor.untyped_storage(), own.untyped_storage()
    # That of what was made without elements, or moved to a GPU, lies nowhere.
    return one is other or one.data_ptr() == other.data_ptr() != 0


def _in_a_network() -> bool:
    """Whether a network calls a part of its own: with what it made itself, a layer without a bias has an empty one.

    Or a backward pass does, which computes such a part once more: no batch comes by that.
    """
    if _task() != _NO_TASK:
        return True
    calls, frame = 0, inspect.currentframe()
    while frame is not None and calls < _NESTED:
        calls += frame.f_code is _CALL
        # Past the network's own call.
        if frame.f_code.co_name == "forward" and _is_of_a_network(frame):
            return True
        frame = frame.f_back
    return calls == _NESTED


def _is_of_a_network(frame: FrameType) -> bool:
    """Whether a function named `forward` is a network's: a user's own may be given one."""
    own = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
    return isinstance(own, nn.Module) and getattr(type(own).forward, "__code__", None) is frame.f_code


_CALL = nn.Module.__call__.__code__
_NESTED = 2
# A network's call, and that of a part of it.
_NO_TASK = -1
_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: _NO_TASK)
# Of the backward pass that runs. Private: without it a part that is computed once more is one that a user calls.
