"""HF TGI's scheduler: Text Generation Inference, backend v3 (archived main, commit db931fcf, January 2026).

Rule: one first-come queue. An idle engine takes what fits and prefills it; then, before every decode of the whole
batch, the queue is asked for more: at most one prefill, then a decode. A request takes all the blocks it can ever need
when it comes in, so there is no preemption. Without chunking a prefill stops the decodes, and unless the last one is
`max_waiting_tokens` behind it needs `waiting_served_ratio` newcomers for each running request. With chunking prefill
and decodes are one forward, and the last prompt is cut to fill the prefill budget.
A cached prefix costs nothing; a request's prompt is cached when it ends, its output never.
Source: backends/v3/src/{backend,queue,block_allocator,radix}.rs, launcher, and of the server flash_causal_lm.py.
Simplifies: no speculation, no sliding window; an output cap beyond the model's length is cut to it. The cache evicts
whole nodes, where TGI shortens the last one, and holds only what was computed, where TGI caches all prompts given up.
"""

from __future__ import annotations

from struct import pack, unpack

from batchsim.base.errors import ScenarioError
from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Event, Sequence
from batchsim.kv.radix_cache import RadixKV
from batchsim.policies.families.first_come import FirstCome
from batchsim.policies.systems.tgi.tgi_config import TgiConfig

_Chosen = list[tuple[Sequence, int, int]]
"""The sequences of the next prefill: (sequence, tokens of its first chunk, tokens found in the cache before it)."""


