"""Which parameters of the replicas are taken for the same one."""

from __future__ import annotations

import pytest

from mirror_nb.errors import UsageError
from mirror_nb.gradients.matching import Offer, match


def offer(*used: tuple[str, int], left: tuple[tuple[str, int], ...] = (), **registered: int) -> Offer:
    unknown = tuple((name, ordinal, (2,), "f") for name, ordinal in (*used, *left))
    return Offer(unknown, registered, frozenset(), frozenset(left))


def test_parameters_match_by_their_order_of_creation() -> None:
    offers = [offer(("a", 1), a=2, b=1), offer(("b", 0), ("a", 1), a=2, b=1)]
    assert match(offers) == [(("a", 1), ("a", 1)), (("b", 0), ("b", 0))]


def test_a_replica_that_made_more_is_matched_by_what_is_used() -> None:
    assert match([offer(("a", 1), a=2), offer(("a", 0), a=1)]) == [(("a", 1), ("a", 0))]


def test_what_was_used_in_different_orders_is_matched_by_the_order_of_creation() -> None:
    offers = [offer(("a", 2), ("a", 1), a=3), offer(("a", 0), ("a", 1), a=2)]
    assert match(offers) == [(("a", 1), ("a", 0)), (("a", 2), ("a", 1))]


def test_each_name_is_matched_by_itself() -> None:
    offers = [offer(("a", 1), ("b", 2), a=2, b=3), offer(("b", 0), ("a", 0), a=1, b=1)]
    assert match(offers) == [(("a", 1), ("a", 0)), (("b", 2), ("b", 0))]


def test_a_replica_that_made_more_is_matched_by_values_whatever_each_one_uses() -> None:
    shared, own = {7: [1], 8: [2]}, {7: [0], 8: [1]}
    values = [{("a", (2,), "f"): {5: [0], **shared}}, {("a", (2,), "f"): own}]
    assert match([offer(("a", 1), a=3), offer(("a", 1), a=2)], values) == [
        (("a", 1), ("a", 0)),
        (("a", 2), ("a", 1)),
    ]


def test_equal_values_are_told_apart_by_their_order() -> None:
    values = [{("a", (2,), "f"): {7: [1, 2]}}, {("a", (2,), "f"): {7: [0, 1]}}]
    assert match([offer(("a", 2), a=3), offer(("a", 1), a=2)], values) == [(("a", 2), ("a", 1))]


def test_of_equal_values_those_in_use_are_alike_whatever_was_made_first() -> None:
    # A network and its copy, which a new process got in the other order.
    values = [{("a", (2,), "f"): {7: [0, 1, 2]}}, {("a", (2,), "f"): {7: [0, 1, 2]}}]
    offers = [offer(("a", 2), ("a", 0), a=3), offer(("a", 1), ("a", 2), a=4)]
    assert match(offers, values) == [(("a", 2), ("a", 1)), (("a", 0), ("a", 2))]
    # Here it is not clear: one uses fewer.
    offers = [offer(("a", 2), a=3), offer(a=4)]
    assert match(offers, values) == [(("a", 2), ("a", 2))]


def test_of_equal_values_those_in_use_are_alike_where_one_replica_has_more_of_them() -> None:
    values = [{("a", (2,), "f"): {7: [0, 1], 8: [2]}}, {("a", (2,), "f"): {7: [1], 8: [0]}}]
    assert match([offer(("a", 1), a=3), offer(("a", 1), a=3)], together=values, doubted={"a"}) == [
        (("a", 1), ("a", 1))
    ]
    assert match([offer(("a", 1), a=3), offer(("a", 1), a=2)], values) == [(("a", 1), ("a", 1))]
    # Who does not use it has no other.
    assert match([offer(("a", 1), ("a", 2), a=3), offer(("a", 0), a=2)], values) == [
        (("a", 1), ("a", 1)),
        (("a", 2), ("a", 0)),
    ]
    # In whichever order it used them.
    alike = [{("a", (2,), "f"): {7: [0, 1, 2]}}, {("a", (2,), "f"): {7: [0, 1]}}]
    assert match([offer(("a", 2), ("a", 1), a=3), offer(("a", 0), a=2)], alike) == [
        (("a", 1), ("a", 0)),
        (("a", 2), ("a", 1)),
    ]
    # Here it may be either.
    with pytest.raises(UsageError, match="3 on replica 0, 2 on replica 1"):
        match([offer(("a", 2), a=3), offer(("a", 0), ("a", 1), a=2)], values)


