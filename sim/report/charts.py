"""Charts as data: lines with intervals against a load or a time. `page/assets/charts.js` draws them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

Values = Sequence[float | None]


@dataclass(frozen=True)
class ChartAxis:
    """A quantity along an axis: its label, how its values are written, and the scale that is shown first.

    `nines` spreads shares near 1: 90 %, 99 % and 99.9 % are equally far apart. `signed` spreads differences near 0, on
    either side: 0.1, 1, 10 and 100 `points` are. `names` stand in place of the numbers 0, 1, 2 of an axis of parts.
    """

    label: str
    kind: Literal["number", "seconds", "share", "points"] = "number"
    scale: Literal["linear", "log", "nines", "signed"] = "linear"
    names: Sequence[str] = ()


@dataclass(frozen=True)
class Series:
    """A line: `y` at `x`, with intervals from `low` to `high` where those are given; None where there is no value.

    `crosses`: for each point whether the queue grows there; `hollow`: whether its mark is open. `joined`: whether a
    line joins the points.
    """

    label: str
    color: str
    x: Sequence[float]
    y: Values
    low: Values = ()
    high: Values = ()
    crosses: Sequence[bool] = ()
    hollow: Sequence[bool] = ()
    dashed: bool = False
    joined: bool = True


@dataclass(frozen=True)
class Chart:
    """A chart with its caption; `target` is a value of y that is asked for, drawn as a dashed line called `asked`,
    `bands` are stretches of x that are shaded in a colour: (from, to, colour). `note` stands below it."""

    caption: str
    x: ChartAxis
    y: ChartAxis
    series: Sequence[Series]
    target: float | None = None
    bands: Sequence[tuple[float, float, str]] = field(default_factory=tuple)
    asked: str = "asked"
    note: str = ""

    @property
    def data(self) -> str:
        """The chart as JSON that may stand inside an HTML page: no text in it ends the element."""
        text = json.dumps(asdict(self), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.replace("<", "\\u003c").replace("&", "\\u0026")
