"""A measured run of an engine: its requests one by one where they are known, else their aggregates.

Metrics are ours whatever the tool called them: TTFT and E2E from the moment the client sent the request to its first
and last token, TPOT = (E2E − TTFT) / (n − 1) of an answer of n tokens; percentiles are observed values (nearest rank).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from batchsim.base.units import NS_PER_S
from batchsim.workload.traces.trace_rows import HashIds, Ints

MISSING = -1
"""Stands for an unknown time in columns of ns."""

LATENCIES = ("ttft", "tpot", "e2e")
OF = {"mean": None, "p50": 50, "p90": 90, "p99": 99}
RATES = ("throughput_rps", "output_tokens_per_s")
FIGURES = (*(f"{latency}_{of}_s" for latency in LATENCIES for of in OF), *RATES)
"""The figures of a run: latencies in seconds, completed requests/s and output tokens/s from the first sending to the
last token."""


@dataclass(frozen=True)
class Client:
    """How the client sent its requests.

    `arrivals`: `open`, at times of their own; `closed`, each when another ends; `at_once`; `unknown`. `rate_rps`: the
    mean rate asked for, None without. `poisson`: exponential gaps were asked for. `max_concurrency`: the most requests
    in flight, of a closed loop its users; None without a limit.
    """

    arrivals: Literal["open", "closed", "at_once", "unknown"] = "unknown"
    rate_rps: float | None = None
    poisson: bool = False
    max_concurrency: int | None = None

    def __str__(self) -> str:
        words = {"open": "open arrivals", "closed": "a closed loop", "at_once": "all at once", "unknown": "arrivals"}
        text = words[self.arrivals]
        text += f" at {self.rate_rps:.4g}/s asked" if self.rate_rps is not None else ""
        most = self.max_concurrency
        return text if most is None else f"{text}, {'' if self.arrivals == 'closed' else 'at most '}{most:,} in flight"


@dataclass(frozen=True)
class MeasuredRequests:
    """The requests of a run as columns of one length, in the order of sending, in ns and tokens.

    `sent_ns` counts from the first sending and is None where the file does not have it; `intended_ns`, on the same
    clock, is when the client meant to send, None likewise. `ttft_ns` and `e2e_ns` count from the sending; MISSING where
    unknown. Of a request that failed (`ok` is false) `e2e_ns` is how long it held the engine, MISSING where it did not
    or that is unknown, and `output_tokens` what came until then. `chunks` is the number of pieces of the answer,
    MISSING where unknown. `hash_ids`: what prompts share; None where the file does not say. `notes`: what was made of
    lengths and failures, a line each. `apart`: the latencies that are left out, since they cannot be.
    """

    sent_ns: Ints | None
    intended_ns: Ints | None
    ttft_ns: Ints
    e2e_ns: Ints
    prompt_tokens: Ints
    output_tokens: Ints
    ok: NDArray[np.bool_]
    chunks: Ints
    hash_ids: HashIds | None = None
    notes: tuple[str, ...] = ()
    apart: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self.ok)

    def picked(self, index: Ints) -> MeasuredRequests:
        """The requests at `index`."""
        columns = ("sent_ns", "intended_ns", "ttft_ns", "e2e_ns", "prompt_tokens", "output_tokens", "ok", "chunks")
        changed = {name: None if (column := getattr(self, name)) is None else column[index] for name in columns}
        return replace(self, hash_ids=None if self.hash_ids is None else self.hash_ids.picked(index), **changed)

    def latency_s(self, name: str) -> NDArray[np.float64]:
        """Latency `name` (`ttft`, `tpot`, `e2e`) of each request in seconds; NaN where it is unknown or undefined."""
        has = {"ttft": self.ttft_ns >= 0, "e2e": self.e2e_ns >= 0}
        has["tpot"] = has["ttft"] & has["e2e"] & (self.output_tokens > 1)
        ns = {"ttft": self.ttft_ns, "e2e": self.e2e_ns, "tpot": self.e2e_ns - self.ttft_ns}[name]
        pieces = np.maximum(self.output_tokens - 1, 1) if name == "tpot" else 1
        return np.where(self.ok & has[name] & (name not in self.apart), ns / pieces / NS_PER_S, np.nan)

    def figures(self, duration_s: float | None = None) -> dict[str, float]:
        """The figures of FIGURES that are defined, by name. `duration_s`: of the run, where sendings are unknown."""
        by_name: dict[str, float] = {}
        for latency in LATENCIES:
            values = self.latency_s(latency)
            by_name |= _summary(latency, np.sort(values[~np.isnan(values)]))
        if self.sent_ns is not None and (self.e2e_ns[self.ok] >= 0).all() and self.ok.any():
            ends = (self.sent_ns + self.e2e_ns)[self.ok]
            duration_s = (int(ends.max()) - int(self.sent_ns.min())) / NS_PER_S
        if duration_s:
            by_name["throughput_rps"] = int(self.ok.sum()) / duration_s
            by_name["output_tokens_per_s"] = int(self.output_tokens[self.ok].sum()) / duration_s
        return by_name


@dataclass(frozen=True)
class MeasuredRun:
    """One measured run, as read from a file.

    `source` is the file, `part` which of its runs, "" for the only one, `model` the served model, "" where unknown.
    `figures`: those of FIGURES that are known. `requests` is None where the file has aggregates alone; `means` then has
    the number of requests that ended well, their lengths, how these vary (`_std`, or `_min` and `_max`), and how fast
    they were sent (`requests`, `prompt_tokens`, `output_tokens`, `sent_rps`); `ended_well` is their share of all,
    `given_up` is the number of further ones, which lasted `given_up_s`. `notes`: what was converted, left out, or is
    wrong with the client, a line each. `impossible`: the figures that are left out of `figures`, since they cannot be.
    """

    source: str
    form: str
    version: str
    client: Client
    figures: Mapping[str, float]
    requests: MeasuredRequests | None = None
    means: Mapping[str, float] = field(default_factory=dict[str, float])
    part: str = ""
    model: str = ""
    notes: tuple[str, ...] = ()
    impossible: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def name(self) -> str:
        """The file, and which of its runs."""
        return f"{self.source} ({self.part})" if self.part else self.source


def nearest_rank(ordered: NDArray[np.float64], percent: int) -> float:
    """The value of sorted, non-empty `ordered` that `percent` % of them do not exceed."""
    return float(ordered[max(-(-len(ordered) * percent // 100), 1) - 1])


def _summary(latency: str, ordered: NDArray[np.float64]) -> dict[str, float]:
    """Mean and percentiles in seconds by figure name; {} of nothing."""
    if not len(ordered):
        return {}
    return {
        f"{latency}_{of}_s": float(ordered.mean()) if percent is None else nearest_rank(ordered, percent)
        for of, percent in OF.items()
    }
