"""Logs that tell more of a row than arrival and lengths: class, priority, tenant, deadline, status, latencies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from batchsim.base.errors import BatchsimError, ScenarioError, TraceError
from batchsim.cli.traces import trace_config
from batchsim.report.text.trace_text import trace_text
from batchsim.scenario import load_scenario
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup
from batchsim.workload.traces.inspect import summary
from batchsim.workload.traces.read_trace import read_trace
from batchsim.workload.traces.trace_config import Columns, TraceConfig
from batchsim.workload.traces.trace_rows import TraceRows

S = 1_000_000_000
HEADER = "ts,in,out,kind,prio,who,gone,status,first,total\n"
COLUMNS = Columns("in", "out", "ts", request_class="kind", priority="prio", tenant="who", deadline="gone")
ROWS = HEADER + "0,100,10,chat,0,acme,5,ok,0.2,1.5\n1,900,5,code,3,,0,ok,,\n2,110,11,chat,1,acme,,ok,0.1,1\n"
SCENARIO = """
model: llama-3.1-8b
cost: {kind: constant, step: 10ms}
kv: {tokens: 400000}
workload:
  arrivals: {kind: trace}
  output_cap: 1024
  trace: {path: log.csv, columns: {arrival: ts, prompt: in, output: out, request_class: kind}, time_unit: s}
