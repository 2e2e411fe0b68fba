"""Engines that run a scheduler on a tiny model, and what is checked of the tokens that come out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the executor runs on torch: pip install 'batchsim[live]'")

from batchsim.calibrate.engine.executor import TorchExecutor
from batchsim.calibrate.engine.prompts import Prompts, RandomPrompts
from batchsim.calibrate.engine.runner import ModelRunner
from batchsim.drive.live import VirtualClock, live
from batchsim.kernel.batch import Batch, Landed, StepResult
from batchsim.kernel.core import EngineCore
from batchsim.kernel.engine_loop import SYNC, EngineLoop
from batchsim.kernel.kv_blocks import TableKV
from batchsim.kernel.policy_config import PromptLookup
from batchsim.kernel.protocols import CostModel, PolicyContext
from batchsim.kernel.record import Recorder
from batchsim.kernel.tokens import output_stream
from batchsim.kernel.types import Arrival, Sequence
from batchsim.kv.choice import new_kv
from batchsim.policies.registry import POLICIES
from tests.support.engine import Constant, Requests

MAX_MODEL_LEN = 120


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
            found = landing()
            return Landed(self.kept(found.finished), verified=found.verified)

        return StepResult(duration_ns, [], landing=landed)

    def kept(self, finished: list[Sequence]) -> list[Sequence]:
        """`finished`, whose answers are kept."""
        for seq in finished:
            self.answers[seq.request.id] = self.tokens(seq)
        return finished


def generate(
    runner: ModelRunner,
    kind: str,
    knobs: dict[str, Any],
    arrivals: list[Arrival],
    *,
    num_blocks: int,
    prompts: Prompts | None = None,
) -> tuple[Timed, EngineCore]:
    """The executor and the engine after all `arrivals` were answered under a policy, with `num_blocks` KV blocks."""
    make, policy = POLICIES[kind]
    config = make(**knobs)
    kv = new_kv(config, num_blocks, runner.block_size, runner.num_swap_blocks, ids=True)
    if isinstance(kv, TableKV):
        kv._free = np.random.default_rng(0).permutation(num_blocks).tolist()  # scattered from the start
    loop, speculation = config.traits.loop, config.traits.speculation
    lookup = None if speculation is None else speculation.lookup
    executor = Timed(runner, kv, Constant(), MAX_MODEL_LEN, loop, lookup, prompts)
    scheduler = policy(config, PolicyContext(kv, MAX_MODEL_LEN, loop=loop))
    core = EngineCore(scheduler, executor, Recorder(), max_model_len=MAX_MODEL_LEN, loop=loop)
    live(core, Requests(*arrivals), VirtualClock())
    return executor, core


def prompt_of(arrival: Arrival, vocab_size: int, answers: dict[int, list[int]] | None = None) -> list[int]:
    """The prompt's tokens, where `answers` by request id may be in it."""
    streams = {output_stream(number): answer for number, answer in (answers or {}).items()}
    return RandomPrompts(vocab_size).ids(arrival.request, streams).tolist()


def likeliest(model: Any, prompt: list[int], answer: list[int]) -> list[int]:
    """What transformers finds likeliest after each token that came before one of `answer`."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer[:-1]])).logits[0]
    return logits[len(prompt) - 1 :].argmax(dim=-1).tolist()
