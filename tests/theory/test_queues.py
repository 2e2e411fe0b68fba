"""The simulator against queueing theory, within 99 % t-intervals over independent replications with fixed seeds.

Each test also shows a theory that is nearly right and falls outside, so that the interval is narrow enough to mean it.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from batchsim.cost.constant import Constant
from batchsim.kernel.batch import Batch
from batchsim.kernel.record import Records
from batchsim.policies.families.dynamic import Dynamic, DynamicConfig
from tests.theory.laws import (
    batch_time_in_system,
    inoue_bound,
    mmc_time_in_system,
    pollaczek_khinchine_wait,
    stepped_mmc_time_in_system,
    stepped_sharing_time_in_system,
)
from tests.theory.stations import UNLIMITED, Draw, Interval, Station, interval, mean_e2e_ns, mean_queue_ns, slots

STEP_NS = 1_000_000
REPLICATIONS = 10


class PerSequence:
    """A step takes STEP_NS for each sequence in it: the station's capacity is shared by all present."""

    def step_ns(self, batch: Batch) -> int:
        return STEP_NS * (batch.num_decode + len(batch.chunks))


class Linear:
    """A step of `prefill` prompt tokens and `context` tokens read takes their weighted sum and a constant."""

    fixed_ns, per_prefill_ns, per_context_ns = STEP_NS, 40_001, 3_001

    def step_ns(self, batch: Batch) -> int:
        return (
            self.fixed_ns + self.per_prefill_ns * batch.num_prefill_tokens + self.per_context_ns * batch.context_tokens
        )

    def alone_ns(self, prompt: int, output: int) -> int:
        """The service time of a request that has the station to itself, summed step by step."""
        contexts = range(prompt, prompt + output - 1)
        return output * self.fixed_ns + self.per_prefill_ns * prompt + self.per_context_ns * sum(contexts)


def among(*lengths: int) -> Draw:
    """Each of `lengths` equally likely."""
    return lambda rng, count: rng.choice(np.array(lengths), count)


def geometric(mean: int) -> Draw:
    return lambda rng, count: rng.geometric(1 / mean, count)


@pytest.mark.slow
def test_one_slot_is_the_pollaczek_khinchine_queue() -> None:
    """One request at a time waits as in M/G/1, with the service law summed from integer step durations."""
    prompts, outputs, load = (10, 100, 250), (1, 20, 60), 0.5
    services = np.array([Linear().alone_ns(p, o) for p in prompts for o in outputs], float)
    rate = load / float(services.mean())
    station = Station(slots(1), Linear(), rate, among(*outputs), among(*prompts))
    wait = station.replicate(mean_queue_ns, REPLICATIONS, 6_000)
    assert pollaczek_khinchine_wait(rate, services) in wait
    without_variance = np.array([services.mean()])
    assert pollaczek_khinchine_wait(rate, without_variance) not in wait
    assert pollaczek_khinchine_wait(1.1 * rate, services) not in wait


def test_one_slot_follows_lindley_to_the_nanosecond() -> None:
    """With one slot a request starts when it has arrived and the one before it has ended, and takes its own time."""
    station = Station(slots(1), Linear(), 1 / 40e6, among(1, 20, 60), among(10, 100, 250))
    requests = station.run(0, 2_000).requests
    free_ns = 0
    for row in requests:
        start_ns = max(free_ns, int(row["arrival_ns"]))
        free_ns = start_ns + Linear().alone_ns(int(row["prompt_tokens"]), int(row["output_tokens"]))
        assert (row["scheduled_ns"], row["ended_ns"]) == (start_ns, free_ns)


@pytest.mark.slow
def test_constant_steps_and_c_slots_are_the_erlang_c_queue() -> None:
    """Geometric outputs over c slots with constant steps are M/M/c, exactly so once the step is accounted for."""
    mean_steps, servers = 60, 4
    service = mean_steps * STEP_NS
    rate = 0.7 * servers / service
    station = Station(slots(servers), Constant(STEP_NS), rate, geometric(mean_steps))
    time = station.replicate(mean_e2e_ns, REPLICATIONS, 4_000)
    assert stepped_mmc_time_in_system(rate, STEP_NS, mean_steps, servers) in time
    assert mmc_time_in_system(rate, service, servers) in time
    assert mmc_time_in_system(rate, service, servers + 1) not in time
    assert mmc_time_in_system(1.1 * rate, service, servers) not in time


def test_stepped_erlang_c_tends_to_the_textbook() -> None:
    """The exact law of stepped service is within a step of M/M/c and comes nearer as services get more steps."""
    rate, servers = 2.8, 4
    textbook = mmc_time_in_system(rate, 1, servers)
    errors = [stepped_mmc_time_in_system(rate, 1 / n, n, servers) - textbook for n in (10, 100, 1000)]
    assert errors[0] < 1 / 10
    assert errors == sorted(errors, reverse=True)
    assert 0 < errors[-1] < 1e-3 * textbook


