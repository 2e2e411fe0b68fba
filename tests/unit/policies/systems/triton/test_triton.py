"""Triton's dynamic batcher, by hand; rules are those of its specification, section 4. A step takes 10 us."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.kernel.batch import Idle
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Request, Sequence
from batchsim.policies.systems.triton.priority_queues import ModelQueuePolicy, PriorityQueues
from batchsim.policies.systems.triton.triton import Triton, TritonConfig
from tests.support.microseconds import blocked_us, busy, ends_us, outcomes, records_of, starts_us, steps, times
from tests.support.random_cases import random_cases

NO_PREFETCHING = ModelQueuePolicy(max_queue_size=1000)


def context() -> PolicyContext:
    return PolicyContext(CountingKV(99, 4), 64)


def triton(arrivals: str, blocks: int = 1000, *, delay_us: int = 0, **knobs: Any) -> Any:
    return records_of(Triton, TritonConfig(max_queue_delay_microseconds=delay_us, **knobs), arrivals, blocks)


def level_of(**policy: Any) -> dict[str, Any]:
    """Knobs of a model without priorities whose one queue has this policy."""
    return {"default_queue_policy": ModelQueuePolicy(**policy)}


# ---- when payloads are formed


def test_rule_1_payloads_formed_ahead_are_closed_at_a_preferred_size() -> None:
    """Busy until 30: 2 of sizes 2 and 4 seal a payload at 12, and again at 26; no third one is begun before 30."""
    arrivals = "0:4->3 5:4->1 12:4->1 25:4->1 26:4->1 27:4->1"
    assert starts_us(triton(arrivals, preferred_batch_size=(2, 4))) == [0, 30, 30, 40, 40, 50]


def test_rule_1_with_a_queue_policy_a_batch_is_formed_only_for_an_idle_instance() -> None:
    """The same at 30: five wait, and the largest preferred size among them is four."""
    arrivals = "0:4->3 5:4->1 12:4->1 25:4->1 26:4->1 27:4->1"
    policy: dict[str, Any] = {"preferred_batch_size": (2, 4), "default_queue_policy": NO_PREFETCHING}
    assert starts_us(triton(arrivals, **policy)) == [0, 30, 30, 30, 30, 40]
    for other in ({"allow_timeout_override": True}, {"default_timeout_microseconds": 900}):
        assert not TritonConfig(**level_of(**other)).prefetches
    assert not TritonConfig(priority_levels=1, default_priority_level=1).prefetches
    assert TritonConfig().prefetches


def test_rule_1_a_payload_that_does_not_run_yet_keeps_growing() -> None:
    """Begun at 5 with one row, it is run at 30 with the four that came by then; the fifth follows."""
    assert starts_us(triton("0:4->3 5:4->1 12:4->1 25:4->1 30:4->1 30:4->1")) == [0, 30, 30, 30, 30, 40]


def test_rule_1_a_payload_sent_by_its_delay_grows_up_to_a_preferred_size() -> None:
    """Busy until 100. Sent at 60 with one row, a second joins at 70 to a preferred size; the third waits until 130."""
    arrivals = "0:4->10 0:4->10 10:4->1 70:4->1 80:4->1"
    knobs: dict[str, Any] = {"max_batch_size": 8, "preferred_batch_size": (2, 4), "delay_us": 50}
    assert starts_us(triton(arrivals, **knobs)) == [0, 0, 100, 100, 130]
    assert starts_us(triton(arrivals, default_queue_policy=NO_PREFETCHING, **knobs)) == [0, 0, 100, 100, 100]


def test_rule_1_two_that_come_at_once_make_a_closed_payload() -> None:
    """Busy until 30 and without a delay: a preferred size of two is complete, though one of four could follow."""
    assert starts_us(triton("0:4->3 5:4->1 5:4->1 12:4->1 12:4->1", preferred_batch_size=(2, 4))) == [0, 30, 30, 40, 40]


def test_rule_1_all_of_one_instant_are_there_before_a_payload_is_formed() -> None:
    """Of sizes 1 and 2 the larger is formed, though the first alone would do."""
    assert starts_us(triton("0:4->3 5:4->1 5:4->1", preferred_batch_size=(1, 2))) == [0, 30, 30]


def test_rule_1_two_payloads_stand_in_line() -> None:
    """Two of one row each at 6; those of 7 and 8 make one when the first has left the line, at 30."""
    assert starts_us(triton("0:4->3 5:4->1 6:4->1 7:4->1 8:4->1", preferred_batch_size=(1, 2))) == [0, 30, 40, 50, 50]


def test_rule_1_behind_a_full_payload_the_next_is_begun() -> None:
    """Busy until 100: two of 5 fill one, the third is sent at 55 and joined at 70; the one of 80 waits until 130."""
    arrivals = "0:4->10 0:4->10 5:4->1 5:4->1 5:4->1 70:4->1 80:4->1"
    records = triton(arrivals, max_batch_size=8, preferred_batch_size=(2,), delay_us=50)
    assert starts_us(records) == [0, 0, 100, 100, 110, 110, 130]


def test_rule_1_a_payload_of_the_largest_preferred_size_is_full() -> None:
    """Busy until 100: formed of those of 10 and 20, not closed under a delay, it takes in no third for all that."""
    arrivals = "0:4->10 0:4->10 10:4->1 20:4->1 30:4->1"
    assert starts_us(triton(arrivals, max_batch_size=8, preferred_batch_size=(2,), delay_us=50)) == [
        0,
        0,
        100,
        100,
        110,
    ]


def test_rule_1_a_payload_below_a_preferred_size_takes_in_whoever_comes() -> None:
    """The same with 4 the only preferred size: the third joins at 80 what was sent at 60."""
    arrivals = "0:4->10 0:4->10 0:4->1 0:4->1 10:4->1 70:4->1 80:4->1"
    records = triton(arrivals, max_batch_size=8, preferred_batch_size=(4,), delay_us=50)
    assert starts_us(records) == [0, 0, 0, 0, 100, 100, 100]


# ---- what is sent


def test_rule_4a_the_largest_preferred_size_reached_is_sent_before_the_delay() -> None:
    """At 7 three are there, two are sent; the third waits until 57."""
    records = triton("0:4->1 7:4->1 7:4->1", max_batch_size=8, preferred_batch_size=(2, 4), delay_us=50)
    assert starts_us(records) == [7, 7, 57]


def test_rule_4a_holds_only_while_the_oldest_is_younger_than_the_delay() -> None:
    """At 20 the oldest of five is 19 old: under a delay of 19 all five go, under one of 20 only four."""
    arrivals = "0:4->2 0:4->2 1:4->1 2:4->1 3:4->1 4:4->1 5:4->1"
    knobs: dict[str, Any] = {"max_batch_size": 8, "preferred_batch_size": (2, 4)}
    knobs["default_queue_policy"] = NO_PREFETCHING
    assert starts_us(triton(arrivals, delay_us=19, **knobs)) == [0, 0, 20, 20, 20, 20, 20]
    assert starts_us(triton(arrivals, delay_us=20, **knobs)) == [0, 0, 20, 20, 20, 20, 30]


def test_rule_4a_without_a_delay_preferred_sizes_go_first() -> None:
    """A delay of 0 is never over: of three waiting two go, then one."""
    records = triton("0:4->2 1:4->1 1:4->1 1:4->1", max_batch_size=8, preferred_batch_size=(2,))
    assert starts_us(records) == [0, 20, 20, 30]


def test_rule_4c_a_batch_that_cannot_grow_is_sent() -> None:
    """Eight of at most eight do not wait for the delay; the ninth does."""
    records = triton("0:4->1 " + "3:4->1 " * 8, max_batch_size=8, delay_us=50)
    assert starts_us(records) == [3] * 8 + [53]


def test_rule_4d_the_delay_of_the_oldest_sends_all() -> None:
    """Due 30 after 3; who comes at 33 is in, at 34 is not."""
    records = triton("3:4->1 20:4->1 33:4->1 34:4->1", delay_us=30)
    assert starts_us(records) == [33, 33, 33, 64]
    assert blocked_us(records)[0] == (3, 0, "batch_window")


def test_rule_4d_the_delay_is_over_when_it_is_not_a_nanosecond_before() -> None:
    """A delay of 1 us from 0."""
    scheduler = Triton(TritonConfig(max_queue_delay_microseconds=1), context())
    scheduler.add(Sequence(Request(0, 0, 4, 1)), 0)
    assert [scheduler.schedule(at_ns, drain=False) for at_ns in (0, 999)] == [Idle(1000)] * 2
    assert not isinstance(scheduler.schedule(1000, drain=False), Idle)


def test_rule_4d_without_a_delay_an_idle_instance_takes_what_is_there() -> None:
    """The default never waits."""
    assert starts_us(triton("0:4->2 1:4->1 2:4->1")) == [0, 20, 20]


def test_rule_4e_waits_for_the_nearest_timeout_too() -> None:
    """Due to be rejected at 25 and to be sent at 100: rejected at 25, and the one behind is sent at 110."""
    records = triton("0:4->1 10:4->1", delay_us=100, **level_of(default_timeout_microseconds=25))
    assert ends_us(records) == [25, 35]
    assert outcomes(records) == [("rejected", "timeout")] * 2


def test_rule_3_unequal_shapes_end_a_batch_of_token_ids() -> None:
    """Prompts 4, 4, 5, 4 in equal-length batches: two, one, one. As texts, or ragged, all four go together."""
    arrivals = "0:4->2 1:4->1 1:4->1 1:5->1 1:4->1"
    assert starts_us(triton(arrivals, allow_ragged_batch=False)) == [0, 20, 20, 30, 40]
    for ragged, padding in ((None, 3), (True, 0)):
        records = triton(arrivals, allow_ragged_batch=ragged)
        assert starts_us(records) == [0, 20, 20, 20, 20]
        assert steps(records, "pad_prefill_tokens")[2] == (padding,)


def test_rule_4c_a_batch_that_an_unequal_shape_ends_is_sent() -> None:
    """The first does not wait for its delay when the second, which cannot join it, is there; that one waits."""
    assert starts_us(triton("0:4->1 2:5->1", allow_ragged_batch=False, delay_us=50)) == [2, 52]


# ---- priorities


def test_rule_5_levels_are_served_from_the_first_and_others_get_the_default() -> None:
    """Two levels, two a batch: priorities 2, 3, 1, 0 with the default level 2 go as [1, 2], [3, 0]."""
    arrivals = "0:4->2p1 1:4->1p2 2:4->1p3 3:4->1p1 4:4->1p0"
    knobs: dict[str, Any] = {"max_batch_size": 2, "priority_levels": 2}
    assert starts_us(triton(arrivals, default_priority_level=2, **knobs)) == [0, 20, 30, 20, 30]
    assert starts_us(triton(arrivals, default_priority_level=1, **knobs)) == [0, 30, 20, 20, 30]


def test_rule_5_a_more_important_arrival_enters_the_pending_batch_first() -> None:
    """Two of level 2 wait for the delay; at 2 two of level 1 come and go with the older one, the other waits on."""
    knobs: dict[str, Any] = {"max_batch_size": 3, "priority_levels": 2, "default_priority_level": 1, "delay_us": 30}
    assert starts_us(triton("0:4->1p2 1:4->1p2 2:4->1p1 2:4->1p1", **knobs)) == [2, 31, 2, 2]


def test_rule_5_without_levels_priorities_are_ignored() -> None:
    """One queue in the order of arrival."""
    assert starts_us(triton("0:4->2 1:4->1p2 2:4->1p1", max_batch_size=1)) == [0, 20, 30]


# ---- queue policies


def test_rule_6_beyond_max_queue_size_requests_are_rejected_when_they_come() -> None:
    """One may wait, what runs does not count; at 20 there is room again."""
    records = triton("0:4->2 1:4->1 2:4->1 25:4->1", max_batch_size=1, **level_of(max_queue_size=1))
    assert [reason for _, reason in outcomes(records)] == ["", "", "queue_full", ""]
    assert records.details == {"queue_full": "max_queue_size 1 of level 1"}


def test_rule_6_those_delayed_take_room_in_their_queue() -> None:
    """Of two in a queue of two one times out, 15 us after it came: a third is rejected until that one has left."""
    queues = PriorityQueues([ModelQueuePolicy("DELAY", 15, max_queue_size=2)])
    first, second, third = (Sequence(Request(i, at_ns, 4, 1)) for i, at_ns in enumerate((7, 9_000, 20_000)))
    assert (queues.put(first, 1), queues.put(second, 1)) == (None, None)
    assert queues.timeout_ns(first) == 15_007
    assert queues.scan(20_000, lambda found, seq: False) == ([], True, [])
    assert (queues.timeout_ns(first), queues.first) == (None, second)
    refusal = queues.put(third, 1)
    assert refusal is not None
    assert (refusal.kind, refusal.reason) == ("rejected", "queue_full")
    queues.remove(second)
    assert queues.scan(20_000, lambda found, seq: False) == ([], True, [])  # the delayed one waits on
    assert queues.put(third, 1) is None


def test_rule_6_all_who_are_turned_away_between_two_steps_are_told() -> None:
    """One as the queue is full, the other as it has waited 15 us."""
    scheduler = Triton(TritonConfig(**level_of(default_timeout_microseconds=15, max_queue_size=1)), context())
    for i in range(2):
        scheduler.add(Sequence(Request(i, 0, 4, 1)), 0)
    scheduler.schedule(15_000, drain=False)
    assert [(event.seq.request.id, event.reason) for event in scheduler.events] == [(1, "queue_full"), (0, "timeout")]


def test_rule_6_each_level_has_its_policy() -> None:
    """Level 2 takes one, level 1 as many as come."""
    knobs: dict[str, Any] = {"max_batch_size": 1, "priority_levels": 2, "default_priority_level": 2}
    knobs["priority_queue_policy"] = {2: ModelQueuePolicy(max_queue_size=1)}
    records = triton("0:4->2p1 1:4->1p2 2:4->1p2 3:4->1p1 4:4->1p1", **knobs)
    assert starts_us(records) == [0, 40, None, 20, 30]


def test_rule_6_a_timeout_is_seen_when_the_scan_reaches_the_request() -> None:
    """Timed out at 20 while the instance is busy, it is rejected at 30; the other, due at 35, runs."""
    records = triton("0:4->3 5:4->1 20:4->1", **level_of(default_timeout_microseconds=15))
    assert outcomes(records)[1:] == [("rejected", "timeout"), ("finished", "")]
    assert (ends_us(records)[1], starts_us(records)[2]) == (30, 30)
    assert records.details == {"timeout": "waited 25 us, default_timeout_microseconds 15"}


def test_rule_6_a_timeout_beyond_the_pending_batch_is_not_seen() -> None:
    """The scan of 30 stops at the second of one a batch: the third, timed out at 24, is found at 40."""
    policies = {1: ModelQueuePolicy(), 2: ModelQueuePolicy(default_timeout_microseconds=20)}
    knobs: dict[str, Any] = {"max_batch_size": 1, "priority_levels": 2, "default_priority_level": 1}
    records = triton("0:4->3 1:4->1p1 2:4->1p1 4:4->1p2", priority_queue_policy=policies, **knobs)
    assert starts_us(records) == [0, 30, 40, None]
    assert ends_us(records)[3] == 40


def test_rule_6_delay_puts_it_behind_the_others_of_its_level_for_good() -> None:
    """Timed out at 20, it is served after the one of 21, which never waited long, and before level 2."""
    policies = {1: ModelQueuePolicy("DELAY", 15), 2: ModelQueuePolicy()}
    knobs: dict[str, Any] = {"max_batch_size": 1, "priority_levels": 2, "default_priority_level": 2}
    records = triton("0:4->3p1 5:4->1p1 21:4->1p1 22:4->1p2", priority_queue_policy=policies, **knobs)
    assert starts_us(records) == [0, 40, 30, 50]


def test_rule_6_a_timeout_does_not_apply_to_what_runs() -> None:
    """Started at 0, it ends at 90 under a timeout of 15."""
    assert outcomes(triton("0:4->9", **level_of(default_timeout_microseconds=15))) == [("finished", "")]


# ---- the batch


def test_the_whole_batch_is_answered_when_it_is_done() -> None:
    """One and three tokens: both at 30, the ended row computing on."""
    records = triton("0:4->1 0:4->3")
    assert [at // 1000 for (at,) in times(records, "delivered_ns")] == [30, 30]
    assert steps(records, "num_decode", "pad_decode_rows") == [(0, 0), (1, 1), (1, 1)]


def test_a_cancelled_request_leaves_its_queue_or_payload() -> None:
    """The payload of one is gone at 20; the one that came later has its place."""
    records = triton("0:4->4 5:4->1c15 21:4->1", max_batch_size=1)
    assert starts_us(records) == [0, None, 40]
    assert steps(records, "pad_decode_rows", "pad_context_tokens") == [(0, 0)] * 5  # nor is it a row of what runs


def test_a_payload_larger_than_the_kv_pool_runs_in_parts() -> None:
    """Three rows of 2 blocks each and a pool of 4: two run, the third after them."""
    records = triton("0:8->1 0:8->1 0:8->1", blocks=4)
    assert starts_us(records) == [0, 0, 10]
    assert blocked_us(records)[0] == (0, 2, "kv_blocks")


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"instance_group_count": 2}, "instance_group_count 2: more than one batch in flight"),
        ({"preferred_batch_size": (2, 5)}, r"preferred_batch_size \[2, 5\]"),
        ({"priority_levels": 2}, "default_priority_level 0"),
        ({"priority_levels": 2, "default_priority_level": 3}, "default_priority_level 3"),
        ({"default_priority_level": 1}, "or both left out"),
        ({"priority_queue_policy": {1: ModelQueuePolicy()}}, r"levels \[1\]"),
    ],
)
def test_a_config_that_triton_or_we_refuse(knobs: dict[str, Any], message: str) -> None:
    """Each wrong knob is named with its value."""
    with pytest.raises(ValueError, match=message):
        TritonConfig(**knobs)


policies = st.builds(
    ModelQueuePolicy,
    timeout_action=st.sampled_from(["REJECT", "DELAY"]),
    default_timeout_microseconds=st.sampled_from([0, 13, 40, 90]),
    max_queue_size=st.sampled_from([0, 0, 2]),
)
common: dict[str, Any] = {
    "max_batch_size": st.integers(4, 6),
    "preferred_batch_size": st.sampled_from([(), (2,), (1, 3), (2, 4)]),
    "max_queue_delay_microseconds": st.sampled_from([0, 7, 20, 60]),
    "allow_ragged_batch": st.sampled_from([None, False, True]),
}
configs = st.builds(TritonConfig, **common) | st.builds(
    TritonConfig,
    **common,
    default_queue_policy=policies,
    priority_levels=st.just(2),
    default_priority_level=st.integers(1, 2),
    priority_queue_policy=st.dictionaries(st.integers(1, 2), policies),
)


@random_cases(160)
@given(config=configs, arrivals=busy(), blocks=st.integers(9, 40))
def test_every_driver_gives_the_same_records(config: TritonConfig, arrivals: Any, blocks: int) -> None:
    """Leaping, stepping, the wall-clock driver and both KV managers agree; every request ends once."""
    records_of(Triton, config, arrivals, blocks)
