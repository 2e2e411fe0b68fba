"""SGLang with a pool of states by hand: where states are kept, what is found again, how many requests run."""

from __future__ import annotations

from typing import Any

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.base.kv_pools import KvPools
from batchsim.kernel.engine_loop import OVERLAP, SYNC
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.tokens import TokenIds, output_stream, prompt_stream
from batchsim.kernel.types import Arrival, Request, Sequence
from batchsim.kv.choice import new_pooled_kv
from batchsim.kv.states import StateRadixKV, states_of
from batchsim.policies.systems.sglang.sglang import Sglang
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from tests.support.stepping import Estimates, Run, run

PLAIN: dict[str, Any] = {"chunked_prefill_size": 8, "disable_overlap_schedule": True}


def played(arrivals: str | list[Arrival], *, states: int = 40, buffers: int = 0) -> Run:
    """A run in chunks of 8 and pages of a token; states are kept at multiples of 4 tokens of a step, and of 8 of an
    answer."""
    return run(
        Sglang,
        SglangConfig(**PLAIN),
        arrivals,
        kv=lambda n, size, swap: StateRadixKV(n, size, states, buffers, chunk=4, tracked=8),
        blocks=400,
        block_size=1,
    )


def asked(*prompts: list[tuple[int, int]], output: int = 3) -> list[Arrival]:
    """Requests one after the other, whose prompts are of parts (stream, tokens), each from the stream's beginning."""
    arrivals: list[Arrival] = []
    for i, parts in enumerate(prompts):
        request = Request(
            i, i * 1000, sum(n for _, n in parts), output, tokens=TokenIds.of([(s, 0, n) for s, n in parts])
        )
        arrivals.append(Arrival(request, output))
    return arrivals


def hits(done: Run) -> list[int]:
    """Cached tokens of each request."""
    return [int(n) for n in done.records.requests["cached_tokens"]]


A, B, ANSWER = prompt_stream(1), prompt_stream(2), output_stream(0)


def test_without_a_buffer_states_are_at_ends_of_chunks_and_of_answers() -> None:
    """20 prompt and 3 output tokens, of which the last is not computed: states at 8, 16, 20 and 22. A prompt that goes
    on from the answer finds 22, one from the prompt 20, one that shares 19 of it 16, and one that shares 7 none."""
    first = [(A, 20)]
    assert hits(played(asked(first, [(A, 20), (ANSWER, 3), (B, 4)]))) == [0, 22]
    assert hits(played(asked(first, [(A, 20), (B, 4)]))) == [0, 20]
    assert hits(played(asked(first, [(A, 19), (B, 4)]))) == [0, 16]
    assert hits(played(asked(first, [(A, 7), (B, 4)]))) == [0, 0]


def test_with_a_buffer_states_are_at_multiples_of_a_steps_tokens() -> None:
    """Prompts of 11 are computed as 8 and 3, and 3 are fewer than 4: the state is at 8. An answer of 10 has 20 computed
    tokens, the last multiple of 8 among them being 16; one of 5 has 15, and its prompt was 11: nothing but 8."""
    long = asked([(A, 11)], [(A, 11), (ANSWER, 10), (B, 4)], output=10)
    assert hits(played(long, buffers=1)) == [0, 16]
    short = asked([(A, 11)], [(A, 11), (ANSWER, 5), (B, 4)], output=5)
    assert hits(played(short, buffers=1)) == [0, 8]


def test_a_junction_has_a_state_where_a_step_can_keep_one() -> None:
    """After a prompt of 16 the tree has states at 8 and 16. One that shares 14 goes on from 8, and its junction is at
    12, the last multiple of 4: its chunk of 8 from 8 on keeps the state there, not at 16; the next one finds 12."""
    done = played(asked([(A, 16)], [(A, 14), (B, 6)], [(A, 13), (prompt_stream(3), 6)]), buffers=1)
    assert hits(done) == [0, 8, 12]


def computed(kv: StateRadixKV, arrival: Arrival) -> None:
    """Computes the prompt of a request as one step from the prefix that is there on, and ends it."""
    seq = Sequence(arrival.request)
    hit = kv.match(seq, seq.num_tokens - 1)
    kv.reserve_state(seq)
    kv.take(seq, hit)
    seq.settled_computed_tokens = hit
    kv.take_states([(seq, seq.num_tokens - hit)])
    assert kv.allocate(seq, seq.num_tokens)
    seq.settled_computed_tokens = seq.num_tokens
    kv.insert_ended(seq, seq.num_tokens)
    kv.free(seq)
    kv.check()


