"""What KV in the memory of the host did for requests: tokens it had of them, what was copied, how long they waited."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from batchsim.base.units import NS_PER_S
from batchsim.kernel.disk_copies import DISK
from batchsim.kernel.offload import LOAD, LOAD_QUEUE, LOADED
from batchsim.kernel.record import (
    DECODE,
    LOAD_WAITED,
    MISSING,
    PREFILL,
    RECOMPUTE,
    STORE_FLUSH,
    TIER_LOAD,
    TIER_STORE,
    WAITING,
    Records,
)
from batchsim.metrics.encoding import Yielded
from batchsim.metrics.lives import Coverage, Int, Intervals, state_intervals

FLUSH = "kv_store_flush"
"""The part of a request's life in which the device waits for stores."""

_Row = tuple[str, Literal["share", "loads", "stores", "B", "s"], Literal["lower", "higher", ""], str]
TIER_METRICS: tuple[_Row, ...] = (
    (
        "host_hit_rate",
        "share",
        "higher",
        "tokens loaded from the host's memory before the cohort's requests first ran / tokens of their prompts",
    ),
    ("host_loads", "loads", "", "loads of a request's KV from the host in the whole run"),
    ("host_loaded_bytes", "B", "", "bytes of KV loaded from the host in the whole run, of all GPUs"),
    ("host_stored_bytes", "B", "", "bytes of KV stored in the host in the whole run, of all GPUs"),
    (
        "kv_load_mean_s",
        "s",
        "lower",
        "how long those of the cohort that loaded KV waited for that, link and engine included, mean",
    ),
    (
        "disk_hit_rate",
        "share",
        "higher",
        "tokens read from a disk below the host before the cohort's requests first ran / tokens of their prompts",
    ),
    ("disk_loads", "loads", "", "reads of a request's KV from a disk to the host in the whole run"),
    ("disk_loaded_bytes", "B", "", "bytes of KV read from a disk to the host in the whole run, of all GPUs"),
    ("disk_stored_bytes", "B", "", "bytes of KV written from the host to a disk in the whole run, of all GPUs"),
    ("kv_stores_stalled", "stores", "lower", "stores of the whole run for whose end the device stood idle"),
    ("kv_store_flush_s", "s", "lower", "how long the device stood idle for ends of stores, in the whole run"),
)
"""Rows of the table of metrics: name, unit, what is better, words."""


@dataclass(frozen=True)
class Copies:
    """Copies between two tiers in a run: by row of the requests `loaded_first`, the tokens that came up before it first
    ran; how often any came up, and the tokens moved each way."""

    loaded_first: Int
    loads: int
    loaded_tokens: int
    stored_tokens: int


@dataclass(frozen=True)
class TierUse:
    """The use of the host's memory for KV in a run, and of a disk below it, over all engines.

    By row of the requests `wait_ns`, how long it waited for loads in all. `stalls` counts stores for which a device
    stood idle; `stall_ns` is the time of these. A token has `token_bytes` on all GPUs.
    """

    host: Copies
    disk: Copies
    wait_ns: Int
    stalls: int
    stall_ns: int
    token_bytes: int


def tier_use(requests: NDArray[np.void], engines: Sequence[Records], token_bytes: int) -> TierUse:
    """The use of tiers by `requests` at `engines`, each with its own states."""
    wait_ns, stalls, stall_ns = np.zeros(len(requests), np.int64), 0, 0
    for records in engines:
        states = records.states
        intervals = state_intervals(records)
        codes = [code for code, text in enumerate(records.texts) if text in (LOAD_QUEUE, LOAD, LOADED)]
        waits = (intervals.state == WAITING) & np.isin(intervals.reason, codes)
        row = np.searchsorted(requests["request_id"], records.requests["request_id"][intervals.request[waits]])
        np.add.at(wait_ns, row, intervals.end_ns[waits] - intervals.start_ns[waits])
        _add_waits_of_steps(wait_ns, requests, states)
        idle = states[states["state"] == STORE_FLUSH]
        stalls, stall_ns = stalls + len(idle), stall_ns + int(idle["blocker"].sum())
    host, disk = (_copies(requests, engines, where) for where in ("host", DISK))
    # What was pushed out of the host again counts once: only what came from the host was of use.
    disk = replace(disk, loaded_first=np.minimum(disk.loaded_first, host.loaded_first))
    return TierUse(host, disk, wait_ns, stalls, stall_ns, token_bytes)


