"""The page of a run that kept less than all, and of tasks: what can be shown is, of the rest a line says what to do."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from batchsim.base.errors import ScenarioError
from batchsim.cli import app
from batchsim.explain.counterfactual import NOT_KEPT, counterfactual
from batchsim.results.read import Results
from batchsim.scenario import load_scenario
from batchsim.study.curves.run import run_scenario
from batchsim.view.page_data import PageData
from tests.unit.view.test_view import SCENARIO

LONG = SCENARIO.replace("requests: 40", "requests: 900").replace("seeds: 1", "seeds: 1\nkeep: KEEP")


def ran(folder: Path, keep: str, text: str = LONG) -> Results:
    path = folder / f"{keep}.yaml"
    path.write_text(text.replace("KEEP", keep))
    return run_scenario(load_scenario(str(path)), out=folder / "results")


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return ran(tmp_path_factory.mktemp("every"), "all")


@pytest.fixture(scope="module")
def requests_alone(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return ran(tmp_path_factory.mktemp("requests"), "requests")


@pytest.fixture(scope="module")
def minutes_alone(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return ran(tmp_path_factory.mktemp("minutes"), "minutes")


def test_rows_of_requests_alone(requests_alone: Results, every: Results) -> None:
    """Their latencies and comparisons are those of a whole run, and no life is told of steps that are not there."""
    page_data, whole = PageData(requests_alone), PageData(every)
    point = page_data.point(0)
    assert set(point["lacks"]) == {"timeline", "lanes", "life"} and point["steps"] is None
    assert "--set keep=all" in point["lacks"]["life"] and point["end_s"] == whole.point(0)["end_s"]
    assert page_data.requests(0, "ttft", None) == whole.requests(0, "ttft", None)
    assert page_data.compare(0, 2, "e2e") == whole.compare(0, 2, "e2e")
    asked = (
        lambda: page_data.timeline(0, 0, None),
        lambda: page_data.lanes(0, 0, None, -1),
        lambda: page_data.request(0, 5),
    )
    for ask in asked:
        with pytest.raises(ScenarioError, match=r"^Not shown: steps and states were not kept"):
            ask()


def test_minutes_in_the_place_of_steps(minutes_alone: Results, every: Results) -> None:
    """Their counts are those of all rows; a window has the minutes that it overlaps."""
    page_data = PageData(minutes_alone)
    point, steps = page_data.point(0), every.steps(*page_data.points()[0])
    assert set(point["lacks"]) == {"lanes", "life", "requests", "compare", "change"}
    assert (point["requests"], point["steps"], point["replicas"]) == (900, len(steps), [0])
    found, rows = page_data.minutes(0, 0, None), every.requests(*page_data.points()[0])
    sent = rows.groupby(rows["sent_ns"] // (60 * 10**9)).size()
    assert found["exact"] and found["sent"] == sent.tolist() and found["start_s"] == [60 * k for k in sent.index]
    busy = steps[steps["start_ns"] < 60e9]["duration_ns"].sum() / 60e9
    assert found["busy"][0] == pytest.approx(busy) and 0 < found["kv_share"][0] < 1
    assert page_data.minutes(0, 0, (61.0, 119.0))["start_s"] == [60.0]
    for asked in (lambda: page_data.requests(0, "ttft", None), lambda: page_data.compare(0, 2, "ttft")):
        with pytest.raises(ScenarioError, match=r"^Not shown: rows of requests and steps"):
            asked()
    with pytest.raises(ScenarioError, match="replica 3: no step ran there"):
        page_data.minutes(0, 3, None)
    with pytest.raises(ScenarioError, match="ends no later than it begins"):
        page_data.minutes(0, 0, (2.0, 1.0))


def test_a_change_of_rows_without_steps_simulates_both_sides(
    requests_alone: Results, minutes_alone: Results, every: Results
) -> None:
    """To the same numbers as of a whole run, and says so; where minutes alone were kept it says what to keep."""
    fewer, point, change = (
        requests_alone,
        PageData(every).points()[0],
        ["policies.continuous.max_num_seqs=8"],
    )
    mine, theirs = counterfactual(fewer, *point, change), counterfactual(every, *point, change)
    assert (mine.rerun, theirs.rerun) == (NOT_KEPT, "")
    for one, other in ((mine.base, theirs.base), (mine.changed, theirs.changed)):
        assert one.misses.equals(other.misses) and len(one.records.steps) == len(other.records.steps) > 0
    with pytest.raises(ScenarioError, match=r"keep: minutes.*--set keep=requests or keep=all\.$"):
        counterfactual(minutes_alone, *point, change)


def test_tasks_have_their_own_curve_and_metrics(tmp_path: Path) -> None:
    """And no change is simulated, since an objective of tasks has no misses of requests: a line says so."""
    results = run_scenario(
        load_scenario("agents", overrides=["seeds=1", "workload.duration=20s", "workload.warmup=0s"]), out=tmp_path
    )
    page_data = PageData(results)
    chart = next(chart for chart in page_data.curves()["charts"] if chart["caption"] == "P99 E2E of tasks")
    rows = results.points
    for line in chart["series"]:
        for value, number in zip(line["y"], line["points"], strict=True):
            assert value is None or value == rows["task_e2e_p99_s"][number]
    assert chart["target"] is None or chart["target"] == 30
    point = page_data.point(0)
    assert "task e2e p99" in {name for name, *_ in point["metrics"]} and set(point["lacks"]) == {"change"}
    assert point["lacks"]["change"].startswith("Not simulated here: slo 'task_e2e<30s @ 95%': bounds tasks")
    assert page_data.request(0, 0)["chapters"] and page_data.lanes(0, 0, None, -1)["of"] == point["requests"]


def test_the_port_of_run_is_checked_before_the_run(tmp_path: Path) -> None:
    """A port that is taken, or given without --view, is told while nothing was simulated yet."""
    (tmp_path / "s.yaml").write_text(SCENARIO)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for more, text in ((["--view"], "cannot be listened at"), ([], "is of --view, which is not given")):
            given = ["run", str(tmp_path / "s.yaml"), "--out", str(tmp_path / "out"), "--port", str(port), *more]
            found = CliRunner().invoke(app, given)
            assert found.exit_code == 2 and f"--port {port}: {text}" in found.output and found.output.count("\n") == 1
    assert not (tmp_path / "out").exists()
