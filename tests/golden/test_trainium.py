"""Qwen3-8B on one Trainium2 chip under vLLM Neuron, published by others, from two of its costs: of a decode, a prompt.

Prompts of 3,460 tokens in the bucket of 4,096, 50 output tokens, one decode program of all slots. The decode and the
prompt were measured with one request at a time; requests a second under full load were not used.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from batchsim.base.units import NS_PER_S
from batchsim.kernel.record import Records
from batchsim.scenario import load_scenario
from batchsim.scenario.config import Point
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup

FILE = Path(os.environ.get("BATCHSIM_MEASURED", "")) / "published" / "trainium.json"
PREFILL_NS = 259_000_000
SCENARIO = """
model: qwen3-8b
max_model_len: 4096
cost:
  kind: linear
  base: {base}ns
  per_token: {token}ns
  per_sequence: {sequence}ns
  shapes: {{preset: neuron, tokens: [4096], requests: [{slots}]}}
kv: {{tokens: {tokens}, block_size: 4096}}
workload:
  arrivals: {{kind: closed_loop, users: {users}, think_time: 0s}}
  lengths: {{prompt: {{kind: fixed, tokens: 3460}}, output: {{kind: fixed, tokens: {output}}}}}
  output_cap: {output}
  requests: {requests}
policies: {{vllm_neuron: {{max_num_seqs: {slots}, max_num_batched_tokens: 4096}}}}
slo: ttft<60s @ 50%
seeds: 1
"""


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    if "BATCHSIM_MEASURED" not in os.environ or not FILE.exists():
        pytest.skip("BATCHSIM_MEASURED names no folder with published/trainium.json")
    return json.loads(FILE.read_text())["qwen3_8b"]


def simulated(folder: Path, decode_ms: float, slots: int, users: int, output: int = 50) -> tuple[float, Records]:
    """(Requests a second, the records) of a closed loop, in which a decode of all slots takes `decode_ms`."""
    decode_ns = round(decode_ms * 1e6)
    # Of a program of 4,096 tokens and one of as many rows as slots: two times, and which of the parts differs.
    token = (PREFILL_NS - decode_ns) // (4096 - slots) if slots < 16 else 0
    sequence = (decode_ns - PREFILL_NS) // (slots - 1) if slots == 16 else 0
    text = SCENARIO.format(
        base=decode_ns - slots * (token + sequence),
        token=token,
        sequence=sequence,
        slots=slots,
        users=users,
        output=output,
        tokens=4096 * slots,
        requests=12 * users,
    )
    path = folder / "trainium.yaml"
    path.write_text(text)
    scenario = load_scenario(str(path))
    run = simulate_point(Setup.of(scenario), Point(scenario.specs[0], scenario.loads[0], 0))
    return len(run.records.requests) * NS_PER_S / run.end_ns, run.records


@pytest.mark.parametrize(("slots", "off"), [(1, -1.5), (2, -2.0), (4, -2.1), (8, -0.9), (16, -1.4)])
def test_the_peak_rate_follows_from_one_prompt_a_step_and_whole_decodes(
    slots: int, off: float, measured: dict[str, Any], tmp_path: Path
) -> None:
    """n prompts one after another, then 49 decodes: n / (n · 259 ms + 49 · decode), within 2.1 % of the measured."""
    decode_ms = measured["decode_ms_per_step"][str(slots)]
    rate, _ = simulated(tmp_path, decode_ms, slots, users=slots)
    assert rate == pytest.approx(slots / (slots * 0.259 + 49 * decode_ms / 1e3), rel=1e-4)
    assert round(100 * (rate / measured["peak_rps"][str(slots)] - 1), 1) == off


@pytest.mark.parametrize("users", [1, 4, 8, 16])
def test_a_step_costs_its_program_whatever_runs_in_it(users: int, measured: dict[str, Any], tmp_path: Path) -> None:
    """16 slots with fewer users: every decode takes 259.15 ms, every prompt 259 ms, and the rates are the measured."""
    rate, records = simulated(tmp_path, measured["decode_ms_per_step"]["16"], 16, users)
    steps = records.steps
    assert set(steps["duration_ns"][steps["num_decode"] > 0].tolist()) == {259_150_000}
    assert set(steps["duration_ns"][steps["num_chunks"] > 0].tolist()) == {PREFILL_NS}
    assert (steps["num_decode"] + steps["pad_decode_rows"])[steps["num_decode"] > 0].tolist() == [16] * (
        (steps["num_decode"] > 0).sum()
    )
    assert rate == pytest.approx(measured["rps_by_concurrency_16_slots_50_out"][str(users)], rel=0.015)


@pytest.mark.parametrize("users", [1, 4, 8, 16])
def test_prompts_alone_are_within_15_per_cent_of_the_measured(
    users: int, measured: dict[str, Any], tmp_path: Path
) -> None:
    """With one output token only prompts are computed, at the one measured cost: 3.86 requests a second for 3.9 to
    4.1."""
    rate, _ = simulated(tmp_path, measured["decode_ms_per_step"]["16"], 16, users, output=1)
    assert rate == pytest.approx(1 / 0.259, rel=1e-6)
    assert rate == pytest.approx(measured["rps_by_concurrency_1_out"][str(users)], rel=0.15)
