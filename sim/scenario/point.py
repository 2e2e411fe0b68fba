"""One point of a scenario: builds its engine and simulates it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from batchsim.base.errors import CalibrationError, ScenarioError
from batchsim.base.units import format_duration
from batchsim.cost import Cost, CostError, Fitted, Scaled, Unknown, with_drafter
from batchsim.cost.presets import under_preset
from batchsim.deployment.catalog import read_model
from batchsim.deployment.memory import STEP_REQUESTS, STEP_TOKENS, KvBudget
from batchsim.deployment.model import GpuSpec, ModelSpec
from batchsim.drive.fleet.fleet_plan import ReplicaSpan
from batchsim.drive.fleet.fleet_records import EngineLife
from batchsim.drive.fleet.simulate_fleet import simulate_fleet
from batchsim.drive.resolved import Resolved
from batchsim.drive.resolved_policy import ResolvedPolicy
from batchsim.drive.simulate import Pulse, simulate
from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_blocks import KVBlockManager
from batchsim.kernel.policy_config import PolicyConfig
from batchsim.kernel.record import Records
from batchsim.kv.choice import new_kv
from batchsim.scenario import Point, PolicySpec, Scenario
from batchsim.scenario.anchor import anchored
from batchsim.scenario.config import Keep
from batchsim.scenario.deployment_config import DeploymentConfig
from batchsim.scenario.device import check_same_defaults
from batchsim.scenario.replicas_config import ReplicasConfig
from batchsim.tables.build import setup_of
from batchsim.workload.build import BuiltWorkload
from batchsim.workload.open_loop import OpenWorkload
from batchsim.workload.traces import read_trace
from batchsim.workload.traces.trace_rows import TraceRows


@dataclass(frozen=True)
class Group:
    """`count` replicas of one kind, which `setup` describes; `name` is "" where all are alike."""

    name: str
    count: int
    setup: Setup


@dataclass(frozen=True)
class Setup:
    """What all points of a scenario share. Building it finds unknown models, GPUs and budgets that do not fit.

    `groups`: the kinds of its replicas, in order of their numbers; () for one engine without a router.
    """

    scenario: Scenario
    resolved: Resolved
    cost: Cost
    kv: KvBudget
    groups: tuple[Group, ...] = ()

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
            if cost.deployment is not None:
                cost.deployment.check_one_scheduler()
            setup = cls(scenario, _resolved(scenario, model, cost), cost, _kv_budget(scenario, model, cost))
        for spec in scenario.specs:
            with scenario.at(f"policies.{spec.label}"):
                setup.resolved.scheduler(spec, setup.new_kv(spec.config), None, cost, cost.stages)
            with scenario.at("cost"):
                setup.cost_under(spec.config)
        with scenario.at("cost"):
            setup = _anchored(setup)
        if file.cost_factor != 1:
            setup = replace(setup, cost=Scaled(setup.cost, file.cost_factor))
        return setup if file.replicas is None else replace(setup, groups=_groups(setup, file.replicas))

    def cost_under(self, config: PolicyConfig) -> Cost:
        """The step times of an engine under a policy: `cost` with the preset of a deployment's engine in the policy's
        mode, and with its drafter where that takes time.

        ScenarioError where its draft model cannot be timed.
        """
        return with_drafter(self._preset_cost(config), self.scenario.cost.draft, config.traits.speculation)

    def _preset_cost(self, config: PolicyConfig) -> Cost:
        stated = self.scenario.cost
        return under_preset(self.cost, stated.preset(config)) if isinstance(stated, DeploymentConfig) else self.cost

    @property
    def cost_text(self) -> str:
        """The cost in words, with what drafting costs."""
        draft = self.scenario.cost.draft
        cost = self._preset_cost(self.scenario.specs[0].config)
        return cost.describe() + ("" if draft is None else f" · drafting: {draft}")

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

    def group_of(self, replica: int) -> Group:
        """The group of a replica by its number; where all are alike, also of those an autoscaler adds."""
        first = 0
        for group in self.groups:
            first += group.count
            if replica < first or not group.name:
                return group
        raise IndexError(f"replica {replica} of {first}")

    @property
    def model(self) -> ModelSpec:
        return self.resolved.model

    @property
    def max_model_len(self) -> int:
        return self.resolved.max_model_len

    @property
    def gpu(self) -> GpuSpec | None:
        """The GPU whose step times are simulated; None where these are stated, or the catalog lacks a profile's GPU."""
        return None if self.cost.deployment is None else self.cost.deployment.gpu

    @property
    def shape_counts(self) -> bool:
        """Whether the model's shape plays a part: in step times, or in how many blocks a swap space holds."""
        if self.groups:
            return any(group.setup.shape_counts for group in self.groups)
        return self.cost.deployment is not None or self.resolved.num_swap_blocks > 0

    @property
    def deployment_text(self) -> str:
        """The engine, how it divides the model and its types, in words; "" where `cost_text` says it, or none does."""
        its_cost = self.cost.cost if isinstance(self.cost, Scaled) else self.cost
        deployment, profile = its_cost.deployment, its_cost.profile
        if not isinstance(self.scenario.cost, DeploymentConfig) or deployment is None:
            return ""
        if profile is None or profile.setup is None:
            return str(setup_of(deployment, deployment.version))
        asked, its = self.scenario.cost.version, profile.setup.version
        return (
            "" if f"{its}.".startswith(f"{asked}.") or not asked else f"{its} is the nearest to {asked}, as asked for"
        )

    @property
    def num_gpus(self) -> int:
        """GPUs of one engine."""
        return self.scenario.cost.num_gpus

    def carrying(self, seed: int | None) -> Setup:
        """This setup with the trace's rows for `seed`, for a machine without the file; with None, without rows."""
        rows = _Trace(self.scenario)
        if seed is not None and self.scenario.file.workload.trace is not None:
            key = self.resolved.trace_seed(seed)
            rows[key] = self.resolved.rows[key]
        return replace(self, resolved=replace(self.resolved, rows=rows))

    def new_kv(self, config: PolicyConfig) -> KVBlockManager:
        """A block manager with all KV blocks free, of the kind that a policy's config asks for."""
        return new_kv(config, self.kv.num_blocks, self.kv.block_size, self.resolved.num_swap_blocks, ids=False)

    def workload(self, load: float, seed: int) -> BuiltWorkload:
        """The requests of a load and seed: the same for every policy."""
        return self.resolved.built_workload(load, seed)

    @property
    def num_engines(self) -> int:
        """The most engines that there can be at a time."""
        replicas = self.scenario.file.replicas
        return 1 if replicas is None else replicas.plan.most

    def at_full_strength(self) -> Setup:
        """This setup with all the replicas there can be, of which none fails."""
        file = self.scenario.file
        if file.replicas is None:
            return self
        count = file.replicas.plan.most if file.replicas.groups is None else None
        steady = replace(file.replicas, count=count, failures=(), lost=None, autoscaler=None)
        return replace(self, scenario=replace(self.scenario, file=replace(file, replicas=steady)))

    def check_can_be_real(self) -> None:
        """ScenarioError if only a simulation could run the scenario: it stretches steps, has replicas or many GPUs."""
        if self.groups:
            raise ScenarioError(
                f"{self.scenario.places['replicas']}: replicas can only be simulated. Remove the key to run one engine."
            )
        with self.scenario.at("cost"):
            if (stages := self.cost.stages) > 1:
                raise ScenarioError(
                    f"pp {stages}: a pipeline can only be simulated, a real run has one stage. Set it to 1."
                )
            if (deployment := self.cost.deployment) is not None and deployment.tp > 1:
                raise ScenarioError(
                    f"tp {deployment.tp}: several GPUs can only be simulated, a real run has one. Set it to 1."
                )
        with self.scenario.at("cost_factor"):
            if (factor := self.scenario.file.cost_factor) != 1:
                raise ScenarioError(
                    f"cost_factor {factor:g} stretches simulated steps, and these would be real. Remove it."
                )

    def engine(self, spec: PolicySpec, workload: BuiltWorkload) -> EngineCore:
        """A new engine under `spec` for one simulation of `workload`."""
        cost = self.cost_under(spec.config)
        return self.resolved.simulator(spec, workload, self.new_kv(spec.config), cost)


