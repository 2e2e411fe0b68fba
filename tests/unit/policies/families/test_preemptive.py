"""Preemptive batching, by hand: a step takes 10 ns, 1 more a prefill token, 2 a decode, 3 a block swapped; blocks of 4.

The pair of most tests: two prompts of 4 that fill 2 blocks each until 74 ns, when both need a third for token 6.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.base.errors import ScenarioError
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import BLOCKED, MISSING
from batchsim.kernel.types import Arrival, Request, Sequence
from batchsim.policies.families.preemption import PreemptiveConfig, WaitingQueue, next_victim, remaining_tokens
from batchsim.policies.families.preemptive import Preemptive
from tests.support.random_cases import random_cases
from tests.support.stepping import Estimates, Exact, Run, crowds, run, run_every_way
from tests.support.whole_batches import blocked, outcomes, times

PAIR = "0:4->6 0:4->6"


def config(seqs: int = 8, budget: int | None = None, watermark: float = 0.0, **knobs: Any) -> PreemptiveConfig:
    return PreemptiveConfig(seqs, budget, watermark=watermark, **knobs)


def preemptive(arrivals: str, blocks: int = 1000, swap_blocks: int = 0, how: str = "live", **knobs: Any) -> Run:
    estimates = knobs.pop("estimates", None)
    chosen = config(**knobs)
    return run(Preemptive, chosen, arrivals, blocks=blocks, swap_blocks=swap_blocks, how=how, estimates=estimates)


# ---- blocks run out


def test_the_newest_gives_up_its_blocks_and_is_computed_again() -> None:
    """5 blocks: at 74 ns request 1 leaves, 0 ends at 86, and 4 + 5 known tokens are computed again for the sixth."""
    result = preemptive(PAIR, blocks=5)
    assert result.preemptions() == [(74, 1, "kv_blocks", 0)]
    assert result.items[-2:] == [[(0, 1)], [(1, 9)]]
    assert times(result.records, "last_token_ns", "num_preemptions", "recomputed_tokens") == [(86, 0, 0), (105, 1, 8)]
    assert blocked(result.records) == [(74, 1, "preemption")]


def test_blocks_that_just_suffice_preempt_nobody() -> None:
    """6 blocks are what both need to their end."""
    result = preemptive(PAIR, blocks=6)
    assert result.preemptions() == []
    assert times(result.records, "last_token_ns") == [(88,), (88,)]


def test_the_victim_is_the_least_important() -> None:
    """Under lowest_priority the older request 0 of priority 1 leaves; among equals the newest does."""
    assert preemptive("0:4->6p1 0:4->6p0", blocks=5, victim="lowest_priority").preemptions() == [
        (74, 0, "kv_blocks", 0)
    ]
    assert preemptive(PAIR, blocks=5, victim="lowest_priority").preemptions() == [(74, 1, "kv_blocks", 0)]


def test_the_victim_is_the_one_with_most_predicted_to_come() -> None:
    """The test's predictor says the cap: 7 for request 0, so it leaves; among equals the newest does."""
    assert preemptive("0:4->6/7 0:4->6", blocks=5, victim="most_remaining").preemptions() == [(74, 0, "kv_blocks", 0)]
    assert preemptive(PAIR, blocks=5, victim="most_remaining").preemptions() == [(74, 1, "kv_blocks", 0)]


def test_two_that_never_fit_together_do_not_take_turns() -> None:
    """Each needs the whole pool in the end: the loser waits until the winner is done, not to preempt it in turn."""
    result = preemptive("0:4->12 0:4->12", blocks=4)
    assert Counter(request for _, request, _, _ in result.preemptions()) == {1: 1}
    assert outcomes(result.records) == [("finished", ""), ("finished", "")]


def test_the_watermark_keeps_blocks_free_while_others_run() -> None:
    """2 of 10 blocks: a prompt of 7 beside one of 1 leaves 2 and comes in, one of 8 leaves 1 and waits."""
    fits = preemptive("0:4->1 0:28->1", blocks=10, watermark=0.2)
    assert times(fits.records, "scheduled_ns") == [(0,), (0,)]
    waits = preemptive("0:4->1 0:32->1", blocks=10, watermark=0.2)
    assert times(waits.records, "scheduled_ns") == [(0,), (14,)]
    assert blocked(waits.records) == [(0, 1, "kv_blocks")]
    assert times(preemptive("0:40->1", blocks=10, watermark=0.2).records, "scheduled_ns") == [(0,)]


