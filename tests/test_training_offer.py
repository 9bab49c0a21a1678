"""What replicas fetch from the controller instead of being sent it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
import torch

from mirror_nb.training import offer
from mirror_nb.training.array_feed import ArrayFeed
from mirror_nb.training.offer import Offer

X = torch.arange(40_000 * 4, dtype=torch.float32).reshape(-1, 4).sin()
Y = (X.sum(1) > 0).long()
BATCH = 8000


@pytest.fixture
def offered() -> Iterator[Offer]:
    made = Offer({"images": X, "views": (X[::2, 1:], Y.expand(2, -1)), "none": None})
    yield made
    made.withdraw()


def test_it_unpickles_to_a_copy_and_little_travels(offered):
    text = pickle.dumps(offered)
    assert len(text) < 2000
    found = pickle.loads(text)
    torch.testing.assert_close(found["images"], X)
    torch.testing.assert_close(found["views"][0], X[::2, 1:])
    torch.testing.assert_close(found["views"][1], Y.expand(2, -1))
    found["images"].zero_()
    torch.testing.assert_close(pickle.loads(text)["images"], X)


def test_whoever_has_fetched_it_keeps_it_and_nobody_else_gets_it():
    made = Offer(X)
    text, path = pickle.dumps(made), made.path
    assert path is not None
    assert offer.reaches(path)
    found = pickle.loads(text)
    made.withdraw()
    torch.testing.assert_close(found, X)
    assert not offer.reaches(path)
    with pytest.raises(FileNotFoundError):
        pickle.loads(text)


def test_few_numbers_are_not_worth_it():
    assert Offer(X[:10].clone()).path is None
    feed = ArrayFeed((X[:10].clone(), Y[:10].clone(), None), batch_size=2, shuffle=False, seed=0)
    assert feed.offer() is None
    assert len(pickle.dumps(feed)) > X[:10].nbytes


def test_a_feed_travels_without_its_arrays_while_they_are_offered():
    feed = ArrayFeed((X, Y, None), batch_size=BATCH, shuffle=False, seed=0)
    path = feed.offer()
    assert path == feed.offer() is not None
    text = pickle.dumps(feed)
    shares = list(pickle.loads(text).shares(0, 2, torch.device("cpu"), epoch=0))
    feed.withdraw()
    assert len(text) < 2000
    first_halves = X.view(-1, 2, BATCH // 2, 4)[:, 0].flatten(0, 1)
    torch.testing.assert_close(torch.cat([share.inputs for share in shares]), first_halves)
    assert len(pickle.dumps(feed)) > X.nbytes
