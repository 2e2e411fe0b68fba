"""Bucket lists by hand, those beside the recorded ones; choices at their boundaries; the best lists against all."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.cost.shapes.best import best_buckets, held_by
from batchsim.cost.shapes.gaudi import GaudiEngine, fallback
from batchsim.cost.shapes.lists import above, first_fit, grid, pow2, pow2_round, sglang_graph_sizes, vllm_graph_sizes


def test_powers_of_two_end_with_the_limit() -> None:
    """Neuron's lists: doubled from 128 or 1 while below the limit, which is the last; NxD Inference rounds the log."""
    assert pow2(128, 1024) == [128, 256, 512, 1024]
    assert pow2(1, 24) == [1, 2, 4, 8, 16, 24]
    assert pow2(128, 128) == [128]
    assert pow2_round(128, 10240)[-2:] == [4096, 10240]  # log2 is 13.3: 8192 is left out
    assert pow2_round(128, 12000)[-2:] == [8192, 12000]  # log2 is 13.6


def test_vllm_captures_graphs_up_to_twice_the_sequences_512_or_the_budget() -> None:
    """1, 2, 4, by 8 below 256, by 16 from there."""
    assert vllm_graph_sizes(16, 8192) == [1, 2, 4, 8, 16, 24, 32]
    assert vllm_graph_sizes(1024, 8192)[-3:] == [480, 496, 512]
    assert vllm_graph_sizes(1024, 8192)[32:36] == [240, 248, 256, 272]
    assert vllm_graph_sizes(256, 12) == [1, 2, 4, 8]


def test_sglang_captures_decode_batches_up_to_the_most_that_run() -> None:
    assert sglang_graph_sizes(20) == [1, 2, 4, 8, 12, 16, 20]
    assert sglang_graph_sizes(600)[-4:] == [512, 544, 576, 600]
    assert sglang_graph_sizes(600)[35:39] == [256, 272, 288, 304]


def test_the_first_bucket_in_the_order_of_tuples_need_not_be_the_smallest() -> None:
    """(1, 900, 0) skips (1, 896, ...), and takes the first query from 900 on; nothing holds three requests."""
    buckets = grid([1, 2], [128, 896, 1280], [0, 4])
    assert first_fit(buckets, (1, 900, 0)) == (1, 1280, 0)
    assert first_fit(buckets, (1, 128, 1)) == (1, 128, 4)
    assert first_fit(buckets, (3, 1, 0)) is None
    assert first_fit([(1, 128), (1, 64 * 8), (2, 256)], (1, 200)) == (1, 512)  # beside which (2, 256) is as large


def test_nxd_inference_takes_the_bucket_above_a_size_but_for_the_largest() -> None:
    assert [above(size, 1024) for size in (127, 128, 1023, 1024, 1025)] == [128, 129, 1024, 1024, 1025]


def test_gaudi_rounds_what_fits_nothing_by_its_cube_root() -> None:
    """4,001: a cube root of 15.9 makes steps of 16 times 32; batch, query and context are held to their limits."""
    assert [fallback(size, 32) for size in (0, 1, 4001, 4096)] == [0, 1, 4096, 4096]
    engine = GaudiEngine(8, 2048, 4096, 1000)
    assert engine.prompt_beyond(1, 2040, 40) == (1, 2048, 32)
    assert engine.decode_beyond(7, 300) == (8, 448)
    assert GaudiEngine(8, 2048, 4096, 50, contiguous_pa=True).most_blocks == 50
    assert GaudiEngine(8, 2048, 4096, 50).most_blocks == 150


def test_the_best_buckets_are_the_best_of_all() -> None:
    """Against every list there is, on 400 random sets of sizes: no list of as many buckets pads less."""
    draw = random.Random(7)
    for _ in range(400):
        sizes = draw.sample(range(1, 40), draw.randint(1, 8))
        seen = {size: draw.randint(0, 6) for size in sizes}
        count, most = draw.randint(1, 5), draw.choice([None, 50, max(sizes)])
        *others, last = sorted({*sizes} | ({most} if most else set()))
        lists = (sorted({*some, last}) for n in range(min(count, len(others) + 1)) for some in combinations(others, n))
        best = best_buckets(seen, count, most)
        assert best.padded == min(held_by(one, seen).padded for one in lists)
        assert best == held_by(best.buckets, seen) and len(best.buckets) <= count and best.buckets[-1] == last


def test_what_buckets_waste_is_the_padding_in_what_they_hold() -> None:
    """Ten of size 3 and one of 8 in 4 and 8: 48 for 38; a size above all is refused, as is nothing."""
    assert held_by([4, 8], {3: 10, 8: 1}).waste == pytest.approx(10 / 48)
    with pytest.raises(ScenarioError, match=r"buckets end with 4, and a size of 8 was seen\."):
        held_by([4], {3: 10, 8: 1})
    with pytest.raises(ScenarioError, match="no sizes were seen"):
        best_buckets({}, 3)
