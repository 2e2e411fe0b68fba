"""Adds seeds to the points of a run until the interval of one metric is narrow enough, or a budget is spent.

All policies at a load get the same seeds, so that they can be compared seed by seed, until each is precise; of the
variants of a `best_of` the best one is asked. Unstable points, where seeds do not help, get no more.

A run that stops when its interval happens to be narrow has an interval that is a little too narrow. Each look at the
data adds to it, so there are at least MIN_SEEDS before the first, and from then on as many seeds at once as the spread
so far calls for, at most as many as there are. Over values as skewed as waiting times such intervals contain the truth
in nine of ten cases instead of 95 % (`tests/unit/study/curves/test_precision.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from batchsim.base.errors import ScenarioError, nearest
from batchsim.metrics.intervals import half_width, t_quantile
from batchsim.results.failed import Failed
from batchsim.results.keep import best_variant, metric_names
from batchsim.scenario import Point
from batchsim.study.curves.lines import Line
from batchsim.study.sweep.points import Sweep

METRIC = "ttft_p99_s"
MIN_SEEDS = 5  # with fewer the spread is too uncertain to stop by
MAX_SEEDS = 20

Result = dict[str, Any] | Failed
Key = tuple[str, float, str]  # policy, load, variant


@dataclass(frozen=True)
class Precision:
    """Half the interval of `metric` is to be at most `share` of its mean; no point gets more than `max_seeds`.

    >>> batchsim.Precision(share=0.05, metric="ttft_p99_s", max_seeds=20)
    Precision(share=0.05, metric='ttft_p99_s', max_seeds=20)
    """

    share: float
    metric: str = METRIC
    max_seeds: int = MAX_SEEDS

    def __post_init__(self) -> None:
        if not isinstance(self.share, Real):
            raise ScenarioError(f"precision {self.share!r} is not a number. Write a share below 1, like 0.05 for 5%.")
        if not isinstance(self.max_seeds, Integral):
            raise ScenarioError(f"max_seeds {self.max_seeds!r} is not a whole number. Write one, like {MAX_SEEDS}.")
        if not isinstance(self.metric, str):
            raise ScenarioError(f"metric {self.metric!r} is not a name. Write a column of summary.csv, like {METRIC}.")
        if not 0 < self.share < 1:
            raise ScenarioError(f"--precision {100 * self.share:g}%: must be above 0% and below 100%, like 5%.")
        if self.max_seeds < MIN_SEEDS:
            raise ScenarioError(
                f"--max-seeds {self.max_seeds}: with fewer than {MIN_SEEDS} seeds an interval may be narrow by chance."
                f" Give at least {MIN_SEEDS}."
            )

    def reached(self, values: Sequence[float]) -> bool:
        """Whether the interval of the mean of `values`, one a seed, is narrow enough."""
        return len(values) >= MIN_SEEDS and half_width(values) <= self.share * abs(float(np.mean(values)))

    def next_seeds(self, values: Sequence[float]) -> int:
        """How many seeds there should be before the next look; as many as there are if these are enough."""
        have = len(values)
        if have < MIN_SEEDS:
            return MIN_SEEDS
        if have >= self.max_seeds or self.reached(values):
            return have
        spread, allowed = float(np.std(values, ddof=1)), self.share * abs(float(np.mean(values)))
        most = min(2 * have, self.max_seeds)
        enough = (n for n in range(have + 1, most) if t_quantile(n) * spread / np.sqrt(n) <= allowed)
        return next(enough, most)


def refine(
    first: Sequence[Result], lines: Sequence[Line], sweep: Sweep, precision: Precision
) -> tuple[list[Result], dict[str, Any]]:
    """`first` with the results of further seeds, and how narrow the interval of every point became."""
    own = {line.policy: line for line in lines}
    results = list(first)
    while wanted := _wanted(results, precision):
        points = []
        for (policy, load, variant), seed in wanted:
            spec = next(spec for spec in own[policy].specs if spec.variant == variant)
            points.append((own[policy].setup, Point(spec, load, seed)))
        more = sweep.attempt(points)
        results += [own[key[0]].named(result) for (key, _), result in zip(wanted, more, strict=True)]
    return results, outcome(results, precision)


def check_metric(line: Line, load: float, metric: str) -> None:
    """ScenarioError unless `metric` is measured."""
    known = metric_names(*next(line.points(load)))
    if metric in known:
        return
    advice = nearest(metric, known, "summary.csv has the names, like ttft_p99_s.")
    raise ScenarioError(f"--metric {metric}: there is no such metric. {advice}")


def outcome(results: Sequence[Result], precision: Precision) -> dict[str, Any]:
    """The precision asked, and of every policy at every load its number of seeds and how narrow its interval is.

    `state` is reached, budget (spent without reaching it), unstable, undefined (no such metric there) or failed.
    """
    points = []
    for load, policies in _by_load(results).items():
        for policy, variants in policies.items():
            best = best_variant({variant: _whole(runs) for variant, runs in variants.items()})
            runs = variants[best]
            values = _values(runs, precision.metric)
            state = _state(runs, values)
            share = None
            if not state:
                assert values is not None, "a point without values has a state"
                state = "reached" if precision.reached(values) else "budget"
                share = half_width(values) / abs(float(np.mean(values))) if np.mean(values) else None
            points.append(
                {"policy": policy, "load": load, "num_seeds": len(runs), "half_width_share": share, "state": state}
            )
    asked = {"share": precision.share, "metric": precision.metric, "max_seeds": precision.max_seeds}
    return asked | {"min_seeds": MIN_SEEDS, "points": points}


def _wanted(results: Sequence[Result], precision: Precision) -> list[tuple[Key, int]]:
    """The points to simulate before the next look, the heaviest load first so that parallel runs end together."""
    wanted: list[tuple[Key, int]] = []
    for load, policies in sorted(_by_load(results).items(), reverse=True):
        running: dict[Key, list[Result]] = {}
        target = 0
        for policy, variants in policies.items():
            open_ones = {v: runs for v, runs in variants.items() if not _state(runs, _values(runs, precision.metric))}
            if open_ones:
                running |= {(policy, load, variant): runs for variant, runs in open_ones.items()}
                best = best_variant({variant: _whole(runs) for variant, runs in open_ones.items()})
                target = max(target, precision.next_seeds(_values(open_ones[best], precision.metric) or []))
        for key, runs in running.items():
            tried = {_seed(run) for run in runs}
            wanted += [(key, seed) for seed in range(target) if seed not in tried]
    return wanted


def _by_load(results: Sequence[Result]) -> dict[float, dict[str, dict[str, list[Result]]]]:
    """The results by load, policy and variant."""
    table: dict[float, dict[str, dict[str, list[Result]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for each in results:
        policy, load, variant = (
            (each.policy, each.load, each.variant)
            if isinstance(each, Failed)
            else (each["policy"], each["load"], each["variant"])
        )
        table[load][policy][variant].append(each)
    return table


def _state(runs: Sequence[Result], values: Sequence[float] | None) -> str:
    """Why a point gets no more seeds whatever its interval; empty if it may."""
    whole = _whole(runs)
    if len(whole) < len(runs):
        return "failed"
    if 2 * sum(bool(run["unstable"]) for run in whole) > len(whole):
        return "unstable"
    return "undefined" if values is None else ""


def _values(runs: Sequence[Result], metric: str) -> list[float] | None:
    """The metric's values, one a seed; None where a seed has none."""
    values = [run["values"][metric] for run in _whole(runs)]
    return None if None in values or not values else values


def _whole(runs: Sequence[Result]) -> list[dict[str, Any]]:
    return [run for run in runs if isinstance(run, dict)]


def _seed(run: Result) -> int:
    return run.seed if isinstance(run, Failed) else run["seed"]
