"""The power of two choices: of two replicas drawn at random, the one with fewer outstanding requests.

Source: `power_of_two` of sgl-router, sgl-router/src/policies/power_of_two.rs in sgl-project/sglang; the rule is that of
M. Mitzenmacher, The power of two choices in randomized load balancing, IEEE TPDS 12 (10), 2001.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from batchsim.base.ranges import Config
from batchsim.drive.fleet.routers.router import Outstanding, Stage, drawn
from batchsim.kernel.types import Request


@dataclass(frozen=True)
class PowerOfTwoConfig(Config):
    """Of two replicas at random the one with fewer outstanding requests."""

    kind: Literal["power_of_two"] = "power_of_two"

    def build(self, seed: int) -> PowerOfTwo:
        return PowerOfTwo(seed)


class PowerOfTwo:
    """See the module's text. The draws are by the request's id, so that policies and loads do not change them."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._requests = Outstanding()

    def route(self, request: Request, stage: Stage, up: Sequence[int]) -> int:
        count, bits = len(up), drawn(self._seed, f"power of two, {stage}", request.id)
        first = (bits >> 32) * count >> 32
        second = first
        if count > 1:
            second = ((bits & 0xFFFFFFFF) * (count - 1) >> 32) + 1 + first
        held = self._requests.by_replica
        replica = min(up[first], up[second % count], key=lambda one: held.get(one, 0))
        self._requests.add(replica, 1)
        return replica

    def answered(self, request: Request, stage: Stage, replica: int) -> None:
        self._requests.add(replica, -1)
