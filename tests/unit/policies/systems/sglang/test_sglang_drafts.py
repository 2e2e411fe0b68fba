"""SGLang with speculative decoding by hand: what its source says of pages, retractions, bursts and the radix cache.

Times in ns with stepping's LinearCost: a step is 10, 1 a prefill token, 2 a decode. The KV block is SGLang's page.
Laws of ones and zeros say exactly how many drafts are accepted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import CAP_CUT
from batchsim.kernel.tokens import TokenIds, output_stream, prompt_stream
from batchsim.kernel.types import Arrival, Request, Sequence
from batchsim.kv.radix_cache import RadixKV
from batchsim.policies.systems.sglang.sglang import Sglang
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from batchsim.policies.systems.sglang.sglang_drafts import DraftingBatch, SglangWithDrafts
from tests.support.sglang_runs import steps, timeline
from tests.support.stepping import Run
from tests.support.whole_batches import requests

NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
EAGLE = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_eagle_topk": 1}


def drafting(
    arrivals: str | list[Arrival], kind: dict[str, Any], acceptance: float | tuple[float, ...], **setting: Any
) -> Run:
    return timeline(arrivals, disable_overlap_schedule=True, acceptance=acceptance, **kind, **setting)


def talk(text: str, turn: int, start: int) -> list[Arrival]:
    """The requests of `text`; the last one's prompt is that of request `turn`, its output, and tokens of its own."""
    arrivals = requests(text)
    before, last = arrivals[turn], arrivals[-1].request
    prompt, output = before.request.prompt_tokens, before.output_tokens or 0
    first = (prompt_stream(0), 0, prompt)
    own = (prompt_stream(9), start, last.prompt_tokens - prompt - output)
    tokens = [TokenIds.of([first]), TokenIds.of([first, (output_stream(turn), 0, output), own])]
    for i, ids in zip((turn, -1), tokens, strict=True):
        r = arrivals[i].request
        request = Request(r.id, r.arrival_ns, r.prompt_tokens, r.max_output_tokens, tokens=ids)
        arrivals[i] = Arrival(request, arrivals[i].output_tokens)
    return arrivals


def test_a_decode_gains_its_own_token_and_those_accepted() -> None:
    """Two of three drafts are right: 1 + 3 + 3 tokens and the last one, drafts being verified that are one too many."""
    done = drafting("0:8->8", NGRAM, (1.0, 1.0, 0.0))
    assert steps(done) == [(0, [(0, 8)]), (18, [(0, 4)]), (30, [(0, 4)]), (42, [(0, 4)])]
    rows = done.records.steps
    assert rows["num_decode_tokens"].tolist() == [0, 4, 4, 4] and rows["num_accepted_tokens"].tolist() == [0, 2, 2, 2]
    assert done.records.requests["last_token_ns"].tolist() == [54]


def test_pages_are_taken_for_twice_the_tokens_verified_and_kept_where_drafts_are_rejected() -> None:
    """6, 9 and 12 computed tokens want room for 8 more: of 100 pages of 4 tokens 4, 5 and 5 are held."""
    done = drafting("0:6->8", NGRAM, (1.0, 1.0, 0.0), tokens=400, disable_radix_cache=True)
    assert [row.free for row in done.log] == [98, 96, 95, 95]
    slow = drafting("0:6->5", NGRAM, 0.0, page=1, tokens=100, disable_radix_cache=True)
    assert [row.free for row in slow.log] == [94, 86, 85, 84, 83]


def test_who_lacks_pages_for_drafts_is_retracted() -> None:
    """After 15 steps two sequences of 25 tokens want 33 each of 64; what they hold, or one token more, would fit."""
    knobs = {"page": 1, "tokens": 64, "schedule_conservativeness": 0.0, "disable_radix_cache": True}
    assert drafting("0:10->20 0:10->20", NGRAM, 0.0, **knobs).preemptions() == [(30 + 15 * 14, 1, "kv_blocks", 0)]
    assert timeline("0:10->20 0:10->20", disable_overlap_schedule=True, **knobs).preemptions() == []


def test_decodes_that_ride_along_verify_nothing() -> None:
    """Beside three chunks request 0 gains a token each; alone it verifies again, behind those whose prompts ran."""
    done = drafting("0:4->12 15:8->5", EAGLE, 1.0, page=1, chunked_prefill_size=4, enable_mixed_chunk=True)
    assert steps(done) == [
        (0, [(0, 4)]),
        (14, [(0, 4)]),
        (26, [(1, 3), (0, 1)]),
        (41, [(1, 3), (0, 1)]),
        (56, [(1, 2), (0, 1)]),
        (70, [(1, 4), (0, 4)]),
    ]
    assert done.records.steps["num_accepted_tokens"].tolist() == [0, 3, 0, 0, 0, 6]
    assert [row.free for row in done.log][:3] == [3996, 3988, 3981]  # 4 + 8; 8 + 8 and a chunk of 3


