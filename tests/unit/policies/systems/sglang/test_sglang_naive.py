"""The SGLang policy against plain loops over lists, rules D1 to D8 and all others, step by step on random runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st

from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.tokens import TokenIds, output_stream, prompt_stream
from batchsim.kernel.types import Arrival
from batchsim.kv.radix_cache import RadixKV
from batchsim.policies.systems.sglang.sglang import Sglang
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from tests.plain.sglang import Naive
from tests.plain.systems import Step
from tests.support.random_cases import few_and_many
from tests.support.stepping import crowds, run
from tests.support.whole_batches import MAX_MODEL_LEN, requests

BUSY = "0:8->30 20:4->12 40:4->12"
KNOBS = {
    "schedule_policy": st.sampled_from(["fcfs", "fcfs", "lpm", "shortest-prefill-first"]),
    "max_running_requests": st.sampled_from([None, None, 2, 5]),
    "max_prefill_tokens": st.sampled_from([4, 20, 100]),
    "chunked_prefill_size": st.sampled_from([-1, 4, 8, 24]),
    "enable_mixed_chunk": st.booleans(),
    "prefill_max_requests": st.sampled_from([None, None, 1, 2]),
    "schedule_conservativeness": st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    "disable_radix_cache": st.booleans(),
    "retraction_policy": st.sampled_from(["length", "priority"]),
    "enable_priority_scheduling": st.booleans(),
    "disable_priority_preemption": st.booleans(),
    "schedule_low_priority_values_first": st.booleans(),
    "priority_scheduling_preemption_threshold": st.sampled_from([0, 1]),
}


def compared(config: SglangConfig, arrivals: list[Arrival], blocks: int, page: int) -> list[Step]:
    """The steps, after proving them those of the plain loops."""
    kv = RadixKV if config.traits.prefix_cache else CountingKV
    log = run(Sglang, config, arrivals, kv=kv, blocks=blocks, block_size=page).log
    found: list[Step] = [(row.start_ns, row.items, row.preempted, row.free) for row in log]
    assert found == Naive(config, arrivals, blocks, page, MAX_MODEL_LEN).steps()
    return found


@st.composite
def texts(draw: st.DrawFn) -> list[Arrival]:
    """A crowd that stays; some prompts begin alike, some with another's prompt and output, some ignore the end."""
    arrivals: list[Arrival] = []
    for arrival in draw(crowds()):
        request, text = arrival.request, draw(st.integers(0, 3))
        segments = [(prompt_stream(text), 0, request.prompt_tokens)] if text else []
        if text == 3 and arrivals:
            turn = draw(st.sampled_from(arrivals))
            before, more = turn.request.prompt_tokens, draw(st.integers(1, turn.output_tokens or 1))
            own = draw(st.integers(1, 4))
            if turn.request.tokens is not None and before + more < 40:
                segments = [*turn.request.tokens.segments, (output_stream(turn.request.id), 0, more)]
                segments += [(prompt_stream(100 + request.id), 0, own)]
                request = replace(request, prompt_tokens=before + more + own)
        ignore_eos = draw(st.sampled_from([False, False, True]))
        output = request.max_output_tokens if ignore_eos else arrival.output_tokens
        tokens = TokenIds.of(segments) if segments else None
        arrivals.append(Arrival(replace(request, tokens=tokens, ignore_eos=ignore_eos), output))
    return arrivals


POOLS = st.sampled_from([(11, 4), (40, 1), (20, 4), (26, 2)])


def _alike(knobs: dict[str, Any], arrivals: list[Arrival], pool: tuple[int, int]) -> None:
    """Step by step the same work in the same order, retractions and free blocks."""
    try:
        config = SglangConfig(**knobs)
    except ValueError:
        return
    compared(config, arrivals, *pool)


test_the_steps_are_those_of_the_plain_loops, test_they_are_so_in_many_more_cases = few_and_many(
    _alike, st.fixed_dictionaries(KNOBS), texts(), POOLS, few=100, many=1000
)


@pytest.mark.parametrize("chunk", [-1, 4, 24])
def test_the_loops_retract_too(chunk: int) -> None:
    """Two join one that is trusted to end early and does not, so that 44 tokens get short: retractions are compared."""
    config = SglangConfig(chunked_prefill_size=chunk, schedule_conservativeness=0.1, disable_radix_cache=True)
    assert any(preempted for _, _, preempted, _ in compared(config, requests(BUSY), 11, 4))
