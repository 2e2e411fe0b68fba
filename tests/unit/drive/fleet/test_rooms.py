"""SGLang's prefill and decode apart: a hand-made timeline for each rule, and what is conserved.

Steps take 10 ms and blocks of 16 tokens 1 ms on a link of 16 MB/s, where a test says nothing else. Rules are those of
python/sglang/srt/disaggregation of the 0.5.23 wheel: prefill.py and decode.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.drive.fleet.simulate_fleet import FleetRun
from batchsim.drive.fleet.transfer import TransferConfig
from batchsim.kernel.batch import Batch
from batchsim.kernel.record import CANCELLED, FINISHED, REJECTED, UNFINISHED
from batchsim.metrics.attribution import attribute
from batchsim.testing.life_sums import check_lives
from batchsim.testing.random_configs import MS
from tests.record_hashes import record_hash
from tests.support.random_cases import random_cases
from tests.support.rooms import RoomCase, asked, room_cases

SLOW = TransferConfig(bandwidth=16e6)


class Even:
    """Steps of 10 ms."""

    def step_ns(self, batch: Batch) -> int:
        return 10 * MS


def _run(*arrivals: Any, **options: Any) -> FleetRun:
    run = RoomCase(list(arrivals), cost=Even(), **options).run()
    check_lives(run.records)
    return run


def _ms(run: FleetRun, column: str) -> list[float]:
    return [ns / MS for ns in run.records.requests[column].tolist()]


def _parts(run: FleetRun, part: str) -> dict[int, float]:
    parts = attribute(run.records)
    rows = parts[parts["part"] == part]
    return dict(zip(rows["request_id"].tolist(), (rows["ns"] / MS).tolist(), strict=True))


def test_the_first_token_is_the_prefill_engines() -> None:
    """process_batch_result_prebuilt: prefill makes it; the call that finds the transfer over puts it out, and decodes
    the request in the same call. 7 blocks take 7 ms behind a step of 10."""
    run = _run(asked(0, 0, 100, 4), transfer=SLOW)
    assert (_ms(run, "first_token_ns"), _ms(run, "last_token_ns")) == ([17], [47])
    assert _parts(run, "queued:transfer") == {0: 7}
    (row,) = run.records.requests
    assert (row["output_tokens"], row["recomputed_tokens"], row["scheduled_ns"]) == (4, 0, 0)


def test_an_answer_of_one_token_takes_no_step_of_the_decode_engine() -> None:
    """get_next_disagg_decode_batch_to_run: what is finished leaves before the batch is merged."""
    run = _run(asked(0, 0, 100, 1), asked(1, 30, 100, 1, beyond=5), transfer=SLOW)
    assert (_ms(run, "first_token_ns"), _ms(run, "last_token_ns")) == ([17, 47], [17, 47])
    assert run.records.requests["output_tokens"].tolist() == [1, 1]
    assert run.records.num_steps == 2


def test_no_prompt_is_computed_before_there_are_blocks_where_it_decodes() -> None:
    """pop_bootstrapped: 40 blocks hold 640 tokens. The first prompt takes 7 of them and 512 are reserved for it, which
    leaves 16 of the 624 that the second needs, until the first ends at 30 ms. The prefill engine stands idle."""
    run = _run(asked(0, 0, 100, 3), asked(1, 0, 100, 3), blocks=(4096, 40))
    assert _ms(run, "scheduled_ns") == [0, 30]
    assert (_ms(run, "first_token_ns"), _ms(run, "last_token_ns")) == ([10, 40], [30, 60])
    assert _parts(run, "queued:waiting_decode_blocks") == {1: 30}


@pytest.mark.parametrize(("blocks", "at_ms"), [(27, 30), (26, 80)])
def test_room_is_kept_for_the_longest_that_runs(blocks: int, at_ms: int) -> None:
    """_need_space_for_single_req: at 30 ms one runs that knows 99 tokens of 96 + 200 and holds 7 blocks; the other
    needs 96 + 16. So 112 + 197 + 112 = 421 tokens must be there: 27 blocks have them, 26 only once five more tokens are
    known, at 80 ms."""
    of_decode = {"num_reserved_decode_tokens": 16}
    arrivals = asked(0, 0, 96, 200), asked(1, 25, 96, 10)
    run = _run(*arrivals, blocks=(4096, blocks), of_decode=of_decode)
    assert _ms(run, "scheduled_ns") == [0, at_ms]


@pytest.mark.parametrize(("cap", "at_ms"), [(232, 20), (233, 30)])
def test_a_cap_counts_but_for_what_could_be_retracted(cap: int, at_ms: int) -> None:
    """_required_admission_tokens: nothing is reserved. At 20 ms one runs that knows 98 tokens of 96 + 60 and holds 7 of
    25 blocks: 400 - 112 - 58 = 230 tokens. The other needs 96 + cap - 98; at 30 ms both differ by one."""
    of_decode = {"num_reserved_decode_tokens": 0}
    arrivals = asked(0, 0, 96, 60), asked(1, 15, 96, 2, beyond=cap - 2)
    run = _run(*arrivals, blocks=(4096, 25), of_decode=of_decode)
    assert _ms(run, "scheduled_ns") == [0, at_ms]


def test_those_that_ended_count_until_the_next_call() -> None:
    """_allocatable_token_budgets: the running batch is filtered after rooms were given out. 79 blocks, of which two
    that run and one that has just ended have 512 tokens each reserved: the third prompt waits for the call after."""
    arrivals = asked(0, 0, 96, 3), asked(1, 0, 96, 9), asked(2, 25, 96, 3)
    of_decode = {"num_reserved_decode_tokens": 400}
    run = _run(*arrivals, blocks=(4096, 90), of_decode=of_decode)
    # At 30 ms 1440 - 112 tokens are free, 800 reserved for the one that ended and the one that runs, 496 needed: 528.
    assert _ms(run, "scheduled_ns") == [0, 0, 30]
    run = _run(*arrivals, blocks=(4096, 87), of_decode=of_decode)
    assert _ms(run, "scheduled_ns") == [0, 0, 40]


def test_chunks_are_sent_as_they_are_computed() -> None:
    """_send_kv_chunk: 64, 64 and 32 tokens, of which the first 8 blocks are there before the third step ends."""
    run = _run(asked(0, 0, 160, 2), transfer=SLOW, knobs={"chunked_prefill_size": 64})
    assert _ms(run, "first_token_ns") == [32]
    assert _parts(run, "queued:transfer") == {0: 2}


def test_a_page_that_is_not_full_goes_with_the_rest() -> None:
    """One link: 9 blocks of 4 ms occupy it behind each other, the last one with the 2 tokens of the last chunk."""
    run = _run(asked(0, 0, 130, 2), transfer=TransferConfig(bandwidth=4e6), knobs={"chunked_prefill_size": 64})
    # The first chunk is on the link from 10 to 26, the second to 42, the last block to 46.
    assert _ms(run, "first_token_ns") == [46]
    assert _parts(run, "queued:transfer") == {0: 16}


def test_what_is_cached_is_sent_with_the_first_step() -> None:
    """maybe_send_cached_prefix_chunk: of 8 blocks 6 are in the tree, and on the link as the step of the others runs."""
    arrivals = asked(0, 0, 128, 1, stream=7), asked(1, 50, 128, 1, stream=7)
    run = _run(*arrivals, transfer=SLOW)
    # The last block is never found: a token must be computed. 7 blocks are sent beside the step, one behind it.
    assert _ms(run, "first_token_ns") == [18, 61]
    assert run.records.requests["cached_tokens"].tolist() == [0, 112]


@pytest.mark.parametrize(("extra", "at_ms"), [(0, 40), (1, 10), (None, 10)])
def test_slots_bound_how_many_have_blocks(extra: int | None, at_ms: int) -> None:
    """DecodeReqToTokenPool: max_running_requests 1 and as many slots more as disaggregation_decode_extra_slots says, by
    default two for each. With its KV there the second waits for a place."""
    of_decode = {"disaggregation_decode_extra_slots": extra, "max_running_requests": 1}
    run = _run(asked(0, 0, 96, 4), asked(1, 1, 96, 2), of_decode=of_decode)
    assert _ms(run, "scheduled_ns") == [0, at_ms]
    assert _ms(run, "first_token_ns") == [10, 50 if extra == 0 else 40]
    assert _parts(run, "queued:no_slot") == ({} if extra == 0 else {1: 20})


def test_buffers_bound_how_many_are_on_their_way() -> None:
    """req_to_metadata_buffer_idx_allocator: two for each of max_running_requests, however many slots there are."""
    of_decode = {"disaggregation_decode_extra_slots": 9, "max_running_requests": 1}
    slow = TransferConfig(bandwidth=16e6, latency=100 * MS)
    run = _run(*(asked(i, 0, 96, 2) for i in range(3)), of_decode=of_decode, transfer=slow)
    assert _ms(run, "scheduled_ns")[:2] == [0, 0] and _ms(run, "scheduled_ns")[2] > 100


def test_a_prefill_engine_has_two_buffers_for_each_slot() -> None:
    """finalize_bootstrap: with one slot one prompt is computed, another waits in the queue, and a third has none before
    the first is with its decode engine."""
    slow = TransferConfig(bandwidth=1e15, latency=30 * MS)
    run = _run(
        *(asked(i, 0, 96, 1) for i in range(3)),
        knobs={"max_running_requests": 1},
        transfer=slow,
        of_decode={"max_running_requests": 8},
    )
    assert _ms(run, "scheduled_ns") == [0, 40, 80]
    assert _parts(run, "queued:no_metadata_buffer") == {2: 40}


def test_it_looks_at_every_nth_call() -> None:
    """process_decode_queue: while one decodes, a call every 10 ms, of which the third looks. Blocks are taken at 40 ms,
    and the KV found at 70; at rest calls follow each other without end."""
    of_decode = {"disaggregation_decode_polling_interval": 3}
    run = _run(asked(0, 0, 96, 20), asked(1, 12, 96, 2), of_decode=of_decode)
    assert _ms(run, "scheduled_ns") == [0, 40]
    assert _ms(run, "first_token_ns") == [10, 70]


def test_while_one_is_retracted_no_transfer_is_looked_at() -> None:
    """resume_retracted_reqs: 18 blocks. Two of 96 + 60 tokens have 10 each in the end, so that the second is retracted,
    and comes back once the first ends at 900 ms. The KV of a third is there from 720 ms on."""
    of_decode = {"num_reserved_decode_tokens": 16}
    arrivals = asked(0, 0, 96, 60), asked(1, 15, 96, 60), asked(2, 405, 16, 1)
    run = _run(*arrivals, blocks=(4096, 18), of_decode=of_decode, transfer=TransferConfig(1e15, 300 * MS))
    first, second, third = run.records.requests
    assert (second["num_swaps"], second["num_preemptions"], second["recomputed_tokens"]) == (1, 1, 0)
    assert _parts(run, "swapped:kv_blocks").keys() == {1}
    assert third["first_token_ns"] == first["last_token_ns"] == 900 * MS
    assert _parts(run, "queued:pulled")[2] == 180
    assert (run.records.requests["outcome"] == FINISHED).all()


def test_without_a_backup_the_retracted_ends() -> None:
    """retract_decode: no KV is left to resume from."""
    of_decode = {"num_reserved_decode_tokens": 0, "disaggregation_decode_retraction_backup": "none"}
    run = _run(asked(0, 0, 96, 60), asked(1, 15, 96, 60), blocks=(4096, 17), of_decode=of_decode)
    assert run.records.requests["outcome"].tolist() == [FINISHED, REJECTED]
    assert run.records.texts[run.records.requests["reason"][1]] == "retracted"


def test_a_failed_transfer_ends_its_request() -> None:
    """pop_transferred: nothing is computed again, and both engines give back its blocks."""
    run = _run(asked(0, 0, 100, 5), asked(1, 0, 100, 5), transfer=SLOW, fails=frozenset({0}))
    assert run.records.requests["outcome"].tolist() == [REJECTED, FINISHED]
    assert _ms(run, "ended_ns")[0] == 17


def test_what_can_never_fit_is_refused() -> None:
    """The prompt's pages and what is reserved are more than there is: it would wait for ever, and all behind it."""
    run = _run(asked(0, 0, 200, 5), asked(1, 0, 100, 5), blocks=(4096, 40))
    assert run.records.requests["outcome"].tolist() == [REJECTED, FINISHED]
    assert "712 KV tokens" not in run.records.details["never_fits"]
    assert "720 KV tokens with the 512 that are reserved, 640 in the pool" in run.records.details["never_fits"]


