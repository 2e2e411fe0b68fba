"""What the GPU of a scenario decides: the KV memory of an engine, and the defaults of its policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from batchsim.base.errors import CalibrationError, ScenarioError
from batchsim.base.kv_groups import KvGroup, KvLayout
from batchsim.base.kv_pools import WindowDemand
from batchsim.cost.adapters import adapter_bytes
from batchsim.cost.base import Cost
from batchsim.cost.drafter import memory_of_drafter
from batchsim.cost.fitted import Fitted
from batchsim.cost.shapes.config import EngineSizes, ShapesConfig
from batchsim.cost.shapes.engine import less_programs
from batchsim.deployment.catalog import read_model
from batchsim.deployment.deployment import Deployment, DraftMemory
from batchsim.deployment.kv_groups import batches_in_flight, request_blocks
from batchsim.deployment.memory import STEP_REQUESTS, STEP_TOKENS, KvBudget
from batchsim.deployment.model import GpuSpec, ModelSpec
from batchsim.kernel.policy_config import Device, Traits
from batchsim.scenario.config import PolicySpec, Scenario, ScenarioFile
from batchsim.scenario.deployment_config import DeploymentConfig
from batchsim.tables.build import setup_of


def device_of(file: ScenarioFile, model_path: str) -> Device | None:
    """The GPU of `file`'s cost; None where it is not in the catalog, or where building the model or cost raises an
    error, which is left to the builder."""
    try:
        model = read_model(model_path)
        gpu = _gpu_of(file, model)
    except (ScenarioError, CalibrationError):
        return None
    if gpu is None:
        return None
    stated = file.cost if isinstance(file.cost, DeploymentConfig) else None
    of = ("", "") if stated is None else (stated.engine, stated.version)
    return Device(gpu.name, gpu.memory_bytes, file.max_model_len or model.max_position_embeddings, *of)


def _gpu_of(file: ScenarioFile, model: ModelSpec) -> GpuSpec | None:
    if isinstance(file.cost, DeploymentConfig):  # whose GPU is known before its step times are
        return file.cost.gpu_spec()
    deployment = file.cost.build(model, block_size=file.kv.block_size).deployment
    return None if deployment is None else deployment.gpu


def check_same_defaults(scenario: Scenario, file: ScenarioFile) -> None:
    """ScenarioError if a policy of `scenario` has other defaults on the GPU of `file`, that of a group of replicas."""
    device = device_of(file, scenario.model_path)
    for spec in scenario.specs:
        defaults = {} if device is None else spec.config.device_defaults(device, spec.knobs)
        config = replace(spec.config, **defaults)
        if device is not None and config != spec.config:
            knobs = [name for name in defaults if getattr(config, name) != getattr(spec.config, name)]
            differ = [f"{name} {getattr(config, name)}, not {getattr(spec.config, name)}" for name in knobs]
            raise ScenarioError(
                f"{spec.name} has by default on {device.name} {', and '.join(differ)} as by the scenario's own cost."
                f" State {' and '.join(knobs)}."
            )


def kv_budget(scenario: Scenario, model: ModelSpec, cost: Cost) -> KvBudget:
    """The KV blocks of one engine: as stated, else as measured by a profile, else what model and GPU leave room for.

    They are the same for every policy, beside the largest step that any of them may take.
    """
    kernel = cost.kernel if isinstance(cost, Fitted) else None
    kv, deployment, profile = scenario.file.kv, cost.deployment, (kernel or cost).profile
    shapes = getattr(scenario.cost, "shapes", None)
    if kv.groups:
        _check_shapes_keep_nothing(shapes, "kv.groups")
        layout = KvLayout(kv.groups, kv.block_bytes)
        return KvBudget(kv.pool_blocks, layout.unit, kv.source or "stated in the scenario", layout)
    if kv.tokens is not None:
        _check_shapes_keep_nothing(shapes, "kv.tokens")
        source = kv.source or "stated in the scenario"
        return KvBudget(kv.tokens // kv.block_size, kv.block_size, source, pools=kv.pools)
    traits = [spec.config.traits for spec in scenario.specs]
    largest_step = _LargestStep(
        max((each.max_num_batched_tokens or 0 for each in traits), default=0) or STEP_TOKENS,
        max((each.max_num_seqs or 0 for each in traits), default=0) or STEP_REQUESTS,
        any(each.prefix_cache for each in traits),
        max((each.speculation.num_drafts for each in traits if each.speculation is not None), default=0),
        all(each.kv_pools for each in traits),
        _window_demand(traits),
        _may_group_windows(scenario.file, scenario.specs),
    )
    if kv.memory is not None:
        _check_shapes_keep_nothing(shapes, "kv.memory")
        return _in_memory(scenario, replace(deployment or Deployment(model), model=model), kv.memory, largest_step)
    if deployment is None:
        raise ScenarioError(f"cost {scenario.cost.kind} has no GPU to derive KV memory from. Add kv: tokens.")
    if profile is not None and profile.num_blocks is not None and profile.block_size == kv.block_size:
        if (scenario.plain.get("kv") or {}).get("utilisation") is not None:
            raise ScenarioError(
                f"kv.utilisation is not read: profile {profile.name} has its KV memory measured. Drop it, or write"
                " kv.tokens in its place."
            )
        return KvBudget(profile.num_blocks, kv.block_size, f"measured, profile {profile.name}")
    if profile is not None and deployment.gpu is None:
        raise ScenarioError(
            f"profile {profile.name} has no KV memory measured in blocks of {kv.block_size}, and names no GPU of the"
            " catalog to derive it from. Add kv: tokens."
        )
    own = replace(deployment, model=model)  # of the same shape, under the name that the scenario has for it
    if isinstance(scenario.cost, DeploymentConfig) and scenario.cost.version:
        own = replace(own, version=scenario.cost.version)  # the tables may be of another, by whose rule no memory goes
    draft, unsaid = _drafter(scenario, own)
    budget = own.derive_kv(
        utilisation=kv.utilisation,
        block_size=kv.block_size,
        draft=draft,
        adapter_bytes=_slots_bytes(scenario, own),
        **largest_step._asdict(),
    )
    if shapes is not None:
        longest = scenario.file.max_model_len or model.max_position_embeddings
        budgets: list[KvBudget] = []
        for each in traits:
            limits = each.max_num_seqs, each.max_num_batched_tokens
            sizes = EngineSizes(*limits, longest, budget.block_size, budget.num_blocks)
            block_bytes = budget.block_size * own.kv_bytes_per_token
            if budget.layout is not None:
                block_bytes = budget.layout.block_bytes or block_bytes
            budgets.append(less_programs(budget, shapes, sizes, block_bytes))
        budget = min(budgets, key=lambda each: each.num_blocks)
    if unsaid:
        budget = replace(budget, terms=f"{budget.terms}; {unsaid}")
    if budget.layout is not None and kv.swap_space:
        raise ScenarioError(
            f"{scenario.source}: kv.swap_space is not read where {model.name} keeps KV in groups of layers, of which"
            " none is swapped. Leave it out."
        )
    if own.engine == "vllm" and isinstance(scenario.cost, DeploymentConfig):
        _check_starts(scenario, budget, own, largest_step.step_tokens)
    return budget


def _check_starts(scenario: Scenario, budget: KvBudget, engine: Deployment, step_tokens: int) -> None:
    """ScenarioError where vLLM would not start, since a longest request does not fit."""
    most, layout = scenario.file.max_model_len, budget.layout
    if most is None:
        return
    advice = "Lower max_model_len, raise kv.utilisation, or use more GPUs."
    if layout is not None:
        in_flight = step_tokens * batches_in_flight(engine.version, engine.pp)
        needed = request_blocks(layout, most, in_flight)
        if budget.num_blocks < needed:
            raise ScenarioError(
                f"{scenario.source}: vLLM does not start with {budget.num_blocks:,} blocks ({budget.terms}), fewer than"
                f" the {needed:,} of a request of max_model_len {most:,}. {advice}"
            )
    elif budget.tokens < most:
        raise ScenarioError(
            f"{scenario.source}: vLLM does not start with KV memory of {budget.tokens:,} tokens ({budget.terms}), fewer"
            f" than max_model_len {most:,}. {advice}"
        )


def _check_shapes_keep_nothing(shapes: ShapesConfig | None, key: str) -> None:
    """ScenarioError where the memory of compiled programs is stated beside that for KV, from which it is gone."""
    for name in () if shapes is None else ("memory_per_program", "graph_memory"):
        if getattr(shapes, name):
            raise ScenarioError(f"shapes: {name} is not read: {key} states what is left for KV. Drop one of the two.")


class _LargestStep(NamedTuple):
    """What the policies of a scenario do at most, as `Deployment.derive_kv` takes it."""

    step_tokens: int
    step_requests: int
    prefix_cache: bool
    draft_tokens: int
    apart: bool
    windows: WindowDemand | None
    windows_in_groups: bool


def _may_group_windows(file: ScenarioFile, specs: Sequence[PolicySpec]) -> bool:
    """Whether all that a scenario asks for is simulated beside groups of layers. Where it is not, windows are set aside
    in one pool, for which groups would have to be refused."""
    replicas, traffic = file.replicas, file.workload
    others = (file.kv.tiers, traffic.all_items, replicas is not None and replicas.lockstep is not None)
    intervals = (getattr(spec.config, "prefill_schedule_interval", 1) for spec in specs)
    return all(spec.config.traits.kv_groups for spec in specs) and not any(others) and all(n == 1 for n in intervals)


def _window_demand(traits: Sequence[Traits]) -> WindowDemand | None:
    """What bounds the windows of all policies; None where those of any are not bounded."""
    demands = [each.windows for each in traits]
    known = [demand for demand in demands if demand is not None]
    if not known or len(known) < len(demands):
        return None
    return WindowDemand(max(demand.requests for demand in known), max(demand.prompt_tokens for demand in known))


def _in_memory(scenario: Scenario, engine: Deployment, size: int, step: _LargestStep) -> KvBudget:
    """The blocks that fit into `size` bytes of each GPU, as stated or as a log says."""
    kv = scenario.file.kv
    if kv.per_token is not None:
        if kv.per_request and any(
            spec.config.traits.prefix_cache and spec.config.traits.kv_groups for spec in scenario.specs
        ):
            raise ScenarioError(
                f"kv.per_request: {kv.per_request:,} B of a request are its state, which is kept nowhere once it ends,"
                " so that prefix caching finds nothing. Set enable_prefix_caching: false."
            )
        budget = _of_two_numbers(size, kv.per_token, kv.per_request, kv.block_size, step.draft_tokens)
    else:
        draft = _drafter(scenario, engine)[0]
        budget = engine.derive_kv(block_size=kv.block_size, draft=draft, room_bytes=size, **step._asdict())
    if budget.num_blocks < 1:
        raise ScenarioError(
            f"kv.memory: {size / 1e9:.3g} GB are less than one block of {engine.model.name}. State more."
        )
    return replace(budget, terms=f"{budget.terms}, {kv.source or 'stated in the scenario'}")


def _slots_bytes(scenario: Scenario, engine: Deployment) -> int:
    """Bytes on each GPU of a stage-less `engine` that its slots for LoRA adapters take, at most over the policies; 0
    without adapters."""
    rank = scenario.file.workload.lora_rank
    if rank is None:
        return 0
    memories = [spec.config.traits.adapters for spec in scenario.specs]
    return max(
        (
            memory.slots * adapter_bytes(engine.model, memory.max_rank or rank, engine.tp)
            for memory in memories
            if memory is not None
        ),
        default=0,
    )


MAX_FIXED_BLOCKS = 10_000
"""Blocks that a request may hold beside those of its tokens, by `kv.per_request`: each is a group of its own."""


def _of_two_numbers(size: int, per_token: int, per_request: int, block_size: int, drafts: int) -> KvBudget:
    """The blocks of `size` bytes of a GPU where a token has `per_token` bytes and a request `per_request` beside, which
    are given as blocks for as long as it runs."""
    block_bytes, states = per_token * block_size, 1 + drafts
    terms, blocks = f"{size / 1e9:.1f} GB of each GPU", size // block_bytes
    if not per_request:
        return KvBudget(blocks, block_size, terms)
    fixed = -(-per_request // (block_bytes * states))
    if fixed > (most := min(MAX_FIXED_BLOCKS, blocks // states - 1)):
        raise ScenarioError(
            f"kv.per_request: {per_request:,} B are {fixed * states:,} blocks of {block_size} tokens, {per_token:,} B"
            f" each, beside a request's tokens, and at most {max(most, 0) * states:,} are possible here. State less, or"
            " more memory."
        )
    groups = (KvGroup("full", block_size), *[KvGroup("state", block_size, states=states)] * fixed)
    return KvBudget(blocks, block_size, terms, KvLayout(groups, block_bytes))


def _drafter(scenario: Scenario, engine: Deployment) -> tuple[DraftMemory | None, str]:
    """What the drafters of the scenario's policies take at most on each GPU, and what to say of one that is not known;
    (None, "") where none drafts."""
    most, unsaid = None, ""
    for spec in scenario.specs:
        if (speculation := spec.config.traits.speculation) is not None:
            own, said = memory_of_drafter(engine, scenario.cost.draft, speculation)
            most, unsaid = max(most, own, key=lambda each: each or (0, 0)), unsaid or said
    return most, unsaid


def deployed_words(stated: DeploymentConfig, cost: Cost) -> str:
    """The engine of a `stated` deployment, how it divides the model and its types, in words, or which version each is
    of where the one asked for has no tables; "" where the description of `cost` says it."""
    deployment, profile = cost.deployment, cost.profile
    if deployment is None:
        return ""
    if profile is None or profile.setup is None:
        return str(setup_of(deployment, deployment.version))
    asked, nearest = stated.version, profile.setup.version
    if not asked or f"{nearest}.".startswith(f"{asked}."):
        return ""
    return f"memory and defaults of {deployment.engine} {asked}, step costs of {nearest}, the nearest with tables"
