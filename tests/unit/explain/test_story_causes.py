"""One cause for each missed objective."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.base.errors import ScenarioError
from batchsim.explain.causes import Objectives, slo_misses
from batchsim.kernel.record import (
    BLOCKED,
    CANCELLED,
    DECODE,
    MISSING,
    PREEMPTED,
    PREFILL,
    RECOMPUTE,
    REJECTED,
    SAT_OUT,
    UNFINISHED,
    Records,
)
from batchsim.metrics.measure import measure
from batchsim.metrics.slo import parse_slo
from tests.support.metrics_helpers import POLICIES, inputs_of, records_of, run, traffic
from tests.support.random_cases import random_cases

TEXTS = ("", "no_slot", "kv_blocks", "too_long", "interactive")


def _causes(records: Records, slo: str, **more: object) -> list[tuple[str, str, int]]:
    misses = slo_misses(records, Objectives(parse_slo(slo), **more))  # type: ignore[arg-type]
    return [(row.metric, row.cause, row.cause_ns) for row in misses.itertuples()]


def _queued_then_prefilled(queued_ns: int, prefill_ns: int) -> Records:
    """One request of one token, and one of no interest."""
    end_ns = queued_ns + prefill_ns
    return records_of(
        [{"sent_ns": 0, "scheduled_ns": queued_ns, "first_token_ns": end_ns, "ended_ns": end_ns}],
        [{"start_ns": queued_ns, "duration_ns": prefill_ns, "num_chunks": 1}],
        [(0, 0, BLOCKED, 1, MISSING), (queued_ns, 0, PREFILL, 0, MISSING)],
        TEXTS,
    )


@pytest.mark.parametrize(
    ("queued_ns", "prefill_ns", "expected"),
    [
        (40, 59, []),
        (40, 60, [("ttft", "queued:no_slot", 40)]),  # its work alone would have kept the bound, though it took longer
        (40, 99, [("ttft", "queued:no_slot", 40)]),
        (40, 100, [("ttft", "prefill", 100)]),  # its work alone misses it
        (140, 100, [("ttft", "queued:no_slot", 140)]),  # so does the queue, and it is longer
    ],
)
def test_waiting_is_the_cause_unless_the_work_alone_is_too_long(queued_ns, prefill_ns, expected):
    """The boundary of the rule: own work below the bound or at it."""
    assert _causes(_queued_then_prefilled(queued_ns, prefill_ns), "ttft<100ns @ 99%") == expected


def test_waiting_is_explained_by_what_kept_it_waiting():
    """Under a bound on the time in the queue a long prefill is no cause, neither alone nor of a mean's excess."""
    for slo in ("queue_time<40ns @ 99%", "mean(queue_time)<40ns"):
        assert _causes(_queued_then_prefilled(40, 1000), slo) == [("queue_time", "queued:no_slot", 40)]
    assert _causes(_queued_then_prefilled(40, 1000), "queue_time<=40ns @ 99%") == []


def _decoded(states: list[tuple[int, int, int, int, int]], kinds: list[str], output_tokens: int = 3) -> Records:
    """A request of several tokens, the first at 10, in steps of 10 ns."""
    steps = [{"start_ns": 10 * i, "duration_ns": 10} | dict.fromkeys(kind.split(), 1) for i, kind in enumerate(kinds)]
    times = {"first_token_ns": 10, "first_delivery_ns": 10, "ended_ns": 10 * len(kinds)}
    request = {"sent_ns": 0, "output_tokens": output_tokens} | times
    return records_of([request], steps, [(0, 0, PREFILL, 0, MISSING), (10, 0, DECODE, 0, MISSING), *states], TEXTS)


def test_the_pace_is_judged_by_what_came_after_the_first_token():
    """A tpot miss names the largest part after the first token; the prefill before it does not count."""
    steps = ["num_chunks", "num_decode", *["num_chunks"] * 4, "num_decode"]
    out = [(20, 0, PREEMPTED, 2, 7), (50, 0, RECOMPUTE, 0, MISSING), (60, 0, DECODE, 0, MISSING)]
    assert _causes(_decoded(out, steps), "tpot<11ns @ 99%") == [("tpot", "preempted:kv_blocks", 30)]
    left_out = [(20, 0, SAT_OUT, 1, MISSING), (60, 0, DECODE, 0, MISSING)]
    assert _causes(_decoded(left_out, steps), "tpot<11ns @ 99%") == [("tpot", "sat_out:no_slot", 40)]
    beside = ["num_chunks", "num_decode num_chunks", "num_decode"]
    assert _causes(_decoded([], beside), "tpot<10ns @ 99%") == [("tpot", "decode_beside_prefill", 10)]
    assert _causes(_decoded([], ["num_chunks", "num_decode", "num_decode"]), "tpot<10ns @ 99%") == [
        ("tpot", "decode_alone", 20)
    ]


def test_the_bound_that_is_exceeded_most_is_the_one_explained():
    """Both are missed: ttft by 10/9, tpot by 10/5, so the pace is explained."""
    beside = ["num_chunks", "num_decode num_chunks", "num_decode"]
    assert _causes(_decoded([], beside), "ttft<9ns & tpot<5ns @ 99%") == [("tpot", "decode_alone", 10)]
    assert _causes(_decoded([], beside), "ttft<3ns & tpot<9ns @ 99%") == [("ttft", "prefill", 10)]


