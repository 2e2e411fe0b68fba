"""When ranks with attention of their own hold more users than tensor parallelism: the shipped question."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchsim.scenario import load_scenario
from batchsim.study.curves.run import run_scenario

TP8 = ("deployment.dp_attention=1", "deployment.ep=1", "deployment.tp=8")


@pytest.mark.slow
def test_the_shipped_scenario_has_the_times_of_its_page(tmp_path: Path) -> None:
    """The table of docs/ranks.md, ms of the median TPOT and TTFT with 16, 128 and 512 users, and who holds these."""
    times: dict[str, list[tuple[int, int, bool]]] = {}
    for name, changes in (("ranks", ()), ("tp8", TP8)):
        summary = run_scenario(load_scenario("experts", overrides=changes), out=tmp_path / name).summary
        rows = summary[["tpot_p50_s", "ttft_p50_s", "in_slo"]].itertuples(index=False)
        times[name] = [(round(1e3 * pace), round(1e3 * ttft), share >= 0.95) for pace, ttft, share in rows]
    assert times == {
        "ranks": [(28, 157, True), (47, 184, True), (70, 229, True)],
        "tp8": [(20, 78, True), (39, 104, True), (79, 22_903, False)],
    }
