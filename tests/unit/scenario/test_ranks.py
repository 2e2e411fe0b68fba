"""Scenarios with `dp_attention`: the replicas that it is, what it is refused for, and what a run leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from batchsim.base.errors import ScenarioError
from batchsim.deployment.catalog import load_gpu
from batchsim.drive.fleet.lockstep.lockstep_config import LockstepConfig
from batchsim.metrics.attribution import attribute
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm_config import TensorrtLlmConfig
from batchsim.results.keep import metric_names
from batchsim.scenario import load_scenario
from batchsim.scenario.point import simulate_point
from batchsim.scenario.ranks import graph_sizes, of_rank
from batchsim.scenario.setup import Setup
from batchsim.testing.life_sums import check_lives

SCENARIO = """
model: Qwen/Qwen3-30B-A3B
cost: {kind: linear, base: 5ms, per_token: 20us}
kv: {tokens: 20000}
dp_attention: 4
workload:
  arrivals: {kind: poisson, mean_rate: 20/s}
  lengths: {prompt: {kind: uniform, min: 50, max: 900}, output: {kind: uniform, min: 5, max: 60}}
  output_cap: 64
  duration: 4s
policies: {vllm: {}}
slo: ttft<500ms @ 90%
seeds: 1
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "ranks.yaml"
    file.write_text(SCENARIO)
    return str(file)


def setup_of(path: str, *overrides: str) -> Setup:
    return Setup.of(load_scenario(path, overrides=overrides))


def test_dp_attention_is_replicas_in_lockstep(path: str) -> None:
    """The number alone, and options of it by --set; 1 is one engine."""
    replicas = load_scenario(path).file.replicas
    assert replicas is not None and replicas.lockstep is not None
    assert (replicas.count, replicas.lockstep.sync_interval, replicas.lockstep.message) == (4, 16, 0)
    changed = load_scenario(path, overrides=["dp_attention=8", "dp_attention.message=50us"]).file.replicas
    assert changed is not None and changed.lockstep is not None
    assert (changed.count, changed.lockstep.message) == (8, 50_000)
    assert load_scenario(path, overrides=["dp_attention=1"]).file.replicas is None


def test_a_run_has_the_parts_and_the_shares_of_ranks(path: str) -> None:
    """Requests wait for ranks, and the share of dummies is measured."""
    setup = setup_of(path)
    point = setup.scenario.points()[0]
    names = metric_names(setup, point)
    assert {"idle_rank_share", "attr_waiting_for_ranks_share", "attr_padding_of_ranks_share"} <= {*names}
    records = simulate_point(setup, point).records
    assert {"waiting_for_ranks", "padding_of_ranks"} <= {*attribute(records)["part"]}
    check_lives(records)
    assert records.replicas is not None
    assert len({*np.bincount(records.replicas.steps).tolist()}) == 1


def test_messages_name_the_key_that_is_written(path: str) -> None:
    """And never the replicas that ranks are."""
    for override in ("dp_attention={ranks: 5000}", "dp_attention={ranks: 2, graphs: 1}", "dp_attention={ranks: 2.5}"):
        with pytest.raises(ScenarioError, match="dp_attention") as error:
            setup_of(path, override)
        assert "replicas" not in str(error.value)


def test_ranks_of_sglang_have_their_part_of_its_limits(path: str) -> None:
    """A chunk and what runs are divided among them, and less of the outputs is reserved; idle ranks run all passes."""
    knobs = "policies={sglang: {chunked_prefill_size: 2048, max_running_requests: 10}}"
    setup = setup_of(path, knobs, "load={mean_rate: [60/s]}")
    config = of_rank(setup.scenario.specs[0].config, 4)
    assert isinstance(config, SglangConfig)
    assert (config.chunked_prefill_size, config.max_running_requests, config.schedule_conservativeness) == (512, 2, 0.3)
    records = simulate_point(setup, setup.scenario.points()[0]).records
    check_lives(records)
    assert (records.steps["num_prefill_tokens"].max(), records.steps["num_running"].max()) == (512, 2)
    assert records.replicas is not None
    assert len({*np.bincount(records.replicas.steps).tolist()}) == 1
    assert {"waiting_for_ranks", "padding_of_ranks"} <= {*attribute(records)["part"]}


