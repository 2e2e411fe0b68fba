"""The scenario `bursty`, with which the README begins, tells its four policies apart."""

from __future__ import annotations

import numpy as np

from batchsim.kernel.record import FINISHED, Records
from batchsim.scenario import Point, load_scenario
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup

LOAD, SEED = 6.0, 2


def _soon(records: Records) -> int:
    """How many requests have their first token within the 2 s of the SLO."""
    rows = records.requests
    return int(((rows["first_delivery_ns"] >= 0) & (rows["first_delivery_ns"] - rows["sent_ns"] < 2e9)).sum())


def _ns_a_token(records: Records) -> float:
    """The 99th percentile of the time per output token, of requests that ended."""
    rows = records.requests
    rows = rows[(rows["outcome"] == FINISHED) & (rows["output_tokens"] > 1)]
    return float(np.percentile((rows["last_token_ns"] - rows["first_token_ns"]) / (rows["output_tokens"] - 1), 99))


def test_reserving_and_preempting_part_where_kv_runs_short() -> None:
    """Beyond the knee whole batches answer nearly none in time, reservation some, preemption three times as many.
    Its price is preempted requests and more time for each token."""
    setup = Setup.of(load_scenario("bursty", overrides=["workload.duration=2min", "workload.warmup=0s"]))
    assert LOAD in setup.scenario.loads
    runs = {spec.name: simulate_point(setup, Point(spec, LOAD, SEED)).records for spec in setup.scenario.specs}
    static, dynamic, continuous, preemptive = runs.values()
    assert list(runs) == ["static", "dynamic", "continuous", "preemptive"]
    assert max(_soon(static), _soon(dynamic)) < 10 < _soon(continuous) < 0.5 * _soon(preemptive)
    assert continuous.requests["num_preemptions"].sum() == 0 < preemptive.requests["num_preemptions"].sum()
    assert _ns_a_token(preemptive) > 2 * _ns_a_token(continuous)
