"""`batchsim run --precision`: seeds are added where they are needed, for all policies at a load alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchsim.results.read import load_results
from tests.support.tiny_scenario import TINY, batchsim, changed

ASKED = ("--precision", "10%", "--metric", "e2e_mean_s", "--max-seeds", 8, "--jobs", 1, "--no-pictures")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny scenario at a load more, at which static's queue grows, run to ± 10 % of the mean E2E."""
    folder = tmp_path_factory.mktemp("precise")
    text = changed(TINY, "[10/s, 20/s]", "[10/s, 20/s, 90/s]").replace("requests: 40", "requests: 150")
    (folder / "s.yaml").write_text(text)
    (folder / "said").write_text(batchsim("run", folder / "s.yaml", "--out", folder, *ASKED).stdout)
    return folder


def test_points_get_seeds_until_they_are_precise(folder: Path) -> None:
    """From 5 to 8 seeds, each a row; unstable points keep the scenario's 2; what was reached is what was asked."""
    results = load_results(folder / "s")
    precision = results.manifest["precision"]
    states = {(each["policy"], each["load"]): each for each in precision["points"]}
    assert states["static", 90.0]["state"] == "unstable"
    assert states["static", 90.0]["num_seeds"] == 2
    rows = results.summary.set_index(["policy", "load"])
    for key, point in states.items():
        assert rows.loc[key, "num_seeds"] == point["num_seeds"]
        if point["state"] != "unstable":
            assert 5 <= point["num_seeds"] <= 8
            narrow = rows.loc[key, "e2e_mean_s_ci"] <= 0.1 * rows.loc[key, "e2e_mean_s"]
            assert narrow == (point["state"] == "reached")
            assert narrow or point["num_seeds"] == 8
    assert {each["state"] for each in precision["points"]} >= {"reached", "unstable"}


def test_policies_at_a_load_keep_common_seeds(folder: Path) -> None:
    """Both policies have the same seeds at every load where both are stable, so that all of them are paired."""
    results = load_results(folder / "s")
    for load in (10.0, 20.0):
        seeds = results.points[results.points["load"] == load].groupby("policy")["seed"].agg(set)
        assert seeds["static"] == seeds["continuous"]
        assert results.paired("static", "continuous", "e2e_mean_s", load).num_seeds == len(seeds["static"])


def test_what_was_reached_and_what_was_not_is_said(folder: Path) -> None:
    """The text counts the points and seeds and names those left out; it is at most 100 columns wide."""
    said = (folder / "said").read_text()
    (line,) = [line for line in said.splitlines() if "points within ±10 % of e2e_mean_s" in line]
    assert "unstable left out" in line
    assert max(map(len, said.splitlines())) <= 100
    assert "nan" not in said


@pytest.mark.slow
def test_the_same_precision_again_simulates_nothing(folder: Path) -> None:
    """All seeds that were added are found again; the JSON tells the outcome."""
    again = batchsim("run", folder / "s.yaml", "--out", folder, *ASKED, "--json")
    manifest = load_results(folder / "s").manifest
    assert (manifest["points_run"], manifest["points_reused"] > 0) == (0, True)
    result = json.loads(again.stdout)
    assert result["precision"] == manifest["precision"]


WRONG = {
    "share": (["--precision", "5"], "--precision 5: '5' is not a share"),
    "zero": (["--precision", "0%"], "above 0% and below 100%"),
    "budget": (["--precision", "5%", "--max-seeds", 3], "Give at least 5"),
    "metric": (["--precision", "5%", "--metric", "ttft_p98_s"], "Did you mean ttft_p99_s?"),
    "metric_alone": (["--metric", "e2e_mean_s"], "--metric e2e_mean_s: is of --precision"),
    "budget_alone": (["--max-seeds", 9], "--max-seeds 9: is of --precision"),
}


@pytest.mark.parametrize(("options", "said"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_asked_is_refused(options: list[str], said: str, tmp_path: Path) -> None:
    """In one line that says what to write instead, before anything is kept."""
    (tmp_path / "s.yaml").write_text(TINY)
    result = batchsim("run", tmp_path / "s.yaml", "--out", tmp_path, "--jobs", 1, "--no-pictures", *options)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert said in result.stderr
    assert not (tmp_path / "s").exists()
