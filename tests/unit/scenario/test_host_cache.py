"""TensorRT-LLM's host cache in a scenario: how much fits, what is said of it, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchsim.kernel.record import LOAD_WAITED
from batchsim.results.heading import kv_text
from batchsim.scenario import load_scenario
from batchsim.scenario.host_cache import HostCache
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup
from batchsim.study.curves.run import run_scenario
from tests.support.scenarios import refusal
from tests.support.tiers import changed, counted_run, one_replica_is_the_engine_alone, tier_text

TIER, POLICY = "{kind: host, size: 64GB}", "tensorrt_llm: {enable_chunked_prefill: true}"
TEXT = tier_text(TIER, POLICY)


def _setup(*changes: tuple[str, str]) -> Setup:
    return changed(TEXT, *changes)


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
    values, records = counted_run(_setup())
    assert 0 < (values["kv_load_mean_s"] or 0) < 0.05
    assert (values["kv_stores_stalled"], values["kv_store_flush_s"]) == (0, 0)
    assert (records.states["state"] == LOAD_WAITED).any()


def test_replicas_have_hosts_of_their_own() -> None:
    one_replica_is_the_engine_alone(TEXT)


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
    assert before in TEXT and complaint in refusal(TEXT.replace(before, after))


@pytest.mark.slow
def test_the_shipped_scenario_under_tensorrt_llm_answers_as_the_page_says(tmp_path: Path) -> None:
    """The numbers of docs/tiers.md."""
    policies = "policies={tensorrt_llm: {enable_chunked_prefill: true}}"
    scenario = load_scenario("tiers", overrides=(policies, "load={mean_rate: [4/s]}"))
    rows = run_scenario(scenario, out=tmp_path).summary.set_index("vary")
    small, large = rows.loc["2GB"], rows.loc["256GB"]
    assert [round(1e3 * each["ttft_mean_s"]) for each in (small, large)] == [101, 59]
    assert [each["host_loads"] for each in (small, large)] == [14, 180]
