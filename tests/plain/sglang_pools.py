"""SGLang with a pool of windows told again as plain loops: nodes in a list by use, rows that know where theirs begin.

As `tests/plain/sglang.py`; written from the rules of SGLang 0.5.23 (prefill_budget.py, common.py, components/swa.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from batchsim.base.kv_pools import KvPools
from batchsim.kernel.types import Arrival
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from tests.plain.sglang import CLIP, Memory, Naive, Node, Row, Tokens


@dataclass
class Mark:
    """Of a row: tokens before which its windows have gone, and before which all is the tree's; where its lock on
    windows begins; the junction that it is to leave a window at; its decode steps."""

    gone: int = 0
    shared: int = 0
    locked_from: int = 0
    junction: int | None = None
    decoded: int = 0


class TwoPools(Memory):
    """`by_use`: the nodes whose window is there, the least recently used first."""

    def __init__(self, blocks: int, page: int, pools: KvPools, *, caches: bool) -> None:
        super().__init__(blocks, page, caches=caches)
        assert pools.window is not None and pools.window_tokens is not None, "the pools are of windows"
        self.window_blocks, self.reach, self.every = pools.window_tokens // page, pools.window - 1, pools.slide_every
        self.by_use: list[Node] = []
        self.marks: dict[Row, Mark] = {}
        self.walked = 0

    # ---- counts

    def end(self, node: Node | None) -> int:
        return sum(len(each.tokens) for each in self.path(node))

    def free_windows(self) -> int:
        own = sum(row.pages - max(mark.gone, mark.shared) // self.page for row, mark in self.marks.items())
        return self.window_blocks - self.size(self.by_use) - own

    def loose(self) -> list[Node]:
        """The nodes whose window nobody needs."""
        locked = [
            node
            for row, mark in self.marks.items()
            for node in self.path(row.node)
            if self.end(node) > mark.locked_from
        ]
        return [node for node in self.by_use if node not in locked]

    def available_windows(self) -> int:
        return (self.free_windows() + self.size(self.loose())) * self.page

    def evict(self, pages: int) -> None:
        before = list(self.nodes)
        super().evict(pages)
        for node in before:
            if node not in self.nodes and node in self.by_use:
                self.by_use.remove(node)
        while self.free_windows() < pages and self.loose():
            node = self.loose()[0]
            self.by_use.remove(node)
            if node in self.unlocked() and all(other.parent is not node for other in self.nodes):
                self.nodes.remove(node)

    # ---- the tree

    def split(self, node: Node, at: int) -> Node:
        upper = super().split(node, at)
        if node in self.by_use:
            self.by_use.insert(self.by_use.index(node), upper)
        return upper

    def use(self, node: Node | None) -> None:
        covered, recent = 0, list[Node]()
        for each in self.path(node):
            if covered < self.reach + self.page and each in self.by_use:
                recent.append(each)
            covered += len(each.tokens)
        for each in reversed(recent):
            self.by_use.remove(each)
            self.by_use.append(each)

    def walk(self, tokens: Tokens) -> tuple[Node | None, int]:
        at, self.walked = self.descend(self.keys(tokens) if self.caches else ())
        while at is not None and not self.is_whole(at):
            at = at.parent
        self.touch(at)
        self.use(at)
        return at, self.end(at)

    def is_whole(self, node: Node) -> bool:
        """Whether a window before the end of `node`, or everything, is there."""
        covered = 0
        for each in self.path(node):
            if each not in self.by_use:
                return covered >= self.reach > 0 and covered > 0
            covered += len(each.tokens)
        return True

    def locked_from(self, node: Node | None) -> int:
        covered, start = 0, self.end(node)
        for each in self.path(node):
            if covered < self.reach:
                covered += len(each.tokens)
                start = self.end(each.parent)
        return start

    # ---- rows

    def hold(self, row: Row, hit: int) -> None:
        super().hold(row, hit)
        junction = self.walked if self.walked > hit else None
        self.marks[row] = Mark(0, hit, self.locked_from(row.node), junction)

    def drop(self, row: Row) -> None:
        super().drop(row)
        del self.marks[row]

    def slide(self, row: Row, before: int) -> None:
        """Gives back what the token behind `before` others does not need."""
        mark, page = self.marks[row], self.page
        if before - self.reach < mark.gone + 1:
            return
        kept = -(-max(self.reach, page) // page) * page if self.caches else self.reach
        mark.gone = max(mark.gone, mark.shared, before - kept) // page * page

    def insert(self, row: Row, computed: int | None = None) -> None:
        if not self.caches:
            return
        mark, tokens = self.marks[row], row.tokens[: row.computed if computed is None else computed]
        known = len(tokens)
        if mark.junction is not None and mark.shared < mark.junction <= known:
            tokens = tokens[: mark.junction]
        if not row.done:
            self.slide(row, len(tokens) - 1)
        keys = self.keys(tokens)
        self.clock += 1
        at: Node | None = None
        matched = 0
        while (child := self.child(at, keys[matched:])) is not None:
            child.used = self.clock
            same = self.alike(child, keys[matched:])
            node = child if same == len(child.tokens) else self.split(child, same)
            if node not in self.by_use and mark.shared < matched + same and mark.gone < matched + same:
                if mark.gone > matched:
                    self.split(node, mark.gone - matched)
                self.by_use.append(node)
            at, matched = node, matched + same
        if matched < len(keys):
            self.clock += 1
            at = Node(keys[matched:], at, self.clock)
            self.nodes.append(at)
            if mark.gone < len(keys):
                if mark.gone > matched:
                    self.split(at, mark.gone - matched)
                window = -(-self.reach // self.page) * self.page
                if len(at.tokens) > window:
                    self.by_use.append(self.split(at, len(at.tokens) - window))
                self.by_use.append(at)
        self.use(at)
        row.node = at
        mark.shared, mark.locked_from = len(keys), self.locked_from(at)
        if mark.junction is not None and len(keys) >= mark.junction:
            mark.junction = None
            if not row.done:
                self.slide(row, known - 1)


class NaivePools(Naive):
    """One run with a pool of windows."""

    def __init__(
        self, config: SglangConfig, arrivals: list[Arrival], blocks: int, page: int, pools: KvPools, max_model_len: int
    ) -> None:
        super().__init__(config, arrivals, blocks, page, max_model_len)
        self.memory = self.two = TwoPools(blocks, page, pools, caches=not config.disable_radix_cache)
        self.offset = 0
        self.windows: list[int] = []  # pages available at each step

    def note(self) -> None:
        self.windows.append(self.two.available_windows() // self.page)

    def fits(self, pages: int) -> bool:
        return pages <= self.two.free() and pages <= self.two.free_windows()

    def grow(self) -> bool:
        rows, memory = self.running.rows, self.two
        memory.evict(self.due(rows))
        if not self.fits(self.due(rows)):
            return False
        for row in rows:
            mark = memory.marks[row]
            if mark.decoded >= 1 and row.known - 1 - memory.reach >= mark.gone + memory.every:
                memory.slide(row, row.known - 1)
            mark.decoded += 1
        memory.evict(len(rows))
        for row in rows:
            row.pages = self.ceil(row.computed + 1) // self.page
        return True

    # ---- prefill

    def prefill(self) -> list[tuple[Row, int]]:
        self.offset = 0
        return super().prefill()

    def take_pages(self) -> None:
        for row, _ in self.work:
            if row.computed and not self.two.caches:
                self.two.slide(row, row.computed)
        super().take_pages()

    def left_windows(self) -> int:
        return self.two.available_windows() - self.offset

    def has_kv(self) -> bool:
        return super().has_kv() and self.left_windows() > 0

    def need(self, tokens: int, outputs: int) -> int:
        reach = self.two.reach
        return max(min(tokens, self.left_chunk) - reach, 0) + min(tokens + outputs, reach) + self.page

    def take(self, row: Row, n: int) -> None:
        is_last = row.computed + n == row.known
        self.offset += self.need(self.ceil(n), min(row.cap, CLIP) if is_last else 0)
        super().take(row, n)

    def chunk_limit(self) -> int:
        return min(self.left_chunk, int(self.left()), self.left_windows() - self.page)

    def add(self, row: Row) -> str:
        lacking, outputs = row.known - row.computed, min(max(row.cap - row.generated, 0), CLIP)
        tokens, chunk = self.ceil(lacking), self.left_chunk
        if row.ignore_eos and not self.memory.caches:
            if (
                tokens + self.page > min(self.left(), self.left_now())
                or self.need(lacking, outputs) > self.left_windows()
            ):
                return "no tokens"
            if lacking > chunk and self.chunked is not None:
                return "other"
            self.take(row, min(lacking, chunk))
            return "added"
        if lacking + outputs + self.page >= self.left():
            return "no tokens"
        need, is_cut = self.need(tokens, outputs), self.config.chunked_prefill_size > 0
        if need >= self.left_windows():
            room = (self.left_windows() - self.need(0, outputs)) // self.page * self.page
            if need < self.two.window_blocks * self.page or not is_cut or room <= 0:
                return "no tokens"
            chunk = min(chunk, room)
        if not is_cut and self.work and tokens >= self.left_input:
            return "other"
        if tokens <= chunk:
            self.take(row, lacking)
            return "added"
        n = chunk // self.page * self.page
        if n < 1 or self.chunked is not None:
            return "other"
        self.take(row, n)
        return "added"
