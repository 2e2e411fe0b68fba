"""Scenarios whose prefill and decode are apart: both ways to write them, what is refused, what they leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from batchsim.base.errors import BatchsimError, ScenarioError
from batchsim.report.reading import sweeps
from batchsim.report.text.deployment_text import shown_deployment
from batchsim.report.text.run_lines import replica_lines
from batchsim.results.read import REPLICAS
from batchsim.scenario import load_scenario
from batchsim.scenario.config import Scenario
from batchsim.scenario.pooled import block_bytes
from batchsim.scenario.setup import Setup
from batchsim.study.curves.run import run_scenario

BASE = """
model: llama-3.1-8b
workload:
  arrivals: {kind: poisson, mean_rate: 8/s}
  lengths: {prompt: {kind: fixed, tokens: 100}, output: {kind: uniform, min: 2, max: 12}}
  output_cap: 16
  requests: 30
policies: {vllm: {max_num_seqs: 8, max_num_batched_tokens: 2048}}
slo: ttft<1s @ 90%
seeds: 1
"""
COST = "cost: {kind: constant, step: 10ms}\nkv: {tokens: 20000}\n"
POOLS = """
pools:
  prefill: {count: 2, knobs: {max_num_batched_tokens: 4096}}
  decode: {count: 1, cost: {kind: constant, step: 5ms}, kv: {tokens: 3200}}
  transfer: {bandwidth: 10GB/s, latency: 20us, links: per_pair}
"""
LARGE = BASE.replace("llama-3.1-8b", "llama-3.1-70b")
SIDES = """
deployment:
  prefill: {engine: vllm, gpu: h100_sxm, tp: 4, count: 2, knobs: {max_num_batched_tokens: 4096}}
  decode: {engine: vllm, gpu: h100_sxm, tp: 8, count: 1, kv: {tokens: 3200}}
  transfer: {bandwidth: 10GB/s, latency: 20us}
