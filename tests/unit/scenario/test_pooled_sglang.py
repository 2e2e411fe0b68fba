"""Scenarios whose prefill and decode are apart under SGLang: both ways to write them, mistakes, what they leave."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from batchsim.base.errors import BatchsimError
from batchsim.policies.systems.sglang.sglang_decode import SglangDecode
from batchsim.policies.systems.sglang.sglang_prefill import SglangPrefill
from batchsim.report.text.deployment_text import shown_deployment
from batchsim.results.read import REPLICAS
from batchsim.scenario import load_scenario
from batchsim.scenario.config import Scenario
from batchsim.scenario.setup import Setup
from batchsim.study.curves.run import run_scenario

BASE = """
model: llama-3.1-8b
workload:
  arrivals: {kind: poisson, mean_rate: 8/s}
  lengths: {prompt: {kind: fixed, tokens: 100}, output: {kind: uniform, min: 2, max: 12}}
  output_cap: 16
  requests: 30
policies: {sglang: {max_running_requests: 8, disable_overlap_schedule: true}}
slo: ttft<1s @ 90%
seeds: 1
"""
COST = "cost: {kind: constant, step: 10ms}\nkv: {tokens: 20000}\n"
POOLS = """
pools:
  prefill: {count: 2, knobs: {chunked_prefill_size: 64}}
  decode: {count: 1, kv: {tokens: 3200}, knobs: {num_reserved_decode_tokens: 16}}
  transfer: {bandwidth: 10GB/s, latency: 20us, links: per_pair}
"""
SIDES = """
deployment:
  prefill: {engine: sglang, gpu: h100_sxm, count: 2}
  decode: {engine: sglang, gpu: h100_sxm, count: 1, knobs: {disaggregation_decode_polling_interval: 2}}
  transfer: {bandwidth: 10GB/s}