def _copies(requests: NDArray[np.void], engines: Sequence[Records], where: str) -> Copies:
    """The copies from and to the tier `where`, up and down."""
    loaded_first, loads, moved = np.zeros(len(requests), np.int64), 0, [0, 0]
    for records in engines:
        codes = [code for code, text in enumerate(records.texts) if text == where]
        states = records.states[np.isin(records.states["reason"], codes)]
        loaded, stored = (states[states["state"] == code] for code in (TIER_LOAD, TIER_STORE))
        row = np.searchsorted(requests["request_id"], loaded["request_id"])
        scheduled_ns = requests["scheduled_ns"][row]
        first = (scheduled_ns == MISSING) | (loaded["time_ns"] <= scheduled_ns)
        np.add.at(loaded_first, row[first], loaded["blocker"][first])
        loads += len(loaded)
        moved = [moved[0] + int(loaded["blocker"].sum()), moved[1] + int(stored["blocker"].sum())]
    return Copies(loaded_first, loads, *moved)


def _add_waits_of_steps(wait_ns: Int, requests: NDArray[np.void], states: NDArray[np.void]) -> None:
    """Adds to `wait_ns` of each request what the steps waited in which its KV was loaded."""
    if not (states["state"] == LOAD_WAITED).any():
        return
    rows = states[np.isin(states["state"], (TIER_LOAD, LOAD_WAITED))]
    is_wait = rows["state"] == LOAD_WAITED
    step = np.cumsum(is_wait)[~is_wait]  # of a load: its step's place among those that wait
    row = np.searchsorted(requests["request_id"], rows["request_id"][~is_wait])
    np.add.at(wait_ns, row, rows["blocker"][is_wait][step])


def tier_kpis(use: TierUse, requests: NDArray[np.void], cohort: NDArray[np.bool_]) -> dict[str, float | None]:
    """The metrics of tiers, by name: copies of the whole run, and what the cohort had of them."""
    ran = cohort & (requests["scheduled_ns"] != MISSING)
    prompts, waited = int(requests["prompt_tokens"][ran].sum()), use.wait_ns[cohort & (use.wait_ns > 0)]
    values: dict[str, float | None] = {
        "kv_load_mean_s": float(waited.mean()) / NS_PER_S if len(waited) else None,
        "kv_stores_stalled": float(use.stalls),
        "kv_store_flush_s": use.stall_ns / NS_PER_S,
    }
    for where, copies in (("host", use.host), (DISK, use.disk)):
        values[f"{where}_hit_rate"] = int(copies.loaded_first[ran].sum()) / prompts if prompts else None
        values[f"{where}_loads"] = float(copies.loads)
        values[f"{where}_loaded_bytes"] = float(copies.loaded_tokens * use.token_bytes)
        values[f"{where}_stored_bytes"] = float(copies.stored_tokens * use.token_bytes)
    return values


def flush_cover(records: Records) -> Coverage | None:
    """When the device stood idle for stores; None where it never did."""
    rows = records.states[records.states["state"] == STORE_FLUSH]
    return Coverage(rows["time_ns"], rows["blocker"]) if len(rows) else None


def flush_times(
    records: Records, intervals: Intervals, is_after_first: Callable[[Records, Int, Int], NDArray[np.bool_]]
) -> Iterator[Yielded]:
    """What waits for stores take off the gaps between steps in requests' lives, and add to FLUSH."""
    cover = flush_cover(records)
    if cover is None:
        return
    at = np.isin(intervals.state, (PREFILL, RECOMPUTE, DECODE))
    start_ns, request = intervals.start_ns[at], intervals.request[at]
    ns = cover.between(start_ns, intervals.end_ns[at])
    after_first = is_after_first(records, request, start_ns)
    yield "host_gap", request, -ns, after_first
    yield FLUSH, request, ns, after_first
