"""Claims: what is read off runs, how a verdict follows, and that every shipped condition is one that can be run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from batchsim.results.read import Results
from batchsim.scenario import load_scenario
from tools.claims.claims_picture import claims_picture, draw_claim
from tools.claims.claims_text import claims_as_json, claims_text, measured
from tools.claims.folklore import FOLKLORE
from tools.claims.measures import (
    Values,
    p50_saved,
    padded_share,
    rate_ratio,
    speed_gained,
    speed_ratio,
    steps_missed,
    throughput_gained,
    throughput_ratio,
    time_lost,
)
from tools.claims.nouns import Claim, Condition, Finding, check_claims

TINY = """\
model: llama-3.1-8b
cost: {kind: constant, step: 10ms}
kv: {tokens: 16000}
workload:
  arrivals: {kind: all_at_once}
  requests: 16
  lengths:
    prompt: {kind: fixed, tokens: 100}
    output: {kind: uniform, min: 2, max: 12}
  output_cap: 16
policies:
  one: {kind: hf_static}
  four: {kind: hf_static, batch_size: 4}
  all: {kind: continuous, max_num_seqs: 16, max_num_batched_tokens: 2048}
slo: e2e<1s @ 99%
seeds: 2
"""


def results(*rows: dict[str, Any]) -> Results:
    """A run with these points; a summary row a policy and load is the first seed's."""
    points = pd.DataFrame([{"load": 1.0, "seed": 0, "unstable": False, **row} for row in rows])
    return Results(Path("r"), points[points["seed"] == 0].reset_index(drop=True), points, {}, {"workload": {}})


def finding(*values: float, low: float = 2.0, high: float | None = 4.0, unit: Any = "×", note: str = "") -> Finding:
    condition = Condition("some condition", throughput_ratio)
    return Finding(Claim("name", "said", "source", "reading", unit, low, high, (condition,)), condition, values, note)


def test_throughput_is_compared_seed_by_seed_with_the_best() -> None:
    """Of the two others the one with the higher mean counts in every seed, also where it is the slower one."""
    run = results(
        *({"policy": "vllm", "seed": seed, "throughput_rps": rps} for seed, rps in enumerate((12.0, 20.0))),
        *({"policy": "a", "seed": seed, "throughput_rps": rps} for seed, rps in enumerate((3.0, 10.0))),
        *({"policy": "b", "seed": seed, "throughput_rps": rps} for seed, rps in enumerate((4.0, 4.0))),
    )
    assert throughput_ratio(run, "vllm", ("a", "b"), 1.0) == Values((4.0, 2.0), "against a: 6.5/s")
    assert throughput_ratio(run, "vllm", ("b",), 1.0).by_seed == (3.0, 5.0)


def test_speed_is_the_ratio_of_times_a_token_seed_by_seed() -> None:
    """Of the other over its own: above 1 where a token comes sooner."""
    run = results(
        *({"policy": "drafts", "seed": seed, "norm_latency_mean_s": s} for seed, s in enumerate((0.01, 0.02))),
        *({"policy": "plain", "seed": seed, "norm_latency_mean_s": s} for seed, s in enumerate((0.02, 0.01))),
    )
    assert speed_ratio(run, "drafts", ("plain",), 1.0) == Values((2.0, 0.5), "15 ms a token against 15 ms")
    assert speed_gained(run, "drafts", ("plain",), 1.0) == Values((1.0, -0.5), "15 ms a token against 15 ms")


def test_throughput_gained_is_a_share_of_the_other_s() -> None:
    """Seed by seed; less is below 0."""
    run = results(
        *({"policy": "ahead", "seed": seed, "throughput_rps": rps} for seed, rps in enumerate((11.0, 9.0))),
        *({"policy": "lockstep", "seed": seed, "throughput_rps": rps} for seed, rps in enumerate((10.0, 10.0))),
    )
    assert throughput_gained(run, "ahead", ("lockstep",), 1.0).by_seed == pytest.approx((0.1, -0.1))


def test_padding_is_read_as_rows_and_as_throughput_lost() -> None:
    """60 % of the rows may cost a fifth of the throughput: both are reported as they are."""
    run = results(
        {"policy": "padded", "pad_share": 0.6, "throughput_rps": 4.0},
        {"policy": "unpadded", "pad_share": 0.0, "throughput_rps": 5.0},
    )
    assert padded_share(run, "padded", (), 1.0).by_seed == (0.6,)
    assert time_lost(run, "padded", ("unpadded",), 1.0).by_seed == pytest.approx((0.2,))


def test_medians_are_compared_with_the_best_stable_queue() -> None:
    """A queue that grows has no median to compare with; where all grow, or its own does, nothing is defined."""
    rows = [
        {"policy": "vllm", "e2e_p50_s": 2.0},
        {"policy": "a", "e2e_p50_s": 1.0, "unstable": True},
        {"policy": "b", "e2e_p50_s": 8.0},
    ]
    assert p50_saved(results(*rows), "vllm", ("a", "b"), 1.0) == Values((0.75,), "2 s against 8 s of b")
    assert p50_saved(results(*rows), "vllm", ("a",), 1.0) == Values((), "the queue of all of them grows without end")
    assert p50_saved(results(*rows), "a", ("b",), 1.0).by_seed == ()


