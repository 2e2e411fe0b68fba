"""Host, kernels and the way there by engine and mode: which apply to what, and that headings say so."""

from pathlib import Path

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.cost import Scaled
from batchsim.cost.presets import PRESETS, preset_of, under_preset
from batchsim.kernel.types import Batch
from batchsim.results.heading import heading, measured_at
from batchsim.scenario.load import parse_scenario
from batchsim.scenario.point import Setup
from batchsim.workload.workload_config import Frontend

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
    """vLLM's host is hidden, and kernels are slower, ahead of results; in lockstep it costs more."""
    setup = setup_of(
        "policies={vllm: {async_scheduling: true}, continuous: {max_num_seqs: 8, max_num_batched_tokens: 512}}"
    )
    ahead, sync = (setup.cost_under(spec.config) for spec in setup.scenario.specs)
    for cost, preset in ((ahead, preset_of("vllm", ahead=True)), (sync, preset_of("vllm", ahead=False))):
        assert preset is not None and preset.host is not None
        assert cost.profile.costs.host == preset.host
        assert cost.profile.costs.in_situ == preset.in_situ
        assert str(preset) in heading(setup) and any(str(preset) in line for line in cost.sources())
        assert f"kernels × {preset.in_situ:g}" in str(preset) or preset.in_situ == 1
        assert "its host is a preset's" in cost.error.source
    assert "its host is assumed" in setup.cost.error.source
    kernels = [cost.without_host().recompute_ns(512) for cost in (ahead, sync)]
    assert kernels[0] == pytest.approx(1.1 * kernels[1], rel=1e-6)


def test_a_stated_host_and_costs_of_other_origin_have_no_preset():
    """What the scenario states counts, and a roofline or a stated cost is nobody's kernel table."""
    stated = setup_of("deployment.host={base: 2ms}")
    assert under(stated) is stated.cost and "preset" not in heading(stated)
    flat = setup_of(text=TEXT.replace("deployment: {engine: vllm, gpu: h100}", "cost: {kind: constant, step: 5ms}")
                    + "policies: {vllm: {}}\nkv: {tokens: 9999}\n")  # fmt: skip
    assert under_preset(flat.cost, PRESETS[0]) is flat.cost


def test_the_preset_reaches_below_a_stretched_cost():
    """cost_factor stretches kernels and host of the preset alike."""
    cost = under(setup_of("cost_factor=2"))
    assert isinstance(cost, Scaled) and cost.cost.profile.costs.in_situ == 1.1
    assert cost.step_ns(Batch(None, [], 0)) == 2 * cost.cost.step_ns(Batch(None, [], 0))


def test_the_way_to_an_engine_goes_by_its_name():
    """`workload.frontend: vllm` is written out, and the heading says whose preset it is."""
    setup = setup_of("workload.frontend=vllm")
    assert setup.scenario.file.workload.frontend == Frontend(13 * MS, 6_000)
    assert measured_at(setup) == "client, front end by the preset of vllm"
    assert measured_at(setup_of("workload.frontend={request: 1ms}")) == "client, front end modelled"
    with pytest.raises(ScenarioError, match=r"frontend is 'vlm'. Did you mean vllm"):
        setup_of("workload.frontend=vlm")


def test_an_anchor_stretches_steps_and_says_so():
    """Half as slow again as simulated at four users is found as a factor, in the heading and the sources."""
    plain = setup_of()
    anchored = setup_of("deployment.anchor={concurrency: 4, tpot: 12ms}")
    cost = anchored.cost
    assert isinstance(cost, Scaled) and 1.2 < cost.factor < 3
    assert f"× {cost.factor:.4g}: anchored to tpot 12 ms at concurrency 4" in heading(anchored)
    assert any(line.startswith("anchor: every step's time ×") for line in cost.sources())
    assert cost.recompute_ns(512) == pytest.approx(cost.factor * plain.cost.recompute_ns(512), rel=1e-6)


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
