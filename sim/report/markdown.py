"""Markdown that shows text letter by letter: labels are a user's own, and a page made of them is read in a browser."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

_MARKS = re.compile(r"([\\`*\[\]|])")


def escaped(text: str) -> str:
    """`text` on one line with nothing in it that Markdown or HTML would take for a mark."""
    return _MARKS.sub(r"\\\1", html.escape(" ".join(text.split()), quote=False))


def markdown_table(headings: Sequence[str], numeric: Sequence[bool], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table of `headings` and `rows` of cells; the columns flagged in `numeric` are set to the right."""
    rules = ["---:" if right else "---" for right in numeric]
    lines = [list(map(escaped, headings)), rules, *(list(map(escaped, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
