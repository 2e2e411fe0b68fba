"""SGLang with HiCache told again as plain loops over lists: which nodes are on the GPU, which on the host, and locked.

Slow on purpose. Steps are those of `tests/plain/sglang.py`, of an engine without overlap; layers are waited for one by
one.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any

from batchsim.kernel.types import Arrival
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from tests.plain.sglang import CLIP, Memory, Naive, Node, Row, Tokens
from tests.plain.systems import Step


@dataclass(eq=False)
class Place(Node):
    """A node of the tree: where its pages are, how many requests inserted it, since when it is in both places, and the
    load on its way into it."""

    on_gpu: bool = True
    on_host: bool = False
    hits: int = 0
    both: int = 0
    loading: int = 0


class Tiers(Memory):
    """The pages of the GPU and of the host. `copying` are the nodes locked for copies, `gathered` those to be stored,
    `written` the pages of those written back."""

    def __init__(self, blocks: int, page: int, host: int, policy: str) -> None:
        super().__init__(blocks, page, caches=True)
        self.host = host
        self.back = policy == "write_back"
        self.threshold = {"write_through": 1, "write_through_selective": 2, "write_back": 1 << 40}[policy]
        self.copying: list[Place] = []
        self.gathered: list[Place] = []
        self.written: list[int] = []
        self.inserted: dict[Row, int] = {}
        self.events = self.loads = self.beyond = 0
        self.end: Any = None

    @property
    def places(self) -> list[Any]:
        return list(self.nodes)

    def free(self) -> int:
        own = sum(row.pages - self.size(self.path(row.node)) for row in self.holders)
        return self.blocks - self.size([node for node in self.places if node.on_gpu]) - own

    def locked(self) -> list[Any]:
        ends = [row.node for row in self.holders] + list(self.copying)
        return [node for end in ends for node in self.path(end)]

    def unlocked(self) -> list[Any]:
        locked = self.locked()
        return [node for node in self.places if node not in locked and node.on_gpu]

    def children(self, node: Any) -> list[Any]:
        return [other for other in self.places if other.parent is node]

    def gpu_leaves(self) -> list[Any]:
        return [node for node in self.unlocked() if not any(child.on_gpu for child in self.children(node))]

    def evict(self, pages: int) -> None:
        while self.free() < pages and (leaves := self.gpu_leaves()):
            leaf = min(leaves, key=lambda node: node.used)
            if self.back and not leaf.on_host and self.to_host(leaf):
                self.written.append(self.size([leaf]))
                self.now_both(leaf)
            if leaf.on_host:
                leaf.on_gpu = False
            else:
                self.drop_node(leaf)

    def drop_node(self, node: Any) -> None:
        for child in self.children(node):
            self.drop_node(child)
        self.nodes.remove(node)

    def host_free(self) -> int:
        return self.host - self.size([node for node in self.places if node.on_host])

    def to_host(self, node: Any) -> bool:
        """Has `node` on the host; False if there is no room."""
        lacking = self.size([node]) - self.host_free()
        if lacking > 0 and self.evict_host(lacking) < lacking:
            return False
        node.on_host = True
        return True

    def evict_host(self, pages: int) -> int:
        freed = 0
        for spare in (True, False) if self.back else ():
            for node in sorted([node for node in self.places if node.both], key=lambda node: node.both):
                if freed >= pages:
                    break
                place: Any = node
                if not (place.on_gpu and place.on_host):
                    place.both = 0
                elif not place.loading and not (spare and place in self.gpu_leaves()):
                    freed += self.size([place])
                    place.on_host, place.both = False, 0
        while freed < pages:
            locked = self.locked()
            leaves: list[Any] = [
                node for node in self.places if not node.on_gpu and node not in locked and not self.children(node)
            ]
            if not leaves:
                break
            leaf = min(leaves, key=lambda node: node.used)
            freed += self.size([leaf])
            self.nodes.remove(leaf)
        return freed

    def now_both(self, node: Any) -> None:
        self.events += 1
        node.both = node.both or self.events

    def split(self, node: Any, at: int) -> Place:
        upper = Place(node.tokens[:at], node.parent, self.clock, node.on_gpu, node.on_host, node.hits)
        upper.loading = node.loading
        if upper.on_gpu and upper.on_host and not upper.loading:
            self.now_both(upper)
        node.tokens, node.parent = node.tokens[at:], upper
        self.nodes.append(upper)
        return upper

    def walk(self, tokens: Tokens) -> tuple[Any, int]:
        """What the GPU has; `end` and `beyond` are of what is only on the host behind that."""
        at, matched = self.find(tokens)
        self.end, self.beyond = at, 0
        while at is not None and not at.on_gpu:
            self.beyond += len(at.tokens)
            at = at.parent
        return at, matched - self.beyond

    def insert(self, row: Row, computed: int | None = None) -> None:
        tokens = row.tokens[: row.computed if computed is None else computed]
        keys = self.keys(tokens)
        node, matched = self.find(tokens)
        for place in self.path(node):
            if not place.on_gpu:
                place.on_gpu = True
                self.now_both(place)
        if matched < len(keys):
            self.clock += 1
            node = Place(keys[matched:], node, self.clock)
            self.nodes.append(node)
        end = 0
        for place in reversed(self.path(node)):
            end += len(place.tokens)
            if end <= self.inserted.get(row, 0):
                continue
            place.hits += 1
            if place.hits >= self.threshold and not place.on_host:
                self.store(place)
        self.inserted[row] = max(self.inserted.get(row, 0), len(keys))
        if len(self.keys(row.prompt)) < len(keys):
            self.find(row.prompt)
        row.node = node

    def store(self, node: Any) -> None:
        """Stores `node` and all above it that are not stored, the root's first."""
        for place in [each for each in reversed(self.path(node)) if not each.on_host]:
            if not self.to_host(place):
                return
            self.copying.append(place)
            self.gathered.append(place)

    def load(self, row: Row, end: Any) -> int:
        """Gives what ends with `end` on the host pages on the GPU; the number of the load, 0 without room."""
        path = [place for place in self.path(end) if not place.on_gpu]
        pages = self.size(path)
        self.copying.append(end)
        self.evict(pages)
        if self.free() < pages:
            self.copying.remove(end)
            return 0
        self.loads += 1
        for place in path:
            place.on_gpu, place.loading = True, self.loads
        row.node = end
        row.pages += pages
        return self.loads

    def loaded(self, end: Any, number: int) -> None:
        for place in self.path(end):
            if place.loading == number:
                place.loading = 0
                self.now_both(place)
        self.copying.remove(end)

    def drop(self, row: Row) -> None:
        super().drop(row)
        self.inserted.pop(row, None)


