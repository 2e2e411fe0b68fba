"""The page on images and pooling models: the table of the shipped scenario is that of its run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from batchsim.report.numbers import percent_text
from batchsim.scenario import load_scenario
from batchsim.study.curves.run import run_scenario

PAGE = (Path(__file__).parents[2] / "docs" / "multimodal.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_table_is_that_of_the_run(tmp_path: Path) -> None:
    """Texts and images within their objectives, at each load under each policy."""
    summary = run_scenario(load_scenario("multimodal"), out=tmp_path).summary
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 4
    for load, cells in rows:
        for policy, cell in zip(("vllm", "small budget", "sglang"), cells.split(" | "), strict=True):
            (row,) = summary[(summary["policy"] == policy) & (summary["load"] == float(load))].to_dict("records")
            assert cell == ", ".join(percent_text(row[f"in_slo[{name}]"]) for name in ("text", "images"))
