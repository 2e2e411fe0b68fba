"""The timeline keeps the rules of the trace-event format, and says what the records say."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.kernel.record import FINISHED, Records
from batchsim.metrics.attribution import attribute
from batchsim.results.timeline_events import ENGINE, HOST, REQUESTS, STEPS, timeline_events, write_timeline
from tests.support.metrics_helpers import POLICIES, arrival, records_of, run, traffic
from tests.support.random_cases import random_cases

BLOCKS = 40


def events_of(records: Records, window_ns: tuple[int, int] | None = None) -> list[dict[str, Any]]:
    """The events as a reader gets them."""
    return json.loads(json.dumps(list(timeline_events(records, BLOCKS, window_ns))))


def ns(us: float) -> int:
    """The time as a reader takes it that cuts to whole nanoseconds."""
    return int(us * 1000.0)


def spans(events: list[dict[str, Any]], pid: int) -> dict[int, list[tuple[int, int, str]]]:
    """(start, end, name) of the slices of a process by thread, in the order of their begins.

    Every end is that of the slice begun last, as the format has it, and no event of a thread is before another of it.
    """
    found: dict[int, list[tuple[int, int, str]]] = {}
    begun: dict[int, list[int]] = {}
    last: dict[int, float] = {}
    for event in events:
        if event["ph"] not in "BE" or event["pid"] != pid:
            continue
        thread = event["tid"]
        mine, still_open = found.setdefault(thread, []), begun.setdefault(thread, [])
        assert event["ts"] >= last.get(thread, 0), event
        last[thread] = event["ts"]
        if event["ph"] == "B":
            still_open.append(len(mine))
            mine.append((ns(event["ts"]), -1, event["name"]))
        else:
            i = still_open.pop()
            assert mine[i][2] == event["name"]
            mine[i] = (mine[i][0], ns(event["ts"]), mine[i][2])
    assert not any(begun.values())
    return found


def check_format(events: list[dict[str, Any]]) -> None:
    """The rules of the format: phases, times, names of all threads that are used, slices that nest."""
    named = {(e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M"}
    for event in events:
        assert event["ph"] in "BECM"
        assert type(event["pid"]) is int and type(event["tid"]) is int and event["name"]
        if event["ph"] == "M":
            continue
        assert isinstance(event["ts"], int | float) and event["ts"] >= 0
        assert ("process_name", event["pid"], 0) in named
        if event["ph"] == "C":
            assert event["args"] and all(isinstance(value, int) and value >= 0 for value in event["args"].values())
        else:
            assert ("thread_name", event["pid"], event["tid"]) in named
    for pid in (ENGINE, REQUESTS):
        spans(events, pid)


@pytest.mark.parametrize("policy", POLICIES)
@random_cases(30, derandomize=True)
@given(
    arrivals=traffic(),
    num_blocks=st.integers(9, BLOCKS),
    window=st.none() | st.tuples(st.integers(0, 20_000), st.integers(1, 60_000)),
)
def test_every_run_and_window_is_a_well_formed_trace(policy, arrivals, num_blocks, window):
    """Whatever happens to the requests, and wherever it is cut, the format's rules hold."""
    made = run(arrivals, POLICIES[policy], num_blocks, num_swap_blocks=12)
    cut = None if window is None else (window[0], window[0] + window[1])
    events = events_of(made.records, cut)
    check_format(events)
    if cut is not None:
        assert all(cut[0] <= ns(e["ts"]) <= cut[1] for e in events if "ts" in e)


@pytest.mark.parametrize("policy", POLICIES)
@random_cases(30, derandomize=True)
@given(arrivals=traffic(), num_blocks=st.integers(9, BLOCKS))
def test_slices_are_the_steps_and_lives_of_the_records_to_the_nanosecond(policy, arrivals, num_blocks):
    """A slice a step; a slice a request from its sending to its end, and no two of them at a time in one lane."""
    records = run(arrivals, POLICIES[policy], num_blocks, num_swap_blocks=12).records
    events = events_of(records)
    steps = [span[:2] for span in spans(events, ENGINE).get(STEPS, [])]
    assert steps == [(int(s["start_ns"]), int(s["start_ns"] + s["duration_ns"])) for s in records.steps]
    lives = {}
    for lane in spans(events, REQUESTS).values():
        mine = [span for span in lane if span[2].startswith("request ")]
        assert all(one[1] <= other[0] for one, other in pairwise(mine))
        lives |= {int(name.split()[1]): (start, end) for start, end, name in mine}
    assert lives == {
        int(r["request_id"]): (int(r["sent_ns"]), int(r["delivered_ns"] if r["outcome"] == FINISHED else r["ended_ns"]))
        for r in records.requests
    }


@random_cases(40, derandomize=True)
@given(arrivals=traffic(), num_blocks=st.integers(9, BLOCKS))
def test_prefill_and_preempted_slices_are_as_long_as_the_parts_of_attribution(arrivals, num_blocks):
    """Steps follow each other without a gap here, so that states and parts are the same time."""
    records = run(arrivals, POLICIES["vllm"], num_blocks).records
    drawn: dict[str, int] = {}
    for lane in spans(events_of(records), REQUESTS).values():
        for start, end, name in lane:
            drawn[name.split(":")[0]] = drawn.get(name.split(":")[0], 0) + end - start
    parts = attribute(records)
    for part in ("prefill", "recompute", "preempted"):
        attributed = parts.loc[parts["part"].astype(str).str.split(":").str[0] == part, "ns"].sum()
        assert drawn.get(part, 0) == attributed


