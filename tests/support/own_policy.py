"""A policy of a user's own, as a scenario names it by its import path."""

from __future__ import annotations

from dataclasses import dataclass

from batchsim.kernel.policy_config import PolicyConfig, Traits
from batchsim.kernel.protocols import PolicyContext
from batchsim.policies.families.continuous import Continuous, ContinuousConfig


@dataclass(frozen=True)
class OwnConfig(PolicyConfig):
    """`spread` is a tuple only to see that tuples survive."""

    max_num_seqs: int
    spread: tuple[int, ...] = ()

    @property
    def traits(self) -> Traits:
        return Traits(max_num_seqs=self.max_num_seqs)


class Own(Continuous):
    """Continuous batching with another config."""

    def __init__(self, config: OwnConfig, context: PolicyContext) -> None:
        super().__init__(ContinuousConfig(config.max_num_seqs, None), context)