@pytest.mark.parametrize(("output", "left"), [(4, 1), (5, 2), (6, 1)])
def test_where_a_burst_goes_beyond_the_end_the_tree_gets_the_last_token_too(output: int, left: int) -> None:
    """Bursts of 4: output 1 + 4 ends with its burst, whose last token is never computed; 4 and 6 in the midst of one.
    The next turn finds all tokens before it, or all but the last."""
    done = drafting(talk(f"0:8->{output} 500:{9 + output}->1", 0, 0), NGRAM, 1.0, page=1)
    assert done.items[-1] == [(1, left)]


@pytest.mark.parametrize(("mixes", "left"), [(True, 4), (False, 2)])
def test_who_ends_beside_prompts_leaves_one_token_less(mixes: bool, left: int) -> None:
    """Of 8 + 6 tokens 13 are computed, of which the tree gets 12, that is 11 pairs; where the last one comes in the
    midst of a burst it gets all 14, or 13 pairs. The next turn of 15 tokens finds them."""
    arrivals = talk("0:8->6 19:20->1 900:15->1", 0, 0)
    done = drafting(arrivals, EAGLE, 1.0, page=1, chunked_prefill_size=4, enable_mixed_chunk=mixes)
    assert done.items[-1] == [(2, left)]


@pytest.mark.parametrize(("kind", "new"), [(EAGLE, 12), (NGRAM, 8), (EAGLE | {"speculative_algorithm": "NEXTN"}, 12)])
def test_an_eagle_prefix_loses_its_last_page(kind: dict[str, Any], new: int) -> None:
    """The fourth page of a prompt of 16 depends on what comes behind it, which is not the same for both."""
    arrivals = requests("0:16->2 500:24->1")
    shared = []
    for arrival, own in zip(arrivals, (0, 8), strict=True):
        r = arrival.request
        segments = [(prompt_stream(0), 0, 16), *([(prompt_stream(1), 0, own)] if own else [])]
        request = Request(r.id, r.arrival_ns, r.prompt_tokens, r.max_output_tokens, tokens=TokenIds.of(segments))
        shared.append(Arrival(request, arrival.output_tokens))
    assert drafting(shared, kind, 0.0).items[-1] == [(1, new)]


@pytest.mark.parametrize(("prompt", "tokens"), [(10, 24), (33, 1)])
def test_a_cap_is_lowered_to_the_steps_that_have_pages(prompt: int, tokens: int) -> None:
    """Of 40 tokens 8 are kept for drafts: a last step begins at 32 computed ones, and makes one more of 10 + 24."""
    row = drafting(f"0:{prompt}->100", NGRAM, 0.0, page=1, tokens=40).records
    assert row.requests["output_tokens"].tolist() == [tokens]
    assert [row.texts[reason] for reason in row.requests["reason"]] == [CAP_CUT]


@pytest.mark.parametrize(
    ("kind", "page", "width", "depth", "reserve"),
    [
        (EAGLE, 1, 4, 3, 8),
        (EAGLE, 64, 4, 3, 8),
        (NGRAM, 64, 4, 3, 8),
        ({"speculative_algorithm": "NGRAM"}, 1, 12, 11, 24),
        ({"speculative_algorithm": "STANDALONE"}, 1, 4, 3, 8),
        # Five passes of four tokens each; in pages of 16, each branch of a pass has two of its own.
        (
            {**EAGLE, "speculative_num_steps": 5, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8},
            1,
            8,
            5,
            40,
        ),
        (
            {**EAGLE, "speculative_num_steps": 5, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8},
            16,
            8,
            5,
            256,
        ),
        ({**EAGLE, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 3}, 1, 3, 2, 12),
    ],
)
def test_what_the_arguments_come_to(kind: dict[str, Any], page: int, width: int, depth: int, reserve: int) -> None:
    """Tokens verified, drafts that may be accepted, tokens in reserve: as SGLang derives them."""
    made = SglangConfig(**kind, acceptance=0.5, disable_overlap_schedule=True).drafting
    assert made is not None and (made.width, made.depth, made.reserve(page)) == (width, depth, reserve)


def test_at_most_48_run_unless_told() -> None:
    """Of 60 short prompts 48 come in at once; told 60, all."""
    text = " ".join(["0:4->9"] * 60)
    assert len(drafting(text, NGRAM, 0.0).items[0]) == 48
    assert len(drafting(text, NGRAM, 0.0, max_running_requests=60).items[0]) == 60


def test_what_decodes_are_expected_to_need_knows_nothing_of_drafts() -> None:
    """0.3 of what their caps leave, of one that ignores the end of its text all; bursts of 2 leave less."""
    batch = DraftingBatch(RadixKV(100, 4), None, 4, 8)
    for number, ignores in enumerate((False, True)):
        seq = Sequence(Request(number, 0, 4, 10 - 6 * number, ignore_eos=ignores))
        seq.settled_computed_tokens, seq.settled_output_tokens, seq.order = 4, 1, number
        batch.join(seq)
    assert batch.reserved(0.3, exact=False) == pytest.approx(9 * 0.3 + 3)
    batch.group.computed += 2
    assert batch.reserved(0.3, exact=True) == batch.reserved(0.3, exact=False) == pytest.approx(7 * 0.3 + 1)