class Tgi(FirstCome):
    """The scheduler. A decode step costs O(1) while the queue is empty or its head stays blocked."""

    evidence = "hand-derived"

    def __init__(self, config: TgiConfig, context: PolicyContext) -> None:
        kv = context.kv
        total = config.max_batch_total_tokens
        if total is not None and total > kv.num_blocks * kv.block_size:
            raise ScenarioError(
                f"tgi: max_batch_total_tokens {total} is above the {kv.num_blocks * kv.block_size} tokens that the KV"
                " memory holds. Lower it or leave it out."
            )
        if config.use_prefix_caching and not isinstance(kv, RadixKV):
            raise ScenarioError(
                f"tgi: its prefix cache needs a RadixKV, not a {type(kv).__name__}. Set use_prefix_caching: false."
            )
        super().__init__(context)
        self.config = config
        self._cache = kv if isinstance(kv, RadixKV) and config.use_prefix_caching else None
        self.total_tokens = kv.num_blocks * kv.block_size if total is None else total
        # Block 0 is kept for health checks where blocks are allocated, that is without padding.
        self.usable_blocks = kv.num_blocks if config.requires_padding else self.total_tokens // kv.block_size - 1
        if self.usable_blocks < 1:
            raise ScenarioError(
                f"tgi: max_batch_total_tokens {self.total_tokens} leaves no KV block of {kv.block_size} tokens beside"
                " block 0, which is kept for health checks. Raise it."
            )
        self._kept_blocks = kv.num_blocks - self.usable_blocks
        self._claimed_blocks = 0  # of the running, shared ones counted for each
        self._must_decode = False  # a prefill for a running batch was made; a decode is next
        self._waiting_tokens = 1  # decodes since the last prefill, and one
        self._widest = 0  # padded: the longest context of the members, less the group's step

    def cancel(self, seq: Sequence, now_ns: int) -> list[Sequence]:
        super().cancel(seq, now_ns)
        self._measure_width()
        return []

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        first = not self.running
        chosen: _Chosen = []
        if first or not self._must_decode:
            chosen, reason = self._next_batch(first)
        else:
            reason = "decode_first"
        self.note_blocked(reason)
        if chosen:
            self._waiting_tokens = 1
            self._must_decode = not first
            return self._prefill(chosen)
        if first:
            return IDLE
        self._waiting_tokens += 1
        self._must_decode = False
        chunks = list(self.partial.items())
        pad_tokens = len(self.group) * (self._widest + self.group.step) - self.group.total_context_tokens
        return Batch(
            self.group,
            chunks,
            sum([n for _, n in chunks]),
            pad_context_tokens=pad_tokens if self.config.requires_padding else 0,
        )

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        if self.waiting:
            # The queue was asked before this step, in vain; it is asked in vain again unless a small batch will do now.
            asked = self._blocked is not None and self._blocked[1] != "decode_first"
            if not asked or (
                not self.config.support_chunking and self._waiting_tokens == self.config.max_waiting_tokens
            ):
                return False
        self._waiting_tokens += 1
        batch.again()
        return True

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        size = batch.num_decode + len(batch.chunks)
        super().complete(batch, finished, now_ns)
        if self.partial:
            self._cut_chunks(size)
        if finished or batch.sampled:
            self._measure_width()
        return finished

    # ---- what the queue gives

    def _next_batch(self, first: bool) -> tuple[_Chosen, str]:
        """Takes the next prefill from the front of the queue; returns its sequences and why the head then waits."""
        config, waiting = self.config, self.waiting
        if not waiting:
            return [], ""
        min_size, max_size, budget = None, config.max_batch_size, config.max_batch_prefill_tokens
        if not first and config.support_chunking:
            max_size = None
            budget -= len(self.group) + sum(self.partial.values())
        elif not first:
            if self._waiting_tokens < config.max_waiting_tokens:
                min_size = int(_single(len(self.running) * _single(config.waiting_served_ratio)))
            if max_size is not None:
                max_size -= len(self.running)
        if budget <= 0:
            return [], "token_budget"
        if self._claimed_blocks * self.kv.block_size >= self.total_tokens:
            return [], "kv_blocks"
        if min_size is not None and len(waiting) < min_size:
            return [], "batch_window"
        if max_size is not None and max_size <= 0:
            return [], "no_slot"
        budget = -(-budget // self.kv.block_size) * self.kv.block_size
        chosen, reason = self._fitting(max_size, budget)
        if min_size is not None and len(chosen) < min_size:
            for seq, _, _ in reversed(chosen):
                self.kv.free(seq)
            return [], reason
        for seq, n, hit in chosen:
            waiting.popleft()
            seq.start_from_cache(hit)
            self._claimed_blocks += self.kv.blocks_for(self.most_tokens(seq))
            self.start_running(seq, n)
        return chosen, reason

    def _fitting(self, max_size: int | None, budget: int) -> tuple[_Chosen, str]:
        """The sequences at the front of the queue that fit, each given the blocks of its whole life, and why no more
        do."""
        chosen: _Chosen = []
        left, longest, new_tokens = budget, 0, 0
        room = self.total_tokens - self._running_tokens() if self.config.requires_padding else 0
        for seq in self.waiting:
            if len(chosen) == max_size:
                return chosen, "no_slot"
            prompt = seq.request.prompt_tokens
            if self.config.requires_padding:
                longest = max(longest, prompt)
                new_tokens += self.most_tokens(seq) + 1 - prompt
                padded = (len(chosen) + 1) * longest
                if padded > budget or padded + new_tokens > room:
                    return chosen, "token_budget" if padded > budget else "kv_blocks"
            hit = self._allocate(seq)
            if hit is None:
                return chosen, "kv_blocks"
            lacking = prompt - hit
            if not self.config.requires_padding and lacking > left:
                if self.config.support_chunking and left > 0:
                    chosen.append((seq, left, hit))
                else:
                    self.kv.free(seq)
                return chosen, "token_budget"
            chosen.append((seq, lacking, hit))
            left -= lacking
        return chosen, ""

    def _allocate(self, seq: Sequence) -> int | None:
        """Takes the blocks of the whole life of `seq`; returns its cached prompt tokens, None if blocks are short.

        A prompt that is cached to its end computes its last token anew. Where blocks are short the cache has been
        evicted all the same.
        """
        most, prompt, hit = self.most_tokens(seq), seq.request.prompt_tokens, 0
        if self._cache is not None:
            hit = self._cache.match(seq, prompt)
            self._cache.take(seq, hit)
        need = self.kv.blocks_for(most) - self.kv.held(seq)
        fits = need <= self.kv.num_free - self._kept_blocks
        if self._cache is not None:
            self._cache.make_room(need + self._kept_blocks)
            if not fits:
                self._cache.free(seq)
        if not fits:
            return None
        self.kv.allocate(seq, most)
        return min(hit, prompt - 1)

    def _prefill(self, chosen: _Chosen) -> Batch:
        """The step of the chosen prompts; with chunking all that runs takes part."""
        cached = [(seq, hit) for seq, _, hit in chosen if hit]
        if self.config.support_chunking:
            chunks = list(self.partial.items())
            return Batch(self.group, chunks, sum([n for _, n in chunks]), cached=cached)
        chunks = [(seq, n) for seq, n, _ in chosen]
        tokens = sum([n for _, n in chunks])
        padded = len(chunks) * max(n for _, n in chunks) if self.config.requires_padding else tokens
        return Batch(None, chunks, tokens, pad_prefill_tokens=padded - tokens, cached=cached)

    def _cut_chunks(self, size: int) -> None:
        """The next chunks of unfinished prompts, the newest first, from what a forward of `size` requests leaves."""
        left = self.config.max_batch_prefill_tokens - (size - 1)
        for seq in reversed(self.partial):
            n = max(min(seq.num_tokens - seq.num_computed_tokens, left), 1)
            self.partial[seq] = n
            left -= n

    # ---- sizes

    def _running_tokens(self) -> int:
        """Tokens of the running batch at its worst, where it is padded: every row as long as the longest, and all
        output tokens still to come."""
        rows, longest, to_come = len(self.running), 0, 0
        for seq in self.running:
            longest = max(longest, seq.num_tokens)
            to_come += self.most_tokens(seq) + 1 - seq.num_tokens
        return rows * longest + to_come

    def _measure_width(self) -> None:
        if self.config.requires_padding:
            self._widest = max((seq.num_computed_tokens for seq in self.group.members), default=0) - self.group.step

    def refusal(self, seq: Sequence) -> Event | None:
        """The rejection of a request that the router would not take, or that could never run."""
        config, prompt = self.config, seq.request.prompt_tokens
        most = self.most_tokens(seq)
        if len(self.waiting) + len(self.running) >= config.max_concurrent_requests:
            detail = f"max_concurrent_requests {config.max_concurrent_requests} are in the engine already"
            return Event("rejected", seq, "queue_full", detail=detail)
        if unfit := super().refusal(seq):
            return unfit
        need = self.kv.blocks_for(most)
        if need > self.usable_blocks or most + 1 > self.total_tokens:
            detail = (
                f"{most + 1} tokens in {need} KV blocks, max_batch_total_tokens {self.total_tokens} in"
                f" {self.usable_blocks} usable blocks"
            )
            return Event("rejected", seq, "never_fits", detail=detail)
        if not config.support_chunking and prompt > config.max_batch_prefill_tokens:
            detail = (
                f"prompt of {prompt} tokens in one step, max_batch_prefill_tokens {config.max_batch_prefill_tokens}"
            )
            return Event("rejected", seq, "over_token_budget", detail=detail)
        return None

    def release(self, seq: Sequence) -> None:
        self._claimed_blocks -= self.kv.blocks_for(self.most_tokens(seq))
        if self._cache is not None:
            self._cache.insert(seq, min(seq.num_computed_tokens, seq.request.prompt_tokens))
        super().release(seq)


def _single(value: float) -> float:
    """`value` in single precision, in which TGI multiplies."""
    return unpack("f", pack("f", value))[0]
