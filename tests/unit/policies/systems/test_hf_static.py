"""Naive Transformers and Vidur's FasterTransformer, by hand: a step takes 10 ns, a KV block holds 4 tokens."""

from __future__ import annotations

from typing import Any

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.policies.systems.faster_transformer import FasterTransformer, FasterTransformerConfig
from batchsim.policies.systems.hf_static import HfStatic, HfStaticConfig
from tests.support.engine import Constant
from tests.support.stepping import run
from tests.support.whole_batches import blocked, outcomes, steps, times

LATER = " 900:1->1 901:1->1"  # keeps the run from draining


def hf(arrivals: str, blocks: int = 1000, **knobs: Any) -> Any:
    return run(HfStatic, HfStaticConfig(**knobs), arrivals, blocks=blocks, cost=Constant(), how="leap").records


def faster_transformer(arrivals: str, blocks: int = 1000, **knobs: Any) -> Any:
    return run(
        FasterTransformer, FasterTransformerConfig(**knobs), arrivals, blocks=blocks, cost=Constant(), how="leap"
    ).records


def test_hf_runs_batches_of_n_in_order_of_arrival() -> None:
    """Five requests make two full batches, whatever their lengths; the rest waits for company."""
    records = hf("0:9->2 0:1->1 0:9->1 0:1->1 0:4->1" + LATER, batch_size=2)
    assert times(records, "scheduled_ns")[:5] == [(0,), (0,), (20,), (20,), (900,)]
    assert blocked(records)[0] == (0, 2, "batch_running")


def test_hf_flushes_the_last_batch() -> None:
    """When no request will come any more a partial batch runs."""
    assert times(hf("0:4->1 0:4->1 0:4->1", batch_size=2), "scheduled_ns") == [(0,), (0,), (10,)]


def test_hf_without_waiting_takes_what_is_there() -> None:
    """An idle server starts with one request; those that came meanwhile go next."""
    records = hf("0:4->2 1:4->1 2:4->1" + LATER, batch_size=2, wait_for_full=False)
    assert times(records, "scheduled_ns")[:3] == [(0,), (20,), (20,)]


def test_hf_pads_prompts_to_the_longest_and_computes_ended_rows_on() -> None:
    """Prompts 5 and 2 are padded by 3; the row that ends first is computed until the other ends."""
    records = hf("0:5->4 0:2->2", batch_size=2)
    columns = ("num_prefill_tokens", "pad_prefill_tokens", "num_decode", "pad_decode_rows", "pad_context_tokens")
    assert steps(records, *columns) == [(7, 3, 0, 0, 0), (0, 0, 2, 0, 3), (0, 0, 1, 1, 6), (0, 0, 1, 1, 7)]


def test_hf_returns_all_answers_when_the_batch_is_over() -> None:
    """No token is delivered before the last row has ended, though generated before."""
    records = hf("0:4->3 0:4->1", batch_size=2)
    assert times(records, "last_token_ns", "first_delivery_ns", "delivered_ns") == [(30, 30, 30), (10, 30, 30)]


def test_hf_ends_a_batch_with_its_last_row_not_with_the_cap() -> None:
    """A row may end before its cap of 9: the batch is over with the last end-of-sequence token."""
    assert times(hf("0:4->3/9 0:4->1/9", batch_size=2), "delivered_ns") == [(30,), (30,)]


def test_hf_cuts_a_padded_batch_that_memory_does_not_hold() -> None:
    """Rows of 8 + 5 - 1 tokens need 3 blocks each: 6 blocks hold two of three."""
    records = hf("0:8->1 0:2->5 0:2->1", batch_size=3, blocks=6)
    assert times(records, "scheduled_ns") == [(0,), (0,), (50,)]


def test_hf_by_default_runs_one_request_at_a_time() -> None:
    """The pipeline's own default batch size is 1."""
    assert times(hf("0:4->2 0:4->1"), "scheduled_ns") == [(0,), (20,)]


def test_faster_transformer_starts_with_what_waits_when_the_last_batch_is_over() -> None:
    """Nobody joins a batch; at its end those that wait come in, at most batch_size_cap."""
    records = faster_transformer("0:4->3 5:4->1 6:4->1 7:4->1" + LATER, batch_size_cap=2)
    assert times(records, "scheduled_ns")[:4] == [(0,), (30,), (30,), (40,)]


def test_faster_transformer_drops_ended_rows_and_holds_their_kv() -> None:
    """No padding; slots of 8 tokens are 2 blocks each, held to the end of the batch; tokens stream."""
    records = faster_transformer("0:5->4 0:2->2", blocks=10, max_tokens_per_request=8)
    columns = ("num_prefill_tokens", "pad_prefill_tokens", "num_decode", "pad_decode_rows", "free_blocks")
    assert steps(records, *columns) == [(7, 0, 0, 0, 6), (0, 0, 2, 0, 6), (0, 0, 1, 0, 6), (0, 0, 1, 0, 6)]
    assert times(records, "first_delivery_ns", "delivered_ns") == [(10, 40), (10, 20)]


def test_faster_transformer_admits_as_many_as_slots_fit() -> None:
    """Slots of 4 blocks: 11 blocks take two of three; one that exceeds its slot is rejected."""
    records = faster_transformer("0:1->2 0:1->1 0:1->1 0:9->9", blocks=11, max_tokens_per_request=16)
    assert times(records, "scheduled_ns")[:3] == [(0,), (0,), (20,)]
    assert outcomes(records)[3] == ("rejected", "never_fits")
    with pytest.raises(ScenarioError, match="max_tokens_per_request 64 takes 16 KV blocks, 15 are in the pool"):
        FasterTransformer(FasterTransformerConfig(), PolicyContext(CountingKV(15, 4), 64))
    assert FasterTransformer(FasterTransformerConfig(), PolicyContext(CountingKV(16, 4), 64)).num_waiting == 0
