"""What LoRA adapters did to requests: which asked for which, found it on the GPU or waited, and what was loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from batchsim.base.units import NS_PER_S
from batchsim.kernel.record import ADAPTER, LOADED, LOADING, Records
from batchsim.metrics.lives import Int, held_back, queueing, state_intervals

_Row = tuple[str, Literal["adapters", "loads", "share", "s"], Literal["lower", "higher", ""], str]
ADAPTER_METRICS: tuple[_Row, ...] = (
    ("adapters", "adapters", "", "LoRA adapters that requests of the cohort asked for"),
    (
        "adapter_hit_rate",
        "share",
        "higher",
        "requests that found their adapter on the GPU when they first ran / these and copies onto it",
    ),
    ("adapter_host_loads", "loads", "lower", "adapters copied onto the GPU in the whole run"),
    ("adapter_disk_loads", "loads", "lower", "adapters read from disk in the whole run"),
    ("adapter_load_s", "s", "lower", "how long steps waited for both in all"),
    ("adapter_held_back_share", "share", "lower", "of the cohort's requests with an adapter, those overtaken for it"),
    ("adapter_held_back_mean_s", "s", "lower", "how long one of the cohort's was passed over, mean"),
)
"""Rows of the table of metrics: name, unit, what is better, words."""


@dataclass(frozen=True)
class AdapterUse:
    """The adapters of a run: parallel arrays by adapter, over all engines.

    `of` is the adapter of each row of the requests, -1 of the base model, `held_ns` how long that request was passed
    over because of its adapter. `hits` counts requests that found their adapter on the GPU when they first ran,
    `host_loads` copies onto a GPU, `disk_loads` reads from disk; `load_ns` is the time of both.
    """

    names: tuple[str, ...]
    of: Int
    held_ns: Int
    hits: Int
    host_loads: Int
    disk_loads: Int
    load_ns: Int


def adapter_use(requests: NDArray[np.void], engines: Sequence[Records]) -> AdapterUse:
    """The use of adapters by `requests` at `engines`, each with its own states."""
    asked: dict[int, str] = {}
    for records in engines:
        rows = records.states[records.states["state"] == ADAPTER]
        codes = zip(rows["request_id"].tolist(), rows["reason"].tolist(), strict=True)
        asked |= {request: records.texts[code] for request, code in codes}
    names = tuple(sorted(set(asked.values()), key=_natural))
    number = {name: k for k, name in enumerate(names)}
    of = np.array([number[asked[i]] if i in asked else -1 for i in requests["request_id"].tolist()], np.int64)
    use = AdapterUse(names, of, np.zeros(len(of), np.int64), *(np.zeros(len(names), np.int64) for _ in range(4)))
    for records in engines:
        _add_loads(use, records, {i: number[name] for i, name in asked.items()})
        queue = queueing(records, state_intervals(records))
        held = held_back(records, queue)
        row = np.searchsorted(requests["request_id"], records.requests["request_id"][held.request])
        np.add.at(use.held_ns, row, held.end_ns - held.start_ns)
    return use


def _natural(name: str) -> tuple[str, int, str]:
    """The key that puts lora-2 before lora-10."""
    head = name.rstrip("0123456789")
    return head, int(name[len(head) :] or 0), name


def _add_loads(use: AdapterUse, records: Records, number: dict[int, int]) -> None:
    """Adds the loads of one engine to `use`; `number` has the adapter of each request by id."""
    rows = records.states[(records.states["state"] == LOADING) | (records.states["state"] == LOADED)]
    rows = rows[np.argsort(rows["request_id"], kind="stable")]
    loading = rows["state"] == LOADING
    adapter = np.array([number[i] for i in rows["request_id"].tolist()], np.int64)
    before = np.append(False, loading[:-1])
    np.add.at(use.hits, adapter[~loading & ~before], 1)
    texts = np.array(records.texts)[rows["reason"]]
    np.add.at(use.host_loads, adapter[loading & (texts == "host")], 1)
    np.add.at(use.disk_loads, adapter[loading & (texts == "disk")], 1)
    ends = np.flatnonzero(~loading & before)
    np.add.at(use.load_ns, adapter[ends], rows["time_ns"][ends] - rows["time_ns"][ends - 1])


def adapter_kpis(use: AdapterUse, cohort: NDArray[np.bool_]) -> dict[str, float | None]:
    """The metrics of adapters, by name: loads of the whole run, and how many of the cohort waited for one."""
    asks = cohort & (use.of >= 0)
    first = int(use.hits.sum()) + int(use.host_loads.sum())
    return {
        "adapters": float(len(np.unique(use.of[asks]))),
        "adapter_hit_rate": int(use.hits.sum()) / first if first else None,
        "adapter_host_loads": float(use.host_loads.sum()),
        "adapter_disk_loads": float(use.disk_loads.sum()),
        "adapter_load_s": float(use.load_ns.sum()) / NS_PER_S,
        "adapter_held_back_share": float((use.held_ns[asks] > 0).mean()) if asks.any() else None,
        "adapter_held_back_mean_s": float(use.held_ns[asks].mean()) / NS_PER_S if asks.any() else None,
    }
