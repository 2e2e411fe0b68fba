"""Host, kernels and the way there by engine and mode: which apply to what, and that headings say so."""

from pathlib import Path

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.cost.in_engine import measured_of
from batchsim.cost.presets import PRESETS, preset_of, under_preset
from batchsim.cost.scaled import Scaled
from batchsim.kernel.batch import Batch
from batchsim.results.heading import heading, measured_at
from batchsim.scenario.parse import parse_scenario
from batchsim.scenario.setup import Setup
from batchsim.workload.workload_config import Frontend
from tests.unit.cost.test_cost import step

MS = 1_000_000
TEXT = """
model: meta-llama/Llama-3.1-8B
deployment: {engine: vllm, gpu: h100}
workload:
  arrivals: {kind: closed_loop, users: 4, think_time: 0s}
  lengths: {prompt: {kind: fixed, tokens: 256}, output: {kind: fixed, tokens: 32}}
  output_cap: exact
  requests: 40
max_model_len: 4096
slo: ttft<1s @ 90%
"""
BIG = TEXT.replace("Llama-3.1-8B", "Llama-3.1-70B").replace("gpu: h100", "gpu: h100, tp: 2, weights: fp8")


def setup_of(*overrides, text=TEXT):
    return Setup.of(parse_scenario(text, "some.yaml", Path(), overrides))


def under(setup):
    return setup.cost_under(setup.scenario.specs[0].config)


def test_each_engine_and_mode_has_its_own_with_evidence():
    """No two are of the same engine and mode, and each names what it was fitted to."""
    assert len({(preset.engine, preset.ahead) for preset in PRESETS}) == len(PRESETS)
    assert all(preset.evidence for preset in PRESETS)
    assert preset_of("vllm", ahead=True) != preset_of("vllm", ahead=False)
    assert preset_of("tgi", ahead=False) is None


def test_a_deployment_takes_the_preset_of_the_mode_of_each_policy():
    """vLLM's host is hidden ahead of results; in lockstep it costs more."""
    setup = setup_of(
        "policies={vllm: {async_scheduling: true}, continuous: {max_num_seqs: 8, max_num_batched_tokens: 512}}"
    )
    ahead, sync = (setup.cost_under(spec.config) for spec in setup.scenario.specs)
    for cost, preset in ((ahead, preset_of("vllm", ahead=True)), (sync, preset_of("vllm", ahead=False))):
        assert preset is not None and preset.host is not None
        assert cost.profile.costs.host == preset.host
        assert str(preset) in heading(setup) and any(str(preset) in line for line in cost.sources())
        assert "its host is a preset's" in cost.error.source
    assert "its host is assumed" in setup.cost.error.source


def test_kernels_that_were_not_measured_in_the_engine_are_the_tables_and_the_heading_says_so():
    """No factor is taken from another GPU, type or model, and no error is claimed for them."""
    setup = setup_of("policies={vllm: {async_scheduling: true}}")
    assert "no measurement of this GPU, type and model" in heading(setup)
    assert "%" not in heading(setup).partition("host: preset")[2].partition("measured at")[0]
    assert under(setup).profile.costs.layers == setup.cost.profile.costs.layers
    assert under(setup).profile.costs.decode == setup.cost.profile.costs.decode


def test_kernels_measured_on_this_gpu_with_this_type_and_model_are_as_long_as_there():
    """Decodes and prompts each by their own factor, with the error that is left; another type has none of it."""
    ahead = "vllm: {async_scheduling: true}"
    setup = setup_of(f"policies={{{ahead}, sync: {{kind: vllm, async_scheduling: false}}}}", text=BIG)
    measured = measured_of(setup.cost.profile)
    assert measured is not None and measured.decode != measured.prompts and str(measured) in heading(setup)
    costs, tables = under(setup).profile.costs, setup.cost.profile.costs
    assert costs.layers.at_one(512) == pytest.approx(measured.prompts * tables.layers.at_one(512))
    assert costs.decode.at_one(8) == pytest.approx(measured.decode * tables.decode.at_one(8))
    assert costs.decode_attention.ns[3][3] == pytest.approx(measured.decode * tables.decode_attention.ns[3][3])
    beside = costs.beside * costs.decode_attention.ns[3][3]
    assert beside == pytest.approx(measured.prompts * tables.beside * tables.decode_attention.ns[3][3])
    error = under(setup).error
    assert error.high == measured.tpot[1] and f"{measured.points} measured points" in error.source
    sync = setup.cost_under(setup.scenario.specs[1].config)
    assert sync.profile.costs.layers == tables.layers and "kernels differ so" in sync.error.source
    assert setup.cost_error == sync.error and setup_of(f"policies={{{ahead}}}", text=BIG).cost_error == error
    other = setup_of("deployment.weights=bfloat16", "deployment.tp=4", "policies={vllm: {}}", text=BIG)
    assert measured_of(other.cost.profile) is None and "no measurement of this GPU, type" in heading(other)


