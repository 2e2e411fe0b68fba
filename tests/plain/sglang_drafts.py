"""SGLang with speculative decoding told again as plain loops over lists, beside `sglang.py`.

Whether the draft of a token is right is a function of request and position, given by whoever compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from batchsim.kernel.types import Arrival
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from tests.plain.sglang import Group, Memory, Naive, Row
from tests.plain.systems import Step


class PairMemory(Memory):
    """Pages found by the pairs of neighbouring tokens."""

    def keys(self, tokens: Any) -> Any:
        return super().keys(tuple(pairwise(tokens)))


class NaiveDrafts(Naive):
    """One run of `arrivals`."""

    def __init__(
        self,
        config: SglangConfig,
        arrivals: list[Arrival],
        blocks: int,
        page: int,
        max_model_len: int,
        right: Callable[[int, int], bool],
    ) -> None:
        steps, topk = config.speculative_num_steps or 1, config.speculative_eagle_topk or 1
        kind, tokens = config.speculative_algorithm, config.speculative_num_draft_tokens
        if kind == "STANDALONE" and config.speculative_num_steps is None:
            steps = 3
        if kind == "NGRAM":
            self.width = tokens or 12
            self.depth, written = self.width - 1, self.width
        else:
            self.width = tokens or steps + 1
            self.depth = min(steps, self.width - 1)
            per_branch = steps
            if page > 1 and topk > 1:
                per_branch = -(-(page - 1 + steps) // page) * page
            written = max(per_branch * topk, self.width)
        self.reserve = 2 * written
        self.right = right
        self.allocated: dict[Row, int] = {}
        super().__init__(config, arrivals, blocks, page, max_model_len)
        if config.max_running_requests is None:
            self.slots = min(48, self.pool // 2)
        if kind in ("EAGLE", "EAGLE3", "NEXTN"):
            self.memory = PairMemory(blocks, page, caches=not config.disable_radix_cache)

    def most_output(self, prompt: int) -> int:
        """The cap with which the last step, two tokens before the end, still finds its pages."""
        return max(self.pool - self.reserve - (prompt - 2), 1)

    def advance(self, row: Row, n: int) -> None:
        if row not in self.riding:
            super().advance(row, n)
            return
        generated, computed = row.generated, row.computed
        accepted = 0
        while self.alone and accepted < self.depth and self.right(row.id, computed + 1 + accepted):
            accepted += 1
        for _ in range(accepted + 1):
            if not row.done:
                row.generated += 1
        row.computed += row.generated - generated
        if row.done:
            stop = len(row.prompt) + row.generated
            self.memory.insert(row, min(computed + accepted + 1, stop) if self.alone else computed)
            self.memory.drop(row)

    # ---- pages

    def prefill(self) -> list[tuple[Row, int]]:
        work = super().prefill()
        for row, n in work:
            self.allocated[row] = row.computed + n
        return work

    def wanted(self, row: Row) -> int:
        return max(self.ceil(row.computed + self.reserve), self.allocated[row])

    def due(self, rows: list[Row]) -> int:
        return sum(self.ceil(self.wanted(row)) - self.ceil(self.allocated[row]) for row in rows) // self.page

    def grow(self) -> bool:
        rows, memory = self.running.rows, self.memory
        memory.evict(self.due(rows))
        if self.due(rows) > memory.free():
            return False
        tokens = sum(self.wanted(row) - self.allocated[row] for row in rows)
        if tokens:
            memory.evict(self.ceil(tokens + (len(rows) * self.page if self.page > 1 else 0)) // self.page)
        for row in rows:
            self.allocated[row] = self.wanted(row)
            row.pages = self.ceil(self.allocated[row]) // self.page
        return True


@dataclass(eq=False)
class Launched:
    """A step in flight. `ends` are the rows whose prompt ends with it, and the decodes of it; `end_ns`: its end."""

    ends: list[tuple[Row, int]]
    riding: list[Row]
    alone: bool
    end_ns: int


class OverlappedDrafts(NaiveDrafts):
    """One run of `arrivals` in SGLang's overlapped loop: 3 ns to launch a step, 2 to process its results.

    A prompt's chunk counts as computed when it is launched, tokens when they are processed; so do those decodes
    computed, which are given pages by what is known.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.flying: Launched | None = None
        self.ended_ns: dict[int, int] = {}

    def steps(self) -> list[Step]:
        free_ns = 0
        while True:
            self.arrive()
            flying, launched = self.flying, None
            work, is_prefill = self.next_batch()
            if not (work or flying or self.retracted):
                work, is_prefill = self.next_batch()
            if work or self.retracted:
                ids = [(row.id, n) for row, n in work]
                free = self.memory.available() // self.page
                self.log.append((self.now_ns, ids, [row.id for row in self.retracted], free))
            was_retracted, self.retracted = bool(self.retracted), []
            if work:
                self.now_ns += 3
                cost = 10 + sum(2 if row in self.riding else n for row, n in work)
                free_ns = max(self.now_ns, free_ns) + cost
                launched = self.launch(work, is_prefill, free_ns)
            self.last = self.batch if work and is_prefill else Group()
            if flying is not None:
                self.now_ns = max(self.now_ns, flying.end_ns) + 2
                self.process(flying)
            elif not work and not was_retracted:
                if self.waiting:
                    self.waiting.pop(0)  # it would wait for ever
                elif not self.to_come:
                    return self.log
                else:
                    self.ratio = self.start
                    self.now_ns = self.to_come[0].arrival_ns
            self.flying = launched

    def launch(self, work: list[tuple[Row, int]], is_prefill: bool, end_ns: int) -> Launched:
        ends: list[tuple[Row, int]] = []
        for row, n in work:
            if row not in self.riding:
                row.computed += n
                if row is self.chunked:
                    continue
            ends.append((row, n))
        return Launched(ends, list(self.riding), not is_prefill, end_ns)

    def process(self, step: Launched) -> None:
        self.riding, self.alone = step.riding, step.alone
        for row, n in step.ends:
            if row not in self.memory.holders:
                continue  # ended in the step before, or retracted since
            self.advance(row, n if row in step.riding else 0)
            if row.done:
                self.ended_ns[row.id] = self.now_ns

    def take_off(self) -> bool:
        flying = [] if self.flying is None else [row for row, _ in self.flying.ends]
        stay = [row for row in self.running.rows if row not in flying or row.generated + 1 < row.cap]
        found = len(stay) < len(self.running.rows)
        if found:
            self.running.rows, self.running.full = stay, False
        return found
