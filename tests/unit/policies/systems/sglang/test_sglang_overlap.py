"""SGLang's overlap of scheduling with the GPU's work, by hand: who waits for whom, what is not known yet, what is lost.

Times in ns with HostCost: a step is 10 on the GPU, 1 a prefill token, 2 a decode; 3 to launch, 2 to process. The KV
block is SGLang's page.
"""

from __future__ import annotations

from typing import Any

import pytest

from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.core import EngineCore
from batchsim.kernel.engine_loop import OVERLAP
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import Recorder
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.tokens import TokenIds, output_stream, prompt_stream
from batchsim.kernel.types import Arrival, Request, Sequence
from batchsim.policies.systems.sglang.running_batch import RunningBatch
from batchsim.policies.systems.sglang.sglang import Sglang
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from batchsim.policies.systems.sglang.token_budget import Completion
from tests.support.sglang_runs import ignoring, overlapped, sharing, timeline
from tests.support.stepping import HostCost, column, lanes, wasted
from tests.support.whole_batches import requests

TRUSTING = {"schedule_conservativeness": 0.0, "disable_radix_cache": True}  # the running reserve nothing


# ---- the loop


def test_a_step_is_launched_before_the_one_before_it_is_processed() -> None:
    """The prompt runs from 3 to 17, its decode is scheduled at 3; its token is out at 19, and the next call is then."""
    done = overlapped("0:4->3")
    assert lanes(done) == [(0, 3, 3, 19), (3, 6, 17, 31), (19, 22, 29, 43)]
    assert (column(done, "first_token_ns"), column(done, "last_token_ns")) == ([19], [43])
    assert wasted(done) == [0, 0, 0]


def test_a_row_that_ends_by_a_stop_token_runs_one_step_too_many() -> None:
    """Nobody foresees that the third of 8 tokens is the last: it is out at 43 as before, and a fourth step runs."""
    done = overlapped("0:4->3/8")
    assert lanes(done)[3] == (31, 34, 41, 55)
    assert (column(done, "last_token_ns"), column(done, "output_tokens"), wasted(done)) == ([43], [3], [0, 0, 0, 1])


def test_who_comes_while_a_step_is_scheduled_waits_for_the_next_call() -> None:
    """Request 1 comes at 20, when the call of 19 has begun; it is taken in at 31 and starts behind the step of 29."""
    done = overlapped("0:4->9 20:4->1")
    assert [(row.start_ns, row.items) for row in done.log[2:4]] == [(19, [(0, 1)]), (31, [(1, 4)])]
    assert lanes(done)[3] == (31, 34, 41, 57)


def test_a_call_that_finds_only_rows_at_their_cap_launches_nothing() -> None:
    """A request of one token decodes nothing: its only step is processed, and nothing was launched meanwhile."""
    assert lanes(overlapped("0:4->1")) == [(0, 3, 3, 19)]


@pytest.mark.parametrize(
    ("knobs", "second"),
    [
        ({}, (3, 6, 17, 33)),
        ({"disable_consecutive_prefill_overlap": True}, (3, 19, 19, 35)),
        ({"disable_consecutive_prefill_overlap": True, "enable_mixed_chunk": True}, (3, 6, 17, 35)),
    ],
)
def test_prefills_can_be_kept_apart(knobs: dict[str, Any], second: tuple[int, ...]) -> None:
    """1 is scheduled at 3. Apart, it is launched at 19, when 0 is processed; if 0 rides along, SGLang takes that for a
    decode."""
    done = overlapped("0:4->2 1:4->1", **{"chunked_prefill_size": 64, **knobs})
    assert lanes(done)[:2] == [(0, 3, 3, 19), second]


# ---- rows in flight


def test_at_their_cap_rows_are_taken_off_before_others_ride() -> None:
    """1 comes at 5 and is scheduled at 19, as the second token of 0 is in flight: its last one, or not."""
    mixed = {"enable_mixed_chunk": True, "chunked_prefill_size": 64}
    done = overlapped("0:4->2 5:4->1", **mixed)
    assert (done.items[2], done.records.steps["num_running"][2]) == ([(1, 4)], 1)
    assert overlapped("0:4->3 5:4->1", **mixed).items[2] == [(1, 4), (0, 1)]


@pytest.mark.parametrize(
    ("text", "third"), [("0:4->3 1:4->1", (43, 46, 46, 62)), ("0:4->3/8 1:4->1", (43, 46, 53, 69))]
)
def test_a_place_is_free_once_a_row_is_taken_off_or_found_finished(text: str, third: tuple[int, ...]) -> None:
    """0 has the only place. The call of 31 takes it off and launches nothing; or launches one step too many of it."""
    assert lanes(overlapped(text, max_running_requests=1))[-1] == third


