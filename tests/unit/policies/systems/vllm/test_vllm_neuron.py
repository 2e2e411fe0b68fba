"""vLLM Neuron's scheduler, by hand: a step takes 10 ns, 1 a prefill token, 2 a decode; a KV block holds 4 tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest

from batchsim.kernel.types import Arrival
from batchsim.policies.systems.vllm.vllm_neuron import VllmNeuron, VllmNeuronConfig
from tests.support.stepping import Run, run, run_every_way
from tests.support.whole_batches import blocked, requests, times


def neuron(arrivals: str, blocks: int = 1000, **knobs: Any) -> Run:
    return run(VllmNeuron, VllmNeuronConfig(**knobs), arrivals, blocks=blocks)


def test_one_prompt_a_step_whole_and_alone_and_the_decodes_stand_still() -> None:
    """Three prompts at 0 take three steps; request 0, which could decode at 14, waits until the last one ends at 42."""
    result = neuron("0:4->3 0:4->2 0:4->2")
    assert result.items == [[(0, 4)], [(1, 4)], [(2, 4)], [(0, 1), (1, 1), (2, 1)], [(0, 1)]]
    assert [row.start_ns for row in result.log] == [0, 14, 28, 42, 58]
    assert times(result.records, "first_token_ns", "last_token_ns") == [(14, 70), (28, 58), (42, 58)]
    assert blocked(result.records) == [(0, 1, "one_prompt"), (14, 2, "one_prompt")]


def test_a_prompt_beyond_the_budget_goes_on_in_consecutive_steps() -> None:
    """Ten tokens in steps of 4 while request 0 decodes from 14 on: it stands still from 26 to 66, and the prompt behind
    the long one is let through only once that is done, before any decode."""
    result = neuron("0:4->3 15:10->1 16:2->1", max_num_seqs=4, max_num_batched_tokens=4)
    assert result.items == [[(0, 4)], [(0, 1)], [(1, 4)], [(1, 4)], [(1, 2)], [(2, 2)], [(0, 1)]]
    assert [row.start_ns for row in result.log] == [0, 14, 26, 40, 54, 66, 78]
    assert times(result.records, "scheduled_ns", "last_token_ns") == [(0, 90), (26, 66), (66, 78)]


def test_a_full_engine_decodes_until_a_slot_is_free() -> None:
    """With two slots the third prompt is held back from 28 to 42, when request 1 has ended."""
    result = neuron("0:4->4 0:4->2 0:4->1", max_num_seqs=2)
    assert result.items == [[(0, 4)], [(1, 4)], [(0, 1), (1, 1)], [(2, 4)], [(0, 1)], [(0, 1)]]
    assert blocked(result.records) == [(0, 1, "one_prompt"), (14, 2, "one_prompt"), (28, 2, "no_slot")]


def test_who_arrives_during_a_step_is_let_through_in_the_next_one() -> None:
    """At 15 request 0 decodes; the prompt that comes meanwhile runs before its next token."""
    result = neuron("0:4->3 15:4->1")
    assert result.items == [[(0, 4)], [(0, 1)], [(1, 4)], [(0, 1)]]


def test_a_prompt_without_room_lets_the_decodes_go_on() -> None:
    """Of 3 blocks a prompt of 4 leaves 2, which one of 5 takes; one of 5 leaves 1, and the second waits for its end."""
    result = neuron("0:4->3 1:5->1", blocks=3)
    assert result.items == [[(0, 4)], [(1, 5)], [(0, 1)], [(0, 1)]]
    tight = neuron("0:5->3 1:5->1", blocks=3)
    assert tight.items == [[(0, 5)], [(0, 1)], [(0, 1)], [(1, 5)]]
    assert blocked(tight.records) == [(15, 1, "kv_blocks")]


def test_a_decode_without_room_preempts_the_last_admitted() -> None:
    """Both hold one of 3 blocks; the first takes the third, so that the second gives up its own, and begins anew when
    the first has ended: its prompt and first token, as one."""
    result = neuron("0:4->6 0:4->2", blocks=3, max_num_seqs=2)
    assert result.items[:3] == [[(0, 4)], [(1, 4)], [(0, 1)]]
    assert result.items[-1] == [(1, 5)]
    assert [row["num_preemptions"] for row in result.records.requests] == [0, 1]


def test_its_records_are_equal_in_every_driver() -> None:
    run_every_way(
        VllmNeuron, VllmNeuronConfig(max_num_seqs=3, max_num_batched_tokens=6), requests("0:4->9 0:9->7 3:4->5 40:5->3")
    )


def test_a_budget_below_the_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens 4 must be at least max_num_seqs 8"):
        VllmNeuronConfig(max_num_seqs=8, max_num_batched_tokens=4)


def _plain(arrivals: list[Arrival], slots: int, budget: int) -> list[tuple[int, list[tuple[int, int]]]]:
    """(Start, (request, tokens) of it) of each step: the rules as a loop over lists, with KV memory to spare."""
    now, steps, waiting, running = 0, [], [], []
    coming = sorted(arrivals, key=lambda each: (each.request.arrival_ns, each.request.id))
    left = {each.request.id: each.request.prompt_tokens for each in arrivals}  # of its prompt
    lacks = {each.request.id: each.output_tokens or 0 for each in arrivals}
    while coming or waiting or running:
        while coming and coming[0].request.arrival_ns <= now:
            waiting.append(coming.pop(0).request.id)
        prompt = next((one for one in running if left[one]), None)
        if prompt is None and waiting and len(running) < slots:
            prompt = waiting.pop(0)
            running.append(prompt)
        if prompt is None and not running:
            now = coming[0].request.arrival_ns
            continue
        items = [(one, 1) for one in running] if prompt is None else [(prompt, min(left[prompt], budget))]
        steps.append((now, items))
        now += 10 + (2 * len(items) if prompt is None else items[0][1])
        for one, n in items:
            if prompt is not None:
                left[one] -= n
            lacks[one] -= not left[one]
        running = [one for one in running if lacks[one]]
    return steps


def test_random_loads_are_scheduled_as_by_the_plain_rule() -> None:
    """80 loads of up to 12 requests, 1 to 4 slots, budgets that cut prompts and that do not."""
    draw = random.Random(11)
    for _ in range(80):
        slots, budget = draw.randint(1, 4), draw.choice([4, 5, 7, 64])
        texts = [
            f"{draw.randint(0, 150)}:{draw.randint(1, 14)}->{draw.randint(1, 6)}" for _ in range(draw.randint(1, 12))
        ]
        arrivals = requests(" ".join(sorted(texts, key=lambda text: int(text.partition(":")[0]))))
        result = run(VllmNeuron, VllmNeuronConfig(max_num_seqs=slots, max_num_batched_tokens=budget), arrivals)
        assert [(row.start_ns, items) for row, items in zip(result.log, result.items, strict=True)] == _plain(
            arrivals, slots, budget
        ), texts
