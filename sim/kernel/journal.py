"""Journal: the life of every request, written to the records as it happens.

The journal reads batches and sequences and never decides anything: policies report reasons, and states follow from what
each batch changes. A sequence begins in state 0 (queued). In the order in which they are applied, the transitions are:

    the batch has the sequence in      from                            to          reason of the row
    ---------------------------------  ------------------------------  ----------  --------------------------------
    preempted and swap_out             any that runs                   SWAPPED     the policy's, "" without one
    preempted alone                    any that runs                   PREEMPTED   the policy's, "" without one
    left, and it has no group now      DECODE                          SAT_OUT     the policy's, "" without one [1]
    joined or swap_in, with a group    SAT_OUT, SWAPPED                DECODE
    chunks, computed so before         any but PREFILL, RECOMPUTE      RECOMPUTE
    chunks, for the first time         any but PREFILL, RECOMPUTE      PREFILL
    nowhere, after a chunk in the      PREFILL, RECOMPUTE              SAT_OUT     the policy's, "token_budget"
      last step, its prompt not done                                               without one [2]
    sampled, as the step ends          PREFILL, RECOMPUTE              DECODE
    finished, as the step ends; or     any                             ENDED       (the request's row has the outcome)
      cancelled, rejected, unfinished

1. Ahead of results only with a reason, and then from PREFILL and RECOMPUTE too: a sequence with its last token in
   flight is not scheduled again and does not sit out; one with its first token in flight could decode.
2. With `explicit_sat_out` only with a reason: without one a chunk of the prompt is in flight.

BLOCKED is the state of the queue, not of a sequence: a row each time that its head, or what blocks it, changes.
HELD_BACK is a remark on a sequence in the queue: others overtake it, for a reason of its own, until a row without one
or its next state. ADAPTER names the LoRA adapter that a request asks for; LOADING and LOADED, of the request for which
that is done, are a load from disk or host memory; LOADED alone: it was there as the request ran for the first time.
ENCODED is none either: a row for each request of a step that encodes items of it, with the step's start and, in the
place of the blocker, the ns that they take. MASKED likewise: a row for each step whose sampling waits for masks, of the
first request that needs one, with the ns of the wait. TIER_LOAD and TIER_STORE: a transfer of a request from or to a
tier of KV beyond the GPU begins, of as many tokens as stand in the place of the blocker. STORE_FLUSH: from then on, for
as many ns as stand there, the device stands idle until that request's KV is stored. LOAD_WAITED, after
the rows of all that is loaded beside one step: the step begins then, and is longer by the ns that stand there.
`kernel/offload.py` and `kernel/host_copies.py` write what the journal does not.
"""

from __future__ import annotations

import struct

from batchsim.base.errors import ScenarioError
from batchsim.kernel.batch import AdapterLoad, Batch, Masks, StepResult
from batchsim.kernel.host_link import LayerCopies, LayerLoad, StepCopies
from batchsim.kernel.protocols import Scheduler
from batchsim.kernel.record import (
    ADAPTER,
    BLOCKED,
    CAP_CUT,
    DECODE,
    ENCODED,
    FINISHED,
    HELD_BACK,
    LOAD_WAITED,
    LOADED,
    LOADING,
    MASKED,
    MISSING,
    PACK_BYTES,
    PREEMPTED,
    PREFILL,
    RECOMPUTE,
    SAT_OUT,
    SWAPPED,
    TIER_LOAD,
    TIER_STORE,
    WAITING,
    Recorder,
    pack_step,
)
from batchsim.kernel.types import Arrival, Event, Resume, Sequence

ENDED = -1
"""The state of a sequence that has produced its last token or was given up; a sequence begins in state 0, queued."""

Reasons = dict[Sequence, tuple[str, int | None]]
"""Why a policy changed a sequence's state in one call, and which request stood in its way."""


class _Life:
    """What the records need to remember of a request while it lives."""

    __slots__ = (
        "arrival",
        "cached",
        "cached_all",
        "computed_once",
        "first_token_ns",
        "last_token_ns",
        "output_tokens",
        "preemptions",
        "recomputed",
        "scheduled_ns",
        "streams",
        "swaps",
    )

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self.scheduled_ns = self.first_token_ns = self.last_token_ns = MISSING
        self.output_tokens = self.preemptions = self.swaps = self.recomputed = self.cached = self.cached_all = 0
        self.streams = 0  # answers that were being streamed with its first token, its own included
        self.computed_once = 0  # high-water mark of computed tokens: below it, computing again is recompute
        if (resume := arrival.resume) is not None:
            self.scheduled_ns, self.first_token_ns = resume.scheduled_ns, resume.first_token_ns
            self.preemptions, self.swaps, self.recomputed = (
                resume.num_preemptions,
                resume.num_swaps,
                resume.recomputed_tokens,
            )
            self.cached, self.cached_all = resume.cached_tokens, resume.cached_tokens_all
            self.computed_once = resume.computed_once


