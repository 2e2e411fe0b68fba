"""EngineCore: one engine's inbox, one scheduler, one executor and their records; cranked by a driver that owns time.

The driver calls `schedule`, `execute` and `complete` in turn, or as far ahead of each other as the engine's `loop` has
it, pushes arrivals to `submit`, and passes on the events that come back. `batchsim.drive.instant` has the loops that do
it and, at its head, the order of an instant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush

from batchsim.base.errors import PolicyError, SchedulerStalled
from batchsim.base.units import counted
from batchsim.kernel.batch import IDLE, Batch, Idle, StepResult, check_end
from batchsim.kernel.chunks import advance_chunks
from batchsim.kernel.draft_group import DraftGroup, Verified
from batchsim.kernel.engine_loop import SYNC, EngineLoop
from batchsim.kernel.events import Cancelled, Ended, EngineEvent, Finished, HandedOver, Pruned, Rejected, Unfinished
from batchsim.kernel.in_flight import LaunchedStep, StepsInFlight
from batchsim.kernel.journal import ENDED, Journal, Reasons
from batchsim.kernel.kv_transfer import Connected, connected, keeps_kv
from batchsim.kernel.protocols import Executor, Scheduler, foreseeing, foresees_ends, steady, turning
from batchsim.kernel.record import OUTCOME_NAMES, Recorder
from batchsim.kernel.types import Arrival, Handover, Sequence

MAX_FRUITLESS_PREEMPTIONS = 10_000
"""Preemptions in a row without a new token; beyond it the run ends in an error, since the policy makes no progress."""


class EngineCore:
    """The engine without a clock. The order of one instant stands at the head of `drive/instant.py`.

    `per_chunk_ns` is the front end's time to deliver each piece of a response, `per_stream_ns` what the first one takes
    longer for each answer being streamed. `max_waiting` bounds the queue: arrivals beyond it are rejected, those of one
    instant counting against each other. At the first step boundary from `stop_ns` on all that is open ends unfinished.
    `tells_tokens`: `complete` also returns token events, at O(batch) a step. `loop`: how host and GPU take turns.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        recorder: Recorder,
        *,
        max_model_len: int,
        max_waiting: int | None = None,
        per_chunk_ns: int = 0,
        per_stream_ns: int = 0,
        stop_ns: int | None = None,
        tells_tokens: bool = False,
        loop: EngineLoop = SYNC,
    ) -> None:
        self.scheduler, self.executor, self.recorder = scheduler, executor, recorder
        self.max_model_len, self.max_waiting = max_model_len, max_waiting
        self.stop_ns = stop_ns
        self.tells_tokens = tells_tokens
        self.loop = loop
        self._ahead = loop.is_ahead
        self.steady = steady(scheduler)
        self.turning = turning(scheduler)
        self.foreseeing = foreseeing(scheduler)
        self.foresees_ends = foresees_ends(scheduler)
        self.connected = connected(scheduler)
        self.events: list[EngineEvent] = []  # what happened and was not returned yet
        self._inbox: list[tuple[int, int, Arrival]] = []
        self._timers: list[tuple[int, int, Sequence, str]] = []
        explicit = loop.kind == "events"
        self.journal = Journal(recorder, per_chunk_ns, per_stream_ns, ahead=self._ahead, explicit_sat_out=explicit)
        self.in_flight = StepsInFlight(loop)
        self._sending: set[Sequence] = set()  # handed over, their KV kept until it is sent
        self._fruitless = 0  # preemptions since the last token
        self._untold: list[Sequence] = []  # preempted by calls that had nothing to run, in no step yet
        self._stopped = False
        self._pruned: set[int] = set()  # ids of requests that were given up for another, of those yet to come too
        self.paused_until_ns = 0  # before which no step begins, though all KV is kept: other weights are loaded

    # ---- what a driver calls

    def submit(self, arrival: Arrival) -> None:
        """Puts an arrival in the inbox; it enters at the first `schedule` at or after its time."""
        heappush(self._inbox, (arrival.request.arrival_ns, arrival.request.id, arrival))

    def cancel(self, request_id: int, now_ns: int) -> None:
        """Ends an open request at its client's wish: at `now_ns`, or with the step that runs then, whose finish wins.

        A request that has ended is left alone. O(open requests).
        """
        for seq in self.journal.lives:
            if seq.request.id == request_id:
                heappush(self._timers, (now_ns, request_id, seq, "client_cancel"))
                return
        inbox = self._inbox
        for place, (time_ns, number, arrival) in enumerate(inbox):
            if number == request_id:
                inbox[place] = (time_ns, number, replace(arrival, cancel_ns=now_ns))

    def prune(self, request_id: int, now_ns: int) -> None:
        """As `cancel`, since another request has succeeded; a request that is yet to come ends as it enters."""
        self._pruned.add(request_id)
        self.cancel(request_id, now_ns)

    def release(self, seq: Sequence, now_ns: int, *, keep_kv: bool = False) -> Handover:
        """Takes an open request out of this engine, to go on at another; returns what leaves. Only between steps.

        Its KV is freed; with `keep_kv` only at `sent`, for an engine that has yet to pull it. ValueError if the request
        is not open here, has its last token, or a step runs.
        """
        life = self.journal.lives.get(seq)
        if life is None or seq.state == ENDED or self.in_flight.steps:
            raise ValueError(f"cannot be handed over at {now_ns} ns, in a step or out of all: {seq!r}")
        kv = self.scheduler.kv
        handover = Handover(life.arrival, self.journal.resume(seq), kv.held(seq), now_ns, seq)
        if keep_kv:
            kv.pin(seq)
            self._sending.add(seq)
        responses = self.scheduler.cancel(seq, now_ns)
        self._end(seq, now_ns, HandedOver, OUTCOME_NAMES[HandedOver.outcome])
        self._respond(responses, now_ns)
        return handover

    def sent(self, handover: Handover) -> None:
        """Frees the KV that `release` kept: the next engine has it, or the request ended on the way."""
        self._sending.remove(handover.seq)
        self.scheduler.kv.unpin(handover.seq)

    @property
    def has_work(self) -> bool:
        """Whether any submitted request has not been answered yet, or its blocks are kept for transfers."""
        return bool(self.journal.lives or self._inbox or (keeps_kv(self.connected) and not self._stopped))

    @property
    def has_entered(self) -> bool:
        """Whether any request that has entered has not been answered yet, or its blocks are kept for transfers."""
        return bool(self.journal.lives or (keeps_kv(self.connected) and not self._stopped))

    @property
    def has_arrivals(self) -> bool:
        """Whether any arrival was submitted that has not entered yet."""
        return bool(self._inbox)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait, those still in the inbox among them."""
        return self.scheduler.num_waiting + len(self._inbox)

    @property
    def queued_prompt_tokens(self) -> int:
        """Tokens of the prompts of requests that were never scheduled, those still in the inbox among them."""
        return self.journal.waiting_prompt_tokens + sum(each[2].request.prompt_tokens for each in self._inbox)

    @property
    def next_timer_ns(self) -> int | None:
        """The time in ns of the next deadline or cancel of a live request, or of the run's stop with work left."""
        due_ns = self._next_cancel_ns()
        if self.stop_ns is None or not self.journal.lives:
            return due_ns
        return self.stop_ns if due_ns is None else min(due_ns, self.stop_ns)

    def _next_cancel_ns(self) -> int | None:
        timers = self._timers
        while timers and timers[0][2] not in self.journal.lives:
            heappop(timers)
        return timers[0][0] if timers else None

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        """Applies cancels, deadlines and arrivals due, then returns the scheduler's step or wait.

        SchedulerStalled if it would wait for ever.
        """
        if self._inbox or self._timers or self.stop_ns is not None:
            self.events = self.enter_due(now_ns)
            if self._stopped:
                return IDLE
        if now_ns < self.paused_until_ns:
            return Idle(self.paused_until_ns)
        self.in_flight.called_ns = now_ns
        call: Callable[[int, bool], object] = self.scheduler.schedule  # a user's own may return anything
        work = call(now_ns, drain)
        reasons = self._drain_events(now_ns) if self.scheduler.events else None
        if isinstance(work, Idle):
            self._check_idle(work, now_ns, drain)
        elif type(work) is not Batch:
            raise self.policy_error(f"schedule() returned {work!r}, neither a Batch nor an Idle")
        else:
            if work.preempted or not work.num_decode:
                self._check_progress(work, now_ns)
                if self._ahead and not (work.chunks or work.num_decode):
                    self._untold += work.preempted
            if work.chunks or work.joined or work.left or work.preempted or work.swap_in or self.journal.prefilling:
                self.journal.scheduled(work, now_ns, reasons or {})
            if self._ahead and work.preempted:
                self._lose_in_flight(work)
        return work

    def enter_due(self, now_ns: int) -> list[EngineEvent]:
        """Applies what is due, as `schedule`; returns the events, to which clients may respond at this instant."""
        if self._inbox or (self._timers and self._timers[0][0] <= now_ns):
            self._take_due(now_ns)
        if self.stop_ns is not None and now_ns >= self.stop_ns:
            self.close(now_ns, "drain_limit")
        return self.take_events() if self.events else []

    def take_events(self) -> list[EngineEvent]:
        """What happened and was not returned yet: rejections by `schedule`, and what `close` and `fail` ended."""
        events, self.events = self.events, []
        return events

    def execute(self, batch: Batch, now_ns: int) -> int:
        """Launches the step that `schedule` returned at `now_ns`; returns its end in ns.

        It starts at once, or where the loop is ahead when the step before it leaves the device.
        """
        if self._untold:
            batch.preempted, self._untold = [*self._untold, *batch.preempted], []
        result: StepResult = self.executor.execute(batch)
        end_ns = now_ns + result.duration_ns
        check_end(end_ns, result.duration_ns)
        pairs = sampled = 0
        if batch.chunks:
            pairs, sampled = advance_chunks(batch, self.scheduler.kv, self.journal, self.policy_error)
        group = batch.decodes
        if group is not None:
            if batch.drafting is None:
                group.advance()
            else:
                self._verify(batch, result.verified)
            batch.group_step = group.step
        if sampled or batch.num_decode or result.finished:
            self._fruitless = 0
        start_ns, duration_ns = now_ns, result.duration_ns
        if self._ahead:
            _, process_ns = batch.host_ns or self.executor.host_ns(batch)
            start_ns, end_ns = self.in_flight.launch(batch, result, now_ns, process_ns)
            duration_ns = end_ns - start_ns
            self.recorder.lanes.launched(self.in_flight.called_ns, now_ns)
        else:
            if batch.load is not None:
                duration_ns = (end_ns := batch.load.beside(now_ns, end_ns)) - now_ns
            self.in_flight.steps.append(LaunchedStep(batch, result.finished, end_ns))
        if batch.load is not None:
            self.journal.kv_copied(batch.load, self.in_flight.called_ns, start_ns)
        self.journal.beside(batch, result, start_ns)
        if self.tells_tokens and group is not None:
            self.in_flight.steps[-1].decodes = list(group.members)
        self.journal.step(self.scheduler, batch, start_ns, duration_ns, pairs, sampled)
        if self.connected is not None:
            self.connected.connector.launched(now_ns, end_ns)
        return end_ns

    def complete(self, now_ns: int) -> list[EngineEvent]:
        """Ends the oldest step in flight: tokens are emitted, the policy frees the finished, responses go out.

        Returns what happened since events were last returned.
        """
        step = self.land()
        if self._ahead:
            self.recorder.lanes.processed(now_ns, step.wasted_tokens)
        return self.deliver(step, now_ns)

    def notice(self, connected: Connected, now_ns: int) -> list[EngineEvent]:
        """`complete` of a call that had nothing to run, at whose launch transfers of KV may have been over."""
        connected.notice()
        self._drain_events(now_ns)
        return self.take_events()

    def land(self) -> LaunchedStep:
        """Takes out the oldest step in flight, which is over, for `deliver`."""
        if not self._ahead:
            return self.in_flight.steps.popleft()
        if self.in_flight.steps[0].landing is not None:
            self.in_flight.wait_for(0, self.journal)
        return self.in_flight.land(self.journal.lives)

    def deliver(self, step: LaunchedStep, now_ns: int) -> list[EngineEvent]:
        """`complete` of the step that `land` took out, but for the row of the host's part of it."""
        batch, finished = step.batch, step.finished
        self.journal.tokens(batch, finished, now_ns)
        if self.tells_tokens:
            self.events += step.tokens(self.journal.lives)
        self._respond(self.scheduler.complete(batch, finished, now_ns), now_ns)
        if self.scheduler.events:
            self._drain_events(now_ns)
        return self.take_events() if self.events else []

    def close(self, now_ns: int, reason: str) -> None:
        """Ends every open request as `unfinished`, those with a response held back too; KV in use is not freed."""
        self._stopped = True
        for _, _, arrival in sorted(self._inbox):
            self._begin(arrival)
        self._inbox = []
        for seq in list(self.journal.lives):
            self._end(seq, now_ns, Unfinished, reason)

    def fail(self, now_ns: int, reason: str) -> list[Arrival]:
        """Ends every open request as `unfinished`, the running step cut at `now_ns` and its tokens lost.

        Returns the arrivals of these requests, in order of entering.
        """
        self.recorder.cut_last_steps(len(self.in_flight.steps), now_ns)
        opened = [life.arrival for life in self.journal.lives.values()]
        opened += [arrival for _, _, arrival in sorted(self._inbox)]
        self.close(now_ns, reason)
        self.in_flight.steps.clear()
        return opened

    # ---- one instant

    def _take_due(self, now_ns: int) -> None:
        """Applies timers due, then arrivals due, until none is: an arrival may bring a deadline that has passed."""
        timers, inbox = self._timers, self._inbox
        while True:
            while timers and timers[0][0] <= now_ns:
                _, _, seq, reason = heappop(timers)
                if seq not in self.journal.lives:
                    continue
                # One that has its last token but is held back with its batch is given up by its client alone.
                responses = self.scheduler.cancel(seq, now_ns) if seq.state != ENDED else []
                if seq.request.id in self._pruned:
                    self._end(seq, now_ns, Pruned, "another_succeeded")
                else:
                    self._end(seq, now_ns, Cancelled, reason)
                self._respond(responses, now_ns)
            if not inbox or inbox[0][0] > now_ns:
                return
            self._enter(heappop(inbox)[2], now_ns)

    def _begin(self, arrival: Arrival) -> Sequence:
        request, resume = arrival.request, arrival.resume
        seq = Sequence(request) if resume is None else resume.sequence(request)
        self.journal.begin(seq, arrival)
        return seq

    def _enter(self, arrival: Arrival, now_ns: int) -> None:
        request, seq = arrival.request, self._begin(arrival)
        if request.prompt_tokens >= self.max_model_len:
            detail = f"prompt of {request.prompt_tokens} tokens, max_model_len {self.max_model_len}"
            self._reject(seq, now_ns, "prompt_too_long", detail)
            return
        if self.max_waiting is not None and self.scheduler.num_waiting >= self.max_waiting:
            detail = f"{counted(self.max_waiting, 'request waits', 'requests wait')} already"
            self._reject(seq, now_ns, "queue_full", detail)
            return
        self.scheduler.add(seq, now_ns)
        if self.scheduler.events:
            self._drain_events(now_ns)
        if seq.state == ENDED:
            return
        self.executor.begin(seq, arrival.output_tokens)
        if request.deadline_ns is not None:
            heappush(self._timers, (request.deadline_ns, request.id, seq, "deadline"))
        if self._pruned and request.id in self._pruned:
            heappush(self._timers, (now_ns, request.id, seq, "client_cancel"))
        elif arrival.cancel_ns is not None:
            heappush(self._timers, (arrival.cancel_ns, request.id, seq, "client_cancel"))

    def _reject(self, seq: Sequence, now_ns: int, reason: str, detail: str) -> None:
        self.recorder.details.setdefault(reason, detail)
        self._end(seq, now_ns, Rejected, reason)

    def _check_idle(self, idle: Idle, now_ns: int, drain: bool) -> None:
        is_awaited = self.in_flight.steps or self._sending or self.connected is not None
        nothing_comes = drain and self.journal.lives and not is_awaited
        if idle.until_ns is not None:
            if idle.until_ns <= now_ns:
                raise SchedulerStalled(f"asks at {now_ns} ns to wait until {idle.until_ns} ns. {self._dump()}")
        elif nothing_comes and self._next_cancel_ns() is None:
            raise SchedulerStalled(f"nothing is due after {now_ns} ns and the scheduler waits. {self._dump()}")

    def _dump(self) -> str:
        scheduler = self.scheduler
        first = next(iter(self.journal.lives), None)
        return (
            f"{type(scheduler).__name__}: {scheduler.num_waiting} waiting, {scheduler.num_running} running,"
            f" {scheduler.kv.num_free} of {scheduler.kv.num_blocks} KV blocks free; oldest: {first!r}"
        )

    # ---- drafts, and tokens that are lost

    def _lose_in_flight(self, batch: Batch) -> None:
        """Takes back tokens in flight that the policy gave up with those it preempted."""
        for seq in batch.preempted:
            if seq.num_lost_tokens:
                self.in_flight.lose(seq)
                seq.num_lost_tokens = seq.num_rejected_tokens = 0

    def _verify(self, batch: Batch, verified: Verified | None) -> None:
        """Moves the members of a group that verifies drafts on by what they got; None: that is known as it lands."""
        group, drafting = batch.decodes, batch.drafting
        assert isinstance(group, DraftGroup) and drafting is not None
        if verified is not None:
            batch.num_accepted_tokens = verified.num_accepted
        group.verify(drafting, verified, ahead=self._ahead)

    # ---- what the policy says

    def _drain_events(self, now_ns: int) -> Reasons:
        """Writes queue-head reasons, ends the rejected, and returns the reasons of this call's state changes."""
        events, self.scheduler.events = self.scheduler.events, []
        reasons: Reasons = {}
        if firsts := [event for event in events if event.kind == "first_token"]:
            self.journal.delivered_first(firsts, now_ns)
            self._respond([event.seq for event in firsts if event.reason == "last"], now_ns)
        for event in events:
            if event.kind in ("blocked", "held_back", "waits"):
                self.journal.waits(event, now_ns)
            elif event.kind == "rejected":
                self._reject(event.seq, now_ns, event.reason, event.detail)
            elif event.kind in ("preempted", "sat_out"):
                reasons[event.seq] = (event.reason, event.blocker)
            elif event.kind != "first_token":
                raise self.policy_error(f"emits an event of kind {event.kind!r}, of which there is none")
        return reasons

    def _check_progress(self, batch: Batch, now_ns: int) -> None:
        """Raises SchedulerStalled for an empty batch, or where preemptions go round without a token."""
        if not (batch.chunks or batch.num_decode or batch.preempted or batch.swap_in):
            raise SchedulerStalled(f"empty batch at {now_ns} ns with nothing preempted or swapped in. {self._dump()}")
        self._fruitless += len(batch.preempted)
        if self._fruitless > MAX_FRUITLESS_PREEMPTIONS:
            raise SchedulerStalled(f"{self._fruitless} preemptions without a token by {now_ns} ns. {self._dump()}")

    def policy_error(self, what: str) -> PolicyError:
        """The error that the policy did `what`."""
        return PolicyError(f"{type(self.scheduler).__name__}: {what}. Correct the policy.")

    def check_returned(self) -> None:
        """Raises PolicyError, at the end of a run that was not stopped, unless all KV memory has come back."""
        kv = self.scheduler.kv
        if not self._stopped and (kv.num_free, kv.num_swap_free) != (kv.num_blocks, kv.num_swap_blocks):
            raise self.policy_error(f"{kv.num_free} of {kv.num_blocks} KV blocks are free after the last request")

    def _respond(self, responses: list[Sequence], now_ns: int) -> None:
        """Finishes the requests whose responses the policy sends, but for those whose clients have given up."""
        for seq in responses:
            if seq in self.journal.lives:
                self._end(seq, now_ns, Finished, self.journal.cap_cut(seq))

    def _end(self, seq: Sequence, now_ns: int, ended: type[Ended | HandedOver], reason: str) -> None:
        """Ends the request of `seq` at this engine and adds the event, an `ended`."""
        in_flight = self.in_flight
        undelivered = 0
        # For finished sequences `in_flight.land` has noted what is computed in vain.
        if in_flight.steps and ended is not Finished and not seq.num_wasted_tokens:
            undelivered = in_flight.waste(seq)
        streams = self.scheduler.streams
        made = self.journal.end(seq, now_ns, ended.outcome, reason, streams=streams, undelivered=undelivered)
        self.executor.end(seq)
        self.events.append(ended(seq.request, reason, made))
