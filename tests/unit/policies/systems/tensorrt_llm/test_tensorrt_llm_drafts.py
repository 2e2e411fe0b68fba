"""TensorRT-LLM with speculative decoding by hand: what its source says of tokens, KV blocks, caps and the overlap.

Times in ns: a step is 10 on the GPU, 1 a prefill token, 2 a decode; overlapping, 3 to launch, 2 to process. A KV block
holds 4 tokens. Laws of ones and zeros say exactly how many drafts are accepted. Rules name the file of NVIDIA/
TensorRT-LLM, as stored in 2026, that they are from.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from batchsim.base.errors import SchedulerStalled
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.record import FINISHED, REJECTED, SAT_OUT
from batchsim.kernel.tokens import TokenIds, output_stream, prompt_stream
from batchsim.kernel.types import Arrival
from batchsim.kv.reuse_tree import ReuseTreeKV
from batchsim.metrics.gaps import token_gaps
from batchsim.policies.systems.tensorrt_llm.decoding_config import DecodingConfig
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm_config import TensorrtLlmConfig
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm_drafts import TensorrtLlmWithDrafts
from tests.support.stepping import HostCost, Run, column, lanes, run, run_alike, wasted
from tests.support.whole_batches import blocked, requests
from tests.unit.policies.systems.tensorrt_llm.test_tensorrt_llm_overlap import EVICTING, turns
from tests.unit.policies.systems.tensorrt_llm.test_tensorrt_llm_reuse import TEXT, alike, states

ALL, NONE = (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)
OVERLAP = {"disable_overlap_scheduler": False}
NGRAM = {"decoding_type": "NGram"}


def drafting(
    arrivals: str | list[Arrival],
    accepted: tuple[float, ...],
    blocks: int = 1000,
    kind: dict[str, Any] | None = None,
    **knobs: Any,
) -> Run:
    """One run with Eagle3's drafts, or another `kind`; without block reuse and overlap unless told."""
    spec = {"decoding_type": "Eagle3", "acceptance": accepted, "max_draft_len": len(accepted)} | (kind or {})
    knobs = {"enable_block_reuse": False, "disable_overlap_scheduler": True} | knobs
    config = TensorrtLlmConfig(speculative_config=DecodingConfig(**spec), **knobs)
    kv = ReuseTreeKV if config.traits.prefix_cache else CountingKV
    setting: dict[str, Any] = {"blocks": blocks, "kv": kv, "loop": config.traits.loop, "cost": HostCost()}
    return run_alike(TensorrtLlmWithDrafts, config, arrivals, "live", "leap", **setting)


def third_goes_on(text: str, known: int) -> list[Arrival]:
    """The requests of `text`, the third's prompt being the second's, `known` tokens of its answer and others."""
    arrivals = requests(text)
    prompt = (TEXT, 0, arrivals[1].request.prompt_tokens)
    own = (prompt_stream(7), 0, arrivals[2].request.prompt_tokens - prompt[2] - known)
    tokens = [None, TokenIds.of([prompt]), TokenIds.of([prompt, (output_stream(1), 0, known), own])]
    both = zip(arrivals, tokens, strict=True)
    return [replace(arrival, request=replace(arrival.request, tokens=ids)) for arrival, ids in both]


def steps(done: Run) -> list[tuple[int, list[tuple[int, int]]]]:
    return [(row.start_ns, row.items) for row in done.log]


# ---- tokens


def test_a_decode_gains_its_own_token_and_those_accepted() -> None:
    """Two of three drafts are right: 1 + 3 + 3 tokens and the last one, in a step that verifies three drafts as well
    (_torch/speculative/spec_sampler_base.py: tokens are added until a stop criterion holds)."""
    done = drafting("0:8->8", (1.0, 1.0, 0.0))
    assert steps(done) == [(0, [(0, 8)]), (18, [(0, 4)]), (30, [(0, 4)]), (42, [(0, 4)])]
    rows = done.records.steps
    assert (rows["num_decode_tokens"].tolist(), rows["num_accepted_tokens"].tolist()) == ([0, 4, 4, 4], [0, 2, 2, 2])
    assert (column(done, "last_token_ns"), column(done, "output_tokens")) == ([54], [8])


