"""What drafters take of the GPU's memory beside the model that they draft for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.deployment.catalog import GPUS, MODELS
from batchsim.deployment.deployment import Deployment
from batchsim.deployment.draft_memory import draft_memory
from batchsim.deployment.model import ModelSpec
from batchsim.deployment.models import read_model
from batchsim.scenario import load_scenario
from batchsim.scenario.setup import Setup
from tests.unit.deployment.test_deployment import DEEPSEEK

LLAMA, H100 = MODELS["llama-3.1-8b"], GPUS["h100"]
LAYER = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14_336 + 2 * 4096


def test_a_head_has_a_layer_and_what_joins_it() -> None:
    """EAGLE shares embedding and output matrix; EAGLE-3 reads two rows and writes 32,000 words of its own."""
    engine = Deployment(LLAMA, H100, "vllm", "0.19")
    assert draft_memory(engine, "eagle") == (2 * (LAYER + 2 * 4096 * 4096), 4096, 1)
    wider, words = 4096 * (4096 + 2 * 1024) // 2 + 4096 * 4096 // 2, 32_000 * 4096
    assert draft_memory(engine, "eagle3") == (2 * (LAYER + wider + 3 * 4096 * 4096 + words), 4096, 1)
    two = draft_memory(engine, "eagle", layers=2, words=1000)
    assert two == (2 * (2 * LAYER + 2 * 4096 * 4096 + 1000 * 4096), 8192, 2)
    assert draft_memory(engine, "ngram") is None and draft_memory(engine, "draft_model") is None


def test_multi_token_prediction_is_a_layer_like_the_last_with_its_experts() -> None:
    """In the checkpoint's types, here FP8, and with the latent KV of a layer."""
    spec = ModelSpec.from_config(DEEPSEEK, "d")
    engine = Deployment(spec, GPUS["h200"], "vllm", "0.19", tp=8, ep=8)
    found = draft_memory(engine, "mtp")
    assert found is not None and found.token_bytes == (512 + 64) * 2
    experts = 256 // 8 * 3 * 7168 * 2048
    assert experts < found.weight_bytes < experts * 1.5


def test_a_hybrid_predicts_further_tokens_with_attention_and_experts() -> None:
    """Nemotron's blocks are one or the other, and its last one has no attention: its head has both."""
    super_120b = read_model("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8")
    drafter = draft_memory(Deployment(super_120b, GPUS["h200"], "vllm", "0.33", tp=4, ep=4), "mtp")
    experts = 512 // 4 * 2 * 1024 * 2688
    assert drafter is not None and drafter.token_bytes == 2 * 128
    assert experts < drafter.weight_bytes < experts * 1.2


def test_a_model_of_attention_alone_has_a_head_of_attention_alone() -> None:
    nano = read_model("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
    alone = replace(nano, layers=tuple(each for each in nano.kinds if each.attention.kv_elements()))
    drafter = draft_memory(Deployment(alone, GPUS["h200"], "vllm", "0.33"), "eagle")
    attention = alone.kinds[0].weights(nano.hidden_size)
    assert drafter is not None and drafter.weight_bytes == 2 * (sum(attention) + 2 * nano.hidden_size**2)


def test_a_model_of_its_own_shares_nothing() -> None:
    """All of its weights, and a token's KV in each of its layers."""
    engine, own = Deployment(MODELS["llama-3.1-70b"], H100, "vllm", tp=4), LLAMA
    assert draft_memory(engine, "draft_model", own=own) == (Deployment(own, tp=4).weight_bytes, 32 * 4096 // 4, 32)


def test_a_block_has_the_drafters_layers_too() -> None:
    """With EAGLE 33 layers share the room that its weights leave, as in vllm issue 19996: 51.63 GiB, 410,128 tokens."""
    engine = Deployment(LLAMA, H100, "vllm", "0.19")
    draft = draft_memory(engine, "eagle")
    assert draft is not None
    bare, beside = engine.derive_kv(block_size=1), engine.derive_kv(block_size=1, draft=draft)
    assert beside.tokens == pytest.approx((bare.tokens * 131_072 - draft.weight_bytes) / 135_168, abs=1)
    assert int(51.63 * 2**30 / 135_168) // 16 * 16 == 410_128
    assert beside.terms == bare.terms + " − 0.5 drafter"
    reported = replace(engine, version="0.9").derive_kv(step_requests=1024, draft=draft)
    assert reported.tokens == pytest.approx(410_128, rel=0.03)


def test_the_largest_drafter_of_a_scenario_is_taken_off() -> None:
    """By what `draft` says of it; of a draft model that is not named nothing is known, and the terms say so."""
    told = Setup.of(load_scenario("speculative")).kv
    plain = Deployment(LLAMA, H100).derive_kv()
    assert told.terms == f"{plain.terms} − 0.8 drafter" and told.num_blocks == 26_572 < plain.num_blocks
    named = "policies={vllm: {speculative_config: {method: draft_model, num_speculative_tokens: 2, acceptance: 0.7}}}"
    unsaid = Setup.of(load_scenario("speculative", overrides=[named, "cost.draft={draft_model: {base: 1ms}}"])).kv
    assert unsaid.terms == f"{plain.terms}; a draft model, which cost.draft does not name, not counted"
    ngram = named.replace("draft_model", "ngram")
    alone = Setup.of(load_scenario("speculative", overrides=[ngram, "cost.draft={ngram: {base: 1ms}}"])).kv
    assert alone == plain


def test_a_draft_model_that_cannot_be_split_is_one_line() -> None:
    """With its place in the cost."""
    text = "policies={vllm: {speculative_config: {method: draft_model, num_speculative_tokens: 2, acceptance: 0.7}}}"
    with pytest.raises(ScenarioError, match=r"draft_model: model: no-such is neither in the catalog nor a file"):
        Setup.of(load_scenario("speculative", overrides=[text, "cost.draft={draft_model: {model: no-such}}"]))