"""


def _loaded(folder: Path, text: str, *overrides: str) -> Scenario:
    path = folder / "apart.yaml"
    path.write_text(text, encoding="utf-8")
    return load_scenario(str(path), overrides=overrides)


def _groups(scenario: Scenario) -> dict[str, tuple[Any, ...]]:
    setup = Setup.of(scenario)
    return {
        group.name: (
            group.count,
            group.setup.scenario.specs[0].config.kv_role,
            group.setup.scenario.specs[0].config.max_num_batched_tokens,
            group.setup.num_gpus,
            group.setup.kv.num_blocks,
        )
        for group in setup.groups
    }


def test_each_side_is_an_engine_of_its_own(tmp_path: Path) -> None:
    """Count, role, knobs, GPUs and blocks, of pools and of a deployment of two sides."""
    pools = _groups(_loaded(tmp_path, BASE + COST + POOLS))
    assert pools == {"prefill": (2, "kv_producer", 4096, 1, 1250), "decode": (1, "kv_consumer", 2048, 1, 200)}
    sides = _groups(_loaded(tmp_path, LARGE + SIDES))
    assert {name: row[:4] for name, row in sides.items()} == {
        "prefill": (2, "kv_producer", 4096, 4),
        "decode": (1, "kv_consumer", 2048, 8),
    }
    assert sides["decode"][4] == 200


def test_keys_are_set_where_they_are_written(tmp_path: Path) -> None:
    """By --set, of both forms."""
    changed = _loaded(tmp_path, BASE + COST + POOLS, "pools.transfer.bandwidth=2GB/s", "pools.decode.kv.tokens=1600")
    replicas = changed.file.replicas
    assert replicas is not None and replicas.transfer is not None
    assert (replicas.transfer.bandwidth, _groups(changed)["decode"][4]) == (2e9, 100)
    changed = _loaded(tmp_path, LARGE + SIDES, "deployment.decode.tp=4", "deployment.prefill.count=3")
    assert [row[:4] for row in _groups(changed).values()] == [(3, "kv_producer", 4096, 4), (1, "kv_consumer", 2048, 4)]
    assert changed.cost.num_gpus == 4


def test_what_chooses_stands_beside_the_sides(tmp_path: Path) -> None:
    """Of pools and of a deployment of two sides: the router, and which prompts stay at a decode engine."""
    beside = "  router: least_tokens\n  local_prefill: {kind: llm_d_prefix, non_cached_tokens: 16}\n"
    for text in (BASE + COST + POOLS + beside, LARGE + SIDES + beside):
        replicas = _loaded(tmp_path, text).file.replicas
        assert replicas is not None and replicas.local_prefill is not None
        assert (replicas.chosen_router.kind, replicas.local_prefill.kind) == ("least_tokens", "llm_d_prefix")
    changed = _loaded(tmp_path, BASE + COST + POOLS + beside, "pools.local_prefill.non_cached_tokens=0")
    results = run_scenario(changed, out=tmp_path / "results")
    rows = pd.read_csv(results.path / REPLICAS)
    assert rows["requests"].tolist() == [0, 0, 30]


def test_dynamo_s_two_routers_run_under_either_engine(tmp_path: Path) -> None:
    """Each prompt goes to one engine of each side, and none to a third."""
    for kind in ("vllm", "sglang"):
        sides = "pools.prefill={count: 2}", "pools.decode={count: 2}"
        overrides = *sides, "pools.router=dynamo_kv", f"policies={{{kind}: {{}}}}"
        results = run_scenario(_loaded(tmp_path, BASE + COST + POOLS, *overrides), out=tmp_path / kind)
        rows = pd.read_csv(results.path / REPLICAS)
        requests = rows["requests"].tolist()
        assert (sum(requests[:2]), sum(requests[2:])) == (30, 30) and min(requests) > 0


def test_a_share_of_the_transfers_fails(tmp_path: Path) -> None:
    """With all failing none finishes under either engine, or each has its prompt computed where it decodes."""
    sides = "pools.prefill={count: 2}", "pools.decode={count: 2}"
    for kind, more, finished in (("vllm", "", 0), ("vllm", "recompute", 30), ("sglang", "", 0)):
        overrides = [*sides, "pools.transfer.failed=1", f"policies={{{kind}: {{}}}}"]
        overrides += [f"pools.transfer.on_failure={more}"] if more else []
        results = run_scenario(_loaded(tmp_path, BASE + COST + POOLS, *overrides), out=tmp_path / f"{kind}{more}")
        (point,) = results.points.to_dict("records")
        assert point["finished"] == finished
        assert point["rejected"] == 30 - finished


def test_no_transfer_fails_whatever_would_follow(tmp_path: Path) -> None:
    """So that 0 and more can be compared under one rule."""
    sides = "pools.prefill={count: 2}", "pools.decode={count: 2}", "policies={vllm: {}}"
    rows = []
    for more in ([], ["pools.transfer.failed=0", "pools.transfer.on_failure=recompute", "pools.transfer.lease=20s"]):
        results = run_scenario(_loaded(tmp_path, BASE + COST + POOLS, *sides, *more), out=tmp_path / f"r{len(more)}")
        (point,) = results.points.to_dict("records")
        rows.append((point["finished"], point["e2e_mean_s"]))
    assert rows[0] == rows[1] and rows[0][0] == 30


def test_sglang_has_no_lease_and_computes_nothing_again(tmp_path: Path) -> None:
    """Both keys of failed transfers that vLLM alone has."""
    sides = "pools.prefill={count: 2}", "pools.decode={count: 2}", "policies={sglang: {}}", "pools.transfer.failed=0.5"
    for key in ("on_failure=recompute", "lease=20s"):
        with pytest.raises(BatchsimError, match="SGLang ends requests whose transfer fails"):
            Setup.of(_loaded(tmp_path, BASE + COST + POOLS, *sides, f"pools.transfer.{key}"))


def test_a_block_is_all_layers_on_all_gpus_of_an_engine(tmp_path: Path) -> None:
    """Llama-3.1-70B: 80 layers, 8 KV heads of 128, keys and values of 2 bytes, 16 tokens, whatever the split."""
    setup = Setup.of(_loaded(tmp_path, LARGE + SIDES))
    sizes = {block_bytes(setup.model, group.setup.cost, 16) for group in setup.groups}
    assert sizes == {80 * 8 * 128 * 2 * 2 * 16}


def test_a_run_has_both_sides_in_its_tables(tmp_path: Path) -> None:
    """replicas.csv has each engine by role with its utilisation; the pace is the decode side's 5 ms a step."""
    results = run_scenario(_loaded(tmp_path, BASE + COST + POOLS), out=tmp_path / "results")
    rows = pd.read_csv(results.path / REPLICAS)
    assert rows["group"].tolist() == ["prefill", "prefill", "decode"]
    assert rows["requests"].tolist() == [15, 15, 30] and rows["finished"].tolist() == [0, 0, 30]
    assert (rows["engine_busy_share"] > 0).all() and (rows["kv_utilisation_peak"] > 0).all()
    (point,) = results.points.to_dict("records")
    assert point["tpot_p50_s"] == pytest.approx(0.005) and point["finished"] == 30
    assert point["ttft_p50_s"] > 0.015
    prefill, decode = replica_lines(results, [(sweeps(results)[0], 0)])
    assert prefill.startswith("vllm, prefill:  15 requests a replica") and "ttft" not in prefill
    assert decode.startswith("vllm, decode:  30 requests a replica") and "ttft p99" in decode


