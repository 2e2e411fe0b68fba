"""What readers make of a request that lived on several engines: one row, its stays apart, its time told whole and once.

Timelines are those of `test_handover`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchsim.drive.fleet.fleet_records import EngineLife, by_engine, merged, stay_rows
from batchsim.drive.simulate import simulate
from batchsim.explain.audit import audit_events
from batchsim.explain.story import Stories
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.record import (
    HANDED_OVER,
    REPLICA_FAILED,
    UNFINISHED,
    Records,
)
from batchsim.metrics.attribution import attribute, part_times
from batchsim.results.frames import frames, to_records
from tests.support.engine import Outcome, Requests, arrival, engine, outcomes, vllm
from tests.support.pools import Pair, handed_over, open_at, pair, start, step


def both(run: Pair) -> Records:
    return merged([EngineLife(k, core.recorder.records()) for k, core in enumerate(run.cores)])


def test_the_engine_before_is_a_stay_and_its_time_is_told_in_order() -> None:
    """One row in requests, one in stays; the parts of all engines sum to the life, the way between them as frontend."""
    run = pair()
    run.run(arrival(0, 0), arrival(1, 5, prompt=5))
    records = both(run)
    assert outcomes(records) == [
        Outcome("finished", "", 0, 10, 37, 37, 3),
        Outcome("finished", "", 10, 20, 47, 47, 3),
    ]
    first, second = frames(records)["stays"].to_dict("records")
    names = ("request_id", "replica", "start_ns", "end_ns", "why")
    assert [first[name] for name in names] == [0, 0, 0, 10, "handed_over"]
    assert [second[name] for name in names] == [1, 0, 5, 20, "handed_over"]
    assert (second["output_tokens"], second["scheduled_ns"], second["first_token_ns"]) == (1, 10, 20)
    parts = attribute(records)
    mine = parts[parts["request_id"] == 1]
    assert dict(zip(mine["part"].astype(str), mine["ns"], strict=True)) == {
        "frontend": 7,
        "waiting_step": 5,
        "prefill": 20,
        "decode_alone": 10,
    }
    message = Stories(records).tell(1)
    assert [(c.what, c.start_ns, c.end_ns) for c in message.chapters] == [
        ("waiting_step", 5, 10),
        ("prefill", 10, 20),
        ("frontend", 20, 27),
        ("prefill", 27, 37),
        ("decode", 37, 47),
    ]
    assert message.parts() == dict(zip(mine["part"].astype(str), mine["ns"], strict=True))
    assert {piece.part for piece in part_times(records) if (piece.ns[piece.after_first] > 0).any()} == {
        "frontend",
        "prefill",
        "decode_alone",
        "decode_beside_prefill",
    }
    assert audit_events(records) == []


def test_stays_read_back_tell_the_same() -> None:
    """From frames, as they are kept."""
    run = pair()
    run.run(arrival(0, 0), arrival(1, 5, cancel_ns=22))
    records = both(run)
    again = to_records(**frames(records))
    assert again.stays("handed_over")["end_ns"].tolist() == [10, 20] and not len(again.stays("replica_failed"))
    assert attribute(again).to_dict() == attribute(records).to_dict()


def test_a_request_that_begins_anew_has_lost_the_handover_too() -> None:
    """Handed over at 10, there at 17, its replica fails at 25: what a third one does from 25 on is its whole life, and
    both stays before are lost."""
    first, second, third = (engine(vllm(CountingKV(100, 4))) for _ in range(3))
    handover = handed_over(first)
    second.submit(handover.arrives(17))
    start(second, 17)
    second.fail(25, REPLICA_FAILED)
    simulate(third, Requests(replace(arrival(0, 25), sent_ns=0, router_ns=7, failover_ns=18, num_retries=1)))
    lives = [EngineLife(k, core.recorder.records()) for k, core in enumerate((first, second, third))]
    records = merged(lives)
    assert records.replicas is not None and records.replicas.stays["replica"].tolist() == [0, 1]
    parts = attribute(records)
    assert dict(zip(parts["part"].astype(str), parts["ns"], strict=True)) == {
        "failover": 18,
        "queued:no_replica": 7,
        "prefill": 10,
        "decode_alone": 20,
    }
    assert [(c.what, c.start_ns, c.end_ns) for c in Stories(records).tell(0).chapters] == [
        ("failover", 0, 10),
        ("queued", 10, 17),
        ("failover", 17, 25),
        ("prefill", 25, 35),
        ("decode", 35, 55),
    ]
    rows = stay_rows(records)
    assert [rows[name].tolist() for name in ("outcome", "num_retries", "failover_ns", "router_ns")] == [
        [HANDED_OVER, UNFINISHED],
        [0, 0],
        [0, 10],
        [0, 7],
    ]


def test_an_engine_that_gets_back_what_it_handed_over_is_told_apart_or_refused() -> None:
    """Two lives of one request between two failures of an engine would share its states."""
    core = engine(vllm(CountingKV(100, 4)))
    simulate(core, Requests(handed_over(core).arrives(20)))
    with pytest.raises(ValueError, match="request 0 lived twice on replica 3"):
        list(by_engine(merged([EngineLife(3, core.recorder.records())])))


def test_time_at_the_next_engine_comes_after_the_first_token() -> None:
    """Beside the step that runs on arrival and in the queue too, so that it counts for TPOT and not for TTFT."""
    run = Pair(engine(vllm(CountingKV(100, 4))), engine(vllm(CountingKV(100, 4), max_num_seqs=1)))
    run.run(arrival(0, 0, output=9), arrival(1, 32))
    paced = {
        piece.part: piece.ns[piece.after_first].tolist()
        for piece in part_times(both(run))
        if piece.ns[piece.after_first].any()
    }
    assert (paced["frontend"], paced["waiting_step"], paced["queued:no_slot"]) == ([7, 7], [0, 8], [0, 40])


def test_what_was_before_the_first_engine_of_a_handover_is_told_once() -> None:
    """A replica failed at 18 and the next came up at 25; from there it was handed over at 35, to arrive at 42."""
    cores = [engine(vllm(CountingKV(100, 4))) for _ in range(3)]
    cores[0].submit(arrival(0, 0))
    step(cores[0], 0)
    start(cores[0], 10)
    cores[0].fail(18, REPLICA_FAILED)
    cores[1].submit(replace(arrival(0, 25), sent_ns=0, router_ns=7, failover_ns=18, num_retries=1))
    handover = cores[1].release(*open_at(cores[1], step(cores[1], 25)))
    simulate(cores[2], Requests(handover.arrives(42)))
    records = merged([EngineLife(k, core.recorder.records()) for k, core in enumerate(cores)])
    parts = attribute(records)
    found = dict(zip(parts["part"].astype(str), parts["ns"], strict=True))
    assert found == {"frontend": 7, "failover": 18, "queued:no_replica": 7, "prefill": 20, "decode_alone": 10}
    message = Stories(records).tell(0)
    assert message.parts() == found
    assert [(c.what, c.start_ns) for c in message.chapters[:5]] == [
        ("failover", 0),
        ("queued", 18),
        ("prefill", 25),
        ("frontend", 35),
        ("prefill", 42),
    ]
    assert stay_rows(records)["router_ns"].tolist() == [0, 7]
