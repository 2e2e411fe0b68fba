"""From the values of one request after the other to the columns of a measured run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from batchsim.check.measured.counts import REFUSED, engine_tokens, failures_note
from batchsim.check.measured.run import MISSING, MeasuredRequests
from batchsim.check.measured.values import Node
from batchsim.workload.traces.trace_rows import HashIds, Ints

_YEAR_NS = 365 * 86_400 * 10**9


@dataclass(frozen=True)
class Row:
    """One request: absolute times in ns on any one clock, MISSING where unknown; lengths in tokens.

    `first` and `last` are the times of the first and last token, `chunks` the pieces of the answer. `by_engine`:
    `output_tokens` is the engine's count; `counted` is what the client counted besides. `why` is the kind of a failure,
    after which `last` is when the client gave up.
    """

    prompt_tokens: int
    output_tokens: int
    ok: bool = True
    intended: int = MISSING
    sent: int = MISSING
    first: int = MISSING
    last: int = MISSING
    chunks: int = MISSING
    counted: int = MISSING
    by_engine: bool = False
    why: str = ""

    @property
    def held(self) -> bool:
        """Whether the engine worked on it, as far as known: it succeeded, got tokens, or lasted and was not refused."""
        return self.ok or self.output_tokens > 0 or (self.last > self.sent != MISSING and self.why not in REFUSED)


def check_row(node: Node, row: Row) -> Row:
    """`row`. MeasuredError where a request that ended well has no token, or its times are out of order."""
    if not row.ok:
        return row
    if not row.output_tokens:
        node.bad("0 output tokens of a request that did not fail", "Mark it as failed, or leave it out.")
    if not row.prompt_tokens:
        node.bad("0 prompt tokens", "The server did not count them: let it report its usage, or leave the request out.")
    times = {"sending": row.sent, "first token": row.first, "last token": row.last}
    known = [(name, ns) for name, ns in times.items() if ns != MISSING]
    for (one, before), (other, after) in pairwise(known):
        if after < before:
            node.bad(f"its {other} is {(before - after) / 1e9:g} s before its {one}", "Times must be of one clock.")
    return row


def requests_of(node: Node, rows: list[Row], hash_ids: Callable[[Ints], HashIds] | None = None) -> MeasuredRequests:
    """The columns of `rows`, in the order of sending. MeasuredError where none ended well, or some lack a time.

    `hash_ids` gives those of the rows at an index.
    """
    if not rows:
        node.bad("holds no requests", "Give the file of a run that sent some.")
    ok = np.array([row.ok for row in rows])
    if not ok.any():
        node.bad(f"none of its {len(rows):,} requests ended well", "Look at their errors.")
    columns = {
        name: np.array([getattr(row, name) for row in rows], np.int64)
        for name in ("intended", "sent", "first", "last", "prompt_tokens", "output_tokens", "chunks", "counted")
    }
    by_engine, held = (np.array([getattr(row, name) for row in rows]) for name in ("by_engine", "held"))
    output, notes = engine_tokens(columns["output_tokens"], columns["counted"], columns["chunks"], ok, by_engine)
    notes = [*failures_note([row.why for row in rows if not row.ok], len(rows)), *notes]
    sent, intended = columns["sent"], columns["intended"]
    has_sent = sent != MISSING
    if has_sent.any() and not has_sent.all():
        node.bad(f"{int((~has_sent).sum()):,} of its {len(rows):,} requests have no time of sending", "Write it anew.")
    base = sent if has_sent.all() else np.zeros(len(rows), np.int64)
    order = np.argsort(base, kind="stable")
    start = int(base[order[0]])
    if int(base[order[-1]]) - start > _YEAR_NS:
        node.bad(
            f"its sendings lie {(int(base[order[-1]]) - start) / _YEAR_NS:.3g} years apart",
            "Look at the unit of its times.",
        )
    has_first, has_last = ok & (columns["first"] != MISSING), held & (columns["last"] != MISSING)
    requests = MeasuredRequests(
        sent_ns=sent - start if has_sent.all() else None,
        intended_ns=intended - start if has_sent.all() and (intended != MISSING).all() else None,
        ttft_ns=np.where(has_first, columns["first"] - base, MISSING),
        e2e_ns=np.where(has_last, columns["last"] - base, MISSING),
        prompt_tokens=columns["prompt_tokens"],
        output_tokens=output,
        ok=ok,
        chunks=columns["chunks"],
        hash_ids=None if hash_ids is None else hash_ids(np.arange(len(rows))),
        notes=tuple(notes),
    )
    return requests.picked(order)
