"""Attention ranks of SGLang told again as plain loops over lists, without overlap and without a prefix cache.

Slow on purpose: to compare with the driver on random workloads. Nobody cancels. A pass takes 10 ns and 1 for each token
of the fullest rank; ranks of decodes alone are padded to the least of `sizes` that holds the fullest.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchsim.kernel.types import Arrival
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from tests.plain.sglang import Group, Naive, Row

Line = tuple[int, int, tuple[int, ...]]
"""Start and end of a pass, and the tokens of each rank."""


class PlainRank(Naive):
    """One rank. `has_prompts`: whether the work it was asked for last has any."""

    has_prompts = False


class PlainRanks:
    """One run of `arrivals` on `count` ranks; `over` is when each request got its last token."""

    def __init__(
        self, config: SglangConfig, arrivals: list[Arrival], count: int, blocks: int, page: int, sizes: Sequence[int]
    ) -> None:
        dealt = [arrivals[rank::count] for rank in range(count)]
        self.ranks = [PlainRank(config, mine, blocks, page, 1000) for mine in dealt]
        self.sizes = sizes
        self.free_ns = 0
        self.lines: list[Line] = []
        self.over: dict[int, int] = {}

    def run(self) -> list[Line]:
        """The passes."""
        while True:
            works: list[list[tuple[Row, int]]] = []
            for rank in self.ranks:
                rank.arrive()
                work, is_prefill = rank.next_batch()
                rank.alone = not is_prefill
                if not work:
                    rank.last = Group()
                    if not rank.waiting and not rank.running.rows:
                        rank.ratio = rank.start
                rank.has_prompts = is_prefill
                works.append(work)
            gathered = max(rank.now_ns for rank in self.ranks)
            for rank in self.ranks:
                rank.now_ns = gathered
            if any(works):
                self.make(works, gathered)
            elif not self.go_on(gathered):
                return self.lines

    def go_on(self, now: int) -> bool:
        """Waits for the next arrival; False if none comes."""
        times = [row.arrival_ns for rank in self.ranks for row in rank.to_come]
        if not times:
            return False
        for rank in self.ranks:
            rank.now_ns = max(now, min(times))
        return True

    def make(self, works: list[list[tuple[Row, int]]], gathered: int) -> None:
        counts = tuple(sum(n for _, n in work) for work in works)
        start = max(gathered, self.free_ns)
        prompts = any(rank.has_prompts and work for rank, work in zip(self.ranks, works, strict=True))
        most = max(counts)
        sizes = [size for size in self.sizes if size >= most]
        self.free_ns = start + 10 + (sizes[0] if sizes and not prompts else most)
        self.lines.append((start, self.free_ns, counts))
        for rank, work in zip(self.ranks, works, strict=True):
            if not work:
                continue
            rank.retracted = []
            for row, n in work:
                rank.advance(row, n)
                if row.done:
                    self.over[row.id] = self.free_ns
            rank.last = rank.batch if rank.has_prompts else Group()
            rank.now_ns = self.free_ns
