"""vLLM's scheduler with prefix caching written out plainly from its rules: lists, token by token, no shortcut.

Slow, and made only to be compared with. `NaiveVllm` holds for any number of calls in flight: `schedule` takes what it
can, and `process` the results of a call; whoever drives it says when. A token is a pair (stream, index); a block's key
is the tuple of its adapter and all tokens up to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from batchsim.kernel.engine_loop import EngineLoop
from batchsim.kernel.tokens import output_stream
from batchsim.kernel.types import MISSING, Arrival, Request
from batchsim.policies.systems.vllm.vllm_config import VllmConfig

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
    sampling: int = 0  # tokens to come that count as known: asynchronous scheduling alone
    flying: int = 0  # tokens in calls not processed
    stale: int = 0  # of these, from before it was preempted
    next_call: int = 0  # of the scheduler, in which it may decode
    chunked: bool = False  # the latest tokens of it that were scheduled did not reach its end
    ended: bool = False

    def __post_init__(self) -> None:
        r = self.request
        if r.tokens is None:
            self.tokens = [(-1 - r.id, i) for i in range(r.prompt_tokens)]
        else:
            self.tokens = [(s, i) for s, start, n in r.tokens.segments for i in range(start, start + n)]


@dataclass(eq=False)
class Call:
    """What one call of the scheduler took: tokens by request, who samples, hits, the preempted; and then the rest."""

    items: dict[Naive, int]
    samples: set[Naive]
    cached: list[list[int]]
    preempted: list[int]
    queues: tuple[int, int, int]
    finished: list[int] = field(default_factory=list[int])
    wasted: int = 0
    end_ns: int = 0


class NaiveVllm:
    """Queues and blocks. `step` makes one step and returns what is to be compared; None where nobody is there."""

    hash_ahead = 0  # tokens after a block on which its key depends
    beyond = 0  # tokens after those computed for which a step takes blocks
    overtakes = False  # whether a waiting request of which `clip` leaves nothing is passed over, and not waited for

    def __init__(
        self, config: VllmConfig, num_blocks: int, block_size: int, max_model_len: int, stages: int = 1
    ) -> None:
        self.config, self.size, self.max_model_len = config, block_size, max_model_len
        self.stages, self.calls = stages, 0
        self.passed_over: list[Naive] = []  # in front of `waiting`
        self.watermark = int(config.watermark * (num_blocks + 1))
        self.queue = list(range(num_blocks))
        self.users = [0] * num_blocks
        self.key: list[Any] = [None] * num_blocks
        self.index: dict[Any, list[int]] = {}
        self.running: list[Naive] = []
        self.waiting: list[Naive] = []
        self.steps = 0  # with tokens
        self.last_prefill = -config.prefill_schedule_interval  # the latest step with a part of a prompt, from 1
        self.bound = False  # the latest call that let in what it could left requests waiting
        self.defers = False
        self.pass_counter: int | None = None  # of ranks in lockstep

    def add(self, r: Naive) -> None:
        self.waiting.append(r)
        self.sort()

    def held_back(self, r: Naive) -> bool:
        """Whether the adapter of `r` would be one too many."""
        adapters = {other.request.adapter for other in self.running} - {MISSING}
        mine = r.request.adapter
        return mine != MISSING and mine not in adapters and len(adapters) >= (self.config.max_loras or 1)

    @staticmethod
    def rank(r: Naive) -> tuple[int, int, int]:
        return r.request.priority, r.request.arrival_ns, r.request.id

    def sort(self) -> None:
        if self.config.policy == "priority":
            self.waiting.sort(key=self.rank)
            self.passed_over.sort(key=self.rank)

    def clip(self, r: Naive, start: int, n: int) -> int:
        """Where a chunk of `n` tokens from `start` on is to end, as its tokens."""
        return n

    def taken(self, r: Naive) -> None:
        """The chunk of the latest `clip`, which is of `r`, is scheduled."""

    def without_blocks(self, r: Naive) -> None:
        """The same, but `r` waits, as blocks are short."""

    # ---- blocks

    def start_of(self, hits: Any) -> int:
        """The tokens of what was looked up."""
        return len(hits) * self.size

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def held_of(self, r: Naive) -> int:
        """The blocks that `r` holds."""
        return len(r.blocks)

    def key_of(self, r: Naive, k: int) -> Any:
        """The key of block `k` of `r`; None while a token on which it depends is not known."""
        end = (k + 1) * self.size + self.hash_ahead
        return (r.request.adapter, *r.tokens[:end]) if end <= len(r.tokens) else None

    def lookup(self, r: Naive) -> list[int]:
        hits: list[int] = []
        for k in range((len(r.tokens) - 1) // self.size):
            same = self.index.get(self.key_of(r, k))
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
        need = max(self.blocks(min(base + n + self.beyond, self.max_model_len)) - have, 0)
        if need + revive + spare > len(self.queue):
            return False
        for b in hits:
            if self.users[b] == 0:
                self.queue.remove(b)
            self.users[b] += 1
        r.blocks += hits + [self.pop() for _ in range(need)]
        r.published += len(hits)
        self.publish(r, base + n)
        return True

    def pop(self) -> int:
        """A free block, which is no longer found by its key."""
        block = self.queue.pop(0)
        self.users[block] = 1
        if self.key[block] is not None:
            self.index[self.key[block]].remove(block)
            self.key[block] = None
        return block

    def publish(self, r: Naive, tokens: int) -> None:
        if not self.config.enable_prefix_caching:
            return
        for k in range(r.published, min(tokens, len(r.tokens)) // self.size):
            key = self.key_of(r, k)
            if key is None:
                return
            self.key[r.blocks[k]] = key
            self.index.setdefault(key, []).append(r.blocks[k])
            r.published = k + 1

    def give_back(self, blocks: list[int]) -> None:
        """Lets go of `blocks` in their order: those without a key are the next to be taken."""
        first, last = [], []
        for b in blocks:
            self.users[b] -= 1
            if self.users[b] == 0:
                (first if self.key[b] is None else last).append(b)
        self.queue = first + self.queue + last

    def free(self, r: Naive) -> None:
        self.give_back(r.blocks[::-1])
        r.blocks, r.published = [], 0

    # ---- a step

    @property
    def queues(self) -> tuple[int, int, int]:
        return len(self.queue), len(self.passed_over) + len(self.waiting), len(self.running)

    def step(self) -> tuple[Any, ...] | None:
        if not (self.running or self.waiting or self.passed_over):
            return None
        call = self.schedule()
        self.process(call)
        items, (free, _, _), (after, waiting, running) = call.items.items(), call.queues, self.queues
        listed = [[r.request.id, n] for r, n in items]
        return listed, call.cached, call.preempted, call.finished, free, after, waiting, running

    def process(self, call: Call) -> None:
        """The results of `call` are there."""
        for r, n in call.items.items():
            if r.ended:
                call.wasted += n
                continue
            r.flying -= n
            stale = r.stale > 0
            r.stale -= n if stale else 0
            if r in call.samples:
                r.tokens.append((output_stream(r.request.id), r.outputs))
                r.outputs += 1
                r.ended = r.outputs >= r.output_len or len(r.tokens) >= self.max_model_len
                if not stale and r.sampling:
                    r.sampling -= 1
                    self.publish(r, r.computed - r.flying)
            if r.ended:
                call.finished.append(r.request.id)
                self.free(r)
                for place in (self.running, self.passed_over, self.waiting):
                    if r in place:
                        place.remove(r)

    def chunk_cap(self) -> int:
        """The most tokens of one request in a step."""
        config = self.config
        everybody = len(self.running) + len(self.passed_over) + len(self.waiting)
        cap = config.long_prefill_token_threshold if everybody > 1 else 0
        if cap and config.long_prefill_token_threshold_adaptive:
            cap = max(cap, config.max_num_batched_tokens // everybody)
        return cap or 1 << 40

    def preempt(self) -> tuple[Naive, int]:
        """Puts the least important of the running back to those waiting; returns it and the place that it had."""
        running = self.running
        victim = running[-1]
        if self.config.policy == "priority":
            victim = max(running, key=lambda v: (v.request.priority, v.request.arrival_ns))
        at = running.index(victim)
        del running[at]
        self.free(victim)
        victim.computed = victim.sampling = 0
        victim.stale = victim.flying
        self.waiting.insert(0, victim)
        self.sort()
        return victim, at

    def schedule(self) -> Call:
        config, cap = self.config, self.chunk_cap()
        self.calls += 1
        interval = config.prefill_schedule_interval
        throttled = self.steps + 1 - self.last_prefill < interval
        if self.pass_counter is not None:
            throttled = self.pass_counter % interval != 0
        self.defers = throttled and not self.bound and any(not r.chunked for r in self.running)
        items: dict[Naive, int] = {}
        preempted: list[int] = []
        budget = self.pass_one(cap, items, preempted)
        cached: list[list[int]] = []
        if not preempted:
            self.pass_two(cap, budget, items, cached)
            if not self.defers:
                self.bound = bool(self.waiting)
        self.steps += bool(items)
        samples: set[Naive] = set()
        for r, n in items.items():
            r.computed += n
            r.flying += n
            r.chunked = r.computed < len(r.tokens) + r.sampling
            if r.computed == len(r.tokens) + r.sampling:
                samples.add(r)
                if config.async_scheduling:
                    r.sampling += 1
                    r.next_call = self.calls + self.stages
        return Call(items, samples, cached, preempted, self.queues)

    def pass_two(self, cap: int, budget: int, items: dict[Naive, int], cached: list[list[int]]) -> None:
        config = self.config
        slots = config.max_num_seqs if config.max_num_active_seqs is None else config.max_num_active_seqs
        passed_over: list[Naive] = []
        while budget > 0 and (self.passed_over or self.waiting) and len(self.running) < slots:
            line = self.passed_over or self.waiting
            if config.policy == "priority" and self.passed_over and self.waiting:
                line = min(self.passed_over, self.waiting, key=lambda q: self.rank(q[0]))
            r = line[0]
            if r.stale or self.held_back(r):
                passed_over.append(line.pop(0))
                continue
            hits = self.lookup(r) if config.enable_prefix_caching else []
            start = self.start_of(hits)
            n = min(len(r.tokens) - start, cap)
            if start < len(r.tokens) - 1 and self.defers:
                break
            if not config.enable_chunked_prefill and n > budget:
                break
            n = self.clip(r, start, min(n, budget))
            if n == 0 and self.overtakes:
                passed_over.append(line.pop(0))
                continue
            if n == 0 or not self.allocate(r, start, n, hits, admission=True):
                self.without_blocks(r)
                break
            self.taken(r)
            self.running.append(line.pop(0))
            if start < len(r.tokens) - 1:
                self.last_prefill = self.steps + 1
            r.computed = start
            items[r] = n
            budget -= n
            if start:
                cached.append([r.request.id, start])
        self.passed_over = passed_over + self.passed_over
        self.sort()

    def pass_one(self, cap: int, scheduled: dict[Naive, int], preempted: list[int]) -> int:
        config, running = self.config, self.running
        budget = config.max_num_scheduled_tokens or config.max_num_batched_tokens
        i = 0
        while i < len(running) and budget > 0:
            r = running[i]
            last_is_coming = r.sampling and r.computed + 2 - r.sampling >= self.cap_of(r)
            known = len(r.tokens) + r.sampling - r.computed
            n = min(known, cap, budget, self.max_model_len - r.computed - 1)
            if last_is_coming or self.calls < r.next_call or (self.defers and r.chunked):
                n = 0
            if n <= 0 or (n := self.clip(r, r.computed, n)) == 0:
                i += 1
                continue
            while not self.allocate(r, r.computed, n, [], admission=False):
                victim, at = self.preempt()
                if at < i:
                    i -= 1
                    budget += scheduled.pop(victim, 0)
                preempted.append(victim.request.id)
                if victim is r:
                    break
            else:
                if r.chunked:
                    self.last_prefill = self.steps + 1
                self.taken(r)
                scheduled[r] = n
                budget -= n
                i += 1
        return budget

    def cap_of(self, r: Naive) -> int:
        return r.request.prompt_tokens + r.request.max_output_tokens


def calls_in_flight(
    engine: NaiveVllm,
    arrivals: list[Arrival],
    loop: EngineLoop,
    host_ns: tuple[int, int],
    stage_ns: Callable[[int], int],
) -> Iterator[tuple[Any, ...]]:
    """Runs vLLM's loop of calls in flight; yields what each call took when, and what came out of it.

    `host_ns`: to launch a call and to process it. `stage_ns`: the time of a stage by the number of its tokens.
    """
    left, now, waits_for_call = list(arrivals), 0, False
    free = [0] * loop.stages
    calls: list[Call] = []
    while True:
        there = bool(engine.running or engine.passed_over or engine.waiting)
        if not (there or waits_for_call or calls):
            if not left:
                return
            now = max(now, left[0].request.arrival_ns)
        while left and left[0].request.arrival_ns <= now:
            arrival = left.pop(0)
            engine.add(Naive(arrival.request, arrival.output_tokens or 0))
            there = True
        ran = False
        if there or waits_for_call:
            call = engine.schedule()
            waits_for_call = False
            items = [[r.request.id, n] for r, n in call.items.items()]
            yield ("call", now, items, call.cached, call.preempted, *call.queues)
            now += host_ns[0]
            calls.append(call)
            ran = bool(items)
            if ran:
                call.end_ns = now
                for stage in range(loop.stages):
                    call.end_ns = max(call.end_ns, free[stage]) + stage_ns(sum(call.items.values()))
                    free[stage] = call.end_ns
        if len(calls) >= loop.depth or not (ran or there):
            call = calls.pop(0)
            now = max(now, call.end_ns) + host_ns[1]
            engine.process(call)
            waits_for_call = waits_for_call or bool(call.finished)
            there = bool(engine.running or engine.passed_over or engine.waiting)
            if call.items:
                yield ("results", now, call.finished, call.wasted, *engine.queues)
        if not ran and (there or waits_for_call):
            now += loop.nap_ns
