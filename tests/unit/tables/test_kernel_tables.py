"""`python -m tools.kernel_tables errors`: its bounds, beside the table that it left in `results`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.kernel_tables import (
    HEAD,
    JUMPS,
    MEDIAN,
    NARROW_MEDIAN,
    NARROW_WORST,
    WORST,
    WORST_OF_JUMPS,
    Row,
    narrow,
)

SHIPPED = Path(__file__).parents[3] / "results" / "reference" / "tables" / "errors.md"


def _row(line: str) -> Row:
    cells = [cell.strip() for cell in line.strip("| \n").split(" | ")]
    if cells[4].startswith("not timed: "):
        return Row(tuple(cells[:4]), reason=cells[4].removeprefix("not timed: ").rstrip(" |"))
    pairs = [[float(text) / 100 for text in cell.split(" / ")] for cell in cells[4:]]
    return Row(tuple(cells[:4]), tuple((median, worst) for median, worst in pairs))


def test_the_shipped_table_is_within_the_bounds() -> None:
    """Of each of its rows, which are written as the tool writes them."""
    text = SHIPPED.read_text(encoding="utf-8")
    *lines, blank, last = text[text.index(HEAD) + len(HEAD) + 1 :].splitlines()
    rows = [_row(line) for line in lines]
    assert len(rows) == 64 and [row.line() for row in rows] == lines
    assert [row.words for row in rows if not row.is_within] == []
    assert (blank, last) == ("", narrow(rows))
    assert "13 models of 8 families" in last


def test_a_model_is_narrow_where_all_of_its_rows_are() -> None:
    """A row beyond either bound, or without errors, leaves its model out."""
    good = ((NARROW_MEDIAN, NARROW_WORST),)
    rows = [
        Row((name, "layers", "h200 × 1", "vllm 1"), good) for name in ("gpt-oss-1", "MiMo-V2", "gpt-oss-2", "GLM-5")
    ]
    rows += [
        Row(("GLM-5",), ((NARROW_MEDIAN, 1.01 * NARROW_WORST),)),
        Row(("MiMo-V2",), ((1.01 * NARROW_MEDIAN, NARROW_WORST),)),
        Row(("Kimi-K3",), reason="no experts"),
    ]
    assert narrow(rows).endswith("wherever they run here are 2 models of 1 families: gpt-oss-1, gpt-oss-2.")


@pytest.mark.parametrize(("family", "worst"), [("Mamba2", WORST), (JUMPS, WORST_OF_JUMPS)])
def test_an_error_above_a_bound_is_beyond(family: str, worst: float) -> None:
    """The median or the largest of all steps together; those of one kind may be more."""
    words = ("model", family, "h200 × 1", "vllm 1")
    assert Row(words, ((MEDIAN, worst),)).is_within
    assert not Row(words, ((MEDIAN, worst * 1.01),)).is_within
    assert not Row(words, ((MEDIAN * 1.01, worst),)).is_within
    assert Row(words, ((1.0, 1.0), (MEDIAN, worst))).is_within
