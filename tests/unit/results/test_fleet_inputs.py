"""Energy: the power of steps and of the time between them, over the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batchsim.cost.power import POWER_LAWS
from batchsim.cost.work import useful_flops_bytes, work_columns
from batchsim.deployment.catalog import GPUS
from batchsim.metrics.measure import measure
from batchsim.results.fleet_inputs import cost_terms, energy_words, idle_watts, step_watts
from batchsim.results.keep import point_inputs
from batchsim.scenario.parse import parse_scenario
from batchsim.scenario.point import Run, simulate_point
from batchsim.scenario.setup import Setup

TEXT = """\
model: llama-3.1-8b
cost: {kind: roofline, gpu: h100, tp: 2}
kv: {tokens: 100000}
workload:
  arrivals: {kind: poisson, mean_rate: 2/s}
  lengths: {prompt: {kind: uniform, min: 10, max: 900}, output: {kind: uniform, min: 2, max: 90}}
  output_cap: 90
  duration: 6s
  warmup: 1s
policies:
  vllm: {async_scheduling: true, max_num_seqs: 256, max_num_batched_tokens: 2048}
slo: ttft<1s @ 90%
"""
FLEET = """\
replicas:
  router: round_robin
  groups:
    two: {count: 2}
    one: {count: 1, cost: {kind: roofline, gpu: a100, tp: 2}}
"""
GROUPS = ("h100", "h100", "a100")


def played(text: str, *overrides: str) -> tuple[Setup, Run]:
    setup = Setup.of(parse_scenario(text, "s.yaml", Path(), overrides))
    return setup, simulate_point(setup, setup.scenario.points()[0])


def integral_j(setup: Setup, run: Run, gpus: tuple[str, ...]) -> float:
    """The energy by hand: each engine's steps one by one, and what is left of the window at rest."""
    (start, end), records, joules = run.window_ns, run.records, 0.0
    for replica, name in enumerate(gpus):
        law, gpu, model = POWER_LAWS[name], GPUS[name], setup.cost.deployment
        assert model is not None
        own = records.steps if records.replicas is None else records.steps[records.replicas.steps == replica]
        flops, moved = useful_flops_bytes(model, work_columns(own))
        rest_ns = end - start
        for i, row in enumerate(own):
            ns, first = int(row["duration_ns"]), int(row["start_ns"])
            within = max(min(first + ns, end) - max(first, start), 0)
            share = 2 * ns / 1e9  # of two GPUs
            watts = law.active_w + law.compute_w * flops[i] / gpu.peak_flops / share
            watts = min(watts + law.memory_w * moved[i] / gpu.memory_bandwidth / share, law.limit_w)
            joules += 2 * watts * within / 1e9
            rest_ns -= within
        joules += 2 * law.idle_w * rest_ns / 1e9
    return joules


@pytest.mark.parametrize("kind", ["one", "fleet", "digest"])
def test_energy_is_the_integral_of_power_over_the_window(kind: str) -> None:
    """Of one engine, of three replicas on two kinds of GPUs, and of these where their steps are not kept: steps at
    their power, the time between at rest, and nothing twice."""
    setup, run = played(TEXT if kind == "one" else TEXT + FLEET)
    expected = integral_j(setup, run, ("h100",) if kind == "one" else GROUPS)
    if kind == "digest":
        setup, run = played(TEXT + FLEET, "keep=requests")
    values = measure(point_inputs(setup, run)).values
    tokens = values["output_tokens_per_s"]
    assert values["energy_j"] == pytest.approx(expected, rel=1e-9) and tokens is not None
    assert values["mean_power_w"] == pytest.approx(expected / 5)
    assert values["energy_with_idle_j_per_output_token"] == pytest.approx(expected / 5 / tokens)
    power, busy = values["power_w"], values["engine_busy_share"]
    assert power is not None and busy is not None and 0.02 < busy < 0.9


