"""HiCache under the SGLang policy on random runs: against plain loops, step by step, and what is conserved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from batchsim.kernel.record import CAP_CUT, FINISHED, REJECTED, TIER_LOAD
from batchsim.kernel.tokens import TokenIds, prompt_stream
from batchsim.kernel.types import Arrival, Request
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from tests.plain.sglang_hicache import NaiveHiCache
from tests.plain.systems import Step
from tests.support.hicache_runs import Host, hicache_run, hicache_timeline
from tests.support.random_cases import few_and_many
from tests.support.tier_lives import moved

KNOBS = {
    "schedule_policy": st.sampled_from(["fcfs", "fcfs", "lpm"]),
    "max_running_requests": st.sampled_from([None, None, 2, 5]),
    "max_prefill_tokens": st.sampled_from([20, 100]),
    "chunked_prefill_size": st.sampled_from([-1, 8, 24]),
    "enable_mixed_chunk": st.booleans(),
    "prefill_max_requests": st.sampled_from([None, None, 1]),
    "schedule_conservativeness": st.sampled_from([0.0, 0.3, 1.0]),
}
HOSTS = st.builds(
    Host,
    pages=st.sampled_from([1, 4, 12, 30, 100]),
    policy=st.sampled_from(["write_through", "write_through_selective", "write_back"]),
    fixed_ns=st.sampled_from([0, 3]),
    load_ns=st.sampled_from([0, 1, 7]),
    store_ns=st.sampled_from([0, 1, 9, 60]),
    layers=st.sampled_from([1, 3, 32]),
)
POOLS = st.sampled_from([(11, 4), (40, 1), (20, 4), (26, 2)])


@st.composite
def visits(draw: st.DrawFn) -> list[Arrival]:
    """Prompts that begin as others of four texts do, of different lengths, now close to each other and now far."""
    arrivals: list[Arrival] = []
    at = 0
    for number in range(draw(st.integers(3, 14))):
        at += draw(st.sampled_from([0, 9, 60, 150, 400]))
        text, prompt, output = draw(st.integers(0, 3)), draw(st.integers(2, 30)), draw(st.integers(1, 8))
        tokens = TokenIds.of([(prompt_stream(text), 0, prompt)])
        cap = output + draw(st.sampled_from([0, 0, 3]))
        arrivals.append(Arrival(Request(number, at, prompt, cap, tokens=tokens), output))
    return arrivals


def compared(knobs: dict[str, Any], arrivals: list[Arrival], pool: tuple[int, int], host: Host) -> None:
    """Step by step the same work at the same times, the same free pages, retractions and loads."""
    blocks, page = pool
    done = hicache_run(arrivals, host, blocks=blocks, page=page, **knobs)
    found: list[Step] = [(row.start_ns, row.items, row.preempted, row.free) for row in done.log]
    config = SglangConfig(**knobs, disable_overlap_schedule=True)
    naive = NaiveHiCache(
        config,
        arrivals,
        blocks,
        page,
        1000,
        host=host.pages,
        policy=host.policy,
        fixed_ns=host.fixed_ns,
        load_ns=host.load_ns,
        store_ns=host.store_ns,
        layers=host.layers,
    )
    assert found == naive.steps()
    assert moved(done.records, TIER_LOAD) == naive.loaded


CASES = (st.fixed_dictionaries(KNOBS), visits(), POOLS, HOSTS)


test_the_steps_are_those_of_the_plain_loops, test_they_are_so_in_many_more_cases = few_and_many(
    compared, *CASES, few=100, many=3000
)


MORE = KNOBS | {"scheduler_recv_interval": st.sampled_from([1, 1, 3]), "enable_priority_scheduling": st.booleans()}


@st.composite
def given_up(draw: st.DrawFn) -> list[Arrival]:
    """As `visits`, of three priorities, some given up while they wait, are computed, or their KV is loaded."""
    arrivals: list[Arrival] = []
    for arrival in draw(visits()):
        request, after = arrival.request, draw(st.sampled_from([None, None, None, 5, 15, 60, 200]))
        request = replace(request, priority=draw(st.integers(0, 2)))
        cancel_ns = None if after is None else request.arrival_ns + after
        arrivals.append(replace(arrival, request=request, cancel_ns=cancel_ns))
    return arrivals


MORE_CASES = (st.fixed_dictionaries(MORE), given_up(), POOLS, HOSTS, st.booleans())


def conserved(
    knobs: dict[str, Any], arrivals: list[Arrival], pool: tuple[int, int], host: Host, overlaps: bool
) -> None:
    """Every request ends once, with its tokens or given up; no page or time is lost, and leaps change no record."""
    if knobs["enable_priority_scheduling"]:
        knobs |= {"schedule_policy": "fcfs", "priority_scheduling_preemption_threshold": 0}
    done = hicache_timeline(arrivals, host, blocks=pool[0], page=pool[1], overlaps=overlaps, **knobs)
    requests = done.records.requests
    assert requests["request_id"].tolist() == [arrival.request.id for arrival in arrivals]
    for row, arrival in zip(requests, arrivals, strict=True):
        if row["outcome"] == FINISHED:
            is_cut = done.records.texts[row["reason"]] == CAP_CUT  # to what fits the pool
            assert is_cut or row["output_tokens"] == arrival.output_tokens
        else:
            assert row["outcome"] == REJECTED or arrival.cancel_ns is not None


test_requests_and_pages_are_conserved, test_they_are_conserved_in_many_more_cases = few_and_many(
    conserved, *MORE_CASES, few=60, many=3000
)