@dataclass(frozen=True)
class Run:
    """A point that was run: what it recorded, and the arrival window (end of warm-up, end of arrivals) in ns.

    `keep` is what is to be kept of it. Of several engines whose steps are not, `records` has none: `lives` have them.
    """

    point: Point
    workload: BuiltWorkload
    records: Records
    streams: bool
    end_ns: int
    window_ns: tuple[int, int]
    spans: tuple[ReplicaSpan, ...] = ()
    keep: Keep = "all"
    lives: tuple[EngineLife, ...] = ()


def simulate_point(setup: Setup, point: Point, pulse: Pulse | None = None) -> Run:
    """Simulates one point to the end of its last request. `spans` of the run: what each replica was doing when."""
    workload = setup.workload(point.load, point.seed)
    if setup.groups:
        return _simulate_fleet(setup, point, workload, pulse)
    core = setup.engine(point.spec, workload)
    end_ns = simulate(core, workload, pulse=pulse)
    core.check_returned()
    records, keep = core.recorder.records(), setup.scenario.file.keep
    return Run(point, workload, records, core.scheduler.streams, end_ns, workload.window_ns, keep=keep)


def _simulate_fleet(setup: Setup, point: Point, workload: BuiltWorkload, pulse: Pulse | None) -> Run:
    config = setup.scenario.file.replicas
    assert config is not None, "a setup has groups only with replicas"
    cores: list[EngineCore] = []

    def new_engine(replica: int) -> EngineCore:
        cores.append(setup.group_of(replica).setup.engine(point.spec, workload))
        return cores[-1]

    drain_ns, (_, end_ns) = setup.resolved.workload.drain, workload.window_ns
    fleet = simulate_fleet(
        new_engine,
        config.chosen_router.build(point.seed),
        config.plan,
        workload,
        feeds_back=not isinstance(workload, OpenWorkload),
        stop_ns=None if drain_ns is None else end_ns + drain_ns,
        until_ns=end_ns,
        join=(keep := setup.scenario.file.keep) == "all",
        pulse=pulse,
    )
    for core in cores:
        core.check_returned()
    late = [failure for failure in config.failures if failure.at >= max(fleet.end_ns, workload.window_ns[1])]
    if late:
        raise ScenarioError(
            f"{setup.scenario.places['replicas']}: replicas.failures: replica {late[0].replica} is to fail at"
            f" {format_duration(late[0].at)}, and {point.spec.name} at load {point.load:g}, seed {point.seed} ends at"
            f" {format_duration(fleet.end_ns)}. Let it fail sooner, or lengthen the workload."
        )
    streams = cores[0].scheduler.streams
    return Run(
        point, workload, fleet.records, streams, fleet.end_ns, workload.window_ns, fleet.spans, keep, fleet.lives
    )


