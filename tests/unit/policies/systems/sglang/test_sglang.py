"""SGLang's scheduler by hand: rules 1 to 4 of its specification, and what is refused; the others: test_sglang_memory.

Times in ns with stepping's LinearCost: a step is 10, 1 a prefill token, 2 a decode. The KV block is SGLang's page.
"""

from __future__ import annotations

from typing import Any

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.tokens import TokenIds
from batchsim.kernel.types import Request, Sequence
from batchsim.kv.radix_cache import RadixKV
from batchsim.policies.systems.sglang.sglang import Sglang, SglangConfig
from batchsim.policies.systems.sglang.waiting_queue import ByPrefix
from tests.support.sglang_runs import ignoring, sharing, steps, timeline
from tests.support.whole_batches import blocked, outcomes

# ---- rule 1: prefill first


def test_rule_1_a_prefill_runs_alone_and_the_decodes_stand_still() -> None:
    """Request 1 arrives during the prefill of 0; its own goes before the first decode, then both decode."""
    done = timeline("0:8->3 15:4->2")
    assert steps(done) == [(0, [(0, 8)]), (18, [(1, 4)]), (32, [(0, 1), (1, 1)]), (46, [(0, 1)])]


def test_rule_1_mixed_chunks_let_the_decodes_ride_along() -> None:
    """With enable_mixed_chunk request 0 decodes in the prefill step of 1; newcomers then stand ahead of it."""
    done = timeline("0:8->3 15:4->2", enable_mixed_chunk=True, chunked_prefill_size=16)
    assert steps(done) == [(0, [(0, 8)]), (18, [(1, 4), (0, 1)]), (34, [(1, 1), (0, 1)])]


def test_rule_1_riding_decodes_are_charged_to_the_chunk() -> None:
    """Of a chunk of 8, one riding decode leaves 7 tokens, a page of 4; alone the prompt is cut at 8."""
    knobs = {"chunked_prefill_size": 8, "max_prefill_tokens": 100}
    mixed = timeline("0:4->9 5:20->1", enable_mixed_chunk=True, **knobs)
    assert mixed.items[1:4] == [[(1, 4), (0, 1)], [(1, 7), (0, 1)], [(1, 7), (0, 1)]]
    assert timeline("0:4->9 5:20->1", **knobs).items[1:4] == [[(1, 8)], [(1, 8)], [(1, 4)]]


def test_rule_1_decodes_that_find_no_page_sit_the_mixed_step_out() -> None:
    """Request 3 takes one of three free pages when 0, 1 and 2 all need one: they stand still and none is retracted."""
    done = timeline(
        "0:2->4 5:3->4 15:4->4 35:3->1",
        tokens=24,
        enable_mixed_chunk=True,
        chunked_prefill_size=16,
        schedule_conservativeness=0.0,
    )
    assert done.items[2:4] == [[(2, 4), (1, 1), (0, 1)], [(3, 3)]]
    assert sorted(done.items[4]) == [(0, 1), (1, 1), (2, 1)]
    assert done.preemptions() == []


@pytest.mark.parametrize(("budget", "step"), [(1, 3), (2, 1)])
def test_rule_1_riding_decodes_are_charged_to_the_input_budget(budget: int, step: int) -> None:
    """One riding decode uses a budget of 1 up, so that request 1 waits for the end of 0; of 2 it leaves enough."""
    done = timeline("0:4->3 5:4->1", enable_mixed_chunk=True, chunked_prefill_size=8, max_prefill_tokens=budget)
    assert (1, 4) in done.items[step]


def test_rule_1_who_waits_for_budget_may_come_to_wait_for_memory_in_a_leap_too() -> None:
    """The riding decodes use a budget of 2 up; at 86 they leave 2 of 19 tokens, which are for them."""
    knobs = {"enable_mixed_chunk": True, "chunked_prefill_size": 8, "max_prefill_tokens": 2}
    done = timeline("0:4->9 0:4->8 5:4->1", page=1, tokens=19, schedule_conservativeness=0.0, **knobs)
    assert blocked(done.records)[1:3] == [(14, 2, "token_budget"), (86, 2, "kv_blocks")]


