"""Logs whose rows wait for each other: sessions, trees that fan out and join, replayed by the simulated answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchsim.base.errors import BatchsimError, ScenarioError
from batchsim.kernel.tokens import TokenIds
from batchsim.scenario import load_scenario
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup
from batchsim.workload.replayed_sessions import ReplayedSessions

MS = 1_000_000
SESSIONS = "columns: {arrival: ts, prompt: in, output: out, session: chat, turn: n, e2e: took}"
TREE = "columns: {arrival: ts, prompt: in, output: out, id: me, parent: after, e2e: took}"
SCENARIO = """
model: llama-3.1-8b
cost: {kind: constant, step: 10ms}
kv: {tokens: 400000}
workload:
  arrivals: {kind: trace}
  output_cap: exact
  trace: {path: log.csv, COLUMNS, time_unit: ms}
policies: {vllm: {}}
slo: ttft<1s @ 99%
seeds: 1
"""
CHAT = "ts,in,out,chat,n,took\n0,100,10,a,1,300\n500,20,5,,0,100\n700,150,4,a,2,80\n1000,300,3,a,3,20\n"


def setup_of(folder: Path, text: str, columns: str, *overrides: str) -> Setup:
    (folder / "log.csv").write_text(text)
    (folder / "mine.yaml").write_text(SCENARIO.replace("COLUMNS", columns))
    return Setup.of(load_scenario(str(folder / "mine.yaml"), overrides=overrides))


def sent_ms(setup: Setup) -> dict[int, float]:
    """When each row was sent in a simulation, in ms."""
    records = simulate_point(setup, setup.scenario.points()[0]).records.requests
    found = {int(row["request_id"]): int(row["sent_ns"]) / MS for row in records}
    assert len(found) == len(records), "every row is sent once"
    return found


def replayed(setup: Setup) -> ReplayedSessions:
    workload = setup.workload(1.0, 0)
    assert isinstance(workload, ReplayedSessions)
    return workload


def expanded(text: TokenIds) -> list[tuple[int, int]]:
    """The tokens of a text one by one: of which stream, and where in it."""
    return [(stream, start + at) for stream, start, length in text.segments for at in range(length)]


def common(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> int:
    """How many tokens two texts begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_a_turn_waits_for_the_answer_and_thinks_as_in_the_log(tmp_path: Path) -> None:
    """Steps of 10 ms: 10 tokens take 100 ms, then 700 - 300 = 400 ms of thinking, and so on, to the ns."""
    setup = setup_of(tmp_path, CHAT, SESSIONS)
    assert sent_ms(setup) == {0: 0.0, 1: 500.0, 2: 100.0 + 400.0, 3: 500.0 + 40.0 + 220.0}


def test_a_replay_as_recorded_sends_at_the_times_of_the_log(tmp_path: Path) -> None:
    """With `as_recorded` no turn waits, whatever the session."""
    setup = setup_of(tmp_path, CHAT, SESSIONS, "workload.trace.replay=as_recorded")
    assert sent_ms(setup) == {0: 0.0, 1: 500.0, 2: 700.0, 3: 1000.0}


def test_turns_without_told_answers_come_no_sooner_than_recorded(tmp_path: Path) -> None:
    """Without e2e a turn is sent when both the answer and its time in the log, after the session's beginning, came."""
    columns = "columns: {arrival: ts, prompt: in, output: out, session: chat}"
    text = "ts,in,out,chat\n0,100,50,a\n200,200,4,a\n900,300,3,a\n"
    setup = setup_of(tmp_path, text, columns)
    assert sent_ms(setup) == {0: 0.0, 1: 500.0, 2: 900.0}
    assert any("2 rows wait for answers whose time is not told" in note for note in replayed(setup).notes)


def test_a_turn_sent_before_its_answer_in_the_log_is_counted(tmp_path: Path) -> None:
    """A log that sent a turn before the answer had come is altered: sent when it comes, and said."""
    text = CHAT.replace("700,150", "250,150")
    setup = setup_of(tmp_path, text, SESSIONS)
    assert "1 rows were sent before the answer they wait for had come: sent when it comes" in replayed(setup).notes
    assert sent_ms(setup)[1] == 100.0


def test_calls_fan_out_and_join(tmp_path: Path) -> None:
    """A plan, two calls side by side of 30 and 70 ms, and a summary that waits for both and 5 ms of its own."""
    text = (
        "ts,in,out,me,after,took\n0,100,10,plan,,50\n60,200,3,x,plan,10\n60,210,7,y,plan,20\n"
        '85,900,2,sum,"[""x"", ""y""]",10\n'
    )
    setup = setup_of(tmp_path, text, TREE)
    assert sent_ms(setup) == {0: 0.0, 1: 110.0, 2: 110.0, 3: 110.0 + 70.0 + 5.0}