def test_what_is_alike_by_itself_is_known_by_its_module() -> None:
    values = [{("a", (2,), "f"): {0: [1, 2]}}, {("a", (2,), "f"): {0: [0, 1]}}]
    together = [{("a", (2,), "f"): {7: [1], 8: [2]}}, {("a", (2,), "f"): {7: [0], 8: [1]}}]
    offers = [offer(("a", 1), a=3), offer(("a", 1), a=2)]
    assert match(offers, values, together) == [(("a", 1), ("a", 0)), (("a", 2), ("a", 1))]
    # What has become of others in it is another matter.
    unlike = [{("a", (2,), "f"): {7: [1], 8: [2]}}, {("a", (2,), "f"): {9: [0], 5: [1]}}]
    assert match(offers, values, unlike) == [(("a", 1), ("a", 1))]


def test_values_that_one_replica_lacks_are_matched_in_order_of_use() -> None:
    values = [{("a", (2,), "f"): {7: [1], 8: [2]}}, {("a", (2,), "f"): {7: [0], 9: [1]}}]
    offers = [offer(("a", 1), ("a", 2), a=3), offer(("a", 0), ("a", 1), a=2)]
    assert match(offers, values) == [(("a", 1), ("a", 0)), (("a", 2), ("a", 1))]


def test_a_module_that_only_one_replica_made_is_not_taken_for_the_one_with_its_values() -> None:
    # Both drew the same numbers, one of them for a module of its own.
    values = [{("a", (2,), "f"): {7: [0], 8: [1]}}, {("a", (2,), "f"): {7: [0]}}]
    assert match([offer(("a", 1), a=2), offer(("a", 0), a=1)], values) == [(("a", 1), ("a", 0))]


def test_different_numbers_of_used_parameters_are_an_error() -> None:
    with pytest.raises(UsageError, match="2 on replica 0, 1 on replica 1"):
        match([offer(("a", 0), ("a", 1), a=2), offer(("a", 0), a=1)])


def test_what_is_left_of_no_sync_is_nobody_elses_where_another_replica_lacks_it() -> None:
    own, shared = {("a", (2,), "f"): {7: [0], 8: [1]}}, {("a", (2,), "f"): {7: [0]}}
    assert match([offer(("a", 0), left=(("a", 1),), a=2), offer(("a", 0), a=1)]) == [(("a", 0), ("a", 0))]
    assert match([offer(left=(("a", 1),), a=2), offer(a=1)], [own, shared]) == []
    # Where all have it it is theirs.
    assert match([offer(left=(("a", 2),), a=3), offer(left=(("a", 0),), a=1)]) == [(("a", 2), ("a", 0))]
    with pytest.raises(UsageError, match="2 on replica 0, 1 on replica 1"):
        match([offer(("a", 0), ("a", 1), left=(("a", 2),), a=2), offer(("a", 0), a=1)])


def test_doubted_names_go_by_values_where_these_tell() -> None:
    offers = [offer(("a", 1), a=3), offer(("a", 2), a=3)]
    values = [{("a", (2,), "f"): {7: [1], 8: [2]}}, {("a", (2,), "f"): {7: [2], 8: [1]}}]
    assert match(offers, together=values, doubted={"a"}) == [(("a", 1), ("a", 2))]
    unlike = [{("a", (2,), "f"): {7: [1], 8: [2]}}, {("a", (2,), "f"): {9: [1], 5: [2]}}]
    assert match(offers, together=unlike, doubted={"a"}) == [(("a", 1), ("a", 1)), (("a", 2), ("a", 2))]
