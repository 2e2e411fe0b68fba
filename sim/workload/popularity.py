"""How evenly several things of a kind are asked for: LoRA adapters, or models by the classes of their requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from batchsim.base.ranges import Config, check_ranges
from batchsim.base.units import Share
from batchsim.workload.sharing import Exponent
from batchsim.workload.tagged import ByKind

SHARE_TOLERANCE = 1e-9
"""Shares are decimal percentages: their sum misses 1 by rounding only."""


@dataclass(frozen=True)
class UniformPopularity(Config):
    """All are asked for alike."""

    kind: Literal["uniform"] = "uniform"


@dataclass(frozen=True)
class ZipfPopularity(Config):
    """Number k of 1, 2, ... is asked for with a chance in proportion to k^-alpha."""

    alpha: Exponent
    """The exponent: 0, all alike; 1, the second half as often as the first."""
    kind: Literal["zipf"] = "zipf"


@dataclass(frozen=True)
class SharePopularity(Config):
    """Each has a share of the requests; all together 100 %."""

    shares: tuple[Share, ...]
    """The shares, one for each."""
    kind: Literal["shares"] = "shares"

    def __post_init__(self) -> None:
        check_ranges(self)
        if abs(sum(self.shares) - 1) > SHARE_TOLERANCE:
            raise ValueError(f"popularity.shares add up to {100 * sum(self.shares):.6g}%. They must make 100%.")


@dataclass(frozen=True)
class FirstPopularity(Config):
    """The first has a share of the requests, the others are asked for alike."""

    share: Share
    """The share of the first one."""
    kind: Literal["first"] = "first"


Popularity = Annotated[UniformPopularity | ZipfPopularity | SharePopularity | FirstPopularity, ByKind()]


def shares_of(law: Popularity, count: int) -> list[float]:
    """The share of each of `count` things, the first one first."""
    if isinstance(law, SharePopularity):
        return list(law.shares)
    if isinstance(law, FirstPopularity):
        return [law.share, *[(1 - law.share) / (count - 1)] * (count - 1)]
    alpha = law.alpha if isinstance(law, ZipfPopularity) else 0.0
    weights = [k**-alpha for k in range(1, count + 1)]
    return [weight / sum(weights) for weight in weights]


def check_popularity(law: Popularity, classes: Mapping[str, Any], *, by_row: bool) -> None:
    """ValueError where the `classes` of a workload have shares of their own, those of the rows of a trace, or are too
    many or few for the law."""
    if not classes or by_row:
        why = "the rows of the trace say of which class each request is" if by_row else "the workload has no classes"
        raise ValueError(f"popularity: {why}. Drop it{'' if by_row else ', or write classes'}.")
    for name, each in classes.items():
        if each.share is not None or each.offline is not None:
            key = "offline" if each.share is None else "share"
            raise ValueError(f"popularity says the shares of all classes, and classes.{name} has {key}. Drop one.")
    if isinstance(law, FirstPopularity) and len(classes) < 2:
        raise ValueError("popularity first has others beside the first, and there is one class. Drop it.")
    if isinstance(law, SharePopularity) and len(law.shares) != len(classes):
        raise ValueError(f"popularity.shares has {len(law.shares)} shares, and there are {len(classes)} classes.")
