"""A policy on a real model: a tiny transformer of random weights on the CPU, where torch is installed.

Steps take the time that the cost of the case says, so that the records must equal those of the simulation; what the
model adds is that every block read was written before.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from batchsim.calibrate.engine.executor import TorchExecutor
from batchsim.calibrate.engine.prompts import Prompts
from batchsim.calibrate.engine.runner import ModelRunner, build_runner
from batchsim.deployment.model import ModelSpec
from batchsim.drive.live import VirtualClock, live
from batchsim.kernel.batch import Batch, Landed, StepResult
from batchsim.kernel.engine_loop import SYNC, EngineLoop
from batchsim.kernel.kv_blocks import TableKV
from batchsim.kernel.policy_config import PromptLookup
from batchsim.kernel.protocols import CostModel
from batchsim.kernel.tokens import TokenIds
from batchsim.kernel.types import Arrival, Sequence
from batchsim.testing.random_configs import MAX_MODEL_LEN
from batchsim.testing.random_engines import Case, Listed, TokenCost

_TINY = ModelSpec("tiny", "llama", 32, 1, 2, 1, 16, 48, 61, 512, dtype="float32")
_BLOCKS, _SWAP_BLOCKS, _ROWS, _TOKENS = 60, 60, 64, 20_000


class Timed(TorchExecutor):
    """The executor with a cost model's durations, so that a run depends on nothing else; keeps all tokens."""

    def __init__(
        self,
        runner: ModelRunner,
        kv: TableKV,
        cost: CostModel,
        max_model_len: int,
        loop: EngineLoop = SYNC,
        lookup: PromptLookup | None = None,
        prompts: Prompts | None = None,
    ) -> None:
        super().__init__(runner, kv, max_model_len=max_model_len, prompts=prompts, loop=loop, lookup=lookup)
        self.cost = cost
        self.answers: dict[int, list[int]] = {}

    def execute(self, batch: Batch) -> StepResult:
        duration_ns = self.cost.step_ns(batch)
        result = super().execute(batch)
        if result.landing is None:
            return StepResult(duration_ns, self.kept(result.finished), result.verified)
        landing = result.landing

        def landed() -> Landed:
            ended = landing()
            return Landed(self.kept(ended.finished), verified=ended.verified)

        return StepResult(duration_ns, [], landing=landed)

    def kept(self, finished: list[Sequence]) -> list[Sequence]:
        """`finished`, whose answers are kept."""
        for seq in finished:
            self.answers[seq.request.id] = self.tokens(seq)
        return finished


def of_prompts(one: Arrival) -> Arrival:
    """With prompt text in place of answers, which a model may not have given yet."""
    if one.request.tokens is None:
        return one
    segments = [(stream + stream % 2, start, length) for stream, start, length in one.request.tokens.segments]
    return replace(one, request=replace(one.request, tokens=TokenIds.of(segments)))


def on_model(case: Case) -> Case | None:
    """The case as a model can run it: with texts that are there; None of engines ahead of results, pipelines, drafts,
    and where vLLM shares blocks that were never computed, under priority."""
    traits = case.config.traits
    if traits.loop.is_ahead or case.stages > 1 or traits.speculation is not None:
        return None
    if getattr(case.config, "policy", "") == "priority" and traits.prefix_cache:
        return None
    following = tuple((think_ns, of_prompts(one)) for think_ns, one in case.workload.following)
    return replace(case, workload=Listed(tuple(map(of_prompts, case.workload.known)), following))


@cache
def _runner(block_size: int) -> ModelRunner:
    return build_runner(
        _TINY,
        device="cpu",
        num_blocks=_BLOCKS,
        block_size=block_size,
        num_swap_blocks=_SWAP_BLOCKS,
        max_num_seqs=_ROWS,
        max_num_batched_tokens=_TOKENS,
        max_model_len=MAX_MODEL_LEN,
    )


def model_equals_simulated(drawn: Case) -> None:
    """On the model the policy leaves the records of its simulation; of cases that no model can run nothing is asked."""
    case = on_model(drawn)
    if case is None:
        return
    core = case.engine(ids=True)
    kv: Any = core.scheduler.kv
    core.executor = Timed(_runner(case.block_size), kv, TokenCost(), MAX_MODEL_LEN)
    live(core, case.workload, VirtualClock())
    played, simulated = core.recorder.records(), case.live(ids=True).recorder.records()
    for table in ("requests", "steps", "states", "lanes"):
        assert np.array_equal(getattr(played, table), getattr(simulated, table)), f"{table} differ on the model"
