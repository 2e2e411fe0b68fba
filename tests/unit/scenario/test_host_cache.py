"""TensorRT-LLM's host cache in a scenario: how much fits, what is said of it, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.kernel.record import LOAD_WAITED, TIER_LOAD, TIER_STORE
from batchsim.metrics.measure import measure
from batchsim.results.heading import kv_text
from batchsim.results.keep import point_inputs
from batchsim.scenario import load_scenario
from batchsim.scenario.host_cache import HostCache
from batchsim.scenario.parse import parse_scenario
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup
from batchsim.study.curves.run import run_scenario
from batchsim.testing.life_sums import check_lives
from tests.support.tier_lives import moved
from tests.unit.scenario.test_hicache_tier import TEXT as UNDER_SGLANG

TIER, POLICY = "{kind: host, size: 64GB}", "tensorrt_llm: {enable_chunked_prefill: true}"
TEXT = UNDER_SGLANG.replace("{kind: host}", TIER).replace("sglang: {max_running_requests: 16}", POLICY)


def _setup(*changes: tuple[str, str]) -> Setup:
    text = TEXT
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return Setup.of(parse_scenario(text, "mine.yaml", Path()))


def _tier(*changes: tuple[str, str]) -> HostCache:
    tiers = _setup(*changes).tier
    assert tiers is not None and tiers.tensorrt_llm is not None
    return tiers.tensorrt_llm


def test_a_size_is_of_all_gpus_each_of_which_has_a_pool_of_its_own() -> None:
    """64 GB over 131,072 B a token in blocks of 16, each over 64 GB/s; of 2 GPUs each has half of both."""
    assert (_tier().num_blocks, _tier().load_ns, _tier().store_ns) == (30_517, 32_768, 32_768)
    two = _tier(("gpu: h100}", "gpu: h100, tp: 2}"))
    assert (two.num_blocks, two.token_bytes, two.load_ns) == (30_517, 65_536, 16_384)


def test_each_way_has_its_bandwidth_and_what_a_transfer_takes_beside() -> None:
    setup = _setup((TIER, "{size: 64GB, bandwidth: 32GB/s, store_bandwidth: 16GB/s, latency: 20us}"))
    assert setup.tier is not None and setup.tier.tensorrt_llm is not None
    kv = setup.tier.tensorrt_llm.new_kv(100, 16)
    assert (kv.loading.fixed_ns, kv.loading.chunk_ns) == (20_000, 65_536)
    assert (kv.storing.fixed_ns, kv.storing.chunk_ns) == (20_000, 131_072)


def test_the_heading_says_how_much_fits_and_how_fast_it_is() -> None:
    said = kv_text(_setup())
    assert "host cache 488,272 tokens (30,517 blocks of 16: 64 GB, 131,072 B a token and GPU; 64 GB/s a GPU" in said


def test_metrics_count_what_the_records_have() -> None:
    """Loads, tokens and bytes of the run, and all of a life in its parts."""
    setup = _setup()
    run = simulate_point(setup, setup.scenario.points()[0])
    values = measure(point_inputs(setup, run)).values
    states = run.records.states
    loads, stores = moved(run.records, TIER_LOAD), moved(run.records, TIER_STORE)
    assert values["host_loads"] == (states["state"] == TIER_LOAD).sum() > 1
    assert values["host_loaded_bytes"] == sum(loads.values()) * 131_072
    assert values["host_stored_bytes"] == sum(stores.values()) * 131_072
    assert 0 < (values["kv_load_mean_s"] or 0) < 0.05
    assert (values["kv_stores_stalled"], values["kv_store_flush_s"]) == (0, 0)
    assert (states["state"] == LOAD_WAITED).any()
    check_lives(run.records)


def test_replicas_have_hosts_of_their_own() -> None:
    """One replica is the engine alone."""
    alone, replica = _setup(), _setup(("seeds: 1", "seeds: 1\nreplicas: {count: 1}"))
    point = alone.scenario.points()[0]
    one, behind = (simulate_point(setup, point).records for setup in (alone, replica))
    assert len(moved(one, TIER_LOAD)) > 3
    assert one.requests["first_token_ns"].tolist() == behind.requests["first_token_ns"].tolist()


def test_a_host_that_is_never_asked_changes_no_record() -> None:
    """Where all that comes back is on the GPU."""
    roomy = [(f"kv: {{tokens: 40000, tiers: [{TIER}]}}", each) for each in (
        f"kv: {{tokens: 400000, tiers: [{TIER}]}}", "kv: {tokens: 400000}")]  # fmt: skip
    hosted, alone = (_setup(change) for change in roomy)
    point = alone.scenario.points()[0]
    one, other = (simulate_point(setup, point).records for setup in (hosted, alone))
    assert one.requests.tobytes() == other.requests.tobytes()
    assert one.steps.tobytes() == other.steps.tobytes()


MISTAKES = [
    (TIER, "{kind: host}", "size is missing: TensorRT-LLM has no host cache by default. Write size: 64GB, say."),
    (TIER, "{size: 2MB}", "size 2,000,000 B holds no block of 2,097,152 B (16 tokens)"),
    (TIER, "{size: 64GB, ratio: 2}", "ratio is not read under tensorrt_llm. Leave it out, or tensorrt_llm."),
    (TIER, "{size: 64GB, write_policy: write_back}", "write_policy is not read under tensorrt_llm"),
    (TIER, "{size: 64GB, blocks_per_chunk: 2}", "blocks_per_chunk is not read under tensorrt_llm"),
    (POLICY, "tensorrt_llm: {enable_block_reuse: false}", "Set enable_block_reuse: true."),
    ("gpu: h100}", "gpu: h100, pp: 2}", "not simulated beside a pipeline"),
    ("cost: {kind: roofline, gpu: h100}", "cost: {kind: constant, step: 10ms}", "no GPU of the catalog says"),
]


@pytest.mark.parametrize(("before", "after", "complaint"), MISTAKES)
def test_a_mistake_is_one_line_that_says_where_and_what(before: str, after: str, complaint: str) -> None:
    """With the key, the numbers, and what to do."""
    with pytest.raises(ScenarioError) as caught:
        _setup((before, after))
    (line,) = str(caught.value).splitlines()
    assert line.startswith("mine.yaml") and complaint in line


@pytest.mark.slow
def test_the_shipped_scenario_under_tensorrt_llm_answers_as_the_page_says(tmp_path: Path) -> None:
    """The numbers of docs/tiers.md."""
    policies = "policies={tensorrt_llm: {enable_chunked_prefill: true}}"
    scenario = load_scenario("tiers", overrides=(policies, "load={mean_rate: [4/s]}"))
    rows = run_scenario(scenario, out=tmp_path).summary.set_index("vary")
    small, large = rows.loc["2GB"], rows.loc["256GB"]
    assert [round(1e3 * each["ttft_mean_s"]) for each in (small, large)] == [101, 59]
    assert [each["host_loads"] for each in (small, large)] == [14, 180]
