"""Logs whose rows name their tasks: which rows belong together, beside sessions, trees and limits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchsim.base.errors import BatchsimError
from batchsim.metrics.measure import measure
from batchsim.metrics.tasks import task_lives
from batchsim.results.keep import point_inputs
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup
from batchsim.study.curves.run import check_inputs
from batchsim.workload.traces.read_trace import read_trace
from batchsim.workload.traces.trace_config import Columns, TraceConfig
from tests.support.paths import ROOT
from tests.unit.workload.test_replayed_sessions import TREE, sent_ms, setup_of

MS = 1_000_000
RUNS = "columns: {arrival: ts, prompt: in, output: out, task: run}"
LOG = "ts,in,out,run\n0,100,10,a\n50,90,3,b\n200,80,20,a\n300,70,5,\n300,70,5,b\n"


PLAIN = "policies={continuous: {max_num_seqs: 8, max_num_batched_tokens: 2048}}"  # joins at each end of a step


def log_of(folder: Path, text: str, columns: str, *overrides: str) -> Setup:
    return setup_of(folder, text, columns, PLAIN, *overrides)


def e2e_ms(setup: Setup) -> list[float]:
    """The end-to-end latency of each task in a simulation of `setup`, in ms, by number."""
    lives = task_lives(point_inputs(setup, simulate_point(setup, setup.scenario.points()[0])))
    return (lives.e2e_ns / MS).tolist()


def test_rows_of_a_task_are_measured_from_its_first_sending_to_its_last_answer(tmp_path: Path) -> None:
    """Steps of 10 ms: a ends 200 ms after 200 ms; b's second row ends 300 + 50 ms, 300 ms after its first was sent; the
    row of none is in no task, and its latency is a request's like all others."""
    setup = log_of(tmp_path, LOG, RUNS)
    assert sent_ms(setup) == {0: 0.0, 1: 50.0, 2: 200.0, 3: 300.0, 4: 300.0}
    assert e2e_ms(setup) == [200.0 + 200.0, 350.0 - 50.0]
    values = measure(point_inputs(setup, simulate_point(setup, setup.scenario.points()[0]))).values
    assert (values["tasks"], values["tasks_undone_share"], values["finished"]) == (2, 0, 5)


def test_an_objective_of_tasks_judges_the_tasks_that_a_log_names(tmp_path: Path) -> None:
    """Of 400 and 300 ms one is below 350 ms; the request of no task is not judged."""
    setup = log_of(tmp_path, LOG, RUNS, "slo=task_e2e<350ms @ 50%")
    check_inputs(setup)
    values = measure(point_inputs(setup, simulate_point(setup, setup.scenario.points()[0]))).values
    assert (values["in_slo"], values["slo_met"], values["goodput_rps"]) == (0.5, 1, None)


def test_a_task_of_sessions_waits_for_its_answers(tmp_path: Path) -> None:
    """Where one column is session and task, its second row is sent 40 ms of thinking after the simulated answer."""
    columns = "columns: {arrival: ts, prompt: in, output: out, session: run, task: run, e2e: took}"
    text = "ts,in,out,run,took\n0,100,10,a,260\n300,200,4,a,80\n"
    setup = log_of(tmp_path, text, columns)
    assert sent_ms(setup) == {0: 0.0, 1: 100.0 + 40.0}
    assert e2e_ms(setup) == [100.0 + 40.0 + 40.0]
    recorded = log_of(tmp_path, text, columns, "workload.trace.replay=as_recorded")
    assert e2e_ms(recorded) == [300.0 + 40.0]


def test_a_named_task_joins_several_trees(tmp_path: Path) -> None:
    """A tree of calls is a task; where the log names tasks, two trees and all between are one."""
    text = "ts,in,out,me,after,took,run\n0,100,10,a,,50,x\n60,200,3,b,a,10,x\n500,90,3,c,,10,x\n"
    assert e2e_ms(log_of(tmp_path, text, TREE)) == [140.0, 30.0]
    assert e2e_ms(log_of(tmp_path, text, TREE.replace("e2e: took", "e2e: took, task: run"))) == [530.0]


@pytest.mark.parametrize("limit", [[], ["replicas={count: 2, router: round_robin}"]])
def test_tasks_behind_limits_and_routers(tmp_path: Path, limit: list[str]) -> None:
    """One at a time, a's second row waits for b's 30 ms at most; a router of two changes nothing of these times."""
    assert e2e_ms(log_of(tmp_path, LOG, RUNS, *limit)) == [400.0, 300.0]
    one = log_of(tmp_path, LOG, RUNS, "workload.max_concurrency=1")
    assert sent_ms(one) == {0: 0.0, 1: 100.0, 2: 200.0, 3: 400.0, 4: 450.0}
    assert e2e_ms(one) == [400.0, 500.0 - 100.0]


