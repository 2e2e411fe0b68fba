"""The buckets that waste least on the sizes that were seen: exact, by dynamic programming over the sorted sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchsim.base.errors import ScenarioError
from batchsim.base.later import np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class BucketList:
    """Buckets for sizes seen. `real` and `padded` are the sums of all sizes, as they were and as buckets hold them."""

    buckets: tuple[int, ...]
    real: int
    padded: int

    @property
    def waste(self) -> float:
        """The part of the padded sum that is padding; 0 where nothing was seen."""
        return 1 - self.real / self.padded if self.padded else 0.0


def held_by(buckets: Sequence[int], seen: Mapping[int, int]) -> BucketList:
    """What `buckets`, which ascend, make of the sizes `seen`, each with how often. ScenarioError for a size above all
    of them."""
    beyond = [size for size in seen if size > buckets[-1]]
    if beyond:
        raise ScenarioError(f"buckets end with {buckets[-1]}, and a size of {max(beyond)} was seen. Add a larger one.")
    at = np.searchsorted(np.array(buckets), np.array(list(seen), np.int64))
    padded = sum(buckets[i] * count for i, count in zip(at.tolist(), seen.values(), strict=True))
    return BucketList(tuple(buckets), sum(size * count for size, count in seen.items()), padded)


def best_buckets(seen: Mapping[int, int], count: int, most: int | None = None) -> BucketList:
    """The at most `count` buckets, of which the largest holds every size, for which the sum of all padded sizes is
    least; of lists alike that of fewest buckets.

    `seen` are sizes, each with how often; `most`, if given, is a size that the largest bucket must hold too. Of k
    buckets and n sizes O(k n log n): the best last bucket before a size moves up with the size. ScenarioError for
    nothing seen.
    """
    every = dict(seen) if most is None else {most: 0, **seen}
    if not every:
        raise ScenarioError("no sizes were seen, so that no buckets are best. Let the workload have requests.")
    sizes = np.array(sorted(every), np.int64)
    weights = np.concatenate([[0], np.cumsum([every[size] for size in sizes.tolist()])]).astype(np.int64)
    least = sizes * weights[1:]  # of one bucket, by the last size that it holds
    layers: list[NDArray[np.int64]] = []
    best, best_layer = int(least[-1]), 0
    for layer in range(1, min(count, len(sizes))):
        least, before = _one_more(sizes, weights, least, layer)
        layers.append(before)
        if least[-1] < best:
            best, best_layer = int(least[-1]), layer
    last, chosen = len(sizes) - 1, [int(sizes[-1])]
    for before in reversed(layers[:best_layer]):
        last = int(before[last])
        chosen.append(int(sizes[last]))
    return BucketList(tuple(reversed(chosen)), sum(size * n for size, n in seen.items()), best)


def _one_more(
    sizes: NDArray[np.int64], weights: NDArray[np.int64], least: NDArray[np.int64], layer: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(The least padded sum of the first sizes with one bucket more than `least` is of, the last size of the bucket
    before). Of the first `layer` sizes, which need no more buckets, it is as it was."""
    result, before = least.copy(), np.arange(len(sizes)) - 1
    todo = [(layer, len(sizes) - 1, layer - 1, len(sizes) - 2)]
    while todo:
        low, high, first, last = todo.pop()
        if low > high:
            continue
        middle = (low + high) // 2
        candidates = np.arange(first, min(middle - 1, last) + 1)
        sums = least[candidates] + sizes[middle] * (weights[middle + 1] - weights[candidates + 1])
        i = int(np.argmin(sums))
        result[middle], before[middle] = sums[i], candidates[i]
        todo += [(low, middle - 1, first, int(candidates[i])), (middle + 1, high, int(candidates[i]), last)]
    return result, before