def test_admission_leaves_the_decodes_their_next_blocks() -> None:
    """At 14 ns the decode needs a block: of 3 that leaves 1, so a prompt of 2 blocks waits and nobody is preempted."""
    result = preemptive("0:4->2 5:8->1", blocks=3)
    assert result.items == [[(0, 4)], [(0, 1)], [(1, 8)]]
    assert result.preemptions() == []
    assert preemptive("0:4->2 5:4->1", blocks=3).items[1] == [(0, 1), (1, 4)]


# ---- swap


def test_a_swapped_sequence_comes_back_where_it_was() -> None:
    """2 blocks go out beside one decode (10 + 2 + 6 ns) and come in for the sixth token (the same)."""
    result = preemptive(PAIR, blocks=5, swap_blocks=2, by="swap")
    assert result.preemptions() == [(74, 1, "kv_blocks", 0)]
    assert [(row.swap_out, row.swap_in) for row in result.log[-2:]] == [([(1, 2)], []), ([], [(1, 2)])]
    columns = ("last_token_ns", "num_swaps", "recomputed_tokens")
    assert times(result.records, *columns) == [(92, 0, 0), (110, 1, 0)]
    assert result.records.steps["num_waiting"].tolist() == [0, 0, 0, 0, 0, 1, 0]
    whole = preemptive(PAIR, blocks=5, swap_blocks=2, by="swap", budget=9, chunked_prefill=False)
    assert times(whole.records, *columns) == [(92, 0, 0), (110, 1, 0)]


def test_a_full_swap_falls_back_to_recompute_and_says_so() -> None:
    """1 swap block does not hold the 2 of the victim."""
    result = preemptive(PAIR, blocks=5, swap_blocks=1, by="swap")
    assert result.preemptions() == [(74, 1, "kv_blocks_swap_full", 0)]
    assert times(result.records, "num_swaps", "recomputed_tokens")[1] == (0, 8)


def test_auto_takes_the_cheaper_and_recompute_on_a_tie() -> None:
    """8 tokens at 1 ns against 2 blocks out and in: 4 ns at 1 ns a block, 8 at 2. At 2 ns, 16 against 12 at 3."""
    for estimates in (Estimates(1, 1), Estimates(2, 3)):
        cheap = preemptive(PAIR, blocks=5, swap_blocks=2, by="auto", estimates=estimates)
        assert times(cheap.records, "num_swaps", "recomputed_tokens")[1] == (1, 0)
    tie = preemptive(PAIR, blocks=5, swap_blocks=2, by="auto", estimates=Estimates(1, 2))
    assert times(tie.records, "num_swaps", "recomputed_tokens")[1] == (0, 8)


def test_the_swapped_come_back_before_anybody_new() -> None:
    """Request 2 would fit the block that is free; it waits for the swapped one, and with recompute behind it too."""
    result = preemptive("0:4->12 0:4->9 80:1->1", blocks=5, swap_blocks=4, by="swap")
    assert (92, 2, "swap_in_first") in blocked(result.records)
    back = next(row.start_ns for row in result.log if row.swap_in)
    assert times(result.records, "scheduled_ns")[2] >= (back,)


def test_a_cancel_frees_the_swap() -> None:
    """A swapped request that is given up returns its slots; the run checks the pools at its end."""
    result = preemptive("0:4->12 0:4->12c90", blocks=5, swap_blocks=4, by="swap")
    assert outcomes(result.records) == [("finished", ""), ("cancelled", "client_cancel")]
    assert not any(row.swap_in for row in result.log)


# ---- the waiting order


@pytest.mark.parametrize(
    ("order", "served"),
    [("fcfs", [0, 1, 2]), ("priority", [2, 0, 1]), ("sjf", [1, 0, 2]), ("srpt", [1, 0, 2])],
)
def test_the_queue_is_served_in_its_order(order: Any, served: list[int]) -> None:
    """One slot and three at once: by arrival and id, by importance, or by the predicted output, ties by id."""
    result = preemptive("0:4->3p1 0:4->2p1 0:4->3p0", seqs=1, waiting_order=order)
    starts = [start for (start,) in times(result.records, "scheduled_ns")]
    assert sorted(range(3), key=starts.__getitem__) == served


