"""Policies of a user's own that fail when more than `limit` requests wait: what a heavy load brings out."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.policy_config import PolicyConfig, Traits
from batchsim.kernel.protocols import PolicyContext
from batchsim.policies.families.continuous import Continuous, ContinuousConfig


@dataclass(frozen=True)
class LimitConfig(PolicyConfig):
    limit: int
    max_num_seqs: int = 8

    @property
    def traits(self) -> Traits:
        return Traits(max_num_seqs=self.max_num_seqs)


class _Limited(Continuous):
    def __init__(self, config: LimitConfig, context: PolicyContext) -> None:
        super().__init__(ContinuousConfig(config.max_num_seqs, None), context)
        self.limit = config.limit

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        return self.fail() if self.num_waiting > self.limit else super().schedule(now_ns, drain)

    def fail(self) -> Batch | Idle:
        raise NotImplementedError


class Forgets(_Limited):
    """Answers neither a batch nor a time, which the engine calls an error of the policy."""

    config = LimitConfig

    def fail(self) -> Batch | Idle:
        return None  # type: ignore[return-value]


class Crashes(_Limited):
    """Has a bug."""

    def fail(self) -> Batch | Idle:
        return 1 // 0  # type: ignore[return-value]


class Dies(_Limited):
    """Is killed by the system."""

    def fail(self) -> Batch | Idle:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError
