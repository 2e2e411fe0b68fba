"""`batchsim/Steps-v0`: token budget and slots of continuous batching, held for a while, on the engine of a scenario."""

from __future__ import annotations

from collections.abc import Sequence
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

    def __init__(
        self,
        scenario: str = "bursty",
        overrides: Sequence[str] = (),
        *,
        config: StepAgentConfig | None = None,
        objectives: Objectives | None = None,
        load: float | None = None,
        horizon_s: float | None = None,
        second_cost: float = 0.0,
        discount_per_s: float = 1.0,
    ) -> None:
        config = StepAgentConfig(max_num_seqs=256, max_num_batched_tokens=8192) if config is None else config
        super().__init__(
            config,
            Told,
            scenario,
            overrides,
            Objectives(ttft_s=1.0, tpot_s=0.05) if objectives is None else objectives,
            load=load,
            horizon_s=horizon_s,
            second_cost=second_cost,
            discount_per_s=discount_per_s,
        )
        self.action_space = gymnasium.spaces.MultiDiscrete([len(config.budgets), len(config.caps)])

    def answered(self, scheduler: Any, action: Any) -> None:
        scheduler.answer = (int(action[0]), int(action[1]))
