"""The measured loads of a fit: the held-out ones, the requests used of each, the errors of all, the claims.

Of thousands of requests the first ones say as much of a step's terms as all. The rule that cuts runs looks at no
result: the first requests of each run by their sending, as many of each as bring all given runs to MOST_REQUESTS
together. Requests sent while the first ones are in flight are simulated, too, but not compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from batchsim.base.errors import MeasuredError
from batchsim.check.measured.run import MISSING, MeasuredRequests, MeasuredRun
from batchsim.check.validation.against import compare
from batchsim.fit.solve import Equations
from batchsim.scenario.config import PolicySpec
from batchsim.scenario.setup import Setup

FEWEST_LOADS = 3
SAME = 0.02
"""Share by which lengths and rates of one load differ between its repeats at most."""
KNEE = 3.0
"""A mean TTFT that 1 % of step time moves by more than this many percent lies beyond the knee: where it errs by more
than FLOORS has, it is judged by load."""
FLOORS = {"tpot_mean_s": 0.015, "throughput_rps": 0.015, "e2e_mean_s": 0.02, "ttft_mean_s": 0.05, "load": 0.015}
"""The least error that a fit claims of each figure, as a share; `load` is of the load axis, beyond the knee."""
SIGMAS = 2.0
MOST_REQUESTS = 40_000
"""Requests of all given runs that are simulated, twice a round: two minutes for most engines, at some 0.1 ms each."""


@dataclass(frozen=True)
class LoadError:
    """The signed errors of one run, simulated less measured as shares, by figure of FLOORS. At the `knee` that of
    `load` is in the place of TTFT and E2E; None: no load within reach equals what was measured."""

    name: str
    errors: Mapping[str, float | None]
    knee: bool

    def exceeded(self, claims: Mapping[str, float]) -> list[str]:
        """The figures that err by more than is claimed."""
        return [name for name, error in self.errors.items() if error is None or abs(error) > claims[name]]


def short_names(runs: Sequence[MeasuredRun]) -> dict[str, str]:
    """{name of a run: shorter unique name}: its part, if all runs are of one file, or the file without its folder."""
    short = {run.name: f"{Path(run.source).name} ({run.part})" if run.part else Path(run.source).name for run in runs}
    if len({run.source for run in runs}) == 1:
        short = {run.name: run.part or short[run.name] for run in runs}
    return short if len({*short.values()}) == len(short) else {name: name for name in short}


def loads_of(runs: Sequence[MeasuredRun]) -> list[list[MeasuredRun]]:
    """The runs by load, repeats of one together, from the lightest to the heaviest by completed tokens/s."""
    loads: list[list[MeasuredRun]] = []
    for run in sorted(runs, key=_heavy):
        for repeats in loads:
            if _same(repeats[0], run):
                repeats.append(run)
                break
        else:
            loads.append([run])
    return loads


def split(runs: Sequence[MeasuredRun]) -> tuple[list[MeasuredRun], list[MeasuredRun]]:
    """(given, held out). Of the loads from the lightest to the heaviest the second is held out, then every third one,
    but never the heaviest: a fit must see loads below and above saturation. The rule looks at no latency and at no
    result. MeasuredError where there are fewer than FEWEST_LOADS."""
    loads = loads_of(runs)
    if len(loads) < FEWEST_LOADS:
        what = "one load" if len(loads) == 1 else f"{len(loads)} loads"
        raise MeasuredError(
            f"{runs[0].name}: {what} in {len(runs)} runs; two are fitted and one is held out. Give runs of other rates"
            " or lengths, or name those to hold out by --hold-out."
        )
    held = range(1, len(loads) - 1, 3)
    given = [run for index, group in enumerate(loads) if index not in held for run in group]
    return given, [run for index in held for run in loads[index]]


def first_of_each(runs: Sequence[MeasuredRun], most: int = MOST_REQUESTS) -> int | None:
    """The most requests of each run that keep all of them to `most` together; None where they have no more."""
    counts = sorted(map(_count, runs))
    if sum(counts) <= most:
        return None
    left = most
    for number, count in enumerate(counts):
        share = left // (len(counts) - number)
        if count > share:
            return max(share, 1)
        left -= count
    return None


def thinned(run: MeasuredRun, first: int | None, most: int = MOST_REQUESTS) -> MeasuredRun:
    """`run` with the figures of its `first` requests alone, and a note; as it is with fewer, or None."""
    count = _count(run)
    if first is None or count <= first:
        return run
    note = f"its first {first:,} requests of {count:,} are fitted and judged, so that those given are {most:,}"
    notes = (*run.notes, f"{note} at most")
    if run.requests is None:
        fewer = {name: run.means[name] * first / count for name in ("requests", "given_up") if name in run.means}
        return replace(run, means={**run.means, **fewer}, notes=notes)
    requests = _first(run.requests, first, run.client.max_concurrency or 0)
    return replace(run, requests=requests, figures=requests.figures(), notes=notes)


def _count(run: MeasuredRun) -> int:
    if run.requests is not None:
        return len(run.requests)
    return round(run.means.get("requests", 0) + run.means.get("given_up", 0))


def _first(requests: MeasuredRequests, first: int, users: int) -> MeasuredRequests:
    """The `first` requests, and, with latencies removed, the requests sent until the last of them had ended."""
    kept = min(first + users, len(requests))
    if requests.sent_ns is not None:
        ends_ns = (requests.sent_ns + np.maximum(requests.e2e_ns, requests.ttft_ns))[:first]
        kept = int(np.searchsorted(requests.sent_ns, ends_ns.max(), "right"))
    cut = requests.picked(np.arange(max(kept, first)))
    judged = (np.arange(len(cut)) < first) | ~cut.ok
    return replace(cut, ttft_ns=np.where(judged, cut.ttft_ns, MISSING), e2e_ns=np.where(judged, cut.e2e_ns, MISSING))


def _heavy(run: MeasuredRun) -> tuple[float, float]:
    """Tokens of prompts and answers completed each second, then in flight at a time."""
    means = mean_lengths(run)
    rate = run.figures.get("throughput_rps") or run.means.get("sent_rps") or run.client.rate_rps or 0.0
    return rate * sum(means), rate * run.figures.get("e2e_mean_s", 0.0)


def mean_lengths(run: MeasuredRun) -> tuple[float, float]:
    """Mean tokens of prompts and of answers."""
    if run.requests is None:
        return run.means["prompt_tokens"], run.means["output_tokens"]
    ok = run.requests.ok
    return float(run.requests.prompt_tokens[ok].mean()), float(run.requests.output_tokens[ok].mean())


def _same(one: MeasuredRun, other: MeasuredRun) -> bool:
    pairs = [*zip(mean_lengths(one), mean_lengths(other), strict=True)]
    pairs += [(side(one), side(other)) for side in (_rate, _users)]
    return all(math.isclose(first, second, rel_tol=SAME) for first, second in pairs)


def _rate(run: MeasuredRun) -> float:
    return run.client.rate_rps or run.means.get("sent_rps") or run.figures.get("throughput_rps", 0.0)


def _users(run: MeasuredRun) -> float:
    return float(run.client.max_concurrency or 0) if run.client.arrivals == "closed" else 0.0


def load_error(setup: Setup, spec: PolicySpec, run: MeasuredRun, steep: float) -> LoadError:
    """The errors of `setup` on a run whose mean TTFT is so `steep` in step time."""
    comparison = compare(setup, spec, [run], shift=False)
    names = ("ttft_mean_s", "tpot_mean_s", "e2e_mean_s", "throughput_rps")
    errors = {name: comparison.error(name).error for name in names if comparison.error(name).live is not None}
    first = errors.get("ttft_mean_s")
    if steep <= KNEE or first is None or abs(first) <= FLOORS["ttft_mean_s"]:
        return LoadError(run.name, errors, knee=False)
    shifts = compare(setup, spec, [run]).shifts
    if not shifts:
        return LoadError(run.name, errors, knee=False)
    kept = {name: errors[name] for name in ("tpot_mean_s", "throughput_rps") if name in errors}
    return LoadError(run.name, kept | {"load": shifts.get("ttft_mean_s")}, knee=True)


def claims_of(given: Sequence[LoadError], equations: Sequence[Equations], terms: int) -> dict[str, float]:
    """The error claimed of each figure at other loads: twice the root mean square at the given ones, more where there
    are hardly more equations than terms, and at least that of FLOORS."""
    spare = math.sqrt(len(equations) / max(len(equations) - terms, 1))
    claims: dict[str, float] = {}
    for name, floor in FLOORS.items():
        errors = [error for one in given if (error := one.errors.get(name)) is not None]
        mean = math.sqrt(sum(error**2 for error in errors) / len(errors)) if errors else 0.0
        claims[name] = max(floor, SIGMAS * spare * mean)
    return claims
