"""Prompts beyond what a profile was measured on, found before the first point."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.cost.profile import Hull, load_profile
from batchsim.scenario import Scenario, load_scenario
from batchsim.scenario.longest_prompt import check_reach
from batchsim.scenario.setup import Setup
from batchsim.study.capacity.find import find_capacities
from batchsim.study.curves.run import run_scenario
from batchsim.study.sweep.points import Sweep

SCENARIO = """\
model: llama-3.1-8b
cost: near.json
workload:
  arrivals: {kind: poisson, mean_rate: 1/s}
  lengths:
    prompt: {kind: fixed, tokens: 20000}
    output: {kind: fixed, tokens: 10}
  output_cap: 16
  duration: 20s
policies:
  vllm: {max_num_seqs: 8, max_num_batched_tokens: 2048}
  static: {batch_size: 2, max_wait: 1s}
load: {mean_rate: [1/s, 2/s]}
slo: ttft<1s & tpot<50ms @ 95%
seeds: 2
"""
PROMPT = "workload.lengths.prompt="
NEAR = replace(
    load_profile("llama-3.1-8b-h100-vllm-0.24.0"),
    name="near",
    origin="measured",
    setup=None,
    hull=Hull(512, 32_768, 65_535.0, max_chunk_context=16_384),
)


def scenario(folder: Path, *overrides: str) -> Scenario:
    """Beside it: `near.json`, a profile that reaches to prompts of 16,384 tokens, and `small.json`, steps of 8,192."""
    (folder / "near.json").write_text(NEAR.to_json(), encoding="utf-8")
    small = replace(NEAR, hull=replace(NEAR.hull, max_tokens=8192))
    (folder / "small.json").write_text(small.to_json(), encoding="utf-8")
    path = folder / "long.yaml"
    path.write_text(SCENARIO, encoding="utf-8")
    return load_scenario(str(path), overrides=overrides)


def check(folder: Path, *overrides: str) -> None:
    setup = Setup.of(scenario(folder, *overrides))
    check_reach(setup, setup.scenario.specs, max(setup.scenario.loads), range(setup.scenario.file.seeds))


def test_a_prompt_beyond_the_profile_ends_runs_and_searches_before_their_first_point(tmp_path: Path) -> None:
    """One line with the policy, the prompt's tokens, the profile's and what to do; nothing is written."""
    said = (
        r"long.yaml:2: vllm, the longest prompt \(seed 0\): 20000 tokens of one prompt asked; profile near was measured"
        r" up to 16384. Recalibrate with --max-model-len 20000 or pass --set cost.extrapolate=true"
    )
    with pytest.raises(ScenarioError, match=said):
        run_scenario(scenario(tmp_path), out=tmp_path / "out")
    with pytest.raises(ScenarioError, match=said):
        find_capacities(scenario(tmp_path), Sweep(tmp_path / "out" / "long"))
    assert not (tmp_path / "out").exists()


def test_a_policy_that_takes_prompts_whole_needs_a_step_that_holds_them(tmp_path: Path) -> None:
    """10,000 tokens are too many for one step of that profile, and none for chunks of 2,048."""
    small = ("cost=small.json", PROMPT + "{kind: fixed, tokens: 10000}")
    with pytest.raises(ScenarioError, match=r"static, the longest .* 10000 tokens in a step asked; .* up to 8192"):
        check(tmp_path, *small)
    check(tmp_path, *small, "policies={vllm: {max_num_seqs: 8, max_num_batched_tokens: 2048}}")


@pytest.mark.parametrize(
    "overrides",
    [
        ["cost.extrapolate=true"],
        ["cost=h100"],
        [PROMPT + "{kind: fixed, tokens: 16384}"],
        ["max_model_len=18000"],
        ["kv.tokens=19200"],
    ],
    ids=["extrapolates", "roofline", "reaches", "rejected by the model", "rejected by the pool"],
)
def test_what_the_profile_reaches_or_need_not_is_not_refused(tmp_path: Path, overrides: list[str]) -> None:
    """Only a prompt that would be computed, and that the profile says nothing of."""
    check(tmp_path, *overrides)


@pytest.mark.parametrize("limit", ["max_model_len=18000", "kv.tokens=18000"])
def test_the_longest_that_is_not_rejected_is_asked(tmp_path: Path, limit: str) -> None:
    """Longer ones that model or pool turn away hide none."""
    with pytest.raises(ScenarioError, match=r"17\d{3} tokens of one prompt asked"):
        check(tmp_path, PROMPT + "{kind: uniform, min: 17000, max: 19000}", limit)


def test_a_law_is_judged_by_what_is_drawn(tmp_path: Path) -> None:
    """Its limit may lie beyond the profile where no request does; of all seeds, at the highest load."""
    law = ("cost=small.json", PROMPT + "{kind: lognormal, mean: 2300, cv: 0.8, max: 20000}")
    check(tmp_path, *law, "seeds=2")
    check(tmp_path, *law, "seeds=3", "load={mean_rate: [1/s]}")
    with pytest.raises(ScenarioError, match=r"static, the longest prompt \(seed 2\): 8\d{3} tokens in a step asked"):
        check(tmp_path, *law, "seeds=3")


def test_a_deployments_profile_is_asked_as_any_other(tmp_path: Path) -> None:
    """A prompt that a policy takes whole is beyond the steps that its kernels were timed in; said once, before any."""
    its = (
        "model=qwen3-8b",
        "cost=null",
        "deployment={engine: vllm, gpu: h100}",
        PROMPT + "{kind: fixed, tokens: 39000}",
    )
    with pytest.raises(
        ScenarioError, match=r"static, the longest .* 39000 tokens in a step asked; .* up to 32768\. Let"
    ):
        check(tmp_path, *its)
    check(tmp_path, *its, "deployment.extrapolate=true")


def test_users_of_a_closed_loop_are_asked_for_their_first_prompt(tmp_path: Path) -> None:
    """It is known before they send it."""
    loop = ("workload.arrivals={kind: closed_loop, users: 2, think_time: 1s}", "load={users: [2]}")
    with pytest.raises(ScenarioError, match="20000 tokens of one prompt"):
        check(tmp_path, *loop)


def test_replicas_are_asked_each_with_its_own_profile(tmp_path: Path) -> None:
    """One kind whose profile does not reach is enough."""
    groups = "{a: {count: 1, cost: h100}, b: {count: 1, cost: near.json}}"
    with pytest.raises(ScenarioError, match="20000 tokens of one prompt"):
        check(tmp_path, "cost=h100", f"replicas={{groups: {groups}, router: random}}")