@pytest.mark.parametrize(("output", "step"), [(8, 1), (9, 20)])
def test_rule_1_riding_decodes_are_charged_to_the_kv_tokens(output: int, step: int) -> None:
    """30 tokens are free and the riding decode will take one of them: 19 + 8 + 1 fit, 19 + 9 + 1 do not."""
    done = timeline(
        f"0:10->20 5:19->{output}",
        page=1,
        tokens=40,
        enable_mixed_chunk=True,
        chunked_prefill_size=100,
        schedule_conservativeness=0.0,
    )
    assert (1, 19) in done.items[step]


def test_rule_1_arrivals_are_taken_in_at_every_so_many_calls_after_decodes() -> None:
    """Request 1 comes at 15, in the first decode of 0: of the calls at 26, 38 and 50 the third takes it in."""
    done = timeline("0:4->9 15:4->1", scheduler_recv_interval=3)
    assert [step for step in steps(done) if (1, 4) in step[1]] == [(50, [(1, 4)])]
    assert blocked(done.records) == []


def test_rule_1_after_a_prompt_and_at_rest_arrivals_are_taken_in_at_once() -> None:
    """Request 1 comes in the prompt's step of 0, request 2 in its last but one decode, request 3 to an engine at rest.

    2 is taken in at the call of 64, when no one runs any more, before the interval of 30 is over.
    """
    done = timeline("0:4->4 5:4->1 45:4->1 200:4->1", scheduler_recv_interval=30)
    prompts = [(start, items) for start, items in steps(done) if items[0][1] == 4]
    assert prompts == [(0, [(0, 4)]), (14, [(1, 4)]), (64, [(2, 4)]), (200, [(3, 4)])]


def test_rule_1_an_arrival_that_is_not_taken_in_can_be_cancelled() -> None:
    """Request 1 comes at 15, gives up at 30 and is never seen by the queue."""
    done = timeline("0:4->9 15:4->1c30", scheduler_recv_interval=30)
    assert [outcome for outcome, _ in outcomes(done.records)] == ["finished", "cancelled"]
    assert all((1, 4) not in items for _, items in steps(done))


# ---- rule 2: schedule policies


def test_rule_2_fcfs_and_lpm_order_the_waiting() -> None:
    """Request 2 has 12 of 16 tokens cached, from request 0: lpm lets it in before 1, fcfs after."""
    arrivals = sharing("0:12->1 5:12->1 5:16->1", ((0, 12),), ((1, 12),), ((0, 12), (2, 4)))
    expected = {"fcfs": [[(0, 12)], [(1, 12)], [(2, 4)]], "lpm": [[(0, 12)], [(2, 4)], [(1, 12)]]}
    for policy, items in expected.items():
        assert timeline(arrivals, schedule_policy=policy, prefill_max_requests=1).items == items


def test_rule_2_lpm_lets_one_of_those_with_a_common_prefix_go_first() -> None:
    """Requests 0 and 1 share 40 tokens that are not cached: 1 gives way to 2 and then computes only its own 4."""
    arrivals = sharing("0:44->1 0:44->1 0:8->1", ((0, 40), (1, 4)), ((0, 40), (2, 4)), ((3, 8),))
    done = timeline(arrivals, schedule_policy="lpm", prefill_max_requests=2)
    assert done.items == [[(0, 44), (2, 8)], [(1, 4)]]
    done = timeline(arrivals, schedule_policy="fcfs", prefill_max_requests=2)
    assert done.items == [[(0, 44), (1, 44)], [(2, 8)]]


def test_rule_2_a_common_prefix_below_32_tokens_is_no_reason_to_wait() -> None:
    """The same with 28 tokens in common: the two run side by side, in the order they came."""
    arrivals = sharing("0:32->1 0:32->1 0:8->1", ((0, 28), (1, 4)), ((0, 28), (2, 4)), ((3, 8),))
    done = timeline(arrivals, schedule_policy="lpm", prefill_max_requests=2)
    assert done.items == [[(0, 32), (1, 32)], [(2, 8)]]


@pytest.mark.parametrize(("num_waiting", "first"), [(128, 127), (129, 0)])
def test_rule_2_lpm_is_fcfs_for_a_long_queue(num_waiting: int, first: int) -> None:
    """The last of 128 waiting has its prompt cached and goes first; of 129 the first does."""
    kv = RadixKV(100, 4)
    known = Sequence(Request(999, 0, 8, 1, tokens=TokenIds.of([(0, 0, 8)])))
    assert kv.allocate(known, 8)
    known.settled_computed_tokens = 8
    kv.insert(known)
    queue = ByPrefix(kv, shortest=False)
    for i in range(num_waiting):
        tokens = TokenIds.of([(0, 0, 12)]) if i == num_waiting - 1 else None
        queue.push(Sequence(Request(i, 0, 12, 1, tokens=tokens)))
    queue.arrange()
    assert queue.head().request.id == first


