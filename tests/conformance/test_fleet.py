"""What replicas behind a router must keep, under every policy and router: one of them is the single engine, leaping
changes nothing, and every request ends exactly once whatever fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from batchsim.base.units import NS_PER_S
from batchsim.drive.fleet.admission import AdmissionConfig
from batchsim.drive.fleet.fixed_fleet import simulate_fixed
from batchsim.drive.fleet.fleet_plan import Failure, FleetPlan
from batchsim.drive.fleet.fleet_records import EngineLife, merged
from batchsim.drive.fleet.routers.router import hears_answers_only
from batchsim.drive.fleet.routing import ROUTERS
from batchsim.drive.fleet.scaling.dynamo_planner import DynamoPlannerConfig
from batchsim.drive.fleet.scaling.hpa import HpaConfig, HpaMetrics, ScalingPolicy, ScalingRules
from batchsim.drive.fleet.scaling.keda import KedaConfig, KedaTriggers
from batchsim.drive.fleet.scaling.thresholds import KvScaler, QueueScaler
from batchsim.drive.fleet.simulate_fleet import FleetRun, simulate_fleet
from batchsim.kernel.core import EngineCore
from batchsim.kernel.record import CAP_CUT, FINISHED, UNFINISHED, Records
from batchsim.metrics.attribution import attribute
from batchsim.policies.registry import POLICIES
from tests.conformance.runs import MS, Case, built, cases
from tests.conformance.test_conformance import RANDOM, same

GIVEN: dict[str, dict[str, Any]] = {"prefix_affinity": {"prefix_tokens": 16, "load_factor": 1.25}}  # without a default
GIVEN["llm_d"] = {"metrics_interval": 2 * MS}  # short enough for these loads
CONFIGS = {kind: config(**GIVEN.get(kind, {})) for kind, config in ROUTERS.items()}
APART = sorted(kind for kind, config in CONFIGS.items() if hears_answers_only(config.build(7)))

every_policy = pytest.mark.parametrize("kind", POLICIES)


class Fleet:
    """Replicas of a case's engine; keeps the cores it made."""

    def __init__(self, case: Case, plan: FleetPlan, router: str = "least_tokens", *, feeds_back: bool = True) -> None:
        self.case, self.plan, self.router, self.feeds_back = case, plan, router, feeds_back
        self.cores: list[EngineCore] = []

    def run(self, *, leap: bool = True) -> FleetRun:
        self.cores = []
        return simulate_fleet(
            self._engine,
            CONFIGS[self.router].build(7),
            self.plan,
            self.case.workload,
            feeds_back=self.feeds_back,
            stop_ns=self.case.stop_ns,
            leap=leap,
        )

    def _engine(self, replica: int) -> EngineCore:
        self.cores.append(self.case.engine())
        return self.cores[-1]


def plain(records: Records) -> Records:
    return replace(records, replicas=None)


def equal(one: FleetRun, other: FleetRun) -> None:
    same(one.records, other.records)
    a, b = one.records.replicas, other.records.replicas
    assert a is not None and b is not None
    for name in ("requests", "steps", "states", "stays"):
        assert getattr(a, name).tobytes() == getattr(b, name).tobytes(), f"replicas of {name} differ"
    assert (one.end_ns, one.spans) == (other.end_ns, other.spans)


def _one_replica_is_the_single_engine_bit_for_bit(case: Case, data: st.DataObject) -> None:
    """Under any router the records of one replica are those of `simulate`, with and without leaping."""
    router = data.draw(st.sampled_from(sorted(ROUTERS)))
    alone = case.simulate().recorder.records()
    for leap in (True, False):
        same(plain(Fleet(case, FleetPlan(1), router).run(leap=leap).records), alone)


@st.composite
def gates(draw: st.DrawFn) -> AdmissionConfig | None:
    """No gate, or one that lets some wait, in any order."""
    order = draw(st.sampled_from([None, None, "fifo", "deadline", "priority", "vtc"]))
    if order is None:
        return None
    most = draw(st.sampled_from([2, 5, 20]))
    return AdmissionConfig(max_outstanding=most, order=order, by="class", ageing=MS if order == "priority" else None)


@st.composite
def scaling(draw: st.DrawFn) -> FleetPlan:
    """A scaler that finds reasons to act."""
    kind = draw(st.sampled_from([QueueScaler, KvScaler, HpaConfig, KedaConfig, DynamoPlannerConfig]))
    delay = draw(st.sampled_from([0, 11 * MS, 200 * MS]))
    every, cold_start = draw(st.sampled_from([3 * MS, 20 * MS])), draw(st.sampled_from([0, 5 * MS, 90 * MS]))
    common = {"every": every, "min": 1, "max": 3, "cold_start": cold_start, "surge": draw(st.sampled_from([0, 2]))}
    if kind is HpaConfig:
        name, target = draw(st.sampled_from([("waiting", 0.4), ("tokens_per_s", 100.0), ("busy_share", 0.5)]))
        policies = (ScalingPolicy("pods", 2, NS_PER_S),)
        down = ScalingRules(stabilization_window=delay, policies=policies)
        scaler = HpaConfig(**common, metrics=HpaMetrics(**{name: target}), scale_down=down)
    elif kind is KedaConfig:
        common |= {"min": draw(st.integers(0, 1)), "polling_interval": 7 * MS, "cooldown": delay}
        scaler = KedaConfig(**common, triggers=KedaTriggers(running=2.0, waiting=1.0))
    elif kind is DynamoPlannerConfig:
        scaler = DynamoPlannerConfig(**common, optimization_target="latency")
    else:
        scaler = kind(**common, above=0.5, below=0.3, scale_down_delay=delay)
    return FleetPlan(draw(st.integers(1, 3)), scaler=scaler, admission=draw(gates()))


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


