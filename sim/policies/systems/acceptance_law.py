"""What a simulation supposes of draft tokens: which share of them is accepted, by position and class of requests."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from batchsim.base.ranges import Range

MAX_DRAFTS = 64
"""The most draft tokens a step: far above what engines verify."""
Probability = Annotated[float, Range(0, 1)]
Law = Probability | tuple[Probability, ...]
"""Draft tokens accepted: one number, the probability of each draft where those before it are right; or for each
position the share of steps in which its draft is accepted, as engines count it."""
Laws = Law | Literal["trace"] | dict[str, Law]
"""A law, or one by request class, in which "" stands for all other classes, or `trace`: for each request the
probability of each draft in its row of the workload's trace."""


def shares_by_class(acceptance: Laws, count: int, counted_by: str) -> dict[str, tuple[float, ...]]:
    """By request class, "" for all others: for each of `count` positions the share of steps in which its draft is
    accepted; empty where a trace says it of each request.

    ValueError for another number of positions than the knob `counted_by` says, for shares that rise and for no class.
    """
    if acceptance == "trace":
        return {}
    laws = acceptance if isinstance(acceptance, dict) else {"": acceptance}
    by_class: dict[str, tuple[float, ...]] = {}
    for name, law in laws.items():
        shares = law if isinstance(law, tuple) else tuple(law**n for n in range(1, count + 1))
        of_class = f" of class {name}" if name else ""
        if len(shares) != count:
            raise ValueError(
                f"acceptance{of_class} has {len(shares)} positions, {counted_by} is {count}. Write as many, or one"
                " number"
            )
        if any(later > share for share, later in pairwise(shares)):
            raise ValueError(
                f"acceptance{of_class} rises: {', '.join(f'{share:g}' for share in shares)}. A draft is accepted"
                " only with those before it: write shares that fall"
            )
        by_class[name] = shares
    if not by_class:
        raise ValueError('acceptance names no class. Write one law, or one by class, "" for all others')
    return by_class
