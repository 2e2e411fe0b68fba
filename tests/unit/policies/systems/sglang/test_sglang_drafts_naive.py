"""SGLang with speculative decoding against plain loops over lists, step by step on random runs."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from hypothesis import strategies as st

from batchsim.kernel.draft_group import DraftGroup, Ints
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.record import FINISHED
from batchsim.kernel.types import Arrival, Sequence
from batchsim.kv.radix_cache import RadixKV
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from batchsim.policies.systems.sglang.sglang_drafts import SglangWithDrafts
from batchsim.policies.systems.sglang.speculative_args import EAGLES
from tests.plain.sglang_drafts import NaiveDrafts, OverlappedDrafts
from tests.plain.systems import Step
from tests.support.random_cases import few_and_many
from tests.support.stepping import HostCost, run
from tests.support.whole_batches import MAX_MODEL_LEN
from tests.unit.policies.systems.sglang.test_sglang_naive import KNOBS, texts

POOLS = st.sampled_from([(14, 4), (48, 1), (20, 4), (26, 2), (40, 4)])
DRAFTS = st.sampled_from(
    [
        {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 3},
        {"speculative_algorithm": "NGRAM"},
        {"speculative_algorithm": "STANDALONE"},
        {"speculative_algorithm": "EAGLE", "speculative_num_steps": 1, "speculative_eagle_topk": 1},
        {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "speculative_eagle_topk": 1},
        {"speculative_algorithm": "NEXTN", "speculative_num_steps": 6, "speculative_eagle_topk": 1},
        {
            "speculative_algorithm": "EAGLE",
            "speculative_num_steps": 2,
            "speculative_eagle_topk": 2,
            "speculative_num_draft_tokens": 4,
        },
    ]
)


def right(request: int, position: int) -> bool:
    return random.Random(f"{request} {position}").random() < 0.6


class Luck:
    """The same luck, as the executor asks for it."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def key(self, seq: Sequence) -> int:
        return seq.request.id

    def accepted(self, group: DraftGroup, drafts: Ints) -> Ints:
        counts = []
        for seq, context, n in zip(group.sequences, group.context.tolist(), drafts.tolist(), strict=True):
            first, most = context + 1, min(n, self.depth)
            counts.append(next((j for j in range(most) if not right(seq.request.id, first + j)), most))
        return np.array(counts, np.int64)

    def foreseen(self, group: DraftGroup) -> None:
        return None

    def proposed(self, group: DraftGroup, gained: Ints, seqs: list[Sequence]) -> None:
        return None


def compared(config: SglangConfig, arrivals: list[Arrival], blocks: int, page: int) -> list[Step]:
    """The steps, after proving them those of the plain loops."""
    kv = RadixKV if config.traits.prefix_cache else CountingKV
    assert config.drafting is not None
    setting: dict[str, Any] = {"kv": kv, "blocks": blocks, "block_size": page, "luck": Luck(config.drafting.depth)}
    loop = config.traits.loop
    done = run(SglangWithDrafts, config, arrivals, loop=loop, cost=HostCost() if loop.is_ahead else None, **setting)
    found: list[Step] = [(row.start_ns, row.items, row.preempted, row.free) for row in done.log]
    naive = OverlappedDrafts if loop.is_ahead else NaiveDrafts
    told = naive(config, arrivals, blocks, page, MAX_MODEL_LEN, right)
    assert found == told.steps()
    if isinstance(told, OverlappedDrafts):
        rows = done.records.requests
        ends = {row["request_id"]: row["last_token_ns"] for row in rows if row["outcome"] == FINISHED}
        assert ends == told.ended_ns
    return found


@st.composite
def configs(draw: st.DrawFn) -> SglangConfig:
    """Knobs of the scheduler and drafts, made to go together."""
    knobs, drafts = draw(st.fixed_dictionaries(KNOBS)), draw(DRAFTS)
    knobs["enable_mixed_chunk"] &= drafts["speculative_algorithm"] in EAGLES
    if knobs["enable_priority_scheduling"]:
        knobs["schedule_policy"] = "fcfs"
    knobs["disable_radix_cache"] &= knobs["schedule_policy"] != "shortest-prefill-first"
    return SglangConfig(**knobs, **drafts, disable_overlap_schedule=draw(st.booleans()), acceptance=0.6)


def _alike(config: SglangConfig, arrivals: list[Arrival], pool: tuple[int, int]) -> None:
    """Step by step the same work in the same order, retractions and free blocks."""
    compared(config, arrivals, *pool)


test_the_steps_with_drafts_are_those_of_the_plain_loops, test_they_are_so_in_many_more_cases = few_and_many(
    _alike, configs(), texts(), POOLS, few=200, many=1500
)