def test_fan_out_and_join_on_replicas(tmp_path: Path) -> None:
    """Behind a router a join waits for answers of several engines, at the same times as on one."""
    text = 'ts,in,out,me,after,took\n0,100,10,1,-1,50\n60,200,3,2,1,10\n60,210,7,3,1,20\n85,900,2,4,"[2, 3]",10\n'
    setup = setup_of(tmp_path, text, TREE, "replicas={count: 2, router: round_robin}")
    assert sent_ms(setup) == {0: 0.0, 1: 110.0, 2: 110.0, 3: 185.0}


def test_prompts_share_along_the_tree(tmp_path: Path) -> None:
    """A branch begins with its parent's prompt and answer, siblings share no more; a short prompt shares nothing."""
    text = "ts,in,out,me,after,took\n0,100,10,1,,50\n60,200,3,2,1,10\n60,210,7,3,1,20\n90,50,2,4,3,10\n99,300,2,5,2,1\n"
    workload = replayed(setup_of(tmp_path, text, TREE))
    texts = [expanded(workload._text(row)) for row in range(5)]
    assert [len(each) for each in texts] == [100, 200, 210, 50, 300]
    assert common(texts[0], texts[1]) == 100
    assert common(texts[1], texts[2]) == 110
    assert common(texts[3], texts[2]) == 0
    assert common(texts[4], texts[1]) == 200
    assert any("3 of 4 that have one" in note for note in workload.notes)


@pytest.mark.parametrize(
    ("overrides", "blamed"),
    [
        (["workload.trace.rate_scale={factor: 2, by: overlay}"], "rate_scale by overlay: rows of this trace wait"),
        (["workload.max_concurrency=3"], "max_concurrency 3: rows of this trace wait for others"),
        (["workload.shared_prefix={groups: 1, added_tokens: 5}"], "shared_prefix: prompts of this trace begin as"),
    ],
)
def test_what_does_not_go_with_rows_that_wait(tmp_path: Path, overrides: list[str], blamed: str) -> None:
    """Copies of a session, a second limit and a second prefix are refused, with the way out."""
    with pytest.raises(ScenarioError, match=blamed):
        setup_of(tmp_path, CHAT, SESSIONS, *overrides).workload(1.0, 0)


def test_compressed_sessions_begin_sooner_and_think_as_long(tmp_path: Path) -> None:
    """Twice the load by compress: times of beginnings are halved, thinking is the user's and stays."""
    text = CHAT + "2000,100,10,b,1,100\n"
    sent = sent_ms(setup_of(tmp_path, text, SESSIONS, "workload.trace.rate_scale={factor: 2, by: compress}"))
    assert (sent[1], sent[4], sent[2]) == (250.0, 1000.0, 500.0)


@pytest.mark.parametrize(
    ("rows", "note"),
    [
        ("0,1,1,a,gone,\n1,1,1,b,a,\n", "1 parents are no row that is used, the first 'gone': not waited for"),
        (
            "0,1,1,a,b,\n1,1,1,b,a,\n",
            "1 parents arrived no sooner than the row that names them, the first 'b': not waited for",
        ),
        ("0,1,1,a,a,\n", "1 parents arrived no sooner"),
        ("0,1,1,a,b,\n1,1,1,b,,\n", "1 parents arrived no sooner than the row that names them, the first 'b'"),
    ],
)
def test_parents_that_cannot_be_waited_for_are_counted(tmp_path: Path, rows: str, note: str) -> None:
    """A parent that is missing, later, or the row itself is not waited for, and counted."""
    workload = replayed(setup_of(tmp_path, "ts,in,out,me,after,took\n" + rows, TREE))
    assert any(note in each for each in workload.notes)


def test_two_rows_of_one_id_are_refused(tmp_path: Path) -> None:
    """An id that stands twice says of no row who waits for it."""
    with pytest.raises(BatchsimError, match="number 1 and 2 of those used, have the id 'a'"):
        replayed(setup_of(tmp_path, "ts,in,out,me,after,took\n0,1,1,a,,\n1,1,1,a,,\n", TREE))


def test_a_run_begins_anew(tmp_path: Path) -> None:
    """A workload that was replayed once replays the same again: nothing of the first run is left."""
    workload = replayed(setup_of(tmp_path, CHAT, SESSIONS))
    for _ in range(2):
        first = [arrival.request.id for arrival in workload.arrivals()]
        assert first == [0, 1]
        (following,) = workload.responded(next(workload.arrivals()).request, 100 * MS)
        assert (following.request.id, following.request.arrival_ns) == (2, 500 * MS)