def test_rule_2_shortest_prefill_first_goes_by_uncached_tokens() -> None:
    """Of 16 tokens with 12 cached, 6 and 12 uncached ones: 4, then 6, then 12 are computed."""
    arrivals = sharing("0:12->1 5:12->1 5:16->1 5:6->1", ((0, 12),), ((1, 12),), ((0, 12), (2, 4)), ((3, 6),))
    done = timeline(arrivals, schedule_policy="shortest-prefill-first", prefill_max_requests=1)
    assert done.items == [[(0, 12)], [(2, 4)], [(3, 6)], [(1, 12)]]


def test_rule_2_shortest_prefill_first_cuts_the_chunk_for_a_shorter_one() -> None:
    """Request 0 leaves 4 of its second chunk of 8 to request 1, which fcfs would keep waiting for the third."""
    knobs = {"chunked_prefill_size": 8}
    done = timeline("0:20->1 5:4->1", schedule_policy="shortest-prefill-first", **knobs)
    assert done.items == [[(0, 8)], [(0, 4), (1, 4)], [(0, 8)]]
    assert timeline("0:20->1 5:4->1", **knobs).items == [[(0, 8)], [(0, 8)], [(0, 4), (1, 4)]]


def test_rule_2_a_chunk_keeps_a_page_whoever_is_shorter() -> None:
    """Two shorter ones would take the whole chunk of 8: one goes beside a page of request 0, the other in the next."""
    done = timeline("0:20->1 5:4->1 5:4->1", schedule_policy="shortest-prefill-first", chunked_prefill_size=8)
    assert done.items == [[(0, 8)], [(0, 4), (1, 4)], [(0, 4), (2, 4)], [(0, 4)]]


# ---- rule 3: priorities


@pytest.mark.parametrize(
    ("knobs", "order"),
    [
        ({}, [0, 1, 2]),
        ({"enable_priority_scheduling": True}, [1, 2, 0]),
        ({"enable_priority_scheduling": True, "schedule_low_priority_values_first": True}, [0, 1, 2]),
    ],
)
def test_rule_3_the_higher_number_first_then_the_earlier(knobs: dict[str, Any], order: list[int]) -> None:
    """Priorities 0, 5, 5: the order they came in unless priorities are on; then the fives, or with low first the 0."""
    done = timeline("0:4->1p0 0:4->1p5 0:4->1p5", prefill_max_requests=1, **knobs)
    assert [row.items[0][0] for row in done.log] == order


@pytest.mark.parametrize("low_first", [False, True])
@pytest.mark.parametrize(("priority", "makes_way"), [(10, False), (11, True)])
def test_rule_3_a_preemption_needs_more_than_the_threshold(priority: int, makes_way: bool, low_first: bool) -> None:
    """With one slot, 11 against 0 retracts the running one, 10 does not: the default threshold is 10."""
    done = timeline(
        f"0:4->9p0 5:4->2p{-priority if low_first else priority}",
        max_running_requests=1,
        enable_priority_scheduling=True,
        schedule_low_priority_values_first=low_first,
    )
    if makes_way:
        assert done.preemptions() == [(14, 0, "priority", 1)]
        # Its prompt is still in the tree, so that only the token it had made is computed anew.
        assert done.items[:4] == [[(0, 4)], [(1, 4)], [(1, 1)], [(0, 1)]]
    else:
        assert done.preemptions() == []
        assert done.items[-2] == [(1, 4)]


def test_rule_3_preemption_can_be_disabled_and_is_not_for_fcfs() -> None:
    """With disable_priority_preemption, or without priorities, the slot is kept."""
    for knobs in ({"enable_priority_scheduling": True, "disable_priority_preemption": True}, {}):
        done = timeline("0:4->9p0 5:4->2p50", max_running_requests=1, **knobs)
        assert done.preemptions() == []
        assert blocked(done.records) == [(14, 1, "no_slot")]


