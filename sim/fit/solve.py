"""The terms under which simulations equal measured runs: linear least squares, simulated and solved again and again.

Each round simulates every run, sums what its requests waited for (`windows`), solves for the terms that would explain
what was measured if the schedule stayed, and goes DAMP of the way. Where a load is so high that 1 % of step time moves
a latency by A %, the linear equations are off by that factor: A is simulated, and the equation divided by it, which is
also how much less it says of step times. Every run counts alike, whatever its number of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import process_time

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from batchsim.base.units import format_duration
from batchsim.check.measured.run import MeasuredRun
from batchsim.check.validation.replay import Replay
from batchsim.cost.base import Cost
from batchsim.cost.fitted import TERMS, Fitted, StepTerms
from batchsim.fit.windows import NAMES, Rows, rows_of
from batchsim.scenario.config import PolicySpec
from batchsim.scenario.point import Run
from batchsim.scenario.setup import Setup

Floats = NDArray[np.float64]

DAMP = 0.7
"""Share of the way to the solution of each round."""
ROUNDS = 10
ENOUGH = 2e-3
"""Change of the predicted latencies, as a share, below which a round is the last."""
RIDGE = 1e-4
"""Weight of the pull toward the defaults: what a term adds to latencies, as a share of them, for each equation's 1."""
STRETCH = 0.02
"""Share by which step times are stretched to see how steep latencies are in them."""
MOST_STEEP = 50.0
CUT = 0.1
"""Share by which a run is off from which on it counts by the error, not by its square: a client that was late, or got
all tokens at once, is not to outweigh the others."""
WEIGHTS = {"ttft": 0.5, "tpot": 1.0, "e2e": 1.0}
"""Of each latency of a run. First tokens are what clients and networks blur most."""


@dataclass(frozen=True)
class Case:
    """What is fitted: the engine's `setup`, its policy during a run (`spec_of`), its `kernel` without a host, None for
    the free form, the columns of NAMES that are fitted (`active`), and the values that these are pulled to."""

    setup: Setup
    spec_of: Callable[[MeasuredRun], PolicySpec]
    kernel: Cost | None
    active: tuple[str, ...]
    defaults: Mapping[str, float]

    def cost(self, values: Mapping[str, float]) -> Fitted:
        return Fitted(self.kernel, StepTerms(**{name: values[name] for name in TERMS}))

    def playing(self, one: Replay, values: Mapping[str, float], stretch: float = 1.0) -> Replay:
        """The replay `one` with steps of these terms, and the way from the client."""
        terms = {name: values[name] * stretch for name in TERMS}
        return replace(one, setup=with_fit(one.setup, self.cost({**values, **terms}), values["frontend"]))


@dataclass(frozen=True)
class Equations:
    """The rows of one latency of run number `run`; how steep that is: percent for each percent of step time, at least
    1; the fewest KV blocks that were ever free."""

    rows: Rows
    steep: float
    run: int
    kv_free: int

    @property
    def weight(self) -> float:
        """What a row is multiplied by, so that a latency of a run counts as one equation in shares of its mean,
        measured or simulated, whichever is more; as less beyond CUT."""
        mean, off = max(self.rows.measured_ns, self.rows.simulated_ns), abs(self.relative_error)
        trust = np.sqrt(CUT / off) if off > CUT else 1.0
        return float(trust * WEIGHTS[self.rows.latency] / (mean * np.sqrt(len(self.rows.left))))

    @property
    def relative_error(self) -> float:
        """(Simulated - measured mean) / the larger of both, divided by the sensitivity to step time, `steep`."""
        mean = max(self.rows.measured_ns, self.rows.simulated_ns)
        return (self.rows.simulated_ns - self.rows.measured_ns) / mean / self.steep


@dataclass(frozen=True)
class Solved:
    """The solution: a value for each of NAMES in ns, `kernel` a factor; the equations at it; how many rounds it took
    and whether the last one moved latencies by less than ENOUGH."""

    values: dict[str, float]
    equations: list[Equations]
    rounds: int
    settled: bool


def with_fit(setup: Setup, cost: Fitted, frontend_ns: float) -> Setup:
    """`setup` with these step times and `frontend_ns` from the client to the engine."""
    way = replace(setup.traffic.frontend, request=round(frontend_ns))
    return replace(setup, cost=cost, traffic=replace(setup.traffic, frontend=way))


