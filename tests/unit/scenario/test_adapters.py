"""Scenarios with LoRA adapters: what runs, what it is made of, and mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.drive.fleet.fleet_records import by_engine
from batchsim.kernel.record import ADAPTER, HELD_BACK, LOADING
from batchsim.metrics.adapters import adapter_use
from batchsim.metrics.attribution import attribute
from batchsim.scenario.parse import parse_scenario
from batchsim.testing.life_sums import check_lives
from tests.support.scenarios import drivers_agree, refusal, setup_of, simulated

TEXT = """\
model: llama-3.1-8b
cost: {kind: linear, base: 5ms, per_token: 20us}
kv: {tokens: 100000}
workload:
  arrivals: {kind: poisson, mean_rate: 40/s}
  lengths: {prompt: {kind: fixed, tokens: 50}, output: {kind: uniform, min: 2, max: 12}}
  output_cap: 16
  requests: 60
  loras: {count: 6, popularity: {kind: zipf, alpha: 1}, share_of_requests: 80%}
lora_cost: {step: 10%, per_adapter: 2%, load_gpu: 1ms, load_disk: 20ms}
policies:
  vllm: {max_num_seqs: 8, max_num_batched_tokens: 512, max_loras: 2, max_cpu_loras: 3}
slo: ttft<1s @ 90%
seeds: 1
"""
VLLM = "  vllm: {max_num_seqs: 8, max_num_batched_tokens: 512, max_loras: 2, max_cpu_loras: 3}"
LORAS = "  loras: {count: 6, popularity: {kind: zipf, alpha: 1}, share_of_requests: 80%}"
COST = "lora_cost: {step: 10%, per_adapter: 2%, load_gpu: 1ms, load_disk: 20ms}"
SGLANG = "  sglang: {max_loras_per_batch: 2%s}"


@pytest.mark.parametrize(
    "policy",
    [
        VLLM,
        VLLM.replace("max_loras: 2", "async_scheduling: false, max_loras: 2"),
        VLLM.replace("max_loras: 2", "policy: priority, max_loras: 1"),
        SGLANG % "",
        SGLANG % ", enable_lora_overlap_loading: true",
        SGLANG % ", lora_drain_wait_threshold: 0.05",
    ],
)
def test_the_parts_of_every_life_sum_to_its_e2e(policy: str) -> None:
    """To the nanosecond, with waiting for an adapter and loading in them; the story of a request has the same parts."""
    records = simulated(TEXT.replace(VLLM, policy)).records
    check_lives(records)
    named = set(attribute(records)["part"])
    assert "queued:adapter" in named and ("adapter_load" in named or "overlap" in policy)


def test_an_adapter_is_noted_for_each_request_that_asks_for_one() -> None:
    """By its name, and what was loaded for whom; the use of adapters counts them."""
    records = simulated(TEXT).records
    states = records.states
    asked = states[states["state"] == ADAPTER]
    assert {records.texts[code] for code in asked["reason"]} <= {f"lora-{k}" for k in range(1, 7)}
    assert 0.6 * 60 < len(asked) < 60
    use = adapter_use(records.requests, [records])
    assert use.host_loads.sum() + use.disk_loads.sum() == (states["state"] == LOADING).sum() > 10
    assert use.load_ns.sum() == 1_000_000 * use.host_loads.sum() + 20_000_000 * use.disk_loads.sum()
    assert (use.held_ns > 0).sum() == len({*states["request_id"][states["state"] == HELD_BACK]}) > 5
    assert use.hits.sum() + use.host_loads.sum() >= len(asked)


def test_without_adapters_nothing_is_noted() -> None:
    """No row of a state beyond those of requests and of the queue."""
    text = TEXT.replace(LORAS + "\n", "").replace(COST + "\n", "").replace(", max_loras: 2, max_cpu_loras: 3", "")
    assert simulated(text).records.states["state"].max() <= 7


def test_a_session_keeps_to_one_adapter() -> None:
    """All turns of a user's session ask for the same."""
    text = TEXT.replace("requests: 60", "duration: 2s").replace(
        LORAS, "  loras: {count: 6}\n  sessions: {turns: {kind: fixed, tokens: 3}, think_time: 10ms}"
    )
    setup = setup_of(text)
    workload = setup.workload(setup.scenario.loads[0], 0)
    turns = workload.turns  # pyright: ignore[reportAttributeAccessIssue]
    adapter = turns.requests.adapter
    assert len(set(adapter)) > 3 and (adapter == adapter[turns.first]).all()


