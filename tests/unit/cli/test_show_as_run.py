"""`batchsim show` refuses what `batchsim run` would, in the same line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_scenario import batchsim
from tests.unit.scenario import test_adapters as adapters
from tests.unit.scenario import test_deployment_mistakes as deployments
from tests.unit.scenario import test_kv_of_groups as groups
from tests.unit.scenario import test_request_kinds as kinds
from tests.unit.scenario import test_structured as structured

CASES = {
    **{f"deployment_{name}": deployments.TEXT.replace(*case[:2], 1) for name, case in deployments.MISTAKES.items()},
    **{f"groups_{name}": groups.TEXT.replace(*case[:2]) for name, case in groups.MISTAKES.items()},
    **{f"adapters_{i}": adapters.TEXT.replace(*case[:2]) for i, case in enumerate(adapters.MISTAKES)},
    **{f"structured_{i}": structured.TEXT.replace(*case[:2]) for i, case in enumerate(structured.MISTAKES)},
    **{f"images_{name}": kinds.IMAGES.replace(*case[:2]) for name, case in kinds.WITH_IMAGES.items()},
    **{f"pooling_{name}": kinds.POOLING.replace(*case[:2]) for name, case in kinds.WITHOUT_TOKENS.items()},
}
SAID = "deployment_no_kernels"
"""Of a deployment whose step times cannot be had `show` prints the rest, and why a run would fail."""


@pytest.mark.slow
def test_show_fails_where_run_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same words, of one line each but where two things lack, and with nothing left behind."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "s.yaml"
    for name, text in CASES.items():
        file.write_text(text)
        shown, ran = batchsim("show", "s.yaml"), batchsim("run", "s.yaml")
        assert (ran.exit_code, ran.stderr.count("\n")) == (2, 2 if "sheet_with_a_part" in name else 1), name
        if name != SAID:
            assert (shown.exit_code, shown.stderr) == (2, ran.stderr), name
        assert "Traceback" not in ran.stderr and list(tmp_path.iterdir()) == [file], name
    assert len(CASES) > 150


def test_show_says_why_a_run_would_fail_for_step_times(tmp_path: Path) -> None:
    """In the words of the run."""
    file = tmp_path / "s.yaml"
    file.write_text(CASES[SAID])
    shown, ran = batchsim("show", file), batchsim("run", file)
    assert ran.exit_code == 2 and shown.exit_code == 0
    said = " ".join(shown.stdout.split())
    assert said.startswith("! ") and " ".join(ran.stderr.split()) in said