def test_a_stated_host_and_costs_of_other_origin_have_no_preset():
    """What the scenario states counts, and a roofline or a stated cost is nobody's kernel table."""
    stated = setup_of("deployment.host={base: 2ms}")
    assert under(stated) is stated.cost and "preset" not in heading(stated)
    flat = setup_of(text=TEXT.replace("deployment: {engine: vllm, gpu: h100}", "cost: {kind: constant, step: 5ms}")
                    + "policies: {vllm: {}}\nkv: {tokens: 9999}\n")  # fmt: skip
    assert under_preset(flat.cost, PRESETS[0]) is flat.cost


def test_the_preset_reaches_below_a_stretched_cost():
    """cost_factor stretches kernels and host of the preset alike."""
    cost, preset = under(setup_of("cost_factor=2")), preset_of("vllm", ahead=True)
    assert isinstance(cost, Scaled) and preset is not None and cost.cost.profile.costs.host == preset.host
    assert cost.step_ns(Batch(None, [], 0)) == 2 * cost.cost.step_ns(Batch(None, [], 0))


def test_the_way_to_an_engine_goes_by_its_name():
    """`workload.frontend: vllm` is written out, and the heading says whose preset it is."""
    setup = setup_of("workload.frontend=vllm")
    assert setup.scenario.file.workload.frontend == Frontend(7_500_000, 4_500, per_stream=600_000)
    assert measured_at(setup) == "client, front end by the preset of vllm"
    assert measured_at(setup_of("workload.frontend={request: 1ms}")) == "client, front end modelled"
    with pytest.raises(ScenarioError, match=r"frontend is 'vlm'. Did you mean vllm"):
        setup_of("workload.frontend=vlm")


@pytest.mark.parametrize("ahead", [True, False])
def test_an_anchor_stretches_decodes_and_says_so(ahead):
    """Of a GPU, type and model that were never measured in the engine, too, and in lockstep: a time per output token
    says nothing of prompts, which take as long as before."""
    policies = f"policies={{vllm: {{async_scheduling: {str(ahead).lower()}}}}}"
    plain, found = setup_of(policies), setup_of(policies, "deployment.anchor={concurrency: 4, tpot: 12ms}")
    assert measured_of(plain.cost.profile) is None
    before, after = under(plain), under(found)
    prompt, decodes = step(chunks=[(0, 200)]), step([1000] * 4)
    assert after.step_ns(prompt) == before.step_ns(prompt)
    longer_ns = after.step_ns(decodes) - before.step_ns(decodes)
    assert longer_ns > MS
    factor = 1 + longer_ns / before.without_host().step_ns(decodes)
    said = "anchored to tpot 12 ms at concurrency 4: steps of decodes × "
    (line,) = (line for line in found.cost.sources() if said in line)
    assert "kernels as the tables have them, then anchored: no measurement" in heading(found)
    assert line in heading(found) and float(line.removeprefix(said)) == pytest.approx(factor, rel=2e-3)


def test_an_anchor_that_decodes_cannot_meet_stretches_every_step():
    """With long prompts and short answers a token takes what prompts beside it take; so it does over PCIe, where no
    step's error is known."""
    long = TEXT.replace("tokens: 256", "tokens: 6000").replace("len: 4096", "len: 8192")
    found = setup_of("deployment.anchor={concurrency: 16, tpot: 22ms}", text=long)
    assert isinstance(found.cost, Scaled) and 0.3 < found.cost.factor < 0.6
    pcie = TEXT.replace("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B").replace("gpu: h100", "gpu: l40s, tp: 2")
    cards = setup_of("deployment.anchor={concurrency: 4, tpot: 80ms}", text=pcie)
    assert isinstance(cards.cost, Scaled) and cards.cost.factor > 1


def test_an_anchor_of_an_engine_without_a_preset_stretches_every_step():
    """Half as slow again as simulated at four users is found as a factor, in the heading and the sources."""
    sync = ("deployment.engine=sglang", "policies={sglang: {disable_overlap_schedule: true}}")
    plain = setup_of(*sync)
    anchored = setup_of(*sync, "deployment.anchor={concurrency: 4, tpot: 12ms}")
    cost = anchored.cost
    assert isinstance(cost, Scaled) and 1.2 < cost.factor < 3
    assert f"× {cost.factor:.4g}: anchored to tpot 12 ms at concurrency 4" in heading(anchored)
    assert any(line.startswith("anchor: every step's time ×") for line in cost.sources())
    assert cost.recompute_ns(512) == pytest.approx(cost.factor * plain.cost.recompute_ns(512), rel=1e-6)


