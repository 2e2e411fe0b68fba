"""A scenario settled: its model, step times, KV memory and requests, from which the engine of any point is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from batchsim.base.errors import CalibrationError, ScenarioError
from batchsim.cost.base import Cost
from batchsim.cost.capped import capped
from batchsim.cost.cost_error import CostError, Unknown
from batchsim.cost.drafter import with_drafter
from batchsim.cost.encoder import VisionTime, with_encoder
from batchsim.cost.encoder_config import EncoderConfig
from batchsim.cost.presets import Preset, under_preset
from batchsim.cost.scaled import Scaled
from batchsim.cost.shapes.config import EngineSizes, ShapesConfig
from batchsim.cost.shapes.engine import check_cold_start, check_needs_none, with_shapes
from batchsim.deployment.catalog import read_model
from batchsim.deployment.memory import KvBudget
from batchsim.deployment.model import GpuSpec, ModelSpec
from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_blocks import KVBlockManager
from batchsim.kernel.kv_transfer import KvConnector
from batchsim.kernel.policy_config import PolicyConfig
from batchsim.kernel.protocols import Executor, ItemsContext, StepEstimator
from batchsim.kernel.record import Recorder
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kv.choice import new_grouped_kv
from batchsim.scenario.adapters import adapter_times_of, check_adapters, take_adapters
from batchsim.scenario.anchor import REQUESTS, anchored
from batchsim.scenario.config import PolicySpec, Scenario
from batchsim.scenario.deployment_config import DeploymentConfig
from batchsim.scenario.device import check_same_defaults, deployed_words, kv_budget
from batchsim.scenario.patient import patient
from batchsim.scenario.pooled import checked_connector, pooled
from batchsim.scenario.ranks import check_one_scheduler, check_ranks, of_one_rank
from batchsim.scenario.real_engine import check_one_can_be_real
from batchsim.scenario.replicas_config import ReplicasConfig
from batchsim.scenario.request_kinds import check_hash_ids, check_kinds, encoder_of, items_context
from batchsim.scenario.schedulers import drawn_luck, new_scheduler
from batchsim.scenario.shared import check_models, with_model
from batchsim.scenario.structured import check_structured, take_masks
from batchsim.scenario.tiered import EngineTiers, check_no_tiers, kv_under, tier_of, under_tier
from batchsim.workload.build import BuiltWorkload, build_workload, classes_by_popularity, known_requests
from batchsim.workload.traces.read_trace import read_trace
from batchsim.workload.traces.trace_rows import TraceRows
from batchsim.workload.workload_config import ClosedLoop, WorkloadConfig


@dataclass(frozen=True)
class Group:
    """`count` replicas of one kind, which `setup` describes; `name` is "" where all are alike."""

    name: str
    count: int
    setup: Setup


@dataclass(frozen=True)
class Setup:
    """What all points of a scenario share. Building it finds unknown models, GPUs and budgets that do not fit.

    `traffic` is who asks for what, `rows` the usable rows of its trace by seed, under 0 alone where no jitter moves
    arrivals; `load_name` and `loads` are its load axis, and beyond `max_waiting` an engine rejects. They are the
    scenario's, unless other requests are played to its engines. `groups`: the kinds of its replicas, in order of their
    numbers; () for one engine without a router. `tier`: where an engine keeps KV beyond its GPU's memory.
    """

    scenario: Scenario
    model: ModelSpec
    cost: Cost
    kv: KvBudget
    traffic: WorkloadConfig
    rows: Mapping[int, TraceRows]
    load_name: str
    loads: tuple[float, ...]
    max_waiting: int | None
    groups: tuple[Group, ...] = ()
    tier: EngineTiers | None = None
    encoder: EncoderConfig | VisionTime | None = None  # of requests' images, audios and videos

    @classmethod
    def of(cls, scenario: Scenario) -> Setup:
        """The setup of `scenario`. ScenarioError if model, GPU, KV memory and policies do not go together."""
        file = scenario.file
        with scenario.at("model"):
            model = read_model(scenario.model_path)
        limit = model.max_position_embeddings
        if file.max_model_len is not None and file.max_model_len > limit:
            raise ScenarioError(
                f"{scenario.places['max_model_len']}: max_model_len {file.max_model_len} is above the {limit} positions"
                f" of {model.name}. Lower it."
            )
        with scenario.at("cost"):
            longest = limit if file.max_model_len is None else file.max_model_len
            cost = file.cost.build(model, block_size=file.kv.block_size, max_model_len=longest)
            check_one_scheduler(scenario, cost)
            kv, axis = kv_budget(scenario, model, cost), (scenario.load_name, scenario.loads)
            traffic = classes_by_popularity(file.workload)
            encoder = encoder_of(file.cost, traffic, model)
            setup = cls(scenario, model, cost, kv, traffic, _Trace(scenario), *axis, file.max_waiting, encoder=encoder)
        with scenario.at("replicas"):
            check_ranks(scenario, model, cost, kv)
        with scenario.at("kv"):
            setup = replace(setup, tier=tier_of(scenario, model, cost, kv))
        for stated in scenario.specs:
            with scenario.at(f"policies.{stated.label}"):
                spec, connector = under_tier(setup.tier, stated)
                check_adapters(spec, file.workload)
                check_structured(spec, file, cost.stages)
                check_kinds(setup.traffic, spec.config, spec.knobs)
                empty, passing = setup.new_kv(spec.config), connector or checked_connector(spec.config)
                new_scheduler(spec, empty, setup.max_model_len, None, cost, cost.stages, 0, setup.items, passing)
            with scenario.at("cost"):
                under = setup.cost_under(spec.config)
                if file.replicas is not None and file.replicas.autoscaler is not None:
                    check_cold_start(under, file.replicas.autoscaler.cold_start)
        with scenario.at("lora_cost"):
            adapter_times_of(scenario, model, cost)
        with scenario.at("cost"):
            setup = setup._anchored()
        if file.cost_factor != 1:
            setup = replace(setup, cost=Scaled(setup.cost, file.cost_factor))
        return setup if file.replicas is None else replace(setup, groups=_groups(setup, file.replicas))

    def _anchored(self) -> Setup:
        """This setup with the step times by which its deployment meets its measured point, if it states one."""
        stated = self.scenario.cost
        if not isinstance(stated, DeploymentConfig) or stated.anchor is None:
            return self
        specs = [spec for spec in self.scenario.specs if spec.kind == stated.engine]
        if not specs:
            raise ScenarioError(
                f"anchor: {stated.anchor} was measured under {stated.engine}, which no policy is. Add {stated.engine}."
            )
        engine = partial(self.engine_of_users, specs[0], stated.anchor.concurrency)
        return replace(self, cost=anchored(self.cost, self.preset(specs[0].config), stated.anchor, engine))

    def engine_of_users(self, spec: PolicySpec, users: int, cost: Cost) -> tuple[EngineCore, BuiltWorkload]:
        """An engine under `spec` whose steps take what `cost` says, and a closed loop of `users` users that take their
        requests from one list. ScenarioError for requests of tasks."""
        traffic = self.traffic
        if traffic.tasks is not None:
            raise ScenarioError("anchor: requests of tasks cannot be sent by users one by one. Drop anchor, or tasks.")
        sessions = traffic.sessions and replace(traffic.sessions, think_time=None, think_kind=None)
        arrivals = ClosedLoop(users, 0, shared_list=sessions is None, ramp=0)
        asked = patient(traffic, arrivals, REQUESTS * users, sessions=sessions, max_concurrency=None)
        setup = replace(self, cost=cost, traffic=asked, load_name="", loads=(1.0,), max_waiting=None)
        workload = setup.workload(1.0, 0)
        return setup.engine(spec, workload), workload

    # ---- what it is

    @property
    def max_model_len(self) -> int:
        stated = self.scenario.file.max_model_len
        return self.model.max_position_embeddings if stated is None else stated

    @property
    def num_swap_blocks(self) -> int:
        """The KV blocks for which host memory is kept."""
        return self.scenario.file.kv.swap_space // (self.model.kv_bytes_per_token * self.kv.block_size)

    @property
    def gpu(self) -> GpuSpec | None:
        """The GPU whose step times are simulated; None where these are stated, or the catalog lacks a profile's GPU."""
        return None if self.cost.deployment is None else self.cost.deployment.gpu

    @property
    def num_gpus(self) -> int:
        """GPUs of one engine."""
        return self.scenario.cost.num_gpus

    @property
    def power_cap(self) -> float | None:
        """The most W that each GPU may draw, where the scenario states it."""
        return getattr(self.scenario.cost, "power_cap", None)

    @property
    def num_engines(self) -> int:
        """The most engines that there can be at a time."""
        replicas = self.scenario.file.replicas
        return 1 if replicas is None else replicas.plan.most

    @property
    def are_ranks(self) -> bool:
        """Whether its engines are ranks of one model that step together."""
        replicas = self.scenario.file.replicas
        return replicas is not None and replicas.lockstep is not None

    @property
    def shape_counts(self) -> bool:
        """Whether the model's shape plays a part: in step times, or in how many blocks a swap space holds."""
        if self.groups:
            return any(group.setup.shape_counts for group in self.groups)
        return self.cost.deployment is not None or self.num_swap_blocks > 0

    @property
    def deployment_text(self) -> str:
        """The engine in words, as `deployed_words` has it; "" where the scenario states no deployment."""
        stated, cost = self.scenario.cost, self.cost.cost if isinstance(self.cost, Scaled) else self.cost
        return deployed_words(stated, cost) if isinstance(stated, DeploymentConfig) else ""

    def check_can_be_real(self) -> None:
        """ScenarioError if only a simulation could run the scenario: it stretches steps, has replicas or many GPUs."""
        if (replicas := self.scenario.file.replicas) is not None and self.groups:
            apart, ranks = replicas.transfer is not None, self.are_ranks
            what, key = ("prefill and decode apart", "pools") if apart else ("replicas", "the key")
            what, key = ("ranks that step together", "dp_attention") if ranks else (what, key)
            raise ScenarioError(
                f"{self.scenario.places['replicas']}: {what} can only be simulated. Remove {key} to run one engine."
            )
        check_no_tiers(self.scenario, "can only be simulated")
        check_one_can_be_real(self.scenario, self.traffic, self.kv, self.cost, self.power_cap, self.shapes)

    # ---- step times

    @property
    def shapes(self) -> ShapesConfig | None:
        """The compiled shapes that the scenario's cost states; None without."""
        return getattr(self.scenario.cost, "shapes", None)

    def preset(self, config: PolicyConfig) -> Preset | None:
        """What is known of a deployment's engine in the mode of a policy; None for other costs."""
        stated = self.scenario.cost
        return stated.preset(config) if isinstance(stated, DeploymentConfig) else None

    def cost_under(self, config: PolicyConfig) -> Cost:
        """The step times of an engine under a policy: `cost` with the preset of a deployment's engine in the policy's
        mode, with its drafter where that takes time, and in its compiled shapes.

        ScenarioError where its draft model cannot be timed, or the shapes do not go with the policy.
        """
        cost = with_drafter(self._preset_cost(config), self.scenario.cost.draft, config.traits.speculation)
        return with_encoder(self._in_shapes(cost, config), self.encoder)

    def _in_shapes(self, cost: Cost, config: PolicyConfig) -> Cost:
        """`cost` with the compiled shapes of the scenario's cost, if it states any."""
        shapes, traits = self.shapes, config.traits
        if shapes is None:
            check_needs_none(cost)
            return cost
        limits = traits.max_num_seqs, traits.max_num_batched_tokens
        sizes = EngineSizes(*limits, self.max_model_len, self.kv.block_size, self.kv.num_blocks)
        return with_shapes(cost, shapes, sizes, traits)

    def _preset_cost(self, config: PolicyConfig) -> Cost:
        return capped(under_preset(self.cost, self.preset(config)), self.power_cap)

    @property
    def cost_text(self) -> str:
        """The cost in words, with what drafting, LoRA adapters and masks cost."""
        config, file = self.scenario.specs[0].config, self.scenario.file
        cost = with_encoder(self._in_shapes(self._preset_cost(config), config), self.encoder)
        beside = (("drafting", file.cost.draft), ("LoRA", file.lora_cost), ("structured", file.structured_cost))
        return cost.describe() + "".join(f" · {name}: {each}" for name, each in beside if each is not None)

    @property
    def cost_error(self) -> CostError | Unknown:
        """How far step times may be off, by what was measured in the engine too; of several kinds of replicas and of
        several policies the widest, unknown where that of one is."""
        each = [group.setup for group in self.groups] or [self]
        errors = [setup._preset_cost(spec.config).error for setup in each for spec in setup.scenario.specs]
        known = [error for error in errors if isinstance(error, CostError)]
        if len(known) < len(errors):
            return next(error for error in errors if isinstance(error, Unknown))
        return max(known, key=lambda error: error.high - error.low)

    def stretched(self, factor: float) -> Setup:
        """This setup with every step taking `factor` times as long, on all replicas."""
        groups = tuple(replace(group, setup=group.setup.stretched(factor)) for group in self.groups)
        return replace(self, cost=Scaled(self.cost, factor, is_end=True), groups=groups)

    # ---- replicas

    def group_of(self, replica: int) -> Group:
        """The group of a replica by its number; where all are alike, also of those an autoscaler adds."""
        first = 0
        for group in self.groups:
            first += group.count
            if replica < first or not group.name:
                return group
        raise IndexError(f"replica {replica} of {first}")

    def at_full_strength(self) -> Setup:
        """This setup with all the replicas there can be, of which none fails."""
        file = self.scenario.file
        if file.replicas is None:
            return self
        count = file.replicas.plan.most if file.replicas.groups is None else None
        steady = replace(file.replicas, count=count, failures=(), lost=None, autoscaler=None)
        return replace(self, scenario=replace(self.scenario, file=replace(file, replicas=steady)))

    # ---- requests

    @property
    def items(self) -> ItemsContext | None:
        """What the requests' images, audios and videos are to an engine; None where no request has any."""
        return items_context(self.traffic, self.model)

    def workload(self, load: float, seed: int) -> BuiltWorkload:
        """The requests of a load and seed: the same for every policy.

        ScenarioError if blocks of the KV cache would not fit into the blocks in which the trace states shared prompts.
        """
        change = {} if not self.load_name else {self.load_name: int(load) if self.load_name == "users" else load}
        workload = build_workload(
            self.traffic,
            load=change,
            seed=seed,
            max_model_len=self.max_model_len,
            base=Path(),
            rows=self.trace_rows(seed),
        )
        listed = known_requests(workload)
        if listed is not None and listed.hash_ids is not None:
            check_hash_ids(self.scenario, listed.hash_ids.block_tokens, self.kv.alignment)
        return workload

    def trace_rows(self, seed: int) -> TraceRows | None:
        """The usable rows of the trace for a run's `seed`; None without a trace."""
        return None if self.traffic.trace is None else self.rows[self.trace_seed(seed)]

    def trace_seed(self, seed: int) -> int:
        """The key of `rows` for a run's `seed`: that seed where jitter moves the arrivals, else 0."""
        trace = self.traffic.trace
        return seed if trace is not None and trace.jitter else 0

    def carrying(self, seed: int | None) -> Setup:
        """This setup with the trace's rows for `seed`, for a machine without the file; with None, without rows."""
        rows = _Trace(self.scenario)
        if seed is not None and self.traffic.trace is not None:
            key = self.trace_seed(seed)
            rows[key] = self.rows[key]
        return replace(self, rows=rows)

    # ---- engines

    def new_kv(self, config: PolicyConfig) -> KVBlockManager:
        """A block manager with all KV blocks free, of the kind that a policy's config asks for."""
        if (layout := self.kv.layout) is not None:
            return new_grouped_kv(config, layout, self.kv.num_blocks, self.max_model_len, self.cost.stages)
        sizes = self.kv.num_blocks, self.kv.block_size, self.num_swap_blocks
        return kv_under(self.tier, config, *sizes, pools=self.kv.pools)

    def engine(self, spec: PolicySpec, workload: BuiltWorkload) -> EngineCore:
        """A new engine under `spec` for one simulation of `workload`."""
        return self.simulator(spec, workload, self.cost_under(spec.config))

    def simulator(self, spec: PolicySpec, workload: BuiltWorkload, cost: Cost) -> EngineCore:
        """A new engine for one simulation of `workload`, its steps as long as `cost` says."""
        spec, connector = under_tier(self.tier, spec)
        executor = SimExecutor(cost, self.max_model_len, spec.config.traits.loop.over(cost.stages))
        take_masks(executor, self.scenario, spec, cost)
        core = self.engine_on(executor, spec, workload, self.new_kv(spec.config), cost, cost.stages, connector)
        if connector is not None:
            connector.attach(core.recorder, core.in_flight)
        return core

    def engine_on(
        self,
        executor: Executor,
        spec: PolicySpec,
        workload: BuiltWorkload,
        kv: KVBlockManager,
        estimator: StepEstimator | None,
        stages: int = 1,
        connector: KvConnector | None = None,
        kind: type[EngineCore] = EngineCore,
    ) -> EngineCore:
        """A new engine, a `kind`, of `stages` pipeline stages for one run of `workload` on `executor`, its KV in `kv`.

        ScenarioError for drafts that `executor` cannot make, or whose worth is not said.
        """
        speculation = spec.config.traits.speculation
        if speculation is not None:
            if not isinstance(executor, SimExecutor):
                spec.check_can_be_real()
            luck = drawn_luck(spec, speculation, workload, self.traffic.classes)
            if isinstance(executor, SimExecutor):
                executor.luck = luck  # any other finds out
        drain_ns, times = self.traffic.drain, adapter_times_of(self.scenario, self.model, self.cost)
        copy_ns = 0 if times is None else times.load_gpu_ns
        core = kind(
            new_scheduler(spec, kv, self.max_model_len, workload, estimator, stages, copy_ns, self.items, connector),
            executor,
            Recorder(),
            max_model_len=self.max_model_len,
            max_waiting=self.max_waiting,
            per_chunk_ns=workload.frontend.per_chunk,
            per_stream_ns=workload.frontend.per_stream,
            stop_ns=None if drain_ns is None else workload.window_ns[1] + drain_ns,
            loop=spec.config.traits.loop.over(stages),
        )
        take_adapters(core, times, spec, workload)
        return core


