"""Attention of layers with a sliding window: what it costs depends on how many of the batch's contexts fill the window.

A batch of 32 × 200 and 32 × 60,000 tokens has a mean of 30,100, which fills any window; half of its sequences do not.
So the grids are read at the mean of min(context, window), which the decode group keeps (`DecodeGroup.in_window`). With
the same members that sum grows by a token a step for each member below the window, so that the time stays a line over
the total context until one of them fills it.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from batchsim.base.later import np
from batchsim.cost.interpolation import GridReader
from batchsim.cost.profile import WindowedAttention
from batchsim.cost.work import Columns, attention_rows, chunk_rows
from batchsim.kernel.draft_group import DraftGroup
from batchsim.kernel.window_sum import keys_in_window

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from batchsim.kernel.batch import Batch

_Piece = tuple[float, float, float]
"""(last, alone, per_token): ns are alone + per_token · tokens up to `last` tokens that all members read together."""


class Windows:
    """Reads `attention`, whose times inside an engine are `in_situ` times as long."""

    __slots__ = ("_attention", "_chunks", "_in_situ", "_pieces", "window")

    def __init__(self, attention: WindowedAttention, in_situ: float) -> None:
        self._attention = attention
        self._in_situ = in_situ
        self._chunks = GridReader(attention.chunks)
        self._pieces: dict[int, list[_Piece]] = {}
        self.window = attention.window

    def line(self, batch: Batch, rows: int) -> tuple[float, float]:
        """(ns, ns a token of the batch's total context, padding included): on which line the decodes of `batch` lie
        that `rows` of attention belong to. Fills in `batch.window_tokens`."""
        group, window, padding = batch.decodes, self.window, batch.pad_context_tokens
        if group is None or group.total_context_tokens != batch.context_tokens:  # stated work, of no group
            tokens, below = min(batch.context_tokens, batch.num_decode * window), 0
        else:
            tokens = group.in_window(window)
            below = 0 if group.windowed is None else group.windowed.below
        batch.window_tokens = tokens
        if padding:
            tokens, below = tokens + min(padding, max(rows - batch.num_decode, 1) * window), 0
        return self._line(rows, tokens, below, batch.context_tokens)[:2]

    def lasting_line(self, batch: Batch) -> tuple[float, float, float] | None:
        """`line` of the next steps of the decodes of `batch`, and up to which total context it holds; None: unknown."""
        group, rows = batch.decodes, batch.num_decode
        if group is None or isinstance(group, DraftGroup) or len(group.members) != rows:
            return None
        context = group.total_context_tokens
        if context - batch.context_tokens not in (0, rows):
            return None
        tokens, windowed = group.in_window(self.window), group.windowed
        assert windowed is not None
        alone, per_token, last = self._line(rows, tokens, windowed.below, context)
        if not windowed.below:
            return alone, per_token, inf
        steps = min(windowed.fills_in - 1, (last - tokens) // windowed.below)
        return alone, per_token, context + steps * rows

    def _line(self, rows: int, tokens: int, below: int, context: int) -> tuple[float, float, float]:
        """(alone, per_token, last): where `below` of the rows gain a token in the window with each step, all `rows` one
        of context; `last` in tokens within the window."""
        pieces = self._pieces.get(rows) or self._pieces_of(rows)
        last, alone, per_token = pieces[min(bisect_left(pieces, tokens, key=_LAST), len(pieces) - 1)]
        if not below:
            return alone + per_token * tokens, 0.0, last
        # rows · tokens − below · context stays as it is while the same rows are below: the same bits at each step.
        fixed = (rows * tokens - below * context) / rows
        return alone + per_token * fixed, per_token * (below / rows), last

    def _pieces_of(self, rows: int) -> list[_Piece]:
        grid = self._attention.decode
        ns = [self._in_situ * alone for alone in grid.row(rows)]
        pieces = [(grid.context[0] * rows, ns[0], 0.0)]  # below the first knot its value holds
        for (a, b), (x, y) in zip(pairwise(ns), pairwise(grid.context), strict=True):
            slope = (b - a) / ((y - x) * rows)
            pieces.append((y * rows, b - slope * y * rows, slope))
        self._pieces[rows] = pieces
        return pieces

    def chunks_ns(self, batch: Batch) -> float:
        """ns of the attention of the chunks of `batch`. Fills in `batch.window_pairs`."""
        pairs = 0
        for seq, n in batch.chunks:
            pairs += keys_in_window(n, seq.settled_computed_tokens, self.window)
        batch.window_pairs = pairs
        tokens, pad = batch.num_prefill_tokens, batch.pad_prefill_tokens
        if pad:
            rows = len(batch.chunks) + batch.pad_prefill_rows
            pairs = max(pairs, rows * keys_in_window((tokens + pad) // rows, 0, self.window))
        return self.prompts_ns(tokens + pad, pairs)

    def prompts_ns(self, tokens: int, pairs: int) -> float:
        """ns of the attention of `tokens` of prompts that read `pairs` keys within the window."""
        return self._in_situ * self._chunks.at(tokens, pairs / tokens) if tokens else 0.0

    def decodes_of(self, columns: Columns) -> NDArray[np.float64]:
        """ns of the attention of the decodes of recorded steps, an element a step. Where the tokens within the window
        were not recorded all contexts are taken as alike."""
        rows, window = attention_rows(columns, None), self.window
        context, recorded = columns["context_tokens"], columns["window_tokens"]
        tokens = np.where(recorded > 0, recorded, np.minimum(context, columns["num_decode"] * window))
        padding = columns["pad_context_tokens"]
        reads = np.maximum(rows - columns["num_decode"], 1) * window
        tokens = tokens + np.minimum(padding, reads)
        busy = columns["num_decode"] + columns["pad_decode_rows"] > 0
        return self._in_situ * self._attention.decode.at(rows, tokens / np.maximum(rows, 1)) * busy

    def chunks_of(self, columns: Columns) -> NDArray[Any]:
        """ns of the attention of the chunks of recorded steps, an element a step; as `decodes_of`."""
        window, pad = self.window, columns["pad_prefill_tokens"]
        tokens = columns["num_prefill_tokens"] + pad
        recorded, pairs = columns["window_pairs"], columns["prefill_pairs"]
        pairs = np.where(recorded > 0, recorded, np.minimum(pairs, columns["num_prefill_tokens"] * window))
        if (pad > 0).any():
            rows = chunk_rows(columns)
            length = tokens // np.maximum(rows, 1)
            growing = np.minimum(length, window)
            rectangle = rows * (growing * (growing + 1) // 2 + (length - growing) * window)
            pairs = np.where(pad > 0, np.maximum(pairs, rectangle), pairs)
        ns = self._attention.chunks.at(tokens, pairs / np.maximum(tokens, 1))
        return self._in_situ * ns * (tokens > 0)


_LAST = itemgetter(0)  # of a piece
