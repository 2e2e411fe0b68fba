"""The time of decode steps as straight pieces over their total context, so that one step costs one look-up."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise
from operator import itemgetter
from typing import Any

from batchsim.cost.profile import HostTerm, StepCosts

Segment = tuple[float, float, float, float, float, float]
"""(first, last, alone, per_token, least, attention): one straight piece of the time in ns of a given number of decodes
over their total context in tokens. From `first` to `last` a step of decodes alone takes max(least, alone + per_token ·
context); `attention` is the part of `alone` that stays in a step with chunks. A bare tuple, since every step reads
one."""

Rows = int | tuple[int, int]
"""Decodes plus rows of padding; as a pair with the rows that attention has, where attention has another number."""


class Segments:
    """The segments of `costs` and `host` by numbers of rows, made when first asked for.

    `most_context` is the largest mean context, beyond which there are none. `launched` gives the ns of a step of so
    many rows launched op by op, but for what grows with contexts. `on_cpu`: without graphs, rows of padding that
    attention alone sees cost attention alone.
    """

    __slots__ = ("_costs", "_host", "_launched", "_most_context", "_of_rows", "_on_cpu", "latest")

    def __init__(
        self,
        costs: StepCosts,
        host: HostTerm,
        most_context: float,
        launched: Callable[[int], float],
        *,
        on_cpu: bool,
    ) -> None:
        self._costs = costs
        self._host = host
        self._most_context = most_context
        self._launched = launched
        self._on_cpu = on_cpu
        self._of_rows: dict[Rows, list[Segment]] = {}
        self.latest: dict[Rows, Segment] = {}
        """The segment that was found last for each number of rows: a group's context grows by little a step."""

    def find(self, key: Rows, context: int) -> Segment:
        """The segment for `key` decodes that holds a total `context` in tokens."""
        if key not in self._of_rows:
            rows, reads = (key, key) if isinstance(key, int) else key
            self._of_rows[key] = self._segments_of(rows, reads)
        segments = self._of_rows[key]
        i = min(bisect_left(segments, context, key=_LAST), len(segments) - 1)
        self.latest[key] = segments[i]
        return segments[i]

    def held(self, rows: Any, reads: Any) -> Any:
        """The number of rows at which the curve `costs.decode` is read; for numbers, or arrays of one a step.

        On a GPU `reads` where there are more, since the graph that is replayed holds all rows of attention; on a CPU
        `rows`.
        """
        return rows if self._on_cpu else rows + (reads - rows) * (reads > rows)

    def _segments_of(self, rows: int, reads: int) -> list[Segment]:
        """All segments for `rows` decodes, of which attention has `reads`, in order of context."""
        costs, host = self._costs, self._host
        knots = costs.decode_attention.context
        ns = [costs.in_situ * alone for alone in costs.decode_attention.row(reads)]
        slopes = [(b - a) / ((y - x) * reads) for (a, b), (x, y) in zip(pairwise(ns), pairwise(knots), strict=True)]
        ends = [knot * reads for knot in knots]
        limit = self._most_context * reads
        held = self.held(rows, reads)
        sequences = min(rows, reads)  # less than rows where there are drafts
        if costs.decode is not None and held <= costs.decode.x[-1]:
            matmuls = costs.in_situ * costs.decode.holding_one(held)
            least = host.with_kernels(0.0, sequences, 0)
        else:
            matmuls = self._launched(rows)
            least = host.with_kernels(costs.launch_ns, sequences, 0)
        serial = host.base + host.per_sequence * sequences if host.mode == "serial" else 0.0
        segments: list[Segment] = []
        first = 0.0
        # Below the first knot its value holds.
        for end, at_end, slope, last in zip(ends, ns, [0.0, *slopes], [*ends[:-1], limit], strict=True):
            attention = at_end - slope * end
            segments.append((first, min(last, limit), matmuls + attention + serial, slope, least, attention))
            first = last
        return segments


_LAST = itemgetter(1)  # of a segment