def test_the_models_length_cuts_no_draft() -> None:
    """60 tokens leave room for 4 of the 64: 1 and 3 of 4, whose rows reach to 64, are got; the engine's sequences are
    longer by their drafts (pyexecutor/py_executor_creator.py)."""
    done = drafting("0:60->9", ALL)
    assert steps(done) == [(0, [(0, 60)]), (70, [(0, 4)])]
    assert column(done, "output_tokens") == [4]


def test_decodes_that_came_last_find_no_tokens_for_their_drafts() -> None:
    """9 tokens a step are two decodes of 4: the third sits out until one of them ends, and no short prompt starts
    beside them (microBatchScheduler.cpp: a decode costs 1 + its drafts, who finds too few ends the step)."""
    done = drafting("0:2->3 0:2->9 0:2->2 12:1->1", NONE, max_num_tokens=9)
    both = [(0, 4), (1, 4)]
    assert [row.items for row in done.log[:4]] == [[(0, 2), (1, 2), (2, 2)], both, both, [(3, 1), (1, 4), (2, 4)]]
    assert [row[1:3] for row in states(done, SAT_OUT)] == [(2, "token_budget")]
    assert blocked(done.records)[0] == (16, 3, "token_budget")


def test_chunks_get_what_decodes_and_their_drafts_leave() -> None:
    """Of 9 tokens a decode takes 4, of the 5 left a prompt of 10 gets whole blocks: 4, 4 and the last 2."""
    done = drafting("0:4->9 1:10->1", NONE, enable_chunked_prefill=True, max_num_tokens=9)
    assert [row.items for row in done.log[1:4]] == [[(1, 4), (0, 4)], [(1, 4), (0, 4)], [(1, 2), (0, 4)]]


@pytest.mark.parametrize(("knobs", "chunks"), [({}, []), (EVICTING, [(0, 4)])])
def test_prompts_before_the_decode_that_finds_no_tokens_have_what_is_left(
    knobs: dict[str, Any], chunks: list[tuple[int, int]]
) -> None:
    """Of 9 tokens 1 takes 5, and 2 finds too few. 0, whose prompt goes on, is before both where all go by arrival, and
    behind them where decodes come first."""
    fair = {"enable_chunked_prefill": True, "context_chunking_policy": "EQUAL_PROGRESS", "max_num_tokens": 9}
    done = drafting("0:20->1 0:2->2 0:2->2", (*NONE, 0.0), **fair, **knobs)
    assert [row.items for row in done.log[:2]] == [[(0, 4), (1, 2), (2, 2)], [*chunks, (1, 5)]]


def test_evicting_with_chunks_who_finds_no_tokens_ends_the_step() -> None:
    """10 tokens a step: 0 and 1 decode, 2 sits out; 3, behind it, gets no chunk of the two that are left."""
    chunked = {"enable_chunked_prefill": True, "max_num_tokens": 10}
    done = drafting("0:2->3 0:2->9 0:2->2 12:2->1", NONE, **EVICTING, **chunked)
    assert [row.items for row in done.log[1:3]] == [[(0, 4), (1, 4)], [(0, 4), (1, 4)]]
    assert states(done, SAT_OUT)[0][1:3] == (2, "token_budget")


def test_ngrams_that_are_not_found_are_rows_all_the_same() -> None:
    """The drafts of a decode that has none are filled up and rejected (pad_draft_tokens_for_cuda_graph in
    _torch/speculative/drafter.py)."""
    done = drafting("0:8->3", ALL, kind=NGRAM | {"found": 0.0})
    assert steps(done) == [(0, [(0, 8)]), (18, [(0, 4)]), (30, [(0, 4)])]
    assert not done.records.steps["num_accepted_tokens"].any()


# ---- blocks


