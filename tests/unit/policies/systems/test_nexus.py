"""Nexus's plan and its early drop, by hand: a step takes 10 us, arrivals, alpha, beta and the SLA are in us."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from batchsim.policies.systems.nexus import Nexus, NexusConfig
from tests.support.microseconds import US, blocked_us, busy, outcomes, records_of, starts_us, steps, times
from tests.support.random_cases import random_cases

LATE = ("rejected", "misses_slo")


def config(sla: float = 100, alpha: int = 10, beta: int = 20, **knobs: Any) -> NexusConfig:
    return NexusConfig(latency_sla=round(sla * US), alpha=alpha * US, beta=beta * US, **knobs)


def nexus(arrivals: str, blocks: int = 1000, **knobs: Any) -> Any:
    return records_of(Nexus, config(**knobs), arrivals, blocks)


@pytest.mark.parametrize(
    ("knobs", "planned"),
    [
        ({}, 3),  # 2 · (30 + 20) = 100
        ({"sla": 99.9}, 2),
        ({"sla": 30}, 1),  # twice that is not within it: one in any case
        ({"batch": 7}, 7),
        ({"workload": 60_000.0}, 3),  # what batches of 3 serve: 3 in 50 us
        ({"workload": 20_000.0}, 2),  # 50 + 40 us for two, 100 + 50 for three; 60 us of 50 us each
        ({"workload": 40_000.0}, 2),  # 50 + 50 us for three; then 50 us are left, in which 2 come
        ({"workload": 1e6}, 3),  # more than they serve
        ({"sla": 200, "beta": 50, "workload": 20_000.0}, 3),  # 120 us are left beside three, and of 50 us that is 2.4
        ({"sla": 100.01, "workload": 40_000.0}, 2),  # 2.0004 come
        ({"sla": 100.03, "workload": 40_000.0}, 3),  # 2.0012 come
        ({"workload": 39_000.0}, 2),  # 51.3 + 50 us for three
        ({"workload": 1.0}, 1),
        ({"sla": 30.005, "workload": 1.0}, 1),  # none comes in a duty cycle
    ],
)
def test_the_planned_size_follows_from_the_sla_and_the_workload(knobs: dict[str, Any], planned: int) -> None:
    assert config(**knobs).planned == planned


def test_a_free_gpu_takes_the_planned_size_or_all_that_wait() -> None:
    """Three, then two."""
    records = nexus("0:4->2 " * 5)
    assert starts_us(records) == [0, 0, 0, 20, 20]
    assert steps(records, "num_chunks") == [(3,), (0,), (2,), (0,)]


def test_who_would_be_late_in_a_batch_of_the_expected_size_is_dropped() -> None:
    """At 80 three are expected to end at 130: that of 29 has until 129, that of 30 until 130."""
    records = nexus("0:4->8 10:4->1 30:4->1 40:4->1 45:4->1")
    assert starts_us(records) == [0, None, 80, 80, 80]
    assert outcomes(records)[1] == LATE
    assert records.details == {"misses_slo": "waited 70 us, latency_sla 100 us"}
    assert starts_us(nexus("0:4->8 10:4->1 29:4->1 40:4->1 45:4->1")) == [0, None, None, 80, 80]


def test_the_fewer_are_left_the_sooner_the_batch_is_expected_to_end() -> None:
    """Behind two that are dropped at 80 one is left, which is expected at 110 and not at 130 or 120."""
    assert starts_us(nexus("0:4->8 5:4->1 7:4->1 10:4->1")) == [0, None, None, 80]
    assert starts_us(nexus("0:4->8 5:4->1 7:4->1 9:4->1")) == [0, None, None, None]


def test_of_a_batch_that_does_not_fit_the_kv_the_first_rows_run() -> None:
    """Two blocks: two of three, then the third, which waits for KV; with blocks for three, the fourth for the batch."""
    records = nexus("0:4->1 " * 3, blocks=2)
    assert starts_us(records) == [0, 0, 10]
    assert blocked_us(records)[0] == (0, 2, "kv_blocks")
    assert blocked_us(nexus("0:4->1 " * 4))[0] == (0, 3, "batch_running")


def test_rows_are_padded_and_compute_on_until_the_batch_ends_and_answers_are_whole() -> None:
    """Of prompts of 8 and 4 tokens and answers of 1 and 3: 4 tokens of padding, then one row of it."""
    records = nexus("0:8->1 0:4->3")
    assert steps(records, "pad_prefill_tokens", "pad_decode_rows") == [(4, 0), (0, 1), (0, 1)]
    assert times(records, "delivered_ns") == [(30 * US,)] * 2


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"batch": 2, "workload": 1.0}, "workload has no effect beside batch 2. Leave one of the two out"),
        ({"sla": 29.9}, r"alpha \+ beta 30 us are above latency_sla 29.9 us, so that no request is in time"),
    ],
)
def test_what_makes_no_plan_is_refused(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config(**knobs)


@random_cases(15)
@given(busy())
def test_every_driver_agrees(arrivals: Any) -> None:
    records_of(Nexus, config(), arrivals, blocks=30)