TWO_POINT = (25, 25, 25, 25, 25, 25, 25, 25, 25, 275)  # mean 50 as below; squared coefficient of variation 2.25


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [pytest.param((50,), id="fixed"), pytest.param(TWO_POINT, id="two_point")])
def test_steps_proportional_to_the_batch_share_the_processor(lengths: tuple[int, ...]) -> None:
    """Mean E2E is S/(1-load) whatever the length law: processor sharing, unlike first come, first served."""
    load, mean_steps = 0.5, float(np.mean(lengths))
    service = mean_steps * STEP_NS
    rate = load / service
    station = Station(slots(UNLIMITED), PerSequence(), rate, among(*lengths))
    time = station.replicate(mean_e2e_ns, REPLICATIONS, 4_000)
    assert stepped_sharing_time_in_system(rate, STEP_NS, _law(lengths)) in time
    assert service / (1 - load) in time
    in_turn = service + pollaczek_khinchine_wait(rate, np.array(lengths, float) * STEP_NS)
    assert in_turn not in time
    assert service / (1 - 1.1 * load) not in time


def _law(lengths: tuple[int, ...]) -> NDArray[np.float64]:
    return np.bincount(lengths) / len(lengths)


@pytest.mark.parametrize("lengths", [(50,), TWO_POINT], ids=["fixed", "two_point"])
def test_stepped_sharing_tends_to_the_textbook(lengths: tuple[int, ...]) -> None:
    """The exact law of sharing by steps comes nearer to S/(1-load) as the same work is cut into more steps."""
    errors = []
    for cut in (1, 4):
        law = _law(tuple(cut * n // 5 for n in lengths))
        errors.append(abs(stepped_sharing_time_in_system(0.05, 1 / cut, law) - 10 / (1 - 0.5)))
    assert errors[1] < errors[0] / 2
    assert errors[1] < 0.02 * 20


@pytest.mark.slow
@pytest.mark.parametrize("draw", [among(30), geometric(30)], ids=["fixed", "geometric"])
def test_unlimited_slots_hold_a_poisson_number(draw: Draw) -> None:
    """With slots for all and constant steps the number running is Poisson: its mean and its variance are the load."""
    load = 20.0
    station = Station(slots(UNLIMITED), Constant(STEP_NS), load / (30 * STEP_NS), draw)
    runs = [_running(station.run(seed, 6_000)) for seed in range(REPLICATIONS)]
    assert load in interval([run.mean() for run in runs])
    dispersion = interval([((run - load) ** 2).mean() / load for run in runs])
    assert 1.0 in dispersion
    assert 0.85 not in dispersion
    assert load + 1 not in interval([run.mean() for run in runs])


def _running(records: Records) -> NDArray[np.float64]:
    """The number running in each step between the first tenth of the arrivals and the last arrival."""
    arrivals = records.requests["arrival_ns"]
    steps = records.steps
    steady = (steps["start_ns"] > arrivals[len(arrivals) // 10]) & (steps["start_ns"] < arrivals[-1])
    return steps["num_running"][steady].astype(float)


class PerRequest:
    """A batch of n prompts takes n times `per_item_ns` and a constant."""

    per_item_ns, fixed_ns = 2 * STEP_NS, 5 * STEP_NS

    def step_ns(self, batch: Batch) -> int:
        return self.fixed_ns + self.per_item_ns * len(batch.chunks)


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.2, 0.7])
def test_dynamic_batching_keeps_to_the_closed_form_bound(load: float) -> None:
    """Without delay and with linear batch times, prefill-only work takes its exact mean time, within Inoue's bound."""
    cost = PerRequest()
    rate = load / cost.per_item_ns
    bound = inoue_bound(rate, cost.per_item_ns, cost.fixed_ns)

    def time(max_queue_delay_ns: int, count: int) -> Interval:
        config = DynamicConfig(max_batch_size=UNLIMITED, max_queue_delay=max_queue_delay_ns)
        return Station(partial(Dynamic, config), cost, rate, among(1)).replicate(mean_e2e_ns, REPLICATIONS, count)

    at_once = time(0, 4_000)
    assert batch_time_in_system(rate, cost.per_item_ns, cost.fixed_ns) in at_once
    assert at_once.mean - at_once.half_width <= bound  # at the higher load bound and mean are 0.1 % apart
    assert batch_time_in_system(rate, cost.per_item_ns, 1.1 * cost.fixed_ns) not in at_once
    delayed = time(30 * STEP_NS, 500)
    assert delayed.mean - delayed.half_width > bound


@pytest.mark.parametrize("load", [0.01, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("fixed", [0.5, 2.0, 20.0])
def test_the_bound_is_above_the_exact_mean_and_near_it(load: float, fixed: float) -> None:
    """Inoue's bound holds for the exact mean time of the batch queue and is at most a quarter above it."""
    exact = batch_time_in_system(load, 1.0, fixed)
    assert exact <= inoue_bound(load, 1.0, fixed) * (1 + 1e-9)
    assert inoue_bound(load, 1.0, fixed) < 1.25 * exact
