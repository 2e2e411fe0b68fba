"""What no run can have measured, and what cannot be played: one line, before anything is counted or simulated."""

from __future__ import annotations

import math
from collections.abc import Mapping

from batchsim.base.errors import MeasuredError
from batchsim.base.ranges import INT32_MAX
from batchsim.check.measured.run import LATENCIES, OF, MeasuredRun
from batchsim.check.measured.values import Node

LEAST_S, MOST_S = 1e-6, 1e7
"""Bounds of a latency in seconds: no engine takes less for a token, and no client waits for four months."""
MOST_PLAYED = 20_000
"""Requests of a run of which only aggregates are known, each of which is simulated, up to 18 times over."""
MOST_USERS = 1_000_000
_COUNTS = {"requests": (1, MOST_PLAYED), "prompt_tokens": (0.5, INT32_MAX), "output_tokens": (0.5, INT32_MAX),
           "sent_rps": (1e-6, 1e6)}  # fmt: skip
_SPREADS = {
    f"{side}_{of}": (0, INT32_MAX) for side in ("prompt_tokens", "output_tokens") for of in ("std", "min", "max")
}
ROUNDED = 1e-3
"""Share by which rounding may put a mean beyond the shortest or the longest."""


def check_run(run: MeasuredRun) -> MeasuredRun:
    """`run`. MeasuredError where one of its figures cannot be, or it cannot be played."""
    if not run.figures:
        raise MeasuredError(f"{run.name}: tells no latency and no rate. Give a run with one of them at least.")
    for latency in LATENCIES:
        figures = {name: run.figures[name] for of in OF if (name := f"{latency}_{of}_s") in run.figures}
        for name, value in figures.items():
            if not LEAST_S <= value <= MOST_S and (latency != "tpot" or name == next(iter(figures))):
                _refuse(run, name, value, latency)
    for name, (least, most) in (_COUNTS | _SPREADS).items():
        value = run.means.get(name)
        if run.requests is None and value and not least <= value <= most:
            advice = f"It must be from {least:g} to {most:g}"
            if name == "requests" and value > most:
                advice = f"Write {most:,}: of as many the means are the same, and at most so many are simulated"
            raise MeasuredError(f"{run.name}: {name} is {value:.9g}. {advice}.")
    if (users := run.client.max_concurrency) is not None and users > MOST_USERS:
        raise MeasuredError(f"{run.name}: {users:,} in flight at most. It must be from 1 to {MOST_USERS:,}.")
    return run


def check_spread(node: Node, side: str, mean: float, spread: Mapping[str, float]) -> None:
    """MeasuredError where the `mean` length of `side` is not from its `_min` to its `_max` in `spread`."""
    least, most = spread.get(f"{side}_min", 0.0), spread.get(f"{side}_max", math.inf)
    if least > most or not (1 - ROUNDED) * least <= mean <= (1 + ROUNDED) * most:
        contradiction = f"{side} from {least:.9g} to {most:.9g} have no mean of {mean:.9g}"
        node.bad(contradiction, "Correct them, or leave _min and _max out.")


def _refuse(run: MeasuredRun, name: str, value: float, latency: str) -> None:
    why, advice = "an engine takes longer", "Look at its unit, or leave its column out where it was not measured."
    if value > MOST_S:
        why, advice = f"that is {value / 86_400:.3g} days", "Look at its unit."
    elif latency == "tpot" and "ttft_mean_s" in run.figures:
        why = "the tokens of an answer came all at once"
        advice = "Leave out TTFT and TPOT, or the times of first tokens: E2E alone is compared and fitted."
    raise MeasuredError(f"{run.name}: {name} is {value:g} s, and {why}. {advice}")
