"""What a scenario may say of compiled shapes, and one clear line for what does not fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.cost.roofline import Roofline
from batchsim.cost.shapes.config import EngineSizes, ShapesConfig
from batchsim.cost.shapes.engine import check_needs_none
from batchsim.deployment.catalog import ACCELERATORS, GPUS, MODELS
from batchsim.fit.engine_fit import check_fits
from batchsim.scenario import load_scenario
from batchsim.scenario.config import Point
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup

SCENARIO = """
model: {model}
max_model_len: 4096
{cost}
kv: {kv}
workload:
  arrivals: {{kind: poisson, mean_rate: 1/s}}
  lengths: {{prompt: {{kind: fixed, tokens: 100}}, output: {{kind: fixed, tokens: 9}}}}
  output_cap: 20
  requests: 5
policies: {{{policy}}}
slo: ttft<10s @ 50%
"""
NEURON = "vllm_neuron: {max_num_seqs: 8, max_num_batched_tokens: 4096}"
VLLM = "vllm: {max_num_seqs: 8, max_num_batched_tokens: 4096, async_scheduling: false}"
LISTS = "preset: lists, tokens: [64], requests: [4]"


def setup(
    folder: Path,
    shapes: str,
    policy: str = NEURON,
    kv: str = "{tokens: 65536}",
    cost: str = "cost: {{kind: linear, base: 1ms, shapes: {{{shapes}}}}}",
    model: str = "qwen3-8b",
) -> Setup:
    path = folder / "shapes.yaml"
    path.write_text(SCENARIO.format(model=model, cost=cost.format(shapes=shapes), kv=kv, policy=policy))
    return Setup.of(load_scenario(str(path)))


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no preset": ({"shapes": "tokens: [64]"}, "cost.shapes.preset is missing. Add it."),
    "another preset": ({"shapes": "preset: cerebras"}, 'cost.shapes.preset is "cerebras". Write'),
    "an unknown key": ({"shapes": "preset: tpu, buckets: [64]"}, "cost.shapes.buckets is not a field of cost.shapes."),
    "a key of another preset": (
        {"shapes": "preset: tpu, context: [128]"},
        "context is not read with preset tpu, which has compile, gap, memory_per_program, tokens, warm,"
        " warmup_per_program. Leave it out",
    ),
    "a list that falls": (
        {"shapes": "preset: neuron, tokens: [4096, 128]"},
        "tokens [4096, 128] must hold at least one size, each above the one before",
    ),
    "an empty list": ({"shapes": "preset: neuron, requests: []"}, "requests [] must hold at least one size"),
    "a size of nothing": (
        {"shapes": "preset: neuron, requests: [0, 8]"},
        "cost.shapes: requests[0] is 0. It must be from 1",
    ),
    "gaudi without a time": ({"shapes": "preset: gaudi", "policy": VLLM}, "compile is missing: gaudi compiles while"),
    "cold without a time": ({"shapes": "preset: tpu, warm: false", "policy": VLLM}, "compile is missing: there are"),
    "a time without effect": (
        {"shapes": "preset: tpu, compile: 9s", "policy": VLLM},
        "compile has no effect: all programs are compiled before. Write warm: false, or drop it",
    ),
    "lists without one": ({"shapes": "preset: lists, tokens: [64]"}, "requests is missing: preset lists has no list"),
    "lists that mix": ({"shapes": f"{LISTS}, mix: true"}, "requests has no effect with mix: every step runs in a"),
    "eager where nothing is": ({"shapes": f"{LISTS}, eager: 1ms"}, "eager has no effect with beyond: error."),
    "another last bucket": (
        {"shapes": "preset: neuron, requests: [1, 4]"},
        "shapes neuron: requests ends with 4, and the last must be 8, max_num_seqs. Set it so.",
    ),
    "another last token": (
        {"shapes": "preset: neuron, tokens: [128, 8192]"},
        "tokens ends with 8192, and the last must be 4096, the least of max_num_batched_tokens and max_model_len.",
    ),
    "context of no tiles": ({"shapes": "preset: neuron, context: [100]"}, "context [100] must be multiples of 128"),
    "context of all": ({"shapes": "preset: neuron, context: [4096]"}, "below max_model_len 4096"),
    "above the model": (
        {"shapes": "preset: nxdi, context: [8192]"},
        "shapes nxdi: context ends with 8192, above max_model_len 4096. Lower it, or raise max_model_len.",
    ),
    "no slots": (
        {"shapes": "preset: tpu", "policy": "static: {batch_size: 4, max_wait: 1s}"},
        "max_num_batched_tokens, and this policy has none",
    ),
    "drafts": (
        {
            "shapes": "preset: tpu",
            "policy": "vllm: {speculative_config: {method: ngram, num_speculative_tokens: 3, acceptance: 0.5}}",
        },
        "shapes tpu: draft tokens are not simulated in compiled shapes. Leave the drafts out.",
    ),
    "passes": ({"shapes": "preset: tpu", "policy": "llama_cpp: {}"}, "splits its steps into passes of its own sizes"),
    "a pipeline": (
        {
            "shapes": "preset: cuda_graphs",
            "policy": VLLM,
            "cost": "cost: {{kind: roofline, gpu: h200, pp: 2, shapes: {{{shapes}}}}}",
        },
        "shapes cuda_graphs: a pipeline of 2 stages is not simulated in shapes. Set pp to 1.",
    ),
    "a profile": (
        {
            "shapes": "preset: cuda_graphs",
            "policy": VLLM,
            "cost": "deployment: {{engine: vllm, gpu: h100, shapes: {{{shapes}}}}}",
        },
        "shapes cuda_graphs: the profile's steps were measured on a GPU, with the graphs that it replays",
    ),
    "memory of nothing": (
        {"shapes": "preset: neuron, memory_per_program: 1GB"},
        "shapes: memory_per_program is not read: kv.tokens states what is left for KV. Drop one of the two.",
    ),
    "a device without shapes": (
        {"shapes": "", "kv": "{}", "policy": VLLM, "cost": "deployment: {{engine: vllm, gpu: tpu_v6e}}"},
        "tpu_v6e runs steps in compiled shapes alone, of which nothing is said. Write shapes: {preset: tpu}, or",
    ),
    "too many programs": (
        {
            "shapes": "preset: gaudi, strategy: lin, compile: 1s, prompts: 64",
            "policy": "vllm: {max_num_seqs: 64, max_num_batched_tokens: 65536}",
        },
        "67,108,864 combinations of batches, queries and contexts, and 100,000 are the most. Take strategy: exp",
    ),
    "no room": (
        {
            "shapes": "preset: neuron, memory_per_program: 20GB",
            "kv": "{}",
            "cost": "cost: {{kind: roofline, gpu: trainium2, shapes: {{{shapes}}}}}",
        },
        "10 programs keep",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_clear_line(mistake: str, tmp_path: Path) -> None:
    given, expected = MISTAKES[mistake]
    with pytest.raises(ScenarioError) as refused:
        setup(tmp_path, **given)
    (line,) = refused.value.lines
    assert expected in line and line.startswith(f"{tmp_path}/shapes.yaml:"), line


def test_programs_take_their_memory_from_that_for_kv(tmp_path: Path) -> None:
    """Ten programs of 1 GB are 4,239 blocks of 16 tokens of 147,456 bytes; warm-up is told beside them."""
    cost = "cost: {{kind: roofline, gpu: trainium2, shapes: {{{shapes}}}}}"
    free = setup(tmp_path, "preset: neuron", kv="{}", cost=cost)
    held = setup(tmp_path, "preset: neuron, memory_per_program: 1GB, warmup_per_program: 6min", kv="{}", cost=cost)
    lost = -(-10_000_000_000 // (16 * 147_456))
    assert free.kv.num_blocks - held.kv.num_blocks == lost
    assert held.kv.terms.endswith(f" − {lost:,} blocks for 10 compiled programs")
    assert "shapes: neuron, 6 of prompts, 4 of decodes, warm-up 3,600 s, 10.0 GB kept" in held.cost_text


def test_gaudis_graphs_take_a_tenth_of_the_memory_for_kv(tmp_path: Path) -> None:
    cost = "cost: {{kind: roofline, gpu: gaudi3, shapes: {{{shapes}}}}}"
    every = setup(tmp_path, "preset: gaudi, compile: 20s, graph_memory: 0%", VLLM, "{}", cost).kv.num_blocks
    assert setup(tmp_path, "preset: gaudi, compile: 20s", VLLM, "{}", cost).kv.num_blocks == every - every // 10


def test_shapes_of_a_deployment_on_an_accelerator_without_tables(tmp_path: Path) -> None:
    """A deployment on Trainium2 takes the roofline of its sheet, and says that nothing of it was measured."""
    cost = "deployment: {{engine: vllm, gpu: trainium2, shapes: {{{shapes}}}}}"
    built = setup(tmp_path, "preset: neuron", kv="{}", cost=cost)
    assert "nothing of trainium2, assumed to reach the same shares as h100" in "".join(built.cost.sources())
    assert "shapes: neuron, 6 of prompts, 4 of decodes" in built.cost_text


def test_default_lists_follow_from_the_limits() -> None:
    """Neuron: tokens from 128 to the budget or the model, requests to the slots; a TPU's budget in steps of 16."""
    engine = EngineSizes(24, 1000, 4096, 16, 1000)
    neuron, tpu = ShapesConfig("neuron").build(engine), ShapesConfig("tpu").build(engine)
    assert neuron.prefill.buckets == ((1, 128), (1, 256), (1, 512), (1, 1000))
    assert neuron.decode.buckets == ((1,), (2,), (4,), (8,), (16,), (24,))
    assert tpu.decode.buckets[-1] == (1008,) and tpu.mixed is tpu.prefill
    gap = ShapesConfig("tpu", gap=256).build(engine)
    assert [size for (size,) in gap.decode.buckets] == [16, 32, 64, 128, 256, 512, 768, 1008]


