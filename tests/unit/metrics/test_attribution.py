"""Every nanosecond of a request's life lies in one part."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.record import (
    BLOCKED,
    DECODE,
    FINISHED,
    MISSING,
    PREEMPTED,
    PREFILL,
    RECOMPUTE,
    UNFINISHED,
    Recorder,
)
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.metrics.attribution import PARTS, attribute, part_times
from tests.support.metrics_helpers import (
    MAX_MODEL_LEN,
    POLICIES,
    LinearCost,
    Run,
    arrival,
    records_of,
    run,
    traffic,
    vllm,
)
from tests.support.random_cases import random_cases


def _parts(records, request_id: int = 0, **more: int) -> dict[str, int]:
    rows = attribute(records, **more)
    rows = rows[rows["request_id"] == request_id]
    return dict(zip(rows["part"], rows["ns"], strict=True))


@pytest.mark.parametrize("policy", POLICIES)
@random_cases(40, derandomize=True)
@given(
    arrivals=traffic(),
    num_blocks=st.integers(9, 40),
    per_chunk_ns=st.sampled_from((0, 111)),
    per_stream_ns=st.sampled_from((0, 90)),
)
def test_parts_sum_to_the_life(policy, arrivals, num_blocks, per_chunk_ns, per_stream_ns):
    """The parts of every request sum to delivery (or end) minus sent, to the nanosecond, and none is negative."""
    front_end = {"per_chunk_ns": per_chunk_ns, "per_stream_ns": per_stream_ns}
    made = run(arrivals, POLICIES[policy], num_blocks, num_swap_blocks=12, **front_end)
    rows = attribute(made.records, per_chunk_ns)
    assert (rows["ns"] > 0).all()
    total = rows.groupby("request_id")["ns"].sum()
    for request in made.records.requests:
        end = request["delivered_ns"] if request["outcome"] == FINISHED else request["ended_ns"]
        assert total.get(request["request_id"], 0) == end - request["sent_ns"]


@pytest.mark.parametrize("policy", POLICIES)
@random_cases(30, derandomize=True)
@given(arrivals=traffic(), num_blocks=st.integers(9, 40))
def test_own_steps_equal_a_log_of_every_step(policy, arrivals, num_blocks):
    """Prefill, recompute and both decode parts equal the steps' items added up one by one."""
    made = run(arrivals, POLICIES[policy], num_blocks, num_swap_blocks=12)
    rows = attribute(made.records)
    names = ("compute", "decode_alone", "decode_beside_prefill")
    expected = _own_steps(made)
    for request_id in made.records.requests["request_id"]:
        parts = dict(zip(*rows[rows["request_id"] == request_id][["part", "ns"]].to_numpy().T, strict=True))
        parts["compute"] = parts.get("prefill", 0) + parts.get("recompute", 0)
        assert {name: parts.get(name, 0) for name in names} == {
            name: expected.get((request_id, name), 0) for name in names
        }


def _own_steps(made: Run) -> dict[tuple[int, str], int]:
    expected: dict[tuple[int, str], int] = {}
    for step, items in zip(made.records.steps, made.log, strict=True):
        beside = "decode_beside_prefill" if any(not item.decodes for item in items) else "decode_alone"
        for item in items:
            key = item.request_id, beside if item.decodes else "compute"
            expected[key] = expected.get(key, 0) + int(step["duration_ns"])
    return expected


def test_a_life_by_hand():
    """Two requests, one slot: the second waits for the running step, then for the slot, and decodes alone."""
    made = run([arrival(0, 0, 10, 2), arrival(1, 500, 10, 2)], lambda kv: vllm(kv, max_num_seqs=1))
    # Steps: prefill of 0 (1000 + 7·10), one decode (1007), then the same of request 1.
    assert _parts(made.records, 0) == {"prefill": 1070, "decode_alone": 1007}
    assert _parts(made.records, 1) == {
        "waiting_step": 570,
        "queued:no_slot": 1007,
        "prefill": 1070,
        "decode_alone": 1007,
    }


def test_front_end_and_held_response():
    """The way in and the last chunk's delivery are `frontend`; between last token and delivery the response is held."""
    records = records_of(
        [{"sent_ns": 0, "arrival_ns": 40, "ended_ns": 100, "delivered_ns": 150}],
        [{"start_ns": 40, "duration_ns": 60, "num_chunks": 1}],
        [(40, 0, PREFILL, 0, MISSING)],
    )
    assert _parts(records, per_chunk_ns=20) == {"frontend": 60, "prefill": 60, "response_held": 30}


def test_a_late_first_piece_counts_for_ttft_and_not_twice():
    """Of 100 ns of decoding 30 pass before the client has the first token: 70 are left for TPOT, E2E is as it was."""
    records = records_of(
        [{"sent_ns": 0, "first_token_ns": 60, "first_delivery_ns": 110, "ended_ns": 160, "delivered_ns": 180}],
        [{"start_ns": 0, "duration_ns": 60, "num_chunks": 1}, {"start_ns": 60, "duration_ns": 100, "num_decode": 1}],
        [(0, 0, PREFILL, 0, MISSING), (60, 0, DECODE, 0, MISSING)],
    )
    assert _parts(records, per_chunk_ns=20) == {"frontend": 20, "prefill": 60, "decode_alone": 100}
    sides = {False: 0, True: 0}
    for times in part_times(records, 20):
        for ns, after in zip(times.ns, times.after_first, strict=True):
            sides[bool(after)] += int(ns)
    assert sides == {False: 110, True: 70}


