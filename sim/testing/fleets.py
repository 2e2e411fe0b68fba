"""Random fleets: replicas of a random engine behind a router, some of which fail or are scaled, and what they keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from hypothesis import strategies as st

from batchsim.base.units import NS_PER_S
from batchsim.drive.fleet.admission import AdmissionConfig
from batchsim.drive.fleet.fixed_fleet import simulate_fixed
from batchsim.drive.fleet.fleet_plan import Failure, FleetPlan
from batchsim.drive.fleet.fleet_records import EngineLife, merged
from batchsim.drive.fleet.routers.router import hears_answers_only
from batchsim.drive.fleet.scaling.autoscaler import AutoscalerConfig
from batchsim.drive.fleet.scaling.dynamo_planner import DynamoPlannerConfig
from batchsim.drive.fleet.scaling.hpa import HpaConfig, HpaMetrics, ScalingPolicy, ScalingRules
from batchsim.drive.fleet.scaling.keda import KedaConfig, KedaTriggers
from batchsim.drive.fleet.scaling.kinds import Scaler
from batchsim.drive.fleet.scaling.thresholds import KvScaler, QueueScaler
from batchsim.drive.fleet.simulate_fleet import FleetRun, simulate_fleet
from batchsim.kernel.core import EngineCore
from batchsim.kernel.record import CAP_CUT, FINISHED, UNFINISHED
from batchsim.metrics.attribution import attribute
from batchsim.testing.by_hand import same
from batchsim.testing.random_configs import MAX_MODEL_LEN, MS, configs, knobs, made
from batchsim.testing.random_engines import Case

ROUTER_SEED = 7


@dataclass(frozen=True)
class Fleet:
    """Replicas of a case's engine behind a router; `turn` is how many requests one of them is simulated by at once
    where they are simulated apart."""

    case: Case
    router: Any
    plan: FleetPlan
    turn: int = 1

    def run(self, *, leap: bool = True, feeds_back: bool = True, cores: list[EngineCore] | None = None) -> FleetRun:
        """What the fleet did; `cores` is filled with its engines. Without `feeds_back` no answer causes a request."""
        made = [] if cores is None else cores

        def engine(replica: int) -> EngineCore:
            made.append(self.case.engine())
            return made[-1]

        router = self.router.build(ROUTER_SEED)
        workload, stop_ns = self.case.workload, self.case.stop_ns
        return simulate_fleet(engine, router, self.plan, workload, feeds_back=feeds_back, stop_ns=stop_ns, leap=leap)

    @property
    def unanswered(self) -> Fleet:
        """The same fleet with requests of which none waits for an answer."""
        return replace(self, case=replace(self.case, workload=replace(self.case.workload, following=())))


def equal(one: FleetRun, other: FleetRun) -> None:
    """AssertionError unless both fleets did the same, byte for byte."""
    same(one.records, other.records)
    a, b = one.records.replicas, other.records.replicas
    assert a is not None and b is not None
    for name in ("requests", "steps", "states", "stays"):
        assert getattr(a, name).tobytes() == getattr(b, name).tobytes(), f"replicas of {name} differ"
    assert (one.end_ns, one.spans) == (other.end_ns, other.spans), "the lives of replicas differ"


@st.composite
def gates(draw: st.DrawFn) -> AdmissionConfig | None:
    """No gate, or one that lets some wait, in any order."""
    order: Any = draw(st.sampled_from([None, None, "fifo", "deadline", "priority", "vtc"]))
    if order is None:
        return None
    most = draw(st.sampled_from([2, 5, 20]))
    return AdmissionConfig(max_outstanding=most, order=order, by="class", ageing=MS if order == "priority" else None)


@st.composite
def scaler_knobs(draw: st.DrawFn, kind: type[AutoscalerConfig], fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Knobs with which this autoscaler finds reasons to act, the `fixed` ones among them."""
    delay = draw(st.sampled_from([0, 11 * MS, 200 * MS]))
    every, cold_start = draw(st.sampled_from([3 * MS, 20 * MS])), draw(st.sampled_from([0, 5 * MS, 90 * MS]))
    drawn: dict[str, Any] = {"every": every, "min": 1, "max": 3, "cold_start": cold_start}
    drawn["surge"] = draw(st.sampled_from([0, 2]))
    if kind is HpaConfig:
        name, target = draw(st.sampled_from([("waiting", 0.4), ("tokens_per_s", 100.0), ("busy_share", 0.5)]))
        down = ScalingRules(stabilization_window=delay, policies=(ScalingPolicy("pods", 2, NS_PER_S),))
        drawn |= {"metrics": HpaMetrics(**{name: target}), "scale_down": down}
    elif kind is KedaConfig:
        triggers = KedaTriggers(running=2.0, waiting=1.0)
        drawn |= {"min": draw(st.integers(0, 1)), "polling_interval": 7 * MS, "cooldown": delay, "triggers": triggers}
    elif kind is DynamoPlannerConfig:
        drawn |= {"optimization_target": "latency"}
    elif kind in (QueueScaler, KvScaler):
        drawn |= {"above": 0.5, "below": 0.3, "scale_down_delay": delay}
    else:
        return draw(knobs(kind, drawn | dict(fixed)))
    return drawn | dict(fixed)


SCALERS: tuple[type[AutoscalerConfig], ...] = get_args(Scaler)
"""The shipped autoscalers, by their configs."""


