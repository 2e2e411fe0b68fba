"""Quantities with units are read exactly or refused in one line that says what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from batchsim.base.units import (
    Duration,
    Quantity,
    clock_text,
    counted,
    format_duration,
    parse_bandwidth,
    parse_bytes,
    parse_duration_ns,
    parse_rate_rps,
    parse_share,
    two_digits,
)

GOOD = [
    (parse_duration_ns, "50ms", 50_000_000),
    (parse_duration_ns, "1.5 us", 1_500),
    (parse_duration_ns, " 10min ", 600_000_000_000),
    (parse_duration_ns, "0s", 0),
    (parse_duration_ns, "2e-3s", 2_000_000),
    (parse_duration_ns, ".5h", 1_800_000_000_000),
    (parse_duration_ns, "0.1s", 100_000_000),
    (parse_rate_rps, "8/s", 8.0),
    (parse_rate_rps, "90/min", 1.5),
    (parse_rate_rps, "1800/h", 0.5),
    (parse_bytes, "32GB", 32_000_000_000),
    (parse_bytes, "1 GiB", 1 << 30),
    (parse_bytes, "7B", 7),
    (parse_bandwidth, "55GB/s", 55e9),
    (parse_share, "99%", 0.99),
    (parse_share, "0%", 0.0),
    (parse_share, "100 %", 1.0),
    (parse_share, "0.99", 0.99),
    (parse_share, 0.85, 0.85),
    (parse_share, 0, 0.0),
]
BAD = [
    (parse_duration_ns, 50, "with a unit, like 50ms"),
    (parse_duration_ns, 0.5, "with a unit"),
    (parse_duration_ns, True, "with a unit"),
    (parse_duration_ns, None, "with a unit"),
    (parse_duration_ns, "50", "no known unit of a time. Write one of ns, us, ms, s, min, h"),
    (parse_duration_ns, "50 parsec", "no known unit"),
    (parse_duration_ns, "50ms/s", "no known unit"),
    (parse_duration_ns, "50MS", "no known unit"),
    (parse_duration_ns, "-1s", "negative"),
    (parse_duration_ns, "nan s", "with a unit"),
    (parse_duration_ns, "inf s", "with a unit"),
    (parse_duration_ns, "1e400s", "with a unit"),
    (parse_duration_ns, "٣s", "with a unit"),
    (parse_duration_ns, "1_000ms", "with a unit"),
    (parse_duration_ns, "", "with a unit"),
    (parse_rate_rps, "8", "no known unit of a rate"),
    (parse_rate_rps, "8rps", "no known unit of a rate"),
    (parse_rate_rps, "0/s", "not above 0"),
    (parse_rate_rps, "-2/s", "not above 0"),
    (parse_bytes, "32gb", "no known unit of a size"),
    (parse_bytes, "-1GB", "negative"),
    (parse_bandwidth, "55GB", "no known unit of a bandwidth. Write one of B/s"),
    (parse_bandwidth, "0GB/s", "not above 0"),
    (parse_share, 1, "1 is not a share. Without a unit it is a fraction, below 1. Write 1%, or 100%, whichever is"),
    (parse_share, "1.0", "'1.0' is not a share. Without a unit it is a fraction, below 1. Write 1%, or 100%"),
    (parse_share, 85, "85 is not a share. Without a unit it is a fraction, below 1. Write 85%, or 0.85."),
    (parse_share, -0.5, "Write a percentage"),
    (parse_share, True, "True is not a share"),
    (parse_share, "101%", "Write a percentage"),
    (parse_share, "-1%", "Write a percentage"),
]


@pytest.mark.parametrize(("parse", "text", "value"), GOOD)
def test_a_quantity_is_read_exactly(parse: Callable[[object], float], text: str, value: float) -> None:
    """Each unit scales to ns, requests per second, bytes or a fraction."""
    assert parse(text) == value


@pytest.mark.parametrize(("parse", "text", "complaint"), BAD)
def test_what_is_no_quantity_is_refused(parse: Callable[[object], float], text: object, complaint: str) -> None:
    """A bare number, an unknown unit or an impossible value draws one line with the offending text."""
    with pytest.raises(ValueError, match=complaint) as error:
        parse(text)
    assert repr(text) in str(error.value)
    assert "\n" not in str(error.value)


@given(st.integers(0, 10**15))
def test_whole_nanoseconds_survive(ns: int) -> None:
    """A time written in ns comes back as the same integer."""
    assert parse_duration_ns(f"{ns}ns") == ns


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (850_000, "850 us"),
        (48_100_000, "48.1 ms"),
        (1_234_567_890, "1.23 s"),
        (2_000_000_000_000, "2,000 s"),
        (-48_100_000, "-48.1 ms"),
    ],
)
def test_a_time_is_written_for_people(ns: int, text: str) -> None:
    """Three significant digits in the unit that suits."""
    assert format_duration(ns) == text


DURATIONS = [
    (0, "0s"),
    (1, "1ns"),
    (1_500, "1.5us"),
    (50_000_000, "50ms"),
    (12_500_000_000, "12.5s"),
    (600_000_000_000, "10min"),
    (630_000_000_000, "630s"),
    (5_400_000_000_000, "90min"),
    (86_400_000_000_000, "24h"),
    (1_000_000_001, "1000000001ns"),
]


@pytest.mark.parametrize(("ns", "text"), DURATIONS)
def test_a_time_is_written_in_the_largest_unit_in_which_it_is_short(ns: int, text: str) -> None:
    """Whole minutes and hours as these, others in s, ms or us to six digits, and digit by digit beyond."""
    assert TypeAdapter(Duration).dump_python(ns, mode="json") == text and parse_duration_ns(text) == ns


@given(st.integers(0, 2**53))
def test_a_written_time_is_read_as_the_same(ns: int) -> None:
    """To the ns, for months."""
    assert parse_duration_ns(TypeAdapter(Duration).dump_python(ns, mode="json")) == ns


def test_a_validator_gets_parser_writer_and_schema() -> None:
    """A marked field is read and written by its functions, from Python as a number too, and is a string in the
    exported schema; a number in JSON lacks its unit."""
    quantity = TypeAdapter(Annotated[int, Quantity(parse_duration_ns, "50ms", lambda ns: f"{ns}ns")])
    assert quantity.validate_json('"2us"') == quantity.validate_python("2us") == 2_000
    assert quantity.validate_python(2_000) == 2_000
    with pytest.raises(ValidationError, match=r"2000 is not a time\. Write a number with a unit, like 50ms\."):
        quantity.validate_json("2000")
    assert quantity.dump_json(2_000) == b'"2000ns"' and quantity.dump_python(2_000) == 2_000
    assert quantity.json_schema() == {"type": "string", "examples": ["50ms"]}


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00:00"), (59.999, "0:00:59"), (49_327, "13:42:07"), (90_000, "25:00:00")]
)
def test_a_clock_shows_what_has_passed(seconds: float, text: str) -> None:
    assert clock_text(int(seconds * 10**9)) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0.01234, "0.012"), (7.5, "7.5"), (99.6, "100"), (100, "100"), (698.2, "700"), (0, "0")]
)
def test_two_digits_have_no_exponent_from_100_on(number: float, text: str) -> None:
    assert two_digits(number) == text


def test_one_thing_is_named_in_the_singular() -> None:
    """None are several, and a plural may be said."""
    assert [counted(number, "step") for number in (0, 1, 2, 1200)] == ["0 steps", "1 step", "2 steps", "1,200 steps"]
    assert [counted(number, "batch", "batches") for number in (1, 2)] == ["1 batch", "2 batches"]
