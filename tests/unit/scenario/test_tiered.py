"""KV in the memory of the host in a scenario: its size and speed, what is said of it, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.base.plain import value_at
from batchsim.kernel.record import TIER_LOAD, TIER_STORE
from batchsim.metrics.attribution import attribute
from batchsim.metrics.measure import measure
from batchsim.results.heading import kv_text
from batchsim.results.keep import point_inputs
from batchsim.scenario import load_scenario
from batchsim.scenario.parse import parse_scenario
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup
from batchsim.scenario.tiered import HostTier
from batchsim.study.curves.lines import short_key
from batchsim.study.curves.run import run_scenario
from batchsim.testing.life_sums import check_lives
from tests.support.scenarios import refusal, setup_of
from tests.support.tier_lives import moved
from tests.support.tiers import TOKEN_BYTES, counted_run, one_replica_is_the_engine_alone, tier_text

TEXT = tier_text("{size: 64GB}", "vllm: {max_num_seqs: 16}")


def _setup(before: str = "seeds: 1", after: str = "seeds: 1") -> Setup:
    assert before in TEXT
    return setup_of(TEXT.replace(before, after))


def _offloaded(before: str = "seeds: 1", after: str = "seeds: 1") -> HostTier:
    tiers = _setup(before, after).tier
    assert tiers is not None and tiers.vllm is not None and tiers.sglang is None
    return tiers.vllm


def test_a_size_is_as_many_chunks_as_vllm_counts() -> None:
    """64 GB over 131,072 B a token of Llama-3.1-8B; split over 2 GPUs the same, each with half the bytes on its link;
    16 GPUs replicate each of 8 KV heads; a block of 16 tokens takes 2,097,152 B / 64 GB/s of a H100's link."""
    one = _offloaded()
    assert (one.num_chunks, one.chunk_bytes, one.load_ns, one.store_ns) == (30_517, 2_097_152, 32_768, 32_768)
    two = _offloaded("gpu: h100}", "gpu: h100, tp: 2}")
    assert (two.num_chunks, two.chunk_bytes, two.load_ns) == (30_517, 2_097_152, 16_384)
    chunked = "{size: 64GB, blocks_per_chunk: 4, bandwidth: 32GB/s, store_bandwidth: 16GB/s}"
    four = _offloaded("{size: 64GB}", chunked)
    assert (four.num_chunks, four.chunk_tokens, four.load_ns, four.store_ns) == (7_629, 64, 262_144, 524_288)


def test_the_heading_says_how_much_fits_and_how_fast_it_is() -> None:
    """With the source of a bandwidth that the scenario does not state."""
    said = kv_text(_setup())
    assert "host tier 488,272 tokens (30,517 chunks of 16: 64 GB over 131,072 B a token; lru, prompts only" in said
    assert "64 GB/s a GPU and way, the most that the data sheet of h100 has" in said
    assert "loads at 10, stores at 5 GB/s" in kv_text(
        _setup("{size: 64GB}", "{size: 64GB, bandwidth: 10GB/s, store_bandwidth: 5GB/s}")
    )


def test_metrics_count_what_the_records_have() -> None:
    """Loads, tokens and bytes of the run, and all of a life in its parts."""
    values, records = counted_run(_setup())
    assert len(moved(records, TIER_LOAD)) > 3
    assert 0 < (values["kv_load_mean_s"] or 0) < 0.1


def test_a_disk_below_the_host_is_counted_apart() -> None:
    """A host of 2 GB gives up what is asked for again: it comes from the disk, of which reads, tokens and bytes are on
    record by themselves, to be loaded from the host. The heading says how fast the disk is."""
    disk = "{size: 2GB}, {kind: disk, bandwidth: 5GB/s, store_bandwidth: 4GB/s}"
    setup = _setup("{size: 64GB}", disk)
    assert "· disk below it, which gives nothing up (reads at 5, writes at 4 GB/s)" in kv_text(setup)
    run = simulate_point(setup, setup.scenario.points()[0])
    values = measure(point_inputs(setup, run)).values
    records = run.records
    rows = records.states[records.states["reason"] == records.texts.index("disk")]
    reads, writes = (rows[rows["state"] == what]["blocker"] for what in (TIER_LOAD, TIER_STORE))
    assert values["disk_loads"] == len(reads) > 3
    assert values["disk_loaded_bytes"] == reads.sum() * TOKEN_BYTES
    assert values["disk_stored_bytes"] == writes.sum() * TOKEN_BYTES > 0
    assert 0 < (values["disk_hit_rate"] or 0) <= (values["host_hit_rate"] or 0)
    check_lives(records)
    parts = attribute(records)
    assert "queued:kv_disk" in parts["part"].tolist()
    # A chunk of 2,097,152 B at 5 and at 4 GB/s.
    tier = _offloaded("{size: 64GB}", disk).disk
    assert tier is not None and (tier.read_ns, tier.write_ns) == (419_430, 524_288)


