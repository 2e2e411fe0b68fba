"""What a replay does, step by step, as facts by the names that recordings are compared under."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from batchsim.base.units import MAX_TIME_NS
from batchsim.check.conform.observed_transfers import ObservedTransfers
from batchsim.check.conform.offload import ObservedOffload
from batchsim.check.conform.recorded_drafts import RecordedDrafts, verified
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.core import EngineCore
from batchsim.kernel.record import BLOCKED, PREEMPTED, STEP_DTYPE, Recorder
from batchsim.kernel.types import MISSING, Sequence
from batchsim.policies.systems.vllm.encoder_cache import EncoderCache
from batchsim.policies.systems.vllm.vllm import Vllm


@dataclass(frozen=True)
class State:
    """What the engine held when the scheduler was asked. `running`: (request, computed, known tokens) by admission."""

    running: list[tuple[int, int, int]]
    waiting: list[int]
    free_blocks: int


RequestFacts = list[tuple[int, dict[str, Any]]]
"""Facts of requests, each with its id."""


@dataclass
class Step:
    """One step of a replay, from the scheduler's call on: its facts by name, as far as they are known, facts of
    requests that are final with it, and the state before it.

    `rows` maps the sequences it computes to their tokens; `stale` lists the ones of them preempted since. `spec` has,
    for sequences that verify drafts, the numbers of drafts, of accepted drafts and of tokens gained; `gained` the
    tokens of all.
    """

    facts: dict[str, Any]
    requests: RequestFacts
    before: State
    batch: Batch | None = None
    rows: list[tuple[Sequence, int]] = field(default_factory=list[tuple[Sequence, int]])
    spec: dict[Sequence, tuple[int, int, int]] = field(default_factory=dict[Sequence, tuple[int, int, int]])
    gained: dict[Sequence, int] = field(default_factory=dict[Sequence, int])
    stale: set[Sequence] = field(default_factory=set[Sequence])


@dataclass
class _Life:
    """Counts of one request; `first_hit`, `hits`: tokens found in a prefix cache, at the first and all admissions.
    `taken_ns`: when the engine took it in."""

    first_hit: int = 0
    hits: int = 0
    admissions: int = 0
    preemptions: int = 0
    wasted: int = 0
    outputs: int = 0
    taken_ns: int = MAX_TIME_NS
    has_token: bool = False
    has_ended: bool = False


@dataclass
class Totals:
    """Counts over the whole replay. `mid_prefill` are victims whose prompt was not yet computed in full;
    `mid_recompute` those whose known tokens (prompt, and output before an earlier preemption) were not.
    """

    requests: int = 0
    steps: int = 0
    finished: int = 0
    preemptions: int = 0
    tokens: int = 0
    cached_tokens: int = 0
    empty_steps: int = 0
    empty_calls: int = 0
    mid_prefill: int = 0
    mid_recompute: int = 0
    victims_in_flight: int = 0
    stale: int = 0
    ignored: int = 0
    naps: int = 0
    drafts: int = 0
    drafts_accepted: int = 0
    most_adapters: int = 0
    encoded: int = 0
    evicted: int = 0
    end_ns: int = 0


@runtime_checkable
class TakesInLast(Protocol):
    """A scheduler whose calls begin with what the call before has left, which may free blocks.

    `free_blocks_asked`: the free blocks between that and its latest call's decisions.
    """

    free_blocks_asked: int


class Observer:
    """Watches `core` replay `num_requests` requests. Its driver calls the methods in their order.

    `in_flight` are the steps that were launched and not processed, oldest first; `done` those of which that came last.
    """

    def __init__(self, core: EngineCore, num_requests: int) -> None:
        self.core = core
        self.totals = Totals(requests=num_requests)
        self.in_flight: deque[Step] = deque()
        self.done: deque[Step] = deque()
        self.drafts: RecordedDrafts | None = None
        self.has_adapters = False  # whether the recording tells the LoRA adapters of the running requests
        self.item_names: Mapping[int, str] = {}
        self._encoder = core.scheduler.encoder if isinstance(core.scheduler, Vllm) else None
        self.transfers = ObservedTransfers.of(core)
        self.offload = ObservedOffload.of(core)
        self.has_ended = False  # whether any request has with the last step
        self.skips = False  # whether the drafter rests where no request can use its drafts
        self._before = State([], [], 0)
        self._known: dict[Sequence, int] = {}  # tokens processed of the running, before the scheduler's latest call
        self._call: Step | None = None  # what that call made, until it is launched
        self._preempted: list[tuple[int, int, int]] = []  # since the last step: request, when, tokens lost
        self._inside: dict[Sequence, None] = {}  # running, by admission
        self._lives: dict[int, _Life] = {}
        self._orders: list[list[int]] = []  # ids of the running requests at each preemption

    # ---- what happens

    def asking(self) -> None:
        """The scheduler is about to be asked."""
        self._before = self._state()
        self._known = {seq: _processed(seq) for seq in self._inside}

    def asked(self, now_ns: int, work: Batch | Idle) -> None:
        """The scheduler answered `work`."""
        scheduler, kv = self.core.scheduler, self.core.scheduler.kv
        if self.in_flight:
            free = scheduler.free_blocks_asked if isinstance(scheduler, TakesInLast) else self._before.free_blocks
            self.in_flight[-1].facts.setdefault("free_blocks_asked", free)
        batch, rows, hits = None, list[tuple[Sequence, int]](), dict[Sequence, int]()
        if isinstance(work, Batch):
            batch, rows, hits = work, list(work.items()), dict(work.cached)
        if self.transfers is not None:
            hits = dict(self.transfers.connector.hits)
        if isinstance(work, Batch):
            for seq in work.preempted:
                self._preempt(seq, now_ns)
        facts = {
            "called_ns": now_ns,
            "in_flight": len(self.in_flight),
            "scheduled": [[seq.request.id, n] for seq, n in rows],
            "processed_before": [_processed(seq) for seq, _ in rows],
            "phase": ["prefill" if seq.group is None else "decode" for seq, _ in rows],
            "cached": [[seq.request.id, n] for seq, n in hits.items()],
            "preempted": [i for i, _, _ in self._preempted],
            "preempted_at_ns": [ns for _, ns, _ in self._preempted],
            "lost_tokens": [lost for _, _, lost in self._preempted],
            "free_blocks_sched": kv.num_free,
            "num_waiting_sched": scheduler.num_waiting,
            "num_running_sched": scheduler.num_running,
            "allocated_blocks": kv.num_blocks - kv.num_free,
        }
        if self.drafts is not None:
            facts |= {
                "blocks": [[seq.request.id, kv.held(seq)] for seq, _ in rows],
                "drafts": self.drafts.given_back([seq.request.id for seq, _ in rows]),
                "skip_drafts": self.skips and all(self._uses_no_draft(seq, n) for seq, n in rows),
            }
        if self._encoder is not None:
            facts |= self._encoded(self._encoder, batch)
        if self.transfers is not None:
            facts |= self.transfers.asked()
            self._pulled(hits)
            for seq in self.core.journal.lives:
                self._life(seq).taken_ns = min(self._life(seq).taken_ns, now_ns)
        if self.offload is not None:
            facts |= self.offload.asked()
        self.totals.empty_calls += not rows
        admitted = self._admit(rows, hits, now_ns)
        if self.has_adapters:
            adapters = {seq.request.adapter for seq in self._inside} - {MISSING}
            facts["adapters"] = sorted(adapters)
            self.totals.most_adapters = max(self.totals.most_adapters, len(adapters))
        self._call = Step(facts, admitted, self._before, batch, rows)

    def also(self, facts: dict[str, Any]) -> None:
        """Adds `facts` of the scheduler's latest call."""
        assert self._call is not None
        self._call.facts |= facts

    def scheduled(self, now_ns: int) -> None:
        """The host is through with the latest call of the scheduler and with preparing its step, which comes later."""
        assert self._call is not None
        self._call.facts["scheduled_ns"] = now_ns

    def launched(self, now_ns: int, end_ns: int | None) -> None:
        """What the scheduler answered last was launched and is over at `end_ns`; None: there was nothing to run."""
        step, totals = self._call, self.totals
        assert step is not None
        self._preempted = []
        start_ns = now_ns if end_ns is None else _last_start_ns(self.core.recorder)
        end_ns = now_ns if end_ns is None else end_ns
        if self.offload is not None:
            step.facts |= self.offload.launched(now_ns)
        step.facts.setdefault("scheduled_ns", now_ns)
        step.facts |= {"index": totals.steps, "start_ns": start_ns, "end_ns": end_ns}
        totals.steps += 1
        totals.tokens += sum(n for _, n in step.rows)
        totals.empty_steps += not step.rows
        if self.drafts is not None and step.batch is not None:
            step.spec = verified(step.batch)
            decoded = [seq for seq, _ in step.rows if seq.group is not None]
            step.gained = dict.fromkeys((*step.batch.sampled, *decoded), 1)
            step.gained |= {seq: gained for seq, (_, _, gained) in step.spec.items()}
        self.in_flight.append(step)

    def processed(self, now_ns: int, finished: list[int]) -> None:
        """The results of the oldest step in flight were processed, which ended the requests `finished`."""
        step, totals, scheduler = self.in_flight.popleft(), self.totals, self.core.scheduler
        in_vain = [(seq, n) for seq, n in step.rows if self._life(seq).has_ended]
        if self.drafts is not None:
            self._verified(step)
        late = [seq for seq, _ in step.rows if seq in step.stale and not self._life(seq).has_ended]
        lost = {seq for seq, _ in in_vain}.union(late)
        step.facts |= {
            "processed_ns": now_ns,
            "finished": finished,
            "wasted": [[seq.request.id, n] for seq, n in in_vain],
            "stale": [seq.request.id for seq in late],
            "ignored": [seq.request.id for seq, _ in step.rows if seq in lost],
            "free_blocks_processed": scheduler.kv.num_free,
            "num_waiting": scheduler.num_waiting,
            "num_running": scheduler.num_running,
        }
        if self._encoder is not None:
            step.facts["encoder_free_processed"] = self._encoder.num_free
            step.facts["encoder_freeable_processed"] = self._encoder.num_freeable
        if self.transfers is not None:
            step.facts |= self.transfers.processed()
            step.requests += self._failed(set(step.facts["errors"]), now_ns)
        if self.offload is not None:
            step.facts |= self.offload.processed()
        for seq, n in in_vain:
            self._life(seq).wasted += n
        totals.stale += len(late)
        totals.ignored += len(lost)
        totals.finished += len(finished)
        self.has_ended = bool(finished)
        totals.end_ns = now_ns
        step.requests += self._first_tokens(step, now_ns)
        step.requests += self._ended(step, set(finished), now_ns)
        self._inside = {seq: None for seq in self._inside if seq in self.core.journal.lives}
        self.done.append(step)

    def _encoded(self, encoder: EncoderCache, batch: Batch | None) -> dict[str, Any]:
        """The facts of the encoder and its cache once a step is scheduled, by the recording's names of items."""
        encoded = [] if batch is None else [[seq.request.id, list(items)] for seq, items in batch.encoded]
        freed = sorted(self.item_names[identifier] for identifier in encoder.freed)
        self.totals.encoded += sum(len(items) for _, items in encoded)
        self.totals.evicted += len(freed)
        return {
            "encode": encoded,
            "encoder_freed": freed,
            "encoder_free_sched": encoder.num_free,
            "encoder_freeable_sched": encoder.num_freeable,
        }

    def _uses_no_draft(self, seq: Sequence, n: int) -> bool:
        """Whether `seq`, of which `n` tokens are scheduled, has a prompt that goes on, or its last token next."""
        if seq.group is None and seq.num_computed_tokens + n < seq.num_tokens:
            return True
        in_flight = any(seq in step.gained for step in self.in_flight)
        return self._life(seq).outputs + 1 + in_flight >= seq.max_output_tokens

    def _verified(self, step: Step) -> None:
        """The facts of the drafts of a step whose results are processed."""
        rows = [seq for seq, _ in step.rows if not self._life(seq).has_ended]
        spec = [[seq.request.id, *step.spec[seq]] for seq in rows if seq in step.spec]
        step.facts["spec"] = spec
        self.totals.drafts += sum(row[1] for row in spec)
        self.totals.drafts_accepted += sum(row[2] for row in spec)
        for seq in rows:
            self._life(seq).outputs += step.gained.get(seq, 0)

    # ---- of requests

    def _preempt(self, seq: Sequence, now_ns: int) -> None:
        totals, known = self.totals, self._known
        self._preempted.append((seq.request.id, now_ns, known[seq]))
        totals.preemptions += 1
        self._life(seq).preemptions += 1
        totals.mid_prefill += known[seq] < seq.request.prompt_tokens
        totals.mid_recompute += known[seq] < seq.num_tokens
        self._orders.append([running.request.id for running in known])
        del self._inside[seq]
        holding = [step for step in self.in_flight if any(row is seq for row, _ in step.rows)]
        totals.victims_in_flight += bool(holding)
        for step in holding:
            step.stale.add(seq)

    def _admit(self, rows: list[tuple[Sequence, int]], hits: dict[Sequence, int], now_ns: int) -> RequestFacts:
        """Counts a call's admissions; returns facts of the requests admitted for the first time."""
        settled: RequestFacts = []
        for seq, _ in rows:
            if seq in self._inside:
                continue
            self._inside[seq] = None
            life, hit = self._life(seq), hits.get(seq, 0)
            if self.transfers is not None and self.transfers.takes_in(seq):
                continue  # was admitted as its pull began
            life.admissions += 1
            life.hits += hit
            self.totals.cached_tokens += hit
            if life.admissions == 1:
                life.first_hit = hit
                settled.append((seq.request.id, {"arrival_ns": seq.request.arrival_ns, "scheduled_ns": now_ns}))
        return settled

    def _pulled(self, hits: dict[Sequence, int]) -> None:
        """Counts the admissions of a call whose KV is pulled."""
        assert self.transfers is not None
        for seq, _, _ in self.transfers.connector.pulling:
            life, hit = self._life(seq), hits.get(seq, 0)
            life.admissions += 1
            if life.admissions == 1:
                life.first_hit = hit
            life.hits += hit
            self.totals.cached_tokens += hit

    def _first_tokens(self, step: Step, now_ns: int) -> RequestFacts:
        settled: RequestFacts = []
        for seq in step.batch.sampled if step.batch is not None else ():
            life = self._life(seq)
            if not life.has_token:
                life.has_token = True
                settled.append((seq.request.id, {"first_token_ns": now_ns}))
        return settled

    def _ended(self, step: Step, finished: set[int], now_ns: int) -> RequestFacts:
        """Facts of the requests that end with `step`, or whose last token in vain it computed."""
        settled: RequestFacts = []
        for seq, _ in step.rows:
            i, life = seq.request.id, self._life(seq)
            if i in finished:
                life.has_ended = True
                ours = {"finish_ns": now_ns, "num_preemptions": life.preemptions, "admissions": life.admissions}
                ours |= {"cached_tokens": life.first_hit, "cached_tokens_all": life.hits}
                ours |= {} if life.has_token else {"first_token_ns": None}
                ours |= {} if self.transfers is None else {"taken_ns": life.taken_ns, "error": False}
                settled.append((i, ours | {"output_tokens": seq.num_output_tokens - seq.num_wasted_tokens}))
            if life.has_ended and not any(row is seq for later in self.in_flight for row, _ in later.rows):
                settled.append((i, {"wasted_tokens": life.wasted}))
        return settled

    def _failed(self, errors: set[int], now_ns: int) -> RequestFacts:
        """Facts of the requests that a failed pull has ended."""
        settled: RequestFacts = []
        for i in errors:
            life = self._lives[i]
            life.has_ended = True
            ours = {"finish_ns": now_ns, "first_token_ns": None, "error": True, "taken_ns": life.taken_ns}
            ours |= {"num_preemptions": life.preemptions, "admissions": life.admissions, "wasted_tokens": 0}
            settled.append((i, ours | {"cached_tokens": life.first_hit, "cached_tokens_all": life.hits}))
        return settled

    def _life(self, seq: Sequence) -> _Life:
        return self._lives.setdefault(seq.request.id, _Life())

    def _state(self) -> State:
        running = [(seq.request.id, seq.num_computed_tokens, seq.num_tokens) for seq in self._inside]
        waiting = [seq.request.id for seq in self.core.journal.lives if seq not in self._inside]
        return State(running, waiting, self.core.scheduler.kv.num_free)

    # ---- the whole

    def run_facts(self) -> dict[str, Any]:
        """Facts of the whole replay, once it has ended."""
        totals, records = self.totals, self.core.recorder.records()
        rows = records.states[records.states["state"] == PREEMPTED]
        victims = list(zip(rows["request_id"].tolist(), rows["blocker"].tolist(), self._orders, strict=True))
        facts = {
            "requests": totals.requests,
            "steps": totals.steps,
            "preemptions": totals.preemptions,
            "tokens": totals.tokens,
            "cached_tokens": totals.cached_tokens,
            "empty_steps": totals.empty_steps,
            "empty_calls": totals.empty_calls,
            "self_preempt": sum(victim == by for victim, by, _ in victims),
            "victim_already_scheduled": sum(  # preemptions for a waiting request do not count
                by in order and order.index(victim) < order.index(by) for victim, by, order in victims
            ),
            "victim_in_flight": totals.victims_in_flight,
            "wasted_tokens": sum(life.wasted for life in self._lives.values()),
            "stale_outputs": totals.stale,
            "ignored": totals.ignored,
            "sleeps": totals.naps,
            "drafts_scheduled": totals.drafts,
            "drafts_accepted": totals.drafts_accepted,
            "most_adapters": totals.most_adapters,
            "encoded": totals.encoded,
            "evicted": totals.evicted,
            "makespan_ns": totals.end_ns,
            "all_finished": totals.finished == totals.requests,
        }
        if self.offload is not None:
            facts |= self.offload.totals
        if not facts["victim_already_scheduled"]:  # phantom hits come from chunks of such victims alone
            facts["phantom_hits"] = 0
        if totals.mid_prefill == totals.mid_recompute:  # else the recording does not say which of the two it counts
            facts["victim_mid_prefill"] = totals.mid_prefill
        return facts

    def blocked_head(self) -> str:
        """The request last blocked at the head of the queue, and the reason; "" if none ever was."""
        records = self.core.recorder.records()
        rows = records.states[records.states["state"] == BLOCKED]
        return f"request {rows['request_id'][-1]} ({records.texts[rows['reason'][-1]]})" if len(rows) else ""


def _processed(seq: Sequence) -> int:
    """Tokens of `seq` processed as Vidur counts: the computed ones, or all known ones once it decodes."""
    return seq.num_computed_tokens if seq.group is None else seq.num_tokens


def _last_start_ns(recorder: Recorder) -> int:
    """When the step recorded last began on the device, ns: the first column of its row."""
    rows = recorder.step_rows
    return struct.unpack_from("<q", rows, len(rows) - STEP_DTYPE.itemsize)[0]
