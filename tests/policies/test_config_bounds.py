"""The smallest and largest values that knobs may have are taken; tests/unit/test_ranges.py asks what lies beyond."""

from __future__ import annotations

from typing import Any

import pytest

from sim.policies import POLICIES

ONE_BATCH = {"num_batch_threads": 1}
AT_THEIR_BOUNDS: list[tuple[str, dict[str, Any]]] = [
    ("static", {"batch_size": 1, "max_wait": 0, "wait_for_full": True}),
    ("static", {"batch_size": 1, "reserve_tokens": 1, "padding": "none", "finished_rows": "drop"}),
    ("dynamic", {"max_batch_size": 1, "preferred_batch_sizes": (1,), "max_queue_delay": 0, "priority_levels": 1}),
    ("dynamic", {"max_batch_size": 2, "preferred_batch_sizes": (1, 2), "max_queue_delay": 0, "max_queue_time": 1}),
    ("continuous", {"max_num_seqs": 1, "max_num_batched_tokens": 1, "reserve_tokens": 1}),
    ("preemptive", {"max_num_seqs": 1, "max_num_batched_tokens": 1, "watermark": 0.0}),
    ("preemptive", {"max_num_seqs": 1, "max_num_batched_tokens": 1, "waiting_order": "priority", "preempt_after": 0}),
    ("gated", {"open_at": 0, "max_num_seqs": 1, "max_num_batched_tokens": 1}),
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
    ("triton", {"max_batch_size": 1, "max_queue_delay_microseconds": 0, "preferred_batch_size": (1,)}),
    ("triton", {"max_batch_size": 2, "preferred_batch_size": (2,), "priority_levels": 1, "default_priority_level": 1}),
    ("triton", {"max_batch_size": 1, "priority_levels": 2, "default_priority_level": 2}),
]


@pytest.mark.parametrize(("kind", "knobs"), AT_THEIR_BOUNDS)
def test_what_is_just_allowed_is_taken(kind: str, knobs: dict[str, Any]) -> None:
    """A config keeps the values it is given."""
    config = POLICIES[kind][0](**knobs)
    assert {name: getattr(config, name) for name in knobs} == knobs


@pytest.mark.parametrize(
    ("kind", "knobs", "slots", "waits_for"),
    [
        ("static", {"batch_size": 3, "wait_for_full": True}, 3, 3),
        ("static", {"batch_size": 3, "wait_for_full": True, "max_wait": 5}, 3, None),
        ("static", {"batch_size": 3, "wait_for_full": False}, 3, None),
        ("hf_static", {"batch_size": 3}, 3, 3),
        ("ray_serve", {"max_batch_size": 3}, 3, None),
        ("ray_serve", {"max_batch_size": 3, "batch_size_fn": "prompt_tokens"}, None, None),
    ],
)
def test_slots_and_what_a_full_batch_waits_for(
    kind: str, knobs: dict[str, Any], slots: int | None, waits_for: int | None
) -> None:
    """A batch that is started by nothing but its last request needs as many at once."""
    config = POLICIES[kind][0](**knobs)
    assert (config.max_num_seqs, getattr(config, "waits_for", None)) == (slots, waits_for)