@pytest.mark.parametrize(("kind", "held"), [({"eagle3_one_model": True}, [3, 4, 4]), (NGRAM, [2, 3, 4])])
def test_a_step_takes_blocks_for_all_its_drafts(kind: dict[str, Any], held: list[int]) -> None:
    """8 tokens, and 2 more where the drafter is in the model (get_num_extra_kv_tokens in _torch/speculative/utils.py).
    A step adds 4 and takes back 3: 12 and 13 tokens after 8, or 14 and 15 after 10 (pyexecutor/resource_manager.py)."""
    assert [1000 - row.free for row in drafting("0:8->4", NONE, kind=kind).log[:3]] == held


@pytest.mark.parametrize(("accepted", "held"), [(ALL, [3, 4, 5]), (NONE, [3, 4, 4])])
def test_accepted_drafts_keep_their_blocks(accepted: tuple[float, ...], held: list[int]) -> None:
    """10 tokens are in blocks; 14 at 18 and, if all are accepted, 18 at 30; else 11 + 4."""
    assert [1000 - row.free for row in drafting("0:8->12", accepted).log[:3]] == held


@pytest.mark.parametrize(("output", "cached"), [(3, 8), (4, 4)])
def test_what_a_rejected_draft_leaves_is_the_last_block_to_be_used_again(output: int, cached: int) -> None:
    """0 leaves 2 full blocks in the tree, and one begun. 1 never holds more than 3 of 6, but each step's third goes to
    the tail of the queue: the first step takes the last unused one, the second the begun one, the third the second
    full one (releaseLastBlock in cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp)."""
    done = drafting(alike(f"0:9->1 50:6->{output} 500:9->1", 8, 0, 8), NONE, 6, NGRAM, enable_block_reuse=True)
    assert column(done, "cached_tokens") == [0, 0, cached]


@pytest.mark.parametrize(("blocks", "start_ns"), [(6, 54), (7, 18)])
def test_blocks_for_the_drafts_of_the_last_step_are_kept_beside_those_to_the_cap(blocks: int, start_ns: int) -> None:
    """0 has 10 tokens as its last step starts, and then 4 and 2 of the drafter's more: 4 blocks; 1 likewise 3."""
    done = drafting("0:8->4 1:4->1", NONE, blocks)
    assert next(row.start_ns for row in done.log if (1, 4) in row.items and row.decodes < len(row.items)) == start_ns


@pytest.mark.parametrize(("knobs", "least"), [({}, 4), (EVICTING, 4), (OVERLAP, 5), (OVERLAP | EVICTING, 5)])
def test_what_never_fits_with_its_drafts_is_refused(knobs: dict[str, Any], least: int) -> None:
    """8 + 4 - 2 tokens, a step of 4 and 2 of the drafter's are 16, or 4 blocks; 8 + 4 - 3 with two steps are 19."""
    assert drafting("0:8->4", NONE, least, **knobs).log
    refused = drafting("0:8->4", NONE, least - 1, **knobs)
    assert not refused.log and column(refused, "outcome") == [REJECTED]


def test_a_decode_that_finds_no_blocks_for_drafts_pauses_the_last() -> None:
    """Both hold 2 of 5 blocks, 6 + 2 tokens; at 22 each wants one for 4 more. 1 is paused, and comes back with 7."""
    done = drafting("0:6->3 0:6->3", NONE, 5, **EVICTING)
    assert done.preemptions() == [(22, 1, "kv_blocks", 1)]
    assert [row.items for row in done.log] == [[(0, 6), (1, 6)], [(0, 4)], [(0, 4)], [(1, 7)], [(1, 4)]]


def test_prompts_enter_the_tree_whole_with_their_results() -> None:
    """Without overlap too, since this loop adds the token before it stores (update_resources in pyexecutor/
    resource_manager.py, after _update_requests)."""
    assert column(drafting(alike("0:8->9 50:12->1", 8, 8), NONE, enable_block_reuse=True), "cached_tokens") == [0, 8]


def test_what_was_accepted_can_be_found_again() -> None:
    """Of 8 + 5 tokens all but the last are stored where the request ends among drafts: its next turn finds 12."""
    done = drafting(turns("0:8->5", 4, 200), ALL, enable_block_reuse=True)
    assert column(done, "cached_tokens") == [0, 12]