class Journal:
    """The open requests of one engine and the rows they leave. `lives` holds them in order of entering.

    `adapter_names`: those of LoRA adapters by number, where they have names. `explicit_sat_out`: only sequences that
    the policy reports as `sat_out` sit out; otherwise any prompt without a chunk in a step does.
    """

    def __init__(
        self,
        recorder: Recorder,
        per_chunk_ns: int,
        per_stream_ns: int = 0,
        *,
        ahead: bool = False,
        explicit_sat_out: bool = False,
    ) -> None:
        self.recorder = recorder
        self.per_chunk_ns = per_chunk_ns
        self.per_stream_ns = per_stream_ns
        self.num_streams = 0  # open requests that have a token
        self.streams_told = 0  # the same with the latest tokens, before any of them ended
        self._ahead = ahead
        self._explicit_sat_out = explicit_sat_out
        self.adapter_names: tuple[str, ...] = ()
        self.lives: dict[Sequence, _Life] = {}
        self.first_tokens: list[int] | None = None  # ids of requests whose first token is out; None: not collected
        self.prefilling: dict[Sequence, None] = {}  # had a chunk in the last step, and are not done

    def begin(self, seq: Sequence, arrival: Arrival) -> None:
        life = self.lives[seq] = _Life(arrival)
        self.num_streams += life.first_token_ns != MISSING
        request = seq.request
        if request.adapter != MISSING:
            names = self.adapter_names
            name = names[request.adapter] if names else str(request.adapter)
            self.recorder.state(request.arrival_ns, request.id, ADAPTER, name)

    def loaded(self, loads: list[AdapterLoad] | tuple[()], start_ns: int) -> None:
        """Notes what LoRA adapters took to be ready, one after another from the start of a step on."""
        at_ns, row = start_ns, self.recorder.state
        for seq, source, ns in loads:
            if source:
                row(at_ns, seq.request.id, LOADING, source)
                at_ns += ns
            row(at_ns, seq.request.id, LOADED)

    @property
    def waiting_prompt_tokens(self) -> int:
        """Tokens of the prompts of requests that were never scheduled."""
        waiting = (life.arrival for life in self.lives.values() if life.scheduled_ns == MISSING)
        return sum(arrival.request.prompt_tokens for arrival in waiting)

    def computed(self, seq: Sequence, done: int) -> None:
        """Notes that a chunk takes `seq`, still at its old count, to `done` tokens; with all, its prompt ends."""
        life, before = self.lives[seq], seq.settled_computed_tokens
        if before < life.computed_once:
            life.recomputed += min(done, life.computed_once) - before
        if done > life.computed_once:
            life.computed_once = done
        if done == seq.num_tokens:
            del self.prefilling[seq]

    def step(
        self, scheduler: Scheduler, batch: Batch, start_ns: int, duration_ns: int, pairs: int, sampled: int
    ) -> None:
        """Writes the row of a step, in the order of STEP_COLUMNS."""
        swap_blocks = 0
        if batch.swap_out or batch.swap_in:
            swap_blocks = sum(n for _, n in batch.swap_out) + sum(n for _, n in batch.swap_in)
        cached = sum([n for _, n in batch.cached]) if batch.cached else 0
        recorder = self.recorder
        if len(recorder.step_rows) > PACK_BYTES:
            recorder.pack_steps()
        try:
            recorder.step_rows += pack_step(
                start_ns, duration_ns, batch.context_tokens, pairs, batch.pad_context_tokens, batch.num_decode,
                batch.num_decode_tokens, batch.num_accepted_tokens, batch.num_prefill_tokens, len(batch.chunks),
                sampled, batch.pad_prefill_tokens, batch.pad_prefill_rows, batch.pad_decode_rows, swap_blocks,
                len(batch.preempted), scheduler.kv.num_free, scheduler.num_waiting, scheduler.num_running, cached,
                batch.num_passes, batch.num_wide_passes, batch.window_tokens, batch.window_pairs,
            )  # fmt: skip
        except struct.error:
            raise ScenarioError(
                f"{type(scheduler).__name__}: a step of {batch.num_prefill_tokens:,} tokens of prompts and"
                f" {batch.pad_prefill_tokens:,} of padding is more than a column of the records holds. Lower the batch"
                " sizes of the policy."
            ) from None

    def waits(self, event: Event, now_ns: int) -> None:
        """Notes that the head of the queue, or what blocks it, changed; or that a request in the queue is held back for
        a reason of its own from now on; without one, that it no longer is; or that it waits for something apart."""
        state = BLOCKED if event.kind == "blocked" else HELD_BACK if event.kind == "held_back" else WAITING
        self.recorder.state(now_ns, event.seq.request.id, state, event.reason, event.blocker)

    def beside(self, batch: Batch, result: StepResult, start_ns: int) -> None:
        """Notes what the step that begins at `start_ns` waits for and loads beside its forward."""
        if result.encode_ns is not None:
            self.encoded(batch, result.encode_ns, start_ns)
        if result.masks is not None:
            self.masked(result.masks, start_ns)
        if result.loads:
            self.loaded(result.loads, start_ns)

    def encoded(self, batch: Batch, encode_ns: list[int], start_ns: int) -> None:
        """Notes how long the encoder takes for the items of each request, before the forward of the step that begins at
        `start_ns`."""
        for (seq, _), ns in zip(batch.encoded, encode_ns, strict=True):
            if ns:
                self.recorder.state(start_ns, seq.request.id, ENCODED, "", ns)

    def masked(self, masks: Masks, start_ns: int) -> None:
        """Notes how long sampling of the step that begins at `start_ns` waits for its masks."""
        if masks.wait_ns:
            self.recorder.state(start_ns, masks.sequences[0].request.id, MASKED, "", masks.wait_ns)

    def kv_copied(self, load: LayerLoad | StepCopies | LayerCopies, called_ns: int, start_ns: int) -> None:
        """Notes what the call of the scheduler at `called_ns` has copied for its step, which begins at `start_ns`, and
        by how long that is longer."""
        row = self.recorder.state
        stored = [] if isinstance(load, LayerLoad) else load.stored
        for seq, tokens in load.parts:
            row(called_ns, seq.request.id, TIER_LOAD, "host", tokens)
        for seq, tokens in stored:
            row(called_ns, seq.request.id, TIER_STORE, "host", tokens)
        first, _ = (load.parts or stored)[0]
        row(start_ns, first.request.id, LOAD_WAITED, "", load.wait_ns)

    def scheduled(self, batch: Batch, now_ns: int, reasons: Reasons) -> None:
        """Writes the state changes that the batch, about to run at `now_ns`, brings."""
        row = self.recorder.state
        swapped_out = {seq for seq, _ in batch.swap_out}
        for seq in batch.preempted:
            life = self.lives[seq]
            # A prompt that sat out is computed no further than its chunks went, which `computed` has noted.
            if seq.state == DECODE or (seq.state == SAT_OUT and life.first_token_ns != MISSING):
                known = seq.num_tokens + seq.num_lost_tokens - seq.num_rejected_tokens
                life.computed_once = max(life.computed_once, known - 1)
            self.prefilling.pop(seq, None)
            seq.state = SWAPPED if seq in swapped_out else PREEMPTED
            if seq.state == SWAPPED:
                life.swaps += 1
            life.preemptions += 1
            row(now_ns, seq.request.id, seq.state, *reasons.get(seq, ("", None)))
        for seq in batch.left:
            decodes = seq.state == DECODE or (self._ahead and seq.state in (PREFILL, RECOMPUTE))
            if decodes and seq.group is None and (seq in reasons or not self._ahead):
                seq.state = SAT_OUT
                row(now_ns, seq.request.id, SAT_OUT, *reasons.get(seq, ("", None)))
        for seq in [*batch.joined, *(seq for seq, _ in batch.swap_in)]:
            if seq.state in (SAT_OUT, SWAPPED) and seq.group is not None:
                seq.state = DECODE
                row(now_ns, seq.request.id, DECODE)
        for seq, tokens in batch.cached:
            life = self.lives[seq]
            life.cached_all += tokens
            if life.scheduled_ns == MISSING:
                life.cached = tokens
        if batch.chunks or self.prefilling:
            self._prefills(batch, now_ns, reasons)

    def rejected(self, seq: Sequence, count: int) -> None:
        """Notes that `count` draft tokens of `seq` in flight turn out rejected, which it kept if it was preempted."""
        if seq.state == PREEMPTED and seq in self.lives:
            self.lives[seq].computed_once -= count

    def _prefills(self, batch: Batch, now_ns: int, reasons: Reasons) -> None:
        row, prefilling = self.recorder.state, self.prefilling
        for seq, _ in batch.chunks:
            if seq.state in (PREFILL, RECOMPUTE):
                continue
            life = self.lives[seq]
            if life.scheduled_ns == MISSING:
                life.scheduled_ns = now_ns
            seq.state = RECOMPUTE if seq.settled_computed_tokens < life.computed_once else PREFILL
            prefilling[seq] = None
            row(now_ns, seq.request.id, seq.state)
        if len(prefilling) > len(batch.chunks):
            running = {seq for seq, _ in batch.chunks}
            for seq in [
                seq for seq in prefilling if seq not in running and (seq in reasons or not self._explicit_sat_out)
            ]:
                del prefilling[seq]
                seq.state = SAT_OUT
                row(now_ns, seq.request.id, SAT_OUT, *reasons.get(seq, ("token_budget", None)))

    def tokens(self, batch: Batch, finished: list[Sequence], now_ns: int) -> None:
        """Notes what the step's tokens, out at `now_ns`, change: first and last ones, prefills that go on to decode."""
        begun: list[_Life] = []
        for seq in batch.sampled:
            life = self.lives[seq]
            if life.first_token_ns == MISSING:
                life.first_token_ns = now_ns
                begun.append(life)
                if self.first_tokens is not None:
                    self.first_tokens.append(seq.request.id)
            if seq.state in (PREFILL, RECOMPUTE):
                seq.state = DECODE
        self.num_streams += len(begun)
        self.streams_told = self.num_streams
        for life in begun:
            life.streams = self.num_streams
        for seq in finished:
            life = self.lives[seq]
            life.last_token_ns = now_ns
            life.output_tokens = seq.num_output_tokens - seq.num_wasted_tokens
            seq.state = ENDED
        for seq in batch.sampled:
            if seq.state == DECODE:
                self.recorder.state(now_ns, seq.request.id, DECODE)

    def delivered_first(self, firsts: list[Event], now_ns: int) -> None:
        """Notes that first tokens which came with the KV of their prompts are out at `now_ns`."""
        self.num_streams += len(firsts)
        self.streams_told = self.num_streams
        for event in firsts:
            seq = event.seq
            life = self.lives[seq]
            life.first_token_ns, life.streams = now_ns, self.num_streams
            if self.first_tokens is not None:
                self.first_tokens.append(seq.request.id)
            seq.state = DECODE
            if event.reason == "last":
                life.last_token_ns, life.output_tokens, seq.state = now_ns, 1, ENDED
            else:
                self.recorder.state(now_ns, seq.request.id, DECODE)

    def resume(self, seq: Sequence) -> Resume:
        """What the open request of `seq` would take along to another engine. Between steps."""
        life, computed = self.lives[seq], seq.num_computed_tokens
        return Resume(
            computed,
            seq.num_output_tokens,
            max(life.computed_once, computed),
            life.scheduled_ns,
            life.first_token_ns,
            life.preemptions,
            life.swaps,
            life.recomputed,
            life.cached,
            life.cached_all,
        )

    def cap_cut(self, seq: Sequence) -> str:
        """CAP_CUT if `seq` ended where the policy had lowered its cap to, else ""."""
        asked, cap = seq.request.max_output_tokens, seq.max_output_tokens
        if cap == asked or seq.num_output_tokens - seq.num_wasted_tokens < cap:
            return ""
        self.recorder.details.setdefault(CAP_CUT, f"{asked} output tokens asked for, {cap} allowed")
        return CAP_CUT

    def end(self, seq: Sequence, now_ns: int, outcome: int, reason: str, *, streams: bool, undelivered: int = 0) -> int:
        """Writes the row of the request of `seq`, of whose tokens `undelivered` are in flight, forgets it, and returns
        its output tokens.

        A finished request is delivered now, or where the policy `streams` was with its last token.
        """
        life = self.lives.pop(seq)
        self.num_streams -= life.first_token_ns != MISSING
        self.prefilling.pop(seq, None)
        finished = outcome == FINISHED
        output_tokens = life.output_tokens or seq.num_output_tokens - undelivered
        seq.state = ENDED
        request = seq.request
        sent_ns, submitted_ns = life.arrival.sent_ns, life.arrival.submitted_ns
        first_delivery = delivered = MISSING
        if finished:
            delivered = (life.last_token_ns if streams else now_ns) + self.per_chunk_ns
            first_delivery = life.first_token_ns + self.per_chunk_ns + self.per_stream_ns * life.streams
            has_token = life.first_token_ns != MISSING
            first_delivery = min(first_delivery, delivered) if streams and has_token else delivered
        self.recorder.request(
            request.id,
            self.recorder.text(request.request_class),
            self.recorder.text(request.tenant),
            request.priority,
            request.arrival_ns if sent_ns is None else sent_ns,
            request.arrival_ns,
            request.prompt_tokens,
            request.max_output_tokens,
            output_tokens,
            life.scheduled_ns,
            life.first_token_ns,
            life.last_token_ns,
            first_delivery,
            delivered,
            life.last_token_ns if finished else now_ns,
            outcome,
            self.recorder.text(reason),
            life.preemptions,
            life.swaps,
            life.recomputed,
            life.cached,
            life.cached_all,
            0 if submitted_ns is None else submitted_ns - request.arrival_ns,
            life.arrival.router_ns,
            life.arrival.failover_ns,
            life.arrival.num_retries,
        )
        return output_tokens