def test_what_shapes_cannot_be_is_refused_before_it_begins(tmp_path: Path) -> None:
    """A real run, and a fit of step costs to measured runs."""
    stated = setup(tmp_path, "preset: neuron")
    with pytest.raises(ScenarioError, match="shapes neuron: compiled shapes can only be simulated, a real run has its"):
        stated.check_can_be_real()
    with pytest.raises(ScenarioError, match="shapes: a fit of step costs in compiled shapes is not made"):
        check_fits(stated)


def test_costs_of_ones_own_are_padded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that counts rows is asked for those of the program."""
    (tmp_path / "own_rows.py").write_text(
        "from batchsim.cost.own_cost import OwnCost\nfrom dataclasses import dataclass\n@dataclass(frozen=True,"
        " kw_only=True)\nclass Rows(OwnCost):\n    def step_ns(self, step):\n        return 1000 * (1 +"
        " step.num_decode + step.pad_decode_rows)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "shapes.yaml"
    cost = 'cost: {kind: "own_rows:Rows", shapes: {preset: lists, tokens: [128], requests: [6]}}'
    path.write_text(SCENARIO.format(model="qwen3-8b", cost=cost, kv="{tokens: 65536}", policy=NEURON))
    scenario = load_scenario(str(path), allow_code=True)
    run = simulate_point(Setup.of(scenario), Point(scenario.specs[0], scenario.loads[0], 0))
    steps = run.records.steps
    assert set(steps["duration_ns"][steps["num_decode"] > 0].tolist()) == {7_000}


def test_every_accelerator_says_which_shapes_it_needs() -> None:
    """And has the figures of its sheet, from the documents that the catalog names."""
    figures = {
        "trainium2": (96 * 2**30, 2.9e12, 667e12, 1299e12),
        "inferentia2": (32 * 2**30, 820e9, 190e12, 190e12),
        "tpu_v5e": (15_258 * 2**20, 819e9, 197e12, None),
        "tpu_v6e": (30_517 * 2**20, 1.638e12, 918e12, None),
        "gaudi3": (122_070 * 2**20, 3.67e12, 1835e12, 1835e12),
    }
    assert set(ACCELERATORS) == set(figures)
    for name, figure in figures.items():
        gpu = GPUS[name]
        assert (gpu.memory_bytes, gpu.memory_bandwidth, gpu.peak_flops, gpu.fp8_flops) == figure
        assert gpu.source == ACCELERATORS[name] and gpu.efficiencies.error_p50 is None
        with pytest.raises(
            ScenarioError, match=rf"{name} runs steps in compiled shapes alone.*Write shapes: \{{preset"
        ):
            check_needs_none(Roofline(MODELS["qwen3-8b"], gpu))


def test_a_replica_that_is_added_is_not_there_before_its_programs(tmp_path: Path) -> None:
    """Seven programs of 10 s each, and a cold start of a minute."""
    scaler = "{kind: hpa, metrics: {waiting: 4}, every: 15s, min: 1, max: 2, cold_start: COLD}"
    more = f"replicas: {{count: 1, router: round_robin, autoscaler: {scaler}}}"
    cost = "cost: {{kind: linear, base: 1ms, shapes: {{{shapes}}}}}\n" + more.replace("{", "{{").replace("}", "}}")
    shapes = "preset: neuron, tokens: [1024, 2048, 4096], warmup_per_program: 10s"
    with pytest.raises(ScenarioError, match=r"warm-up 70 s: replicas.autoscaler.cold_start 60 s is shorter than that"):
        setup(tmp_path, shapes, cost=cost.replace("COLD", "60s"))
    assert setup(tmp_path, shapes, cost=cost.replace("COLD", "70s")).groups