# ---- overlapping


def test_a_step_is_launched_with_drafts_before_it_is_known_what_the_one_before_accepted() -> None:
    """The prompt runs from 3 to 11, its first decode is scheduled at 3, the second at 13, with all 4 rows of the first
    in flight: 4 + 2 tokens in 2 blocks, 10 in 3, 14 in 4; then 2 of the first step's 4 are taken back."""
    done = drafting("0:4->9", (1.0, 0.0, 0.0), **OVERLAP)
    assert lanes(done)[:3] == [(0, 3, 3, 19), (3, 6, 17, 31), (19, 22, 29, 43)]
    assert [1000 - row.free for row in done.log[:4]] == [2, 3, 4, 4]
    assert column(done, "first_token_ns") == [19]


def test_who_surely_ends_with_the_step_in_flight_runs_no_more() -> None:
    """Of a cap of 3 at 19 one is known: the step in flight makes one at least, and one is left, so a third is launched;
    at 31 it is known that 2 are, and nothing is launched (will_complete_next_iteration, pyexecutor/py_executor.py)."""
    done = drafting("0:4->3", NONE, **OVERLAP)
    assert [row.items for row in done.log] == [[(0, 4)], [(0, 4)], [(0, 4)]]
    assert (column(done, "output_tokens"), wasted(done)) == ([3], [0, 0, 0])


def test_who_ends_among_drafts_runs_a_step_in_vain() -> None:
    """Of a cap of 3 at 19 one is known, as above; all drafts are right, so that the step in flight is the last: the
    third computes 4 rows in vain."""
    done = drafting("0:4->3", ALL, **OVERLAP)
    assert [row.items for row in done.log] == [[(0, 4)], [(0, 4)], [(0, 4)]]
    assert (column(done, "output_tokens"), column(done, "last_token_ns"), wasted(done)) == ([3], [31], [0, 0, 4])


def test_a_cap_of_one_has_no_decode() -> None:
    """The first token is in flight at 3, and is the last."""
    assert lanes(drafting("0:4->1", ALL, **OVERLAP)) == [(0, 3, 3, 19)]


def test_who_ends_by_the_models_length_is_foreseen_too() -> None:
    """62 tokens leave room for 2 of the 64: the decode in flight at 77 is the last."""
    done = drafting("0:62->9", NONE, **OVERLAP)
    assert (column(done, "output_tokens"), wasted(done)) == ([2], [0, 0])


def test_all_rows_in_flight_count_for_blocks() -> None:
    """8 blocks for two of 8 tokens. At 41 each has 10 and a step of 4 in flight, and wants room for 4 more: 10 blocks.
    1 is paused. Without overlap each step begins with what the one before has left, and 14 tokens fit 4 blocks."""
    done = drafting("0:6->4 0:6->4", NONE, 8, **EVICTING, **OVERLAP)
    assert done.preemptions() == [(41, 1, "kv_blocks", 0)]
    assert not drafting("0:6->4 0:6->4", NONE, 8, **EVICTING).preemptions()
    assert (column(done, "output_tokens"), sum(wasted(done))) == ([4, 4], 0)


def test_a_paused_request_comes_back_with_what_it_had_in_flight() -> None:
    """At 41 1 has 6 + 1 + 4 tokens and 4 rows in flight, which turn out right: 15 (_pause_requests after
    _update_requests in pyexecutor/py_executor.py). Where a step takes 14, the scheduler fails."""
    done = drafting("0:6->20 0:6->20", ALL, 9, **EVICTING, **OVERLAP, max_num_tokens=15)
    assert done.preemptions() == [(41, 1, "kv_blocks", 1)]
    assert next(n for row in done.log[3:] for number, n in row.items if number == 1) == 15
    assert column(done, "output_tokens") == [20, 20]
    with pytest.raises(SchedulerStalled, match="request 1 was paused with 15 tokens, more than max_num_tokens 14"):
        drafting("0:6->20 0:6->20", ALL, 9, **EVICTING, **OVERLAP, max_num_tokens=14)


