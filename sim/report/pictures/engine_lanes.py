"""How busy host and device of an engine ahead of results were over time: a row each, or one for each stage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from batchsim.drive.fleet.fleet_records import by_engine
from batchsim.explain.step_terms import device_rows
from batchsim.kernel.record import Records
from batchsim.metrics.host_lane import device_spans_ns, host_spans_ns, host_waits_ns
from batchsim.report.pictures.style import GREY
from batchsim.report.reading import Floats
from batchsim.results.read import Results

HOST = "host"
WAITS: dict[str, Any] = {"facecolor": "white", "edgecolor": "black", "hatch": "//////", "linewidth": 0}
"""How waiting is drawn: not in a colour, since each may be a policy's."""
ROW_INCH = 0.17
_FILL = 0.86  # of a row's height, at work all the time


def lane_shares(
    results: Results, policy: str, load: float, seed: int, edges_ns: Floats
) -> dict[str, tuple[Floats, Floats]]:
    """By row, the host's first: the shares of each interval of `edges_ns` in which it was at work and in which it stood
    still for the host, means over engines. Empty where none was ahead of results."""
    if results.lanes(policy, load, seed) is None:
        return {}
    records = results.records(policy, load, seed)
    by_lane: dict[str, list[tuple[Floats, Floats]]] = {}
    for engine in by_engine(records):
        engine_records, replica = engine.records, None if records.replicas is None else engine.replica
        if not len(engine_records.lanes):
            continue
        waits = _share(_waits(engine_records), edges_ns)
        by_lane.setdefault(HOST, []).append(
            (_share(np.concatenate(host_spans_ns(engine_records)), edges_ns), np.zeros_like(waits))
        )
        for name, spans in (
            device_rows(results, engine_records, policy, replica) or {"device": device_spans_ns(engine_records)}
        ).items():
            by_lane.setdefault(name, []).append((_share(spans, edges_ns), waits))
    return {name: _means(shares) for name, shares in by_lane.items()}


def draw_lane_shares(ax: Axes, shares: dict[str, tuple[Floats, Floats]], edges: Floats, color: str) -> None:
    """Draws a row for each lane, the host's at the top, filled as high as it was at work; on top of that, in black, how
    long it stood still for the host."""
    for row, (name, (busy, waits)) in enumerate(shares.items()):
        floor = len(shares) - 1 - row
        own = GREY if name == HOST else color
        ax.stairs(floor + _FILL * busy, edges, baseline=floor, fill=True, color=own)
        if waits.any():
            top = floor + _FILL * (busy + waits)
            ax.stairs(top, edges, baseline=floor + _FILL * busy, fill=True, **WAITS)
    ax.set_ylim(0, len(shares))
    ax.set_yticks([len(shares) - 1 - row + _FILL / 2 for row in range(len(shares))], list(shares), size=7)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")


def _waits(records: Records) -> NDArray[np.int64]:
    starts_ns = records.steps["start_ns"]
    return np.stack([starts_ns - host_waits_ns(records), starts_ns], axis=1)


def _share(spans: NDArray[np.int64], edges_ns: Floats) -> Floats:
    """The share of each interval that lies in `spans`, which do not overlap."""
    spans = spans[spans[:, 1] > spans[:, 0]]
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    if not len(spans):
        return np.zeros(len(edges_ns) - 1)
    lengths = np.stack([np.zeros(len(spans)), spans[:, 1] - spans[:, 0]], axis=1)
    return np.diff(np.interp(edges_ns, spans.ravel(), np.cumsum(lengths.ravel()))) / np.diff(edges_ns)


def _means(shares: Iterable[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    busy, waits = zip(*shares, strict=True)
    return np.mean(busy, axis=0), np.mean(waits, axis=0)
