"""What the journal derives from batches: state rows, reasons, counts. Prompts have 8 tokens."""

from __future__ import annotations

from typing import Any

import pytest

from batchsim.kernel.batch import Batch
from batchsim.kernel.journal import ENDED, Journal
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.record import (
    CANCELLED,
    DECODE,
    FINISHED,
    MISSING,
    PREEMPTED,
    PREFILL,
    RECOMPUTE,
    SAT_OUT,
    SWAPPED,
    Recorder,
)
from batchsim.kernel.types import Arrival, DecodeGroup, Request, Sequence
from tests.support.engine import vllm


def begun(count: int, **arrival: Any) -> tuple[Journal, list[Sequence]]:
    """A journal with so many open requests of 8 prompt tokens."""
    journal = Journal(Recorder(), 0)
    sequences = [Sequence(Request(i, 0, 8, 99)) for i in range(count)]
    for seq in sequences:
        journal.begin(seq, Arrival(seq.request, 99, **arrival))
    return journal, sequences


def chunk(journal: Journal, seq: Sequence, tokens: int, now_ns: int, *, sampled: bool = False, **batch: Any) -> None:
    """A step of one chunk, as the core runs it: said, computed, and its token out 10 ns later."""
    work = Batch(None, [(seq, tokens)], tokens, **batch)
    journal.scheduled(work, now_ns, {})
    journal.computed(seq, seq.settled_computed_tokens + tokens)
    seq.settled_computed_tokens += tokens
    if sampled:
        seq.settled_output_tokens += 1
        work.sampled = [seq]
    journal.tokens(work, [], now_ns + 10)


def states(journal: Journal) -> list[tuple[int, int, int, str, int]]:
    """(time, request, state, reason, blocker) of every row."""
    records = journal.recorder.records()
    return [
        (
            int(row["time_ns"]),
            int(row["request_id"]),
            int(row["state"]),
            records.texts[row["reason"]],
            int(row["blocker"]),
        )
        for row in records.states
    ]


def ended(journal: Journal, seq: Sequence) -> Any:
    """The row of `seq`, given up at 1,000 ns."""
    journal.end(seq, 1000, CANCELLED, "client_cancel", streams=True)
    (row,) = journal.recorder.records().requests
    return row


def test_a_prompt_that_a_batch_leaves_out_lacked_tokens_unless_the_policy_says_otherwise() -> None:
    """A prefill that gets no chunk though its prompt is not done sat out: by the given reason, or `token_budget`."""
    journal, (noted, untold, other) = begun(3)
    journal.scheduled(Batch(None, [(noted, 4), (untold, 4)], 8), 0, {})
    journal.scheduled(Batch(None, [(other, 8)], 8), 10, {noted: ("kv_blocks", 2)})
    assert states(journal) == [
        (0, 0, PREFILL, "", MISSING),
        (0, 1, PREFILL, "", MISSING),
        (10, 2, PREFILL, "", MISSING),
        (10, 0, SAT_OUT, "kv_blocks", 2),
        (10, 1, SAT_OUT, "token_budget", MISSING),
    ]
    assert [seq.state for seq in (noted, untold, other)] == [SAT_OUT, SAT_OUT, PREFILL]


def test_a_decode_that_leaves_the_group_sits_out_until_it_is_back() -> None:
    """With the reason given, or none; who is back before the next batch never left, who ended sat nothing out."""
    journal, (seq, other) = begun(2)
    group = DecodeGroup(4)
    for one in (seq, other):
        chunk(journal, one, 8, 0, sampled=True)
        group.join(one)
    journal.scheduled(Batch(group, [], 0), 20, {})
    group.leave(seq)
    journal.scheduled(Batch(group, [], 0), 30, {seq: ("token_budget", 1)})
    group.join(seq)
    journal.scheduled(Batch(group, [], 0), 40, {})
    group.leave(seq)
    group.join(seq)
    journal.scheduled(Batch(group, [], 0), 50, {})
    group.leave(seq)
    journal.scheduled(Batch(group, [], 0), 60, {})
    work = Batch(group, [], 0)
    journal.tokens(work, [other], 70)
    group.leave(other)
    journal.scheduled(Batch(group, [], 0), 70, {})
    assert states(journal)[4:] == [
        (30, 0, SAT_OUT, "token_budget", 1),
        (40, 0, DECODE, "", MISSING),
        (60, 0, SAT_OUT, "", MISSING),
    ]


