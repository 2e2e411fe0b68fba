"""What is not known of a cost: its error, and the factor by which a scenario stretches its steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from batchsim.base.errors import ScenarioError
from batchsim.cost.calibrated import Calibrated
from batchsim.cost.constant import Constant
from batchsim.cost.cost_error import Unknown, error_of
from batchsim.cost.host_config import StatedHost
from batchsim.cost.profile import load_profile
from batchsim.cost.roofline import Roofline
from batchsim.cost.scaled import Scaled
from batchsim.cost.work import TIME_TERMS, columns_of
from batchsim.deployment.catalog import GPUS, MODELS
from batchsim.deployment.deployment import Deployment
from batchsim.results.heading import heading
from batchsim.results.provenance import identity, short_hash
from batchsim.scenario import Point, load_scenario
from batchsim.scenario.parse import parse_scenario
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup
from batchsim.testing.by_hand import same
from tests.support.paths import ROOT
from tests.unit.cost.test_cost import BATCHES, LINEAR, ROOFLINE
from tests.unit.cost.test_profile import PROFILE

SCENARIO = """
model: llama-3.1-8b
cost: {kind: linear, base: %dms, per_token: %dus, per_sequence: %dus, per_context_token: %dns, per_swapped_block: %dus}
kv: {tokens: 3200, swap_space: 1GB}
workload:
  arrivals: {kind: poisson, mean_rate: 12/s}
  lengths: {prompt: {kind: gamma, mean: 300, cv: 0.8, max: 800}, output: {kind: gamma, mean: 40, cv: 0.6, max: 90}}
  output_cap: 90
  requests: 120