@pytest.mark.parametrize(("order", "first"), [("fcfs", 0), ("priority", 2), ("sjf", 1), ("srpt", 1)])
def test_the_swapped_wait_in_the_same_order(order: Any, first: int) -> None:
    """By arrival and id, by importance, or by the predicted output."""
    context = PolicyContext(CountingKV(10, 4, 10), 64, Exact())
    scheduler = Preemptive(config(by="swap", waiting_order=order), context)
    for i, (output, priority) in enumerate([(3, 1), (2, 1), (3, 0)]):
        scheduler.swapped.push(Sequence(Request(i, 0, 4, output, priority=priority)))
    assert scheduler.swapped.head().request.id == first


def test_srpt_counts_what_is_generated_already_and_sjf_does_not() -> None:
    """A preempted request with 5 of 8 tokens made goes before one of 4, by srpt alone."""
    old, new = Sequence(Request(0, 0, 4, 8)), Sequence(Request(1, 0, 4, 4))
    old.settled_output_tokens = 5
    heads = {}
    for order in ("srpt", "sjf"):
        queue = WaitingQueue(order, Exact())
        queue.push(old)
        queue.push(new)
        heads[order] = queue.head()
    assert heads == {"srpt": old, "sjf": new}


class Short:
    """Foretells two tokens for everybody."""

    name = "short"

    def predict(self, request: Request) -> int:
        return 2


def test_whoever_outgrew_a_prediction_has_nothing_to_come() -> None:
    """By 3 tokens or by 6, which says nothing of what remains: the first to arrive is served, the newest the victim."""
    old, new = Sequence(Request(0, 0, 4, 20)), Sequence(Request(1, 5, 4, 20))
    old.settled_output_tokens, new.settled_output_tokens = 5, 8
    old.order, new.order = 0, 1
    assert [remaining_tokens(seq, Short()) for seq in (old, new)] == [0, 0]
    queue = WaitingQueue("srpt", Short())
    queue.push(new)
    queue.push(old)
    assert queue.head() is old
    assert next_victim("most_remaining", {old: None, new: None}, {}, Short()) is new


# ---- preempt_after

IMPORTANT = "0:4->9p1 5:4->1p0"  # steps end at 14, 26, 38, 50; the second arrives at 5


@pytest.mark.parametrize("how", ["live", "leap"])
@pytest.mark.parametrize(("after", "at"), [(32, 38), (33, 38), (34, 50)])
def test_a_head_that_waited_long_enough_takes_the_slot_at_the_next_boundary(how: str, after: int, at: int) -> None:
    """Due at 37 or on the boundary 38 it comes in at 38, due at 39 a step later; a leap does not miss it."""
    result = preemptive(IMPORTANT, seqs=1, waiting_order="priority", preempt_after=after, how=how)
    assert result.preemptions() == [(at, 0, "priority", 1)]
    assert times(result.records, "scheduled_ns")[1] == (at,)


@pytest.mark.parametrize("priority", [1, 2])
def test_equal_or_higher_importance_is_never_preempted(priority: int) -> None:
    """The head waits for the end of a running request of its own or a better class."""
    arrivals = f"0:4->9p1 5:4->1p{priority}"
    result = preemptive(arrivals, seqs=1, waiting_order="priority", preempt_after=0)
    assert result.preemptions() == []
    assert blocked(result.records) == [(14, 1, "no_slot")]


def test_importance_takes_blocks_too_from_the_fewest() -> None:
    """1 of 7 blocks is free and the head needs 3: the newer of the two least important alone leaves."""
    arrivals = "0:5->9p2 0:5->9p2 0:5->9p1 20:12->1p0"
    result = preemptive(arrivals, blocks=7, waiting_order="priority", preempt_after=0)
    assert result.preemptions()[:1] == [(25, 1, "priority", 3)]
    assert times(result.records, "scheduled_ns")[3] == (25,)


def test_nobody_is_preempted_in_vain() -> None:
    """All that is less important holds 2 of 5 blocks, and the head needs 5: it waits without doing harm."""
    result = preemptive("0:5->4p1 0:5->4p0 20:20->1p0", blocks=5, waiting_order="priority", preempt_after=0)
    assert [p for p in result.preemptions() if p[2] == "priority"] == []
    assert times(result.records, "scheduled_ns")[2] == (62,)


