"""`batchsim validate --against`: files of benchmark tools beside a scenario's engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_scenario import TINY, batchsim

DATA = Path(__file__).parents[1] / "data" / "measured"


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    """The tiny scenario, whose own workload plays no part."""
    path = tmp_path / "mine.yaml"
    path.write_text(TINY)
    return path


def test_a_result_of_vllm_bench_is_compared(scenario: Path, tmp_path: Path) -> None:
    """The file, its client's faults, where they part and the errors on stdout; three files with the same."""
    asked = ["--policy", "continuous", "--out", tmp_path / "out", "--name", "x", "--json", tmp_path / "copy.json"]
    done = batchsim("validate", scenario, "--no-shift", "--against", DATA / "vllm_detailed.json", *asked)
    assert done.exit_code == 0, done.stderr
    assert "vllm bench serve" in done.stdout and "1 of 4 requests failed" in done.stdout
    assert "- continuous: request 0 (sent at 0.000 s, 100 prompt tokens): TTFT 0.05 s measured" in done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines()[-4:]] == ["TPOT", "E2E", "requests/s", "tokens/s"]
    assert {file.name for file in (tmp_path / "out").iterdir()} == {f"against-x.{end}" for end in ("json", "md", "png")}
    text = (tmp_path / "copy.json").read_text()
    assert text == (tmp_path / "out" / "against-x.json").read_text()
    (point,) = json.loads(text)["points"]
    (tpot,) = (error for error in point["errors"] if error["name"] == "tpot_mean_s")
    assert tpot["simulated"] == pytest.approx(0.01) and tpot["live"] == pytest.approx((0.07 / 3 + 0.2 / 6) / 2)
    assert tpot["error"] == pytest.approx(tpot["simulated"] / tpot["live"] - 1)


def test_the_runs_of_a_table_are_chosen_by_their_names(scenario: Path, tmp_path: Path) -> None:
    """One row of two; the other policy too."""
    asked = ["--part", "stage 0", "--no-shift", "--out", tmp_path]
    done = batchsim("validate", scenario, "--against", DATA / "stages.csv", *asked)
    assert done.exit_code == 0, done.stderr
    points = json.loads((tmp_path / "against-mine-stages.json").read_text())["points"]
    assert [(point["policy"], point["part"]) for point in points] == [
        ("static", "a, stage 0"),
        ("continuous", "a, stage 0"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against", "{data}/gone.json"], "gone.json: cannot be read: No such file"),
        (["--against", "{data}/requests.csv", "--loads", "2"], "--against: the file says the loads"),
        (["--against", "{data}/stages.csv", "--part", "b"], "--part b: no run is so called. There are a, stage 0"),
        (["--against", "{data}/requests.csv", "--policy", "sjf"], "--policy sjf: the scenario has static"),
        (["--part", "x"], "--part x: names runs of --against"),
        (["--against", "{data}/requests.csv", "--set", "max_model_len=50"], "is beyond max_model_len 50"),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_line(
    arguments: list[str], message: str, scenario: Path, tmp_path: Path
) -> None:
    """Exit 2 and what to do."""
    given = [argument.format(data=DATA) for argument in arguments]
    done = batchsim("validate", scenario, "--out", tmp_path, *given)
    assert done.exit_code == 2
    lines = [line for line in done.stderr.splitlines() if ": 1 of 1" not in line]
    assert message in lines[-1] and len(lines) == 1
