"""Engines in compiled shapes: leaping or not, simulated or live, the records are equal, and times those of programs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from batchsim.cost.work import TIME_TERMS, work_columns
from batchsim.drive.live import VirtualClock, live
from batchsim.drive.simulate import simulate
from batchsim.kernel.core import EngineCore
from batchsim.kernel.record import FINISHED, Records
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.scenario import load_scenario
from batchsim.scenario.setup import Setup
from batchsim.testing.by_hand import same

SCENARIO = """
model: qwen3-8b
max_model_len: 2048
cost: {{kind: linear, base: 2ms, per_token: 30us, per_context_token: 37ns, per_sequence: 5us{shapes}}}
kv: {{tokens: {tokens}, block_size: 16}}
workload:
  arrivals: {{kind: poisson, mean_rate: 6/s}}
  lengths: {{prompt: {{kind: uniform, min: 10, max: 900}}, output: {{kind: uniform, min: 1, max: 60}}}}
  output_cap: 100
  requests: 30
policies: {{{policy}}}
slo: ttft<10s @ 50%
seeds: 1
"""
LIMITS = "max_num_seqs: 8, max_num_batched_tokens: 512"
POLICIES = {
    "vllm_neuron": f"vllm_neuron: {{{LIMITS}}}",
    "vllm": f"vllm: {{{LIMITS}, async_scheduling: false}}",
    "vllm ahead": f"vllm: {{{LIMITS}}}",
    "continuous": f"continuous: {{{LIMITS}}}",
    "prefill first": f"continuous: {{{LIMITS}, order: prefill_first}}",
    "preemptive": f"preemptive: {{{LIMITS}}}",
    "static": "static: {batch_size: 4, max_wait: 1s}",
    "sglang": "sglang: {max_running_requests: 8, chunked_prefill_size: 512}",
    "tensorrt_llm": "tensorrt_llm: {max_batch_size: 8, max_num_tokens: 1024}",
}
CASES = [
    ("preset: neuron", "vllm_neuron"),
    ("preset: neuron, context: [128, 512]", "vllm_neuron"),
    ("preset: nxdi", "vllm_neuron"),
    ("preset: tpu", "vllm"),
    ("preset: tpu, warm: false, compile: 1s", "vllm ahead"),
    ("preset: tpu", "continuous"),
    ("preset: gaudi, compile: 2s", "vllm"),
    ("preset: gaudi, compile: 2s, prompts: 4", "vllm ahead"),
    ("preset: gaudi, compile: 2s, strategy: lin, contiguous: true", "continuous"),
    ("preset: cuda_graphs, eager: 1ms", "preemptive"),
    ("preset: lists, tokens: [4096], requests: [3], context: [1024], beyond: compile, compile: 1s", "static"),
    ("preset: lists, tokens: [256], requests: [4], beyond: exact", "prefill first"),
    ("preset: lists, tokens: [1024], mix: true", "sglang"),
    ("preset: sglang_graphs, eager: 1ms, requests: [1, 2, 4]", "sglang"),
    ("preset: lists, tokens: [1024], mix: true", "tensorrt_llm"),
]


def built(folder: Path, shapes: str, policy: str, tokens: int = 65536) -> Setup:
    path = folder / "shapes.yaml"
    block = f", shapes: {{{shapes}}}" if shapes else ""
    path.write_text(SCENARIO.format(shapes=block, policy=POLICIES[policy], tokens=tokens))
    return Setup.of(load_scenario(str(path)))


def run(setup: Setup, how: str) -> tuple[EngineCore, Records]:
    workload = setup.workload(setup.scenario.loads[0], 0)
    core = setup.engine(setup.scenario.specs[0], workload)
    if how == "live":
        live(core, workload, VirtualClock())
    else:
        simulate(core, workload, leap=how == "leap")
    return core, core.recorder.records()


@pytest.mark.parametrize("tokens", [65536, 3072])
@pytest.mark.parametrize(("shapes", "policy"), CASES)
def test_records_in_shapes_are_equal_in_every_driver(shapes: str, policy: str, tokens: int, tmp_path: Path) -> None:
    """Leaping, stepping and live by a virtual clock, with KV memory to spare and without."""
    setup = built(tmp_path, shapes, policy, tokens)
    core, records = run(setup, "leap")
    same(records, run(setup, "step")[1])
    same(records, run(setup, "live")[1])
    assert (records.requests["outcome"] == FINISHED).all()
    core.check_returned()


@pytest.mark.parametrize(("shapes", "policy"), CASES)
def test_each_recorded_step_takes_what_its_padded_work_does(shapes: str, policy: str, tmp_path: Path) -> None:
    """But for compilations and steps without a program, and for prompts that are not alike: never less than half."""
    core, records = run(built(tmp_path, shapes, policy), "leap")
    executor = core.executor
    assert isinstance(executor, SimExecutor) and executor.pads is not None
    cost = core.executor.cost  # type: ignore[attr-defined]
    terms = cost.explain(work_columns(records.steps))
    rest_ns = records.steps["duration_ns"] - sum(terms[name] for name in TIME_TERMS)
    extra = {"compile": 1_000_000_000, "eager": 1_000_000}
    allowed = [ns for word, ns in extra.items() if word in shapes]
    if "gaudi" in shapes:
        assert (np.abs(rest_ns) < 1_000_000).all()
    else:
        assert set(rest_ns.tolist()) <= {0, *allowed}
    assert ("compile" in shapes and "gaudi" not in shapes) <= bool((rest_ns == 1_000_000_000).any())


def test_a_shape_that_pads_nothing_changes_no_record(tmp_path: Path) -> None:
    """Every size has a program: the steps are those without shapes, whose leaps are other code."""
    every = "preset: lists, mix: true, tokens: [" + ", ".join(map(str, range(1, 513))) + "]"
    for policy in ("vllm", "preemptive"):
        _, records = run(built(tmp_path, every, policy), "leap")
        same(records, run(built(tmp_path, "", policy), "leap")[1])