def test_replicas_have_tiers_of_their_own() -> None:
    """One replica is the engine alone; of two each loads what it stored."""
    one_replica_is_the_engine_alone(TEXT)
    two = _setup("seeds: 1", "seeds: 1\nreplicas: {count: 2, router: {kind: round_robin}}")
    run = simulate_point(two, two.scenario.points()[0])
    assert measure(point_inputs(two, run)).values["host_loads"] == len(moved(run.records, TIER_LOAD))


def test_a_tier_is_set_by_its_place() -> None:
    """`--set`, `vary` and `--counterfactual` name the tiers of the list from 0 on."""
    scenario = parse_scenario(TEXT, "mine.yaml", Path(), ("kv.tiers.0.size=128GB",))
    assert [tier.size for tier in scenario.file.kv.tiers] == [128_000_000_000]
    assert value_at(scenario.plain, ("kv", "tiers", "0", "size")) == "128GB"
    assert value_at(scenario.plain, ("kv", "tiers", "1", "size")) is None
    for wrong in ("kv.tiers.1.size=1GB", "kv.tiers.first.size=1GB"):
        with pytest.raises(ScenarioError, match=r"kv.tiers is a list of 1, and (1|first) is none of 0 to 0"):
            parse_scenario(TEXT, "mine.yaml", Path(), (wrong,))


@pytest.mark.parametrize("text", [("kv.tiers=[]",), ()])
def test_a_first_tier_is_begun_by_its_size(text: tuple[str, ...]) -> None:
    """A scenario without tiers gets one, of the host, with the other keys at their defaults: what a counterfactual of a
    run without them asks for. Any other key, or place, is one line."""
    none = TEXT.replace(f", tiers: [{TIER}]", "")
    scenario = parse_scenario(none if not text else TEXT, "mine.yaml", Path(), (*text, "kv.tiers.0.size=128GB"))
    (tier,) = scenario.file.kv.tiers
    assert (tier.kind, tier.size, tier.eviction_policy) == ("host", 128_000_000_000, "lru")
    for wrong, said in (
        ("kv.tiers.0.latency=3us", "kv.tiers: size is missing, for which vLLM has no default"),
        ("kv.tiers.1.size=1GB", "kv.tiers is empty. Set it as a whole."),
    ):
        with pytest.raises(ScenarioError, match=said):
            Setup.of(parse_scenario(none if not text else TEXT, "mine.yaml", Path(), (*text, wrong)))


@pytest.mark.parametrize(
    ("key", "short"),
    [("kv.tiers.0.size", "tiers.0.size"), ("kv.tokens", "kv.tokens"), ("policies.a.b", "b"), ("a", "a")],
)
def test_a_varied_tier_is_named_with_its_list(key: str, short: str) -> None:
    assert short_key(key) == short


