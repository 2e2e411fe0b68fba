"""Little's law as an identity of the records: the two tables count the same time in the system."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from batchsim.kernel.batch import Batch
from batchsim.kernel.record import Records
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from tests.theory.stations import Policy, Station, slots


class Mixed:
    """A step whose duration depends on everything in it."""

    def step_ns(self, batch: Batch) -> int:
        return 1_000_003 + 211 * batch.num_prefill_tokens + 40_009 * batch.num_decode + 13 * batch.context_tokens


def time_in_system_ns(records: Records) -> tuple[int, int]:
    """Request-nanoseconds in the system, added up over requests and, on its own, over steps.

    A step holds those who waited or ran in it for all of its duration, and those who arrived during it until its end.
    """
    requests, steps = records.requests, records.steps
    by_request = int((requests["ended_ns"] - requests["arrival_ns"]).sum())
    present = steps["num_waiting"].astype(np.int64) + steps["num_running"]
    seen = np.searchsorted(steps["start_ns"], requests["arrival_ns"])  # the first step that starts after the arrival
    by_step = int((present * steps["duration_ns"]).sum()) + int(
        (steps["start_ns"][seen] - requests["arrival_ns"]).sum()
    )
    return by_request, by_step


TIGHT = VllmConfig(enable_prefix_caching=False, async_scheduling=False, max_num_seqs=64, max_num_batched_tokens=256)
CASES = {
    "one_slot": (slots(1), 1 << 20, 5),
    "eight_slots": (slots(8), 1 << 20, 30),
    "few_blocks": (partial(Vllm, TIGHT), 40, 30),
}


@pytest.mark.parametrize(("policy", "num_blocks", "rate_rps"), CASES.values(), ids=CASES)
def test_little_is_exact(policy: Policy, num_blocks: int, rate_rps: float) -> None:
    """Sum of E2E times equals the integral of the number in system, to the nanosecond."""
    station = Station(
        policy,
        Mixed(),
        rate_rps / 1e9,
        lambda rng, count: rng.integers(1, 80, count),
        lambda rng, count: rng.integers(1, 300, count),
        num_blocks,
    )
    records = station.run(1, 1_000)
    assert (records.requests["num_preemptions"].sum() > 0) == (num_blocks == 40)
    by_request, by_step = time_in_system_ns(records)
    assert by_request == by_step


def test_little_would_notice_a_lost_nanosecond() -> None:
    """One request recorded a nanosecond late breaks the identity."""
    station = Station(slots(4), Mixed(), 5e-9, lambda rng, count: rng.integers(1, 80, count))
    records = station.run(2, 100)
    records.requests["ended_ns"][7] += 1
    by_request, by_step = time_in_system_ns(records)
    assert by_request == by_step + 1