def _groups(setup: Setup, replicas: ReplicasConfig) -> tuple[Group, ...]:
    """The groups of replicas, each with a setup of its own, as if the scenario were about one of its engines."""
    alone = replace(setup.scenario, file=replace(setup.scenario.file, replicas=None))
    if replicas.groups is None:
        return (Group("", replicas.total, replace(setup, scenario=alone, cost=of_one_rank(setup.cost))),)
    groups = list[Group]()
    for name, group in replicas.groups.items():
        lone = with_model(alone, group.model)
        of = f"replicas.groups.{name}" if replicas.transfer is None else f"the {name} side"
        where = f"{setup.scenario.places['replicas']}: {of}"
        file = replace(
            lone.file,
            cost=alone.file.cost if group.cost is None else group.cost,
            kv=alone.file.kv if group.kv is None else group.kv,
        )
        if file.kv.block_size != alone.file.kv.block_size:
            raise ScenarioError(
                f"{where}: kv.block_size {file.kv.block_size} is not the scenario's {alone.file.kv.block_size}. Set the"
                " same."
            )
        try:
            if replicas.transfer is None:
                check_same_defaults(lone, file)
                own = replace(lone, file=file, places={})
            else:
                own = pooled(alone, file, name, replicas)
            groups.append(Group(name, group.count, Setup.of(own)))
        except (ScenarioError, CalibrationError) as error:
            raise type(error)(f"{where}: {error}") from None
    if replicas.are_models:
        with setup.scenario.at("replicas"):
            check_models(replicas, alone.file, {each.name: each.setup for each in groups})
    return tuple(groups)


class _Trace(dict[int, TraceRows]):
    """The rows of a scenario's trace by seed, read when first asked for."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self._scenario = scenario

    def __missing__(self, seed: int) -> TraceRows:
        trace = self._scenario.file.workload.trace
        if trace is None:
            raise KeyError(seed)
        rows = self[seed] = read_trace(replace(trace, rate_scale=None), self._scenario.base, seed)
        return rows