@pytest.mark.parametrize(
    ("gib", "few", "many"), [(16, 8, 8), (24, 48, 160), (48, 32, 160), (80, 256, 512), (141, 256, 512), (180, 512, 512)]
)
def test_the_largest_graph_of_sglang_is_by_the_gpus_memory(gib: int, few: int, many: int) -> None:
    """Of fewer than 4 GPUs in all, and of more; never above what a rank runs; with eager and TensorRT-LLM none."""
    gpu, config, graphs = replace(load_gpu("h100"), memory_bytes=gib * 2**30), SglangConfig(), LockstepConfig()
    assert graph_sizes(config, graphs, gpu, 2, 1)[-1] == few
    assert graph_sizes(config, graphs, gpu, 2, 2)[-1] == many == graph_sizes(config, graphs, gpu, 4, 1)[-1]
    assert graph_sizes(replace(config, max_running_requests=7), graphs, gpu, 4, 1) == [1, 2, 4, 7]
    assert graph_sizes(config, LockstepConfig(eager=True), gpu, 4, 1) == []
    assert graph_sizes(TensorrtLlmConfig(), graphs, gpu, 4, 1) == []


def test_ranks_of_tensorrt_llm_share_a_queue(path: str) -> None:
    """None has more than its slots, all run every pass, and none is padded."""
    setup = setup_of(path, "policies={tensorrt_llm: {max_batch_size: 3}}", "load={mean_rate: [60/s]}")
    records = simulate_point(setup, setup.scenario.points()[0]).records
    check_lives(records)
    assert records.steps["num_running"].max() == 3
    assert not records.steps["pad_prefill_tokens"].any()
    assert {*records.steps["pad_decode_rows"].tolist()} == {0, 1}
    assert records.replicas is not None
    assert len({*np.bincount(records.replicas.steps).tolist()}) == 1


def test_without_graphs_no_rank_is_padded(path: str) -> None:
    """Dummies aside, which are of one token."""
    steps = simulate_point(s := setup_of(path, "dp_attention.eager=true"), s.scenario.points()[0]).records.steps
    assert not steps["pad_prefill_tokens"].any()
    assert {*steps["pad_decode_rows"].tolist()} == {0, 1}