def test_power_is_of_the_steps_and_an_idle_gpu_draws_its_own() -> None:
    """Two H100s at rest draw 2 × 70 W; in steps 2 × 447 W at least; the mean lies between."""
    setup, run = played(TEXT)
    values = measure(point_inputs(setup, run)).values
    power, mean = values["power_w"], values["mean_power_w"]
    assert idle_watts(setup) == 140
    assert power is not None and mean is not None and 140 < mean < 894 < power < 1400


def test_a_step_that_only_swaps_draws_what_any_step_does() -> None:
    """It computes nothing: 2 × 447 W. A step that computes and has no work by the cost leaves all unknown."""
    setup, run = played(TEXT)
    terms = cost_terms(setup, run.records, run.point.spec.config)
    terms["bytes"][3] = terms["flops"][3] = 0
    assert step_watts(setup, run.records, terms) is None
    rows = run.records.steps.copy()
    for name in ("num_decode", "num_decode_tokens", "num_prefill_tokens", "num_chunks"):
        rows[name][3] = 0
    watts = step_watts(setup, replace(run.records, step_rows=rows), terms)
    assert watts is not None and watts[3] == 894 == watts.min()


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        ("{kind: roofline, gpu: b300_sxm}", "power of b300_sxm: unknown, no power law"),
        ("{kind: roofline, gpu: h100, pp: 2}", "power of h100: unknown, steps of a pipeline overlap"),
        ("{kind: linear, base: 5ms, per_token: 10us}", "power: unknown, no GPU of the catalog is meant"),
    ],
)
def test_what_has_no_law_has_no_energy(cost: str, words: str) -> None:
    """None, never a zero, of every metric of energy; and the sources say why."""
    setup, run = played(TEXT.replace("{kind: roofline, gpu: h100, tp: 2}", cost))
    values = measure(point_inputs(setup, run)).values
    assert energy_words(setup) == words and idle_watts(setup) is None
    names = [name for name in values if name.startswith("energy_") or name.endswith("power_w")]
    assert len(names) == 5 and {values[name] for name in names} == {None}


CONTROLLED = """\
model: llama-3.1-8b
cost: {kind: roofline, gpu: h100}
kv: {tokens: 400000}
workload:
  arrivals: {kind: poisson, mean_rate: 0.5/s}
  lengths: {prompt: {kind: uniform, min: 100, max: 900}, output: {kind: uniform, min: 50, max: 250}}
  output_cap: 250
  duration: 60s
policies:
  free: {kind: continuous, max_num_seqs: 256, max_num_batched_tokens: 8192}
  energy_aware: {%s}
slo: ttft<20s @ 90%%
seeds: 1
"""


def controlled(knobs: str, *overrides: str) -> list[dict[str, float]]:
    """The metrics of the free run and of the controlled one."""
    setup = Setup.of(parse_scenario(CONTROLLED % knobs, "s.yaml", Path(), overrides))
    runs = [measure(point_inputs(setup, simulate_point(setup, point))).values for point in setup.scenario.points()]
    assert all(values["finished"] == values["submitted"] for values in runs)
    return [{name: value for name, value in values.items() if value is not None} for values in runs]


def test_a_control_limit_trades_latency_for_energy() -> None:
    """At 0.5/s waiting for 8 requests saves a third of the energy and more, and takes at least three times as long."""
    free, limit = controlled("control_limit: 8, max_hold: 10s")
    assert limit["energy_j"] < 0.67 * free["energy_j"] and limit["e2e_p50_s"] > 3 * free["e2e_p50_s"]


def test_a_power_budget_is_held() -> None:
    """At 4/s 300 W are held, which the free run exceeds by half: with fuller steps, and so less energy a token."""
    knobs = "power_budget: 300W, step_power: 600W, idle_power: 70W"
    free, budget = controlled(knobs, "workload.arrivals.mean_rate=4/s", "workload.duration=15s")
    assert budget["mean_power_w"] < 300 < 450 < free["mean_power_w"]
    assert budget["energy_with_idle_j_per_output_token"] < free["energy_with_idle_j_per_output_token"]
    assert budget["ttft_p50_s"] > 0.5 > free["ttft_p50_s"]
