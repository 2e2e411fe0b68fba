"""A request that goes on at another engine: what leaves, what comes along, and what each engine's records say.

Timelines are exact: a step takes 10 ns, and KV is on its way for 7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count

import pytest

from batchsim.base.errors import PolicyError
from batchsim.drive.fleet.fleet_records import EngineLife, by_engine, merged, stay_rows
from batchsim.drive.instant import ENTER, crank
from batchsim.drive.simulate import simulate
from batchsim.explain.audit import audit_events
from batchsim.explain.story import Stories
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import EngineEvent, HandedOver
from batchsim.kernel.handover import Handover, Resume
from batchsim.kernel.kv_blocks import CountingKV, TableKV
from batchsim.kernel.protocols import PolicyContext, Scheduler
from batchsim.kernel.record import (
    DECODE,
    HANDED_OVER,
    MISSING,
    PREFILL,
    RECOMPUTE,
    REPLICA_FAILED,
    UNFINISHED,
    Records,
)
from batchsim.kernel.types import Arrival, Batch, Idle
from batchsim.kv.prefix_cache import BlockHashKV
from batchsim.metrics.attribution import attribute, part_times
from batchsim.policies.families.continuous import Continuous, ContinuousConfig
from batchsim.policies.families.gated import Gated, GatedConfig
from batchsim.policies.families.preemptive import Preemptive, PreemptiveConfig
from batchsim.policies.families.static import Static, StaticConfig
from batchsim.policies.systems.vllm import Vllm, VllmConfig
from batchsim.results.frames import requests_frame, states_frame, stays_frame, steps_frame, to_records
from tests.unit.engine import MAX_MODEL_LEN, Outcome, Requests, arrival, engine, outcomes, vllm

TRANSFER_NS = 7
PREFILL_ENGINE, DECODE_ENGINE = 0, 1


class Pair:
    """Two engines in one virtual time: who has its first token at the first goes on at the second, its KV pulled."""

    def __init__(self, prefill: EngineCore, decode: EngineCore, *, keep_kv: bool = True) -> None:
        self.cores = (prefill, decode)
        self.keep_kv = keep_kv
        self.message: list[tuple[int, EngineEvent]] = []
        self._due: list[tuple[int, int, Callable[[int], None]]] = []
        self._serial = count()
        self._loops = [crank(core, self) for core in self.cores]
        self._waits = [next(loop) for loop in self._loops]

    def is_over(self) -> bool:
        return False

    def tell(self, events: Iterable[EngineEvent], now_ns: int) -> None:
        self.message += ((now_ns, event) for event in events)

    def run(self, *arrivals: Arrival) -> list[list[Outcome]]:
        """Runs all to the end; returns the outcomes at each engine. At one instant steps end, then transfers, then all
        that is due is scheduled."""
        for one in arrivals:
            self._at(one.request.arrival_ns, lambda now_ns, one=one: self.cores[PREFILL_ENGINE].submit(one))
        while self._due:
            now_ns = self._due[0][0]
            while self._due and self._due[0][0] == now_ns:
                heappop(self._due)[2](now_ns)
            for k in range(2):
                if not isinstance(self._waits[k], Batch):
                    self._turn(k, now_ns)
        for core in self.cores:
            core.check_returned()
        return [outcomes(core.recorder.records()) for core in self.cores]

    def _at(self, time_ns: int, act: Callable[[int], None]) -> None:
        heappush(self._due, (time_ns, next(self._serial), act))

    def _turn(self, k: int, now_ns: int) -> None:
        """Lets engine `k` go on until it runs a step or rests."""
        wait = self._loops[k].send(now_ns)
        while wait is ENTER:
            wait = self._loops[k].send(now_ns)
        self._waits[k] = wait
        if isinstance(wait, Batch):
            self._at(self.cores[k].execute(wait, now_ns), lambda end_ns: self._end(k, wait, end_ns))
        elif isinstance(wait, Idle) and wait.until_ns is not None:
            self._at(wait.until_ns, lambda now_ns: None)

    def _end(self, k: int, batch: Batch, end_ns: int) -> None:
        self._waits[k] = self._loops[k].send(end_ns)
        core = self.cores[k]
        for seq in batch.sampled if k == PREFILL_ENGINE else ():
            if seq in core.journal.lives:
                handover = core.release(seq, end_ns, keep_kv=self.keep_kv)
                self.tell(core.take_events(), end_ns)
                self._at(end_ns + TRANSFER_NS, lambda now_ns, it=handover: self._through(it, now_ns))

    def _through(self, handover: Handover, now_ns: int) -> None:
        if self.keep_kv:
            self.cores[PREFILL_ENGINE].sent(handover)
        self.cores[DECODE_ENGINE].submit(handover.arrives(now_ns))


def pair(*, blocks: int = 100, keep_kv: bool = True) -> Pair:
    return Pair(*(engine(vllm(CountingKV(blocks, 4))) for _ in range(2)), keep_kv=keep_kv)


def row_of(core: EngineCore, request_id: int) -> dict[str, int]:
    requests = core.recorder.records().requests
    (row,) = requests[requests["request_id"] == request_id]
    return {name: int(row[name]) for name in requests.dtype.names or ()}


def test_a_request_released_after_its_prompt_is_resumed_with_its_kv_and_counted_once() -> None:
    """Prompt and first token at 10, the KV through at 17; the next engine computes that one token, and two follow at
    27 and 37. Its row there has the first step and the first token of the first engine."""
    run = pair()
    first, second = run.run(arrival(0, 0))
    assert first == [Outcome("handed_over", "handed_over", 0, 10, MISSING, 10, 1)]
    assert second == [Outcome("finished", "", 0, 10, 37, 37, 3)]
    row = row_of(run.cores[DECODE_ENGINE], 0)
    assert (row["sent_ns"], row["arrival_ns"], row["recomputed_tokens"]) == (0, 17, 0)
    steps = run.cores[DECODE_ENGINE].recorder.records().steps
    columns = ("start_ns", "num_prefill_tokens", "prefill_pairs", "num_decode", "context_tokens")
    assert [tuple(step[name] for name in columns) for step in steps] == [(17, 1, 5, 0, 0), (27, 0, 0, 1, 5)]
    states = run.cores[DECODE_ENGINE].recorder.records().states
    assert [(row["time_ns"], row["state"]) for row in states] == [(17, PREFILL), (27, DECODE)]
    assert [(at_ns, type(event).__name__) for at_ns, event in run.message] == [(10, "HandedOver"), (37, "Finished")]


def test_its_kv_stays_taken_until_it_is_sent() -> None:
    """Three prompts of 12 tokens, a pool of 6 blocks: the third waits till 17, and not till 10, for blocks."""
    kept, freed = pair(blocks=6), pair(blocks=6, keep_kv=False)
    for run in (kept, freed):
        run.run(*(arrival(i, 0, prompt=12, output=2) for i in range(3)))
    starts = [[row_of(run.cores[PREFILL_ENGINE], i)["scheduled_ns"] for i in range(3)] for run in (kept, freed)]
    assert starts == [[0, 0, 17], [0, 0, 10]]


@pytest.mark.parametrize(("given", "reason"), [({"cancel_ns": 12}, "client_cancel"), ({"deadline_ns": 17}, "deadline")])
def test_who_gives_up_while_the_kv_is_on_its_way_ends_as_it_arrives(given: dict[str, int], reason: str) -> None:
    """It takes part in no step of the next engine, and both engines have all their KV back."""
    run = pair()
    first, second = run.run(arrival(0, 0, **given))
    assert first == [Outcome("handed_over", "handed_over", 0, 10, MISSING, 10, 1)]
    assert second == [Outcome("cancelled", reason, 0, 10, MISSING, 17, 1)]
    assert not run.cores[DECODE_ENGINE].recorder.num_steps


@pytest.mark.parametrize(("given", "reason"), [({"cancel_ns": 25}, "client_cancel"), ({"deadline_ns": 27}, "deadline")])
def test_who_gives_up_at_the_next_engine_ends_there(given: dict[str, int], reason: str) -> None:
    """At 27, the end of its first step there, with two tokens."""
    assert pair().run(arrival(0, 0, **given))[1] == [Outcome("cancelled", reason, 0, 10, MISSING, 27, 2)]


def test_who_ends_with_the_first_token_is_not_handed_over() -> None:
    """The answer is whole."""
    run = pair()
    assert run.run(arrival(0, 0, output=1)) == [[Outcome("finished", "", 0, 10, 10, 10, 1)], []]


def _policies(kv: type[CountingKV | TableKV]) -> dict[str, Scheduler]:
    context = PolicyContext(kv(100, 4), MAX_MODEL_LEN)
    cached = VllmConfig(async_scheduling=False, max_num_seqs=4, max_num_batched_tokens=64)
    return {
        "continuous": Continuous(ContinuousConfig(max_num_seqs=4, max_num_batched_tokens=64), context),
        "gated": Gated(GatedConfig(max_num_seqs=4, max_num_batched_tokens=64), context),
        "preemptive": Preemptive(PreemptiveConfig(max_num_seqs=4, max_num_batched_tokens=64), context),
        "vllm": vllm(kv(100, 4)),
        "vllm, prefixes cached": Vllm(cached, replace(context, kv=BlockHashKV(100, 4))),
    }


@pytest.mark.parametrize("kv", [CountingKV, TableKV])
@pytest.mark.parametrize("policy", _policies(CountingKV))
def test_policies_go_on_with_what_was_computed(policy: str, kv: type[CountingKV | TableKV]) -> None:
    """One token to compute and no more, whatever the policy; the timeline is the same."""
    run = Pair(engine(_policies(kv)[policy]), engine(_policies(kv)[policy]))
    assert run.run(arrival(0, 0))[1] == [Outcome("finished", "", 0, 10, 37, 37, 3)]
    assert run.cores[DECODE_ENGINE].recorder.records().steps["num_prefill_tokens"].tolist() == [1, 0]


def test_a_policy_that_would_compute_it_all_again_is_an_error() -> None:
    """It counts prompts from their beginning, and says so in one line."""
    static = Static(StaticConfig(batch_size=1), PolicyContext(CountingKV(100, 4), MAX_MODEL_LEN))
    with pytest.raises(PolicyError, match=r"^Static: schedules 4 tokens of .*Correct the policy\.$"):
        Pair(engine(vllm(CountingKV(100, 4))), engine(static)).run(arrival(0, 0))


def went_on(resume: Resume, *, slots: int = 4, blocks: int = 100) -> EngineCore:
    """An engine that ran a request of 8 prompt and 6 output tokens which came at 50 with `resume`."""
    core = engine(vllm(CountingKV(blocks, 4), max_num_seqs=slots))
    first = arrival(0, 50, prompt=8, output=6)
    simulate(core, Requests(replace(first, sent_ns=0, resume=resume)))
    return core


def test_what_was_computed_before_and_did_not_come_along_is_recomputed() -> None:
    """4 of the 8 prompt tokens came with their KV; 4, and a token generated, are computed again."""
    core = went_on(Resume(4, 2, computed_once=9, scheduled_ns=3, first_token_ns=20))
    assert outcomes(core.recorder.records()) == [Outcome("finished", "", 3, 20, 90, 90, 6)]
    assert row_of(core, 0)["recomputed_tokens"] == 5
    assert [(row["time_ns"], row["state"]) for row in core.recorder.records().states] == [(50, RECOMPUTE), (60, DECODE)]


def test_a_request_may_come_without_tokens_generated() -> None:
    """The last token of its prompt is computed again, and samples the first: here, where the first was not kept."""
    core = went_on(Resume(7, 0, computed_once=8))
    assert outcomes(core.recorder.records()) == [Outcome("finished", "", 50, 60, 110, 110, 6)]
    assert row_of(core, 0)["recomputed_tokens"] == 1


def test_counts_go_on_from_those_of_earlier_engines() -> None:
    """Preemptions, swaps, recomputed and cached tokens are of the whole life; the first admission was elsewhere."""
    before = Resume(
        0, 1, 8, 3, 20, num_preemptions=2, num_swaps=1, recomputed_tokens=5, cached_tokens=4, cached_tokens_all=6
    )
    row = row_of(went_on(before), 0)
    names = ("num_preemptions", "num_swaps", "recomputed_tokens", "cached_tokens", "cached_tokens_all")
    assert [row[name] for name in names] == [2, 1, 5 + 8, 4, 6]


def start(core: EngineCore, now_ns: int) -> int:
    work = core.schedule(now_ns, True)
    assert isinstance(work, Batch)
    return core.execute(work, now_ns)


def step(core: EngineCore, now_ns: int) -> int:
    end_ns = start(core, now_ns)
    core.complete(end_ns)
    return end_ns


def handed_over(core: EngineCore) -> Handover:
    """What leaves as `core` hands over, at 10, a request that arrived at 0."""
    core.submit(arrival(0, 0))
    end_ns = step(core, 0)
    return core.release(next(iter(core.journal.lives)), end_ns)


def test_what_leaves_is_what_the_next_engine_begins_with() -> None:
    """A decode in mid-flight: its KV blocks, tokens and counts, and the arrival with the client's own time."""
    core = engine(vllm(CountingKV(100, 4)))
    core.submit(arrival(7, 0, prompt=8, output=6, cancel_ns=400, deadline_ns=500))
    now_ns = step(core, step(core, step(core, 0)))
    (seq,) = core.journal.lives
    handover = core.release(seq, now_ns)
    assert (handover.num_blocks, handover.left_ns) == (3, 30)
    assert handover.resume == Resume(10, 3, 10, 0, 10)
    next_one = handover.arrives(44)
    assert (next_one.sent_ns, next_one.request.arrival_ns, next_one.request.deadline_ns) == (0, 44, 500)
    assert (next_one.cancel_ns, next_one.output_tokens, next_one.resume) == (400, 6, handover.resume)
    (event,) = core.take_events()
    assert isinstance(event, HandedOver)
    assert (event.request.id, event.reason) == (7, "handed_over")
    assert not core.has_work
    core.check_returned()