def test_counters_show_blocks_queue_and_tokens():
    """Two prompts of 8 tokens in blocks of 4, one step after the other; at the end nothing is computed any more."""
    records = run([arrival(0, 0, 8, 2), arrival(1, 0, 8, 2)], POLICIES["vllm"], BLOCKS).records
    events = events_of(records)
    last = {e["name"]: e["args"] for e in events if e["ph"] == "C"}
    assert last["tokens of the step"] == {"prefill": 0, "decode": 0, "padding": 0}
    used = [e["args"]["blocks"] for e in events if e["ph"] == "C" and e["name"] == "KV blocks used"]
    assert used == (BLOCKS - records.steps["free_blocks"]).tolist()
    assert next(e["args"] for e in events if e["name"] == "requests") == {"waiting": 0, "running": 2}


def test_a_wait_says_what_held_it_and_a_preemption_for_whom():
    """One slot: the second request is queued for it until the first has ended."""
    records = run([arrival(0, 0, 4, 5), arrival(1, 0, 4, 2)], lambda kv: POLICIES["vllm"](kv, max_num_seqs=1)).records
    events = events_of(records)
    waits = [e for e in events if e["ph"] == "B" and e["name"].startswith("queued")]
    assert [wait["name"] for wait in waits] == ["queued: no_slot"]
    ((start, end, _),) = [
        span for lane in spans(events, REQUESTS).values() for span in lane if span[2] == "queued: no_slot"
    ]
    assert waits[0]["args"]["no_slot_ms"] == (end - start) / 1e6


def test_a_cut_slice_tells_its_own_times():
    """Half of a request's life is shown, with where it really began and ended."""
    records = run([arrival(0, 0, 4, 5)], POLICIES["vllm"]).records
    end = int(records.requests["delivered_ns"][0])
    cut = next(e for e in events_of(records, (end // 2, end)) if e["name"] == "request 0")
    assert (cut["args"]["from_us"], cut["args"]["to_us"]) == (0, pytest.approx(end / 1000))


def test_lanes_are_used_again():
    """Ten requests, one after the other, live in one lane."""
    records = run([arrival(i, 50_000 * i, 4, 3) for i in range(10)], POLICIES["vllm"]).records
    assert list(spans(events_of(records), REQUESTS)) == [1]


def test_steps_that_overlap_in_a_pipeline_have_a_thread_each():
    """The third begins as the first ends, and has its thread."""
    steps = [{"start_ns": at, "duration_ns": 2000, "num_decode": 1} for at in (0, 1000, 2000)]
    events = events_of(records_of([{"ended_ns": 4000}], steps))
    check_format(events)
    found = spans(events, ENGINE)
    assert found == {STEPS: [(0, 2000, "decode"), (2000, 4000, "decode")], STEPS + 1: [(1000, 3000, "decode")]}


def test_host_and_device_of_an_engine_ahead_have_a_thread_each():
    """The host's calls and results beside the steps; what the device waited for it lies before the step."""
    steps = [{"start_ns": at, "duration_ns": 2000, "num_decode": 1} for at in (100, 2600)]
    records = records_of([{"ended_ns": 4700}], steps, lanes=[(0, 100, 2300, 0), (2300, 2600, 4700, 0)])
    for window in (None, (2200, 2700)):
        check_format(events_of(records, window))
    found = spans(events_of(records), ENGINE)
    calls = [(0, 100, "schedule"), (2300, 2600, "schedule")]
    assert found[HOST] == [calls[0], (2100, 2300, "process results"), calls[1], (4600, 4700, "process results")]
    waits = [(0, 100, "waits for the host"), (2100, 2600, "waits for the host")]
    assert found[STEPS] == [waits[0], (100, 2100, "decode"), waits[1], (2600, 4600, "decode")]
    rows = {"stage 1": np.array([[100, 900], [2600, 3000]]), "stage 2": np.array([[900, 2100], [3000, 4600]])}
    events = list(timeline_events(records, BLOCKS, rows=rows))
    check_format(events)
    found = spans(events, ENGINE)
    assert [span for span in found[STEPS + 1] if span[2] == "decode"] == [(900, 2100, "decode"), (3000, 4600, "decode")]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == ENGINE}
    assert names == {HOST: "host", STEPS: "stage 1", STEPS + 1: "stage 2"}


def test_the_file_is_json_packed_if_asked(tmp_path):
    """Both files hold the same events and facts; the counts are those of the file."""
    records = run([arrival(0, 0, 4, 5)], POLICIES["vllm"]).records
    events = list(timeline_events(records, BLOCKS))
    for name, opened in (("t.json", open), ("t.json.gz", gzip.open)):
        counts = write_timeline(events, tmp_path / name, {"policy": "vllm"})
        with opened(tmp_path / name, "rt") as file:
            read = json.load(file)
        assert read["traceEvents"] == json.loads(json.dumps(events))
        assert read["otherData"] == {"policy": "vllm"} and read["displayTimeUnit"] == "ms"
        assert counts == {phase: sum(e["ph"] == phase for e in events) for phase in "MBEC"}