def test_prefill_first_steps_are_sat_out_and_gaps_are_the_hosts():
    """A decode sits out a step that runs prefills only, and a span without a step is a host gap."""
    records = records_of(
        [{"sent_ns": 0, "ended_ns": 100}],
        [
            {"start_ns": 0, "duration_ns": 10, "num_chunks": 1},
            {"start_ns": 15, "duration_ns": 25, "num_chunks": 1},
            {"start_ns": 40, "duration_ns": 20, "num_decode": 1},
            {"start_ns": 60, "duration_ns": 40, "num_decode": 1, "num_chunks": 1},
        ],
        [(0, 0, PREFILL, 0, MISSING), (10, 0, DECODE, 0, MISSING)],
    )
    assert _parts(records) == {
        "prefill": 10,
        "host_gap": 5,
        "sat_out:prefill_first": 25,
        "decode_alone": 20,
        "decode_beside_prefill": 40,
    }


def test_preempted_names_its_blocker():
    """Time without a place carries the reason and the request that took it; computing again is `recompute`."""
    states = [
        (0, 0, PREFILL, 0, MISSING),
        (10, 0, PREEMPTED, 1, 7),
        (30, 0, RECOMPUTE, 0, MISSING),
    ]
    steps = [{"start_ns": start, "duration_ns": 10, "num_chunks": 1} for start in (0, 10, 20, 30)]
    rows = attribute(records_of([{"sent_ns": 0, "ended_ns": 40}], steps, states, ("", "kv_blocks")))
    assert list(rows.itertuples(index=False, name=None))[-1] == (0, "preempted:kv_blocks", 20, 7)
    assert dict(zip(rows["part"], rows["ns"], strict=True))["recompute"] == 10


def test_those_behind_inherit_the_reason_of_the_head():
    """The queue's reasons in time apply to whoever waits, from its arrival on."""
    records = records_of(
        [{"sent_ns": 0, "scheduled_ns": 100, "ended_ns": 100}, {"sent_ns": 30, "scheduled_ns": 90, "ended_ns": 90}],
        states=[(10, 0, BLOCKED, 1, MISSING), (60, 0, BLOCKED, 2, MISSING)],
        texts=("", "no_slot", "kv_blocks"),
    )
    assert _parts(records, 0) == {"queued:unstated": 10, "queued:no_slot": 50, "queued:kv_blocks": 40}
    assert _parts(records, 1) == {"queued:no_slot": 30, "queued:kv_blocks": 30}


def test_arrival_at_the_start_of_a_step_waits_for_no_step():
    """A request that arrives as a step starts was there for its schedule: it queues, it does not wait for a step."""
    steps = [{"start_ns": 50, "duration_ns": 50, "num_decode": 1}]
    records = records_of([{"sent_ns": 50, "ended_ns": 100}, {"sent_ns": 51, "ended_ns": 100}], steps)
    assert _parts(records, 0) == {"queued:unstated": 50}
    assert _parts(records, 1) == {"waiting_step": 49}


def test_request_on_its_way_when_the_run_ends():
    """One that had not arrived when the run was cut has only the way it made."""
    records = records_of([{"sent_ns": 50, "arrival_ns": 90, "ended_ns": 70, "outcome": UNFINISHED}])
    assert _parts(records) == {"frontend": 20}


def test_time_after_the_first_token_is_told_apart():
    """What comes before the first token counts for its TTFT, the rest, preemptions too, for the pace."""
    states = [(0, 0, PREFILL, 0, MISSING), (10, 0, DECODE, 0, MISSING), (20, 0, PREEMPTED, 1, 7)]
    states += [(30, 0, RECOMPUTE, 0, MISSING), (40, 0, DECODE, 0, MISSING)]
    kinds = ("num_chunks", "num_decode", "num_chunks", "num_chunks", "num_decode")
    steps = [{"start_ns": 10 * i, "duration_ns": 10, kind: 1} for i, kind in enumerate(kinds)]
    records = records_of([{"sent_ns": 0, "first_token_ns": 10, "ended_ns": 50}], steps, states, ("", "kv_blocks"))
    split: dict[bool, dict[str, int]] = {False: {}, True: {}}
    for times in part_times(records):
        for ns, after_first in zip(times.ns.tolist(), times.after_first.tolist(), strict=True):
            if ns:
                split[after_first][times.part] = split[after_first].get(times.part, 0) + ns
    assert split[False] == {"prefill": 10}
    assert split[True] == {"decode_alone": 20, "preempted:kv_blocks": 10, "recompute": 10}


def test_part_order_is_that_of_parts():
    """Categories come in the order of PARTS, so that tables of different runs line up."""
    made = run([arrival(i, 300 * i, 12, 6) for i in range(8)], num_blocks=9)
    names = [name.partition(":")[0] for name in attribute(made.records)["part"].cat.categories]
    assert names == sorted(names, key=PARTS.index)


def test_an_unclosed_run_is_refused():
    """States of a request without a row mean that the records were taken too early."""
    recorder = Recorder()
    core = EngineCore(
        vllm(CountingKV(100, 4)), SimExecutor(LinearCost(), MAX_MODEL_LEN), recorder, max_model_len=MAX_MODEL_LEN
    )
    core.submit(arrival(0, 0, 4, 4))
    core.execute(core.schedule(0, True), 0)
    with pytest.raises(ValueError, match="close the core"):
        attribute(recorder.records())


def test_no_requests_no_rows():
    """An empty run attributes nothing and does not fail."""
    assert len(attribute(records_of([]))) == 0
    assert attribute(records_of([]))["ns"].dtype == np.int64