class NaiveHiCache(Naive):
    """One run beside a host of `host` pages; a copy takes `fixed_ns` and `load_ns` or `store_ns` a page, a step has
    `layers`."""

    def __init__(
        self,
        config: SglangConfig,
        arrivals: list[Arrival],
        blocks: int,
        page: int,
        max_model_len: int,
        *,
        host: int,
        policy: str,
        fixed_ns: int,
        load_ns: int,
        store_ns: int,
        layers: int,
    ) -> None:
        super().__init__(config, arrivals, blocks, page, max_model_len)
        self.memory: Any = Tiers(blocks, page, host, policy)
        self.fixed_ns, self.load_ns, self.store_ns, self.layers = fixed_ns, load_ns, store_ns, layers
        self.loading_ns = self.storing_ns = 0  # when each link is free
        self.stores: list[tuple[int, list[Place]]] = []
        self.loads: list[tuple[int, list[tuple[Any, int]]]] = []
        self.loaded: dict[int, int] = {}  # tokens by request
        self.batch_loads: list[tuple[Any, int, int]] = []

    def submit(self) -> None:
        nodes, self.memory.gathered = self.memory.gathered, []
        if nodes:
            self.storing_ns = max(self.storing_ns, self.now_ns) + self.fixed_ns
            self.storing_ns += self.store_ns * self.memory.size(nodes)
            self.stores.append((self.storing_ns, nodes))

    def take_over(self) -> bool:
        over = False
        for end_ns, nodes in list(self.stores):
            if end_ns <= self.now_ns:
                over = True
                self.stores.remove((end_ns, nodes))
                for node in nodes:
                    self.memory.copying.remove(node)
        for end_ns, ends in list(self.loads):
            if end_ns <= self.now_ns:
                over = True
                self.loads.remove((end_ns, ends))
                for end, number in ends:
                    self.memory.loaded(end, number)
        return over

    def write_back(self) -> int:
        """When the host goes on."""
        still_ns = self.now_ns
        for pages in self.memory.written:
            still_ns = self.storing_ns = max(still_ns, self.storing_ns) + self.fixed_ns + self.store_ns * pages
        self.memory.written = []
        return still_ns

    def beside(self, num_pages: int, step_ns: int) -> int:
        """When a step that begins now is over, each layer of which waits for its part of the load."""
        begin_ns = max(self.loading_ns, self.now_ns) + self.fixed_ns
        self.loading_ns = begin_ns + self.load_ns * num_pages
        at = Fraction(self.now_ns)
        for layer in range(1, self.layers + 1):
            at = max(at, begin_ns + Fraction(self.load_ns * num_pages * layer, self.layers))
            at += Fraction(step_ns, self.layers)
        self.loads.append((self.loading_ns, [(end, number) for end, number, _ in self.batch_loads]))
        return ceil(at)

    def steps(self) -> list[Step]:
        memory = self.memory
        while True:
            self.arrive()
            self.take_over()
            work, is_prefill = self.called()
            if not work and not self.retracted:
                self.submit()
                if self.take_over():
                    work, is_prefill = self.called()
            still_ns = self.write_back()
            if not work:
                self.last = type(self.last)()
                if self.retracted:
                    ids = [row.id for row in self.retracted]
                    self.log.append((self.now_ns, [], ids, memory.available() // self.page))
                    self.retracted = []
                    self.now_ns = still_ns + 10
                    self.submit()
                    continue
                times = [row.arrival_ns for row in self.to_come[:1]]
                times += [end for end, _ in [*self.stores, *self.loads]]
                times += [still_ns] if still_ns > self.now_ns else []
                if not times:
                    if self.waiting:
                        raise AssertionError("waits for ever")
                    return self.log
                if not (self.waiting or self.running.rows or self.chunked):
                    self.ratio = self.start
                self.now_ns = min(times)
                continue
            ids = [(row.id, n) for row, n in work]
            self.log.append((self.now_ns, ids, [row.id for row in self.retracted], memory.available() // self.page))
            self.retracted = []
            self.now_ns = still_ns
            step_ns = 10 + sum(2 if row in self.riding else n for row, n in work)
            if is_prefill and self.batch_loads:
                pages = sum(tokens for _, _, tokens in self.batch_loads) // self.page
                self.now_ns = self.beside(pages, step_ns)
            else:
                self.now_ns += step_ns
            for row, n in work:
                self.advance(row, n)
            self.submit()
            self.last = self.batch if is_prefill else type(self.last)()

    def called(self) -> tuple[list[tuple[Row, int]], bool]:
        work, is_prefill = self.next_batch()
        if not work and not self.running.rows and not self.retracted:
            work = self.prefill()  # nothing runs that could make room
            if work:
                self.batch = type(self.last)([row for row, _ in work])
            return work, bool(work)
        return work, is_prefill

    def prefill(self) -> list[tuple[Row, int]]:
        self.batch_loads = []
        return super().prefill()

    def sort(self) -> None:
        if self.config.schedule_policy != "lpm":
            super().sort()
            return
        later: set[Row] = set()
        hits: dict[Row, int] = {}
        first: list[Tokens] = []
        for row in self.waiting:
            _, on_gpu = self.memory.walk(row.tokens)
            hits[row] = min(on_gpu + self.memory.beyond, row.known - 1)
            if on_gpu > 32:
                continue
            if any(row.tokens[:32] == other[:32] and len(row.tokens) >= 32 for other in first):
                later.add(row)
            else:
                first.append(row.tokens)
        self.waiting.sort(key=lambda row: (row in later, row not in later and -hits[row]))

    def add(self, row: Row) -> str:
        end, beyond = self.memory.end, self.memory.beyond
        lacking = row.known - row.computed
        if lacking + min(row.cap - row.generated, CLIP) + self.page >= self.left():
            return "no tokens"
        for loaded in (beyond, 0):
            tokens = self.ceil(lacking - loaded)
            if self.config.chunked_prefill_size <= 0 and self.work and tokens >= self.left_input:
                return "other"
            n = lacking - loaded
            if tokens > self.left_chunk:
                n = self.left_chunk // self.page * self.page
                if n < 1 or self.chunked is not None:
                    return "other"
            number = self.memory.load(row, end) if loaded >= 10 else 0
            if number:
                self.batch_loads.append((end, number, loaded))
                self.loaded[row.id] = self.loaded.get(row.id, 0) + loaded
                row.computed += loaded
            if number or not loaded:
                self.take(row, n)
                return "added"
        raise AssertionError("the second time nothing is loaded")

    def decode(self) -> bool:
        rows = self.running.rows
        self.memory.evict(self.due(rows))
        if self.spares(rows) and self.due(rows) > self.memory.free():
            return False  # it waits for pages that are locked
        return super().decode()

    def spares(self, stay: list[Row]) -> bool:
        copying = self.stores or self.loads or self.memory.gathered
        return len(stay) == 1 and not self.chunked and bool(copying)
