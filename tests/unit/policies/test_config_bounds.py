"""The smallest and largest values that knobs may have are taken; `base/test_ranges.py` asks what lies beyond."""

from __future__ import annotations

from typing import Any

import pytest

from batchsim.base.ranges import numeric_fields
from batchsim.kernel.engine_loop import EVENTS, EngineLoop
from batchsim.kernel.policy_config import AdapterMemory, Traits
from batchsim.policies.registry import POLICIES
from batchsim.policies.systems.vllm.vllm_config import ASYNCHRONOUS, SYNCHRONOUS

ONE_BATCH = {"num_batch_threads": 1}
SLOT = {"max_num_seqs": 1, "max_num_batched_tokens": 1}
AT_THEIR_BOUNDS: list[tuple[str, dict[str, Any]]] = [
    ("static", {"batch_size": 1, "max_wait": 0, "wait_for_full": True}),
    ("static", {"batch_size": 1, "reserve_tokens": 1, "padding": "none", "finished_rows": "drop"}),
    ("dynamic", {"max_batch_size": 1, "preferred_batch_sizes": (1,), "max_queue_delay": 0, "priority_levels": 1}),
    ("dynamic", {"max_batch_size": 2, "preferred_batch_sizes": (1, 2), "max_queue_delay": 0, "max_queue_time": 1}),
    ("continuous", {"max_num_seqs": 1, "max_num_batched_tokens": 1, "reserve_tokens": 1}),
    ("preemptive", {"max_num_seqs": 1, "max_num_batched_tokens": 1, "watermark": 0.0}),
    ("preemptive", {"max_num_seqs": 1, "max_num_batched_tokens": 1, "waiting_order": "priority", "preempt_after": 0}),
    ("gated", {"open_at": 0, "max_num_seqs": 1, "max_num_batched_tokens": 1}),
    ("energy_aware", {"control_limit": 1, "max_num_seqs": 1, "max_num_batched_tokens": 1, "max_hold": 1}),
    ("energy_aware", {"power_budget": 9.0, "step_power": 9.0, "idle_power": 8.0, "window": 1, "control_limit": 256}),
    ("vllm", {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_num_active_seqs": 1, "max_num_scheduled_tokens": 1}),
    ("vllm", {"max_num_seqs": 2, "max_num_batched_tokens": 2, "max_num_active_seqs": 2, "max_num_scheduled_tokens": 2}),
    ("orca", {"batch_size_cap": 1, "max_tokens_per_request": 1}),
    ("sarathi", {"batch_size_cap": 1, "chunk_size": 1, "watermark_blocks_fraction": 0.0}),
    ("vllm_v0", {"batch_size_cap": 1, "max_tokens_in_batch": 1, "watermark_blocks_fraction": 0.0}),
    ("faster_transformer", {"batch_size_cap": 1, "max_tokens_per_request": 1}),
    ("hf_static", {"batch_size": 1}),
    ("tgi", {"max_batch_prefill_tokens": 1, "max_concurrent_requests": 1, "max_batch_size": 1}),
    ("tgi", {"max_batch_prefill_tokens": 2, "max_batch_total_tokens": 2, "max_waiting_tokens": 0}),
    ("tgi", {"max_batch_prefill_tokens": 1, "max_batch_total_tokens": 1, "waiting_served_ratio": 0.0}),
    ("tgi", {"requires_padding": True, "support_chunking": False, "use_prefix_caching": False}),
    ("ray_serve", {"max_batch_size": 1, "batch_wait_timeout_s": 0.0, "max_ongoing_requests": 1}),
    ("tf_serving", ONE_BATCH | {"max_batch_size": 1, "max_enqueued_batches": 1, "batch_timeout_micros": 0}),
    (
        "tf_serving",
        {
            "num_batch_threads": 1,
            "max_batch_size": 2,
            "max_execution_batch_size": 1,
            "enable_large_batch_splitting": True,
        },
    ),
    (
        "tf_serving",
        {
            "num_batch_threads": 1,
            "max_batch_size": 2,
            "max_execution_batch_size": 2,
            "enable_large_batch_splitting": False,
        },
    ),
    (
        "tf_serving",
        {
            "num_batch_threads": 1,
            "max_batch_size": 2,
            "allowed_batch_sizes": (1, 2),
            "enable_large_batch_splitting": False,
        },
    ),
    ("clipper", {"slo_micros": 1, "batch_size": 1, "seed": 0}),
    ("clipper", {"slo_micros": 1, "batch_size": -1}),
    ("clockwork", {"default_slo": 1, "batch_sizes": (1,), "exec_durations": (1,)}),
    ("nexus", {"latency_sla": 1, "alpha": 1, "beta": 0, "workload": 1e-6}),
    ("nexus", {"latency_sla": 1, "alpha": 1, "beta": 0, "batch": 1}),
    ("aimd", {"latency_objective": 1, "increase": 1, "initial_batch_size": 2, "max_batch_size": 2, "batch_delay": 0}),
    (
        "adaptive_shared_batch",
        {"num_batch_threads": 1, "initial_in_flight_batches_limit": 1, "min_in_flight_batches_limit": 1},
    ),
    ("adaptive_shared_batch", {"num_batch_threads": 3, "max_batch_size": 1, "batches_to_average_over": 1}),
    ("serial_device_batch", {"num_batch_threads": 1, "initial_in_flight_batches_limit": 1, "target_pending": 1}),
    ("tbt_model", SLOT | {"tbt": 1, "min_prefill_tokens": 1}),
    ("tbt_feedback", SLOT | {"tbt": 1, "least": 1, "increase": 1, "hysteresis": 0.0}),
    ("tbt_feedback", SLOT | {"steers": "max_num_seqs", "least": 1}),
    ("memory_seqs", SLOT | {"min_num_seqs": 1, "factor": 1.0}),
    ("exclusive", SLOT | {"threshold": 0.0}),
    ("exclusive", SLOT | {"threshold": 1.0}),
    ("triton", {"max_batch_size": 1, "max_queue_delay_microseconds": 0, "preferred_batch_size": (1,)}),
    ("triton", {"max_batch_size": 2, "preferred_batch_size": (2,), "priority_levels": 1, "default_priority_level": 1}),
    ("triton", {"max_batch_size": 1, "priority_levels": 2, "default_priority_level": 2}),
]


@pytest.mark.parametrize(("kind", "knobs"), AT_THEIR_BOUNDS)
def test_what_is_just_allowed_is_taken(kind: str, knobs: dict[str, Any]) -> None:
    """A config keeps the values it is given."""
    config = POLICIES[kind][0](**knobs)
    assert {name: getattr(config, name) for name in knobs} == knobs


BUDGET = ("max_num_seqs", "max_num_batched_tokens")
OF_VLLM, OF_SGLANG = AdapterMemory(1, in_host=1, max_rank=16), AdapterMemory(8, pooled=True)
TRAITS: list[tuple[str, dict[str, Any], Traits]] = [
    ("static", {"batch_size": 3}, Traits(3, waits_for=3, knobs=("batch_size", "max_wait"), kv_groups=True)),
    ("static", {"batch_size": 3, "max_wait": 5}, Traits(3, knobs=("batch_size", "max_wait"), kv_groups=True)),
    ("static", {"batch_size": 3, "wait_for_full": False}, Traits(3, knobs=("batch_size", "max_wait"), kv_groups=True)),
    ("dynamic", {"max_batch_size": 3}, Traits(3, knobs=("max_batch_size", "max_queue_delay"))),
    ("continuous", {"max_num_seqs": 3, "max_num_batched_tokens": 9}, Traits(3, 9, knobs=BUDGET, kv_groups=True)),
    ("continuous", {"max_num_seqs": 3, "max_num_batched_tokens": None}, Traits(3, None, knobs=BUDGET, kv_groups=True)),
    ("gated", {"max_num_seqs": 3, "max_num_batched_tokens": 9}, Traits(3, 9, knobs=BUDGET, kv_groups=True)),
    (
        "energy_aware",
        {"max_num_seqs": 3, "max_num_batched_tokens": 9},
        Traits(3, 9, knobs=(*BUDGET, "control_limit")),
    ),
    (
        "vllm",
        {"async_scheduling": False, "max_num_seqs": 3, "max_num_active_seqs": 2, "max_num_batched_tokens": 9},
        Traits(
            3,
            9,
            prefix_cache="blocks",
            knobs=(*BUDGET, "long_prefill_token_threshold"),
            loop=SYNCHRONOUS,
            pipelines=True,
            takes_items=True,
            adapters=OF_VLLM,
            masks="sampled",
            kv_groups=True,
        ),
    ),
    (
        "vllm",
        {"enable_prefix_caching": False},
        Traits(
            1024,
            8192,
            knobs=(*BUDGET, "long_prefill_token_threshold"),
            loop=ASYNCHRONOUS,
            pipelines=True,
            takes_items=True,
            adapters=OF_VLLM,
            masks="sampled",
            kv_groups=True,
        ),
    ),
    ("orca", {"batch_size_cap": 3}, Traits(3, loop=EVENTS, pipelines=True)),
    ("sarathi", {"batch_size_cap": 3}, Traits(3, loop=EVENTS, pipelines=True)),
    ("vllm_v0", {"batch_size_cap": 3}, Traits(3, loop=EVENTS, pipelines=True)),
    ("faster_transformer", {"batch_size_cap": 3}, Traits(3)),
    ("hf_static", {"batch_size": 3}, Traits(3, waits_for=3, knobs=("batch_size",))),
    ("hf_static", {"batch_size": 3, "wait_for_full": False}, Traits(3, knobs=("batch_size",))),
    (
        "sglang",
        {},
        Traits(
            prefix_cache="radix",
            knobs=("chunked_prefill_size", "max_prefill_tokens", "max_running_requests"),
            takes_items=True,
            adapters=OF_SGLANG,
            kv_pools=True,
            masks="all",
            loop=EngineLoop("overlap", depth=2),
        ),
    ),
    (
        "sglang",
        {"disable_radix_cache": True, "disable_consecutive_prefill_overlap": True},
        Traits(
            knobs=("chunked_prefill_size", "max_prefill_tokens", "max_running_requests"),
            takes_items=True,
            adapters=OF_SGLANG,
            kv_pools=True,
            loop=EngineLoop("overlap", depth=2),
        ),
    ),
    (
        "sglang",
        {"disable_radix_cache": True, "disable_overlap_schedule": True},
        Traits(
            knobs=("chunked_prefill_size", "max_prefill_tokens", "max_running_requests"),
            takes_items=True,
            adapters=OF_SGLANG,
            kv_pools=True,
            masks="all",
        ),
    ),
    (
        "tensorrt_llm",
        {},
        Traits(
            2048,
            prefix_cache="reuse",
            knobs=("max_batch_size", "max_num_tokens"),
            loop=EngineLoop("overlap", depth=2),
        ),
    ),
    (
        "tensorrt_llm",
        {"enable_block_reuse": False, "disable_overlap_scheduler": True},
        Traits(2048, knobs=("max_batch_size", "max_num_tokens")),
    ),
    (
        "tgi",
        {"max_batch_size": 3},
        Traits(prefix_cache="radix", knobs=("max_batch_size", "max_batch_prefill_tokens", "max_batch_total_tokens")),
    ),
    (
        "tgi",
        {"max_batch_size": 3, "support_chunking": False, "use_prefix_caching": False},
        Traits(3, knobs=("max_batch_size", "max_batch_prefill_tokens", "max_batch_total_tokens")),
    ),
    ("ray_serve", {"max_batch_size": 3}, Traits(3, knobs=("max_batch_size",))),
    ("ray_serve", {"max_batch_size": 3, "batch_size_fn": "prompt_tokens"}, Traits(knobs=("max_batch_size",))),
    ("tf_serving", ONE_BATCH | {"max_batch_size": 3}, Traits(3, knobs=("max_batch_size",))),
    ("clipper", {"slo_micros": 9}, Traits()),
    ("clipper", {"slo_micros": 9, "batch_size": 3}, Traits(3, knobs=("batch_size",))),
    ("clockwork", {"default_slo": 9}, Traits(16)),
    ("nexus", {"latency_sla": 100, "alpha": 5, "beta": 10}, Traits(8)),
    ("nexus", {"latency_sla": 100, "alpha": 5, "beta": 10, "batch": 3}, Traits(3, knobs=("batch",))),
    ("aimd", {"latency_objective": 9}, Traits(knobs=("latency_objective", "batch_delay"))),
    ("aimd", {"latency_objective": 9, "max_batch_size": 3}, Traits(3, knobs=("latency_objective", "batch_delay"))),
    (
        "adaptive_shared_batch",
        {"num_batch_threads": 4, "max_batch_size": 3},
        Traits(3, knobs=("max_batch_size", "num_batch_threads")),
    ),
    (
        "serial_device_batch",
        {"num_batch_threads": 4, "max_batch_size": 3},
        Traits(3, knobs=("max_batch_size", "num_batch_threads")),
    ),
    ("tbt_model", SLOT, Traits(1, 1, knobs=("max_num_seqs", "tbt"))),
    ("tbt_feedback", SLOT | {"least": 1}, Traits(1, 1, knobs=("max_num_seqs", "tbt"))),
    ("memory_seqs", SLOT, Traits(1, 1, knobs=("max_num_seqs", "max_num_batched_tokens"))),
    ("exclusive", SLOT, Traits(1, 1, knobs=("max_num_seqs", "max_num_batched_tokens"))),
    (
        "tf_serving",
        ONE_BATCH | {"max_batch_size": 3, "max_execution_batch_size": 2, "enable_large_batch_splitting": True},
        Traits(2, knobs=("max_batch_size",)),
    ),
    ("triton", {"max_batch_size": 3}, Traits(3, knobs=("max_batch_size",))),
    ("vllm_neuron", {"max_num_seqs": 3}, Traits(3, 8192, knobs=BUDGET, loop=EngineLoop("sync", nap_ns=1_000_000))),
    ("llama_cpp", {"n_parallel": 3, "n_batch": 9}, Traits(3, 9, knobs=("n_parallel", "n_batch"), splits_steps=True)),
    ("preemptive", SLOT, Traits(1, 1, knobs=BUDGET)),
]


@pytest.mark.parametrize(("kind", "knobs", "traits"), TRAITS)
def test_what_a_config_tells_others(kind: str, knobs: dict[str, Any], traits: Traits) -> None:
    """Slots, tokens of a step, what a full batch waits for, the KV memory it needs, and what capacity may change."""
    config = POLICIES[kind][0](**knobs)
    assert config.traits == traits


def test_every_policy_is_among_them() -> None:
    """Of each at least one config's traits are known by value."""
    assert {kind for kind, _, _ in TRAITS} == set(POLICIES)


@pytest.mark.parametrize(
    ("knobs", "predictor", "swap"),
    [
        ({}, False, False),
        ({"waiting_order": "priority", "victim": "lowest_priority"}, False, False),
        ({"waiting_order": "sjf"}, True, False),
        ({"waiting_order": "srpt"}, True, False),
        ({"victim": "most_remaining"}, True, False),
        ({"by": "swap"}, False, True),
        ({"by": "auto"}, False, True),
    ],
)
def test_what_a_preemptive_config_needs(knobs: dict[str, Any], predictor: bool, swap: bool) -> None:
    """Predicted lengths to order a queue or choose a victim by, and host memory to swap to."""
    config = POLICIES["preemptive"][0](max_num_seqs=3, max_num_batched_tokens=9, **knobs)
    assert config.traits == Traits(3, 9, needs_predictor=predictor, needs_swap_space=swap, knobs=BUDGET)


@pytest.mark.parametrize(("kind", "traits"), [(kind, traits) for kind, _, traits in TRAITS])
def test_knobs_that_capacity_changes_are_numbers_of_the_config(kind: str, traits: Traits) -> None:
    """None is misspelt, and none is a choice or a switch, which cannot be doubled."""
    assert numeric_fields(POLICIES[kind][0]).keys() >= set(traits.knobs)


def test_where_sglang_keeps_adapters() -> None:
    """As many on the GPU and in host memory as said, given up as said, copied beside steps if asked for."""
    knobs = {
        "max_loras_per_batch": 3, "max_loaded_loras": 5, "lora_eviction_policy": "fifo",
        "enable_lora_overlap_loading": True,
    }  # fmt: skip
    kept = AdapterMemory(3, most=5, eviction="fifo", pooled=True, overlaps=True)
    assert POLICIES["sglang"][0](**knobs).traits.adapters == kept