def test_a_victim_of_importance_returns_and_ends() -> None:
    """It goes back to the queue, and comes in when the more important one is done."""
    result = preemptive(IMPORTANT, seqs=1, waiting_order="priority", preempt_after=0)
    assert result.preemptions() == [(14, 0, "priority", 1)]
    assert times(result.records, "scheduled_ns", "last_token_ns", "output_tokens") == [(0, 127, 9), (14, 28, 1)]


def test_a_swapped_victim_leaves_its_place_in_the_same_step() -> None:
    """Swapped out and first in line to come back, it does not get in before the one it made room for."""
    arrivals = "0:4->9p1 5:4->3p0"
    result = preemptive(arrivals, seqs=1, swap_blocks=9, by="swap", waiting_order="priority", preempt_after=0)
    assert result.items[1:4] == [[(1, 4)], [(1, 1)], [(1, 1)]]
    assert times(result.records, "num_swaps", "recomputed_tokens", "output_tokens") == [(1, 0, 9), (0, 0, 3)]


def test_who_lost_its_blocks_waits_its_time_anew() -> None:
    """Request 1, preempted for blocks at 86, is due at 106, so it returns at 110; by its arrival it would at 98."""
    result = preemptive("0:4->9p1 1:4->9p0", blocks=5, waiting_order="priority", preempt_after=20)
    assert result.preemptions() == [(86, 1, "kv_blocks", 1), (110, 0, "priority", 1)]


def test_the_block_a_victim_was_about_to_take_counts_for_the_head() -> None:
    """At 75 one block is free, which the victim is due beside its 2: the head's 3 fit, and it comes in."""
    arrivals = "0:4->9p1 0:5->12p0 70:12->1p0"
    result = preemptive(arrivals, blocks=6, waiting_order="priority", preempt_after=0)
    assert result.preemptions()[0] == (75, 0, "priority", 2)


def test_a_prompt_in_chunks_makes_way_for_a_more_important_one() -> None:
    """It would take the whole budget of every step up to its end; it starts again afterwards."""
    result = preemptive("0:20->1p1 5:4->1p0", seqs=4, budget=4, waiting_order="priority", preempt_after=0)
    assert result.preemptions() == [(14, 0, "priority", 1)]
    assert result.items[:3] == [[(0, 4)], [(1, 4)], [(0, 4)]]


def test_a_head_takes_tokens_too_as_many_as_its_prompt_needs_at_once() -> None:
    """7 tokens beside 2 decodes of a budget of 8: whole it lacks one, so the newer decode leaves; in chunks nobody."""
    arrivals = "0:4->5p1 0:4->5p1 20:7->1p0"
    knobs: dict[str, Any] = {"seqs": 8, "budget": 8, "waiting_order": "priority", "preempt_after": 0}
    whole = preemptive(arrivals, chunked_prefill=False, **knobs)
    assert whole.preemptions() == [(32, 1, "priority", 2)]
    assert whole.items[2] == [(0, 1), (2, 7)]
    assert preemptive(arrivals, **knobs).items[2] == [(0, 1), (1, 1), (2, 6)]
    more = preemptive("0:4->5p1 0:4->5p1 20:8->1p0", chunked_prefill=False, **knobs)
    assert more.preemptions() == [(32, 1, "priority", 2), (32, 0, "priority", 2)]


def test_without_chunks_a_prompt_waits_for_room_in_the_budget() -> None:
    """6 tokens beside one decode need a budget of 7; with 6 they wait until the decode has ended."""
    arrivals = "0:4->3 0:6->1"
    late = preemptive(arrivals, seqs=2, budget=6, chunked_prefill=False)
    assert late.items == [[(0, 4)], [(0, 1)], [(0, 1)], [(1, 6)]]
    assert blocked(late.records) == [(0, 1, "token_budget")]
    assert preemptive(arrivals, seqs=2, budget=7, chunked_prefill=False).items[1] == [(0, 1), (1, 6)]


