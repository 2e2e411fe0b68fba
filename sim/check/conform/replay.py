"""Runs batchsim's scheduler on a recording's requests, each step in its recorded time, and gives each step's facts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from batchsim.base.errors import ScenarioError
from batchsim.check.conform.recording import BadRecording, Recording
from batchsim.drive.instant import ENTER, SETTLE, THROUGH, crank
from batchsim.drive.source import Traffic, VirtualClock
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import EngineEvent, Finished, Rejected
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import BLOCKED, PREEMPTED, Recorder
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Arrival, Batch, Idle, Request, Sequence
from batchsim.kv.choice import new_kv
from batchsim.policies.registry import POLICIES


@dataclass(frozen=True)
class State:
    """What the engine held when the scheduler was asked. `running`: (request, computed, known tokens) by admission."""

    running: list[tuple[int, int, int]]
    waiting: list[int]
    free_blocks: int


@dataclass(frozen=True)
class Step:
    """One replayed step: its facts by name, facts of requests that are final with it, and the state before it."""

    facts: dict[str, Any]
    requests: list[tuple[int, dict[str, Any]]]
    before: State


@dataclass
class _Life:
    """Counts of one request; `first_hit`, `hits`: tokens found in a prefix cache, at the first and all admissions."""

    first_hit: int = 0
    hits: int = 0
    admissions: int = 0
    preemptions: int = 0


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
    mid_prefill: int = 0
    mid_recompute: int = 0
    end_ns: int = 0


class _RecordedTimes:
    """The recorded duration of each step, as a cost model. Steps beyond the recording's end take 1 ns."""

    def __init__(self, durations_ns: list[int]) -> None:
        self._durations_ns = iter(durations_ns)

    def step_ns(self, batch: Batch) -> int:
        return next(self._durations_ns, 1)


class _Arrivals:
    """The recorded requests as a workload."""

    def __init__(self, arrivals: list[Arrival]) -> None:
        self._arrivals = arrivals

    def arrivals(self) -> Iterator[Arrival]:
        return iter(self._arrivals)

    def responded(self, request: Request, now_ns: int) -> Arrival | None:
        return None


