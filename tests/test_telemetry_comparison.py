"""Comparisons of replicas' parameters by their checksums: who differs, what is compared, what is told again."""

from __future__ import annotations

from mirror_nb.telemetry.comparison import Parted, compared


def test_what_all_replicas_synchronise_is_compared_and_what_one_of_them_lacks_differs():
    found = compared([({"w": 1, "b": 2}, {}), ({"w": 1}, {}), ({"w": 3, "b": 2}, {})])
    assert not found
    assert dict(found.differing) == {"w": (2,), "b": (1,)}
    assert repr(found) == "2 of 2 parameters differ: w on r2, b on r1"


def test_what_is_not_synchronised_is_compared_where_all_replicas_hold_it():
    found = compared([({"w": 1}, {"head": 5, "own": 6}), ({"w": 1}, {"head": 7})])
    assert (found.parameters, dict(found.differing)) == (2, {"head": (1,)})


def test_of_what_one_replica_synchronises_and_another_merely_holds_both_values_count():
    assert compared([({"w": 1}, {"w": 9}), ({"w": 1}, {"w": 8})])
    assert compared([({"w": 1}, {}), ({}, {"w": 1})]).parameters == 1


def test_where_a_replica_has_synchronised_nothing_yet_what_it_lacks_is_not_compared():
    found = compared([({"w": 1, "b": 2}, {}), ({}, {"w": 1})])
    assert found
    assert found.parameters == 1


def test_what_differs_is_told_once_and_again_when_it_was_equal_in_between():
    parted = Parted()
    apart, equal, others = [{"w": 1}, {"w": 2}], [{"w": 1}, {"w": 1}], [{"b": 1}, {"b": 1}]
    assert parted.note(apart) == ["w"]
    assert [parted.note(sums) for sums in (apart, others, apart, equal)] == [[]] * 4
    assert parted.note(apart) == ["w"]
