"""What ranks of one model that step together need of a scenario."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from batchsim.base.errors import ScenarioError
from batchsim.cost.base import Cost
from batchsim.cost.calibrated import Calibrated
from batchsim.cost.one_group import of_one_group
from batchsim.cost.scaled import Scaled
from batchsim.cost.shapes.lists import sglang_graph_sizes, vllm_graph_sizes
from batchsim.deployment.deployment import Deployment
from batchsim.deployment.memory import KvBudget
from batchsim.deployment.model import GpuSpec, ModelSpec
from batchsim.drive.fleet.lockstep.lockstep_config import LockstepConfig
from batchsim.kernel.policy_config import PolicyConfig
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm_config import TensorrtLlmConfig
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from batchsim.scenario.config import PolicySpec, Scenario, ScenarioFile
from batchsim.scenario.deployment_config import DeploymentConfig
from batchsim.scenario.rank_forms import ENGINES, KEY
from batchsim.scenario.request_kinds import features
from batchsim.workload.workload_config import WorkloadConfig

SGLANG_CONSERVATIVENESS = 0.3
"""By what SGLang multiplies the part of outputs that is reserved where it has attention groups."""
_USUAL_GIB = 80
"""Memory of a GPU that is not known, like an H100's."""
_SGLANG_GRAPHS = ((20, 8, 8), (35, 48, 160), (60, 32, 160), (160, 256, 512))
"""(GiB, requests, requests): the largest decode that SGLang captures on GPUs of less memory, below 4 GPUs and above.
With more memory: 512."""


def check_ranks(scenario: Scenario, model: ModelSpec, cost: Cost, kv: KvBudget) -> None:
    """ScenarioError for what is not simulated of ranks that step together, if the scenario has some."""
    file = scenario.file
    replicas = file.replicas
    if replicas is None or replicas.lockstep is None:
        return
    if not any(kind.mlp.kind == "experts" for kind in model.kinds):
        if any(spec.kind in ("sglang", "tensorrt_llm") for spec in scenario.specs):
            raise ScenarioError(
                f"{model.name} has no experts, and what ranks of SGLang and TensorRT-LLM share of its MLPs is not"
                f" simulated. Leave out {KEY}, or choose a model with experts."
            )
        raise ScenarioError(
            f"{model.name} has no experts, and vLLM's data-parallel ranks of it are engines that do not wait for each"
            f" other. Write replicas: {{count: {replicas.count}, router: shortest_queue}} instead of {KEY}."
        )
    _check_cost(file.cost, cost, replicas.total)
    written = scenario.plain["replicas"]["lockstep"] or {}
    for spec in scenario.specs:
        _check_policy(spec, cost.deployment)
        if spec.kind != "vllm":
            _check_options(spec, written)
        if isinstance(spec.config, SglangConfig):
            _check_sglang(spec.name, spec.config, replicas.total, kv.block_size)
    _check_memory(file, cost)
    others = features(file, "LoRA adapters", "images, audios and videos", "models that make no tokens")
    others |= features(file, "constrained answers", "tasks", "rollouts", "offline jobs")
    others |= {"groups of KV blocks": kv.layout is not None, "pools of KV apart": kv.pools is not None}
    others["tiers of KV"] = bool(file.kv.tiers)
    if any(spec.kind == "tensorrt_llm" for spec in scenario.specs):
        others["deadlines and patience under tensorrt_llm"] = _may_leave(file.workload)
    for what in (what for what, asked in others.items() if asked):
        raise ScenarioError(f"{what} are not simulated for ranks that step together. Drop them, or {KEY}.")


def _may_leave(workload: WorkloadConfig) -> bool:
    """Whether requests may end before any rank has taken them."""
    parts = (workload, *workload.classes.values())
    of_rows = workload.trace is not None and workload.trace.columns is not None and workload.trace.columns.deadline
    return bool(of_rows) or any(part.deadline is not None or part.patience is not None for part in parts)


def check_one_scheduler(scenario: Scenario, cost: Cost) -> None:
    """ScenarioError if the deployment has attention groups that schedule for themselves, and they are no ranks."""
    replicas, deployment = scenario.file.replicas, cost.deployment
    if deployment is not None and (replicas is None or replicas.lockstep is None):
        deployment.check_one_scheduler()


def shares_experts(cost: Cost) -> bool:
    """Whether `cost` is of a deployment with attention groups that share experts."""
    return cost.deployment is not None and cost.deployment.dp_attention > 1


def of_one_rank(cost: Cost) -> Cost:
    """`cost` for the steps of one rank: where its deployment has several attention groups, without their experts."""
    if not shares_experts(cost):
        return cost
    if isinstance(cost, Scaled):
        return replace(cost, cost=of_one_rank(cost.cost))
    assert isinstance(cost, Calibrated), "checked by check_ranks"
    return of_one_group(cost)


