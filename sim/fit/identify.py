"""How well measured runs determine each term, and which terms they cannot separate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from batchsim.fit.solve import WEIGHTS, Case, Solved, system
from batchsim.fit.windows import NAMES

Floats = NDArray[np.float64]

KNOWN = 0.05
"""Half the interval of a term, as a share of its value, up to which it is declared identified."""
FLOOR = 0.002
"""Least error of an equation, as a share of its latency: schedules part by chance, however right the terms are."""
TOLD_APART = 0.95
"""Correlation of the errors of two terms from which on they cannot be separated."""
SIGMAS = 2.0
NOTHING = 1e-6
"""Share of the largest singular value up to which a direction is none that the equations tell of."""

_SETTLES = {
    frozenset(("kernel", "base")): "a run of long prompts or many requests at a time, where the kernel's time grows",
    frozenset(("kernel", "sequence")): "a run of longer contexts at as many requests in flight",
    frozenset(("kernel", "prompt_token")): "a run with few prompt tokens for each output token",
    frozenset(("sequence", "prompt_token")): "a run of another mix of prompt and output lengths",
    frozenset(("sequence", "context_token")): "a run of longer contexts at as many requests in flight",
    frozenset(("sequence", "base")): "a run with far more, or far fewer, requests in flight",
    frozenset(("pair", "prompt_token")): "a run of prompts of other lengths, some of thousands of tokens",
    frozenset(("frontend", "base")): "a run of one request at a time with other prompt lengths",
    frozenset(("frontend", "prompt_token")): "a run of one request at a time with other prompt lengths",
    frozenset(("beside_token", "context_token")): "a run of long prompts beside many decodes, and one without",
}
LARGER = {
    "kernel": "prompts of thousands of tokens, or many requests at a time",
    "base": "one request at a time",
    "sequence": "as many requests at a time as the engine takes",
    "prompt_token": "long prompts and short answers",
    "context_token": "many requests of long contexts",
    "beside_token": "long prompts beside many decodes",
    "pair": "prompts of many thousands of tokens",
    "rows_2": "one, two and three requests at a time",
    "rows_4": "three to six requests at a time",
    "rows_8": "six to twelve requests at a time",
    "frontend": "one request at a time, of short prompts",
}
"""Of each term, a load in which it makes a larger share of a latency."""
_LAG = "runs of a larger or smaller model on the same server"
_OTHERWISE = "a run of other lengths, and one at another load"


@dataclass(frozen=True)
class Term:
    """One fitted term: its value and `half` its 95 % interval, in ns or as a factor; the largest share of a mean
    latency that it makes; whether it stands `alone`, and is not mixed with what no term is of. It is identified where
    `half` is at most KNOWN of the value besides."""

    name: str
    value: float
    half: float
    share: float
    alone: bool = True

    @property
    def identified(self) -> bool:
        return self.alone and self.value > 0 and self.half <= KNOWN * self.value


@dataclass(frozen=True)
class Confused:
    """Two terms that these runs cannot separate, by the correlation of their errors; which run would settle it."""

    one: str
    other: str
    correlation: float
    settles: str


@dataclass(frozen=True)
class Identified:
    """`terms` in the order of NAMES; `condition`: the number of the equations, each column divided by its size;
    `confused`: pairs, the worst first."""

    terms: tuple[Term, ...]
    condition: float
    confused: tuple[Confused, ...]


def identify(case: Case, solved: Solved, *, ahead: bool) -> Identified:
    """How well the terms of a solution are known: from the equations, one for each latency of a run.

    `ahead`: the engine schedules ahead of results. Its tokens come late by a part of a step, the lag, which beyond what
    is simulated no runs of one model can separate from the way from the client.
    """
    a, _ = system(case, solved.equations, solved.values)
    sigma = _sigma(solved, int((a != 0).any(axis=0).sum()))
    known = identified(a, case.active, solved.values, sigma, _shares(case, solved), "frontend" if ahead else "")
    lag = (Confused("frontend", "lag", 1.0, _LAG),) if ahead else ()
    return replace(known, confused=(*lag, *known.confused))


def identified(
    a: Floats,
    names: Sequence[str],
    values: Mapping[str, float],
    sigma: float,
    shares: Mapping[str, float],
    mixed: str = "",
) -> Identified:
    """How well the terms `names` are known that solve equations of rows `a`, each off by `sigma` (FLOOR at least).

    `shares`: the largest part of a latency, or of a step, that each makes. `mixed`: the term that does not stand alone.
    """
    size = np.sqrt((a * a).sum(axis=0))
    seen = size > 0
    scaled = a[:, seen] / size[seen]
    _, spread, directions = np.linalg.svd(np.linalg.qr(scaled, mode="r"), full_matrices=True)
    condition = float(spread[0] / spread[-1]) if len(spread) == int(seen.sum()) and spread[-1] > 0 else float("inf")
    covariance = np.linalg.pinv(scaled.T @ scaled, rcond=1e-12)
    halves = np.full(len(size), np.inf)
    halves[seen] = SIGMAS * max(sigma, FLOOR) * np.sqrt(np.maximum(np.diag(covariance), 0.0)) / size[seen]
    rank = int((spread > NOTHING * spread[0]).sum())
    unknown = np.abs(directions[rank:]).max(axis=0, initial=0.0) > NOTHING  # the equations say nothing of these
    halves[np.flatnonzero(seen)[unknown]] = np.inf
    terms = tuple(
        Term(name, values[name], half, shares[name], name != mixed)
        for name, half in zip(names, halves.tolist(), strict=True)
    )
    known = {term.name: term.identified for term in terms}
    there = [name for name, is_seen in zip(names, seen, strict=True) if is_seen]
    deviations = np.sqrt(np.maximum(np.diag(covariance), 1e-300))
    correlations = covariance / np.outer(deviations, deviations)
    confused = [
        Confused(there[i], there[j], float(correlations[i, j]), _settled_by(there[i], there[j]))
        for i, j in combinations(range(len(there)), 2)
        if abs(correlations[i, j]) >= TOLD_APART and not (known[there[i]] and known[there[j]])
    ]
    return Identified(terms, condition, tuple(sorted(confused, key=lambda pair: -abs(pair.correlation))))


def _settled_by(one: str, other: str) -> str:
    return _SETTLES.get(frozenset((one, other)), _OTHERWISE)


def _sigma(solved: Solved, terms: int) -> float:
    """Root mean square of what the equations of means are off by, for each that is not used up by a term."""
    off = np.array([WEIGHTS[one.rows.latency] * one.relative_error for one in solved.equations])
    return float(np.sqrt((off**2).sum() / max(len(off) - terms, 1)))


def _shares(case: Case, solved: Solved) -> dict[str, float]:
    shares: dict[str, float] = {}
    for name in case.active:
        parts: Sequence[float] = [
            float(one.rows.step_ns[NAMES.index(name)]) * solved.values[name] / one.rows.simulated_ns
            for one in solved.equations
        ]
        shares[name] = max(parts)
    return shares