@st.composite
def scaling(
    draw: st.DrawFn, kind: type[AutoscalerConfig] | None = None, fixed: Mapping[str, Any] | None = None
) -> FleetPlan:
    """A fleet under this autoscaler, or under any shipped one."""
    asked = draw(st.sampled_from(SCALERS)) if kind is None else kind
    makes = scaler_knobs(asked, fixed or {}).map(lambda drawn: made(asked, drawn))
    scaler = draw(makes.filter(lambda one: one is not None))
    return FleetPlan(draw(st.integers(max(1, scaler.min), scaler.max)), scaler=scaler, admission=draw(gates()))


@st.composite
def failing(draw: st.DrawFn) -> FleetPlan:
    """One to three replicas of which some fail, often in the middle of steps."""
    count = draw(st.integers(1, 3))
    failures, free_ns = [], [0] * count
    for _ in range(draw(st.integers(2, 6))):
        replica = draw(st.integers(0, count - 1))
        at_ns = free_ns[replica] + draw(st.sampled_from([3 * MS, 7_654_321, 2_030_000, 20 * MS]))
        down_ns = draw(st.sampled_from([1, 2 * MS, 9 * MS]))
        notice_ns = draw(st.sampled_from([0, 0, at_ns - free_ns[replica]]))
        failures.append(Failure(replica, at_ns, down_ns, notice_ns))
        free_ns[replica] = at_ns + down_ns + 1
    return FleetPlan(count, tuple(failures), draw(st.sampled_from(["retry", "retry", "fail"])), None, draw(gates()))


@st.composite
def routers(draw: st.DrawFn, config: Any, fixed: Mapping[str, Any]) -> Any:
    """A config of this router with the `fixed` knobs; None where it refuses them. Metrics are read often."""
    often = {"metrics_interval": 2 * MS} if "metrics_interval" in {knob.name for knob in fields(config)} else {}
    return draw(configs(config, often | dict(fixed)))


def one_replica_equals_engine(fleet: Fleet) -> None:
    """One replica leaves the records of `simulate`, with and without leaping."""
    alone = fleet.case.simulate().recorder.records()
    one = replace(fleet, plan=FleetPlan(1))
    for leap in (True, False):
        same(replace(one.run(leap=leap).records, replicas=None), alone)


def conservation(fleet: Fleet) -> None:
    """Each request ends once whatever fails, its parts sum to its life, engines that stay give all memory back."""
    cores: list[EngineCore] = []
    run = fleet.run(cores=cores)
    _every_request_once(fleet, run)
    _parts_sum(run)
    for core in cores:
        core.check_returned()


def leap_equals_stepping(fleet: Fleet) -> None:
    """Leaping leaves the records of stepping; so it does up to the next arrival where answers cause none."""
    equal(fleet.run(), fleet.run(leap=False))
    fleet = fleet.unanswered
    equal(fleet.run(feeds_back=False), fleet.run(feeds_back=False, leap=False))


def equal_seeds(fleet: Fleet) -> None:
    """The same fleet with the same requests and the same seed of its router, run again, leaves equal bytes."""
    equal(fleet.run(), fleet.run())


def apart_equals_together(fleet: Fleet) -> None:
    """Of a router that hears answers only: replicas simulated by themselves, in turns of any length, leave the records
    of all in one environment, and its end."""
    if not hears_answers_only(fleet.router.build(ROUTER_SEED)):
        return
    fleet = replace(fleet.unanswered, plan=FleetPlan(fleet.plan.count))
    together = fleet.run(feeds_back=False, leap=False)
    equal(fleet.run(feeds_back=False), together)
    cores = [fleet.case.engine() for _ in range(fleet.plan.count)]
    end_ns = simulate_fixed(cores, fleet.router.build(ROUTER_SEED), fleet.case.workload, turn=fleet.turn)
    lives = [EngineLife(replica, core.recorder.records()) for replica, core in enumerate(cores)]
    equal(FleetRun(merged(lives), end_ns, together.spans), together)


def _every_request_once(fleet: Fleet, run: FleetRun) -> None:
    requests, replicas = run.records.requests, run.records.replicas
    assert replicas is not None
    workload = fleet.case.workload
    arrivals = [*workload.known, *(arrival for _, arrival in workload.following)]
    lengths = {arrival.request.id: arrival.output_tokens or 0 for arrival in arrivals}
    assert requests["request_id"].tolist() == sorted(lengths), "not every request ended once"
    for row in requests[requests["outcome"] == FINISHED]:
        length = min(lengths[row["request_id"]], MAX_MODEL_LEN - row["prompt_tokens"])
        if run.records.texts[row["reason"]] == CAP_CUT:
            length = min(length, row["output_tokens"])
        assert row["output_tokens"] == length, f"request {row['request_id']} has another length than its own"
    texts = run.records.texts
    failed = [texts[row["reason"]] == "replica_failed" for row in requests]
    if fleet.plan.lost == "fail":
        assert (requests["outcome"][failed] == UNFINISHED).all() and not len(replicas.stays)
    else:
        assert not any(failed) and len(replicas.stays) == requests["num_retries"].sum()
    assert ((requests["num_retries"] > 0) == (requests["failover_ns"] > 0)).all()


def _parts_sum(run: FleetRun) -> None:
    requests = run.records.requests
    parts: Any = attribute(run.records)
    assert (parts["ns"] > 0).all()
    lives = parts.groupby("request_id")["ns"].sum()
    for row in requests:
        end_ns = row["delivered_ns"] if row["outcome"] == FINISHED else row["ended_ns"]
        assert lives.get(row["request_id"], 0) == end_ns - row["sent_ns"], "the parts of a life do not sum to it"