def test_an_anchor_of_measured_kernels_changes_decodes_alone():
    """Prompts have a measurement of their own, which one point of TPOT says nothing of."""
    plain = setup_of("policies={vllm: {async_scheduling: true}}", text=BIG)
    found = setup_of(
        "policies={vllm: {async_scheduling: true}}", "deployment.anchor={concurrency: 4, tpot: 40ms}", text=BIG
    )
    before, after = under(plain).profile.costs, under(found).profile.costs
    assert after.layers == before.layers and after.chunk_grid == before.chunk_grid
    factor = after.decode.at_one(4) / before.decode.at_one(4)
    assert factor > 1.1 and f"steps of decodes × {factor:.4g}" in heading(found)
    assert after.beside * after.decode_attention.ns[3][3] == pytest.approx(
        before.beside * before.decode_attention.ns[3][3]
    )


def test_an_anchor_shifts_the_decodes_of_an_engine_whose_tables_are_off_by_a_constant():
    """TensorRT-LLM's: at 4 and at 64 rows steps change by the same, and prompts take as long as before."""
    text = BIG.replace("vllm, gpu: h100, tp: 2", "tensorrt_llm, gpu: h200, tp: 4")
    more = ("deployment.kv=fp8", "policies={tensorrt_llm: {}}")
    plain = setup_of(*more, text=text)
    found = setup_of(*more, "deployment.anchor={concurrency: 4, tpot: 9ms}", text=text)
    before, after = under(plain).profile.costs, under(found).profile.costs
    assert after.layers == before.layers and after.decode_attention == before.decode_attention
    shifts = [after.decode.at_one(rows) - before.decode.at_one(rows) for rows in (4, 64)]
    assert shifts[0] == pytest.approx(shifts[1]) and abs(shifts[0]) > 0.3 * MS
    assert f"anchored to tpot 9 ms at concurrency 4: steps of decodes {shifts[0] / MS:+.3g} ms".replace(
        "-", "−"
    ) in heading(found)


def test_an_anchor_needs_a_policy_of_its_engine():
    """The point was measured under the deployment's engine, not under another's scheduler."""
    with pytest.raises(ScenarioError, match=r"concurrency 4 was measured under vllm, which no policy is. Add vllm"):
        setup_of("deployment.anchor={concurrency: 4, tpot: 12ms}", "policies={tgi: {}}")


def test_groups_and_varied_deployments_name_all_their_presets():
    """A fleet of two engines' deployments has one of each in its heading; so has a key that is varied."""
    groups = "{a: {count: 1}, b: {count: 1, deployment: {engine: vllm, gpu: h200}}}"
    fleet = setup_of(
        f"replicas={{router: round_robin, groups: {groups}}}", "policies={vllm: {async_scheduling: false}}"
    )
    sync, ahead = (preset_of("vllm", ahead=ahead) for ahead in (False, True))
    assert heading(fleet).count(str(sync)) == 1 and str(ahead) not in heading(fleet)
    varied = setup_of("vary={policies.vllm.async_scheduling: [true, false]}", "policies={vllm: {}}")
    assert all(heading(varied).count(str(preset)) == 1 for preset in (sync, ahead))


def test_a_heading_says_of_which_value_its_gpu_and_cost_are():
    """Where what varies may change them; a knob of a policy does not."""
    says = "GPU and cost are those of the first value of deployment.gpu"
    assert says in heading(setup_of("vary={deployment.gpu: [h100_sxm, h200]}"))
    assert "first value" not in heading(setup_of("vary={policies.vllm.max_num_seqs: [8, 16]}"))


def test_a_heading_names_each_engine_whose_kernels_another_ones_policy_has():
    """Of a group of replicas and of a value that varies too."""
    groups = "{a: {count: 1}, b: {count: 1, deployment: {engine: sglang, gpu: h100}}}"
    fleet = setup_of("policies={vllm: {}}", f"replicas={{router: round_robin, groups: {groups}}}")
    varied = setup_of("policies={vllm: {}}", "vary={deployment.engine: [vllm, sglang]}")
    assert all(heading(setup).count("vllm: with sglang's kernels") == 1 for setup in (fleet, varied))
    assert "with vllm's kernels" not in heading(fleet) and "with" not in heading(setup_of("policies={vllm: {}}"))
