"""Published steps of Trainium2 under vLLM Neuron, from one or two of its own costs.

Qwen3-8B on one chip: prompts of 3,460 tokens in the bucket of 4,096, 50 output tokens, one decode program of all slots.
The decode and the prompt were measured with one request at a time; requests a second under full load were not used.
Gemma 4 31B on 32 cores: time to the first token by bucket.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
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
cost: {{{cost}, shapes: {{preset: neuron, tokens: {buckets}, requests: [{slots}]}}}}
kv: {{tokens: {tokens}, block_size: 4096}}
workload:
  arrivals: {{kind: closed_loop, users: {users}, think_time: 0s{order}}}
  lengths: {{{lengths}}}
  output_cap: {output}
  requests: {requests}
policies: {{vllm_neuron: {{max_num_seqs: {slots}, max_num_batched_tokens: 4096}}}}
slo: ttft<60s @ 50%
seeds: 1
"""
SHIPPED = "kind: linear, base: 3ms, per_token: 62500ns, per_context_token: 2100ns"
"""The cost of the scenario `trainium`."""


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    if "BATCHSIM_MEASURED" not in os.environ or not FILE.exists():
        pytest.skip("BATCHSIM_MEASURED names no folder with published/trainium.json")
    return json.loads(FILE.read_text())


@pytest.fixture(scope="module")
def measured(published: dict[str, Any]) -> dict[str, Any]:
    return published["qwen3_8b"]


def recorded(
    folder: Path,
    cost: str,
    *sets: str,
    slots: int = 1,
    users: int = 1,
    output: int = 50,
    prompts: tuple[int, ...] = (),
    buckets: tuple[int, ...] = (4096,),
) -> tuple[float, Records]:
    """(Requests a second, the records) of a closed loop; of `prompts` each once, else 12 of 3,460 tokens a user."""
    prompt = f"prompt: {{kind: fixed, tokens: 3460}}, output: {{kind: fixed, tokens: {output}}}"
    text = SCENARIO.format(
        cost=cost,
        buckets=list(buckets),
        slots=slots,
        users=users,
        output=output,
        order=", shared_list: true" if prompts else "",
        lengths=f"kind: list, prompt: {list(prompts)}, output: {[output] * len(prompts)}" if prompts else prompt,
        tokens=4096 * slots,
        requests=len(prompts) or 12 * users,
    )
    path = folder / "trainium.yaml"
    path.write_text(text)
    scenario = load_scenario(str(path), overrides=sets)
    run = simulate_point(Setup.of(scenario), Point(scenario.specs[0], scenario.loads[0], 0))
    return len(run.records.requests) * NS_PER_S / run.end_ns, run.records


def simulated(folder: Path, decode_ms: float, slots: int, users: int, output: int = 50) -> tuple[float, Records]:
    """The same where a prompt takes 259 ms and a decode of all slots `decode_ms`."""
    decode_ns = round(decode_ms * 1e6)
    # Of a program of 4,096 tokens and one of as many rows as slots: two times, and which of the parts differs.
    token = (PREFILL_NS - decode_ns) // (4096 - slots) if slots < 16 else 0
    sequence = (decode_ns - PREFILL_NS) // (slots - 1) if slots == 16 else 0
    base = decode_ns - slots * (token + sequence)
    cost = f"kind: linear, base: {base}ns, per_token: {token}ns, per_sequence: {sequence}ns"
    return recorded(folder, cost, slots=slots, users=users, output=output)


def durations_ms(records: Records) -> tuple[float, float]:
    """(The step of a prompt, that of a decode), each alike in all steps."""
    steps = records.steps
    (prompt,) = set(steps["duration_ns"][steps["num_chunks"] > 0].tolist())
    (decode,) = set(steps["duration_ns"][steps["num_decode"] > 0].tolist())
    return prompt / 1e6, decode / 1e6


def off(value: float, reference: float) -> float:
    return round(100 * (value / reference - 1), 1)


@pytest.mark.parametrize(("slots", "expected"), [(1, -1.5), (2, -2.0), (4, -2.1), (8, -0.9), (16, -1.4)])
def test_the_peak_rate_follows_from_one_prompt_a_step_and_whole_decodes(
    slots: int, expected: float, measured: dict[str, Any], tmp_path: Path
) -> None:
    """n prompts one after another, then 49 decodes: n / (n · 259 ms + 49 · decode), within 2.1 % of the measured."""
    decode_ms = measured["decode_ms_per_step"][str(slots)]
    rate, _ = simulated(tmp_path, decode_ms, slots, users=slots)
    assert rate == pytest.approx(slots / (slots * 0.259 + 49 * decode_ms / 1e3), rel=1e-4)
    assert off(rate, measured["peak_rps"][str(slots)]) == expected


