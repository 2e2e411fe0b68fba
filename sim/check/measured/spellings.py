"""Columns of a table that say one thing twice, `sent_s` beside `sent_ms`: the same in every row, or refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

from batchsim.check.measured import tidy
from batchsim.check.measured.aggregates import UNIT_S, figure_of
from batchsim.check.measured.values import Node

_CLOCKS = ("intended", "sent", "first", "last")
_CLOCK_S = 0.01  # roundings of a date, and the client's own work between two looks at a clock
_SHARE = 0.05  # of a latency: what a client counts in of its own


def check_alike(rows: Sequence[Node], names: Sequence[str]) -> None:
    """MeasuredError for the first row in which two columns of one time differ."""
    spellings: dict[str, dict[str, float]] = {}
    for name in names:
        stem, _, unit = name.rpartition("_")
        if unit in UNIT_S and (quantity := _quantity(stem)):
            spellings.setdefault(quantity, {})[name] = UNIT_S[unit]
    for quantity, columns in spellings.items():
        may = (_CLOCK_S, 0.0) if quantity in _CLOCKS else (1e-6, _SHARE)
        for one, other in combinations(columns, 2):
            _compare(rows, f"{one} and {other}", (one, other), columns, may, lambda a, b: (a, b))
    for clock, latency in (("first", "ttft"), ("last", "e2e")):
        if all(each in spellings for each in ("sent", clock, latency)):
            names = [next(iter(spellings[each])) for each in ("sent", clock, latency)]
            units, what = (
                spellings["sent"] | spellings[clock] | spellings[latency],
                f"{names[1]} − {names[0]} and {names[2]}",
            )
            _compare(rows, what, names, units, (_CLOCK_S, _SHARE), lambda a, b, c: (b - a, c))


def _quantity(stem: str) -> str:
    """What a column of this name, its unit aside, has; "" for none of the times that are known."""
    if figure := figure_of(stem):
        return figure[0]
    return next((each for each in (*_CLOCKS, "ttft", "e2e") if stem in tidy.REQUEST[each]), "")


def _compare(
    rows: Sequence[Node],
    what: str,
    names: Sequence[str],
    units: dict[str, float],
    may: tuple[float, float],
    sides: Callable[..., tuple[float, float]],
) -> None:
    """MeasuredError for a row whose `sides` differ by more than they `may`: seconds, or a share of them."""
    for row in rows:
        values = [row.value.get(name) for name in names]
        if all(isinstance(value, int | float) for value in values):
            one, other = sides(*(value * units[name] for value, name in zip(values, names, strict=True)))
            if other and abs(one - other) > max(may[0], may[1] * other):  # 0: of a request that failed
                contradiction = f"{what} say {one:.9g} s and {other:.9g} s, and are one thing"
                row.bad(contradiction, "Keep the column that is right.")
