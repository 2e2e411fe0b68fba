"""Profiles fitted anew to kept measurements: those of an H100, to the profile kept beside them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

torch = pytest.importorskip("torch", reason="calibrations run on torch: pip install 'batchsim[live]'")

from batchsim.base.errors import CalibrationError
from batchsim.calibrate.engine.session import load_result
from batchsim.cli import app
from batchsim.cost.profile import load_profile
from tools.refit import main, refit

KEPT = Path(__file__).parents[2] / "results" / "reference" / "gpu"
RAW = KEPT / "profile-llama-3.1-8b.partial.json"
LIVE = sorted((KEPT / "fitted").glob("*.npz"))
refit_app = typer.Typer()
refit_app.command()(main)


def test_the_kept_profile_is_what_the_kept_measurements_give(tmp_path: Path) -> None:
    """But for the commit and the day."""
    words = [word for file in LIVE for word in ("--also", str(file))]
    done = CliRunner().invoke(refit_app, [str(RAW), "-o", str(tmp_path / "new.json"), *words])
    assert done.exit_code == 0, done.output
    found, kept = (json.loads(path.read_text(encoding="utf-8")) for path in (tmp_path / "new.json", KEPT / "h100.json"))
    for profile in (found, kept):
        del profile["made"]["fitted_by"], profile["made"]["fitted_on"]
    assert found == kept
    assert list(found["made"]["live_runs_fitted"].values()) == [file.name for file in LIVE]


def test_without_live_runs_nothing_is_known_of_an_engine_ahead(tmp_path: Path) -> None:
    """The run ahead that was made there was of prompts alone, too few steps; a live one has enough."""
    refit(RAW, tmp_path / "alone.json")
    alone, kept = load_profile(str(tmp_path / "alone.json")), load_profile(str(KEPT / "h100.json"))
    assert alone.ahead is None and "live_runs_fitted" not in alone.made
    assert kept.ahead is not None and kept.ahead.launch_ns > 1.2 * kept.costs.launch_ns > 0


def test_a_live_run_counts_once_and_the_profile_needs_a_place(tmp_path: Path) -> None:
    """One line each."""
    copied = tmp_path / "copied.npz"
    shutil.copy(LIVE[0], copied)
    twice = ["--also", str(LIVE[0]), "--also", str(copied)]
    for words, line in (
        (["-o", str(tmp_path / "new.json"), *twice], f"--also {copied}: is the same run as {LIVE[0].name}."),
        (["-o", str(tmp_path / "no" / "new.json")], f"{tmp_path / 'no' / 'new.json'}: cannot be written"),
    ):
        done = CliRunner().invoke(refit_app, [str(RAW), *words])
        assert done.exit_code == 2 and done.output.startswith(line) and done.output.count("\n") == 1, done.output


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reason": "interrupted"}, "was cut: interrupted"),
        ({"made": {"model": {"hidden_size": 3584}}}, "model hidden_size 3584, now it is 4096"),
        ({"made": {"graphs": False}}, "was run with graphs False, calibrated was True"),
        ({"made": {"block_size": 32}}, "was run with block_size 32, calibrated was 16"),
        ({"made": {"software": {"torch": "2.13.0"}}}, "software torch 2.13.0, now it is 2.11.0"),
    ],
)
def test_a_live_run_of_something_else_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    live = load_result(LIVE[0])
    made = {
        name: live.made[name] | value if isinstance(value, dict) else value
        for name, value in change.pop("made", {}).items()
    }
    replace(live, made=live.made | made, **change).save(tmp_path / "other.npz")
    with pytest.raises(CalibrationError, match=words):
        refit(RAW, tmp_path / "new.json", [tmp_path / "other.npz"])


def test_runs_that_a_cost_was_fitted_to_do_not_judge_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they are called."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    shutil.copy(LIVE[1], tmp_path / "runs" / "renamed.npz")
    done = CliRunner().invoke(app, ["validate", "live-gpu", "--from", "runs", "--set", f"cost={KEPT / 'h100.json'}"])
    assert done.exit_code == 2 and "the cost was fitted to renamed.npz, which cannot judge it" in done.output


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"key": {}}, "cannot be read as measurements"),
        ({"format": "another"}, "is no calibration that was cut short"),
        ({"key": {"gpu": "NVIDIA H200"}}, "was begun with hardware gpu NVIDIA H100 80GB HBM3, now it is NVIDIA H200"),
        ({"key": {"device": "cpu"}}, "its machine is not that of its options"),
        ({"num_blocks": None}, "was cut before it knew the KV memory"),
    ],
)
def test_what_does_not_belong_together_is_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    value = json.loads(RAW.read_text(encoding="utf-8"))
    if change.get("key"):
        value["key"]["hardware"] |= change["key"]
    else:
        value |= change
    (tmp_path / "raw.json").write_text(json.dumps(value), encoding="utf-8")
    with pytest.raises(CalibrationError, match=words):
        refit(tmp_path / "raw.json", tmp_path / "new.json", LIVE)
    assert not (tmp_path / "new.json").exists()


def test_the_kept_comparison_is_what_validate_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every table of the runs at the higher load beside their simulation, as the docs quote them."""
    monkeypatch.chdir(tmp_path)
    words = ["validate", "live-gpu", "--from", str(KEPT / "judged"), "--set", f"cost={KEPT / 'h100.json'}"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    found, kept = (root / "results" / "reference" / "validation-live-gpu.md" for root in (tmp_path, KEPT.parents[2]))
    tables = [[line for line in path.read_text(encoding="utf-8").splitlines() if "|" in line] for path in (found, kept)]
    assert len(tables[1]) > 60 and tables[0] == tables[1]
