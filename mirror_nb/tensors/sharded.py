"""Parameters of which each replica has a part alone: FSDP's, and other distributed tensors. Knows torch alone."""

from __future__ import annotations

import sys

import torch
from torch import nn

WHY = (
    "its tensors are sharded: each replica has a part of them alone. torch.distributed.checkpoint.state_dict."
    "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) makes whole ones of them in a cell"
)


def refuse(obj: object) -> None:
    """Raise TypeError for what is of no use in another process: a distributed tensor, or a mesh of devices."""
    if isinstance(obj, torch.Tensor) and is_sharded(obj):
        raise TypeError(WHY)
    meshes = sys.modules.get("torch.distributed.device_mesh")
    if meshes is not None and isinstance(obj, meshes.DeviceMesh):
        raise TypeError("a mesh belongs to the replica")


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a distributed one, or a parameter in which FSDP keeps several: there it is not whole."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return getattr(tensor, "_is_flat_param", False) or (tensors is not None and isinstance(tensor, tensors.DTensor))


def has_sharded(network: nn.Module) -> bool:
    """Whether parameters of a network are sharded."""
    # What makes them so is in one of these.
    possible = any(f"torch.distributed.{name}" in sys.modules for name in ("tensor", "fsdp"))
    return possible and any(map(is_sharded, network.parameters()))
