"""Calibrating a very small model on the CPU: cut short, killed, gone on with, finished, shown; and nonsense refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch", reason="calibration runs on torch: pip install 'batchsim[live]'")

from batchsim.base.errors import CalibrationError
from batchsim.calibrate.engine.runner import build_runner
from batchsim.calibrate.profile.bench import Bench, MeasuredStep
from batchsim.calibrate.profile.calibration import Options, calibrate
from batchsim.calibrate.profile.point_plan import StepShape, columns
from batchsim.calibrate.profile.raw import Raw
from batchsim.calibrate.profile.this_machine import Sentinel
from batchsim.cli.calibrate import calibrate_app
from batchsim.cost.calibrated import Calibrated
from batchsim.cost.profile import Profile, SwapCost, load_profile
from batchsim.report.pictures.profile_picture import draw_profile
from batchsim.report.text.profile_text import summary, table

torch.set_num_threads(1)

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "torch_dtype": "float32",
    "rms_norm_eps": 1e-5,
}
HULL = {"max_seqs": 4, "max_batched_tokens": 32, "max_model_len": 64}


def model_file(folder: Path) -> str:
    """The config.json of the small model, written to `folder`."""
    path = folder / "small.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    return str(path)


@dataclass(frozen=True)
class Cut:
    """A calibration interrupted by Ctrl-C and then gone on with to its end."""

    options: Options
    out: Path
    cut: Profile
    raw: Raw
    final: Profile


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Cut:
    """About 12 s of measuring, shared by the tests that look at its outcome."""
    folder = tmp_path_factory.mktemp("calibration")
    options = Options(model_file(folder), "cpu", minutes=2, **HULL)
    out, partial = folder / "small-cpu.json", folder / "small-cpu.partial.json"

    def interrupt(what: str, share: float) -> None:
        if share > 0.3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(options, out, interrupt)
    half = load_profile(str(out))
    raw = Raw.load(partial, json.loads(partial.read_text(encoding="utf-8"))["key"])
    return Cut(options, out, half, raw, calibrate(options, out))


@pytest.mark.slow
def test_an_interrupted_calibration_leaves_a_profile_that_says_what_is_missing(cut: Cut) -> None:
    """After Ctrl-C the file is a whole profile, with costs above 0 and its gaps listed."""
    assert any(what.startswith("rounds:") for what in cut.cut.missing)
    assert any(what.startswith("block") for what in cut.cut.missing)
    assert Calibrated(cut.cut).kernel_ns(columns([StepShape("H", (10, 10))]))[0] > 0


@pytest.mark.slow
def test_going_on_measures_nothing_twice(cut: Cut) -> None:
    """What was there before the interruption is there after it, as the first visits of each step."""
    final = {StepShape.from_row(row): row["rounds"] for row in cut.final.samples}
    before = {point: sample.to_row()["rounds"] for point, sample in cut.raw.samples.items()}
    assert before
    for point, rounds in before.items():
        assert final[point][: len(rounds)] == rounds
    assert {len(rounds) for rounds in final.values()} == {4}
    assert Sentinel.of(cut.final) is not None and cut.final.made["sentinel"] == cut.raw.sentinel
    assert [run.spec.name for run in cut.raw.runs] == list(cut.final.made["engine_runs"])[: len(cut.raw.runs)]


@pytest.mark.slow
def test_a_finished_calibration_lacks_only_what_a_cpu_cannot_give(cut: Cut) -> None:
    """KV blocks and energy are missing, everything else is measured, and the hull is the one asked for."""
    assert [what.partition(":")[0] for what in cut.final.missing] == ["num_blocks", "energy"]
    hull = cut.final.hull
    assert (hull.max_sequences, hull.max_tokens, hull.max_context, hull.max_chunk_context) == (4, 32, 63, 64)
    assert not cut.final.costs.host.assumed
    assert cut.final.costs.swap is not None
    assert {row["block"] for row in cut.final.samples} == set("ABCDEH")
    assert not list(cut.out.parent.glob("*.partial.json"))


@pytest.mark.slow
def test_the_fit_describes_what_was_measured(cut: Cut) -> None:
    """Fitted and measured kernel times agree to 25 % in the median even on a busy machine, regions listed with all."""
    rows = {row["region"]: row for row in cut.final.residuals}
    assert rows["all"]["n"] == sum(row["n"] for region, row in rows.items() if region != "all")
    assert rows["all"]["p50"] < 0.25
    held_out = cut.final.held_out
    assert held_out is not None
    assert {"n", "p50", "p95", "bias", "steps", "batches", "ahead"} <= set(held_out)


@pytest.mark.slow
def test_an_engine_that_schedules_ahead_was_measured_apart(cut: Cut) -> None:
    """Its runs are in the fit, and its lanes replace those of the engine that waits."""
    ahead = cut.final.ahead
    assert ahead is not None
    assert ahead != cut.final.costs
    assert not ahead.host.assumed
    assert "where the engine schedules ahead" in table(cut.final)


@pytest.mark.slow
def test_a_finished_calibration_is_not_measured_again(cut: Cut) -> None:
    """The same call returns the finished profile and leaves its bytes alone; with other options it is refused."""
    before = cut.out.read_bytes()
    assert calibrate(cut.options, cut.out) == cut.final
    assert cut.out.read_bytes() == before
    with pytest.raises(CalibrationError, match="begun with options max_seqs 4, now it is 2"):
        calibrate(replace(cut.options, max_seqs=2), cut.out)


@pytest.mark.slow
def test_a_profile_is_printed_and_drawn(cut: Cut, tmp_path: Path) -> None:
    """The table names coefficients, regions and gaps, the summary the held-out error; the picture is a PNG."""
    text = table(cut.final)
    assert all(word in text for word in ("decode attention", "decode 1-8", "held out, whole engine steps", "missing:"))
    assert max(map(len, text.splitlines())) <= 100
    assert "held out" in summary(cut.final)
    draw_profile(cut.final, tmp_path / "profile.png")
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_killed_calibration_leaves_a_profile_and_what_it_measured(tmp_path: Path) -> None:
    """SIGKILL at the first engine run: the profile of the steps before it can be read, and so can the raw samples."""
    script = (
        "import os, signal, sys, torch\n"
        "from pathlib import Path\n"
        "from batchsim.calibrate.profile.calibration import Options, calibrate\n"
        "torch.set_num_threads(1)\n"
        "def kill(what, share):\n"
        "    if what.startswith('engine run'):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        f"calibrate(Options(sys.argv[1], 'cpu', **{HULL}), Path(sys.argv[2]), kill)\n"
    )
    out = tmp_path / "killed.json"
    ended = subprocess.run([sys.executable, "-c", script, model_file(tmp_path), str(out)], check=False)
    assert ended.returncode == -9
    assert any(what.startswith("block host") for what in load_profile(str(out)).missing)
    assert load_profile(str(out)).costs.host.assumed
    partial = tmp_path / "killed.partial.json"
    assert Raw.load(partial, json.loads(partial.read_text(encoding="utf-8"))["key"]).samples


def call(*arguments: str) -> tuple[int, str]:
    """The exit code of `batchsim calibrate`, and what it says on stderr."""
    result = CliRunner().invoke(calibrate_app, list(arguments))
    return result.exit_code, result.stderr


def test_nonsense_is_refused_in_one_line(tmp_path: Path) -> None:
    """Each wrong call ends with code 2 and one line that names what is wrong, before anything is measured."""
    small, out = model_file(tmp_path), str(tmp_path / "out.json")
    (tmp_path / "file").write_text("", encoding="utf-8")
    right = {"--model": small, "--device": "cpu", "-o": out}
    cases = {
        "--model is missing": {"--model": None},
        "--device tpu: not known": {"--device": "tpu"},
        "neither in the catalog nor a file": {"--model": "llama-3.1-8c"},
        "at least 0.25": {"--minutes": "0.1"},
        "--minutes nan": {"--minutes": "nan"},
        "--minutes inf": {"--minutes": "inf"},
        "--block-size 4096 is more": {"--block-size": "4096", "--kv-tokens": "64", "--max-model-len": "64"},
        "more than --kv-tokens 32 hold": {"--kv-tokens": "32", "--max-model-len": "64"},
        "takes 2 to 128 tokens": {"--max-model-len": "4096"},
        "is below --max-seqs 64": {"--max-seqs": "64", "--max-batched-tokens": "32"},
        "cannot be written": {"-o": str(tmp_path / "file" / "out.json")},
    }
    if not torch.cuda.is_available():
        cases["sees no CUDA device"] = {"--device": "cuda"}
    for expected, changes in cases.items():
        arguments = [part for name, value in (right | changes).items() if value is not None for part in (name, value)]
        code, said = call(*arguments)
        assert code == 2, said
        assert expected in said
        assert said.count("\n") == 1
    assert not Path(out).exists()


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One line with the pip command, exit code 2."""
    monkeypatch.setitem(sys.modules, "torch", None)
    code, said = call("--model", "llama-3.1-8b", "--device", "cuda", "-o", str(tmp_path / "x.json"))
    assert code == 2
    assert said.endswith("pip install 'batchsim[live]'\n")
    assert said.count("\n") == 1


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    """No profile is written over what is none, and no picture drawn into what is not called one."""
    other = tmp_path / "other.json"
    other.write_text("{}", encoding="utf-8")
    for words, message in [
        (("--model", "llama-3.1-8b", "--device", "cpu", "-o", str(other)), "no batchsim-profile file"),
        (("show", "llama-3.1-8b-h200-vllm-0.24.0", "-o", str(tmp_path / "x.txt")), "does not end in .png"),
    ]:
        result = CliRunner().invoke(calibrate_app, list(words))
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert message in result.stderr
    assert other.read_text(encoding="utf-8") == "{}"
    assert [file.name for file in tmp_path.iterdir()] == ["other.json"]