def _failures_and_scaling_lose_no_request_and_leaping_changes_nothing(
    case: Case, plan: FleetPlan, data: st.DataObject
) -> None:
    """Each request ends once, its parts sum to its life, engines that stay give all memory back; leaping or not, and
    run again, the records are equal."""
    fleet = Fleet(case, plan, data.draw(st.sampled_from(sorted(ROUTERS))))
    run = fleet.run()
    cores = fleet.cores
    equal(run, fleet.run(leap=False))
    equal(run, fleet.run())
    _every_request_once(case, fleet.plan, run)
    _parts_sum(run)
    for core in cores:
        core.check_returned()


def _replicas_that_do_not_interact_may_leap_past_each_other(case: Case, data: st.DataObject) -> None:
    """Where answers cause no arrivals, leaping up to the next arrival leaves the records of stepping."""
    plan = data.draw(st.one_of(failing(), scaling()))
    fleet = Fleet(case, plan, data.draw(st.sampled_from(sorted(ROUTERS))), feeds_back=False)
    run = fleet.run()
    equal(run, fleet.run(leap=False))


def _replicas_of_a_router_that_hears_answers_only_run_apart(case: Case, data: st.DataObject) -> None:
    """Each simulated by itself, in turns of any length, leaves the records of all in one environment, and its end."""
    plan = FleetPlan(data.draw(st.integers(1, 4)))
    router = data.draw(st.sampled_from(APART))
    together = Fleet(case, plan, router, feeds_back=False).run(leap=False)
    equal(Fleet(case, plan, router, feeds_back=False).run(), together)
    cores = [case.engine() for _ in range(plan.count)]
    end_ns = simulate_fixed(cores, CONFIGS[router].build(7), case.workload, turn=data.draw(st.integers(1, 5)))
    lives = [EngineLife(replica, core.recorder.records()) for replica, core in enumerate(cores)]
    equal(FleetRun(merged(lives), end_ns, together.spans), together)


def _every_request_once(case: Case, plan: FleetPlan, run: FleetRun) -> None:
    requests, replicas = run.records.requests, run.records.replicas
    assert replicas is not None
    lengths = {a.request.id: a.output_tokens for a in case.workload.known}
    lengths |= {a.request.id: a.output_tokens for _, a in case.workload.following}
    assert requests["request_id"].tolist() == sorted(lengths)
    for row in requests[requests["outcome"] == FINISHED]:
        length = min(lengths[row["request_id"]], 400 - row["prompt_tokens"])
        if run.records.texts[row["reason"]] == CAP_CUT:
            length = min(length, row["output_tokens"])
        assert row["output_tokens"] == length
    texts = run.records.texts
    failed = [texts[row["reason"]] == "replica_failed" for row in requests]
    if plan.lost == "fail":
        assert (requests["outcome"][failed] == UNFINISHED).all() and not len(replicas.stays)
    else:
        assert not any(failed) and len(replicas.stays) == requests["num_retries"].sum()
    assert ((requests["num_retries"] > 0) == (requests["failover_ns"] > 0)).all()


def _parts_sum(run: FleetRun) -> None:
    requests = run.records.requests
    parts = attribute(run.records)
    assert (parts["ns"] > 0).all()
    lives = parts.groupby("request_id")["ns"].sum()
    for row in requests:
        end_ns = row["delivered_ns"] if row["outcome"] == FINISHED else row["ended_ns"]
        assert lives.get(row["request_id"], 0) == end_ns - row["sent_ns"]


@every_policy
@RANDOM
@given(data=st.data())
def test_replicas_of_a_random_engine_keep_what_all_must(kind: str, data: st.DataObject) -> None:
    """Each of the properties above, of one case after the other."""
    case = data.draw(cases(kind))
    assume(built(case))
    _one_replica_is_the_single_engine_bit_for_bit(case, data)
    for plans in (scaling(), failing()):
        _failures_and_scaling_lose_no_request_and_leaping_changes_nothing(case, data.draw(plans), data)
    unanswered = replace(case, workload=replace(case.workload, following=()))
    _replicas_that_do_not_interact_may_leap_past_each_other(unanswered, data)
    _replicas_of_a_router_that_hears_answers_only_run_apart(unanswered, data)
