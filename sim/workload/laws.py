"""Laws of prompt and output lengths, and drawing from them.

A draw is rounded to whole tokens and then clipped to [min, max]: production lengths pile up at their limits in the
same way (Azure 2023 code: 3.7 % of the prompts at 7435-7437 tokens). Clipping moves the mean; whoever draws reports it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from sim.workload.table import Ints
from sim.workload.tagged import ByKind

STRICT: dict[str, object] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}
"""What every config of a workload asks of the validator."""

MAX_TOKENS = 2**31 - 1  # no engine holds a longer request; more is a slip

MIN_CV, MAX_CV = 1e-3, 100.0  # recorded traffic lies between 0.3 and 13; far outside, gamma draws lose all digits


def check_cv(cv: float) -> None:
    """ValueError unless `cv` is one that can be drawn with."""
    if not MIN_CV <= cv <= MAX_CV:
        raise ValueError(f"cv is {cv:g}. It must be from {MIN_CV:g} to {MAX_CV:g}.")


def check_positive(name: str, value: float) -> None:
    """ValueError unless `value` is a finite number above 0."""
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} is {value:g}. It must be above 0.")


@dataclass(frozen=True)
class FixedTokens:
    """Always `tokens`."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT
    tokens: int
    kind: Literal["fixed"] = "fixed"

    def __post_init__(self) -> None:
        _check_range(self.tokens, None, "tokens")

    @property
    def mean_tokens(self) -> float:
        return self.tokens


@dataclass(frozen=True)
class UniformTokens:
    """Every length from `min` to `max` equally likely, both included."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT
    min: int
    max: int
    kind: Literal["uniform"] = "uniform"

    def __post_init__(self) -> None:
        _check_range(self.min, self.max)

    @property
    def mean_tokens(self) -> float:
        return (self.min + self.max) / 2


@dataclass(frozen=True)
class LognormalTokens:
    """Lognormal with this mean and coefficient of variation before it is clipped to [min, max]."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT
    mean: float
    cv: float
    min: int = 1
    max: int | None = None
    kind: Literal["lognormal"] = "lognormal"

    def __post_init__(self) -> None:
        _check_spread(self.mean, self.cv, self.min, self.max)

    @property
    def mean_tokens(self) -> float:
        return self.mean


@dataclass(frozen=True)
class GammaTokens:
    """Gamma with this mean and coefficient of variation before it is clipped to [min, max]."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT
    mean: float
    cv: float
    min: int = 1
    max: int | None = None
    kind: Literal["gamma"] = "gamma"

    def __post_init__(self) -> None:
        _check_spread(self.mean, self.cv, self.min, self.max)

    @property
    def mean_tokens(self) -> float:
        return self.mean


@dataclass(frozen=True)
class EmpiricalTokens:
    """One of `values`, equally likely or in proportion to `weights`."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT
    values: tuple[int, ...]
    weights: tuple[float, ...] | None = None
    kind: Literal["empirical"] = "empirical"

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("values is empty. List the lengths to draw from.")
        _check_range(min(self.values), max(self.values), "the smallest of values")
        if self.weights is None:
            return
        if len(self.weights) != len(self.values):
            raise ValueError(f"{len(self.weights)} weights for {len(self.values)} values. Write one weight a value.")
        if not all(weight >= 0 for weight in self.weights) or not 0 < sum(self.weights) < math.inf:
            raise ValueError(f"weights add up to {sum(self.weights):g}. They must be 0 or more, finite and not all 0.")

    @property
    def mean_tokens(self) -> float:
        return float(np.average(self.values, weights=self.weights))


Law = Annotated[FixedTokens | UniformTokens | LognormalTokens | GammaTokens | EmpiricalTokens, ByKind()]


def _check_range(low: int, high: int | None, name: str = "min") -> None:
    if low < 1:
        raise ValueError(f"{name} is {low}. A length is at least 1 token.")
    if max(low, high or 0) > MAX_TOKENS:
        raise ValueError(f"a length of {max(low, high or 0)} tokens is asked. At most {MAX_TOKENS} are possible.")
    if high is not None and high < low:
        raise ValueError(f"max is {high}, below min {low}.")


def _check_spread(mean: float, cv: float, low: int, high: int | None) -> None:
    check_positive("mean", mean)
    check_cv(cv)
    _check_range(low, high)
    _check_range(max(low, math.floor(mean)), None)
    if mean < low or (high is not None and mean > high):
        raise ValueError(f"mean {mean:g} lies outside min {low} and max {high}. Widen them or move the mean.")


@dataclass(frozen=True)
class DrawnTokens:
    """Lengths, and the whole numbers drawn before the law's min and max changed them."""

    tokens: Ints
    drawn: NDArray[np.float64] | Ints


def draw_tokens(law: Law, rng: np.random.Generator, size: int) -> DrawnTokens:
    """`size` lengths of `law`. The first n do not depend on `size`: every sampler takes its randomness in order."""
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
    top = MAX_TOKENS if law.max is None else law.max
    return DrawnTokens(np.clip(drawn, law.min, top).astype(np.int64), drawn)


def _unclipped(tokens: Ints) -> DrawnTokens:
    return DrawnTokens(tokens, tokens)
