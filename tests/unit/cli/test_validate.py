"""`batchsim validate`, on live runs that were saved, and once on a real tiny model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from batchsim.base.plain import to_plain
from batchsim.cost.constant import Linear
from batchsim.scenario import load_scenario
from batchsim.scenario.setup import Setup
from tests.support.predicted import predict
from tests.support.tiny_scenario import batchsim

LOAD = 12.0
SLOWER = Linear(base=918_000, per_token=30_600, per_sequence=132_600, per_context_token=510)  # 2 % than the demo's
MADE = {
    "device": "cpu",
    "weights": "random (seed 0)",
    "backend": "sdpa",
    "graphs": False,
    "hardware": {"device": "cpu", "cpu": "a made-up CPU", "torch_threads": 1},
    "software": {"torch": "2.0"},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two "live" runs of the demo, each predicted by a cost 2 % above the scenario's. To be read, not changed."""
    folder = tmp_path_factory.mktemp("saved")
    setup = Setup.of(load_scenario("live-demo"))
    policy = setup.scenario.find("continuous")
    run = predict(setup, policy, LOAD, 0, SLOWER)
    asked = {"knobs": policy.plain, "num_swap_blocks": setup.num_swap_blocks, "max_model_len": setup.max_model_len}
    made = MADE | asked | {"model": to_plain(setup.model), "block_size": setup.kv.block_size}
    for repeat in (0, 1):
        replace(run, repeat=repeat, made=made).save(folder / f"run-{repeat}.npz")
    return folder


def test_saved_runs_are_judged(saved: Path, tmp_path: Path) -> None:
    """The distortion comes back as the bias; four files are written, a copy of the JSON too; the table ends stdout."""
    copy = tmp_path / "copy.json"
    done = batchsim("validate", "live-demo", "--from", saved, "--out", tmp_path, "--name", "x", "--json", copy)
    assert done.exit_code == 0, done.stderr
    found = json.loads((tmp_path / "validation-x.json").read_text())
    (whole,) = (row for row in found["steps"] if row["region"] == "all")
    assert whole["bias"] == pytest.approx(1 / 1.02 - 1, abs=1e-4)
    assert copy.read_text() == (tmp_path / "validation-x.json").read_text()
    assert found["made"]["live"]["hardware"] == MADE["hardware"]
    assert {file.name for file in tmp_path.glob("validation-x*")} == {
        f"validation-x{end}" for end in (".json", ".md", ".png", "-steps.png")
    }
    assert done.stdout.splitlines()[-1].split()[0] == "tokens/s" and "\ncontinuous  12 " in done.stdout
    assert "a made-up CPU" in done.stdout


TABLES = "{{kind: profile, profile: llama-3.1-8b-h200-vllm-0.24.0}}"  # braces as `format` takes them


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "{saved}", "--set", "workload.requests=61"], "none of which served the requests"),
        (["--from", "{saved}", "--policy", "static"], "none of which served the requests"),
        (["--from", "{saved}", "--set", "policies.continuous.max_num_seqs=8"], "had knobs.config.max_num_seqs 16"),
        (["--set", "model=llama-3.1-8b", "--set", f"cost={TABLES}"], "the error would not be the simulator's"),
        (["--from", "{empty}"], "holds no live runs"),
        (["--from", "{saved}", "--seed", "1", "--loads", "2"], "as they were made. Drop --loads, --seed."),
        (["--policy", "sjf"], "has no policy sjf"),
        (["--at", "fast"], "not shares of saturation"),
        (["--at", "50%", "--loads", "2"], "both are given"),
        (["--loads", "2/s"], "not loads"),
    ],
)
def test_what_cannot_be_judged_is_said_in_one_line(
    arguments: list[str], message: str, saved: Path, tmp_path: Path
) -> None:
    """Exit 2 and what to do."""
    given = [argument.format(saved=saved, empty=tmp_path) for argument in arguments]
    done = batchsim("validate", "live-demo", "--out", tmp_path, *given)
    assert done.exit_code == 2
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_a_policy_that_completes_nothing_is_named(tmp_path: Path) -> None:
    """With the reason of the rejections; where loads are given only the share of saturation is missing."""
    pytest.importorskip("torch", reason="runs a model")
    # Prompts that the pool cannot hold.
    small = ("--set", "kv.tokens=16", "--policy", "continuous", "--out", tmp_path)
    done = batchsim("validate", "live-demo", *small)
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert "live-demo, continuous: only 0 requests completed" in done.stderr and "Rejected:" in done.stderr
    go_on = batchsim("validate", "live-demo", *small, "--loads", "400", "--repeats", 1)
    assert "share of saturation not known" in go_on.stderr, go_on.stderr
    assert go_on.exit_code == 0, go_on.exception
    assert "none of its requests was ever run" in go_on.stderr


def test_a_file_that_is_no_live_run_is_named(tmp_path: Path) -> None:
    """One line with the file."""
    (tmp_path / "odd.npz").write_bytes(b"no")
    done = batchsim("validate", "live-demo", "--from", tmp_path, "--out", tmp_path)
    assert done.exit_code == 2
    assert "odd.npz" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_tiny_model_is_run_and_judged(tmp_path: Path) -> None:
    """Real runs are kept and can be judged again with the same result; the machine and the weights are named."""
    pytest.importorskip("torch", reason="runs a model")
    few = ("--set", "workload.requests=8", "--policy", "continuous", "--loads", "8")
    done = batchsim("validate", "live-demo", *few, "--repeats", 2, "--out", tmp_path, "--name", "t")
    assert done.exit_code == 0, done.stderr
    first = json.loads((tmp_path / "validation-t.json").read_text())
    (point,) = first["points"]
    assert len(point["live"]) == point["live_runs"] >= 2  # more where some did not count
    assert point["live_runs_not_counted"] == sum(run["void"] != "" for run in point["live"])
    assert "weights random" in done.stdout and "live on cpu" in done.stdout
    kept = tmp_path / "validation-t-runs"
    again = batchsim("validate", "live-demo", *few[:4], "--from", kept, "--out", tmp_path, "--name", "u")
    assert again.exit_code == 0, again.stderr
    second = json.loads((tmp_path / "validation-u.json").read_text())
    assert second["points"] == first["points"]
