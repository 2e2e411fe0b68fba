"""Plans over how many engines prefill to how many decode: the configurations, what they cost, which of them wins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from batchsim.base.errors import ScenarioError
from batchsim.report.page.plan_page import MANIFESTS, write_report
from batchsim.report.page.plan_text import plan_text
from batchsim.scenario import Scenario, load_scenario
from batchsim.study.planning.assumptions import commands_for
from batchsim.study.planning.demand import demand_of
from batchsim.study.planning.fleet_search import judge
from batchsim.study.planning.make import Planned
from batchsim.study.planning.plan_tables import plan_tables
from batchsim.study.planning.pool_manifests import Side, pool_manifests
from batchsim.study.planning.probe import Ask, Book, drive
from batchsim.study.planning.space import space_of
from batchsim.study.planning.split import split_text
from batchsim.study.sweep.points import Sweep

PLANNED = """\
model: llama-3.1-8b
cost: {kind: linear, base: 5ms, per_token: 50us, per_sequence: 100us}
workload:
  arrivals: {kind: poisson, mean_rate: 10/s}
  lengths: {prompt: {kind: lognormal, mean: 400, cv: 1, max: 2000}, output: {kind: fixed, tokens: 32}}
  output_cap: 64
  duration: 4s
policies:
  vllm: {max_num_seqs: 128}
slo: ttft<1s & tpot<9ms @ 95%
seeds: 2
plan:
  target: {rate: 30/s}
  window: 4s
  currency: $
  gpus:
    own:
      price: 2.00/h
      deployment:
        engine: vllm
        gpu: {kind: sheet, memory: 80GB, bandwidth: 3350GB/s, bf16: 989TFLOP/s, peer_link: 450GB/s}
    stated:
      price: 2.00/h
      kv_tokens: 200000
      cost: {kind: linear, base: 5ms, per_token: 50us, per_sequence: 100us}
  router: least_tokens
  max_replicas: 6
  transfer: {bandwidth: 50GB/s, latency: 20us}
  free: {gpu: [stated], pools: [mixed, {prefill: 1, decode: 1}, {prefill: 2, decode: 1}]}
