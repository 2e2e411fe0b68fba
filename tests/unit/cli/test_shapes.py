"""`batchsim shapes`, and what `run` and `explain` say of compiled shapes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_scenario import batchsim

SCENARIO = """\
model: qwen3-8b
max_model_len: 512
cost: {kind: linear, base: 5ms, per_token: 20us, shapes: {SHAPES}}
kv: {tokens: 16000}
workload:
  arrivals: {kind: poisson, mean_rate: 4/s}
  lengths:
    prompt: {kind: uniform, min: 20, max: 200}
    output: {kind: uniform, min: 2, max: 12}
  output_cap: 16
  requests: 60
policies:
  POLICY
load: {mean_rate: [2/s, 4/s]}
slo: ttft<200ms & tpot<50ms @ 95%
seeds: 1
"""
NEURON = "vllm_neuron: {max_num_seqs: 4, max_num_batched_tokens: 256}"
VLLM = "vllm: {max_num_seqs: 4, max_num_batched_tokens: 256}"


def _written(folder: Path, shapes: str = "preset: neuron", policy: str = NEURON) -> Path:
    path = folder / "s.yaml"
    path.write_text(SCENARIO.replace("SHAPES", shapes).replace("POLICY", policy))
    return path


def _found(folder: Path, *options: Any, **written: str) -> dict[str, Any]:
    done = batchsim("shapes", _written(folder, **written), "--json", *options)
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def test_the_best_lists_hold_all_sizes_and_waste_less_than_any_other_shown(tmp_path: Path) -> None:
    """At most three buckets each, the policy's limit the last, written as shapes that a scenario can have."""
    found = _found(tmp_path, "--buckets", 3, "--load", 4)
    tokens, requests = found["lists"]["tokens"], found["lists"]["requests"]
    assert (tokens["best"]["buckets"][-1], requests["best"]["buckets"][-1]) == (256, 4)
    assert len(tokens["best"]["buckets"]) == len(requests["best"]["buckets"]) == 3
    assert (
        tokens["best"]["padded"]
        < tokens["own"]["padded"]
        == sum((128 if int(size) <= 128 else 256) * count for size, count in tokens["seen"].items())
    )
    assert sum(tokens["seen"].values()) == 60  # a prompt a step
    assert found["shapes"] == {
        "preset": "lists",
        "tokens": tokens["best"]["buckets"],
        "requests": requests["best"]["buckets"],
    }
    lists = ", ".join(f"{key}: {value}" for key, value in found["shapes"].items())
    again = _found(tmp_path, "--buckets", 3, "--load", 4, shapes=lists)["lists"]["requests"]
    assert again["best"] == again["own"]


def test_steps_that_mix_have_one_list_of_tokens(tmp_path: Path) -> None:
    found = _found(tmp_path, shapes="preset: tpu", policy=VLLM)
    assert list(found["lists"]) == ["tokens"] and found["shapes"]["mix"] is True
    assert found["lists"]["tokens"]["own"]["buckets"] == [16, 32, 64, 128, 256]


def test_the_text_names_lists_and_waste_and_the_picture_is_drawn(tmp_path: Path) -> None:
    done = batchsim("shapes", _written(tmp_path), "--buckets", 2, "-o", tmp_path / "sizes.png")
    assert done.exit_code == 0, done.stderr
    for said in ("s · vllm_neuron at 4 req/s offered, 1 seed: 60 sizes of tokens", "tokens, best", "shapes: {preset:"):
        assert said in done.stdout
    assert (tmp_path / "sizes.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "written", "expected"),
    [
        (["--load", 3], {}, "--load 3: is not one of the scenario's loads. Write one of 2, 4."),
        (["--policy", "orca"], {}, "--policy orca: the scenario has vllm_neuron. Write one of them."),
        (["--set", "replicas={count: 2, router: random}"], {}, "buckets are found for one engine. Drop replicas"),
        (["--set", "load={mean_rate: auto}"], {}, "load: auto finds loads by simulating them all. Write a list"),
        ([], {"shapes": "preset: gaudi, compile: 9s", "policy": VLLM}, "its buckets have three dimensions"),
        ([], {"policy": VLLM}, "has no program: prompts and decodes run in programs of their own"),
        ([], {"shapes": "preset: neuron, requests: [2]"}, "requests ends with 2, and the last must be 4"),
    ],
)
def test_what_cannot_be_found_is_one_line(
    options: list[Any], written: dict[str, str], expected: str, tmp_path: Path
) -> None:
    done = batchsim("shapes", _written(tmp_path, **written), *options)
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert expected in done.stderr, done.stderr


def test_run_and_explain_tell_padding_programs_and_compilations(tmp_path: Path) -> None:
    """Cold programs of a TPU: each is compiled once, while requests wait; the table has every program."""
    path = _written(tmp_path, "preset: tpu, warm: false, compile: 2s", VLLM)
    done = batchsim("run", path, "--out", tmp_path, "--jobs", 1, "--no-pictures", "--set", "load={mean_rate: [4/s]}")
    assert done.exit_code == 0, done.stderr
    text = " ".join(done.stdout.split())
    programs = [line for line in done.stdout.splitlines() if line.strip().startswith("steps ")]
    table = [line for line in programs if "tokens" in line]
    assert 2 <= len(table) <= 5
    said = f"shapes tpu: padding is .* of tokens; {len(table)} programs used; {len(table)} compiled at run time,"
    assert re.search(said + f" {2 * len(table)} s in which requests waited [0-9,]+ times", text), text
    explained = " ".join(batchsim("explain", tmp_path / "s").stdout.split())
    assert f"{len(table)} compiled at run time" in explained


def test_run_says_what_it_counts_of_graphs_and_nothing_of_replicas(tmp_path: Path) -> None:
    """Steps beyond the largest graph run without one, so that sizes are counted; of several engines a line says why
    there is no table."""
    path = _written(tmp_path, "preset: cuda_graphs", VLLM)
    options = ("--jobs", 1, "--no-pictures", "--set", "load={mean_rate: [4/s]}", "--out", tmp_path)
    assert re.search(
        r"shapes cuda_graphs: padding is .* of tokens; \d+ sizes of steps used", _said("run", path, *options)
    )
    said = _said("run", path, *options, "--set", "replicas={count: 2, router: random}")
    assert "shapes cuda_graphs: padding and programs are shown of one engine alone, not of replicas" in said


def _said(*words: Any) -> str:
    done = batchsim(*words)
    assert done.exit_code == 0, done.stderr
    return " ".join(done.stdout.split())
