"""llama.cpp's server, by hand: a step takes 10 ns, 1 more a prompt token, 2 a decode; a KV block holds 4 tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.base.errors import ScenarioError
from batchsim.kernel.types import Arrival
from batchsim.policies.systems.llama_cpp.llama_cpp import LlamaCpp
from batchsim.policies.systems.llama_cpp.llama_cpp_config import LlamaCppConfig
from batchsim.policies.systems.llama_cpp.passes import passes_of
from tests.support.random_cases import random_cases
from tests.support.stepping import Run, crowds, run, run_every_way
from tests.support.whole_batches import BLOCK_SIZE, blocked, outcomes, times


def slots(arrivals: str, blocks: int = 2000, **knobs: Any) -> Run:
    return run(LlamaCpp, LlamaCppConfig(**knobs), arrivals, blocks=blocks)


def test_a_prompt_is_computed_beside_the_decodes() -> None:
    """The second prompt joins the first request's decode at 14; its first token comes with that step, at 30."""
    result = slots("0:4->4 5:4->2")
    assert result.items == [[(0, 4)], [(0, 1), (1, 4)], [(0, 1), (1, 1)], [(0, 1)]]
    assert [row.start_ns for row in result.log] == [0, 14, 30, 44]
    assert times(result.records, "first_token_ns", "last_token_ns") == [(14, 56), (30, 44)]


def test_decodes_come_first_and_prompts_fill_the_batch() -> None:
    """Of 6 tokens the decode takes one: the prompt of 8 runs in pieces of 5 and 3."""
    assert slots("0:4->4 5:8->1", n_batch=6).items == [[(0, 4)], [(0, 1), (1, 5)], [(0, 1), (1, 3)], [(0, 1)]]


def test_prompts_share_a_batch_by_slot_and_the_last_slot_is_taken_first() -> None:
    """With two slots never used the first request takes slot 1, the second slot 0, whose prompt is computed first."""
    assert slots("0:8->1 0:4->1", n_parallel=2, n_batch=6).items == [[(0, 2), (1, 4)], [(0, 6)]]


def test_the_slot_used_longest_ago_is_taken_next() -> None:
    """Both end at 16, slot 0 (request 1) first: request 2 takes slot 0, so that the cut meets request 3 in slot 1."""
    result = slots("0:3->1 0:3->1 5:4->1 5:4->1", n_parallel=2, n_batch=6)
    assert result.items == [[(0, 3), (1, 3)], [(2, 4), (3, 2)], [(3, 2)]]


def test_requests_wait_for_a_slot_first_come_first_served() -> None:
    """One slot: the second comes in when the first has ended, at 26, the third after it."""
    result = slots("0:4->2 5:4->1 6:4->1", n_parallel=1)
    assert times(result.records, "scheduled_ns") == [(0,), (26,), (40,)]
    assert blocked(result.records)[0] == (14, 1, "no_slot")


def test_a_request_that_could_outgrow_its_slot_is_refused() -> None:
    """10 blocks in 4 slots are 2 each: 8 tokens fit, of which the last output is never computed, 9 do not."""
    rows = outcomes(slots("0:4->5 0:4->6", blocks=10).records)
    assert [row[0] for row in rows] == ["finished", "rejected"] and "never_fits" in rows[1]


def test_slots_without_a_block_are_refused() -> None:
    """Three blocks cannot be shared out among four slots."""
    with pytest.raises(ScenarioError, match="3 KV blocks leave none for each of n_parallel 4"):
        slots("0:4->1", blocks=3)


def test_a_batch_too_small_for_the_slots_is_refused() -> None:
    """All slots decode in one step, which therefore has room for a token of each."""
    with pytest.raises(ValueError, match="n_batch 3 must be >= n_parallel 4"):
        LlamaCppConfig(n_batch=3)


@pytest.mark.parametrize(
    ("batch", "n_ubatch", "passes"),
    [
        ([(3, 1)], 4, [1]),
        ([(0, 1), (1, 1), (3, 1)], 4, [2, 1]),
        ([(0, 1), (2, 1), (4, 1)], 4, [1, 1, 1]),
        ([(0, 1), (1, 1), (2, 1), (3, 1)], 4, [4]),
        ([(0, 1), (1, 1), (2, 1), (3, 1)], 3, [4]),  # a token of each at the least
        ([(2, 10)], 4, [4, 4, 2]),
        ([(0, 1), (2, 1), (1, 5)], 4, [2, 1, 4]),  # slot 2 is no longer next once slot 1 has not joined
        ([(1, 1), (0, 5)], 4, [1, 4, 1]),
        ([(0, 3), (1, 5)], 4, [4, 2, 2]),
        ([(0, 3), (1, 5)], 9, [6, 2]),
    ],
)
def test_a_pass_takes_as_many_tokens_of_slots_that_follow_on_each_other(
    batch: list[tuple[int, int]], n_ubatch: int, passes: list[int]
) -> None:
    """By hand, of (slot, tokens) in the order of the batch."""
    assert passes_of(batch, n_ubatch) == passes


