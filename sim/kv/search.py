"""The last lookup in a cache of runs, kept so that the head of a queue that asks at every step is walked again only
when what it would hit has changed."""

from __future__ import annotations

from batchsim.kernel.types import Sequence
from batchsim.kv.block_keys import BlockKeys
from batchsim.kv.cached_runs import Run, Span


class Search:
    """Which of the first `limit` blocks of `seq` can be found, by their `keys`: `num_hits` of them, in runs.

    `missing`: the key at which the walk stopped; None: at the limit. `echoes`: whether the prompt contains what another
    request generates.
    """

    __slots__ = (
        "_counts", "_hits", "_is_settled", "_num_unused", "_num_unused_of", "echoes", "keys", "limit", "missing",
        "num_hits", "seq",
    )  # fmt: skip

    def __init__(self, seq: Sequence, keys: BlockKeys, limit: int) -> None:
        self.seq = seq
        self.keys = keys
        self.limit = limit
        self.num_hits = 0
        self.missing: int | None = None
        tokens = seq.request.tokens
        # streams of odd numbers are outputs (`output_stream` of kernel/tokens.py)
        self.echoes = tokens is not None and any(stream % 2 for stream, _, _ in tokens.segments)
        self._hits: list[Run] = []
        self._counts: list[int] = []  # blocks of each that were hit, the first ones
        self._is_settled = False  # whether a walk would hit the same again
        self._num_unused, self._num_unused_of = 0, -1  # the last count, and of how many blocks; -1: to be made anew

    def walk(self, spans: dict[int, Span]) -> None:
        """Follows the keys from span to span, up to the first block missing or the limit, unless that is known."""
        if self._is_settled:
            return
        hits: list[Run] = []
        counts: list[int] = []
        number, missing, keys, limit = 0, None, self.keys, self.limit
        while number < limit:
            key, length = keys.run(number, limit)
            span = spans.get(key)
            if span is None:
                missing = key
                break
            run = span.runs[0]
            count = min(run.length, length)
            hits.append(run)
            counts.append(count)
            number += count
        self._hits, self._counts, self.num_hits, self.missing = hits, counts, number, missing
        self._num_unused_of = -1
        self._is_settled = True

    def first(self, have: int) -> list[tuple[Run, int]]:
        """The runs of the first `have` hit blocks, each with how many of its own first blocks these are."""
        parts: list[tuple[Run, int]] = []
        for run, count in zip(self._hits, self._counts, strict=True):
            if have <= 0:
                break
            parts.append((run, min(count, have)))
            have -= count
        return parts

    def num_unused(self, have: int) -> int:
        """How many of the first `have` hit blocks no sequence holds."""
        if self._num_unused_of != have:
            self._num_unused = sum([count for run, count in self.first(have) if not run.users])
            self._num_unused_of = have
        return self._num_unused

    def has_hit(self, run: Run) -> bool:
        """Whether blocks of `run` were hit."""
        return run in self._hits

    # ---- what changes

    def published(self, key: int, count: int) -> None:
        """Blocks with `count` keys from `key` on can be found from now on."""
        if self.missing is not None and 0 <= self.missing - key < count:
            self._is_settled = False

    def changed(self, run: Run) -> None:
        """`run` is cut, or some of its blocks can be found no longer."""
        if run in self._hits:
            self._is_settled = False

    def given_back(self) -> None:
        """Runs have fewer users."""
        self._num_unused_of = -1