@pytest.mark.parametrize(("output", "makes_way"), [(70, True), (71, False)])
def test_rule_3_what_is_made_way_for_is_as_it_was_when_last_looked_at(output: int, makes_way: bool) -> None:
    """63.7 of 70 free tokens are not spoken for; preempting request 0 adds its 6.3: as many as 1 may generate, 70.

    Its prompt of 20 does not count, since it was never looked at. With one token more nobody is preempted.
    """
    done = timeline(
        f"0:30->10p0 5:20->{output}p50", page=1, tokens=100, max_running_requests=1, enable_priority_scheduling=True
    )
    assert done.preemptions() == ([(40, 0, "priority", 1)] if makes_way else [])


def test_rule_3_a_full_batch_is_looked_at_before_every_step() -> None:
    """Request 1 has found the slot taken; 2, more important, takes it although nobody has left since."""
    done = timeline("0:4->9p0 5:4->9p0 40:4->2p50", max_running_requests=1, enable_priority_scheduling=True)
    assert done.preemptions() == [(50, 0, "priority", 2)]


def test_rule_3_a_full_batch_is_looked_at_as_what_it_reserves_falls() -> None:
    """Request 1 reserves 0.7 of 4,000 tokens, and less with every step, until the victim 0 leaves enough for 2."""
    done = timeline(
        "0:4->30p0 0:4->30/4000p50 30:4->2/1320p50",
        page=1,
        tokens=4100,
        max_model_len=5000,
        max_running_requests=2,
        enable_priority_scheduling=True,
    )
    assert [(victim, by) for _, victim, _, by in done.preemptions()] == [(0, 2)]
    assert [row.preempted for row in done.log].index([0]) == 12


def test_rule_3_what_stays_reserved_is_the_sum_of_sglang() -> None:
    """0.7 of 3, 7 and 3, added row by row, less the 2.1 of the victim 2, leave a little more than 9 of 16: 2 + 6 + 1.

    Of 13 tokens at once they would leave 9.
    """
    done = timeline(
        "0:1->4p70 5:1->8p70 15:1->4p0 25:2->6p70",
        page=1,
        tokens=18,
        max_running_requests=3,
        enable_priority_scheduling=True,
        disable_radix_cache=True,
    )
    assert done.preemptions() == [(33, 2, "priority", 3)]
    assert done.items[3] == [(3, 2)]


@pytest.mark.parametrize(("output", "at_once"), [(41, True), (42, False)])
def test_rule_3_what_the_others_reserve_stays_so(output: int, at_once: bool) -> None:
    """Request 1 reserves 27.3 of 90 tokens beside the victim's 20.3: 20 + 41 + 1 fit at once, 20 + 42 + 1 do not."""
    done = timeline(
        f"0:10->30p0 0:10->40p50 5:20->{output}p50",
        page=1,
        tokens=100,
        max_running_requests=2,
        enable_priority_scheduling=True,
    )
    assert done.preemptions()[0] == (30, 0, "priority", 2)
    assert ((2, 20) in done.items[1]) is at_once


def test_rule_3_what_victims_reserved_is_free_at_once() -> None:
    """Of 90 tokens request 1 reserves 20.3: 20 + 45 + 1 fit at once, beside the 20.3 of the victim they would not."""
    done = timeline(
        "0:10->30p0 0:10->30p50 5:20->45p50",
        page=1,
        tokens=100,
        max_running_requests=2,
        enable_priority_scheduling=True,
    )
    assert done.preemptions() == [(30, 0, "priority", 2)]
    assert done.items[1] == [(2, 20)]


@pytest.mark.parametrize(("output", "victims"), [(24, [1]), (25, [0, 1])])
def test_rule_3_several_victims_leave_in_batch_order(output: int, victims: list[int]) -> None:
    """32 of 40 tokens are free and twice 8 reserved: the less important 1 makes 24 of them free, for 25 both go."""
    done = timeline(
        f"0:4->9p1 0:4->9p0 5:4->{output}p50",
        page=1,
        tokens=40,
        max_running_requests=2,
        schedule_conservativeness=2.0,
        enable_priority_scheduling=True,
    )
    assert done.log[1].preempted == victims


