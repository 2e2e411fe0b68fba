"""Leaps of vLLM's engine over steps that verify drafts: how often its scheduler is asked."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from batchsim.kernel.record import SAT_OUT
from batchsim.kernel.tokens import TokenIds
from batchsim.kernel.types import Arrival
from batchsim.kv.choice import new_kv
from batchsim.policies.systems.vllm.speculative_config import SpeculativeConfig
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from batchsim.policies.systems.vllm.vllm_drafts import VllmWithDrafts
from batchsim.testing.by_hand import same
from tests.support.stepping import BLOCK_SIZE, Run, run
from tests.support.whole_batches import requests

EAGLE = SpeculativeConfig("eagle", 3, (0.8, 0.6, 0.45))


def leapt(arrivals: list[Arrival], drafts: SpeculativeConfig = EAGLE, blocks: int = 1000, **knobs: Any) -> Run:
    """The run with leaps, its log the calls of the scheduler; a run that steps leaves the same records."""
    knobs = {"enable_prefix_caching": False, "max_num_seqs": 8} | knobs
    config = VllmConfig(async_scheduling=False, speculative_config=drafts, **knobs)

    def kv(num_blocks: int, block_size: int, swap_blocks: int) -> Any:
        return new_kv(config, num_blocks, block_size, swap_blocks, ids=False)

    setting = {"blocks": blocks, "kv": kv, "max_model_len": 400}
    leaping, stepping = (run(VllmWithDrafts, config, arrivals, how=how, **setting) for how in ("leap", "step"))
    same(leaping.records, stepping.records)
    assert (leaping.records.texts, leaping.records.details) == (stepping.records.texts, stepping.records.details)
    assert len(stepping.log) == len(stepping.records.steps)
    return leaping


@pytest.mark.parametrize(
    ("arrivals", "knobs", "asked"),
    [
        pytest.param("0:9->160 0:7->160", {}, 11, id="from the prompts to the end"),
        pytest.param("0:9->160 0:7->160", {"blocks": 80}, 13, id="until blocks are short"),
        pytest.param("0:9->160 0:7->160 0:5->160", {"max_num_seqs": 2}, 16, id="beside one that waits for a slot"),
        pytest.param("0:9->160 0:7->160 150:5->4", {}, 14, id="an arrival joins"),
        pytest.param("0:9->160 0:7->160", {"enable_prefix_caching": True}, 11, id="with prefix caching"),
    ],
)
def test_steps_alike_are_leapt_over(arrivals: str, knobs: dict[str, Any], asked: int) -> None:
    """The scheduler is asked where somebody joins, blocks are short or an end may be near, and no more often."""
    done = leapt(requests(arrivals), **knobs)
    assert len(done.log) == asked < len(done.records.steps) / 4


def test_what_a_lookup_does_not_find_is_asked_every_time() -> None:
    """How many n-grams turn up is known after each step."""
    done = leapt(requests("0:9->160 0:7->160"), SpeculativeConfig("ngram", 3, 0.5, found=0.5))
    assert len(done.log) == len(done.records.steps)


def test_who_finds_no_token_left_sits_out() -> None:
    """Of three that verify three drafts each, in steps of 5 tokens: the first takes 4, the second what is left."""
    done = leapt(requests("0:1->40 0:1->40 0:1->40"), max_num_seqs=3, max_num_batched_tokens=5)
    states = done.records.states
    sat_out = states[states["state"] == SAT_OUT]
    assert len(sat_out) and set(sat_out["request_id"].tolist()) == {2}
    assert {done.records.texts[reason] for reason in sat_out["reason"].tolist()} == {"token_budget"}


@pytest.mark.parametrize("seed", range(40))
def test_random_engines_leave_the_records_of_stepping(seed: int) -> None:
    """Few blocks, full slots, priorities, caching of shared prompts, cancels, several drafters."""
    pick = random.Random(seed)
    method = pick.choice(["eagle", "eagle3", "mtp", "draft_model", "ngram"])
    found = {"found": pick.choice([0.3, 1.0])} if method == "ngram" else {}
    drafts = SpeculativeConfig(method, pick.choice([1, 3, 5]), pick.choice([0.0, 0.4, 0.8, 1.0]), **found)
    lines = sorted(
        (pick.choice([0, 0, 100, 900, 3_000]), pick.randint(2, 40), pick.choice([1, 5, 60, 150])) for _ in range(9)
    )
    arrivals = list[Arrival]()
    for arrival in requests(" ".join(f"{at}:{prompt}->{output}" for at, prompt, output in lines)):
        number, prompt = arrival.request.id, arrival.request.prompt_tokens
        head = min(prompt - 1, 12)
        tokens = TokenIds.of([(0, 0, head), (1 + number, 0, prompt - head)])
        request = replace(arrival.request, priority=pick.randint(0, 2), tokens=tokens)
        cancel_ns = request.arrival_ns + pick.randint(1, 3_000) if pick.random() < 0.2 else None
        arrivals.append(Arrival(request, arrival.output_tokens, cancel_ns))
    leapt(
        arrivals,
        drafts,
        blocks=pick.choice([60, 90, 1000]) * 4 // BLOCK_SIZE + 10,
        enable_prefix_caching=pick.random() < 0.5,
        policy=pick.choice(["fcfs", "priority"]),
        max_num_seqs=pick.choice([2, 5, 16]),
        max_num_batched_tokens=pick.choice([40, 64, 200]),
    )