@pytest.mark.parametrize("users", [1, 4, 8, 16])
def test_a_step_costs_its_program_whatever_runs_in_it(users: int, measured: dict[str, Any], tmp_path: Path) -> None:
    """16 slots with fewer users: every decode takes 259.15 ms, every prompt 259 ms, and the rates are the measured."""
    rate, records = simulated(tmp_path, measured["decode_ms_per_step"]["16"], 16, users)
    steps = records.steps
    assert durations_ms(records) == (259, 259.15)
    assert (steps["num_decode"] + steps["pad_decode_rows"])[steps["num_decode"] > 0].tolist() == [16] * (
        (steps["num_decode"] > 0).sum()
    )
    assert rate == pytest.approx(measured["rps_by_concurrency_16_slots_50_out"][str(users)], rel=0.015)
    if users == 1:
        requests = records.requests
        e2e_s = np.median(requests["delivered_ns"] - requests["arrival_ns"]) / NS_PER_S
        assert e2e_s == pytest.approx(measured["e2e_p50_s_concurrency_1"], rel=1e-4)


@pytest.mark.parametrize(("users", "expected"), [(1, -1.2), (4, -6.0), (8, -6.0), (16, -6.0)])
def test_prompts_alone_are_within_15_per_cent_of_the_measured(
    users: int, expected: float, measured: dict[str, Any], tmp_path: Path
) -> None:
    """With one output token only prompts are computed, at the one measured cost: 3.86 requests a second for 3.9 to
    4.1."""
    rate, _ = simulated(tmp_path, measured["decode_ms_per_step"]["16"], 16, users, output=1)
    assert rate == pytest.approx(1 / 0.259, rel=1e-6)
    assert off(rate, measured["rps_by_concurrency_1_out"][str(users)]) == expected


@pytest.mark.parametrize(("slots", "expected"), [(1, 3.5), (2, -16.9), (4, -7.0), (8, 0.0), (16, -45.3)])
def test_what_the_shipped_scenario_assumes_of_other_programs(
    slots: int, expected: float, measured: dict[str, Any], tmp_path: Path
) -> None:
    """Its cost is that of the decode of 8 slots and of the prompt; programs of other sizes are in proportion."""
    prompt, decode = durations_ms(recorded(tmp_path, SHIPPED, slots=slots, users=slots)[1])
    assert prompt == pytest.approx(259, abs=0.01)
    assert off(decode, measured["decode_ms_per_step"][str(slots)]) == expected


@pytest.mark.parametrize(("factor", "expected"), [("decode", (-29.6, 0.0)), ("prompt", (0.0, 42.0))])
def test_one_factor_on_the_sheet_meets_the_prompt_or_the_decode(
    factor: str, expected: tuple[float, float], measured: dict[str, Any], tmp_path: Path
) -> None:
    """The chip's sheet has 130 ms for the prompt, 2.0 times too fast, and 8.0 ms for the decode of one slot, 1.4 times:
    with either right, the other is 30 or 42 % off."""
    sheet = "kind: roofline, gpu: trainium2"
    real = {"prompt": 1e3 * measured["prefill_s"], "decode": measured["decode_ms_per_step"]["1"]}
    prompt, decode = durations_ms(recorded(tmp_path, sheet)[1])
    all_slots = durations_ms(recorded(tmp_path, sheet, slots=16, users=16)[1])[1]
    assert (round(prompt), round(decode, 1), round(all_slots, 1)) == (130, 8.0, 11.5)
    by = real[factor] / {"prompt": prompt, "decode": decode}[factor]
    prompt, decode = durations_ms(recorded(tmp_path, sheet, f"cost_factor={by}")[1])
    assert (off(prompt, real["prompt"]), off(decode, real["decode"])) == expected


def test_prompts_of_gemma_by_bucket_from_the_smallest_and_the_largest(
    published: dict[str, Any], tmp_path: Path
) -> None:
    """Between its buckets of 512 and 4,096 tokens a line: of 1,024 and 2,048 it is within 7 %, and so the mean."""
    gemma = published["gemma4_31b"]
    ttft, buckets = {int(size): ms for size, ms in gemma["ttft_ms"].items()}, (512, 1024, 2048, 4096)
    token = (ttft[4096] - ttft[512]) / (4096 - 512)
    cost = f"kind: linear, base: {ttft[512] - 512 * token:.6f}ms, per_token: {1e6 * token:.3f}ns"
    _, records = recorded(tmp_path, cost, output=1, prompts=(300, 700, 1024, 1025, 3460), buckets=buckets)
    requests = records.requests
    times = (requests["delivered_ns"] - requests["arrival_ns"]) / 1e6
    assert times[1] == times[2]  # in the same bucket
    of = dict(zip(buckets, times[[0, 1, 3, 4]].tolist(), strict=True))
    assert [off(of[size], ttft[size]) for size in buckets] == [0, 3.9, 6.3, 0]
    mean = sum(share * of[int(size)] for size, share in gemma["mix"].items())
    assert off(mean, gemma["weighted_ttft_ms"]) == 2.5
