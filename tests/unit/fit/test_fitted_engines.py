"""Real engines that others measured, fitted in part and predicted in the rest: `python -m tools.measured_engines`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools.measured_engines import fit_h100, fit_rtx4090, medians


@pytest.fixture(scope="module")
def engines() -> Path:
    """The folder of the measured runs."""
    found = Path(os.environ.get("BATCHSIM_MEASURED", "")) / "engines"
    if "BATCHSIM_MEASURED" not in os.environ or not found.is_dir():
        pytest.skip("BATCHSIM_MEASURED names no folder with engines in it")
    return found


@pytest.mark.slow
def test_vllm_on_an_rtx_4090_with_two_thirds_held_out(engines: Path) -> None:
    """Ahead of results and short of KV, over that GPU's roofline: the means of what was not shown, within 1 %."""
    found, (given, held) = fit_rtx4090(engines)
    assert (given["requests"], held["requests"]) == (100, 200)
    for latency in ("ttft", "tpot", "e2e"):
        assert abs(held[f"{latency}_mean_s"]) < 0.01
    assert ("frontend", "lag") in {(pair.one, pair.other) for pair in found.known.confused}


@pytest.mark.slow
def test_vllm_on_an_h100_from_six_loads_of_two_configurations(engines: Path) -> None:
    """All 21 points of three configurations: the medians of TPOT within 3 %, of E2E 4 %, of TTFT 10 %, where two loads
    that lie within the fit's error of saturation have an interval and no error; the configuration that was never shown
    has its throughput within 6 % at every load."""
    _, rows = fit_h100(engines)
    assert len(rows) == 21 and sum(row["given"] for row in rows) == 6
    found = medians(rows)
    assert found["tpot_mean_s"] < 0.03 and found["e2e_mean_s"] < 0.04 and found["ttft_mean_s"] < 0.10
    knee = {(row["config"], row["stage"]): row["ttft_mean_s"] for row in rows if row["knee"]}
    assert set(knee) == {("vllm+batch_size", 3), ("vllm+chunking_and_prefix_caching", 4)}
    assert all(high > 2 * (1 + low) for low, high in knee.values())
    unseen = [row for row in rows if row["config"] == "vllm+batch_size"]
    assert all(abs(row["throughput_rps"]) < 0.06 for row in unseen) and not any(row["given"] for row in unseen)