@pytest.mark.parametrize(("blocks", "start_ns"), [(4, 44), (5, 32)])
def test_who_is_ending_counts_for_blocks_up_to_its_cap_alone(blocks: int, start_ns: int) -> None:
    """At 32 0 holds 5 + 1 + 2 tokens and a step of 4 in 3 blocks, beyond its cap of 8, so that it counts for no fourth:
    2 of 5 are there for the 3 tokens of 1 and the drafter's 2 (getNeededBlocksOneStep in cpp/tensorrt_llm/
    batch_manager/kvCacheManager.cpp)."""
    done = drafting("0:5->3 25:3->1", NONE, blocks, **EVICTING, **OVERLAP)
    assert next(row.start_ns for row in done.log if (1, 3) in row.items) == start_ns


def test_a_cancel_in_flight_leaves_what_is_known() -> None:
    """Cancelled at 25, 0 ends with 8 + 5 known tokens and 4 rows under way: 12 of the known ones are stored."""
    done = drafting(turns("0:8->20c25", 9, 200), ALL, enable_block_reuse=True, **OVERLAP)
    assert column(done, "cached_tokens") == [0, 12]
    assert wasted(done)[:3] == [0, 0, 4]


def test_a_prompt_preempted_with_its_token_in_flight_has_a_gap_to_its_next() -> None:
    """Without drafts, whose gaps are not known: 1 is paused at 3, its first token is out at 17 and the second at 34."""
    config = TensorrtLlmConfig(**EVICTING)
    setting: dict[str, Any] = {"blocks": 3, "block_size": 1, "loop": config.traits.loop, "cost": HostCost()}
    records = run(TensorrtLlmWithDrafts, config, "0:1->1 0:1->2", kv=ReuseTreeKV, **setting).records
    gaps, counts = token_gaps(records, records.requests["outcome"] == FINISHED)
    assert (gaps.tolist(), counts.tolist()) == ([17], [1])


LEFT_OUT = {**OVERLAP, "enable_chunked_prefill": True, "max_num_tokens": 9}
"""9 tokens a step: a decode of 5, and a block of a prompt."""


def test_who_is_left_out_gives_back_what_its_step_in_flight_rejects() -> None:
    """At 24 0 decodes too, and 1 is left out with 5 rows in flight: 4 + 5 tokens in 3 blocks. When 4 are rejected 5 are
    left, in 2. 0 has 15, then 20 and 25, in 4, 5 and 7."""
    done = drafting("0:12->3 0:1->9", (*NONE, 0.0), **LEFT_OUT)
    assert [row.items for row in done.log[:5]] == [[(0, 8), (1, 1)], [(0, 4), (1, 5)], [(0, 5)], [(0, 5)], [(1, 5)]]
    assert [1000 - row.free for row in done.log[:4]] == [4 + 1, 4 + 3, 5 + 3, 7 + 2]


def test_a_cancel_of_who_is_left_out_leaves_what_is_known() -> None:
    """As above, 1 cancelled at 40, while it is left out: 1 + 2 tokens are known, none in flight, and 2 are stored."""
    done = drafting(third_goes_on("0:12->3 0:1->9c40 200:3->1", 1), (*NONE, 0.0), enable_block_reuse=True, **LEFT_OUT)
    assert column(done, "cached_tokens") == [0, 0, 2]


def test_a_pause_of_who_is_ending_leaves_what_is_known() -> None:
    """At 41 1 has 6 + 2 known tokens, the last one and 3 drafts in flight, and is paused for 0: 7 are stored."""
    arrivals = third_goes_on("0:6->4 0:6->3 200:8->1", 1)
    done = drafting(arrivals, NONE, 8, enable_block_reuse=True, **EVICTING, **OVERLAP)
    assert done.preemptions() == [(41, 1, "kv_blocks", 0)]
    assert (column(done, "cached_tokens"), column(done, "output_tokens")) == ([0, 0, 7], [4, 3, 1])