def solve(
    case: Case, replays: Sequence[Replay], say: Callable[[str], None], start: Mapping[str, float] | None = None
) -> Solved:
    """The terms of `case` under which `replays` come nearest to what was measured, from the defaults or `start` on."""
    values = {name: case.defaults.get(name, 0.0) for name in NAMES} if start is None else dict(start)
    best, best_error, moved, rounds = None, np.inf, np.inf, 0
    while True:
        begun_s = process_time()
        equations = simulate_all(case, replays, values)
        if not rounds:
            count, took_s = sum(one.count for one in replays), process_time() - begun_s
            most_s = format_duration(took_s * ROUNDS * 1e9)
            say(f"{count:,} requests in {len(replays)} runs: at most {ROUNDS} rounds more, which take {most_s} of CPU")
        error = error_of(equations)
        if error < best_error:
            best, best_error = (values, equations), error
        say(f"round {rounds}: latencies off by {100 * error:.2f} % of step time (root mean square)")
        if moved < ENOUGH or rounds == ROUNDS:
            break
        aimed = _aim(case, equations, values)
        following = {name: values[name] + DAMP * (aimed[name] - values[name]) for name in NAMES}
        moved = _change(equations, values, following)
        values, rounds = following, rounds + 1
    assert best is not None, "the error of a simulation is a number"
    return Solved(*best, rounds, moved < ENOUGH)


def simulate_all(case: Case, replays: Sequence[Replay], values: Mapping[str, float]) -> list[Equations]:
    """The equations of all runs at these values."""
    equations: list[Equations] = []
    for number, one in enumerate(replays):
        plain, stretched = (_played(case, one, values, stretch) for stretch in (1.0, 1 + STRETCH))
        cost = case.cost(values)
        free = int(plain.records.steps["free_blocks"].min())
        later = {rows.latency: rows.simulated_ns for rows in rows_of(one, stretched, cost)}
        for rows in rows_of(one, plain, cost):
            by_steps = float(rows.step_ns[:-1] @ _vector(values)[:-1])
            gained = later.get(rows.latency, rows.simulated_ns) - rows.simulated_ns
            steep = gained / (STRETCH * by_steps) if by_steps > 0 else 1.0
            equations.append(Equations(rows, min(max(steep, 1.0), MOST_STEEP), number, free))
    return equations


def _played(case: Case, one: Replay, values: Mapping[str, float], stretch: float) -> Run:
    return case.playing(one, values, stretch).simulate(case.spec_of(one.run))


def _vector(values: Mapping[str, float]) -> Floats:
    return np.array([values[name] for name in NAMES])


def error_of(equations: Sequence[Equations]) -> float:
    """Root of the weighted mean square of the errors of means, as shares of step time; beyond CUT, of their product."""
    weights = np.array([WEIGHTS[one.rows.latency] for one in equations])
    off = np.abs([one.relative_error for one in equations])
    return float(np.sqrt((weights**2 * off * np.minimum(off, CUT)).sum() / (weights**2).sum()))


def system(case: Case, equations: Sequence[Equations], values: Mapping[str, float]) -> tuple[Floats, Floats]:
    """(a, b) of the equations a·x = b for the active terms: what remains, divided by steepness, plus what is there.

    Rows are weighted. Terms that are not active stay at their values.
    """
    columns = [NAMES.index(name) for name in case.active]
    now = _vector(values)[columns]
    a = [one.weight * one.rows.windows[:, columns] for one in equations]
    b = [one.weight * one.rows.left / one.steep for one in equations]
    whole = np.concatenate(a)
    return whole, np.concatenate(b) + whole @ now


def _aim(case: Case, equations: Sequence[Equations], values: Mapping[str, float]) -> dict[str, float]:
    """The values that solve the equations, none below 0, with a pull toward the defaults."""
    a, b = system(case, equations, values)
    terms = least(a, b, np.array([case.defaults.get(name, 0.0) for name in case.active]))
    return {**values, **dict(zip(case.active, terms.tolist(), strict=True))}


def least(a: Floats, b: Floats, defaults: Floats) -> Floats:
    """The x, none below 0, whose a·x is nearest to b, with a pull of RIDGE toward `defaults`."""
    size = np.sqrt((a * a).sum(axis=0))
    size[size == 0] = 1.0
    ridge = np.sqrt(RIDGE) * np.eye(len(size))
    x, _ = nnls(np.concatenate([a / size, ridge]), np.concatenate([b, np.sqrt(RIDGE) * defaults * size]))
    return x / size


def _change(equations: Sequence[Equations], values: Mapping[str, float], following: Mapping[str, float]) -> float:
    """Largest relative change of any mean latency from the terms `values` to those `following`."""
    change = _vector(following) - _vector(values)
    return max(abs(float(one.rows.step_ns @ change)) / one.rows.measured_ns for one in equations)
