"""Useful work of models whose layers are not dense: experts that tokens choose, windows, latent attention, types."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchsim.cost.useful import useful_flops_bytes
from batchsim.cost.work import columns_of
from batchsim.deployment.catalog import MODELS, read_model
from batchsim.deployment.deployment import Deployment
from batchsim.deployment.layers import DenseMlp, GroupedAttention, Layers
from tests.unit.test_cost import step

MIXTRAL = Deployment(read_model("mistralai/Mixtral-8x7B-v0.1"))
LLAMA = Deployment(MODELS["llama-3.1-8b"])


def work(deployment: Deployment, *contexts: int) -> tuple[float, float]:
    """(FLOPs, bytes) of a step of decodes with these contexts."""
    flops, moved = useful_flops_bytes(deployment, columns_of(step(list(contexts))))
    return float(flops[0]), float(moved[0])


def test_dense_layers_are_those_of_the_sheet() -> None:
    """A token does two FLOPs a weight, and reads all of them and its keys and values."""
    model = LLAMA.model
    flops, moved = work(LLAMA, 100, 200)
    weights = model.num_hidden_layers * model.layer_matmul_parameters + model.head_parameters
    assert flops == 2 * 2 * weights + 300 * model.attention_flops_per_pair
    assert moved == 2 * weights + 300 * model.kv_bytes_per_token


def test_a_token_goes_through_its_experts_and_reads_no_others() -> None:
    """Mixtral's 12.9 of 46.7 billion weights for one token; a hundred tokens read nearly all."""
    flops, moved = work(MIXTRAL, 1)
    assert flops / 2 == pytest.approx(12.9e9 - 32_000 * 4_096, rel=0.01)  # less the embedding
    assert moved / 2 == pytest.approx(12.9e9 - 32_000 * 4_096, rel=0.01)
    assert work(MIXTRAL, *[1] * 100)[1] / 2 == pytest.approx(46.7e9 - 32_000 * 4_096, rel=0.01)


def test_types_are_read_as_they_are_kept() -> None:
    """FP8 weights are half the bytes but for the output matrix, which stays; FP8 keys half those of 16 bits."""
    head = LLAMA.model.head_parameters * 2
    (_, whole), (_, half) = work(LLAMA, 1), work(replace(LLAMA, weight_dtype="fp8"), 1)
    kv = LLAMA.model.kv_bytes_per_token
    assert half - head - kv == (whole - head - kv) / 2
    assert work(LLAMA, 9)[1] - work(replace(LLAMA, kv_dtype="fp8"), 9)[1] == 9 * kv / 2


def test_a_window_bounds_what_is_read() -> None:
    """Half of the layers with a window of 64 read 64 keys of a context of 1,000, and all of one of 50."""
    its = LLAMA.model
    shape = (its.num_attention_heads, its.num_key_value_heads, its.head_dim)
    kinds = [
        Layers(16, GroupedAttention(*shape, window=window), DenseMlp(its.intermediate_size)) for window in (64, None)
    ]
    windowed = replace(LLAMA, model=replace(its, layers=tuple(kinds)))
    assert work(windowed, 50) == work(LLAMA, 50)
    less = (1_000 - 64) / 2
    assert work(LLAMA, 1_000)[1] - work(windowed, 1_000)[1] == less * its.kv_bytes_per_token
    assert work(LLAMA, 1_000)[0] - work(windowed, 1_000)[0] == less * its.attention_flops_per_pair


def test_latent_attention_reads_one_vector_a_token() -> None:
    """DeepSeek-V3 reads 576 elements a layer for a token of context, in 16 bits."""
    deepseek = Deployment(read_model("deepseek-ai/DeepSeek-V3"))
    assert work(deepseek, 1_001)[1] - work(deepseek, 1)[1] == pytest.approx(1_000 * 61 * 576 * 2)
