"""Two schedules recorded from Vidur (commit 7d47513a), equal to configurations of our families, step by step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sim.core import EngineCore, SimExecutor
from sim.kv import CountingKV, TableKV
from sim.policies.continuous import Continuous, ContinuousConfig
from sim.policies.static import Static, StaticConfig
from sim.record import Recorder
from sim.types import Arrival, Batch, Idle, PolicyContext, Request

TOLERANCE_NS = 10_000  # the recording's times are sums of floats, rounded to 1 us

SLOT_TOKENS = 256  # max_tokens_per_request of the recordings
CAP = 12  # their batch_size_cap

CASES = {
    "orca": (Continuous, ContinuousConfig(CAP, None, chunked_prefill=False, reserve_tokens=SLOT_TOKENS)),
    "faster_transformer_leakfixed": (
        Static,
        StaticConfig(
            CAP,
            wait_for_full=False,
            padding="none",
            finished_rows="drop",
            respond="row_end",
            reserve_tokens=SLOT_TOKENS,
        ),
    ),
}


class ConstantCost:
    """Every step takes the recording's time."""

    def __init__(self, step_s: float) -> None:
        self._step_ns = _ns(step_s)

    def step_ns(self, batch: Batch) -> int:
        return self._step_ns


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _recording(name: str) -> dict[str, Any]:
    folder = os.environ.get("BATCHSIM_GOLDEN")
    if folder is None:
        pytest.skip("BATCHSIM_GOLDEN names no folder of recordings")
    path = Path(folder) / "vidur" / f"{name}.json"
    if not path.exists():
        pytest.skip(f"{path} is missing")
    return json.loads(path.read_text())


def _steps(core: EngineCore, arrivals: list[Arrival]) -> Iterator[tuple[int, list[list[int]], list[int], int]]:
    """(start, batch, completed, allocated blocks) of each step, the core cranked by hand."""
    for arrival in arrivals:
        core.submit(arrival)
    times = sorted(arrival.request.arrival_ns for arrival in arrivals)
    now_ns, kv = 0, core.scheduler.kv
    while core.has_work:
        work = core.schedule(now_ns, drain=False)
        if isinstance(work, Idle):
            now_ns = next(ns for ns in times if ns > now_ns)
            continue
        items = [[seq.request.id, n] for seq, n in work.items()]
        allocated = kv.num_blocks - kv.num_free
        end_ns = core.execute(work, now_ns)
        core.responses = []
        core.complete(end_ns)
        yield now_ns, items, [request.id for request in core.responses], allocated
        now_ns = end_ns


@pytest.mark.parametrize("kv", [CountingKV, TableKV])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_recording_step_by_step(name: str, kv: Any) -> None:
    """Starts, batches in order, completions and allocated blocks of every iteration are the recorded ones."""
    recording = _recording(name)
    policy, config = CASES[name]
    meta = recording["scheduler"]
    assert (meta["max_tokens_per_request"], meta["batch_size_cap"]) == (SLOT_TOKENS, CAP)
    pool = kv(meta["num_blocks"], meta["block_size"])
    core = EngineCore(
        policy(config, PolicyContext(pool, SLOT_TOKENS)),
        SimExecutor(ConstantCost(recording["cost_model"]["iteration_time_s"]), SLOT_TOKENS),
        Recorder(),
        max_model_len=SLOT_TOKENS,
    )
    arrivals = [
        Arrival(
            Request(row["id"], _ns(row["arrived_at"]), row["num_prefill_tokens"], row["num_decode_tokens"]),
            row["num_decode_tokens"],
        )
        for row in recording["requests"]
    ]
    steps = list(_steps(core, arrivals))
    assert len(steps) == len(recording["iterations"])
    for (start_ns, items, completed, allocated), row in zip(steps, recording["iterations"], strict=True):
        assert abs(start_ns - _ns(row["start"])) < TOLERANCE_NS
        assert (items, completed) == (row["batch"], row["completed"]), row["iter"]
        assert allocated == row["allocated_blocks_after_schedule"], row["iter"]
