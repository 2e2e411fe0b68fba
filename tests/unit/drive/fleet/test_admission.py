"""The gate before a router, by hand: buckets to the nanosecond, orders, VTC's bound, and all of it in a fleet."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from batchsim.base.units import NS_PER_S
from batchsim.drive.fleet.admission import AdmissionConfig, RateLimit
from batchsim.drive.fleet.fleet_plan import Failure, FleetPlan
from batchsim.kernel.types import Request
from batchsim.results.frames import frames
from tests.support.engine import arrival, outcomes
from tests.unit.drive.fleet.test_fleet import parts, run


def asked(id_: int, at_ns: int = 0, prompt: int = 10, cap: int = 10, **more: object) -> Request:
    return Request(id_, at_ns, prompt, cap, **more)  # pyright: ignore[reportArgumentType]


def order_of(config: AdmissionConfig, *requests: Request) -> list[int]:
    gate = config.build()
    for request in requests:
        gate.put(request)
    return [gate.pop().id for _ in range(len(gate))]


# ---- token bucket


def test_a_bucket_lets_a_burst_through_and_then_its_rate() -> None:
    """2 a second, 3 at once: 3 at time 0, the next after half a second to the nanosecond, and never more than 3."""
    gate = AdmissionConfig(rate_limit=RateLimit(of="requests", per_second=2, burst=3)).build()
    half = NS_PER_S // 2

    def said(*times_ns: int) -> list[str]:
        return [gate.refuses(asked(0), at_ns) for at_ns in times_ns]

    assert said(0, 0, 0, 0) == ["", "", "", "rate_limited"]
    assert said(half - 1, half, half) == ["rate_limited", "", "rate_limited"]
    assert said(*[100 * NS_PER_S] * 4) == ["", "", "", "rate_limited"]


def test_a_bucket_counts_requests_at_any_times_no_more_than_burst_and_rate() -> None:
    """Over every stretch of t seconds at most burst + rate × t pass, and a request that fits is never refused."""
    gate = AdmissionConfig(rate_limit=RateLimit(of="requests", per_second=5, burst=4)).build()
    draw, now_ns, passed = random.Random(1), 0, []
    for _ in range(2000):
        now_ns += draw.randrange(0, 300_000_000)
        if not gate.refuses(asked(0), now_ns):
            passed.append(now_ns)
    for first in range(0, len(passed), 7):
        for last in range(first, min(first + 60, len(passed))):
            seconds = (passed[last] - passed[first]) / NS_PER_S
            assert last - first + 1 <= 4 + 5 * seconds + 1e-6
    assert len(passed) > 0.9 * 5 * now_ns / NS_PER_S


def test_buckets_are_of_tenants_or_classes_in_requests_or_tokens() -> None:
    """One owner's empty bucket is nobody else's; 20 tokens are a prompt of 10 and a cap of 10."""
    limit = RateLimit(of="tokens", per_second=20, burst=20)
    gate = AdmissionConfig(rate_limit=limit).build()
    assert [gate.refuses(asked(0, tenant=name), 0) for name in "aab"] == ["", "rate_limited", ""]
    assert gate.refuses(asked(0, prompt=11, tenant="c"), 0) == "rate_limited"
    assert gate.refuses(asked(0, tenant="a"), NS_PER_S) == ""
    gate = AdmissionConfig(rate_limit=limit, by="class").build()
    assert [gate.refuses(asked(0, tenant="a", request_class=name), 0) for name in "xyx"] == ["", "", "rate_limited"]


# ---- orders


def test_the_earliest_deadline_goes_first_and_those_without_last() -> None:
    """Among equals who came first."""
    config = AdmissionConfig(max_outstanding=1, order="deadline")
    listed = [asked(0), asked(1, deadline_ns=90), asked(2, deadline_ns=30), asked(3, 1, deadline_ns=30), asked(4, 2)]
    assert order_of(config, *listed) == [2, 3, 1, 0, 4]


def test_earliest_deadline_first_meets_all_deadlines_that_can_be_met() -> None:
    """Of one server and equal lengths, random deadlines: where serving by deadline misses any, every order does."""
    draw = random.Random(3)
    for _ in range(50):
        deadlines = [draw.randrange(1, 12) for _ in range(6)]
        listed = [asked(i, deadline_ns=deadline) for i, deadline in enumerate(deadlines)]
        served = order_of(AdmissionConfig(max_outstanding=1, order="deadline"), *listed)
        met = all(deadlines[id_] >= place + 1 for place, id_ in enumerate(served))
        assert met == all(sum(d <= by for d in deadlines) <= by for by in range(12))  # no stretch holds more than fit


def test_ageing_lets_nobody_wait_for_ever() -> None:
    """One step of priority is worth 100 ns: who has waited 300 ns goes before one 2 steps more important."""
    config = AdmissionConfig(max_outstanding=1, order="priority", ageing=100)
    assert order_of(config, asked(0, 0, priority=3), asked(1, 50, priority=0)) == [1, 0]
    assert order_of(config, asked(0, 0, priority=2), asked(1, 250, priority=0), asked(2, 150, priority=0)) == [2, 0, 1]


def test_vtc_serves_two_who_always_wait_alike_within_its_bound() -> None:
    """Long and short requests, three tenants, any order of answers: what two who always have somebody waiting were
    served never differs by more than twice the largest request, and not by a constant share."""
    config = AdmissionConfig(max_outstanding=1, order="vtc")
    gate, draw = config.build(), random.Random(5)
    served: dict[str, float] = {"long": 0.0, "short": 0.0, "mixed": 0.0}
    for i in range(2000):
        gate.put(asked(3 * i, i, 400, 100, tenant="long"))
        gate.put(asked(3 * i + 1, i, 10, 5, tenant="short"))
        gate.put(asked(3 * i + 2, i, draw.randrange(1, 400), draw.randrange(1, 100), tenant="mixed"))
    most = 400 + 2 * 100
    while served["short"] < 30 * most:
        request = gate.pop()
        served[request.tenant] += request.prompt_tokens + 2 * request.max_output_tokens
        assert max(served.values()) - min(served.values()) <= 2 * most


def test_vtc_gives_back_what_was_not_generated_and_lets_nobody_save_up() -> None:
    """Who was charged for 100 tokens and got 10 goes before; who comes late begins where the others are."""
    config = AdmissionConfig(max_outstanding=1, order="vtc", input_weight=1, output_weight=1)
    gate = config.build()
    for i in range(40):
        gate.put(asked(i, i, 10, 100, tenant="ab"[i % 2]))
    assert [gate.pop().tenant for _ in range(4)] == ["a", "b", "a", "b"]
    gate.answered(asked(0, 0, 10, 100, tenant="b"), 10)
    assert [gate.pop().tenant for _ in range(3)] == ["b", "a", "b"]
    gate.put(asked(100, 100, 10, 100, tenant="late"))
    gate.put(asked(101, 100, 10, 100, tenant="late"))
    # a at 330, b at 350, and late begins at 330, not at 0, from where it would go three times in a row
    assert [gate.pop().tenant for _ in range(4)] == ["a", "late", "b", "a"]


def test_a_class_is_shed_while_as_many_wait_as_it_says() -> None:
    """Whoever waits counts, and other classes are let wait."""
    gate = AdmissionConfig(max_outstanding=1, shed={"batch": 2}).build()
    for i in range(2):
        assert gate.refuses(asked(i, request_class="batch"), 0) == ""
        gate.put(asked(i))
    assert [gate.refuses(asked(9, request_class=name), 0) for name in ("batch", "chat")] == ["shed", ""]
    gate.pop()
    assert gate.refuses(asked(9, request_class="batch"), 0) == ""


# ---- in a fleet: steps take 10 ns


def test_who_waits_at_the_gate_is_dispatched_as_soon_as_another_is_answered() -> None:
    """Two replicas, one request each of 30 ns: the third and fourth wait until 30, and their wait is told."""
    plan = FleetPlan(2, admission=AdmissionConfig(max_outstanding=1))
    for leap in (True, False):
        found = run(plan, *(arrival(i, 0) for i in range(4)), leap=leap)
        assert [outcome.ended_ns for outcome in outcomes(found.records)] == [30, 30, 60, 60]
        assert parts(found, 2)["queued:no_replica"] == 30


def test_the_gate_turns_away_and_lets_give_up() -> None:
    """One in flight, requests of 30 ns. Request 1 waits beyond its deadline; 2 is shed, since 1 waits; 3 goes at 30."""
    config = AdmissionConfig(max_outstanding=1, shed={"batch": 1})
    known = [arrival(0, 0), arrival(1, 1, deadline_ns=20), arrival(2, 2), arrival(3, 25)]
    known[2] = replace(known[2], request=replace(known[2].request, request_class="batch"))
    found = outcomes(run(FleetPlan(1, admission=config), *known).records)
    assert [(each.outcome, each.reason, each.ended_ns) for each in found] == [
        ("finished", "", 30),
        ("cancelled", "deadline", 20),
        ("rejected", "shed", 2),
        ("finished", "", 60),
    ]


def test_a_failure_sends_what_it_lost_through_the_gate_again() -> None:
    """Nobody is lost, asked twice for the rate, or let in beyond what the one replica left may hold."""
    config = AdmissionConfig(max_outstanding=2, rate_limit=RateLimit(of="requests", per_second=1, burst=8))
    plan = FleetPlan(2, (Failure(0, 15, 200),), "retry", admission=config)
    found = run(plan, *(arrival(i, 0) for i in range(9)))
    states = [each.outcome for each in outcomes(found.records)]
    assert states.count("finished") == 8 and states.count("rejected") == 1
    requests = frames(found.records)["requests"]
    assert requests["num_retries"].sum() == 2


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "admission holds nobody. Write max_outstanding: 64, or a rate_limit"),
        ({"order": "vtc"}, "order needs max_outstanding: without it nobody waits"),
        ({"shed": {"a": 1}}, "shed needs max_outstanding"),
        ({"max_outstanding": 1, "order": "priority"}, "order priority needs ageing, like 30s, and no other"),
        ({"max_outstanding": 1, "ageing": 5}, "order priority needs ageing, like 30s, and no other"),
        ({"max_outstanding": 1, "input_weight": 1.0}, "are for order vtc, not fifo"),
    ],
)
def test_a_gate_that_says_nothing_or_two_things_is_refused(values: dict[str, object], said: str) -> None:
    """In one line that says what to write."""
    with pytest.raises(ValueError, match=said):
        AdmissionConfig(**values)  # pyright: ignore[reportArgumentType]