"""


def _loaded(folder: Path, text: str, *overrides: str) -> Scenario:
    path = folder / "apart.yaml"
    path.write_text(text, encoding="utf-8")
    return load_scenario(str(path), overrides=overrides)


def test_each_side_is_an_engine_of_its_own(tmp_path: Path) -> None:
    """Its scheduler, mode, knobs and memory; decode has no radix cache."""
    prefill, decode = Setup.of(_loaded(tmp_path, BASE + COST + POOLS)).groups
    specs = [group.setup.scenario.specs[0] for group in (prefill, decode)]
    assert [spec.policy for spec in specs] == [SglangPrefill, SglangDecode]
    assert [spec.config.disaggregation_mode for spec in specs] == ["prefill", "decode"]
    assert [spec.config.chunked_prefill_size for spec in specs] == [64, 8192]
    assert [spec.config.num_reserved_decode_tokens for spec in specs] == [512, 16]
    assert [spec.config.disable_radix_cache for spec in specs] == [False, True]
    assert [group.setup.kv.num_blocks for group in (prefill, decode)] == [1250, 200]


def test_a_run_has_both_sides_in_its_tables(tmp_path: Path) -> None:
    """Prompts of two chunks take 20 ms; an answer's first token comes with the last three of their seven blocks of 2
    MiB, which take 629 us and 20 us of latency."""
    results = run_scenario(_loaded(tmp_path, BASE + COST + POOLS), out=tmp_path / "results")
    rows = pd.read_csv(results.path / REPLICAS)
    assert rows["group"].tolist() == ["prefill", "prefill", "decode"]
    assert rows["requests"].tolist() == [15, 15, 30] and rows["finished"].tolist() == [0, 0, 30]
    (point,) = results.points.to_dict("records")
    assert point["finished"] == 30
    assert point["ttft_p50_s"] == pytest.approx(0.02 + 3 * 2**21 / 10e9 + 20e-6, rel=1e-6)
    assert point["tpot_p50_s"] == pytest.approx(0.01)


def test_the_command_of_each_side_says_its_mode(tmp_path: Path) -> None:
    """And the knobs that only engines apart have."""
    shown = shown_deployment(_loaded(tmp_path, BASE + SIDES))
    prefill, decode = (shown.sides[side].line for side in ("prefill", "decode"))
    assert prefill.endswith("--disaggregation-mode prefill")
    assert decode.endswith("--disaggregation-mode decode --disaggregation-decode-polling-interval 2")
    assert "--max-running-requests 8" in prefill and "--max-running-requests 8" in decode


DECODE = "pools.decode.knobs={%s}"
PREFILL = "pools.prefill.knobs={%s}"
POLICY = "policies={sglang: {%s}}"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (DECODE % "num_reserved_decode_tokens: -1", "knobs: num_reserved_decode_tokens is -1. It must be"),
        (DECODE % "num_reserved_decode_token: 5", "knobs.num_reserved_decode_token is not a field of knobs"),
        (
            DECODE % "disaggregation_decode_polling_interval: 0",
            "disaggregation_decode_polling_interval is 0. It must be",
        ),
        (DECODE % "disaggregation_decode_extra_slots: 1.5", "knobs.disaggregation_decode_extra_slots is 1.5"),
        (DECODE % "disaggregation_decode_retraction_backup: disk", "disaggregation_decode_retraction_backup"),
        (DECODE % "disaggregation_decode_retraction_backup: host_pool", "host_pool where prefill and decode are apart"),
        (DECODE % "disaggregation_decode_enable_radix_cache: true", "radix_cache: true where prefill and decode"),
        (DECODE % "disaggregation_decode_allocation_policy: prefill_complete", "prefill_complete where prefill"),
        (DECODE % "disaggregation_mode: prefill", "disaggregation_mode prefill: this side is decode. Leave it out"),
        (DECODE % "disable_radix_cache: false", "SGLang has no radix cache where it decodes. Leave it out"),
        (PREFILL % "num_reserved_decode_tokens: 64", "num_reserved_decode_tokens is a knob of decode. Write it there"),
        (PREFILL % "disaggregation_decode_extra_slots: 2", "extra_slots is a knob of decode. Write it there"),
        (PREFILL % "disaggregation_decode_polling_interval: 2", "polling_interval is a knob of decode"),
        (PREFILL % "disaggregation_decode_retraction_backup: none", "retraction_backup is a knob of decode"),
        (PREFILL % "optimistic_prefill_attempts: 1", "optimistic_prefill_attempts: 1 where prefill and decode"),
        (PREFILL % "chunked_prefill_size: 50", "chunked_prefill_size 50 must be divisible by page_size"),
        (POLICY % "enable_mixed_chunk: true", "enable_mixed_chunk: true where prefill and decode are apart"),
        (POLICY % "scheduler_recv_interval: 4", "scheduler_recv_interval: 4 where prefill and decode are apart"),
        (POLICY % "speculative_algorithm: NGRAM, acceptance: 0.5", "speculative_algorithm: NGRAM where prefill"),
        (POLICY % "is_embedding: true", "is_embedding"),
        ("pools.prefill.deployment={engine: vllm, gpu: h100}", "engine vllm passes KV to its like alone. Write"),
        ("pools.decode.deployment={engine: trtllm, gpu: h100}", "tensorrt_llm"),
        ("policies={sglang: {}, tgi: {}}", "tgi is of kind tgi, and only vllm and sglang pass KV"),
        ("pools.transfer.bandwidth=0GB/s", "bandwidth"),
        ("pools.local_prefill={kind: tensorrt_llm_threshold}", "SGLang's decode engines compute no prompts"),
    ],
)
def test_mistakes_are_one_line_each(tmp_path: Path, override: str, said: str) -> None:
    """With the place, and what to do."""
    with pytest.raises(BatchsimError) as refusal:
        Setup.of(_loaded(tmp_path, BASE + COST + POOLS, override))
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)