policies: {vllm: {}}
slo: ttft<1s @ 99%
seeds: 1
"""


def read(folder: Path, text: str, columns: Columns = COLUMNS, **fields: object) -> TraceRows:
    (folder / "log.csv").write_text(text)
    config = TraceConfig("log.csv", columns=columns, **({"time_unit": "s"} | fields))  # type: ignore[arg-type]
    return read_trace(config, folder)


def scenario(folder: Path, text: str, *overrides: str) -> Setup:
    (folder / "log.csv").write_text(text)
    (folder / "mine.yaml").write_text(SCENARIO)
    return Setup.of(load_scenario(str(folder / "mine.yaml"), overrides=overrides))


def test_labels_are_read_by_their_columns(tmp_path: Path) -> None:
    """Texts are numbered by first appearance; what a row does not tell is -1, a 0 of a duration included."""
    rows = read(tmp_path, ROWS)
    assert rows.texts == {"request_class": ("chat", "code"), "tenant": ("acme",)}
    assert {role: column.tolist() for role, column in rows.labels.items()} == {
        "request_class": [0, 1, 0],
        "priority": [0, 3, 1],
        "tenant": [0, -1, 0],
        "deadline": [5 * S, -1, -1],
    }
    assert rows.class_counts == {"chat": 2, "code": 1}


def test_rows_that_failed_are_left_out_and_counted(tmp_path: Path) -> None:
    """A status that is no success drops its row, with a count by status, unless `failed: keep`."""
    text = ROWS + "3,1,1,chat,0,acme,0,timeout,,\n4,1,1,chat,0,acme,0,500,,\n5,1,1,chat,0,acme,0,500,,\n"
    columns = Columns("in", "out", "ts", status="status")
    rows = read(tmp_path, text, columns)
    assert len(rows) == 3
    assert "3 of 6 rows dropped: they failed (2 '500', 1 'timeout')" in rows.notes
    assert len(read(tmp_path, text, columns, failed="keep")) == 6


@pytest.mark.parametrize(
    ("row", "blamed"),
    [
        ("0,1,1,,0,a,0,ok,,", "log.csv:2: kind is missing"),
        ("0,1,1,c,high,a,0,ok,,", "prio 'high' is not a whole number"),
        ("0,1,1,c,,a,0,ok,,", "prio is missing"),
        ("0,1,1,c,9999999999,a,0,ok,,", "prio 9999999999 is beyond"),
        ("0,1,1,c,1.5,a,0,ok,,", "prio '1.5' is not a whole number"),
        ("0,1,1,c,0,a,-1,ok,,", "gone '-1' is negative"),
        ("0,1,1,c,0,a,soon,ok,,", "gone 'soon' is not a number"),
        ("0,1,1,c,0," + "x" * 300 + ",0,ok,,", "is no name: at most 256 printable letters"),
        ("0,1,1,c,0,a\x07,0,ok,,", "is no name"),
    ],
)
def test_label_that_cannot_be_read(tmp_path: Path, row: str, blamed: str) -> None:
    """A bad label is one line with its place; with `on_broken: drop` its row is left out and counted."""
    with pytest.raises(TraceError, match=r"on_broken: drop") as caught:
        read(tmp_path, HEADER + row + "\n")
    assert blamed in str(caught.value) and "\n" not in str(caught.value)
    rows = read(tmp_path, ROWS + row + "\n", on_broken="drop")
    assert len(rows) == 3 and any("1 of 4 rows dropped as broken" in note for note in rows.notes)


def test_ids_named_as_classes_are_refused(tmp_path: Path) -> None:
    """A column of ids named as that of classes is not a thousand rows in every table."""
    text = HEADER + "".join(f"{i},1,1,k{i},0,a,0,ok,,\n" for i in range(1001))
    with pytest.raises(TraceError, match="'k1000' is one class more than 1,000; is it an id"):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("fields", "blamed"),
    [
        ({"columns": Columns("in", "out", "ts", ttft="first"), "time_unit": "iso"}, "'first' has no unit"),
        ({"columns": Columns("in", "out", e2e="total")}, "'total' has no unit"),
        ({"duration_unit": "ms"}, "goes with no column"),
        ({"failed": "keep"}, "no column says what failed"),
    ],
)
def test_labels_that_do_not_fit_the_block(fields: dict[str, object], blamed: str) -> None:
    """A unit without a column, or a column without a unit, is refused."""
    with pytest.raises(ValueError, match=blamed):
        TraceConfig("log.csv", **fields)  # type: ignore[arg-type]


def test_a_turn_needs_its_session() -> None:
    """The number of a turn says nothing without the session it is of."""
    with pytest.raises(ValueError, match="of which session is not said"):
        Columns("in", "out", turn="turn")


def three_classes(seed: int) -> tuple[str, dict[str, tuple[int, int, int]]]:
    """A log of three classes with lengths and rates of their own, and its (requests, prompt, output) by class."""
    rng, lines, known = np.random.default_rng(seed), [], {}
    for name, rate, prompt, output in (("chat", 3.0, 600, 120), ("code", 1.5, 2000, 40), ("agent", 0.5, 8000, 300)):
        times = np.cumsum(rng.exponential(1 / rate, int(60 * rate)))
        lines += [(time, f"{time:.6f},{prompt},{output},{name},0,,0,ok,,\n") for time in times]
        known[name] = (len(times), prompt, output)
    return HEADER + "".join(line for _, line in sorted(lines)), known


def test_every_class_has_its_own_rows(tmp_path: Path) -> None:
    """Requests, lengths and finishes by class are those of the log's rows, one by one."""
    text, known = three_classes(7)
    setup = scenario(tmp_path, text)
    run = simulate_point(setup, setup.scenario.points()[0])
    requests, texts = run.records.requests, run.records.texts
    names = np.array([texts[code] for code in requests["request_class"]])
    for name, (count, prompt, output) in known.items():
        mine = requests[names == name]
        assert len(mine) == count
        assert set(mine["prompt_tokens"]) == {prompt} and set(mine["output_tokens"]) == {output}
    times = {name: [] for name in known}
    for line in text.splitlines()[1:]:
        time, _, _, name, *_ = line.split(",")
        times[name].append(float(time))
    start = min(each[0] for each in times.values())
    for name, each in times.items():
        sent_s = np.sort(requests["sent_ns"][names == name]) / S
        assert np.allclose(sent_s, np.array(each) - start, atol=2e-9)


def test_classes_of_resampled_rows_are_those_of_the_rows(tmp_path: Path) -> None:
    """Arrivals drawn beside the rows' lengths: each class has its share of rows and its own lengths."""
    text, known = three_classes(7)
    changes = ["workload.arrivals={kind: poisson, mean_rate: 50/s}", "workload.lengths={kind: trace}"]
    setup = scenario(tmp_path, text, *changes, "workload.duration=60s")
    workload = setup.workload(1.0, 0)
    seen: dict[str, set[tuple[int, int]]] = {}
    counts: dict[str, int] = {}
    for arrival in workload.arrivals():
        name = arrival.request.request_class
        seen.setdefault(name, set()).add((arrival.request.prompt_tokens, workload.true_output_tokens(arrival.request)))
        counts[name] = counts.get(name, 0) + 1
    assert seen == {name: {(prompt, output)} for name, (_, prompt, output) in known.items()}
    total, rows = sum(counts.values()), sum(count for count, _, _ in known.values())
    for name, (count, _, _) in known.items():
        share = count / rows
        assert abs(counts[name] / total - share) < 4 * np.sqrt(share * (1 - share) / total)


