"""Every packer on a few lengths, worked out by hand from the rule at the head of its class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from batchsim.base.errors import ScenarioError
from batchsim.training.packers.bins import Bins, at_least, first_fit, next_fit
from batchsim.training.packers.registry import CLASSES, PACKERS

SIX = [5, 3, 4, 2, 6, 1]
CASES: list[tuple[str, dict[str, Any], list[int], Any]] = [
    ("transformers.padded", {}, [3, 1], [0, 1]),
    ("transformers.length_grouped", {"batch_size": 1, "mega_batch_mult": 2}, [1, 2, 3, 4], [3, 0, 1, 2]),
    (
        "transformers.length_grouped_distributed",
        {"batch_size": 1, "num_replicas": 2},
        [1, 2, 3, 4, 1],
        [[3, 2, 4], [1, 0, 3]],  # the first comes again, so that ranks have equally many
    ),
    (
        "transformers.length_grouped_distributed",
        {"batch_size": 1, "num_replicas": 2, "drop_last": True},
        [1, 2, 3, 4, 1],
        [[3, 2], [1, 0]],
    ),
    (
        "transformers.batch_rebalance",
        {"effective_batch_size": 4, "dp_size": 2, "grad_accum": 1},
        [100, 10, 10, 10],
        [[[0]], [[1, 2, 3]]],
    ),
    (
        "transformers.batch_rebalance",
        {"effective_batch_size": 4, "dp_size": 2, "grad_accum": 1, "drop_last": False},
        [1, 1, 1, 1, 2],
        [[[0, 1], [4]], [[2, 3], [0]]],  # the tail of one is filled from the start
    ),
    ("fairseq.batch_by_size", {"max_tokens": 12, "required_batch_size_multiple": 1}, [4, 3, 2, 6], [[2, 1, 0], [3]]),
    ("fairseq.batch_by_size", {"max_tokens": 12, "required_batch_size_multiple": 2}, [4, 3, 2, 6], [[2, 1], [0, 3]]),
    (
        "fairseq.batch_by_size",
        {"max_tokens": 99, "max_sentences": 1, "required_batch_size_multiple": 1, "order": "given"},
        [4, 3],
        [[0], [1]],
    ),
    ("torchdata.max_token_bucketize", {"max_token_count": 5, "buffer_size": 2}, [4, 1, 2, 3], [[1, 2], [3], [0]]),
    (
        "torchdata.max_token_bucketize",
        {"max_token_count": 5, "include_padding": True},
        [4, 1, 2, 3, 9],
        [[1, 2], [3], [0]],
    ),
    ("deepspeed.batch_by_seqlens", {"max_tokens": 4}, [2, 2, 2, 2, 2], [[0, 1], [2, 3]]),
    ("deepspeed.batch_by_seqlens", {"max_tokens": 4, "effective_batch_size": 2}, [2, 2, 2, 3, 1], [[0, 1], [2]]),
    (
        "deepspeed.batch_by_seqlens",
        {"max_tokens": 4, "effective_batch_size": 2, "required_microbatches_of_same_size": True},
        [1, 3, 2, 1, 4, 9, 1],
        [[0, 2], [1, 3]],
    ),
    ("trl.bfd", {"seq_length": 7}, SIX, [[(4, 0, 6), (5, 0, 1)], [(0, 0, 5), (3, 0, 2)], [(2, 0, 4), (1, 0, 3)]]),
    ("trl.bfd", {"seq_length": 4}, [9, 0, 2], [[(0, 0, 4)], [(2, 0, 2)]]),
    ("trl.bfd", {"seq_length": 7, "map_batch_size": 1}, [1, 2], [[(0, 0, 1)], [(1, 0, 2)]]),
    ("trl.bfd_split", {"seq_length": 4}, [9, 2], [[(0, 0, 4)], [(0, 4, 4)], [(1, 0, 2), (0, 8, 1)]]),
    (
        "trl.wrapped",
        {"seq_length": 4, "map_batch_size": 2},
        [3, 3, 3],
        [[(0, 0, 3), (1, 0, 1)], [(1, 1, 2)], [(2, 0, 3)]],
    ),
    ("axolotl.multipack", {"batch_max_len": 7}, [*SIX, 9], [[[0, 3]], [[1, 2]], [[4, 5]]]),
    ("axolotl.multipack", {"batch_max_len": 7, "batch_size": 2}, SIX, [[[0, 3], [1, 2]]]),
    ("axolotl.multipack", {"batch_max_len": 7, "batch_size": 2, "drop_last": False}, [7], [[[0]]]),
    ("axolotl.multipack", {"batch_max_len": 7, "bin_size": 1}, [1, 2], [[[0]], [[1]]]),
    ("axolotl.multipack", {"batch_max_len": 7, "group_size": 1}, [1, 2], [[[0]], [[1]]]),
    ("axolotl.multipack", {"batch_max_len": 7, "sequential": True}, SIX, [[[0]], [[1, 2]], [[3]], [[4, 5]]]),
    ("megatron_bridge.first_fit_shuffle", {"pack_size": 7}, SIX, [[0, 3], [1, 2], [4, 5]]),
    ("megatron_bridge.first_fit_decreasing", {"pack_size": 7}, SIX, [[4, 5], [0, 3], [2, 1]]),
    ("megatron_bridge.first_fit_decreasing", {"pack_size": 2}, [2, 2], [[1], [0]]),
    ("torchtune.packed", {"max_seq_len": 5}, [3, 3, 2], [[(0, 0, 3)], [(1, 0, 3), (2, 0, 2)]]),
    (
        "torchtune.packed",
        {"max_seq_len": 4, "split_across_pack": True},
        [3, 3, 2],
        [[(0, 0, 3), (1, 0, 1)], [(1, 1, 2), (2, 0, 2)]],
    ),
    ("torchtune.packed", {"max_seq_len": 5, "max_packs": 1}, [3, 3, 2], [[(0, 0, 3)]]),
    ("llamafactory.greedy_knapsack", {"capacity": 7}, SIX, [[4, 5], [0, 3], [2, 1]]),
    ("llamafactory.greedy_knapsack", {"capacity": 2}, [2, 2], [[1], [0]]),
    ("llamafactory.packed_supervised", {"cutoff_len": 7}, [9, 3, 4], [[2, 1]]),
    ("llamafactory.packed_supervised", {"cutoff_len": 7, "preprocessing_batch_size": 1}, [3, 4], [[0], [1]]),
    ("swift.binpack", {"packing_length": 7}, [5, 4, 2], [[0], [1, 2]]),
    ("swift.binpack", {"packing_length": 7, "batch": 2}, [5, 1, 2, 6], [[3, 1], [0, 2]]),
    ("swift.sequential", {"packing_length": 7}, [5, 2, 0, 3], [[0, 1], [2, 3]]),
    ("nemo_rl.concatenative", {"bin_capacity": 5}, [3, 3, 2], [[0], [1, 2]]),
    (
        "nemo_rl.first_fit_decreasing",
        {"bin_capacity": 3, "bin_count_multiple": 4},
        [1, 1, 1, 3],
        [[3], [2], [0], [1]],
    ),
    ("nemo_rl.first_fit_shuffle", {"bin_capacity": 7, "min_bin_count": 4}, SIX, [[0, 3], [1, 2], [4], [5]]),
    ("nemo_rl.modified_first_fit_decreasing", {"bin_capacity": 12}, [7, 5, 3, 3, 1], [[0, 1], [2, 3, 4]]),
    ("nemo_rl.modified_first_fit_decreasing", {"bin_capacity": 14}, [8, 3, 3, 4], [[0, 1, 2], [3]]),
    ("nemo_rl.modified_first_fit_decreasing", {"bin_capacity": 14}, [8, 5], [[0, 1], []]),
    ("nemo_rl.dynamic_batching", {"train_micro_batch_tokens": 128}, [10, 70, 20], [[0, 2], [1]]),
    ("skyrl.first_fit_decreasing", {"bin_capacity": 7}, [4, 4, 3], [[1, 2], [0]]),
    ("skyrl.balanced", {"bin_capacity": 4}, [9, 2, 2], [[0], [1, 2]]),
    ("verl.karmarkar_karp", {"k_partitions": 2, "values": "lengths"}, [1, 2, 3, 4], [[0, 3], [1, 2]]),
    (
        "verl.karmarkar_karp",
        {"k_partitions": 2, "values": "lengths", "equal_size": False},
        [6, 1, 2, 3],
        [[1, 2, 3], [0]],  # of equal sums the set of more items
    ),
    ("verl.group_balanced", {"k_partitions": 2, "group_size": 2}, [1, 1, 5, 5], [[2, 3], [0, 1]]),
    ("verl.greedy_partition", {"k_partitions": 2}, [5, 1, 1, 1], [[0, 3], [1, 2]]),
    ("verl.greedy_partition", {"k_partitions": 2, "equal_size": False}, [5, 1, 1, 1], [[0], [1, 2, 3]]),
    ("verl.rearrange_micro_batches", {"max_token_len": 8}, [4, 4, 4], [[0, 1], [2]]),
    ("verl.rearrange_micro_batches", {"max_token_len": 99, "num_batches_divided_by": 3}, [1, 5, 9], [[0], [2], [1]]),
    ("verl.rearrange_micro_batches", {"max_token_len": 8, "force_group_size": 2}, [1, 2, 4, 4], [[2, 3], [0, 1]]),
    ("areal.ffd", {"capacity": 7}, [5, 3, 4, 2], [[0, 3], [2, 1]]),
    ("areal.ffd", {"capacity": 99, "n_groups_divisor": 2}, [5, 3, 4], [[0], [2, 1]]),
    ("areal.kk", {"capacity": 7}, [5, 3, 4, 2], [[2, 1], [0, 3]]),
    ("areal.balanced_greedy", {"K": 2}, [5, 3, 4, 2], [[0, 3], [2, 1]]),
    ("areal.min_abs_diff", {"k": 2}, [1, 2, 3, 6], [[0, 1, 2], [3]]),
    (
        "megatron_core.balanced_cp",
        {"max_seqlen_per_dp_cp_rank": 4, "dp_cp_ranks": 2},
        [8, 2],
        [[[0], [0]], [[1], [1]]],
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[2]}")
def test_a_packer_by_hand(case: tuple[str, dict[str, Any], list[int], Any]) -> None:
    """The bins, and their order, that the rule makes."""
    kind, options, lengths, expected = case
    packed = PACKERS[kind](**options).pack(lengths, range(len(lengths)))
    assert packed == expected


def test_every_packer_has_a_case_a_rule_and_a_count() -> None:
    """Nothing is registered that is not tried, described and counted."""
    assert {kind for kind, *_ in CASES} == set(PACKERS)
    assert all(each.rule and each.follows and each.makes and each.__doc__ for each in CLASSES)


REFUSED = [
    ("torchtune.packed", {"max_seq_len": 5}, [6], "example 0 has 6 tokens, more than max_seq_len 5"),
    ("megatron_bridge.first_fit_shuffle", {"pack_size": 5}, [1, 6], "example 1 has 6 tokens, more than pack_size 5"),
    ("nemo_rl.concatenative", {"bin_capacity": 5}, [6], "more than bin_capacity 5"),
    ("nemo_rl.concatenative", {"bin_capacity": 5, "min_bin_count": 2}, [5], "2 bins are asked for and there are 1"),
    (
        "transformers.batch_rebalance",
        {"effective_batch_size": 3, "dp_size": 2, "grad_accum": 2},
        [1, 2, 3, 4],
        "a step has 3 samples for 4 micro-batches",
    ),
    ("verl.karmarkar_karp", {"k_partitions": 2}, [1, 2, 3], "3 sequences are no multiple of 2 parts"),
    ("verl.rearrange_micro_batches", {"max_token_len": 9, "min_num_micro_batch": 2}, [9], "2 parts are asked for"),
    ("areal.ffd", {"capacity": 9, "n_groups_divisor": 2}, [1], "2 groups are asked for and there are 1 sequences"),
    ("areal.min_abs_diff", {"k": 2, "min_size": 2}, [1, 2, 3], "2 parts of at least 2 need 4 sequences, there are 3"),
    ("megatron_core.balanced_cp", {"max_seqlen_per_dp_cp_rank": 4, "dp_cp_ranks": 1}, [8], "needs 2 ranks and there"),
    ("llamafactory.greedy_knapsack", {"capacity": 5}, [6], "more than capacity 5"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case[0]}-{case[3]}")
def test_what_a_framework_fails_at_is_an_error(case: tuple[str, dict[str, Any], list[int], str]) -> None:
    """One line says which example, or how many bins, with the numbers."""
    kind, options, lengths, expected = case
    with pytest.raises(ScenarioError) as error:
        PACKERS[kind](**options).pack(lengths, range(len(lengths)))
    assert expected in str(error.value) and str(error.value).startswith(kind) and "\n" not in str(error.value)


def plain_first_fit(order: Sequence[int], lengths: Sequence[int], capacity: int, most: int | None) -> Bins:
    """First fit as its rule says it: a scan over all bins for each example."""
    bins: Bins = []
    for i in order:
        for row in bins:
            if sum(lengths[j] for j in row) + lengths[i] <= capacity and len(row) != most:
                row.append(i)
                break
        else:
            bins.append([i])
    return bins


@pytest.mark.parametrize("seed", range(8))
def test_first_fit_by_a_tree_is_first_fit_by_a_scan(seed: int) -> None:
    """The same bins, also with a limit on their examples, of which a full one takes none of length 0."""
    rng = np.random.default_rng([seed, 45])
    lengths = rng.integers(0, 21, 90).tolist()
    order = rng.permutation(90).tolist()
    for most in (None, 1, 3):
        assert first_fit(order, lengths, 20, most) == plain_first_fit(order, lengths, 20, most)
    assert first_fit([], lengths, 20) == []


def test_next_fit_looks_at_the_last_bin_alone() -> None:
    """A short example does not go back into an earlier bin."""
    assert next_fit([0, 1, 2], [3, 5, 1], 5) == [[0], [1], [2]]


def test_more_bins_take_the_last_examples_of_the_largest() -> None:
    """Bins are ranked once, of equal ones the last first, and used until one example is left."""
    assert at_least([[0, 1], [2, 3], [4]], 5, None, "x") == [[0], [2], [4], [3], [1]]
    assert at_least([[0, 1]], None, None, "x") == [[0, 1]]
