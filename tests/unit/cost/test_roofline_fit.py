"""The shipped efficiencies against public kernel sums: fitted on two models, judged on the others."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer

from batchsim.cost.roofline import Roofline
from batchsim.kernel.batch import Batch
from batchsim.kernel.types import DecodeGroup, Request, Sequence
from tools import fit_roofline
from tools.fit_roofline import GPUS, load


@pytest.fixture(scope="module")
def tables() -> Path:
    """The folder of the public tables."""
    if "BATCHSIM_MEASURED" not in os.environ:
        pytest.skip("BATCHSIM_MEASURED names no folder with aiconfigurator/ in it")
    return Path(os.environ["BATCHSIM_MEASURED"]) / "aiconfigurator"


@pytest.mark.parametrize("name", GPUS)
def test_held_out_models_are_predicted_within_the_bar(tables: Path, name: str) -> None:
    """Median at most 5 %, 95th percentile at most 10 % on models that took no part in the fit."""
    p50, p95 = fit_roofline.held_out_errors(GPUS[name], load(tables, name))
    assert p50 <= 0.05
    assert p95 <= 0.10


@pytest.mark.parametrize("name", GPUS)
def test_the_printed_error_is_the_measured_one(tables: Path, name: str) -> None:
    """What `describe` and `sources` say is what the comparison gives."""
    e = GPUS[name].efficiencies
    assert (e.error_p50, e.error_p95) == pytest.approx(
        fit_roofline.held_out_errors(GPUS[name], load(tables, name)), abs=0.0006
    )


@pytest.mark.parametrize("name", GPUS)
def test_the_fit_gives_the_shipped_numbers(tables: Path, name: str) -> None:
    """Fitting anew from other numbers ends at the catalog's, to the digits it holds."""
    shipped = GPUS[name].efficiencies
    start = replace(shipped, matmul=0.5, weights=0.5, gemm_ns=1.0)
    fitted = fit_roofline.fit(replace(GPUS[name], efficiencies=start), load(tables, name))
    for field in fit_roofline.GEMM_FIELDS + fit_roofline.ATTENTION_FIELDS:
        coarse = 50 if field.endswith("_ns") else 0.0011
        assert getattr(fitted, field) == pytest.approx(getattr(shipped, field), abs=coarse), field


def test_kernel_ns_of_a_batch_is_what_was_compared(tables: Path) -> None:
    """The object a simulation calls gives the number the columns gave: 32 decodes at 1024 tokens of context."""
    sums = next(s for s in load(tables, "h200") if s.model.name == "llama-3.1-8b")
    row = np.flatnonzero((sums.columns["num_decode"] == 32) & (sums.columns["context_tokens"] == 32 * 1024))[0]
    group = DecodeGroup(16)
    for i in range(32):
        seq = Sequence(Request(i, 0, 1024, 10))
        seq.settled_computed_tokens, seq.settled_output_tokens = 1024, 1
        group.join(seq)
    predicted = Roofline(sums.model, GPUS["h200"]).kernel_ns(Batch(group, [], 0))
    measured = sums.gemm_ns[row] + sums.attention_ns[row]
    assert measured == pytest.approx(6.033e6)
    assert predicted / measured - 1 == pytest.approx(fit_roofline.errors(GPUS["h200"], sums)[row], abs=1e-6)


def test_the_command_prints_every_gpu_and_marks_the_held_out(tables: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One table a GPU; two of the four models held out."""
    fit_roofline.main(tables)
    out = capsys.readouterr().out
    assert all(f"{name}: matmul" in out for name in GPUS)
    assert out.count("held out") == 2 * len(GPUS)


def test_the_command_names_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr and exit code 2."""
    with pytest.raises(typer.Exit) as ended:
        fit_roofline.main(tmp_path)
    said = capsys.readouterr().err
    assert ended.value.exit_code == 2 and "Give that of the AIConfigurator tables." in said and said.count("\n") == 1
