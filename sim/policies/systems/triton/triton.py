"""NVIDIA Triton's dynamic batcher in front of a generative model: core commit 73aad7c3, one model instance.

Rule: the batcher scans its queues, priority level 1 first, up to `max_batch_size` requests, those with unequal inputs
excepted, and (a) sends the largest preferred size reached while the oldest has waited less than the delay, (b) sends
nothing if nothing is pending, (c) sends all if the batch cannot grow or has the largest preferred size, (d) sends all
if the delay is over or 0, (e) else waits for the delay or the nearest timeout. Without priorities, queue limits and
timeouts it forms payloads ahead: up to two stand in line, and the last one grows until it is saturated; else it forms
one only for an idle instance. A timeout is seen when the scan reaches the request: it is rejected (`timeout`), or
DELAYed behind all others of its level. A payload runs to its end and is answered as a whole. Ages are from arrival.
Source: src/dynamic_batch_scheduler.cc, scheduler_utils.cc, rate_limiter.cc, model_config_utils.cc of that commit.
Simplifies: requests of one row; no merging of payloads, response cache or rate limits; a busy instance's queue is not
looked through for timeouts in between; a request is expired from its timeout on, and a cancelled one leaves at once;
requests bring no timeout of their own. The model pads prompts to the longest, but for ragged ones.
KV: `closed_batches.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from batchsim.base.ranges import Levels, LevelsOrNone, PositiveInt
from batchsim.base.units import Microseconds
from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.kv_blocks import never_fits
from batchsim.kernel.policy_config import PolicyConfig, Traits
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Sequence
from batchsim.policies.families.closed_batches import ClosedBatches
from batchsim.policies.families.padded_batch import WholeBatches
from batchsim.policies.systems.triton.priority_queues import ModelQueuePolicy, PriorityQueues

MAX_PAYLOADS = 2
"""Payloads that stand in line for an instance when they are formed ahead."""


@dataclass(frozen=True)
class TritonConfig(PolicyConfig):
    """Knobs of Triton's model configuration, with its defaults; those of its `dynamic_batching` stand beside
    `max_batch_size`."""

    max_batch_size: PositiveInt = 4
    """Requests of a batch at most; 4 is what Triton's auto-completed configurations get."""
    preferred_batch_size: tuple[PositiveInt, ...] = ()
    """Sizes at which a batch starts at once."""
    max_queue_delay_microseconds: Microseconds = 0
    """How long the oldest request waits for a fuller batch."""
    preserve_ordering: bool = False
    """Whether answers keep the order of requests; it changes nothing with one instance."""
    priority_levels: LevelsOrNone = 0
    """Levels of priority; 0: none."""
    default_priority_level: LevelsOrNone = 0
    """The level of a request that names none."""
    default_queue_policy: ModelQueuePolicy = field(default_factory=ModelQueuePolicy)
    """Time-outs and size of queues."""
    priority_queue_policy: dict[Levels, ModelQueuePolicy] = field(default_factory=dict[int, ModelQueuePolicy])
    """Time-outs and size of a level's queue, by level from 1, the highest."""
    allow_ragged_batch: bool | None = None
    """Of the prompt's input, where prompts are token ids: false batches equal lengths only, true any, without padding;
    null: prompts are texts, which always batch."""
    instance_group_count: Literal[1] | PositiveInt = 1
    """Instances of the model; more than 1 is not simulated."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.instance_group_count != 1:
            raise ValueError(
                f"instance_group_count {self.instance_group_count}: more than one batch in flight is not simulated yet."
                " Set it to 1, here and in the model configuration"
            )
        if any(size > self.max_batch_size for size in self.preferred_batch_size):
            raise ValueError(
                f"preferred_batch_size {list(self.preferred_batch_size)} must not be above max_batch_size"
                f" {self.max_batch_size}"
            )
        levels, default = self.priority_levels, self.default_priority_level
        if default != 0 if levels == 0 else not 1 <= default <= levels:
            raise ValueError(
                f"default_priority_level {default} must be in [1, priority_levels {levels}], or both left out"
            )
        if any(level > levels for level in self.priority_queue_policy):
            raise ValueError(
                f"priority_queue_policy for levels {sorted(self.priority_queue_policy)}: they must be in [1,"
                f" priority_levels {levels}]"
            )

    @property
    def traits(self) -> Traits:
        return Traits(max_num_seqs=self.max_batch_size, knobs=("max_batch_size",))

    @property
    def prefetches(self) -> bool:
        """Whether payloads are formed while the instance is busy."""
        return self.priority_levels == 0 and not self.default_queue_policy.forbids_prefetching


class Triton(WholeBatches):
    """The scheduler. A decode step is O(levels), an arrival O(max_batch_size + levels) and what has timed out."""

    evidence = "hand-derived"
    deviations: ClassVar[dict[str, str]] = {"no_idling": "waits max_queue_delay for a preferred batch size"}

    def __init__(self, config: TritonConfig, context: PolicyContext) -> None:
        self.payloads = ClosedBatches(context, padding="none" if config.allow_ragged_batch else "longest")
        super().__init__(context, self.payloads.running)
        self.config = config
        levels, policies = range(1, max(config.priority_levels, 1) + 1), config.priority_queue_policy
        self.queues = PriorityQueues([policies.get(i, config.default_queue_policy) for i in levels])
        self._preferred = sorted(config.preferred_batch_size) or [config.max_batch_size]
        self._next_ns: int | None = None  # when the batcher looks next, asleep until then
        self._seen_ns = 0  # up to where it has looked

    @property
    def num_waiting(self) -> int:
        return len(self.queues) + self.payloads.num_waiting

    def add(self, seq: Sequence, now_ns: int) -> None:
        at_ns = max(seq.request.arrival_ns, self._seen_ns)
        self._wake_until(at_ns)
        refusal = never_fits(self.kv, seq, self.max_model_len) or self.queues.put(seq, self._level(seq))
        if refusal is not None:
            self.events.append(refusal)
            return
        self._next_ns = at_ns

    def cancel(self, seq: Sequence, now_ns: int) -> list[Sequence]:
        if seq in self.queues:
            self.queues.remove(seq)
            return []
        return [] if self.payloads.discard(seq) else self.batch.cancel(seq)

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        self._wake_until(now_ns + 1)
        payloads = self.payloads
        if not payloads.is_running and not payloads.batches:
            self._form(now_ns)
        work: Batch | Idle = IDLE
        if payloads.is_running:
            work = self.batch.step()
        elif payloads.batches:
            work = payloads.start()
            self._form(now_ns)  # there is a slot again
        elif self._next_ns is not None:
            work = Idle(self._next_ns)
        self.note_blocked(payloads.head or self.queues.first)
        return work

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        self._wake_until(now_ns + 1)
        return super().repeat(batch, now_ns)

    def _level(self, seq: Sequence) -> int:
        """The level of a request: one outside the levels is of the default one, and there is one without levels."""
        levels, priority = self.config.priority_levels, seq.request.priority
        if not levels:
            return 1
        return priority if 1 <= priority <= levels else self.config.default_priority_level

    # ---- the batcher

    def _wake_until(self, until_ns: int) -> None:
        """Lets a batcher that forms payloads ahead do what it would have done before `until_ns`, at its time."""
        if not self.config.prefetches:
            return  # an idle instance is asked at each instant that matters
        while self._next_ns is not None and self._next_ns < until_ns:
            self._form(self._next_ns)
        self._seen_ns = max(self._seen_ns, until_ns - 1)

    def _form(self, now_ns: int) -> None:
        """Moves requests to payloads while there is a slot and a reason to send; else notes when to look again."""
        payloads, queues = self.payloads, self.queues
        self._next_ns = None
        while queues and self._has_slot():
            growing = payloads.batches[-1] if payloads.batches and not payloads.batches[-1].is_closed else None
            rows = list(growing.rows) if growing is not None else []

            def joins(taken: list[Sequence], seq: Sequence, rows: list[Sequence] = rows) -> bool:
                return self._joins([*rows[:1], *taken[:1]], len(rows) + len(taken), seq)

            pending, is_cut, rejected = queues.scan(now_ns, joins)
            self.events += rejected
            count, is_saturated = self._to_send(len(rows), pending, is_cut, now_ns)
            for seq in pending[:count]:
                queues.remove(seq)
            if growing is None:
                payloads.put(pending[:count], is_closed=is_saturated)
            else:
                payloads.extend(growing, pending[:count])
                growing.is_closed = is_saturated
            if not count and not is_saturated:
                return

    def _has_slot(self) -> bool:
        """Whether one more payload may be in line."""
        batches = self.payloads.batches
        if self.config.prefetches:
            return len(batches) < MAX_PAYLOADS
        return not batches and not self.payloads.is_running

    def _joins(self, first: list[Sequence], size: int, seq: Sequence) -> bool:
        """Whether `seq` may join a payload of `size` rows, the first of which is `first[0]`."""
        if size == self.config.max_batch_size:
            return False
        equal = self.config.allow_ragged_batch is False
        return not (equal and first and first[0].request.prompt_tokens != seq.request.prompt_tokens)

    def _to_send(self, size: int, pending: list[Sequence], is_cut: bool, now_ns: int) -> tuple[int, bool]:
        """(how many of `pending` join the payload of `size` rows now, whether that saturates the payload).

        (0, False): the batcher waits until `_next_ns`.
        """
        count, largest = len(pending), self._preferred[-1]
        if size >= largest or (not count and is_cut):
            return 0, True
        if not count:
            return 0, False
        delay_ns = 1000 * self.config.max_queue_delay_microseconds
        due_ns = min(seq.request.arrival_ns for seq in pending) + delay_ns
        is_late = delay_ns > 0 and now_ns >= due_ns
        best = max((n - size for n in self._preferred if size < n <= size + count), default=0)
        if best and not is_late:
            return best, delay_ns == 0
        if is_cut or size + count >= largest:
            return count, True
        if is_late or delay_ns == 0 or (size and size not in self._preferred):
            return count, False
        timeouts = [due for seq in pending if (due := self.queues.timeout_ns(seq)) is not None]
        self._next_ns = min([due_ns, *timeouts])
        return 0, False