def test_prefill_stops_at_once_where_decode_is_full() -> None:
    """Held blocks never fill its memory, as vLLM's do: with room for one request there one prompt is computed."""
    run = _run(*(asked(i, 0, 100, 30) for i in range(4)), blocks=(4096, 40), of_decode={})
    scheduled, ended = run.records.requests["scheduled_ns"], run.records.requests["last_token_ns"]
    assert scheduled[1:].tolist() == ended[:-1].tolist()


def test_the_blocks_of_a_prompt_are_kept_until_all_is_sent() -> None:
    """process_disagg_prefill_inflight_queue: 8 blocks; the second prompt of 7 waits for those of the first."""
    run = _run(asked(0, 0, 100, 2), asked(1, 0, 100, 2), blocks=(9, 4096), transfer=SLOW)
    assert _ms(run, "scheduled_ns") == [0, 17]
    assert _parts(run, "queued:kv_blocks") == {1: 17}


@pytest.mark.parametrize("overlaps", [False, True])
def test_without_transfer_time_ttft_is_prefills_and_the_pace_decodes(overlaps: bool) -> None:
    """With one engine of each and all memory: first tokens come as from an engine that only computes these prompts; and
    each token after that as from one that decodes this request alone."""
    knobs = {"disable_overlap_schedule": not overlaps}
    arrivals = [asked(i, 7 * i, 30 + 61 * i, 1) for i in range(9)]
    case = RoomCase(arrivals, knobs=knobs)
    alone = case.alone(arrivals, is_prefill=True).recorder.records()
    np.testing.assert_array_equal(case.run().records.requests["first_token_ns"], alone.requests["first_token_ns"])
    (one,) = RoomCase([asked(0, 0, 100, 40)], knobs=knobs).run().records.requests
    (same,) = case.alone([asked(0, 0, 100, 40)], is_prefill=False).recorder.records().requests
    for row in (one, same):
        assert row["output_tokens"] == 40
    assert one["first_token_ns"] == same["first_token_ns"]
    late_ns = (one["last_token_ns"] - one["first_token_ns"]) - (same["last_token_ns"] - same["first_token_ns"])
    assert late_ns == (1_000_000 if overlaps else 0)  # an engine alone decodes while it processes the first token


