"""Step costs fitted to recorded steps of engines that are known, and predictions beside recorded steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from batchsim.base.errors import MeasuredError, ScenarioError
from batchsim.check.steps.read import read_steps
from batchsim.check.steps.recorded import Engine, RecordedSteps, StepLog
from batchsim.check.validation.recorded_steps import compare_steps
from batchsim.cost.cost_error import CostError
from batchsim.fit.step_fit import StepFit, fit_steps
from batchsim.scenario.load import load_scenario
from batchsim.scenario.setup import Setup
from batchsim.workload.workload_config import Frontend
from tests.support.engine_truth import LINEAR_ENGINE, Load, scenario_text, setup_of
from tests.support.step_logs import Steps, fpm_log, sglang_log, simulated, vllm_log

FREE = "cost: {kind: free}"
LOAD = Load(6, 600, 100)
POOL = 400_000
TRUTH = {"base": 8e6, "sequence": 100e3, "prompt_token": 60e3, "context_token": 60.0}
Writer = Callable[[Steps, np.ndarray], str]


def log_of(tmp_path: Path, write: Writer, noise: float = 0.0, load: Load = LOAD, name: str = "engine.log") -> StepLog:
    """The log of the linear engine under a load."""
    text = scenario_text(LINEAR_ENGINE, load=load, requests=80)
    (tmp_path / name).write_text(write(*simulated(text, noise)))
    return read_steps(tmp_path / name, Engine(POOL, 16, False, 8192))


def fitted(log: StepLog, *held: StepLog, cost: str = FREE) -> StepFit:
    setup = setup_of(scenario_text(cost))
    return fit_steps(setup, setup.scenario.specs[0], [log], held)


def test_a_linear_engine_is_found_in_its_forward_pass_metrics(tmp_path: Path) -> None:
    """Every term that is declared identified is within 5 % of the truth; steps held out are predicted, noise aside."""
    found = fitted(log_of(tmp_path, fpm_log, 0.03))
    known = {term.name: term.value for term in found.known.terms if term.identified}
    assert {"base", "prompt_token"} <= known.keys() <= TRUTH.keys()
    assert known == pytest.approx({name: TRUTH[name] for name in known}, rel=0.05)
    assert not found.violations and found.claims == {"step_time": 0.015}
    (_, given), (_, held) = found.regions
    assert given[-1].n + held[-1].n + 5 >= sum(len(one) for one in [log_of(tmp_path, fpm_log).steps])
    assert held[-1].p50 < 0.03 and abs(held[-1].bias) < 0.01
    assert {row.region for row in held} > {"decode 1-8", "mixed", "all"}


def test_the_claim_of_a_fit_to_steps_is_the_error_of_its_cost(tmp_path: Path) -> None:
    """As the fit has it, and as a scenario reads it from the file. The way from the client is left as it was."""
    setup = setup_of(scenario_text(FREE, way="5ms"))
    found = fit_steps(setup, setup.scenario.specs[0], [log_of(tmp_path, fpm_log)], [])
    (tmp_path / "mine.json").write_text(found.to_json({}))
    (tmp_path / "use.yaml").write_text(scenario_text("cost: mine.json"))
    use = Setup.of(load_scenario(str(tmp_path / "use.yaml")))
    for error in (found.fitted.cost.error, use.cost.error):
        assert isinstance(error, CostError) and (error.low, error.high) == (-0.015, 0.015)
        assert "TPOT" not in error.source
    assert found.fitted.traffic.frontend == use.traffic.frontend == Frontend(5_000_000)


def test_of_the_ten_stretches_of_each_core_three_are_held_out(tmp_path: Path) -> None:
    """The second and every third after it: what a step took in them moves no term."""
    log = log_of(tmp_path, fpm_log)
    found = fitted(log)
    assert [one.name for one in found.held_out] == [f"stretch {n} of 10 of core 1" for n in (2, 5, 8)]
    assert [one.name for one in found.given] == [f"stretch {n} of 10 of core 1" for n in (1, 3, 4, 6, 7, 9, 10)]
    ns = log.steps.ns.copy()
    ns[np.arange(len(ns)) * 10 // len(ns) == 4] *= 3
    slow = StepLog(log.source, log.form, RecordedSteps(**{**vars(log.steps), "ns": ns}), (), log.left_out)
    other = fitted(slow)
    assert other.terms.base == pytest.approx(found.terms.base, rel=1e-3)
    assert [line for line in other.violations if line.startswith("stretch 5 of 10 of core 1: step_time -66.7 %")]


def test_logs_held_out_are_judged_by_alone(tmp_path: Path) -> None:
    """All steps of the others are fitted to."""
    log, held = (log_of(tmp_path, fpm_log, 0.03, load, f"{load}.log") for load in (LOAD, Load(3, 1000, 60)))
    found = fitted(log, held)
    assert len(found.given) == len(found.held_out) == 10
    assert abs(found.regions[1][1][-1].bias) < 0.01
    assert found.sources == (log.source, held.source)


def test_contexts_are_found_from_the_kv_that_vllm_says_is_in_use(tmp_path: Path) -> None:
    """Within what percentages to a tenth allow for; the log before that tells none, and what they cost is said to be
    within the sequences."""
    load = Load(12, 600, 150)
    told = fitted(log_of(tmp_path, lambda steps, ms: vllm_log(steps, ms, POOL // 16), load=load))
    assert told.terms.context_token == pytest.approx(60, rel=0.1)
    untold = fitted(log_of(tmp_path, lambda steps, ms: vllm_log(steps, ms, POOL // 16, usage=False), load=load))
    assert untold.terms.context_token == 0 and untold.terms.sequence > 1.2 * TRUTH["sequence"]
    assert "contexts of decodes are not told: what they cost is within `sequence`" in " ".join(untold.notes)
    assert not untold.violations


def test_a_kernel_needs_the_contents_that_it_asks_for(tmp_path: Path) -> None:
    """With them it is stretched to the steps; without, the fit is refused in one line that says what to do."""
    log = log_of(tmp_path, fpm_log)
    found = fitted(log, cost="cost: h200")
    assert found.terms.kernel > 0 and not found.violations
    old = log_of(tmp_path, lambda steps, ms: vllm_log(steps, ms, POOL // 16, usage=False))
    with pytest.raises(MeasuredError, match=r"tell what the fit needs.*write cost: \{kind: free\}"):
        fitted(old, cost="cost: h200")


def test_decodes_alone_make_no_model_of_prompts(tmp_path: Path) -> None:
    """SGLang's decode lines say nothing of prompts: the free form is refused, unless the scenario states their cost."""
    log = log_of(tmp_path, sglang_log, load=Load(0.5, 300, 900))
    assert len(log.steps) >= 20
    found = fitted(log)
    assert found.lacking == ("no step with a prompt is timed: in this fit prompts would cost nothing",)
    assert found.violations[0] == found.lacking[0]
    stated = fitted(log, cost=LINEAR_ENGINE)
    assert not stated.lacking and stated.terms.prompt_token == pytest.approx(60e3)


