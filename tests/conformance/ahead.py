"""Engines of random cases that schedule ahead of results, with integer times for host and device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from batchsim.kernel.batch import Batch
from batchsim.kernel.core import EngineCore
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import Recorder
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kv.choice import new_kv
from batchsim.policies.registry import POLICIES
from batchsim.testing.random_configs import MAX_MODEL_LEN
from batchsim.testing.random_engines import Case, TokenCost


@dataclass(frozen=True)
class LaneTokenCost(TokenCost):
    """TokenCost for the device, and a host that is sometimes the slower one."""

    def device_ns(self, batch: Batch) -> int:
        return self.step_ns(batch)

    def stages_ns(self, batch: Batch) -> tuple[int, ...]:
        return (self.step_ns(batch),)

    def host_ns(self, batch: Batch | None) -> tuple[int, int]:
        return (100_000, 0) if batch is None else (300_000 * len(batch.chunks), 1_000_000)


def asynchronous(case: Case) -> Case:
    """The vLLM engine of `case` with asynchronous scheduling."""
    return replace(case, config=replace(case.config, async_scheduling=True))


def engine_ahead(case: Case, executor: type[SimExecutor] = SimExecutor, *, ids: bool = False) -> EngineCore:
    """A fresh engine in the loop of the case's policy. ScenarioError if the policy refuses this memory."""
    loop = case.config.traits.loop
    cost = LaneTokenCost(per_context_ns=37 if case.luck is None else 0)  # with drafts it may be known late
    kv = new_kv(case.config, case.num_blocks, case.block_size, case.num_swap_blocks, ids=ids)
    scheduler: Any = POLICIES[case.kind][1](case.config, PolicyContext(kv, MAX_MODEL_LEN, loop=loop))
    made = executor(cost, MAX_MODEL_LEN, loop, case.luck)
    return EngineCore(scheduler, made, Recorder(), max_model_len=MAX_MODEL_LEN, stop_ns=case.stop_ns, loop=loop)
