"""LMCache in a scenario: how much fits, what is said of it, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchsim.results.heading import kv_text
from batchsim.scenario import load_scenario
from batchsim.scenario.lmcache_tier import LmcacheTier
from batchsim.scenario.setup import Setup
from batchsim.study.curves.run import run_scenario
from tests.support.scenarios import refusal
from tests.support.tiers import changed, counted_run, one_replica_is_the_engine_alone, tier_text

TIER, POLICY = "{connector: lmcache, size: 64GB}", "vllm: {max_num_seqs: 16}"
TEXT = tier_text(TIER, POLICY)


def _setup(*changes: tuple[str, str]) -> Setup:
    return changed(TEXT, *changes)


def _tier(*changes: tuple[str, str]) -> LmcacheTier:
    tiers = _setup(*changes).tier
    assert tiers is not None and isinstance(tiers.vllm, LmcacheTier)
    return tiers.vllm


def test_a_size_is_of_all_gpus_in_chunks_of_256_tokens() -> None:
    """64 GB over 131,072 B a token, a chunk over 64 GB/s; of 2 GPUs each has half of it."""
    assert (_tier().num_chunks, _tier().load_ns, _tier().store_ns) == (1907, 524_288, 524_288)
    two = _tier(("gpu: h100}", "gpu: h100, tp: 2}"))
    assert (two.num_chunks, two.load_ns) == (1907, 262_144)
    assert _tier((TIER, "{connector: lmcache, size: 64GB, chunk_size: 64}")).num_chunks == 7629


def test_each_way_has_its_bandwidth_and_what_a_transfer_takes_beside() -> None:
    tier = _tier((TIER, TIER.replace("64GB", "64GB, bandwidth: 32GB/s, store_bandwidth: 16GB/s, latency: 20us")))
    assert (tier.load_ns, tier.store_ns) == (1_048_576, 2_097_152)
    setup = _setup((TIER, TIER.replace("64GB", "64GB, latency: 20us")))
    assert setup.tier is not None and setup.tier.vllm is not None
    config = setup.tier.vllm.policy(setup.scenario.specs[0]).config
    assert [getattr(config, name) for name in ("copy_ns", "load_ns", "cpu_chunks")] == [20_000, 524_288, 1907]


def test_the_heading_says_how_much_fits_and_how_fast_it_is() -> None:
    said = kv_text(_setup())
    assert "LMCache 488,192 tokens (1,907 chunks of 256: 64 GB over 131,072 B a token; 64 GB/s a GPU and way" in said


def test_layer_by_layer_a_step_waits_for_less() -> None:
    """Of the model's 32 layers; the same conversations find as much, and wait less for it."""
    layered = "{connector: lmcache, size: 64GB, use_layerwise: true}"
    assert (_tier().num_layers, _tier((TIER, layered)).num_layers) == (0, 32)
    assert "layer by layer, 64 GB/s" in kv_text(_setup((TIER, layered)))
    whole, by_layer = (counted_run(setup)[0] for setup in (_setup(), _setup((TIER, layered))))
    assert whole["host_hit_rate"] == by_layer["host_hit_rate"]
    assert (by_layer["kv_load_mean_s"] or 0) < 0.5 * (whole["kv_load_mean_s"] or 0)
    assert (by_layer["ttft_mean_s"] or 0) < (whole["ttft_mean_s"] or 0)


def test_metrics_count_what_the_records_have() -> None:
    """Loads, tokens and bytes of the run, and all of a life in its parts."""
    values, _ = counted_run(_setup())
    assert 0 < (values["kv_load_mean_s"] or 0) < 0.1


def test_replicas_have_hosts_of_their_own() -> None:
    one_replica_is_the_engine_alone(TEXT)


MISTAKES = [
    (TIER, "{connector: lmcache}", "size is missing: LMCache's own is 5 GiB for each GPU. Write size: 64GB, say."),
    (TIER, "{connector: lmcache, size: 2MB}", "size 2,000,000 B holds no chunk of 33,554,432 B (256 tokens)"),
    (TIER, "{connector: lmcache, size: 64GB, chunk_size: 100}", "chunk_size 100 is no multiple of the 16 tokens"),
    (TIER, "{size: 64GB, chunk_size: 64}", "chunk_size is not read with connector offloading. Leave it out."),
    (TIER, "{connector: lmcache, size: 64GB, eviction_policy: arc}", "eviction_policy is not read with connector lm"),
    (TIER, "{size: 64GB, use_layerwise: true}", "use_layerwise is not read with connector offloading. Leave it out."),
    (TIER, "{connector: lmcache, size: 64GB, enable_async_loading: true}", "enable_async_loading is not a field of"),
    (TIER, "{connector: lmcache, size: 64GB, min_retrieve_tokens: 512}", "min_retrieve_tokens is not a field of"),
    (TIER, "{connector: lmcache, size: 64GB, save_decode_cache: true}", "save_decode_cache is not a field of"),
    (TIER, "{connector: lmcache, size: 64GB, ratio: 2}", "ratio is not read under vllm"),
    (TIER, "{connector: nixl, size: 64GB}", 'kv.tiers.0.connector is "nixl"'),
    (POLICY, "sglang: {max_running_requests: 16}", "connector is not read under sglang"),
    (POLICY, "vllm: {enable_prefix_caching: false}", "Set enable_prefix_caching: true."),
    (POLICY, "vllm: {prefill_schedule_interval: 4}", "prefill_schedule_interval 4, not simulated with a tier"),
    ("gpu: h100}", "gpu: h100, pp: 2}", "not simulated beside a pipeline"),
]


@pytest.mark.parametrize(("before", "after", "complaint"), MISTAKES)
def test_a_mistake_is_one_line_that_says_where_and_what(before: str, after: str, complaint: str) -> None:
    """With the key, the numbers, and what to do."""
    assert before in TEXT and complaint in refusal(TEXT.replace(before, after))


@pytest.mark.slow
def test_the_shipped_scenario_with_lmcache_answers_as_the_page_says(tmp_path: Path) -> None:
    """The numbers of docs/tiers.md."""
    overrides = ("kv.tiers.0.connector=lmcache", "load={mean_rate: [4/s]}")
    rows = run_scenario(load_scenario("tiers", overrides=overrides), out=tmp_path).summary.set_index("vary")
    small, large = rows.loc["2GB"], rows.loc["256GB"]
    assert [round(1e3 * each["ttft_mean_s"], 1) for each in (small, large)] == [106.9, 63.1]
    assert [each["host_loads"] for each in (small, large)] == [0, 179]
    assert [round(100 * each["host_hit_rate"]) for each in (small, large)] == [0, 21]
