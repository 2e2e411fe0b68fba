"""A small scenario and runs of it that stand for live ones: the simulation with a known distortion."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchsim.base.plain import to_plain
from batchsim.check.validation.live_runs import LivePoint, Simulated, ValidationSetup, judge
from batchsim.check.validation.verdicts import BOUNDS
from batchsim.cost.base import Cost
from batchsim.cost.constant import Linear
from batchsim.drive.live import VirtualClock, live
from batchsim.kernel.batch import Batch
from batchsim.kernel.record import Records
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.report.validation_report import Judged, Validation
from batchsim.scenario import load_scenario
from batchsim.scenario.config import PolicySpec
from batchsim.scenario.setup import Setup
from tests.support.paths import ROOT

LOAD = 14.0
SCENARIO = ROOT / "scenarios" / "live-demo.yaml"
COST = Linear(base=2_200_000, per_token=80_000, per_sequence=250_000, per_context_token=600)


@dataclass(frozen=True)
class Sample:
    """A run with the fields of a live result."""

    policy: str
    load: float
    seed: int
    repeat: int
    records: Records
    kernel_ns: NDArray[np.int64]
    rested: NDArray[np.int64]
    end_ns: int
    streams: bool
    num_blocks: int
    made: dict[str, Any]
    window_ns: tuple[int, int]
    reason: str = ""


@dataclass
class Distorted:
    """`cost` with every step longer by `factor`, and by up to `jitter` of itself more, step by step at random.

    The steps numbered in `burst` take twice as long."""

    cost: Linear
    factor: float
    jitter: float
    rng: np.random.Generator
    burst: range
    steps: int = 0

    def step_ns(self, batch: Batch) -> int:
        self.steps += 1
        burst = 2 if self.steps in self.burst else 1
        return round(self.cost.step_ns(batch) * self.factor * burst * (1 + self.jitter * self.rng.random()))


@cache
def demo() -> Setup:
    """The shipped demo."""
    return Setup.of(load_scenario(str(SCENARIO)))


_SIMULATED: dict[tuple[int, int, float], tuple[Setup, PolicySpec, Simulated]] = {}


class Remembered(ValidationSetup):
    """Simulates a policy at a load once: every point asks for the same 17 loads around its own."""

    def simulate(self, policy: PolicySpec, load: float) -> Simulated:
        key = id(self.setup), id(policy), load
        if key not in _SIMULATED:  # kept with what its ids are of, so that nothing else gets them
            _SIMULATED[key] = self.setup, policy, super().simulate(policy, load)
        return _SIMULATED[key][2]


@cache
def case(cost: Cost = COST) -> ValidationSetup:
    """The demo as `cost` predicts it."""
    return Remembered(replace(demo(), cost=cost), seed=0)


def played(
    policy: str | PolicySpec,
    load: float,
    factor: float = 1.0,
    *,
    jitter: float = 0.0,
    repeat: int = 0,
    burst: range = range(0),
) -> Sample:
    """A run of the demo whose steps take `factor` times what COST says, and up to `jitter` more; twice in a `burst`."""
    setup = demo()
    spec = setup.scenario.find(policy) if isinstance(policy, str) else policy
    workload, kv = setup.workload(load, 0), setup.new_kv(spec.config)
    cost = Distorted(COST, factor, jitter, np.random.default_rng(repeat), burst)
    core = setup.engine_on(SimExecutor(cost, setup.max_model_len), spec, workload, kv, COST)
    run = live(core, workload, VirtualClock())
    records = core.recorder.records()
    return Sample(
        spec.name,
        load,
        0,
        repeat,
        records,
        np.empty(0, np.int64),
        np.array(run.rested, np.int64),
        run.end_ns,
        core.scheduler.streams,
        kv.num_blocks,
        made_of(setup, spec) | {"drift": [0.0, 0.0], "drift_of_means": [0.0, 0.0]},
        workload.window_ns,
    )


def made_of(setup: Setup, policy: PolicySpec) -> dict[str, Any]:
    """What a live run of `policy` says of itself."""
    return {
        "device": "cpu",
        "hardware": {"device": "cpu", "cpu": "none"},
        "model": to_plain(setup.model),
        "block_size": setup.kv.block_size,
        "num_swap_blocks": setup.num_swap_blocks,
        "max_model_len": setup.max_model_len,
        "knobs": policy.plain,
    }


def late(sample: Sample, lag_ns: int) -> Sample:
    """The same run, had its load source handed every request over `lag_ns` late."""
    requests = sample.records.requests.copy()
    requests["lag_ns"] = lag_ns
    return replace(sample, records=replace(sample.records, requests=requests))


@cache
def point(policy: str = "continuous", *factors: float, share: float | None = 0.5) -> LivePoint:
    """A point whose live runs are slower than the simulation by these factors."""
    lives = [played(policy, LOAD, factor, repeat=i) for i, factor in enumerate(factors)]
    return judge(case(), demo().scenario.find(policy), LOAD, share, lives)


def validation(*points: LivePoint, device: str = "cpu") -> Validation:
    judged = Judged("mean_rate", BOUNDS[device], {found.policy: 20.0 for found in points})
    return Validation("x", "live-demo", "demo · a machine", {"seed": 0}, points, judged)
