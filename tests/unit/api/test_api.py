"""The commands as functions, and what results say of themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import batchsim
from batchsim.base.errors import ScenarioError

TINY: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "cost": {"kind": "constant", "step": "10ms"},
    "kv": {"tokens": 100_000},
    "workload": {
        "arrivals": {"kind": "poisson", "mean_rate": "1/s"},
        "lengths": {"prompt": {"kind": "fixed", "tokens": 20}, "output": {"kind": "fixed", "tokens": 11}},
        "output_cap": 32,
        "duration": "60s",
    },
    "policies": {
        "continuous": {"max_num_seqs": 2, "max_num_batched_tokens": 2048},
        "static": {"batch_size": 2, "max_wait": "100ms", "respond": "batch_end"},
    },
    "load": {"mean_rate": ["1/s", "30/s"]},
    "slo": "ttft<50ms @ 90%",
    "seeds": 1,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> batchsim.Results:
    return batchsim.run(batchsim.Scenario(TINY, name="tiny"), out=tmp_path_factory.mktemp("results"))


def test_requests_have_their_latencies_in_seconds(results: batchsim.Results) -> None:
    """11 tokens at 10 ms a step: the metrics' percentiles are those of the columns."""
    table = results.requests("continuous", 1.0, 0)
    assert np.allclose(table["tpot_s"], 0.01)
    assert np.allclose(table["e2e_s"], table["ttft_s"] + 10 * table["tpot_s"])
    assert np.allclose(table["norm_latency_s"], table["e2e_s"] / 11)
    point = results.points[(results.points["policy"] == "continuous") & (results.points["load"] == 1.0)].iloc[0]
    assert np.sort(table["ttft_s"])[int(np.ceil(0.99 * len(table))) - 1] == pytest.approx(point["ttft_p99_s"])


def test_answers_that_come_whole_have_no_tpot(results: batchsim.Results) -> None:
    """As the metrics have it; their other latencies are there."""
    table = results.requests("static", 1.0, 0)
    assert table["tpot_s"].isna().all()
    assert table["e2e_s"].notna().all()


def test_what_is_unstable_is_flagged_in_every_frame(results: batchsim.Results) -> None:
    """30/s at two sequences of 110 ms is beyond any capacity, 1/s is not."""
    for table in (results.summary, results.points):
        flags = table[table["policy"] == "continuous"].set_index("load")["unstable"]
        assert (bool(flags[1.0]), bool(flags[30.0])) == (False, True)
    assert results.requests("continuous", 30.0, 0)["unstable"].all()
    assert not results.requests("continuous", 1.0, 0)["unstable"].any()


def test_plots_are_figures(results: batchsim.Results) -> None:
    """Of every picture a matplotlib figure with the axes of its panels."""
    titles = [ax.get_title(loc="left") for ax in results.plot.p99_vs_qps().axes]
    assert {"P99 TTFT", "P50 TPOT"} <= set(titles)
    assert len(results.plot.timeline(1.0).axes) >= 2
    assert results.plot.p99_vs_qps()._repr_png_().startswith(b"\x89PNG")  # by which a notebook shows it
    assert [ax.get_title(loc="left") for ax in results.plot.latency_cdf(1.0).axes][:1] == ["TTFT"]


def test_explain_tells_what_the_command_tells(results: batchsim.Results) -> None:
    """An entry a policy: parts of all lives, the life of one request, the causes of misses."""
    parts = results.explain(policy="continuous", load=1.0, slowest=2)
    assert [one["policy"] for one in parts] == ["continuous"]
    assert len(parts[0]["slowest"]) == 2
    lives = results.explain(load=1.0, request=3)
    assert [(one["policy"], one["request_id"]) for one in lives] == [("continuous", 3), ("static", 3)]
    assert [one["policy"] for one in results.explain(load=30.0, slo=True)] == ["continuous", "static"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"policy": "vllm"}, "has no policy vllm. Write one of continuous, static."),
        ({"request": 1, "slo": True}, "request and slo: each tells something else. Give one of them."),
        ({"by": "itl"}, "by itl: is no latency of a request. Write one of ttft, tpot, e2e, queue_time, norm_latency."),
        ({"slowest": -1}, "slowest -1: is no number of requests. Write 0 or more."),
    ],
)
def test_explain_refuses_in_a_line(results: batchsim.Results, asked: dict[str, Any], said: str) -> None:
    """What the run does not have, and questions that exclude each other."""
    with pytest.raises(ScenarioError) as found:
        results.explain(**asked)
    assert str(found.value).endswith(said)


def test_read_again_they_are_the_same(results: batchsim.Results) -> None:
    """A folder of results has plots and latencies too."""
    again = batchsim.load_results(results.path)
    assert isinstance(again, batchsim.Results)
    assert again.summary.equals(results.summary)


