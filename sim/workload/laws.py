"""Laws of prompt and output lengths, and drawing from them.

A draw is rounded to whole tokens and then clipped to [min, max]: production lengths pile up at their limits in the same
way (Azure 2023 code: 3.7 % of the prompts at 7435-7437 tokens). Clipping moves the mean, which the caller reports.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from batchsim.base.later import np
from batchsim.base.ranges import INT32_MAX, Config, PositiveInt, Range, check_ranges
from batchsim.workload.tagged import ByKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from batchsim.workload.traces.trace_rows import Ints

Cv = Annotated[float, Range(1e-3, 100)]
"""Coefficient of variation. Recorded traffic has 0.3 to 13; far outside, gamma draws lose all digits."""
MeanTokens = Annotated[float, Range(1, INT32_MAX)]
Weight = Annotated[float, Range(0, 1e12)]


@dataclass(frozen=True)
class FixedTokens(Config):
    """Always `tokens`.

    >>> batchsim.Fixed(100).mean_tokens
    100
    """

    tokens: PositiveInt
    """The length of each."""
    kind: Literal["fixed"] = "fixed"

    @property
    def mean_tokens(self) -> float:
        return self.tokens


@dataclass(frozen=True)
class UniformTokens(Config):
    """Every length from `min` to `max` equally likely, both included.

    >>> batchsim.Uniform(2, 12).mean_tokens
    7.0
    """

    min: PositiveInt
    """The least length."""
    max: PositiveInt
    """The largest length."""
    kind: Literal["uniform"] = "uniform"

    def __post_init__(self) -> None:
        check_ranges(self)
        _check_order(self.min, self.max)

    @property
    def mean_tokens(self) -> float:
        return (self.min + self.max) / 2


@dataclass(frozen=True)
class _SpreadTokens(Config):
    mean: MeanTokens
    """Mean of what is drawn, before it is clipped."""
    cv: Cv
    """Coefficient of variation of what is drawn: standard deviation over mean."""
    min: PositiveInt = 1
    """The least that is drawn; what is below it is drawn as it."""
    max: PositiveInt | None = None
    """The most that is drawn; what is above it is drawn as it."""

    def __post_init__(self) -> None:
        check_ranges(self)
        _check_mean(self.mean, self.min, self.max)

    @property
    def mean_tokens(self) -> float:
        return self.mean


@dataclass(frozen=True)
class LognormalTokens(_SpreadTokens):
    """Lognormal with this mean and coefficient of variation before it is clipped to [min, max].

    >>> batchsim.Lognormal(mean=900, cv=1.0, max=8000).max
    8000
    """

    kind: Literal["lognormal"] = "lognormal"


@dataclass(frozen=True)
class GammaTokens(_SpreadTokens):
    """Gamma with this mean and coefficient of variation before it is clipped to [min, max]."""

    kind: Literal["gamma"] = "gamma"


@dataclass(frozen=True)
class EmpiricalTokens(Config):
    """One of `values`, equally likely or in proportion to `weights`."""

    values: tuple[PositiveInt, ...]
    """The lengths to draw from."""
    weights: tuple[Weight, ...] | None = None
    """How often each is drawn, in proportion; all alike unless given."""
    kind: Literal["empirical"] = "empirical"

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.values:
            raise ValueError("values is empty. List the lengths to draw from.")
        if self.weights is None:
            return
        if len(self.weights) != len(self.values):
            raise ValueError(f"{len(self.weights)} weights for {len(self.values)} values. Write one weight a value.")
        if not sum(self.weights):
            raise ValueError("weights add up to 0. Not all can be 0.")

    @property
    def mean_tokens(self) -> float:
        return float(np.average(self.values, weights=self.weights))


Law = Annotated[FixedTokens | UniformTokens | LognormalTokens | GammaTokens | EmpiricalTokens, ByKind()]


def _check_order(low: int, high: int) -> None:
    if high < low:
        raise ValueError(f"max is {high}, below min {low}.")


def _check_mean(mean: float, low: int, high: int | None) -> None:
    if high is not None:
        _check_order(low, high)
    if mean < low or (high is not None and mean > high):
        raise ValueError(f"mean {mean:g} lies outside min {low} and max {high}. Widen them or move the mean.")


@dataclass(frozen=True)
class DrawnTokens:
    """Lengths in tokens; `drawn` are the same before they were clipped to the law's min and max."""

    tokens: Ints
    drawn: NDArray[np.float64] | Ints

    def scaled(self, factor: float) -> DrawnTokens:
        """These lengths times `factor`, in whole tokens, at least 1."""
        if factor == 1:
            return self
        tokens, drawn = (np.maximum(np.rint(x * factor), 1) for x in (self.tokens, self.drawn))
        return DrawnTokens(tokens.astype(np.int64), drawn)

    def where(self, chosen: NDArray[np.bool_], other: DrawnTokens) -> DrawnTokens:
        """These lengths where `chosen`, elsewhere those of `other`."""
        return DrawnTokens(np.where(chosen, self.tokens, other.tokens), np.where(chosen, self.drawn, other.drawn))


def draw_tokens(law: Law, rng: np.random.Generator, size: int) -> DrawnTokens:
    """`size` lengths in tokens. The first n do not depend on `size`: every sampler takes its randomness in order."""
    if isinstance(law, FixedTokens):
        return _unclipped(np.full(size, law.tokens))
    if isinstance(law, UniformTokens):
        return _unclipped(law.min + (rng.random(size) * (law.max - law.min + 1)).astype(np.int64))
    if isinstance(law, EmpiricalTokens):
        weights = np.ones(len(law.values)) if law.weights is None else np.array(law.weights)
        edges = np.cumsum(weights / weights.sum())
        edges[np.flatnonzero(weights)[-1] :] = 1.0  # rounding must leave no gap below 1, nor reach a weight of 0
        index = np.searchsorted(edges, rng.random(size), side="right")
        return _unclipped(np.array(law.values)[index])
    if isinstance(law, GammaTokens):
        shape = law.cv**-2
        lengths = rng.standard_gamma(shape, size) * (law.mean / shape)
    else:
        variance = math.log1p(law.cv**2)
        lengths = np.exp(math.log(law.mean) - variance / 2 + math.sqrt(variance) * rng.standard_normal(size))
    drawn = np.rint(lengths)
    top = INT32_MAX if law.max is None else law.max
    return DrawnTokens(np.clip(drawn, law.min, top).astype(np.int64), drawn)


def _unclipped(tokens: Ints) -> DrawnTokens:
    return DrawnTokens(tokens, tokens)
