"""Results that another version of batchsim made: they are read as far as they go, and it is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from batchsim.results.read import load_results
from tests.support.resealed import reseal
from tests.support.tiny_scenario import batchsim


@pytest.fixture
def copied(ran: Path, tmp_path: Path) -> Path:
    """The folder of a run, which may be changed."""
    shutil.copytree(ran, tmp_path / "s")
    (manifest,) = (tmp_path / "s").glob("*/manifest.json")
    return manifest.parent


def rewrite(folder: Path, **changes: Any) -> None:
    """Changes keys of the manifest; None removes one."""
    manifest = json.loads((folder / "manifest.json").read_text()) | changes
    kept = {name: value for name, value in manifest.items() if value is not None}
    (folder / "manifest.json").write_text(json.dumps(kept))


def drop_column(folder: Path, name: str) -> None:
    for file in (folder / "summary.csv", folder / "points.csv"):
        rows = [line.split(",") for line in file.read_text().splitlines()]
        if name not in rows[0]:
            continue
        at = rows[0].index(name)
        file.write_text("".join(",".join(row[:at] + row[at + 1 :]) + "\n" for row in rows))


def test_own_results_are_read_without_a_word(copied: Path) -> None:
    """Nothing on stderr as long as code and packages are these."""
    assert batchsim("explain", copied).stderr == ""


def test_results_of_another_version_are_told_in_one_line(copied: Path) -> None:
    """The code and every package that differs, then and here; the answer comes all the same."""
    packages = json.loads((copied / "manifest.json").read_text())["packages"]
    rewrite(copied, code="0123456789ab", packages=packages | {"numpy": "1.0.0"})
    result = batchsim("explain", copied)
    assert (result.exit_code, result.stderr.count("\n")) == (0, 1)
    assert "made by another version (code 0123456789ab, here " in result.stderr
    assert ", numpy 1.0.0, here " in result.stderr and "pandas" not in result.stderr
    with pytest.warns(UserWarning, match="made by another version"):
        load_results(copied)


def test_a_key_that_the_manifest_lacks_is_named(copied: Path) -> None:
    """No KeyError: what is missing, and what to do."""
    rewrite(copied, outcomes=None, slo=None)
    result = batchsim("explain", copied)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "manifest.json has no slo, outcomes: another version of batchsim wrote it. Run the" in result.stderr


def test_a_column_that_the_tables_lack_is_named(copied: Path) -> None:
    """The tables of a run whose metrics had fewer names."""
    drop_column(copied, "slo_margin")
    reseal(copied.parent)
    result = batchsim("explain", copied)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.stderr
    assert "has no column slo_margin: another version" in result.stderr


@pytest.mark.parametrize(
    "command", [["explain"], ["explain", "--slo"], ["timeline", "--policy", "continuous"], ["view"]]
)
@pytest.mark.parametrize(
    ("table", "column"), [("points.csv", "seed"), ("points.csv", "cohort"), ("summary.csv", "kind")]
)
def test_a_column_that_every_run_has_is_missed_by_name(
    copied: Path, command: list[str], table: str, column: str
) -> None:
    """Whatever the command: no KeyError, and none begins."""
    frame = pd.read_csv(copied / table, dtype=str, keep_default_na=False)
    frame.drop(columns=column).to_csv(copied / table, index=False)
    reseal(copied.parent)
    result = batchsim(command[0], copied, *command[1:])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.stderr
    assert (
        f"{table}: cannot be read: it has no column {column}, so another version of batchsim wrote it." in result.stderr
    )
