"""The `deployment:` block: what it stands for, where it may stand, and what a heading says of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batchsim.base.errors import CalibrationError, ScenarioError
from batchsim.cost.host_config import StatedHost
from batchsim.cost.roofline import Roofline
from batchsim.deployment.catalog import MODELS
from batchsim.deployment.deployment import Deployment
from batchsim.deployment.quantisation import ELEMENT_BYTES
from batchsim.policies.registry import POLICIES
from batchsim.results.heading import heading
from batchsim.scenario import Scenario
from batchsim.scenario.deployment_config import ENGINES, DeploymentConfig, GpuSheet
from batchsim.scenario.parse import parse_scenario
from batchsim.scenario.schema import scenario_schema
from batchsim.scenario.setup import Setup
from batchsim.tables import find

SHEET = "{kind: sheet, name: my-gpu, memory: 80GB, bandwidth: 3350GB/s, bf16: 989TFLOP/s, peer_link: 450GB/s}"
TEXT = f"""
model: llama-3.1-8b
deployment:
  engine: vllm
  gpu: {SHEET}
  tp: 2
workload:
  arrivals: {{kind: poisson, mean_rate: 8/s}}
  lengths: {{prompt: {{kind: fixed, tokens: 10}}, output: {{kind: fixed, tokens: 10}}}}
  output_cap: 10
  requests: 10
slo: ttft<1s @ 90%
"""
OWN = GpuSheet(80 * 10**9, 3350e9, 989e12, name="my-gpu", peer_link=450e9)
GROUPS = (
    "replicas={router: round_robin, groups: {a: {count: 1}, b: {count: 1, deployment: {engine: vllm, gpu: %s, tp: 4}}}}"
)


def scenario(*overrides: str, text: str = TEXT) -> Scenario:
    return parse_scenario(text, "some.yaml", Path(), overrides)


def test_a_deployment_stands_for_a_cost_and_names_the_policy() -> None:
    """Without policies the engine's own runs, under its defaults for the GPU; the roofline is of the sheet's GPU."""
    found = scenario()
    assert found.cost == DeploymentConfig("vllm", OWN, tp=2)
    assert [(spec.kind, spec.by_device) for spec in found.specs] == [
        ("vllm", {"max_num_batched_tokens": 8192, "max_num_seqs": 1024})
    ]
    cost = Setup.of(found).cost
    assert isinstance(cost, Roofline)
    assert cost.deployment == Deployment(MODELS["llama-3.1-8b"], OWN.spec(), "vllm", tp=2)


def test_set_and_vary_reach_into_a_deployment() -> None:
    """Under the name that the scenario writes, and as a whole."""
    assert scenario("deployment.tp=4").cost == DeploymentConfig("vllm", OWN, tp=4)
    assert scenario("deployment.gpu=l40s", "deployment.version=0.10").cost == DeploymentConfig(
        "vllm", "l40s", version="0.10", tp=2
    )
    whole = scenario("deployment={engine: sglang, gpu: h200_sxm, host: {base: 1ms}}")
    assert whole.cost == DeploymentConfig("sglang", "h200_sxm", host=StatedHost(1_000_000))
    assert [spec.kind for spec in whole.specs] == ["sglang"]
    varied = scenario("vary={deployment.tp: [1, 2, 4]}")
    assert [each.cost.num_gpus for each in varied.variants] == [1, 2, 4]
    engines = "vary={deployment.engine: [vllm, sglang]}"
    with pytest.raises(
        ScenarioError, match=r"value sglang: the policy would be sglang, not vllm, .* \{vllm: \{\}, sgl"
    ):
        scenario(engines)
    both = scenario(engines, "policies={vllm: {}, sglang: {}}")
    assert [len(each.specs) for each in both.variants] == [2, 2]
    assert (
        scenario("cost=h200", "policies={continuous: {max_num_seqs: 8, max_num_batched_tokens: 64}}").cost.num_gpus == 1
    )


def test_groups_of_replicas_and_offers_of_a_plan_have_deployments() -> None:
    """Each of its own; its GPUs are counted."""
    setup = Setup.of(scenario(GROUPS % SHEET))
    assert [(group.name, group.setup.num_gpus) for group in setup.groups] == [("a", 2), ("b", 4)]
    assert "1 b replica on my-gpu × 4 · vllm, tp 4, weights bfloat16, kv bfloat16 · cost: roofline" in heading(setup)
    offer = f"{{price: 2/h, deployment: {{engine: sglang, gpu: {SHEET}, tp: 8}}}}"
    plan = f"plan={{target: {{rate: 60/s}}, currency: $, router: round_robin, max_replicas: 9, gpus: {{x: {offer}}}}}"
    planned = scenario(plan).file.plan
    assert planned is not None
    assert planned.gpus["x"].gpus == 8
    assert planned.gpus["x"].cost == DeploymentConfig("sglang", OWN, tp=8)


def test_a_heading_says_engine_degrees_and_types() -> None:
    """Of one engine; a policy of another engine is said to run on this one's kernels."""
    text = heading(Setup.of(scenario("policies={vllm: {}, sglang: {}}")))
    assert "llama-3.1-8b on my-gpu × 2 · vllm, tp 2, weights bfloat16, kv bfloat16 · cost: roofline, tp 2" in text
    assert "sglang: with vllm's kernels" in text
    tables = ("model=llama-3.1-70b", "deployment={engine: vllm, gpu: h100_sxm, tp: 4, weights: fp8}")
    text = heading(Setup.of(scenario(*tables)))
    assert "llama-3.1-70b on h100 × 4 · cost: kernel tables of vllm 0.24.0, tp 4, weights fp8, kv bfloat16 (" in text
    older = heading(Setup.of(scenario(*tables, "deployment.version=0.10")))
    assert "h100 × 4 · memory and defaults of vllm 0.10, step costs of 0.24.0, the nearest with tables · cost:" in older
    assert "async_scheduling False, scheduler_reserve_full_isl False" in older and "async_scheduling" not in text
    assert "nearest" not in heading(Setup.of(scenario(*tables, "deployment.version=0.24")))
    assert heading(Setup.of(scenario(*tables, "cost_factor=1.1"))).count("tp 4, weights fp8") == 1


