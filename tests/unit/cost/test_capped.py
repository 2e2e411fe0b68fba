"""A power cap: how much longer a step takes by the law, and whatever can be wrong with one."""

from __future__ import annotations

import re

import pytest

from batchsim.base.errors import BatchsimError
from batchsim.cost.capped import Capped, capped
from batchsim.cost.cost_error import Unknown
from batchsim.cost.fitted import StepTerms
from batchsim.cost.power import POWER_LAWS, PowerLaw
from batchsim.cost.roofline import Roofline
from batchsim.cost.roofline_config import RooflineConfig
from batchsim.cost.work import TIME_TERMS, columns_of
from batchsim.deployment.catalog import GPUS, MODELS
from batchsim.drive.simulate import simulate
from batchsim.fit.engine_fit import check_fits
from batchsim.scenario.fitted_config import FittedConfig
from batchsim.scenario.point import simulate_point
from batchsim.testing.by_hand import same
from tests.support.scenarios import setup_of
from tests.unit.cost.test_cost import BATCHES, step

LLAMA, H100 = MODELS["llama-3.1-8b"], GPUS["h100"]
ROOFLINE, LAW = Roofline(LLAMA, H100), POWER_LAWS["h100"]
PROMPT = step(chunks=[(0, 4000)])
TEXT = """\
model: llama-3.1-8b
cost: {kind: roofline, gpu: h100}
kv: {tokens: 100000}
workload:
  arrivals: {kind: poisson, mean_rate: 6/s}
  lengths: {prompt: {kind: uniform, min: 10, max: 900}, output: {kind: uniform, min: 2, max: 90}}
  output_cap: 90
  duration: 3s
policies:
  vllm: {async_scheduling: true}
slo: ttft<1s @ 90%
"""


def test_a_step_above_the_cap_runs_at_the_cube_root_of_what_is_left_above_idle() -> None:
    """Of a law by which every step draws 100 W at rest and 600 W else, a cap of 500 W leaves 4/5 of the dynamic power:
    arithmetic takes (5/4)^(1/3) times as long, and the rest as long as before."""
    cost = Capped(ROOFLINE, 500, PowerLaw(100, 600, 0, 0, 700, ""))
    before, after = (each.explain(columns_of(PROMPT)) for each in (ROOFLINE, cost))
    for name in TIME_TERMS:
        slower = 1.25 ** (1 / 3) if name in ("matmul", "attention") else 1
        assert after[name][0] == pytest.approx(slower * before[name][0])
    added = (1.25 ** (1 / 3) - 1) * (before["matmul"][0] + before["attention"][0])
    assert cost.step_ns(PROMPT) == pytest.approx(ROOFLINE.step_ns(PROMPT) + added, abs=2)
    assert added > 0.05 * ROOFLINE.step_ns(PROMPT)


def test_a_step_below_the_cap_takes_as_long_as_without_it() -> None:
    """One decode draws less than 600 W, a long prompt the limit of 700 W; under the limit nothing changes at all."""
    cost = Capped(ROOFLINE, 600, LAW)
    assert cost.step_ns(BATCHES["one decode"]) == ROOFLINE.step_ns(BATCHES["one decode"])
    assert cost.step_ns(PROMPT) > ROOFLINE.step_ns(PROMPT)
    assert capped(ROOFLINE, 700) is ROOFLINE and capped(ROOFLINE, None) is ROOFLINE


@pytest.mark.parametrize("name", BATCHES)
def test_the_explained_parts_add_up_to_the_step(name: str) -> None:
    """`explain` on a recorded row and `step_ns` on the batch tell the same duration, with and without the host."""
    for cost in (Capped(ROOFLINE, 500, LAW), Capped(ROOFLINE, 500, LAW).without_host()):
        terms = cost.explain(columns_of(BATCHES[name]))
        assert abs(sum(terms[term][0] for term in TIME_TERMS) - cost.step_ns(BATCHES[name])) <= 2


def test_the_lower_the_cap_the_longer_a_step_and_the_less_its_energy() -> None:
    """Down to the least cap; the energy of a prompt's step falls as the cap is lowered, though it takes longer."""
    caps = (700, 650, 600, 550, 500, 490)
    ns = [capped(ROOFLINE, cap).step_ns(PROMPT) for cap in caps]
    joules = [cap * each for cap, each in zip(caps, ns, strict=True)]
    assert ns == sorted(ns) and len(set(ns)) == len(ns)
    assert joules == sorted(joules, reverse=True)


def test_leaps_under_a_cap_are_the_steps() -> None:
    """A run that leaps and one that steps leave the same records; some steps are slower than without the cap."""
    records = []
    for leap, cap in ((True, ", power_cap: 500W"), (False, ", power_cap: 500W"), (True, "")):
        setup = setup_of(TEXT.replace("gpu: h100", f"gpu: h100{cap}"))
        point = setup.scenario.points()[0]
        workload = setup.workload(point.load, point.seed)
        core = setup.engine(point.spec, workload)
        simulate(core, workload, leap=leap)
        records.append(core.recorder.records())
    leapt, stepped, free = records
    same(leapt, stepped)
    assert leapt.requests["ended_ns"].sum() > free.requests["ended_ns"].sum()


