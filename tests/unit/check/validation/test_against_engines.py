"""Simulations beside runs of real engines that others measured, with nothing fitted to them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchsim.check.measured.read import read_measured
from batchsim.check.measured.run import Client
from batchsim.check.validation.against import compare
from batchsim.check.validation.comparison import Comparison
from batchsim.scenario.parse import parse_scenario
from batchsim.scenario.setup import Setup

WORKLOAD = """
workload:
  arrivals: {kind: poisson, mean_rate: 1/s}
  lengths: {prompt: {kind: fixed, tokens: 1}, output: {kind: fixed, tokens: 1}}
  output_cap: exact
  requests: 1
load: {mean_rate: [1/s]}
slo: ttft<1s @ 99%
seeds: 1
"""
RTX4090 = """
model: llama-3.1-8b
cost: {kind: roofline, gpu: rtx4090}
kv: {tokens: 41408}
max_model_len: 32768
policies:
  vllm: {max_num_seqs: 256, max_num_batched_tokens: 2048, enable_prefix_caching: true, async_scheduling: true}
"""
H100 = """
model: llama-3.1-8b
cost: {kind: profile, profile: llama-3.1-8b-h100-vllm-0.24.0}
max_model_len: 512
policies:
  vllm: {max_num_seqs: 128, max_num_batched_tokens: 8192, enable_chunked_prefill: false,
         enable_prefix_caching: false, async_scheduling: false}
"""


@pytest.fixture(scope="module")
def engines() -> Path:
    """The folder of the measured runs."""
    found = Path(os.environ.get("BATCHSIM_MEASURED", "")) / "engines"
    if "BATCHSIM_MEASURED" not in os.environ or not found.is_dir():
        pytest.skip("BATCHSIM_MEASURED names no folder with engines in it")
    return found


def compared(text: str, *runs: object) -> list[Comparison]:
    """Each run beside its simulation under the one policy of `text`."""
    setup = Setup.of(parse_scenario(text + WORKLOAD, "engine.yaml", Path()))
    return [compare(setup, setup.scenario.specs[0], [run], shift=False) for run in runs]  # type: ignore[list-item]


def percent(found: Comparison, name: str) -> float:
    error = found.error(name).error
    assert error is not None
    return 100 * error


def test_vllm_on_an_rtx_4090_with_full_kv(engines: Path) -> None:
    """300 requests at the engine, what their prompts share read beside them; a roofline of that GPU is 13 % slow."""
    (run,) = read_measured(engines / "rtx4090_llama-3.1-8b" / "requests.csv")
    assert run.requests is not None and run.requests.hash_ids is not None
    assert run.requests.hash_ids.reused_share == pytest.approx(0.075, abs=0.001)
    (found,) = compared(RTX4090, run)
    errors = [percent(found, f"{latency}_mean_s") for latency in ("ttft", "tpot", "e2e")]
    assert errors == pytest.approx([17.4, 13.3, 16.4], abs=0.1)
    assert percent(found, "throughput_rps") == pytest.approx(-12.1, abs=0.1)


@pytest.mark.slow
def test_vllm_on_an_h100_by_kernel_tables_alone(engines: Path) -> None:
    """Seven loads, the last three closed loops in fact: TPOT is 2 to 25 % short; TTFT more, as a client is in it."""
    runs = [run for run in read_measured(engines / "kubecon_na_2025_h100.csv") if run.part.startswith("vllm, ")]
    assert [run.client.arrivals for run in runs] == ["open"] * 4 + ["closed"] * 3
    assert runs[6].client == Client("closed", 183.38, max_concurrency=427)
    found = compared(H100, *runs)
    tpot = [percent(one, "tpot_mean_s") for one in found]
    assert tpot == pytest.approx([-3.9, -2.2, -11.4, -25.2, -17.0, -17.3, -15.0], abs=0.1)
    e2e = [percent(one, "e2e_mean_s") for one in found]
    assert e2e == pytest.approx([-7.9, -4.9, -13.5, -26.9, -20.5, -20.4, -17.9], abs=0.1)
    ttft = [percent(one, "ttft_mean_s") for one in found]
    assert ttft == pytest.approx([-66.6, -51.8, -52.7, -58.8, -22.1, -21.7, -19.1], abs=0.1)
