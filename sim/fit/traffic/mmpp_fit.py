"""Markov-modulated Poisson processes fitted to gaps by maximum likelihood.

Between two arrivals the states move by exp(D x), D the generator less the rates; the chain is reversible, so D is
symmetric in other units and one eigendecomposition serves all gaps: in its eigenvectors every gap is a diagonal matrix
times one matrix that is the same for all. Stretches of gaps, and laws beside each other, are multiplied at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from batchsim.base.units import NS_PER_S, YEAR_NS
from batchsim.workload.processes import MmppArrivals, MmppState

Floats = NDArray[np.float64]

MOST_STATES = 4
MOST_GAPS = 10_000
"""Gaps by which a law is found, and from where to search by a fifth of them; it is judged by all. More are thinned to
as many in STRETCHES stretches."""
STRETCHES = 5
_STEPS = {2: 80, 3: 120, 4: 150}  # of the search
_NEAR = 1e-7  # how far apart laws are whose difference is a slope
_SCALED_EVERY = 4  # of the gaps of a stretch: by then no product is too small for a float
_IMPOSSIBLE = 1e6  # in the place of an infinite log likelihood a gap, which a search by differences cannot take
_BOUND = 14.0  # of the logarithms of rates, stays and weights in units of the mean gap


def fit_mmpp(gaps_s: Floats, tell: Callable[[str], None]) -> Iterator[tuple[MmppArrivals, float, int]]:
    """For 2 to MOST_STATES states the likeliest process, its log likelihood of all gaps and how many numbers it has.

    More states begin from the best law of fewer, one of its states being two. `tell` is called with each number of
    states before its fit.
    """
    unit = float(gaps_s.mean())
    gaps = gaps_s / unit
    sample, coarse = _sample(gaps, MOST_GAPS), _sample(gaps, MOST_GAPS // 5)
    best: Floats | None = None
    for states in range(2, MOST_STATES + 1):
        tell(f"{states} states")
        starts = _first_starts(sample) if best is None else _split(best, states - 1)
        tried = [_search(start, states, coarse) for start in starts]
        value, best = min(tried, key=lambda pair: pair[0])
        if len(coarse) < len(sample):
            value, best = _search(best, states, sample)
        if value >= _IMPOSSIBLE:
            return
        likelihood = log_likelihood(best, states, gaps) - len(gaps) * math.log(unit)
        yield _process(best, states, unit), likelihood, len(best) - 1


def _sample(gaps: Floats, most: int) -> Floats:
    """Stretches of `gaps`, evenly spaced, of `most` together."""
    if len(gaps) <= most:
        return gaps
    each = most // STRETCHES
    starts = np.linspace(0, len(gaps) - each, STRETCHES).astype(int)
    return np.concatenate([gaps[start : start + each] for start in starts])


def _search(start: Floats, states: int, gaps: Floats) -> tuple[float, Floats]:
    def minus(values: Floats) -> tuple[float, Floats]:
        near = np.concatenate((values[None], values + _NEAR * np.eye(len(values))))
        likelihoods = log_likelihoods(near, states, gaps)
        losses = np.where(np.isfinite(likelihoods), -likelihoods / len(gaps), _IMPOSSIBLE)
        return float(losses[0]), (losses[1:] - losses[0]) / _NEAR

    solution = minimize(
        minus,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=[(-_BOUND, _BOUND)] * len(start),
        options={"maxiter": _STEPS[states], "ftol": 1e-8},
    )
    return float(solution.fun), solution.x


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
    """`log_likelihoods` of one law."""
    return float(log_likelihoods(values[None], states, gaps)[0])


def log_likelihoods(values: Floats, states: int, gaps: Floats) -> Floats:
    """For each row of `values` the log density of `gaps`, in units of their mean, the first beginning with an arrival
    of the stationary process.

    Rates are scaled to a mean of 1: the simulator takes the mean rate as given, and the likeliest law may have another.
    """
    rates, stays, weights = (np.exp(np.array(part)) for part in zip(*(_parts(v, states) for v in values), strict=True))
    left = weights.sum(axis=1, keepdims=True) - weights
    shares = weights * left * stays
    shares /= shares.sum(axis=1, keepdims=True)
    rates = rates / (shares * rates).sum(axis=1, keepdims=True)
    root = np.sqrt(shares)
    moves = weights[:, None, :] / (left * stays)[:, :, None]
    diagonal = np.arange(states)
    moves[:, diagonal, diagonal] = -1 / stays - rates
    symmetric = root[:, :, None] * moves / root[:, None, :]
    decay, vectors = np.linalg.eigh((symmetric + symmetric.transpose(0, 2, 1)) / 2)
    turned = vectors.transpose(0, 2, 1)
    product, logs = _product(decay, turned @ (rates[:, :, None] * vectors), gaps)
    density = (((root * rates)[:, None, :] @ vectors) @ product @ (turned @ root[:, :, None]))[:, 0, 0]
    possible = density > 0
    return np.where(possible, np.log(np.where(possible, density, 1.0)) + logs, -np.inf)


def _product(decay: Floats, step: Floats, gaps: Floats) -> tuple[Floats, Floats]:
    """For each law the product over all gaps x, in order, of diag(exp(decay x)) step: scaled to 1, and the logarithm of
    its scale. Gaps are cut into as many stretches as each has gaps, and these multiplied side by side."""
    laws, states = decay.shape
    length = max(math.isqrt(len(gaps)), 1)
    cut = len(gaps) // length * length
    product, logs = np.broadcast_to(np.eye(states), (laws, 1, states, states)), np.zeros(laws)
    for part in (gaps[:cut].reshape(-1, length), gaps[None, cut:]):  # the last stretch is what is left
        factors = np.broadcast_to(np.eye(states), (laws, len(part), states, states))
        for i in range(part.shape[1]):
            factors = factors * np.exp(decay[:, None, :] * part[None, :, i, None])[:, :, None, :]
            factors = (factors.reshape(laws, -1, states) @ step).reshape(factors.shape)
            if i % _SCALED_EVERY == 0 or i == part.shape[1] - 1:
                factors, logs = _scaled(factors, logs)
        product = np.concatenate((product, factors), axis=1)
    while product.shape[1] > 1:
        odd = product[:, -1:] if product.shape[1] % 2 else product[:, :0]
        pairs = product[:, : product.shape[1] // 2 * 2 : 2] @ product[:, 1::2]
        product, logs = _scaled(np.concatenate((pairs, odd), axis=1), logs)
    return product[:, 0], logs


def _scaled(matrices: Floats, logs: Floats) -> tuple[Floats, Floats]:
    """The matrices of each law scaled to 1, and `logs` with the logarithms of their scales: -inf where one is 0."""
    scale = np.abs(matrices).max(axis=(2, 3))
    with np.errstate(divide="ignore"):
        logs = logs + np.log(scale).sum(axis=1)
    return matrices / np.where(scale > 0, scale, 1.0)[:, :, None, None], logs


def _process(values: Floats, states: int, unit_s: float) -> MmppArrivals:
    """The process of these logarithms in units of the mean gap; the state with the lowest rate first."""
    rates, stays, weights = (np.exp(part) for part in _parts(values, states))
    order = np.argsort(rates)
    rates, weights = rates / rates.max(), weights / weights.max()
    slow_first = (MmppState(_digits(rates[i]), _stay_ns(float(stays[i]) * unit_s), _digits(weights[i])) for i in order)
    return MmppArrivals(1 / unit_s, tuple(slow_first))


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def _stay_ns(stay_s: float) -> int:
    return min(max(round(_digits(stay_s) * NS_PER_S), 1), YEAR_NS)
