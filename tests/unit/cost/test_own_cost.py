"""Step times of the user's own: `cost: {kind: "module:Class"}`, as examples/own_cost.py has it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from batchsim.base.errors import ScenarioError
from batchsim.kernel.record import Records
from batchsim.results.heading import heading
from batchsim.results.provenance import identity
from batchsim.scenario import Scenario, load_scenario
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup
from tests.support.paths import ROOT
from tests.unit.scenario.test_replicas import SCENARIO

EXAMPLES = ROOT / "examples"
LINEAR = "{kind: linear, base: 20ms, per_token: 10us}"
OWN = '{kind: "own_cost:Throttled", base: 20ms, per_token: 10us, above: ABOVE, slowdown: 1.5}'


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.syspath_prepend(str(tmp_path))


def loaded(folder: Path, cost: str, more: str = "", *, allow_code: bool = True) -> Scenario:
    path = folder / "some.yaml"
    text = re.sub(r"cost: .*", lambda _: f"cost: {cost}", SCENARIO)
    path.write_text(f"{text}{more}", encoding="utf-8")
    return load_scenario(str(path), overrides=["workload.duration=6s"], allow_code=allow_code)


def records(scenario: Scenario) -> Records:
    return simulate_point(Setup.of(scenario), scenario.points()[0]).records


def test_steps_take_what_a_cost_of_one_s_own_says(tmp_path: Path) -> None:
    """The example below its limit is a linear cost, and leaves the same records; above it steps take 1.5 times that."""
    linear = records(loaded(tmp_path, LINEAR))
    same = records(loaded(tmp_path, OWN.replace("ABOVE", "8")))
    assert np.array_equal(linear.steps, same.steps) and np.array_equal(linear.requests, same.requests)
    steps = records(loaded(tmp_path, OWN.replace("ABOVE", "3"))).steps
    work = 20_000_000 + 10_000 * (steps["num_decode_tokens"] + steps["num_prefill_tokens"])
    above = steps["num_decode"] + steps["num_chunks"] > 3
    assert above.any() and not above.all()
    assert np.array_equal(steps["duration_ns"], np.where(above, 1.5, 1) * work)


def test_it_is_named_and_its_file_is_a_part_of_the_points(tmp_path: Path) -> None:
    """In the heading; and by its hash in the identity, so that no point of an older file is reused."""
    own = OWN.replace("ABOVE", "3")
    setup = Setup.of(loaded(tmp_path, own))
    assert "Throttled, code of its own" in heading(setup) and "own_cost:Throttled" in identity(setup)["cost"][0]
    groups = (
        f"replicas: {{router: random, groups: {{a: {{count: 1}}, b: {{count: 1, cost: {own[:-1]}, num_gpus: 4}}}}}}}}"
    )
    group = Setup.of(loaded(tmp_path, LINEAR, groups))
    assert [each.setup.num_gpus for each in group.groups] == [1, 4]
    hashes = [*identity(setup)["own"], *identity(group)["own"]]
    assert len(hashes) == 2 and len(set(hashes)) == 1 and hashes[0]


def test_a_plan_offers_gpus_whose_cost_is_one_s_own(tmp_path: Path) -> None:
    """Beside others, as many GPUs as it says."""
    own = OWN.replace("ABOVE", "3")[:-1] + ", num_gpus: 2}"
    other = f"{{cost: {LINEAR}, price: 1/h, kv_tokens: 9000}}"
    offers = f"{{mine: {{cost: {own}, price: 2/h, kv_tokens: 20000}}, other: {other}}}"
    plan = f"plan: {{target: {{rate: 8/s}}, currency: USD, router: random, max_replicas: 9, gpus: {offers}}}\n"
    text = SCENARIO.replace("kv: {tokens: 20000}\n", "")
    (tmp_path / "plan.yaml").write_text(f"{text}{plan}", encoding="utf-8")
    file = load_scenario(str(tmp_path / "plan.yaml"), allow_code=True).file
    assert file.plan is not None and [offer.gpus for offer in file.plan.gpus.values()] == [2, 1]


CLASS = """
from batchsim.cost.own_cost import OwnCost
from dataclasses import dataclass
@dataclass(frozen=True)
class Mine(OwnCost):
    def step_ns(self, step):
        {body}
