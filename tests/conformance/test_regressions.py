"""Cases that random runs once found, kept."""

from __future__ import annotations

import pytest

from batchsim.base.errors import SchedulerStalled
from batchsim.kernel.core import MAX_FRUITLESS_PREEMPTIONS
from batchsim.kernel.types import MISSING, Arrival, Request
from batchsim.policies.families.preemption import PreemptiveConfig
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from batchsim.testing.policy_checks import requests_end_once
from batchsim.testing.random_engines import Case, Listed


def listed(*rows: tuple[int, int, int]) -> Listed:
    """Requests (prompt, output, priority), all at time 0."""
    return Listed(tuple(Arrival(Request(i, 0, p, o, priority=k), o) for i, (p, o, k) in enumerate(rows)))


@pytest.mark.parametrize("ids", [False, True])
def test_one_swapped_out_in_mid_recompute_takes_its_next_block_once(ids: bool) -> None:
    """Swapped in with one token lacking at a block's edge, it holds that block already; none is lost."""
    config = PreemptiveConfig(3, 3, watermark=0.0, by="swap", waiting_order="priority", preempt_after=0)
    case = Case("preemptive", config, 9, 2, 5, listed((1, 16, 0), (2, 6, 0), (3, 8, 1), (3, 7, 1)))
    kv = case.live(ids=ids).scheduler.kv
    assert (kv.num_free, kv.num_swap_free) == (9, 5)


def test_what_sglang_has_room_for_the_prompt_alone_of_ends_without_a_token() -> None:
    """Of 28 tokens of KV the prompt takes 24 and a page is kept: 28 - 24 - 4 - 1 is below 0, and the cap 0."""
    case = Case("sglang", SglangConfig(disable_radix_cache=True), 7, 4, 0, listed((21, 42, 0)))
    core = case.simulate()
    requests_end_once(case, core)
    (row,) = core.recorder.records().requests
    assert (row["output_tokens"], row["first_token_ns"]) == (0, MISSING)


@pytest.mark.slow
def test_two_that_take_turns_preempting_each_other_are_a_stall_not_a_hang() -> None:
    """vLLM's rule for exact ties lets these two go round for ever without a token; the run says so and ends."""
    config = VllmConfig(
        enable_prefix_caching=False,
        async_scheduling=False,
        max_num_seqs=3,
        max_num_batched_tokens=64,
        policy="priority",
        long_prefill_token_threshold=5,
        scheduler_reserve_full_isl=False,
        watermark=0.2,
    )
    case = Case("vllm", config, 7, 16, 0, listed((1, 66, 0), (12, 64, 0)))
    with pytest.raises(SchedulerStalled, match=f"{MAX_FRUITLESS_PREEMPTIONS + 1} preemptions without a token"):
        case.simulate()
