"""vLLM with speculative decoding against a naive model of it, step by step in random scenarios."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from batchsim.base.errors import ScenarioError, SchedulerStalled
from batchsim.kernel.batch import Batch
from batchsim.kernel.core import EngineCore
from batchsim.kernel.draft_group import DraftGroup, Ints
from batchsim.kernel.kv_blocks import KVBlockManager
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import Recorder
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Arrival, Sequence
from batchsim.kv.choice import new_kv
from batchsim.kv.grouped import GroupedBlocks
from batchsim.kv.prefix_cache import BlockHashKV
from batchsim.policies.systems.vllm.speculative_config import SpeculativeConfig
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from batchsim.policies.systems.vllm.vllm_drafts import VllmWithDrafts
from tests.plain.vllm_drafts import Drafting, NaiveDrafts
from tests.support.engine import STEP_NS
from tests.support.stepping import Stages
from tests.unit.policies.systems.vllm.test_naive_vllm import MAX_MODEL_LEN, equal_rows, scenario

SCENARIOS = 40
LIMIT = 3000
Case = tuple[VllmConfig, int, int, list[Arrival]]


def right(seed: int, request: int, position: int) -> bool:
    return random.Random(f"{seed} {request} {position}").random() < 0.6


def found(seed: int, request: int, tokens: int) -> int:
    return random.Random(f"{seed} {request} {tokens} drafts").choice([0, 1, 3, 9])


class Luck:
    """The same luck, as the executor asks for it."""

    def __init__(self, seed: int, varies: bool) -> None:
        self.seed, self.varies = seed, varies

    def key(self, seq: Sequence) -> int:
        return seq.request.id

    def accepted(self, group: DraftGroup, drafts: Ints) -> Ints:
        counts = []
        for seq, n in zip(group.sequences, drafts.tolist(), strict=True):
            first = int((group.computed - group.rejected)[seq.phase]) + 1
            wrong = (j for j in range(n) if not right(self.seed, seq.request.id, first + j))
            counts.append(next(wrong, n))
        return np.array(counts, np.int64)

    def foreseen(self, group: DraftGroup) -> None:
        return None

    def proposed(
        self, group: DraftGroup, gained: Ints, seqs: list[Sequence]
    ) -> tuple[Ints, dict[Sequence, int]] | None:
        if not self.varies:
            return None
        pairs = zip(group.sequences, (group.computed + gained + 1).tolist(), strict=True)
        counts = [found(self.seed, seq.request.id, n) for seq, n in pairs]
        return np.array(counts, np.int64), {s: found(self.seed, s.request.id, s.num_tokens + 1) for s in seqs}


def case(seed: int) -> Case:
    config, num_blocks, size, arrivals = scenario(seed)
    pick = random.Random(1000 + seed)
    drafts = pick.choice([1, 3, 4, 7])
    spec = SpeculativeConfig(pick.choice(["ngram", "eagle", "eagle3", "mtp", "draft_model"]), drafts, 0.5)
    asynchronous = pick.random() < 0.5
    requests = []
    for arrival in arrivals:
        r = arrival.request
        cap = r.max_output_tokens + pick.choice([0, 0, 2, 30])
        requests.append(replace(arrival, request=replace(r, max_output_tokens=cap)))
    room = -(-drafts // size) + 1
    return replace(config, speculative_config=spec, async_scheduling=asynchronous), num_blocks + room, size, requests


def steps_of_naive(
    seed: int, case: tuple[VllmConfig, int, Any, list[Arrival]], naive: type[NaiveDrafts] = NaiveDrafts
) -> list[Any]:
    config, num_blocks, size, arrivals = case
    spec = config.speculative_config
    assert spec is not None
    varies = spec.method == "ngram"
    engine = naive(
        config,
        num_blocks,
        size,
        MAX_MODEL_LEN,
        lambda r, p: right(seed, r, p),
        lambda r, n: found(seed, r, n) if varies else spec.num_speculative_tokens,
    )
    rows: list[Any] = []
    now_ns, left = 0, list(arrivals)
    depth = 2 if config.async_scheduling else 1
    while len(rows) < LIMIT:
        while left and left[0].request.arrival_ns <= now_ns:
            arrival = left.pop(0)
            engine.add(Drafting(arrival.request, arrival.output_tokens or 0))
        if not (engine.running or engine.waiting):
            if not left:
                return rows
            now_ns = left[0].request.arrival_ns
            while engine.launched:
                engine.land()
            continue
        row = engine.launch()
        lands = len(engine.launched) == depth or (not row[0] and engine.launched)
        rows.append((now_ns, *row, *(engine.land() if lands else ())))
        now_ns += STEP_NS
    return rows


def steps_of_ours(
    seed: int, config: VllmConfig, kv: KVBlockManager, arrivals: list[Arrival]
) -> tuple[list[Any], EngineCore]:
    loop = config.traits.loop
    spec = config.speculative_config
    assert spec is not None
    scheduler = VllmWithDrafts(config, PolicyContext(kv, MAX_MODEL_LEN, loop=loop))
    executor = SimExecutor(Stages(1), MAX_MODEL_LEN, loop, Luck(seed, spec.method == "ngram"))
    core = EngineCore(scheduler, executor, Recorder(), max_model_len=MAX_MODEL_LEN, loop=loop)
    for arrival in arrivals:
        core.submit(arrival)
    rows: list[Any] = []
    now_ns, flying, depth = 0, core.in_flight.steps, loop.depth
    times = [arrival.request.arrival_ns for arrival in arrivals]
    while core.has_work and len(rows) < LIMIT:
        core.enter_due(now_ns)
        if not core.has_entered:
            now_ns = min(ns for ns in times if ns > now_ns)
            while flying:
                core.complete(now_ns)
            continue
        work = core.schedule(now_ns, drain=False)
        items, cached, preempted, blocks = [], [], [], []
        if isinstance(work, Batch):
            items = [[seq.request.id, n] for seq, n in work.items()]
            cached = [[seq.request.id, n] for seq, n in work.cached]
            preempted = [seq.request.id for seq in work.preempted]
            blocks = [[seq.request.id, kv.held(seq)] for seq, _ in work.items()]
        row = [now_ns, items, cached, preempted, blocks, kv.num_free, scheduler.num_waiting, scheduler.num_running]
        if isinstance(work, Batch) and (items or depth == 1):
            core.execute(work, now_ns)
        if len(flying) == depth or (not items and flying):
            finished = [event.request.id for event in core.complete(now_ns)]
            row += [finished, kv.num_free, scheduler.num_waiting, scheduler.num_running]
        rows.append(tuple(row))
        now_ns += STEP_NS
        if isinstance(kv, BlockHashKV | GroupedBlocks):
            kv.check()
    if not core.has_work:
        while flying:
            core.complete(now_ns)
        core.check_returned()
    return rows, core


def compare(seed: int) -> tuple[list[Any], EngineCore]:
    drawn = case(seed)
    config, num_blocks, size, arrivals = drawn
    naive = steps_of_naive(seed, drawn)
    kv = new_kv(config, num_blocks, size, ids=seed % 2 == 0)
    try:
        ours, core = steps_of_ours(seed, config, kv, arrivals)
    except SchedulerStalled:
        pytest.fail(f"scenario {seed} stalls")
    equal_rows(ours, naive, f"scenario {seed}, {drawn[0]}")
    return ours, core


def _context(config: VllmConfig) -> PolicyContext:
    return PolicyContext(new_kv(config, 64, 4, ids=False), MAX_MODEL_LEN, loop=config.traits.loop)


def test_steps_too_small_for_a_padded_prompt_are_refused_not_waited_for_for_ever() -> None:
    """A prompt that is cached but for one token is padded to the width of a decode, which no step would have."""
    spec = SpeculativeConfig("draft_model", 3, 0.5)
    config = VllmConfig(max_num_seqs=2, max_num_batched_tokens=4, speculative_config=spec, enable_prefix_caching=False)
    VllmWithDrafts(config, _context(config))
    config = replace(config, enable_prefix_caching=True)
    with pytest.raises(ScenarioError, match=r"at most 3 tokens .* padded to 4.* Raise max_num_batched_tokens\.$"):
        VllmWithDrafts(config, _context(config))
    config = replace(config, max_num_batched_tokens=8, max_num_scheduled_tokens=3)
    with pytest.raises(ScenarioError, match=r"at most 3 tokens .* Raise max_num_scheduled_tokens\.$"):
        VllmWithDrafts(config, _context(config))
    config = replace(config, max_num_scheduled_tokens=4)
    VllmWithDrafts(config, _context(config))


def test_every_step_equals_the_naive_models() -> None:
    """Tokens with drafts, hits, preemptions, blocks held and free, finishes and queues are equal; all of them occur."""
    runs = [compare(seed) for seed in range(SCENARIOS)]
    rows = [row for found, _ in runs for row in found]
    assert sum(bool(row[2]) for row in rows) > 50 and sum(bool(row[3]) for row in rows) > 50
    steps = np.concatenate([core.recorder.records().steps for _, core in runs])
    drafts = steps["num_decode_tokens"] - steps["num_decode"]
    assert 0.2 < steps["num_accepted_tokens"].sum() / drafts.sum() < 0.6
    assert (steps["pad_decode_rows"] > 0).sum() >= 5


@pytest.mark.slow
def test_many_more_scenarios_equal_the_naive_models() -> None:
    """23 times as many."""
    for seed in range(SCENARIOS, 24 * SCENARIOS):
        compare(seed)
