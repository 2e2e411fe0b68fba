"""From packed rows to steps: which rank has which micro-batch, what it computes, and what is left over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchsim.training.steps import Layout, Step
from tests.support.training import run, scenario

DOCUMENTS = [(0, 0, 1024), (1, 0, 2048), (2, 0, 512), (3, 0, 4608)]


def examples(step: Step) -> list[list[list[int]]]:
    """By rank and micro-batch the examples."""
    return [[[piece[0] for row in each.rows for piece in row] for each in rank] for rank in step.rounds[0]]


@pytest.mark.parametrize(
    ("mask", "pads", "rows", "computed", "squares"),
    [
        ("document", "none", [DOCUMENTS], 8192, 26_738_688),
        ("cross", "none", [DOCUMENTS], 8192, 8192**2),
        ("document", "capacity", [DOCUMENTS], 9000, 26_738_688),
        ("cross", "capacity", [DOCUMENTS], 9000, 9000**2),
        ("padded", "longest", [[piece] for piece in DOCUMENTS], 4 * 4608, 4 * 4608**2),
        ("document", "longest", [[piece] for piece in DOCUMENTS], 4 * 4608, 26_738_688),
    ],
)
def test_tokens_and_squares_by_mask_and_padding(mask: Any, pads: Any, rows: Any, computed: int, squares: int) -> None:
    """Padding counts as tokens; under a mask by document it has no squares, else rows have those of their width."""
    batch = Layout(mask, pads, 9000, 1, 1).micro_batch(rows)
    assert (batch.real, batch.computed, batch.squares, batch.own_squares) == (8192, computed, squares, 26_738_688)


def test_rows_and_documents_are_rounded_up() -> None:
    """A row to a multiple of 16 as Megatron-Bridge pads, a document to twice the context-parallel ranks."""
    assert Layout("document", "longest", None, 16, 1).micro_batch([[(0, 0, 17)]]).computed == 32
    assert Layout("document", "none", None, 1, 8).micro_batch([[(0, 0, 17), (1, 0, 8)]]).computed == 24 + 8


def test_ranks_take_micro_batches_by_turns(tmp_path: Path) -> None:
    """Micro-batch k goes to rank k modulo ranks, until each has as many as are accumulated; the rest is lost."""
    keys = {"ranks": {"data": 2}, "accumulate": 2, "samples": 1}
    packer = {"kind": "transformers.padded", "sampler": "sequential"}
    epoch = run(tmp_path, [5] * 9, packer, **keys).epoch
    assert [examples(step) for step in epoch.steps] == [[[[0], [2]], [[1], [3]]], [[[4], [6]], [[5], [7]]]]
    assert epoch.lost == [8]


def test_a_last_step_may_have_fewer(tmp_path: Path) -> None:
    """Without drop_last the last step has as many micro-batches as all ranks can have."""
    keys = {"ranks": {"data": 2}, "accumulate": 2, "drop_last": False}
    packer = {"kind": "transformers.padded", "sampler": "sequential"}
    epoch = run(tmp_path, [5] * 7, packer, **keys).epoch
    assert [examples(step) for step in epoch.steps][1:] == [[[[4]], [[5]]]]
    assert epoch.lost == [6]


def test_rows_are_shuffled_after_packing_unless_told_otherwise(tmp_path: Path) -> None:
    """Decreasing packers put long documents first: rows are shuffled, the same way for the same seed."""
    packer, lengths = {"kind": "megatron_bridge.first_fit_decreasing"}, list(range(1, 41))
    first = [run(tmp_path, lengths, packer, capacity=40, seed=seed).steps for seed in (0, 0, 1)]
    times = [[step.time_s for step in steps] for steps in first]
    assert times[0] == times[1] != times[2]
    plain = run(tmp_path, lengths, packer, capacity=40, shuffle_rows=False)
    assert next(len(each.rows[0]) for step in plain.epoch.steps for each in step.micro_batches()) == 1
    assert plain.epoch.rows[0] == [(39, 0, 40)]


def test_a_steps_sequences_are_shared_out_and_packed_by_rank(tmp_path: Path) -> None:
    """verl's dynamic batches: ranks get equal work, and as many micro-batches as the rank that has most."""
    keys = {"ranks": {"data": 2}, "capacity": 10, "global_batch": 6}
    epoch = run(tmp_path, [9, 9, 9, 2, 2, 2], {"kind": "verl.rearrange_micro_batches"}, **keys).epoch
    counts = [len(rank) for rank in epoch.steps[0].rounds[0]]
    assert counts[0] == counts[1] and len(epoch.steps) == 1
    assert sorted(piece for rank in examples(epoch.steps[0]) for each in rank for piece in each) == [0, 1, 2, 3, 4, 5]


def test_a_document_on_several_ranks_is_one_micro_batch(tmp_path: Path) -> None:
    """Megatron-Core: two rounds, the long document on both ranks at half the tokens each."""
    keys = {"ranks": {"data": 2}, "capacity": 4, "global_batch": 2}
    result = run(tmp_path, [8, 2], {"kind": "megatron_core.balanced_cp"}, **keys)
    step = result.epoch.steps[0]
    assert [[[each.ranks for each in rank] for rank in ranks] for ranks in step.rounds] == [[[2], [2]], [[2], [2]]]
    assert len(step.micro_batches()) == 2
    assert result.steps[0].time_s == pytest.approx((4 + 1) * 1e-6)
    assert result.steps[0].real == 10


def test_longer_examples_are_dropped_or_truncated_before_packing(tmp_path: Path) -> None:
    """What is filtered is counted, in examples and in tokens."""
    packer = {"kind": "torchtune.packed"}
    dropped = run(tmp_path, [3, 9, 4], packer, capacity=5, longer="drop")
    assert (dropped.epoch.filtered, dropped.figures["dropped"]) == ([1], pytest.approx(1 / 3))
    cut = run(tmp_path, [3, 9, 4], packer, capacity=5, longer="truncate")
    assert cut.figures["truncated_tokens"] == pytest.approx(4 / 16)
    assert (cut.figures["truncated"], cut.figures["dropped"]) == (pytest.approx(1 / 3), 0)


def test_samples_lie_end_to_end_under_a_mask_by_document(tmp_path: Path) -> None:
    """Padding-free: the micro-batch of a padded sampler as one row without padding."""
    packer = {"kind": "transformers.padded"}
    assert run(tmp_path, [3, 9], packer, samples=2).figures["padding"] == pytest.approx(1 - 12 / 18)
    assert run(tmp_path, [3, 9], packer, samples=2, mask="document").figures["padding"] == 0


def test_the_packer_gets_its_ranks_and_batches_from_the_scenario(tmp_path: Path) -> None:
    """Options that are left out are filled with data ranks, accumulation and the capacity."""
    keys = {"ranks": {"data": 2}, "accumulate": 2, "samples": 2}
    epoch = run(tmp_path, [4] * 16, {"kind": "transformers.batch_rebalance"}, **keys).epoch
    assert [[len(rank) for rank in step.rounds[0]] for step in epoch.steps] == [[2, 2], [2, 2]]
    assert scenario(tmp_path, [1], {"kind": "trl.bfd"}, capacity=7).config.capacity == 7
