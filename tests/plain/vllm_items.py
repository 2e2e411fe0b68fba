"""vLLM's scheduler for requests with images written out plainly: `NaiveVllm` with an encoder budget and cache."""

from __future__ import annotations

from typing import Any

from batchsim.kernel.types import Item
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from tests.plain.vllm import Call, Naive, NaiveVllm


class NaiveVllmItems(NaiveVllm):
    """`queues` also has the free and the freeable embeddings, and of the last call what it encodes and drops."""

    overtakes = True

    def __init__(self, config: VllmConfig, num_blocks: int, block_size: int, max_model_len: int) -> None:
        super().__init__(config, num_blocks, block_size, max_model_len)
        assert config.max_num_encoder_input_tokens and config.encoder_cache_size
        self.encoder_budget, self.empty = config.max_num_encoder_input_tokens, config.encoder_cache_size
        self.there: dict[int, set[Naive]] = {}  # the users of each item in the cache
        self.unused: list[int] = []  # of these, those without users, the one let go first in front
        self.size_of: dict[int, int] = {}
        self.left = self.left_then = 0  # of the budget, and the same at the latest `clip`
        self.take: list[int] = []  # what is to be encoded for that one
        self.encode: dict[Naive, list[int]] = {}
        self.dropped: list[int] = []

    @property
    def queues(self) -> tuple[Any, ...]:  # type: ignore[override]
        freeable = self.empty + sum(self.size_of[i] for i in self.unused)
        return (*super().queues, self.empty, freeable)

    # ---- the encoder

    def clip(self, r: Naive, start: int, n: int) -> int:
        n, self.take = self.tokens_for(r, n, start)
        self.left_then = self.left
        return n

    def taken(self, r: Naive) -> None:
        if self.take:
            self.left = self.left_then  # what was given back meanwhile is lost
        self.keep(r, self.take)

    def without_blocks(self, r: Naive) -> None:
        self.let_go(r)

    def tokens_for(self, r: Naive, n: int, start: int) -> tuple[int, list[int]]:
        """The tokens of `n` that `r` may compute from `start` on, and which of its items are to be encoded for that."""
        take: list[int] = []
        for k, item in enumerate(r.request.items):
            self.size_of[item.identifier] = item.tokens
            begin, end = item.start, item.start + item.tokens
            if begin >= start + n or end <= start:
                continue
            if self.config.disable_chunked_mm_input and start <= begin and start + n < end:
                return max(0, begin - start), take
            if item.identifier in [r.request.items[j].identifier for j in take]:
                continue
            if item.identifier in self.there:
                self.there[item.identifier].add(r)
                self.unused = [i for i in self.unused if i != item.identifier]
                continue
            if not self.room(item, r, take):
                return max(0, begin - start), take
            take.append(k)
        return n, take

    def room(self, item: Item, r: Naive, take: list[int]) -> bool:
        taken = sum(r.request.items[j].tokens for j in take)
        if item.tokens > self.left - taken:
            return False
        if item.tokens + taken > self.empty + sum(self.size_of[i] for i in self.unused):
            return False
        while item.tokens + taken > self.empty:
            oldest = self.unused.pop(0)
            del self.there[oldest]
            self.dropped.append(oldest)
            self.empty += self.size_of[oldest]
        return True

    def keep(self, r: Naive, take: list[int]) -> None:
        for k in take:
            item = r.request.items[k]
            self.there.setdefault(item.identifier, set()).add(r)
            self.empty -= item.tokens
            self.left -= item.tokens
        if take:
            self.encode[r] = take

    def let_go(self, r: Naive, computed: int | None = None) -> None:
        """Of all items, or of those that lie before token `computed`, in each place that `r` has come to."""
        items = r.request.items
        for item in items:
            users = self.there.get(item.identifier)
            if not users or r not in users:
                continue
            places = [i for i in items if i.identifier == item.identifier and i.start < r.computed]
            if computed is None or all(i.start + i.tokens <= computed for i in places):
                users.remove(r)
                if not users:
                    self.unused.append(item.identifier)

    # ---- the scheduler

    def free(self, r: Naive) -> None:
        super().free(r)
        self.let_go(r)
        self.left += sum(r.request.items[k].tokens for k in self.encode.pop(r, ()))

    def process(self, call: Call) -> None:
        for r in call.items:
            if not r.ended and not r.stale:
                self.let_go(r, r.computed - r.sampling)
            part = Call({r: call.items[r]}, call.samples, [], [], call.queues)
            super().process(part)
            call.finished += part.finished
            call.wasted += part.wasted

    def schedule(self) -> Call:
        self.left, self.encode, self.dropped = self.encoder_budget, {}, []
        call = super().schedule()
        dropped = [i for i in self.dropped if i not in self.there]
        call.queues = (*self.queues, [[r.request.id, take] for r, take in self.encode.items()], dropped)  # type: ignore
        return call
