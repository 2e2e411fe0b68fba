"""The comparison with measured silicon: which points it may look at, what it makes of them, how it counts errors."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchsim.scenario.deployment_config import DeploymentConfig
from batchsim.scenario.parse import parse_scenario
from batchsim.scenario.setup import Setup
from batchsim.workload.laws import FixedTokens, UniformTokens
from batchsim.workload.lengths import Lengths
from batchsim.workload.limited_client import LimitedClient
from batchsim.workload.workload_config import ClosedLoop
from tests.silicon.__main__ import _deployments
from tests.silicon.pools import PooledRow, Side, of_pools, pooled_text
from tests.silicon.rows import CHECKPOINTS, Row, is_given, scenario_text
from tests.silicon.table import Point, error, tables

ROW = Row(
    id="a",
    gap=False,
    engine="vllm",
    version="0.19.0",
    model="meta-llama/Llama-3.1-70B",
    gpu="h100_sxm",
    precision="fp8",
    gemm="fp8",
    moe="fp8",
    tp=8,
    ep=1,
    moe_tp=8,
    concurrency=4,
    isl=100,
    osl=10,
    ttft_ms=100.0,
    tpot_ms=10.0,
)


def test_halves_are_of_whole_deployments():
    """By the parity of SHA-256 of model, GPU, engine, precision and TP; load and experts change none."""
    assert ROW.deployment == "meta-llama/Llama-3.1-70B|h100_sxm|vllm|fp8|tp8"
    assert is_given(ROW.deployment) and is_given(replace(ROW, concurrency=64, ep=8, version="").deployment)
    assert not is_given("meta-llama/Llama-3.1-70B|h100_sxm|vllm|fp8|tp4")
    given = [is_given(f"model|gpu|vllm|fp8|tp{tp}") for tp in range(400)]
    assert 160 < sum(given) < 240


def test_ranks_are_of_one_gpu_each_and_a_half_of_their_own():
    """Whatever the file says of tp and ep."""
    ranks = replace(ROW, model="MiniMaxAI/MiniMax-M2.5", tp=4, ep=16, ranks=4)
    assert ranks.deployment == "MiniMaxAI/MiniMax-M2.5|h100_sxm|vllm|fp8|tp4|dp4"
    scenario = parse_scenario(scenario_text(ranks), "a", Path(), ())
    stated, replicas = scenario.cost, scenario.file.replicas
    assert isinstance(stated, DeploymentConfig) and (stated.tp, stated.dp_attention, stated.ep) == (1, 4, 4)
    assert replicas is not None and replicas.count == 4 and replicas.lockstep is not None


def test_engines_apart_are_halved_by_all_their_workers_and_simulated_by_side():
    """Each side with its engines, GPUs and experts; attention ranks on a side, or other engines, are left out."""
    known: dict[str, Any] = {name: getattr(ROW, name) for name in Row.__dataclass_fields__} | {"engine": "sglang"}
    row = PooledRow(**known, prefill=Side(2, 4, 1, 1, 4, 1), decode=Side(1, 8, 1, 1, 8, 4), stated="")
    replicas = parse_scenario(pooled_text(row), "a", Path(), ()).file.replicas
    assert replicas is not None and replicas.groups is not None and replicas.transfer is not None
    assert {name: (group.count, getattr(group.cost, "tp", 0)) for name, group in replicas.groups.items()} == {
        "prefill": (2, 4),
        "decode": (1, 8),
    }
    even = next(row for n in range(9) if is_given((row := replace(row, stated=f"{n}")).deployment))
    assert of_pools(even) == "are simulated"
    assert of_pools(replace(even, concurrency=257)).startswith("have more than 256 clients")
    assert "not simulated apart" in of_pools(replace(even, decode=replace(even.decode, ranks=8)))
    assert "tensorrt_llm" in of_pools(replace(even, engine="tensorrt_llm"))


def test_a_point_is_simulated_as_its_clients_asked():
    """Ten requests a client, from one list, all at once, lengths from four fifths of the greatest, by the way there."""
    scenario = parse_scenario(scenario_text(ROW), "a", Path(), ())
    workload, stated = scenario.file.workload, scenario.cost
    assert workload.arrivals == ClosedLoop(4, 0, shared_list=True, ramp=0) and workload.requests == 40
    assert workload.lengths == Lengths(UniformTokens(80, 100), UniformTokens(8, 10))
    assert workload.frontend.request > 0 and isinstance(stated, DeploymentConfig)
    assert (stated.engine, stated.tp, stated.weights, stated.kv) == ("vllm", 8, "fp8", "fp8") and not stated.moe
    assert scenario.specs[0].config.traits.max_num_seqs == 4
    exact = parse_scenario(scenario_text(replace(ROW, gap=True)), "a", Path(), ()).file.workload
    assert exact.lengths == Lengths(FixedTokens(100), FixedTokens(10))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt_llm"])
@pytest.mark.parametrize("model", CHECKPOINTS)
def test_every_engine_and_model_of_the_points_can_be_written(engine, model):
    """Scenarios are read whatever the tables have."""
    scenario = parse_scenario(scenario_text(replace(ROW, engine=engine, model=model)), "a", Path(), ())
    assert [spec.kind for spec in scenario.specs] == [engine]
    assert isinstance(scenario.cost, DeploymentConfig)
    assert (scenario.cost.weights or "own") == ("own" if model.startswith("openai/") else "fp8")


def test_errors_are_relative_to_what_was_measured():
    """Signed in the bias, by size in the rest; the anchor has none of its own, and unknown clients stand apart."""
    points = [
        Point(ROW, (110.0, 9.0), None, (200.0, 20.0)),
        Point(replace(ROW, id="b", concurrency=8), (80.0, 10.0), (100.0, 10.5), (100.0, 10.0)),
        Point(replace(ROW, id="c", gap=True), (1e6, 1e6), None, (1.0, 1.0)),
        Point(replace(ROW, id="d"), None, None, (1.0, 1.0), "no tables"),
    ]
    assert error((110.0, 9.0), ROW, 0) == pytest.approx(0.1) and error((110.0, 9.0), ROW, 1) == pytest.approx(-0.1)
    text = tables(points)
    assert "| vllm | 2 | batchsim | 15.0 | 19.0 | 15.0 | -5.0 | 5.0 | 9.0 | 5.0 | -5.0 |" in text
    assert "|  | 2 | aiconfigurator | 50.0 | 90.0 | 50.0 | +50.0 |" in text
    assert "|  | 1 | batchsim, anchored | 0.0 | 0.0 | 0.0 | +0.0 | 5.0 | 5.0 | 5.0 | +5.0 |" in text
    assert "- 1 of vllm Llama-3.1-70B fp8 on h100_sxm tp 8: not simulated: no tables" in text


def test_a_deployment_is_anchored_by_itself():
    """Points of other experts' GPUs and of unknown clients are not of the same deployment."""
    rows = [ROW, replace(ROW, id="b", ep=2), replace(ROW, id="c", gap=True), replace(ROW, id="d", concurrency=99)]
    assert [[row.id for row in mine] for mine in _deployments(rows)] == [["a", "d"], ["b"], ["c"]]


def test_the_loop_of_a_point_is_a_limited_client():
    """The form that any scenario can use."""
    text = scenario_text(ROW).replace(
        "deployment: {engine: vllm, gpu: h100_sxm, tp: 8, ep: 1, weights: fp8, kv: fp8}",
        "cost: {kind: constant, step: 5ms}\nkv: {tokens: 9999}",
    )
    workload = Setup.of(parse_scenario(text, "a", Path(), ())).workload(1.0, 0)
    assert isinstance(workload, LimitedClient) and workload.limit == 4 and workload.num_offered == 40
