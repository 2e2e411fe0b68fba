"""Bucket lists of engines with compiled shapes, as pure functions of numbers, and the first bucket that fits a size.

A bucket is a tuple of sizes, a list ascends. Sources, by the names of their functions:

    NxD Inference         `generate_buckets`, neuronx-distributed-inference @ 4bcdc54, modules/autobucketing.py
    vLLM Neuron           `num_batched_tokens_buckets`, aws-neuron-sdk @ a3247f5b, vllm-neuron/docs/design/vllm
    TPU                   `get_token_paddings`, `get_req_paddings`, tpu-inference 0.32.0, runner/utils.py
    Gaudi                 `exp_range`, `lin_range`, vllm-gaudi @ 091bbadd, extension/bucketing
    CUDA graphs           vLLM's `_set_cudagraph_sizes` (config/vllm.py), SGLang 0.5.23's cuda_graph_hook.py
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import product
from math import ceil, log2

Bucket = tuple[int, ...]
"""The sizes of one program, a number for each dimension of its phase."""


def pow2(low: int, high: int) -> list[int]:
    """`low` doubled while it is below `high`, and `high`."""
    sizes: list[int] = []
    while low < high:
        sizes.append(low)
        low *= 2
    return [*sizes, high]


def pow2_round(low: int, high: int) -> list[int]:
    """NxD Inference's list: powers of two from that at or below `low`, up to and without 2 to the rounded log of
    `high`; then `high`. So 5000 follows on 2048, and 10240 on 4096."""
    if low == high:
        return [high]
    return [2**i for i in range(int(log2(low)), round(log2(high)))] + [high]


def pow2_gap(low: int, high: int, gap: int = 0) -> list[int]:
    """TPU's list: `low` doubled until `high` is reached; with a `gap` doubled while at most that, then in steps of it.

    The last is at least `high`, and may be above it.
    """
    sizes = [low]
    while sizes[-1] < high:
        last = sizes[-1]
        sizes.append(2 * last if not gap or 2 * last <= gap else last + gap)
    return sizes


def tpu_tokens(low: int, budget: int, gap: int = 0) -> list[int]:
    """TPU's token buckets: `pow2_gap` without those above `budget`, rounded up to a multiple of `low`, and that."""
    most = -(-budget // low) * low
    return sorted({size for size in pow2_gap(low, most, gap) if size <= most} | {most})


def tpu_requests(low: int, high: int) -> list[int]:
    """TPU's request buckets: powers of two from `low` on that are below `high`, and `high`."""
    return pow2(min(low, high), high)


def nxdi_chunks(tile: int, longest: int) -> list[int]:
    """NxD Inference's prompt buckets with chunked prefill: the smallest, the middle and the largest of the multiples
    of `tile` up to that which holds `longest`."""
    count = -(-longest // tile)
    return sorted({tile, tile * max(count // 2, 1), tile * count})


def grid(*lists: Iterable[int]) -> list[Bucket]:
    """Every combination of the sizes of each dimension, sorted as tuples."""
    return sorted(product(*lists))


def nxdi_prefix(low: int, high: int, second_low: int, second_high: int, *, zero: bool) -> list[Bucket]:
    """NxD Inference's two-dimensional buckets with a prefix cache: new tokens by the prefix's, 0 among these if
    `zero`."""
    prefixes = pow2_round(second_low, second_high)
    return grid(pow2_round(low, high), [0, *prefixes] if zero else prefixes)


def exp(low: int, step: int, high: int, count: int) -> list[int]:
    """Gaudi's exponential list: `count` values from `low` to `high` by equal factors, each rounded up to a multiple
    of `step`, the last at most `high`.

    A `low` of 0 or 1 is added to the list that begins with `step`.
    """
    if count == 1:
        return [high]
    first = low if low > 1 else step
    share = 1 / (count - 1)
    sizes = {min(ceil(first * (high / first) ** (share * i) / step) * step, high) for i in range(count - 1)}
    return sorted(sizes | {high} | ({low} if low <= 1 else set()))


def lin(low: int, step: int, high: int) -> list[int]:
    """Gaudi's linear list: `low` doubled while below `step`, then multiples of `step` up to `high`; a `low` of 0 comes
    last, as the engine lists it."""
    sizes, size = [], low or step
    while size < min(step, high + 1):
        sizes.append(size)
        size *= 2
    sizes += range(step, high + 1, step)
    return [*sizes, 0] if low == 0 else sizes


def vllm_graph_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> list[int]:
    """Tokens for which vLLM captures CUDA graphs: 1, 2, 4, then by 8 below 256, by 16 from there, up to the least of
    twice the sequences, 512 and the step's budget. An engine without drafts."""
    most = min(2 * max_num_seqs, 512, max_num_batched_tokens)
    return [size for size in [1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)] if size <= most]


def sglang_graph_sizes(max_running: int) -> list[int]:
    """Decode batch sizes for which SGLang captures CUDA graphs, `max_running` among them. An engine without drafts."""
    sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, max_running + 1, 32)]
    return sorted({size for size in sizes if size <= max_running} | {max_running})


def first_fit(buckets: Sequence[Bucket], sizes: Bucket) -> Bucket | None:
    """The first of the sorted `buckets`, in the order of tuples, that is at least `sizes` in every dimension; None if
    there is none.

    In the order of tuples is not by the smallest product: of a filtered list a later dimension may be far above its
    size. O(1) in the common case of one dimension, else up to the length of the list.
    """
    for i in range(bisect_left(buckets, sizes), len(buckets)):
        if all(have >= need for have, need in zip(buckets[i], sizes, strict=True)):
            return buckets[i]
    return None


def above(size: int, largest: int) -> int:
    """The size for which NxD Inference looks: the next bucket *above* `size`, but the `largest` for just that."""
    return size + (size < largest)