def test_one_token_of_the_budget_is_enough_to_come_in() -> None:
    """Beside two decodes of a budget of 3, or 7 tokens of one of 8, a due head preempts nobody; none waits for two."""
    arrivals = "0:4->9p1 0:4->9p1 41:2->1p0"
    result = preemptive(arrivals, seqs=3, budget=3, waiting_order="priority", preempt_after=0)
    assert result.preemptions() == []
    assert result.items[4] == [(0, 1), (1, 1), (2, 1)]
    knobs: dict[str, Any] = {"seqs": 4, "budget": 8, "waiting_order": "priority", "preempt_after": 0}
    for order in ("decode_first", "prefill_first"):
        assert preemptive("0:15->1p1 5:4->1p0", order=order, **knobs).items[1] == [(0, 7), (1, 1)]
    beside = preemptive("0:4->9p0 10:15->1p1 30:4->1p0", order="prefill_first", **knobs)
    assert beside.items[:3] == [[(0, 4)], [(1, 8)], [(1, 7), (2, 1)]]
    assert preemptive("0:4->3 0:6->1", seqs=2, budget=5).items[0] == [(0, 4), (1, 1)]


def test_decodes_that_stand_still_have_no_tokens_to_give() -> None:
    """Under prefill_first the prompt in chunks takes all 8 tokens: it leaves too, after the lesser decode."""
    knobs: dict[str, Any] = {"seqs": 4, "budget": 8, "waiting_order": "priority", "preempt_after": 0}
    result = preemptive("0:4->9p2 10:16->1p1 30:4->1p0", order="prefill_first", **knobs)
    assert result.preemptions() == [(32, 0, "priority", 2), (32, 1, "priority", 2)]
    assert result.items[:3] == [[(0, 4)], [(1, 8)], [(2, 4)]]


def test_who_was_preempted_before_its_first_decode_decodes_once() -> None:
    """Under prefill_first no decode step lies between the two prefills of request 0; its tokens are still its own."""
    result = preemptive(IMPORTANT, seqs=1, waiting_order="priority", preempt_after=0, order="prefill_first")
    assert result.items[:4] == [[(0, 4)], [(1, 4)], [(0, 5)], [(0, 1)]]
    assert times(result.records, "output_tokens") == [(9,), (1,)]


def test_the_watermark_does_not_count_when_all_others_make_way() -> None:
    """The head needs all 10 blocks and would leave less than the watermark of 2, but it will run alone."""
    result = preemptive("0:4->9p1 5:37->1p0", blocks=10, watermark=0.2, waiting_order="priority", preempt_after=0)
    assert result.preemptions() == [(14, 0, "priority", 1)]


@pytest.mark.parametrize(("prompt", "victims"), [(17, [1]), (21, [1, 0])])
def test_the_watermark_counts_while_anybody_stays(prompt: int, victims: list[int]) -> None:
    """4 of 10 blocks are free and 2 stay so: a victim of 3 makes room for 5 blocks, for 6 the other leaves too."""
    arrivals = f"0:9->9p1 0:9->9p1 5:{prompt}->1p0"
    result = preemptive(arrivals, blocks=10, watermark=0.2, waiting_order="priority", preempt_after=0)
    assert [p for p in result.preemptions() if p[0] == 28] == [(28, victim, "priority", 2) for victim in victims]


def test_the_blocks_that_decodes_take_next_are_not_for_the_head() -> None:
    """One block is free, which the decode is due: there is none for a head of 4 tokens without its leaving."""
    result = preemptive("0:4->5p1 5:4->1p0", blocks=3, waiting_order="priority", preempt_after=0)
    assert result.preemptions() == []
    result = preemptive("0:4->5p1 5:4->1p0", blocks=2, waiting_order="priority", preempt_after=0)
    assert result.preemptions()[0] == (14, 0, "priority", 1)


def test_who_comes_at_a_boundary_is_due_at_once() -> None:
    """With preempt_after 0 no nanosecond need pass."""
    result = preemptive("0:4->9p1 14:4->1p0", seqs=1, waiting_order="priority", preempt_after=0)
    assert result.preemptions() == [(14, 0, "priority", 1)]