def test_only_an_open_request_between_steps_can_be_released() -> None:
    """Not one in a step, not one that has left, and not one that only waits for its batch's answers."""
    core = engine(vllm(CountingKV(100, 4)))
    core.submit(arrival(0, 0))
    end_ns = start(core, 0)
    (seq,) = core.journal.lives
    with pytest.raises(ValueError, match="cannot be handed over at 5 ns"):
        core.release(seq, 5)
    core.complete(end_ns)
    core.release(seq, end_ns)
    with pytest.raises(ValueError, match="cannot be handed over at 11 ns"):
        core.release(seq, 11)
    config = StaticConfig(batch_size=2, respond="batch_end")
    held = engine(Static(config, PolicyContext(CountingKV(100, 4), MAX_MODEL_LEN)))
    held.submit(arrival(0, 0, output=1))
    held.submit(arrival(1, 0, output=2))
    step(held, 0)
    with pytest.raises(ValueError, match="request 0"):
        held.release(next(iter(held.journal.lives)), 10)


def test_a_resume_without_work_left_is_refused() -> None:
    """At least one known token is to be computed, and one output token to come."""
    request = arrival(3, 0, prompt=4, output=2).request
    assert Resume(4, 1).sequence(request).num_tokens == 5
    for wrong in (Resume(5, 1), Resume(4, 0), Resume(0, 2), Resume(-1, 0), Resume(0, -1)):
        with pytest.raises(ValueError, match=r"^request 3 cannot resume with .* 4 tokens of prompt and at most 2 "):
            wrong.sequence(request)


