"""`python -m tools.claims`: its report, what it leaves behind, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tools.claims.__main__ import app


def claims(*args: object) -> Any:
    """The result of a call: `exit_code`, `stdout`, `stderr`."""
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.mark.slow
def test_claims_prints_and_keeps_a_report(tmp_path: Path) -> None:
    """With fewer requests than shipped: a narrow report, kept as text beside its picture; JSON holds the values."""
    call = ("--only", "padding", "--jobs", 1, "--out", tmp_path, "--set", "workload.requests=40")
    result = claims(*call)
    assert result.exit_code == 0, result.output
    report = result.stdout.splitlines()
    assert max(len(line) for line in report[:-1] if not line.startswith("cost: ")) <= 100
    assert any(line.startswith('padding: "30-50 % of FLOPs wasted on padding" holds under') for line in report)
    assert (tmp_path / "claims" / "claims.txt").read_text().splitlines() == report[:-1]
    assert (tmp_path / "claims" / "claims.png").stat().st_size > 10_000
    rows = json.loads(claims(*call, "--json").stdout)["findings"]
    assert len(rows) > 5 and all(len(row["values"]) == 3 for row in rows)


def test_an_unknown_claim_is_one_line() -> None:
    """The error names the claims there are."""
    result = claims("--only", "25x")
    assert result.exit_code == 2
    assert (
        result.stderr == "--only 25x: is no claim. Write one of 24x, 2-4x, padding, one-token, p50, overlap, drafts.\n"
    )


def test_a_change_that_takes_away_what_is_compared_is_one_line(tmp_path: Path) -> None:
    """Without the policies of a condition there is no verdict, rather than an empty one."""
    few = ("--set", "workload.requests=4", "--set", "policies={vllm: {}}", "--set", "seeds=1")
    result = claims("--only", "padding", "--jobs", 1, "--out", tmp_path, *few)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert "claim padding under 'batches of 8' needs transformers 8 at load 1" in result.stderr


def test_claims_refuse_what_the_commands_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in place of the folder, code that was not allowed, an empty option: one line, before any work."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    own = 'policies.vllm={kind: "mine:Mine", max_num_seqs: 8}'
    refused = (
        (("--out", "file/x.png"), "file/x.png: cannot be written: "),
        (("--set", own), "Add --allow-code"),
        (("--out", ""), "--out has an empty value"),
    )
    for args, message in refused:
        result = claims("--only", "24x", *args)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
        assert message in result.stderr and [path.name for path in tmp_path.iterdir()] == ["file"]