def test_rule_3_victims_are_the_least_important_then_the_latest() -> None:
    """Of two slots with priorities 1 and 1, the request that came later gives way, and only it."""
    done = timeline("0:4->9p1 0:4->9p1 5:4->2p50", max_running_requests=2, enable_priority_scheduling=True)
    assert [(request, by) for _, request, _, by in done.preemptions()] == [(1, 2)]
    done = timeline("0:4->9p1 0:4->9p2 5:4->2p50", max_running_requests=2, enable_priority_scheduling=True)
    assert [(request, by) for _, request, _, by in done.preemptions()] == [(0, 2)]


# ---- rule 4: budgets of a prefill batch


def test_rule_4_slots_bound_the_running() -> None:
    """Two of three run; the third waits for a slot and is let in once request 0 has ended."""
    done = timeline("0:4->2 0:4->4 0:4->1", max_running_requests=2)
    assert done.items == [[(0, 4), (1, 4)], [(0, 1), (1, 1)], [(2, 4)], [(1, 1)], [(1, 1)]]
    assert blocked(done.records) == [(0, 2, "no_slot")]


def test_rule_4_the_number_of_requests_in_a_batch_is_bounded() -> None:
    """prefill_max_requests 2: three prompts take two batches, one behind the other."""
    assert timeline("0:4->1 0:4->1 0:4->1", prefill_max_requests=2).items == [[(0, 4), (1, 4)], [(2, 4)]]


@pytest.mark.parametrize(("budget", "batches"), [(12, 2), (13, 1)])
def test_rule_4_later_requests_must_stay_below_the_input_budget(budget: int, batches: int) -> None:
    """After 4 tokens, 8 more need a budget above 12, not of 12."""
    assert len(timeline("0:4->1 0:8->1", max_prefill_tokens=budget).items) == batches


@pytest.mark.parametrize(("budget", "batches"), [(12, 2), (13, 1)])
def test_rule_4_the_input_budget_is_charged_whole_pages(budget: int, batches: int) -> None:
    """5 tokens take 8 of it; the next 4 must be below the rest."""
    assert len(timeline("0:5->1 0:4->1", max_prefill_tokens=budget).items) == batches


def test_rule_4_the_chunk_is_charged_whole_pages() -> None:
    """5 tokens take two pages of 4, which uses a chunk of 8 up."""
    assert timeline("0:5->1 0:3->1", chunked_prefill_size=8).items == [[(0, 5)], [(1, 3)]]
    assert timeline("0:4->1 0:3->1", chunked_prefill_size=8).items == [[(0, 4), (1, 3)]]


def test_rule_4_without_a_slot_the_budget_is_not_asked() -> None:
    """The riding decode would use a budget of 1 up, too; what 1 waits for is the slot."""
    done = timeline(
        "0:4->9 5:4->1", enable_mixed_chunk=True, chunked_prefill_size=8, max_prefill_tokens=1, max_running_requests=1
    )
    assert blocked(done.records) == [(14, 1, "no_slot")]


@pytest.mark.parametrize(("output", "reason"), [(42, "token_budget"), (43, "kv_blocks")])
def test_rule_4_a_first_chunk_reserves_no_output(output: int, reason: str) -> None:
    """60 free less 1 of the riding decode, 4 of request 1 and a page: of 51 request 2 needs 4 + 42 + 4, or all."""
    done = timeline(
        f"0:4->9 5:20->30 5:4->{output}",
        tokens=64,
        enable_mixed_chunk=True,
        chunked_prefill_size=8,
        schedule_conservativeness=0.0,
    )
    assert done.items[1] == [(1, 4), (0, 1)]
    assert blocked(done.records)[0] == (14, 2, reason)


def test_rule_4_what_no_page_of_the_chunk_is_left_for_lacks_tokens() -> None:
    """Of a chunk of 8 one riding decode and 4 tokens of request 1 leave 3, less than a page."""
    done = timeline("0:4->9 5:4->1 5:4->1", enable_mixed_chunk=True, chunked_prefill_size=8)
    assert done.items[1:3] == [[(1, 4), (0, 1)], [(2, 4), (0, 1)]]
    assert blocked(done.records) == [(14, 2, "token_budget")]


# ---- what is refused


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"schedule_policy": "dfs-weight"}, "not simulated yet. Choose from fcfs, lpm"),
        ({"enable_priority_scheduling": True, "schedule_policy": "lpm"}, "schedule_policy must be fcfs or lof"),
        ({"disable_radix_cache": True, "schedule_policy": "shortest-prefill-first"}, "requires prefix caching"),
        (
            {"disable_overlap_schedule": True, "disable_consecutive_prefill_overlap": True},
            "disable_consecutive_prefill_overlap: true has no effect",
        ),
    ],
)
def test_combinations_that_sglang_refuses(knobs: dict[str, Any], message: str) -> None:
    """Each in SGLang's own names."""
    with pytest.raises(ValueError, match=message):
        SglangConfig(**knobs)


