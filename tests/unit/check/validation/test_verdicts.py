"""What a validation must reach, on points that are off by known amounts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from batchsim.check.validation.comparison import MetricError
from batchsim.check.validation.live_runs import LivePoint, judge
from batchsim.check.validation.verdicts import BOUNDS, Verdict, all_steps, verdicts
from tests.support.validation_samples import LOAD, case, demo, played, point


def test_bounds_are_met_and_missed_where_they_lie() -> None:
    """A simulation 3 % short misses the CPU's bias of 2 % and nothing else; on a GPU latencies miss as well."""
    found = point("continuous", 1.03)
    cpu = {verdict.what: verdict.met for verdict in verdicts([found], BOUNDS["cpu"])}
    assert cpu == {
        "signed bias of step time at par": False,
        "median error of step time at par": True,
        "tpot mean": True,
        "e2e mean": True,
        "ttft mean": True,
    }
    gpu = {verdict.what: verdict.met for verdict in verdicts([found], BOUNDS["cuda"])}
    assert gpu["median error of step time"] is False and gpu["95th percentile of step-time error"] is True
    assert gpu["tpot mean"] is False


def test_biases_of_two_policies_that_cancel_are_a_miss() -> None:
    """3 % short under one policy and 3 % long under another: the pool is within the bound, no policy is."""
    both = [point("continuous", 1.03), point("vllm", 0.97)]
    pooled = all_steps(both)[-1].bias
    bias = verdicts(both, BOUNDS["cpu"])[0]
    assert abs(pooled) < 0.02 and bias.met is False
    assert bias.bound == "within ±2 % under every policy" and "largest: vllm +3.09%" in bias.found
    assert verdicts([point("continuous", 1.0), point("vllm", 0.99)], BOUNDS["cpu"])[0].met is True


def drifted(policy: str, factor: float, *medians: float, means: tuple[float, ...] | None = None) -> LivePoint:
    """A run slower by `factor` than the cost says, beside these readings of the sentinel; its means are its medians
    unless given."""
    run = played(policy, LOAD, factor)
    made = run.made | {"drift": list(medians), "drift_of_means": list(means or medians)}
    return judge(case(), demo().scenario.find(policy), LOAD, None, [replace(run, made=made)])


def step_verdicts(*points: LivePoint, device: str = "cpu") -> list[Verdict]:
    return verdicts(points, BOUNDS[device])[:2]


def test_step_times_on_a_cpu_are_judged_at_par() -> None:
    """Steps 4 % longer on a machine that is 4 % slower are as predicted; a GPU's are judged as they are."""
    slower = drifted("continuous", 1.04, 0.04, 0.04)
    assert [v.met for v in step_verdicts(slower)] == [True, True]
    assert step_verdicts(slower)[0].found.endswith(" steps in 1 calm of 1 live runs")
    assert [v.met for v in step_verdicts(slower, device="cuda")] == [False, False]
    assert step_verdicts(slower, device="cuda")[0].what == "signed bias of step time"


def test_what_interrupts_steps_is_in_the_mean_that_par_is_told_by() -> None:
    """Medians that stand still and means 1.5 % above: a run 4 % longer is off by 2.5 %, one 3 % longer by 1.5 %."""
    tails = {"means": (0.015, 0.015)}
    biases = [drifted("continuous", factor, 0.0, 0.0, **tails).bias_at_par for factor in (1.04, 1.03)]
    assert biases == pytest.approx([1.015 / 1.04 - 1, 1.015 / 1.03 - 1], abs=1e-6)
    assert [step_verdicts(drifted("continuous", f, 0.0, 0.0, **tails))[0].met for f in (1.04, 1.03)] == [False, True]


@pytest.mark.parametrize(
    ("medians", "means", "calm"),
    [
        ((0.01, 0.03), (0.01, 0.03), True),
        ((0.01, 0.031), (0.01, 0.031), False),
        ((0.0, 0.0), (0.021, 0.021), False),
        ((-0.04, -0.03), (-0.025, -0.02), True),
    ],
    ids=["as it was", "moved meanwhile", "interrupted", "quicker"],
)
def test_a_run_is_calm_where_the_sentinel_says_the_same_before_and_after(medians, means, calm) -> None:
    """By median and mean, to 2 %: what is not known to as much cannot be judged by a bound of 2 %."""
    point = drifted("continuous", 1.0, *medians, means=means)
    assert [run.calm for run in point.lives] == [calm]
    assert (point.pairs_at_par is None) is not calm and point.drift == pytest.approx(np.mean(means))
    assert [v.met is None for v in step_verdicts(point)] == [not calm, not calm]
    if not calm:
        assert [v.found for v in step_verdicts(point)] == 2 * ["0 calm of 1 live runs"]