policies: {preemptive: {max_num_seqs: 16, max_num_batched_tokens: 512, by: auto}}
slo: ttft<1s @ 99%%
"""


def _scenario(tmp_path, scale=1, *overrides):
    path = tmp_path / "stretched.yaml"
    path.write_text(SCENARIO % tuple(scale * each for each in (5, 20, 100, 40, 60)))
    return load_scenario(str(path), overrides=overrides)


def _records(scenario):
    return simulate_point(Setup.of(scenario), Point(scenario.specs[0], 1.0, 0)).records


def test_a_factor_is_the_same_as_a_cost_of_that_many_times_the_time(tmp_path):
    """Steps, swaps and the choice between swap and recompute all follow the stretched times, to the nanosecond."""
    stretched = _records(_scenario(tmp_path, 1, "cost_factor=3.0"))
    stated = _records(_scenario(tmp_path, 3))
    same(stretched, stated)
    assert (stretched.steps["swap_blocks"] > 0).any()


def test_a_factor_of_one_changes_nothing(tmp_path):
    """Whether it is written or not."""
    plain, stretched = _records(_scenario(tmp_path)), _records(_scenario(tmp_path, 1, "cost_factor=1.0"))
    assert np.array_equal(plain.requests, stretched.requests) and np.array_equal(plain.steps, stretched.steps)


def test_a_factor_is_told_and_makes_other_points(tmp_path):
    """The heading, the sources and the identity of a point have it."""
    plain, stretched = Setup.of(_scenario(tmp_path)), Setup.of(_scenario(tmp_path, 1, "cost_factor=1.1"))
    assert "× 1.1" in heading(stretched) and "×" not in heading(plain)
    assert stretched.cost.sources()[-1] == "cost_factor: every step's time × 1.1, as stated in the scenario"
    assert short_hash(identity(plain)) != short_hash(identity(stretched))
    assert stretched.kv == plain.kv


def test_a_model_that_plays_no_part_is_not_named(tmp_path):
    """With stated times its shape only says how much fits a swap space; a group with a roofline needs it again."""
    no_swap = ("kv={tokens: 3200}", "policies={continuous: {max_num_seqs: 16, max_num_batched_tokens: 512}}")
    count, groups = (f"replicas={{{what}, router: random}}" for what in ("count: 2", "groups: {a: {count: 2}%s}"))
    for replicas in ((), (count,), (groups % "",)):
        assert "llama" not in heading(Setup.of(_scenario(tmp_path, 1, *no_swap, *replicas))), replicas
    on_h200 = groups % ", b: {count: 1, cost: {kind: roofline, gpu: h200}}"
    for shown in ((), (*no_swap, on_h200)):
        assert " · llama-3.1-8b bf16 · " in heading(Setup.of(_scenario(tmp_path, 1, *shown)))


@pytest.mark.parametrize("text", ["0.0", "-1.0", "1e3"])
def test_an_impossible_factor_is_refused(tmp_path, text):
    """It is one line that names the key and the limits."""
    with pytest.raises(ScenarioError, match=r"cost_factor is .* from 0.01 to 100"):
        _scenario(tmp_path, 1, f"cost_factor={text}")


def test_real_steps_cannot_be_stretched(tmp_path):
    """What runs on a real machine may not carry a factor, which it would ignore."""
    with pytest.raises(ScenarioError, match=r"--set cost_factor=1.1: cost_factor 1.1 stretches simulated steps"):
        Setup.of(_scenario(tmp_path, 1, "cost_factor=1.1")).check_can_be_real()


@pytest.mark.parametrize("batch", BATCHES.values(), ids=list(BATCHES))
@pytest.mark.parametrize("cost", [ROOFLINE, LINEAR], ids=["roofline", "linear"])
def test_the_explained_parts_are_stretched_too(cost, batch):
    """They add up to the stretched step; the work in it is the same."""
    scaled = Scaled(cost, 1.25)
    terms, plain = scaled.explain(columns_of(batch)), cost.explain(columns_of(batch))
    assert abs(sum(terms[term][0] for term in TIME_TERMS) - scaled.step_ns(batch)) <= 3
    assert terms["flops"][0] == plain["flops"][0] and terms["bytes"][0] == plain["bytes"][0]


def test_what_a_policy_is_told_of_recompute_and_swap_is_stretched_too():
    """Both by the factor: else a policy that chooses between them would choose by another machine."""
    scaled = Scaled(LINEAR, 2.5)
    assert scaled.swap_ns(64) == 2.5 * LINEAR.swap_ns(64) > 0
    assert scaled.recompute_ns(100) == 2.5 * LINEAR.recompute_ns(100) > 0


def test_what_each_kind_is_of_and_how_far_it_reaches():
    """Stated times are of nothing; a profile is bounded unless told to go on, and no longer itself once stretched."""
    profile = load_profile("llama-3.1-8b-h200-vllm-0.24.0")
    measured, roofline = Calibrated(profile), Deployment(MODELS["llama-3.1-8b"], GPUS["h100"], tp=2)
    known = {
        Constant(1000): (None, None, None),
        LINEAR: (None, None, None),
        Roofline(MODELS["llama-3.1-8b"], GPUS["h100"], tp=2): (roofline, None, None),
        measured: (profile.deployment, profile, profile.hull),
        Calibrated(profile, extrapolate=True): (profile.deployment, profile, None),
        Scaled(measured, 1.1): (profile.deployment, None, profile.hull),
    }
    assert {cost: (cost.deployment, cost.profile, cost.reach) for cost in known} == known
    types = {"weight_dtype": "bfloat16", "kv_dtype": "bfloat16"}
    assert profile.deployment == Deployment(profile.model, GPUS["h200"], "vllm", "0.24.0", **types)
    assert replace(profile, gpu="tpu").deployment.gpu is None


def test_what_each_kind_knows_of_its_error():
    """A roofline by the models held out, tables by versions of kernels; a stated time has none."""
    roofline = Roofline(MODELS["llama-3.1-8b"], GPUS["h100"]).error
    assert roofline.high == -roofline.low == GPUS["h100"].efficiencies.error_p95
    assert "held" not in str(roofline) and "its host is assumed" in roofline.source
    imported = Calibrated(load_profile("llama-3.1-8b-h200-vllm-0.24.0")).error
    assert (imported.low, imported.high, str(imported)) == (-0.2026, 0.2026, "±20 %")
    assert Constant(1000).error == LINEAR.error == Unknown("step times are stated")
    assert Scaled(ROOFLINE, 1.1).error == ROOFLINE.error
    reaching = Calibrated(load_profile("llama-3.1-8b-h200-vllm-0.24.0"), extrapolate=True).error
    assert reaching.source == f"{imported.source}; beyond the profile's reach unknown"


MODEL = MODELS["llama-3.1-8b"]


@pytest.mark.parametrize(
    ("model", "gpu", "tp", "why"),
    [
        (MODEL, "h100", 2, "tp 2"),
        (MODELS["llama-3.1-70b"], "h100", 4, "tp 4, llama-3.1-70b"),
        (MODELS["qwen2.5-7b"], "a100", 1, "qwen2.5-7b"),
        (replace(MODEL, dtype="float16"), "h200", 1, "float16"),
        (replace(MODEL, num_hidden_layers=16), "h200", 1, "llama-3.1-8b"),
        (MODEL, "l40s", 1, "attention"),
        (MODELS["llama-3.1-70b"], "l40s", 8, "attention, tp 8 over PCIe 4.0 x16, llama-3.1-70b"),
    ],
)
def test_the_error_of_a_roofline_outside_its_fit_is_unknown(model, gpu, tp, why):
    """Heading, sources and error say why, and none of them has a number for it."""
    cost = Roofline(model, GPUS[gpu], tp=tp)
    assert cost.error == Unknown(f"{why} not in the fit") and str(cost.error) == "unknown"
    assert cost.describe().endswith(f", not measured here (error unknown: {why} not in the fit)")
    assert "%" not in cost.describe() and "±" not in cost.describe()
    known = "known of llama-3.1-8b, qwen3-14b, qwen3-8b, mistral-7b in bfloat16 on one GPU; here: "
    assert f"{known}unknown, {why} not in the fit" in cost.sources()
    assert Scaled(cost, 1.1).error == cost.error


def test_a_pipeline_is_named_and_its_error_unknown():
    """Neither the cut of the layers nor what goes between stages was in any comparison."""
    cost = Roofline(MODEL, GPUS["h100"], tp=2, pp=4)
    assert cost.describe() == "cost: roofline, tp 2, pp 4, not measured here (error unknown: tp 2, pp 4 not in the fit)"
    assert Roofline(MODEL, GPUS["h100"], pp=2).error == Unknown("pp 2 not in the fit")


def test_a_gpu_of_which_nothing_was_timed_has_no_error():
    """Its shares are another's: heading and sources say so, and no figure of the other's fit stands for it."""
    cost = Roofline(MODEL, GPUS["rtx4090"])
    assert cost.error == Unknown("no kernel of rtx4090 was timed")
    assert cost.describe().endswith(", not measured here (error unknown: no kernel of rtx4090 was timed)")
    assert any("nothing of rtx4090, assumed to reach the same shares as l40s" in line for line in cost.sources())
    assert not any("off by" in line or "known of" in line for line in cost.sources())


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-14b", "qwen3-8b", "mistral-7b"])
def test_the_error_of_a_roofline_inside_its_fit_is_the_measured_one(name):
    """Models that were compared, under another name or context length too: neither costs time."""
    for model in (MODELS[name], replace(MODELS[name], name="mine", max_position_embeddings=9)):
        cost = Roofline(model, GPUS["h100"])
        assert cost.error.high == GPUS["h100"].efficiencies.error_p95
        assert cost.describe() == "cost: roofline, not measured here (kernel part ±8.6 %)"


def test_replicas_of_which_one_has_no_known_error_have_none(tmp_path):
    """The others' errors say nothing of it; the scenario's own cost, which no group takes, nothing either."""
    for other, low in (("gpu: h100", -0.086), ("gpu: h100, tp: 2", None)):
        kinds = {"a": "gpu: h200", "b": other}
        groups = ", ".join(f"{k}: {{count: 1, cost: {{kind: roofline, {gpu}}}}}" for k, gpu in kinds.items())
        setup = Setup.of(_scenario(tmp_path, 1, f"replicas={{groups: {{{groups}}}, router: random}}"))
        assert getattr(setup.cost_error, "low", None) == low


def test_a_measured_profile_with_another_host_has_no_known_error():
    """Its steps were measured with the host of the profile."""
    stated = Calibrated(PROFILE, host=StatedHost(1_000_000).term())
    assert stated.error == Unknown("its host is stated, and steps were measured with another")
    assert f"; error unknown: {stated.error.source}; host stated" in stated.describe() and "±" not in stated.describe()


def test_a_measured_profile_tells_the_spread_of_its_biases():
    """Predicted 2 % too long in one region and 1 % too short in another: real steps take 1/1.02 to 1/0.99 times as
    long, and the median error goes on top."""
    row = {"n": 50, "p50": 0.005, "p95": 0.03}
    steps = [row | {"region": "a", "bias": 0.02}, row | {"region": "b", "bias": -0.01}]
    held_out = row | {"what": "steps", "bias": 0.001, "steps": steps}
    error = Calibrated(replace(PROFILE, held_out=held_out)).error
    assert (error.low, error.high) == pytest.approx((1 / 1.02 - 1 - 0.005, 1 / 0.99 - 1 + 0.005))
    assert str(error) == "−2.5 to +1.5 %" and "held-out" in error.source
    fitted = Calibrated(replace(PROFILE, held_out=None, residuals=tuple(steps))).error
    assert (fitted.low, fitted.high) == (error.low, error.high) and "no step was held out" in fitted.source
    bare = Calibrated(replace(PROFILE, held_out=None, residuals=()))
    assert bare.error == Unknown("the profile has neither held-out steps nor residuals")


AHEAD = """
model: llama-3.1-8b
cost: h100
workload:
  arrivals: {kind: poisson, mean_rate: 12/s}
  lengths: {prompt: {kind: fixed, tokens: 30}, output: {kind: fixed, tokens: 30}}
  output_cap: 90
  requests: 120
