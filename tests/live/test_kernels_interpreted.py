"""The Triton kernels against SDPA in Triton's interpreter, on the CPU in fp32.

Triton decides at its import whether it compiles or interprets, so the cases run in one process of their own, with
TRITON_INTERPRET=1; each is a test here that reads its line of that process's report.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the live executor needs torch")
triton = pytest.importorskip("triton", reason="the kernels are written in Triton")

from batchsim.base.errors import CalibrationError
from batchsim.calibrate.engine.triton_backend import TritonBackend
from tests.live.kernel_cases import CASES

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-5  # of a row's norm; fp32 reaches 1e-6
ALWAYS = {"rms_norm", "add_rms_norm", "add", "silu_mul", "rope", "keys", "values"}
BROKEN = triton.__version__.startswith("3.6.") and np.lib.NumpyVersion(np.__version__) >= "2.4.0"


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """The errors of every case, or its traceback, from the interpreter's process."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.live.kernel_cases"],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(BROKEN, reason="Triton 3.6 cannot interpret with numpy 2.4 or newer")
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_equal_sdpa(name: str, report: dict[str, Any]) -> None:
    """Every kernel's rows are those of plain torch, and nothing outside the step's own blocks is read or written."""
    errors, case = report[name], CASES[name]
    assert isinstance(errors, dict), errors
    attention = {name for name, rows in (("decode", case.decodes), ("prefill", case.chunks)) if rows}
    assert set(errors) == ALWAYS | attention
    wrong = {kernel: error for kernel, error in errors.items() if not error <= TOLERANCE}  # NaN is wrong too
    assert not wrong


def test_a_head_size_without_a_tile_is_refused() -> None:
    """A head_dim that is not a power of two is refused in one line, before any kernel is built."""
    cache = torch.zeros(2, 16, 1, 80)
    with pytest.raises(CalibrationError, match="head_dim 80 is not a power of two"):
        TritonBackend(num_programs=1).decode(torch.zeros(1, 2, 80), cache, cache, torch.zeros(1, 1), torch.ones(1), 1.0)