def test_slots_are_taken_off_the_kv_memory() -> None:
    """As many as may run at once, each for the largest rank."""
    text = TEXT.replace("cost: {kind: linear, base: 5ms, per_token: 20us}\nkv: {tokens: 100000}", "cost: h100")
    one, ten = (setup_of(text.replace(VLLM, f"  vllm: {{max_loras: {n}}}")).kv for n in (1, 10))
    assert one.num_blocks - ten.num_blocks == pytest.approx(9 * 83.886e6 / (16 * 131072), abs=1)


@pytest.mark.parametrize("policy", [VLLM, SGLANG % "", SGLANG % ", enable_lora_overlap_loading: true"])
def test_both_drivers_leave_the_same_records(policy: str) -> None:
    """By a clock and in simulated time, bit for bit."""
    drivers_agree(TEXT.replace(VLLM, policy))


def test_replicas_have_adapters_of_their_own() -> None:
    """Each engine loads for itself; the parts of every life sum to its E2E, and the use counts all engines."""
    records = simulated(TEXT + "replicas: {count: 2, router: round_robin}\n").records
    parts = attribute(records)
    requests = records.requests
    assert (requests["delivered_ns"] - requests["sent_ns"] == parts.groupby("request_id")["ns"].sum().to_numpy()).all()
    engines = [engine for _, _, engine in by_engine(records)]
    use = adapter_use(requests, engines)
    loads = [int((engine.states["state"] == LOADING).sum()) for engine in engines]
    assert min(loads) > 3 and use.host_loads.sum() + use.disk_loads.sum() == sum(loads)
    assert (use.of >= 0).sum() == len({*records.states["request_id"][records.states["state"] == ADAPTER].tolist()})


def test_rows_of_a_trace_name_their_adapters(tmp_path: Path) -> None:
    """By the column that the scenario names; an empty field is the base model, and nothing may be drawn beside."""
    rows = [f"{i},50,5,{name}" for i, name in enumerate(["fr", "", "de", "fr"])]
    (tmp_path / "trace.csv").write_text("\n".join(["t,p,o,adapter", *rows]))
    columns = "{arrival: t, prompt: p, output: o, lora: adapter}"
    traced = f"  trace: {{path: trace.csv, columns: {columns}, time_unit: ms}}"
    text = TEXT.replace("{kind: poisson, mean_rate: 40/s}", "{kind: trace}").replace(LORAS, traced)
    lines = [line for line in text.splitlines() if not line.startswith(("  lengths:", "  requests:"))]
    setup = setup_of("\n".join(lines), tmp_path)
    workload = setup.workload(setup.scenario.loads[0], 0)
    assert workload.source.adapter_names == ("fr", "de")
    assert [arrival.request.adapter for arrival in workload.arrivals()] == [0, -1, 1, 0]
    drawn = "\n".join(lines).replace(traced, f"{traced}\n{LORAS}")
    with pytest.raises(ScenarioError, match=r"loras\.count: the rows of the trace say which adapter each request asks"):
        parse_scenario(drawn, "mine.yaml", tmp_path)


