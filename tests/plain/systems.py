"""TensorRT-LLM and TGI told again as plain loops over lists, with no decode group, no heap and no events.

Slow on purpose: to compare with the policies on random workloads. Nobody cancels and every request fits the pool.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from batchsim.kernel.types import Arrival
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm_config import TensorrtLlmConfig
from batchsim.policies.systems.tgi.tgi_config import TgiConfig

Step = tuple[int, list[tuple[int, int]], list[int], int]
"""Start, (request, tokens) in batch order, the preempted, free blocks."""


@dataclass(eq=False)
class Row:
    """One request."""

    id: int
    arrival_ns: int
    prompt: int
    output: int
    cap: int
    computed: int = 0
    generated: int = 0
    held: int = 0
    chunk: int = 0
    decodes: bool = False

    @property
    def known(self) -> int:
        return self.prompt + self.generated


@dataclass
class Engine:
    """Time, blocks and the log of steps; 10 ns a step, 1 more a prompt token, 2 a decode."""

    arrivals: list[Arrival]
    blocks: int
    block_size: int
    now_ns: int = 0
    log: list[Step] = field(default_factory=list[Step])

    def __post_init__(self) -> None:
        self.to_come = [
            Row(r.id, r.arrival_ns, r.prompt_tokens, a.output_tokens or 1, r.max_output_tokens)
            for a in self.arrivals
            for r in [a.request]
        ]
        self.free = self.blocks

    def ceil(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def arrived(self) -> list[Row]:
        """Those due by now, taken out of those to come."""
        due = [row for row in self.to_come if row.arrival_ns <= self.now_ns]
        self.to_come = [row for row in self.to_come if row.arrival_ns > self.now_ns]
        return due

    def grow(self, row: Row, tokens: int) -> None:
        need = max(self.ceil(tokens) - row.held, 0)
        row.held += need
        self.free -= need
        assert self.free >= 0

    def drop(self, row: Row) -> None:
        self.free += row.held
        row.held = row.computed = 0
        row.decodes = False

    def run(self, work: list[tuple[Row, int]], preempted: list[Row]) -> list[Row]:
        """One step, in batch order; returns and frees the finished."""
        ids = [(row.id, n) for row, n in work]
        self.log.append((self.now_ns, ids, [row.id for row in preempted], self.free))
        self.now_ns += 10 + sum(2 if row.decodes else n for row, n in work)
        ended = []
        for row, n in work:
            row.computed += n
            if row.computed == row.known:
                row.generated += 1
                row.decodes = True
                if row.generated == row.output:
                    ended.append(row)
                    self.drop(row)
        return ended


def tensorrt_llm(config: TensorrtLlmConfig, arrivals: list[Arrival], blocks: int, block_size: int) -> list[Step]:
    """The steps of TensorRT-LLM."""
    engine = Engine(arrivals, blocks, block_size)
    queue: list[Row] = []
    active: list[Row] = []
    while active or queue or engine.to_come:
        queue += engine.arrived()
        while queue and len(active) < config.max_batch_size:
            active.append(queue.pop(0))
        if not active:
            engine.now_ns = engine.to_come[0].arrival_ns
            continue
        paused: list[Row] = []
        if config.capacity_scheduler_policy == "MAX_UTILIZATION":
            fitting = _max_utilization(engine, config, active, paused)
        else:
            fitting = _no_evict(engine, config, active)
        work = micro_batch(engine, config, fitting)
        for row in paused:
            cut(row, config)
        for row, _ in work:
            engine.grow(row, row.computed + 1 if row.decodes else row.known)
        for row in engine.run(work, paused):
            active.remove(row)
    return engine.log


def _no_evict(engine: Engine, config: TensorrtLlmConfig, active: list[Row]) -> list[Row]:
    fitting = [row for row in active if row.decodes]
    left = engine.free - sum(engine.ceil(row.prompt + row.cap) - row.held for row in fitting)
    if config.capacity_scheduler_policy == "STATIC_BATCH" and fitting:
        return fitting
    for row in active:
        if row.decodes:
            continue
        need = engine.ceil(row.prompt + row.cap) - row.held
        if need > left:
            break
        fitting.append(row)
        left -= need
    return fitting


def _max_utilization(engine: Engine, config: TensorrtLlmConfig, active: list[Row], paused: list[Row]) -> list[Row]:
    fitting: list[Row] = []
    used, i, end = 0, 0, len(active)
    while i < end:
        row = active[i]
        need = engine.ceil(row.computed + 1) - row.held if row.decodes else 0 if row.held else engine.ceil(row.known)
        if used + need <= engine.free:
            fitting.append(row)
            used += need
            i += 1
            continue
        started = [j for j in range(i, end) if active[j].held]
        if not started:
            break
        end = started[-1]
        paused.append(active[end])
        engine.drop(active[end])
    return fitting


class EngineFailsError(Exception):
    """The engine's scheduler raises: a prompt is longer than a step."""


def cut(row: Row, config: TensorrtLlmConfig) -> None:
    """In the C++ runtime: takes generated tokens away until the paused row can be computed in one step again."""
    if config.backend == "pytorch":
        return
    while row.known > config.max_num_tokens and not config.enable_chunked_prefill:
        row.generated -= 1


class Blocks(Protocol):
    """What the second stage must know of an engine."""

    block_size: int


