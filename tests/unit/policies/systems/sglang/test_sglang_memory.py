"""SGLang's memory by hand: rules 5 to 10 of its specification, and random runs of all of it.

Times in ns with stepping's LinearCost: a step is 10, 1 a prefill token, 2 a decode. The KV block is SGLang's page.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import SAT_OUT
from batchsim.kernel.tokens import TokenIds, output_stream, prompt_stream
from batchsim.kernel.types import Arrival, Request, Sequence
from batchsim.kv.radix_cache import RadixKV
from batchsim.policies.systems.sglang.running_batch import RunningBatch
from batchsim.policies.systems.sglang.sglang import Sglang, SglangConfig
from batchsim.policies.systems.sglang.token_budget import Completion, NewTokenRatio, RemainingOutput
from batchsim.testing.by_hand import same
from tests.support.random_cases import random_cases
from tests.support.sglang_runs import ignoring, sharing, steps, timeline
from tests.support.stepping import crowds, run
from tests.support.whole_batches import blocked

# ---- rule 5: reservation


@pytest.mark.parametrize(("prompt", "start_ns"), [(8, 20), (9, 248)])
def test_rule_5_the_running_reserve_a_share_of_what_they_may_generate(prompt: int, start_ns: int) -> None:
    """40 tokens, 10 held, 0.7 x 19 expected: 16.7 are left. 8 + 7 + 1 is below that, 9 + 7 + 1 waits for the end."""
    done = timeline(f"0:10->20 5:{prompt}->7", page=1, tokens=40)
    assert next(row.start_ns for row in done.log if (1, prompt) in row.items) == start_ns
    if prompt == 9:
        assert blocked(done.records) == [(20, 1, "kv_blocks")]


@pytest.mark.parametrize(("tokens", "batches"), [(62, 1), (61, 2)])
def test_rule_5_a_candidate_reserves_all_its_output(tokens: int, batches: int) -> None:
    """Request 0 takes 10 + 20 and a page of 1; as much for request 1 must be below the rest, before either decodes."""
    done = timeline("0:10->20 0:10->19", page=1, tokens=tokens)
    assert sum(1 for row in done.log if not row.decodes) == batches


def test_rule_5_a_full_batch_is_not_tried_again_until_somebody_leaves() -> None:
    """125 tokens do not fit in 124.7 when request 1 comes; 20 steps later they would, but 0 must end first."""
    done = timeline("0:10->60/380 5:114->10", page=1, tokens=400)
    assert steps(done)[59:61] == [(716, [(0, 1)]), (728, [(1, 114)])]


# ---- rule 6: the ratio


@pytest.mark.parametrize(("prompt", "start_ns"), [(114, 260), (115, 728)])
def test_rule_6_the_ratio_falls_with_every_decode_step(prompt: int, start_ns: int) -> None:
    """After 20 decodes it is 0.68: of 370 free tokens 244.1 are reserved, 125 fit and 126 do not."""
    done = timeline(f"0:10->60/380 260:{prompt}->10", page=1, tokens=400)
    assert next(row.start_ns for row in done.log if (1, prompt) in row.items) == start_ns


def test_rule_6_an_idle_engine_resets_it() -> None:
    """After request 0 the ratio is 0.64, which would let 2 in beside 1; but the engine idled, and 2 waits."""
    done = timeline("0:10->60/380 2000:10->60/380 2005:114->10", page=1, tokens=400)
    assert blocked(done.records) == [(2020, 2, "kv_blocks")]


def test_rule_6_start_floor_and_what_a_retraction_sets() -> None:
    """0.7 of the conservativeness, at most 1; 0.14 of that after 600 steps; (generated + 20 each) / (caps + 1)."""
    ratio = NewTokenRatio(1.0)
    assert ratio.current == 0.7
    for _ in range(601):
        ratio.decay()
    assert ratio.current == pytest.approx(0.098)
    ratio.after_retraction(30, 199, 2)
    assert ratio.current == 0.35
    ratio.after_retraction(30, 19, 2)
    assert ratio.current == 1.0
    ratio.reset()
    assert ratio.current == 0.7
    assert NewTokenRatio(2.0).current == 1.0


def test_rule_5_expected_outputs_are_clipped_at_4096() -> None:
    """Of 5,000 tokens to come 4,096 count, until fewer are left; 10 to come count as they are."""
    growth = RemainingOutput()
    long, short = Sequence(Request(0, 0, 1, 5000)), Sequence(Request(1, 0, 1, 10))
    growth.join(long, 7)
    growth.join(short, 7)
    assert [growth.tokens(7 + step) for step in (0, 5, 904, 905)] == [4106, 4101, 4096 - 894, 4095 - 895]
    growth.leave(long)
    assert (growth.tokens(8), growth.of(short, 8, 0.5)) == (9, 4.5)


@pytest.mark.parametrize(("prompt", "admitted_ns"), [(2, 20), (3, 248)])
def test_rule_5_who_ignores_the_end_of_its_text_reserves_all_of_it(prompt: int, admitted_ns: int) -> None:
    """40 tokens, 10 held, all 19 to come: 11 are left. 2 + 7 + 1 is below that, 3 + 7 + 1 waits for the end."""
    done = timeline(ignoring(f"0:10->20 5:{prompt}->7", 0), page=1, tokens=40)
    assert next(row.start_ns for row in done.log if (1, prompt) in row.items) == admitted_ns


@pytest.mark.parametrize(("cap", "admitted_ns"), [(8, 20), (9, 248)])
def test_rule_5_without_the_cache_the_ends_are_played_through(cap: int, admitted_ns: int) -> None:
    """30 free, less a prompt of 9 and a page: 20. Two go on for 8 tokens: 4 are left, for 9: 2, and 2 must be kept.

    That 19 of request 0 and 8 of request 1 to come are more than 20 does not count: the first to end gives back 9.
    """
    done = timeline(ignoring(f"0:10->20 5:9->{cap}", 0, 1), page=1, tokens=40, disable_radix_cache=True)
    assert next(row.start_ns for row in done.log if (1, 9) in row.items) == admitted_ns


@pytest.mark.parametrize(("prompt", "admitted_ns"), [(15, 20), (16, 248)])
def test_rule_5_and_the_prompt_must_fit_beside_what_is_reserved(prompt: int, admitted_ns: int) -> None:
    """30 free, 13.3 reserved for request 0: 15 and a page fit, 16 and a page do not, though the ends would allow it."""
    done = timeline(ignoring(f"0:10->20 5:{prompt}->1", 1), page=1, tokens=40, disable_radix_cache=True)
    assert next(row.start_ns for row in done.log if (1, prompt) in row.items) == admitted_ns


@pytest.mark.parametrize(("prompt", "admitted_ns"), [(10, 20), (11, 248)])
def test_rule_5_and_may_fill_what_is_left(prompt: int, admitted_ns: int) -> None:
    """30 free, all 19 to come reserved for request 0, which ignores its end too: 10 and a page are the 11 left."""
    done = timeline(ignoring(f"0:10->20 5:{prompt}->1", 0, 1), page=1, tokens=40, disable_radix_cache=True)
    assert next(row.start_ns for row in done.log if (1, prompt) in row.items) == admitted_ns


@pytest.mark.parametrize(("prompt", "beside"), [(3, True), (4, False)])
def test_rule_5_without_the_cache_the_rest_of_a_page_is_no_waste(prompt: int, beside: bool) -> None:
    """Of a chunk of 8 a riding decode and the 4 tokens to which 1 is cut leave 3: enough for 3 tokens, not for 4."""
    arrivals = ignoring(f"0:4->9 5:20->30 5:{prompt}->2", 2)
    done = timeline(arrivals, enable_mixed_chunk=True, chunked_prefill_size=8, disable_radix_cache=True)
    assert done.items[1] == [(1, 4), *[(2, 3)] * beside, (0, 1)]
    assert blocked(done.records) == ([] if beside else [(14, 2, "token_budget")])


def test_rule_5_who_ends_last_is_played_before_the_last_listed() -> None:
    """30 tokens last for 10 of both and 10 more of the second; SGLang lists the second first, which has 20 to come."""
    first, second = (Sequence(Request(i, 0, 1, cap, ignore_eos=True)) for i, cap in enumerate((10, 20)))
    completion = Completion(1.0, lambda seq: 0)
    assert completion.fits(first, [], [], 30)
    assert not completion.fits(second, [], [], 30)
    assert Completion(1.0, lambda seq: 0).fits(first, [second], [], 30)


def test_rule_5_sums_of_floats_are_those_of_sglang() -> None:
    """0.7 of 2, 7 and 1, added row by row as SGLang does, are below 7, and 7 the other way round."""
    batch = RunningBatch(CountingKV(100, 4), None)
    rows = [Sequence(Request(i, 0, 1, cap)) for i, cap in enumerate((3, 8, 2))]
    for seq in rows:
        seq.settled_computed_tokens = seq.settled_output_tokens = 1
        batch.join(seq)
    batch.keep_order(rows)
    assert int(batch.reserved(0.7, exact=False)) == 6
    batch.keep_order(rows[::-1])
    assert int(batch.reserved(0.7, exact=False)) == 7


# ---- rule 7: chunks


def test_rule_7_one_request_is_chunked_and_goes_first() -> None:
    """20 tokens in chunks of 8: nobody else fits until its last one, and no decode runs in between."""
    done = timeline("0:20->2 0:4->2", chunked_prefill_size=8)
    assert done.items == [[(0, 8)], [(0, 8)], [(0, 4), (1, 4)], [(0, 1), (1, 1)]]
    assert blocked(done.records) == [(0, 1, "token_budget")]


def test_rule_7_a_cut_is_made_at_a_page() -> None:
    """5 tokens leave 4 of 12, as they take two pages; the next prompt is cut there, not at 7."""
    assert timeline("0:5->1 0:12->1", chunked_prefill_size=12).items == [[(0, 5), (1, 4)], [(1, 8)]]


@pytest.mark.parametrize(("chunk", "chunks"), [(-1, [3]), (0, [3]), (1, [1, 1, 1])])
def test_rule_7_0_is_no_chunk_size(chunk: int, chunks: list[int]) -> None:
    """Like -1 it turns chunks off; 1 is the smallest."""
    assert timeline("0:3->1", page=1, chunked_prefill_size=chunk).items == [[(0, n)] for n in chunks]


def test_rule_7_a_cut_may_leave_one_token() -> None:
    """Of a chunk of 2 request 1 gets what 0 leaves."""
    assert timeline("0:1->1 0:3->1", page=1, chunked_prefill_size=2).items == [[(0, 1), (1, 1)], [(1, 2)]]


def test_rule_7_a_decode_given_up_leaves_what_it_generated() -> None:
    """Request 0, cancelled at 40, has computed 8 + 2 tokens; request 1, which goes on from there, computes the rest."""
    first, second = sharing("0:8->9 100:12->1", ((0, 8),), ((0, 8), (1, 4)))
    said = TokenIds.of([*first.request.tokens.segments, (output_stream(0), 0, 4)])
    second = replace(second, request=replace(second.request, tokens=said))
    done = timeline([replace(first, cancel_ns=40), second], page=1)
    assert done.items[-1] == [(1, 2)]


def test_rule_7_a_prompt_given_up_half_computed_is_over() -> None:
    """Request 0, cancelled during its first chunk, leaves the next one to request 1."""
    assert timeline("0:20->1c5 0:4->1", chunked_prefill_size=8).items == [[(0, 8)], [(1, 4)]]


@pytest.mark.parametrize(("output", "beside"), [(31, True), (32, False)])
def test_rule_7_a_middle_chunk_reserves_no_output(output: int, beside: bool) -> None:
    """Request 0 may generate 30 tokens, but with its second of three chunks 48 are left, less the chunk and a page."""
    arrivals = f"0:20->30 5:4->{output}"
    done = timeline(arrivals, tokens=56, chunked_prefill_size=8, schedule_policy="shortest-prefill-first")
    assert done.items[1] == [(0, 4), (1, 4)][: 1 + beside]


@pytest.mark.parametrize(("output", "beside"), [(7, True), (8, False)])
def test_rule_7_the_last_chunk_reserves_the_output(output: int, beside: bool) -> None:
    """44 free, less a page, a page to spare and 20 tokens of output: 16 are left, which 4 + 8 + 4 would use up."""
    done = timeline(f"0:20->20 0:4->{output}", tokens=60, chunked_prefill_size=8)
    assert ((1, 4) in done.items[2]) is beside


def test_rule_7_without_chunks_the_first_may_exceed_the_budget() -> None:
    """A prompt of 20 with a budget of 8 runs whole, and alone."""
    assert timeline("0:20->1 0:4->1", max_prefill_tokens=8).items == [[(0, 20)], [(1, 4)]]


def test_rule_7_a_chunk_that_finds_no_page_waits_for_the_decodes() -> None:
    """22 tokens: with 10 of 12 computed beside two decodes of 6 tokens each none is left; 1 is retracted for 0."""
    done = timeline(
        "0:1->8 0:1->8 5:12->1",
        page=1,
        tokens=22,
        enable_mixed_chunk=True,
        chunked_prefill_size=4,
        schedule_conservativeness=0.0,
    )
    assert done.items[5:8] == [[(2, 2), (0, 1), (1, 1)], [(0, 1)], [(2, 2), (0, 1)]]
    states = done.records.states[done.records.states["state"] == SAT_OUT]
    rows = [(int(r["time_ns"]), int(r["request_id"]), done.records.texts[r["reason"]]) for r in states]
    assert rows == [(92, 2, "kv_blocks")]


def test_rule_7_a_prompt_that_is_cut_outlives_the_last_decode() -> None:
    """17 tokens: 9 of request 0 and 8 of 1, which finds no more; 0 alone cannot go on, and makes room for 1 at once."""
    done = timeline(
        "0:1->12 5:10->1",
        page=1,
        tokens=17,
        enable_mixed_chunk=True,
        chunked_prefill_size=2,
        schedule_conservativeness=0.0,
    )
    assert (done.items[8], done.items[9], done.log[9].preempted) == ([(1, 1), (0, 1)], [(1, 2)], [0])


# ---- rule 8: strict order


def test_rule_8_nobody_overtakes_the_first_that_does_not_fit() -> None:
    """Request 2 would fit at 20 ns, but 1 does not and stands before it."""
    done = timeline("0:10->20 5:9->7 6:2->2", page=1, tokens=40)
    assert next(row.items for row in done.log if (2, 2) in row.items) == [(1, 9), (2, 2)]


# ---- rule 9: retraction


def test_rule_9_the_longest_input_of_equal_outputs_is_retracted() -> None:
    """14 tokens of prompts and two a step fill 30 after 8 steps: 1 loses its KV and comes back when 0 has ended.

    Its prompt is evicted with the rest, to have 20 tokens free for request 0.
    """
    done = timeline("0:6->20 5:8->12", page=1, tokens=30, schedule_conservativeness=0.0)
    retracted_ns = 34 + 8 * 14
    assert done.preemptions() == [(retracted_ns, 1, "kv_blocks", 0)]
    row = next(row for row in done.log if row.preempted)
    assert (row.start_ns, row.items, row.free) == (retracted_ns, [(0, 1)], 15)
    assert steps(done)[-4:-2] == [(retracted_ns + 10 * 12, [(0, 1)]), (retracted_ns + 11 * 12, [(1, 17)])]


def test_rule_9_a_retraction_evicts_for_the_next_20_steps() -> None:
    """Request 0 ends one step later; still the prompt of 1 was evicted for it, and all 17 tokens are computed anew."""
    done = timeline("0:6->10/20 5:8->12", page=1, tokens=30, schedule_conservativeness=0.0)
    assert [row.items for row in done.log if not row.decodes][-1] == [(1, 17)]


def test_rule_9_the_fewest_generated_tokens_go_first() -> None:
    """Request 1 came later and has generated less, so it is retracted though its prompt is shorter."""
    done = timeline("0:8->16 60:4->12", page=1, tokens=30, schedule_conservativeness=0.0)
    assert [(request, reason) for _, request, reason, _ in done.preemptions()] == [(1, "kv_blocks")]


def test_rule_9_full_ties_retract_the_last_to_have_joined() -> None:
    """Two like requests of one batch: the second goes."""
    done = timeline("0:6->12 5:6->12", page=1, tokens=26, schedule_conservativeness=0.0)
    assert [request for _, request, _, _ in done.preemptions()] == [1]


def test_rule_9_a_victim_may_stand_in_its_own_way_alone() -> None:
    """At 127 request 1 has filled its blocks and none is free; 0 needs none, so that nobody else is the reason."""
    done = timeline("0:4->15 5:5->10", tokens=24, schedule_conservativeness=0.0)
    assert done.preemptions() == [(127, 1, "kv_blocks", -1)]


def test_rule_9_no_more_are_retracted_than_free_the_pages_due() -> None:
    """At 161 requests 0 and 1 need a page each and none is free; the two of request 2 are as many."""
    done = timeline("0:4->16 0:4->16 60:1->8", tokens=32, disable_radix_cache=True, schedule_conservativeness=0.0)
    assert done.preemptions() == [(161, 2, "kv_blocks", 0), (217, 1, "kv_blocks", 0)]


def test_rule_9_by_priority_the_least_important_is_retracted() -> None:
    """retraction_policy priority: the higher number stays, or with low first the lower."""
    for low_first, victim in ((False, 0), (True, 1)):
        done = timeline(
            "0:6->20p1 5:8->12p2",
            page=1,
            tokens=30,
            schedule_conservativeness=0.0,
            retraction_policy="priority",
            schedule_low_priority_values_first=low_first,
        )
        assert done.preemptions()[0][1] == victim


def test_rule_9_the_retracted_wait_behind_all_others() -> None:
    """Request 2 came while 0 and 1 ran and was not let in; when 0 has ended it goes before 1, retracted meanwhile."""
    done = timeline("0:6->20 5:8->12 40:9->9", page=1, tokens=30, schedule_conservativeness=0.0)
    firsts = [row.items[0][0] for row in done.log if not row.decodes]
    assert done.preemptions()[0][1] == 1
    assert firsts == [0, 1, 2, 1]


def test_rule_9_a_retraction_sets_the_ratio_by_those_who_stay() -> None:
    """Request 0 stays with 29 of 60 tokens: (29 + 20) / (60 + 1)."""
    built: list[Sglang] = []

    def policy(config: SglangConfig, context: PolicyContext) -> Sglang:
        built.append(Sglang(config, context))
        return built[-1]

    config = SglangConfig(chunked_prefill_size=-1, schedule_conservativeness=0.0)
    done = run(policy, config, "0:6->50/60 5:8->50", kv=RadixKV, blocks=70, block_size=1, max_model_len=100)
    assert [request for _, request, _, _ in done.preemptions()] == [1]
    assert built[0].ratio.current == 49 / 61


def test_rule_9_the_head_retracted_is_blocked_first_by_that() -> None:
    """In the step of its retraction nothing is admitted; in the next its memory is not there."""
    done = timeline("0:6->20 5:8->12", page=1, tokens=30, schedule_conservativeness=0.0)
    assert blocked(done.records) == [(146, 1, "preemption"), (158, 1, "kv_blocks")]


# ---- rule 10: the radix cache


def test_rule_10_a_later_request_computes_only_what_is_not_cached() -> None:
    """12 tokens in common, in pages of 4: request 1 computes its other 4, and all 16 without the cache."""
    arrivals = sharing("0:12->1 50:16->1", ((0, 12),), ((0, 12), (1, 4)))
    done = timeline(arrivals)
    assert done.items == [[(0, 12)], [(1, 4)]]
    assert done.records.requests["cached_tokens"].tolist() == [0, 12]
    assert timeline(arrivals, disable_radix_cache=True).items == [[(0, 12)], [(1, 16)]]


@pytest.mark.parametrize(("page", "computed"), [(1, 1), (4, 4), (8, 8)])
def test_rule_10_a_match_never_covers_the_whole_prompt(page: int, computed: int) -> None:
    """Of the same 8 tokens again, one page is computed anew."""
    arrivals = sharing("0:8->1 50:8->1", ((0, 8),), ((0, 8),))
    assert timeline(arrivals, page=page).items == [[(0, 8)], [(1, computed)]]


def test_rule_10_equal_prompts_of_one_batch_do_not_share() -> None:
    """A prompt is found from the end of its prefill on: both compute all 8 tokens, the third only 4."""
    arrivals = sharing("0:8->1 0:8->1 5:8->1", *[((0, 8),)] * 3)
    assert timeline(arrivals).items == [[(0, 8), (1, 8)], [(2, 4)]]


def test_rule_10_a_chunk_is_found_once_it_is_computed() -> None:
    """Beside the last chunk of request 0, request 1 finds the 16 tokens of the first two."""
    arrivals = sharing("0:20->1 0:20->1", ((0, 20),), ((0, 20),))
    assert timeline(arrivals, chunked_prefill_size=8).items == [[(0, 8)], [(0, 8)], [(0, 4), (1, 4)]]


def test_rule_10_the_output_of_a_finished_request_is_found() -> None:
    """A second turn of 8 + 9 + 3 tokens finds the first turn's prompt and 8 of its output, not the last token's KV."""
    first = sharing("0:8->9", ((0, 8),))[0]
    tokens = TokenIds.of([(prompt_stream(0), 0, 8), (1, 0, 9), (prompt_stream(5), 0, 3)])
    second = Arrival(Request(1, 1000, 20, 1, tokens=tokens), 1)
    assert timeline([first, second]).items[-1] == [(1, 4)]


def test_rule_10_what_is_cached_gives_way_to_new_requests() -> None:
    """The pool holds one request's pages at a time; the third finds nothing of the first left, and none is refused."""
    arrivals = sharing("0:24->1 100:24->1 200:24->1", ((0, 24),), ((1, 24),), ((0, 24),))
    assert timeline(arrivals, tokens=32).items == [[(0, 24)], [(1, 24)], [(2, 24)]]
    assert timeline(arrivals, tokens=64).items == [[(0, 24)], [(1, 24)], [(2, 4)]]


