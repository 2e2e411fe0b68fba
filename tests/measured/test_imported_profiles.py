"""The shipped imported profiles against the public kernel sums they are made of."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from batchsim.base.errors import CalibrationError
from batchsim.calibrate.import_aiconfigurator import SYSTEMS, import_profile
from batchsim.cost.calibrated import Calibrated
from batchsim.cost.profile import load_profile, profile_names
from tools import import_profiles
from tools.fit_roofline import load

ROOT = Path(__file__).parents[2]
GPUS = [system.gpu for system in SYSTEMS.values()]


@pytest.fixture(scope="module")
def tables() -> Path:
    """The folder of the public tables."""
    if "BATCHSIM_MEASURED" not in os.environ:
        pytest.skip("BATCHSIM_MEASURED names no folder with aiconfigurator/ in it")
    return Path(os.environ["BATCHSIM_MEASURED"]) / "aiconfigurator"


@pytest.mark.parametrize("gpu", GPUS)
def test_kernels_are_the_sums_within_three_percent(tables: Path, gpu: str) -> None:
    """Every row of the composite (on A100: of the same sums) for the shipped models; the host term comes on top."""
    compared = 0
    for sums in load(tables, gpu):
        if sums.model.name not in import_profiles.MODELS:
            continue
        cost = Calibrated(load_profile(f"{gpu}-{sums.model.name}-aiconfigurator"))
        off = cost.kernel_ns(sums.columns) / (sums.gemm_ns + sums.attention_ns) - 1
        worst = int(np.argmax(np.abs(off)))
        print(
            f"{gpu} {sums.model.name}: {len(off)} steps, worst {100 * off[worst]:+.2f} %,"
            f" mean {100 * off.mean():+.2f} %"
        )
        assert np.abs(off).max() <= 0.03
        rows = sums.columns["num_decode"] + sums.columns["num_chunks"]
        np.testing.assert_array_equal(cost.host_ns(sums.columns), 600_000 + 2_000 * rows)
        compared += len(off)
    assert compared >= 90


def test_every_gpu_and_model_is_shipped() -> None:
    """Three GPUs by four models, and each names itself."""
    wanted = {f"{gpu}-{model}-aiconfigurator" for gpu in GPUS for model in import_profiles.MODELS}
    assert wanted <= set(profile_names())
    for name in wanted:
        profile = load_profile(name)
        assert profile.name == name
        assert profile.origin == "imported"
        assert profile.costs.host.assumed
        assert any("no norms" in note for note in profile.notes)


@pytest.mark.parametrize("system", SYSTEMS)
def test_importing_again_gives_the_shipped_bytes(tables: Path, system: str) -> None:
    """The same tables, the same file: nothing of the machine or the day is in it."""
    profile = import_profile(tables, system, "qwen2.5-7b")
    assert profile.to_json() == (ROOT / "calibrate" / "profiles" / f"{profile.name}.json").read_text(encoding="utf-8")


def test_heads_between_those_of_the_tables_are_said(tables: Path) -> None:
    """Qwen2.5-7B has 28 query heads, the tables 24 and 32: its attention lies between, and a note says so."""
    profile = import_profile(tables, "h200_sxm", "qwen2.5-7b")
    assert any("28 query heads: between the measured 24 and 32" in note for note in profile.notes)
    assert not any("between the measured" in note for note in load_profile("h200-qwen3-8b-aiconfigurator").notes)


@pytest.mark.parametrize(
    ("system", "model", "message"),
    [
        ("b300_sxm", "qwen3-8b", r"--gpu b300_sxm: .* h200_sxm, h100_sxm, a100_sxm"),
        ("h200_sxm", "qwen3-9b", r"--model qwen3-9b: not in the catalog\. Write one of llama"),
    ],
)
def test_what_is_not_known_is_named(tables: Path, system: str, model: str, message: str) -> None:
    """One line that says what there is."""
    with pytest.raises(CalibrationError, match=message):
        import_profile(tables, system, model)


def test_missing_and_broken_tables_are_named(tmp_path: Path) -> None:
    """A folder without tables, and one with a file that is none."""
    with pytest.raises(CalibrationError, match=r"gemm_perf\.parquet: not found\. Give the folder"):
        import_profile(tmp_path, "h200_sxm", "qwen3-8b")
    (tmp_path / "kernel_tables").mkdir()
    (tmp_path / "kernel_tables" / "h200_sxm_gemm_vllm_0.24.0_gemm_perf.parquet").write_text("no table")
    with pytest.raises(CalibrationError, match=r"gemm_perf\.parquet: cannot be read"):
        import_profile(tmp_path, "h200_sxm", "qwen3-8b")


@pytest.mark.slow
def test_the_command_writes_all_of_them(
    tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file for each GPU and model, named on stdout."""
    monkeypatch.setattr("sys.argv", ["import_profiles", str(tables), str(tmp_path)])
    assert import_profiles.main() == 0
    printed = [Path(line) for line in capsys.readouterr().out.split()]
    assert sorted(printed) == sorted(tmp_path.iterdir())
    assert len(printed) == len(SYSTEMS) * len(import_profiles.MODELS)