def test_show_refuses_what_is_no_profile(tmp_path: Path) -> None:
    """A file that is no profile, and a name that is none, end with code 2 and one line."""
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    for name in (str(tmp_path / "other.json"), "h200-llama-3.1-8c"):
        code, said = call("show", name)
        assert (code, said.count("\n")) == (2, 1)


def test_an_unreadable_partial_file_is_said(tmp_path: Path) -> None:
    """What is no calibration that was cut short is not taken for one."""
    (tmp_path / "p.partial.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(CalibrationError, match="no calibration that was cut short"):
        calibrate(Options(model_file(tmp_path), "cpu", **HULL), tmp_path / "p.json")


def partial(folder: Path, **changes: Any) -> Path:
    """The file of a calibration that was cut short, with `changes`; None takes a key away."""
    raw = Raw(
        {"options": {}},
        samples={StepShape("A", (3,)): MeasuredStep(StepShape("A", (3,)), [5.0])},
        swap=SwapCost(1, 2, False),
    )
    raw.save(folder / "p.json")
    value = json.loads((folder / "p.json").read_text(encoding="utf-8")) | changes
    kept = {name: found for name, found in value.items() if changes.get(name, 0) is not None}
    (folder / "p.json").write_text(json.dumps(kept), encoding="utf-8")
    return folder / "p.json"


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "batchsim-calibration-partial 1"},
        {"key": None},
        {"key": 3},
        {"samples": [{"block": "A"}]},
        {"samples": 3},
        {"runs": [{"run": ["vllm", 2, True, 0], "columns": {}, "kernel_ns": [], "period_ns": []}]},
        {"swap": {"base": 1}},
        {"swap": {"base": "1", "per_block": 2, "assumed": False}},
        {"num_blocks": "many"},
        {"sentinel": {"ns": 5}},
        {"seconds": None},
    ],
    ids=str,
)
def test_a_partial_file_that_is_damaged_is_said_in_one_line(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Missing keys and wrong types are the error that any other file is, and an undamaged one is read."""
    assert Raw.load(partial(tmp_path), {"options": {}}).samples
    with pytest.raises(CalibrationError, match="no calibration that was cut short"):
        Raw.load(partial(tmp_path, **changes), {"options": {}})


def test_a_later_call_is_brought_to_the_first_ones_speed(tmp_path: Path) -> None:
    """Where the sentinel takes 10 % longer than in the first call, so does all else; it is said, and corrected."""
    sizes = {"num_blocks": 4, "max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 32}
    runner = build_runner(model_file(tmp_path), device="cpu", **sizes)
    for first_ns, level in ((None, 1.0), (1000.0, 1.1)):
        bench = Bench(runner, StepShape("A", (3,)), 0, first_ns)
        assert bench.factor(0.0) == 1.0
        bench.drift = [(float(i), 1100.0) for i in range(8)]
        assert bench.factor(3.5) == pytest.approx(level)
        assert [note.partition(" (")[0] for note in bench.notes()] == (
            [] if first_ns is None else ["drift: the machine was 10.0 % slower than in the first call"]
        )


def test_a_point_as_columns_has_the_work_that_it_holds() -> None:
    """Two decodes after 3 and 5 tokens beside a chunk of 4 after 2: their sums as step records have them."""
    table_ = {name: int(values[0]) for name, values in columns([StepShape("E", (3, 5), ((2, 4),))]).items()}
    assert (table_["num_decode"], table_["num_prefill_tokens"], table_["context_tokens"]) == (2, 4, 8)
    assert table_["prefill_pairs"] == int(np.sum([3, 4, 5, 6]))