def test_priority_tenant_and_deadline_of_a_row_reach_the_engine(tmp_path: Path) -> None:
    """What a row tells wins over its class, whose deadline stands in for none; deadlines count from the sending."""
    named = "workload.trace.columns={arrival: ts, prompt: in, output: out, request_class: kind, tenant: who,"
    setup = scenario(
        tmp_path,
        ROWS,
        f"{named} priority: prio, deadline: gone}}",
        "workload.classes={code: {priority: 9, deadline: 7s}}",
    )
    sent = [arrival.request for arrival in setup.workload(1.0, 0).arrivals()]
    assert [(each.request_class, each.priority, each.tenant) for each in sent] == [
        ("chat", 0, "acme"),
        ("code", 3, ""),
        ("chat", 1, "acme"),
    ]
    assert [each.deadline_ns for each in sent] == [5 * S, 8 * S, None]


@pytest.mark.parametrize(
    ("overrides", "blamed"),
    [
        (["workload.classes={chat: {share: 60%}, code: {share: 40%}}"], "Drop share, or write assign: at_random"),
        (["workload.classes={chatt: {priority: 1}}"], "no row is of class chatt; there are chat, code"),
        (["workload.classes={chat: {share: 100%}}", "workload.assign=by_row"], "have a share and assign by_row"),
        (["workload.trace.columns.request_class=null", "workload.assign=by_row"], "no column says of which class"),
        (["workload.trace.columns.request_class=null", "workload.classes={a: {priority: 1}}"], "a has no share"),
        (["workload.assign=at_random"], "is for classes beside the rows"),
    ],
)
def test_classes_that_contradict_the_rows(tmp_path: Path, overrides: list[str], blamed: str) -> None:
    """A share beside rows that tell their class, and a class of no row, are refused with what to do."""
    with pytest.raises(BatchsimError, match=blamed):
        scenario(tmp_path, ROWS, *overrides)


def test_classes_at_random_where_it_is_meant(tmp_path: Path) -> None:
    """With `assign: at_random` shares stand beside rows, even of a log that tells classes."""
    classes = "workload.classes={a: {share: 50%}, b: {share: 50%}}"
    setup = scenario(tmp_path, ROWS, classes, "workload.assign=at_random")
    assert {arrival.request.request_class for arrival in setup.workload(1.0, 0).arrivals()} <= {"a", "b"}
    with pytest.raises(ScenarioError, match="drawn at random beside the rows"):
        scenario(tmp_path, ROWS, classes, "workload.trace.columns.request_class=null")


def test_a_class_of_a_log_has_an_objective_and_knobs(tmp_path: Path) -> None:
    """--set on one class of a log leaves the others as the rows tell them."""
    setup = scenario(tmp_path, ROWS, "workload.classes.code.slo=ttft<9s @ 99%")
    classes = setup.scenario.file.workload.classes
    assert list(classes) == ["code", "chat"]
    assert (classes["code"].slo, classes["chat"].slo) == ("ttft<9s @ 99%", None)
    assert classes["chat"].share == pytest.approx(2 / 3)


def test_inspect_shows_each_class(tmp_path: Path) -> None:
    """Rows and mean lengths by class are those of the rows, in figures and in text."""
    figures = summary(read(tmp_path, ROWS))
    assert figures["classes"]["chat"] == {"rows": 2, "mean_prompt_tokens": 105.0, "mean_output_tokens": 10.5}
    assert "class code: 1 rows, on average 900.0 prompt and 5.0 output tokens" in trace_text(figures)


def test_columns_of_an_option_may_name_any_role(tmp_path: Path) -> None:
    """--columns takes whatever a scenario's columns take, and lists that where a name is none of it."""
    (log := tmp_path / "log.csv").touch()
    config = trace_config(log, "auto", "arrival=ts,prompt=in,output=out,request_class=kind", "s")
    assert config.columns is not None and config.columns.request_class == "kind"
    with pytest.raises(
        ScenarioError, match=r"what else rows may tell is .*, session, status, structured, task, tenant, ttft, turn"
    ):
        trace_config(log, "auto", "prompt=in,output=out,klass=kind", None)
