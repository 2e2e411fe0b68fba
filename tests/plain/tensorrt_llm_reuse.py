"""TensorRT-LLM with block reuse told again as plain loops: tokens as tuples, the tree as nested dicts, a list as queue.

Slow on purpose: to compare with the policy on random workloads that share tokens. Nobody cancels and all fit the pool.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from batchsim.kernel.tokens import output_stream
from batchsim.kernel.types import Arrival
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm_config import TensorrtLlmConfig
from tests.plain.systems import Row, Step, cut, micro_batch

Tokens = tuple[tuple[int, int], ...]
"""Stream and index of each."""


@dataclass(eq=False)
class Node:
    """A block in the tree; `children` by their tokens. The root is block -1."""

    block: int
    children: dict[Tokens, Node] = field(default_factory=dict[Tokens, "Node"])

    def nodes(self) -> list[tuple[Node, Tokens, Node]]:
        """(parent, tokens, child) of all below."""
        found = [(self, tokens, child) for tokens, child in self.children.items()]
        return found + [edge for _, _, child in found for edge in child.nodes()]


class Pool:
    """Blocks, who holds them, and the tree."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.queue = list(range(blocks))
        self.refs = [0] * blocks
        self.tables: dict[Row, list[int]] = {}
        self.root = Node(-1)

    def ceil(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def held(self, row: Row) -> int:
        return len(self.tables.get(row, []))

    def chop(self, tokens: Tokens) -> list[Tokens]:
        size = self.block_size
        return [tokens[at : at + size] for at in range(0, len(tokens) - size + 1, size)]

    def walk(self, tokens: Tokens) -> tuple[list[Node], Tokens | None]:
        """The nodes of the full blocks of `tokens`, and all tokens up to the first block that is missing."""
        path: list[Node] = []
        node = self.root
        for i, part in enumerate(self.chop(tokens)):
            if part not in node.children:
                return path, tokens[: (i + 1) * self.block_size]
            node = node.children[part]
            path.append(node)
        return path, None

    def new_block(self) -> int:
        block = self.queue.pop(0)
        for parent, tokens, child in self.root.nodes():
            if child.block == block:
                del parent.children[tokens]
        self.refs[block] = 1
        return block

    def add(self, row: Row, tokens: Tokens) -> int:
        """Gives a starting row the blocks of all its tokens; returns how many of these are cached."""
        path, missing = self.walk(tokens[:-1])
        table = [node.block for node in path]
        cached = len(path) * self.block_size
        last = path[-1] if path else self.root
        rest = tokens[cached:-1]
        if missing is None and rest in last.children:
            table.append(last.children.pop(rest).block)
            cached += len(rest)
        for block in table:
            if not self.refs[block]:
                self.queue.remove(block)
            self.refs[block] += 1
        table += [self.new_block() for _ in range(self.ceil(len(tokens)) - len(table))]
        self.tables[row] = table
        return cached

    def store(self, row: Row, tokens: Tokens) -> Node:
        node = self.root
        for part, block in zip(self.chop(tokens), self.tables[row], strict=False):
            node = node.children.setdefault(part, Node(block))
        return node

    def give_up(self, row: Row, tokens: Tokens) -> None:
        """Stores all that hold `tokens`, the begun block too, and releases them."""
        node, full = self.store(row, tokens), len(tokens) // self.block_size
        if rest := tokens[full * self.block_size :]:
            node.children.setdefault(rest, Node(self.tables[row][full]))
        self.release(row)

    def release(self, row: Row) -> None:
        for block in reversed(self.tables.pop(row)):
            self.refs[block] -= 1
            if not self.refs[block]:
                self.queue.append(block)


class FirstStage:
    """Which of the active requests fit the pool, by any of the three capacity policies, and which of them are paused.

    An engine says which of its rows are prompts yet, the blocks that a row needs for its next step, and those that it
    may come to hold in all.
    """

    config: TensorrtLlmConfig
    pool: Pool
    active: list[Any]
    tokens: dict[int, Tokens]

    def is_prompt(self, row: Any) -> bool:
        raise NotImplementedError

    def needs(self, row: Any) -> int:
        raise NotImplementedError

    def most(self, row: Any) -> int:
        return self.pool.ceil(row.prompt + row.cap)

    @property
    def evicts(self) -> bool:
        return self.config.capacity_scheduler_policy == "MAX_UTILIZATION"

    def known(self, row: Any) -> Tokens:
        return self.tokens[row.id][: row.known]

    def makers(self) -> set[Tokens]:
        """What prompts that are computed in part will add to the tree."""
        if not self.config.waits_for_prefixes:
            return set()
        partial = [row for row in self.active if row in self.pool.tables and self.is_prompt(row)]
        missing = [self.pool.walk(self.known(row))[1] for row in partial]
        return {tokens for tokens in missing if tokens is not None}

    def passed_over(self, row: Any, made: set[Tokens]) -> bool:
        if row in self.pool.tables or not self.config.waits_for_prefixes:
            return False
        missing = self.pool.walk(self.known(row))[1]
        if missing in made:
            return True
        if missing is not None:
            made.add(missing)
        return False

    def no_evict(self) -> list[Any]:
        def to_come(row: Any) -> int:
            return self.most(row) - self.pool.held(row)

        fitting = [row for row in self.active if not self.is_prompt(row)]
        left = len(self.pool.queue) - sum(map(to_come, fitting))
        if self.config.capacity_scheduler_policy == "STATIC_BATCH" and fitting:
            return fitting
        made = self.makers()
        for row in self.active:
            if not self.is_prompt(row) or self.passed_over(row, made):
                continue
            if to_come(row) > left:
                break
            fitting.append(row)
            left -= to_come(row)
        return fitting

    def max_utilization(self, paused: list[Any]) -> list[Any]:
        refs, made, fitting = self.pool.refs.copy(), self.makers(), list[Any]()
        used, i, end, tables = 0, 0, len(self.active), self.pool.tables
        while i < end:
            row = self.active[i]
            if self.passed_over(row, made):  # asked again after a pause
                i += 1
                continue
            if used + self.needs(row) <= refs.count(0):
                fitting.append(row)
                used += self.needs(row)
                i += 1
                continue
            started = [j for j in range(i, end) if self.active[j] in tables]
            if not started:
                break
            end = started[-1]
            paused.append(self.active[end])
            for block in tables[paused[-1]]:
                refs[block] -= 1
        return fitting


class Reusing(FirstStage):
    """The engine: 10 ns a step, 1 more a prompt token, 2 a decode."""

    def __init__(self, config: TensorrtLlmConfig, arrivals: list[Arrival], blocks: int, block_size: int) -> None:
        self.config = config
        self.block_size = block_size  # with `ceil`, what `micro_batch` asks of an engine
        self.pool = Pool(blocks, block_size)
        self.to_come = [
            Row(r.id, r.arrival_ns, r.prompt_tokens, a.output_tokens or 1, r.max_output_tokens)
            for a in arrivals
            for r in [a.request]
        ]
        self.tokens = {a.request.id: all_tokens(a) for a in arrivals}
        self.queue: list[Row] = []
        self.active: list[Row] = []
        self.now_ns = 0
        self.log: list[Step] = []

    def ceil(self, tokens: int) -> int:
        return self.pool.ceil(tokens)

    def is_prompt(self, row: Row) -> bool:
        return not row.decodes

    def needs(self, row: Row) -> int:
        if row.decodes:
            return int(row.computed % self.block_size == 0)
        return 0 if row in self.pool.tables else self.ceil(row.known)

    def run(self) -> list[Step]:
        while self.active or self.queue or self.to_come:
            self.queue += [row for row in self.to_come if row.arrival_ns <= self.now_ns]
            while self.queue and len(self.active) < self.config.max_batch_size:
                self.active.append(self.queue.pop(0))
            self.to_come = [row for row in self.to_come if row.arrival_ns > self.now_ns]
            if self.active:
                self.step()
            else:
                self.now_ns = self.to_come[0].arrival_ns
        return self.log

    def step(self) -> None:
        pool, paused = self.pool, list[Row]()
        fitting = self.max_utilization(paused) if self.evicts else self.no_evict()
        work = micro_batch(self, self.config, fitting)
        for row in paused:
            pool.give_up(row, self.known(row)[:-1])
            row.computed, row.decodes = 0, False
            cut(row, self.config)
        for i, (row, n) in enumerate(work):
            if row not in pool.tables:
                row.computed = pool.add(row, self.known(row))
                work[i] = (row, min(n, row.known - row.computed))
        for row, _ in work:
            if row.decodes and row.computed % self.block_size == 0:
                pool.tables[row].append(pool.new_block())
        ids = [(row.id, n) for row, n in work]
        self.log.append((self.now_ns, ids, [row.id for row in paused], len(pool.queue)))
        self.now_ns += 10 + self.waits_ns() + sum(2 if row.decodes else n for row, n in work)
        for row, n in work:
            row.computed += n
        prompts = [row for row, _ in work if not row.decodes]
        for row in prompts:
            if self.config.backend == "tensorrt" and row.computed == row.known:
                pool.store(row, self.known(row)[:-1])
        for row, _ in work:
            if row.computed == row.known:
                row.generated += 1
                row.decodes = True
            if row.generated == row.output and row.decodes:
                pool.give_up(row, self.known(row)[:-1])
                self.active.remove(row)
        for row in prompts:
            if self.config.backend == "pytorch" and row in self.active:
                pool.store(row, self.known(row)[: row.computed])

    def waits_ns(self) -> int:
        """How long a step waits for copies of KV before it begins."""
        return 0


def all_tokens(arrival: Arrival) -> Tokens:
    """The prompt of a request and all that it will generate."""
    request = arrival.request
    segments = request.tokens.segments if request.tokens is not None else ((-1 - request.id, 0, request.prompt_tokens),)
    prompt = [(stream, start + i) for stream, start, length in segments for i in range(length)]
    return (*prompt, *((output_stream(request.id), i) for i in range(arrival.output_tokens or 1)))
