"""SGLang's HiCache in a scenario: how much fits, what is said of it, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.kernel.record import STORE_FLUSH, TIER_LOAD
from batchsim.results.heading import kv_text
from batchsim.scenario import load_scenario
from batchsim.scenario.hicache_tier import HiCacheTier
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup
from batchsim.study.curves.run import run_scenario
from tests.support.scenarios import refusal
from tests.support.tier_lives import moved
from tests.support.tiers import changed, counted_run, one_replica_is_the_engine_alone, tier_text

TIER, POLICY = "{kind: host}", "sglang: {max_running_requests: 16}"
TEXT = tier_text(TIER, POLICY)


def _setup(*changes: tuple[str, str]) -> Setup:
    return changed(TEXT, *changes)


def _tier(*changes: tuple[str, str]) -> HiCacheTier:
    tiers = _setup(*changes).tier
    assert tiers is not None and tiers.sglang is not None
    return tiers.sglang


def test_a_ratio_is_as_many_pages_as_sglang_counts() -> None:
    """2.0 x 40,000 tokens by default, in pages of 16, and one more; a page of 2,097,152 B over 64 GB/s."""
    assert (_tier().num_pages, _tier().load_ns, _tier().num_layers) == (5001, 32_768, 32)
    assert _tier((TIER, "{ratio: 0.5}")).num_pages == 1251


def test_a_size_is_of_all_gpus_each_of_which_has_a_pool_of_its_own() -> None:
    """64 GB over 131,072 B a token; of 2 GPUs each has half of both. 16 GPUs have each of 8 KV heads twice, and the
    hosts' pools too."""
    assert _tier((TIER, "{size: 64GB}")).num_pages == 30_518
    two = _tier((TIER, "{size: 64GB}"), ("gpu: h100}", "gpu: h100, tp: 2}"))
    assert (two.num_pages, two.token_bytes, two.load_ns) == (30_518, 65_536, 16_384)
    sixteen = _tier((TIER, "{size: 64GB}"), ("gpu: h100}", "gpu: h100, tp: 16}"))
    assert (sixteen.num_pages, sixteen.token_bytes) == (15_259, 16_384)


def test_the_heading_says_how_much_fits_and_how_fast_it_is() -> None:
    said = kv_text(_setup())
    assert "HiCache 80,016 tokens on the host (5,001 pages of 16: 2 times the GPU's, 131,072 B a token and GPU" in said
    assert "write_through; 64 GB/s a GPU and way, the most that the data sheet of h100 has" in said


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_metrics_count_what_the_records_have(policy: str) -> None:
    """Loads, tokens and bytes of the run, and all of a life in its parts."""
    values, records = counted_run(_setup((TIER, f"{{write_policy: {policy}}}")))
    assert 0 < (values["kv_load_mean_s"] or 0) < 0.01
    assert values["kv_stores_stalled"] == (records.states["state"] == STORE_FLUSH).sum()
    assert (values["kv_stores_stalled"] == 0) == (policy != "write_back")


def test_replicas_have_hosts_of_their_own() -> None:
    one_replica_is_the_engine_alone(TEXT)


def test_two_engines_keep_the_same_size_their_own_way() -> None:
    """vLLM's chunks and SGLang's pages of 64 GB, side by side."""
    setup = _setup((TIER, "{size: 64GB}"), (POLICY, POLICY + "\n  vllm: {max_num_seqs: 16}"))
    assert setup.tier is not None and setup.tier.vllm is not None and setup.tier.sglang is not None
    assert (setup.tier.vllm.num_chunks, setup.tier.sglang.num_pages) == (30_517, 30_518)
    runs = [simulate_point(setup, point).records for point in setup.scenario.points()]
    assert all(moved(records, TIER_LOAD) for records in runs)


MISTAKES = [
    (TIER, "{size: 64GB, ratio: 2}", "size and ratio both say how much fits. Write one of them."),
    (TIER, "{size: 0B}", "size 0 B holds no page of 2,097,152 B (16 tokens)"),
    (TIER, "{size: 2MB}", "size 2,000,000 B holds no page of 2,097,152 B (16 tokens)"),
    (TIER, "{ratio: 0}", "kv.tiers.0: ratio is 0"),
    (TIER, "{ratio: 0.0001}", "ratio 0.0001 of 40,000 tokens holds no page of 16 tokens"),
    (TIER, "{write_policy: write_around}", 'kv.tiers.0.write_policy is "write_around"'),
    (TIER, "{eviction_policy: arc}", "eviction_policy is not read under sglang. Leave it out, or sglang."),
    (TIER, "{offload_prompt_only: false}", "offload_prompt_only is not read under sglang"),
    (TIER, "{blocks_per_chunk: 2}", "blocks_per_chunk is not read under sglang"),
    (TIER, "{kind: disk}", "tiers are disk: one host's memory is simulated, and one disk below it"),
    (POLICY, "vllm: {}", "size is missing, for which vLLM has no default. Write size: 64GB, say."),
    (POLICY, "sglang: {disable_radix_cache: true}", "sglang caches no prefixes"),
    (
        POLICY,
        "sglang: {speculative_algorithm: NGRAM, speculative_num_draft_tokens: 4, acceptance: [0.5, 0.5, 0.5]}",
        "sglang drafts tokens, not simulated with a tier. Leave out speculative_algorithm.",
    ),
    (
        "  output_cap: 50",
        "  output_cap: 50\n  structured: 30%\nstructured_cost: {step: 100us, per_request: 20us}",
        "sglang with constrained answers: not simulated beside HiCache",
    ),
    ("gpu: h100}", "gpu: h100, pp: 2}", "not simulated beside a pipeline"),
    ("cost: {kind: roofline, gpu: h100}", "cost: {kind: constant, step: 10ms}", "no GPU of the catalog says"),
]


@pytest.mark.parametrize(("before", "after", "complaint"), MISTAKES)
def test_a_mistake_is_one_line_that_says_where_and_what(before: str, after: str, complaint: str) -> None:
    """With the key, the numbers, and what to do."""
    assert before in TEXT and complaint in refusal(TEXT.replace(before, after))


def test_vllm_has_no_knobs_of_sglang() -> None:
    with pytest.raises(ScenarioError, match=r"write_policy is not read under vllm. Leave it out, or vllm."):
        _setup((TIER, "{size: 64GB, write_policy: write_back}"), (POLICY, "vllm: {}"))


@pytest.mark.slow
def test_the_shipped_scenario_under_sglang_answers_as_the_page_says(tmp_path: Path) -> None:
    """The numbers of docs/tiers.md."""
    scenario = load_scenario("tiers", overrides=("policies={sglang: {}}", "load={mean_rate: [4/s]}"))
    rows = run_scenario(scenario, out=tmp_path).summary.set_index("vary")
    small, large = rows.loc["2GB"], rows.loc["256GB"]
    assert [round(1e3 * each["ttft_mean_s"], 1) for each in (small, large)] == [95.4, 52.3]
    assert [each["host_loads"] for each in (small, large)] == [0, 179]
    assert [round(100 * each["host_hit_rate"]) for each in (small, large)] == [0, 23]
