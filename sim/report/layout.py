"""Lines of plain text of at most WIDTH columns: long ones broken, cells aligned."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from sim.report.reading import wrapped

WIDTH = 100
_MIN_TEXT = 10  # letters that a shortened label or bound keeps
_LABEL_END = 4  # of them at a label's end, where variants differ: `static (batch…e 16)`


def fit(line: str) -> str:
    """`line` over as many lines of WIDTH as it needs, broken between its ` · ` parts where it has some."""
    if len(line) <= WIDTH:
        return line
    if " · " in line:
        return wrapped(line, WIDTH)
    return "\n".join(textwrap.wrap(line, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))


def aligned(grid: list[list[str]], *, last_left: bool = True, spare: Sequence[str] = ()) -> list[str]:
    """The rows as lines of at most WIDTH columns: first and last column to the left, numbers to the right.

    Where it is too wide the columns headed `spare` are left out one by one; then the last column is shortened, then the
    middle of the first, with `…` for what is cut.
    """
    widths = _widths(grid)
    for head in spare:
        if sum(widths) + 2 * (len(widths) - 1) > WIDTH:
            at = grid[0].index(head)
            grid = [[*cells[:at], *cells[at + 1 :]] for cells in grid]
            widths = _widths(grid)
    for column in (-1, 0):
        excess = sum(widths) + 2 * (len(widths) - 1) - WIDTH
        widths[column] = min(widths[column], max(_MIN_TEXT, widths[column] - excess))
    lines = []
    for cells in grid:
        first, *middle, last = cells
        numbers = [cell.rjust(width) for cell, width in zip(middle, widths[1:-1], strict=True)]
        end = _cut(last, widths[-1])
        line = [
            _cut(first, widths[0], _LABEL_END).ljust(widths[0]),
            *numbers,
            end if last_left else end.rjust(widths[-1]),
        ]
        lines.append("  ".join(line).rstrip())
    return lines


def _widths(grid: list[list[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*grid, strict=True)]


def _cut(text: str, width: int, end: int = 0) -> str:
    """`text` in at most `width` letters, its last `end` kept."""
    return text if len(text) <= width else text[: width - 1 - end] + "…" + text[len(text) - end :]


def listed(line: str, parts: Sequence[str]) -> str:
    """The parts after the line's beginning, and on further lines where they do not fit; none is broken."""
    lines = [line]
    for part in parts:
        separator = "  " if lines[-1] == line else "   "
        if len(lines[-1]) + len(separator) + len(part) <= WIDTH:
            lines[-1] += separator + part
        else:
            lines.append(f"  {part}")
    return "\n".join(lines)