def _anchored(setup: Setup) -> Setup:
    """`setup` with the step times by which its deployment meets its measured point, if it states one."""
    stated = setup.scenario.cost
    if not isinstance(stated, DeploymentConfig) or stated.anchor is None:
        return setup
    specs = [spec for spec in setup.scenario.specs if spec.kind == stated.engine]
    if not specs:
        raise ScenarioError(
            f"anchor: {stated.anchor} was measured under {stated.engine}, which no policy is. Add {stated.engine}."
        )
    return replace(setup, cost=anchored(setup, specs[0], stated.anchor))


def _groups(setup: Setup, replicas: ReplicasConfig) -> tuple[Group, ...]:
    """The groups of replicas, each with a setup of its own, as if the scenario were about one of its engines."""
    alone = replace(setup.scenario, file=replace(setup.scenario.file, replicas=None))
    if replicas.groups is None:
        return (Group("", replicas.total, replace(setup, scenario=alone)),)
    found = []
    for name, group in replicas.groups.items():
        file = replace(
            alone.file,
            cost=alone.file.cost if group.cost is None else group.cost,
            kv=alone.file.kv if group.kv is None else group.kv,
        )
        if file.kv.block_size != alone.file.kv.block_size:
            raise ScenarioError(
                f"{setup.scenario.places['replicas']}: replicas.groups.{name}: kv.block_size {file.kv.block_size} is"
                f" not the scenario's {alone.file.kv.block_size}. Set the same."
            )
        try:
            check_same_defaults(alone, file)
            found.append(Group(name, group.count, Setup.of(replace(alone, file=file, places={}))))
        except (ScenarioError, CalibrationError) as error:
            where = setup.scenario.places["replicas"]
            raise type(error)(f"{where}: replicas.groups.{name}: {error}") from None
    return tuple(found)