@pytest.mark.parametrize(("computed", "cached"), [(4, 8), (3, 7)])
def test_before_it_grows_it_evicts_a_page_more_for_each_decode(computed: int, cached: int) -> None:
    """4 pages are free and 10 cached. Two decodes want 2 pages each, and 2 to spare: 8 stay cached. What their prompts
    left of their pages counts once more: 7 stay. A second growth, which needs nothing, evicts nothing."""
    kv = RadixKV(16, 4)
    batch = DraftingBatch(kv, kv, 4, 8)
    for number in range(12):
        seq = Sequence(Request(number, 0, 4, 9))
        assert kv.allocate(seq, 4)
        seq.settled_computed_tokens = 4 if number < 10 else computed
        if number < 10:
            kv.insert(seq)
            kv.free(seq)
            continue
        seq.settled_output_tokens = computed - 3
        batch.join(seq)
    assert (kv.cached_blocks, kv.num_free) == (10, 14)
    assert batch.grow()
    assert (kv.cached_blocks, kv.num_free) == (cached, 10)
    kv.check()
    other = Sequence(Request(99, 0, 4, 9))
    assert kv.allocate(other, 8 if computed == 4 else 12) and batch.grow()
    assert kv.cached_blocks == cached
    assert np.array_equal(batch.group.room, [12, 12])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"speculative_num_steps": 3}, "speculative_num_steps 3 needs speculative_algorithm"),
    ({"acceptance": 0.5}, "acceptance is of draft tokens: it needs speculative_algorithm"),
    ({"speculative_algorithm": "DFLASH", "acceptance": 0.5}, "DFLASH is not simulated yet"),
    (EAGLE, "needs to be told how many drafts are right"),
    ({"speculative_algorithm": "EAGLE3", "acceptance": 0.5}, "EAGLE3 needs speculative_num_steps"),
    ({"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "acceptance": 0.5}, "needs speculative_eagle_topk"),
    ({**EAGLE, "speculative_num_draft_tokens": 5, "acceptance": 0.5}, "SGLang makes it speculative_num_steps + 1, 4"),
    ({**EAGLE, "speculative_eagle_topk": 2, "acceptance": 0.5}, "needs speculative_num_draft_tokens"),
    ({**NGRAM, "speculative_num_steps": 3, "acceptance": 0.5}, "does not count under NGRAM"),
    ({**NGRAM, "enable_mixed_chunk": True, "acceptance": 0.5}, "SGLang turns it off under NGRAM"),
    ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 1, "acceptance": 0.5}, "must be 2 to 64"),
    ({**EAGLE, "acceptance": (0.5, 0.4)}, "acceptance has 2 positions, the most drafts that can be accepted is 3"),
    ({**EAGLE, "acceptance": (0.5, 0.4, 0.6)}, "acceptance rises: 0.5, 0.4, 0.6"),
]


@pytest.mark.parametrize(("knobs", "words"), REFUSED)
def test_arguments_that_do_not_go_together_are_refused(knobs: dict[str, Any], words: str) -> None:
    """Each in one line that says what to write instead."""
    with pytest.raises(ValueError, match=words.replace("+", r"\+")) as refusal:
        SglangConfig(**{"disable_overlap_schedule": True, **knobs})
    assert "\n" not in str(refusal.value)


def test_without_an_algorithm_it_is_the_scheduler_without_drafts() -> None:
    """The registered class makes the plain one."""
    made = SglangWithDrafts(SglangConfig(), PolicyContext(RadixKV(100, 4), 1000))
    assert type(made) is Sglang


@pytest.mark.parametrize(
    ("knobs", "method", "drafts", "branches"),
    [
        (NGRAM, "ngram", 3, 1),
        (EAGLE, "eagle", 3, 1),
        (EAGLE | {"speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}, "eagle", 3, 4),
        (EAGLE | {"speculative_eagle_topk": 4, "speculative_num_draft_tokens": 3}, "eagle", 2, 4),
    ],
)
def test_a_tree_of_drafts_is_as_deep_as_its_steps_and_tokens_allow(
    knobs: dict[str, Any], method: str, drafts: int, branches: int
) -> None:
    """At most a draft a step, and one fewer than tokens are verified; each pass of the drafter has topk tokens."""
    speculation = SglangConfig(**knobs, acceptance=0.5).traits.speculation
    assert speculation is not None
    assert (speculation.method, speculation.num_drafts, speculation.branches) == (method, drafts, branches)
    assert [len(shares) for shares in speculation.positions.values()] == [drafts]
