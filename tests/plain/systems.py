"""TGI told again as plain loops over lists, with no decode group, no heap and no events; and the rows of engines.

Slow on purpose: to compare with the policy on random workloads. No request is cancelled and each fits the pool.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from batchsim.kernel.types import Arrival
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