@pytest.mark.parametrize(
    ("text", "override", "said"),
    [
        (BASE + COST + POOLS, "pools.prefill.count=0", "pools.prefill: count is 0"),
        (BASE + COST + POOLS, "pools.decode.kv.block_size=32", "apart.yaml:14: the decode side: kv.block_size 32"),
        (BASE + COST + POOLS, "pools.link=2", "pools has no link. Known are prefill, decode, transfer"),
        (BASE + COST + POOLS, "pools.decode.kv.utilisation=0.8", "decode.kv.utilisation is not read beside decode.kv"),
        (LARGE + SIDES, "deployment.prefill.speed=2", "deployment.prefill.speed is not a field of deployment.prefill."),
        (LARGE + SIDES, "deployment.tp=8", "deployment has no tp. Known are prefill, decode, transfer"),
        (BASE + COST + POOLS, "pools.router=llm_d", "router llm_d reads what engines report"),
        (BASE + COST + POOLS, "pools.router=nearest", "nearest"),
        (BASE + COST + POOLS, "pools.transfer.failed=1.5", "failed is 1.5"),
        (BASE + COST + POOLS, "pools.transfer.lease=20s", "lease is of transfers that fail, and it is not said"),
        (
            BASE + COST + POOLS,
            "pools.transfer.on_failure=recompute",
            "on_failure is of transfers that fail, and it",
        ),
        (
            BASE + COST + POOLS + "  local_prefill: {kind: dynamo_isl_bounding}\n",
            "pools.router=dynamo_kv",
            "router dynamo_kv is not simulated with local_prefill",
        ),
        (BASE + COST + POOLS, "pools.local_prefill={kind: short}", "short"),
        (BASE + COST + POOLS, "pools.local_prefill={kind: llm_d_prefix}", "pools.local_prefill.non_cached_tokens"),
        (BASE + COST + POOLS, "pools.local_prefill={kind: dynamo_isl_bounding, new_share: 1.2}", "new_share is 1.2"),
        (
            BASE + COST + POOLS,
            "pools.local_prefill={kind: tensorrt_llm_threshold, max_local_prefill_length: -1}",
            "max_local_prefill_length is -1",
        ),
        (BASE + COST + POOLS, "pools.local=5", "pools has no local."),
    ],
)
def test_errors_name_the_keys_as_they_are_written(tmp_path: Path, text: str, override: str, said: str) -> None:
    """Not those of the groups of replicas, as which both sides are kept."""
    with pytest.raises(BatchsimError) as refusal:
        Setup.of(_loaded(tmp_path, text, override))
    assert said in str(refusal.value) and "replicas.groups" not in str(refusal.value)


def test_both_sides_are_set_as_a_whole_and_taken_away(tmp_path: Path) -> None:
    """By --set, in the place of what the file has."""
    whole = "{prefill: {count: 3}, decode: {count: 2}, transfer: {bandwidth: 1GB/s}}"
    assert [row[0] for row in _groups(_loaded(tmp_path, BASE + COST + POOLS, f"pools={whole}")).values()] == [3, 2]
    assert _loaded(tmp_path, BASE + COST + POOLS, "pools=null").file.replicas is None
    whole = whole.replace("count", "engine: vllm, gpu: h100_sxm, tp: 8, count")
    sides = _groups(_loaded(tmp_path, LARGE + SIDES, f"deployment={whole}"))
    assert {name: (row[0], row[3]) for name, row in sides.items()} == {"prefill": (3, 8), "decode": (2, 8)}
    one = _loaded(tmp_path, LARGE + SIDES, "deployment={engine: vllm, gpu: h100_sxm, tp: 4}")
    assert one.file.replicas is None and one.cost.num_gpus == 4