@pytest.mark.parametrize("cancel_ms", [1, 6, 9.5, 11, 13, 14.5, 18, 22, 40])
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_client_may_give_up_anywhere(cancel_ms: float, overlaps: bool) -> None:
    """In the bootstrap queue, the prompt, the transfer and the decode: all blocks come back, and the record ends."""
    slow = TransferConfig(bandwidth=0.112e9, latency=2 * MS)
    arrivals = [asked(0, 0, 100, 30), asked(1, 0, 100, 30, cancel_ms=cancel_ms)]
    of_decode = {"num_reserved_decode_tokens": 16}
    run = RoomCase(
        arrivals, slow, blocks=(4096, 30), of_decode=of_decode, knobs={"disable_overlap_schedule": not overlaps}
    ).run()
    assert run.records.requests["outcome"].tolist() == [FINISHED, CANCELLED]
    check_lives(run.records)


@pytest.mark.parametrize("stop_ms", [0.5, 4, 6.5, 12, 14, 25])
def test_a_run_may_be_cut_anywhere(stop_ms: float) -> None:
    """Each request ends there, and no engine goes on."""
    arrivals = [asked(i, 0.3 * i, 100, 60) for i in range(4)]
    case = RoomCase(arrivals, TransferConfig(0.05e9, MS), blocks=(4096, 60), stop_ns=int(stop_ms * MS))
    run = case.run()
    assert run.records.requests["outcome"].tolist() == [UNFINISHED] * 4
    assert run.end_ns < (stop_ms + 40) * MS
    check_lives(run.records)


