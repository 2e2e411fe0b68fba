"""What every policy must keep, whatever it decides. Acceptance of a policy: it is registered and this passes."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from batchsim.drive.instant import ENTER, LAND, THROUGH, Busy, Launch, crank
from batchsim.drive.source import Inline, VirtualClock
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.core import EngineCore
from batchsim.kernel.draft_group import DraftGroup
from batchsim.kernel.events import EngineEvent, Tokens
from batchsim.kernel.journal import ENDED
from batchsim.kernel.record import CANCELLED, CAP_CUT, FINISHED, MISSING, REJECTED, Records
from batchsim.kernel.types import Arrival, Request, Sequence
from batchsim.metrics.measure import token_gaps
from batchsim.policies.registry import POLICIES
from batchsim.policies.systems.vllm.speculative_config import SpeculativeConfig
from tests.conformance.runs import MS, Case, Listed, built, cases
from tests.support.life_sums import check_lives


def random_cases(examples: int | None = None) -> settings:
    """As many as asked, else as tests/conftest.py says."""
    return settings(
        max_examples=settings.default.max_examples if examples is None else examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large],
    )


RANDOM, MANY = random_cases(), random_cases(60)
TWICE = random_cases(2 * settings.default.max_examples)
every_policy = pytest.mark.parametrize("kind", POLICIES)


def same(one: Records, other: Records) -> None:
    for table in ("requests", "steps", "states", "lanes"):
        a, b = getattr(one, table), getattr(other, table)
        assert len(a) == len(b) and a.tobytes() == b.tobytes(), f"{table} differ"
    assert one.texts == other.texts


@every_policy
@TWICE
@given(data=st.data())
def test_a_random_engine_keeps_what_every_policy_must(kind: str, data: st.DataObject) -> None:
    """Each of the properties below, of one case after the other."""
    case = data.draw(cases(kind))
    assume(built(case))
    records = case.simulate().recorder.records()
    with_ids = case.live(ids=True)
    same(records, with_ids.recorder.records())
    _drivers_alike(case, records)
    _every_request_ends_once_and_all_memory_comes_back(case, with_ids)
    _budgets_are_kept_in_every_step(case)
    check_lives(records)
    _pooled_gaps_equal_those_counted_token_by_token(case)
    if not case.config.traits.needs_predictor:
        _no_policy_sees_a_true_output_length(case)


@pytest.mark.slow
@every_policy
@MANY
@given(data=st.data())
def test_records_are_equal_in_many_more_cases(kind: str, data: st.DataObject) -> None:
    """The records of both drivers and both KV managers, far more often."""
    case = data.draw(cases(kind))
    assume(built(case))
    records = case.simulate().recorder.records()
    _drivers_alike(case, records)
    same(records, case.live(ids=True).recorder.records())


def _drivers_alike(case: Case, records: Records) -> None:
    """simulate with leaping, whose `records` these are, equals that without and live, bit for bit."""
    same(records, case.simulate(leap=False).recorder.records())
    same(records, case.live().recorder.records())


def _every_request_ends_once_and_all_memory_comes_back(case: Case, core: EngineCore) -> None:
    """Each request has exactly one row with its right length, and no block or swap slot is lost."""
    records = core.recorder.records()
    requests = records.requests
    lengths = {a.request.id: a.output_tokens for a in case.workload.known}
    lengths |= {a.request.id: a.output_tokens for _, a in case.workload.following}
    expected = len(case.workload.known) + len(case.workload.following)
    assert sorted(requests["request_id"]) == list(range(expected))
    for row in requests:
        if row["outcome"] == FINISHED:
            length = min(lengths[row["request_id"]], 400 - row["prompt_tokens"])
            if records.texts[row["reason"]] == CAP_CUT:
                length = min(length, row["output_tokens"])
            assert row["output_tokens"] == length
            assert row["arrival_ns"] < row["first_token_ns"] <= row["last_token_ns"] <= row["delivered_ns"]
        else:
            assert row["delivered_ns"] == MISSING
    if case.stop_ns is not None:
        return  # what ran when the run stopped keeps its memory
    assert set(requests["outcome"]) <= {FINISHED, REJECTED, CANCELLED}
    kv = core.scheduler.kv
    assert (kv.num_free, kv.num_swap_free) == (kv.num_blocks, kv.num_swap_blocks)
    assert (core.scheduler.num_waiting, core.scheduler.num_running) == (0, 0)


NEEDED: dict[str, dict[str, Any]] = {
    "static": {"batch_size": 4},
    "dynamic": {"max_batch_size": 4},
    "continuous": {"max_num_seqs": 8, "max_num_batched_tokens": 64},
    "preemptive": {"max_num_seqs": 8, "max_num_batched_tokens": 64},
    "clipper": {"slo_micros": 10_000_000},
    "aimd": {"latency_objective": 1000 * MS},
    "clockwork": {"default_slo": 10_000 * MS},
    "nexus": {"latency_sla": 10_000 * MS, "alpha": 50 * MS, "beta": 100 * MS},
    "adaptive_shared_batch": {"num_batch_threads": 4},
    "serial_device_batch": {"num_batch_threads": 4},
    "tbt_model": {"max_num_seqs": 8, "max_num_batched_tokens": 64},
    "tbt_feedback": {"max_num_seqs": 8, "max_num_batched_tokens": 64},
    "memory_seqs": {"max_num_seqs": 8, "max_num_batched_tokens": 64},
    "exclusive": {"max_num_seqs": 8, "max_num_batched_tokens": 64},
    "tf_serving": {"num_batch_threads": 1, "pad_variable_length_inputs": True},
}
DRAFTS = {"speculative_config": SpeculativeConfig("eagle", 3, (0.8, 0.6, 0.45))}


@pytest.mark.parametrize(
    ("kind", "knobs"),
    [*((kind, NEEDED.get(kind, {})) for kind in POLICIES), ("vllm", DRAFTS)],
    ids=[*POLICIES, "drafts"],
)
def test_who_has_ended_is_not_kept(kind: str, knobs: dict[str, Any]) -> None:
    """Of 70 requests, which end at their cap or 300 tokens below it, the engine holds few at the end: those whose
    cap is looked for yet, say. An engine that serves for days must not grow."""
    for below_cap, drive in ((0, Case.simulate), (300, Case.simulate), (0, Case.live), (300, Case.live)):
        arrivals = tuple(
            Arrival(Request(i, 20 * MS * i, 10 + i % 30, 5 + i % 17 + below_cap), 5 + i % 17) for i in range(70)
        )
        core = drive(Case(kind, POLICIES[kind][0](**knobs), 200, 16, 60, Listed(arrivals)))
        assert (core.recorder.records().requests["outcome"] == FINISHED).sum() == 70
        assert sum(type(held) is Sequence for held in reachable(core)) < 40


def reachable(root: object) -> Iterator[object]:
    """All that `root` refers to, directly or not, as the garbage collector sees it; modules and classes aside."""
    seen, unread = {id(root)}, [root]
    while unread:
        held = unread.pop()
        yield held
        for other in gc.get_referents(held):
            if id(other) not in seen and not isinstance(other, (type, ModuleType, FunctionType)):
                seen.add(id(other))
                unread.append(other)


def _budgets_are_kept_in_every_step(case: Case) -> None:
    """Slots, token budget and blocks are never exceeded, and no sequence is scheduled twice in a step."""
    core = case.engine()
    config = case.config
    slots = getattr(config, "max_num_seqs", None)
    budget = getattr(config, "max_num_batched_tokens", None)
    for work in _steps(case, core):
        items = [(seq.request.id, n) for seq, n in work.items()]
        assert len({i for i, _ in items}) == len(items)
        assert all(n >= 1 for _, n in items)
        dummies = 0 if work.drafting is None else sum(work.drafting.padding.values())
        tokens = work.num_prefill_tokens + work.num_decode_tokens + dummies
        assert sum(n for _, n in items) == tokens
        if budget is not None:
            assert tokens <= budget
        if slots is not None:
            assert len(items) <= slots
        assert 0 <= core.scheduler.kv.num_free <= core.scheduler.kv.num_blocks
        if getattr(config, "prefix_cache", ""):
            core.scheduler.kv.check()
        computed = [s.num_computed_tokens for s in (work.decodes.members if work.decodes else ())]
        if isinstance(work.decodes, DraftGroup):
            computed = work.decodes.context.tolist()  # without drafts in flight that will turn out rejected
        assert work.context_tokens == sum(computed)


def _pooled_gaps_equal_those_counted_token_by_token(case: Case) -> None:
    """The pooled ITL equals brute force over every token's time; with drafts or in pipelines it may be unknown."""
    core = case.engine()
    times: dict[int, list[int]] = {}
    for _ in _steps(case, core, times):
        pass
    records = core.recorder.records()
    done = records.requests["outcome"] == FINISHED
    finished = set(records.requests["request_id"][done])
    brute = sorted(b - a for i, t in times.items() if i in finished for a, b in pairwise(t))
    gaps, counts = token_gaps(records, done)
    pooled = np.sort(np.repeat(gaps, counts))
    if not len(pooled) and (case.stages > 1 or case.config.traits.speculation is not None):
        return
    assert pooled.tolist() == brute


