"""The table of metrics says what is measured, in its order, and what each metric needs."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from batchsim.kernel.lane_rows import LANE_DTYPE
from batchsim.metrics.latencies import LATENCIES, STREAMED, holds_queue
from batchsim.metrics.measure import PERCENTILES, measure
from batchsim.metrics.point_inputs import PointInputs
from batchsim.metrics.slo import parse_slo
from batchsim.metrics.table import METRICS, STATISTICS
from batchsim.results.keep import metric_names
from batchsim.scenario import load_scenario
from batchsim.scenario.setup import Setup
from tests.support.metrics_helpers import MS, arrival, inputs_of, run
from tests.support.paths import ROOT

PAGE = ROOT / "docs/metrics.md"
WITHOUT: dict[str, dict[str, Any]] = {
    "streamed answers": {"streams": False},
    "arrivals over time": {"all_at_once": True},
    "an objective": {"slo": None},
    "an objective of requests": {"slo": parse_slo("p99(ttft)<1s")},
    "a limit on sequences": {"max_num_seqs": None},
    "a prefix cache": {"has_prefix_cache": False},
    "a GPU of the catalog": {"peak_flops": None, "memory_bandwidth": None},
    "known power": {"step_watts": None},
    "idle power": {"idle_watts": None},
    "a steady run": {"stationary": False},
    "draft tokens": {},  # the run has none; see `inputs`
    "an engine ahead": {},
}
BESIDES = {
    "an objective": {"an objective of requests"},
    "a prefix cache": {"sessions"},
    "known power": {"idle power"},
}


def test_what_is_measured_has_a_row_and_what_has_a_row_is_measured() -> None:
    """In the order of the table; of classes after a metric's own name."""
    for scenario, without in (
        ("replicas", "ranks tasks sessions rollouts offline adapters tiers sleep share"),
        ("mixed-priority", "replicas ranks tasks sessions rollouts offline adapters tiers sleep share"),
    ):
        loaded = load_scenario(scenario)
        names = metric_names(Setup.of(loaded), loaded.points()[0])
        expected = [name for name, metric in METRICS.items() if metric.needs not in without.split()]
        assert [name for name in names if "[" not in name] == expected
        assert {name.partition("[")[0] for name in names} <= set(expected)
    assert list(STATISTICS) == ["mean", *(f"p{percent}" for percent in PERCENTILES)]


@cache
def inputs(*, drafts: bool, ahead: bool) -> PointInputs:
    """A run with all that any metric needs but replicas, with `drafts` as if each decode verified some, and `ahead` as
    if each step had been launched at its start."""
    records = run([arrival(i, i * MS, 4, 3) for i in range(150)]).records
    steps = records.steps.copy()
    steps["num_decode_tokens"] += 3 * drafts * steps["num_decode"]
    steps["num_accepted_tokens"] += drafts * steps["num_decode"]
    lanes = np.zeros(len(steps) * ahead, LANE_DTYPE)
    if ahead:
        lanes["called_ns"] = lanes["launched_ns"] = steps["start_ns"]
        lanes["processed_ns"] = steps["start_ns"] + steps["duration_ns"]
    records = replace(records, step_rows=steps, lanes=lanes)
    work = np.ones(len(records.steps))
    return inputs_of(
        records,
        window_ns=(0, 200 * MS),
        slo=parse_slo("ttft<1s @ 99%"),
        max_num_seqs=4,
        has_prefix_cache=True,
        cost_terms={"flops": work, "bytes": work},
        step_watts=work,
        idle_watts=0.5,
        peak_flops=1e15,
        memory_bandwidth=1e12,
        stationary=True,
        turn=np.arange(150) % 5,
    )


@pytest.mark.parametrize("need", ["", *WITHOUT])
def test_a_metric_is_none_without_what_it_needs_and_only_then(need: str) -> None:
    """With all of it nothing is; `replicas` have metrics of their own. With draft tokens gaps are not known."""
    given = inputs(drafts=need != "draft tokens", ahead=need != "an engine ahead")
    found = measure(replace(given, **WITHOUT.get(need, {}))).values
    if need != "draft tokens":
        assert found["acceptance_length"] == 2
    missing = {name for name, value in found.items() if value is None}
    expected = {need, *BESIDES.get(need, ())} - {""}
    gaps = {name for name in METRICS if name.startswith("itl_")} if need != "draft tokens" else set[str]()
    assert missing == {name for name, metric in METRICS.items() if metric.needs in expected} | gaps


def test_latencies_after_the_first_token_are_those_of_streamed_answers() -> None:
    """Those and no others lack the time in the queue, and do not grow with it."""
    after = {name for name, latency in LATENCIES.items() if latency.part == "after first token"}
    assert after == {"tpot", "itl"} == {*STREAMED, "itl"}
    for name, latency in LATENCIES.items():
        assert (METRICS[f"{name}_p99_s"].needs == "streamed answers") is (name in after) is not latency.queues


def test_words_and_headings() -> None:
    """Times lose their unit; a heading is the words where the row has none shorter."""
    assert [METRICS[name].words for name in ("ttft_p99_s", "output_tokens_per_s")] == [
        "ttft p99",
        "output tokens per s",
    ]
    headings = [METRICS[name].heading for name in ("ttft_p50_s", "norm_latency_mean_s", "throughput_rps", "in_slo")]
    assert headings == ["ttft p50", "s/token", "done/s", "in SLO"]
    assert all(metric.doc for metric in METRICS.values()) and all(latency.doc for latency in LATENCIES.values())


def test_the_glossary_says_what_the_table_says() -> None:
    """Of the first name of every row of the glossary."""
    text = PAGE.read_text(encoding="utf-8").partition("## Glossary")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)`(?:, `\w+`)* ([^|]+) \|", text, re.MULTILINE)
    assert len(rows) == 8
    for name, message in rows:
        assert message in (LATENCIES[name].doc if name in LATENCIES else METRICS[name].doc), name


def test_columns_of_latencies_from_a_requests_beginning_hold_its_time_in_the_queue() -> None:
    """Of any statistic, of all requests or of a class; not what comes after the first token, nor any other metric."""
    columns = ["ttft_p99_s", "e2e_mean_s[gold]", "queue_time_p50_s", "norm_latency_p99_s", "task_e2e_p90_s"]
    assert [column for column in columns if not holds_queue(column)] == []
    others = ["tpot_p99_s", "itl_p99_s[gold]", "throughput_rps", "ttft", "queue_depth_mean", "task_e2e"]
    assert [column for column in others if holds_queue(column)] == []