@given(room_cases())
@random_cases(60)
def test_requests_and_blocks_are_conserved(case: RoomCase) -> None:
    """Every request ends once, with all its tokens if it finished; all blocks come back, and all parts sum to the
    life. None is refused but what fails, can never run, or is retracted without a backup or alone."""
    run = case.run()
    requests = run.records.requests
    assert requests["request_id"].tolist() == [arrival.request.id for arrival in case.arrivals]
    finished = requests["outcome"] == FINISHED
    lengths = np.array([arrival.output_tokens for arrival in case.arrivals])
    assert (requests["output_tokens"][finished] == lengths[finished]).all()
    refused = {run.records.texts[code] for code in requests["reason"][requests["outcome"] == REJECTED]}
    assert refused <= {"never_fits", "kv_transfer_failed", "retracted", "kv_blocks"}
    assert set(requests["outcome"].tolist()) <= {FINISHED, CANCELLED, REJECTED}
    check_lives(run.records)


@given(room_cases(), st.sampled_from([None, None, 30.0, 90.0]))
@random_cases(60)
def test_running_ahead_changes_no_record(case: RoomCase, stop_ms: float | None) -> None:
    """Engines are simulated as far as no other acts: the rows are those of one event after the other."""
    case.stop_ns = None if stop_ms is None else int(stop_ms * MS)
    leapt, stepped = case.run(), case.run(leap=False)
    assert record_hash(leapt.records) == record_hash(stepped.records)
    assert leapt.end_ns == stepped.end_ns