def test_a_due_head_passes_the_swapped_that_are_less_important() -> None:
    """Request 1 of priority 1 lies in swap for want of blocks; request 2 of priority 0 fits and passes it."""
    arrivals = "0:4->12p1 0:4->9p1 80:1->1p0"
    knobs: dict[str, Any] = {"by": "swap", "waiting_order": "priority"}
    passed = preemptive(arrivals, blocks=5, swap_blocks=4, preempt_after=0, **knobs)
    assert times(passed.records, "scheduled_ns")[2] == (92,)
    assert passed.preemptions() == [(74, 1, "kv_blocks", 0)]
    late = preemptive(arrivals, blocks=5, swap_blocks=4, **knobs)
    assert times(late.records, "scheduled_ns")[2] > (92,)


def test_a_due_head_in_swap_asks_for_one_token_of_the_budget() -> None:
    """At 104 request 1 lies in swap and lacks one token: a budget of 12 lets it take the place of request 0."""
    knobs: dict[str, Any] = {"waiting_order": "priority", "preempt_after": 0, "budget": 12, "chunked_prefill": False}
    result = preemptive("0:4->9p2 1:4->6p1", blocks=5, swap_blocks=9, by="swap", **knobs)
    assert result.preemptions() == [(86, 1, "kv_blocks", 1), (104, 0, "priority", 1)]


def test_a_due_head_does_not_pass_its_equals_in_swap() -> None:
    """As above, but all are equals: the request in swap is first."""
    arrivals = "0:4->12p1 0:4->9p1 80:1->1p1"
    result = preemptive(arrivals, blocks=5, swap_blocks=4, by="swap", waiting_order="priority", preempt_after=0)
    back = next(row.start_ns for row in result.log if row.swap_in)
    assert times(result.records, "scheduled_ns")[2] >= (back,)


# ---- the budget


def test_a_swapped_decode_takes_its_token_of_the_budget() -> None:
    """It is back at 92 with one of 8 tokens, which leaves 7 to the prompt of 8 that comes in with it."""
    result = preemptive(PAIR + " 80:8->1", blocks=5, swap_blocks=2, by="swap", budget=8)
    assert result.items[-2:] == [[(1, 1), (2, 7)], [(2, 1)]]


def test_a_swapped_decode_that_stands_still_takes_no_token_of_the_budget() -> None:
    """Under prefill_first it is back at 92 too, and the prompt that comes in with it has all 8 tokens."""
    knobs: dict[str, Any] = {"by": "swap", "budget": 8, "order": "prefill_first"}
    result = preemptive(PAIR + " 80:8->1", blocks=5, swap_blocks=2, **knobs)
    assert result.items[-2:] == [[(2, 8)], [(1, 1)]]


def test_prefill_first_takes_no_blocks_for_decodes_that_stand_still() -> None:
    """Request 0 lacks a block from 18 on; its rival loses its own only at 36, when its prompt is done and 0 can run."""
    result = preemptive("0:4->3 0:12->3", blocks=4, seqs=2, budget=8, order="prefill_first")
    assert result.items[:3] == [[(0, 4), (1, 4)], [(1, 8)], [(0, 1)]]
    assert result.preemptions() == [(36, 1, "kv_blocks", 0)]


def test_a_head_that_lacks_tokens_names_the_prompt_that_takes_them() -> None:
    """The first prompt takes all 4 tokens of the step; a head that lacks a slot is in nobody's way."""
    for seqs, budget, rows in ((2, 4, [(1, 0)]), (1, 4, [(1, MISSING)])):
        states = preemptive("0:8->1 0:4->1", seqs=seqs, budget=budget).records.states
        assert states[states["state"] == BLOCKED][["request_id", "blocker"]].tolist() == rows


def test_chunks_and_prefill_first_are_those_of_the_continuous_family() -> None:
    """Budget 6: the decodes go first, or stand still while the second prompt runs in two chunks."""
    arrivals = "0:4->3 12:8->2"
    assert preemptive(arrivals, seqs=2, budget=6).items[1:3] == [[(0, 1), (1, 5)], [(0, 1), (1, 3)]]
    first = preemptive(arrivals, seqs=2, budget=6, order="prefill_first")
    assert first.items[1:4] == [[(1, 6)], [(1, 2)], [(0, 1), (1, 1)]]


