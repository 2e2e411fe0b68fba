"""What is installed: one name, whole, with a version; no folder of a user's stands in its way."""

from __future__ import annotations

import fnmatch
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from batchsim import __version__
from tests.support.paths import ROOT
from tests.support.tiny_scenario import TINY, batchsim

FOLDERS = {"batchsim": "sim", "batchsim.calibrate": "calibrate", "batchsim.scenarios": "scenarios"}
NOT_INSTALLED = {"sim/DESIGN.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "sim/decisions").glob("*.md"))}


def files() -> list[Path]:
    """All files of the package, relative to the clone; links into it and what Python made are none."""
    found = [path.relative_to(ROOT) for folder in FOLDERS.values() for path in (ROOT / folder).rglob("*")]
    return [path for path in found if (ROOT / path).is_file() and "__pycache__" not in path.parts]


def test_every_folder_with_code_is_a_package() -> None:
    """Else setup.py, which looks for packages, would leave it out."""
    folders = {folder for path in files() if path.suffix == ".py" for folder in path.parents if folder != Path()}
    lacking = {folder for folder in folders if not (ROOT / folder / "__init__.py").exists()}
    assert lacking == set()


def test_every_file_of_data_is_installed() -> None:
    """Each is named by a pattern of package-data in pyproject.toml."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    named = []
    for package, globs in patterns.items():
        base = max((name for name in FOLDERS if f"{package}.".startswith(f"{name}.")), key=len)
        inner = package.removeprefix(base).replace(".", "/")
        named += [f"{FOLDERS[base]}{inner}/{glob}" for glob in globs]
    data = [str(path) for path in files() if path.suffix != ".py"]
    assert {name for name in data if not any(fnmatch.fnmatch(name, glob) for glob in named)} == NOT_INSTALLED


def test_the_version_is_printed() -> None:
    """By `--version`, before any command."""
    assert batchsim("--version").stdout == f"batchsim {__version__}\n"


@pytest.mark.slow
def test_folders_named_like_ours_do_no_harm(tmp_path: Path) -> None:
    """With a `sim`, a `calibrate` and a `scenarios` of one's own found first, a run goes through, in workers too."""
    for name in FOLDERS.values():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('not this one')")
    (tmp_path / "s.yaml").write_text(TINY)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "batchsim", "run", "s.yaml", "--jobs", "2", "--no-pictures"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "continuous" in ran.stdout
