"""What a check says, and when: of its smallest failing case, of a deviation that is declared."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import strategies as st

from batchsim.base.errors import ScenarioError
from batchsim.testing.check import Cases, Check, NotAsDeclared, named


def below(limit: int) -> Check:
    def holds(number: int) -> None:
        assert number < limit, f"{number} is too large"

    return Check("below", Cases(st.integers(0, 99), 30).all(holds))


def test_a_check_fails_with_the_smallest_of_its_cases_in_a_note() -> None:
    """Two-digit numbers, of which all fail, are drawn again in every run: their smallest is the shortest, then the
    first drawn."""
    below(100)()
    with pytest.raises(AssertionError, match=r"^\d is too large") as raised:
        below(0)()
    (note,) = raised.value.__notes__
    assert "30 of 30 cases; the smallest: " in note


def test_what_an_extension_raises_itself_fails_the_check() -> None:
    def crashes(number: int) -> None:
        raise ZeroDivisionError("of mine")

    with pytest.raises(ZeroDivisionError, match="of mine"):
        Check("crashes", Cases(st.integers(), 3).all(crashes))()


class Waits:
    """A thing with a deviation."""

    deviations: ClassVar[dict[str, str]] = {"no_idling": "waits for more"}


def test_a_declared_deviation_is_no_failure_and_must_be_seen() -> None:
    """A declaration that outlives the deviation is an error, as one of a check that is not there."""
    (deviating,) = named(Waits, {"no_idling": below(0).hold})
    assert (deviating.name, deviating.deviation) == ("no_idling", "waits for more")
    deviating()
    (declared,) = named(Waits, {"no_idling": below(100).hold})
    with pytest.raises(NotAsDeclared, match=r"^no_idling: declared \(waits for more\), and no case shows it\."):
        declared()
    Check("no_idling", below(100).hold, "waits for more", cases=19)()  # too few to say that none shows it
    with pytest.raises(ScenarioError, match=r"^Waits\.deviations: no check is called no_idling\.$"):
        named(Waits, {"other": below(100).hold})


def test_a_deviation_is_no_leave_to_crash() -> None:
    """What is declared is that a property does not hold, not that the thing fails at all."""

    def crashes() -> None:
        raise ZeroDivisionError("of mine")

    with pytest.raises(ZeroDivisionError):
        Check("no_idling", crashes, "waits for more")()


def test_the_name_of_a_check_is_its_id_in_pytest() -> None:
    assert below(1).__name__ == "below"


def test_knobs_of_which_none_is_a_config_are_an_error_in_one_line() -> None:
    with pytest.raises(ScenarioError, match=r"^Mine: random knobs hardly ever make a config\. Fix those") as raised:
        Cases(st.integers().filter(lambda number: False), 3, "Mine").all(print)()
    assert "\n" not in str(raised.value)
