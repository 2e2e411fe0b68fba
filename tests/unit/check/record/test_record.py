"""Recordings of an installed vLLM's scheduler: equal to the policy of its version, and where a rule is changed not."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.check.conform import StepComparison, conform
from batchsim.check.record.record import engine_spec, record_engine
from batchsim.scenario.parse import parse_scenario
from batchsim.scenario.setup import Setup
from tests.engines.recorded import need_vllm, random_scenario

ROOT = Path(__file__).parents[4]
STORED = sorted((ROOT / "tests/data/recordings").glob("*.json.gz"))
TEXT = """\
model: llama-3.1-8b
cost: {kind: constant, step: 20ms}
kv: {tokens: 2048, block_size: 16}
max_model_len: 2048
slo: e2e<1min @ 99%
workload:
  arrivals: {kind: poisson, mean_rate: 20/s}
  lengths: {prompt: {kind: lognormal, mean: 300, cv: 1, max: 1500}, output: {kind: uniform, min: 1, max: 60}}
  output_cap: 400
  requests: 40
policies:
  vllm:
    {async_scheduling: false, enable_prefix_caching: false, max_num_seqs: 8, max_num_batched_tokens: 128}
"""


def parts(data: dict[str, Any], path: Path) -> StepComparison:
    path.write_text(json.dumps(data))
    verdict = conform(path)
    assert isinstance(verdict, StepComparison)
    return verdict


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.name)
def test_stored_recordings_are_made_again(path: Path) -> None:
    """Made by the schedulers of vLLM 0.30, 0.32 and 0.33, each by the rules of its version."""
    verdict = conform(path)
    assert isinstance(verdict, StepComparison)
    assert not verdict.difference, str(verdict)
    assert verdict.num_steps > 100


@pytest.mark.parametrize("path", [path for path in STORED if "0.33" not in path.name], ids=lambda path: path.name)
def test_an_older_recording_differs_from_the_rules_of_today(path: Path, tmp_path: Path) -> None:
    """Each of these was made where a rule bites that has changed since, so that the version counts."""
    data = json.loads(gzip.decompress(path.read_bytes()))
    verdict = parts(data | {"meta": data["meta"] | {"version": "0.33"}}, tmp_path / "r.json")
    assert verdict.difference
    assert verdict.around[-1].startswith("by the rules of 0.3")
    assert " it is equal: " in verdict.around[-1]


def test_the_rule_at_which_they_part_is_named(tmp_path: Path) -> None:
    """A recording of 0.32 under priority, said to be of 0.33; and one that differs by none of the rules."""
    data = json.loads(gzip.decompress((ROOT / "tests/data/recordings/vllm-0.32.0-14.json.gz").read_bytes()))
    data["meta"]["engine_version"] = "0.33.0"
    said = parts(data, tmp_path / "r.json").around[-1]
    assert said.startswith("by the rules of 0.3")
    assert "it is equal: those behind a running request that preempts itself are scheduled since 0.33" in said
    data["meta"] |= {"engine_version": "0.32.0", "max_num_seqs": 2}
    verdict = parts(data, tmp_path / "r.json")
    assert verdict.difference
    assert not any("by the rules of 0.33 it is" in line for line in verdict.around)


def test_a_version_that_is_not_known_is_compared_with_the_followed_one(tmp_path: Path) -> None:
    """And the verdict says with which, where they part."""
    data = json.loads(gzip.decompress(next(path for path in STORED if "0.32" in path.name).read_bytes()))
    data["meta"]["engine_version"] = "0.29.0"
    verdict = parts(data, tmp_path / "r.json")
    assert "recorded with vLLM 0.29.0, the policy follows 0.33.0" in verdict.around


def test_host_times_of_every_step_are_two_lists_of_one_length(tmp_path: Path) -> None:
    """Where the two differ, or calls without a step have none, the file is refused in one line."""
    path = next(each for each in STORED if "host_empty" in json.loads(gzip.decompress(each.read_bytes()))["meta"])
    data = json.loads(gzip.decompress(path.read_bytes()))
    meta = data["meta"]
    cut = meta | {"host_update": meta["host_update"][1:]}
    with pytest.raises(ScenarioError, match=r"host_schedule and meta\.host_update are not two lists of one length"):
        parts(data | {"meta": cut}, tmp_path / "r.json")
    with pytest.raises(ScenarioError, match="meta has no host_empty"):
        parts(data | {"meta": {k: v for k, v in meta.items() if k != "host_empty"}}, tmp_path / "r.json")
    slower = meta | {"host_update": [2 * each for each in meta["host_update"]]}
    assert "t_processed" in parts(data | {"meta": slower}, tmp_path / "r.json").difference


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("max_num_seqs: 8,", "max_num_seqs: 8, version: '0.32',"), "record: vllm: version 0.32 is not passed"),
        (("  vllm:", "  sglang:"), "record: sglang is of kind sglang, and only vllm is recorded"),
        (("slo:", "max_waiting: 3\nslo:"), "max_waiting is not recorded"),
        (("slo:", "replicas: {count: 2, router: round_robin}\nslo:"), "replicas is not recorded"),
    ],
)
def test_what_is_not_recorded_is_refused(change: tuple[str, str], said: str) -> None:
    """Before the engine is started, in one line."""
    text = TEXT.replace(*change)
    if "sglang" in text:
        text = text[: text.index("    {async")] + "    {}\n"
    with pytest.raises(ScenarioError, match=said):
        scenario = parse_scenario(text, "s.yaml", Path())
        record_engine(Setup.of(scenario), engine_spec(scenario.specs[0], None, None), 1.0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_random_scenarios_are_recorded_and_equal(seed: int, tmp_path: Path) -> None:
    """Twenty, on the vLLM that make real-engines installs, by the rules of its version."""
    python = need_vllm()
    scenario = random_scenario(seed)
    made = record_engine(Setup.of(scenario), engine_spec(scenario.specs[0], python, None), scenario.loads[0], 0)
    made.write(tmp_path / "r.json")
    verdict = conform(tmp_path / "r.json")
    assert isinstance(verdict, StepComparison)
    assert not verdict.difference, str(verdict)
    assert verdict.num_steps == len(made.data["steps"]) > 100


def recorded(folder: Path, name: str, *options: str) -> list[dict[str, Any]]:
    """The steps that `batchsim record` writes of TEXT, in a program of its own, which finds `tests.engines`."""
    (folder / "s.yaml").write_text(TEXT)
    command = [sys.executable, "-m", "batchsim", "record", "s.yaml", "--python", need_vllm(), "-o", name, *options]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/engines'}"}
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=600)
    return json.loads((folder / name).read_text())["steps"]


@pytest.mark.slow
def test_a_rule_that_is_changed_in_the_installed_scheduler_is_found_at_its_step(tmp_path: Path) -> None:
    """Three changes: the order of the queue, a token of the budget, what of a prompt must fit."""
    plain = recorded(tmp_path, "plain.json")
    assert not conform(tmp_path / "plain.json").difference
    for name in ("NewestFirst", "BudgetOffByOne", "FirstPartOnly"):
        steps = recorded(tmp_path, f"{name}.json", "--scheduler-cls", f"planted.{name}", "--allow-code")
        first = next(n for n, (a, b) in enumerate(zip(plain, steps, strict=False)) if a != b)
        data = json.loads((tmp_path / f"{name}.json").read_text())
        assert data["meta"]["scheduler"] == f"planted.{name}"
        verdict = conform(tmp_path / f"{name}.json", "vllm")
        assert verdict.difference.startswith(f"step {first + 1} differs in "), (name, str(verdict))
