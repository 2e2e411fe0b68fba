"""Ray Serve's batches, by hand; rules are those of its specification, section 6. A step takes 10 us."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.kernel.batch import Idle
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Request, Sequence
from batchsim.policies.systems.ray_serve import RayServe, RayServeConfig
from tests.support.microseconds import blocked_us, busy, ends_us, outcomes, records_of, starts_us, steps, times
from tests.support.random_cases import random_cases


def ray(arrivals: str, blocks: int = 1000, *, wait_us: int = 10, **knobs: Any) -> Any:
    knobs = {"max_ongoing_requests": 100, "batch_wait_timeout_s": wait_us / 1e6} | knobs
    return records_of(RayServe, RayServeConfig(**knobs), arrivals, blocks)


def test_rule_2_the_timer_starts_when_the_first_is_taken() -> None:
    """Idle: taken at its arrival, 3; those that arrive by 13 are in, the one at 14 starts a timer of its own."""
    assert starts_us(ray("3:4->1 9:4->1 13:4->1 14:4->1")) == [13, 13, 13, 24]


def test_rule_2_a_batch_is_closed_when_its_timer_ends_not_a_nanosecond_before() -> None:
    """Taken at 0 with a timer of 10 ns."""
    scheduler = RayServe(RayServeConfig(batch_wait_timeout_s=1e-8), PolicyContext(CountingKV(9, 4), 64))
    scheduler.add(Sequence(Request(0, 0, 4, 1)), 0)
    assert scheduler.schedule(9, drain=False) == Idle(10)
    assert not isinstance(scheduler.schedule(10, drain=False), Idle)


def test_who_waits_is_counted_wherever_it_is() -> None:
    """Failed and not told yet: the two of 11 tokens; in the loop: two; at the proxy: one."""
    config = RayServeConfig(max_batch_size=10, batch_size_fn="prompt_tokens", max_ongoing_requests=2)
    scheduler = RayServe(config, PolicyContext(CountingKV(99, 4), 64))
    for i, (at_ns, prompt) in enumerate([(0, 11), (1, 11), (2, 4), (2, 4), (2, 4)]):
        scheduler.add(Sequence(Request(i, at_ns, prompt, 1)), at_ns)
    assert (len(scheduler.failed), scheduler.loop.num_waiting, len(scheduler.outside)) == (2, 2, 1)
    assert (scheduler.num_waiting, scheduler.num_running) == (5, 0)


def test_rule_2_a_full_batch_does_not_wait() -> None:
    """The second of two seals it; the third, of the same instant, waits for its own timer."""
    assert starts_us(ray("0:4->1 5:4->1 5:4->1", max_batch_size=2)) == [5, 5, 15]


def test_rule_2_those_of_one_instant_keep_their_order() -> None:
    """One a batch: each batch is full with its first, who stands behind it stays there."""
    assert starts_us(ray("0:4->1 0:4->1 0:4->1 0:4->1", max_batch_size=1)) == [0, 10, 20, 30]


def test_prompts_are_padded_to_the_longest_of_the_batch() -> None:
    """3 and 5 tokens, 2 of padding."""
    assert steps(ray("0:3->1 0:5->1", max_batch_size=2), "num_prefill_tokens", "pad_prefill_tokens") == [(8, 2)]


def test_rule_2_a_timeout_of_zero_takes_what_is_there() -> None:
    """Two of one instant go together, a microsecond later is another batch."""
    assert starts_us(ray("0:4->1 0:4->1 1:4->1 2:4->1", wait_us=0)) == [0, 0, 10, 20]


def test_rule_3_batches_are_closed_while_another_runs_and_not_topped_up() -> None:
    """The first runs from 10 to 110; meanwhile two timers end, and the batches of one run one after the other."""
    records = ray("0:4->10 20:4->1 40:4->1 105:4->1")
    assert starts_us(records) == [10, 110, 120, 130]
    assert blocked_us(records)[1:3] == [(20, 1, "batch_running"), (110, 2, "batch_running")]


def test_rule_3_a_batch_still_forming_when_the_replica_gets_free_waits_for_its_timer() -> None:
    """The replica is free at 20; the batch begun at 15 is closed at 25."""
    assert starts_us(ray("0:4->1 15:4->1 24:4->1")) == [10, 25, 25]


def test_rule_4_what_does_not_fit_goes_to_the_back_and_seals_the_batch() -> None:
    """At most 10 tokens: 4 | 4 + 2 | 8, which was the second to arrive and runs last, when its timer ends."""
    records = ray("0:4->1 0:8->1 0:4->1 0:2->1", wait_us=50, max_batch_size=10, batch_size_fn="prompt_tokens")
    assert starts_us(records) == [0, 50, 10, 10]


def test_rule_4_a_batch_that_is_exactly_full_is_closed() -> None:
    """6 + 4 tokens are not above 10."""
    records = ray("0:6->1 3:4->1", wait_us=50, max_batch_size=10, batch_size_fn="prompt_tokens")
    assert starts_us(records) == [3, 3]


def test_rule_4_a_single_item_of_exactly_the_limit_runs() -> None:
    """10 tokens are not above 10."""
    records = ray("0:10->1 3:4->1", wait_us=50, max_batch_size=10, batch_size_fn="prompt_tokens")
    assert starts_us(records) == [0, 53]


def test_who_gives_up_leaves_one_place() -> None:
    """0 computes and 1, closed, gives up at 6: 2 enters at 10, and 3 when 0 has ended, in a batch apart."""
    knobs = {"wait_us": 0, "max_batch_size": 2, "max_ongoing_requests": 2}
    assert starts_us(ray("0:4->3 5:4->1c6 7:4->1 7:4->1", **knobs)) == [0, None, 30, 40]


def test_all_who_give_up_within_a_step_leave_their_places() -> None:
    """0 computes until 30; 1 and 2 give up before 10, when 3 and 4 take both places and make a batch."""
    knobs = {"wait_us": 0, "max_batch_size": 2, "max_ongoing_requests": 3}
    assert starts_us(ray("0:4->3 1:4->1c5 1:4->1c6 7:4->1 7:4->1", **knobs)) == [0, None, None, 30, 30]


def test_who_gives_up_last_leaves_its_place_and_those_of_its_batch() -> None:
    """0 has ended at 10 and is answered when 1, the last of the batch, gives up: 2 and 3 enter together."""
    knobs = {"wait_us": 0, "max_batch_size": 2, "max_ongoing_requests": 2}
    assert starts_us(ray("0:4->1 0:4->9c15 1:4->1 1:4->1", **knobs)) == [0, 0, 20, 20]


def test_rule_4_a_single_item_above_the_limit_fails() -> None:
    """11 tokens never fit 10; it seals the batch it was tried for, and fails as the first of the next."""
    records = ray("0:6->1 3:11->1 4:4->1", wait_us=50, max_batch_size=10, batch_size_fn="prompt_tokens")
    assert outcomes(records) == [("finished", ""), ("rejected", "item_too_large"), ("finished", "")]
    assert starts_us(records) == [3, None, 54]
    assert records.details == {"item_too_large": "batch_size_fn gives 11, max_batch_size 10"}


def test_rule_5_a_cancelled_request_keeps_its_place_until_the_batch_starts() -> None:
    """It was given up at 3, but with it the batch is full at 5; only the other is computed."""
    records = ray("0:4->1c3 5:4->1 6:4->1", max_batch_size=2)
    assert starts_us(records) == [None, 5, 16]
    assert ends_us(records)[:2] == [3, 15]


def test_rule_5_a_batch_of_cancelled_requests_is_skipped() -> None:
    """The one closed at 25 is empty when its turn comes at 40; the next runs."""
    assert starts_us(ray("0:4->3 15:4->1c33 27:4->1")) == [10, None, 40]


def test_rule_6_answers_leave_with_the_batch_or_are_streamed() -> None:
    """One and three tokens: both at 40, or each with its last; a stream's first token is out after the prefill."""
    whole = ray("0:4->1 0:4->3")
    assert [at // 1000 for (at,) in times(whole, "delivered_ns")] == [40, 40]
    streamed = ray("0:4->1 0:4->3", stream=True)
    assert [at // 1000 for (at,) in times(streamed, "delivered_ns")] == [20, 40]
    assert [at // 1000 for (at,) in times(streamed, "first_delivery_ns")] == [20, 20]


def test_rule_6_nobody_joins_a_streaming_batch() -> None:
    """The batch of one row that decodes until 40 is not joined by the one closed at 25."""
    assert starts_us(ray("0:4->3 15:4->1", stream=True)) == [10, 40]


def test_rule_7_a_replica_with_too_few_ongoing_requests_never_fills_a_batch() -> None:
    """Two at a time: the third enters at 50 with the two responses, and its timer starts then."""
    arrivals = "0:4->3 0:4->3 5:4->1 6:4->1 7:4->1"
    records = ray(arrivals, wait_us=20, max_batch_size=4, max_ongoing_requests=2)
    assert starts_us(records) == [20, 20, 70, 70, 100]
    assert (20, 2, "no_slot") in blocked_us(records)


def test_rule_7_a_place_that_gets_free_within_a_step_is_not_taken_before() -> None:
    """A stream's row ends at 20; who came at 12 enters then, with a timer until 35. The batch itself ends at 30."""
    records = ray("0:4->3 0:4->2 12:4->1", wait_us=15, max_batch_size=2, max_ongoing_requests=2, stream=True)
    assert starts_us(records) == [0, 0, 35]


def test_a_batch_larger_than_the_kv_pool_runs_in_parts() -> None:
    """Three rows of 2 blocks each and a pool of 4: two run, the third follows before a batch closed long since."""
    records = ray("0:8->1 0:8->1 0:8->1 1:8->1 1:8->1 1:8->1", blocks=4, wait_us=50, max_batch_size=3)
    assert starts_us(records) == [0, 0, 10, 20, 20, 30]
    assert blocked_us(records)[0] == (0, 2, "kv_blocks")


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"max_concurrent_batches": 2}, "max_concurrent_batches 2: more than one batch in flight"),
    ],
)
def test_a_config_that_ray_or_we_refuse(knobs: dict[str, Any], message: str) -> None:
    """Each wrong knob is named with its value."""
    with pytest.raises(ValueError, match=message):
        RayServeConfig(**knobs)


def test_defaults_are_those_of_ray() -> None:
    """10 requests, 10 ms, one batch at a time."""
    config = RayServeConfig()
    assert (config.max_batch_size, config.batch_wait_timeout_s, config.max_concurrent_batches) == (10, 0.01, 1)


configs = st.builds(
    RayServeConfig,
    max_batch_size=st.integers(1, 12),
    batch_wait_timeout_s=st.sampled_from([0.0, 7e-6, 20e-6, 6e-5]),
    batch_size_fn=st.sampled_from([None, None, "prompt_tokens"]),
    max_ongoing_requests=st.integers(1, 9),
    stream=st.booleans(),
)


@random_cases(80)
@given(config=configs, arrivals=busy(), blocks=st.integers(9, 40))
def test_every_driver_gives_the_same_records(config: RayServeConfig, arrivals: Any, blocks: int) -> None:
    """Leaping, stepping, the wall-clock driver and both KV managers agree; every request ends once."""
    records_of(RayServe, config, arrivals, blocks)
