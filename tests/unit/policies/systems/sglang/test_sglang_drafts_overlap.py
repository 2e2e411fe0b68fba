"""SGLang's drafts where scheduling overlaps, its default, by hand: pages go by what is known, and so does who ends.

Times in ns with HostCost: a step is 10 on the GPU, 1 a prefill token, 2 a decode; 3 to launch, 2 to process. Laws of
ones and zeros say exactly how many drafts are accepted.
"""

from __future__ import annotations

from typing import Any

import pytest

from batchsim.kernel.engine_loop import OVERLAP
from batchsim.kernel.types import Arrival, Request, Sequence
from batchsim.kv.radix_cache import RadixKV
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from batchsim.policies.systems.sglang.sglang_drafts import DraftingBatch
from tests.support.sglang_runs import overlapped, steps
from tests.support.stepping import Run, column, lanes, wasted
from tests.unit.policies.systems.sglang.test_sglang_drafts import EAGLE, NGRAM, talk

TRUSTING = {"schedule_conservativeness": 0.0, "disable_radix_cache": True}  # the running reserve nothing


def drafting(
    arrivals: str | list[Arrival], kind: dict[str, Any], acceptance: float | tuple[float, ...], **setting: Any
) -> Run:
    return overlapped(arrivals, acceptance=acceptance, **kind, **setting)


def test_scheduling_overlaps_with_drafts_too_unless_told() -> None:
    """As shipped."""
    assert SglangConfig(**EAGLE, acceptance=0.5).traits.loop == OVERLAP
    assert SglangConfig(**EAGLE, acceptance=0.5, disable_overlap_schedule=True).traits.loop.kind == "sync"


def test_a_step_verifies_before_it_is_known_what_the_one_before_accepted() -> None:
    """Two of three drafts are right. Bursts of 3 come out at 35 and 47; of 8 tokens one is left then, the row that
    makes it is in flight, and no other is launched."""
    done = drafting("0:8->8", NGRAM, (1.0, 1.0, 0.0))
    assert lanes(done) == [(0, 3, 3, 23), (3, 6, 21, 35), (23, 26, 33, 47), (35, 38, 45, 59)]
    assert done.records.steps["num_accepted_tokens"].tolist() == [0, 2, 2, 2]
    assert (column(done, "last_token_ns"), column(done, "output_tokens"), wasted(done)) == ([59], [8], [0, 0, 0, 0])


def test_a_burst_that_reaches_the_cap_is_not_foreseen() -> None:
    """At 35 five tokens are known and four in flight, of which SGLang counts one: the next four rows are in vain."""
    done = drafting("0:8->8", NGRAM, 1.0)
    assert lanes(done)[3] == (35, 38, 45, 59)
    assert (column(done, "last_token_ns"), column(done, "output_tokens"), wasted(done)) == ([47], [8], [0, 0, 0, 4])


def test_pages_are_taken_for_eight_tokens_beyond_the_known_ones() -> None:
    """6 computed tokens are known at 3 and still at 21, when a step in flight writes more; 9 at 33."""
    done = drafting("0:6->8", NGRAM, (1.0, 1.0, 0.0), tokens=400, disable_radix_cache=True)
    assert [(row.start_ns, row.free) for row in done.log] == [(0, 98), (3, 96), (21, 96), (33, 95)]


def test_who_is_retracted_loses_its_tokens_in_flight() -> None:
    """At 245 two sequences of 25 known tokens want 33 each of 64. What request 1 verifies then is lost: it comes back
    with 16 of its tokens, and makes the seventeenth again."""
    done = drafting("0:10->20 0:10->20", NGRAM, 0.0, page=1, tokens=64, **TRUSTING)
    assert done.preemptions() == [(245, 1, "kv_blocks", 0)]
    assert wasted(done)[16] == 4 and sum(wasted(done)) == 4
    assert [row.items for row in done.log if (1, 26) in row.items]
    assert column(done, "output_tokens") == [20, 20]


