"""What every policy must keep, whatever it decides: `check_policy`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
from hypothesis import strategies as st

from batchsim.base.errors import BatchsimError
from batchsim.kernel.core import EngineCore
from batchsim.kernel.draft_group import DraftGroup
from batchsim.kernel.journal import ENDED
from batchsim.kernel.record import CANCELLED, CAP_CUT, FINISHED, MISSING, REJECTED
from batchsim.kernel.types import Arrival, Request, Sequence
from batchsim.metrics.measure import token_gaps
from batchsim.policies.named_policy import policy_and_config
from batchsim.testing.by_hand import same, steps
from batchsim.testing.check import CASES, Cases, Check, name_of, named, one_line, refused_in_one_line
from batchsim.testing.life_sums import check_lives
from batchsim.testing.random_configs import MAX_MODEL_LEN, MS
from batchsim.testing.random_configs import knobs as random_knobs
from batchsim.testing.random_engines import Case, Listed, Policy, built
from batchsim.testing.random_engines import cases as random_cases
from batchsim.testing.router_checks import fleet_checks

STREAM = 70
"""The requests of the stream after which an engine is asked what it holds."""
_HELD = 40


def check_policy(policy: Policy, *, knobs: Mapping[str, Any] | None = None, cases: int = CASES) -> list[Check]:
    """The checks of a policy: its class, or a shipped one's name.

    They are held on as many random `cases`: each an engine with random knobs, but for those in `knobs`, a random KV
    pool and random requests. ScenarioError for what is no policy.
    """
    config, scheduler = policy_and_config(policy)
    whose = name_of(scheduler)
    engines = built_cases(policy, knobs)
    drawn = Cases(engines, cases, whose)
    few = replace(drawn, count=max(2, cases // 8))
    stated = Cases(_stated(policy, config, knobs or {}), cases, whose)
    return named(
        scheduler,
        {
            "conservation": drawn.all(conservation),
            "no_idling": drawn.all(no_idling),
            "kv_within_pool": drawn.all(kv_within_pool),
            "step_budgets": drawn.all(step_budgets),
            "equal_seeds": drawn.all(equal_seeds),
            "leap_equals_stepping": drawn.all(leap_equals_stepping),
            "live_equals_simulated": drawn.all(live_equals_simulated),
            "lives_sum": drawn.all(lives_sum),
            "token_times": drawn.all(token_times),
            "no_foresight": drawn.all(no_foresight),
            "ended_forgotten": few.all(ended_forgotten),
            "one_line_errors": stated.all(one_line_errors),
            **_on_the_model(few),
            **fleet_checks(engines, max(2, cases // 2), whose),
        },
        cases,
    )


def built_cases(policy: Policy, fixed: Mapping[str, Any] | None = None) -> st.SearchStrategy[Case]:
    """Random engines that the policy takes, with the `fixed` knobs."""
    return random_cases(policy, fixed or {}).filter(built)  # type: ignore[return-value]


def _on_the_model(few: Cases[Case]) -> dict[str, Callable[[], None]]:
    """The check on a real model, where torch is there."""
    if find_spec("torch") is None:
        return {}

    def holds(case: Case) -> None:
        from batchsim.testing.on_model import model_equals_simulated  # torch takes seconds to import

        model_equals_simulated(case)

    return {"model_equals_simulated": few.all(holds)}


@st.composite
def _stated(draw: st.DrawFn, policy: Policy, config: Any, fixed: Mapping[str, Any]) -> tuple[Policy, Any, int]:
    """A policy with knobs as a user may state them, right or wrong, and the KV blocks of a pool."""
    return policy, (config, draw(random_knobs(config, fixed))), draw(st.integers(1, 30))


def conservation(case: Case) -> None:
    """Each request has exactly one row with its right length, and no block or swap slot is lost."""
    requests_end_once(case, case.live(ids=True))


def requests_end_once(case: Case, core: EngineCore) -> None:
    """`conservation` of the run that is over on `core`."""
    records = core.recorder.records()
    requests = records.requests
    lengths = {a.request.id: a.output_tokens or 0 for a in case.workload.known}
    lengths |= {a.request.id: a.output_tokens or 0 for _, a in case.workload.following}
    expected = len(case.workload.known) + len(case.workload.following)
    assert sorted(requests["request_id"]) == list(range(expected)), "not every request ended once"
    for row in requests:
        if row["outcome"] == FINISHED:
            length = min(lengths[row["request_id"]], MAX_MODEL_LEN - row["prompt_tokens"])
            if records.texts[row["reason"]] == CAP_CUT:
                length = min(length, row["output_tokens"])
            assert row["output_tokens"] == length, f"request {row['request_id']} has another length than its own"
            first_ns = row["first_token_ns"] if row["output_tokens"] else row["last_token_ns"]  # its end, without any
            assert (row["first_token_ns"] == MISSING) == (not row["output_tokens"]), "a first token that is none"
            assert row["arrival_ns"] < first_ns <= row["last_token_ns"] <= row["delivered_ns"]
        else:
            assert row["delivered_ns"] == MISSING, f"request {row['request_id']} was delivered without an end"
    if case.stop_ns is not None:
        return  # what ran when the run stopped keeps its memory
    assert set(requests["outcome"]) <= {FINISHED, REJECTED, CANCELLED}, "a request was neither answered nor refused"
    kv = core.scheduler.kv
    free = kv.num_free, kv.num_swap_free
    assert free == (kv.num_blocks, kv.num_swap_blocks), f"KV and swap blocks free at the end: {free}"
    left = core.scheduler.num_waiting, core.scheduler.num_running
    assert left == (0, 0), f"sequences waiting and running at the end: {left}"


def no_idling(case: Case) -> None:
    """An engine on which nothing runs does not wait while requests do."""
    core = case.engine()

    def idles(now_ns: int) -> None:
        if case.stop_ns is not None and now_ns >= case.stop_ns:
            return
        scheduler = core.scheduler
        idle = scheduler.num_waiting and not scheduler.num_running and not core.in_flight.steps
        assert not idle, f"at {now_ns:,} ns {scheduler.num_waiting} requests wait and nothing runs"

    for _ in steps(case, core, idles=idles):
        pass


def kv_within_pool(case: Case) -> None:
    """No step takes more KV or swap blocks than there are, and each of its sequences has blocks for all its tokens."""
    core = case.engine()
    for work in steps(case, core):
        kv = core.scheduler.kv
        assert 0 <= kv.num_free <= kv.num_blocks, f"{kv.num_free} of {kv.num_blocks} KV blocks are free"
        assert 0 <= kv.num_swap_free <= kv.num_swap_blocks, f"{kv.num_swap_free} of {kv.num_swap_blocks} swap blocks"
        if getattr(case.config, "prefix_cache", ""):
            kv.check()  # type: ignore[attr-defined]
        for seq, n in work.chunks:
            tokens = seq.settled_computed_tokens + n
            room = kv.room(seq)
            assert room >= tokens, f"request {seq.request.id} computes {tokens} tokens with KV blocks for {room}"
        if not case.config.traits.prefix_cache:  # else sequences share blocks
            held = sum(kv.held(seq) for seq, _ in work.items())
            assert held + kv.num_free <= kv.num_blocks, f"a step's sequences hold {held} KV blocks, {kv.num_free} free"


def step_budgets(case: Case) -> None:
    """Slots and token budget are never exceeded, no sequence is twice in a step, and the context counted is right."""
    core = case.engine()
    slots = getattr(case.config, "max_num_seqs", None)
    budget = getattr(case.config, "max_num_batched_tokens", None)
    for work in steps(case, core):
        items = [(seq.request.id, n) for seq, n in work.items()]
        assert len({i for i, _ in items}) == len(items), "a sequence is twice in a step"
        assert all(n >= 1 for _, n in items), "a sequence is in a step without a token"
        dummies = 0 if work.drafting is None else sum(work.drafting.padding.values())
        tokens = work.num_prefill_tokens + work.num_decode_tokens + dummies
        assert sum(n for _, n in items) == tokens, "the tokens of a step are counted wrong"
        assert budget is None or tokens <= budget, f"{tokens} tokens in a step of max_num_batched_tokens {budget}"
        assert slots is None or len(items) <= slots, f"{len(items)} sequences in a step of max_num_seqs {slots}"
        computed = [s.num_computed_tokens for s in (work.decodes.members if work.decodes else ())]
        if isinstance(work.decodes, DraftGroup):
            computed = work.decodes.context.tolist()  # without drafts in flight that will turn out rejected
        assert work.context_tokens == sum(computed), "the context of a step is counted wrong"


def equal_seeds(case: Case) -> None:
    """The same engine with the same requests, run again, leaves equal bytes."""
    same(case.simulate().recorder.records(), case.simulate().recorder.records())


def leap_equals_stepping(case: Case) -> None:
    """Leaping over steps alike leaves the bytes of stepping."""
    same(case.simulate().recorder.records(), case.simulate(leap=False).recorder.records())


def live_equals_simulated(case: Case) -> None:
    """The live driver with a virtual clock, block ids or not, leaves the bytes of the simulation."""
    records = case.simulate().recorder.records()
    for ids in (False, True):
        same(records, case.live(ids=ids).recorder.records())


def lives_sum(case: Case) -> None:
    """The parts and chapters of every request's life sum to its latency."""
    check_lives(case.simulate().recorder.records())