def test_a_policy_without_a_calm_run_leaves_the_bias_open_unless_another_misses() -> None:
    """The others' figures stand beside."""
    wild = drifted("vllm", 1.0, 0.0, 0.04)
    good, bad = drifted("continuous", 1.0, 0.0, 0.0), drifted("continuous", 1.05, 0.0, 0.0)
    assert step_verdicts(good, wild)[0].met is None and step_verdicts(bad, wild)[0].met is False
    assert step_verdicts(good, wild)[0].found.endswith(
        "1 calm of 2 live runs (largest: continuous +0.00%), none of vllm"
    )


def test_without_a_sentinel_nothing_is_called_calm() -> None:
    """A run beside which nobody looked, and one of an older version with medians alone, which still tell the drift."""
    run = played("continuous", LOAD, 1.03)
    bare = {name: value for name, value in run.made.items() if not name.startswith("drift")}
    for made, drift, more in ((bare, None, ": the machine's drift is not known"), (bare | {"drift": [0.04]}, 0.04, "")):
        point = judge(case(), demo().scenario.find("continuous"), LOAD, None, [replace(run, made=made)])
        assert point.drift == drift
        assert [(v.met, v.found) for v in step_verdicts(point)] == 2 * [(None, "0 calm of 1 live runs" + more)]


def test_a_figure_that_a_side_lacks_is_never_passed_over() -> None:
    """Nothing on one side is a miss; nothing on both leaves the bound open, unless another point misses it."""
    found = point("continuous", 1.0)

    def without(simulated: float | None, live: float | None) -> LivePoint:
        gone = MetricError("tpot_mean_s", simulated, live, None, None, few=False)
        return replace(found, errors=tuple(gone if e.name == gone.name else e for e in found.errors))

    def tpot(*points: LivePoint) -> Verdict:
        return next(v for v in verdicts(points, BOUNDS["cpu"]) if v.what == "tpot mean")

    assert tpot(found).met is True
    assert tpot(found, without(None, None)).met is None
    assert tpot(found, without(0.1, None)).met is tpot(found, without(0.1, 0.0)).met is False
    assert tpot(point("continuous", 1.5), without(None, None)).met is False
    assert "not defined at continuous, load 14" in tpot(found, without(None, None)).found


def test_a_wide_spread_widens_the_bound_of_a_latency_on_a_cpu_alone() -> None:
    """An error of 12 % beside a spread of 8 % is within two spreads: enough for the CPU's bounds, not the GPU's."""
    found = point("continuous", 1.03, 1.15)
    e2e = found.error("e2e_mean_s")
    assert e2e.error is not None and e2e.spread is not None
    assert 0.10 < abs(e2e.error) < 2 * e2e.spread and not found.unfit
    for device, met in (("cpu", True), ("cuda", False)):
        judged = {verdict.what: verdict.met for verdict in verdicts([found], BOUNDS[device])}
        assert judged["e2e mean"] is met


def test_near_saturation_the_load_axis_and_the_throughput_are_judged() -> None:
    """From 90 % of saturation on a GPU's latencies have no bound of their own."""
    near = point("continuous", 1.0, share=0.95)
    judged = {verdict.what: verdict.met for verdict in verdicts([near], BOUNDS["cuda"])}
    assert judged["e2e mean"] is None and judged["load-equivalent error"] is True and judged["throughput rps"] is True
    off = point("continuous", 1.1, share=0.95)
    judged = {verdict.what: verdict.met for verdict in verdicts([off], BOUNDS["cuda"])}
    assert judged["load-equivalent error"] is False


def test_the_load_axis_is_judged_for_the_tails_as_well() -> None:
    """A p99 alone beyond the bound, or beyond reach, is a miss; few observations are marked."""
    near = point("continuous", 1.0, share=0.95)
    shifts = dict.fromkeys(near.shifts, 0.0)
    assert list(shifts) == ["ttft_mean_s", "ttft_p99_s", "e2e_mean_s", "e2e_p99_s"]

    def judged(**changed: float | None) -> Verdict:
        all_verdicts = verdicts([replace(near, shifts=shifts | changed)], BOUNDS["cuda"])
        return next(verdict for verdict in all_verdicts if verdict.what == "load-equivalent error")

    assert judged().met is True and judged().found.startswith("4 of 4 figures")
    off = judged(ttft_p99_s=0.03)
    assert off.met is False and "+3.0% (~ ttft p99, continuous" in off.found
    assert judged(e2e_p99_s=None).met is False and "1 beyond reach" in judged(e2e_p99_s=None).found
