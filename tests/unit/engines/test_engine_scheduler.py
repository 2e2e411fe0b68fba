"""An installed vLLM's own scheduler in the loop: what it is given, what is refused, and that `vllm` is equal to it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.drive.simulate import simulate
from batchsim.engines.engine_config import PASSED, EngineConfig
from batchsim.engines.worker import worker_of
from batchsim.kernel.record import Records
from batchsim.policies.systems.vllm.vllm_config import FOLLOWED_VERSION, VllmConfig, version_numbers
from batchsim.scenario.config import PolicySpec
from batchsim.scenario.parse import parse_scenario
from batchsim.scenario.setup import Setup
from tests.engines.recorded import need_vllm, random_scenario

TEXT = """\
model: llama-3.1-8b
cost: {kind: constant, step: 20ms}
kv: {tokens: 4096, block_size: 16}
max_model_len: 2048
slo: e2e<1min @ 99%
workload:
  arrivals: {kind: constant, mean_rate: 10/s}
  lengths: {prompt: {kind: fixed, tokens: 100}, output: {kind: fixed, tokens: 10}}
  output_cap: exact
  requests: 10
policies:
  real: {kind: engine, engine: vllm}
"""


def run_of(setup: Setup, spec: PolicySpec) -> Records:
    workload = setup.workload(setup.loads[0], 0)
    core = setup.engine(spec, workload)
    simulate(core, workload)
    core.check_returned()
    return core.recorder.records()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_the_policy_equals_the_scheduler_that_is_installed(seed: int) -> None:
    """Ten random scenarios: every step, and the host's times of it, bit for bit."""
    python = need_vllm()
    scenario = random_scenario(seed, python, worker_of(python).version.rpartition(".")[0])
    setup = Setup.of(scenario)
    ours, real = (run_of(setup, spec) for spec in scenario.specs)
    assert len(ours.steps)
    assert ours.steps.tobytes() == real.steps.tobytes()
    assert ours.lanes.tobytes() == real.lanes.tobytes()
    for column in ("ended_ns", "first_token_ns", "num_preemptions", "cached_tokens_all"):
        assert ours.requests[column].tolist() == real.requests[column].tolist()


@pytest.mark.slow
def test_an_older_scheduler_is_not_the_policy_as_shipped() -> None:
    """With prefill_schedule_interval the scheduler before 0.33 and the policy of 0.33 part: the test above can fail."""
    python = need_vllm()
    if version_numbers(worker_of(python).version) == FOLLOWED_VERSION:
        pytest.skip(f"vLLM {worker_of(python).version} in .vllm has the rules of the policy")
    scenario = random_scenario(5, python)
    ours, real = (run_of(Setup.of(scenario), spec) for spec in scenario.specs)
    assert ours.steps.tobytes() != real.steps.tobytes()


def test_without_vllm_one_line_says_how_to_install_it() -> None:
    """The scenario itself is checked without it."""
    if sys.modules.get("vllm") or any((Path(path) / "vllm").is_dir() for path in sys.path):
        pytest.skip("vLLM is installed beside batchsim here")
    setup = Setup.of(parse_scenario(TEXT, "s.yaml", Path()))
    with pytest.raises(
        ScenarioError, match=r"engine vllm: .* cannot import it .*pip install vllm.*--python PATH"
    ) as said:
        run_of(setup, setup.scenario.specs[0])
    assert "\n" not in str(said.value)


def test_an_interpreter_that_is_not_there_is_named() -> None:
    """And what to do."""
    text = TEXT.replace("engine: vllm}", "engine: vllm, python: /no/python}")
    setup = Setup.of(parse_scenario(text, "s.yaml", Path(), allow_code=True))
    with pytest.raises(ScenarioError, match=r"engine vllm: /no/python cannot be run: No such file.*Install it"):
        run_of(setup, setup.scenario.specs[0])


@pytest.mark.parametrize("knob", ["python: /no/python", "scheduler_cls: mine.Scheduler"])
def test_a_scenario_names_a_program_only_where_that_is_allowed(knob: str) -> None:
    """Else a file from elsewhere could run anything."""
    text = TEXT.replace("engine: vllm}", f"engine: vllm, {knob}}}")
    with pytest.raises(ScenarioError, match=r"s\.yaml:12: .* is code of its own.*--allow-code"):
        parse_scenario(text, "s.yaml", Path())


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"max_loras": 2}, "max_loras 2 is not passed"),
        ({"version": "0.32"}, "version 0.32 is not passed"),
        ({"disable_chunked_mm_input": True}, "disable_chunked_mm_input True is not passed"),
    ],
)
def test_a_knob_that_the_real_scheduler_does_not_get_is_refused(knobs: dict[str, Any], said: str) -> None:
    """Rather than dropped."""
    with pytest.raises(ValueError, match=f"{said} to an engine's own scheduler. Drop it"):
        EngineConfig(**knobs)


def test_the_knobs_that_are_passed_are_those_stated() -> None:
    """Each at its value, and async_scheduling as the class of the scheduler."""
    config = EngineConfig(watermark=0.1, policy="priority", max_num_seqs=3)
    assert config.passed == {name: getattr(config, name) for name in PASSED}
    assert (config.passed["watermark"], config.passed["policy"], config.passed["max_num_seqs"]) == (0.1, "priority", 3)
    assert config.traits.loop == VllmConfig().traits.loop


def test_no_model_is_run_under_it() -> None:
    """A real model needs the ids of KV blocks, which the engine keeps to itself."""
    (spec,) = parse_scenario(TEXT, "s.yaml", Path()).specs
    with pytest.raises(ScenarioError, match="an engine's own scheduler runs in simulated time alone"):
        spec.check_can_be_real()
