"""Steps of a simulated engine, written out as the logs that real engines keep of theirs: the forms at their sources."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchsim.scenario import Point
from batchsim.scenario.point import simulate_point
from tests.support.engine_truth import setup_of

Steps = NDArray[np.void]


def simulated(text: str, noise: float = 0.0) -> tuple[Steps, NDArray[np.float64]]:
    """The steps of a scenario's one point, and what each took in ms, off by `noise` at random."""
    setup = setup_of(text)
    steps = simulate_point(setup, Point(setup.scenario.specs[0], setup.scenario.loads[0], 0)).records.steps
    off = np.exp(noise * np.random.default_rng(1).standard_normal(len(steps)))
    return steps, steps["duration_ns"] / 1e6 * off


def vllm_log(steps: Steps, ms: NDArray[np.float64], blocks: int, *, usage: bool = True, pool: str = "") -> str:
    """vLLM's iterations of 2026 on, or without KV usage those of before."""
    lines = [
        f"(EngineCore pid=7) INFO 10-05 12:00:00 [kv_cache_utils.py:1733] GPU KV cache size: {pool} tokens"
    ] * bool(pool)
    used = 1 - np.append(steps["free_blocks"][1:], blocks) / blocks
    for i, step in enumerate(steps):
        head = "(APIServer pid=1) INFO 10-05 12:00:00 [loggers.py:182] Engine 000: " if usage else (
            "(EngineCore_DP0 pid=7) INFO 12-22 21:44:40 [core.py:349] ")  # fmt: skip
        tail = f", GPU KV cache usage: {100 * used[i]:.1f}%" * usage
        lines.append(
            f"{head}Iteration({i}): {step['num_chunks']} context requests, {step['num_prefill_tokens']} context tokens,"
            f" {step['num_decode']} generation requests, {step['num_decode_tokens']} generation tokens, iteration"
            f" elapsed time: {ms[i]:.2f} ms{tail}"
        )
    return "\n".join(lines) + "\n"


def fpm(step: Any, ms: float, number: int, *, worker: str = "a", rank: int = 0) -> dict[str, Any]:
    """A step as forward-pass metrics."""
    chunks = int(step["num_chunks"])
    tokens, pairs = int(step["num_prefill_tokens"]), int(step["prefill_pairs"])
    before = (pairs - tokens * (tokens + 1) // 2) // tokens if chunks == 1 else 0
    scheduled = {
        "num_prefill_requests": chunks,
        "sum_prefill_tokens": tokens,
        "var_prefill_length": 0.0,
        "sum_prefill_kv_tokens": before,
        "num_decode_requests": int(step["num_decode"]),
        "sum_decode_kv_tokens": int(step["context_tokens"]),
        "var_decode_kv_tokens": 0.0,
    }
    queued = dict.fromkeys(scheduled, 0)
    head = {"version": 1, "worker_id": worker, "dp_rank": rank, "counter_id": number, "wall_time": ms / 1e3}
    return head | {"scheduled_requests": scheduled, "queued_requests": queued}


def fpm_log(steps: Steps, ms: NDArray[np.float64]) -> str:
    """The records of Dynamo's trace."""
    envelope = {"schema": "dynamo.fpm.trace.v1", "source": {"producer_id": "p"}, "capture_mode": "full"}
    records = (envelope | {"observed_at_unix_ms": i, "fpm": fpm(step, ms[i], i + 1)} for i, step in enumerate(steps))
    return "".join(json.dumps(record) + "\n" for record in records)


def sglang_log(steps: Steps, ms: NDArray[np.float64], every: int = 40) -> str:
    """SGLang's batches: a line for each prefill, and for every fortieth decode."""
    lines, count, tokens, since_ms = [], 0, 0, 0.0
    for i, step in enumerate(steps):
        since_ms += ms[i]
        stamp = "[2026-01-05 10:00:00 TP0]"
        if step["num_chunks"]:
            lines.append(
                f"{stamp} Prefill batch, #new-seq: {step['num_chunks']}, #new-token: {step['num_prefill_tokens']},"
                f" #cached-token: 0, token usage: 0.01, #running-req: {step['num_decode']}, #queue-req: 0,"
            )
        if not step["num_decode"] or step["num_chunks"]:
            continue
        count, tokens = count + 1, tokens + int(step["num_decode"])
        if count % every == 0:
            held = int(step["context_tokens"]) + int(step["num_decode"])
            lines.append(
                f"{stamp} Decode batch, #running-req: {step['num_decode']}, #token: {held}, token usage: 0.02,"
                f" cuda graph: True, gen throughput (token/s): {1e3 * tokens / since_ms:.2f}, #queue-req: 0,"
            )
            tokens, since_ms = 0, 0.0
    return "\n".join(lines) + "\n"
