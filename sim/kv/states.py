"""The pool of states of linear layers, and the radix tree over it and the other layers' tokens, as SGLang 0.5.23's.

A request has a slot for its state. Without a buffer a copy of the state goes into the tree with each part of its
prompt, at its end, and the slot itself with all its tokens when it ends. With an extra buffer it has one slot more, two
where scheduling overlaps, and its states are kept at multiples of STATE_GRID tokens from where a step began: the tree
gets the last one in each part of a prompt, or that at the *junction*, up to where layers that keep all tokens had more
of its prefix than could be used; and of an answer that at the last multiple of STATE_TRACKED tokens. What is behind
that is not put in.
A prefix is used up to the deepest node with a state, which is copied. A lock is on that node's state alone. A slot that
is lacking is evicted: the states least recently matched or put in first, those of leaves with their tokens.
Source: python/sglang/srt/mem_cache/unified_cache/components/mamba.py, mem_cache/allocation.py (ensure_mamba_capacity)
and managers/schedule_batch.py (_mamba_radix_cache_v2_req_prepare_for_extend) of the 0.5.23 wheel.
Simplifies: an answer's last state is not lost to a step in flight behind its end.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import lcm
from typing import cast

from batchsim.base.kv_pools import STATE_GRID, STATE_TRACKED
from batchsim.kernel.kv_blocks import CountingKV, KVBlockManager
from batchsim.kernel.types import Sequence
from batchsim.kv.radix_cache import Holding
from batchsim.kv.radix_tokens import TokenRun, common_tokens, tail
from batchsim.kv.side_radix import SideRadixKV
from batchsim.kv.side_tree import SideNode, SidePool, SideTree


class StateTree(SideTree):
    """The tree: a live node has a state at its end."""

    __slots__ = ()

    def __init__(self, block_size: int, states: SidePool) -> None:
        super().__init__(block_size, states, 0)

    def insert(self, run: TokenRun, blocks: list[int]) -> tuple[SideNode, int, bool]:
        """Puts in `run`, whole pages with the ids `blocks`, and a state at its end. Returns (the node at its end, how
        many of its tokens the tree had, whether the state was lacking and is the tree's now)."""
        self.now += 1
        node, at, page = self.root, 0, self.block_size
        while run and (child := node.children.get(self._first(run))) is not None:
            child.used = self.now
            n = self.whole_pages(common_tokens(child.key, run))
            node = child if n == len(child.blocks) * page else self._split(child, n)
            at, run = at + n, tail(run, n)
        matched = at
        if at < len(blocks) * page:
            node = self.add_leaf(node, run, blocks[at // page :])
        end, is_new = cast(SideNode, node), False
        if end.parent is not None:
            self.now += 1
            is_new, end.used, end.side_used = not end.live, self.now, self.now
            if is_new:
                self._make_live(end)
        return end, matched, is_new

    def lock_state(self, node: SideNode) -> None:
        """Keeps the state of `node`, if it has one."""
        if node.parent is not None:
            self._lock_one(node)

    def unlock_state(self, node: SideNode) -> None:
        """Takes back one `lock_state`."""
        if node.parent is not None:
            self._unlock_one(node)

    def _slots(self, node: SideNode) -> int:
        return 1

    def _cover(self, covered: int, node: SideNode, num_tokens: int, *, is_part: bool) -> int:
        return 0 if node.live and not is_part else -1

    def _use(self, node: SideNode) -> None:
        if node.live:
            node.side_used = self.now


class _Span:
    """What one sequence has: `held` slots; the length of the state to be put in next, None if there is none; where
    its junction is, None if it has none; and the tokens behind the last part of its prompt."""

    __slots__ = ("held", "junction", "started", "tracked")

    def __init__(self, held: int, junction: int | None) -> None:
        self.held, self.junction = held, junction
        self.tracked: int | None = None
        self.started = 0


class States(SidePool):
    """Slots for states, of which a request takes `buffers` more than its own, and the engine sets aside `per_request`
    for each that runs."""

    __slots__ = ("buffers", "per_request")

    def __init__(self, num_states: int, buffers: int, *, caches: bool) -> None:
        super().__init__(num_states)
        self.buffers = buffers
        self.per_request = 3 + buffers if caches else 1


class StateRadixKV(SideRadixKV):
    """A `RadixKV` of layers that keep all tokens, with `states` beside."""

    __slots__ = ("_chunk", "_grid", "_spans", "_stateful", "_tracked", "states")

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_states: int,
        buffers: int,
        *,
        chunk: int = STATE_GRID,
        tracked: int = STATE_TRACKED,
    ) -> None:
        super().__init__(num_blocks, block_size)
        self.states = States(num_states, buffers, caches=True)
        self._tree = self._side = self._stateful = StateTree(block_size, self.states)
        self._chunk, self._grid = chunk, max(chunk, block_size)
        self._tracked = lcm(tracked, block_size)
        self._spans: dict[Sequence, _Span] = {}

    # ---- admission

    def reserve_state(self, seq: Sequence) -> None:
        """Makes a slot free for a copy of the state that `seq` has just matched, if there is one."""
        last, tree = self._last_match, self._stateful
        assert last is not None and last[0] is seq, "it was just matched"
        node = cast(SideNode, last[3])
        if node.parent is None or self.states.num_free:
            return
        tree.lock(node)
        tree.lock_state(node)
        self._free.extend(tree.evict_side(1))
        tree.unlock_state(node)
        tree.unlock(node)
        self._last_match = (*last[:2], tree.now, *last[3:])

    def take(self, seq: Sequence, hit_tokens: int) -> None:
        node, walked = self._matched(seq, hit_tokens)
        self._stateful.lock(node)
        self._stateful.lock_state(node)
        walked = walked // self._grid * self._grid
        self._spans[seq] = _Span(int(hit_tokens > 0), walked if walked > hit_tokens else None)
        self.states.num_free -= int(hit_tokens > 0)
        self._held[seq] = Holding(node, node.path_blocks())
        seq.num_blocks = hit_tokens // self.block_size

    def take_states(self, chunks: Iterable[tuple[Sequence, int]]) -> None:
        """Takes the slots that the sequences of `chunks` lack, and notes which state each of these parts of a prompt
        leaves; `chunks` have numbers of tokens."""
        states, whole = self.states, 1 + self.states.buffers
        spans = [(self._spans[seq], seq, n) for seq, n in chunks]
        need = sum([whole - span.held for span, _, _ in spans])
        if need > states.num_free:
            self._free.extend(self._stateful.evict_side(need - states.num_free))
        states.num_free -= need
        for span, seq, n in spans:
            span.held, span.started = whole, seq.settled_computed_tokens + n
            if states.buffers:
                self._track(span, seq.settled_computed_tokens, n)

    def _track(self, span: _Span, start: int, num_tokens: int) -> None:
        grid, last = self._grid, num_tokens // self._grid * self._grid
        if not last:
            return
        span.tracked = start + last
        end = start + num_tokens if num_tokens // self._chunk * self._chunk == last else span.tracked + 1
        if span.junction is not None and start < span.junction < end and not (span.junction - start) % grid:
            span.tracked = span.junction

    # ---- what is put in

    def insert(self, seq: Sequence, limit: int | None = None) -> None:
        span, length = self._spans[seq], seq.num_computed_tokens if limit is None else limit
        if self.states.buffers:
            length, span.tracked = span.tracked or 0, None
        if length <= 0:
            return
        if not self.states.num_free:
            self._free.extend(self._stateful.evict_side(1))
        if self._put(seq, length):
            self.states.num_free -= 1

    def insert_ended(self, seq: Sequence, limit: int) -> None:
        """As `insert`, of a sequence that has ended, whose own slot goes into the tree."""
        span, length = self._spans[seq], limit
        if self.states.buffers:
            answered = limit // self._tracked * self._tracked
            length = span.tracked if span.tracked is not None else answered if answered > span.started else 0
        if length > 0 and self._put(seq, length):
            span.held -= 1

    def _put(self, seq: Sequence, length: int) -> bool:
        """Puts the whole pages of the first `length` tokens into the tree with a state; whether it had none there."""
        holding, tree, page = self._held[seq], self._stateful, self.block_size
        self._fill(holding, self._grown(seq))
        num_blocks = length // page
        node, matched, is_new = tree.insert(tree.known_pages(seq, length), holding.table[:num_blocks])
        tree.lock(node)
        tree.lock_state(node)
        tree.unlock_state(cast(SideNode, holding.node))
        self._share(holding, node, num_blocks, matched)
        return is_new

    def free(self, seq: Sequence) -> None:
        if self._pinned and self.is_kept(seq):
            return
        holding = self._held.get(seq)
        if holding is not None:
            self._stateful.unlock_state(cast(SideNode, holding.node))
            self.states.num_free += self._spans.pop(seq).held
        super().free(seq)

    def check(self) -> None:
        super().check()
        nodes = [cast(SideNode, node) for node in self._tree.nodes()]
        locks = dict.fromkeys(nodes, 0)
        for holding in self._held.values():
            locks[cast(SideNode, holding.node)] += 1
        assert all(node.side_locks == locks[node] for node in nodes if node.parent is not None)
        live = [node for node in nodes if node.live]
        assert all(node.is_offered for node in live if not node.side_locks)
        held = sum(span.held for span in self._spans.values())
        assert self.states.num_free + len(live) + held == self.states.num_blocks
        assert self.states.num_evictable == sum(not node.side_locks for node in live)


class StatesKV(CountingKV):
    """Counts blocks; `states` say how many requests may run at once, each with a slot."""

    __slots__ = ("states",)

    def __init__(self, num_blocks: int, block_size: int, num_states: int) -> None:
        super().__init__(num_blocks, block_size)
        self.states = States(num_states, 0, caches=False)


def states_of(kv: KVBlockManager) -> States | None:
    """The pool of states of `kv`; None where it has none."""
    return kv.states if isinstance(kv, StatesKV | StateRadixKV) else None
