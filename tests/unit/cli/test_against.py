"""`batchsim validate --against`: files of benchmark tools beside a scenario's engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.tiny_scenario import TINY, batchsim

DATA = ROOT / "tests" / "data" / "measured"


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


USERS = "model,requests,max_concurrency,request_rate,prompt_tokens_mean,output_tokens_mean,ttft_mean_ms,tpot_mean_ms"


def test_rows_of_the_scenario_s_model_are_compared(scenario: Path, tmp_path: Path) -> None:
    """A closed loop by `max_concurrency`, at an infinite rate, beside rows of another model, which are counted."""
    table = tmp_path / "mc.csv"
    rows = [f"{name},8,2,inf,100,8,20,10" for name in ("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-8B")]
    table.write_text("\n".join([USERS, *rows]) + "\n")
    asked = ["--policy", "continuous", "--no-shift", "--out", tmp_path, "--json", tmp_path / "x.json"]
    done = batchsim("validate", scenario, "--against", table, *asked)
    assert done.exit_code == 0, done.stderr
    (point,) = json.loads((tmp_path / "x.json").read_text())["points"]
    assert point["client"] == "a closed loop, 2 in flight"
    assert any(note.startswith("1 of other models left out") for note in point["notes"])


def test_what_cannot_be_is_named_and_is_no_error(scenario: Path, tmp_path: Path) -> None:
    """On a sheet's GPU a TTFT of 1 ms for 16,384 tokens and a TPOT of 0.05 ms: measured and simulated stand in the
    table, and no error beside."""
    table = tmp_path / "absurd.csv"
    table.write_text(USERS.removeprefix("model,") + "\n4,1,,16384,128,1.0,0.05\n")
    asked = ["--policy", "continuous", "--no-shift", "--out", tmp_path, "--set", "cost=h100"]
    done = batchsim("validate", scenario, "--against", table, *asked, "--set", "kv.tokens=20000")
    assert done.exit_code == 0, done.stderr
    assert "cannot be as measured (by the sheet of llama-3.1-8b on h100" in " ".join(done.stdout.split())
    assert [line.split()[-6:-4] for line in done.stdout.splitlines()[-2:]] == [["cannot", "be"]] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against", "{data}/gone.json"], "gone.json: cannot be read: No such file"),
        (["--against", "{data}/requests.csv", "--loads", "2"], "--against: the file says the loads"),
        (["--against", "{data}/stages.csv", "--part", "b"], "--part b: no run is so called. There are a, stage 0"),
        (["--against", "{data}/requests.csv", "--policy", "sjf"], "--policy sjf: the scenario has static"),
        (
            ["--against", "{data}/requests.csv", "--device", "cpu", "--repeats", "3", "--seed", "0"],
            "--against: the file says the loads, and nothing runs live. Drop --device, --repeats, --seed.",
        ),
        (["--no-shift"], "--no-shift: is of --against. Add that, or drop it."),
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


@pytest.mark.parametrize("name", ["run.json", "against-x.json", "against-x.md", "against-x.png"])
def test_no_file_of_another_is_written_over(scenario: Path, tmp_path: Path, name: str) -> None:
    """Neither the measured run nor what bears a name of the files to be written: found before the work."""
    run = tmp_path / "run.json"
    run.write_bytes((DATA / "vllm_detailed.json").read_bytes())
    there = tmp_path / name
    if there != run:
        there.write_text("my own work\n")
    before = there.read_bytes()
    asked = ["--no-shift", "--out", tmp_path, "--name", "x", "--json", run if there == run else tmp_path / "copy.json"]
    refused = batchsim("validate", scenario, "--policy", "continuous", "--against", run, *asked)
    assert (refused.exit_code, refused.stdout, refused.stderr.count("\n")) == (2, "", 1), refused.output
    assert f"{name}: is " in refused.stderr and "Give another" in refused.stderr
    assert there.read_bytes() == before and not (tmp_path / "copy.json").exists()


def test_the_same_comparison_is_made_anew(scenario: Path, tmp_path: Path) -> None:
    """Over its own files."""
    asked = ["--no-shift", "--out", tmp_path, "--name", "x", "--json", tmp_path / "copy.json", "--policy", "continuous"]
    for _ in range(2):
        done = batchsim("validate", scenario, "--against", DATA / "vllm_detailed.json", *asked)
        assert done.exit_code == 0, done.stderr


def test_an_answer_that_came_all_at_once_parts_from_nothing(scenario: Path, tmp_path: Path) -> None:
    """Beside others that did not: its TPOT is 0, of which no latency is a share."""
    (tmp_path / "run.csv").write_text("sent_s,prompt_tokens,output_tokens,ttft_s,e2e_s\n0,99,5,0.5,0.5\n9,99,5,0.5,9\n")
    asked = ["--no-shift", "--out", tmp_path, "--policy", "continuous"]
    done = batchsim("validate", scenario, "--against", tmp_path / "run.csv", *asked)
    assert done.exit_code == 0, f"{done.output} {done.exception!r}"
