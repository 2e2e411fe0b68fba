"""Engines that run a scheduler on a tiny model, and what is checked of the tokens that come out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the executor runs on torch: pip install 'batchsim[live]'")

from batchsim.calibrate.engine.prompts import Prompts, RandomPrompts
from batchsim.calibrate.engine.runner import ModelRunner
from batchsim.drive.live import VirtualClock, live
from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_blocks import TableKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import Recorder
from batchsim.kernel.tokens import output_stream
from batchsim.kernel.types import Arrival
from batchsim.kv.choice import new_kv
from batchsim.policies.registry import POLICIES
from batchsim.testing.on_model import Timed
from tests.support.engine import Constant, Requests

MAX_MODEL_LEN = 120


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
