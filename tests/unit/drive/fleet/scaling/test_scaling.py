"""KEDA's and Dynamo's autoscalers and spot losses, on timelines by hand. Steps take 10 ns, an output of n tokens n."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.base.units import NS_PER_S
from batchsim.drive.fleet.fleet_plan import Failure, FleetPlan, ReplicaSpan
from batchsim.drive.fleet.scaling.autoscaler import AutoscalerConfig, FleetLoad
from batchsim.drive.fleet.scaling.dynamo_planner import DynamoPlannerConfig
from batchsim.drive.fleet.scaling.hpa import ScalingPolicy, ScalingRules
from batchsim.drive.fleet.scaling.keda import KedaConfig, KedaTriggers
from batchsim.results.frames import frames
from tests.support.engine import arrival, outcomes
from tests.unit.drive.fleet.test_fleet import parts, run

NOW = ScalingRules(stabilization_window=0, policies=(ScalingPolicy("pods", 9, NS_PER_S),))


def keda(**more: float) -> KedaConfig:
    ends = {"every": 100, "min": 0, "max": 4, "cold_start": 20, "polling_interval": 200, "cooldown": 500, "surge": 4}
    triggers = KedaTriggers(waiting=2, running=1)
    return KedaConfig(**(ends | more), triggers=triggers, scale_up=NOW, scale_down=NOW)  # pyright: ignore


def test_keda_scales_by_totals_and_to_nothing_after_the_cooldown() -> None:
    """At 100 five wait: 5 / 2 wants 3. The last request ends at 600, so that the poll at 400 is the last that sees any:
    the one at 1000 is the first 500 ns after it, and lets the last replica go."""
    found = run(FleetPlan(1, scaler=keda()), *(arrival(i, 0, output=10) for i in range(6)), slots=1, until_ns=1200)
    assert found.spans[0] == ReplicaSpan(0, "up", 0, 1000)
    assert [span for span in found.spans if span.state == "starting"] == [
        ReplicaSpan(1, "starting", 100, 120),
        ReplicaSpan(2, "starting", 100, 120),
    ]


def test_keda_starts_the_first_replica_when_somebody_waits_at_the_router() -> None:
    """The group is empty from 600 on. A request at 710 is seen by the poll at 800 and served from 820."""
    found = run(FleetPlan(1, scaler=keda(cooldown=400)), arrival(0, 0, output=3), arrival(1, 710, output=3))
    assert found.spans[0] == ReplicaSpan(0, "up", 0, 400)
    assert ReplicaSpan(0, "starting", 800, 820) in found.spans
    assert outcomes(found.records)[1].ended_ns == 850 and parts(found, 1)["queued:no_replica"] == 110


def test_a_replica_that_comes_up_at_a_look_keeps_the_request_it_was_started_for() -> None:
    """Started at 800 for a request of 710, it is up at 1000, when a poll sees the request on its way to it."""
    plan = FleetPlan(1, scaler=keda(cooldown=0, cold_start=200))
    found = run(plan, arrival(0, 0, output=3), arrival(1, 710, output=3, deadline_ns=3000))
    served = outcomes(found.records)[1]
    assert (served.outcome, served.ended_ns, parts(found, 1)["queued:no_replica"]) == ("finished", 1030, 290)


def test_keda_needs_more_than_the_activation() -> None:
    """A request that waits alone is not above 1: it is never served."""
    plan = FleetPlan(1, scaler=keda(cooldown=400, activation=1.0))
    found = run(plan, arrival(0, 0, output=3), arrival(1, 710, output=3, deadline_ns=3000))
    assert outcomes(found.records)[1].outcome == "cancelled"


def test_who_would_wait_for_ever_is_an_error() -> None:
    """Nobody comes any more, and one alone never activates."""
    with pytest.raises(ScenarioError, match=r"no replica for 10,000 looks, and 1 request waits for one"):
        run(FleetPlan(1, scaler=keda(cooldown=400, activation=1.0)), arrival(0, 0, output=3), arrival(1, 710, output=3))


def planner(target: str) -> DynamoPlannerConfig:
    return DynamoPlannerConfig(
        every=50,
        min=1,
        max=3,
        cold_start=60,
        optimization_target=target,  # pyright: ignore[reportArgumentType]
    )


@pytest.mark.parametrize(("prompt", "count", "starts"), [(30, 5, 0), (36, 5, 1), (36, 4, 0)])
def test_dynamo_s_planner_counts_the_prompts_that_wait_as_demand(prompt: int, count: int, starts: int) -> None:
    """Of 400 tokens of KV one request runs in about `prompt` and the others wait for as much each: 150 of 400 is below
    40 %, 180 above; whole blocks of 4 are in use."""
    found = run(FleetPlan(1, scaler=planner("latency")), *(arrival(i, 0, prompt, 20) for i in range(count)), slots=1)
    assert sum(span.state == "starting" and span.start_ns == 50 for span in found.spans) == starts


def test_dynamo_s_planner_waits_for_what_starts_and_removes_one_at_a_time() -> None:
    """At 50 a replica is added; it starts until 110, so that the look at 100 adds none; the one at 150 does."""
    many = [arrival(i, 0, 36, 20) for i in range(20)]
    found = run(FleetPlan(1, scaler=planner("latency")), *many, slots=1, until_ns=8000)
    starting = [span.start_ns for span in found.spans if span.state == "starting"]
    assert starting[:2] == [50, 150]
    last = sorted(span.end_ns for span in found.spans if span.replica in (1, 2) and span.state == "up")
    assert last[-1] - last[-2] == 50


class Scripted:
    """An autoscaler that asks for what it is told to, look by look."""

    def __init__(self, *wanted: int) -> None:
        self.wanted = list(wanted)

    def desired(self, fleet: FleetLoad, now_ns: int) -> int:
        return self.wanted.pop(0) if self.wanted else fleet.num_replicas


@dataclass(frozen=True, kw_only=True)
class ScriptedConfig(AutoscalerConfig):
    wanted: tuple[int, ...]

    def build(self) -> Scripted:
        return Scripted(*self.wanted)


def scripted(*wanted: int, **more: int) -> ScriptedConfig:
    given = {"every": 100, "min": 1, "max": 3, "cold_start": 150} | more
    return ScriptedConfig(**given, wanted=wanted)


def test_the_newest_replica_is_removed_first() -> None:
    """One that still starts at 200 goes before the one that serves, and never takes a request."""
    found = run(FleetPlan(1, scaler=scripted(2, 1)), arrival(0, 0, output=100), until_ns=1000)
    assert found.spans == (ReplicaSpan(0, "up", 0, 1000), ReplicaSpan(1, "starting", 100, 200))


def test_surge_lets_new_ones_start_while_others_drain() -> None:
    """Both serve for 1,000 ns. At 100 one of two is to go and drains; at 200 two are wanted again: with max 2 there is
    no place until it is empty, with a surge of 1 one starts at once."""
    for surge, most in ((0, 2), (1, 3)):
        config = scripted(1, 2, 2, max=2, surge=surge, cold_start=10)
        found = run(FleetPlan(2, scaler=config), *(arrival(i, 0, output=100) for i in range(2)), until_ns=500)
        assert len({span.replica for span in found.spans}) == most
        assert (ReplicaSpan(2, "starting", 200, 210) in found.spans) == bool(surge)


def test_a_spot_replica_drains_in_its_notice_and_costs_nothing_until_replaced() -> None:
    """Told at 40, replica 0 gets nobody new, ends what it has at 50 and is gone then, back at 120."""
    plan = FleetPlan(2, (Failure(0, 80, 40, notice=40),), "retry")
    found = run(plan, arrival(0, 0, output=5), arrival(1, 0, output=5), arrival(2, 45), arrival(3, 46), arrival(4, 130))
    assert found.spans[:4] == (
        ReplicaSpan(0, "up", 0, 40),
        ReplicaSpan(0, "draining", 40, 50),
        ReplicaSpan(0, "lost", 50, 120),
        ReplicaSpan(0, "up", 120, 160),
    )
    assert frames(found.records)["requests"]["replica"].tolist() == [0, 1, 1, 1, 0]


def test_what_a_spot_replica_still_has_at_the_end_of_its_notice_is_lost() -> None:
    """A request of 100 ns is cut at 80 and begins anew on the other replica."""
    plan = FleetPlan(2, (Failure(0, 80, 40, notice=40),), "retry")
    found = run(plan, arrival(0, 0, output=10), arrival(1, 0, output=2))
    assert found.spans[1:3] == (ReplicaSpan(0, "draining", 40, 80), ReplicaSpan(0, "lost", 80, 120))
    assert outcomes(found.records)[0].ended_ns == 180 and parts(found, 0)["failover"] == 80


def test_a_notice_begins_in_the_run() -> None:
    """And not before it."""
    with pytest.raises(ValueError, match="a notice of 50 ns before 40 ns is before the start"):
        Failure(0, 40, 10, notice=50)
