"""Which tests are asked for each mutated file: those of its own behaviour, few seconds of them."""

from __future__ import annotations

import fnmatch
from functools import cache
from pathlib import PurePosixPath

from batchsim.policies.registry import POLICIES
from tests.mutants.making import ROOT

ENGINE = (
    "test_core test_decode test_journal kernel/test_record test_kv test_static"
    " test_continuous test_preemptive test_vllm test_regressions"
    " fleet/test_fleet drive/test_live test_attribution test_policy_errors"
)
CACHE = "test_prefix_cache test_kv test_vllm test_naive_vllm conformance:vllm"
AHEAD = "test_leaps_ahead test_vllm_pipelines test_naive_vllm test_ahead_recordings conformance:vllm"
GROUPS = "test_grouped test_grouped_cache test_vllm_groups test_naive_vllm_groups conformance/test_groups"
DRAFTS = "test_naive_vllm_drafts test_acceptance test_ahead_recordings test_draft_leaps conformance:vllm"
RADIX = "test_radix_cache test_sglang test_sglang_memory test_sglang_drafts test_tgi conformance:sglang"
REUSE = "test_tensorrt_llm test_tensorrt_llm_reuse test_tensorrt_llm_overlap conformance:tensorrt_llm"
MEASURES = "metrics/test_metrics test_objectives test_kpis test_slo conformance:continuous"
BATCHES = "test_static test_dynamic test_hf_static conformance:static conformance:dynamic"
TRITON = "test_triton conformance:triton"
LLAMA_CPP = "test_llama_cpp conformance:llama_cpp"
TGI = "test_tgi conformance:tgi"
SGLANG = (
    "test_sglang test_sglang_clip test_sglang_memory test_sglang_naive"
    " test_sglang_batch test_sglang_parts test_sglang_overlap conformance:sglang"
)
LMCACHE = "test_vllm_lmcache test_vllm_lmcache_layers unit/scenario/test_lmcache_tier"
HOST_CACHE = "test_tensorrt_llm_host unit/scenario/test_host_cache"
TENSORRT_DRAFTS = "test_tensorrt_llm_drafts test_tensorrt_llm_drafts_naive conformance:tensorrt_llm"
POOLS = (
    "test_sglang_pools_naive test_sglang_windows test_sglang_states test_sglang_states_naive"
    " conformance/test_pools_apart"
)
HICACHE = "test_sglang_hicache test_sglang_hicache_naive"
SGLANG_DRAFTS = "test_sglang_drafts test_sglang_drafts_naive test_sglang_drafts_overlap conformance:sglang"
# The tests of each file, by names in tests/ that are of one file; `conformance:KIND` are those of one policy.
TESTS = {
    "sim/kernel/core.py": (
        f"{ENGINE} test_landing test_vllm_connector test_handover test_pipeline_leaps test_sglang_hicache"
        " metrics/test_rollouts workload/test_tasks test_shared_gpu"
    ),
    "sim/kernel/chunks.py": ENGINE,
    "sim/kernel/in_flight.py": (
        f"{ENGINE} {AHEAD} test_landing test_in_flight cost/test_masks test_sglang_hicache test_side_by_side"
        " test_recorded_ranks metrics/test_tiers test_sglang_overlap validation/test_live_runs"
    ),
    "sim/kernel/leaps.py": (
        f"{ENGINE} {AHEAD} test_leaps test_sleeping_engines test_draft_leaps test_window_leaps conformance/test_shapes"
        " test_handover test_pools scenario/test_pooled workload/test_tasks curves/test_precision"
    ),
    "sim/kernel/leaps_ahead.py": f"{ENGINE} {AHEAD} test_sleeping_engines test_window_leaps test_pools test_shared_gpu",
    "sim/kernel/queue_leaps.py": "metrics/test_tiers test_vllm_offload",
    "sim/kernel/pipeline_leaps.py": "test_pipeline_leaps test_vllm_pipelines test_window_leaps",
    "sim/kernel/lane_rows.py": f"{ENGINE} {AHEAD} kernel/test_record test_sleeping_engines validation/test_live_runs",
    "sim/kernel/packed_rows.py": "kernel/test_record test_keep",
    "sim/kernel/sim_executor.py": (
        f"{ENGINE} test_draft_leaps test_acceptance test_in_flight metrics/test_encoding unit/scenario/test_adapters"
        " cost/test_masks test_pipeline_leaps test_sglang_overlap conformance/test_shapes test_landing"
    ),
    "sim/kernel/types.py": (
        f"{ENGINE} test_handover test_window_sum test_vllm_items test_embedding_cache test_tensorrt_llm"
        " test_sglang_batch"
    ),
    "sim/kernel/kv_transfer.py": "test_vllm_connector test_pools",
    "sim/kernel/kv_rooms.py": "test_rooms",
    "sim/kernel/disk_copies.py": "test_vllm_tiering",
    "sim/kernel/offload.py": "test_vllm_offload metrics/test_tiers",
    "sim/kernel/host_copies.py": f"test_host_copies {HICACHE}",
    "sim/kernel/host_link.py": f"test_host_copies {HICACHE} metrics/test_tiers {HOST_CACHE} {LMCACHE}",
    "sim/kernel/window_sum.py": "test_window_sum test_window_leaps",
    "sim/kernel/journal.py": (
        f"{ENGINE} metrics/test_encoding unit/scenario/test_adapters test_pools cost/test_masks test_sglang_hicache"
        " test_tf_serving"
    ),
    "sim/kernel/record.py": f"{ENGINE} test_frames test_keep test_window_leaps",
    "sim/kv/block_keys.py": f"{CACHE} {REUSE} test_offload_tier test_offload_lives",
    "sim/kernel/kv_blocks.py": f"{ENGINE} test_handover test_tensorrt_llm_drafts",
    "sim/kv/block_pool.py": f"{CACHE} metrics/test_tiers",
    "sim/kv/cached_runs.py": CACHE,
    "sim/kv/choice.py": "test_kv test_grouped test_vllm_groups test_sglang_states test_pools_apart test_vllm_offload",
    "sim/kv/free_queue.py": CACHE,
    "sim/kv/group_*.py": GROUPS,
    "sim/kv/grouped*.py": GROUPS,
    "sim/kv/hicache.py": f"test_hicache {HICACHE}",
    "sim/kv/host_tree.py": f"test_hicache {HICACHE}",
    "sim/kv/disk_tier.py": "test_disk_tier test_vllm_tiering",
    "sim/kv/offload_*.py": "test_offload_tier test_offload_lives test_vllm_offload",
    "sim/kv/prefix_cache.py": f"{CACHE} test_vllm_offload test_naive_vllm_drafts test_draft_leaps metrics/test_tiers",
    "sim/kv/radix_*.py": f"{RADIX} test_kv",
    "sim/kv/pooled_radix.py": POOLS,
    "sim/kv/side_*.py": POOLS,
    "sim/kv/states.py": POOLS,
    "sim/kv/window*.py": POOLS,
    "sim/kv/search.py": f"{CACHE} metrics/test_tiers",
    "sim/kv/chunk_store.py": LMCACHE,
    "sim/kv/reuse_host.py": HOST_CACHE,
    "sim/kv/reuse_tree.py": f"{REUSE} {TENSORRT_DRAFTS} {HOST_CACHE} test_kv",
    "sim/metrics/*.py": MEASURES,
    "sim/metrics/adapter*.py": "unit/scenario/test_adapters test_adapters_picture",
    "sim/metrics/encoding.py": "metrics/test_encoding",
    "sim/metrics/masks.py": "unit/scenario/test_structured cost/test_masks",
    "sim/metrics/rank_waits.py": "test_rank_waits test_recorded_ranks unit/scenario/test_ranks test_side_by_side",
    "sim/metrics/tiers.py": "metrics/test_tiers scenario/test_tiered test_sglang_hicache",
    "sim/metrics/gaps.py": f"{MEASURES} unit/scenario/test_structured",
    "sim/metrics/measure.py": (
        f"{MEASURES} curves/test_precision test_tasks test_offline metrics/test_rollouts test_adapters_picture"
        " scenario/test_tiered unit/scenario/test_shared test_keep"
    ),
    "sim/metrics/slo.py": f"{MEASURES} metrics/test_rollouts",
    "sim/metrics/stability.py": f"{MEASURES} test_planning",
    "sim/metrics/kpis.py": f"{MEASURES} test_offline test_keep unit/scenario/test_ranks",
    "sim/metrics/rollouts.py": "metrics/test_rollouts workload/test_rollout metrics/test_metrics test_objectives",
    "sim/metrics/sleeping.py": "unit/scenario/test_shared",
    "sim/metrics/step_totals.py": f"{MEASURES} test_keep unit/scenario/test_ranks",
    "sim/metrics/digest.py": "test_keep",
    "sim/metrics/histogram.py": "test_keep",
    "sim/metrics/by_minute.py": "test_keep",
    "sim/metrics/tasks.py": "test_tasks",
    "sim/metrics/latencies.py": f"{MEASURES} test_metric_table test_confidence test_plots",
    "sim/metrics/intervals.py": "test_confidence metrics/test_metrics test_planning curves/test_precision",
    "sim/metrics/warmup.py": "test_warmup",
    "sim/policies/families/budget.py": "test_continuous test_config_bounds conformance:continuous",
    "sim/policies/families/continuous.py": "test_continuous conformance:continuous",
    "sim/policies/families/dynamic.py": BATCHES,
    "sim/policies/families/preempti*.py": ("test_preemptive test_regressions conformance:preemptive"),
    "sim/policies/families/queues.py": (
        "test_vllm test_preemptive conformance:vllm test_vllm_connector test_vllm_offload test_pools"
    ),
    "sim/policies/families/padded_batch.py": (f"{BATCHES} test_tf_serving test_ray_serve test_triton"),
    "sim/policies/families/first_come.py": "test_continuous test_tgi conformance:continuous",
    "sim/policies/systems/vidur/vidur_scheduler.py": (
        "test_sarathi test_vllm_v0 test_orca test_vidur_pipelines conformance:sarathi conformance:vllm_v0"
    ),
    "sim/policies/systems/vidur/micro_batches.py": "test_vidur_pipelines conformance:sarathi",
    "sim/policies/families/closed_batches.py": "test_tf_serving test_ray_serve test_triton conformance:ray_serve",
    "sim/policies/families/static.py": BATCHES,
    "sim/policies/families/draws.py": "test_draws test_clipper",
    "sim/policies/families/held_back.py": "test_active_adapters test_lora_batch unit/scenario/test_adapters",
    "sim/policies/families/observed.py": "test_batch_agent test_step_agent",
    "sim/policies/families/batch_agent.py": "test_batch_agent",
    "sim/policies/families/step_agent.py": "test_step_agent",
    "sim/policies/families/controlled.py": "test_tbt_model test_tbt_feedback test_memory_seqs conformance:tbt_feedback",
    "sim/policies/systems/tf_batch_threads.py": "test_tf_adaptive test_tf_serial_device",
    "sim/policies/systems/tf_adaptive.py": "test_tf_adaptive conformance:adaptive_shared_batch",
    "sim/policies/systems/tf_serial_device.py": "test_tf_serial_device conformance:serial_device_batch",
    "sim/policies/systems/faster_transformer.py": "test_hf_static conformance:faster_transformer",
    "sim/policies/systems/hf_static.py": "test_hf_static conformance:hf_static",
    "sim/policies/systems/vidur/sarathi.py": ("test_sarathi test_vidur_naive test_vidur_pipelines conformance:sarathi"),
    "sim/policies/systems/vidur/orca.py": "test_orca test_vidur_pipelines conformance:orca",
    "sim/policies/systems/acceptance_law.py": "test_acceptance test_sglang_drafts",
    "sim/policies/systems/sglang/*.py": SGLANG,
    "sim/policies/systems/sglang/sglang_config.py": f"{SGLANG} test_request_kinds test_sglang_drafts test_lora_batch",
    "sim/policies/systems/sglang/sglang_drafts.py": f"{SGLANG_DRAFTS} test_request_kinds",
    "sim/policies/systems/sglang/embedding_cache.py": "test_embedding_cache",
    "sim/policies/systems/sglang/lora_batch.py": "test_lora_batch",
    "sim/policies/systems/sglang/prefill_adder.py": f"{SGLANG} {POOLS} {HICACHE} unit/scenario/test_adapters",
    "sim/policies/systems/sglang/running_batch.py": f"{SGLANG} {POOLS} {HICACHE}",
    "sim/policies/systems/sglang/sglang.py": f"{SGLANG} {POOLS} {HICACHE} unit/scenario/test_adapters",
    "sim/policies/systems/sglang/waiting_queue.py": f"{SGLANG} unit/scenario/test_adapters",
    "sim/policies/systems/sglang/window_budget.py": POOLS,
    "sim/policies/systems/sglang/sglang_hicache.py": HICACHE,
    "sim/policies/systems/sglang/pd_config.py": "test_rooms test_config_bounds",
    "sim/policies/systems/sglang/sglang_decode.py": "test_rooms test_sglang_apart_naive",
    "sim/policies/systems/sglang/sglang_prefill.py": "test_rooms test_sglang_apart_naive",
    "sim/policies/systems/sglang/sglang_items.py": "test_embedding_cache test_request_kinds",
    "sim/policies/systems/sglang/speculative_args.py": SGLANG_DRAFTS,
    "sim/policies/systems/tensorrt_llm/tensorrt_llm.py": f"{REUSE} test_tensorrt_llm_drafts",
    "sim/policies/systems/llama_cpp/*.py": LLAMA_CPP,
    "sim/policies/systems/tgi/*.py": TGI,
    "sim/policies/systems/triton/*.py": TRITON,
    "sim/policies/systems/tensorrt_llm/*.py": REUSE,
    "sim/policies/systems/tensorrt_llm/tensorrt_llm_config.py": f"{REUSE} test_tensorrt_llm_drafts",
    "sim/policies/systems/tensorrt_llm/tensorrt_llm_drafts.py": TENSORRT_DRAFTS,
    "sim/policies/systems/tensorrt_llm/tensorrt_llm_host.py": HOST_CACHE,
    "sim/policies/systems/tensorrt_llm/decoding_config.py": f"{TENSORRT_DRAFTS} test_plots",
    "sim/policies/systems/vllm/vllm.py": (
        f"{CACHE} {AHEAD} test_pipeline_leaps test_vllm_groups test_naive_vllm_groups test_vllm_items test_leaps"
        " test_core conformance/test_shapes"
    ),
    "sim/policies/systems/vllm/cohorts.py": f"{AHEAD} {GROUPS} test_pipeline_leaps",
    "sim/policies/systems/vllm/encoder_cache.py": "test_vllm_items test_ahead_recordings",
    "sim/policies/systems/vllm/vllm_items.py": "test_vllm_items metrics/test_encoding test_request_kinds",
    "sim/policies/systems/vllm/vllm_drafts.py": f"{DRAFTS} test_naive_vllm_groups test_active_adapters",
    "sim/policies/systems/vllm/active_adapters.py": "test_active_adapters test_naive_vllm test_ahead_recordings",
    "sim/policies/systems/vllm/connector_config.py": "test_vllm_connector scenario/test_pooled",
    "sim/policies/systems/vllm/lmcache_config.py": LMCACHE,
    "sim/policies/systems/vllm/offload_config.py": "test_vllm_offload metrics/test_tiers",
    "sim/policies/systems/vllm/vllm_connector.py": (
        "test_vllm_connector test_vllm_offload test_pools test_ahead_recordings"
    ),
    "sim/policies/systems/vllm/vllm_groups.py": GROUPS,
    "sim/policies/systems/vllm/vllm_intervals.py": "test_vllm_intervals test_naive_vllm test_ahead_recordings",
    "sim/policies/systems/vllm/vllm_lmcache.py": LMCACHE,
    "sim/policies/systems/vllm/vllm_tiering.py": "test_vllm_tiering",
    "sim/policies/systems/vllm/vllm_offload.py": "test_vllm_offload metrics/test_tiers test_vllm_tier_recordings",
    "sim/policies/systems/vllm/vllm_state.py": f"{CACHE} {AHEAD} test_active_adapters",
    "sim/policies/systems/vllm/speculative_config.py": f"{DRAFTS} test_config_bounds",
    "sim/policies/systems/vllm/vllm_config.py": f"{CACHE} test_config_bounds test_device_defaults test_request_kinds",
    "sim/policies/systems/vidur/vllm_v0.py": ("test_vllm_v0 test_vidur_naive test_vidur_pipelines conformance:vllm_v0"),
}


