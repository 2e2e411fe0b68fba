"""`batchsim/WholeBatch-v0`: how many requests the next whole batch takes, on the engine of a scenario."""

from __future__ import annotations

from typing import Any

import gymnasium  # pyright: ignore[reportMissingImports]

from batchsim.gym.engine_env import EngineEnv
from batchsim.gym.request_objectives import Objectives
from batchsim.policies.families.batch_agent import BATCH_OBSERVED, BatchAgent, BatchAgentConfig


class Told(BatchAgent):
    """An agent of whole batches whose next answer is given to it."""

    answer = 0

    def decide(self, observed: tuple[float, ...]) -> int:
        return self.answer


class WholeBatchEnv(EngineEnv):
    """Decisions whenever the engine is idle and requests wait: action k of `Discrete(max_batch_size + 1)` starts a
    batch of the first k of them, or of all that there are; 0 waits for the next arrival, for `max_wait` at most.

    Observation: `BATCH_OBSERVED` of `batch_agent.py`. All else: see `EngineEnv`.
    """

    quantities = BATCH_OBSERVED
    agent = Told
    usual_config = BatchAgentConfig()
    usual_objectives = Objectives(e2e_s=10.0)

    def actions_of(self, config: BatchAgentConfig) -> gymnasium.Space[Any]:
        return gymnasium.spaces.Discrete(config.max_batch_size + 1)

    def answered(self, scheduler: Any, action: Any) -> None:
        scheduler.answer = int(action)