@pytest.mark.parametrize(("sampled", "recomputed"), [(False, 3), (True, 10)])
def test_only_what_was_computed_is_computed_again(sampled: bool, recomputed: int) -> None:
    """Of a prompt of which 3 tokens were computed when it sat out and was preempted, 3; of a decode all of them."""
    journal, (seq, other) = begun(2)
    if sampled:
        chunk(journal, seq, 8, 0, sampled=True)
        group = DecodeGroup(4)
        group.join(seq)
        for _ in range(2):
            group.advance()
        group.leave(seq)
        journal.scheduled(Batch(group, [(other, 2)], 2), 10, {})
    else:
        chunk(journal, seq, 3, 0)
        chunk(journal, other, 2, 10)
    assert seq.state == SAT_OUT
    journal.scheduled(Batch(None, [(other, 1)], 1, preempted=[seq]), 20, {})
    seq.reset_computed()
    chunk(journal, seq, seq.num_tokens - 1 if sampled else 8, 30)
    assert journal.lives[seq].recomputed == recomputed


def test_one_swapped_back_decodes_from_then_on_though_the_batch_may_hold_prompts_alone() -> None:
    """Its state is decode from the batch that moves it in, once."""
    journal, (seq, other) = begun(2)
    chunk(journal, seq, 8, 0, sampled=True)
    group = DecodeGroup(4)
    journal.scheduled(Batch(None, [], 0, preempted=[seq], swap_out=[(seq, 2)]), 20, {seq: ("kv_blocks", 1)})
    group.join(seq)
    journal.scheduled(Batch(None, [(other, 4)], 4, swap_in=[(seq, 2)]), 30, {})
    journal.scheduled(Batch(group, [(other, 4)], 4), 40, {})
    assert states(journal)[2:] == [
        (20, 0, SWAPPED, "kv_blocks", 1),
        (30, 0, DECODE, "", MISSING),
        (30, 1, PREFILL, "", MISSING),
    ]


def test_preemptions_swaps_and_recomputed_tokens_are_counted() -> None:
    """Twice swapped out, once preempted: 3 and 2; of the 8 tokens computed again 2 were lost before they were made."""
    journal, (seq,) = begun(1)
    chunk(journal, seq, 6, 0)
    journal.scheduled(Batch(None, [], 0, preempted=[seq]), 10, {})
    seq.reset_computed()
    chunk(journal, seq, 4, 20)
    chunk(journal, seq, 4, 30, sampled=True)
    for now_ns in (40, 60):
        journal.scheduled(Batch(None, [], 0, preempted=[seq], swap_out=[(seq, 2)]), now_ns, {})
        group = DecodeGroup(4)
        group.join(seq)
        journal.scheduled(Batch(group, [], 0, swap_in=[(seq, 2)]), now_ns + 10, {})
        group.leave(seq)
    assert [row[2] for row in states(journal)] == [
        PREFILL, PREEMPTED, RECOMPUTE, DECODE, SWAPPED, DECODE, SWAPPED, DECODE,
    ]  # fmt: skip
    row = ended(journal, seq)
    assert (row["num_preemptions"], row["num_swaps"], row["recomputed_tokens"]) == (3, 2, 6)
    assert (row["scheduled_ns"], row["first_token_ns"], row["output_tokens"]) == (0, 40, 1)


def test_a_preempted_decode_recomputes_what_its_group_had_computed() -> None:
    """8 prompt tokens and 3 of 4 generated ones: the eleven are computed again, and a twelfth anew."""
    journal, (seq,) = begun(1)
    chunk(journal, seq, 8, 0, sampled=True)
    group = DecodeGroup(4)
    group.join(seq)
    for _ in range(3):
        group.advance()
    group.leave(seq)
    journal.scheduled(Batch(group, [], 0, preempted=[seq]), 50, {})
    seq.reset_computed()
    chunk(journal, seq, 12, 60, sampled=True)
    assert ended(journal, seq)["recomputed_tokens"] == 11


def test_cached_tokens_are_those_of_the_first_admission_and_of_all() -> None:
    """4 found at first, 8 after a preemption."""
    journal, (seq,) = begun(1)
    chunk(journal, seq, 4, 0, cached=[(seq, 4)])
    journal.scheduled(Batch(None, [], 0, preempted=[seq]), 10, {})
    seq.reset_computed()
    chunk(journal, seq, 4, 20, cached=[(seq, 8)])
    row = ended(journal, seq)
    assert (row["cached_tokens"], row["cached_tokens_all"]) == (4, 12)


def test_a_step_counts_blocks_moved_both_ways_and_those_preempted() -> None:
    """2 blocks out and 3 in are 5; the queue and the free blocks are the scheduler's."""
    journal, (seq, other) = begun(2)
    scheduler = vllm(CountingKV(100, 4))
    scheduler.add(seq, 0)
    scheduler.kv.allocate(other, 8)
    moves: dict[str, Any] = {"swap_out": [(seq, 2)], "swap_in": [(other, 3)], "cached": [(other, 4), (seq, 1)]}
    for kept in ({"swap_out", "swap_in", "cached"}, {"swap_out"}, {"swap_in"}):
        work = Batch(None, [(other, 2)], 2, preempted=[seq], **{name: moves[name] for name in kept})
        journal.step(scheduler, work, 5, 10, 7, 0)
    steps = journal.recorder.records().steps
    assert steps["swap_blocks"].tolist() == [5, 2, 3]
    assert steps["cached_tokens"].tolist() == [5, 0, 0]
    columns = ["start_ns", "duration_ns", "prefill_pairs", "num_prefill_tokens", "num_chunks", "num_preempted"]
    assert [int(steps[0][name]) for name in columns] == [5, 10, 7, 2, 1, 1]
    assert [int(steps[0][name]) for name in ("free_blocks", "num_waiting", "num_running")] == [98, 1, 0]


