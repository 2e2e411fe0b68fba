"""Scenarios with constrained answers: what their masks cost each engine, whose time that is, and mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchsim.base.errors import ScenarioError, TraceError
from batchsim.explain.step_terms import step_terms
from batchsim.kernel.record import MASKED
from batchsim.metrics.attribution import attribute
from batchsim.metrics.masks import MASK_WAIT, step_mask_ns
from batchsim.scenario import load_scenario
from batchsim.scenario.parse import parse_scenario
from batchsim.study.curves.run import run_scenario
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
  structured: 40%
structured_cost: {step: 2ms, per_request: 3ms}
policies:
  vllm: {max_num_seqs: 8, max_num_batched_tokens: 64}
slo: ttft<1s @ 90%
seeds: 1
"""
VLLM = "  vllm: {max_num_seqs: 8, max_num_batched_tokens: 64}"
SYNC = VLLM.replace("max_num_seqs", "async_scheduling: false, max_num_seqs")
SGLANG = "  sglang: {chunked_prefill_size: 64}"
SGLANG_SYNC = "  sglang: {chunked_prefill_size: 64, disable_overlap_schedule: true}"
POLICIES = [VLLM, SYNC, SGLANG, SGLANG_SYNC]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_parts_of_every_life_sum_to_its_e2e(policy: str) -> None:
    """To the nanosecond, with waits for masks in them; the story of a request has the same parts."""
    records = simulated(TEXT.replace(VLLM, policy)).records
    check_lives(records)
    parts = attribute(records)
    assert MASK_WAIT in set(parts["part"]) and (parts["ns"] > 0).all()


@pytest.mark.slow
def test_what_masks_cost_is_what_the_page_says(tmp_path: Path) -> None:
    """The numbers of docs/structured.md, by its command."""
    changes = [
        "policies={vllm: {}, waits: {kind: vllm, async_scheduling: false}}",
        "load.mean_rate=[8/s]",
        *("seeds=1", "workload.duration=2min", "workload.structured=100%"),
        "structured_cost={step: 100us, per_request: 200us}",
        "vary={structured_cost.per_request: [1ns, 200us, 500us, 1ms]}",
    ]
    summary = run_scenario(load_scenario("chat", overrides=changes), out=tmp_path).summary
    rows = {label: summary[summary["label"].str.startswith(f"{label}, ")] for label in ("vllm", "waits")}
    paces_ms = {label: (1e3 * each["tpot_p50_s"]).tolist() for label, each in rows.items()}
    assert [float(f"{pace:.3g}") for pace in paces_ms["vllm"]] == [9.3, 9.3, 17.9, 332]
    assert [float(f"{pace:.3g}") for pace in paces_ms["waits"]] == [12.2, 12.2, 37.2, 356]
    assert [round(100 * each) for each in rows["vllm"]["attr_mask_wait_share"]] == [0, 0, 32, 68]


@pytest.mark.parametrize("policy", POLICIES)
def test_all_drivers_leave_the_same_records(policy: str) -> None:
    """By a clock and in simulated time, bit for bit."""
    drivers_agree(TEXT.replace(VLLM, policy))


@pytest.mark.parametrize("policy", POLICIES)
def test_masks_that_take_no_longer_than_forwards_delay_no_sampling(policy: str) -> None:
    """Each step takes 5 ms and more, its masks 5 ms at most; ahead of results, results go out later all the same."""
    short = TEXT.replace("{step: 2ms, per_request: 3ms}", "{step: 1ms, per_request: 500us}").replace(VLLM, policy)
    records = simulated(short).records
    free = simulated(short.replace("{step: 1ms, per_request: 500us}", "{step: 1ns}")).records
    assert not (records.states["state"] == MASKED).any()
    if "async_scheduling: false" in policy or "disable_overlap" in policy:
        assert records.steps.tobytes() == free.steps.tobytes() and records.requests.tobytes() == free.requests.tobytes()
    else:
        late_ns = records.requests["first_token_ns"] - free.requests["first_token_ns"]
        assert late_ns.max() >= 1_500_000 - 1


def test_replicas_fill_masks_of_their_own_requests() -> None:
    """The parts of every life sum to its E2E, as with one engine."""
    records = simulated(TEXT + "replicas: {count: 2, router: round_robin}\n").records
    sums = attribute(records).groupby("request_id")["ns"].sum().to_numpy()
    assert (records.requests["delivered_ns"] - records.requests["sent_ns"] == sums).all()
    assert step_mask_ns(records).sum() > 0


def test_a_share_of_each_class_is_constrained() -> None:
    """Its own where it states one, else the workload's; the n-th request is the same, however many follow."""
    classes = "  classes: {chat: {share: 50%, structured: 0%}, tool: {share: 50%}}\n"
    text = TEXT.replace("  structured: 40%\n", f"  structured: 100%\n{classes}")
    setup = setup_of(text)
    requests = [arrival.request for arrival in setup.workload(setup.scenario.loads[0], 0).arrivals()]
    assert [request.constrained for request in requests] == [request.request_class == "tool" for request in requests]
    counts = []
    for number in (60, 600):
        setup = setup_of(TEXT.replace("requests: 60", f"requests: {number}"))
        arrivals = setup.workload(setup.scenario.loads[0], 0).arrivals()
        counts.append([arrival.request.constrained for arrival in arrivals])
    assert counts[1][:60] == counts[0] and 200 < sum(counts[1]) < 280