MISTAKES = [
    (LORAS, "  loras: {popularity: {kind: uniform}}", "how many adapters there are is not said. Write count: 32, say."),
    (LORAS, "  loras: {count: 0}", "workload.loras: count is 0. It must be from 1 to 100000."),
    (LORAS, "  loras: {count: 100001}", "workload.loras: count is 100001. It must be from 1"),
    (LORAS, "  loras: {count: 2.5}", "workload.loras.count"),
    (LORAS, "  loras: {count: many}", "workload.loras.count"),
    (LORAS, "  loras: {count: 4, rank: 0}", "workload.loras: rank is 0. It must be from 1 to 512."),
    (LORAS, "  loras: {count: 4, rank: 513}", "workload.loras: rank is 513. It must be from 1 to 512."),
    (LORAS, "  loras: {count: 4, rank: 32}", "adapters of rank 32 are above max_lora_rank 16. Raise it, or lower"),
    (LORAS, "  loras: {count: 4, share_of_requests: 120%}", "workload.loras.share_of_requests"),
    (LORAS, "  loras: {count: 4, share_of_requests: -1%}", "workload.loras.share_of_requests"),
    (LORAS, "  loras: {count: 4, popularity: zipf}", "workload.loras.popularity"),
    (LORAS, "  loras: {count: 4, popularity: {kind: zipf}}", "workload.loras.popularity"),
    (
        LORAS,
        "  loras: {count: 4, popularity: {kind: zipf, alpha: -1}}",
        "workload.loras.popularity: alpha is -1. It must be",
    ),
    (
        LORAS,
        "  loras: {count: 4, popularity: {kind: zipf, alpha: 11}}",
        "workload.loras.popularity: alpha is 11. It must be",
    ),
    (LORAS, "  loras: {count: 4, popularity: {kind: pareto}}", "workload.loras.popularity"),
    (LORAS, "  loras: {count: 4, popularity: {kind: uniform, alpha: 1}}", "workload.loras.popularity"),
    (
        LORAS,
        "  loras: {count: 2, popularity: {kind: shares, shares: [50%, 30%]}}",
        "add up to 80%. They must make",
    ),
    (LORAS, "  loras: {count: 3, popularity: {kind: shares, shares: [50%, 50%]}}", "has 2 shares, and count is 3"),
    (LORAS, "  loras: {count: 1, popularity: {kind: shares, shares: []}}", "add up to 0%"),
    (LORAS, "  loras: {number: 4}", "number"),
    (LORAS, "  loras: 4", "workload.loras"),
    (LORAS, "  loras: {}", "how many adapters there are is not said"),
    (LORAS + "\n", "", "lora_cost: the workload has no LoRA adapters. Write workload.loras, or drop lora_cost."),
    (f"{LORAS}\n{COST}\n", "", "max_loras is for LoRA adapters, and the workload has none"),
    (COST + "\n", "", "lora_cost is missing: the workload has LoRA adapters. Write lora_cost: {step: 5%"),
    (COST, "lora_cost: {step: 10%}", "how long an adapter takes to be read from disk is not said. Write load_disk, or"),
    (COST, "lora_cost: {disk: 2GB/s, load_disk: 1s}", "load_disk and disk both say how long reading takes"),
    (COST, "lora_cost: {load_disk: 1s}", "no GPU is known over whose host link adapters would go. Write load_gpu."),
    (COST, "lora_cost: {load_disk: 1}", "lora_cost.load_disk"),
    (COST, "lora_cost: {load_disk: 1s, load_gpu: -1ms}", "lora_cost.load_gpu"),
    (COST, "lora_cost: {load_disk: 1s, load_gpu: 2h}", "lora_cost: load_gpu is 7,200s. It must be from 0s"),
    (COST, "lora_cost: {load_disk: 1s, load_gpu: 1ms, step: 101%}", "lora_cost.step"),
    (COST, "lora_cost: {load_disk: 1s, load_gpu: 1ms, per_adapter: much}", "lora_cost.per_adapter"),
    (COST, "lora_cost: {disk: fast, load_gpu: 1ms}", "lora_cost.disk"),
    (COST, "lora_cost: {load_disk: 1s, load_gpu: 1ms, per_token: 1%}", "per_token"),
    (VLLM, "  vllm: {max_loras: 0}", "max_loras"),
    (VLLM, "  vllm: {max_loras: 4, max_cpu_loras: 2}", "max_cpu_loras 2 must be at least max_loras 4"),
    (VLLM, "  vllm: {max_lora_rank: 20}", "max_lora_rank 20 is none of 1, 8, 16, 32, 64, 128, 256, 320, 512"),
    (VLLM, "  vllm: {max_lora_rank: 8}", "adapters of rank 16 are above max_lora_rank 8"),
    (VLLM, "  vllm: {lora_slots: 4}", "lora_slots"),
    (VLLM, SGLANG % ", max_loaded_loras: 1", "max_loaded_loras 1 must be at least max_loras_per_batch 2"),
    (VLLM, SGLANG % ", lora_eviction_policy: random", "lora_eviction_policy"),
    (VLLM, SGLANG % ", lora_drain_wait_threshold: -1", "lora_drain_wait_threshold"),
    (VLLM, SGLANG % ", max_lora_rank: 16", "max_lora_rank"),
    (
        VLLM,
        "  continuous: {max_num_seqs: 8, max_num_batched_tokens: 64}",
        "continuous serves no LoRA adapters, and requests ask for some.",
    ),
    (VLLM, "  static: {batch_size: 4, max_wait: 1s}", "static serves no LoRA adapters"),
    (
        VLLM,
        "  tensorrt_llm: {}",
        "tensorrt_llm serves no LoRA adapters, and requests ask for some.",
    ),
    (
        "  requests: 60",
        "  requests: 60\n  classes: {a: {share: 100%, loras: {share_of_requests: 50%}}}",
        "classes.a.loras: how many adapters there are is not said",
    ),
]


@pytest.mark.parametrize(("before", "after", "complaint"), MISTAKES)
def test_a_mistake_is_one_line_that_says_where_and_what(before: str, after: str, complaint: str) -> None:
    """With the key, the numbers, and what to do."""
    assert before in TEXT and complaint in refusal(TEXT.replace(before, after))


def test_more_adapters_than_sglang_loads_are_refused() -> None:
    """As the run begins, where their number is known of traces too."""
    with pytest.raises(ScenarioError, match="6 LoRA adapters are more than max_loaded_loras 4"):
        simulated(TEXT.replace(VLLM, SGLANG % ", max_loaded_loras: 4"))
