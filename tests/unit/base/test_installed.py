"""Names that installed packages add: an example package is built, installed beside batchsim, and used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.unit.scenario.test_replicas import SCENARIO

EXAMPLE = ROOT / "examples/extension_package"
FLEET = "replicas: {count: 2, router: {kind: by_length, limit: 100}}\n"
POLICIES = "policies={longest_first: {max_num_seqs: 8, max_num_batched_tokens: 512}}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the example is installed, without a network."""
    folder = tmp_path_factory.mktemp("site")
    source = shutil.copytree(EXAMPLE, folder / "source")
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "install", *offline, "--target", str(folder / "site"), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return folder / "site"


def batchsim(folder: Path, *args: str, code: int = 0) -> str:
    """What the command prints in `folder`, with the packages of `folder` installed; its exit code is as expected."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-m", "batchsim", *args]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def claiming(folder: Path, group: str, *lines: str, name: str = "greedy") -> None:
    """Makes `folder` one in which a package has these entry points."""
    meta = folder / f"{name}-1.dist-info"
    meta.mkdir(parents=True)
    (meta / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n", encoding="utf-8")
    text = "\n".join([f"[batchsim.{group}]", *lines])
    (meta / "entry_points.txt").write_text(f"{text}\n", encoding="utf-8")


def test_a_package_adds_names_that_scenarios_use(site: Path) -> None:
    """Without --allow-code, since it was installed; the policy by its label, the router by its kind."""
    (site / "some.yaml").write_text(SCENARIO + FLEET, encoding="utf-8")
    run = ["run", "some.yaml", "--no-pictures", "--set", "workload.duration=6s", "--set", POLICIES]
    text = batchsim(site, *run)
    assert "longest_first" in text and "router ByLengthConfig" in text, text
    assert "longest_first      installed     example_batching.longest_first:LongestFirst" in batchsim(site, "policies")


def test_what_a_package_adds_is_checked_by_its_name(site: Path) -> None:
    for name in ("longest_first", "by_length"):
        lines = batchsim(site, "check", name, "--cases", "2").splitlines()
        assert lines and all(line.startswith("holds") for line in lines), lines


WRONG = {
    "clash": (
        ["vllm = some:Thing"],
        "greedy 1 adds the name vllm to batchsim.policies, which batchsim itself has",
    ),
    "gone": (["mine = no_such_module:Thing"], "no_such_module:Thing of greedy 1 cannot be imported: No module named"),
    "other": (["mines = some:Thing"], "there is no policy mine. Did you mean mines?"),
}


@pytest.mark.parametrize(("lines", "said"), WRONG.values(), ids=WRONG)
def test_a_package_that_is_wrong_is_one_line(tmp_path: Path, lines: list[str], said: str) -> None:
    """Once one of its names, or one that nobody has, is looked up."""
    claiming(tmp_path, "policies", *lines)
    (tmp_path / "some.yaml").write_text(SCENARIO, encoding="utf-8")
    error = batchsim(tmp_path, "run", "some.yaml", "--set", "policies={mine: {}}", code=2)
    assert said in error and error.count("\n") == 1, error


def test_a_name_that_two_packages_add_is_one_line(tmp_path: Path) -> None:
    claiming(tmp_path, "policies", "mine = one:Thing")
    claiming(tmp_path, "policies", "mine = other:Thing", name="second")
    error = batchsim(tmp_path, "check", "mine", code=2)
    assert "second 1 adds the name mine to batchsim.policies, which greedy 1 has too." in error, error


def test_a_profile_of_a_package_is_found_by_its_name(tmp_path: Path) -> None:
    """Its entry point is the path of the file."""
    profile = ROOT / "sim/tables/profiles/llama-3.1-8b-h100-vllm-0.24.0-fp8.json"
    (tmp_path / "some.py").write_text(f"FILE = {str(profile)!r}\nNONE = 3\n", encoding="utf-8")
    claiming(tmp_path, "profiles", "my_gpu = some:FILE", "no_file = some:NONE")
    assert "holds     whole_ns" in batchsim(tmp_path, "check", "profile", "--set", "profile=my_gpu", "--cases", "2")
    (tmp_path / "some.yaml").write_text(SCENARIO, encoding="utf-8")
    cost = "cost={kind: profile, profile: no_file}"
    error = batchsim(tmp_path, "run", "some.yaml", "--set", cost, code=2)
    assert "profile no_file: some:NONE of greedy 1 is no path of a file." in error and error.count("\n") == 1, error