def test_where_an_end_is_awaited_nobody_is_retracted() -> None:
    """18 tokens of prompts and 3 a step fill 36 after 6 steps, as the last token of 0 is in flight: nothing is launched
    until it is there and its 12 tokens are free."""
    done = overlapped("0:6->7 1:4->12 10:8->12", page=1, tokens=36, **TRUSTING)
    assert column(done, "num_preemptions") == [0, 0, 0]
    at = next(i for i, items in enumerate(done.items) if items == [(1, 1), (2, 1)])
    (_, _, start_ns, processed_ns), (called_ns, launched_ns, next_ns, _) = lanes(done)[at - 1 : at + 1]
    assert (called_ns, next_ns) == (processed_ns, launched_ns)
    assert processed_ns == start_ns + 16 + 2


def test_a_retracted_row_loses_its_token_in_flight() -> None:
    """As above, but 0 goes on: of 6 known tokens each the longest prompt goes, 2. It computes 8 + 6 anew."""
    done = overlapped("0:6->12 1:4->12 10:8->12", page=1, tokens=36, **TRUSTING)
    at = next(i for i, row in enumerate(done.log) if row.preempted)
    assert (done.log[at].preempted, done.items[at]) == ([2], [(1, 1), (0, 1)])
    assert (wasted(done)[at - 1], sum(wasted(done))) == (1, 1)
    assert (column(done, "output_tokens"), column(done, "recomputed_tokens")) == ([12, 12, 12], [0, 0, 14])
    assert [(2, 14)] in done.items


def test_a_last_token_that_is_lost_is_made_again() -> None:
    """At 31 the third and last token of 0 is in flight; 1, more important, takes the only place. 0 computes 4 + 2."""
    done = overlapped(
        "0:4->3 25:4->2p50", max_running_requests=1, enable_priority_scheduling=True, disable_radix_cache=True
    )
    assert (done.log[3].preempted, done.items[3:]) == ([0], [[(1, 4)], [(1, 1)], [(0, 6)]])
    assert (column(done, "output_tokens"), wasted(done)) == ([3, 2], [0, 0, 1, 0, 0, 0])
    assert column(done, "last_token_ns")[0] > column(done, "last_token_ns")[1]


def test_a_first_token_that_is_lost_is_made_again() -> None:
    """At 3 the prompt of 0 is in flight as 1, more important, takes the only place: 0 computes 4 tokens in vain."""
    knobs = {"max_running_requests": 1, "enable_priority_scheduling": True, "disable_radix_cache": True}
    done = overlapped("0:4->3 1:4->2p50", **knobs)
    assert (done.log[1].preempted, done.items[1:4]) == ([0], [[(1, 4)], [(1, 1)], [(0, 4)]])
    assert (wasted(done), column(done, "output_tokens")) == ([4, 0, 0, 0, 0, 0], [3, 2])
    assert column(done, "first_token_ns")[0] > column(done, "last_token_ns")[1]


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("by_decode", [False, True])
def test_a_row_in_flight_reserves_a_token_more(by_decode: bool, ignore_eos: bool) -> None:
    """Of 10 tokens it has 1, or 2; the last of them is not known. Half of what is left counts, or all of it."""
    kv = CountingKV(100, 4)
    batch = RunningBatch(kv, None, ahead=True)
    seq = Sequence(Request(0, 0, 4, 10, ignore_eos=ignore_eos))
    assert kv.allocate(seq, 4)
    seq.settled_computed_tokens, seq.settled_output_tokens = 4, 1
    batch.join(seq)
    step = Batch(batch.group if by_decode else None, [] if by_decode else [(seq, 4)], 0 if by_decode else 4)
    if by_decode:
        batch.group.advance()
    else:
        step.sampled = [seq]
    left = 9 if by_decode else 10
    share = 1.0 if ignore_eos else 0.5
    for in_flight, more in ((step, 0), (None, -1)):
        batch.await_results(in_flight)
        assert batch.reserved(0.5, exact=False) == batch.reserved(0.5, exact=True) == (left + more) * share


def test_an_output_beyond_the_clip_reserves_no_more() -> None:
    """Of more than 4,096 tokens left 4,096 count, whether or not one is in flight."""
    batch = RunningBatch(CountingKV(100, 4), None, ahead=True)
    seq = Sequence(Request(0, 0, 4, 5000))
    seq.settled_computed_tokens, seq.settled_output_tokens = 4, 1
    batch.join(seq)
    step = Batch(None, [(seq, 4)], 4)
    step.sampled = [seq]
    batch.await_results(step)
    assert batch.reserved(1.0, exact=False) == 4096.0


def test_ends_are_played_through_with_known_tokens() -> None:
    """In the call of 31 request 0 holds 6 and has 2 known tokens of 6; 1 takes 4 + 1 and has 5 to come.

    4 steps of both need 8, and 1 is kept for each, below the rest: 22 tokens are enough, 21 are not.
    """
    called: dict[int, int] = {}
    for tokens in (21, 22):
        arrivals = ignoring("0:4->6 20:4->5", 0, 1)
        done = overlapped(arrivals, page=1, tokens=tokens, disable_radix_cache=True)
        called[tokens] = next(row.start_ns for row in done.log if (1, 4) in row.items)
    assert called[21] > called[22] == 31