policies: {vllm: {}, sglang: {}}
slo: ttft<1s @ 99%
"""
WAITS = "policies={vllm: {async_scheduling: false}}"
PROFILE_OF_H100 = "cost={kind: profile, profile: llama-3.1-8b-h100-vllm-0.24.0"


@pytest.mark.parametrize(
    ("overrides", "who"),
    [
        ((), "vllm, sglang"),
        (("policies.vllm.async_scheduling=false",), "sglang"),
        ((WAITS,), ""),
        ((WAITS, "cost.pp=2"), "vllm"),
        ((WAITS, "vary={policies.vllm.async_scheduling: [false, true]}"), "vllm"),
        (("cost.host={base: 0ms, per_sequence: 0us}",), ""),
        (("cost_factor=1.1",), "vllm, sglang"),
        ((PROFILE_OF_H100 + "}",), "vllm, sglang"),
        ((PROFILE_OF_H100 + ", host: {base: 1ms, mode: overlapped}}",), ""),
        (("cost={kind: linear, base: 1ms}", "kv.tokens=3200"), ""),
        (("replicas={router: random, groups: {a: {count: 1}, b: {count: 1, cost: {kind: roofline, gpu: h200}}}}",),
         "vllm, sglang"),
    ],
)  # fmt: skip
def test_a_heading_says_whose_hidden_host_nobody_measured(overrides, who):
    """Of engines ahead of results alone, and not where there is no host's part or its overlap is stated."""
    found = heading(Setup.of(parse_scenario(AHEAD, "some.yaml", Path(), overrides)))
    said = [part for part in found.split(" · ") if part.endswith(": host all beside the device, not measured")]
    assert said == ([f"{who}: host all beside the device, not measured"] if who else [])


def test_the_fit_that_a_measured_profile_keeps_is_no_measure_of_its_error():
    """What engine runs added to its kernels has the name under which imported profiles keep their error."""
    kept = load_profile(str(ROOT / "results" / "reference" / "gpu" / "h100.json"))
    assert "launch_ns" in kept.made["in_engine"]
    assert error_of(kept).source.startswith("held-out ")