def _no_policy_sees_a_true_output_length(case: Case) -> None:
    """Until the first request ends, a workload whose outputs are all as long as their caps is scheduled alike."""
    longest = tuple(replace(a, output_tokens=a.request.max_output_tokens) for a in case.workload.known)
    twin = replace(case, workload=Listed(longest))
    short, long = (_until_an_end(c) for c in (replace(case, workload=Listed(case.workload.known)), twin))
    assert long[: len(short)] == short


def _until_an_end(case: Case) -> list[list[tuple[int, int]]]:
    """What each step scheduled, up to the one in which the first sequence finishes."""
    core, scheduled, seen = case.engine(), [], set()
    for work in _steps(case, core):
        if any(seq.state == ENDED for seq in seen):
            break
        items = list(work.items())
        seen |= {seq for seq, _ in items}
        scheduled.append([(seq.request.id, n) for seq, n in items])
    return scheduled


class _Telling(Inline):
    """A source that notes when each token of a request came."""

    def __init__(self, case: Case, clock: VirtualClock, times: dict[int, list[int]]) -> None:
        super().__init__(case.workload, clock)
        passed_on = self.tell

        def tell(events: Iterable[EngineEvent], now_ns: int) -> None:
            for event in events:
                if isinstance(event, Tokens):
                    times.setdefault(event.request.id, []).extend([now_ns] * event.count)
            passed_on(events, now_ns)

        self.tell = tell


def _steps(case: Case, core: EngineCore, times: dict[int, list[int]] | None = None) -> Iterator[Batch]:
    """Cranks the core by hand, yielding each batch before it runs and noting the time of every token."""
    clock = VirtualClock()
    core.tells_tokens = True
    source = _Telling(case, clock, {} if times is None else times)
    loop = crank(core, source)
    wait = next(loop)
    while wait is not THROUGH:
        if wait is ENTER:
            source.hand_over(core)
        elif isinstance(wait, Idle):
            source.wait(wait.until_ns)
        elif isinstance(wait, Batch):
            yield wait
            clock.sleep_until(core.execute(wait, clock.now_ns()))
        elif isinstance(wait, Launch):
            clock.sleep_until(wait.until_ns)
            if wait.batch is not None:
                yield wait.batch
                core.execute(wait.batch, clock.now_ns())
        elif wait is LAND:
            oldest = core.in_flight.steps[0]
            clock.sleep_until(max(clock.now_ns(), oldest.end_ns) + oldest.process_ns)
        else:
            assert isinstance(wait, Busy)
            clock.sleep_until(wait.until_ns)
        wait = loop.send(clock.now_ns())
