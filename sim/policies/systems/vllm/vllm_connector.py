"""vLLM 0.33 with a KV connector: prompts whose KV is pulled from another engine, and KV that is kept for others.

Rule, beside that of `vllm`:

1. A waiting request whose prompt another engine has computed gets blocks for all of it and waits apart (`held`) while
   the KV comes, but for what the prefix cache has. It takes no tokens of the step and no slot; with all slots taken no
   pull begins. It is let in only into blocks that no prompt in the making will need.
2. Requests held are looked at before the others. Once the pull is noticed the blocks can be found by others, and the
   last token of the prompt is computed again, which samples the first one.
3. A request that ends and is to be pulled by another engine keeps its blocks until these are sent.
4. An engine that pulls, with steps in flight: the blocks of an ended request which a step in flight may still write are
   free once that step is processed. If the sequence to be preempted is in such a step, none is preempted: the one that
   lacks a block waits, and all behind it.
5. An engine that keeps KV: a token in flight of a preempted request is dropped and sampled again.
6. A pull that fails ends its request, or has its prompt computed here. A preempted request is not pulled again.

Source: vllm/v1/core/sched/scheduler.py (`schedule`, `_update_waiting_for_remote_kv`, `_update_from_kv_xfer_finished`,
`_connector_finished`, `_drain_deferred_frees`), vllm/distributed/kv_transfer/kv_connector/v1/base.py and
nixl/pull_scheduler.py of the 0.33.0 wheel; equal to its recordings.
Simplifies: leases end only after pulls that failed; no synchronous loads, pushes, partly failed pulls, drafts or
pipelines.
"""

from __future__ import annotations

from collections import deque

from batchsim.base.errors import ScenarioError
from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.kv_transfer import KvConnector
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Event, Sequence
from batchsim.policies.families.queues import TwoQueues
from batchsim.policies.systems.vllm.connector_config import VllmConnectorConfig
from batchsim.policies.systems.vllm.vllm import Vllm

Chunks = list[tuple[Sequence, int]]


