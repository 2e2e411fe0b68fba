"""`calibrate --steps` and `validate --steps`: step costs from an engine's own records, and predictions beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.engine_truth import LINEAR_ENGINE, Load, scenario_text
from tests.support.step_logs import fpm_log, sglang_log, simulated, vllm_log
from tests.support.tiny_scenario import batchsim

FIT = "calibrate --scenario free.yaml -o a.json --steps"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs of a linear engine in each form, and `free.yaml`, that engine without a cost."""
    found = tmp_path_factory.mktemp("steps")
    steps, ms = simulated(scenario_text(LINEAR_ENGINE, load=Load(6, 600, 100), requests=80), 0.02)
    (found / "logs").mkdir()
    (found / "logs" / "fpm.jsonl").write_text(fpm_log(steps, ms))
    (found / "vllm.log").write_text(vllm_log(steps, ms, 25_000))
    (found / "sglang.log").write_text(sglang_log(steps, ms))
    (found / "free.yaml").write_text(scenario_text("cost: {kind: free}"))
    return found


def test_a_fit_to_recorded_steps_is_a_cost_that_other_logs_are_held_against(folder: Path, tmp_path: Path) -> None:
    """Terms and errors held out are printed; the file is a cost, with which the steps of another log are predicted."""
    mine, json_file = tmp_path / "mine.json", tmp_path / "steps.json"
    done = batchsim("calibrate", "--steps", folder / "logs", "--scenario", folder / "free.yaml", "-o", mine)
    assert done.exit_code == 0, done.stderr
    assert "a prompt token computed" in done.stdout and "held out  all" in done.stdout
    assert "claimed of the time of other steps: ±1.5 %" in done.stdout
    written = json.loads(mine.read_text())
    assert [*written["files"]] == [str(folder / "logs" / "fpm.jsonl")] and len(written["held_out"]) == 3
    given = ("--set", f"cost={mine}", "--steps", folder / "vllm.log")
    done = batchsim("validate", folder / "free.yaml", *given, "--json", json_file)
    assert done.exit_code == 0, done.stderr
    assert "beside vllm.log" in done.stdout and "! vllm.log: times are those of waiting for the model" in done.stdout
    whole = json.loads(json_file.read_text())
    (row,) = [row for row in whole["policies"][0]["rows"] if row["region"] == "all"]
    assert row["n"] == whole["policies"][0]["compared"] > 500 and abs(row["bias"]) < 0.01 and row["p95"] < 0.06
    done = batchsim("validate", folder / "free.yaml", *given, "--out", tmp_path / "results", "--name", "mine")
    assert done.exit_code == 0 and (tmp_path / "results" / "steps-mine.json").exists()


def test_nothing_is_written_where_stretches_held_out_err_by_more_than_is_claimed(folder: Path, tmp_path: Path) -> None:
    """An engine that changed its speed has no one cost; --force writes all the same."""
    lines = (folder / "logs" / "fpm.jsonl").read_text().splitlines()
    slow = [line.replace('"wall_time": 0.0', '"wall_time": 0.09') for line in lines[: len(lines) // 5]]
    (tmp_path / "moved.jsonl").write_text("\n".join([*slow, *lines[len(slow) :]]))
    given = ("--steps", tmp_path / "moved.jsonl", "--scenario", folder / "free.yaml", "-o", tmp_path / "mine.json")
    done = batchsim("calibrate", *given)
    assert done.exit_code == 1 and "mine.json: not written" in done.stderr and not (tmp_path / "mine.json").exists()
    assert "stretch 2 of 10 of core 1: step_time" in done.stderr or "is no claim" in done.stderr
    assert batchsim("calibrate", *given, "--force").exit_code == 0 and (tmp_path / "mine.json").exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("calibrate --steps vllm.log -o a.json", "calibrate --steps: --scenario is missing"),
        ("calibrate --steps vllm.log --scenario free.yaml", "calibrate --steps: -o is missing"),
        (f"{FIT} vllm.log --minutes 3", "--minutes: is of --url, not of --steps"),
        (f"{FIT} vllm.log --bench vllm.log", "--steps: is of --steps, not of --bench"),
        ("calibrate --hold-out vllm.log -o a.json", "Add files of measured runs or an engine's logs, or drop it"),
        (f"{FIT} vllm.log vllm.log", "is given twice"),
        (f"{FIT} vllm.log --hold-out vllm.log", "no log is left to fit to"),
        (f"{FIT} none.log", "none.log: cannot be read"),
        (f"{FIT} sglang.log", "the scenario's policy is vllm. Give one of sglang"),
        (f"{FIT} free.yaml", "free.yaml: has no line of a step"),
        (f"{FIT} vllm.log --policy x", "--policy x: the scenario has vllm"),
        ("validate free.yaml --steps vllm.log", "cost of kind free has no numbers yet"),
        ("validate free.yaml --steps vllm.log --at 50%", "Drop --at."),
        ("validate free.yaml --steps vllm.log --against vllm.log", "Drop --against."),
        ("validate free.yaml --steps vllm.log --device cpu --repeats 2 --seed 1", "Drop --device, --repeats, --seed."),
        ("validate free.yaml --steps vllm.log --no-shift", "alone. Drop --no-shift."),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: str, why: str
) -> None:
    """With what to do; nothing is written."""
    monkeypatch.chdir(folder)
    done = batchsim(*words.split())
    assert done.exit_code == 2 and why in done.stderr and done.stderr.count("\n") == 1
    assert not (folder / "a.json").exists()
