"""`batchsim claims`: its report, what it leaves behind, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_scenario import batchsim


@pytest.mark.slow
def test_claims_prints_and_keeps_a_report(tmp_path: Path) -> None:
    """With fewer requests than shipped: a narrow report, kept as text beside its picture; JSON holds the values."""
    call = ("claims", "--only", "padding", "--jobs", 1, "--out", tmp_path, "--set", "workload.requests=40")
    result = batchsim(*call)
    assert result.exit_code == 0, result.output
    report = result.stdout.splitlines()
    assert max(len(line) for line in report[:-1] if not line.startswith("cost: ")) <= 100
    assert any(line.startswith('padding: "30-50 % of FLOPs wasted on padding" holds under') for line in report)
    assert (tmp_path / "claims" / "claims.txt").read_text().splitlines() == report[:-1]
    assert (tmp_path / "claims" / "claims.png").stat().st_size > 10_000
    rows = json.loads(batchsim(*call, "--json").stdout)["findings"]
    assert len(rows) > 5 and all(len(row["values"]) == 3 for row in rows)


def test_an_unknown_claim_is_one_line() -> None:
    """The error names the claims there are."""
    result = batchsim("claims", "--only", "25x")
    assert result.exit_code == 2
    assert result.stderr == "--only 25x: is no claim. Write one of 24x, 2-4x, padding, one-token, p50.\n"


def test_a_change_that_takes_away_what_is_compared_is_one_line(tmp_path: Path) -> None:
    """Without the policies of a condition there is no verdict, rather than an empty one."""
    few = ("--set", "workload.requests=4", "--set", "policies={vllm: {}}", "--set", "seeds=1")
    result = batchsim("claims", "--only", "padding", "--jobs", 1, "--out", tmp_path, *few)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert "claim padding under 'batches of 8' needs transformers 8 at load 1" in result.stderr
