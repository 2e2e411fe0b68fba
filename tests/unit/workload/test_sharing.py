"""Prompts that begin alike: shared prefixes and sessions with growing context, open and in a closed loop."""

from __future__ import annotations

import heapq
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchsim.base.units import NS_PER_S
from batchsim.kernel.tokens import output_stream
from batchsim.kernel.types import Arrival
from batchsim.scenario import Point, load_scenario
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup
from batchsim.workload.build import BuiltWorkload, build_workload
from batchsim.workload.laws import FixedTokens, GammaTokens, LognormalTokens, UniformTokens
from batchsim.workload.lengths import Lengths
from batchsim.workload.predictors import ClassMeanConfig, OracleConfig, build_predictor
from batchsim.workload.processes import PoissonArrivals
from batchsim.workload.sessions import OpenSessions
from batchsim.workload.sharing import Sessions, SharedPrefix
from batchsim.workload.traces.trace_config import TraceConfig
from batchsim.workload.workload_config import (
    AllAtOnce,
    ClosedLoop,
    Frontend,
    TraceArrivals,
    TrafficClass,
    WorkloadConfig,
)

CHAT = Lengths(LognormalTokens(300, 1.0), GammaTokens(80, 0.8))
SMALL = Lengths(FixedTokens(10), FixedTokens(5))
OPEN = PoissonArrivals(4.0)
LOOP = ClosedLoop(4, NS_PER_S, "exponential")
TURNS = UniformTokens(1, 6)
OPEN_SESSIONS = Sessions(TURNS, 3 * NS_PER_S, "exponential")


def build(arrivals: Any, *, seed: int = 1, max_model_len: int = 32_768, load: Any = None, **fields: Any) -> Any:
    """A workload of ten minutes of chat unless said otherwise."""
    if "requests" not in fields:
        fields.setdefault("duration", 600 * NS_PER_S)
    config = WorkloadConfig(arrivals, **{"output_cap": 1024, "lengths": CHAT, **fields})
    return build_workload(config, load=load or {}, seed=seed, max_model_len=max_model_len, base=Path())


def drive(workload: BuiltWorkload, service_ns: Any = lambda request: NS_PER_S) -> list[Arrival]:
    """Everything sent when each request takes `service_ns(request)`; answers come in the order of their times."""
    sent, running = [], []
    known = workload.arrivals()

    def take(arrival: Arrival | None) -> None:
        if arrival is not None:
            sent.append(arrival)
            end_ns = arrival.request.arrival_ns + service_ns(arrival.request)
            heapq.heappush(running, (end_ns, arrival.request.id, arrival.request))

    for arrival in known:
        take(arrival)
    while running:
        end_ns, _, request = heapq.heappop(running)
        take(workload.responded(request, end_ns))
    return sent


def parts(arrival: Arrival) -> list[tuple[int, int, int]]:
    assert arrival.request.tokens is not None
    assert arrival.request.tokens.num_tokens == arrival.request.prompt_tokens
    return list(arrival.request.tokens.segments)


# ---- shared prefixes


def test_prompts_are_longer_by_the_prefix_and_begin_with_a_group() -> None:
    """What the law draws follows the prefix: same lengths, arrivals and outputs as without, on top of 512 tokens."""
    plain, shared = build(OPEN), build(OPEN, shared_prefix=SharedPrefix(8, 512))
    before, after = list(plain.arrivals()), list(shared.arrivals())
    for one, other in zip(before, after, strict=True):
        assert one.request.tokens is None
        assert other.request.prompt_tokens == one.request.prompt_tokens + 512
        assert (other.request.arrival_ns, other.output_tokens) == (one.request.arrival_ns, one.output_tokens)
        head, own = parts(other)
        assert (head[1:], own[1:]) == ((0, 512), (0, one.request.prompt_tokens))
    heads = Counter(parts(arrival)[0] for arrival in after)
    assert (
        len(heads) == 8 and len({parts(arrival)[1][0] for arrival in after} | {h[0] for h in heads}) == len(after) + 8
    )
    assert [n for n in plain.notes if "prompt lengths" in n] == [n for n in shared.notes if "prompt lengths" in n]


