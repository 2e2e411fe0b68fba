"""Why tasks missed their objective: the critical path, and the one cause of each miss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from batchsim.base.errors import ScenarioError
from batchsim.explain.causes import Objectives, part_sides
from batchsim.explain.task_causes import BETWEEN, TaskObjectives, path_ns, task_misses
from batchsim.kernel.record import PRUNED
from batchsim.report.pictures.plots import p99_vs_qps_figure
from batchsim.report.text.causes_text import causes, causes_text
from batchsim.scenario import load_scenario
from batchsim.study.curves.run import run_scenario
from tests.support.metrics_helpers import MS
from tests.unit.workload.test_tasks import PRUNING, SCENARIO, played, setup_of
from tests.unit.workload.traces.test_logged_tasks import LOG, RUNS, log_of

LATE = "slo=task_e2e<100ms @ 50%"


def objectives(plain: dict[str, object]) -> TaskObjectives:
    found = TaskObjectives.of(plain)
    assert found is not None
    return found


def missed(folder: Path, *overrides: str, text: str = SCENARIO) -> list[tuple[str, str, int]]:
    setup = setup_of(folder, *overrides, text=text)
    frame, _ = task_misses(played(setup).records, objectives(setup.scenario.plain))
    return list(zip(frame["metric"], frame["cause"], frame["cause_ns"], strict=True))


@pytest.mark.parametrize("text", [SCENARIO, PRUNING], ids=["joined", "pruned tree"])
def test_the_parts_of_the_critical_path_sum_to_the_task(tmp_path: Path, text: str) -> None:
    """To the nanosecond, also where requests wait for each other's steps and where others were pruned."""
    setup = setup_of(tmp_path, "policies={vllm: {max_num_seqs: 2}}", "workload.arrivals.mean_rate=90/s", text=text)
    records = played(setup).records
    found = objectives(setup.scenario.plain)
    names, before, after = part_sides(records, 0)
    lives, size = found.lives(records), found.tasks.num_requests
    task = records.requests["request_id"] // size
    assert len(lives.first) > 10 and np.isfinite(lives.e2e_ns).all() and "queued:no_slot" in names
    assert (records.requests["outcome"] == PRUNED).any() == (text == PRUNING)
    for first, e2e_ns in zip(lives.first, lives.e2e_ns, strict=True):
        time_ns = path_ns(records.requests, before + after, np.flatnonzero(task == task[first]))
        assert time_ns.sum() == e2e_ns and len(time_ns) == len(names) + 1
        assert time_ns[-1] >= 45 * MS if text == SCENARIO else time_ns[-1] == 25 * MS


def test_work_and_tools_are_blamed_where_they_alone_are_too_long(tmp_path: Path) -> None:
    """A task alone takes 100 ms, a tool's 40 ms, the longer of two answers, 5 ms and 20 ms: decoding is the most of it.
    With a tool of a second that is."""
    metric, cause, ns = missed(tmp_path, LATE)[0]
    assert (metric, cause) == ("task_e2e", "decode_alone") and 90 * MS < ns < 200 * MS
    stages = SCENARIO.replace("wait: 40ms", "wait: 1s")
    assert missed(tmp_path, LATE, text=stages)[0] == ("task_e2e", BETWEEN, 1_005 * MS)


def test_what_lies_in_others_way_is_blamed_otherwise(tmp_path: Path) -> None:
    """One slot for six tasks a second: work and tools would have kept a bound of a second, the queue did not."""
    found = missed(
        tmp_path, "policies={vllm: {max_num_seqs: 1}}", "workload.arrivals.mean_rate=60/s", "slo=task_e2e<1s @ 50%"
    )
    assert len(found) > 10 and {row[:2] for row in found} == {("task_e2e", "queued:no_slot")}
    assert min(ns for _, _, ns in found) > 300 * MS


def test_a_task_that_is_not_done_is_named_after_who_failed_first(tmp_path: Path) -> None:
    """One request may wait for the one slot, and others are turned away: that is the cause, and no time is blamed."""
    setup = setup_of(
        tmp_path, "max_waiting=1", "policies={vllm: {max_num_seqs: 1}}", "workload.arrivals.mean_rate=600/s"
    )
    frame, judged = task_misses(played(setup).records, objectives(setup.scenario.plain))
    assert "rejected" in set(frame["metric"]) and frame["cause"].str.startswith("rejected:").any()
    undone = frame[frame["metric"] == "rejected"]
    assert all(value is pd.NA for value in undone["value_ns"]) and set(undone["cause_ns"]) == {0}
    assert judged == {"": 300}


def test_only_tasks_after_the_warm_up_and_of_bounded_classes_are_judged(tmp_path: Path) -> None:
    """Three tasks begin, at 0, 1 and 2 s; a bound on requests beside that on tasks leaves both to be explained."""
    setup = setup_of(tmp_path, "workload.warmup=1500ms", LATE)
    records = played(setup).records
    assert task_misses(records, objectives(setup.scenario.plain))[1] == {"": 1}
    plain = setup_of(tmp_path, "slo=p50(task_e2e)<1s, p50(ttft)<1s").scenario.plain
    assert objectives(plain).stated.judges_requests and Objectives.of(plain).judges_requests
    assert TaskObjectives.of(setup_of(tmp_path, "slo=ttft<1s @ 50%").scenario.plain) is None


def test_explain_counts_tasks_and_requests_apart(tmp_path: Path) -> None:
    """In the table, each with its own number of them; the picture against load has panels of tasks."""
    (tmp_path / "mine.yaml").write_text(SCENARIO)
    scenario = load_scenario(str(tmp_path / "mine.yaml"), overrides=["slo=p50(task_e2e)<100ms, p50(ttft)<1ms"])
    results = run_scenario(scenario, out=tmp_path / "results")
    found = causes(results, ["vllm"], 1.0, [0])
    assert [(row["counted"], row["missed"], row["offered"]) for row in found] == [("requests", 18, 18), ("tasks", 3, 3)]
    titles = [ax.get_title(loc="left") for ax in p99_vs_qps_figure(results).axes]
    assert [title for title in titles if "tasks" in title] == ["P99 E2E of tasks", "P50 E2E of tasks"]
    text = causes_text(results, found, 1.0, 1)
    assert "18 of 18 requests missed (100 %)" in text and "vllm: 3 of 3 tasks missed (100 %)" in text


def test_where_no_task_began_after_the_warm_up_a_line_says_so(tmp_path: Path) -> None:
    """The last one begins at 2 s; requests of it come later."""
    (tmp_path / "mine.yaml").write_text(SCENARIO)
    scenario = load_scenario(str(tmp_path / "mine.yaml"), overrides=["workload.warmup=2020ms", LATE])
    results = run_scenario(scenario, out=tmp_path / "results")
    with pytest.raises(ScenarioError, match=r"nothing that the SLO bounds was measured .* shorten workload.warmup"):
        causes(results, ["vllm"], 1.0, [0])


def test_tasks_of_a_log_are_refused_in_one_line(tmp_path: Path) -> None:
    """Results do not say which request is of which task; the line says what to do."""
    plain = log_of(tmp_path, LOG, RUNS, "slo=task_e2e<350ms @ 50%").scenario.plain
    assert TaskObjectives.of(plain) is None
    with pytest.raises(ScenarioError, match="bounds tasks, and what is looked at here are requests"):
        Objectives.of(plain)