def test_times_that_are_none_of_steps_make_no_model(tmp_path: Path) -> None:
    """Under asynchronous scheduling vLLM prints the rest of a wait: the fit is refused without --force."""
    log = log_of(tmp_path, lambda steps, ms: "async_scheduling=True\n" + vllm_log(steps, ms, POOL // 16))
    assert fitted(log).violations == [f"engine.log: {log.doubt}"] and "Record with --no-async-scheduling" in log.doubt


def test_few_steps_and_scenarios_that_take_no_fit_are_refused(tmp_path: Path) -> None:
    """In one line each."""
    log = log_of(tmp_path, fpm_log)
    few = log.steps.picked(np.arange(len(log.steps)) < 19)
    with pytest.raises(MeasuredError, match=r"19 of 19 recorded steps .* 20 are needed"):
        fitted(StepLog("few.log", log.form, few, (), log.left_out))
    with pytest.raises(ScenarioError, match="cost_factor and anchor"):
        fitted(log, cost="cost: h200\ncost_factor: 2")


def test_stalls_hardly_count_in_the_fit_and_are_said(tmp_path: Path) -> None:
    """A step of a hundred times its length is no step's cost; the bias has it."""
    log = log_of(tmp_path, fpm_log)
    ns = log.steps.ns.copy()
    ns[::50] *= 100
    found = fitted(StepLog(log.source, log.form, RecordedSteps(**{**vars(log.steps), "ns": ns}), (), log.left_out))
    assert found.terms.base == pytest.approx(8e6, rel=0.05)
    assert "steps took more than 5 times what is predicted" in " ".join(found.notes)
    assert found.violations


def test_the_file_of_a_fit_is_a_cost(tmp_path: Path) -> None:
    """`cost: mine.json` gives the terms back."""
    found = fitted(log_of(tmp_path, fpm_log))
    (tmp_path / "mine.json").write_text(found.to_json({}))
    setup = setup_of(scenario_text(f"cost: {tmp_path / 'mine.json'}"))
    assert setup.cost.terms == found.terms  # type: ignore[attr-defined]
    assert json.loads((tmp_path / "mine.json").read_text())["claims"] == {"step_time": 0.015}


# ---- predictions beside recorded steps


def test_predicted_steps_stand_beside_recorded_ones_by_kind(tmp_path: Path) -> None:
    """Of the true cost nothing is off; of one that is a tenth too slow every kind is."""
    log = log_of(tmp_path, fpm_log)
    true = setup_of(scenario_text(LINEAR_ENGINE)).cost
    found = compare_steps("vllm", true, log.steps, ahead=False)
    assert found.device_bias is None
    assert [row.region for row in found.rows] == ["decode 1-8", "decode 9-64", "prefill", "mixed", "all"]
    assert all(row.p95 < 1e-6 and abs(row.bias) < 1e-6 for row in found.rows)
    slow = LINEAR_ENGINE.replace("8ms", "8.8ms").replace("60us", "66us").replace("40us", "44us").replace("60ns", "66ns")
    off = compare_steps("vllm", setup_of(scenario_text(slow)).cost, log.steps, ahead=False)
    assert all(row.p50 == pytest.approx(0.1) and row.bias == pytest.approx(0.1) for row in off.rows)


def test_steps_whose_time_hangs_on_what_is_not_told_are_not_compared(tmp_path: Path) -> None:
    """They are counted; where none is left the comparison is refused."""
    old = log_of(tmp_path, lambda steps, ms: vllm_log(steps, ms, POOL // 16, usage=False)).steps
    flat = setup_of(scenario_text("cost: {kind: linear, base: 8ms, per_token: 60us}")).cost
    assert compare_steps("vllm", flat, old, ahead=False).compared == len(old)
    true = setup_of(scenario_text(LINEAR_ENGINE)).cost
    some = compare_steps("vllm", true, old, ahead=False)
    assert 0 < some.compared < len(old) == some.recorded
    with pytest.raises(MeasuredError, match="leave open what decodes read"):
        compare_steps("vllm", true, old.picked((old.decodes > 3) & (old.chunks == 0)), ahead=False)


def test_an_engine_ahead_of_results_takes_the_longer_of_host_and_device(tmp_path: Path) -> None:
    """A synchronous one takes both; without the host's part the bias is the device's."""
    steps = log_of(tmp_path, fpm_log).steps
    cost = setup_of(scenario_text("cost: {kind: roofline, gpu: h100, host: {base: 1.5ms}}")).cost
    both, longer = (compare_steps("vllm", cost, steps, ahead=ahead) for ahead in (False, True))
    total = {one.name: (one.rows[-1].bias + 1) for one in (both,)}["vllm"]
    assert both.device_bias is not None and longer.device_bias == pytest.approx(both.device_bias)
    assert total - (both.device_bias + 1) == pytest.approx(1.5e6 * both.compared / steps.ns.sum(), rel=0.05)
    assert longer.rows[-1].bias < both.rows[-1].bias