MISTAKES = {
    "no_number": ("dp_attention=many", "dp_attention is 'many'. Write dp_attention: 8"),
    "one_rank": ("dp_attention={ranks: 1, eager: true}", "1 ranks step together. Write from 2"),
    "unknown_option": ("dp_attention={ranks: 2, graphs: true}", "graphs is not a field"),
    "no_interval": ("dp_attention.sync_interval=0", "sync_interval"),
    "too_many_servers": ("dp_attention.api_servers=9", "9 api_servers for 4 ranks"),
    "router": ("replicas.router=round_robin", "router is not simulated for ranks"),
    "dense": ("model=llama-3.1-8b", "has no experts, and vLLM's data-parallel ranks of it are engines that do not"),
    "other_policy": ("policies={orca: {}}", "only ranks of vllm, sglang, tensorrt_llm are simulated"),
    "waves_of_sglang": ("sglang&dp_attention.sync_interval=8", "dp_attention.sync_interval is of vLLM's ranks"),
    "waves_as_they_are": ("sglang&dp_attention.sync_interval=16", "dp_attention.sync_interval is of vLLM's ranks"),
    "messages_of_sglang": ("sglang&dp_attention.message=5us", "dp_attention.message is of vLLM's ranks"),
    "servers_of_sglang": ("sglang&dp_attention.api_servers=2", "dp_attention.api_servers is of vLLM's ranks"),
    "dense_sglang": (
        "sglang&model=llama-3.1-8b",
        "what ranks of SGLang and TensorRT-LLM share of its MLPs is not simulated",
    ),
    "polls": ("sglang&policies.sglang.scheduler_recv_interval=4", "scheduler_recv_interval is not simulated for ranks"),
    "eager_tensorrt_llm": ("tensorrt_llm&dp_attention.eager=true", "and TensorRT-LLM's have none. Leave it out"),
    "cpp_runtime": ("tensorrt_llm&policies.tensorrt_llm.backend=tensorrt", "ranks are of the PyTorch runtime"),
    "chunk_of_parts_of_pages": (
        "sglang&policies.sglang.chunked_prefill_size=2000",
        "2000 is divided among 4 ranks, and 500 tokens are no whole pages, here KV blocks of 16. Set a multiple of 64.",
    ),
    "short_chunk": ("sglang&policies.sglang.chunked_prefill_size=-3", "chunked_prefill_size"),
    "drafts_of_sglang": (
        "sglang&policies.sglang={speculative_algorithm: EAGLE, speculative_num_steps: 3, speculative_eagle_topk: 1,"
        " speculative_num_draft_tokens: 4, acceptance: 0.7}",
        "Leave out speculative_algorithm",
    ),
    "drafts": (
        "policies.vllm.speculative_config={method: mtp, num_speculative_tokens: 2, acceptance: 0.7}",
        "drafts are not simulated for ranks",
    ),
    "one_beside_several": (
        "vary={dp_attention: [1, 2]}",
        "vary dp_attention, value 2: one engine beside several, whose tables have other columns",
    ),
    "shapes": ("cost.shapes={preset: cuda_graphs}", "shapes: ranks are padded to their engine's own sizes"),
    "tiers": ("kv.tiers=[{size: 10GB, bandwidth: 50GB/s}]", "tiers of KV are not simulated for ranks"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_not_simulated_is_refused_in_one_line(path: str, mistake: str) -> None:
    """With where, what and what to do."""
    override, message = MISTAKES[mistake]
    engine, _, other = override.partition("&")
    overrides = [f"policies={{{engine}: {{}}}}", other] if other else [override]
    with pytest.raises(ScenarioError) as error:
        setup_of(path, *overrides)
    text = str(error.value)
    assert message in text
    assert "\n" not in text


def test_ranks_beside_replicas_of_the_file_are_refused(tmp_path: Path) -> None:
    """Also beside some that step together, of which a router or a number would be passed over."""
    file = tmp_path / "both.yaml"
    for lockstep in ("lockstep: {}", "lockstep: 3", "router: round_robin"):
        file.write_text(f"{SCENARIO}replicas: {{count: 8, {lockstep}}}\n")
        with pytest.raises(ScenarioError, match="dp_attention and replicas are both given"):
            setup_of(str(file))
        with pytest.raises(ScenarioError, match="dp_attention and replicas are both given"):
            setup_of(str(file), "dp_attention.eager=true")


def test_tasks_of_ranks_are_refused(path: str) -> None:
    stage = "{prompt: {kind: fixed, tokens: 40}, output: {kind: fixed, tokens: 8}}"
    with pytest.raises(ScenarioError, match="tasks are not simulated for ranks that step together"):
        setup_of(path, f"workload.tasks={{stages: [{stage}]}}", "workload.lengths=null")


def test_constrained_answers_of_ranks_are_refused(path: str) -> None:
    with pytest.raises(ScenarioError, match="constrained answers are not simulated for ranks that step together"):
        setup_of(path, "workload.structured=50%", "structured_cost={step: 10us, per_request: 10us}")


DEPLOYED = SCENARIO.replace("dp_attention: 4\n", "").replace(
    "model: Qwen/Qwen3-30B-A3B", "model: deepseek-ai/DeepSeek-R1"
)
DEPLOYED = DEPLOYED.replace(
    "cost: {kind: linear, base: 5ms, per_token: 20us}",
    "deployment: {engine: vllm, gpu: h200, dp_attention: 8, ep: 8}",
)


@pytest.fixture
def deployed(tmp_path: Path) -> str:
    file = tmp_path / "deployed.yaml"
    file.write_text(DEPLOYED)
    return str(file)


def test_the_groups_of_a_deployment_are_ranks(deployed: str) -> None:
    """Each an engine on its own GPUs; with options by their own key, and none where --set leaves one group."""
    setup = setup_of(deployed)
    replicas = setup.scenario.file.replicas
    assert replicas is not None and replicas.lockstep is not None
    assert (replicas.count, setup.num_gpus) == (8, 1)
    eager = load_scenario(deployed, overrides=["dp_attention.eager=true"]).file.replicas
    assert eager is not None and eager.lockstep is not None
    assert (eager.count, eager.lockstep.eager) == (8, True)
    alone = ["deployment.dp_attention=1", "deployment.ep=1", "deployment.tp=8"]
    assert load_scenario(deployed, overrides=alone).file.replicas is None


def test_their_passes_last_as_the_slowest_ranks_and_the_experts_of_all(deployed: str) -> None:
    """What a step of a rank takes besides its waiting: its own kernels and the experts' share."""
    setup = setup_of(deployed, "load={mean_rate: [20/s]}")
    point = setup.scenario.points()[0]
    records = simulate_point(setup, point).records
    check_lives(records)
    cost = setup.groups[0].setup.cost_under(point.spec.config)
    assert cost.experts_ns(8, decodes=True) > 0
    assert records.steps["duration_ns"].min() > int(cost.experts_ns(8, decodes=True))


DEPLOYED_MISTAKES = {
    "other_number": ("dp_attention=4", "dp_attention has 4 ranks, and deployment.dp_attention 8 groups, which are"),
    "replicas": ("replicas={count: 2, router: round_robin}", "dp_attention 8: so many schedulers"),
    "anchor": ("deployment.anchor={concurrency: 4, tpot: 20ms}", "anchor is not simulated for ranks"),
    "power_cap": ("deployment.power_cap=600W", "power_cap is not simulated for ranks"),
    "other_engine": ("deployment.engine=sglang", "vllm is of kind vllm, and the deployment's ranks are of sglang"),
}


@pytest.mark.parametrize("mistake", DEPLOYED_MISTAKES)
def test_what_a_deployment_of_ranks_cannot_have(deployed: str, mistake: str) -> None:
    if mistake == "other_engine":  # no profile of which comes with batchsim
        pytest.importorskip("aiconfigurator_core", reason="aiconfigurator-core (extra gpus) is not installed")
    override, message = DEPLOYED_MISTAKES[mistake]
    with pytest.raises(ScenarioError) as error:
        setup_of(deployed, override)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_deployment_of_one_group_is_no_rank(tmp_path: Path) -> None:
    """Its experts are on all ranks."""
    file = tmp_path / "deployed.yaml"
    deployment = "deployment: {engine: vllm, gpu: h200_sxm}"
    file.write_text(SCENARIO.replace("cost: {kind: linear, base: 5ms, per_token: 20us}", deployment))
    with pytest.raises(ScenarioError, match=r"deployed.yaml:5: dp_attention has 4 ranks, and the deployment one"):
        setup_of(str(file))


def test_it_is_given_beside_no_other_replicas(tmp_path: Path) -> None:
    """Nor without a number of ranks."""
    file = tmp_path / "both.yaml"
    file.write_text(SCENARIO + "replicas: {count: 2, router: round_robin}\n")
    with pytest.raises(ScenarioError, match=r"both.yaml:5: .*dp_attention and replicas are both given"):
        load_scenario(str(file))
    file.write_text(SCENARIO.replace("dp_attention: 4", "dp_attention: {sync_interval: 4}"))
    with pytest.raises(ScenarioError, match=r"both.yaml:5: dp_attention has no ranks"):
        load_scenario(str(file))


@pytest.mark.parametrize("key", ["deadline=2s", "patience={mean: 2s, kind: exponential}"])
def test_requests_that_leave_are_refused_in_the_queue_that_ranks_of_tensorrt_llm_share(key: str) -> None:
    """No rank has them then; vLLM's ranks have each its own."""
    changes = ["model=Qwen/Qwen3-30B-A3B", "cost={kind: linear, base: 8ms}", "kv.tokens=60000", "dp_attention=4"]
    for kind in ("vllm", "tensorrt_llm"):
        scenario = load_scenario("bursty", overrides=[*changes, f"policies={{{kind}: {{}}}}", f"workload.{key}"])
        if kind == "vllm":
            Setup.of(scenario)
            continue
        with pytest.raises(
            ScenarioError, match="deadlines and patience under tensorrt_llm are not simulated for ranks"
        ):
            Setup.of(scenario)