def test_a_run_that_stops_counts_what_was_generated_elsewhere() -> None:
    """Of a request that had not entered yet, too."""
    core = engine(vllm(CountingKV(100, 4)))
    core.submit(replace(arrival(0, 50), resume=Resume(4, 2, 4, 0, 10)))
    core.close(40, "time_limit")
    assert outcomes(core.recorder.records()) == [Outcome("unfinished", "time_limit", 0, 10, MISSING, 40, 2)]


def test_an_engine_whose_kv_is_being_sent_has_not_stalled() -> None:
    """What heads the queue waits for blocks that come back with the transfer."""
    core = engine(vllm(CountingKV(2, 4)))
    core.submit(arrival(0, 0, prompt=7, output=2))
    step(core, 0)
    handover = core.release(next(iter(core.journal.lives)), 10, keep_kv=True)
    core.submit(arrival(1, 10, prompt=7, output=2))
    assert isinstance(core.schedule(10, True), Idle)
    core.sent(handover)
    assert isinstance(core.schedule(12, True), Batch)


# ---- what readers make of it


def both(run: Pair) -> Records:
    return merged([EngineLife(k, core.recorder.records()) for k, core in enumerate(run.cores)])


def test_the_engine_before_is_a_stay_and_its_time_is_told_in_order() -> None:
    """One row in requests, one in stays; the parts of all engines sum to the life, the way between them as frontend."""
    run = pair()
    run.run(arrival(0, 0), arrival(1, 5, prompt=5))
    records = both(run)
    assert outcomes(records) == [
        Outcome("finished", "", 0, 10, 37, 37, 3),
        Outcome("finished", "", 10, 20, 47, 47, 3),
    ]
    frame = stays_frame(records)
    assert frame is not None
    first, second = frame.to_dict("records")
    names = ("request_id", "replica", "start_ns", "end_ns", "why")
    assert [first[name] for name in names] == [0, 0, 0, 10, "handed_over"]
    assert [second[name] for name in names] == [1, 0, 5, 20, "handed_over"]
    assert (second["output_tokens"], second["scheduled_ns"], second["first_token_ns"]) == (1, 10, 20)
    parts = attribute(records)
    mine = parts[parts["request_id"] == 1]
    assert dict(zip(mine["part"].astype(str), mine["ns"], strict=True)) == {
        "frontend": 7,
        "waiting_step": 5,
        "prefill": 20,
        "decode_alone": 10,
    }
    message = Stories(records).tell(1)
    assert [(c.what, c.start_ns, c.end_ns) for c in message.chapters] == [
        ("waiting_step", 5, 10),
        ("prefill", 10, 20),
        ("frontend", 20, 27),
        ("prefill", 27, 37),
        ("decode", 37, 47),
    ]
    assert message.parts() == dict(zip(mine["part"].astype(str), mine["ns"], strict=True))
    assert {piece.part for piece in part_times(records) if (piece.ns[piece.after_first] > 0).any()} == {
        "frontend",
        "prefill",
        "decode_alone",
        "decode_beside_prefill",
    }
    assert audit_events(records) == []


