"""Defaults that an engine takes from its GPU: how a scenario has them, says them and is refused where they part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.cli.lists import policies
from batchsim.kernel.policy_config import Device
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from batchsim.results.heading import heading
from batchsim.scenario import Scenario
from batchsim.scenario.parse import parse_scenario
from batchsim.scenario.setup import Setup

SCENARIO = """
model: llama-3.1-8b
cost: a100
max_model_len: 4096
workload:
  arrivals: {kind: poisson, mean_rate: 8/s}
  lengths: {prompt: {kind: fixed, tokens: 10}, output: {kind: fixed, tokens: 10}}
  output_cap: 10
  requests: 10
policies: {vllm: {async_scheduling: false}}
slo: ttft<1s @ 90%
"""
PROFILE = "cost={kind: profile, profile: llama-3.1-8b-a100-vllm-0.14.0}"
LINEAR = ("cost={kind: linear, base: 1ms}", "kv.tokens=4096")
GIB = 2**30


def scenario(*overrides: str, text: str = SCENARIO) -> Scenario:
    return parse_scenario(text, "some.yaml", Path(), overrides)


@pytest.mark.parametrize(
    ("gib", "stated", "tokens"),
    [(19.9, {}, 2048), (20, {}, 4096), (59.9, {}, 4096), (60, {}, 8192), (159.9, {}, 8192), (160, {}, 16384),
     (160, {"chunked_prefill_size": -1}, None)],
)  # fmt: skip
def test_sglang_cuts_prompts_by_the_gpus_memory(gib: float, stated: dict[str, Any], tokens: int | None) -> None:
    """As its server does on start, unless told."""
    found = SglangConfig.device_defaults(Device("any", int(gib * GIB), 4096), stated)
    assert found.get("chunked_prefill_size") == tokens


@pytest.mark.parametrize("stated", [{"max_num_seqs": 0}, {"max_num_batched_tokens": -1}, {"max_num_seqs": "many"}])
def test_what_the_config_will_refuse_is_not_reckoned_with(stated: dict[str, Any]) -> None:
    """The error is then of what was stated, not of a default made from that."""
    assert VllmConfig.device_defaults(Device("any", 80 * GIB, 4096), stated) == {}


def limits(found: Scenario) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) of the only policy."""
    (spec,) = found.specs
    return spec.config.max_num_batched_tokens, spec.config.max_num_seqs


@pytest.mark.parametrize(
    ("gpu", "gib", "stated", "expected"),
    [
        ("b200", 160, {}, (16384, 1024)),
        ("h200", 159.9, {}, (8192, 1024)),
        ("h100", 70, {}, (8192, 1024)),
        ("h100", 69.9, {}, (2048, 256)),
        ("NVIDIA A100-SXM4-80GB", 80, {}, (2048, 256)),
        ("NVIDIA GB10", 119, {}, (2048, 256)),
        ("l40s", 45, {}, (2048, 256)),
        ("h100", 80, {"max_num_seqs": 1}, (4096, None)),
        ("h100", 80, {"max_num_batched_tokens": 128}, (None, 128)),
        ("l40s", 45, {"enable_chunked_prefill": False}, (4096, 256)),
        ("h100", 80, {"enable_chunked_prefill": False}, (8192, 1024)),
        ("l40s", 45, {"max_num_batched_tokens": 64, "max_num_seqs": 64}, (None, None)),
        ("h100", 80, {"max_num_batched_tokens": 64, "enable_chunked_prefill": False}, (None, 64)),
        ("l40s", 45, {"max_num_seqs": "many"}, (None, None)),
        ("l40s", 45, {"max_num_batched_tokens": 0}, (None, None)),
    ],
)
def test_vllms_defaults_go_by_memory_and_name(
    gpu: str, gib: float, stated: dict[str, Any], expected: tuple[int | None, int | None]
) -> None:
    """A server's, by its table; a defaulted number of tokens holds a sequence of 4,096 without chunked prefill and is
    cut to what the sequences can have, that of sequences to the tokens. What is stated, however odd, stays as it is."""
    found = VllmConfig.device_defaults(Device(gpu, int(gib * GIB), 4096), stated)
    assert (found.get("max_num_batched_tokens"), found.get("max_num_seqs")) == expected