def test_without_chunks_what_could_not_be_recomputed_is_rejected() -> None:
    """4 + 5 - 1 tokens fit a budget of 8 in one step, should it come to that; one more does not."""
    result = preemptive("0:4->5 0:4->6", seqs=2, budget=8, chunked_prefill=False)
    assert outcomes(result.records) == [("finished", ""), ("rejected", "over_token_budget")]
    detail = "up to 9 tokens to recompute in one step, max_num_batched_tokens 8"
    assert result.records.details == {"over_token_budget": detail}
    assert outcomes(preemptive("0:4->6", seqs=2, budget=8).records) == [("finished", "")]
    model_length = preemptive("0:4->6/90", seqs=2, budget=63, chunked_prefill=False)  # 64, and the last is not computed
    assert outcomes(model_length.records) == [("finished", "")]


def test_a_request_that_fits_no_empty_pool_is_rejected() -> None:
    """16 tokens fit 4 blocks, 17 do not: it is told so at once and blocks nobody."""
    result = preemptive("0:8->10 0:8->9", blocks=4)
    assert outcomes(result.records) == [("rejected", "never_fits"), ("finished", "")]


# ---- what is refused


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"seqs": 8, "budget": 7}, "max_num_batched_tokens 7 must be at least max_num_seqs 8"),
        ({"preempt_after": 5}, "needs waiting_order: priority, not fcfs"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(knobs: dict[str, Any], message: str) -> None:
    """Each wrong knob is named with its value."""
    with pytest.raises(ValueError, match=message):
        config(**knobs)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"waiting_order": "sjf"}, "waiting_order: sjf, victim: newest needs predicted"),
        ({"waiting_order": "srpt"}, "waiting_order: srpt, victim: newest needs predicted"),
        ({"victim": "most_remaining"}, "victim: most_remaining needs predicted"),
        ({"by": "auto"}, "by: auto needs estimates"),
        ({"by": "swap"}, "by: swap needs swap space"),
    ],
)
def test_a_knob_that_lacks_what_it_needs_is_refused(knobs: dict[str, Any], message: str) -> None:
    """Lengths come from a named predictor only, swap needs space: said before the run starts."""
    with pytest.raises(ScenarioError, match=message):
        Preemptive(config(**knobs), PolicyContext(CountingKV(10, 4), 64))


# ---- everything at once


@st.composite
def configs(draw: st.DrawFn) -> PreemptiveConfig:
    """Any mix of knobs."""
    preempt_after = draw(st.sampled_from([None, 0, 15, 40]))
    orders = ["fcfs", "priority", "sjf", "srpt"] if preempt_after is None else ["priority"]
    return PreemptiveConfig(
        draw(st.integers(1, 5)),
        draw(st.sampled_from([None, 5, 8])),
        draw(st.booleans()),
        draw(st.sampled_from(["decode_first", "prefill_first"])),
        draw(st.sampled_from([0.0, 0.1, 0.3])),
        draw(st.sampled_from(["newest", "lowest_priority", "most_remaining"])),
        draw(st.sampled_from(["recompute", "swap", "auto"])),
        draw(st.sampled_from(orders)),
        preempt_after,
    )


@random_cases(200)
@given(
    arrivals=crowds(),
    chosen=configs(),
    blocks=st.integers(9, 13),
    swap_blocks=st.integers(1, 12),
    block_ns=st.sampled_from([1, 2, 4]),
)
def test_every_driver_agrees_and_the_limits_hold(
    arrivals: list[Arrival], chosen: PreemptiveConfig, blocks: int, swap_blocks: int, block_ns: int
) -> None:
    """Bit-equal records under every driver, leap and KV manager; slots, budget, pool and swap kept; the run ends."""
    estimates = Estimates(2, block_ns)
    result = run_every_way(Preemptive, chosen, arrivals, blocks=blocks, swap_blocks=swap_blocks, estimates=estimates)
    priority = {arrival.request.id: arrival.request.priority for arrival in arrivals}
    in_swap: dict[int, int] = {}
    for row in result.log:
        assert len(row.items) <= chosen.max_num_seqs
        assert len({request for request, _ in row.items}) == len(row.items)
        assert sum(n for _, n in row.items) <= (chosen.max_num_batched_tokens or 1000)
        assert not {request for request, _ in row.items} & set(row.preempted)
        assert 0 <= row.free <= blocks
        for request, moved in row.swap_in:
            assert in_swap.pop(request) == moved
        in_swap.update(row.swap_out)
        assert chosen.by != "recompute" or not in_swap
    for _, victim, reason, by in result.preemptions():
        assert not reason.startswith("priority") or priority[by] < priority[victim]
