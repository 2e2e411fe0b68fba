"""TensorRT-LLM with speculative decoding against plain loops over lists, call by call on random runs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from batchsim.base.errors import SchedulerStalled
from batchsim.kernel.draft_group import DraftGroup, Ints
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.types import Arrival, Sequence
from batchsim.kv.reuse_tree import ReuseTreeKV
from batchsim.policies.systems.tensorrt_llm.decoding_config import DecodingConfig
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm_config import TensorrtLlmConfig
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm_drafts import TensorrtLlmWithDrafts
from tests.plain.tensorrt_llm import EngineFailsError
from tests.plain.tensorrt_llm_drafts import Drafting
from tests.support.random_cases import few_and_many
from tests.support.stepping import HostCost, Run, crowds, run, wasted
from tests.support.whole_batches import BLOCK_SIZE, MAX_MODEL_LEN, requests
from tests.unit.policies.systems.tensorrt_llm.test_tensorrt_llm_overlap import EVICTING, KNOBS, check_told, config_of
from tests.unit.policies.systems.tensorrt_llm.test_tensorrt_llm_reuse import sharing

CROWDS = st.one_of(crowds(), sharing())
DRAFTS = {"drafts": st.integers(1, 5), "in_model": st.booleans(), "overlaps": st.booleans()}
RUNS = st.fixed_dictionaries(KNOBS | DRAFTS)


def right(request: int, position: int) -> bool:
    return random.Random(f"{request} {position}").random() < 0.6


class Luck:
    """The same luck, as the executor asks for it."""

    def key(self, seq: Sequence) -> int:
        return seq.request.id

    def accepted(self, group: DraftGroup, drafts: Ints) -> Ints:
        counts = []
        for seq, n, computed in zip(group.sequences, drafts.tolist(), group.context.tolist(), strict=True):
            counts.append(next((j for j in range(n) if not right(seq.request.id, computed + 1 + j)), n))
        return np.array(counts, np.int64)

    def foreseen(self, group: DraftGroup) -> None:
        return None

    def proposed(self, group: DraftGroup, gained: Ints, seqs: list[Sequence]) -> None:
        return None


def compared(knobs: dict[str, Any], arrivals: list[Arrival], blocks: int) -> Run | None:
    """The run, after proving it that of the loop told naively; None if both fail."""
    drafts, overlaps, in_model = knobs["drafts"], knobs["overlaps"], knobs["in_model"] or knobs["overlaps"]
    kind: dict[str, Any] = {"decoding_type": "Eagle3", "eagle3_one_model": in_model, "max_draft_len": drafts}
    config = TensorrtLlmConfig(
        **config_of(knobs, drafts + 1),
        disable_overlap_scheduler=not overlaps,
        speculative_config=DecodingConfig(acceptance=0.6, **kind),
    )
    arrivals = [replace(arrival, cancel_ns=None) for arrival in arrivals]
    kv = ReuseTreeKV if knobs["reuse"] else CountingKV
    setting: dict[str, Any] = {"blocks": blocks, "kv": kv, "loop": config.traits.loop, "cost": HostCost()}
    naive = Drafting(config, arrivals, blocks, BLOCK_SIZE, MAX_MODEL_LEN)
    naive.drafts, naive.in_model, naive.right = drafts, in_model, right
    try:
        naive.run()
    except EngineFailsError:
        with pytest.raises(SchedulerStalled, match="was paused with"):
            run(TensorrtLlmWithDrafts, config, arrivals, luck=Luck(), **setting)
        return None
    done = run(TensorrtLlmWithDrafts, config, arrivals, luck=Luck(), **setting)
    assert done.records.requests["outcome"].tolist() == [0] * len(arrivals)
    check_told(done, naive)
    return done


test_every_call_with_drafts_is_that_of_the_naive_loop, test_they_are_so_in_many_more_cases = few_and_many(
    compared, RUNS, CROWDS, st.integers(12, 18), few=50, many=1000
)


def test_the_naive_loop_pauses_with_drafts_in_flight_too() -> None:
    """Four fill 12 blocks for long: pauses and steps too many are compared."""
    knobs = {"capacity": EVICTING["capacity_scheduler_policy"], "size": 100, "tokens": 36, "reuse": True, "aware": True}
    drafts = {"drafts": 3, "in_model": True, "overlaps": True}
    done = compared({**knobs, **drafts, "chunking": None}, requests("0:7->16 0:7->16/20 0:5->9/11 9:3->12"), 12)
    assert done is not None
    assert len(done.preemptions()) > 2
    assert sum(wasted(done)) > 0
