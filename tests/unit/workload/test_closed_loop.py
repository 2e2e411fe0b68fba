"""Closed loops: who sends what when, whatever the order of the answers."""

import heapq
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from batchsim.base.errors import ScenarioError
from batchsim.base.units import NS_PER_S
from batchsim.workload.build import build_workload, intended_ns
from batchsim.workload.laws import GammaTokens, LognormalTokens
from batchsim.workload.lengths import Lengths
from batchsim.workload.predictors import ClassMeanConfig, OracleConfig, build_predictor
from batchsim.workload.workload_config import ClosedLoop, Frontend, TrafficClass, WorkloadConfig

LENGTHS = Lengths(LognormalTokens(500, 1.0), GammaTokens(100, 0.8))


def build(users=4, think_time=NS_PER_S, think_kind="exponential", *, load=None, loop=None, **fields):
    """A closed loop of ten minutes unless `requests` is given; `loop` are further fields of it."""
    if "requests" not in fields:
        fields.setdefault("duration", 600 * NS_PER_S)
    config = WorkloadConfig(ClosedLoop(users, think_time, think_kind, **(loop or {})), 1024, LENGTHS, **fields)
    return build_workload(config, load=load or {}, seed=1, max_model_len=32_768, base=Path())


def drive(workload, service_ns):
    """Everything sent when each request takes `service_ns(request)`; answers come in the order of their times."""
    sent, open_requests = [], []

    def take(arrival):
        if arrival is not None:
            sent.append(arrival)
            end_ns = arrival.request.arrival_ns + service_ns(arrival.request)
            heapq.heappush(open_requests, (end_ns, arrival.request.id, arrival.request))

    for arrival in workload.arrivals():
        take(arrival)
    while open_requests:
        end_ns, _, request = heapq.heappop(open_requests)
        take(workload.responded(request, end_ns))
    return sent


def test_draws_depend_on_user_and_turn_only():
    """Fast, slow and reordering engines get the same j-th request of user u."""
    engines = [lambda r: NS_PER_S, lambda r: 20 * NS_PER_S, lambda r: (r.prompt_tokens * 7919) % (9 * NS_PER_S)]
    runs = [
        {a.request.id: (a.request.prompt_tokens, a.output_tokens) for a in drive(build(), engine)} for engine in engines
    ]
    shared = set.intersection(*(set(run) for run in runs))
    assert len(shared) > 80
    assert all(runs[0][i] == runs[1][i] == runs[2][i] for i in shared)
    assert len(runs[0]) > 2 * len(runs[1])


def test_more_users_do_not_change_what_the_first_ones_ask():
    """The load axis adds users; request (user, turn) stays as it is, under another id."""

    def by_user(users):
        sent = drive(build(load={"users": users}), lambda r: NS_PER_S)
        return {divmod(a.request.id, users)[::-1]: (a.request.prompt_tokens, a.request.arrival_ns) for a in sent}

    few, many = by_user(2), by_user(8)
    assert few.items() <= many.items()
    assert {user for user, _ in many} == set(range(8))


