"""What each tool calls TTFT, TPOT and ITL, and what is read of its files.

Source: each tool's own code, 2025 and 2026. `n` is the number of output tokens.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Definition:
    """The metrics of one tool in words. `form` is what `MeasuredRun.form` says; `read` names the parts of the file that
    are used."""

    form: str
    ttft: str
    tpot: str
    itl: str
    read: str


DEFINITIONS = (
    Definition(
        "vllm bench serve",
        "sending (after `max_concurrency` let it go) to first chunk",
        "(E2E − TTFT) / (n − 1)",
        "gaps between chunks",
        "`ttfts`, E2E = TTFT + Σ `itls`, `start_times`, `output_lens`",
    ),
    Definition(
        "SGLang bench_serving",
        "sending to first chunk",
        "(E2E − TTFT) / (n − 1)",
        "a chunk's gap over its tokens",
        "as above; sendings are not in the file",
    ),
    Definition(
        "guidellm",
        "`request_start` to first token",
        "`time_per_output_token` = E2E / n: holds the first token",
        "(last − first) / (n − 1): our TPOT",
        "`info.timings`: targeted and actual start, first and last token",
    ),
    Definition(
        "aiperf",
        "`request_start_ns` to first token",
        "none by that name",
        "`inter_token_latency` = (E2E − TTFT) / (n − 1): our TPOT",
        "`time_to_first_token`, `request_latency`, n by the server (`usage_completion_tokens`) where it says",
    ),
    Definition(
        "inference-perf",
        "`start_time` to first token",
        "(last − first) / (n − 1), n counted anew from chunks: up to twice the tokens, half the time",
        "gaps between tokens, 0 inside a chunk",
        "TPOT = (E2E − TTFT) / (n − 1) with the server's n; of aggregates, of the means",
    ),
    Definition(
        "LLMServingSim bench",
        "handed to the engine to first token at its core: no client",
        "(last − first) / (n − 1)",
        "none",
        "`arrival_time`, `queued_ts`, `first_token_ts`, `last_token_ts`",
    ),
    Definition(
        "tidy table",
        "column `ttft`, or `first_token` − `sent`",
        "column `tpot` of aggregates; else (E2E − TTFT) / (n − 1)",
        "none",
        "columns by their names, each with its unit: `ttft_s`, `e2e_mean_ms`",
    ),
)


def definition(form: str) -> Definition:
    """The definitions of the tool that wrote files of `form`."""
    return next(row for row in DEFINITIONS if row.form == form)
