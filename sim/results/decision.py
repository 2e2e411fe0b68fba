"""The decision on a policy: at which loads it meets its objective, for sure, on average, or with the verdict open.

A load is `met` where the lower end of the interval of its margin is 0 or more, `missed` where the upper end is below 0
or the queue grows, `open` between, and where the error of the step costs decides. With one seed, of which there is no
interval, the margin itself is judged. What was not measured is `not known`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class JudgedLoad:
    """One load: the mean `margin` of the objective, of the worst class where each has its own, and the ends of its 95 %
    interval, None without one. `grows`: its queue grows; `failed`: it could not be simulated; `by_cost`: the objective
    is met at one end of the cost's error alone. `shares`: the interval of the share within the objective, by class; ""
    is all requests."""

    load: float
    margin: float
    low: float | None = None
    high: float | None = None
    grows: bool = False
    failed: bool = False
    by_cost: bool = False
    shares: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])

    @property
    def verdict(self) -> Literal["met", "missed", "open", "not known"]:
        """What the interval and the cost's error leave of the objective at this load."""
        if self.failed or math.isnan(self.margin):
            return "not known"
        if self.by_cost:
            return "open"
        low, high = (self.margin if end is None else end for end in (self.low, self.high))
        if self.grows or high < 0:
            return "missed"
        return "met" if low >= 0 else "open"

    @property
    def on_average(self) -> bool:
        """Whether the mean margin is 0 or more without growth, whatever the cost's error."""
        return self.margin >= 0 and not (self.grows or self.failed or self.by_cost)


@dataclass(frozen=True)
class Decision:
    """The judged loads of the policy `name`, from the lowest up."""

    name: str
    loads: tuple[JudgedLoad, ...]

    @property
    def sure(self) -> float | None:
        """The highest load at which the objective is met at the lower end of the interval; None if there is none."""
        return max((each.load for each in self.loads if each.verdict == "met"), default=None)

    @property
    def highest(self) -> float | None:
        """The highest load at which it is met on average; None if there is none."""
        return max((each.load for each in self.loads if each.on_average), default=None)

    @property
    def open(self) -> tuple[JudgedLoad, ...]:
        """The loads above `sure` at which the verdict is open."""
        return tuple(e for e in self.loads if e.verdict == "open" and (self.sure is None or e.load > self.sure))

    @property
    def missed_below(self) -> tuple[float, ...]:
        """The loads below `sure` at which the objective is not surely met, the error of the costs aside."""
        known = (each for each in self.loads if each.verdict in ("missed", "open") and not each.by_cost)
        return tuple(each.load for each in known if self.sure is not None and each.load < self.sure)
