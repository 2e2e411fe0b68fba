"""Costs taken apart for engines that schedule ahead of results: the host's part and the device's, by stage."""

from __future__ import annotations

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.cost.calibrated import Calibrated
from batchsim.cost.constant import Linear
from batchsim.cost.host_config import HostCost
from batchsim.cost.profile import HostTerm, load_profile
from batchsim.cost.roofline import Roofline
from batchsim.cost.scaled import Scaled
from batchsim.cost.work import columns_of
from batchsim.deployment.catalog import GPUS, MODELS
from batchsim.deployment.deployment import Deployment
from batchsim.scenario import load_scenario
from batchsim.scenario.setup import Setup
from tests.unit.cost.test_cost import BATCHES

LLAMA, H100 = MODELS["llama-3.1-8b"], GPUS["h100"]
HOST = HostCost(600_001, 2_000, 30)
COSTS = {
    "roofline": Roofline(LLAMA, H100, host=HOST),
    "profile": Calibrated(
        load_profile("llama-3.1-8b-h100-vllm-0.24.0"), host=HostTerm(600_001, 2_000, 30, "serial", True)
    ),
    "stretched": Scaled(Roofline(LLAMA, H100, host=HOST), 1.5),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("cost", COSTS)
def test_host_and_device_sum_to_the_step(cost: str, batch: str) -> None:
    """To the rounding of each; the host's part lies half before the launch, the odd ns and half after the end."""
    whole, lanes = COSTS[cost], COSTS[cost].lanes()
    before_ns, after_ns = lanes.host_ns(BATCHES[batch])
    assert before_ns >= 300_000 and 0 <= after_ns - before_ns <= 1
    assert abs(lanes.device_ns(BATCHES[batch]) + before_ns + after_ns - whole.step_ns(BATCHES[batch])) <= 2
    assert lanes.host_ns(None) == (0, 0)


def test_a_stated_cost_has_no_host() -> None:
    """All of its time is the device's."""
    lanes = Linear(1000, per_token=3).lanes()
    assert lanes.host_ns(BATCHES["mixed"]) == (0, 0)
    assert lanes.device_ns(BATCHES["mixed"]) == Linear(1000, per_token=3).step_ns(BATCHES["mixed"])


@pytest.mark.parametrize("pp", [2, 4])
def test_stages_share_the_layers_and_the_last_one_samples(pp: int) -> None:
    """All but the last send their hidden states on; less that, the stages sum to the step on the device."""
    cost, batch = Roofline(LLAMA, H100, pp=pp), BATCHES["mixed"]
    *others, last = cost.lanes().stages_ns(batch)
    assert len(others) == pp - 1 and len(set(others)) == 1
    tokens, rows = batch.num_decode_tokens + batch.num_prefill_tokens, batch.num_decode_tokens + len(batch.chunks)
    sent_ns = H100.peer_latency_ns + tokens * LLAMA.hidden_size * 2 / H100.peer_link * 1e9
    assert cost.transfer_ns(tokens) == pytest.approx(sent_ns)
    assert last - (others[0] - sent_ns) == pytest.approx(cost.head_ns(rows), abs=3)
    device_ns = Roofline(LLAMA, H100, host=HostCost(0, 0, 0)).step_ns(batch)
    assert sum(others) + last - (pp - 1) * sent_ns == pytest.approx(device_ns, abs=2 * pp)


def test_the_kv_pool_of_a_pipeline_is_that_of_the_stage_with_the_output_matrix() -> None:
    """Each stage has half of the layers and of a token's KV; the last one the matrix of the vocabulary besides."""
    two = Deployment(LLAMA, H100, pp=2)
    norm = LLAMA.hidden_size  # the last, beside the output matrix
    layers = LLAMA.num_parameters - 2 * LLAMA.head_parameters - norm
    assert two.weight_bytes == 2 * (layers // 2 + LLAMA.head_parameters + norm)
    free_bytes = int(H100.memory_bytes * 0.9) - two.weight_bytes - 2_600_000_000
    assert two.derive_kv().num_blocks == free_bytes // (LLAMA.kv_bytes_per_token // 2 * 16)
    assert (two.num_gpus, Deployment(LLAMA, H100, tp=2, pp=2).num_gpus) == (2, 4)


@pytest.mark.parametrize(("knob", "message"), [("pp", "a pipeline can"), ("tp", "several GPUs can")])
def test_several_gpus_are_no_real_run(knob: str, message: str) -> None:
    """Nothing that runs a model would have them: refused where a scenario is validated or run live."""
    overrides = [f"cost={{kind: roofline, gpu: h100, {knob}: 2}}", "policies={vllm: {}}"]
    scenario = load_scenario("bursty", overrides=overrides)
    with pytest.raises(ScenarioError, match=rf"^--set cost=.*{knob} 2: {message} only be simulated.* Set it to 1\.$"):
        Setup.of(scenario).check_can_be_real()


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("{kind: continuous, max_num_seqs: 8, max_num_batched_tokens: 64}", "continuous runs one batch at a time"),
        (
            "{kind: vllm, speculative_config: {method: eagle, num_speculative_tokens: 2, acceptance: 0.5}}",
            "speculative_config in a pipeline is not simulated",
        ),
    ],
)
def test_who_cannot_fill_a_pipeline_is_refused(policy: str, message: str) -> None:
    """Before anything is simulated, in one line that begins with the setting that asked for it."""
    overrides = ["cost={kind: roofline, gpu: h100, pp: 2}", f"policies={{it: {policy}}}"]
    with pytest.raises(ScenarioError, match=f"^--set policies=.*{message}"):
        Setup.of(load_scenario("bursty", overrides=overrides))


def test_unequal_stages_take_as_much_as_they_have_layers() -> None:
    """Of 32 layers three stages have 11, 11 and 10, by vLLM's rule; recorded steps are cut alike."""
    cost, batch = Roofline(LLAMA, H100, deployment=Deployment(LLAMA, H100, "vllm", pp=3)), BATCHES["mixed"]
    first, second, last = (float(ns) for ns in cost.lanes().stages_ns(batch))
    tokens, rows = batch.num_decode_tokens + batch.num_prefill_tokens, batch.num_decode_tokens + len(batch.chunks)
    sent_ns, body_ns = cost.transfer_ns(tokens), cost.without_host().step_ns(batch) - cost.head_ns(rows)
    assert first == second == pytest.approx(body_ns * 11 / 32 + sent_ns, abs=2)
    assert last == pytest.approx(body_ns * 10 / 32 + cost.head_ns(rows), abs=2)
    recorded = cost.lanes().stages_of(columns_of(batch))[0]
    assert recorded == pytest.approx([first, second, last], abs=2)