def token_times(case: Case) -> None:
    """The pooled ITL equals brute force over every token's time; with drafts or in pipelines it may be unknown."""
    core = case.engine()
    times: dict[int, list[int]] = {}
    for _ in steps(case, core, times):
        pass
    records = core.recorder.records()
    done = records.requests["outcome"] == FINISHED
    finished = set(records.requests["request_id"][done])
    brute = sorted(b - a for i, t in times.items() if i in finished for a, b in pairwise(t))
    gaps, counts = token_gaps(records, done)
    pooled = np.sort(np.repeat(gaps, counts))
    if not len(pooled) and (case.stages > 1 or case.config.traits.speculation is not None):
        return
    assert pooled.tolist() == brute, "recorded times between tokens are not those at which tokens came"


def no_foresight(case: Case) -> None:
    """Until the first request ends, a workload whose outputs are all as long as their caps is scheduled alike; of a
    policy that is given a predictor nothing is asked."""
    if case.config.traits.needs_predictor:
        return
    longest = tuple(replace(a, output_tokens=a.request.max_output_tokens) for a in case.workload.known)
    twin = replace(case, workload=Listed(longest))
    short, long = (_until_an_end(c) for c in (replace(case, workload=Listed(case.workload.known)), twin))
    assert long[: len(short)] == short, "the schedule depends on output lengths that are not known yet"


