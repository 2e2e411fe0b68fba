"""SGLang told again as plain loops over lists, with a batch object that owns its flag and a tree of explicit tokens.

Slow on purpose: to compare with the policy on random workloads. Nobody cancels. Steps take 10 ns, 1 more a prompt
token, 2 a decode.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from batchsim.kernel.tokens import output_stream
from batchsim.kernel.types import Arrival
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from tests.plain.systems import Step

CLIP = 4096
Tokens = tuple[tuple[int, int], ...]
"""(stream, index) of each."""


@dataclass(eq=False)
class Node:
    """A run of whole pages of the tree."""

    tokens: Tokens = ()
    parent: Node | None = None
    used: int = 0


@dataclass(eq=False)
class Row:
    """One request. `seen` are its tokens and its cached ones when last looked at; `node` ends what it locks."""

    id: int
    arrival_ns: int
    prompt: Tokens
    output: int
    cap: int
    priority: int
    ignore_eos: bool
    entered: int = 0
    computed: int = 0
    generated: int = 0
    pages: int = 0
    node: Node | None = None
    seen: tuple[int, int] = (0, 0)

    @property
    def known(self) -> int:
        return len(self.prompt) + self.generated

    @property
    def tokens(self) -> Tokens:
        return (*self.prompt, *[(output_stream(self.id), i) for i in range(self.generated)])

    @property
    def done(self) -> bool:
        return self.generated >= min(self.output, max(self.cap, 1))


@dataclass(eq=False)
class Group:
    """SGLang's batch object: its rows, and whether it is full."""

    rows: list[Row] = field(default_factory=list[Row])
    full: bool = False