def resolve(scenario: Scenario) -> Resolved:
    """All that a machine needs to run `scenario` without reading YAML. Raises what `Setup.of` raises.

    ScenarioError for a scenario that only a simulation can run.
    """
    setup = Setup.of(scenario)
    setup.check_can_be_real()
    return setup.resolved


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


def _resolved(scenario: Scenario, model: ModelSpec, cost: Cost) -> Resolved:
    file = scenario.file
    kv = file.kv
    return Resolved(
        name=scenario.name,
        model=model,
        model_path=scenario.model_path,
        block_size=kv.block_size,
        num_blocks=None if kv.tokens is None else kv.tokens // kv.block_size,
        num_swap_blocks=kv.swap_space // (model.kv_bytes_per_token * kv.block_size),
        max_model_len=model.max_position_embeddings if file.max_model_len is None else file.max_model_len,
        max_waiting=file.max_waiting,
        workload=file.workload,
        rows=_Trace(scenario),
        policies=tuple(
            ResolvedPolicy(spec.label, spec.kind, spec.config, spec.variant, spec.predictor) for spec in scenario.specs
        ),
        load_name=scenario.load_name,
        loads=scenario.loads,
        seeds=file.seeds,
        slo=file.slo,
        profile=None if cost.profile is None else json.loads(cost.profile.to_json()),
    )


def _kv_budget(scenario: Scenario, model: ModelSpec, cost: Cost) -> KvBudget:
    """The KV blocks of one engine: as stated, else as measured by a profile, else what model and GPU leave room for.

    They are the same for every policy, beside the largest step that any of them may take.
    """
    kernel = cost.kernel if isinstance(cost, Fitted) else None
    kv, deployment, profile = scenario.file.kv, cost.deployment, (kernel or cost).profile
    if kv.tokens is not None:
        return KvBudget(kv.tokens // kv.block_size, kv.block_size, "stated in the scenario")
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
    traits = [spec.config.traits for spec in scenario.specs]
    found = own.derive_kv(
        utilisation=kv.utilisation,
        block_size=kv.block_size,
        step_tokens=max((its.max_num_batched_tokens or 0 for its in traits), default=0) or STEP_TOKENS,
        step_requests=max((its.max_num_seqs or 0 for its in traits), default=0) or STEP_REQUESTS,
    )
    most = scenario.file.max_model_len
    if (
        own.engine == "vllm"
        and isinstance(scenario.cost, DeploymentConfig)
        and most is not None
        and found.tokens < most
    ):
        raise ScenarioError(
            f"{scenario.source}: vLLM does not start with KV memory of {found.tokens:,} tokens ({found.terms}), fewer"
            f" than max_model_len {most:,}. Lower max_model_len, raise kv.utilisation, or use more GPUs."
        )
    return found