def test_tasks_that_a_cut_goes_through_are_counted(tmp_path: Path) -> None:
    """A duration or a slice that keeps one of a's two rows says so; b, of which neither or both are kept, is whole."""
    note = "1 tasks have rows on both sides of the cut by"
    for override, by in (("workload.duration=100ms", "duration"), ("workload.requests=2", "requests")):
        notes = log_of(tmp_path, LOG.replace("300,70,5,b", "60,1,1,b"), RUNS, override).workload(1.0, 0).notes
        assert (f"{note} {by}: measured by those that are kept" in notes) == (by == "duration"), notes
    sliced = log_of(tmp_path, LOG, RUNS, "workload.trace.time=[0s, 0.25s]").workload(1.0, 0).notes
    assert "1 tasks have rows on both sides of the cut by trace.time: measured by those that are kept" in sliced


@pytest.mark.parametrize(("first", "stop", "cut"), [(0, 2, 2), (0, 3, 1), (1, 5, 1), (0, 5, 0), (3, 4, 0)])
def test_tasks_that_a_choice_of_rows_goes_through_are_counted(tmp_path: Path, first: int, stop: int, cut: int) -> None:
    """Rows of a are the first and third, of b the second and last; a row left out that cannot be read is of neither."""
    (tmp_path / "log.csv").write_text(f"{LOG}400,x\n")
    columns = Columns("in", "out", "ts", task="run")
    rows = read_trace(TraceConfig("log.csv", columns=columns, time_unit="ms", rows=(first, stop)), tmp_path)
    said = [note for note in rows.notes if "both sides of the cut" in note]
    note = f"{cut:,} tasks have rows on both sides of the cut by trace.rows: measured by those that are kept"
    assert said == ([note] if cut else [])


@pytest.mark.parametrize(
    ("overrides", "blamed"),
    [
        (["workload.trace.rate_scale={factor: 2, by: overlay}"], "rate_scale by overlay: rows of this trace are parts"),
        (["workload.trace.rate_scale={factor: 0.5, by: thin}"], "rate_scale by thin: rows of this trace are parts"),
        (["workload.trace.columns.task=who"], "who"),
        (["workload.trace.columns.task=ts"], "name one column twice"),
    ],
)
def test_what_would_tear_tasks_apart_is_refused(tmp_path: Path, overrides: list[str], blamed: str) -> None:
    """Copies and samples of rows, in one line."""
    with pytest.raises(BatchsimError) as caught:
        log_of(tmp_path, LOG, RUNS, *overrides).workload(1.0, 0)
    assert blamed in str(caught.value) and "\n" not in str(caught.value)


def test_drawn_arrivals_have_no_tasks_of_a_log(tmp_path: Path) -> None:
    """Lengths of the rows alone: the tasks are counted out, and an objective of theirs is refused."""
    poisson = ["workload.arrivals={kind: poisson, mean_rate: 9/s}", "workload.lengths={kind: trace}"]
    setup = log_of(tmp_path, LOG, RUNS, *poisson, "workload.requests=9", "slo=task_e2e<1s @ 99%")
    assert any("tasks of the rows not used: poisson" in note for note in setup.workload(9.0, 0).notes)
    with pytest.raises(BatchsimError, match="this workload has none"):
        check_inputs(setup)


def test_spans_of_a_trace_are_a_task_where_a_trace_has_several(tmp_path: Path) -> None:
    """OpenTelemetry's traceId names the task of its generations; traces of one request each are no tasks."""
    span = {"attributes": {"gen_ai.usage.input_tokens": 5, "gen_ai.usage.output_tokens": 2}}
    spans = [
        span | {"traceId": trace, "startTimeUnixNano": at, "endTimeUnixNano": at + 5}
        for trace, at in (("x", 0), ("y", 10), ("x", 20))
    ]
    for kept, tasks in ((spans, [0, 1, 0]), (spans[:2], None)):
        (tmp_path / "spans.jsonl").write_text("".join(json.dumps(each) + "\n" for each in kept))
        found = read_trace(TraceConfig("spans.jsonl"), tmp_path).labels.get("task")
        assert (None if found is None else found.tolist()) == tasks


def test_a_session_of_llm_serving_sim_is_a_task() -> None:
    """The calls of an agent's session belong together; a request of its own is of no task."""
    samples = ROOT / "tests" / "data" / "traces"
    rows = read_trace(TraceConfig("llmservingsim_style.jsonl"), samples)
    assert rows.labels["task"].tolist() == [-1, 0, 0]


def test_a_column_that_is_task_and_session_is_read_from_any_table(tmp_path: Path) -> None:
    """One column of Parquet in two roles gives both."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"ts": [0, 1], "in": [5, 6], "out": [1, 1], "run": ["a", "a"]}), tmp_path / "log.parquet")
    columns = Columns("in", "out", "ts", session="run", task="run")
    rows = read_trace(TraceConfig("log.parquet", columns=columns, time_unit="s"), tmp_path)
    assert rows.labels["session"].tolist() == rows.labels["task"].tolist() == [0, 0]
