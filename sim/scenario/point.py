"""One point of a scenario, simulated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from batchsim.base.errors import ScenarioError
from batchsim.base.units import format_duration
from batchsim.drive.fleet.fleet_plan import ReplicaSpan
from batchsim.drive.fleet.fleet_records import EngineLife
from batchsim.drive.fleet.lockstep.passes import LockstepCost
from batchsim.drive.fleet.lockstep.rank_costs import IteratedCosts, RankCosts
from batchsim.drive.fleet.lockstep.recorded_ranks import simulate_iterations, simulate_ranks
from batchsim.drive.fleet.pools import Pools, PrefillCore, simulate_pools
from batchsim.drive.fleet.rooms import Rooms, SendingCore
from batchsim.drive.fleet.shared_gpu import Models, simulate_shared
from batchsim.drive.fleet.side_by_side import simulate_side_by_side
from batchsim.drive.fleet.simulate_fleet import FleetRun, simulate_fleet
from batchsim.drive.fleet.sleeping import SleepConfig
from batchsim.drive.simulate import Pulse, simulate
from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_rooms import RoomConnector
from batchsim.kernel.kv_transfer import KvConnector
from batchsim.kernel.record import Records
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm_config import TensorrtLlmConfig
from batchsim.scenario.config import Keep, Point, PolicySpec
from batchsim.scenario.pooled import block_bytes
from batchsim.scenario.ranks import graph_sizes, of_rank, shares_experts
from batchsim.scenario.replicas_config import ReplicasConfig
from batchsim.scenario.setup import Setup
from batchsim.workload.build import BuiltWorkload
from batchsim.workload.open_loop import OpenWorkload
from batchsim.workload.rollout import RolloutWorkload

_CORES: dict[str, type[EngineCore]] = {"kv_producer": PrefillCore, "prefill": SendingCore}
"""The engines that hand requests over, by their role."""


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
    if setup.are_ranks:
        run = _simulate_ranks(setup, point, workload)
    elif setup.groups:
        run = _simulate_fleet(setup, point, workload, pulse)
    else:
        run = _simulate_one(setup, point, workload, pulse)
    if isinstance(workload, RolloutWorkload):
        workload.check_done()
    return run


def _simulate_one(setup: Setup, point: Point, workload: BuiltWorkload, pulse: Pulse | None) -> Run:
    core = setup.engine(point.spec, workload)
    end_ns = simulate(core, workload, pulse=pulse)
    core.check_returned()
    records, keep = core.recorder.records(), setup.scenario.file.keep
    return Run(point, workload, records, core.scheduler.streams, end_ns, workload.window_ns, keep=keep)


def _simulate_ranks(setup: Setup, point: Point, workload: BuiltWorkload) -> Run:
    keep, window_ns = setup.scenario.file.keep, workload.window_ns
    fleet = _run_ranks(setup, point.spec, workload, window_ns[1], join=keep == "all")
    return Run(point, workload, fleet.records, True, fleet.end_ns, window_ns, fleet.spans, keep, fleet.lives)


def _simulate_fleet(setup: Setup, point: Point, workload: BuiltWorkload, pulse: Pulse | None) -> Run:
    config = setup.scenario.file.replicas
    assert config is not None, "a setup has groups only with replicas"
    cores: list[EngineCore] = []

    def new_engine(replica: int) -> EngineCore:
        cores.append(setup.group_of(replica).setup.engine(point.spec, workload))
        return cores[-1]

    drain_ns, (_, end_ns) = setup.traffic.drain, workload.window_ns
    keep, router = setup.scenario.file.keep, config.new_router(point.seed)
    stop_ns = None if drain_ns is None else end_ns + drain_ns
    options = {"stop_ns": stop_ns, "until_ns": end_ns, "join": keep == "all", "pulse": pulse}
    if config.transfer is not None:
        prefill, decode = setup.groups
        size = block_bytes(setup.model, decode.setup.cost, setup.kv.block_size)
        sizes = prefill.count, decode.count, config.transfer, size
        decider = None if config.local_prefill is None else config.local_prefill.build()
        fails = partial(config.transfer.fails, point.seed)
        pools = Rooms(*sizes, fails) if point.spec.kind == "sglang" else Pools(*sizes, decider, fails)

        def new_pooled(number: int) -> EngineCore:
            cores.append(_pooled_engine(setup.group_of(number).setup, point, workload, pools.connector(number)))
            pools.records(number, cores[-1].recorder)
            return cores[-1]

        fleet = simulate_pools(new_pooled, router, pools, workload, **options)
    elif config.share is not None:
        homes = {group.name: number for number, group in enumerate(setup.groups)}
        sharing = [homes[name] for name, group in (config.groups or {}).items() if not group.own_gpu]
        fleet = simulate_side_by_side(new_engine, homes, sharing, workload, **options)
    elif config.sleep is not None:
        fleet = simulate_shared(new_engine, _models_of(setup, config, config.sleep), workload, **options)
    else:
        feeds_back = not isinstance(workload, OpenWorkload)
        fleet = simulate_fleet(new_engine, router, config.plan, workload, feeds_back=feeds_back, **options)
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


def _pooled_engine(setup: Setup, point: Point, workload: BuiltWorkload, connector: KvConnector) -> EngineCore:
    """A new engine of one of two pools, which `setup` describes; `connector` passes its KV on."""
    own = next(spec for spec in setup.scenario.specs if spec.name == point.spec.name)
    cost = setup.cost_under(own.config)
    executor = SimExecutor(cost, setup.max_model_len, own.config.traits.loop)
    kind = _CORES.get(getattr(own.config, "kv_role", getattr(own.config, "disaggregation_mode", "")), EngineCore)
    core = setup.engine_on(executor, own, workload, setup.new_kv(own.config), cost, connector=connector, kind=kind)
    if isinstance(connector, RoomConnector) and kind is EngineCore:
        core.max_waiting = None  # who is refused for too long a queue was so where its prompt is computed
    return core


def _run_ranks(setup: Setup, spec: PolicySpec, workload: BuiltWorkload, until_ns: int, *, join: bool) -> FleetRun:
    """Simulates the ranks of `setup` under `spec`, as `simulate_ranks` does."""
    replicas, config = setup.scenario.file.replicas, spec.config
    assert replicas is not None and replicas.lockstep is not None and replicas.count is not None, "checked by Setup"
    one = setup.groups[0].setup
    spec = replace(spec, config=of_rank(config, replicas.count))
    config = spec.config
    cost, loop = one.cost_under(config), config.traits.loop
    lanes = cost.lanes()
    cores: list[EngineCore] = []
    for _ in range(replicas.count):
        executor = SimExecutor(LockstepCost(lanes), one.max_model_len, loop)
        cores.append(one.engine_on(executor, spec, workload, one.new_kv(config), cost))
    deployment = cost.deployment
    tp, gpu = (1, None) if deployment is None else (deployment.tp, deployment.gpu)
    step_ns, sizes = cost.step_ns, graph_sizes(config, replicas.lockstep, gpu, replicas.count, tp)
    if loop.is_ahead:
        step_ns = lanes.device_ns
    experts_ns = cost.experts_ns if shares_experts(cost) else None
    if spec.kind == "sglang":
        costs = IteratedCosts(step_ns, sizes, experts_ns, tp)
        fleet = simulate_iterations(cores, costs, workload, until_ns=until_ns, join=join)
    elif isinstance(config, TensorrtLlmConfig):
        costs, most = RankCosts(step_ns, sizes, experts_ns), config.max_batch_size
        fleet = simulate_iterations(cores, costs, workload, most_active=most, until_ns=until_ns, join=join)
    else:
        costs = RankCosts(step_ns, sizes, experts_ns)
        fleet = simulate_ranks(cores, costs, replicas.lockstep, workload, until_ns=until_ns, join=join)
    for core in cores:
        core.check_returned()
    return fleet


def _models_of(setup: Setup, replicas: ReplicasConfig, sleep: SleepConfig) -> Models:
    """The models of `setup`, with how long the weights of each that shares the GPU take to move."""
    written, moves = replicas.groups or {}, {}
    for number, group in enumerate(setup.groups):
        if not written[group.name].own_gpu:
            model, deployment = group.setup.model, group.setup.cost.deployment
            moves[number] = sleep.moves(model.weight_bytes if deployment is None else deployment.weight_bytes)
    return Models({group.name: number for number, group in enumerate(setup.groups)}, moves, sleep.min_awake)
