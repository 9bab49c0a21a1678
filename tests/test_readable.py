from __future__ import annotations

import pytest

from mirror_nb import readable


@pytest.mark.parametrize(
    ("value", "shown"), [(0.1234, "0.123"), (12.34, "12.3"), (123.4, "123"), (12345.6, "12346"), (-1200.0, "-1200")]
)
def test_a_number_has_three_digits_that_count(value, shown):
    assert readable.number(value) == shown


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1023.4 * 1024, "1023 KiB"),
        (1023.6 * 1024, "1 MiB"),
        (25 * 2**20, "25 MiB"),
        (3 * 2**30, "3 GiB"),
        (5 * 2**40, "5120 GiB"),
    ],
)
def test_a_size_goes_in_steps_of_1024(nbytes, shown):
    assert readable.size(nbytes) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.000212, "0.21 ms"), (0.083, "83.0 ms"), (0.4, "400 ms"), (1.25, "1.2 s")]
)
def test_a_time_that_is_compared_is_in_milliseconds_below_a_second(seconds, shown):
    assert readable.milliseconds(seconds) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0123, "12 ms"),
        (0.9996, "1.0 s"),
        (3.42, "3.4 s"),
        (35.2, "35 s"),
        (59.6, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3600, "1 h 00 min"),
        (12000, "3 h 20 min"),
    ],
)
def test_a_duration_has_units(seconds, shown):
    assert readable.duration(seconds) == shown


@pytest.mark.parametrize(("things", "shown"), [([0], "0"), ([0, 1], "0 and 1"), (["a", "b", "c"], "a, b and c")])
def test_a_list_ends_with_and(things, shown):
    assert readable.listed(things) == shown


def test_the_columns_of_a_table_stand_below_each_other():
    rows = [("replica", "device", "at"), ("0", "cpu:0", "line 12"), ("10", "cpu:10", "")]
    assert readable.aligned(rows) == [
        "replica  device  at",
        "0        cpu:0   line 12",
        "10       cpu:10",
    ]
