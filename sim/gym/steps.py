"""`batchsim/Steps-v0`: token budget and slots of continuous batching, held for a while, on the engine of a scenario."""

from __future__ import annotations

from typing import Any

import gymnasium  # pyright: ignore[reportMissingImports]

from batchsim.gym.engine_env import EngineEnv
from batchsim.gym.request_objectives import Objectives
from batchsim.policies.families.step_agent import STEP_OBSERVED, StepAgent, StepAgentConfig


class Told(StepAgent):
    """An agent of steps whose next answer is given to it."""

    answer = (0, 0)

    def decide(self, observed: tuple[float, ...]) -> tuple[int, int]:
        return self.answer


class StepsEnv(EngineEnv):
    """Decisions every `config.every`, before a step: action (i, j) of `MultiDiscrete` takes the i-th of `budgets` as
    the tokens of a step and the j-th of `caps` as the most sequences that run, until the next one.

    Observation: `STEP_OBSERVED` of `step_agent.py`. All else: see `EngineEnv`.
    """

    quantities = STEP_OBSERVED
    agent = Told
    usual_config = StepAgentConfig(max_num_seqs=256, max_num_batched_tokens=8192)
    usual_objectives = Objectives(ttft_s=1.0, tpot_s=0.05)

    def actions_of(self, config: StepAgentConfig) -> gymnasium.Space[Any]:
        return gymnasium.spaces.MultiDiscrete([len(config.budgets), len(config.caps)])

    def answered(self, scheduler: Any, action: Any) -> None:
        scheduler.answer = (int(action[0]), int(action[1]))
