"""What is said and drawn of a capacity: decided ends as numbers, all else in words."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from batchsim.cost.cost_error import Unknown
from batchsim.report.pictures import capacity_picture as capacity_picture_module
from batchsim.report.pictures.capacity_picture import capacity_picture
from batchsim.report.text.capacity_text import capacity_json, capacity_text
from batchsim.scenario import load_scenario
from batchsim.scenario.setup import Setup
from batchsim.study.capacity.book import Book, Trial, capacity
from batchsim.study.capacity.capacities import CapacityStudy, PolicyCapacity
from batchsim.study.capacity.search import Axis, Effort
from batchsim.study.capacity.study import PolicySearch


def _trials(margin: float, luck: float) -> dict[int, Trial]:
    return {seed: Trial(margin + luck * (-1) ** seed, 1e6) for seed in range(4)}


PASSES, DOUBTFUL, BARELY_FAILS, FAILS = (
    _trials(margin, luck) for margin, luck in ((0.009, 1e-5), (0.004, 0.05), (-0.004, 0.05), (-0.3, 1e-3))
)


UNMEASURED = Unknown("nobody compared it")


@cache
def _setup() -> Setup:
    return Setup.of(load_scenario("chat"))


def study(book: Book) -> CapacityStudy:
    """One policy of `chat`, of which these trials are known."""
    setup = _setup()
    case = PolicySearch(setup, setup.scenario.specs[0], Axis(0.01), 10.0, Effort(), book=book)
    found = [PolicyCapacity(case, capacity(book))]
    return CapacityStudy(setup.scenario, setup, "ttft<1s @ 99%", 1.0, Effort(), found, [], UNMEASURED, None, [])


@pytest.mark.parametrize(
    ("book", "cell", "met", "why"),
    [
        ({8.0: PASSES, 10.0: DOUBTFUL, 11.0: BARELY_FAILS}, ", undecided]", "up to the capacity", "no load up to 11"),
        ({10.0: DOUBTFUL, 11.0: BARELY_FAILS, 14.0: FAILS}, " [undecided, ", "up to the capacity", "no load from 10"),
        ({8.0: PASSES, 10.0: DOUBTFUL, 11.0: FAILS}, "10.", "up to the capacity", ""),
        ({8.0: PASSES}, "met up to 8, the highest tried", "always", ""),
        ({8.0: PASSES, 10.0: DOUBTFUL}, "met up to 8, then undecided", "undecided", "capacity not found up to 10"),
        ({10.0: DOUBTFUL}, "undecided", "undecided", "capacity not found up to 10"),
        ({10.0: BARELY_FAILS, 14.0: FAILS}, "undecided", "undecided", "no load from 10"),
        ({14.0: FAILS}, "met at no rate", "never", ""),
    ],
)
def test_what_no_load_decided_is_said_in_words(book: Book, cell: str, met: str, why: str) -> None:
    """In the table, in a line of its own with what to do, and in the JSON as null with the reason."""
    found = study(book)
    text, (row,), name = capacity_text(found), capacity_json(found)["capacities"], found.policies[0].name
    assert cell in next(line for line in text.splitlines() if line.startswith(name))
    assert (f"! {name}: {why or 'no load up'}" in text) is bool(why)
    assert row["met"] == met and row["why_unknown"].startswith(why) and bool(row["why_unknown"]) is bool(why)
    assert [row["low"], row["high"]] == [found.policies[0].found.low, found.policies[0].found.high]


def test_the_picture_shades_no_further_than_what_was_decided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between decided ends; to a side on which nothing was decided, to the end of the axis, and the value is dotted."""
    spans: list[tuple[float, float]] = []
    values: list[tuple[float, Any]] = []
    draw = Axes.axvspan
    monkeypatch.setattr(
        Axes, "axvspan", lambda ax, low, high, **how: spans.append((low, high)) or draw(ax, low, high, **how)
    )
    line = Axes.axvline
    monkeypatch.setattr(
        Axes, "axvline", lambda ax, at, **how: values.append((at, how["linestyle"])) or line(ax, at, **how)
    )
    bracket = {10.0: DOUBTFUL, 11.0: BARELY_FAILS}
    for book in (bracket, {8.0: PASSES, **bracket}, {**bracket, 14.0: FAILS}, {8.0: PASSES, **bracket, 14.0: FAILS}):
        capacity_picture(study(book), tmp_path / "capacity.png")
    neither, below, above, both = spans
    assert neither[0] < 10 and neither[1] > 11 and below[0] > 8 and below[1] > 11 and above[0] < 10 and above[1] < 14
    assert both == (below[0], above[1])
    assert [style for _, style in values] == [":", ":", ":", "-"]
    assert all(low < at < high for (low, high), (at, _) in zip(spans, values, strict=True))


def test_the_picture_of_one_policy_has_room_for_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the shares beside the panel none stands on another."""
    drawn: list[Figure] = []
    monkeypatch.setattr(capacity_picture_module, "save", lambda fig, path: drawn.append(fig))
    capacity_picture(study({8.0: PASSES, 10.0: DOUBTFUL, 14.0: FAILS}), tmp_path / "capacity.png")
    (fig,) = drawn
    canvas = FigureCanvasAgg(fig)
    canvas.draw()
    (ax,) = fig.axes
    boxes = [text.get_window_extent(canvas.get_renderer()) for text in ax.get_yticklabels() if text.get_text()]
    ends = sorted((box.y0, box.y1) for box in boxes)
    assert len(ends) > 4 and all(below[1] <= above[0] for below, above in pairwise(ends))