def test_groups_are_drawn_by_zipf_and_not_by_the_load() -> None:
    """Group k has a chance in proportion to 1 / k^zipf; request i has the same group at every rate."""
    prefix = SharedPrefix(4, 10, zipf=1.0)
    low, high = build(OPEN, shared_prefix=prefix), build(OPEN, shared_prefix=prefix, load={"mean_rate": 40.0})
    groups = [parts(arrival)[0][0] for arrival in high.arrivals()]
    shares = np.array([groups.count(group) for group in sorted(set(groups))]) / len(groups)
    assert shares == pytest.approx(np.array([12, 6, 4, 3]) / 25, abs=0.01)
    assert groups[: low.num_offered] == [parts(arrival)[0][0] for arrival in low.arrivals()]
    even = build(OPEN, shared_prefix=SharedPrefix(4, 10), load={"mean_rate": 40.0})
    assert Counter(parts(a)[0] for a in even.arrivals()).most_common()[0][1] < 0.27 * even.num_offered


def test_a_class_has_a_prefix_of_its_own_or_the_workloads() -> None:
    """Classes without one share the workload's texts with each other; a class's own are apart and change no other."""
    own = TrafficClass(0.4, shared_prefix=SharedPrefix(2, 50))
    classes = {"a": TrafficClass(0.3), "b": TrafficClass(0.3), "own": own}
    heads: dict[str, set[Any]] = {name: set() for name in classes}
    for arrival in build(OPEN, classes=classes, shared_prefix=SharedPrefix(3, 20)).arrivals():
        heads[arrival.request.request_class].add(parts(arrival)[0])
    assert heads["a"] == heads["b"] and len(heads["a"]) == 3 and {h[2] for h in heads["a"]} == {20}
    assert len(heads["own"]) == 2 and {h[2] for h in heads["own"]} == {50} and not heads["own"] & heads["a"]
    for arrival in build(OPEN, classes=classes).arrivals():
        assert (arrival.request.tokens is None) is (arrival.request.request_class != "own")


def test_users_of_a_closed_loop_share_prefixes_too() -> None:
    """Without sessions every turn draws its group anew, the same under every engine."""
    fast, slow = (
        {a.request.id: parts(a) for a in drive(build(LOOP, shared_prefix=SharedPrefix(3, 16)), lambda r, s=s: s)}
        for s in (NS_PER_S, 7 * NS_PER_S)
    )
    assert slow.items() <= fast.items()
    assert len({head for head, _ in fast.values()}) == 3


# ---- sessions


def by_session(sent: list[Arrival]) -> list[list[Arrival]]:
    """The turns of each session: those whose prompts begin with the same own text."""
    found: dict[tuple[int, ...], list[Arrival]] = {}
    for arrival in sorted(sent, key=lambda arrival: arrival.request.arrival_ns):
        found.setdefault(parts(arrival)[0][:2], []).append(arrival)
    return list(found.values())


@pytest.mark.parametrize(("arrivals", "sessions"), [(LOOP, Sessions(TURNS)), (OPEN, OPEN_SESSIONS)])
def test_a_prompt_is_the_prompt_before_its_answer_and_new_text(arrivals: Any, sessions: Sessions) -> None:
    """Every turn but the first adds the earlier answer, whole, as that request's output, and text of its own."""
    sent = drive(build(arrivals, sessions=sessions))
    turns = by_session(sent)
    for session in turns:
        for before, after in pairwise(session):
            *context, answer, own = parts(after)
            assert context == parts(before)
            assert answer == (output_stream(before.request.id), 0, before.output_tokens)
            assert own[1] == 0 and own[0] not in {s for s, _, _ in parts(before)}
            assert after.request.arrival_ns > before.request.arrival_ns + NS_PER_S
    counts = Counter(len(session) for session in turns)
    assert set(counts) == {1, 2, 3, 4, 5, 6} and len({a.request.id for a in sent}) == len(sent)


