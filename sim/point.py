"""One point of a scenario: builds its engine and simulates it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from sim.catalog import load_gpu, load_model
from sim.core import EngineCore, SimExecutor
from sim.cost import Cost, RooflineConfig, build_cost
from sim.errors import ScenarioError
from sim.kv import CountingKV, KVBlockManager
from sim.model import GpuSpec, KvBudget, ModelSpec, derive_kv
from sim.record import Recorder, Records
from sim.scenario import Point, PolicySpec, Scenario
from sim.simulate import simulate
from sim.types import PolicyContext, Request, Scheduler
from sim.workload.build import BuiltWorkload, build_workload
from sim.workload.predictors import build_predictor

_ATTRIBUTES = ("kv", "events", "streams", "num_waiting", "num_running")


@dataclass(frozen=True)
class Setup:
    """What all points of a scenario share. Building it finds unknown models, GPUs and budgets that do not fit."""

    scenario: Scenario
    model: ModelSpec
    cost: Cost
    kv: KvBudget
    max_model_len: int

    @classmethod
    def of(cls, scenario: Scenario) -> Setup:
        """ScenarioError if model, GPU, KV memory and policies do not go together."""
        file = scenario.file
        with scenario.at("model"):
            model = load_model(scenario.model_path)
        limit = model.max_position_embeddings
        max_model_len = limit if file.max_model_len is None else file.max_model_len
        if max_model_len > limit:
            raise ScenarioError(
                f"{scenario.places['max_model_len']}: max_model_len {max_model_len} is above the {limit} positions of"
                f" {model.name}. Lower it."
            )
        with scenario.at("cost"):
            cost = build_cost(file.cost, model, block_size=file.kv.block_size)
            setup = cls(scenario, model, cost, _kv_budget(scenario, model), max_model_len)
        for spec in scenario.specs:
            with scenario.at(f"policies.{spec.label}"):
                setup.scheduler(spec, setup.new_kv())
        return setup

    @property
    def gpu(self) -> GpuSpec | None:
        """The GPU of a roofline; other costs have none."""
        config = self.scenario.cost
        return load_gpu(config.gpu) if isinstance(config, RooflineConfig) else None

    @property
    def num_gpus(self) -> int:
        config = self.scenario.cost
        return config.tp if isinstance(config, RooflineConfig) else 1

    @cached_property
    def num_swap_blocks(self) -> int:
        block_bytes = self.model.kv_bytes_per_token * self.kv.block_size
        return self.scenario.file.kv.swap_space // block_bytes

    def new_kv(self) -> CountingKV:
        return CountingKV(self.kv.num_blocks, self.kv.block_size, self.num_swap_blocks)

    def workload(self, load: float, seed: int) -> BuiltWorkload:
        """The requests of a load and seed: the same for every policy."""
        scenario = self.scenario
        return build_workload(
            scenario.file.workload,
            load=scenario.load_override(load),
            seed=seed,
            max_model_len=self.max_model_len,
            base=scenario.base,
        )

    def scheduler(self, spec: PolicySpec, kv: KVBlockManager, workload: BuiltWorkload | None = None) -> Scheduler:
        """A new scheduler of `spec`. Without a workload its predictor only stands in for one."""
        predictor = None
        if spec.predictor is not None:
            predictor = _Unasked() if workload is None else build_predictor(spec.predictor, workload)
        scheduler = spec.policy(spec.config, PolicyContext(kv, self.max_model_len, predictor, self.cost))
        missing = [name for name in _ATTRIBUTES if not hasattr(scheduler, name)]
        if missing:
            raise ScenarioError(f"{spec.kind} has no {', '.join(missing)}. See the Scheduler protocol in sim/types.py.")
        return scheduler

    def engine(self, spec: PolicySpec, workload: BuiltWorkload) -> EngineCore:
        """A new engine for one simulation."""
        drain_ns = self.scenario.file.workload.drain
        return EngineCore(
            self.scheduler(spec, self.new_kv(), workload),
            SimExecutor(self.cost, self.max_model_len),
            Recorder(),
            max_model_len=self.max_model_len,
            max_waiting=self.scenario.file.max_waiting,
            per_chunk_ns=workload.frontend.per_chunk,
            stop_ns=None if drain_ns is None else workload.window_ns[1] + drain_ns,
        )


class _Unasked:
    """Stands for a predictor while a policy's knobs are only being checked."""

    name = "unasked"

    def predict(self, request: Request) -> int:
        raise AssertionError("a scheduler must not predict before a request arrives")


@dataclass(frozen=True)
class Run:
    """A simulated point."""

    point: Point
    workload: BuiltWorkload
    records: Records
    streams: bool
    end_ns: int


def simulate_point(setup: Setup, point: Point) -> Run:
    """Simulates one point to the end of its last request."""
    workload = setup.workload(point.load, point.seed)
    core = setup.engine(point.spec, workload)
    end_ns = simulate(core, workload)
    core.check_returned()
    return Run(point, workload, core.recorder.records(), core.scheduler.streams, end_ns)


def _kv_budget(scenario: Scenario, model: ModelSpec) -> KvBudget:
    kv, cost = scenario.file.kv, scenario.cost
    if kv.tokens is not None:
        return KvBudget(kv.tokens // kv.block_size, kv.block_size, "stated in the scenario")
    if not isinstance(cost, RooflineConfig):
        raise ScenarioError(f"cost {cost.kind} has no GPU to derive KV memory from. Add kv: tokens.")
    return derive_kv(model, load_gpu(cost.gpu), utilisation=kv.utilisation, block_size=kv.block_size, tp=cost.tp)
