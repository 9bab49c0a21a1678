"""Handles: names of objects that they do not keep alive."""

from __future__ import annotations

import gc

from mirror_nb.mirroring.handles import Handles


class Thing:
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


def test_equal_objects_have_handles_of_their_own_and_are_found_in_order():
    handles: Handles[Thing] = Handles(lambda handle: None)
    one, two, three = Thing(), Thing(), Thing()
    handles.learn("b", one)
    handles.learn("a", two)
    assert (handles.of(one), handles.of(two), handles.of(three)) == ("b", "a", None)
    assert handles.find("b") is one
    assert handles.find("c") is None
    assert list(handles.all()) == ["b", "a"]
    assert handles.all()["a"] is two


def test_a_handle_that_is_taken_back_means_nothing_and_its_object_goes_untold():
    gone: list[str] = []
    handles: Handles[Thing] = Handles(gone.append)
    thing, other = Thing(), Thing()
    handles.learn("a", thing)
    handles.learn("b", other)
    handles.unlearn("a")
    handles.unlearn("never")
    assert (handles.find("a"), handles.of(thing), handles.all()) == (None, None, {"b": other})
    del thing
    gc.collect()
    assert gone == []


def test_an_object_that_goes_is_told_of_once_and_its_handle_means_nothing():
    told: list[str] = []
    handles: Handles[Thing] = Handles(told.append)
    thing = Thing()
    handles.learn("a", thing)
    del thing
    gc.collect()
    assert told == ["a"]
    assert handles.find("a") is None
    assert handles.all() == {}


def test_a_handle_that_means_another_object_by_now_stays_when_the_first_goes():
    told: list[str] = []
    handles: Handles[Thing] = Handles(told.append)
    first, second = Thing(), Thing()
    handles.learn("a", first)
    handles.learn("a", second)
    del first
    gc.collect()
    assert told == []
    assert handles.find("a") is second


def test_what_has_no_weak_references_is_held():
    gone: list[str] = []
    handles: Handles[object] = Handles(gone.append)
    thing = object()
    handles.learn("a", thing)
    assert handles.of(thing) == "a"
    del thing
    assert type(handles.find("a")) is object
    assert list(handles.all()) == ["a"]
    handles.unlearn("a")
    assert handles.find("a") is None
    assert gone == []
