"""Which models the kernel tables can time, as they could when `tests/data/tables/timed.csv` was made of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchsim.tables.versions import version
from tests.unit.tables.timed import MODELS, lines

KEPT = [
    line.split("\t") for line in (Path(__file__).parents[2] / "data" / "tables" / "timed.csv").read_text().splitlines()
]
MADE_OF = "0.12.0"


def test_most_models_can_be_timed_and_the_others_say_why() -> None:
    """Two thirds or more; a reason is a clause of words, without the tables' own names for keys."""
    timed = [row for row in KEPT if len(row) == 8]
    reasons = [row[5] for row in KEPT if len(row) == 6]
    assert len(KEPT) == 4 * len(MODELS) == len(timed) + len(reasons)
    assert len(timed) > len(KEPT) * 2 / 3
    assert all("timed" in reason or "arithmetic" in reason for reason in reasons)
    assert not any(char in reason for reason in reasons for char in "{}'\"")


def test_no_step_3_7_is_timed_anywhere() -> None:
    """No experts of that shape were timed on any GPU."""
    assert {len(row) for row in KEPT if "Step-3.7" in row[0]} == {6}


@pytest.mark.slow
@pytest.mark.skipif(version() != MADE_OF, reason=f"aiconfigurator-core {MADE_OF} is not installed")
def test_the_installed_tables_answer_as_they_did() -> None:
    assert [line.split("\t") for line in lines()] == KEPT