def test_stays_read_back_tell_the_same() -> None:
    """From frames, as they are kept."""
    run = pair()
    run.run(arrival(0, 0), arrival(1, 5, cancel_ns=22))
    records = both(run)
    again = to_records(requests_frame(records), steps_frame(records), states_frame(records), stays_frame(records))
    assert again.stays("handed_over")["end_ns"].tolist() == [10, 20] and not len(again.stays("replica_failed"))
    assert attribute(again).to_dict() == attribute(records).to_dict()


def test_a_request_that_begins_anew_has_lost_the_handover_too() -> None:
    """Handed over at 10, there at 17, its replica fails at 25: what a third one does from 25 on is its whole life, and
    both stays before are lost."""
    first, second, third = (engine(vllm(CountingKV(100, 4))) for _ in range(3))
    handover = handed_over(first)
    second.submit(handover.arrives(17))
    start(second, 17)
    second.fail(25, REPLICA_FAILED)
    simulate(third, Requests(replace(arrival(0, 25), sent_ns=0, router_ns=7, failover_ns=18, num_retries=1)))
    lives = [EngineLife(k, core.recorder.records()) for k, core in enumerate((first, second, third))]
    records = merged(lives)
    assert records.replicas is not None and records.replicas.stays["replica"].tolist() == [0, 1]
    parts = attribute(records)
    assert dict(zip(parts["part"].astype(str), parts["ns"], strict=True)) == {
        "failover": 18,
        "queued:no_replica": 7,
        "prefill": 10,
        "decode_alone": 20,
    }
    assert [(c.what, c.start_ns, c.end_ns) for c in Stories(records).tell(0).chapters] == [
        ("failover", 0, 10),
        ("queued", 10, 17),
        ("failover", 17, 25),
        ("prefill", 25, 35),
        ("decode", 35, 55),
    ]
    rows = stay_rows(records)
    assert [rows[name].tolist() for name in ("outcome", "num_retries", "failover_ns", "router_ns")] == [
        [HANDED_OVER, UNFINISHED],
        [0, 0],
        [0, 10],
        [0, 7],
    ]


def test_an_engine_that_gets_back_what_it_handed_over_is_told_apart_or_refused() -> None:
    """Two lives of one request between two failures of an engine would share its states."""
    core = engine(vllm(CountingKV(100, 4)))
    simulate(core, Requests(handed_over(core).arrives(20)))
    with pytest.raises(ValueError, match="request 0 lived twice on replica 3"):
        list(by_engine(merged([EngineLife(3, core.recorder.records())])))
