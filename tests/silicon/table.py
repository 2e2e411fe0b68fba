"""Errors of many points in a table: by engine, by GPU, by model, those of unknown clients apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tests.silicon.rows import Row


@dataclass(frozen=True)
class Point:
    """A measured point, and (TTFT, TPOT) in ms: simulated, anchored (None for the anchor itself), and aiconfigurator's
    own; None where there is none. `why` says so of the simulated."""

    row: Row
    simulated: tuple[float, float] | None
    anchored: tuple[float, float] | None
    own: tuple[float, float] | None
    why: str = ""


def error(found: tuple[float, float] | None, row: Row, which: int) -> float:
    """Found over measured, less 1, of TTFT (0) or TPOT (1); NaN where nothing was found."""
    return np.nan if found is None else found[which] / (row.ttft_ms, row.tpot_ms)[which] - 1


def tables(points: Sequence[Point]) -> str:
    """Markdown: errors of the points that both have, in %."""
    known = [point for point in points if not point.row.gap]
    parts = [
        *_table("engine", known, lambda row: row.engine),
        *_table("engine and GPU", known, lambda row: f"{row.engine} {row.gpu}"),
        *_table("engine and model", known, lambda row: f"{row.engine} {row.model.rpartition('/')[2]}"),
        "Points whose client is not known (`gap`), lengths taken as exact:\n",
        *_table("engine", [point for point in points if point.row.gap], lambda row: row.engine),
        "Points that aiconfigurator has no estimate of:\n",
        *_alone([point for point in known if point.simulated and not point.own]),
        *_left_out(points),
    ]
    return "\n".join(parts)


def _table(by: str, points: Sequence[Point], group: Callable[[Row], str]) -> Iterator[str]:
    columns = "median | p90 | mean | bias"
    yield f"| {by} | n | of | TTFT {columns} | TPOT {columns} |"
    yield "|---|---|---|" + "---|" * 8
    for name in sorted({group(point.row) for point in points}):
        mine = [point for point in points if group(point.row) == name and point.simulated and point.own]
        if mine:
            yield _line(name, "batchsim", [(point.simulated, point.row) for point in mine])
            yield _line("", "aiconfigurator", [(point.own, point.row) for point in mine])
            anchored = [point for point in mine if point.anchored]
            if anchored:
                yield _line("", "batchsim, of the next line", [(point.simulated, point.row) for point in anchored])
                yield _line("", "batchsim, anchored", [(point.anchored, point.row) for point in anchored])
    yield ""


def _alone(points: Sequence[Point]) -> Iterator[str]:
    """The errors of points that only batchsim has."""
    columns = "median | p90 | mean | bias"
    yield f"| engine, model and GPU | n | of | TTFT {columns} | TPOT {columns} |"
    yield "|---|---|---|" + "---|" * 8
    groups: dict[str, list[Point]] = {}
    for point in points:
        row = point.row
        groups.setdefault(f"{row.engine} {row.model.rpartition('/')[2]} {row.gpu}", []).append(point)
    for name, of_group in sorted(groups.items()):
        yield _line(name, "batchsim", [(point.simulated, point.row) for point in of_group])
        anchored = [point for point in of_group if point.anchored]
        yield _line("", "batchsim, anchored", [(point.anchored, point.row) for point in anchored])
    yield ""


def _line(name: str, of: str, found: Sequence[tuple[tuple[float, float] | None, Row]]) -> str:
    cells = [name, str(len(found)), of]
    for which in (0, 1):
        errors = 100 * np.array([error(values, row, which) for values, row in found])
        if len(errors):
            size = np.abs(errors)
            stats = (np.median(size), np.quantile(size, 0.9), size.mean())
            cells += [*(f"{x:.1f}" for x in stats), f"{errors.mean():+.1f}"]
        else:
            cells += ["–"] * 4
    return f"| {' | '.join(cells)} |"


def _left_out(points: Iterable[Point]) -> Iterator[str]:
    """What could not be compared, and why."""
    whys: dict[str, int] = {}
    for point in points:
        if point.simulated is None or point.own is None:
            row = point.row
            who = "not simulated: " + point.why if point.simulated is None else "aiconfigurator has no estimate"
            what = f"{row.engine} {row.model.rpartition('/')[2]} {row.precision} on {row.gpu} tp {row.tp}: {who}"
            whys[what] = whys.get(what, 0) + 1
    if whys:
        yield "Not compared:\n"
        yield from (f"- {count} of {what}" for what, count in sorted(whys.items()))
