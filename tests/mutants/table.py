"""Which tests are asked for each mutated file: those of its own behaviour, few seconds of them."""

from __future__ import annotations

import fnmatch
from pathlib import PurePosixPath

from batchsim.policies.registry import POLICIES
from tests.mutants.making import ROOT

ENGINE = (
    "unit/test_core unit/test_decode unit/test_journal unit/test_record unit/test_kv policies/test_static"
    " policies/test_continuous policies/test_preemptive policies/test_vllm conformance/test_regressions"
    " unit/test_fleet unit/test_live unit/test_attribution unit/test_policy_errors"
)
CACHE = "unit/test_prefix_cache unit/test_kv policies/test_vllm unit/test_naive_vllm conformance:vllm"
AHEAD = (
    "policies/test_leaps_ahead policies/test_vllm_pipelines unit/test_naive_vllm golden/test_ahead_recordings"
    " conformance:vllm"
)
DRAFTS = (
    "unit/test_naive_vllm_drafts unit/test_acceptance golden/test_ahead_recordings policies/test_draft_leaps"
    " conformance:vllm"
)
RADIX = (
    "unit/test_radix_cache policies/test_sglang policies/test_sglang_memory policies/test_sglang_drafts"
    " policies/test_tgi conformance:sglang"
)
REUSE = (
    "policies/test_tensorrt_llm policies/test_tensorrt_llm_reuse policies/test_tensorrt_llm_overlap"
    " conformance:tensorrt_llm"
)
MEASURES = "unit/test_metrics unit/test_metrics_objectives unit/test_metrics_kpis unit/test_slo conformance:continuous"
BATCHES = "policies/test_static policies/test_dynamic policies/test_hf_static conformance:static conformance:dynamic"
TRITON = "policies/test_triton conformance:triton"
LLAMA_CPP = "policies/test_llama_cpp conformance:llama_cpp"
TGI = "policies/test_tgi conformance:tgi"
SGLANG = (
    "policies/test_sglang policies/test_sglang_clip policies/test_sglang_memory policies/test_sglang_naive"
    " policies/test_sglang_batch policies/test_sglang_parts policies/test_sglang_overlap conformance:sglang"
)
TENSORRT_DRAFTS = "policies/test_tensorrt_llm_drafts policies/test_tensorrt_llm_drafts_naive conformance:tensorrt_llm"
SGLANG_DRAFTS = (
    "policies/test_sglang_drafts policies/test_sglang_drafts_naive policies/test_sglang_drafts_overlap"
    " conformance:sglang"
)
# The tests of each file, in tests/; `conformance:KIND` are those of one policy.
TESTS = {
    "sim/kernel/core.py": f"{ENGINE} conformance/test_landing",
    "sim/kernel/chunks.py": ENGINE,
    "sim/kernel/in_flight.py": f"{ENGINE} {AHEAD} conformance/test_landing",
    "sim/kernel/leaps.py": f"{ENGINE} {AHEAD} unit/test_sleeping_engines policies/test_draft_leaps",
    "sim/kernel/leaps_ahead.py": f"{ENGINE} {AHEAD} unit/test_sleeping_engines",
    "sim/kernel/pipeline_leaps.py": "policies/test_pipeline_leaps policies/test_vllm_pipelines",
    "sim/kernel/lane_rows.py": f"{ENGINE} {AHEAD} unit/test_record unit/test_sleeping_engines",
    "sim/kernel/packed_rows.py": "unit/test_record unit/test_keep",
    "sim/kernel/sim_executor.py": f"{ENGINE} policies/test_draft_leaps unit/test_acceptance",
    "sim/kernel/types.py": f"{ENGINE} unit/test_handover",
    "sim/kernel/journal.py": ENGINE,
    "sim/kernel/record.py": ENGINE + " unit/test_frames",
    "sim/kv/block_keys.py": f"{CACHE} {REUSE}",
    "sim/kernel/kv_blocks.py": ENGINE,
    "sim/kv/choice.py": "unit/test_kv",
    "sim/kv/free_queue.py": CACHE,
    "sim/kv/prefix_cache.py": CACHE,
    "sim/kv/radix_*.py": RADIX,
    "sim/kv/reuse_tree.py": f"{REUSE} {TENSORRT_DRAFTS}",
    "sim/metrics/*.py": MEASURES,
    "sim/metrics/measure.py": f"{MEASURES} unit/test_precision unit/test_tasks",
    "sim/metrics/step_totals.py": f"{MEASURES} unit/test_keep",
    "sim/metrics/digest.py": "unit/test_keep",
    "sim/metrics/histogram.py": "unit/test_keep",
    "sim/metrics/by_minute.py": "unit/test_keep",
    "sim/metrics/tasks.py": "unit/test_tasks",
    "sim/metrics/latencies.py": f"{MEASURES} unit/test_metric_table",
    "sim/metrics/intervals.py": "unit/test_confidence unit/test_metrics unit/test_planning unit/test_precision",
    "sim/metrics/warmup.py": "theory/test_warmup",
    "sim/policies/families/budget.py": "policies/test_continuous policies/test_config_bounds conformance:continuous",
    "sim/policies/families/continuous.py": "policies/test_continuous conformance:continuous",
    "sim/policies/families/dynamic.py": BATCHES,
    "sim/policies/families/preempti*.py": (
        "policies/test_preemptive conformance/test_regressions conformance:preemptive"
    ),
    "sim/policies/families/queues.py": "policies/test_vllm policies/test_preemptive conformance:vllm",
    "sim/policies/families/padded_batch.py": (
        f"{BATCHES} policies/test_tf_serving policies/test_ray_serve policies/test_triton"
    ),
    "sim/policies/families/first_come.py": "policies/test_continuous policies/test_tgi conformance:continuous",
    "sim/policies/systems/vidur/vidur_scheduler.py": (
        "policies/test_sarathi policies/test_vllm_v0 policies/test_orca policies/test_vidur_pipelines"
        " conformance:sarathi conformance:vllm_v0"
    ),
    "sim/policies/systems/vidur/micro_batches.py": "policies/test_vidur_pipelines conformance:sarathi",
    "sim/policies/families/closed_batches.py": "policies/test_tf_serving policies/test_ray_serve policies/test_triton"
    " conformance:ray_serve",
    "sim/policies/families/static.py": BATCHES,
    "sim/policies/systems/faster_transformer.py": "policies/test_hf_static conformance:faster_transformer",
    "sim/policies/systems/hf_static.py": "policies/test_hf_static conformance:hf_static",
    "sim/policies/systems/vidur/sarathi.py": (
        "policies/test_sarathi policies/test_vidur_naive policies/test_vidur_pipelines conformance:sarathi"
    ),
    "sim/policies/systems/vidur/orca.py": "policies/test_orca policies/test_vidur_pipelines conformance:orca",
    "sim/policies/systems/acceptance_law.py": "unit/test_acceptance policies/test_sglang_drafts",
    "sim/policies/systems/sglang/*.py": SGLANG,
    "sim/policies/systems/sglang/sglang_drafts.py": SGLANG_DRAFTS,
    "sim/policies/systems/sglang/speculative_args.py": SGLANG_DRAFTS,
    "sim/policies/systems/tensorrt_llm/tensorrt_llm.py": REUSE,
    "sim/policies/systems/llama_cpp/*.py": LLAMA_CPP,
    "sim/policies/systems/tgi/*.py": TGI,
    "sim/policies/systems/triton/*.py": TRITON,
    "sim/policies/systems/tensorrt_llm/*.py": REUSE,
    "sim/policies/systems/tensorrt_llm/tensorrt_llm_drafts.py": TENSORRT_DRAFTS,
    "sim/policies/systems/tensorrt_llm/decoding_config.py": f"{TENSORRT_DRAFTS} unit/test_report_plots",
    "sim/policies/systems/vllm/vllm.py": f"{CACHE} {AHEAD}",
    "sim/policies/systems/vllm/cohorts.py": AHEAD,
    "sim/policies/systems/vllm/vllm_drafts.py": DRAFTS,
    "sim/policies/systems/vllm/speculative_config.py": f"{DRAFTS} policies/test_config_bounds",
    "sim/policies/systems/vllm/vllm_config.py": f"{CACHE} policies/test_config_bounds unit/test_device_defaults",
    "sim/policies/systems/vidur/vllm_v0.py": (
        "policies/test_vllm_v0 policies/test_vidur_naive policies/test_vidur_pipelines conformance:vllm_v0"
    ),
}


def tests_of(path: str) -> frozenset[str]:
    """The test files of a mutated file: those of the most exact pattern; without one a policy's own, or none."""
    patterns = [pattern for pattern in TESTS if fnmatch.fnmatch(path, pattern)]
    kind = PurePosixPath(path).stem
    if not patterns and kind not in POLICIES:
        return frozenset()
    names = TESTS[max(patterns, key=len)].split() if patterns else [f"policies/test_{kind}", f"conformance:{kind}"]
    return frozenset([*names, "policies/test_config_bounds"] if path.startswith("sim/policies/") else names)


def test_file(name: str) -> str:
    """The path of what `TESTS` calls `name`."""
    return "tests/conformance/test_conformance.py" if ":" in name else f"tests/{name}.py"


def check(paths: list[str]) -> None:
    """Ends the program if a file has no tests here, or tests that are not there."""
    for path in paths:
        if not tests_of(path):
            raise SystemExit(f"{path} is in no row of TESTS in {__file__}. Add its tests there.")
        for name in tests_of(path):
            if not (ROOT / test_file(name)).exists():
                raise SystemExit(f"{path}: TESTS in {__file__} names {test_file(name)}, which is not there.")