def tests_of(path: str) -> tuple[str, ...]:
    """The tests of a mutated file, by the names that `located` gives, in the order of their row: that of the most exact
    pattern; without one a policy's own, or none."""
    patterns = [pattern for pattern in TESTS if fnmatch.fnmatch(path, pattern)]
    kind = PurePosixPath(path).stem
    if not patterns and kind not in POLICIES:
        return ()
    names = TESTS[max(patterns, key=len)].split() if patterns else [f"test_{kind}", f"conformance:{kind}"]
    names += ["test_config_bounds"] if path.startswith("sim/policies/") else []
    return tuple(dict.fromkeys(map(located, names)))


@cache
def located(name: str) -> str:
    """The path in tests/, without `.py`, of the one file that `TESTS` calls `name`; `conformance:KIND` is a name of its
    own. Ends the program if it is of none, or of several."""
    if ":" in name:
        return name
    paths = [path.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    files = [path.removesuffix(".py") for path in paths if f"/{path}".endswith(f"/{name}.py")]
    if len(files) != 1:
        raise SystemExit(f"TESTS in {__file__} names {name}, which is of {len(files)} files of tests/. Name the one.")
    return files[0]


def test_file(name: str) -> str:
    """The path of the file of tests that `tests_of` names."""
    return "tests/conformance/test_conformance.py" if ":" in name else f"tests/{name}.py"


def check(paths: list[str]) -> None:
    """Ends the program if a file has no tests here, or tests that are not there."""
    for path in paths:
        if not tests_of(path):
            raise SystemExit(f"{path} is in no row of TESTS in {__file__}. Add its tests there.")
