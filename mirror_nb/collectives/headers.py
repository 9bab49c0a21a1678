"""What a collective is, in one integer that every replica lays down for the others to compare, and in words.

    kind (4 bits) | fold (3) | dtype (4) | root or number of groups (8) | elements (40)

Knows no memory and no waiting.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.int64,
    torch.int16,
    torch.int8,
    torch.uint8,
)
HALF = (torch.bfloat16, torch.float16)
# What is summed in fp32.
_CODES = {dtype: i for i, dtype in enumerate(DTYPES)}
MERGE_CALL = "merge_call"
# How one says in words what it is; where another collective meets it, that is TensorFlow's error:
UNEVEN_MERGE_CALLS = "Some replicas made a different number of replica_context().merge_call() calls."


class Fold(enum.IntEnum):
    """How the parts of all replicas become one."""

    SUM = 0
    MEAN = 1
    MAX = 2
    MIN = 3
    PRODUCT = 4


class Kind(enum.IntEnum):
    """Which collective it is."""

    BARRIER = 1
    ALL_REDUCE = 2
    REDUCE = 3
    BROADCAST = 4
    ALL_GATHER = 5
    ALL_REDUCE_BY_GROUPS = 6
    CARRIED = 7
    # By somebody else, who knows what it is: here its name alone is compared.


def head(kind: Kind, fold: Fold, dtype: torch.dtype) -> int:
    """Return the part of a header that names neither root nor length."""
    return ((kind << 3 | fold) << 4 | _CODES[dtype]) << 48


SUM_HEADS = {dtype: tuple(head(Kind.ALL_REDUCE, fold, dtype) for fold in Fold) for dtype in DTYPES}
# Of all-reduces, by Fold: to put them together takes longer than to look them up.


def label(kind: Kind, what: Tensor | str | None) -> str:
    """Return a collective in words; `what`: its tensor, or of what another carries all there is to say."""
    if isinstance(what, str):
        return what
    return kind.name.lower() if kind is Kind.BARRIER or what is None else f"{kind.name.lower()} of {shown(what)}"


def for_purpose(purpose: str) -> str:
    """Return the words that say what a collective is for; empty where nobody has said."""
    return f" for {purpose}" if purpose else ""


def shown(tensor: Tensor) -> str:
    """Return dtype and shape in words: float32[2, 3]."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def words(header: int, what: Tensor | str | None = None) -> str:
    """A header as a user would say it; `what`: as in Exchange, where it is known."""
    kind = Kind(header >> 55)
    name = kind.name.lower()
    if isinstance(what, str):
        return what
    if kind is Kind.CARRIED:
        return "a collective through gloo"
    if kind is Kind.BARRIER:
        return name
    numel, root, dtype, fold = header & ((1 << 40) - 1), header >> 40 & 255, header >> 48 & 15, header >> 52 & 7
    if kind in (Kind.ALL_REDUCE, Kind.REDUCE, Kind.ALL_REDUCE_BY_GROUPS):
        name = f"{name} ({Fold(fold).name})"
    if kind in (Kind.REDUCE, Kind.BROADCAST):
        name = f"{name} {'to' if kind is Kind.REDUCE else 'from'} replica {root}"
    of = f"{numel} {str(DTYPES[dtype]).removeprefix('torch.')}" if what is None else shown(what)
    return f"{name} of {of}"
