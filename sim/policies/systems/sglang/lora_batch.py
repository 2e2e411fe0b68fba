"""Which waiting requests SGLang 0.5.23 lets in by their LoRA adapters: of at most `max_loras_per_batch` in a batch.

Rule: the base model counts as an adapter. A request whose adapter neither runs nor was taken is passed over where it
would be one too many; the requests behind it are tried. With `enable_lora_overlap_loading` a request whose adapter is
not on the GPU has it copied there beside the steps, one copy after another, and is passed over until that is done. With
`lora_drain_wait_threshold`, where all places are taken and requests of other adapters have waited longer than that, one
running adapter is drained for each of them, first the one whose requests have the fewest tokens to go. It takes in only
requests that may write at most 1.2 times as many, until none of its own runs.
Source: python/sglang/srt/managers/scheduler.py, lora/{lora_overlap_loader,lora_drainer}.py of the 0.5.23 wheel.
Simplifies: no adapter is pinned; the base model is not drained.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from batchsim.base.units import NS_PER_S
from batchsim.kernel.types import MISSING, Event, Sequence
from batchsim.policies.families.held_back import HeldBack
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from batchsim.policies.systems.sglang.waiting_queue import Waiting

DRAIN_TOLERANCE = 1.2
"""How many times the tokens that a draining adapter has to go a request of it may write; lora_drainer.py."""


class LoraBatch:
    """The adapters of the batch in the making. `is_used`: whether any request has come with an adapter; `load_ns`: how
    long one takes to be copied onto the GPU."""

    def __init__(self, config: SglangConfig, load_ns: int) -> None:
        self.is_used = False
        self.held = HeldBack()
        self._most = config.lora_slots
        self._overlaps = bool(config.enable_lora_overlap_loading)
        self._patience_ns = round((config.lora_drain_wait_threshold or 0) * NS_PER_S)
        self._load_ns = load_ns
        self._now_ns = 0
        self._running: set[int] = set()
        self._draining: dict[int, int] = {}  # adapters, each with the most tokens that one of its requests has to go
        self._passed_over: dict[Sequence, str] = {}
        self._on_gpu: OrderedDict[int, None] = OrderedDict()  # by use, where copies overlap with steps
        self._copies: dict[int, int] = {}  # copies under way: the end of each in ns, by adapter

    def begin(self, running: Iterable[Sequence], waiting: Waiting, now_ns: int) -> None:
        """Begins a batch beside the `running` requests, into which those `waiting` may come."""
        self._now_ns = now_ns
        self._passed_over = {}
        to_go: dict[int, int] = {}
        for seq in running:
            left = seq.max_output_tokens - seq.num_output_tokens
            to_go[seq.request.adapter] = max(to_go.get(seq.request.adapter, 0), left)
        self._running = set(to_go)
        for adapter in self._running & self._on_gpu.keys():
            self._on_gpu.move_to_end(adapter)
        self._drain(to_go, waiting)

    def allows(self, seq: Sequence) -> bool:
        """Whether `seq` may come in by its adapter; if not, it is noted as passed over."""
        reason = self._obstacle(seq)
        if reason:
            self._passed_over[seq] = reason
        return not reason

    def take(self, seq: Sequence) -> None:
        """Takes note that `seq` was looked at: its adapter counts from now on, whether or not it came in."""
        self._running.add(seq.request.adapter)
        self.held.forget(seq)

    def end(self, stopped_at: Sequence | None) -> tuple[list[Sequence], list[Event]]:
        """(The requests that this batch has passed over, in order; events), where it has stopped at another one."""
        return list(self._passed_over), self.held.tried(self._passed_over, stopped_at)

    @property
    def next_copy_ns(self) -> int | None:
        """When the next copy ends, in ns; None where none is under way."""
        return min((end_ns for end_ns in self._copies.values() if end_ns > self._now_ns), default=None)

    def _obstacle(self, seq: Sequence) -> str:
        adapter, running = seq.request.adapter, self._running
        if adapter not in running and len(running) >= self._most:
            return "adapter"
        if (to_go := self._draining.get(adapter)) is not None and seq.max_output_tokens > DRAIN_TOLERANCE * to_go:
            return "adapter_drains"
        if self._overlaps and adapter != MISSING and not self._is_ready(adapter):
            return "adapter_copied" if adapter in self._copies else "adapter"
        return ""

    def _is_ready(self, adapter: int) -> bool:
        """Whether `adapter` is on the GPU; begins to copy it where it is not and has room beside what runs."""
        if adapter in self._on_gpu:
            return True
        end_ns = self._copies.get(adapter)
        if end_ns is None:
            if len(self._running | self._copies.keys() | {adapter}) <= self._most:
                self._copies[adapter] = max(self._now_ns, *self._copies.values(), 0) + self._load_ns
            return False
        if end_ns > self._now_ns:
            return False
        del self._copies[adapter]
        if len(self._on_gpu) >= self._most:
            kept = self._running | self._copies.keys()
            del self._on_gpu[next((each for each in self._on_gpu if each not in kept), next(iter(self._on_gpu)))]
        self._on_gpu[adapter] = None
        return True

    def _drain(self, to_go: dict[int, int], waiting: Waiting) -> None:
        """Chooses what is drained; `to_go` has for each running adapter the most tokens that a request has to go."""
        if not self._patience_ns:
            return
        self._draining = {adapter: to_go[adapter] for adapter in self._draining if adapter in to_go}
        if len(to_go) < self._most:
            return
        since_ns: dict[int, int] = {}
        for seq in waiting.first(len(waiting)):
            adapter, came_ns = seq.request.adapter, seq.request.arrival_ns
            if adapter not in to_go and self._now_ns - came_ns > self._patience_ns:
                since_ns[adapter] = min(since_ns.get(adapter, came_ns), came_ns)
        for _ in range(len(since_ns) - len(self._draining)):
            left = {each: tokens for each, tokens in to_go.items() if each != MISSING and each not in self._draining}
            if not left:
                return
            adapter = min(left, key=lambda each: (left[each], each))
            self._draining[adapter] = left[adapter]