# ---- all of it at random

KNOBS = {
    "schedule_policy": st.sampled_from(["fcfs", "lpm", "shortest-prefill-first"]),
    "max_running_requests": st.sampled_from([None, 1, 3]),
    "max_prefill_tokens": st.sampled_from([4, 20, 100]),
    "chunked_prefill_size": st.sampled_from([-1, 4, 8, 24]),
    "enable_mixed_chunk": st.booleans(),
    "prefill_max_requests": st.sampled_from([None, 2]),
    "schedule_conservativeness": st.sampled_from([0.0, 0.3, 1.0]),
    "disable_radix_cache": st.booleans(),
    "retraction_policy": st.sampled_from(["length", "priority"]),
    "enable_priority_scheduling": st.booleans(),
    "schedule_low_priority_values_first": st.booleans(),
    "priority_scheduling_preemption_threshold": st.sampled_from([0, 10]),
}


class Checked(Sglang):
    """Looks over the pages after every step."""

    def complete(self, batch: Any, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        responses = super().complete(batch, finished, now_ns)
        if isinstance(self.kv, RadixKV):
            self.kv.check()
        return responses


@random_cases(60)
@given(st.fixed_dictionaries(KNOBS), crowds(), st.lists(st.integers(0, 2), min_size=9, max_size=9), st.data())
def test_random_runs_are_equal_under_every_driver_and_lose_no_page(
    knobs: dict[str, Any], arrivals: list[Arrival], texts: list[int], data: st.DataObject
) -> None:
    """Live, stepping and leaping leave equal records, every request ends; pages and locks add up after each step."""
    try:
        config = SglangConfig(**knobs)
    except ValueError:
        return
    shared = []
    for arrival, text in zip(arrivals, texts, strict=False):
        r = arrival.request
        tokens = TokenIds.of([(prompt_stream(text), 0, r.prompt_tokens)]) if text else None
        request = Request(r.id, r.arrival_ns, r.prompt_tokens, r.max_output_tokens, r.priority, tokens=tokens)
        shared.append(Arrival(request, arrival.output_tokens, arrival.cancel_ns))
    kv = RadixKV if config.traits.prefix_cache else CountingKV
    blocks, page = data.draw(st.sampled_from([(11, 4), (40, 1), (20, 4)]))
    setting: dict[str, Any] = {"kv": kv, "blocks": blocks, "block_size": page}
    first = run(Checked, config, shared, **setting)
    assert [int(i) for i in first.records.requests["request_id"]] == [a.request.id for a in shared]
    for how in ("step", "leap"):
        other = run(Sglang, config, shared, how=how, **setting)
        same(first.records, other.records)