def _until_an_end(case: Case) -> list[list[tuple[int, int]]]:
    """What each step scheduled, up to the one in which the first sequence finishes."""
    core, scheduled, seen = case.engine(), [], set()
    for work in steps(case, core):
        if any(seq.state == ENDED for seq in seen):
            break
        items = list(work.items())
        seen |= {seq for seq, _ in items}
        scheduled.append([(seq.request.id, n) for seq, n in items])
    return scheduled


def ended_forgotten(case: Case) -> None:
    """Of a long stream, whose requests end at their cap or 300 tokens below it, the engine holds few at its end: those
    whose cap is looked for yet, say. An engine that serves for days must not grow."""
    for below_cap, drive in ((0, Case.simulate), (300, Case.simulate), (0, Case.live), (300, Case.live)):
        stream = tuple(
            Arrival(Request(i, 20 * MS * i, 10 + i % 30, 5 + i % 17 + below_cap), 5 + i % 17) for i in range(STREAM)
        )
        core = drive(replace(case, num_blocks=3200 // case.block_size, workload=Listed(stream), stop_ns=None))
        assert len(core.recorder.records().requests) == STREAM
        held = sum(type(one) is Sequence for one in reachable(core))
        assert held < _HELD, f"{held} of {STREAM} sequences are held after all have ended"


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


def one_line_errors(stated: tuple[Policy, Any, int]) -> None:
    """Knobs that do not fit are refused with a ValueError of one line, a pool that does not with a ScenarioError."""
    policy, (config, knobs), num_blocks = stated
    made = refused_in_one_line(config, knobs)
    if made is None:
        return
    try:
        Case(policy, made, num_blocks, 4, 0, Listed(())).engine()
    except BatchsimError as error:
        one_line(error)
