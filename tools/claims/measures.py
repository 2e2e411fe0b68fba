"""What a test of a claim reads off a run: a value a seed, and a note with what else to know.

All take (results, policy, against, load); of several policies in `against`, the best one counts and is named. Shares
are fractions. Without values the note says why there are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchsim.base.units import NS_PER_S, format_duration, parse_duration_ns
from batchsim.metrics.table import METRICS
from batchsim.results.read import Results

LATENCY_BOUND_S = 0.1
"""Mean normalised latency, s/token, at which rates are compared: our choice, ten tokens a second are read with ease."""


@dataclass(frozen=True)
class Values:
    """A value for each seed; none where it is not defined, and `note` says why."""

    by_seed: tuple[float, ...]
    note: str = ""


def throughput_ratio(results: Results, policy: str, against: Sequence[str], load: float) -> Values:
    """Completions per second of `policy` over those of the best of `against`."""
    best = _best(results, against, load, "throughput_rps")
    mine, theirs = (_by_seed(results, name, load, "throughput_rps") for name in (policy, best))
    return Values(tuple((mine / theirs).tolist()), f"against {best}: {theirs.mean():.2g}/s" if len(against) > 1 else "")


def throughput_gained(results: Results, policy: str, against: Sequence[str], load: float) -> Values:
    """By what share the completions per second of `policy` are above those of `against`."""
    return Values(tuple(ratio - 1 for ratio in throughput_ratio(results, policy, against, load).by_seed))


def speed_gained(results: Results, policy: str, against: Sequence[str], load: float) -> Values:
    """By what share a token of `policy` comes faster than one of `against`."""
    ratios = speed_ratio(results, policy, against, load)
    return Values(tuple(ratio - 1 for ratio in ratios.by_seed), ratios.note)


def speed_ratio(results: Results, policy: str, against: Sequence[str], load: float) -> Values:
    """How many times as fast a token comes: the mean normalised latency of `against` over that of `policy`."""
    (other,) = against
    mine, theirs = (_by_seed(results, name, load, "norm_latency_mean_s") for name in (policy, other))
    return Values(tuple((theirs / mine).tolist()), f"{_s(mine.mean())} a token against {_s(theirs.mean())}")


def rate_ratio(results: Results, policy: str, against: Sequence[str], load: float) -> Values:
    """The highest tested rate with a mean of at most LATENCY_BOUND_S a token, of `policy` over the best of `against`.

    One value for all seeds together; `load` is not used.
    """
    mine = _highest_rate(results, policy)
    theirs = max(_highest_rate(results, other) for other in against)
    if not (mine and theirs):
        return Values((), "one of them is slower than that at every rate tested")
    return Values((mine / theirs,), f"{mine:g}/s against {theirs:g}/s")


def p50_saved(results: Results, policy: str, against: Sequence[str], load: float) -> Values:
    """The share by which the median E2E of `policy` is below that of the best of `against` whose queue is stable."""
    stable = [other for other in against if not _unstable(results, other, load)]
    if not stable:
        return Values((), "the queue of all of them grows without end")
    if _unstable(results, policy, load):
        return Values((), f"the queue of {policy} grows without end")
    best = _best(results, stable, load, "e2e_p50_s")
    mine, theirs = (_by_seed(results, name, load, "e2e_p50_s") for name in (policy, best))
    return Values(tuple((1 - mine / theirs).tolist()), f"{_s(mine.mean())} against {_s(theirs.mean())} of {best}")


def padded_share(results: Results, policy: str, against: Sequence[str], load: float) -> Values:
    """Padded token rows over all token rows that the steps computed."""
    return Values(tuple(_by_seed(results, policy, load, "pad_share").tolist()))


def time_lost(results: Results, policy: str, against: Sequence[str], load: float) -> Values:
    """The share of `policy`'s throughput that its padding costs: against the same batches without it, `against`."""
    (unpadded,) = against
    mine, theirs = (_by_seed(results, name, load, "throughput_rps") for name in (policy, unpadded))
    return Values(tuple((1 - mine / theirs).tolist()))


def next_step_share(results: Results, policy: str, against: Sequence[str], load: float) -> Values:
    """The share of requests of class `short`, sent after the warm-up, that take part in the first step after arrival.

    At its start at the latest the step in progress, one token of everybody else, has ended.
    """
    warmup_ns = parse_duration_ns(results.scenario["workload"].get("warmup", "0s"))
    shares, longest_ns, most_steps = [], 0.0, 0
    for seed in _seeds(results, policy, load):
        requests = results.requests(policy, load, seed)
        short = (requests["request_class"].astype(str) == "short") & (requests["sent_ns"] >= warmup_ns)
        requests = requests.take(np.flatnonzero(short))
        missed, waited_ns = steps_missed(requests, results.steps(policy, load, seed))
        shares.append(float((missed == 0).mean()))
        longest_ns, most_steps = max(longest_ns, float(waited_ns.max())), max(most_steps, int(missed.max()))
    return Values(tuple(shares), f"up to {_s(longest_ns / NS_PER_S)}, {most_steps:,} steps missed")


def steps_missed(requests: pd.DataFrame, steps: pd.DataFrame) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """For each request how many steps started from its arrival on before its first one, and how long it waited in ns.

    For a request that never ran: until the end of its wait, at least one step.
    """
    starts = np.sort(steps["start_ns"].to_numpy())
    arrived = requests["arrival_ns"].to_numpy()
    first = requests["scheduled_ns"].fillna(requests["ended_ns"]).to_numpy().astype(np.int64)
    missed = np.searchsorted(starts, first, side="left") - np.searchsorted(starts, arrived, side="left")
    never = requests["scheduled_ns"].isna().to_numpy()
    return np.where(never, np.maximum(missed, 1), missed), (first - arrived).astype(np.float64)


def _rows(frame: pd.DataFrame, policy: str, load: float) -> pd.DataFrame:
    return frame.take(np.flatnonzero((frame["policy"] == policy) & (frame["load"] == load)))


def _seeds(results: Results, policy: str, load: float) -> list[int]:
    return [int(seed) for seed in _rows(results.points, policy, load)["seed"]]


def _by_seed(results: Results, policy: str, load: float, metric: str) -> NDArray[np.float64]:
    """The metric in the order of the seeds, which is the same for all policies."""
    return np.asarray(_rows(results.points, policy, load).sort_values("seed")[metric], dtype=np.float64)


def _mean(results: Results, policy: str, load: float, metric: str) -> float:
    return float(_by_seed(results, policy, load, metric).mean())


def _best(results: Results, policies: Sequence[str], load: float, metric: str) -> str:
    """The policy with the best mean over seeds."""
    pick = max if METRICS[metric].better == "higher" else min
    return pick(policies, key=lambda policy: _mean(results, policy, load, metric))


def _unstable(results: Results, policy: str, load: float) -> bool:
    return bool(np.asarray(_rows(results.summary, policy, load)["unstable"])[0])


def _highest_rate(results: Results, policy: str) -> float:
    """The highest tested load with a stable queue and a mean of at most LATENCY_BOUND_S a token; 0 if none."""
    table = results.summary
    good = (table["policy"] == policy) & ~table["unstable"] & (table["norm_latency_mean_s"] <= LATENCY_BOUND_S)
    return float(np.max(np.asarray(table["load"])[np.asarray(good)], initial=0.0))


def _s(seconds: float) -> str:
    """A time to two digits, or to whole seconds."""
    rounded = float(f"{seconds:.2g}") if seconds < 100 else round(seconds)
    return format_duration(rounded * NS_PER_S)