def test_a_cancel_of_a_prompt_in_flight_leaves_what_is_known() -> None:
    """At 3 all 8 tokens of 0 are in flight, and its first one: 7 are stored, a whole block of them."""
    done = drafting(alike("0:8->9c1 200:9->1", 8, 8), ALL, enable_block_reuse=True, **OVERLAP)
    assert column(done, "cached_tokens") == [0, 4]


# ---- refusals


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ({"decoding_type": "Medusa"}, "decoding_type: Medusa is not simulated. Choose from Eagle, Eagle3, MTP"),
        ({"max_draft_len": None}, "decoding_type Eagle3 needs max_draft_len. Write it"),
        ({"decoding_type": "MTP"}, "max_draft_len 3 does not count under decoding_type MTP"),
        ({"mtp_eagle_one_model": True}, "mtp_eagle_one_model is no knob of decoding_type Eagle3"),
        ({"num_nextn_predict_layers": 3}, "num_nextn_predict_layers is no knob of decoding_type Eagle3"),
        (NGRAM | {"eagle3_one_model": True}, "eagle3_one_model is no knob of decoding_type NGram"),
        ({"found": 0.5}, "found is 0.5, but Eagle3 always drafts"),
        ({"acceptance": (0.5, 0.4)}, "acceptance has 2 positions, max_draft_len is 3"),
        ({"acceptance": (0.4, 0.5, 0.6)}, "acceptance rises"),
        ({"max_draft_len": 0}, "max_draft_len is 0"),
    ],
)
def test_a_decoding_config_that_is_none_is_refused(kind: dict[str, Any], words: str) -> None:
    """One line says what does not fit."""
    with pytest.raises(ValueError) as error:
        DecodingConfig(**{"decoding_type": "Eagle3", "acceptance": 0.7, "max_draft_len": 3} | kind)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (NGRAM, "NGram: TensorRT-LLM turns its overlap scheduler off under it. Set disable_overlap_scheduler: true"),
        ({"decoding_type": "Draft_Target"}, "Draft_Target: a draft model of its own in an engine whose scheduling"),
        ({"eagle3_one_model": False}, "Eagle3: a draft model of its own in an engine whose scheduling overlaps"),
    ],
)
def test_a_drafter_outside_the_model_is_refused_to_the_overlap(kind: dict[str, Any], words: str) -> None:
    """Without overlap all of them are simulated (support_overlap_scheduler in _torch/speculative/interface.py)."""
    spec = DecodingConfig(**{"decoding_type": "Eagle3", "acceptance": 0.7, "max_draft_len": 3} | kind)
    assert TensorrtLlmConfig(disable_overlap_scheduler=True, speculative_config=spec).traits.speculation is not None
    with pytest.raises(ValueError) as error:
        TensorrtLlmConfig(speculative_config=spec)
    assert words in str(error.value)


def test_drafts_are_of_the_pytorch_runtime_alone() -> None:
    """What the C++ runtime does with drafts is not simulated."""
    spec = DecodingConfig("Eagle3", 0.7, max_draft_len=3)
    with pytest.raises(ValueError, match="speculative_config: drafts are not simulated of backend tensorrt"):
        TensorrtLlmConfig(backend="tensorrt", speculative_config=spec)


def test_a_step_must_hold_a_decode_and_its_drafts() -> None:
    """3 drafts and a token are 4."""
    spec = DecodingConfig("Eagle3", 0.7, max_draft_len=3)
    assert TensorrtLlmConfig(max_num_tokens=4, speculative_config=spec)
    with pytest.raises(ValueError, match="max_num_tokens 3 must be at least 4, the tokens of a decode and its drafts"):
        TensorrtLlmConfig(max_num_tokens=3, speculative_config=spec)


def test_mtp_has_as_many_drafts_as_layers() -> None:
    """One unless set; the others go by max_draft_len."""
    assert DecodingConfig("MTP", 0.7).num_drafts == 1
    three = DecodingConfig("MTP", 0.7, num_nextn_predict_layers=3)
    assert (three.num_drafts, three.extra_kv_tokens, three.speculation.method) == (3, 2, "mtp")
    assert DecodingConfig("MTP", 0.7, num_nextn_predict_layers=3, mtp_eagle_one_model=False).extra_kv_tokens == 0