def test_a_user_has_one_request_out_and_thinks_between():
    """The next request follows the answer by the think time; ids are turn * users + user."""
    sent = drive(build(users=3, think_time=5 * NS_PER_S, think_kind="constant"), lambda r: 2 * NS_PER_S)
    for user in range(3):
        own = [a.request for a in sent if a.request.id % 3 == user]
        assert [r.id // 3 for r in own] == list(range(len(own)))
        assert {b.arrival_ns - a.arrival_ns for a, b in pairwise(own)} == {7 * NS_PER_S}


def test_users_are_met_amid_a_think_time():
    """First requests of constant thinkers are uniform over the think time, those of exponential ones exponential."""
    constant = [a.request.arrival_ns for a in build(1000, 8 * NS_PER_S, "constant").arrivals()]
    assert (np.mean(constant), np.max(constant)) == pytest.approx((4e9, 8e9), rel=0.05)
    exponential = [a.request.arrival_ns for a in build(1000, 8 * NS_PER_S).arrivals()]
    assert (np.mean(exponential), np.std(exponential)) == pytest.approx((8e9, 8e9), rel=0.08)
    keys = [(a.request.arrival_ns, a.request.id) for a in build(50).arrivals()]
    assert keys == sorted(keys)


def test_nothing_is_sent_at_or_after_the_duration():
    """The loop ends with the duration, which is the window's end."""
    workload = build(duration=60 * NS_PER_S, warmup=NS_PER_S)
    sent = drive(workload, lambda r: NS_PER_S)
    assert 50 * NS_PER_S < max(a.request.arrival_ns for a in sent) < 60 * NS_PER_S
    assert (workload.window_ns, workload.num_offered) == ((NS_PER_S, 60 * NS_PER_S), None)


def test_a_number_of_requests_ends_the_loop():
    """Exactly so many are sent; the window ends with the last; a second run is like the first."""
    workload = build(requests=37)
    first = drive(workload, lambda r: NS_PER_S)
    assert (len(first), workload.num_offered) == (37, 37)
    assert workload.window_ns == (0, max(a.request.arrival_ns for a in first))
    assert drive(workload, lambda r: NS_PER_S) == first


def test_the_front_end_delays_both_ways():
    """The engine sees a request later, and the user the answer."""
    frontend = Frontend(request=1000, per_prompt_token=10, per_chunk=500)
    workload = build(users=1, think_time=0, requests=2, frontend=frontend)
    first, second = drive(workload, lambda r: 10_000)
    assert (first.sent_ns, first.request.arrival_ns) == (0, 1000 + 10 * first.request.prompt_tokens)
    assert second.sent_ns == first.request.arrival_ns + 10_000 + 500


def test_a_loop_in_which_time_stands_still_is_an_error():
    """Requests refused on arrival and sent again at once would never end; a few of them are no error."""
    workload = build(users=2, think_time=0)
    with pytest.raises(ScenarioError, match="of user 0 in a row ended when they were sent, at 0 ns"):
        drive(workload, lambda r: 0)
    sent = drive(build(users=2, think_time=0), lambda r: 0 if r.id // 2 % 100 else 10 * NS_PER_S)
    assert len(sent) == 2 * (59 * 100 + 1)


def test_reports_of_a_closed_loop_come_from_a_sample():
    """Lengths, classes and predictions are known before the run."""
    classes = {"chat": TrafficClass(0.5), "code": TrafficClass(0.5)}
    workload = build(classes=classes)
    assert workload.describe["text"] == "closed loop, 4 users, think time 1 s exponential"
    assert workload.describe["mean_output_tokens"] == pytest.approx(100, rel=0.03)
    sent = drive(workload, lambda r: NS_PER_S)
    oracle = build_predictor(OracleConfig(), workload)
    assert [oracle.predict(a.request) for a in sent] == [a.output_tokens for a in sent]
    mean = build_predictor(ClassMeanConfig(), workload)
    assert {mean.predict(a.request) for a in sent if a.request.request_class == "chat"} == {
        round(workload.mean_output_tokens["chat"])
    }
    assert workload.true_output_tokens(sent[-1].request) == sent[-1].output_tokens


def test_a_ramp_starts_users_one_after_another():
    """User i of n begins at i/n of the ramp, whatever the think time; 0 s: all at once."""
    ramped = [a.request.arrival_ns for a in build(4, loop={"ramp": 8 * NS_PER_S}).arrivals()]
    assert ramped == [0, 2 * NS_PER_S, 4 * NS_PER_S, 6 * NS_PER_S]
    at_once = build(4, loop={"ramp": 0})
    assert [a.request.arrival_ns for a in at_once.arrivals()] == [0] * 4
    assert at_once.describe["text"] == "closed loop, 4 users, think time 1 s exponential, begun at once"


SHARED = {"shared_list": True, "ramp": 0}


def test_whoever_is_free_takes_the_next_of_a_shared_list():
    """Two users: while one is busy with request 0 the other works through the list."""
    sent = drive(build(2, 0, loop=SHARED, requests=6), lambda r: (100 if r.id == 0 else 10) * NS_PER_S)
    assert [(a.request.id, a.request.arrival_ns // NS_PER_S) for a in sent] == [
        (0, 0),
        (1, 0),
        (2, 10),
        (3, 20),
        (4, 30),
        (5, 40),
    ]


def test_a_shared_list_is_the_same_for_every_engine_and_number_of_users():
    """Request i of the list is the same however many take from it and whoever is quick; all are sent, once."""
    runs = [
        drive(build(users, loop=SHARED, requests=50), lambda r, slow=slow: (r.prompt_tokens * 7919) % slow)
        for users, slow in ((2, 9 * NS_PER_S), (2, 7), (7, NS_PER_S))
    ]
    lists = [sorted((a.request.id, a.request.prompt_tokens, a.output_tokens) for a in run) for run in runs]
    assert lists[0] == lists[1] == lists[2]
    assert [number for number, *_ in lists[0]] == list(range(50))


def test_users_of_a_shared_list_think_before_they_take_the_next():
    """The think time lies between an answer at the client and the next sending; the window ends with the last."""
    fields = {"requests": 3, "frontend": Frontend(request=7, per_chunk=5)}
    workload = build(1, NS_PER_S, "constant", loop=SHARED, **fields)
    sent = drive(workload, lambda r: 100)
    assert [a.sent_ns for a in sent] == [0, NS_PER_S + 112, 2 * (NS_PER_S + 112)]
    assert workload.window_ns == (0, 2 * (NS_PER_S + 112))
    assert [a.sent_ns for a in drive(workload, lambda r: 100)] == [a.sent_ns for a in sent]
    assert intended_ns(workload) is None
