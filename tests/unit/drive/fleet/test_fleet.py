"""Replicas in time, by hand: what a failure costs, who waits at the router, when a scaler acts. Steps take 10 ns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pandas as pd
import pytest

from batchsim.drive.fleet.fleet_plan import Failure, FleetPlan, ReplicaSpan
from batchsim.drive.fleet.fleet_records import EngineLife, by_engine, merged
from batchsim.drive.fleet.routing import (
    LeastTokens,
    LeastTokensConfig,
    PrefixAffinity,
    PrefixAffinityConfig,
    Random,
    RandomConfig,
    RoundRobin,
    RoundRobinConfig,
    ShortestQueue,
    ShortestQueueConfig,
    Stage,
)
from batchsim.drive.fleet.scaling.thresholds import KvScaler, QueueScaler
from batchsim.drive.fleet.simulate_fleet import FleetRun, simulate_fleet
from batchsim.explain.audit import audit_events
from batchsim.explain.story import Stories
from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.tokens import TokenIds
from batchsim.kernel.types import Arrival, Request
from batchsim.metrics.attribution import attribute
from batchsim.policies.families.static import Static, StaticConfig
from batchsim.results.frames import frames, to_records
from tests.support.engine import Outcome, Requests, arrival, engine, outcomes, vllm
from tests.support.metrics_helpers import records_of


def run(plan: FleetPlan, *arrivals: Arrival, slots: int = 4, leap: bool = True, **more: int) -> FleetRun:
    def new_engine(replica: int) -> EngineCore:
        return engine(vllm(CountingKV(100, 4), max_num_seqs=slots))

    router = RoundRobin(RoundRobinConfig(), 0)
    return simulate_fleet(new_engine, router, plan, Requests(*arrivals), feeds_back=False, leap=leap, **more)


def parts(found: FleetRun, request_id: int) -> dict[str, int]:
    rows = attribute(found.records)
    mine = rows[rows["request_id"] == request_id]
    return dict(zip(mine["part"].astype(str), mine["ns"].tolist(), strict=True))


def steps_of(found: FleetRun, replica: int) -> list[tuple[int, int]]:
    frame = frames(found.records)["steps"]
    mine = frame[frame["replica"] == replica]
    return list(zip(mine["start_ns"].tolist(), mine["duration_ns"].tolist(), strict=True))


@pytest.mark.parametrize("leap", [True, False])
def test_a_failing_replica_hands_its_requests_to_another_from_the_start(leap: bool) -> None:
    """Replica 0 fails amid the second step of request 0, which runs anew on replica 1 after the step there has ended;
    a request after the recovery goes to replica 0 again."""
    plan = FleetPlan(2, (Failure(0, 15, 20),), "retry")
    found = run(plan, arrival(0, 0), arrival(1, 0), arrival(2, 30), arrival(3, 40), leap=leap)
    assert outcomes(found.records) == [
        Outcome("finished", "", 20, 30, 50, 50, 3),
        Outcome("finished", "", 0, 10, 30, 30, 3),
        Outcome("finished", "", 30, 40, 60, 60, 3),
        Outcome("finished", "", 40, 50, 70, 70, 3),
    ]
    requests = frames(found.records)["requests"]
    assert requests["replica"].tolist() == [1, 1, 1, 0]
    first = requests.iloc[0]
    assert (first["sent_ns"], first["arrival_ns"], first["failover_ns"], first["num_retries"]) == (0, 15, 15, 1)
    assert parts(found, 0) == {"failover": 15, "waiting_step": 5, "prefill": 10, "decode_beside_prefill": 10} | {
        "decode_alone": 10
    }
    assert steps_of(found, 0) == [(0, 10), (10, 5), (40, 10), (50, 10), (60, 10)]
    (stay,) = frames(found.records)["stays"].to_dict("records")
    assert (stay["request_id"], stay["replica"], stay["start_ns"], stay["end_ns"]) == (0, 0, 0, 15)
    assert (stay["why"], stay["output_tokens"], stay["first_token_ns"]) == ("replica_failed", 1, 10)
    assert found.spans == (
        ReplicaSpan(0, "up", 0, 15),
        ReplicaSpan(0, "failed", 15, 35),
        ReplicaSpan(0, "up", 35, 70),
        ReplicaSpan(1, "up", 0, 70),
    )


def test_requests_wait_at_the_router_while_nobody_is_up() -> None:
    """The wait has a reason of its own; a deadline ends it, and then no replica is named."""
    plan = FleetPlan(1, (Failure(0, 15, 20),), "retry")
    found = run(plan, arrival(0, 0), arrival(1, 18, deadline_ns=25), arrival(2, 20))
    assert [(o.outcome, o.reason, o.ended_ns) for o in outcomes(found.records)] == [
        ("finished", "", 65),
        ("cancelled", "deadline", 25),
        ("finished", "", 65),
    ]
    assert parts(found, 0) == {"failover": 15, "queued:no_replica": 20, "prefill": 10, "decode_alone": 20}
    assert parts(found, 1) == {"queued:no_replica": 7}
    assert parts(found, 2) == {"queued:no_replica": 15, "prefill": 10, "decode_alone": 20}
    assert frames(found.records)["requests"]["replica"].tolist() == [0, pd.NA, 0]


def test_a_failure_may_end_its_requests() -> None:
    """`fail`: they are unfinished, with that reason and what they had generated, and are not sent again."""
    found = run(FleetPlan(2, (Failure(0, 15, 20),), "fail"), arrival(0, 0), arrival(1, 0))
    assert outcomes(found.records)[0] == Outcome("unfinished", "replica_failed", 0, 10, -1, 15, 1)
    assert outcomes(found.records)[1].outcome == "finished"
    assert found.records.replicas is not None and not len(found.records.replicas.stays)


def test_a_request_lost_twice_on_one_replica_keeps_both_lives_apart() -> None:
    """Its states on that replica are told life by life, and tables read back tell the same."""
    plan = FleetPlan(1, (Failure(0, 15, 5), Failure(0, 45, 5)), "retry")
    found = run(plan, arrival(0, 0))
    assert outcomes(found.records) == [Outcome("finished", "", 50, 60, 80, 80, 3)]
    assert parts(found, 0) == {"failover": 15 + 25, "queued:no_replica": 10, "prefill": 10, "decode_alone": 20}
    assert [len(part.requests) for _, _, part in by_engine(found.records)] == [1, 1, 1]
    records = found.records
    again = to_records(**frames(records))
    pd.testing.assert_frame_equal(attribute(again), attribute(records))


def scaler(**more: int) -> QueueScaler:
    given = {"every": 100, "min": 1, "max": 3, "cold_start": 50, "scale_down_delay": 150} | more
    return QueueScaler(above=1, below=0.5, **given)


def test_a_scaler_adds_after_a_cold_start_and_removes_after_the_delay() -> None:
    """Five requests of 100 ns on one slot. At 100 four wait for one replica, at 200 three for two: one is added each
    time. From 400 on fewer than a half wait for each, so that at 600 and 800 one is removed, and then min is held."""
    found = run(FleetPlan(1, scaler=scaler()), *(arrival(i, 0, output=10) for i in range(5)), slots=1, until_ns=2000)
    assert found.end_ns == 500
    assert found.spans == (
        ReplicaSpan(0, "up", 0, 2000),
        ReplicaSpan(1, "starting", 100, 150),
        ReplicaSpan(1, "up", 150, 800),
        ReplicaSpan(2, "starting", 200, 250),
        ReplicaSpan(2, "up", 250, 600),
    )


def test_a_scaler_adds_no_more_than_max() -> None:
    """Whatever waits, and a cold start counts as one that is there."""
    many = [arrival(i, 0, output=10) for i in range(60)]
    found = run(FleetPlan(1, scaler=scaler(max=2, cold_start=1000)), *many, slots=1)
    assert {span.replica for span in found.spans} == {0, 1}
    assert next(span for span in found.spans if span.replica) == ReplicaSpan(1, "starting", 100, 1100)


def test_a_removed_replica_ends_what_it_has_and_gets_nothing_new() -> None:
    """It drains until its last request has ended."""
    plan = FleetPlan(2, scaler=scaler(every=50, scale_down_delay=0))
    found = run(plan, arrival(0, 0, output=10), arrival(1, 0, output=10), arrival(2, 60), arrival(3, 65))
    assert found.spans[1:] == (ReplicaSpan(1, "up", 0, 50), ReplicaSpan(1, "draining", 50, 100))
    assert frames(found.records)["requests"]["replica"].tolist() == [0, 1, 0, 0]


KV = KvScaler(above=0.6, below=0.3, every=50, min=1, max=2, cold_start=10, scale_down_delay=60)


def test_a_scaler_by_kv_adds_none_to_a_replica_that_is_always_busy_and_nearly_empty() -> None:
    """A step runs at every instant, and of 100 blocks at most 4 are in use: a tenth of the load that fills it."""
    found = run(FleetPlan(1, scaler=KV), *(arrival(i, 100 * i, output=10) for i in range(10)), until_ns=1000)
    assert frames(found.records)["steps"]["duration_ns"].sum() == found.end_ns == 1000
    assert found.spans == (ReplicaSpan(0, "up", 0, 1000),)


def test_a_scaler_by_kv_adds_where_memory_fills_and_removes_where_it_is_free() -> None:
    """At 50 ns four prompts hold 76 of 100 blocks, and a second replica is added. From the look at 150 on nothing is
    held, so that it goes at 250, the first look beyond the delay."""
    found = run(FleetPlan(1, scaler=KV), *(arrival(i, 0, prompt=76, output=10) for i in range(4)), until_ns=1000)
    assert 100 < found.end_ns < 150
    assert found.spans[1:] == (ReplicaSpan(1, "starting", 50, 60), ReplicaSpan(1, "up", 60, 250))


def test_a_scaler_by_kv_leaves_out_replicas_that_take_no_requests() -> None:
    """Replica 1 drains from 50 on, nearly empty; at 100 replica 0 alone is beyond 60 %, and both together are not."""
    scaler = replace(KV, max=3, scale_down_delay=0)
    full = (arrival(2 + i, 51, prompt=76, output=10) for i in range(4))
    found = run(FleetPlan(2, scaler=scaler), arrival(0, 0, output=1), arrival(1, 0, output=30), *full)
    assert ReplicaSpan(1, "draining", 50, 300) in found.spans and ReplicaSpan(2, "starting", 100, 110) in found.spans


SOON = {"cold_start": 1, "scale_down_delay": 0}


@pytest.mark.parametrize(
    ("plan", "begins_ns"),
    [
        (
            FleetPlan(
                2, scaler=QueueScaler(above=5, below=1, every=50, min=1, max=2, cold_start=1, scale_down_delay=0)
            ),
            100,
        ),
        (FleetPlan(2, (Failure(1, 50, 500),), "fail"), 50),
    ],
    ids=["removed", "failed"],
)
def test_who_waits_for_a_full_batch_is_woken_when_the_last_other_replica_goes(plan: FleetPlan, begins_ns: int) -> None:
    """Request 4 waits on replica 0 for a second one, which answers of replica 1 might still bring; then nobody can."""

    def new_engine(replica: int) -> EngineCore:
        return engine(Static(StaticConfig(batch_size=2), PolicyContext(CountingKV(100, 4), 1_000)))

    arrivals = [arrival(i, 0, output=2 if i % 2 == 0 else 10) for i in range(4)]
    workload = Requests(*arrivals, arrival(4, 5, output=2))
    found = simulate_fleet(new_engine, RoundRobin(RoundRobinConfig(), 0), plan, workload, feeds_back=True)
    assert outcomes(found.records)[4] == Outcome("finished", "", begins_ns, begins_ns + 10, *(begins_ns + 20,) * 2, 2)


# ---- routers


def asked(id_: int, prompt: int = 10, cap: int = 10, tokens: TokenIds | None = None) -> Request:
    return Request(id_, 0, prompt, cap, tokens=tokens)


def test_round_robin_goes_on_where_replicas_are_missing() -> None:
    """The next by number of those that are up, and from the beginning after the last."""
    router = RoundRobin(RoundRobinConfig(), 0)
    ups = [(0, 1, 2), (0, 2), (0, 1, 2), (1, 2), (2,), (0, 1)]
    assert [router.route(asked(i), "both", up) for i, up in enumerate(ups)] == [0, 2, 0, 1, 2, 0]


def test_least_tokens_and_shortest_queue_count_what_is_not_answered() -> None:
    """By prompt and cap, or by number; ties go to the lowest number, and an answer takes its request away."""
    tokens, queue = LeastTokens(LeastTokensConfig(), 0), ShortestQueue(ShortestQueueConfig(), 0)
    large, small = asked(0, 50, 50), asked(1, 10, 10)
    assert [tokens.route(r, "both", (0, 1)) for r in (large, small, small, small)] == [0, 1, 1, 1]
    assert [queue.route(r, "both", (0, 1)) for r in (large, small, small, small)] == [0, 1, 0, 1]
    tokens.answered(large, "both", 0)
    queue.answered(small, "both", 1)
    assert (tokens.route(small, "both", (0, 1)), queue.route(small, "both", (0, 1))) == (0, 1)


def test_routers_keep_the_stages_of_a_request_apart() -> None:
    """Each stage has a turn of its own, and draws of its own; a prompt alone is no claim on the tokens after it."""
    turns = RoundRobin(RoundRobinConfig(), 0)
    stages: list[tuple[Stage, tuple[int, ...]]] = [("prefill", (0, 1)), ("decode", (2, 3))] * 2
    assert [turns.route(asked(i), stage, up) for i, (stage, up) in enumerate(stages)] == [0, 2, 1, 3]
    tokens = LeastTokens(LeastTokensConfig(), 0)
    assert [tokens.route(asked(0, 50, 50), stage, (0,)) for stage in ("prefill", "both")] == [0, 0]
    assert tokens.route(asked(1, 149, 1), "decode", (1,)) == 1
    assert [tokens.route(asked(2, 1, 1), "decode", (0, 1)) for _ in range(2)] == [0, 1]
    tokens.answered(asked(0, 50, 50), "prefill", 0)
    tokens.answered(asked(0, 50, 50), "both", 0)
    assert tokens.route(asked(2, 150, 1), "both", (0, 1)) == 0
    draws = Random(RandomConfig(), 1)
    by_stage = [[draws.route(asked(i), stage, (0, 1)) for i in range(100)] for stage in ("prefill", "decode", "both")]
    assert len({tuple(drawn) for drawn in by_stage}) == 3


def test_the_random_router_draws_by_seed_and_request() -> None:
    """The same request goes to the same replica whatever came before; another seed is another draw."""
    ids = range(3_000)
    one = [Random(RandomConfig(), 1).route(asked(i), "both", (0, 1, 2)) for i in ids]
    router = Random(RandomConfig(), 1)
    assert [router.route(asked(i), "both", (0, 1, 2)) for i in reversed(ids)] == one[::-1]
    assert [Random(RandomConfig(), 2).route(asked(i), "both", (0, 1, 2)) for i in ids] != one
    assert all(abs(one.count(replica) - 1_000) < 100 for replica in (0, 1, 2))


def _sharing(id_: int, stream: int) -> Request:
    return asked(id_, 30, 10, TokenIds.of([(stream, 0, 20), (1000 + 2 * id_, 0, 10)]))


def test_prompts_that_begin_alike_go_to_one_replica_within_the_bound() -> None:
    """With little outstanding a prefix keeps its replica; a hot one spills before its replica holds more than
    `load_factor` times the mean."""
    config = PrefixAffinityConfig(prefix_tokens=16, load_factor=1.5)
    router = PrefixAffinity(config, 0)
    homes: dict[int, set[int]] = {}
    for i in range(200):
        replica = router.route(_sharing(i, 2 * (i % 10)), "both", (0, 1, 2, 3))
        homes.setdefault(i % 10, set()).add(replica)
        router.answered(_sharing(i, 2 * (i % 10)), "both", replica)
    assert all(len(found) == 1 for found in homes.values()) and len(set.union(*homes.values())) > 1
    held = [0, 0, 0, 0]
    for i in range(100):
        held[router.route(_sharing(i, 0), "both", (0, 1, 2, 3))] += 1
        assert max(held) <= -(-1.5 * sum(held) // 4)
    assert max(held) == 38 and sorted(held)[1] > 0


def test_only_the_prefixes_of_a_replica_that_leaves_move() -> None:
    """All others keep theirs."""
    config = PrefixAffinityConfig(prefix_tokens=16, load_factor=100)

    def homes(up: tuple[int, ...]) -> Iterator[int]:
        for stream in range(0, 100, 2):
            yield PrefixAffinity(config, 0).route(_sharing(0, stream), "both", up)

    before, after = list(homes((0, 1, 2, 3))), list(homes((0, 1, 3)))
    assert all(now == then for then, now in zip(before, after, strict=True) if then != 2)
    assert 2 in before and 2 not in after


def test_stories_and_audit_tell_of_replicas() -> None:
    """The life that was lost is a chapter, and what a replica's requests cost each other is told replica by replica."""
    found = run(FleetPlan(2, (Failure(0, 15, 20),), "retry"), arrival(0, 0), arrival(1, 0), arrival(2, 30))
    story = Stories(found.records).tell(0)
    assert [(c.what, c.start_ns, c.end_ns) for c in story.chapters[:2]] == [
        ("failover", 0, 15),
        ("waiting_step", 15, 20),
    ]
    assert story.ns == 50
    lost = [event for event in audit_events(found.records) if event["kind"] == "lost"]
    assert [(event["time_ns"], event["replica"], event["delayed"]) for event in lost] == [(15, 0, [0])]


def test_the_host_s_part_of_a_step_stays_with_it_among_others() -> None:
    """Steps go by their start; of an engine that is not ahead the host's part is the step."""
    of_ahead = records_of([], [{"start_ns": 2, "duration_ns": 4}, {"start_ns": 6}], lanes=[(0, 2, 8, 0), (2, 4, 9, 3)])
    of_sync = records_of([], [{"start_ns": 3, "duration_ns": 2}])
    records = merged([EngineLife(0, of_ahead), EngineLife(1, of_sync)])
    assert records.lanes.tolist() == [(0, 2, 8, 0), (3, 3, 5, 0), (2, 4, 9, 3)]
    lanes = {engine.replica: engine.records.lanes.tolist() for engine in by_engine(records)}
    assert lanes == {0: [(0, 2, 8, 0), (2, 4, 9, 3)], 1: [(3, 3, 5, 0)]}
    assert not len(merged([EngineLife(0, of_sync), EngineLife(1, of_sync)]).lanes)
