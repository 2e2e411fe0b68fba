"""Markdown that others read in a browser: what a user named is text in it, never a mark."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchsim.report.markdown import escaped, markdown_table
from batchsim.report.sheet import Cell, Section, Sheet, Table
from batchsim.report.text import validation_text
from tests.support.validation_samples import point, validation

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("best_of 4", "best_of 4"),
        (HOSTILE, "&lt;img src=x onerror=alert(1)&gt;"),
        ("a & b", "a &amp; b"),
        ("[x](javascript:y)", r"\[x\](javascript:y)"),
        ("a | b", r"a \| b"),
        ("`*a*` \\", r"\`\*a\*\` \\"),
        ("two\nlines", "two lines"),
    ],
)
def test_a_label_is_shown_letter_by_letter(label: str, shown: str) -> None:
    """HTML, links, columns, code, emphasis and lines of a label's own do nothing; a word with _ is left as it is."""
    assert escaped(label) == shown
    assert markdown_table([label], [False], [[label]]).splitlines()[2] == f"| {shown} |"


def test_a_plan_and_a_validation_hold_no_html_from_names() -> None:
    """Neither in titles, sentences and captions nor in cells."""
    cell = Cell("configurations", 0, "policy", HOSTILE)
    view = Table("configurations", (HOSTILE,), ((cell,),))
    section = Section(HOSTILE, [[HOSTILE, cell]], [("one", HOSTILE)], [view])
    found = replace(validation(point()), name=HOSTILE, heading=HOSTILE)
    for page in (Sheet(HOSTILE, HOSTILE, [section], []).markdown(), validation_text.markdown(found, [])):
        assert "<" not in page and "&lt;img" in page