def test_a_run_under_a_cap_draws_no_more_than_that_in_any_step() -> None:
    """By the power that metrics are made of; without the cap some steps draw more."""
    from batchsim.results.fleet_inputs import cost_terms, step_watts

    most = []
    for cap in ("", ", power_cap: 500W"):
        setup = setup_of(TEXT.replace("gpu: h100", f"gpu: h100{cap}"))
        run = simulate_point(setup, setup.scenario.points()[0])
        watts = step_watts(setup, run.records, cost_terms(setup, run.records, run.point.spec.config))
        assert watts is not None
        most.append(watts.max())
    assert most[0] > 600 and most[1] == 500


def test_step_times_under_a_cap_claim_no_error() -> None:
    """The law was compared with no measurement of the GPU, which the heading and the sources say."""
    cost = capped(ROOFLINE, 500)
    assert isinstance(cost.error, Unknown) and "power cap of 500 W" in cost.error.source
    assert "capped at 500 W a GPU" in cost.describe()
    assert cost.sources()[-1].startswith("power cap 500 W: arithmetic slowed by the cube root")
    assert (cost.deployment, cost.reach, cost.profile) == (ROOFLINE.deployment, None, None)


GPU = "{kind: roofline, gpu: h100}"
CAPPED = TEXT.replace("gpu: h100", "gpu: h100, power_cap: 500W")
SHEET = "{engine: vllm, power_cap: 500W, gpu: {kind: sheet, memory: 80GB, bandwidth: 3350GB/s, bf16: 989TFLOP/s}}"
MISTAKES = {
    # what the cost is, what the line says
    "no_unit": (
        GPU.replace("}", ", power_cap: 500}"),
        "mine.yaml:2: cost.power_cap: 500 is not a power. Write a number",
    ),
    "wrong_unit": (GPU.replace("}", ", power_cap: 500J}"), "'500J' has no known unit of a power. Write one of W, kW"),
    "watt_in_words": (GPU.replace("}", ", power_cap: 500 watt}"), "has no known unit of a power. Write one of W, kW"),
    "negative": (GPU.replace("}", ", power_cap: -500W}"), "'-500W' is negative. A power is 0 or more."),
    "zero": (GPU.replace("}", ", power_cap: 0W}"), "power_cap is 0W. It must be from 1W to"),
    "a_list": (GPU.replace("}", ", power_cap: [500W]}"), "['500W'] is not a power. Write a number with a unit"),
    "too_low": (
        GPU.replace("}", ", power_cap: 300W}"),
        "mine.yaml:2: power_cap: 300 W is not from 490 W to 700 W, 70 %",
    ),
    "too_high": (GPU.replace("}", ", power_cap: 1kW}"), "1000 W is not from 490 W to 700 W, 70 % to all of the limit"),
    "pipeline": (GPU.replace("}", ", pp: 2, power_cap: 500W}"), "pp 2: steps of a pipeline overlap, and no law says"),
    "no_law": (
        "{kind: roofline, gpu: b300_sxm, power_cap: 900W}",
        "there is no power law for b300_sxm. Leave power_cap",
    ),
    "misspelt": (GPU.replace("}", ", powercap: 500W}"), "powercap is not a field of cost. Did you mean power_cap?"),
    "of_a_stated_cost": ("{kind: linear, base: 5ms, power_cap: 500W}", "power_cap is not a field of cost"),
    "of_a_profile": ("{kind: profile, profile: x.json, power_cap: 500W}", "power_cap is not a field of cost"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_cap_is_one_line_that_says_what_to_do(name: str) -> None:
    cost, expected = MISTAKES[name]
    with pytest.raises(BatchsimError, match=re.escape(expected)) as caught:
        setup_of(TEXT.replace(GPU, cost))
    assert "\n" not in str(caught.value)


def test_a_cap_on_a_sheet_or_a_real_run_is_refused() -> None:
    """A sheet states no power; a real GPU is capped by its driver."""
    text = TEXT.replace(f"cost: {GPU}", f"deployment: {SHEET}")
    with pytest.raises(BatchsimError, match="there is no power law for own-gpu"):
        setup_of(text)
    setup = setup_of(CAPPED)
    with pytest.raises(BatchsimError, match=r"mine.yaml:2: power_cap 500W can only be simulated: .* nvidia-smi -pl"):
        setup.check_can_be_real()


def test_a_cap_where_steps_were_measured_is_refused() -> None:
    """They ran under a cap of their own: no fit is made with one, and none has a kernel with one."""
    with pytest.raises(BatchsimError, match=r"mine.yaml:2: power_cap slows steps, and measured ones ran"):
        check_fits(setup_of(CAPPED))
    kernel = RooflineConfig("h100", power_cap=500)
    with pytest.raises(BatchsimError, match="power_cap of a fit's kernel is in what was measured already"):
        FittedConfig(StepTerms(kernel=1.1), kernel=kernel).build(LLAMA)
