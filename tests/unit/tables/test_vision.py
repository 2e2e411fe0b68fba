"""Times of vision towers from kernel tables, held against the tables' own sums."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchsim.base.errors import ScenarioError
from batchsim.cost.encoder import VisionTime
from batchsim.cost.interpolation import Curve, Grid
from batchsim.deployment.catalog import GPUS, read_model
from batchsim.deployment.deployment import Deployment
from batchsim.scenario.deployment_config import DeploymentConfig
from batchsim.scenario.parse import parse_scenario
from batchsim.scenario.setup import Setup
from batchsim.tables.modes import NoTablesError
from batchsim.tables.versions import SYSTEMS, version
from batchsim.tables.vision import vision_time
from tests.support.scenarios import setup_of

needs_tables = pytest.mark.skipif(version() is None, reason="the kernel tables are not installed: batchsim[gpus]")

MODEL = "Qwen/Qwen3-VL-8B-Instruct"
ON_H100 = Deployment(read_model(MODEL), GPUS["h100"], engine="vllm")
SCENARIO = f"""\
model: {MODEL}
deployment: {{engine: vllm, gpu: h100}}
workload:
  arrivals: {{kind: poisson, mean_rate: 8/s}}
  lengths: {{prompt: {{kind: fixed, tokens: 10}}, output: {{kind: fixed, tokens: 10}}}}
  items: {{tokens: {{kind: fixed, tokens: 64}}}}
  output_cap: 10
  requests: 10
policies: {{vllm: {{}}}}
slo: ttft<1s @ 90%
"""


# ---- the form


def test_images_of_a_step_are_one_call() -> None:
    """Two take less than twice one; each has its part by its size, and a factor is one of all."""
    time = VisionTime(
        Curve((1.0, 100.0), (1_000.0, 2_980.0)),  # 980 and 20 a token
        Grid((1, 4), (10.0, 20.0), ((100.0, 400.0), (250.0, 1_000.0))),
        "",
    )
    assert time.items_ns([[10]]) == [980 + 200 + 100]
    assert time.items_ns([[10, 10]]) == [980 + 400 + 150]
    assert time.items_ns([[10], [20]]) == [(980 + 600) // 3 + 75, 2 * (980 + 600) // 3 + 300]
    assert (time * 2).items_ns([[10], []]) == [2 * 1280, 0]


# ---- the tables


def direct(engine: str, gpu: str, backend: str, tp: int, images: int, tokens: int) -> float:
    """ms of the encoder in a batch of equal images, as the package itself runs the model's."""
    from aiconfigurator_core.sdk.backends.factory import get_backend
    from aiconfigurator_core.sdk.config import RuntimeConfig
    from aiconfigurator_core.sdk.config_builders import build_model_config
    from aiconfigurator_core.sdk.models import get_model
    from aiconfigurator_core.sdk.perf_database import get_database

    degrees: dict[str, Any] = {"tp_size": tp, "pp_size": 1, "attention_dp_size": 1, "moe_tp_size": 1, "moe_ep_size": 1}
    model = get_model(MODEL, build_model_config(**degrees, enable_encoder_dp=False), engine)
    database: Any = get_database(SYSTEMS.get(gpu, gpu), engine, backend)
    asked = RuntimeConfig(batch_size=1, num_images_per_request=images, num_image_tokens=tokens)
    times, _, _, _ = get_backend(engine)._run_encoder_phase(model, database, asked, 1)
    return sum(times.values())


@needs_tables
@pytest.mark.parametrize(("gpu", "engine", "tp"), [("h100", "vllm", 1), ("b200_sxm", "sglang", 2), ("l40s", "vllm", 1)])
def test_a_derived_time_is_that_of_direct_queries(gpu: str, engine: str, tp: int) -> None:
    """Of 40 calls with one to twenty images, none of whose sizes is a knot: the median within 0.5 %, all within 4 %."""
    time = vision_time(replace(ON_H100, gpu=GPUS[gpu], engine=engine, tp=tp))
    backend, draws, errors = time.source.split()[-1], np.random.default_rng(7), list[float]()
    for _ in range(40):
        images = int(draws.choice([1, 1, 2, 3, 5, 12, 20]))
        tokens = int(draws.integers(20, 16_384 // images))
        (ns,) = time.items_ns([[tokens] * images])
        errors.append(abs(ns / 1e6 / direct(engine, gpu, backend, tp, images, tokens) - 1))
    assert np.median(errors) < 0.005
    assert max(errors) < 0.04


@needs_tables
def test_small_images_are_faster_together() -> None:
    """Four of 256 tokens take a third less than one after another, on an H100; two halves less than one of both."""
    time = vision_time(ON_H100)
    (one,), (four,) = time.items_ns([[256]]), time.items_ns([[256] * 4])
    assert 0.62 * 4 * one < four < 0.7 * 4 * one
    (large,), (two,) = time.items_ns([[4_096]]), time.items_ns([[2_048] * 2])
    assert 1.4 * two < large < 1.6 * two


@needs_tables
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gpu": GPUS["a100"]}, "no encoder attention was timed on this GPU under this engine"),
        ({"tp": 3}, "tp 3 does not divide the encoder's heads 16"),
        ({"heads": 9}, "no encoder attention of heads of 128 was timed"),
    ],
)
def test_what_the_tables_lack_is_named(change: dict[str, Any], reason: str) -> None:
    """The kernels that are missing, or what cannot be cut."""
    model = ON_H100.model
    if heads := change.get("heads"):
        assert model.vision is not None
        model, change = replace(model, vision=replace(model.vision, num_heads=heads)), {}
    if tp := change.get("tp"):  # which divides nothing of the model either
        model = replace(model, num_attention_heads=12 * tp, num_key_value_heads=tp, hidden_size=4608, layers=())
        change = {"tp": tp}
    with pytest.raises(NoTablesError) as raised:
        vision_time(replace(ON_H100, model=model, **change))
    assert raised.value.reason == reason


# ---- scenarios


@needs_tables
def test_a_scenario_without_an_encoder_has_the_tower_s() -> None:
    """The heading names it, and a stated one takes its place."""
    setup = setup_of(SCENARIO)
    assert "encoder: vision tower of 27 layers of 1,152, kernels of vllm 0.24.0" in setup.cost_text
    stated = Setup.of(parse_scenario(SCENARIO, "s.yaml", Path(), ("deployment.encoder.base=2ms",)))
    assert "encoder: 2 ms an item" in stated.cost_text


@pytest.mark.parametrize(
    ("gpu", "model", "tokens", "said"),
    [
        ("h100", "google/gemma-4-26B-A4B", 64, "the encoder of gemma4 models is not known here; those of"),
        ("h100", "llama-3.1-8b", 64, "the encoder of llama models is not known here"),
        ("h100", MODEL, 20_000, "items of 20,000 tokens are above the 16,384"),
        ("trainium2", MODEL, 64, "no kernel tables are of such a GPU"),
    ],
)
def test_an_encoder_that_is_not_known_is_to_be_stated(gpu: str, model: str, tokens: int, said: str) -> None:
    """One line with the reason and what to write."""
    config = DeploymentConfig("vllm", gpu)
    with pytest.raises(ScenarioError) as raised:
        config.vision_time(read_model(model), tokens)
    line = str(raised.value)
    assert said in line and "Write, say, encoder: {base: 2ms" in line and "\n" not in line
