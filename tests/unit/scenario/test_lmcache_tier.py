"""LMCache in a scenario: how much fits, what is said of it, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.kernel.record import TIER_LOAD, TIER_STORE
from batchsim.metrics.measure import measure
from batchsim.results.heading import kv_text
from batchsim.results.keep import point_inputs
from batchsim.scenario import load_scenario
from batchsim.scenario.lmcache_tier import LmcacheTier
from batchsim.scenario.parse import parse_scenario
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup
from batchsim.study.curves.run import run_scenario
from batchsim.testing.life_sums import check_lives
from tests.support.tier_lives import moved
from tests.unit.scenario.test_hicache_tier import TEXT as UNDER_SGLANG

TIER, POLICY = "{connector: lmcache, size: 64GB}", "vllm: {max_num_seqs: 16}"
TEXT = UNDER_SGLANG.replace("{kind: host}", TIER).replace("sglang: {max_running_requests: 16}", POLICY)


def _setup(*changes: tuple[str, str]) -> Setup:
    text = TEXT
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return Setup.of(parse_scenario(text, "mine.yaml", Path()))


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


def test_metrics_count_what_the_records_have() -> None:
    """Loads, tokens and bytes of the run, and all of a life in its parts."""
    setup = _setup()
    run = simulate_point(setup, setup.scenario.points()[0])
    values = measure(point_inputs(setup, run)).values
    loads, stores = moved(run.records, TIER_LOAD), moved(run.records, TIER_STORE)
    assert values["host_loads"] == len(loads) > 1
    assert values["host_loaded_bytes"] == sum(loads.values()) * 131_072
    assert values["host_stored_bytes"] == sum(stores.values()) * 131_072
    assert 0 < (values["kv_load_mean_s"] or 0) < 0.1
    check_lives(run.records)


def test_replicas_have_hosts_of_their_own() -> None:
    """One replica is the engine alone."""
    alone, replica = _setup(), _setup(("seeds: 1", "seeds: 1\nreplicas: {count: 1}"))
    point = alone.scenario.points()[0]
    one, behind = (simulate_point(setup, point).records for setup in (alone, replica))
    assert len(moved(one, TIER_LOAD)) > 3
    assert one.requests["first_token_ns"].tolist() == behind.requests["first_token_ns"].tolist()


MISTAKES = [
    (TIER, "{connector: lmcache}", "size is missing: LMCache's own is 5 GiB for each GPU. Write size: 64GB, say."),
    (TIER, "{connector: lmcache, size: 2MB}", "size 2,000,000 B holds no chunk of 33,554,432 B (256 tokens)"),
    (TIER, "{connector: lmcache, size: 64GB, chunk_size: 100}", "chunk_size 100 is no multiple of the 16 tokens"),
    (TIER, "{size: 64GB, chunk_size: 64}", "chunk_size is not read with connector offloading. Leave it out."),
    (TIER, "{connector: lmcache, size: 64GB, eviction_policy: arc}", "eviction_policy is not read with connector lm"),
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
    with pytest.raises(ScenarioError) as caught:
        _setup((before, after))
    (line,) = str(caught.value).splitlines()
    assert line.startswith("mine.yaml") and complaint in line


@pytest.mark.slow
def test_the_shipped_scenario_with_lmcache_answers_as_the_page_says(tmp_path: Path) -> None:
    """The numbers of docs/tiers.md."""
    overrides = ("kv.tiers.0.connector=lmcache", "load={mean_rate: [4/s]}")
    rows = run_scenario(load_scenario("tiers", overrides=overrides), out=tmp_path).summary.set_index("vary")
    small, large = rows.loc["2GB"], rows.loc["256GB"]
    assert [round(1e3 * each["ttft_mean_s"], 1) for each in (small, large)] == [106.9, 63.1]
    assert [each["host_loads"] for each in (small, large)] == [0, 179]
    assert [round(100 * each["host_hit_rate"]) for each in (small, large)] == [0, 21]