def test_what_is_shown_of_both_sides(tmp_path: Path) -> None:
    """The memory and the knobs of each, and the command that starts one of its engines."""
    shown = shown_deployment(_loaded(tmp_path, LARGE + SIDES))
    assert shown.kv.startswith("prefill KV ") and "; decode KV 3,200 tokens" in shown.kv
    assert shown.policies["vllm, prefill"].max_num_batched_tokens == 4096  # pyright: ignore
    assert shown.command is None
    prefill, decode = (shown.sides[side].line for side in ("prefill", "decode"))
    assert (
        "--tensor-parallel-size 4 --max-num-seqs 8 --max-num-batched-tokens 4096 " in prefill
        and '"kv_role":"kv_producer"}\'' in prefill
    )
    assert "--tensor-parallel-size 8" in decode and '"kv_role":"kv_consumer"}\'' in decode
    assert prefill in str(shown) and decode in str(shown)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            BASE + COST + POOLS.replace("max_num_batched_tokens: 4096", "max_num_seq: 5"),
            "the prefill side: knobs of vllm: knobs.max_num_seq is not a field of knobs",
        ),
        (
            BASE + COST + POOLS.replace("max_num_batched_tokens: 4096", "enable_prefix_caching: 'no'"),
            "knobs.enable_prefix_caching is",
        ),
        (BASE.replace("vllm: {", "continuous: {") + COST + POOLS, "only vllm and sglang pass KV"),
        (
            BASE.replace(
                "2048}", "2048, speculative_config: {method: ngram, num_speculative_tokens: 2, acceptance: 0.5}}"
            )
            + COST
            + POOLS,
            "speculative_config",
        ),
        (
            BASE.replace("  requests: 30", "  requests: 30\n  loras: {count: 4, rank: 8}")
            + COST
            + "lora_cost: {load_gpu: 1ms, load_disk: 1ms}\n"
            + POOLS,
            "LoRA adapters are not simulated where",
        ),
        (
            BASE.replace("  requests: 30", "  requests: 30\n  items: {tokens: {kind: fixed, tokens: 40}}")
            + COST.replace("step: 10ms", "step: 10ms, encoder: {base: 1ms}")
            + POOLS,
            "images, audios and videos are not simulated where",
        ),
        (
            BASE
            + COST.replace("kv: {tokens: 20000}", "kv: {num_blocks: 900, groups: [{kind: full, block_size: 16}]}")
            + POOLS,
            "groups of KV blocks are not simulated where",
        ),
        (
            BASE + COST + POOLS.replace("cost: {kind: constant, step: 5ms}", "deployment: {engine: sglang, gpu: h100}"),
            "engine sglang passes KV to its like alone",
        ),
        (BASE.replace("vllm: {", "vllm: {prefill_schedule_interval: 2, ") + COST + POOLS, "prefill_schedule_interval"),
        (BASE + COST + POOLS.replace("links: per_pair", "links: ring"), "links"),
        (BASE + COST + POOLS.replace("  transfer:", "  transfers:"), "pools has no transfers"),
        (BASE + COST + "pools: {prefill: {count: 1}, decode: {count: 1}}\n", "pools has no transfer"),
        (BASE + COST + POOLS.replace("count: 2, ", ""), "count"),
        (BASE + COST + POOLS.replace("max_num_batched_tokens: 4096", "max_tokens: 1"), "max_tokens"),
        (BASE + COST + POOLS + "replicas: {count: 2, router: random}\n", "both are given"),
        (LARGE + SIDES + COST, "cost is given beside a deployment of two sides"),
        (LARGE + SIDES.replace("tp: 8", "pp: 2"), "pp"),
        (
            BASE + COST + "replicas: {groups: {prefill: {count: 1}, decode: {count: 1}}, router: round_robin}\n",
            "transfer",
        ),
    ],
)
def test_what_is_not_simulated_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    """With the place, and what to do."""
    with pytest.raises(BatchsimError) as refusal:
        Setup.of(_loaded(tmp_path, text))
    assert said in str(refusal.value) and "apart.yaml" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [("rollout", "rollouts are not simulated"), ("plan", "not planned for prefill and decode apart")],
)
def test_what_goes_without_pools_is_refused_with_them(name: str, said: str) -> None:
    """Of shipped scenarios."""
    pools = "pools={prefill: {count: 1}, decode: {count: 1}, transfer: {bandwidth: 1GB/s}}"
    with pytest.raises(ScenarioError, match=said):
        Setup.of(load_scenario(name, overrides=("replicas=null", pools)))


def test_a_real_run_of_pools_is_refused_by_the_key_that_is_written(tmp_path: Path) -> None:
    """Not by that of the replicas, as which pools are kept."""
    with pytest.raises(ScenarioError, match=r"prefill and decode apart can only be simulated\. Remove pools"):
        Setup.of(_loaded(tmp_path, BASE + COST + POOLS)).check_can_be_real()
