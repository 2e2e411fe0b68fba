"""Lines of plain text that fit the output's width: long ones are broken between words, cells aligned, none is cut."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

WIDTH = 100
"""Columns of a line in a file or a pipe."""
MIN_WIDTH = 40
_MIN_TEXT = 10  # letters to which a column of words is narrowed at most

Grid = list[list[str]]


def width() -> int:
    """Columns of an output line: WIDTH, or on a terminal the terminal's (COLUMNS, where set), at least MIN_WIDTH."""
    return max(shutil.get_terminal_size((WIDTH, 24)).columns, MIN_WIDTH) if sys.stdout.isatty() else WIDTH


def fit(line: str) -> str:
    """`line` over as many lines as it needs, broken between its ` · ` parts where it has some, else between words."""
    if len(line) <= width():
        return line
    lines = wrapped(line, width()).split("\n") if " · " in line else [line]
    return "\n".join(part for each in lines for part in (filled(each, "  ") if len(each) > width() else [each]))


def wrapped(text: str, letters: int) -> str:
    """`text` broken at its ` · ` separators into lines of at most `letters`, where the parts allow."""
    done: list[str] = []
    for part in text.split(" · "):
        if done and len(done[-1]) + 3 + len(part) <= letters:
            done[-1] += f" · {part}"
        else:
            done.append(part)
    return "\n".join(done)


def filled(text: str, indent: str, first: str = "") -> list[str]:
    """`text` as lines that begin with `indent`, the first one with `first`, broken between words alone."""
    return textwrap.wrap(
        text, width(), initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def aligned(grid: Grid, *, left: Sequence[int] = (0, -1), spare: Sequence[str] = (), close: bool = False) -> list[str]:
    """The rows of `grid`, its first the headings, as lines: columns `left` set to the left, the others to the right.

    A table too wide for the output first loses its columns headed `spare`, one by one; then, if `close`, the gap
    between columns is 1 letter; then the left-set columns wrap, the widest first; at last the table is split into parts
    one below another, each beginning with the first column.
    """
    most, columns = width(), len(grid[0])
    words = [column % columns for column in left]
    shown = list(range(columns))
    widths, gap = [max(map(len, column)) for column in zip(*grid, strict=True)], 2
    for head in spare:
        if _total([widths[column] for column in shown], gap) > most:
            shown.remove(grid[0].index(head))
    if close and _total([widths[column] for column in shown], gap) > most:
        gap = 1
    for column in sorted(words, key=lambda column: -widths[column]):
        excess = _total([widths[each] for each in shown], gap) - most
        least = max([_MIN_TEXT, *(len(word) for cells in grid for word in cells[column].split())])
        widths[column] = min(widths[column], max(least, widths[column] - excess))
    lines: list[str] = []
    for part in _parts(shown, widths, most, gap):
        for cells in grid:
            lines += _row([cells[i] for i in part], [widths[i] for i in part], [i in words for i in part], gap)
    return lines


def _parts(shown: list[int], widths: list[int], most: int, gap: int) -> list[list[int]]:
    """The column numbers of each part that a table is split into to fit `most` letters; one part if all columns fit."""
    first, *others = shown
    parts = [[first]]
    for column in others:
        part = parts[-1]
        if len(part) > 1 and _total([widths[each] for each in (*part, column)], gap) > most:
            parts.append([first, column])
        else:
            part.append(column)
    return parts


def _row(cells: list[str], widths: list[int], left: list[bool], gap: int) -> list[str]:
    """One row of a table as lines: several where the text of a left-set cell is wider than its column."""
    broken = [
        textwrap.wrap(c, max(w, 1), break_long_words=False, break_on_hyphens=False)
        for c, w in zip(cells, widths, strict=True)
    ]
    lines: list[str] = []
    for i in range(max(1, *map(len, broken))):
        texts = [lines_of[i] if i < len(lines_of) else "" for lines_of in broken]
        padded = [t.ljust(w) if to_left else t.rjust(w) for t, w, to_left in zip(texts, widths, left, strict=True)]
        lines.append((" " * gap).join(padded).rstrip())
    return lines


def _total(widths: list[int], gap: int) -> int:
    return sum(widths) + gap * (len(widths) - 1)


def listed(line: str, parts: Sequence[str]) -> str:
    """`line` followed by `parts`, on further lines where they do not fit; no part is broken."""
    lines = [line]
    for part in parts:
        separator = "  " if lines[-1] == line else "   "
        if len(lines[-1]) + len(separator) + len(part) <= width():
            lines[-1] += separator + part
        else:
            lines.append(f"  {part}")
    return "\n".join(lines)
