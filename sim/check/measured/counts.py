"""Output tokens of an answer: the engine's count where a file has it or its pieces imply it, and the clients' counts.

A client without the server's usage field tokenises the text anew and may be far off, in both directions, and so is all
that it divides by the number of tokens. An engine streams at least a token a piece, so that more pieces than tokens
give such a count away; fewer pieces may be merged ones.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import cut
from batchsim.check.measured.run import MISSING
from batchsim.check.measured.values import Node
from batchsim.workload.traces.trace_rows import Ints

EMPTY_PIECES = 2
"""Pieces of an answer that hold no token at most: one with the role before it, one with the reason of its end."""
UNLIKE = 0.05
"""Least relative difference of two counts of the same tokens that is reported."""
CONTRADICT = 0.15
"""Relative difference of the reported tokens from the number that mean TPOT, TTFT and E2E imply, from which on they
contradict: means of quotients are no quotients of means."""

Bools = NDArray[np.bool_]


def engine_tokens(output: Ints, counted: Ints, chunks: Ints, ok: Bools, by_engine: Bools) -> tuple[Ints, list[str]]:
    """The tokens of each answer as the engine made them, and notes on what clients counted instead.

    `counted`: what the client counted where `output` is the engine's (`by_engine`) and the file has both, else MISSING.
    """
    notes: list[str] = []
    both = ok & (counted != MISSING)
    if unlike := int((counted != output)[both].sum()):
        theirs, ours = (int(column[both].sum()) for column in (counted, output))
        notes.append(
            f"{unlike:,} answers are longer or shorter by the client: {theirs:,} tokens, {ours:,} by the server"
        )
    client_counted = ok & ~by_engine & (chunks != MISSING)
    tokens, pieces = int(output[client_counted].sum()), int(chunks[client_counted].sum())
    if pieces - EMPTY_PIECES * int(client_counted.sum()) > (1 + UNLIKE) * tokens:
        notes.append(
            f"the client counted {tokens:,} output tokens anew, of answers that came in {pieces:,} pieces of a token at"
            " least: taken as so many tokens as pieces"
        )
        return np.where(client_counted, np.maximum(output, chunks), output), notes
    merged = ok & (chunks != MISSING)
    tokens, pieces = int(output[merged].sum()), int(chunks[merged].sum())
    if tokens > pieces:
        or_not = (
            "; or the client counted anew and too many, which the file does not tell" if client_counted.any() else ""
        )
        notes.append(f"{tokens:,} tokens came in {pieces:,} chunks: the gaps between chunks are no steps{or_not}")
    return output, notes


def mean_tokens(
    node: Node,
    figures: dict[str, float],
    means: dict[str, float],
    *,
    itl_s: float | None = None,
    client: float | None = None,
) -> list[str]:
    """Puts the engine's mean number of output tokens into `means`, and what hangs on it into `figures`; notes on it.

    `itl_s`: the mean time between pieces. `client`: the mean that the client counted where that of `means` is the
    engine's, by which its TPOT and tokens/s are, too. MeasuredError where a mean is 0, as of a column not measured.
    """
    tokens = means["output_tokens"]
    if tokens <= 0 or client == 0:
        node.bad("a mean of its output tokens is 0", "Leave out the column that was not measured.")
    first, tpot, last = (figures.get(f"{name}_mean_s") for name in ("ttft", "tpot", "e2e"))
    decode = last - first if last is not None and first is not None else None
    if client is not None:
        if abs(client / tokens - 1) <= UNLIKE:
            return []
        by_engine = {"tpot": decode and tpot and decode / tpot + 1, "output_tokens_per_s": _told_by_rates(figures)}
        kept = {name for name, taken in by_engine.items() if taken and abs(taken / tokens - 1) <= UNLIKE}
        _divided_anew(figures, client, tokens, kept)
        return [f"the client counted {client:.4g} output tokens on average, the engine {tokens:.4g}, which are taken"]
    whole = decode if decode is not None else None if tpot is None else tpot * (tokens - 1)
    if itl_s and whole:
        pieces = whole / itl_s + 1
        if pieces - EMPTY_PIECES > (1 + UNLIKE) * tokens:
            means["output_tokens"] = pieces
            _divided_anew(figures, tokens, pieces)
            return [
                f"the client counted {tokens:.4g} output tokens anew, of answers of {pieces:.4g} pieces of a token at"
                " least (by the mean time between them): taken as so many tokens"
            ]
        return []
    if not (decode and tpot) or tokens <= 2:
        others = _told_by_rates(figures)
        if not others or abs(others / tokens - 1) <= CONTRADICT:
            return []
        return [
            f"{tokens:.4g} output tokens are told, and tokens/s over requests/s are {others:.4g}: one of them was"
            " counted anew, and the file does not tell which"
        ]
    implied = decode / tpot + 1
    if implied > (1 + CONTRADICT) * tokens:
        means["output_tokens"] = implied
        figures.pop("output_tokens_per_s", None)
        return [
            f"the client counted {tokens:.4g} output tokens anew: mean TTFT, TPOT and E2E are of {implied:.4g}, which"
            " are taken"
        ]
    if implied < tokens / (1 + CONTRADICT):
        return [
            f"{tokens:.4g} output tokens are told, and mean TTFT, TPOT and E2E are of {implied:.4g}: the TPOT is a time"
            " between pieces or holds the first token, or the client counted anew, which the file does not tell"
        ]
    return []


def _told_by_rates(figures: Mapping[str, float]) -> float | None:
    """Tokens per answer, by tokens/s over requests/s; None where one is unknown."""
    answers, each_s = figures.get("throughput_rps"), figures.get("output_tokens_per_s")
    return each_s / answers if answers and each_s else None


def _divided_anew(figures: dict[str, float], by: float, tokens: float, kept: Iterable[str] = ()) -> None:
    """TPOT and tokens/s of `figures`, which are by `by` tokens an answer, by `tokens`; but those of `kept`."""
    for name in figures:
        if name.startswith("tpot_") and tokens > 1 and "tpot" not in kept:
            figures[name] *= (by - 1) / (tokens - 1)
    if "output_tokens_per_s" in figures and "output_tokens_per_s" not in kept:
        figures["output_tokens_per_s"] *= tokens / by


# ---- failures

REFUSED = {"HTTP 400", "HTTP 401", "HTTP 403", "HTTP 404", "HTTP 413", "HTTP 422", "HTTP 429", "HTTP 503", "not sent"}
"""Kinds of failures of requests that no engine ever had, where no token came."""
_KINDS = {
    "timeout": r"time.?d?[ -]?out|deadline",
    "not sent": r"refused|cannot connect|connect call failed|name or service|unreachable",
    "cancelled": r"cancel|abort|incomplete",
    "disconnected": r"disconnect|reset by peer|broken pipe|payload|closed",
}
_SHOWN_KINDS = 4


def failure_kind(text: str) -> str:
    """A failure in a word or two: the status of HTTP, one of a few kinds, or the end of its last line."""
    status = re.search(r"(?<![\d.])([45]\d\d)(?![\d.])", text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if status is not None:
        return f"HTTP {status[1]}"
    known = next((kind for kind, words in _KINDS.items() if re.search(words, text, re.IGNORECASE)), None)
    return known or (cut(lines[-1], 40) if lines else "no reason told")


def failures_note(kinds: Iterable[str] | Mapping[str, int], total: float) -> list[str]:
    """A line that counts the failures among `total` requests by kind; none of none."""
    counts = Counter(kinds)
    if not (failed := counts.total()):
        return []
    most = counts.most_common(_SHOWN_KINDS)
    words = [f"{count:,} {kind}" for kind, count in most if kind]
    words += [f"{failed - sum(count for _, count in most):,} of other kinds"] if len(counts) > _SHOWN_KINDS else []
    by_kind = f" ({', '.join(words)})" if words else ""
    return [f"{failed:,} of {total:,.0f} requests failed{by_kind}: their latencies are no figures"]