class VllmConnector(Vllm):
    """The scheduler."""

    def __init__(self, config: VllmConnectorConfig, context: PolicyContext) -> None:
        if context.connector is None or context.loop.stages > 1:
            raise ScenarioError("vllm: KV is passed between engines of one pipeline stage that have a connector.")
        super().__init__(config, context)
        self._passing = config
        self.connector: KvConnector = context.connector
        self._link = context.connector.link
        self._apart: dict[Sequence, None] = {}  # in the first queue: pulled, and not running since
        self._pulling: dict[Sequence, str] = {}  # of these; what became of the pull: "", "done" or "failed"
        self._pulled: set[Sequence] = set()  # their pull has begun once, and will not again
        self._in_flight: deque[Batch] = deque()
        self._late: deque[tuple[Batch, Sequence, int]] = deque()  # blocks to be freed once a batch is processed
        self._hits: Chunks = []  # of pulls that began in calls without a step
        self._no_room = "waiting_decode_blocks"  # why the head waits whose pull has no blocks
        self._ended_ns: int | None = None  # while ends are processed: now
        self._has_news = False  # transfers were noticed since the last call

    def _new_queue(self) -> TwoQueues:
        first, second = super()._new_queue(), super()._new_queue()
        assert not isinstance(first, TwoQueues) and not isinstance(second, TwoQueues)
        return TwoQueues(first, second)

    @property
    def pulled(self) -> list[Sequence]:
        """The sequences held whose KV is being pulled, or whose pull has not been looked at since, in queue order."""
        queue = self.queue
        assert isinstance(queue, TwoQueues)
        return [seq for seq in queue.first.in_order() if seq in self._pulling]

    def cancel(self, seq: Sequence, now_ns: int) -> list[Sequence]:
        if seq in self._pulling and not self._pulling[seq]:
            self.connector.abandoned.add(seq)  # its blocks are being written
        return super().cancel(seq, now_ns)

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        connector = self.connector
        connector.pulling, connector.hits = [], []
        self._has_news = False
        work = super().schedule(now_ns, drain)
        if isinstance(work, Idle):
            self._hits += connector.hits
            return IDLE
        if work.chunks or work.num_decode:
            work.cached = [*self._hits, *connector.hits]
            self._hits = []
            self._in_flight.append(work)
        return work

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        return not self._may_turn() and super().repeat(batch, now_ns)

    def is_steady(self, batch: Batch) -> bool:
        return not self._may_turn() and super().is_steady(batch)

    def foreseen(self, batch: Batch) -> list[int] | None:
        return super().foreseen(batch)  # here, as `schedule` and `complete` are replaced

    def _may_turn(self) -> bool:
        """Whether the next call may do something else, of what transfers or steps in flight have brought or blocked: a
        sequence that lacks a block waits until the one to be preempted is in no step in flight."""
        return bool(self._has_news or self._late or self.stalled)

    def leapt(self, batches: list[Batch]) -> None:
        self._in_flight = deque(batches)
        self.connector.leapt(len(batches))

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        self._in_flight.popleft()
        while self._late and self._late[0][0] is batch:
            _, seq, unknown = self._late.popleft()
            super()._free(seq, unknown, returns=False)
        self._ended_ns = now_ns
        responses = super().complete(batch, finished, now_ns)
        self._ended_ns = None
        self._pulled.difference_update(finished)
        self.notice()
        return responses

    def notice(self) -> None:
        noticed = self.connector.processed()
        if noticed.is_empty:
            return
        self._has_news = True
        failed = set(noticed.failed)
        for seq in noticed.loaded:
            if seq in self.connector.abandoned:
                self.connector.abandoned.remove(seq)
                super()._free(seq, 0, returns=False)
            elif seq in failed and self._passing.kv_load_failure_policy == "fail":
                self._forget(seq)
                self.events.append(Event("rejected", seq, "kv_load_failed", detail="its KV could not be pulled"))
            else:
                self._pulling[seq] = "failed" if seq in failed else "done"
        for seq in noticed.sent:
            del self.connector.kept[seq]
            self._free(seq, seq.num_wasted_tokens, returns=False)

    # ---- giving back

    def _is_in_flight(self, seq: Sequence) -> bool:
        """Whether a step in flight computes tokens of `seq`."""
        group, last_step = seq.group, seq.left_step
        if group is None:
            group = seq.last_group
        else:
            last_step = group.step
        for batch in self._in_flight:
            if group is not None and batch.decodes is group and seq.joined_step < batch.group_step <= last_step:
                return True
            if any(chunked is seq for chunked, _ in batch.chunks):
                return True
        return False

    def _may_preempt(self, victim: Sequence) -> bool:
        return not (self._passing.defers and self._is_in_flight(victim))

    def _preempt(self, victim: Sequence, by: Sequence) -> None:
        lost = self._unknown(victim) if self._passing.delivers and self._is_in_flight(victim) else 0
        super()._preempt(victim, by)
        if lost:
            victim.lose_in_flight(lost)

    def _free(self, seq: Sequence, unknown: int, *, returns: bool) -> None:
        """Gives back the blocks of `seq`, or keeps them for another engine, or until no step in flight writes them."""
        if self._ended_ns is not None and self._link.keeps(seq.request):
            seq.num_blocks = self.kv.held(seq)
            self.connector.kept[seq] = seq.num_blocks
            self._link.keep(seq, seq.num_blocks, self._ended_ns)
        elif self._passing.defers and not returns and self._is_in_flight(seq):
            seq.num_blocks = self.kv.held(seq)
            self._late.append((self._in_flight[-1], seq, unknown))
        else:
            super()._free(seq, unknown, returns=returns)

    # ---- the waiting

    def _forget(self, seq: Sequence) -> None:
        self._pulled.discard(seq)
        if seq not in self._apart:
            super()._forget(seq)
            return
        queue = self.queue
        assert isinstance(queue, TwoQueues)
        queue.first.remove(seq)
        del self._apart[seq]
        self._pulling.pop(seq, None)
        self._hits = [(each, tokens) for each, tokens in self._hits if each is not seq]
        if seq not in self.connector.abandoned:
            seq.reset_computed()
            self._free(seq, 0, returns=False)

    def _start(self, seq: Sequence, computed: int) -> None:
        self._apart.pop(seq, None)
        super()._start(seq, computed)

    def _admit(self, cap: int, left: int, chunks: Chunks, cached: Chunks) -> str:
        """As that of `Vllm`, and begins pulls. What is set aside returns to the front of its queue."""
        queue, held, unknown = self.queue, list[Sequence](), list[Sequence]()
        assert isinstance(queue, TwoQueues)
        reason = ""
        if len(self._pulling) == len(self.waiting) and not any(self._pulling.values()):
            return self._limit(left) or "launch"  # the KV of all is on its way
        while self.waiting and not (reason := self._limit(left)):
            seq = queue.head()
            if seq in self._pulling and not self._look(seq):
                held.append(queue.pop())
                continue
            computed = seq.settled_computed_tokens
            hit = self.cache.lookup(seq) if self.cache is not None and not computed else 0
            beyond = 0 if computed else self._pullable(seq, hit)
            if beyond is None:
                unknown.append(queue.pop())
                continue
            if beyond:
                if not self._pull(seq, hit, beyond):
                    reason = self._no_room
                    break
                held.append(queue.pop())
                continue
            start = max(hit, computed)
            if not (n := self._cut(min(seq.num_tokens - start, cap), left)):
                reason = "token_budget"
                break
            if not self._room(seq, start + n, hit):
                reason = "kv_blocks"
                break
            self._start(queue.pop(), start)
            if hit:
                self.connector.hits.append((seq, hit))
            chunks.append((seq, n))
            left -= n
        for seq in reversed(held):
            queue.first.put_back(seq)
        for seq in reversed(unknown):
            queue.second.put_back(seq)
        return reason or "launch"  # with which the pulls begin

    def _pullable(self, seq: Sequence, hit: int) -> int | None:
        """The tokens after the first `hit` ones of `seq` whose KV is to be pulled; None: that is not known yet."""
        if seq in self._pulled or not self._link.pulls(seq.request):
            return 0
        return seq.num_tokens - hit

    def _pull(self, seq: Sequence, hit: int, beyond: int) -> bool:
        """Takes blocks for the first tokens of `seq`, of which `hit` are cached and `beyond` pulled; False, and nothing
        changed, if blocks are short."""
        kv, tokens = self.kv, hit + beyond
        spare = self._watermark_blocks if self.running else 0
        in_the_making = [*self.partial, *self._apart]
        reserved = sum(kv.blocks_for(each.num_tokens) - kv.held(each) for each in in_the_making)
        must_fit = kv.blocks_for(tokens) + reserved
        if self.config.scheduler_reserve_full_isl:
            must_fit = max(must_fit, kv.blocks_for(seq.num_tokens))
        if self.cache is not None:
            # What is pulled is not there yet, so that others cannot find it.
            if not self.cache.admit(seq, tokens, hit, spare, must_fit * kv.block_size, ahead=beyond):
                return False
        elif must_fit + spare > kv.num_free or not kv.allocate(seq, tokens):
            return False
        seq.start_from_cache(tokens)
        self._pulled.add(seq)
        self._apart[seq] = None
        self._pulling[seq] = ""
        pulled = kv.held(seq) - hit // kv.block_size
        self.connector.pulling.append((seq, beyond, pulled))
        if hit:
            self.connector.hits.append((seq, hit))
        return True

    def _look(self, seq: Sequence) -> bool:
        """Whether the pull of `seq` was noticed to be over; then its blocks are as those of any other."""
        became = self._pulling[seq]
        if not became:
            return False
        del self._pulling[seq]
        if became == "failed":
            seq.reset_computed()
            self._free(seq, 0, returns=False)
            return True
        computed = seq.settled_computed_tokens
        if self.cache is not None:
            self.cache.publish(seq, computed)
        seq.start_from_cache(min(computed, seq.num_tokens - 1))
        return True

    def _room(self, seq: Sequence, num_tokens: int, hit: int) -> bool:
        """As that of `Vllm`; a sequence whose KV was pulled has its blocks."""
        kv, held = self.kv, self.kv.held(seq)
        if not held:
            return super()._room(seq, num_tokens, hit)
        must_fit = seq.num_tokens if self.config.scheduler_reserve_full_isl else num_tokens
        spare = self._watermark_blocks if self.running else 0
        return max(kv.blocks_for(must_fit) - held, 0) + spare <= kv.num_free and kv.allocate(seq, num_tokens)