class Memory:
    """Pages: the tree's and those that rows have for themselves."""

    def __init__(self, blocks: int, page: int, *, caches: bool) -> None:
        self.blocks, self.page, self.caches = blocks, page, caches
        self.nodes: list[Node] = []
        self.holders: list[Row] = []
        self.clock = 0

    def path(self, node: Any) -> list[Any]:
        found: list[Any] = []
        while node is not None:
            found.append(node)
            node = node.parent
        return found

    def size(self, nodes: list[Node]) -> int:
        return sum(len(node.tokens) for node in nodes) // self.page

    def free(self) -> int:
        own = sum(row.pages - self.size(self.path(row.node)) for row in self.holders)
        return self.blocks - self.size(self.nodes) - own

    def unlocked(self) -> list[Node]:
        locked = [node for row in self.holders for node in self.path(row.node)]
        return [node for node in self.nodes if node not in locked]

    def available(self) -> int:
        """Tokens that are free or can be evicted."""
        return (self.free() + self.size(self.unlocked())) * self.page

    def evict(self, pages: int) -> None:
        """Until so many are free, or there is nothing to evict."""
        while self.free() < pages:
            leaves = [leaf for leaf in self.unlocked() if all(node.parent is not leaf for node in self.nodes)]
            if not leaves:
                return
            self.nodes.remove(min(leaves, key=lambda leaf: leaf.used))

    def split(self, node: Any, at: int) -> Any:
        """Parts `node` behind its first `at` tokens, whose node is returned."""
        upper = Node(node.tokens[:at], node.parent, self.clock)
        node.tokens, node.parent = node.tokens[at:], upper
        self.nodes.append(upper)
        return upper

    def child(self, at: Node | None, rest: Tokens) -> Node | None:
        """The child of `at` that begins with the first page of `rest`."""
        found = [node for node in self.nodes if node.parent is at and node.tokens[: self.page] == rest[: self.page]]
        return found[0] if rest and found else None

    def alike(self, node: Node, rest: Tokens) -> int:
        """Tokens of `node`, in whole pages, with which `rest` begins."""
        page, n = self.page, 0
        while n < len(node.tokens) and node.tokens[n : n + page] == rest[n : n + page]:
            n += page
        return n

    def descend(self, keys: Tokens) -> tuple[Any, int]:
        """The end of the part of `keys` that is in the tree, and its length."""
        self.clock += 1
        at: Node | None = None
        matched = 0
        while (child := self.child(at, keys[matched:])) is not None:
            same = self.alike(child, keys[matched:])
            matched += same
            if same < len(child.tokens):
                child.used = self.clock
                return self.split(child, same), matched
            at = child
        return at, matched

    def touch(self, node: Node | None) -> None:
        """Takes note that the path to `node` is used."""
        for each in self.path(node):
            each.used = self.clock

    def find(self, tokens: Tokens) -> tuple[Any, int]:
        """The end of the part of `tokens` that is in the tree, which is used by that, and its length."""
        node, matched = self.descend(self.keys(tokens) if self.caches else ())
        self.touch(node)
        return node, matched

    def walk(self, tokens: Tokens) -> tuple[Node | None, int]:
        """The end of the cached part of `tokens`, which is used by that, and its length."""
        return self.find(tokens)

    def keys(self, tokens: Any) -> Any:
        """What the whole pages of `tokens` are found by."""
        return tokens[: len(tokens) // self.page * self.page]

    def insert(self, row: Row, computed: int | None = None) -> None:
        if not self.caches:
            return
        tokens = row.tokens[: row.computed if computed is None else computed]
        keys = self.keys(tokens)
        node, matched = self.walk(tokens)
        if matched < len(keys):
            self.clock += 1
            node = Node(keys[matched:], node, self.clock)
            self.nodes.append(node)
        if len(self.keys(row.prompt)) < len(keys):
            self.walk(row.prompt)
        row.node = node

    def hold(self, row: Row, hit: int) -> None:
        self.holders.append(row)
        row.computed, row.pages = hit, hit // self.page

    def drop(self, row: Row) -> None:
        self.holders.remove(row)
        row.node, row.pages, row.computed = None, 0, 0


class Naive:
    """One run of `arrivals`. A decode computes `width` tokens in a step of decodes alone."""

    width = 1

    def __init__(
        self, config: SglangConfig, arrivals: list[Arrival], blocks: int, page: int, max_model_len: int
    ) -> None:
        self.config, self.page, self.pool = config, page, blocks * page
        self.memory = Memory(blocks, page, caches=not config.disable_radix_cache)
        self.limit = min(max_model_len, self.pool)
        self.start = self.ratio = min(0.7 * config.schedule_conservativeness, 1.0)
        asked = config.max_running_requests or max(min(self.pool * 512 // max_model_len, 4096), 2048)
        self.slots = min(asked, self.pool // 2)
        self.preempts = config.enable_priority_scheduling and not config.disable_priority_preemption
        self.mixes = config.enable_mixed_chunk and config.chunked_prefill_size > 0
        self.to_come = [self.row(arrival) for arrival in arrivals]
        self.waiting: list[Row] = []
        self.entries = self.passes = self.now_ns = 0
        self.running, self.last = Group(), Group()
        self.chunked: Row | None = None
        self.retracted: list[Row] = []
        self.log: list[Step] = []

    def row(self, arrival: Arrival) -> Row:
        r = arrival.request
        segments = r.tokens.segments if r.tokens is not None else ((-1 - r.id, 0, r.prompt_tokens),)
        prompt = tuple((stream, start + i) for stream, start, length in segments for i in range(length))
        output = r.max_output_tokens if r.ignore_eos else arrival.output_tokens or 1
        return Row(r.id, r.arrival_ns, prompt, output, r.max_output_tokens, r.priority, r.ignore_eos)

    def ceil(self, tokens: int) -> int:
        return -(-tokens // self.page) * self.page

    # ---- the loop

    def steps(self) -> list[Step]:
        memory = self.memory
        while True:
            self.arrive()
            work, is_prefill = self.next_batch()
            self.alone = not is_prefill
            if not work:
                self.last = Group()
                if self.retracted:
                    continue
                if self.waiting:
                    self.waiting.pop(0)  # it would wait for ever
                    continue
                if not self.to_come:
                    return self.log
                self.ratio = self.start
                self.now_ns = self.to_come[0].arrival_ns
                continue
            ids = [(row.id, n) for row, n in work]
            self.log.append((self.now_ns, ids, [row.id for row in self.retracted], memory.available() // self.page))
            self.note()
            self.retracted = []
            self.now_ns += 10 + sum(2 if row in self.riding else n for row, n in work)
            for row, n in work:
                self.advance(row, n)
            self.last = self.batch if is_prefill else Group()

    def arrive(self) -> None:
        for row in [row for row in self.to_come if row.arrival_ns <= self.now_ns]:
            self.to_come.remove(row)
            self.enter(row)

    def note(self) -> None:
        """Called with each step."""

    def enter(self, row: Row) -> None:
        prompt = len(row.prompt)
        if prompt >= self.limit - 6:
            return
        most = min(self.limit - 2 - prompt, self.pool - self.ceil(prompt) - self.page - 1, self.most_output(prompt))
        row.cap = max(min(row.cap, most), 0)
        tokens = self.ceil(prompt) + 1 if row.ignore_eos and not self.memory.caches else prompt
        if tokens + row.cap + self.page < self.pool:
            self.push(row)

    def most_output(self, prompt: int) -> int:
        return self.pool

    def push(self, row: Row) -> None:
        self.entries += 1
        row.entered = self.entries
        self.waiting.append(row)

    def advance(self, row: Row, n: int) -> None:
        memory = self.memory
        row.computed += n
        if row is self.chunked:
            return  # SGLang puts it into the tree when next asked
        row.generated += 1
        if row.done or row not in self.riding:
            memory.insert(row)
        if row.done:
            memory.drop(row)

    def next_batch(self) -> tuple[list[tuple[Row, int]], bool]:
        """The work of the next step, in batch order, and whether any of it is a prefill."""
        last = self.last
        if self.chunked is not None and self.chunked in last.rows:
            self.memory.insert(self.chunked)
        stay = [row for row in last.rows if not row.done and row is not self.chunked]
        if len(stay) < len(last.rows):
            self.running.full = False
        last.rows = stay
        if stay and not self.running.rows:
            self.running = last
        else:
            self.running.rows += stay
        stay = [row for row in self.running.rows if not row.done]
        if len(stay) < len(self.running.rows):
            self.running.full = False
        self.running.rows = stay
        self.riding: list[Row] = []
        work = self.prefill()
        if work:
            self.batch = Group([row for row, _ in work])
            if self.mixes and self.running.rows:
                self.take_off()
            if self.mixes and self.running.rows and self.grow():
                self.riding = self.running.rows
                for row in self.riding:
                    row.seen = (row.known, 0)
                self.batch.rows = self.batch.rows + self.riding
                work += [(row, 1) for row in self.riding]
                self.running = Group([], self.running.full)
            return work, True
        if not self.decode():
            return [], False
        self.riding = self.running.rows
        return [(row, self.width) for row in self.running.rows], False

    # ---- decode

    def take_off(self) -> bool:
        """Takes those off the running whose last token is surely on its way; whether there were any."""
        return False

    def due(self, rows: list[Row]) -> int:
        return sum(row.computed % self.page == 0 for row in rows)

    def fits(self, pages: int) -> bool:
        return pages <= self.memory.free()

    def grow(self) -> bool:
        rows, memory = self.running.rows, self.memory
        memory.evict(self.due(rows))
        if not self.fits(self.due(rows)):
            return False
        memory.evict(len(rows))
        for row in rows:
            row.pages = self.ceil(row.computed + 1) // self.page
        return True

    def decode(self) -> bool:
        """Lets the running decode; whether they do."""
        waits = self.take_off()
        if not self.running.rows:
            return False
        if self.grow():
            self.ratio = max(self.ratio - self.start * (1 - 0.14) / 600, self.start * 0.14)
            return True
        if waits:
            return False
        sign = -1 if self.config.schedule_low_priority_values_first else 1

        def worth(row: Row) -> tuple[int, int, int]:
            by_priority = self.config.retraction_policy == "priority"
            return sign * row.priority if by_priority else 0, row.generated, -len(row.prompt)

        stay = sorted(self.running.rows, key=worth, reverse=True)
        while not self.spares(stay):
            row = stay.pop()
            self.retract(row, len(stay))
            self.push(row)
            self.memory.evict(self.due(stay))
            if self.fits(self.due(stay)):
                break
        self.running.rows, self.running.full = stay, False
        generated = sum(row.generated for row in stay) + 20 * len(stay)
        self.ratio = min(generated / (sum(row.cap for row in stay) + 1), 1.0)
        return self.grow()

    def spares(self, stay: list[Row]) -> bool:
        """Whether no more than those that do not `stay` are retracted, though pages are short."""
        return False

    def retract(self, row: Row, num_left: int) -> None:
        self.memory.drop(row)
        self.memory.evict(self.ceil(20 * num_left) // self.page)
        self.retracted.append(row)
        row.seen = (row.seen[0], 0)

    def reserved(self, row: Row) -> float:
        return min(row.cap - row.generated, CLIP) * (1.0 if row.ignore_eos else self.ratio)

    # ---- prefill

    def prefill(self) -> list[tuple[Row, int]]:
        running, memory, config = self.running, self.memory, self.config
        if self.preempts or not running.rows:
            running.full = False
        if self.chunked is None:
            if running.full or not self.waiting:
                return []
            if len(running.rows) >= self.slots and not self.preempts:
                running.full = True
                return []
        self.sort()
        chunk = config.chunked_prefill_size
        riding = len(running.rows) if self.mixes else 0
        self.left_input = config.max_prefill_tokens - riding
        self.left_chunk = chunk - riding if chunk > 0 else 1 << 40
        self.spent = riding + sum([self.reserved(row) for row in running.rows])
        self.spent_now = riding
        self.work: list[tuple[Row, int]] = []
        self.ends: list[tuple[float, int]] | None = None
        victims = len(self.retracted)
        if self.chunked is not None and not self.go_on(self.chunked):
            return []
        for row in list(self.waiting):
            if self.has_kv() and min(self.left_input, self.left_chunk) <= 0:
                break
            if len(self.work) >= self.slots - len(running.rows):
                running.full = True
            if running.full and not (self.preempts and self.make_way(row)):
                break
            row.node, hit = memory.walk(row.tokens[:-1])
            row.seen = (row.known, hit)
            self.matched(row, hit)
            if config.prefill_max_requests is not None and len(self.work) >= config.prefill_max_requests:
                row.node = None
                break
            memory.hold(row, hit)
            verdict = self.add(row)
            if verdict == "added":
                self.waiting.remove(row)
                if self.has_kv():
                    continue
                verdict = "no tokens"
            else:
                memory.drop(row)
            if verdict == "no tokens":
                running.full = bool(self.work or running.rows)
            break
        for row in self.retracted[victims:]:
            self.push(row)
        self.take_pages()
        return self.work

    def matched(self, row: Row, hit: int) -> None:
        """Called with each look at a prefix that may be taken."""

    def take_pages(self) -> None:
        """Takes pages for the work."""
        spare = len(self.work) if self.page > 1 else 0
        self.memory.evict(self.ceil(sum(n for _, n in self.work)) // self.page + spare)
        for row, n in self.work:
            row.pages = self.ceil(row.computed + n) // self.page

    def has_kv(self) -> bool:
        """Whether any KV memory is left, of what is spoken for and of what is taken."""
        return self.left() > 0 and self.left_now() > 0

    def left(self) -> float:
        return self.memory.available() - self.spent

    def left_now(self) -> float:
        return self.memory.available() - self.spent_now

    def sort(self) -> None:
        """Puts the queue in order; or looks at its prefixes in every 32nd pass."""
        config, memory = self.config, self.memory
        if config.enable_priority_scheduling:
            sign = 1 if config.schedule_low_priority_values_first else -1
            self.waiting.sort(key=lambda row: (sign * row.priority, row.entered))
        looks = config.schedule_policy != "fcfs" and memory.caches
        if looks and (config.schedule_policy != "lpm" or len(self.waiting) <= 128):
            later: set[Row] = set()
            hits: dict[Row, int] = {}
            first: list[Tokens] = []
            for row in self.waiting:
                _, hits[row] = memory.walk(row.tokens)
                if hits[row] > 32:
                    continue
                if any(row.tokens[:32] == other[:32] and len(row.tokens) >= 32 for other in first):
                    later.add(row)
                else:
                    first.append(row.tokens)
            self.lacking = {row: max(row.known - min(hits[row], row.known - 1), 1) for row in self.waiting}
            if config.schedule_policy == "lpm":
                self.waiting.sort(key=lambda row: (row in later, row not in later and -min(hits[row], row.known - 1)))
            else:
                self.waiting.sort(key=lambda row: (row in later, self.lacking[row], row.entered))
        elif memory.caches and self.waiting:
            if self.passes % 32 == 0:
                for row in reversed(self.waiting[:128]):
                    memory.walk(row.tokens)
            self.passes += 1

    def take(self, row: Row, n: int) -> None:
        is_last = row.computed + n == row.known
        if not is_last:
            self.chunked = row
        elif row is self.chunked:
            self.chunked = None
        self.work.append((row, n))
        tokens = self.ceil(n)
        self.spent += tokens + self.page + (min(row.cap, CLIP) if is_last else 0)
        self.spent_now += tokens + self.page
        self.left_input -= tokens
        self.left_chunk -= tokens

    def chunk_limit(self) -> int:
        """The most tokens of the chunk of a prompt that goes on."""
        limit = min(self.left_chunk, int(self.left()))
        return self.left_chunk if limit <= 0 else limit

    def go_on(self, row: Row) -> bool:
        limit = self.chunk_limit()
        lacking = row.known - row.computed
        if self.config.schedule_policy == "shortest-prefill-first" and self.left_chunk >= 2 * self.page:
            kept = 0
            for other in self.waiting:
                need = self.ceil(self.lacking[other])
                if self.lacking[other] >= lacking or kept + need > self.left_chunk - self.page:
                    break
                kept += need
            if kept:
                limit = min(limit, (self.left_chunk - kept) // self.page * self.page)
        room = row.pages * self.page + self.memory.available() - row.computed
        n = min(lacking, limit, room)
        if n < 1:
            return False
        self.take(row, n)
        return True

    def add(self, row: Row) -> str:
        """Adds `row` to the work: "added", "no tokens" of KV memory, or "other" reasons to stop."""
        lacking = row.known - row.computed
        tokens = self.ceil(lacking)
        if row.ignore_eos and not self.memory.caches:
            need = tokens + self.page
            if need > min(self.left(), self.left_now()) or not self.lasts(row, self.left_now() - need):
                return "no tokens"
            if lacking > self.left_chunk and self.chunked is not None:
                return "other"
            self.take(row, min(lacking, self.left_chunk))
            return "added"
        if lacking + min(row.cap - row.generated, CLIP) + self.page >= self.left():
            return "no tokens"
        if self.config.chunked_prefill_size <= 0 and self.work and tokens >= self.left_input:
            return "other"
        if tokens <= self.left_chunk:
            self.take(row, lacking)
            return "added"
        n = self.left_chunk // self.page * self.page
        if n < 1 or self.chunked is not None:
            return "other"
        self.take(row, n)
        return "added"

    def lasts(self, row: Row, left: float) -> bool:
        """Whether `left` tokens last until all end: those listed when first asked, and those asked for since."""

        def end(one: Row) -> tuple[float, int]:
            return one.cap * (1.0 if one.ignore_eos else self.ratio) - one.generated, one.known

        if self.ends is None:
            rows = [row, *self.running.rows, *[other for other, _ in self.work]]
            self.ends = sorted([end(one) for one in rows if end(one)[0] > 0], key=lambda pair: pair[0])
        elif end(row)[0] > 0:
            later = [i for i, (tokens, _) in enumerate(self.ends) if end(row)[0] <= tokens]
            self.ends.insert(later[0] if later else max(len(self.ends) - 1, 0), end(row))
        freed = 0
        for i, (tokens, held) in enumerate(self.ends):
            count = len(self.ends) - i
            if left + freed - tokens * count <= count:
                return False
            freed += held
        return True

    def make_way(self, row: Row) -> bool:
        """Retracts decodes for `row`, if their expected tokens are enough by what was last known of it."""
        sign = 1 if self.config.schedule_low_priority_values_first else -1
        short = row.seen[0] - row.seen[1] + min(row.cap, CLIP) - self.left()
        victims: list[Row] = []
        for other in sorted(self.running.rows, key=lambda one: (-sign * one.priority, -one.entered)):
            if sign * (other.priority - row.priority) <= self.config.priority_scheduling_preemption_threshold:
                break
            victims.append(other)
            short -= self.reserved(other)
            if short <= 0:
                break
        if not victims or short > 0:
            return False
        for other in [one for one in self.running.rows if one in victims]:
            self.spent -= self.reserved(other)
            self.running.rows = [one for one in self.running.rows if one is not other]
            self.retract(other, len(self.running.rows))
        return True
