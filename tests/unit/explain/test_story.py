"""One request's life in chapters, by hand. That they sum for every policy: `policies/test_attribution_sums.py`."""

from __future__ import annotations

from itertools import pairwise

import pytest

from batchsim.explain.story import Chapter, Stories
from batchsim.kernel.record import BLOCKED, CANCELLED, DECODE, MISSING, PREEMPTED, PREFILL, RECOMPUTE
from tests.support.metrics_helpers import arrival, records_of, run, vllm


def _chapters(chapters: tuple[Chapter, ...]) -> list[tuple[str, int, int]]:
    return [(chapter.what, chapter.start_ns, chapter.end_ns) for chapter in chapters]


def test_a_request_behind_another_by_hand():
    """It arrives beside a step, queues for the slot behind nobody, prefills and decodes."""
    made = run([arrival(0, 0, 10, 2), arrival(1, 500, 10, 2)], lambda kv: vllm(kv, max_num_seqs=1))
    story = Stories(made.records).tell(1)
    # Steps: prefill of 0 until 1070 and one decode until 2077, then the same of request 1.
    assert _chapters(story.chapters) == [
        ("waiting_step", 500, 1070),
        ("queued", 1070, 2077),
        ("prefill", 2077, 3147),
        ("decode", 3147, 4154),
    ]
    assert [chapter.steps for chapter in story.chapters] == [0, 0, 1, 1]
    assert story.chapters[1].reason == "no_slot" and story.chapters[1].head is None
    assert story.ns == 4154 - 500 == sum(story.parts().values())


def test_the_queue_names_who_stood_first_and_what_held_it():
    """A chapter for each hold: who headed the queue, where that is another, and who stood in its way."""
    records = records_of(
        [{"sent_ns": 0, "ended_ns": 60}, {"sent_ns": 5, "ended_ns": 100}, {"sent_ns": 0, "ended_ns": 100}],
        states=[
            (10, 0, BLOCKED, 1, 7),
            (60, 1, BLOCKED, 2, MISSING),
            (90, 1, PREFILL, 0, MISSING),
        ],
        texts=("", "no_slot", "kv_blocks"),
    )
    chapters = Stories(records).tell(1).chapters
    assert [(c.reason, c.head, c.blocker, c.start_ns, c.end_ns) for c in chapters if c.what == "queued"] == [
        ("unstated", None, None, 5, 10),
        ("no_slot", 0, 7, 10, 60),
        ("kv_blocks", None, None, 60, 90),
    ]


def test_a_preemption_names_who_took_the_place():
    """Out of its place, computed again, decoding on: each span with its steps, and the gap between steps."""
    states = [(0, 0, PREFILL, 0, MISSING), (10, 0, DECODE, 0, MISSING), (25, 0, PREEMPTED, 1, 7)]
    states += [(30, 0, RECOMPUTE, 0, MISSING), (40, 0, DECODE, 0, MISSING)]
    steps = [
        {"start_ns": 0, "duration_ns": 10, "num_chunks": 1},
        {"start_ns": 10, "duration_ns": 5, "num_chunks": 1},
        {"start_ns": 18, "duration_ns": 7, "num_decode": 1},
        {"start_ns": 25, "duration_ns": 5, "num_chunks": 1},
        {"start_ns": 30, "duration_ns": 10, "num_chunks": 1},
        {"start_ns": 40, "duration_ns": 10, "num_decode": 1, "num_chunks": 1},
    ]
    story = Stories(records_of([{"sent_ns": 0, "ended_ns": 50}], steps, states, ("", "kv_blocks"))).tell(0)
    prefill, decode, out, again, on = story.chapters
    assert (prefill.what, prefill.steps) == ("prefill", 1)
    assert decode.parts == {"sat_out:prefill_first": 5, "decode_alone": 7, "host_gap": 3} and decode.steps == 1
    assert (out.what, out.reason, out.blocker, out.ns) == ("preempted", "kv_blocks", 7, 5)
    assert (again.what, again.ns) == ("recompute", 10)
    assert on.parts == {"decode_beside_prefill": 10}


def test_the_way_there_and_back_belongs_to_the_life():
    """From sending to delivery: the front end first and last, the held answer between."""
    records = records_of(
        [{"sent_ns": 0, "arrival_ns": 40, "ended_ns": 100, "delivered_ns": 150}],
        [{"start_ns": 40, "duration_ns": 60, "num_chunks": 1}],
        [(40, 0, PREFILL, 0, MISSING)],
    )
    assert _chapters(Stories(records, per_chunk_ns=20).tell(0).chapters) == [
        ("frontend", 0, 40),
        ("prefill", 40, 100),
        ("response_held", 100, 130),
        ("frontend", 130, 150),
    ]


def test_a_given_up_request_ends_where_it_was():
    """One cancelled in the queue has the queue alone, without gaps."""
    made = run([arrival(0, 0, 10, 9), arrival(1, 500, 10, 2, cancel_ns=4000)], lambda kv: vllm(kv, max_num_seqs=1))
    story = Stories(made.records).tell(1)
    (row,) = made.records.requests[made.records.requests["request_id"] == 1]
    assert row["outcome"] == CANCELLED
    assert [chapter.what for chapter in story.chapters] == ["waiting_step", "queued"]
    assert all(one.end_ns == two.start_ns for one, two in pairwise(story.chapters))
    assert story.chapters[-1].end_ns == row["ended_ns"]


def test_an_unknown_request_is_refused():
    """No story is made up."""
    with pytest.raises(KeyError, match="request 9"):
        Stories(records_of([{"sent_ns": 0, "ended_ns": 1}])).tell(9)
