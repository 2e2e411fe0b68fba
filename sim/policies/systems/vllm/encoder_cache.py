"""vLLM's encoder budget of a step and its cache of encoder outputs: which images, videos and audios a step encodes.

Rule: an item is encoded whole, in the step in which its first placeholder token comes up, where the step's budget and
the cache have room for all its embeddings; else the request gets the tokens before it only. One that the cache has, by
its content, is not encoded again. A request holds its items until their placeholders are in the KV cache, or it is
preempted or ends; items that no request holds stay until room is needed, the one let go longest ago first.
Source: vllm/v1/core/sched/scheduler.py (`_try_schedule_encoder_inputs`, `_free_encoder_inputs`) and
vllm/v1/core/encoder_cache_manager.py of the 0.33.0 wheel; equal to its recordings.
Simplifies: decoder-only models alone, whose items have as many embeddings as placeholder tokens; no connectors.
"""

from __future__ import annotations

from collections.abc import Iterable

from batchsim.kernel.batch import Batch
from batchsim.kernel.types import Item, Sequence


class EncoderCache:
    """The cache, and the budget of the step in the making; both in embeddings.

    `num_free` of the cache are empty, `num_freeable` are empty or of items that no request holds. `encoding` has the
    items that the step encodes, by sequence, each by its place in `Request.items`; `freed` the identifiers of items
    that were evicted since the step was begun; `refused` the requests that got no token for want of room, each with the
    item that it lacks. `whole_items`: no chunk of a prompt ends inside an item.
    """

    def __init__(self, budget: int, size: int, *, whole_items: bool, ahead: bool) -> None:
        self.budget, self.size = budget, size
        self.num_free = self.num_freeable = size
        self.encoding: dict[Sequence, list[int]] = {}
        self.freed: list[int] = []
        self.refused: dict[Sequence, Item] = {}
        self.holding: dict[Sequence, None] = {}  # requests that hold items
        self._whole_items = whole_items
        self._ahead = ahead
        self._left = budget  # of this step
        self._users: dict[int, set[Sequence]] = {}  # by identifier of all that are there
        self._freeable: dict[int, int] = {}  # embeddings of those without users, the one let go first in front
        # Of the batches in flight: the sequences with items, and whether each gets a token.
        self._rows: dict[Batch, dict[Sequence, bool]] = {}
        self._taken: list[int] = []  # of the request asked for last
        self._left_then = 0  # the budget if these are encoded

    # ---- a step

    def begin(self) -> None:
        """Begins a step, with all of the budget."""
        self._left = self.budget
        self.encoding, self.freed, self.refused = {}, [], {}

    def encodable(self, seq: Sequence, computed: int, n: int) -> int:
        """How many of the next `n` tokens of `seq`, of which `computed` are, this step may compute: none that needs an
        item for which there is no room. May evict, and lets `seq` hold the items that are there."""
        items, self._taken = seq.request.items, []
        if not items:
            return n
        left, embeddings, whole = self._left, 0, set[int]()
        for i, item in enumerate(items):
            start, end = item.start, item.start + item.tokens
            if start >= computed + n:
                break
            if end <= computed:
                continue
            if self._whole_items and computed <= start and computed + n < end:
                n = max(start - computed, 0)
                self._refuse(seq, n, item)
                break
            if item.identifier in whole or self._is_there(seq, item):
                continue
            if not self._has_room(item.tokens, left, embeddings):
                n = max(start - computed, 0)
                self._refuse(seq, n, item)
                break
            whole.add(item.identifier)
            embeddings += item.tokens
            left -= item.tokens
            self._taken.append(i)
        self._left_then = left
        return n

    def _refuse(self, seq: Sequence, n: int, item: Item) -> None:
        if not n:
            self.refused[seq] = item

    def _is_there(self, seq: Sequence, item: Item) -> bool:
        users = self._users.get(item.identifier)
        if users is None:
            return False
        if not users:
            self.num_freeable -= self._freeable.pop(item.identifier)
        users.add(seq)
        self.holding[seq] = None
        return True

    def _has_room(self, embeddings: int, left: int, taken: int) -> bool:
        """Whether `embeddings` fit `left` of the budget, and the cache beside those `taken`; evicts for it."""
        need = embeddings + taken
        if embeddings > left or (need > self.num_free and need > self.num_freeable):
            return False
        while need > self.num_free:
            identifier, size = next(iter(self._freeable.items()))
            del self._freeable[identifier], self._users[identifier]
            self.freed.append(identifier)
            self.num_free += size
        return True

    def encode(self, seq: Sequence) -> None:
        """Keeps room for what the latest `encodable`, which was of `seq`, has taken: its tokens are scheduled."""
        if not self._taken:
            return
        self.encoding[seq], self._left = self._taken, self._left_then
        self.holding[seq] = None
        for i in self._taken:
            item = seq.request.items[i]
            self._users.setdefault(item.identifier, set()).add(seq)
            self.num_free -= item.tokens
            self.num_freeable -= item.tokens
        self._taken = []

    def scheduled(self, batch: Batch) -> None:
        """Ends a step, which is `batch`: writes into it what it encodes."""
        self.freed = [identifier for identifier in self.freed if identifier not in self._users]
        if self.encoding:
            batch.encoded = [(seq, tuple(items)) for seq, items in self.encoding.items()]
        decodes = batch.decodes.members if batch.decodes is not None else {}
        rows = {seq: seq.settled_computed_tokens + n == seq.num_tokens for seq, n in batch.chunks if seq.request.items}
        rows |= {seq: True for seq in self.holding if seq in decodes}
        if rows:
            self._rows[batch] = rows

    # ---- letting go

    def processed(self, batch: Batch, finished: Iterable[Sequence]) -> None:
        """Lets go of the items whose placeholders are in the KV cache with the results of `batch`, in its order, and of
        all items of the `finished`."""
        rows = self._rows.get(batch, {})
        if not rows:
            return
        ended = set(finished)
        for seq in batch.in_order(list(rows)):
            if seq in self.holding:
                self._let_go(seq)
            if seq in ended:
                self.free(seq)
        del self._rows[batch]

    def _let_go(self, seq: Sequence) -> None:
        # Tokens that are known ahead of results are not in the KV cache yet, as vLLM counts.
        unknown = sum(rows.get(seq, False) for rows in self._rows.values()) if self._ahead else 0
        computed, items = seq.num_computed_tokens, seq.request.items
        in_cache = computed - unknown
        held = self._held(seq)
        # One that the request has in several places is held until the last place that its computed tokens reach.
        needed = {item.identifier for item in items if item.start < computed and item.start + item.tokens > in_cache}
        for i in held:
            if items[i].identifier not in needed:
                self._leave(seq, items[i])
        if not any(seq in self._users[items[i].identifier] for i in held):
            del self.holding[seq]

    def free(self, seq: Sequence) -> None:
        """Lets go of all items of `seq`; what it was to encode in this step is not encoded, and its budget is back."""
        if seq not in self.holding:
            return
        del self.holding[seq]
        for i in self._held(seq):
            self._leave(seq, seq.request.items[i])
        self._left += sum(seq.request.items[i].tokens for i in self.encoding.pop(seq, ()))

    def _held(self, seq: Sequence) -> list[int]:
        """The places of the items of `seq` that are there, in the order in which vLLM walks them, which has a set."""
        return list({i for i, item in enumerate(seq.request.items) if item.identifier in self._users})

    def _leave(self, seq: Sequence, item: Item) -> None:
        users = self._users[item.identifier]
        if users:
            users.discard(seq)
            if not users:
                self._freeable[item.identifier] = item.tokens
                self.num_freeable += item.tokens