def test_rates_at_equal_latency_are_the_highest_that_keep_it() -> None:
    """16/s is too slow and 8/s grows, so 4/s counts for vllm; the better of the others keeps the bound at 2/s."""
    table = [
        ("vllm", 4.0, 0.05, False), ("vllm", 8.0, 0.05, True), ("vllm", 16.0, 0.5, False),
        ("a", 1.0, 0.1, False), ("a", 2.0, 0.11, False), ("b", 1.0, 0.05, False), ("b", 2.0, 0.1, False),
    ]  # fmt: skip
    names = ("policy", "load", "norm_latency_mean_s", "unstable")
    run = results(*(dict(zip(names, row, strict=True)) for row in table))
    assert rate_ratio(run, "vllm", ("a", "b"), 1.0) == Values((2.0,), "4/s against 2/s")
    assert rate_ratio(run, "vllm", ("c",), 1.0).by_seed == ()


@pytest.mark.parametrize(
    ("arrival", "scheduled", "missed"),
    [(5, 10, 0), (10, 10, 0), (10, 20, 1), (5, 30, 2), (11, None, 2), (35, None, 1)],
)
def test_steps_missed_are_those_that_began_without_it(arrival: int, scheduled: int | None, missed: int) -> None:
    """Steps start at 0, 10, 20 and 30; one that starts with the arrival could have had it; who never ran missed one."""
    steps = pd.DataFrame({"start_ns": [0, 10, 20, 30]})
    request = {"arrival_ns": [arrival], "scheduled_ns": pd.array([scheduled], dtype="Int64"), "ended_ns": [35]}
    counted, waited_ns = steps_missed(pd.DataFrame(request), steps)
    assert counted.tolist() == [missed]
    assert waited_ns.tolist() == [(35 if scheduled is None else scheduled) - arrival]


@pytest.mark.parametrize(
    ("values", "high", "verdict"),
    [
        ((2.0, 4.0), 4.0, "yes"),
        ((1.9, 1.0), 4.0, "no: less"),
        ((4.1,), 4.0, "no: more"),
        ((4.1,), None, "yes"),
        ((1.9, 2.1), 4.0, "seeds differ"),
        ((), 4.0, "undefined"),
    ],
)
def test_a_claim_holds_where_every_seed_is_in_its_range(
    values: tuple[float, ...], high: float | None, verdict: str
) -> None:
    """From 2 to 4, bounds included; without an upper bound more is fine too; seeds must agree."""
    assert finding(*values, high=high).verdict == verdict


def test_values_are_written_with_their_spread() -> None:
    """The spread stands where the seeds differ as written; a share is never rounded up to all."""
    assert measured(finding(23.7, 24.2, 24.1)) == "24 × (23.7–24.2)"
    assert measured(finding(1.342, 1.342)) == "1.3 ×"
    assert measured(finding(0.999, 1.0, unit="%")) == "99.9 % (99.9–100)"
    assert measured(finding(-0.2, unit="%")) == "-20 %"
    assert measured(finding()) == "–"


def test_the_report_says_what_holds_and_stays_narrow() -> None:
    """A claim's line counts the conditions under which it holds; every line fits 100 columns, long notes too."""
    claim = finding(3.0, note="n " * 60)
    text = claims_text([claim, Finding(claim.claim, claim.condition, (), "why not")], "a run " * 30)
    assert 'name: "said" holds under 1 of 2 conditions' in text
    assert "same step costs for all: this compares schedulers, not engines" in text
    assert "undefined" in text and "why not" in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_picture_has_a_mark_a_seed() -> None:
    """Three seeds give three marks at the condition's row; an undefined one gives its reason instead."""
    claim = finding(3.0, 2.5, 5.0)
    ax = Figure().subplots()
    draw_claim(ax, claim.claim, [claim, Finding(claim.claim, claim.condition, (), "why not")])
    (marks,) = [line for line in ax.lines if line.get_marker() == "o"]
    assert (list(marks.get_xdata()), list(marks.get_ydata())) == ([3.0, 2.5, 5.0], [0, 0, 0])
    assert [text.get_text() for text in ax.texts] == ["undefined: why not"]


def test_claims_run_their_scenario_once_a_set_of_keys(tmp_path: Path) -> None:
    """Two conditions on one run and one with equal lengths: two runs are kept, and batches of four are four times one.

    With equal outputs of 5 tokens every step costs 10 ms: 16 requests one at a time take 80 steps, by four 20 steps.
    """
    scenario = tmp_path / "tiny.yaml"
    scenario.write_text(TINY)
    equal = ("workload.lengths.output={kind: fixed, tokens: 5}",)
    conditions = (
        Condition("as drawn", throughput_ratio, (), ("one",), policy="four"),
        Condition("padding", padded_share, policy="four"),
        Condition("equal", throughput_ratio, equal, ("one",), policy="four"),
    )
    claim = Claim("c", "said", "source", "reading", "×", 4, 4, conditions)
    found, heading = check_claims([claim], str(scenario), out=tmp_path / "out")
    assert heading.startswith("tiny · cost: ")
    assert found[2].values == pytest.approx((4.0, 4.0))
    assert found[0].values[0] < 4 and found[1].values[0] > 0
    assert len(list((tmp_path / "out" / "tiny").glob("*/summary.csv"))) == 2
    claims_picture(found, heading, tmp_path / "c.png")
    assert imread(tmp_path / "c.png").std() > 0.01
    rows = claims_as_json(found, heading)["findings"]
    assert [row["set"] for row in rows] == [[], [], list(equal)]


@pytest.mark.parametrize("claim", FOLKLORE, ids=lambda claim: claim.name)
def test_every_condition_names_what_its_scenario_has(claim: Claim) -> None:
    """The keys it sets are accepted, and its policies and load are among those that run."""
    for condition in claim.conditions:
        scenario = load_scenario("claims", overrides=condition.overrides)
        assert {condition.policy, *condition.against} <= set(scenario.file.policies)
        assert condition.load in scenario.loads
        assert scenario.file.workload.classes or condition.measure.__name__ != "next_step_share"
