"""A policy of a user's own, as a scenario names it by its import path."""

from __future__ import annotations

from dataclasses import dataclass

from sim.policies.continuous import Continuous, ContinuousConfig
from sim.types import PolicyContext


@dataclass(frozen=True)
class OwnConfig:
    """`spread` is a tuple only to see that tuples survive."""

    max_num_seqs: int
    spread: tuple[int, ...] = ()


class Own(Continuous):
    """Continuous batching with another config."""

    def __init__(self, config: OwnConfig, context: PolicyContext) -> None:
        super().__init__(ContinuousConfig(config.max_num_seqs, None), context)
