"""vLLM's scheduler with speculative decoding written out plainly from its rules, in lockstep and ahead of results.

Slow, and made only to be compared with. Whether the draft of a token is right, and how many drafts are found, are
functions of request and position, given by whoever compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from batchsim.kernel.tokens import output_stream
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from tests.plain.vllm import Naive, NaiveVllm


@dataclass(eq=False)
class Drafting(Naive):
    """`drafts` that wait; `real` counts outputs made, those in flight too."""

    drafts: int = 0
    real: int = 0


@dataclass
class Step:
    """One step in flight: tokens of each request, drafts really among them, tokens that come of it, who samples."""

    items: dict[Drafting, int]
    drafts: dict[Drafting, int]
    got: dict[Drafting, int]
    sampled: set[Drafting]


class NaiveDrafts(NaiveVllm):
    """`launch` schedules a step and says what is to be compared; `land` processes the oldest one."""

    def __init__(
        self,
        config: VllmConfig,
        num_blocks: int,
        block_size: Any,  # or what a class beside this one has in its place
        max_model_len: int,
        right: Callable[[int, int], bool],
        found: Callable[[int, int], int],
    ) -> None:
        super().__init__(config, num_blocks, block_size, max_model_len)
        spec = config.speculative_config
        assert spec is not None
        self.k, method = spec.num_speculative_tokens, spec.method
        self.beyond = 0 if method == "ngram" else self.k
        self.slots = 1 if method == "draft_model" else 0
        self.hash_ahead = 1 if method in ("eagle", "eagle3", "mtp") else 0
        self.right, self.found = right, found
        self.launched: list[Step] = []

    # ---- schedule

    def launch(self) -> tuple[Any, ...]:
        config, cap = self.config, self.chunk_cap()
        running: list[Any] = self.running
        budget, inb = config.step_tokens, config.max_num_batched_tokens
        items: dict[Drafting, int] = {}
        drafts: dict[Drafting, int] = {}
        preempted: list[int] = []
        partial = False
        i = 0
        while i < len(running) and budget > 0 and inb > self.slots:
            r: Drafting = running[i]
            if r.sampling > 0 and r.computed + 2 - r.sampling >= r.request.prompt_tokens + r.request.max_output_tokens:
                i += 1
                continue
            known = len(r.tokens) + r.sampling
            n = min(known + r.drafts - r.computed, cap)
            n = min(n, budget, inb - self.slots, self.max_model_len - r.computed - 1)
            n = self.clip(r, r.computed, n) if n > 0 else n
            if n <= 0:
                i += 1
                continue
            while not self.allocate(r, r.computed, n, [], admission=False):
                victim, at = self.preempt()
                assert isinstance(victim, Drafting)
                if at < i:
                    i -= 1
                if victim in items:
                    back = items.pop(victim)
                    drafts.pop(victim, None)
                    budget, inb = budget + back, inb + back + self.slots
                victim.drafts = 0
                preempted.append(victim.request.id)
                if victim is r:
                    break
            else:
                items[r] = n
                d = min(r.drafts, n + r.computed - known)
                if d > 0:
                    drafts[r] = d
                partial = partial or r.chunked
                r.drafts = 0
                budget, inb = budget - n, inb - n - self.slots
                i += 1
        cached: list[Any] = []
        padded: set[Any] = set()
        first_pass = bool(items)
        most = config.max_num_seqs if config.max_num_active_seqs is None else config.max_num_active_seqs
        while not preempted and budget > 0 and inb > self.slots and self.waiting and len(running) < most:
            w: Any = self.waiting[0]
            hits = self.lookup(w) if config.enable_prefix_caching else []
            start = self.start_of(hits)
            left = len(w.tokens) - start
            n, rest = min(left, cap), min(budget, inb - self.slots)
            fits = start + 1 + self.k + 1 <= self.max_model_len
            pads = left == 1 and not partial and (first_pass or start > 0) and fits
            if pads:
                if 1 + self.k > rest:
                    break
                n = 1 + self.k
            elif n > rest:
                if not config.enable_chunked_prefill:
                    break
                n = rest
            clipped = self.clip(w, start, n)
            if pads and clipped != n:
                clipped, pads = 1, False
            n = clipped
            if n == 0 or not self.allocate(w, start, n, hits, admission=True):
                break
            self.waiting.pop(0)
            running.append(w)
            w.computed = start
            items[w] = n
            if pads:
                drafts[w] = self.k
                padded.add(w)
            if start:
                cached.append([w.request.id, start])
            budget, inb = budget - n, inb - n - self.slots
        self.fly(items, drafts, padded)
        order = [[r.request.id, n] for r, n in items.items()]
        blocks = [[r.request.id, self.held_of(r)] for r in items]
        return order, cached, preempted, blocks, len(self.queue), len(self.waiting), len(running)

    def fly(self, items: dict[Drafting, int], drafts: dict[Drafting, int], padded: set[Any]) -> None:
        """Launches: what the step yields is settled now, though not known yet. Drafts of the padded are all wrong."""
        got: dict[Drafting, int] = {}
        sampled: set[Drafting] = set()
        late = self.config.async_scheduling
        for r, n in items.items():
            r.computed += n
            r.flying += n
            d = drafts.get(r, 0)
            r.chunked = r.computed - d < len(r.tokens) + r.sampling
            if r.chunked:
                continue
            sampled.add(r)
            accepted = 0
            while (
                accepted < d
                and r not in padded
                and self.right(r.request.id, r.request.prompt_tokens + r.real + accepted)
            ):
                accepted += 1
            got[r] = accepted + 1
            r.real += accepted + 1
            if late:
                r.sampling += 1 + d
                r.drafts = self.k
        if items:
            self.launched.append(Step(items, drafts, got, sampled))

    # ---- results

    def land(self) -> tuple[Any, ...]:
        step = self.launched.pop(0)
        late = self.config.async_scheduling
        finished: list[int] = []
        for r, n in step.items.items():
            if r.ended:
                continue
            r.flying -= n
            stale = r.stale > 0
            if stale:
                r.stale -= n
            if r not in step.sampled:
                continue
            d, gained = step.drafts.get(r, 0), step.got[r]
            if not stale:
                r.computed -= d + 1 - gained
                if late:
                    r.sampling -= d + 1 - gained
            dropped = 0
            for j in range(gained):
                r.tokens.append((output_stream(r.request.id), r.outputs))
                r.outputs += 1
                if r.outputs >= r.output_len or len(r.tokens) >= self.max_model_len:
                    r.ended = True
                    dropped = gained - j - 1
                    break
            if not stale:
                r.computed -= dropped
                if late:
                    r.sampling -= gained
                if r in self.running:
                    self.publish(r, r.computed - r.flying)
            if r.ended:
                finished.append(r.request.id)
                self.free(r)
                (self.running if r in self.running else self.waiting).remove(r)
            elif not late:
                r.drafts = min(self.found(r.request.id, len(r.tokens)), self.k)
        return finished, len(self.queue), len(self.waiting), len(self.running)