def test_short_of_pages_behind_one_at_its_cap_nothing_is_launched() -> None:
    """At 49 request 0, which holds 26 of 52 tokens, has its last one in flight; request 1 wants one more. Nobody is
    retracted: at 63 the pages are there, and the step starts at once."""
    wide = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8}
    done = drafting("0:10->3 0:10->8", wide, 0.0, page=1, tokens=52, **TRUSTING)
    assert [(row.start_ns, row.free) for row in done.log][:4] == [(0, 32), (3, 0), (35, 0), (63, 24)]
    assert lanes(done)[3][:3] == (63, 66, 66)
    assert done.preemptions() == []


def test_who_is_at_its_cap_does_not_run_any_more() -> None:
    """Request 0 has its second and last token in flight when the other's third step is launched."""
    done = drafting("0:4->2 0:4->5", NGRAM, 0.0)
    assert done.records.steps["num_running"].tolist() == [2, 2, 1, 1, 1]


def test_decodes_that_ride_along_gain_a_token_each() -> None:
    """Beside three chunks, scheduled while a burst is in flight; at 61 both decode, and again at 75, in vain."""
    done = drafting("0:4->12 15:8->5", EAGLE, 1.0, page=1, chunked_prefill_size=4, enable_mixed_chunk=True)
    both = [(1, 4), (0, 4)]
    assert steps(done) == [
        (0, [(0, 4)]),
        (3, [(0, 4)]),
        (19, [(1, 3), (0, 1)]),
        (31, [(1, 3), (0, 1)]),
        (46, [(1, 2), (0, 1)]),
        (61, both),
        (75, both),
    ]
    assert done.records.steps["num_accepted_tokens"].tolist() == [0, 3, 0, 0, 0, 6, 0]
    assert [row.free for row in done.log][:3] == [3996, 3988, 3985]
    assert (wasted(done)[-1], column(done, "last_token_ns")) == (8, [89, 89])


@pytest.mark.parametrize(("output", "left", "more"), [(4, 1, 4), (5, 2, 4), (6, 1, 0)])
def test_a_step_too_many_adds_nothing_to_the_tree(output: int, left: int, more: int) -> None:
    """Bursts of 4, and but for a last token foreseen a step that nobody counts: the next turn finds what it does
    without overlap."""
    done = drafting(talk(f"0:8->{output} 500:{9 + output}->1", 0, 0), NGRAM, 1.0, page=1)
    assert wasted(done)[2] == more
    assert done.items[-1] == [(1, left)]


@pytest.mark.parametrize(("mixes", "left"), [(True, 4), (False, 2)])
def test_who_ends_beside_prompts_leaves_one_token_less(mixes: bool, left: int) -> None:
    """As without overlap."""
    arrivals = talk("0:8->6 19:20->1 900:15->1", 0, 0)
    done = drafting(arrivals, EAGLE, 1.0, page=1, chunked_prefill_size=4, enable_mixed_chunk=mixes)
    assert done.items[-1] == [(2, left)]


def test_a_cancel_leaves_what_is_known() -> None:
    """Given up at 47, with 9 tokens known and a step in flight: the next turn of 21 finds 8 + 8 of its 8 + 12."""
    arrivals = talk("0:8->12 500:21->1", 0, 0)
    first = arrivals[0]
    cancelled = Arrival(Request(0, 0, 8, 40, tokens=first.request.tokens), 40, cancel_ns=36)
    done = drafting([cancelled, arrivals[1]], NGRAM, 1.0, page=1)
    assert column(done, "output_tokens") == [9, 1]
    assert done.items[-1] == [(1, 5)]


def test_what_decodes_are_expected_to_need_goes_by_what_is_known() -> None:
    """A first token in flight counts no more than four rows of drafts: 0.3 of 10 and of 9."""
    batch = DraftingBatch(RadixKV(100, 4), None, 4, 8, ahead=True)
    for number in range(2):
        seq = Sequence(Request(number, 0, 4, 10))
        seq.settled_computed_tokens, seq.settled_output_tokens, seq.order = 4, 1, number
        batch.join(seq)
    batch.group.unknown[1] = 0
    assert [batch.in_flight(seq) for seq in batch.rows()] == [1, 0]
    batch.group.computed[1] += 4
    batch.group.unknown[1] += 4
    for exact in (False, True):
        assert batch.reserved(0.3, exact=exact) == pytest.approx(10 * 0.3 + 9 * 0.3)