@dataclass(frozen=True)
class Nothing(OwnCost):
    pass
class Other:
    def step_ns(self, step):
        return 1
"""
SAID = "cost: Mine.step_ns gives "
WRONG_ANSWERS = {
    "float": ("return 1e6", SAID + "1000000.0 for a step of "),
    "zero": ("return 0", SAID + "0 for a step of "),
    "negative": ("return -5", SAID + "-5 for a step of "),
    "nothing": ("return None", SAID + "None for a step of "),
    "truth": ("return True", SAID + "True for a step of "),
    "hours": ("return 10**13", SAID + "10000000000000 for a step of "),
    "error": ("return 1 / 0", "fails for a step of num_prefill_tokens "),
    "no such field": ("return step.tokens", "'StepWork' object has no attribute 'tokens'"),
    "exit": ("raise SystemExit(3)", "cost: Mine.step_ns fails for a step of "),
}


@pytest.mark.parametrize(("body", "said"), WRONG_ANSWERS.values(), ids=WRONG_ANSWERS)
def test_what_is_no_duration_is_one_line(tmp_path: Path, request: pytest.FixtureRequest, body: str, said: str) -> None:
    """With the step that was asked for."""
    name = "cost_" + re.sub(r"\W", "_", request.node.name)
    (tmp_path / f"{name}.py").write_text(CLASS.format(body=body), encoding="utf-8")
    setup = Setup.of(loaded(tmp_path, f'{{kind: "{name}:Mine"}}'))
    with pytest.raises(ScenarioError, match=re.escape(said)) as raised:
        simulate_point(setup, setup.scenario.points()[0])
    assert "\n" not in str(raised.value)


WRONG_NAMES = {
    "module": ('{kind: "no_such:Thing"}', "cost no_such:Thing cannot be imported: No module named 'no_such'"),
    "class": ('{kind: "own_cost:Gone"}', "cost own_cost:Gone cannot be imported: AttributeError"),
    "step_ns": ('{kind: "names_cost:Nothing"}', "names_cost:Nothing has no step_ns. Write def step_ns(self, step)"),
    "base": ('{kind: "names_cost:Other"}', "names_cost:Other is no dataclass that derives from OwnCost."),
    "missing": ('{kind: "own_cost:Throttled", base: 1ms}', "cost.per_token is missing. Add it."),
    "unknown": (
        OWN.replace("slowdown", "slow").replace("ABOVE", "3"),
        "cost.slow is not a field of cost. Did you mean",
    ),
    "range": (OWN.replace("ABOVE", "0"), "above is 0. It must be from 1"),
    "unit": (OWN.replace("ABOVE", "3").replace("20ms", "20"), "base"),
    "gpus": (OWN.replace("ABOVE", "3")[:-1] + ", num_gpus: 0}", "num_gpus is 0. It must be from 1 to 1024"),
}


@pytest.mark.parametrize(("cost", "said"), WRONG_NAMES.values(), ids=WRONG_NAMES)
def test_what_is_wrong_with_its_name_or_knobs_is_one_line(tmp_path: Path, cost: str, said: str) -> None:
    """With the place in the scenario."""
    (tmp_path / "names_cost.py").write_text(CLASS.format(body="return 1"), encoding="utf-8")
    with pytest.raises(ScenarioError, match=re.escape(said)) as raised:
        loaded(tmp_path, cost)
    assert str(raised.value).startswith(f"{tmp_path / 'some.yaml'}:3")
    assert len(raised.value.lines) == str(raised.value).count("\n") + 1


def test_its_code_runs_only_where_it_is_allowed(tmp_path: Path) -> None:
    """To import a module is to run it; in a group of replicas too."""
    own = OWN.replace("ABOVE", "3")
    groups = f"replicas: {{router: random, groups: {{a: {{count: 1, cost: {own}}}}}}}"
    for cost, more in ((own, ""), (LINEAR, groups)):
        with pytest.raises(ScenarioError, match="own_cost:Throttled is code of its own, which a scenario runs only"):
            loaded(tmp_path, cost, more, allow_code=False)