def test_an_answer_delivered_whole_misses_by_that():
    """Its ttft holds all its decoding, and it has no pace, which is named only where nothing else was missed."""
    request = {"sent_ns": 0, "output_tokens": 5, "first_token_ns": 30, "ended_ns": 100}  # first delivery at 100
    states = [(0, 0, BLOCKED, 1, MISSING), (20, 0, PREFILL, 0, MISSING), (30, 0, DECODE, 0, MISSING)]
    steps = [{"start_ns": 20, "duration_ns": 10, "num_chunks": 1}, {"start_ns": 30, "duration_ns": 70, "num_decode": 1}]
    records = records_of([request], steps, states, TEXTS)
    assert _causes(records, "ttft<90ns & tpot<50ns @ 99%") == [("ttft", "whole_response", 70)]
    assert _causes(records, "ttft<101ns & tpot<50ns @ 99%") == [("tpot", "whole_response", 0)]


def test_those_that_did_not_finish_are_misses_of_what_they_waited_for():
    """Rejected: the reason. Cancelled: the largest part of its life; without a life its reason."""
    lost = {"sent_ns": 0, "last_token_ns": MISSING, "first_token_ns": MISSING}
    records = records_of(
        [
            lost | {"outcome": REJECTED, "reason": 3, "ended_ns": 0},
            lost | {"outcome": CANCELLED, "reason": 1, "ended_ns": 50},
            lost | {"outcome": UNFINISHED, "reason": 2, "ended_ns": 0},
        ],
        states=[(0, 1, BLOCKED, 1, MISSING)],
        texts=TEXTS,
    )
    assert _causes(records, "ttft<1s @ 99%") == [
        ("rejected", "rejected:too_long", 0),
        ("cancelled", "queued:no_slot", 50),
        ("unfinished", "unfinished:kv_blocks", 0),
    ]


def test_classes_are_judged_by_their_own_objective_and_the_warm_up_by_none():
    """A class with an SLO of its own keeps to it; who was sent in the warm-up misses nothing."""
    rows = [
        {"sent_ns": at, "first_token_ns": at + 100, "ended_ns": at + 100, "request_class": k}
        for at, k in ((0, 4), (9, 0))
    ]
    records = records_of(rows, texts=TEXTS)
    own = {"interactive": parse_slo("ttft<50ns @ 99%")}
    judged = Objectives(parse_slo("ttft<200ns @ 99%"), own, ("interactive",))
    misses = slo_misses(records, judged)
    assert (misses["request_id"].tolist(), misses["request_class"].tolist()) == ([0], ["interactive"])
    assert misses["limit_ns"].tolist() == [50] and misses["value_ns"].tolist() == [100]
    assert slo_misses(records, Objectives(judged.slo, own, (), warmup_ns=5)).empty


def test_a_percentile_takes_those_beyond_its_limit_and_gaps_alone_are_refused():
    """p50 or p99: who is beyond the limit is explained. A bound on itl is of no request."""
    records = _queued_then_prefilled(40, 70)
    assert _causes(records, "p50(ttft)<100ns, p99(itl)<1ns") == [("ttft", "queued:no_slot", 40)]
    with pytest.raises(ScenarioError, match="bounds gaps between tokens"):
        Objectives.of({"slo": "p99(itl)<5ms", "workload": {}})


def test_objectives_are_read_from_a_scenario():
    """Warm-up, front end and the objectives of classes."""
    workload = {
        "warmup": "5s",
        "frontend": {"per_chunk": "2ms"},
        "classes": {"a": {"slo": "ttft<1s @ 90%"}, "b": {"share": 1}},
    }
    found = Objectives.of({"slo": "e2e<9s @ 99%", "workload": workload})
    assert (found.warmup_ns, found.per_chunk_ns) == (5_000_000_000, 2_000_000)
    assert (list(found.class_slos), found.class_names) == (["a"], ("a", "b"))


@pytest.mark.parametrize("policy", POLICIES)
@random_cases(40, derandomize=True)
@given(arrivals=traffic(), num_blocks=st.integers(9, 40), ttft=st.integers(500, 9000), tpot=st.integers(500, 3000))
def test_the_misses_are_those_of_the_metrics(policy, arrivals, num_blocks, ttft, tpot):
    """As many as `in_slo` leaves out, each with a cause that took some time of the request, or none at all."""
    made = run(arrivals, POLICIES[policy], num_blocks, num_swap_blocks=12)
    slo = parse_slo(f"ttft<{ttft}ns & tpot<{tpot}ns @ 99%")
    misses = slo_misses(made.records, Objectives(slo))
    requests = made.records.requests
    window = (0, int(requests["sent_ns"].max()) + 1)
    streams = policy not in ("static", "dynamic")
    in_slo = measure(inputs_of(made.records, window_ns=window, slo=slo, streams=streams)).values["in_slo"]
    assert in_slo is not None and round((1 - in_slo) * len(requests)) == len(misses)
    assert misses["request_id"].is_unique
    lives = np.where(requests["delivered_ns"] != MISSING, requests["delivered_ns"], requests["ended_ns"])
    life_ns = dict(zip(requests["request_id"].tolist(), (lives - requests["sent_ns"]).tolist(), strict=True))
    assert all(0 <= row.cause_ns <= life_ns[row.request_id] for row in misses.itertuples())
