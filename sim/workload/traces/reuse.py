"""How often a cache of any size would find the prompts of a trace again, from one pass over it.

A prompt is a chain of units, blocks of `block_tokens` tokens, and found is its longest beginning that the cache has.
Requests are taken one after another; when one ends, its units are touched from the last to the first, so that what
others can share stays longest. Under these rules, and least recently used first, a cache has just the units touched
since a unit's last touch number fewer than its size (Mattson et al. 1970: stack distances), whatever that size is.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import ScenarioError
from batchsim.workload.traces.trace_rows import HashIds, Ints, TraceRows

GROUPS = 16
"""Parts into which sampled units fall, whose spread says how far a sampled curve may be off."""
LEAST_FOLLOWED = 10 * GROUPS
"""Different units that a sample must follow at least."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # of Fibonacci hashing: neighbouring ids fall far apart
T_95 = 2.131
"""Student's t of 15 degrees of freedom at 95 %, for `GROUPS` parts."""


@dataclass(frozen=True)
class ReuseCurve:
    """Hit rates over cache sizes. `distances`: units a cache must hold to find a unit again, ascending, of all units
    found at any size; `groups`: the part of the sample, of `GROUPS`, that each belongs to; `followed`: units of each
    part.

    `num_units` and `num_tokens`: full units, and tokens of all prompts. With `share` below 1 only that part of the
    units was followed, by their hashes (SHARDS, Waldspurger et al. 2015).
    """

    block_tokens: int
    distances: Ints
    groups: Ints
    followed: Ints
    num_units: int
    num_distinct: int
    num_tokens: int
    share: float = 1.0

    def hit_rate(self, num_tokens: float) -> float:
        """The part of all prompt tokens that a cache of `num_tokens` tokens finds."""
        return float(self._hits(num_tokens).sum()) / self.share * self.block_tokens / self.num_tokens

    def error(self, num_tokens: float) -> float:
        """Half of the 95 % interval of `hit_rate`, by how the parts of the sample differ; 0 where all was followed."""
        spread = float(self._hits(num_tokens).std(ddof=1)) * GROUPS**0.5
        return 0.0 if self.share == 1 else T_95 * spread / self.share * self.block_tokens / self.num_tokens

    def _hits(self, num_tokens: float) -> NDArray[np.float64]:
        """Units found, by group. A unit that most prompts begin with, in the sample or not, would weigh too much: what
        a group followed beyond the expected is taken off its hits, as such units are found by all but tiny caches."""
        within = int(np.searchsorted(self.distances, num_tokens // self.block_tokens, side="right"))
        hits = np.bincount(self.groups[:within], minlength=GROUPS).astype(np.float64)
        return hits + self._lacking if within else np.zeros(GROUPS)

    @property
    def _lacking(self) -> NDArray[np.float64]:
        """Units by which each group of the sample followed fewer than were to be expected."""
        if self.share == 1:
            return np.zeros(GROUPS)
        return self.num_units * self.share / GROUPS - self.followed.astype(np.float64)

    @property
    def least_tokens(self) -> int:
        """Tokens of the smallest cache that the curve covers: a sample has on average one unit in 1 / `share`."""
        return ceil(1 / self.share) * self.block_tokens

    @property
    def most(self) -> float:
        """The hit rate of a cache that forgets nothing."""
        return self.hit_rate(self.working_tokens)

    @property
    def working_tokens(self) -> int:
        """Tokens of the smallest cache that finds as much as one that forgets nothing; 0 where nothing is found."""
        return int(self.distances[-1]) * self.block_tokens if len(self.distances) else 0

    def size_for(self, part: float) -> int:
        """Tokens of the smallest cache that finds at least `part` of what one finds that forgets nothing."""
        at = max(int(np.ceil(part * len(self.distances))) - 1, 0)
        return int(self.distances[at]) * self.block_tokens if len(self.distances) else 0

    def steps(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(Sizes in tokens at which the hit rate rises, the hit rates from there on)."""
        sizes, counts = np.unique(self.distances, return_counts=True)
        hits = (np.cumsum(counts) + self._lacking.sum()) / self.share
        return sizes.astype(np.float64) * self.block_tokens, hits * self.block_tokens / self.num_tokens


def reuse_curve(rows: TraceRows, *, outputs: bool = False, share: float = 1.0) -> ReuseCurve:
    """The curve of `rows`, whose prompts have hash ids. ScenarioError if they have none.

    `outputs`: full blocks of outputs take room too, as in a GPU's prefix cache; no prompt finds them, since a trace
    does not say what was generated. `share`: the part of the units to follow.
    """
    if rows.hash_ids is None:
        raise ScenarioError(
            f"{rows.source}: has no hash_ids, which say what prompts have in common. Name their column with --columns"
            " hash_ids=NAME and --set hash_id_block_size=N, or fit a workload with shared_prefix."
        )
    keys, owners = _touches(rows, rows.hash_ids, outputs)
    num_units, distinct = int((keys >= 0).sum()), len(np.unique(keys[keys >= 0]))
    hashes = keys.astype(np.uint64) * _MULTIPLIER
    if share < 1.0:
        kept = (hashes >> np.uint64(11)).astype(np.float64) < share * 2.0**53
        keys, owners, hashes = keys[kept], owners[kept], hashes[kept]
        _check_sample(rows.source, share, len(np.unique(keys[keys >= 0])), distinct)
    needed = stack_distances(keys)
    # What the same request touched before a unit is not in between at its lookup, which comes before all its touches.
    starts = np.flatnonzero(np.diff(owners, prepend=-1))
    own = np.arange(len(keys)) - np.repeat(starts, np.diff(np.append(starts, len(keys))))
    sizes = np.rint((needed - own)[needed > 0] / share).astype(np.int64)
    order = np.argsort(sizes, kind="stable")
    groups = ((hashes >> np.uint64(3)) % np.uint64(GROUPS)).astype(np.int64)
    return ReuseCurve(
        rows.hash_ids.block_tokens,
        sizes[order],
        groups[needed > 0][order],
        np.bincount(groups[keys >= 0], minlength=GROUPS),
        num_units,
        distinct,
        int(rows.prompt_tokens.sum()),
        share,
    )


def _check_sample(source: str, share: float, followed: int, distinct: int) -> None:
    """ScenarioError where a sample `followed` too few of the different units for `GROUPS` parts of it to be alike."""
    if followed < LEAST_FOLLOWED:
        raise ScenarioError(
            f"{source}: a sample of {100 * share:.3g}% follows {followed:,} of {distinct:,} different units, and below"
            f" {LEAST_FOLLOWED} its figures mean nothing. Follow a larger share, or all."
        )


def _touches(rows: TraceRows, hashed: HashIds, outputs: bool) -> tuple[Ints, Ints]:
    """(Units in the order in which they are touched, those of outputs below 0; the row that touches each)."""
    keys, owners = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    next_own = -1  # a unit of an output is touched once
    for i, (prompt, output) in enumerate(zip(rows.prompt_tokens.tolist(), rows.output_tokens.tolist(), strict=True)):
        full = prompt // hashed.block_tokens
        beyond = (prompt + max(output - 1, 0)) // hashed.block_tokens - full if outputs else 0
        of_output = np.arange(next_own, next_own - beyond, -1)
        next_own -= beyond
        keys += [of_output, np.array(hashed.row(i)[:full], np.int64)[::-1]]
        owners.append(np.full(beyond + full, i))
    return np.concatenate(keys), np.concatenate(owners)


def stack_distances(keys: Ints) -> Ints:
    """For each touch the number of different keys touched since the last touch of its key, itself included; 0 for a
    first touch. O(n log² n) in arrays.

    Between two touches of a key lie as many different ones as touches, less those whose own last touch is in between
    too: touches before it whose last one is later than its own.
    """
    count = len(keys)
    last = np.full(count, -1, np.int64)
    order = np.argsort(keys, kind="stable")
    again = keys[order[1:]] == keys[order[:-1]]
    last[order[1:][again]] = order[:-1][again]
    return np.where(last >= 0, np.arange(count) - last - _greater_before(last), 0)


def _greater_before(values: Ints) -> Ints:
    """For each value how many before it are greater, by merging sorted halves."""
    count = len(values)
    greater = np.zeros(count, np.int64)
    order = np.arange(count)  # each run of `width` positions sorted by value
    width = 1
    while width < count:
        run = np.arange(count) // (2 * width)
        is_right = np.arange(count) // width % 2 == 1
        # Sorted by run, then value, the left half first among equals: what of the left lies behind is greater.
        merged = order[np.lexsort((is_right, values[order], run))]
        side = (merged // width) % 2
        lefts_so_far = np.cumsum(side == 0)
        starts = np.arange(0, count, 2 * width)
        of_run = np.minimum(starts + width, count) - starts
        before = np.concatenate(([0], np.cumsum(of_run)))[np.arange(count) // (2 * width)]
        right = side == 1
        greater[merged[right]] += (before + of_run[np.arange(count) // (2 * width)] - lefts_so_far)[right]
        order = merged
        width *= 2
    return greater
