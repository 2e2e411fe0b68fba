"""`--executor ray` on a cluster of two nodes on this machine, and what is said where there is none."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.study.sweep.pool import Killed
from batchsim.study.sweep.ray_pool import run_on_ray
from tests.support.paths import ROOT
from tests.support.tiny_scenario import TINY, batchsim

LIMIT_S = 120


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of two nodes with one CPU each."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'batchsim[ray]'")
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    node = {"num_cpus": 1, "object_store_memory": 100_000_000, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=node)
    try:
        made.add_node(**node)
        made.wait_for_nodes()
        yield made.address
    finally:
        made.shutdown()


@pytest.mark.slow
def test_points_run_on_both_nodes(cluster: str) -> None:
    """Every task has its own result, and both nodes made some."""

    def where(number: int) -> str:
        import ray  # pyright: ignore[reportMissingImports]

        time.sleep(0.2)  # so that one node alone does not take all
        return str(ray.get_runtime_context().get_node_id())

    found = dict(run_on_ray(where, list(range(10)), cluster))
    assert sorted(found) == list(range(10))
    assert len(set(found.values())) == 2


@pytest.mark.slow
def test_a_worker_that_dies_fails_its_own_task(cluster: str) -> None:
    """The others have their results."""

    def die_at_two(number: int) -> int:
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return 2 * number

    found = dict(run_on_ray(die_at_two, [1, 2, 3], cluster))
    assert (found[0], found[2]) == (2, 6)
    assert isinstance(found[1], Killed) and "WorkerCrashedError" in found[1].how


@pytest.mark.slow
def test_an_error_of_the_scenario_comes_back_as_itself(cluster: str) -> None:
    """Not as one of Ray's, with its traceback of several processes."""

    def refuse(number: int) -> int:
        raise ScenarioError(f"{number}: is wrong. Write another.")

    with pytest.raises(ScenarioError, match=r"^5: is wrong\. Write another\.$"):
        list(run_on_ray(refuse, [5, 5], cluster))


@pytest.mark.slow
def test_ray_gives_the_bytes_of_a_local_run(cluster: str, tmp_path: Path) -> None:
    """Every file of a run but its manifest, the points' tables included; the trace travels with the points."""
    trace = "\n".join(["ts,in,out", *(f"{40 * i},{50 + i % 7},{3 + i % 5}" for i in range(60))])
    (tmp_path / "my.csv").write_text(trace)
    replay = TINY.replace("{kind: poisson, mean_rate: 20/s}", "{kind: trace}").replace(
        "  lengths:\n    prompt: {kind: fixed, tokens: 100}\n    output: {kind: uniform, min: 2, max: 12}\n",
        "  trace: {path: my.csv, columns: {arrival: ts, prompt: in, output: out}, time_unit: ms,"
        " rate_scale: {factor: 1, by: compress}}\n",
    )
    replay = replay.replace("  requests: 40\n", "").replace("mean_rate: [10/s, 20/s]", "rate_scale: [1, 2]")
    for name, text in (("poisson", TINY), ("replay", replay)):
        (tmp_path / f"{name}.yaml").write_text(text)
        for folder, options in (("local", ["--jobs", "2"]), ("ray", ["--executor", "ray", "--address", cluster])):
            ran = batchsim_process(tmp_path, "run", f"{name}.yaml", "--out", folder, *options)
            assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
        local, ray = (files_of(tmp_path / folder / name) for folder in ("local", "ray"))
        assert len(local) > 8 * 4
        assert local == ray
    (manifest,) = (tmp_path / "ray" / "poisson").glob("*/manifest.json")
    facts = json.loads(manifest.read_text())
    assert (facts["ray"], facts["jobs"], facts["points_run"]) == (cluster, None, 8)


def files_of(folder: Path) -> dict[str, bytes]:
    """What a run leaves, apart from when and how it was made."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if path.name not in ("manifest.json", ".lock")}


def batchsim_process(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from batchsim.cli import app; app()", *args]
    root = ROOT
    environment = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, env=environment)


def test_without_a_cluster_there_is_one_line(tmp_path: Path) -> None:
    """No Ray, or nobody at the address: exit code 2, what is missing and what to do, and nothing is written."""
    (tmp_path / "s.yaml").write_text(TINY)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    ran = batchsim("run", tmp_path / "s.yaml", "--out", tmp_path, "--executor", "ray", "--address", address)
    assert (ran.exit_code, ran.stderr.count("\n")) == (2, 1)
    assert "pip install 'batchsim[ray]'" in ran.stderr or f"nobody answers at {address}" in ran.stderr
    assert not list(tmp_path.glob("s/points/*"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--address", "a:1"], "--address: is for --executor ray."),
        (["--executor", "ray", "--jobs", "2"], "--jobs: is for --executor local."),
        (["--executor", "slurm"], "'slurm'"),
    ],
)
def test_options_that_do_not_go_together(tmp_path: Path, options: list[str], said: str) -> None:
    """None of them is ignored."""
    (tmp_path / "s.yaml").write_text(TINY)
    ran = batchsim("run", tmp_path / "s.yaml", "--out", tmp_path, *options)
    assert (ran.exit_code, ran.stderr.count("\n")) == (2, 1)
    assert said in ran.stderr
