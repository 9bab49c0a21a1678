"""Checksums of tensors: equal values give equal ones, on every device and in every process.

Knows no networks: whoever compares says what belongs together.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from mirror_nb.tensors.layouts import as_row, blocks

_MODULUS = (1 << 61) - 1
# A prime: the remainder has every bit in it.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# By their bytes.
_ODD = -7046029254386353131, -4658895280553007687
# Numbers without a pattern.
_ROW = 4095
# Words that are weighed one by one. Odd: the signs of a whole row, turned, would not change an even one's sum.


def bits(values: Iterable[torch.Tensor]) -> int:
    """Return a checksum of the tensors' bits and their places; equal values give equal sums on every device."""
    return mixed(checksums(values))


def checksums(values: Iterable[torch.Tensor]) -> list[int]:
    """Return such a checksum of each tensor; a GPU is waited for once."""
    sums = [_sum(value.detach()) for value in values]
    if not sums:
        return []
    apart = len({each.device for each in sums}) > 1
    here = torch.stack([each.cpu() for each in sums] if apart else sums)
    return [each % _MODULUS for each in here.tolist()]


def _sum(value: torch.Tensor) -> torch.Tensor:
    parts = [_placed(_words(as_row(b))) for b in blocks(value)]
    if len(parts) == 1:
        return parts[0]
    # On the meta device there is a shape alone.
    return (
        torch.stack([part * (2 * i + 1) for i, part in enumerate(parts)]).sum()
        if parts
        else torch.tensor(0, device="cpu")
    )


def mixed(sums: Iterable[int]) -> int:
    """Return one checksum for several, in their order."""
    return functools.reduce(lambda total, each: (total * 1_000_003 + each) % _MODULUS, sums, 0)


def _words(flat: torch.Tensor) -> torch.Tensor:
    # Whole int64s where there are: summing 10 M values takes 8 ms then, and 60 ms where each must be widened.
    if flat.nbytes % 8:
        return flat.view(_INTEGERS[flat.element_size()])
    return (flat.clone() if flat.storage_offset() * flat.element_size() % 8 else flat).view(torch.int64)


def _placed(words: torch.Tensor) -> torch.Tensor:
    """Sum the words, each times a number that its place gives: values that change places change the sum."""
    if len(words) <= _ROW:
        words = words.long()
        # The sum has of the highest bits whether they are even alone, and these are the signs.
        return words.bitwise_xor(words >> 32).mul(_weights(words.device)[: len(words)]).sum()
    rows = len(words) // _ROW
    body, rest = words[: rows * _ROW].view(rows, _ROW), words[rows * _ROW :]
    # A word's place is its column and its row: sums over both read the words twice and copy nothing.
    columns, lines = body.sum(0, dtype=torch.int64), body.sum(1, dtype=torch.int64)
    return _placed(columns) + _ODD[0] * _placed(lines) + _ODD[1] * _placed(rest)


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return odd numbers without a pattern, the same in every process; products with them may wrap around."""
    mixed = (torch.arange(1, _ROW + 1, device="cpu") * _ODD[0]).bitwise_xor(torch.arange(_ROW, device="cpu") << 29)
    return (mixed * _ODD[1]).bitwise_or(1).to(device)
