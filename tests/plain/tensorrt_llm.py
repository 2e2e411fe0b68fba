"""TensorRT-LLM told again as plain loops: tokens as tuples, the tree of reused blocks as nested dicts, a list as queue.

Slow on purpose: to compare with the policy on random workloads. No request is cancelled and all fit the pool.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from batchsim.kernel.tokens import output_stream
from batchsim.kernel.types import Arrival
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm_config import TensorrtLlmConfig
from tests.plain.systems import Row, Step

R = TypeVar("R", bound=Row)

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


class Capacity(Generic[R]):
    """Rows, blocks, and the first stage of TensorRT-LLM: which of the active rows fit."""

    config: TensorrtLlmConfig
    block_size: int

    def begin(self, arrivals: list[Arrival], blocks: int) -> None:
        self.pool = Pool(blocks, self.block_size)
        self.tokens = {a.request.id: all_tokens(a) for a in arrivals}
        self.queue: list[R] = []
        self.active: list[R] = []

    def arrive(self, rows: list[R]) -> None:
        self.queue += rows
        while self.queue and len(self.active) < self.config.max_batch_size:
            self.active.append(self.queue.pop(0))

    # ---- the state of a row

    def is_context(self, row: R) -> bool:
        return not row.decodes

    def is_generating(self, row: R) -> bool:
        return row.decodes

    def known(self, row: R) -> Tokens:
        return self.tokens[row.id][: row.known]

    def most(self, row: R) -> int:
        """Blocks that `row` may come to hold."""
        return self.pool.ceil(row.prompt + row.cap)

    def needs(self, row: R) -> int:
        """Blocks of a step, for a row that waits or decodes."""
        if self.is_context(row):
            return 0 if row in self.pool.tables else self.pool.ceil(row.known)
        return int(row.computed % self.block_size == 0)

    # ---- blocks

    def allot(self, row: R) -> None:
        """Gives a starting row the blocks of all its tokens, of which those found in the tree are computed."""
        if self.config.enable_block_reuse:
            row.computed = self.pool.add(row, self.known(row))
        else:
            row.computed = 0
            self.pool.tables[row] = [self.pool.new_block() for _ in range(self.pool.ceil(row.known))]

    def give_up(self, row: R) -> None:
        """Frees the KV of `row`, stored for reuse but for its last known token."""
        if row not in self.pool.tables:
            return
        if self.config.enable_block_reuse:
            self.pool.give_up(row, self.known(row)[:-1])
        else:
            self.pool.release(row)

    # ---- the first stage

    def fitting(self, paused: list[R]) -> list[R]:
        """The rows that fit; the last ones started make room, and are added to `paused`."""
        if self.config.capacity_scheduler_policy == "MAX_UTILIZATION":
            return self.max_utilization(paused)
        return self.no_evict()

    def makers(self) -> set[Tokens]:
        """What prompts that are computed in part will add to the tree."""
        if not self.config.waits_for_prefixes:
            return set()
        partial = [row for row in self.active if row in self.pool.tables and self.is_context(row)]
        missing = [self.pool.walk(self.known(row))[1] for row in partial]
        return {tokens for tokens in missing if tokens is not None}

    def passed_over(self, row: R, made: set[Tokens]) -> bool:
        if row in self.pool.tables or not self.config.waits_for_prefixes:
            return False
        missing = self.pool.walk(self.known(row))[1]
        if missing in made:
            return True
        if missing is not None:
            made.add(missing)
        return False

    def no_evict(self) -> list[R]:
        fitting = [row for row in self.active if self.is_generating(row)]
        left = len(self.pool.queue) - sum(self.most(row) - self.pool.held(row) for row in fitting)
        if self.config.capacity_scheduler_policy == "STATIC_BATCH" and fitting:
            return fitting
        made = self.makers()
        for row in self.active:
            if not self.is_context(row) or self.passed_over(row, made):
                continue
            need = self.most(row) - self.pool.held(row)
            if need > left:
                break
            fitting.append(row)
            left -= need
        return fitting

    def max_utilization(self, paused: list[R]) -> list[R]:
        refs, made, fitting = self.pool.refs.copy(), self.makers(), list[R]()
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


class Waiting(Capacity[Row]):
    """The engine that waits for each step: 10 ns, 1 more a prompt token, 2 a decode."""

    def __init__(self, config: TensorrtLlmConfig, arrivals: list[Arrival], blocks: int, block_size: int) -> None:
        self.config, self.block_size = config, block_size
        self.begin(arrivals, blocks)
        self.to_come = [
            Row(r.id, r.arrival_ns, r.prompt_tokens, a.output_tokens or 1, r.max_output_tokens)
            for a in arrivals
            for r in [a.request]
        ]
        self.now_ns = 0
        self.log: list[Step] = []

    def run(self) -> list[Step]:
        while self.active or self.queue or self.to_come:
            self.arrive([row for row in self.to_come if row.arrival_ns <= self.now_ns])
            self.to_come = [row for row in self.to_come if row.arrival_ns > self.now_ns]
            if self.active:
                self.step()
            else:
                self.now_ns = self.to_come[0].arrival_ns
        return self.log

    def waits_ns(self) -> int:
        """How long a step waits for copies of KV before it begins."""
        return 0

    def step(self) -> None:
        pool, paused = self.pool, list[Row]()
        work = micro_batch(self.config, self.block_size, self.fitting(paused))
        for row in paused:
            self.give_up(row)
            row.computed, row.decodes = 0, False
            cut(row, self.config)
        for i, (row, n) in enumerate(work):
            if row not in pool.tables:
                self.allot(row)
                work[i] = (row, min(n, row.known - row.computed))
        for row, _ in work:
            if row.decodes and row.computed % self.block_size == 0:
                pool.tables[row].append(pool.new_block())
        ids = [(row.id, n) for row, n in work]
        self.log.append((self.now_ns, ids, [row.id for row in paused], len(pool.queue)))
        self.now_ns += 10 + self.waits_ns() + sum(2 if row.decodes else n for row, n in work)
        for row, n in work:
            row.computed += n
        prompts = [row for row, _ in work if not row.decodes and self.config.enable_block_reuse]
        for row in prompts:
            if self.config.backend == "tensorrt" and row.computed == row.known:
                pool.store(row, self.known(row)[:-1])
        for row, _ in work:
            if row.computed == row.known:
                row.generated += 1
                row.decodes = True
            if row.generated == row.output and row.decodes:
                self.give_up(row)
                self.active.remove(row)
        for row in prompts:
            if self.config.backend == "pytorch" and row in self.active:
                pool.store(row, self.known(row)[: row.computed])


def all_tokens(arrival: Arrival) -> Tokens:
    """The prompt of a request and all that it will generate."""
    request = arrival.request
    segments = request.tokens.segments if request.tokens is not None else ((-1 - request.id, 0, request.prompt_tokens),)
    prompt = [(stream, start + i) for stream, start, length in segments for i in range(length)]
    return (*prompt, *((output_stream(request.id), i) for i in range(arrival.output_tokens or 1)))


class EngineFailsError(Exception):
    """The engine's scheduler raises: a prompt is longer than a step."""


