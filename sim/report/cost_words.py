"""What is said of numbers that the error of step times makes, the same words in every command."""

from __future__ import annotations

import math
from collections.abc import Callable

from batchsim.cost import CostError, Unknown
from batchsim.report.numbers import DASH

CANNOT_TELL = "cannot be told without calibration"
HOW = (
    f"{CANNOT_TELL}: batchsim calibrate --bench FILES, --steps LOGS, or --url of a running server, with --scenario and"
    " -o mine.json, then cost: mine.json"
)


def off_by(error: CostError | Unknown) -> str:
    """`step times ±20 %: kernels differ so`, or that their error is unknown, and why."""
    return f"step times {error}: {error.source}" if isinstance(error, CostError) else f"unknown: {error.source}"


def ends_text(ends: tuple[float, float], shown: Callable[[float], str]) -> str:
    """Both ends of a value as `shown` writes them; `∞` where the queue grows, `–` where it is not defined."""
    if any(math.isnan(end) for end in ends):
        return DASH
    return between(*("∞" if math.isinf(end) else shown(end) for end in ends))


def between(fast: str, slow: str) -> str:
    """`31…480 ms`, `31 ms…4.1 s`: both ends as texts, with their unit once where it is the same."""
    if fast == slow or DASH in (fast, slow):
        return fast if fast == slow else f"{fast}…{slow}"
    (number, _, unit), (_, _, other) = fast.partition(" "), slow.partition(" ")
    return f"{number}…{slow}" if unit == other else f"{fast}…{slow}"
