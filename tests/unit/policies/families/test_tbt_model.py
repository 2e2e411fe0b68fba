"""A token budget from step times, by hand: a step takes 10 ns, 1 more a prefill token, 2 a decode."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from batchsim.base.errors import ScenarioError
from batchsim.kernel.batch import Batch
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Request, Sequence
from batchsim.policies.families.tbt_model import TbtModel, TbtModelConfig
from tests.support.random_cases import random_cases
from tests.support.stepping import Run, crowds, run, run_every_way

LIMITS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 40}


def by_model(arrivals: str, **knobs: Any) -> Run:
    return run(TbtModel, TbtModelConfig(**LIMITS | knobs), arrivals)


def test_beside_decodes_prompts_have_the_tokens_that_keep_the_objective() -> None:
    """Alone a prompt of 30 is computed at once. Beside one decode 20 ns hold 8 tokens of prompts: 10 + 2 + 8."""
    result = by_model("0:4->4 1:30->1", tbt=20, min_prefill_tokens=1)
    assert result.items == [[(0, 4)], [(0, 1), (1, 8)], [(0, 1), (1, 8)], [(0, 1), (1, 8)], [(1, 6)]]
    assert [row.start_ns for row in result.log] == [0, 14, 34, 54, 74]
    assert by_model("0:30->1", tbt=20, min_prefill_tokens=1).items == [[(0, 30)]]


def test_a_nanosecond_less_is_a_token_less() -> None:
    assert by_model("0:4->2 1:30->1", tbt=19, min_prefill_tokens=1).items[1] == [(0, 1), (1, 7)]


def test_prompts_do_not_starve_where_the_decodes_alone_miss_the_objective() -> None:
    """12 ns are more than 5 already: the least of three tokens is left to prompts."""
    result = by_model("0:4->3 1:5->1", tbt=5, min_prefill_tokens=3)
    assert result.items == [[(0, 4)], [(0, 1), (1, 3)], [(0, 1), (1, 2)]]


def test_the_stated_budget_bounds_what_times_would_allow() -> None:
    """Of 40 tokens 39 beside a decode, however long a step may be; and a new prompt shares them with one begun."""
    result = by_model("0:4->3 1:45->1 1:45->1", tbt=1000)
    assert result.items[1:3] == [[(0, 1), (1, 39)], [(0, 1), (1, 6), (2, 33)]]


class ByPairs:
    """10 ns a step, and for each token of a chunk 1 and as many as are computed of its prompt already."""

    def step_ns(self, batch: Batch) -> int:
        return 10 + sum(n * (1 + seq.settled_computed_tokens) for seq, n in batch.chunks) + batch.num_prefill_tokens

    def recompute_ns(self, num_tokens: int) -> int:
        return 0

    def swap_ns(self, num_blocks: int) -> int:
        return 0


def test_the_expected_step_has_the_prompt_begun_first_and_then_one_from_its_start() -> None:
    """Of a prompt with 3 tokens computed 5 are left: 8 tokens are these at 4 ns and 3 at 1, 4 tokens all of it."""
    scheduler = TbtModel(TbtModelConfig(**LIMITS), PolicyContext(CountingKV(9, 4), 64, None, ByPairs()))
    begun = Sequence(Request(0, 0, 8, 1))
    begun.settled_computed_tokens = 3
    scheduler.partial[begun] = 5
    assert [scheduler._step_ns(n) for n in (8, 5, 4)] == [10 + 20 + 3 + 8, 10 + 20 + 5, 10 + 16 + 4]


def test_one_that_waits_beside_decodes_stops_no_leap() -> None:
    scheduler = TbtModel(TbtModelConfig(**LIMITS), PolicyContext(CountingKV(9, 4), 64, None, ByPairs()))
    scheduler.add(Sequence(Request(0, 0, 8, 1)), 0)
    assert scheduler.is_settled()


def test_without_estimates_it_is_refused() -> None:
    with pytest.raises(ScenarioError, match=r"tbt_model: its budget needs estimates of step times. Use tbt_feedback."):
        TbtModel(TbtModelConfig(**LIMITS), PolicyContext(CountingKV(9, 4), 64))


@pytest.mark.parametrize("knobs", [{"chunked_prefill": False}, {"order": "prefill_first"}])
def test_a_controller_needs_chunks_behind_the_decodes(knobs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Set chunked_prefill: true and order: decode_first"):
        TbtModelConfig(**LIMITS | knobs)


@random_cases(25)
@given(crowds())
def test_every_driver_agrees(arrivals: Any) -> None:
    run_every_way(TbtModel, TbtModelConfig(**LIMITS, tbt=19, min_prefill_tokens=2), arrivals, blocks=12)
