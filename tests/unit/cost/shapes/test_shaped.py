"""Steps in compiled shapes, by hand: each costs its program, whatever of it is used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from batchsim.base.errors import ScenarioError
from batchsim.cost.constant import Linear
from batchsim.cost.shapes.config import EngineSizes, ShapesConfig
from batchsim.cost.shapes.shaped import Shaped
from batchsim.cost.work import TIME_TERMS, columns_of
from batchsim.kernel.batch import Batch
from batchsim.kernel.types import DecodeGroup, Request, Sequence

COST = Linear(base=1_000, per_token=10, per_sequence=100, per_context_token=1)
"""1,000 ns a step, 10 a token, 100 a sequence, 1 a token of context."""
ENGINE = EngineSizes(max_num_seqs=32, max_num_batched_tokens=512, max_model_len=1024, block_size=16, num_blocks=600)


def shaped(engine: EngineSizes = ENGINE, **knobs: Any) -> Shaped:
    return Shaped(COST, ShapesConfig(**knobs).build(engine), engine.block_size)


def decodes(*contexts: int) -> Batch:
    """A step in which as many sequences decode, after so many tokens each."""
    group = DecodeGroup(16)
    for i, context in enumerate(contexts):
        seq = Sequence(Request(i, 0, context + 1, 9))
        seq.settled_computed_tokens = context
        group.join(seq)
    return Batch(group, [], 0)


def prompts(*tokens: int, after: int = 0, beside: Batch | None = None) -> Batch:
    """A step of prompts of so many tokens, each after `after` computed ones, and of the decodes of `beside`."""
    chunks = []
    for i, n in enumerate(tokens):
        seq = Sequence(Request(100 + i, 0, after + n, 9))
        seq.settled_computed_tokens = after
        chunks.append((seq, n))
    return Batch(None if beside is None else beside.decodes, chunks, sum(tokens))


def ns(cost: Shaped, batch: Batch) -> int:
    """What the step takes, padded."""
    extra_ns = cost.pad(batch)
    return cost.step_ns(batch) + extra_ns


def pads(batch: Batch) -> tuple[int, int, int, int]:
    return batch.pad_decode_rows, batch.pad_context_tokens, batch.pad_prefill_tokens, batch.pad_prefill_rows


def test_a_decode_costs_the_whole_batch_of_nxd_inference() -> None:
    """One request in a batch of 32 after 100 tokens: 32 rows that read 128 each, as 32 requests do."""
    one, every = decodes(100), decodes(*[100] * 32)
    cost = shaped(preset="nxdi")
    assert ns(cost, one) == ns(cost, every) == 1_000 + 32 * 110 + 32 * 128
    assert pads(one) == (31, 32 * 128 - 100, 0, 0)


@pytest.mark.parametrize(("context", "bucket"), [(126, 128), (127, 256), (1022, 1024), (1023, 1024)])
def test_nxd_inference_looks_for_a_bucket_above_the_length(context: int, bucket: int) -> None:
    """With its own token a sequence of 127 fits 128, one of 128 takes 256, and only the largest takes its equal."""
    batch = decodes(context)
    shaped(preset="nxdi").pad(batch)
    assert batch.context_tokens + batch.pad_context_tokens == 32 * bucket


def test_every_row_of_neuron_reads_the_longest_model_or_the_bucket_of_the_longest_decode() -> None:
    """Three decodes run as four; each reads 1,024 tokens, with buckets of context 384 where the longest has 300."""
    batch = decodes(10, 300, 20)
    assert ns(shaped(preset="neuron"), batch) == 1_000 + 4 * 110 + 4 * 1024
    batch = decodes(10, 300, 20)
    assert ns(shaped(preset="neuron", context=[128, 384]), batch) == 1_000 + 4 * 110 + 4 * 384
    assert pads(batch) == (1, 4 * 384 - 330, 0, 0)
    batch = decodes(10, 127, 20)  # 128 with its own token
    shaped(preset="neuron", context=[128, 384]).pad(batch)
    assert batch.pad_context_tokens == 4 * 128 - 157


def test_a_prompt_of_neuron_is_padded_to_its_bucket_of_tokens() -> None:
    """130 tokens cost 256; two prompts in a step have no program."""
    batch = prompts(130)
    assert ns(shaped(preset="neuron"), batch) == 1_000 + 256 * 10 + 100
    with pytest.raises(ScenarioError, match=r"a step of prompts of requests 2, query 130 fits no compiled program"):
        shaped(preset="neuron").pad(prompts(130, 3))


def test_tpu_pads_the_tokens_of_a_mixed_step_and_not_its_context() -> None:
    """Two decodes and 39 tokens of two prompts make 41, which run as 64; context is as it was."""
    batch = prompts(20, 19, beside=decodes(50, 60))
    cost = shaped(preset="tpu")
    assert ns(cost, batch) == 1_000 + 64 * 10 + (4 + 23) * 100 + 110
    assert pads(batch) == (23, 0, 0, 0)
    assert cost.shapes.num_programs == 6  # 16 to 512, of all steps alike


def test_gaudi_runs_decodes_and_prompts_one_behind_the_other() -> None:
    """Three decodes as four; prompts of 20 and 40 tokens in programs of 32 and 48: the times of three programs."""
    cost = shaped(preset="gaudi", compile=1_000_000)
    batch = prompts(20, 40, beside=decodes(50, 60, 70))
    assert ns(cost, batch) == (1_000 + 4 * 110 + 180) + (1_000 + 32 * 10 + 100) + (1_000 + 48 * 10 + 100)
    assert (*pads(batch), batch.num_passes) == (1, 0, 20, 0, 3)
    terms = cost.explain(columns_of(batch))
    assert sum(float(terms[name][0]) for name in TIME_TERMS) == cost.step_ns(batch)


def test_gaudi_merges_prompts_without_context_up_to_its_most() -> None:
    """Of five the first four share a program of 4 rows of 48, the fifth has context and runs alone."""
    cost = shaped(preset="gaudi", prompts=4, compile=1_000_000)
    batch = prompts(20, 40, 10)
    assert ns(cost, batch) == 1_000 + 4 * 48 * 10 + 4 * 100
    assert (*pads(batch), batch.num_passes) == (0, 0, 4 * 48 - 70, 1, 1)
    assert ns(cost, prompts(20, 40, after=16)) == (1_000 + 320 + 100) + (1_000 + 480 + 100)


def test_a_compilation_is_waited_for_once() -> None:
    """A decode step of more blocks than any bucket: rounded, compiled, and there for the next one."""
    tight = EngineSizes(4, 512, 1024, 16, 10)  # buckets of up to 30 blocks
    cost = shaped(tight, preset="gaudi", compile=5_000_000)
    first, again = decodes(500, 100), decodes(500, 100)
    assert ns(cost, first) - ns(cost, again) == 5_000_000
    assert ns(shaped(preset="tpu", warm=False, compile=7_000), decodes(3)) == 7_000 + 1_000 + 16 * 110 + 3


def test_a_step_beyond_the_largest_graph_runs_as_it_is() -> None:
    """65 decodes where 64 tokens are the most of a graph: without padding, and what launches take in addition."""
    cost = shaped(preset="cuda_graphs", eager=700)
    assert ns(cost, decodes(*[9] * 62)) == 1_000 + 64 * 110 + 62 * 9
    assert ns(cost, decodes(*[9] * 65)) == 700 + 1_000 + 65 * 110 + 65 * 9


def test_sglang_replays_graphs_of_decodes_alone() -> None:
    """Nine decodes as twelve, and 40 as they are, and longer; prompts and mixed steps have no graph to lack."""
    cost = shaped(EngineSizes(32, 512, 1024, 16, 600), preset="sglang_graphs", eager=700)
    assert ns(cost, decodes(*[9] * 9)) == 1_000 + 12 * 110 + 81
    assert ns(cost, decodes(*[9] * 40)) == 700 + 1_000 + 40 * 110 + 360
    assert ns(cost, prompts(20)) == 1_000 + 200 + 100
    assert ns(cost, prompts(20, beside=decodes(9))) == 1_000 + 210 + 200 + 9
    assert str(cost.shapes) == "shapes: sglang_graphs, 8 of decodes"


def test_lists_of_ones_own() -> None:
    """Beyond them an error with both sides, no padding, or a program of just these sizes."""
    lists: dict[str, Any] = {"preset": "lists", "tokens": [64], "requests": [4]}
    assert ns(shaped(**lists), decodes(9, 9, 9)) == 1_000 + 4 * 110 + 27
    batch = prompts(20, 30)
    assert ns(shaped(**lists), batch) == 1_000 + 64 * 10 + 2 * 100 and pads(batch) == (0, 0, 14, 0)
    with pytest.raises(ScenarioError) as refused:
        shaped(**lists).pad(decodes(*[9] * 5))
    assert str(refused.value) == (
        "shapes lists: a step of decodes of requests 5 fits no compiled program, whose largest are requests 4. Add"
        " buckets, or hold the policy to them."
    )
    assert ns(shaped(**lists, beyond="exact"), decodes(*[9] * 5)) == 1_000 + 5 * 110 + 45
    assert ns(shaped(**lists, beyond="compile", compile=50), decodes(*[9] * 5)) == 50 + 1_000 + 5 * 110 + 45


def test_what_no_program_mixes_is_refused() -> None:
    """Prompts beside decodes on Neuron: the numbers, and policies that keep them apart."""
    with pytest.raises(ScenarioError, match=r"a step of 2 decodes and 1 prompts has no program.*vllm_neuron"):
        shaped(preset="neuron").pad(prompts(20, beside=decodes(5, 6)))


def test_padding_is_taken_back_and_written_anew() -> None:
    """As a leap does: the batch goes on as its policy made it, and pads of the policy's own count as real."""
    batch, cost = decodes(100, 200), shaped(preset="nxdi")
    cost.pad(batch)
    cost.unpad(batch)
    assert pads(batch) == (0, 0, 0, 0)
    own = Batch(decodes(100).decodes, [], 0, pad_decode_rows=1, pad_context_tokens=30)
    cost.pad(own)
    assert (own.num_decode + own.pad_decode_rows, own.context_tokens + own.pad_context_tokens) == (32, 32 * 128)
    cost.unpad(own)
    assert pads(own) == (1, 30, 0, 0)
    with pytest.raises(ScenarioError, match="the policy pads its batches itself"):
        shaped(preset="gaudi", compile=5).pad(own)


def test_the_times_of_recorded_steps_are_those_of_the_padded_work() -> None:
    """`explain` of a padded step sums to what it took."""
    for preset, batch in (
        ("nxdi", decodes(100, 300)),
        ("tpu", prompts(20, 30, beside=decodes(7))),
        ("neuron", prompts(77, after=128)),
    ):
        cost = shaped(preset=preset)
        cost.pad(batch)
        terms = cost.explain(columns_of(batch))
        assert sum(terms[name] for name in TIME_TERMS) == np.array([cost.step_ns(batch)])