@pytest.mark.slow
def test_capacity_finds_what_two_places_carry(tmp_path: Path) -> None:
    """Between nothing and 2 / 110 ms = 18.2/s; a looser SLO, given by name, carries more."""
    one = TINY | {"policies": {"continuous": TINY["policies"]["continuous"]}}
    loads = [
        batchsim.capacity(one, slo=slo, only_rates=True, precision="20%", max_seeds=3, out=tmp_path)
        .policies[0]
        .found.load
        for slo in (None, "ttft<500ms @ 90%")
    ]
    assert 0 < loads[0] < loads[1] < 18.2
    study = batchsim.capacity(one, only_rates=True, precision="20%", max_seeds=3, out=tmp_path)
    assert repr(study).startswith(f"<CapacityStudy scenario: continuous {loads[0]:.3g}; ") and "\n" not in repr(study)


def test_words_of_options_are_checked_as_the_commands_check_them(tmp_path: Path) -> None:
    """One line, by the name of the argument."""
    with pytest.raises(ScenarioError, match=r"^precision: 60% is not from 0\.2% to 50%\."):
        batchsim.capacity(TINY, precision="60%", out=tmp_path)
    with pytest.raises(ScenarioError, match=r"^metric: is of precision, which is not given\."):
        batchsim.run(TINY, metric="e2e_mean_s", out=tmp_path)
    with pytest.raises(ScenarioError, match=r"^scenario: kv\.tokens is varied, and plan takes one value\."):
        batchsim.plan(TINY | {"vary": {"kv.tokens": [1000, 2000]}}, out=tmp_path)
    with pytest.raises(ScenarioError, match="plan"):
        batchsim.plan(TINY, out=tmp_path)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"policies": "static"}, "policies: is the text 'static'. Write a list: policies=['static']."),
        ({"policies": ["vllm"]}, "policies: 'vllm' is none of scenario. Write one of continuous, static."),
        ({"max_seeds": 2}, "max_seeds: 2 is no whole number from 3 to 10,000. Write one."),
        ({"max_probes": "9"}, "max_probes: '9' is no whole number from 5 to 1,000. Write one."),
    ],
)
def test_capacity_refuses_by_the_name_of_the_argument(asked: dict[str, Any], said: str, tmp_path: Path) -> None:
    """And not by the option's, before it simulates anything."""
    with pytest.raises(ScenarioError) as found:
        batchsim.capacity(TINY, out=tmp_path, **asked)
    assert str(found.value) == said
    assert not list(tmp_path.iterdir())


def test_arrivals_alone_and_overrides_in_one_text_are_refused_with_what_to_write() -> None:
    poisson: Any = batchsim.Poisson("8/s")
    with pytest.raises(
        ScenarioError, match=r"^Scenario: workload is PoissonArrivals.* alone\. Write batchsim\.Workload"
    ):
        batchsim.Scenario(model="llama-3.1-8b", workload=poisson)
    with pytest.raises(ScenarioError, match=r"Write a list: overrides=\['seeds=1'\]\.$"):
        batchsim.Scenario("chat", overrides="seeds=1")
    one: Any = "4/s"
    with pytest.raises(ValueError, match=r"^mean_rate is '4/s', expected a list, like"):
        batchsim.Load(mean_rate=one)


def test_the_first_seed_is_meant_where_none_is_named(results: batchsim.Results) -> None:
    for name in ("requests", "steps", "states"):
        table = getattr(results, name)
        assert table("continuous", 1.0).equals(table("continuous", 1.0, 0))


def test_a_load_that_is_no_number_is_refused_by_every_question(results: batchsim.Results) -> None:
    load: Any = "1/s"
    for ask in (lambda: results.requests("static", load), lambda: results.plot.timeline(load)):
        with pytest.raises(
            ScenarioError, match=r"load '1/s' is no number\. Tested are 1, 30; write one without its unit"
        ):
            ask()


def test_results_are_told_in_a_line(results: batchsim.Results) -> None:
    """Where they are, how large they are, and what to ask: not their tables."""
    told = repr(results)
    assert told.startswith(f"<Results {results.path}: 2 policies × 2 loads × 1 seed; ") and "\n" not in told


def test_a_scenario_is_told_in_a_line() -> None:
    """Its policies, loads and SLO; where it lists no loads they are to be found."""
    assert repr(batchsim.Scenario(TINY, name="tiny")) == (
        "<Scenario tiny: continuous, static; mean_rate 1, 30; ttft<50ms @ 90%>"
    )
    found = batchsim.Scenario(TINY | {"load": {"mean_rate": "auto"}})
    assert "; mean_rate found; " in repr(found)