"""


@pytest.fixture
def plan(tmp_path: Path) -> Scenario:
    (tmp_path / "s.yaml").write_text(PLANNED)
    return load_scenario(str(tmp_path / "s.yaml"))


def _with_free(plan: Scenario, free: str) -> Scenario:
    return load_scenario(plan.source, overrides=[f"plan.free={free}"])


def _book(plan: Scenario) -> Book:
    return Book(demand_of(plan), Sweep(Path(plan.source).parent / "r"))


def test_pools_have_no_choice_of_router_and_stand_beside_mixed_engines(plan: Scenario) -> None:
    routers = "router: [least_tokens, round_robin]"
    groups = space_of(
        _with_free(plan, f"{{gpu: [stated], pools: [mixed, {{prefill: 3, decode: 1}}], {routers}}}")
    ).groups
    assert [group.name for group in groups] == [
        "vllm: pools mixed, router least_tokens",
        "vllm: pools mixed, router round_robin",
        "vllm: pools 3 prefill + 1 decode",
    ]


def test_a_replica_of_pools_is_a_set_of_engines_each_with_a_deployment_of_its_own(plan: Scenario) -> None:
    """Three prefill engines and a decode engine of two GPUs are five GPUs; two sets are six and two engines."""
    plan = _with_free(plan, "{gpu: [own], pools: [{prefill: 3, decode: {count: 1, tp: 2}}]}")
    (group,) = space_of(plan).groups
    book = _book(plan)
    assert split_text({"prefill": 3, "decode": {"count": 1, "tp": 2}}) == "3 prefill + 1 decode (tp 2)"
    assert book.offer(group).gpus == 5
    prefill, decode = book.setup(Ask(replace(group, replicas=2))).groups
    assert (prefill.count, decode.count) == (6, 2)
    assert (prefill.setup.num_gpus, decode.setup.num_gpus) == (1, 2)
    first, second = commands_for(Planned(book.demand, book, [group], [None], []), group)
    assert "kv_producer" in first.line and "--tensor-parallel-size" not in first.line
    assert "kv_consumer" in second.line and "--tensor-parallel-size 2" in second.line


@pytest.mark.parametrize(
    ("free", "said"),
    [
        ("{pools: [apart]}", "pools: apart is no split. Write mixed, or how many engines prefill and decode"),
        ("{pools: [{prefill: 2}]}", "is no split"),
        ("{pools: [{prefill: 0, decode: 1}]}", "prefill counts 0 engines. Write a whole number from 1 to 64"),
        ("{pools: [{prefill: 1, decode: true}]}", "decode counts True engines"),
        ("{pools: [{prefill: {tp: 2}, decode: 1}]}", "prefill counts None engines"),
        ("{pools: [{prefill: {count: 1, gpu: own}, decode: 1}]}", "prefill has gpu. A side has count and tp"),
        ("{pools: [{prefill: 4, decode: 2}]}", "4 to 2 engines is the ratio 2 to 1"),
        (
            "{gpu: [stated], pools: [{prefill: 1, decode: {count: 1, tp: 2}}]}",
            "tp: the cost of stated is of kind linear",
        ),
    ],
)
def test_what_is_no_split_is_one_line(plan: Scenario, free: str, said: str) -> None:
    with pytest.raises(ScenarioError) as error:
        space_of(_with_free(plan, free))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_pools_need_a_transfer_and_a_transfer_needs_pools(plan: Scenario) -> None:
    with pytest.raises(ScenarioError, match=r"pools needs plan\.transfer\. Write transfer"):
        space_of(load_scenario(plan.source, overrides=["plan.transfer=null"]))
    with pytest.raises(ScenarioError, match="transfer is given, and no prefill and decode engines are apart"):
        load_scenario(plan.source, overrides=["plan.free={gpu: [stated]}"])


def test_the_ratio_is_chosen_that_deciding_every_one_chooses(plan: Scenario, tmp_path: Path) -> None:
    """One prefill and one decode engine hold at this pace what two mixed engines do not: of all numbers of sets of each
    ratio that cost no more, theirs alone hold. The text says so, and of stated costs there is no manifest."""
    tables = plan_tables(plan, out=tmp_path / "results")
    (chosen,) = tables["recommendation"]
    assert (chosen["policy"], chosen["replicas"]) == ("vllm: pools 1 prefill + 1 decode", 1)
    assert chosen["router"] == "round_robin"
    (row,) = [row for row in tables["configurations"] if row["policy"] == chosen["policy"]]
    assert row["gpus"] == 2
    mixed, pair, _ = space_of(plan).groups
    book = _book(plan)
    asked = [Ask(replace(mixed, replicas=count)) for count in (1, 2)] + [Ask(pair)]
    probes = drive(book, [judge(book, ask) for ask in asked])
    assert [probe.met for probe in probes] == [False, False, True]
    assert "Run 1 set of engines on stated under vllm: pools 1 prefill + 1 decode behind round_robin" in " ".join(
        plan_text(tables, "$").split()
    )
    assert {*MANIFESTS.values()}.isdisjoint(file.name for file in write_report(tables, "s", "$", tmp_path / "plan"))


@pytest.mark.slow
def test_a_deployment_of_pools_ends_with_a_graph_of_dynamo_and_values_of_llm_d(plan: Scenario, tmp_path: Path) -> None:
    """As many workers of each side as the sets have, each with the words of its command and its GPUs."""
    free = "{gpu: [own], pools: [{prefill: 1, decode: {count: 2, tp: 2}}]}"
    changes = [f"plan.free={free}", "plan.target.rate=30/s", "slo=ttft<5s @ 80%"]
    tables = plan_tables(load_scenario(plan.source, overrides=changes), out=tmp_path / "results")
    (chosen,) = tables["recommendation"]
    write_report(tables, "s", "$", tmp_path / "plan")
    graph = yaml.safe_load((tmp_path / "plan" / "dynamo.yaml").read_text())
    assert (graph["kind"], graph["apiVersion"]) == ("DynamoGraphDeployment", "nvidia.com/v1alpha1")
    services = graph["spec"]["services"]
    assert [*services] == ["Frontend", "VllmPrefillWorker", "VllmDecodeWorker"]
    told = {name: (each["replicas"], each["resources"]["limits"]["gpu"]) for name, each in [*services.items()][1:]}
    sets = chosen["replicas"]
    assert told == {"VllmPrefillWorker": (sets, "1"), "VllmDecodeWorker": (2 * sets, "2")}
    args = services["VllmDecodeWorker"]["extraPodSpec"]["mainContainer"]["args"]
    assert args[:2] == ["--model", "meta-llama/Llama-3.1-8B"] and args[-2:] == ["--disaggregation-mode", "decode"]
    assert "--tensor-parallel-size" in args and '{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}' in args
    values = yaml.safe_load((tmp_path / "plan" / "llm-d-values.yaml").read_text())
    assert values["routing"]["proxy"] == {"enabled": True, "connector": "nixlv2"}
    sides = {name: (values[name]["replicas"], values[name]["parallelism"]["tensor"]) for name in ("prefill", "decode")}
    assert sides == {"prefill": (sets, 1), "decode": (2 * sets, 2)}
    words = values["decode"]["containers"][0]["args"]
    assert "--tensor-parallel-size" not in words and "--max-num-seqs" in words
    assert values["modelArtifacts"]["uri"] == "hf://meta-llama/Llama-3.1-8B"
    write_report({name: rows for name, rows in tables.items() if name not in MANIFESTS}, "s", "$", tmp_path / "plan")
    assert not any((tmp_path / "plan" / file).exists() for file in MANIFESTS.values())


def test_sglang_has_a_graph_of_dynamo_alone() -> None:
    """Its words name the side already; an engine that neither starts has none."""
    line = "python -m sglang.launch_server --model-path some/model --disaggregation-mode prefill"
    made = pool_manifests("sglang", [Side("prefill", 3, 2, 2, line, ())], "round_robin")
    assert [*made] == ["dynamo"]
    worker = yaml.safe_load(made["dynamo"])["spec"]["services"]["SGLangPrefillWorker"]
    assert worker["replicas"] == 3 and worker["resources"] == {"limits": {"gpu": "2"}}
    assert worker["extraPodSpec"]["mainContainer"]["args"] == line.split()[3:]
    assert pool_manifests("tensorrt_llm", [], "round_robin") == {}
