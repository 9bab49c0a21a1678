"""What a replica wrote into the ledger is read as it was, as long as it is of the step that is asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mirror_nb.training.ledger import ENTRY_BYTES, Landmark, Ledger, Page
from mirror_nb.training.loop import Totals
from mirror_nb.values import same


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    made = Ledger(2, 0)
    yield made
    made.close()


def page(ledger: Ledger, replica_id: int = 1) -> Page:
    assert ledger.address is not None
    return Page(ledger.address, replica_id, 2)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.tensor(1 / 3, dtype=torch.float64),
        torch.tensor(2**62 + 1),
        torch.tensor(True),
        torch.tensor(float("nan")),
        torch.tensor(7, dtype=torch.int16),
        torch.tensor(0.5, dtype=torch.bfloat16),
        torch.arange(6.0).reshape(2, 3),
        torch.ones(3, dtype=torch.bfloat16),
        torch.full((2, 2), 0.5, dtype=torch.float8_e4m3fn).T,
        torch.eye(3).to_sparse(),
        torch.empty(0),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}",
)
def test_totals_and_buffers_are_read_as_they_were_written(ledger, tensor):
    totals = Totals(0.1, 64, {"a": 1.0}, {"b": (2.0, 3)}, ({"total": tensor}, {}))
    landmark = Landmark("run", 7, 1, 3)
    assert page(ledger).write(landmark, totals, {2: tensor})
    read = ledger.read(1, landmark)
    assert read is not None
    found, buffers = read
    assert found.plain().keys() == totals.plain().keys()
    assert (found.loss, found.examples, found.parts, found.named) == (0.1, 64, {"a": 1.0}, {"b": (2.0, 3)})
    for copy in (found.metrics[0]["total"], buffers[2]):
        assert copy.dtype is tensor.dtype
        wide = torch.float32 if tensor.dtype.itemsize == 1 else tensor.dtype
        torch.testing.assert_close(copy.to(wide), tensor.to(wide), rtol=0, atol=0, equal_nan=True)
    assert same(found.metrics[1], {})


def test_the_latest_two_steps_are_kept_and_others_are_not_told_for_them(ledger):
    mine = page(ledger)
    for updates in (1, 2, 3):
        mine.write(Landmark("run", updates, 0, updates), Totals(loss=float(updates)), {})
    assert [ledger.read(1, Landmark("run", updates, 0, updates)) is not None for updates in (1, 2, 3)] == [
        False,
        True,
        True,
    ]
    assert ledger.read(1, Landmark("another", 3, 0, 3)) is None
    assert ledger.read(0, Landmark("run", 3, 0, 3)) is None


def test_what_is_too_large_is_refused_and_leaves_what_was_there(ledger):
    mine = page(ledger)
    kept = Landmark("run", 1, 0, 1)
    mine.write(kept, Totals(loss=1.0), {})
    assert not mine.write(Landmark("run", 3, 0, 3), Totals(), {0: torch.zeros(2 * ENTRY_BYTES)})
    read = ledger.read(1, kept)
    assert read is not None
    assert read[0].loss == 1.0
