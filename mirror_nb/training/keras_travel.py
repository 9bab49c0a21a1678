"""A Keras model on its way from the controller to the replicas: its objects as they are, its tensors beside them.

The objects travel each time, since nothing tells whether they have changed; a tensor only after it was written to.

    model ─▶ Copies.pack ─▶ Parcel (structure, tensors that the replicas lack) ─▶ Arrived.open ─▶ its copy

Knows tensors and pickles; knows no replica and no strategy.
"""

from __future__ import annotations

import io
import pickle
import types
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from mirror_nb.errors import TransferError
from mirror_nb.transfer.keras_objects import reduce_keras, repairing
from mirror_nb.transfer.pickler import Pickler, module_by_name


@final
@dataclass(frozen=True, slots=True)
class Parcel:
    """A model that travels."""

    structure: bytes
    # The pickle, in which tensors are numbers.
    tensors: dict[int, torch.Tensor]
    # Those that the receiver lacks, or whose values have changed.
    kinds: dict[int, tuple[bool, bool]]
    # Of all tensors of the structure: whether they are parameters, and want gradients.


@final
class Copies:
    """What the replicas have of one model: the sender's side."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[int, torch.Tensor]] = {}
        # By id; the tensor is held, so that its id stays its own.
        self._states: dict[int, tuple[int, int]] = {}
        self._count = 0

    def pack(self, model: Any) -> Parcel:
        """Return what to send so that the receiver has the model as it is now.

        Raises TransferError for a model that holds what cannot be pickled.
        """
        file = io.BytesIO()
        packer = _Packer(file, self._number)
        try:
            packer.dump(model)
        except Exception as reason:
            raise TransferError(
                f"the Keras model {getattr(model, 'name', '')!r} cannot be sent to the replicas: "
                f"{type(reason).__name__}: {reason}; keep files, locks and generators out of its attributes"
            ) from reason
        used = packer.tensors
        self._numbers = {id(tensor): (number, tensor) for number, tensor in used.items()}
        fresh = {number: tensor.detach() for number, tensor in used.items() if self._changed(number, tensor)}
        self._states = {number: _state(tensor) for number, tensor in used.items()}
        kinds = {number: (isinstance(tensor, nn.Parameter), tensor.requires_grad) for number, tensor in used.items()}
        return Parcel(file.getvalue(), fresh, kinds)

    def changed(self, tensor: torch.Tensor) -> bool:
        """Whether the receiver has other values of this tensor, or none."""
        known = self._numbers.get(id(tensor))
        return known is None or self._changed(known[0], tensor)

    def same(self, tensor: torch.Tensor) -> None:
        """Both sides hold equal values of this tensor now."""
        known = self._numbers.get(id(tensor))
        if known is not None:
            self._states[known[0]] = _state(tensor)

    def forget(self) -> None:
        """The receiver may have anything."""
        self._states.clear()

    def _number(self, tensor: torch.Tensor) -> int:
        known = self._numbers.get(id(tensor))
        if known is None:
            known = self._numbers[id(tensor)] = (self._count, tensor)
            self._count += 1
        return known[0]

    def _changed(self, number: int, tensor: torch.Tensor) -> bool:
        return self._states.get(number) != _state(tensor)


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor._version, tensor.data_ptr()


@final
class Arrived:
    """The receiver's side: tensors stay the same objects, however often the model arrives."""

    def __init__(self) -> None:
        self._tensors: dict[int, torch.Tensor] = {}

    def open(self, parcel: Parcel, device: torch.device) -> Any:
        """Return the model, its tensors on `device`."""
        for number, values in parcel.tensors.items():
            self._take(number, values, device, *parcel.kinds[number])
        self._tensors = {number: self._tensors[number] for number in parcel.kinds}
        for number, (_, wanted) in parcel.kinds.items():
            self._tensors[number].requires_grad_(wanted)
        opener = _Opener(io.BytesIO(parcel.structure), self._tensors)
        with repairing():
            return opener.load()

    def _take(self, number: int, values: torch.Tensor, device: torch.device, parameter: bool, wanted: bool) -> None:
        known = self._tensors.get(number)
        if known is not None and known.shape == values.shape and known.dtype == values.dtype:
            with torch.no_grad():
                known.copy_(values)
            return
        # Of their own: what arrives looks at the pages of the message.
        own = values.to(device, copy=True)
        self._tensors[number] = nn.Parameter(own, requires_grad=wanted) if parameter else own


@final
class _Packer(Pickler):
    def __init__(self, file: io.BytesIO, number: Any) -> None:
        super().__init__(file, protocol=5)
        self.tensors: dict[int, torch.Tensor] = {}
        self._number = number

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return None
        number = self._number(obj)
        self.tensors[number] = obj
        return number

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            return module_by_name(obj) or super().reducer_override(obj)
        return reduce_keras(obj) or super().reducer_override(obj)


@final
class _Opener(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: dict[int, torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: Any) -> torch.Tensor:
        return self._tensors[number]
