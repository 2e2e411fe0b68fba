"""The tables a run prints."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from batchsim.base.errors import ScenarioError
from batchsim.report.layout import aligned
from batchsim.report.reading import load_to_show, sweeps
from batchsim.report.text.run_table import asked_columns
from batchsim.report.text.summary_text import highest_loads, point_table, report, warnings
from batchsim.report.text.trace_text import trace_text
from tests.support.report_samples import FOUR, SEVEN, sample_results


def cell(table: str, label: str) -> list[str]:
    """The cells of the row that starts with `label`, split at double spaces."""
    line = next(line for line in table.splitlines() if line.startswith(label))
    return [part.strip() for part in line.split("  ") if part.strip()]


def set_value(results: Any, policy: str, load: float, **values: Any) -> None:
    summary = results.summary
    for name, value in values.items():
        summary.loc[(summary["policy"] == policy) & (summary["load"] == load), name] = value


def reasons(**given: dict[str, int]) -> dict[str, dict[str, int]]:
    """Outcomes of one run by reason, as the manifest has them."""
    return {f"{outcome}_by_reason": given.get(outcome, {}) for outcome in ("rejected", "cancelled", "unfinished")}


def test_compare_table_has_a_row_a_policy_in_the_scenarios_order():
    """Values carry ± and units; an unstable policy shows no latency but the word; padding is a percentage."""
    results = sample_results()
    set_value(
        results, "continuous", 8.0, ttft_p50_s=0.0483, ttft_p50_s_ci=0.0021, ttft_p99_s=0.613, ttft_p99_s_ci=0.088
    )
    table = point_table(results, 8.0)
    assert table.splitlines()[0] == "at 8 req/s offered, same requests for all (3 seeds, ± = 95 %)"
    assert [line.split("  ")[0] for line in table.splitlines()[2:6]] == [label for label, _, _ in FOUR.values()]
    assert cell(table, "continuous")[1:3] == ["48 ± 2 ms", "610 ± 90 ms"]
    assert cell(table, "static") == [
        "static (bs 16)",
        "–",
        "–",
        "–",
        "unstable",
        "3.0 %",
        "3.4",
        "41 %",
        "padding, slots",
    ]


def test_response_sent_whole_has_no_tpot_and_the_table_says_why():
    """A stable static policy shows – under tpot, never 0, and the dash is explained; without one it is not."""
    table = point_table(sample_results(), 1.0)
    assert cell(table, "static")[3] == "–"
    assert "– not defined (a response sent whole, or of one token, has no tpot)" in table
    assert "not defined" not in point_table(sample_results({"continuous": FOUR["continuous"]}), 8.0)


def test_hits_of_a_prefix_cache_have_a_column_where_there_are_some():
    """A policy without a cache has a dash there; without any hit, and of older results, there is no column."""
    results = sample_results()
    assert " hit " not in point_table(results, 8.0)
    results.summary["prefix_hit_rate"] = np.nan
    assert " hit " not in point_table(results, 8.0)
    set_value(results, "preemptive", 8.0, prefix_hit_rate=0.366)
    table = point_table(results, 8.0)
    assert table.splitlines()[1].split()[-4:] == ["pad", "hit", "bound", "by"]
    assert cell(table, "preemptive")[-2] == "37 %" and cell(table, "continuous")[-2] == "–"
    assert " hit " not in point_table(results, 4.0)


def test_percentile_of_few_observations_is_marked():
    """`~` stands before exactly the cells whose metric is in `few`, and is explained."""
    results = sample_results()
    set_value(results, "preemptive", 8.0, few="ttft_p99_s")
    table = point_table(results, 8.0)
    cells = cell(table, "preemptive")
    assert cells[2].startswith("~") and not cells[1].startswith("~") and not cells[3].startswith("~")
    assert "~ fewer than 20 observations beyond the percentile" in table
    assert cell(table, "continuous")[2][0] != "~"


def test_one_seed_has_no_interval():
    """Without an interval nothing is shown after a value, neither ± 0 nor ± nan."""
    table = point_table(sample_results(seeds=1), 8.0)
    assert "±" not in table and "nan" not in table
    assert "(1 seed)" in table


@pytest.mark.parametrize(
    ("value", "half", "shown"),
    [
        (2.41, 0.33, "2.4 ± 0.3 s"),
        (0.0312, 0.00004, "31.20 ± 0.04 ms"),
        (0.05, 0.3, "50 ± 300 ms"),
        (0.05, 1.2, "50 ± 1200 ms"),
        (0.0312, 0.0, "31.2 ± 0.0 ms"),
        (0.999, np.nan, "999 ms"),
        (12345.0, np.nan, "12300 s"),
        (np.nan, np.nan, "–"),
    ],
)
def test_values_are_rounded_to_their_interval(value: float, half: float, shown: str):
    """The interval has one digit, the value is rounded to its place and keeps at least two digits."""
    results = sample_results()
    set_value(results, "preemptive", 8.0, ttft_p50_s=value, ttft_p50_s_ci=half)
    assert cell(point_table(results, 8.0), "preemptive")[1] == shown


@pytest.mark.parametrize(("share", "shown"), [(0.9996, ">99.9 %"), (1.0, "100 %"), (0.0004, "<0.1 %"), (0.0, "0")])
def test_shares_are_never_rounded_to_all_or_nothing(share: float, shown: str):
    """99.96 % is not printed as 100 %, nor 0.04 % as 0."""
    results = sample_results()
    set_value(results, "preemptive", 8.0, in_slo=share)
    assert shown in cell(point_table(results, 8.0), "preemptive")


def test_lines_are_at_most_100_columns():
    """In a file; long labels go on below, many policies in further lines; none is dropped, no word is cut."""
    policies = {
        **SEVEN,
        "long": ("static (batch_size 16)", "static", 30.0),
        "other": ("a policy whose label somebody made very long (batch_size 64)", "static", 30.0),
    }
    results = sample_results(policies, noise=0.5)
    text = report(results, 12.0)
    assert max(map(len, text.splitlines())) <= 100
    first = " ".join(line.split("  ")[0] for line in point_table(results, 12.0).splitlines())
    assert all(label in first for label, _, _ in policies.values()) and "…" not in text


@pytest.mark.parametrize("columns", [40, 160, *(pytest.param(width, marks=pytest.mark.slow) for width in (60, 80))])
def test_tables_fit_the_terminal_they_are_written_to(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whatever width: no line is longer, no word of a label or a heading is cut."""
    results = sample_results({**SEVEN, "long": ("static (batch_size 16)", "static", 30.0)}, noise=0.5)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    text = report(results, 12.0)
    assert max(map(len, text.splitlines())) <= columns
    assert {"(batch_size", "continuous", "p99", "SLO"} <= set(text.split()) and "…" not in text


