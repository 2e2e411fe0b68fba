"""Decisions: a load is judged by the ends of its interval, and a policy by its loads."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from batchsim.report.decisions import decision_text, decisions, names_text
from batchsim.results.decision import Decision, JudgedLoad
from tests.support.report_samples import sample_results

MET, OPEN = JudgedLoad(6.0, 0.02, 0.01, 0.03), JudgedLoad(7.0, 0.002, -0.03, 0.01, shares={"": (0.96, 1.0)})
MISSED = JudgedLoad(8.0, -0.2, -0.3, -0.1)


@pytest.mark.parametrize(
    ("load", "verdict", "on_average"),
    [
        (MET, "met", True),
        (OPEN, "open", True),
        (MISSED, "missed", False),
        (replace(MET, low=0.0), "met", True),
        (replace(MISSED, high=0.0), "open", False),
        (JudgedLoad(1.0, 0.0), "met", True),
        (JudgedLoad(1.0, -1e-9), "missed", False),
        (replace(MET, grows=True), "missed", False),
        (replace(MET, by_cost=True), "open", False),
        (replace(MISSED, by_cost=True), "open", False),
        (replace(MET, failed=True), "not known", False),
        (JudgedLoad(1.0, math.nan), "not known", False),
    ],
)
def test_a_load_is_judged_by_the_ends_of_its_interval(load: JudgedLoad, verdict: str, on_average: bool) -> None:
    """Met from a lower end of 0 on, missed below an upper end of 0; growth, failures and the cost's error go before."""
    assert (load.verdict, load.on_average) == (verdict, on_average)


def test_a_decision_tells_the_sure_from_the_open() -> None:
    """The highest load that is met for sure, and what is open above it, with its shares."""
    found = Decision("vllm", (MISSED, replace(OPEN, load=5.0), MET, OPEN))
    assert (found.sure, found.highest, found.open) == (6.0, 7.0, (OPEN,))
    assert decision_text(found, "mean_rate") == "sure at 6 req/s; open at 7 req/s (96.0 to 100 %)"
    by_class = replace(OPEN, shares={"chat": (0.96, 1.02), "batch": (0.999, 0.999)})
    text = decision_text(Decision("vllm", (by_class, replace(OPEN, load=9.0, by_cost=True))), "users")
    assert text == (
        "sure at no load; open with 7 users (chat 96.0 to 100 %, batch 99.9 %), with 9 users (the error of the step"
        " costs decides)"
    )
    several = tuple(replace(OPEN, load=load, by_cost=load > 8) for load in (7.0, 8.0, 9.0, 10.0))
    assert decision_text(Decision("vllm", several), "mean_rate") == (
        "sure at no load; open at 7, 8 req/s (96.0 to 100 %), at 9, 10 req/s (the error of the step costs decides)"
    )


def test_a_line_names_three_policies_and_counts_more() -> None:
    """A title has no room for all."""
    assert [names_text("abcd"[:n]) for n in (1, 2, 3, 4)] == ["a", "a and b", "a, b and c", "4 policies"]


def test_what_is_missed_below_the_highest_load_is_known() -> None:
    """Loads that failed, or that the cost's error decides, are no misses; nor are loads above."""
    below = JudgedLoad(2.0, -0.1, -0.2, -0.05)
    found = Decision("p", (below, replace(below, load=3.0, failed=True), replace(below, load=4.0, by_cost=True), MET))
    assert found.missed_below == (2.0,) and Decision("p", (below, MISSED)).missed_below == ()
    assert Decision("p", (below,)).sure is None and Decision("p", (below,)).highest is None


def test_a_run_decides_by_the_intervals_over_its_seeds() -> None:
    """A margin of less than half its interval is open; one seed has no interval, and its margin decides."""
    results = sample_results()
    summary = results.summary.copy()
    at = (summary["policy"] == "continuous") & (summary["load"] == 12.0)
    summary.loc[at, ["slo_margin", "slo_margin_ci"]] = 0.004, 0.01
    summary.loc[at, ["in_slo", "in_slo_ci"]] = 0.994, 0.01
    (found,) = (each for each in decisions(replace(results, summary=summary)) if each.name == "continuous")
    assert decision_text(found, "mean_rate") == "sure at 8 req/s; open at 12 req/s (98.4 to 100 %)"
    (alone,) = (each for each in decisions(sample_results(seeds=1)) if each.name == "continuous")
    assert alone.sure == alone.highest == 12.0 and alone.open == ()