@pytest.mark.parametrize(("arrivals", "sessions"), [(LOOP, Sessions(TURNS)), (OPEN, OPEN_SESSIONS)])
def test_turns_do_not_depend_on_the_engine(arrivals: Any, sessions: Sessions) -> None:
    """A slower engine is sent fewer turns, and those are the same, text for text."""
    more: dict[str, Any] = {"sessions": sessions, "shared_prefix": SharedPrefix(2, 30)}
    more["classes"] = {"x": TrafficClass(0.5), "y": TrafficClass(0.5, lengths=SMALL)}
    runs = []
    for service in (lambda r: NS_PER_S, lambda r: 30 * NS_PER_S, lambda r: (r.prompt_tokens * 7919) % (9 * NS_PER_S)):
        sent = drive(build(arrivals, **more), service)
        runs.append({a.request.id: (parts(a), a.output_tokens, a.request.request_class) for a in sent})
    assert runs[1].items() <= runs[0].items() and len(runs[1]) < len(runs[0])
    shared = runs[0].keys() & runs[2].keys()
    assert len(shared) > 100 and all(runs[0][i] == runs[2][i] for i in shared)
    again = build(arrivals, **more)
    assert drive(again) == drive(again)


def test_a_session_is_of_one_class_and_has_one_prefix() -> None:
    """Class and group are drawn for a session, or a user's class for all of theirs; their shares hold."""
    classes = {"x": TrafficClass(0.7), "y": TrafficClass(0.3, shared_prefix=SharedPrefix(5, 40))}
    for arrivals, sessions in ((ClosedLoop(100, NS_PER_S), Sessions(TURNS)), (OPEN, OPEN_SESSIONS)):
        sent = drive(build(arrivals, sessions=sessions, classes=classes, duration=100 * NS_PER_S))
        firsts = {parts(a)[int(a.request.request_class == "y")][0]: a.request.request_class for a in sent}
        for arrival in sent:
            head = parts(arrival)
            assert firsts[head[int(arrival.request.request_class == "y")][0]] == arrival.request.request_class
        assert list(firsts.values()).count("y") / len(firsts) == pytest.approx(0.3, abs=0.08)
    users: dict[int, set[str]] = {}
    for arrival in drive(build(LOOP, sessions=Sessions(TURNS), classes=classes)):
        users.setdefault(arrival.request.id % LOOP.users, set()).add(arrival.request.request_class)
    assert all(len(classes_of) == 1 for classes_of in users.values())


@pytest.mark.parametrize(("arrivals", "sessions"), [(LOOP, FixedTokens(50)), (OPEN, FixedTokens(50))])
def test_a_session_ends_before_it_outgrows_the_model(arrivals: Any, sessions: Any) -> None:
    """With 10 new and 5 generated tokens a turn, 100 positions hold 6 turns after a prefix of 9; a note counts them."""
    closed = arrivals is LOOP
    workload = build(
        arrivals,
        sessions=Sessions(sessions) if closed else Sessions(sessions, NS_PER_S),
        lengths=SMALL,
        max_model_len=100,
        shared_prefix=SharedPrefix(1, 9),
    )
    sent = drive(workload)
    lengths = Counter(a.request.prompt_tokens for a in sent)
    assert set(lengths) == {19 + 15 * turn for turn in range(6)}
    assert {a.output_tokens for a in sent} == {5}
    (note,) = [note for note in workload.notes if "end before their last turn" in note]
    total = 1024 if closed else len(workload.start_ns)
    assert note.startswith(f"{total:,} of {total:,} sessions")


def test_a_first_turn_too_long_is_sent_alone() -> None:
    """It is cut or to be rejected as any request would be, and the session is over."""
    for law in (FixedTokens(98), FixedTokens(200)):
        sent = drive(build(LOOP, sessions=Sessions(TURNS), lengths=Lengths(law, FixedTokens(5)), max_model_len=100))
        assert {a.request.prompt_tokens for a in sent} == {law.tokens}
        assert {len(parts(a)) for a in sent} == {1}
        assert {a.output_tokens for a in sent} == {2 if law.tokens == 98 else 1}


def test_open_sessions_meet_the_rate_of_requests() -> None:
    """`mean_rate` is of all turns once the first sessions have run their course; turns follow after the think time."""
    arrivals = PoissonArrivals(20.0)
    workload = build(arrivals, sessions=Sessions(TURNS, 5 * NS_PER_S), duration=500 * NS_PER_S, warmup=100 * NS_PER_S)
    assert isinstance(workload, OpenSessions)
    sent = drive(workload)
    inside = [a for a in sent if workload.window_ns[0] <= a.request.arrival_ns]
    assert len(inside) / 400 == pytest.approx(20, rel=0.05)
    assert max(a.request.arrival_ns for a in sent) < 500 * NS_PER_S == workload.window_ns[1]
    assert workload.num_offered is None and not workload.all_at_once
    for session in by_session(sent)[:50]:
        gaps = [b.request.arrival_ns - a.request.arrival_ns for a, b in pairwise(session)]
        assert set(gaps) <= {6 * NS_PER_S}
    assert str(workload.describe["text"]).startswith("Poisson arrivals of ")
    assert workload.describe["mean_turns"] == pytest.approx(3.5, rel=0.02)


