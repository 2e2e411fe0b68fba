"""A request that goes on at another engine: what leaves, what comes along, and what each engine's records say.

Timelines are exact: a step takes 10 ns, and KV is on its way for 7.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from batchsim.base.errors import PolicyError, SchedulerStalled
from batchsim.drive.simulate import simulate
from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import EngineEvent, HandedOver
from batchsim.kernel.kv_blocks import CountingKV, TableKV
from batchsim.kernel.protocols import PolicyContext, Scheduler
from batchsim.kernel.record import (
    DECODE,
    MISSING,
    PREFILL,
    RECOMPUTE,
    Recorder,
)
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.tokens import TokenIds
from batchsim.kernel.types import Resume
from batchsim.kv.prefix_cache import BlockHashKV
from batchsim.policies.families.continuous import Continuous, ContinuousConfig
from batchsim.policies.families.gated import Gated, GatedConfig
from batchsim.policies.families.preemptive import Preemptive, PreemptiveConfig
from batchsim.policies.families.static import Static, StaticConfig
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from tests.support.engine import DRIVERS, MAX_MODEL_LEN, Constant, Outcome, Requests, arrival, engine, outcomes, vllm
from tests.support.pools import DECODE_ENGINE, PREFILL_ENGINE, Pair, open_at, pair, row_of, start, step


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


def test_what_leaves_is_what_the_next_engine_begins_with() -> None:
    """A decode in mid-flight: its KV blocks, tokens and counts, and the arrival with the client's own time."""
    core = engine(vllm(CountingKV(100, 4)))
    core.submit(replace(arrival(7, 0, prompt=8, output=6, cancel_ns=400, deadline_ns=500), submitted_ns=0))
    now_ns = step(core, step(core, step(core, 0)))
    (seq,) = core.journal.lives
    handover = core.release(seq, now_ns)
    assert (handover.num_blocks, handover.left_ns) == (3, 30)
    assert handover.resume == Resume(10, 3, 10, 0, 10)
    next_one = handover.arrives(44)
    assert (next_one.sent_ns, next_one.request.arrival_ns, next_one.request.deadline_ns) == (0, 44, 500)
    assert (next_one.cancel_ns, next_one.output_tokens, next_one.resume) == (400, 6, handover.resume)
    assert next_one.submitted_ns is None  # the load source was late for the first engine alone
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


class _Resting(Vllm):
    """Runs nothing after its first step."""

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        return super().schedule(now_ns, drain) if not now_ns else IDLE


def test_an_engine_that_waits_with_all_kv_sent_has_stalled() -> None:
    """Nothing is on its way any more."""
    config = VllmConfig(enable_prefix_caching=False, async_scheduling=False)
    core = engine(_Resting(config, PolicyContext(CountingKV(100, 4), MAX_MODEL_LEN)))
    core.submit(arrival(0, 0))
    handover = core.release(*open_at(core, step(core, 0)), keep_kv=True)
    core.submit(arrival(1, 10))
    assert core.schedule(10, True) is IDLE
    core.sent(handover)
    with pytest.raises(SchedulerStalled):
        core.schedule(17, True)


def test_answers_held_for_the_one_that_leaves_are_sent() -> None:
    """The last row of a batch that runs: with it the batch is over."""
    config = StaticConfig(batch_size=2, respond="batch_end")
    core = engine(Static(config, PolicyContext(CountingKV(100, 4), MAX_MODEL_LEN)))
    core.submit(arrival(0, 0, output=1))
    core.submit(arrival(1, 0, output=3))
    end_ns = step(core, 0)
    core.release(next(seq for seq in core.journal.lives if seq.request.id == 1), end_ns)
    assert [(type(event).__name__, event.request.id) for event in core.take_events()] == [
        ("HandedOver", 1),
        ("Finished", 0),
    ]
    core.check_returned()


class _Leaving(EngineCore):
    """Hands over whatever is open at a step's end."""

    def complete(self, now_ns: int) -> list[EngineEvent]:
        events = super().complete(now_ns)
        for seq in list(self.journal.lives):
            self.release(seq, now_ns)
        return events + self.take_events()


@pytest.mark.parametrize("drive", DRIVERS.values(), ids=DRIVERS)
def test_clients_are_told_of_ends_and_not_of_handovers(drive: Callable[[EngineCore, Requests], int]) -> None:
    """Who was handed over has no answer yet; who ended with the first token has."""
    core = _Leaving(
        vllm(CountingKV(100, 4)), SimExecutor(Constant(), MAX_MODEL_LEN), Recorder(), max_model_len=MAX_MODEL_LEN
    )
    workload = Requests(arrival(0, 0), arrival(1, 0, output=1))
    drive(core, workload)
    assert workload.answered == [(1, 10)]


def test_what_the_next_engine_has_cached_and_what_came_along_are_not_added() -> None:
    """4 tokens are cached there, 8 came along: one is computed, and the 4 are counted as found."""
    config = VllmConfig(async_scheduling=False, max_num_seqs=4, max_num_batched_tokens=64)
    core = engine(Vllm(config, PolicyContext(BlockHashKV(100, 4), MAX_MODEL_LEN)))
    here, come = (arrival(i, at_ns, prompt=8, output=3) for i, at_ns in ((0, 0), (1, 50)))
    here = replace(here, request=replace(here.request, tokens=TokenIds.of([(0, 0, 4), (2, 0, 4)])))
    come = replace(come, request=replace(come.request, tokens=TokenIds.of([(0, 0, 4), (4, 0, 4)])))
    simulate(core, Requests(here, replace(come, sent_ns=0, resume=Resume(8, 1, 8, 0, 10))))
    assert core.recorder.records().steps["num_prefill_tokens"].tolist() == [8, 0, 0, 1, 0]
    assert row_of(core, 1)["cached_tokens_all"] == 4