@pytest.mark.parametrize(
    ("version", "off"),
    [
        ("0.11.2", {"async_scheduling", "scheduler_reserve_full_isl"}),
        ("0.12.0", {"async_scheduling"}),
        ("0.13.1", {"async_scheduling"}),
        ("0.14.0", set()),
    ],
)
def test_earlier_versions_have_less_on_by_default(version: str, off: set[str]) -> None:
    """Scheduling ahead came with 0.14, admission by a whole prompt with 0.12; of another engine's version nothing is
    known."""
    found = VllmConfig.device_defaults(Device("h100", 80 * GIB, 4096, "vllm", version), {})
    assert {name for name, value in found.items() if value is False} == off
    other = VllmConfig.device_defaults(Device("h100", 80 * GIB, 4096, "sglang", version), {})
    assert False not in other.values()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), (2048, 256)),
        (("cost.gpu=h100",), (8192, 1024)),
        ((PROFILE,), (2048, 256)),
        (LINEAR, (8192, 1024)),
        (("policies.vllm.max_num_seqs=300",), (2048, 300)),
        (("policies.vllm.max_num_batched_tokens=100",), (100, 100)),
    ],
)
def test_a_scenario_goes_by_the_gpu_of_its_cost(overrides: tuple[str, ...], expected: tuple[int, int]) -> None:
    """Roofline or profile; without a GPU the config's own defaults hold, and what is stated always does."""
    found = scenario(*overrides)
    assert limits(found) == expected
    (policy,) = Setup.of(found).scenario.specs
    assert (policy.config.max_num_batched_tokens, policy.config.max_num_seqs) == expected


def test_a_heading_says_which_defaults_are_the_gpus() -> None:
    """Those not stated alone, once for each GPU that is varied; nothing where no GPU is known."""
    by_a100 = "by default on a100: vllm max_num_batched_tokens 2048"
    assert heading(Setup.of(scenario())).endswith(f"{by_a100}, max_num_seqs 256")
    assert heading(Setup.of(scenario("policies.vllm.max_num_seqs=300"))).endswith(by_a100)
    assert "by default" not in heading(Setup.of(scenario(*LINEAR)))
    varied = heading(Setup.of(scenario("vary={cost.gpu: [a100, h100]}")))
    assert f"{by_a100}, max_num_seqs 256 · by default on h100: vllm max_num_batched_tokens 8192" in varied
    assert heading(Setup.of(scenario("vary={policies.vllm.watermark: [0.1, 0.2]}"))).count("by default") == 1


def test_replicas_on_gpus_with_other_defaults_are_refused() -> None:
    """One policy has one set of knobs: they are to be stated. Groups on GPUs with the same defaults are not refused."""
    other = "replicas={router: round_robin, groups: {a: {count: 1}, b: {count: 1, cost: GPU}}}"
    with pytest.raises(ScenarioError) as caught:
        Setup.of(scenario(other.replace("GPU", "h100")))
    assert str(caught.value).endswith(
        "replicas.groups.b: vllm has by default on h100 max_num_batched_tokens 8192, not 2048, and max_num_seqs 1024,"
        " not 256 as by the scenario's own cost. State max_num_batched_tokens and max_num_seqs."
    )
    Setup.of(scenario(other.replace("GPU", "l40s")))
    knobs = ("policies.vllm.max_num_seqs=64", "policies.vllm.max_num_batched_tokens=512")
    Setup.of(scenario(other.replace("GPU", "h100"), *knobs))


def test_a_gpu_that_nobody_knows_is_named_by_the_cost() -> None:
    """The device is looked up before the cost is built, whose error is the one that is told."""
    with pytest.raises(ScenarioError, match="GPU x100 is not in the catalog"):
        Setup.of(scenario("cost={kind: roofline, gpu: x100}"))


def test_policies_tells_which_knobs_go_by_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the defaults that hold where none is known."""
    policies(as_json=True)
    rows = {row["policy"]: row for row in json.loads(capsys.readouterr().out)}
    assert {name for name, row in rows.items() if "by_gpu" in row} == {"vllm", "sglang"}
    assert rows["sglang"]["by_gpu"] == ["chunked_prefill_size"]
    assert set(rows["vllm"]["by_gpu"]) == {"max_num_seqs", "max_num_batched_tokens"}
    policies(as_json=False)
    text = " ".join(capsys.readouterr().out.split())
    assert "max_num_batched_tokens and max_num_seqs by the GPU where one is known" in text