def cut(row: Row, config: TensorrtLlmConfig) -> None:
    """In the C++ runtime: takes generated tokens away until the paused row can be computed in one step again."""
    if config.backend == "pytorch":
        return
    while row.known > config.max_num_tokens and not config.enable_chunked_prefill:
        row.generated -= 1


def micro_batch(
    config: TensorrtLlmConfig, block_size: int, fitting: list[R], of_decode: int = 1
) -> list[tuple[R, int]]:
    """The second stage of TensorRT-LLM: which of `fitting` run, with how many tokens, in batch order."""
    contexts: list[tuple[R, int]] = []
    decodes: list[tuple[R, int]] = []
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
        contexts = _parted(_chunks(config, block_size, contexts, config.max_num_tokens - used))
    return contexts + decodes


def _parted(contexts: list[tuple[R, int]]) -> list[tuple[R, int]]:
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
    config: TensorrtLlmConfig, block_size: int, contexts: list[tuple[R, int]], capacity: int
) -> list[tuple[R, int]]:
    if sum(n for _, n in contexts) <= capacity:
        return contexts
    sizes = [0] * len(contexts)
    if config.context_chunking_policy == "EQUAL_PROGRESS":
        progress = True
        while progress:
            progress = False
            for i, (_, lacking) in enumerate(contexts):
                more = min(block_size, lacking - sizes[i])
                if more and sum(sizes) + more <= capacity:
                    sizes[i] += more
                    progress = True
    else:
        for i, (_, lacking) in enumerate(contexts):
            n = min(lacking, capacity)
            sizes[i] = n if n == lacking else n // block_size * block_size
            capacity -= sizes[i]
    return [(row, n) for (row, _), n in zip(contexts, sizes, strict=True) if n]