def test_the_front_end_delays_sessions_both_ways() -> None:
    """Later turns are delayed by their whole prompt, the context too, and the answer on its way back."""
    frontend = Frontend(request=1000, per_prompt_token=10, per_chunk=500)
    sessions = Sessions(FixedTokens(3), 10_000)
    workload = build(OPEN, sessions=sessions, lengths=SMALL, frontend=frontend)
    sent = drive(workload, lambda request: 7000)
    first, second, _ = by_session(sent)[0]
    assert first.sent_ns is not None and second.sent_ns is not None
    assert second.sent_ns - first.request.arrival_ns == 7000 + 500 + 10_000
    assert second.request.arrival_ns - second.sent_ns == 1000 + 10 * 25
    keys = [(a.request.arrival_ns, a.request.id) for a in workload.arrivals()]
    assert keys == sorted(keys)


def test_predictors_know_sessions() -> None:
    """The oracle and the class mean work on turns as on requests, in both kinds of sessions."""
    for arrivals, sessions in ((LOOP, Sessions(TURNS)), (OPEN, OPEN_SESSIONS)):
        workload = build(arrivals, sessions=sessions)
        oracle = build_predictor(OracleConfig(), workload)
        sent = drive(workload)
        assert [oracle.predict(a.request) for a in sent[-20:]] == [a.output_tokens for a in sent[-20:]]
        assert build_predictor(ClassMeanConfig(), workload).predict(sent[0].request) == pytest.approx(80, rel=0.05)


# ---- what is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build(OPEN, sessions=Sessions(TURNS)), "sessions with poisson arrivals need think_time"),
        (lambda: build(OPEN, sessions=OPEN_SESSIONS, requests=5), "end with a duration, not with a number"),
        (lambda: build(LOOP, sessions=OPEN_SESSIONS), "sessions.think_time is for open arrivals"),
        (lambda: build(AllAtOnce(), sessions=OPEN_SESSIONS, requests=5), "sessions need arrivals over time"),
        (
            lambda: build(TraceArrivals(), sessions=OPEN_SESSIONS, lengths=None, trace=TraceConfig("t")),
            "sessions need arrivals over time",
        ),
    ],
)
def test_blocks_that_make_no_sense_are_refused_in_one_line(make: Any, message: str) -> None:
    """Every broken block names the field, the number and what to do."""
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


# ---- what an engine makes of it

SCENARIO = """\
model: llama-3.1-8b
cost: {kind: constant, step: 10ms}
kv: {tokens: 160000, block_size: 16}
workload:
  arrivals: {kind: closed_loop, users: 3, think_time: 1s}
  sessions: {turns: {kind: fixed, tokens: 5}}
  shared_prefix: {groups: 1, added_tokens: 100}
  lengths: {prompt: {kind: uniform, min: 1, max: 60}, output: {kind: uniform, min: 1, max: 60}}
  output_cap: exact
  requests: 60
policies:
  vllm: {enable_prefix_caching: true, async_scheduling: false}
slo: e2e<10s @ 90%
seeds: 1
"""


def test_a_turn_finds_the_context_of_the_one_before(tmp_path: Path) -> None:
    """With room for all, a later turn finds the whole blocks of all that was computed before: not the last token."""
    (tmp_path / "s.yaml").write_text(SCENARIO)
    setup = Setup.of(load_scenario(str(tmp_path / "s.yaml")))
    run = simulate_point(setup, Point(setup.scenario.specs[0], 1.0, 0))
    requests = {int(row["request_id"]): row for row in run.records.requests}
    assert len(requests) == 60
    for request_id, row in requests.items():
        if request_id // 3 % 5:
            before = requests[request_id - 3]
            assert row["cached_tokens"] == (before["prompt_tokens"] + before["output_tokens"] - 1) // 16 * 16
        elif request_id >= 3:
            assert row["cached_tokens"] == 96
