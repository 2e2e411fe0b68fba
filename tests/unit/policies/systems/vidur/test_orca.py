"""Orca's scheduler, by hand: a KV block holds 4 tokens; a step takes 10 ns, 1 more a prefill token, 2 a decode."""

from __future__ import annotations

from typing import Any

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.kernel.batch import Batch
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import DecodeGroup, Request, Sequence
from batchsim.policies.systems.vidur.orca import Orca, OrcaConfig
from tests.support.stepping import Run, run
from tests.support.whole_batches import blocked, outcomes, times


def orca(arrivals: str, blocks: int = 1000, **knobs: Any) -> Run:
    return run(Orca, OrcaConfig(**knobs), arrivals, blocks=blocks)


def test_every_step_holds_the_running_and_whole_new_prompts() -> None:
    """One that comes during a step joins the next with its full prompt, whatever its length, beside the decode."""
    result = orca("0:4->4 5:40->2")
    assert result.items == [[(0, 4)], [(0, 1), (1, 40)], [(0, 1), (1, 1)], [(0, 1)]]
    assert times(result.records, "first_token_ns", "last_token_ns") == [(14, 92), (66, 80)]


def test_the_running_stand_before_the_new_in_the_batch() -> None:
    """Batch order is order of admission, which is order of arrival."""
    assert orca("0:2->3 0:2->3 12:2->1").items[1] == [(0, 1), (1, 1), (2, 2)]


def test_a_step_has_at_most_batch_size_cap_members() -> None:
    """With a cap of 2 the third waits for the first end; with 3 it starts at once."""
    arrivals = "0:4->3 0:4->1 0:4->1"
    result = orca(arrivals, batch_size_cap=2)
    assert result.items == [[(0, 4), (1, 4)], [(0, 1), (2, 4)], [(0, 1)]]
    assert blocked(result.records) == [(0, 2, "no_slot")]
    assert orca(arrivals, batch_size_cap=3).items[0] == [(0, 4), (1, 4), (2, 4)]


def test_each_holds_a_slot_of_the_longest_request_to_its_end() -> None:
    """Slots of 16 tokens are 4 blocks: 11 blocks hold two, 12 three, however short the requests."""
    arrivals = "0:1->3 0:1->1 0:1->1"
    tight = orca(arrivals, blocks=11, max_tokens_per_request=16)
    assert tight.items == [[(0, 1), (1, 1)], [(0, 1), (2, 1)], [(0, 1)]]
    assert [row.free for row in tight.log] == [3, 3, 7]
    assert blocked(tight.records) == [(0, 2, "kv_blocks")]
    assert orca(arrivals, blocks=12, max_tokens_per_request=16).items[0] == [(0, 1), (1, 1), (2, 1)]


def test_nobody_overtakes_a_blocked_head_and_nobody_is_preempted() -> None:
    """A full pool makes the queue wait; those that run keep their slots."""
    result = orca("0:2->3 0:30->1 0:1->1", blocks=8, max_tokens_per_request=32)
    assert result.items == [[(0, 2)], [(0, 1)], [(0, 1)], [(1, 30)], [(2, 1)]]
    assert result.preemptions() == []


def test_the_slot_is_the_models_length_unless_given() -> None:
    """max_model_len 64 takes 16 blocks a request, so 31 hold one at a time."""
    assert orca("0:1->1 0:1->1", blocks=31).items == [[(0, 1)], [(1, 1)]]
    assert orca("0:1->1 0:1->1", blocks=32).items == [[(0, 1), (1, 1)]]


def test_a_request_longer_than_a_slot_is_rejected() -> None:
    """The last token is never computed: 9 + 8 - 1 tokens fit a slot of 16, one more does not."""
    result = orca("0:9->8 0:9->9", max_tokens_per_request=16)
    assert outcomes(result.records) == [("finished", ""), ("rejected", "never_fits")]
    assert result.records.details == {"never_fits": "17 tokens need KV, max_tokens_per_request 16"}


def test_steps_of_decodes_are_repeated() -> None:
    """A step of decodes is the same again, though somebody waits; what was said before it is still there to be read."""
    scheduler = Orca(OrcaConfig(max_tokens_per_request=8), PolicyContext(CountingKV(2, 4), 64))
    for i, prompt in enumerate((2, 9, 2)):
        scheduler.add(Sequence(Request(i, 0, prompt, 4)), 0)
    prompts = scheduler.schedule(0, drain=True)
    assert isinstance(prompts, Batch)
    assert [(event.kind, event.seq.request.id) for event in scheduler.events] == [("rejected", 1), ("blocked", 2)]
    assert scheduler.repeat(Batch(DecodeGroup(4), [], 0), 12)


def test_a_pool_smaller_than_a_slot_is_refused() -> None:
    """Otherwise nobody could ever start."""
    with pytest.raises(ScenarioError, match="max_tokens_per_request 17 takes 5 KV blocks, 4 are in the pool"):
        Orca(OrcaConfig(max_tokens_per_request=17), PolicyContext(CountingKV(4, 4), 64))
