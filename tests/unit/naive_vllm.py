"""vLLM's scheduler with prefix caching written out plainly from its rules: lists, token by token, no shortcut.

Slow, and made only to be compared with. A token is a pair (stream, index); a block's key is the tuple of all tokens up
to its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from batchsim.kernel.tokens import output_stream
from batchsim.kernel.types import Request
from batchsim.policies.systems.vllm import VllmConfig

Token = tuple[int, int]


@dataclass(eq=False)
class Naive:
    """One request's state."""

    request: Request
    output_len: int
    tokens: list[Token] = field(default_factory=list[Token])
    computed: int = 0
    outputs: int = 0
    blocks: list[int] = field(default_factory=list[int])
    published: int = 0

    def __post_init__(self) -> None:
        r = self.request
        if r.tokens is None:
            self.tokens = [(-1 - r.id, i) for i in range(r.prompt_tokens)]
        else:
            self.tokens = [(s, i) for s, start, n in r.tokens.segments for i in range(start, start + n)]


class NaiveVllm:
    """Queues and blocks. `step` makes one step and returns what is to be compared; None where nobody is there."""

    def __init__(self, config: VllmConfig, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self.config, self.size, self.max_model_len = config, block_size, max_model_len
        self.watermark = int(config.watermark * (num_blocks + 1))
        self.queue = list(range(num_blocks))
        self.users = [0] * num_blocks
        self.key: list[Any] = [None] * num_blocks
        self.index: dict[Any, list[int]] = {}
        self.running: list[Naive] = []
        self.waiting: list[Naive] = []

    def add(self, r: Naive) -> None:
        self.waiting.append(r)
        self.sort()

    def sort(self) -> None:
        if self.config.policy == "priority":
            self.waiting.sort(key=lambda r: (r.request.priority, r.request.arrival_ns, r.request.id))

    # ---- blocks

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def lookup(self, r: Naive) -> list[int]:
        hits: list[int] = []
        for k in range((len(r.tokens) - 1) // self.size):
            same = self.index.get(tuple(r.tokens[: (k + 1) * self.size]))
            if not same:
                break
            hits.append(same[0])
        return hits

    def allocate(self, r: Naive, base: int, n: int, hits: list[int], admission: bool) -> bool:
        have = len(r.blocks) + len(hits)
        revive = sum(self.users[b] == 0 for b in hits)
        spare = self.watermark if admission and self.running else 0
        if admission and self.config.scheduler_reserve_full_isl:
            whole = self.blocks(min(len(r.tokens), self.max_model_len))
            if max(whole - have, 0) + revive + spare > len(self.queue):
                return False
        need = max(self.blocks(base + n) - have, 0)
        if need + revive + spare > len(self.queue):
            return False
        for b in hits:
            if self.users[b] == 0:
                self.queue.remove(b)
            self.users[b] += 1
        new = [self.queue.pop(0) for _ in range(need)]
        for b in new:
            self.users[b] = 1
            if self.key[b] is not None:
                self.index[self.key[b]].remove(b)
                self.key[b] = None
        r.blocks += hits + new
        r.published += len(hits)
        if self.config.enable_prefix_caching:
            for k in range(r.published, min(base + n, len(r.tokens)) // self.size):
                key = tuple(r.tokens[: (k + 1) * self.size])
                self.key[r.blocks[k]] = key
                self.index.setdefault(key, []).append(r.blocks[k])
                r.published = k + 1
        return True

    def free(self, r: Naive) -> None:
        first, last = [], []
        for b in reversed(r.blocks):
            self.users[b] -= 1
            if self.users[b] == 0:
                (first if self.key[b] is None else last).append(b)
        self.queue = first + self.queue + last
        r.blocks, r.published = [], 0

    # ---- a step

    def step(self) -> tuple[Any, ...] | None:
        if not self.running and not self.waiting:
            return None
        scheduled, cached, preempted = self.schedule()
        free, finished = len(self.queue), []
        items = [[r.request.id, n] for r, n in scheduled.items()]
        for r, n in scheduled.items():
            r.computed += n
        for r in scheduled:
            if r.computed == len(r.tokens):
                r.tokens.append((output_stream(r.request.id), r.outputs))
                r.outputs += 1
                if r.outputs >= r.output_len or len(r.tokens) >= self.max_model_len:
                    finished.append(r.request.id)
                    self.free(r)
                    self.running.remove(r)
        return items, cached, preempted, finished, free, len(self.queue), len(self.waiting), len(self.running)

    def schedule(self) -> tuple[dict[Naive, int], list[Any], list[int]]:
        config = self.config
        everybody = len(self.running) + len(self.waiting)
        cap = config.long_prefill_token_threshold if everybody > 1 else 0
        if cap and config.long_prefill_token_threshold_adaptive:
            cap = max(cap, config.max_num_batched_tokens // everybody)
        scheduled: dict[Naive, int] = {}
        preempted: list[int] = []
        budget = self.pass_one(cap or 1 << 40, scheduled, preempted)
        cached: list[Any] = []
        slots = config.max_num_seqs if config.max_num_active_seqs is None else config.max_num_active_seqs
        while not preempted and budget > 0 and self.waiting and len(self.running) < slots:
            r = self.waiting[0]
            hits = self.lookup(r) if config.enable_prefix_caching else []
            start = len(hits) * self.size
            n = min(len(r.tokens) - start, cap or 1 << 40)
            if not config.enable_chunked_prefill and n > budget:
                break
            n = min(n, budget)
            if not self.allocate(r, start, n, hits, admission=True):
                break
            self.running.append(self.waiting.pop(0))
            r.computed = start
            scheduled[r] = n
            budget -= n
            if start:
                cached.append([r.request.id, start])
        return scheduled, cached, preempted

    def pass_one(self, cap: int, scheduled: dict[Naive, int], preempted: list[int]) -> int:
        config, running = self.config, self.running
        budget = config.max_num_scheduled_tokens or config.max_num_batched_tokens
        i = 0
        while i < len(running) and budget > 0:
            r = running[i]
            n = min(len(r.tokens) - r.computed, cap, budget, self.max_model_len - r.computed - 1)
            while not self.allocate(r, r.computed, n, [], admission=False):
                victim = running[-1]
                if config.policy == "priority":
                    victim = max(running, key=lambda v: (v.request.priority, v.request.arrival_ns))
                at = running.index(victim)
                running.remove(victim)
                if at < i:
                    i -= 1
                    budget += scheduled.pop(victim, 0)
                self.free(victim)
                victim.computed = 0
                self.waiting.insert(0, victim)
                self.sort()
                preempted.append(victim.request.id)
                if victim is r:
                    break
            else:
                scheduled[r] = n
                budget -= n
                i += 1
        return budget
