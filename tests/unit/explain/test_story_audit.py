"""The audit log: who was delayed in favour of whom, when and why."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.explain.audit import KINDS, audit_events, audit_log
from batchsim.kernel.record import BLOCKED, CANCELLED, DECODE, MISSING, PREEMPTED, PREFILL, SAT_OUT, SWAPPED
from tests.support.metrics_helpers import POLICIES, arrival, records_of, run, traffic, vllm
from tests.support.random_cases import random_cases

TEXTS = ("", "no_slot", "kv_blocks")


def test_a_held_queue_names_its_head_and_who_stood_in_its_way():
    """One event a hold, with how many stood in the queue."""
    rows = [{"sent_ns": at, "scheduled_ns": 60, "ended_ns": 100} for at in (0, 5, 20)]
    states = [(10, 0, BLOCKED, 2, 7), (60, 0, PREFILL, 0, MISSING), (60, 1, BLOCKED, 1, MISSING)]
    held = [e for e in audit_events(records_of(rows, states=states, texts=TEXTS)) if e["kind"] == "queue_held"]
    assert held == [
        {
            "time_ns": 10,
            "until_ns": 60,
            "kind": "queue_held",
            "reason": "kv_blocks",
            "delayed": [0],
            "in_favour_of": [7],
            "waiting": 2,
        },
        {
            "time_ns": 60,
            "until_ns": 100,
            "kind": "queue_held",
            "reason": "no_slot",
            "delayed": [1],
            "in_favour_of": [],
            "waiting": 2,
        },
    ]


def test_who_was_overtaken_by_whom():
    """Request 0 came first and in last: both later ones overtook it, and 2 overtook 1."""
    starts = (90, 50, 40)
    rows = [{"sent_ns": i, "scheduled_ns": s, "ended_ns": 100} for i, s in enumerate(starts)]
    states = [(s, i, PREFILL, 0, MISSING) for i, s in sorted(enumerate(starts), key=lambda item: item[1])]
    found = [e for e in audit_events(records_of(rows, states=states)) if e["kind"] == "overtaken"]
    assert [(e["delayed"], e["in_favour_of"], e["count"], e["until_ns"]) for e in found] == [
        ([0], [2, 1], 2, 90),
        ([1], [2], 1, 50),
    ]


def test_lost_places_and_steps_sat_out_by_name():
    """Preempted, swapped and left out: from when until when, for whom."""
    states = [
        (0, 0, PREFILL, 0, MISSING),
        (10, 0, PREEMPTED, 2, 7),
        (30, 0, SAT_OUT, 1, MISSING),
        (50, 0, SWAPPED, 0, 8),
    ]
    events = audit_events(records_of([{"sent_ns": 0, "ended_ns": 90}], states=states, texts=TEXTS))
    assert [(e["kind"], e["time_ns"], e["until_ns"], e["reason"], e["in_favour_of"]) for e in events] == [
        ("preempted", 10, 30, "kv_blocks", [7]),
        ("sat_out", 30, 50, "no_slot", []),
        ("swapped", 50, 90, "unstated", [8]),
    ]


def test_decodes_that_wait_for_prompts_name_both():
    """Steps without a decode in a row are one event while the same requests are concerned."""
    rows = [{"sent_ns": 0, "ended_ns": 90} for _ in range(3)]
    states = [(0, 0, PREFILL, 0, MISSING), (10, 0, DECODE, 0, MISSING), (10, 1, PREFILL, 0, MISSING)]
    states += [(30, 1, DECODE, 0, MISSING), (30, 2, PREFILL, 0, MISSING), (40, 2, DECODE, 0, MISSING)]
    steps = [{"start_ns": 10 * i, "duration_ns": 10, "num_chunks": 1} for i in range(4)]
    steps.append({"start_ns": 40, "duration_ns": 50, "num_decode": 3})
    found = [e for e in audit_events(records_of(rows, steps, states)) if e["kind"] == "sat_out"]
    assert [(e["time_ns"], e["until_ns"], e["delayed"], e["in_favour_of"]) for e in found] == [
        (10, 30, [0], [1]),
        (30, 40, [0, 1], [2]),
    ]
    assert {e["reason"] for e in found} == {"prefill_first"}


def test_first_come_first_served_overtakes_nobody_and_gives_up_is_told():
    """With one slot the queue is held; the cancelled one is an event of its own."""
    made = run(
        [arrival(0, 0, 10, 9), arrival(1, 500, 10, 2, cancel_ns=4000), arrival(2, 600, 10, 2)],
        lambda kv: vllm(kv, max_num_seqs=1),
    )
    kinds = [e["kind"] for e in audit_events(made.records)]
    assert "overtaken" not in [e["kind"] for e in audit_events(made.records) if e["delayed"] != [1]]
    assert kinds.count("cancelled") == 1 and kinds.count("queue_held") == 2
    assert made.records.requests["outcome"].tolist()[1] == CANCELLED


@pytest.mark.parametrize("policy", POLICIES)
@random_cases(30, derandomize=True)
@given(arrivals=traffic(), num_blocks=st.integers(9, 40))
def test_every_line_keeps_the_schema(policy, arrivals, num_blocks):
    """A header, then events by time with all fields, about requests that exist and spans that do not run backwards."""
    made = run(arrivals, POLICIES[policy], num_blocks, num_swap_blocks=12)
    header, *events = [json.loads(line) for line in audit_log(made.records, policy=policy)]
    assert header == {"schema": "batchsim-audit", "version": 1, "policy": policy}
    ids = set(made.records.requests["request_id"].tolist())
    more = {"queue_held": {"waiting"}, "overtaken": {"count"}}
    for event in events:
        assert set(event) - more.get(event["kind"], set()) == {
            "time_ns", "until_ns", "kind", "reason", "delayed", "in_favour_of",
        }  # fmt: skip
        assert event["kind"] in KINDS and event["reason"] and event["delayed"]
        assert event["time_ns"] <= event["until_ns"]
        assert {*event["delayed"], *event["in_favour_of"]} <= ids
        if event["kind"] not in ("preempted", "swapped"):  # the newest that needs blocks gives up its own place
            assert not {*event["delayed"]} & {*event["in_favour_of"]}
    assert [e["time_ns"] for e in events] == sorted(e["time_ns"] for e in events)
    lost = sum(e["kind"] in ("preempted", "swapped") for e in events)
    assert lost == made.records.requests["num_preemptions"].sum()