def test_times_of_the_front_end_are_kept() -> None:
    """When the client sent it and the load source handed it over, what router and failed replicas took."""
    noted: dict[str, int] = {"sent_ns": 1, "submitted_ns": 7, "router_ns": 2, "failover_ns": 3, "num_retries": 4}
    journal, (seq,) = begun(1, **noted)
    row = ended(journal, seq)
    assert (row["sent_ns"], row["lag_ns"], row["router_ns"], row["failover_ns"], row["num_retries"]) == (1, 7, 2, 3, 4)
    journal, (seq,) = begun(1)
    row = ended(journal, seq)
    assert (row["sent_ns"], row["lag_ns"], row["router_ns"], row["failover_ns"], row["num_retries"]) == (0, 0, 0, 0, 0)


def test_output_ends_with_the_last_token_though_the_row_goes_on() -> None:
    """A sequence that ended and stays in the group, as padding, makes no more tokens for its client."""
    journal, (seq,) = begun(1)
    chunk(journal, seq, 8, 0, sampled=True)
    group = DecodeGroup(4)
    group.join(seq)
    group.advance()
    journal.tokens(Batch(group, [], 0), [seq], 20)
    group.advance()
    row = ended(journal, seq)
    assert (row["output_tokens"], row["last_token_ns"]) == (2, 20)


@pytest.mark.parametrize(("streams", "first", "last"), [(True, 13, 23), (False, 33, 33)])
def test_a_streamed_answer_arrives_with_its_tokens_and_a_whole_one_when_it_is_sent(
    streams: bool, first: int, last: int
) -> None:
    """Tokens at 10 and 20 ns, the answer sent at 30; the front end takes 3 ns for each piece."""
    journal = Journal(Recorder(), 3)
    seq = Sequence(Request(0, 0, 8, 99))
    journal.begin(seq, Arrival(seq.request, 99))
    chunk(journal, seq, 8, 0, sampled=True)
    journal.tokens(Batch(None, [], 0), [seq], 20)
    journal.end(seq, 30, FINISHED, "", streams=streams)
    assert (seq.state, seq in journal.lives) == (ENDED, False)
    (row,) = journal.recorder.records().requests
    assert (row["first_delivery_ns"], row["delivered_ns"], row["ended_ns"]) == (first, last, 20)


def test_a_preemption_without_a_reason_has_none() -> None:
    """Its row's reason is empty."""
    journal, (seq,) = begun(1)
    chunk(journal, seq, 4, 20)
    journal.scheduled(Batch(None, [], 0, preempted=[seq]), 30, {})
    assert states(journal)[-1] == (30, 0, PREEMPTED, "", MISSING)


def test_who_made_its_last_token_has_ended() -> None:
    """At once, though its answer may be held; the lag of its client counts from the arrival."""
    journal = Journal(Recorder(), 0)
    seq = Sequence(Request(0, 5, 8, 99))
    journal.begin(seq, Arrival(seq.request, 99, submitted_ns=9))
    chunk(journal, seq, 8, 10, sampled=True)
    journal.tokens(Batch(None, [], 0), [seq], 30)
    assert seq.state == ENDED
    journal.end(seq, 40, FINISHED, "", streams=True)
    (row,) = journal.recorder.records().requests
    assert row["lag_ns"] == 4


@pytest.mark.parametrize("preempted", [True, False])
def test_drafts_rejected_after_a_preemption_are_not_computed_again(preempted: bool) -> None:
    """Of 11 tokens computed 3 turn out rejected while their sequence waits: 8 are computed a second time, not 11. Of
    one that goes on nothing is taken off."""
    journal, (seq,) = begun(1)
    chunk(journal, seq, 8, 0, sampled=True)
    seq.settled_computed_tokens, seq.settled_output_tokens = 11, 4
    if preempted:
        journal.scheduled(Batch(None, [], 0, preempted=[seq]), 20, {})
        seq.reset_computed()
    journal.rejected(seq, 3)
    seq.settled_output_tokens -= 3
    if preempted:
        chunk(journal, seq, 9, 30, sampled=True)
    assert journal.lives[seq].recomputed == (8 if preempted else 0)
    assert journal.lives[seq].computed_once == (9 if preempted else 8)
