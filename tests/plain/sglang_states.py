"""SGLang with a pool of states told again as plain loops: nodes with a state in a list by use.

As `tests/plain/sglang.py`; written from the rules of SGLang 0.5.23 (components/mamba.py, allocation.py,
schedule_batch.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from batchsim.base.kv_pools import KvPools
from batchsim.kernel.types import Arrival
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from tests.plain.sglang import Memory, Naive, Node, Row
from tests.plain.sglang_pools import TwoPools


@dataclass
class Slots:
    """Of a row: its slots; tokens at the state that is to be put in next; its junction; where its answer began."""

    held: int = 0
    tracked: int | None = None
    junction: int | None = None
    started: int = 0


class States(TwoPools):
    """`by_use`: the nodes with a state at their end, the least recently used first."""

    def __init__(self, blocks: int, page: int, states: int, buffers: int, chunk: int, tracked: int) -> None:
        super().__init__(blocks, page, KvPools(2, page), caches=True)
        self.states, self.buffers, self.chunk = states, buffers, chunk
        self.grid, self.every = max(chunk, page), lcm(tracked, page)
        self.slots: dict[Row, Slots] = {}

    def free_states(self) -> int:
        return self.states - len(self.by_use) - sum(slots.held for slots in self.slots.values())

    def loose(self) -> list[Node]:
        needed = [row.node for row in self.holders]
        return [node for node in self.by_use if node not in needed]

    def free_windows(self) -> int:
        return 1 << 40  # there is no such pool

    def evict_states(self, count: int) -> None:
        while self.free_states() < count and self.loose():
            node = self.loose()[0]
            self.by_use.remove(node)
            if node in self.unlocked() and all(other.parent is not node for other in self.nodes):
                self.nodes.remove(node)

    # ---- the tree

    def split(self, node: Node, at: int) -> Node:
        return Memory.split(self, node, at)

    def use(self, node: Node | None) -> None:
        if node in self.by_use:
            self.by_use.remove(node)
            self.by_use.append(node)

    def is_whole(self, node: Node) -> bool:
        return node in self.by_use

    # ---- rows

    def copy(self, row: Row) -> None:
        """Makes room for a copy of the state that `row` found."""
        if row.node is not None:
            self.holders.append(row)
            row.pages = self.size(self.path(row.node))
            self.evict_states(1)
            self.holders.remove(row)
            row.pages = 0

    def hold(self, row: Row, hit: int) -> None:
        self.holders.append(row)
        row.computed, row.pages = hit, hit // self.page
        walked = self.walked // self.grid * self.grid
        self.slots[row] = Slots(1 if hit else 0, junction=walked if walked > hit else None)

    def drop(self, row: Row) -> None:
        self.holders.remove(row)
        row.node, row.pages, row.computed = None, 0, 0
        del self.slots[row]

    def start(self, work: list[tuple[Row, int]]) -> None:
        whole = 1 + self.buffers
        self.evict_states(sum(whole - self.slots[row].held for row, _ in work))
        for row, n in work:
            slots, grid, begin = self.slots[row], self.grid, row.computed
            slots.held, slots.started = whole, begin + n
            if self.buffers and n >= grid:
                slots.tracked = begin + n // grid * grid
                reach = begin + n if n // self.chunk * self.chunk == n // grid * grid else slots.tracked + 1
                at = slots.junction
                if at is not None and begin < at < reach and (at - begin) % grid == 0:
                    slots.tracked = at

    def insert(self, row: Row, computed: int | None = None) -> None:
        slots, known = self.slots[row], row.computed if computed is None else computed
        length = known
        if self.buffers and row.done and slots.tracked is None:
            length = known // self.every * self.every
            length = length if length > slots.started else 0
        elif self.buffers:
            length = slots.tracked or 0
        if not row.done:
            slots.tracked = None
        if length == 0:
            return
        if not row.done:
            self.evict_states(1)
        keys = self.keys(row.tokens[:length])
        at, matched = self.descend(keys)
        self.touch(at)
        if matched < len(keys):
            self.clock += 1
            at = Node(keys[matched:], at, self.clock)
            self.nodes.append(at)
        row.node = at
        if at is None:
            return
        self.clock += 1
        at.used = self.clock
        if at in self.by_use:
            self.use(at)
        else:
            self.by_use.append(at)
            slots.held -= 1 if row.done else 0


class NaiveStates(Naive):
    """One run with a pool of states, in a radix cache."""

    def __init__(
        self,
        config: SglangConfig,
        arrivals: list[Arrival],
        blocks: int,
        page: int,
        states: States,
        max_model_len: int,
    ) -> None:
        super().__init__(config, arrivals, blocks, page, max_model_len)
        self.memory = self.own = states
        self.slots = min(self.slots, states.states // (3 + states.buffers))
        self.free_states: list[int] = []  # at each step, those that can be evicted among them

    def note(self) -> None:
        self.free_states.append(self.own.free_states() + len(self.own.loose()))

    def matched(self, row: Row, hit: int) -> None:
        self.own.copy(row)

    def take_pages(self) -> None:
        self.own.start(self.work)
        super().take_pages()