POLICY = "vllm: {max_num_seqs: 16}"
COST = "cost: {kind: roofline, gpu: h100}"
TIER = "{size: 64GB}"
POOLS = "pools: {prefill: {count: 1}, decode: {count: 1}, transfer: {bandwidth: 50GB/s}}"
LORAS = "lora_cost: {step: 5%, per_adapter: 1%, load_gpu: 10ms, load_disk: 200ms}"
DISK = "{size: 64GB}, {kind: disk, bandwidth: 5GB/s}"
MISTAKES = [
    (TIER, "{size: 64GB}, {size: 1GB}", "tiers are host, host: one host's memory is simulated, and one disk below it"),
    (TIER, "{kind: disk, bandwidth: 5GB/s}", "tiers are disk: one host's memory is simulated, and one disk below it"),
    (TIER, DISK.replace("disk", "remote"), "kv.tiers.1.kind is \"remote\". Write 'host' or 'disk'."),
    (TIER, DISK + ", " + DISK[DISK.index("{kind") :], "tiers are host, disk, disk: one host's memory is simulated"),
    (
        TIER,
        DISK.replace("}", ", size: 4TB}").replace("64GB, size: 4TB", "64GB"),
        "size of a disk is not read: vLLM",
    ),
    (TIER, DISK.replace("disk,", "disk, blocks_per_chunk: 4,"), "blocks_per_chunk of a disk is not read: it is a key"),
    (TIER, "{size: 64GB}, {kind: disk}", "bandwidth of the disk is missing. Write bandwidth: 5GB/s, say."),
    (TIER, DISK.replace("64GB", "64GB, store_threshold: 2"), "store_threshold 2 is not simulated with a disk. Set it"),
    (TIER, DISK.replace("64GB", "64GB, connector: lmcache"), "a disk is simulated below the host of vLLM's own connec"),
    (POLICY, "sglang: {}", "kv.tiers: a disk is simulated below the host of vLLM's own connector alone"),
    (TIER, "{kind: host}", "kv.tiers: size is missing, for which vLLM has no default. Write size: 64GB, say."),
    (TIER, "{size: 0B}", "size 0 B holds no chunk of 2,097,152 B (16 tokens), and vLLM does not start"),
    (TIER, "{size: 2MB}", "size 2,000,000 B holds no chunk of 2,097,152 B (16 tokens)"),
    (TIER, "{size: 64}", "kv.tiers.0.size: 64 is not a size"),
    (TIER, "{size: 64GB, speed: 3}", "kv.tiers.0.speed is not a field of kv.tiers.0"),
    (TIER, "{size: 64GB, bandwidth: 0GB/s}", "kv.tiers.0.bandwidth: '0GB/s' is not above 0"),
    (TIER, "{size: 64GB, store_bandwidth: 3}", "kv.tiers.0.store_bandwidth: 3 is not a bandwidth"),
    (TIER, "{size: 64GB, latency: -1us}", "kv.tiers.0.latency"),
    (TIER, "{size: 64GB, blocks_per_chunk: 0}", "kv.tiers.0: blocks_per_chunk is 0"),
    (TIER, "{size: 64GB, eviction_policy: lfu}", 'kv.tiers.0.eviction_policy is "lfu"'),
    (TIER, "{size: 64GB, store_threshold: -1}", "kv.tiers.0: store_threshold is -1"),
    ("[{size: 64GB}]", "{size: 64GB}", "kv.tiers is"),
    (COST, "cost: {kind: constant, step: 10ms}", "no GPU of the catalog says how fast its host is"),
    (COST, "cost: {kind: roofline, gpu: h100, pp: 2}", "not simulated beside a pipeline. Leave out pp, or tiers."),
    (
        POLICY,
        "static: {batch_size: 4}",
        "static is of kind static, and only vllm, sglang and tensorrt_llm offload KV here",
    ),
    (
        POLICY,
        "continuous: {max_num_seqs: 4, max_num_batched_tokens: 64}",
        "continuous is of kind continuous, and only",
    ),
    (POLICY, "vllm: {enable_prefix_caching: false}", "vllm caches no prefixes"),
    (POLICY, "vllm: {prefill_schedule_interval: 4}", "vllm has prefill_schedule_interval 4"),
    (
        POLICY,
        "vllm: {speculative_config: {method: eagle, num_speculative_tokens: 1, acceptance: [0.5]}}",
        "vllm drafts tokens",
    ),
    ("seeds: 1", "seeds: 1\n" + POOLS, "not simulated beside prefill and decode apart. Leave out pools, or tiers."),
    ("  output_cap: 50", "  output_cap: 50\n  loras: {count: 3}\n" + LORAS, "not simulated beside LoRA adapters."),
]


@pytest.mark.parametrize(("before", "after", "complaint"), MISTAKES)
def test_a_mistake_is_one_line_that_says_where_and_what(before: str, after: str, complaint: str) -> None:
    """With the key, the numbers, and what to do."""
    text = TEXT.replace(TIER, DISK) if "a disk is" in complaint and before == POLICY else TEXT
    assert before in text and complaint in refusal(text.replace(before, after))


def test_real_engines_have_no_tiers() -> None:
    """Only a simulation has one."""
    with pytest.raises(ScenarioError, match=r"kv.tiers can only be simulated. Remove them"):
        _setup().check_can_be_real()


@pytest.mark.slow
def test_the_shipped_scenario_answers_as_it_says(tmp_path: Path) -> None:
    """Its text: at 1/s the host changes nothing; at 4/s the mean TTFT is two thirds and its p99 two fifths."""
    rows = run_scenario(load_scenario("tiers"), out=tmp_path).summary.set_index(["vary", "load"])
    small, large = ({load: rows.loc[(size, load)] for load in (1.0, 4.0)} for size in ("2GB", "256GB"))
    for name in ("ttft_mean_s", "ttft_p99_s", "prefix_hit_rate", "host_hit_rate"):
        assert small[1.0][name] == large[1.0][name]
    assert small[4.0]["host_loads"] == 0 < large[4.0]["host_loads"]
    assert large[4.0]["ttft_mean_s"] / small[4.0]["ttft_mean_s"] == pytest.approx(2 / 3, abs=0.05)
    assert large[4.0]["ttft_p99_s"] / small[4.0]["ttft_p99_s"] == pytest.approx(2 / 5, abs=0.05)
    # the numbers of docs/tiers.md
    assert [round(1e3 * each[4.0]["ttft_mean_s"], 1) for each in (large, small)] == [64.6, 94.9]
    assert [each[load]["host_loads"] for each in (small, large) for load in (1.0, 4.0)] == [0, 0, 0, 178]
