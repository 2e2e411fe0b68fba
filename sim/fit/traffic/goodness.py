"""How well fitted traffic agrees with its trace: figures of both, the fit's over many draws of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchsim.base.units import NS_PER_S
from batchsim.fit.traffic.traffic_fit import TrafficFit
from batchsim.workload.build import build_workload
from batchsim.workload.open_loop import OpenWorkload
from batchsim.workload.sessions import OpenSessions
from batchsim.workload.traces.arrival_stats import index_of_dispersion
from batchsim.workload.traces.trace_rows import Ints
from batchsim.workload.workload_config import WorkloadConfig

WINDOWS_S = (1, 10, 60)
DRAWS = 39
"""Draws of the fit: one more lies between the lowest and the highest of 39 in 95 of 100 cases."""
LONGEST = 10**9  # tokens: no model's limit plays a part


@dataclass(frozen=True)
class Traffic:
    """Requests as columns: `sent_ns` from 0, sorted (of sessions: when each begins), and the tokens of each."""

    sent_ns: Ints
    prompt_tokens: Ints
    output_tokens: Ints

    @property
    def dispersion(self) -> dict[int, float | None]:
        """Index of dispersion for counts, by the length of the windows in s."""
        return {window: index_of_dispersion(self.sent_ns, window * NS_PER_S) for window in WINDOWS_S}

    def figures(self) -> dict[str, float]:
        """The figures compared, by name with unit; undefined ones are left out."""
        gaps = np.diff(self.sent_ns) / NS_PER_S
        by_name: dict[str, float | None] = {
            "requests/s": (len(self.sent_ns) - 1) * NS_PER_S / float(self.sent_ns[-1]),
            "gaps: CV": float(gaps.std() / gaps.mean()),
            "gaps: p50 s": float(np.percentile(gaps, 50)),
            "gaps: p99 s": float(np.percentile(gaps, 99)),
        }
        by_name |= {f"dispersion at {window} s": index for window, index in self.dispersion.items()}
        for side, tokens in (("prompt", self.prompt_tokens), ("output", self.output_tokens)):
            by_name[f"{side} tokens: mean"] = float(tokens.mean())
            by_name |= {f"{side} tokens: p{q}": float(np.percentile(tokens, q)) for q in (50, 99)}
        if len({*self.prompt_tokens.tolist()}) > 1 and len({*self.output_tokens.tolist()}) > 1:
            ranks = _ranks(self.prompt_tokens), _ranks(self.output_tokens)
            by_name["rank correlation"] = float(np.corrcoef(*ranks)[0, 1])
        return {name: value for name, value in by_name.items() if value is not None}


def _ranks(values: Ints) -> NDArray[np.float64]:
    """The place of each value in their order from 1 on; equal ones share the mean of their places (Spearman)."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[place]


@dataclass(frozen=True)
class Compared:
    """A figure of the trace and of draws of the fit."""

    name: str
    trace: float
    draws: tuple[float, ...]

    @property
    def low(self) -> float:
        return min(self.draws)

    @property
    def high(self) -> float:
        return max(self.draws)

    @property
    def median(self) -> float:
        return float(np.median(self.draws))

    @property
    def agrees(self) -> bool:
        """Whether the trace's figure lies within those of the draws, or within 1 % of their median."""
        return self.low <= self.trace <= self.high or abs(self.trace - self.median) <= 0.01 * abs(self.median)


def recorded(fit: TrafficFit) -> Traffic:
    """What was recorded, of the same kind as what is drawn."""
    rows = fit.rows
    assert rows.arrival_ns is not None, "checked when fitted"
    starts_ns = rows.arrival_ns[fit.first]
    return Traffic(starts_ns - starts_ns[0], fit.prompt_tokens, rows.output_tokens)


def drawn(workload: WorkloadConfig, seed: int) -> Traffic:
    """One draw of fitted traffic."""
    built = build_workload(workload, load={}, seed=seed, max_model_len=LONGEST, base=Path())
    if isinstance(built, OpenSessions):
        requests = built.turns.requests
        return Traffic(built.start_ns - built.start_ns[0], requests.own_tokens, requests.asked_tokens)
    assert isinstance(built, OpenWorkload), "fitted traffic is open"
    return Traffic(built.sent_ns - built.sent_ns[0], built.requests.prompt_tokens, built.requests.asked_tokens)


def compare(trace: Traffic, draws: Sequence[Traffic]) -> list[Compared]:
    """The figures of the trace beside those of all draws that have them."""
    every: list[Mapping[str, float]] = [draw.figures() for draw in draws]
    return [
        Compared(name, value, tuple(figures[name] for figures in every if name in figures))
        for name, value in trace.figures().items()
        if any(name in figures for figures in every)
    ]


def survival(values: NDArray[np.float64], at: NDArray[np.float64]) -> NDArray[np.float64]:
    """The share of `values` above each of `at`."""
    return 1 - np.searchsorted(np.sort(values), at, side="right") / len(values)