@pytest.mark.parametrize(("left", "fits"), [(10, False), (11, True)])
def test_who_ends_gives_back_what_is_known(left: int, fits: bool) -> None:
    """One of 10 + 2 tokens, the last in flight, has 2 to come and gives back 11; the other has 20 to come."""
    ends, stays = Sequence(Request(0, 0, 10, 3)), Sequence(Request(1, 0, 4, 20))
    ends.settled_output_tokens = 2
    assert Completion(1.0, lambda seq: 1).fits(stays, [ends], [], left) is fits


# ---- what the tree has, and when


def test_a_first_token_that_decodes_already_is_not_in_the_tree() -> None:
    """0 decodes before its prompt is processed; 1 goes on with its first token, and finds the 8 of the prompt only."""
    text = (prompt_stream(0), 0, 8)
    turn = TokenIds.of([text, (output_stream(0), 0, 1), (prompt_stream(1), 0, 3)])
    arrivals = [
        Arrival(Request(0, 0, 8, 9, tokens=TokenIds.of([text])), 9),
        Arrival(Request(1, 30, 12, 1, tokens=turn), 1),
    ]
    assert column(overlapped(arrivals, page=1), "cached_tokens") == [0, 8]


@pytest.mark.parametrize(("run", "cached"), [(overlapped, 8), (timeline, 12)])
def test_the_last_part_of_a_prompt_enters_the_tree_after_the_next_call(run: Any, cached: int) -> None:
    """A prompt of 16 goes in two; its twin finds the first part, without overlap 12 of the 15 that count."""
    done = run(sharing("0:16->2 1:16->1", ((0, 16),), ((0, 16),)), chunked_prefill_size=8)
    assert column(done, "cached_tokens")[1] == cached


@pytest.mark.parametrize(("cap", "cached"), [(3, 10), (8, 11)])
def test_a_step_too_many_leaves_the_last_token_in_the_tree(cap: int, cached: int) -> None:
    """8 tokens and an answer of 3 come again: by its cap the last token was never computed, by a stop token it was."""
    first, second = requests(f"0:8->3/{cap} 200:14->1")
    text = (prompt_stream(0), 0, 8)
    turn = TokenIds.of([text, (output_stream(0), 0, 3), (prompt_stream(1), 0, 3)])
    arrivals = [
        Arrival(Request(0, 0, 8, cap, tokens=TokenIds.of([text])), first.output_tokens),
        Arrival(Request(1, 200, 14, 1, tokens=turn), second.output_tokens),
    ]
    assert column(overlapped(arrivals, page=1), "cached_tokens") == [0, cached]


# ---- idle


def engine(blocks: int, **knobs: Any) -> tuple[EngineCore, Sglang]:
    """An engine with pages of one token, to be cranked by hand, and its scheduler."""
    config = SglangConfig(chunked_prefill_size=-1, disable_radix_cache=True, **knobs)
    scheduler = Sglang(config, PolicyContext(CountingKV(blocks, 1), 400, loop=OVERLAP))
    executor = SimExecutor(HostCost(), 400, OVERLAP)
    return EngineCore(scheduler, executor, Recorder(), max_model_len=400, loop=OVERLAP), scheduler


def call(core: EngineCore, now_ns: int) -> Batch | Idle:
    """One turn of the loop: a call of the scheduler, then the step of the call before."""
    num_before = len(core.in_flight.steps)
    work = core.schedule(now_ns, drain=False)
    if isinstance(work, Batch):
        core.execute(work, now_ns)
    if num_before:
        core.complete(now_ns + 50)
    return work


@pytest.mark.parametrize("cancelled", [False, True])
def test_the_ratio_is_set_back_one_call_later(cancelled: bool) -> None:
    """The call that finds nobody while the last result is to come leaves the ratio where the decodes had brought it."""
    core, scheduler = engine(100)
    core.submit(requests("0:4->9" if cancelled else "0:4->3")[0])
    ratios: list[float] = []
    for now_ns in (0, 100, 200, 300, 400):
        if cancelled and now_ns == 300:
            core.cancel(0, now_ns)
        call(core, now_ns)
        ratios.append(scheduler.ratio.current)
    assert ratios[0] == ratios[4] > ratios[1] > ratios[2] == ratios[3]


def test_a_retraction_sets_the_ratio_by_what_is_known() -> None:
    """Two of 4 + 100 tokens fill 120; the one that stays has a token in flight, which does not count."""
    core, scheduler = engine(120, schedule_conservativeness=0.0)
    for arrival in requests("0:4->100 50:4->100"):
        core.submit(arrival)
    for now_ns in range(0, 10_000, 100):
        stay = next(iter(scheduler.running), None)
        generated = 0 if stay is None else stay.num_output_tokens
        work = call(core, now_ns)
        if isinstance(work, Batch) and work.preempted:
            assert scheduler.ratio.current == (generated - 1 + 20) / (100 + 1)
            return
    raise AssertionError("nobody was retracted")
