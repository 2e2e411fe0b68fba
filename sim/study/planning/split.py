"""How many engines prefill to how many decode: the values of `pools` in a plan's `free`.

    free: {pools: [mixed, {prefill: 3, decode: 1}, {prefill: {count: 2, tp: 1}, decode: {count: 1, tp: 2}}]}

With the ratio chosen a plan counts sets of engines as it counts replicas: two sets of 3 and 1 are six prefill and two
decode engines in one pool each. So the search has one number to find for each ratio, and mixed engines stand beside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd
from typing import Any

POOLS, MIXED = "pools", "mixed"
DEPLOYED = ("tp", "pp", "ep", "dp_attention", "weights", "moe", "kv")
"""Of a plan's `free`, the keys of the GPUs' deployments."""
SIDES = ("prefill", "decode")
MOST = 64
"""Engines of a side in a set."""
_EXAMPLE = "mixed, or how many engines prefill and decode, like {prefill: 3, decode: 1}"


@dataclass(frozen=True)
class Side:
    """The engines of one side in a set, and the keys of their deployment that are `stated` for them alone."""

    count: int
    stated: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def pool(self, cost: Mapping[str, Any], sets: int) -> dict[str, Any]:
        """The side as a scenario writes it, in this number of `sets` of engines with a `cost`."""
        own = {"cost": {**cost, **self.stated}} if self.stated else {}
        return {"count": self.count * sets, **own}


def split_of(value: Any) -> dict[str, Side] | None:
    """The sides of a value that was checked; None for mixed engines."""
    if value == MIXED:
        return None
    sides: dict[str, Side] = {}
    for side in SIDES:
        written = value[side] if isinstance(value[side], dict) else {"count": value[side]}
        sides[side] = Side(written["count"], {key: own for key, own in written.items() if key != "count"})
    return sides


def split_text(value: Any) -> str:
    """A value in words: `3 prefill + 1 decode`, with what is stated for a side alone."""
    split = split_of(value)
    if split is None:
        return MIXED
    return " + ".join(f"{each.count} {side}{_stated(each)}" for side, each in split.items())


def _stated(side: Side) -> str:
    return f" ({', '.join(f'{key} {value}' for key, value in side.stated.items())})" if side.stated else ""


def check_split(value: Any) -> None:
    """ValueError, which says what to write, for a value that is none."""
    if value == MIXED:
        return
    if not isinstance(value, dict) or set(value) != set(SIDES):
        raise ValueError(f"{value} is no split. Write {_EXAMPLE}.")
    for side in SIDES:
        written = value[side] if isinstance(value[side], dict) else {"count": value[side]}
        if unknown := next((key for key in written if key not in ("count", *DEPLOYED)), ""):
            raise ValueError(f"{side} has {unknown}. A side has count and {', '.join(DEPLOYED)}.")
        count = written.get("count")
        if type(count) is not int or not 1 <= count <= MOST:
            raise ValueError(f"{side} counts {count} engines. Write a whole number from 1 to {MOST}.")
    counts = [each.count for each in (split_of(value) or {}).values()]
    if (common := gcd(*counts)) > 1:
        fewer = ", ".join(f"{side}: {count // common}" for side, count in zip(SIDES, counts, strict=True))
        raise ValueError(
            f"{counts[0]} to {counts[1]} engines is the ratio {counts[0] // common} to {counts[1] // common}, of which"
            f" the plan finds how many sets. Write {{{fewer}}}."
        )
