"""Markov-modulated Poisson processes fitted to gaps by maximum likelihood.

Between two arrivals the states move by exp(D x), D the generator less the rates; the chain is reversible, so D is
symmetric in other units and one eigendecomposition serves all gaps: in its eigenvectors every gap is a diagonal matrix
times one matrix that is the same for all. The product of all of them is taken pair by pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from batchsim.base.units import NS_PER_S, YEAR_NS
from batchsim.workload.processes import MmppArrivals, MmppState

Floats = NDArray[np.float64]

MOST_STATES = 4
MOST_GAPS = 10_000
"""Gaps by which a law is found; it is judged by all. More are thinned to as many in STRETCHES stretches."""
STRETCHES = 5
_STEPS = {2: 80, 3: 120, 4: 150}  # of the search
_IMPOSSIBLE = 1e6  # in the place of an infinite log likelihood a gap, which a search by differences cannot take
_BOUND = 14.0  # of the logarithms of rates, stays and weights in units of the mean gap


def fit_mmpp(gaps_s: Floats) -> Iterator[tuple[MmppArrivals, float, int]]:
    """For 2 to MOST_STATES states the likeliest process, its log likelihood of all gaps and how many numbers it has.

    More states begin from the best law of fewer, one of its states being two.
    """
    unit = float(gaps_s.mean())
    gaps = gaps_s / unit
    sample = _sample(gaps)
    best: Floats | None = None
    for states in range(2, MOST_STATES + 1):
        starts = _first_starts(sample) if best is None else _split(best, states - 1)
        tried = [_search(start, states, sample) for start in starts]
        value, best = min(tried, key=lambda pair: pair[0])
        if value >= _IMPOSSIBLE:
            return
        likelihood = log_likelihood(best, states, gaps) - len(gaps) * math.log(unit)
        yield _process(best, states, unit), likelihood, len(best) - 1


def _sample(gaps: Floats) -> Floats:
    """Stretches of `gaps`, evenly spaced, of MOST_GAPS together."""
    if len(gaps) <= MOST_GAPS:
        return gaps
    each = MOST_GAPS // STRETCHES
    starts = np.linspace(0, len(gaps) - each, STRETCHES).astype(int)
    return np.concatenate([gaps[start : start + each] for start in starts])


def _search(start: Floats, states: int, gaps: Floats) -> tuple[float, Floats]:
    def minus(values: Floats) -> float:
        likelihood = log_likelihood(values, states, gaps)
        return -likelihood / len(gaps) if math.isfinite(likelihood) else _IMPOSSIBLE

    found = minimize(
        minus,
        start,
        method="L-BFGS-B",
        bounds=[(-_BOUND, _BOUND)] * len(start),
        options={"maxiter": _STEPS[states], "ftol": 1e-8},
    )
    return float(found.fun), found.x


def _first_starts(gaps: Floats) -> list[Floats]:
    """Two states, the rate of one being above the mean by as much as that of the other is below, of three lengths."""
    return [np.log([3.0, 0.3, stay, stay]) for stay in (3.0, 30.0, 300.0)]


def _split(values: Floats, states: int) -> list[Floats]:
    """`values` with each state in turn as two, of a higher and a lower rate and shorter stays."""
    rates, stays, weights = _parts(values, states)
    starts: list[Floats] = []
    for state in range(states):
        more = [np.append(part, part[state]) for part in (rates, stays, weights)]
        more[0][[state, -1]] += np.log([2.5, 0.4])
        more[1][[state, -1]] -= np.log(2)
        more[2] -= more[2][0]
        starts.append(np.clip(np.concatenate((more[0], more[1], more[2][1:])), -_BOUND, _BOUND))
    return starts


def _parts(values: Floats, states: int) -> tuple[Floats, Floats, Floats]:
    """The logarithms of rates, stays and weights. The first weight is 1; of two states neither counts."""
    weights = np.zeros(states) if states == 2 else np.append(0.0, values[2 * states :])
    return values[:states], values[states : 2 * states], weights


def log_likelihood(values: Floats, states: int, gaps: Floats) -> float:
    """The log density of `gaps`, in units of their mean, the first beginning with an arrival of the stationary process.

    Rates are scaled to a mean of 1: the simulator is told the mean rate, and the likeliest law may have another.
    """
    rates, stays, weights = (np.exp(part) for part in _parts(values, states))
    left = weights.sum() - weights
    shares = weights * left * stays
    shares /= shares.sum()
    rates = rates / (shares @ rates)
    root = np.sqrt(shares)
    moves = np.tile(weights, (states, 1)) / (left * stays)[:, None]
    np.fill_diagonal(moves, -1 / stays - rates)
    symmetric = root[:, None] * moves / root[None, :]
    decay, vectors = np.linalg.eigh((symmetric + symmetric.T) / 2)
    step = vectors.T @ (rates[:, None] * vectors)
    first = (root * rates) @ vectors
    matrices = np.exp(np.multiply.outer(gaps, decay))[:, :, None] * step
    product, logs = _product(matrices)
    density = float(first @ product @ (vectors.T @ root))
    return math.log(density) + logs if density > 0 else -math.inf


def _product(matrices: Floats) -> tuple[Floats, float]:
    """The product of all matrices in order, as one that is scaled to 1 and the logarithm of its scale."""
    logs = 0.0
    while True:
        scale = np.abs(matrices).max(axis=(1, 2))
        if not (scale > 0).all():
            return matrices[0] * 0, -math.inf
        logs += float(np.log(scale).sum())
        matrices = matrices / scale[:, None, None]
        if len(matrices) == 1:
            return matrices[0], logs
        odd = matrices[-1:] if len(matrices) % 2 else matrices[:0]
        matrices = np.concatenate((matrices[: len(matrices) // 2 * 2 : 2] @ matrices[1::2], odd))


def _process(values: Floats, states: int, unit_s: float) -> MmppArrivals:
    """The process of these logarithms in units of the mean gap; the state with the lowest rate first."""
    rates, stays, weights = (np.exp(part) for part in _parts(values, states))
    order = np.argsort(rates)
    rates, weights = rates / rates.max(), weights / weights.max()
    found = (MmppState(_digits(rates[i]), _stay_ns(float(stays[i]) * unit_s), _digits(weights[i])) for i in order)
    return MmppArrivals(1 / unit_s, tuple(found))


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def _stay_ns(stay_s: float) -> int:
    return min(max(round(_digits(stay_s) * NS_PER_S), 1), YEAR_NS)