def test_memory_goes_by_the_version_that_is_asked_for() -> None:
    """vLLM 0.19 takes 90 % and counts no graphs to it, where the nearest tables are of 0.24, which takes 92 %."""
    tables = ("model=llama-3.1-70b", "deployment={engine: vllm, gpu: h100_sxm, tp: 4, weights: fp8, version: 0.19}")
    older, newer = Setup.of(scenario(*tables)), Setup.of(scenario(*tables, "deployment.version=0.24"))
    assert "× 0.90" in older.kv.terms and "graphs" not in older.kv.terms
    assert "× 0.92" in newer.kv.terms and "graphs" in newer.kv.terms


def test_vllm_does_not_start_with_less_memory_than_a_context() -> None:
    """One line with both numbers, as the engine says it; stated pools may be as small as one likes."""
    tables = ("model=llama-3.1-70b", "deployment={engine: vllm, gpu: h100_sxm, tp: 4, weights: fp8}")
    small = "kv={utilisation: 30%}"
    with pytest.raises(
        ScenarioError, match=r"vLLM does not start with KV memory of [\d,]+ tokens .* max_model_len 131,072"
    ):
        Setup.of(scenario(*tables, small, "max_model_len=131072"))
    assert Setup.of(scenario(*tables, small, "max_model_len=4096")).kv.tokens > 4096
    Setup.of(scenario(*tables, "kv={tokens: 1600}", "max_model_len=131072"))


def test_a_gpu_with_kernel_tables_needs_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """No roofline takes its place; the line names the ways out."""
    monkeypatch.setattr(find, "version", lambda: None)
    with pytest.raises(CalibrationError, match=r"some.yaml:3: .*llama-3.1-8b on a30, .*batchsim\[gpus\].*kind: linear"):
        Setup.of(scenario("deployment.gpu=a30"))


def test_the_types_and_engines_are_those_of_deployments_and_policies() -> None:
    """Each type that may be stated has bytes, and each engine a policy of its name."""
    schema = scenario_schema()["$defs"]["DeploymentConfig"]["properties"]
    for key in ("weights", "moe", "kv"):
        named = [value for each in schema[key]["anyOf"] for value in each.get("enum", ())]
        assert {"fp8", "bfloat16"} <= {*named} <= {*ELEMENT_BYTES}, key
    assert {*ENGINES} <= {*POLICIES}


def test_null_takes_a_key_away() -> None:
    """So that another cost may stand in a deployment's place."""
    stated = ("policies={vllm: {}}", "kv={tokens: 4096}")
    found = scenario("deployment=null", "cost={kind: constant, step: 10ms}", *stated)
    assert found.cost.kind == "constant"
    with pytest.raises(ScenarioError, match=r"cost is missing\. Add deployment: \{engine: vllm, gpu: h100_sxm\}"):
        scenario("cost=null")


def test_a_sheets_host_is_stated_as_a_rooflines_is() -> None:
    """Serial; another mode has no meaning there."""
    cost = Setup.of(scenario("deployment.host={base: 2ms, per_sequence: 3us}")).cost
    assert isinstance(cost, Roofline)
    assert (cost.host.base, cost.host.per_sequence, cost.host.per_token) == (2_000_000, 3_000, 0)
    with pytest.raises(ScenarioError, match="a roofline's host is serial"):
        Setup.of(scenario("deployment.host={base: 2ms, mode: overlapped}"))
    assert replace(OWN, name="x").spec().source == "as stated in the scenario"


def test_a_sheets_roofline_times_dense_models_in_their_types() -> None:
    """FP8 weights and KV are of its own cost and memory, their error unknown; experts are still refused."""
    typed = scenario("deployment.weights=fp8", "deployment.kv=fp8", "deployment.gpu.fp8=1979TFLOP/s")
    plain, quantised = Setup.of(scenario()), Setup.of(typed)
    assert isinstance(quantised.cost, Roofline) and quantised.cost.gpu.fp8_flops == 1979e12
    assert quantised.cost.deployment.types.mlp == "fp8"
    assert quantised.kv.tokens > 2 * plain.kv.tokens
    with pytest.raises(ScenarioError, match="moe fp8 has no step times on a GPU of a sheet, whose roofline"):
        scenario("deployment.moe=fp8")