def test_a_chunk_must_be_whole_pages_and_the_cache_needs_its_kv() -> None:
    """A chunk of 10 with pages of 4, and counted blocks where a radix tree is asked for, are errors."""
    with pytest.raises(ScenarioError, match="chunked_prefill_size 10 must be divisible by page_size"):
        Sglang(SglangConfig(chunked_prefill_size=10), PolicyContext(RadixKV(10, 4), 64))
    with pytest.raises(ScenarioError, match="needs a RadixKV"):
        Sglang(SglangConfig(), PolicyContext(CountingKV(1000, 4), 64))


@pytest.mark.parametrize(("tokens", "max_model_len"), [(40, 1000), (1000, 40)])
def test_prompts_leave_6_tokens_of_the_context_and_of_the_pool(tokens: int, max_model_len: int) -> None:
    """Of 40 tokens of either, 33 may be prompt; 34 are refused."""
    done = timeline("0:33->1 100:34->1", page=1, tokens=tokens, max_model_len=max_model_len)
    assert outcomes(done.records) == [("finished", ""), ("rejected", "prompt_too_long")]
    limits = f"6 less than max_model_len {max_model_len} and the {tokens} KV tokens"
    assert done.records.details == {"prompt_too_long": f"prompt of 34 tokens; it must be below 34, {limits}"}


@pytest.mark.parametrize(
    ("page", "tokens", "max_model_len", "output"),
    [(1, 1000, 40, 40 - 2 - 10), (1, 40, 1000, 40 - 2 - 10), (4, 40, 1000, 40 - 12 - 4 - 1), (1, 1000, 1000, 90)],
)
def test_a_cap_is_cut_to_what_context_and_pool_hold(page: int, tokens: int, max_model_len: int, output: int) -> None:
    """A prompt of 10 that would go on for 90 tokens ends at the cut cap; nothing is refused for it."""
    done = timeline("0:10->90", page=page, tokens=tokens, max_model_len=max_model_len)
    assert outcomes(done.records) == [("finished", "" if output == 90 else "cap_cut")]
    details = {} if output == 90 else {"cap_cut": f"90 output tokens asked for, {output} allowed"}
    assert done.records.details == details
    assert done.records.requests["output_tokens"].tolist() == [output]


@pytest.mark.parametrize(("to_the_end", "disable_radix_cache"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("prompt", "outcome"), [(47, "finished"), (48, "rejected")])
def test_what_would_keep_the_head_of_the_queue_for_ever_is_rejected(
    prompt: int, outcome: str, to_the_end: bool, disable_radix_cache: bool
) -> None:
    """Of 64 tokens in pages of 16 none are left for output: 47 and a page are below 64, 48 and a page never will be.

    With the cache also for one that ignores the end of its text.
    """
    arrivals = ignoring(f"0:{prompt}->5 100:4->1", *([0] if to_the_end else []))
    done = timeline(arrivals, page=16, tokens=64, disable_radix_cache=disable_radix_cache)
    reason = "never_fits" if outcome == "rejected" else "cap_cut"
    assert outcomes(done.records) == [(outcome, reason), ("finished", "")]
    details = "48 KV tokens for what is known, 0 to come and a page of 16 must be below the 64 in the pool"
    assert outcome == "finished" or done.records.details == {"never_fits": details}


@pytest.mark.parametrize(("output", "ends"), [(27, "finished"), (28, "rejected")])
def test_one_that_can_never_come_back_is_rejected(output: int, ends: str) -> None:
    """Preempted with one token made, it would need 8 tokens for 5, the rest of its output, a page of 4 and one: 40."""
    arrivals = ignoring(f"0:4->{output}p0 5:4->2p50", 0)
    done = timeline(
        arrivals, tokens=40, max_running_requests=1, enable_priority_scheduling=True, disable_radix_cache=True
    )
    assert done.preemptions() == [(14, 0, "priority", 1)]
    assert sorted(what for what, _ in outcomes(done.records)) == ["finished", ends]