@dataclass
class Replay:
    """One replay. `steps()` may be iterated once; `totals`, `core` and `rejected` are as of the last step it gave."""

    recording: Recording
    core: EngineCore = field(init=False)
    totals: Totals = field(default_factory=Totals)
    rejected: list[int] = field(default_factory=list[int])
    _inside: dict[Sequence, None] = field(default_factory=dict[Sequence, None])  # running, by admission
    _lives: dict[int, _Life] = field(default_factory=dict[int, _Life])
    _orders: list[list[int]] = field(default_factory=list[list[int]])  # ids of the running requests at each preemption
    _finished: list[int] = field(default_factory=list[int])  # ids of the requests that the latest step finished

    def __post_init__(self) -> None:
        self.core = _engine(self.recording)
        self._traffic = Traffic(_Arrivals(self.recording.arrivals))

    def steps(self) -> Iterator[Step]:
        """Runs the replay, giving each step once it has ended."""
        core, clock = self.core, VirtualClock()
        self.totals.requests = len(self.recording.arrivals)
        loop = crank(core, self, settles=True)
        wait, settled = next(loop), list[tuple[int, dict[str, Any]]]()
        before, known, facts = self._state(), dict[Sequence, int](), dict[str, Any]()
        while wait is not THROUGH:
            now_ns = clock.now_ns()
            if wait is ENTER:
                if facts:
                    settled += self._ended(facts, now_ns)
                    yield Step(facts, settled, before)
                    facts = {}
                self._traffic.submit_due(core, now_ns)
            elif wait is SETTLE:
                before, known = self._state(), {seq: self._processed(seq) for seq in self._inside}
            elif isinstance(wait, Batch):
                facts = self._scheduled(wait, now_ns, known)
                settled = self._admitted(wait, now_ns)
                end_ns = core.execute(wait, now_ns)
                clock.sleep_until(end_ns)
                settled += self._sampled(wait, end_ns)
            else:
                assert isinstance(wait, Idle)
                wakes = [ns for ns in (wait.until_ns, self._traffic.next_ns) if ns is not None]
                if wakes:
                    clock.sleep_until(min(wakes))
            wait = loop.send(clock.now_ns())

    def is_over(self) -> bool:
        """Whether all of the recording's requests have arrived."""
        return self._traffic.next_ns is None

    def tell(self, events: Iterable[EngineEvent], now_ns: int) -> None:
        """Notes which requests were rejected or finished; no client answers."""
        for event in events:
            if isinstance(event, Rejected):
                self.rejected.append(event.request.id)
            elif isinstance(event, Finished):
                self._finished.append(event.request.id)

    # ---- what a step did

    def _scheduled(self, work: Batch, now_ns: int, known: dict[Sequence, int]) -> dict[str, Any]:
        """The facts of a step known once it is scheduled; adds it to the totals."""
        items, kv, totals = list(work.items()), self.core.scheduler.kv, self.totals
        tokens = sum(n for _, n in items)
        law = self.recording.law
        totals.steps += 1
        totals.tokens += tokens
        totals.empty_steps += not items
        for seq in work.preempted:
            totals.preemptions += 1
            self._life(seq).preemptions += 1
            totals.mid_prefill += known[seq] < seq.request.prompt_tokens
            totals.mid_recompute += known[seq] < seq.num_tokens
            self._orders.append([running.request.id for running in known])
            del self._inside[seq]
        return {
            "index": totals.steps - 1,
            "start_ns": now_ns,
            "scheduled": [[seq.request.id, n] for seq, n in items],
            "processed_before": [self._processed(seq) for seq, _ in items],
            "phase": ["prefill" if seq.group is None else "decode" for seq, _ in items],
            "cached": [[seq.request.id, n] for seq, n in work.cached],
            "preempted": [seq.request.id for seq in work.preempted],
            "preempted_at_ns": [now_ns for _ in work.preempted],
            "lost_tokens": [known[seq] for seq in work.preempted],
            "free_blocks_sched": kv.num_free,
            "allocated_blocks": kv.num_blocks - kv.num_free,
            "end_ns": now_ns + law.step_ns(tokens) if law is not None else None,
        }

    def _admitted(self, work: Batch, now_ns: int) -> list[tuple[int, dict[str, Any]]]:
        """Counts this step's admissions; returns (request id, facts) of the requests admitted for the first time."""
        settled: list[tuple[int, dict[str, Any]]] = []
        hits = dict(work.cached)
        for seq, _ in list(work.items()):
            if seq in self._inside:
                continue
            self._inside[seq] = None
            life, hit = self._life(seq), hits.get(seq, 0)
            life.admissions += 1
            life.hits += hit
            self.totals.cached_tokens += hit
            if life.admissions == 1:
                life.first_hit = hit
                settled.append((seq.request.id, {"arrival_ns": seq.request.arrival_ns, "scheduled_ns": now_ns}))
        return settled

    def _sampled(self, work: Batch, end_ns: int) -> list[tuple[int, dict[str, Any]]]:
        return [(seq.request.id, {"first_token_ns": end_ns}) for seq in work.sampled if seq.num_output_tokens == 1]

    def _ended(self, facts: dict[str, Any], end_ns: int) -> list[tuple[int, dict[str, Any]]]:
        """Adds the facts known after the step to `facts`; returns (request id, facts) of the requests it finished."""
        core, settled = self.core, []
        finished, self._finished = self._finished, []
        facts |= {
            "finished": finished,
            "free_blocks_after": core.scheduler.kv.num_free,
            "num_waiting": core.scheduler.num_waiting,
            "num_running": core.scheduler.num_running,
        }
        if facts["end_ns"] is None:
            facts["end_ns"] = end_ns
        self.totals.end_ns = end_ns
        self.totals.finished += len(finished)
        self._inside = {seq: None for seq in self._inside if seq in core.journal.lives}
        for i in finished:
            life = self._lives[i]
            ours = {"finish_ns": end_ns, "num_preemptions": life.preemptions, "admissions": life.admissions}
            settled.append((i, ours | {"cached_tokens": life.first_hit, "cached_tokens_all": life.hits}))
        return settled

    def _life(self, seq: Sequence) -> _Life:
        return self._lives.setdefault(seq.request.id, _Life())

    @staticmethod
    def _processed(seq: Sequence) -> int:
        """Tokens of `seq` processed as Vidur counts: the computed ones, or all known ones once it decodes."""
        return seq.num_computed_tokens if seq.group is None else seq.num_tokens

    def _state(self) -> State:
        running = [(seq.request.id, seq.num_computed_tokens, seq.num_tokens) for seq in self._inside]
        waiting = [seq.request.id for seq in self.core.journal.lives if seq not in self._inside]
        return State(running, waiting, self.core.scheduler.kv.num_free)

    # ---- the whole

    def run_facts(self) -> dict[str, Any]:
        """Facts of the whole replay, once it has ended."""
        totals, states = self.totals, self.core.recorder.records().states
        rows = states[states["state"] == PREEMPTED]
        victims = list(zip(rows["request_id"].tolist(), rows["blocker"].tolist(), self._orders, strict=True))
        facts = {
            "requests": totals.requests,
            "steps": totals.steps,
            "preemptions": totals.preemptions,
            "tokens": totals.tokens,
            "cached_tokens": totals.cached_tokens,
            "empty_steps": totals.empty_steps,
            "self_preempt": sum(victim == by for victim, by, _ in victims),
            "victim_already_scheduled": sum(  # preemptions for a waiting request do not count
                by in order and order.index(victim) < order.index(by) for victim, by, order in victims
            ),
            "makespan_ns": totals.end_ns,
            "all_finished": totals.finished == totals.requests,
        }
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


def _engine(recording: Recording) -> EngineCore:
    """An engine with the recorded policy, knobs and KV blocks. BadRecording where the policy refuses its memory."""
    try:
        kv = new_kv(recording.config, recording.num_blocks, recording.block_size, ids=False)
        context = PolicyContext(kv, recording.max_model_len)
        scheduler = POLICIES[recording.policy][1](recording.config, context)
    except ScenarioError as error:
        raise BadRecording(str(error)) from None
    except ValueError as error:
        raise BadRecording(f"{error}.") from None
    executor = SimExecutor(_RecordedTimes(recording.durations_ns), recording.max_model_len)
    return EngineCore(scheduler, executor, Recorder(), max_model_len=recording.max_model_len)