@random_cases(200)
@given(
    decodes=st.sets(st.integers(0, 9)),
    prompts=st.dictionaries(st.integers(0, 9), st.integers(1, 30)),
    n_ubatch=st.integers(1, 20),
)
def test_passes_are_those_of_a_search_token_by_token(decodes: set[int], prompts: dict[int, int], n_ubatch: int) -> None:
    """A list of tokens, each with its slot; a pass adds one of each of its slots while all have one and it may."""
    rows = [(slot, 1) for slot in sorted(decodes)]
    rows += [(slot, n) for slot, n in sorted(prompts.items()) if slot not in decodes]
    tokens, found = [slot for slot, n in rows for _ in range(n)], list[int]()
    while tokens:
        slots_of = list[int]()
        for slot in tokens:
            if slot not in slots_of and (not slots_of or slot == slots_of[-1] + 1):
                slots_of.append(slot)
        found.append(0)
        while all(slot in tokens for slot in slots_of):
            for slot in slots_of:
                tokens.remove(slot)
            found[-1] += len(slots_of)
            if found[-1] + len(slots_of) > n_ubatch:
                break
    assert passes_of(rows, n_ubatch) == found


def test_steps_say_how_many_passes_they_take() -> None:
    """Slots 3 to 0 are taken in turn. Three prompts of 2 are one pass of 6; at slots 2 and 3 decodes are one, and once
    only slots 1 and 3 are left, two. A prompt longer than `n_ubatch` is computed in parts."""
    records = slots("0:2->4 0:2->2 0:2->3 100:9->1", n_parallel=4, n_ubatch=6).records
    columns = ("num_decode", "num_chunks", "num_passes", "num_wide_passes")
    assert records.steps[list(columns)].tolist() == [
        (0, 3, 1, 1),
        (3, 0, 1, 1),
        (2, 0, 2, 0),
        (1, 0, 1, 0),
        (0, 1, 2, 2),
    ]


@random_cases(30)
@given(arrivals=crowds(), n_parallel=st.integers(1, 5), n_batch=st.sampled_from([5, 8, 17]))
def test_the_steps_are_those_of_a_plain_loop_under_every_driver(
    arrivals: list[Arrival], n_parallel: int, n_batch: int
) -> None:
    """Bit-equal records under every driver; without cancels the steps of a loop over an array of slots."""
    config = LlamaCppConfig(n_parallel, n_batch)
    run_every_way(LlamaCpp, config, arrivals, blocks=40)
    arrivals = [replace(arrival, cancel_ns=None) for arrival in arrivals]
    log = run(LlamaCpp, config, arrivals, blocks=40).log
    assert [(row.start_ns, row.items) for row in log] == naive(arrivals, n_parallel, n_batch, 40)


def naive(
    arrivals: list[Arrival], n_parallel: int, n_batch: int, blocks: int
) -> list[tuple[int, list[tuple[int, int]]]]:
    """Start and (request, tokens) of each step: an array of slots, each [request, prompt, computed, output], searched
    anew at every choice."""
    room = blocks // n_parallel * BLOCK_SIZE
    coming = [
        (a.request.arrival_ns, a.request.id, a.request.prompt_tokens, a.output_tokens)
        for a in arrivals
        if a.output_tokens and a.request.prompt_tokens + a.request.max_output_tokens - 1 <= room
    ]
    table: list[list[int] | None] = [None] * n_parallel
    used = [-1] * n_parallel
    log: list[tuple[int, list[tuple[int, int]]]] = []
    now = clock = 0
    while coming or any(table):
        if not any(table):
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now and None in table:
            _, who, prompt, output = coming.pop(0)
            i = min((i for i in range(n_parallel) if table[i] is None), key=lambda i: (used[i], -i))
            table[i] = [who, prompt, 0, output]
        decodes = sum(slot is not None and slot[2] >= slot[1] for slot in table)
        step, left, start, cost = list[tuple[int, int]](), n_batch - decodes, now, 10 + 2 * decodes
        for i, slot in enumerate(table):
            if slot is None:
                continue
            n = 1
            if slot[2] < slot[1]:
                n = min(slot[1] - slot[2], left)
                left -= n
                cost += n
            step += [(slot[0], n)] * (n > 0)
            slot[2] += n
            if slot[2] == slot[1] + slot[3] - 1:
                table[i], clock = None, clock + 1
                used[i] = clock
        log.append((start, sorted(step)))
        now += cost
    return log