def test_figures_of_a_trace_keep_their_columns_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns without room go below with the row's name again; no row is broken in its middle."""
    tokens = dict.fromkeys(("mean", "cv", "min", "p50", "p90", "p99", "max"), 1_234_567.0)
    figures = {"source": "log.csv", "format": "mapping", "rows": 3, "arrivals": None, "notes": []}
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    text = trace_text(figures | {"prompt_tokens": tokens, "output_tokens": tokens})
    rows = [line for line in text.splitlines() if "1,234,567" in line or "1234567.00" in line]
    assert max(map(len, text.splitlines())) <= 60 and len(rows) == 4
    assert [row[:6] for row in rows] == ["prompt", "output"] * 2


def test_a_table_that_is_too_wide_goes_on_below(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words are broken into lines first, then columns go to a second part, with the first column again."""
    grid = [["", "one", "two", "why"], ["a policy", "1" * 20, "2" * 20, "because it is so"]]
    assert aligned(grid) == [
        "                           one                   two  why",
        "a policy  11111111111111111111  22222222222222222222  because it is so",
    ]
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert aligned(grid) == [
        "                           one",
        "a policy  11111111111111111111",
        "                           two",
        "a policy  22222222222222222222",
        "          why",
        "a policy  because it",
        "          is so",
    ]
    assert aligned(grid, close=True) == [
        "                          one",
        "a policy 11111111111111111111",
        "                          two why",
        "a policy 22222222222222222222 because it",
        "                              is so",
    ]


def test_load_shown_is_the_highest_at_which_a_policy_meets_the_slo():
    """With none, it is the middle load, the lower of two."""
    results = sample_results()
    assert load_to_show(results) == 16.0
    results.summary["slo_margin"] = -0.5
    assert load_to_show(results) == 8.0
    assert load_to_show(sample_results({"static": FOUR["static"]}, loads=(1.0, 2.0, 4.0, 8.0))) == 2.0


def test_load_shown_is_one_that_surely_meets_the_slo_where_there_is_one():
    """The lower end of the interval decides; one that meets it on average is shown where none surely does, and by a
    policy whose loads are its own."""
    results = sample_results()
    set_value(results, "preemptive", 16.0, slo_margin=0.01, slo_margin_ci=0.02)
    assert load_to_show(results) == 12.0
    (of_policy,) = [sweep for sweep in sweeps(results) if sweep.policy == "preemptive"]
    assert of_policy.meets_slo[of_policy.index(16.0)] and of_policy.loads[of_policy.shown_at] == 12.0
    results.summary["slo_margin_ci"] = 0.02
    assert load_to_show(results) == 16.0
    (of_policy,) = [sweep for sweep in sweeps(results) if sweep.policy == "preemptive"]
    assert of_policy.loads[of_policy.shown_at] == 16.0


def test_highest_loads_name_every_policy_and_the_holes():
    """`never` where no load meets the SLO; a lower load that fails is named; an unstable point never counts."""
    results = sample_results()
    set_value(results, "preemptive", 4.0, slo_margin=-0.001)
    set_value(results, "dynamic", 20.0, slo_margin=0.0)
    line = highest_loads(results)
    assert line.startswith(
        "highest rate tested that surely meets ttft<1s & tpot<50ms @ 99%:  static (bs 16) never   dynamic 4"
    )
    assert "preemptive 16 (but not 4)" in line


def test_an_objective_that_is_not_defined_is_no_miss():
    """Without a margin at any load a policy is `not known`, neither `never` nor met."""
    results = sample_results()
    results.summary.loc[results.summary["policy"] == "static", "slo_margin"] = np.nan
    assert "static (bs 16) not known\n" in highest_loads(results)


def test_where_all_queues_grow_the_least_bad_row_is_named():
    """The largest share within the SLO decides, then completions; silent as soon as one row is stable or alone."""
    results = sample_results()
    for policy, in_slo, done in (("static", 0.02, 9.0), ("dynamic", 0.03, 4.0), ("continuous", 0.03, 5.0)):
        set_value(results, policy, 20.0, unstable=True, in_slo=in_slo, throughput_rps=done)
    set_value(results, "preemptive", 20.0, unstable=True, in_slo=0.0, throughput_rps=99.0)
    (line,) = [line for line in report(results, 20.0).splitlines() if "least bad" in line]
    assert line == "the queue grows in every row of the table; least bad: continuous, 3.0 % in SLO, 5.0 requests/s done"
    set_value(results, "preemptive", 20.0, unstable=False)
    assert "least bad" not in report(results, 20.0)
    assert "least bad" not in report(sample_results({"static": FOUR["static"]}), 20.0)


def test_growing_queues_are_warned_of():
    """The load from which the queue grows is named; where a higher load is stable again, each growing one is."""
    results = sample_results()
    none = "no percentiles of TTFT or E2E there"
    assert f"! static (bs 16): the queue grows from 4 req/s on; {none}" in warnings(results, 8.0)
    assert not any(line.startswith("! preemptive") for line in warnings(results, 8.0))
    set_value(results, "static", 20.0, unstable=False)
    assert f"! static (bs 16): the queue grows at load 4, 8, 12, 16; {none}" in warnings(results, 8.0)


def test_uncompleted_requests_are_warned_of_with_their_reasons():
    """Share, numbers over all seeds and reasons with their first case; only of the load shown."""
    results = sample_results()
    set_value(results, "continuous", 8.0, uncompleted_share=0.021)
    results.manifest["outcomes"]["continuous"] = [
        {"load": 8.0, "seed": 0, **reasons(rejected={"never_fits": 60}, cancelled={"deadline": 1})},
        {"load": 8.0, "seed": 1, **reasons(rejected={"never_fits": 40})},
        {"load": 12.0, "seed": 0, **reasons(rejected={"never_fits": 1000})},
    ]
    results.manifest["details"] = {"continuous": {"never_fits": "131 KV blocks needed, 128 in the pool"}}
    assert warnings(results, 8.0)[-1] == (
        "! continuous: 2.1 % of requests not completed at 8 req/s offered: 100 rejected (never_fits, 131 KV blocks"
        " needed, 128 in the pool), 1 cancelled (deadline) over all seeds"
    )
    assert not any("not completed" in line for line in warnings(results, 12.0))


def test_requests_cut_short_by_the_engine_are_warned_of():
    """Number over all seeds and the first case; only of the load shown."""
    results = sample_results()
    results.manifest["outcomes"]["continuous"] = [
        {"load": load, "seed": seed, **reasons(), "cap_cut": 3} for load, seed in ((8.0, 0), (8.0, 1))
    ]
    results.manifest["details"] = {"continuous": {"cap_cut": "90 output tokens asked for, 28 allowed"}}
    assert warnings(results, 8.0)[-1] == (
        "! continuous: 6 requests over all seeds ended early at 8 req/s offered: the engine cuts output caps to its KV"
        " memory and context (90 output tokens asked for, 28 allowed)"
    )
    assert not any("cut" in line for line in warnings(results, 12.0))


def test_best_of_names_its_variant_in_the_table():
    """Where the best variant changes with the load, the table names that of its load, the other lines the policy."""
    results = sample_results()
    set_value(results, "static", 1.0, label="static (bs 4)")
    assert cell(point_table(results, 1.0), "static")[0] == "static (bs 4)"
    assert cell(point_table(results, 8.0), "static")[0] == "static (bs 16)"
    assert "static (best at each load) never" in highest_loads(results)


@pytest.mark.parametrize(
    ("load_name", "head"),
    [
        ("users", "with 8 users, same"),
        ("rate_scale", "at 8× the trace's rate, same"),
        ("", "at the scenario's load, same"),
    ],
)
def test_head_says_what_the_load_is(load_name: str, head: str):
    """Closed loops, scaled traces and scenarios without a load axis each say so."""
    assert point_table(sample_results(load_name=load_name), 8.0).startswith(head)


def test_head_says_what_really_arrived():
    """Where the seeds' mean rate misses the asked one by more than 2 %, the head has both."""
    results = sample_results()
    results.summary.loc[results.summary["load"] == 8.0, "offered_rps"] = 6.95
    assert point_table(results, 8.0).startswith("at 8 req/s offered (6.95 in these seeds), same requests")
    assert point_table(results, 4.0).startswith("at 4 req/s offered, same requests")


def test_report_counts_the_variants_of_best_of():
    """With more runs than policies × loads × seeds it does not claim the product."""
    results = sample_results()
    results.manifest["points_run"] = 147
    assert "4 policies × 7 loads × 3 seeds, 147 runs with best_of" in report(results)


def test_report_says_what_was_run():
    """Heading, KV budget, workload with the number of runs, notes, then the table at the chosen load."""
    results = sample_results()
    for workload in results.manifest["workload"]:
        workload["notes"] = ["3 requests cut to max_model_len"]
    lines = report(results).splitlines()
    assert " · ".join(lines[:2]) == results.manifest["heading"]
    assert lines[2].startswith("KV 892,800 tokens")
    assert lines[3] == "on/off arrivals, CV 2.4, IDC(1 s) 6.1 · 4 policies × 7 loads × 3 seeds = 84 runs"
    assert lines[4] == "- 3 requests cut to max_model_len"
    assert lines[5].startswith("at 16 req/s offered")


def test_load_that_was_not_tested_is_refused():
    """The error names the loads there are."""
    with pytest.raises(ScenarioError, match=r"load 3 was not tested. Tested are 1, 2, 4, 8, 12, 16, 20\."):
        point_table(sample_results(), 3.0)


def test_a_column_without_a_letter_is_empty():
    """As where nothing is known of any row."""
    assert aligned([["", "x"], ["", "1"]], left=(0,)) == ["  x", "  1"]


def test_metrics_can_be_asked_onto_the_screen() -> None:
    """By name, without the unit, or by what stands above them; of a class; in the order asked, in the place of all."""
    results = sample_results()
    columns = asked_columns("makespan_throughput_rps, ttft_p99,in SLO,bound_by, pad_share", ())
    assert columns == ["makespan_throughput_rps", "ttft_p99_s", "in_slo", "bound_by", "pad_share"]
    assert asked_columns("hit,ttft_p99_s[chat]", ["chat"]) == ["prefix_hit_rate", "ttft_p99_s[chat]"]
    lines = report(results, None, ["ttft_p99_s", "pad_share", "preemptions"]).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("at 16 req/s"))
    assert lines[at + 1].split() == ["ttft", "p99", "pad", "preemptions"]
    plain = report(results).splitlines()
    assert len([line for line in lines if "s/token" in line]) == 0 < len([line for line in plain if "s/token" in line])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("preemtions", "--columns preemtions: preemtions is no metric. Write one of preemptions"),
        ("makespan,preempt", "preempt is no metric. Write one of preemptions, preemption_rate"),
        ("ttft_p99_s[chat]", "chat is no class. Write no class: the workload has none"),
        ("hit,,pad", "nothing is no metric"),
        ("zzzzz", "Write one of columns of summary.csv"),
    ],
)
def test_a_column_that_there_is_not_is_one_line_with_its_like(asked: str, said: str) -> None:
    """Of a wrong name those near it, or that hold it."""
    with pytest.raises(ScenarioError) as caught:
        asked_columns(asked, ())
    assert said in str(caught.value)
