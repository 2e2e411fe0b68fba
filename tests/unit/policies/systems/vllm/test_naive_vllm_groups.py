"""The vLLM policy on groups of layers against a naive model of vLLM's, call by call in random scenarios.

Source of its rules: vllm/v1/core/kv_cache_coordinator.py, single_type_kv_cache_manager.py, kv_cache_manager.py and
sched/scheduler.py of the 0.33.0 wheel.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from batchsim.base.kv_groups import KvGroup, KvLayout
from batchsim.kernel.types import Arrival
from batchsim.kv.choice import new_grouped_kv
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from tests.plain.vllm_groups import NaiveDraftGroups, NaiveGroups
from tests.unit.policies.systems.vllm.test_naive_vllm import (
    MAX_MODEL_LEN,
    Watching,
    calls_compared,
    equal_rows,
    scenario,
    steps_of_naive,
    steps_of_ours,
)
from tests.unit.policies.systems.vllm.test_naive_vllm_drafts import case as draft_case
from tests.unit.policies.systems.vllm.test_naive_vllm_drafts import steps_of_naive as steps_of_naive_drafts
from tests.unit.policies.systems.vllm.test_naive_vllm_drafts import steps_of_ours as steps_of_our_drafts

SCENARIOS = 16
Case = tuple[VllmConfig, KvLayout, int, list[Arrival]]


def layout_of(pick: random.Random, *, caches: bool, drafts: int = 0) -> KvLayout:
    """Random groups; where states are cached blocks of all groups are of one size."""
    has_states = pick.random() < 0.6
    size = pick.choice([4, 16, 24]) if has_states and caches else 0
    groups: list[KvGroup] = []
    if pick.random() < 0.9:
        groups.append(KvGroup("full", size or pick.choice([1, 2, 4, 16])))
    for _ in range(pick.choice([0, 1, 1, 3])):
        groups += [KvGroup("window", size or pick.choice([1, 2, 4, 8]), pick.choice([1, 2, 7, 16, 33, 64]))]
    groups += groups[-1:] * pick.choice([0, 0, 2])
    if has_states or not groups:
        grid = pick.choice([None, None, 1, 4]) if caches else None
        states = 1 + caches + (grid is not None) + drafts
        groups += [KvGroup("state", size or 64, None, states, caches, grid)] * pick.choice([1, 2])
    pick.shuffle(groups)
    return KvLayout(tuple(groups), 1)


def case(seed: int, stages: int, *, caches: bool, ahead: bool) -> Case:
    """Knobs, groups, blocks and requests; the pool has room for the longest request, and at times for few more."""
    config, _, _, arrivals = scenario(seed)
    config = replace(config, enable_prefix_caching=caches, async_scheduling=ahead)
    pick = random.Random(5000 + seed)
    layout = layout_of(pick, caches=caches)
    alone = new_grouped_kv(config, layout, 1, MAX_MODEL_LEN, stages).needs_at_most(MAX_MODEL_LEN)
    return config, layout, alone + pick.choice([0, 0, 2, 5, 20, 200]), arrivals


def compare_in_turn(seed: int, *, caches: bool) -> list[Any]:
    """The rows of the steps, which equal the naive model's."""
    config, layout, num_blocks, arrivals = case(seed, 1, caches=caches, ahead=False)
    naive = steps_of_naive(NaiveGroups(config, num_blocks, layout, MAX_MODEL_LEN), arrivals, 3000)
    ours = steps_of_ours(config, new_grouped_kv(config, layout, num_blocks, MAX_MODEL_LEN), arrivals, 3000)
    equal_rows(ours, naive, f"scenario {seed}, {caches=}, {layout}")
    return ours


def compare(seed: int, stages: int, *, caches: bool, ahead: bool) -> list[Any]:
    """The rows of the calls in flight, which equal the naive model's, as do both drivers' records each other."""
    config, layout, num_blocks, arrivals = case(seed, stages, caches=caches, ahead=ahead)
    engine = NaiveGroups(config, num_blocks, layout, MAX_MODEL_LEN, stages)
    where = f"scenario {seed} of {stages} stages, {caches=}, {ahead=}, {layout}"
    return calls_compared(
        engine,
        Watching,
        config,
        lambda: new_grouped_kv(config, layout, num_blocks, MAX_MODEL_LEN, stages),
        arrivals,
        stages,
        where,
    )


def compare_drafts(seed: int, *, caches: bool) -> list[Any]:
    """The rows of steps that verify drafts, in turn or ahead of results, which equal the naive model's."""
    config, _, _, arrivals = draft_case(seed)
    config = replace(config, enable_prefix_caching=caches)
    assert config.speculative_config is not None
    pick = random.Random(6000 + seed)
    layout = layout_of(pick, caches=caches, drafts=config.speculative_config.num_speculative_tokens)
    kv = new_grouped_kv(config, layout, 1, MAX_MODEL_LEN)
    kv.draft_room = config.speculative_config.lookahead
    num_blocks = kv.needs_at_most(MAX_MODEL_LEN)
    num_blocks += pick.choice([0, 2, 5, 20, 200])
    naive = steps_of_naive_drafts(seed, (config, num_blocks, layout, arrivals), NaiveDraftGroups)
    kv = new_grouped_kv(config, layout, num_blocks, MAX_MODEL_LEN)
    ours, _ = steps_of_our_drafts(seed, config, kv, arrivals)
    equal_rows(ours, naive, f"scenario {seed}, {caches=}, {layout}, {config}")
    return ours


CACHES = pytest.mark.parametrize("caches", [False, True], ids=["", "cached"])


@CACHES
def test_every_step_equals_the_naive_models(caches: bool) -> None:
    """Tokens, hits, preemptions, ends, free blocks and queues are equal; hits and preemptions occur."""
    rows = [row for seed in range(SCENARIOS) for row in compare_in_turn(seed, caches=caches)]
    assert sum(bool(row[2]) for row in rows) >= 10 * caches
    assert sum(bool(row[3]) for row in rows) > 3


@CACHES
@pytest.mark.parametrize(("stages", "ahead"), [(1, True), (3, False), (3, True)])
def test_every_call_in_flight_equals_the_naive_models(stages: int, ahead: bool, caches: bool) -> None:
    """The same with several batches in flight, and both drivers."""
    rows = [row for seed in range(5) for row in compare(seed, stages, caches=caches, ahead=ahead)]
    assert sum(bool(row[4]) for row in rows if row[0] == "call") > 0


@CACHES
def test_every_step_that_verifies_drafts_equals_the_naive_models(caches: bool) -> None:
    """Tokens with drafts, hits, preemptions, blocks held and free, finishes and queues are equal."""
    rows = [row for seed in range(SCENARIOS) for row in compare_drafts(seed, caches=caches)]
    assert sum(bool(row[2]) for row in rows) >= 10 * caches
    assert sum(bool(row[3]) for row in rows) > 3