def micro_batch(
    engine: Blocks, config: TensorrtLlmConfig, fitting: list[Row], of_decode: int = 1
) -> list[tuple[Row, int]]:
    """The second stage of TensorRT-LLM: who of `fitting` runs, with how many tokens, in batch order."""
    contexts: list[tuple[Row, int]] = []
    decodes: list[tuple[Row, int]] = []
    used = 0
    for row in fitting:
        n = of_decode if row.decodes else 0 if config.enable_chunked_prefill else row.known
        if not row.decodes and n > config.max_num_tokens:
            raise EngineFailsError
        if used + n > config.max_num_tokens:
            break
        used += n
        (decodes if row.decodes else contexts).append((row, n or row.known - row.computed))
    if config.enable_chunked_prefill:
        contexts = _parted(_chunks(engine, config, contexts, config.max_num_tokens - used))
    return contexts + decodes


def _parted(contexts: list[tuple[Row, int]]) -> list[tuple[Row, int]]:
    """Those that do not end their prompt first: two fingers move inwards and swap what stands on the wrong side."""
    low, high = 0, len(contexts) - 1

    def ends(i: int) -> bool:
        row, n = contexts[i]
        return row.computed + n == row.known

    while low < high:
        if not ends(low):
            low += 1
        elif ends(high):
            high -= 1
        else:
            contexts[low], contexts[high] = contexts[high], contexts[low]
            low, high = low + 1, high - 1
    return contexts


def _chunks(
    engine: Blocks, config: TensorrtLlmConfig, contexts: list[tuple[Row, int]], capacity: int
) -> list[tuple[Row, int]]:
    if sum(n for _, n in contexts) <= capacity:
        return contexts
    sizes = [0] * len(contexts)
    if config.context_chunking_policy == "EQUAL_PROGRESS":
        progress = True
        while progress:
            progress = False
            for i, (_, lacking) in enumerate(contexts):
                more = min(engine.block_size, lacking - sizes[i])
                if more and sum(sizes) + more <= capacity:
                    sizes[i] += more
                    progress = True
    else:
        for i, (_, lacking) in enumerate(contexts):
            n = min(lacking, capacity)
            sizes[i] = n if n == lacking else n // engine.block_size * engine.block_size
            capacity -= sizes[i]
    return [(row, n) for (row, _), n in zip(contexts, sizes, strict=True) if n]


def tgi(config: TgiConfig, arrivals: list[Arrival], blocks: int, block_size: int) -> list[Step]:
    """The steps of TGI with paged attention."""
    engine = Engine(arrivals, blocks, block_size)
    queue: list[Row] = []
    while queue or engine.to_come:
        queue += engine.arrived()
        if not queue:
            engine.now_ns = engine.to_come[0].arrival_ns
            continue
        batch = _next_batch(engine, config, queue, None, config.max_batch_size, config.max_batch_prefill_tokens)
        batch = _forward(engine, config, batch)
        waiting_tokens = 1
        while batch:
            queue += engine.arrived()
            size: int | None = None
            places: int | None = None
            budget = config.max_batch_prefill_tokens
            if config.support_chunking:
                budget -= sum(row.chunk for row in batch)
            else:
                size = (
                    None
                    if waiting_tokens >= config.max_waiting_tokens
                    else int(len(batch) * config.waiting_served_ratio)
                )
                places = None if config.max_batch_size is None else config.max_batch_size - len(batch)
            new = _next_batch(engine, config, queue, size, places, budget)
            if new:
                waiting_tokens = 1
                if config.support_chunking:
                    batch = _forward(engine, config, batch + new)
                    if not batch:
                        break
                else:
                    batch += _forward(engine, config, new)
                queue += engine.arrived()
            batch = _forward(engine, config, batch)
            waiting_tokens += 1
    return engine.log


def _next_batch(
    engine: Engine, config: TgiConfig, queue: list[Row], min_size: int | None, max_size: int | None, budget: int
) -> list[Row]:
    if budget <= 0 or not queue or max_size == 0 or (min_size is not None and len(queue) < min_size):
        return []
    budget = engine.ceil(budget) * engine.block_size
    new: list[Row] = []
    prefill_tokens = 0
    for row in queue:
        need = engine.ceil(row.prompt + row.cap - 1)
        if need > engine.free - 1:  # block 0
            break
        if prefill_tokens + row.prompt > budget:
            if config.support_chunking and budget > prefill_tokens:
                row.chunk = budget - prefill_tokens
                new.append(row)
                engine.grow(row, row.prompt + row.cap - 1)
            break
        row.chunk = row.prompt
        prefill_tokens += row.prompt
        new.append(row)
        engine.grow(row, row.prompt + row.cap - 1)
        if len(new) == max_size:
            break
    if min_size is not None and len(new) < min_size:
        for row in new:
            engine.drop(row)
        return []
    del queue[: len(new)]
    return new


def _forward(engine: Engine, config: TgiConfig, batch: list[Row]) -> list[Row]:
    """One forward of `batch`; returns who goes on, with the tokens of their next one."""
    ended = engine.run([(row, row.chunk) for row in batch], [])
    going_on = [row for row in batch if row not in ended]
    left = config.max_batch_prefill_tokens - (len(batch) - 1)
    for row in reversed(going_on):
        row.chunk = 1
        if not row.decodes:
            row.chunk = max(min(row.prompt - row.computed, left), 1)
            left -= row.chunk
    return going_on