def test_rows_of_a_trace_say_which_answers_are_constrained(tmp_path: Path) -> None:
    """By the column that the scenario names; no share may be stated beside, and no other word stand there."""
    rows = [f"{i},50,5,{word}" for i, word in enumerate(["1", "", "false", "True", "0"])]
    (tmp_path / "trace.csv").write_text("\n".join(["t,p,o,guided", *rows]))
    columns = "{arrival: t, prompt: p, output: o, structured: guided}"
    traced = f"  trace: {{path: trace.csv, columns: {columns}, time_unit: ms}}"
    text = TEXT.replace("{kind: poisson, mean_rate: 40/s}", "{kind: trace}").replace("  structured: 40%", traced)
    lines = [line for line in text.splitlines() if not line.startswith(("  lengths:", "  requests:"))]
    setup = setup_of("\n".join(lines), tmp_path)
    arrivals = setup.workload(setup.scenario.loads[0], 0).arrivals()
    assert [arrival.request.constrained for arrival in arrivals] == [True, False, False, True, False]
    with pytest.raises(ScenarioError, match="the rows of the trace say which answers are constrained"):
        parse_scenario("\n".join(lines).replace(traced, f"{traced}\n  structured: 40%"), "mine.yaml", tmp_path)
    (tmp_path / "trace.csv").write_text("t,p,o,guided\n0,50,5,json")
    with pytest.raises(TraceError, match="guided 'json' is neither 1 or true nor 0, false or empty"):
        setup_of("\n".join(lines), tmp_path).workload(1.0, 0)


SHARE, COST = "  structured: 40%\n", "structured_cost: {step: 2ms, per_request: 3ms}\n"
DRAFTS = "  vllm: {speculative_config: {method: ngram, num_speculative_tokens: 3, acceptance: 0.7}, max_num_seqs: 8}"
LORAS = "  loras: {count: 4, rank: 8}\n"
LORA_COST = "lora_cost: {load_gpu: 1ms, load_disk: 1ms}\n"
MISTAKES = [
    (SHARE, "  structured: 140%\n", "workload.structured"),
    (SHARE, "  structured: many\n", "workload.structured"),
    (SHARE, "", "structured_cost: no answer is constrained. Write workload.structured: 30%, say, or drop"),
    (SHARE, "  structured: 0%\n", "structured_cost: no answer is constrained"),
    (COST, "", "structured_cost is missing: the workload has constrained answers. Write structured_cost: {step: 100us"),
    (COST, "structured_cost: {}\n", "structured_cost takes no time. Write step: 100us, per_request: 20us, say"),
    (COST, "structured_cost: {step: 3}\n", "structured_cost.step"),
    (COST, "structured_cost: {per_request: 2s}\n", "per_request is 2s. It must be from"),
    (COST, "structured_cost: {per_step: 1ms}\n", "per_step"),
    (VLLM, "  gated: {}", "gated constrains no answers here, and workload.structured asks for some. Drop structured"),
    (VLLM, "  vllm: {runner: pooling}", "constrains no answers here"),
    (VLLM, DRAFTS, "constrained answers beside drafts are not simulated. Drop one of the two"),
    (VLLM, "  sglang: {disable_consecutive_prefill_overlap: true}", "beside constrained answers is not simulated"),
    (SHARE + COST, SHARE + LORAS + COST + LORA_COST, "constrained answers beside LoRA adapters are not simulated"),
]


@pytest.mark.parametrize(("old", "new", "said"), MISTAKES)
def test_a_mistake_is_one_clear_line(old: str, new: str, said: str) -> None:
    """Where it is, what is wrong, and what to do."""
    assert old in TEXT
    assert said in refusal(TEXT.replace(old, new))


def test_no_real_run_constrains_answers() -> None:
    setup = setup_of(TEXT)
    with pytest.raises(ScenarioError, match="constrained answers can only be simulated: no model here samples by a"):
        setup.check_can_be_real()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_steps_are_made_of_counts_waits_as_host(policy: str, tmp_path: Path) -> None:
    """Beside the one term of the cost; they sum to every step's duration."""
    results = run_scenario(parse_scenario(TEXT.replace(VLLM, policy), "mine.yaml", tmp_path), out=tmp_path)
    name = policy.split(":")[0].strip()
    records = results.records(name, 1.0, 0)
    terms = step_terms(results, records, name)
    assert terms["host"].tolist() == step_mask_ns(records).tolist() and terms["host"].any()
    assert sum(terms.values()) == pytest.approx(records.steps["duration_ns"], abs=8)