def test_a_leaf_goes_with_its_state_and_what_is_above_another_loses_its_state_alone() -> None:
    """Three prompts, of 8, of these and 4 more, and of 5 others, have a state each and all 3 slots. A fourth of 6 needs
    one: the state of the first goes, whose tokens the second needs; then for a fifth the second's 4 tokens go too."""
    kv = StateRadixKV(100, 1, 3, 0)
    first, second, third, fourth, fifth = asked(
        [(A, 8)], [(A, 8), (B, 4)], [(B, 5)], [(prompt_stream(3), 6)], [(prompt_stream(4), 6)]
    )
    for arrival in (first, second, third):
        computed(kv, arrival)
    assert (kv.cached_blocks, kv.states.num_free) == (17, 0)
    computed(kv, fourth)
    assert (kv.cached_blocks, kv.lookup(Sequence(second.request)), kv.lookup(Sequence(first.request))) == (23, 0, 0)
    computed(kv, fifth)
    assert (kv.cached_blocks, kv.states.num_free) == (25, 0)


def test_a_slot_for_a_copy_is_free_before_the_request_comes_in() -> None:
    """Two prompts have both slots; one that goes on from the first makes the other's go, and its own stays."""
    kv = StateRadixKV(100, 1, 2, 0)
    first, second, longer = asked([(A, 8)], [(B, 5)], [(A, 8), (B, 4)])
    computed(kv, first)
    computed(kv, second)
    seq = Sequence(longer.request)
    assert kv.match(seq, 11) == 8
    kv.reserve_state(seq)
    assert (kv.states.num_free, kv.cached_blocks) == (1, 8)
    kv.take(seq, 8)
    assert (kv.states.num_free, kv.states.num_evictable) == (0, 0)


@pytest.mark.parametrize(("states", "buffers", "most"), [(10, 0, 3), (10, 1, 2), (10, 2, 2), (9, 2, 1)])
def test_as_many_run_as_have_states_set_aside(states: int, buffers: int, most: int) -> None:
    """Three and the buffers for each."""
    done = played("0:4->9 0:4->9 0:4->9 0:4->9 0:4->9", states=states, buffers=buffers)
    assert max(len({request for request, _ in items}) for items in done.items) == most


def test_without_a_radix_cache_a_request_has_one_state() -> None:
    """Two states, two requests at a time."""
    config = SglangConfig(disable_radix_cache=True, **PLAIN)
    pools = KvPools(states=2)
    done = run(
        Sglang,
        config,
        "0:4->9 0:4->9 0:4->9",
        kv=lambda n, size, swap: new_pooled_kv(config, pools, n, size),
        blocks=400,
        block_size=4,
    )
    assert max(len(items) for items in done.items) == 2


def test_the_buffer_has_two_slots_where_scheduling_overlaps() -> None:
    """So many has the manager that goes with a config."""
    pools = KvPools(states=20, extra_buffer=True)
    for overlaps, buffers in ((True, 2), (False, 1)):
        states = states_of(new_pooled_kv(SglangConfig(disable_overlap_schedule=not overlaps), pools, 100, 1))
        assert states is not None
        assert (states.buffers, states.per_request) == (buffers, 3 + buffers)


@pytest.mark.parametrize(
    ("knobs", "pools", "page", "complaint"),
    [
        ({}, KvPools(states=20), 1, "do not go with overlap. Write disable_overlap_schedule: true."),
        ({"disable_overlap_schedule": True}, KvPools(states=20), 16, "in pages of one token. Write kv.block_size: 1."),
        ({}, KvPools(states=4, extra_buffer=True), 1, "4 states are fewer than the 5 .* Raise kv.pools.states."),
        ({"enable_mixed_chunk": True}, KvPools(states=20, extra_buffer=True), 1, "Write enable_mixed_chunk: false."),
        ({"chunked_prefill_size": 48}, KvPools(states=20, extra_buffer=True), 48, "48 and 64 tokens must divide"),
    ],
)
def test_what_sglang_does_not_keep_so_is_refused(
    knobs: dict[str, Any], pools: KvPools, page: int, complaint: str
) -> None:
    """In one line with the way out."""
    config = SglangConfig(**knobs)
    loop = SYNC if config.disable_overlap_schedule else OVERLAP
    context = PolicyContext(new_pooled_kv(config, pools, 100, page), 400, None, Estimates(), loop)
    with pytest.raises(ScenarioError, match=rf"^sglang: .*{complaint}"):
        Sglang(config, context)