def _check_cost(stated: Any, cost: Cost, ranks: int) -> None:
    deployment = cost.deployment
    if deployment is not None and (cost.profile is None or deployment.dp_attention > 1):
        apart = cost.profile is not None and cost.profile.costs.experts is not None
        if not isinstance(stated, DeploymentConfig) or not apart:
            raise ScenarioError(
                f"{KEY} needs what the ranks' experts take apart from the rest of their steps, which a roofline and a"
                " profile of other attention groups do not tell. Write deployment: {engine: vllm, gpu: h200_sxm,"
                f" {KEY}: {ranks}, ep: {ranks}}}, or the cost of one rank's steps: cost: {{kind: linear, ...}}."
            )
    elif isinstance(stated, DeploymentConfig):
        raise ScenarioError(
            f"{KEY} has {ranks} ranks, and the deployment one attention group. Write {KEY}: {ranks} in the deployment."
        )
    for key in ("anchor", "power_cap"):
        if getattr(stated, key, None) is not None:
            raise ScenarioError(f"{key} is not simulated for ranks that step together. Leave it out, or {KEY}.")
    if cost.stages > 1:
        raise ScenarioError(f"pp {cost.stages}: ranks that are pipelines are not simulated. Set pp to 1.")
    if getattr(stated, "shapes", None) is not None:
        raise ScenarioError(
            f"shapes: ranks are padded to their engine's own sizes of CUDA graphs. Leave shapes out, or {KEY}."
        )


def of_rank(config: PolicyConfig, ranks: int) -> PolicyConfig:
    """The knobs of each of `ranks` ranks. SGLang's are of all together: a chunk, and the requests that run, are divided
    among them, and the part of outputs that is reserved is 0.3 of what is asked.

    Source: python/sglang/srt/arg_groups/parallel_hook.py (`_handle_data_parallelism`) and
    mem_cache/kv_cache_configurator.py (`resolve_max_num_reqs`) of the 0.5.23 wheel.
    """
    if not isinstance(config, SglangConfig):
        return config
    chunk, running = config.chunked_prefill_size, config.max_running_requests
    return replace(
        config,
        chunked_prefill_size=chunk // ranks if chunk > 0 else chunk,
        max_running_requests=None if running is None else max(running // ranks, 1),
        schedule_conservativeness=config.schedule_conservativeness * SGLANG_CONSERVATIVENESS,
    )


def graph_sizes(config: PolicyConfig, lockstep: LockstepConfig, gpu: GpuSpec | None, ranks: int, tp: int) -> list[int]:
    """The tokens of the CUDA graphs that each of `ranks` ranks of `tp` GPUs captures, with `config` as of `of_rank`;
    none where it is eager.

    Source of SGLang's largest: python/sglang/srt/arg_groups/memory_hook.py of the 0.5.23 wheel.
    """
    if lockstep.eager or isinstance(config, TensorrtLlmConfig):  # which by default pads no batch to a graph's size
        return []
    if not isinstance(config, SglangConfig):
        assert isinstance(config, VllmConfig), "checked by check_ranks"
        return vllm_graph_sizes(config.max_num_seqs, config.max_num_batched_tokens)
    gib = _USUAL_GIB if gpu is None else gpu.memory_bytes / 2**30
    few, many = next((sizes for below, *sizes in _SGLANG_GRAPHS if gib < below), (512, 512))
    most = few if ranks * tp < 4 else many
    return sglang_graph_sizes(most if config.max_running_requests is None else min(most, config.max_running_requests))


def _check_policy(spec: PolicySpec, deployment: Deployment | None) -> None:
    if spec.kind not in ENGINES:
        raise ScenarioError(
            f"{spec.name} is of kind {spec.kind}, and only ranks of {', '.join(ENGINES)} are simulated to step"
            f" together. Leave it out, or {KEY}."
        )
    if deployment is not None and deployment.dp_attention > 1 and deployment.engine != spec.kind:
        raise ScenarioError(
            f"{spec.name} is of kind {spec.kind}, and the deployment's ranks are of {deployment.engine}. Write"
            f" policies: {{{deployment.engine}: {{}}}}, or engine: {spec.kind} in the deployment."
        )
    if spec.config.traits.speculation is not None:
        knob = "speculative_algorithm" if spec.kind == "sglang" else "speculative_config"
        raise ScenarioError(f"{spec.name}: drafts are not simulated for ranks. Leave out {knob}, or {KEY}.")
    if isinstance(spec.config, TensorrtLlmConfig) and spec.config.backend != "pytorch":
        raise ScenarioError(f"{spec.name}: ranks are of the PyTorch runtime. Leave out backend, or {KEY}.")


def _check_options(spec: PolicySpec, written: Mapping[str, Any]) -> None:
    engine = "SGLang" if spec.kind == "sglang" else "TensorRT-LLM"
    for key in ("sync_interval", "message", "api_servers", *(["eager"] if spec.kind == "tensorrt_llm" else [])):
        if written.get(key) is not None:
            raise ScenarioError(f"{spec.name}: {KEY}.{key} is of vLLM's ranks, and {engine}'s have none. Leave it out.")


def _check_sglang(name: str, config: SglangConfig, ranks: int, page: int) -> None:
    chunk = config.chunked_prefill_size
    if chunk > 0 and (chunk < ranks or chunk // ranks % page):
        raise ScenarioError(
            f"{name}: chunked_prefill_size {chunk} is divided among {ranks} ranks, and {chunk // ranks} tokens are no"
            f" whole pages, here KV blocks of {page}. Set a multiple of {ranks * page}."
        )
    for key in ("scheduler_recv_interval", "disable_consecutive_prefill_overlap"):
        if getattr(config, key) not in (None, False, 1):
            raise ScenarioError(f"{name}: {key} is not simulated for ranks. Leave it out, or {KEY}.")


def _check_memory(file: ScenarioFile, cost: Cost) -> None:
    deployment = cost.deployment
    if deployment is not None and deployment.engine in ("sglang", "tensorrt_llm") and file.kv.tokens is None:
        raise ScenarioError(
            f"{deployment.engine}: what it keeps of a GPU's memory beside KV with {KEY} is not known. Write kv.tokens,"
            " of one rank, as its log has it."
        )
