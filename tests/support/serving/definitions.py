"""What benchmark clients call TTFT, ITL, TPOT, latency and throughput, in the columns of `received/*.csv`.

One row says it in words, for the docs' table, and as a function, for the tests against these clients: read in the
sources of guidellm 0.8.1 (`schemas/base/request_stats.py`), aiperf 0.13.0 (`metrics/types`) and vLLM
(`benchmarks/serve.py`, `benchmarks/lib/endpoint_request_func.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

HEAD = ("client", "its name", "here", "in words")
Kind = Literal["first token", "token", "latency", "rate"]


@dataclass(frozen=True)
class Ours:
    """The requests that a server recorded, in s and tokens, one value a request."""

    sent_s: Any
    ttft_s: Any
    e2e_s: Any
    n: Any

    @classmethod
    def of(cls, rows: list[dict[str, int]]) -> Ours:
        """From the rows of `received/*.csv`."""
        sent, ttft, e2e, tokens = (
            np.array([row[name] for row in rows]) for name in ("sent_ns", "ttft_ns", "e2e_ns", "output_tokens")
        )
        return cls(sent / 1e9, ttft / 1e9, e2e / 1e9, tokens)

    @property
    def span_s(self) -> float:
        """From the first request's sending to the last answer's end."""
        return float((self.sent_s + self.e2e_s).max() - self.sent_s.min())


@dataclass(frozen=True)
class Definition:
    """A client's metric: its name, what it is here, in s or a second, and how it is measured, for its bound."""

    client: str
    name: str
    here: str
    words: str
    kind: Kind
    value: Callable[[Ours], float]


_TTFT, _E2E = "`ttft`", "`e2e`"
_GAPS = "`(e2e - ttft) / (n - 1)`"


def _median(value: Callable[[Ours], Any]) -> Callable[[Ours], float]:
    return lambda ours: float(np.median(value(ours)))


_ttft = _median(lambda ours: ours.ttft_s)
_e2e = _median(lambda ours: ours.e2e_s)
_tpot = _median(lambda ours: (ours.e2e_s - ours.ttft_s) / (ours.n - 1))


def _requests(ours: Ours) -> float:
    return len(ours.n) / ours.span_s


def _tokens(ours: Ours) -> float:
    return float(ours.n.sum()) / ours.span_s


def _every_gap(ours: Ours) -> float:
    return float((ours.e2e_s - ours.ttft_s).sum() / (ours.n - 1).sum())


DEFINITIONS = (
    Definition(
        "openai", "ttft", _TTFT, "a client of one's own: to the first piece with a choice", "first token", _ttft
    ),
    Definition("openai", "tpot", _GAPS, "of its own times and `usage.completion_tokens`", "token", _tpot),
    Definition("openai", "e2e", _E2E, "to the last piece with a choice", "latency", _e2e),
    Definition("guidellm", "time_to_first_token_ms", _TTFT, "to the first token, of a request", "first token", _ttft),
    Definition(
        "guidellm", "inter_token_latency_ms", _GAPS, "a request's mean gap: others call it TPOT", "token", _tpot
    ),
    Definition(
        "guidellm",
        "time_per_output_token_ms",
        "`e2e / n`",
        "with the first token's wait in it: no one else's TPOT",
        "token",
        _median(lambda ours: ours.e2e_s / ours.n),
    ),
    Definition("guidellm", "request_latency", _E2E, "to the end of the stream, usage included", "latency", _e2e),
    Definition("guidellm", "requests_per_second", "`requests / span`", "its mean, not its median", "rate", _requests),
    Definition("guidellm", "output_tokens_per_second", "`Σn / span`", "its mean, not its median", "rate", _tokens),
    Definition("aiperf", "time_to_first_token", _TTFT, "to the first piece with text", "first token", _ttft),
    Definition("aiperf", "inter_token_latency", _GAPS, "a request's mean gap", "token", _tpot),
    Definition("aiperf", "request_latency", _E2E, "to the last piece with text", "latency", _e2e),
    Definition(
        "aiperf",
        "request_throughput",
        "`requests / span`",
        "its span has some 0.2 s more: longer runs, less error",
        "rate",
        _requests,
    ),
    Definition(
        "aiperf", "output_token_throughput", "`Σn / span`", "of what succeeded, by the same span", "rate", _tokens
    ),
    Definition("vllm bench serve", "ttft_ms", _TTFT, "to the first piece with a choice", "first token", _ttft),
    Definition("vllm bench serve", "tpot_ms", _GAPS, "of requests of 2 tokens and more", "token", _tpot),
    Definition(
        "vllm bench serve",
        "itl_ms",
        "`Σ(e2e - ttft) / Σ(n - 1)`",
        "its mean is over all gaps of all requests, so long answers weigh more",
        "token",
        _every_gap,
    ),
    Definition("vllm bench serve", "e2el_ms", _E2E, "to the last piece with a choice", "latency", _e2e),
    Definition(
        "vllm bench serve",
        "request_throughput",
        "`requests / span`",
        "span by its clock, set-up included",
        "rate",
        _requests,
    ),
    Definition(
        "vllm bench serve", "output_throughput", "`Σn / span`", "span by its clock, set-up included", "rate", _tokens
    ),
)


def of_client(client: str) -> list[Definition]:
    """The definitions of one client."""
    return [definition for definition in DEFINITIONS if definition.client == client]


def table() -> str:
    """The definitions as the docs' table."""
    rows = [HEAD, ("---",) * len(HEAD)]
    rows += [(each.client, f"`{each.name}`", each.here, each.words) for each in DEFINITIONS]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)
