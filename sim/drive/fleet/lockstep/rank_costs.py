"""How long a pass takes by the cost of a rank's own steps, and what it pads them to.

1. A pass lasts as long as the step of the slowest rank, a dummy's among them: one token without context. Where the cost
   holds experts apart, they come on top, by the tokens of all ranks, padded; the kernels of graphs where all decode.
2. Where the largest batch of any rank fits a captured size of CUDA graphs, every rank is padded to the least size that
   holds the fullest one; with a larger one all run eager, as they are.
Source: vllm/v1/worker/gpu/dp_utils.py and cudagraph_utils.py of the vLLM 0.33.0 wheel.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from batchsim.drive.fleet.lockstep.passes import num_tokens
from batchsim.kernel.batch import Batch


class Share(NamedTuple):
    """A rank's part of a pass: ns of its own step, padded, and of these ns of the padding; and the tokens of a dummy,
    padded."""

    own_ns: int
    padding_ns: int
    rows: int


class ExpertsNs(Protocol):
    """How long experts take over the tokens of all ranks: `Cost.experts_ns`."""

    def __call__(self, tokens: int, /, *, decodes: bool) -> float: ...


class RankCosts:
    """The cost of passes by `step_ns`, that of one rank's step, and `experts_ns`, that of all ranks' experts where
    `step_ns` leaves them out. `sizes`: the captured ones, rising; none: all eager.

    `shares` are those of the latest pass, by rank.
    """

    def __init__(
        self, step_ns: Callable[[Batch], int], sizes: Sequence[int], experts_ns: ExpertsNs | None = None
    ) -> None:
        self._step_ns = step_ns
        self._sizes = sizes
        self._experts_ns = experts_ns
        self.shares: list[Share] = []

    def pass_ns(self, batches: Sequence[Batch | None]) -> int:
        """ns of a pass of these batches by rank, None being a dummy. They are padded as the pass has it."""
        tokens = [1 if batch is None else num_tokens(batch) for batch in batches]
        at = bisect_left(self._sizes, max(tokens))
        size = self._sizes[at] if at < len(self._sizes) else 0
        self.shares = [self._share(batch, max(size - count, 0)) for batch, count in zip(batches, tokens, strict=True)]
        if self._experts_ns is not None:
            decodes = not any(batch is not None and batch.chunks for batch in batches)
            asked = sum(tokens)
            padded = sum(max(size, count) for count in tokens)
            self._add_experts(asked, padded, decodes=decodes)
        return max(share.own_ns for share in self.shares)

    def _add_experts(self, asked: int, padded: int, *, decodes: bool) -> None:
        """Adds to each share what the experts take of the tokens of all ranks: `asked`, and `padded` with padding."""
        assert self._experts_ns is not None, "of a cost that holds experts apart"
        ns = int(self._experts_ns(padded, decodes=decodes))
        padding_ns = max(ns - int(self._experts_ns(asked, decodes=decodes)), 0)  # a larger kernel may be faster
        self.shares = [Share(share.own_ns + ns, share.padding_ns + padding_ns, share.rows) for share in self.shares]

    def _share(self, batch: Batch | None, padding: int) -> Share:
        if batch is None:
            own_ns = self._step_ns(dummy(1 + padding))
            return Share(own_ns, own_ns - self._step_ns(dummy(1)), 1 + padding)
        batch.pad_decode_rows = batch.pad_prefill_tokens = 0
        alone_ns = self._step_ns(batch)
        if not padding:
            return Share(alone_ns, 0, 0)
        if batch.chunks:
            batch.pad_prefill_tokens = padding
        else:
            batch.pad_decode_rows = padding
        own_ns = self._step_ns(batch)
        return Share(own_ns, own_ns - alone_ns, 0)


class IteratedCosts(RankCosts):
    """The cost of passes as SGLang pads them: decodes of all ranks to the captured size of the fullest one, idle ranks
    too, which else take no time. With a prompt anywhere, or more decodes than any captured size, no rank is padded;
    then the experts compute, of decodes alone that fill half of it or more, as many rows for each rank as for the
    fullest. What they compute of a rank is a multiple of `tp`, the GPUs of each.

    Source: python/sglang/srt/layers/dp_attention.py (`DpPaddingMode`) and model_executor/forward_batch_info.py of the
    0.5.23 wheel. Simplifies: sums that fit the buffer of the custom all-reduce are padded like others.
    """

    def __init__(
        self,
        step_ns: Callable[[Batch], int],
        sizes: Sequence[int],
        experts_ns: ExpertsNs | None = None,
        tp: int = 1,
    ) -> None:
        super().__init__(step_ns, sizes, experts_ns)
        self._tp = tp

    def pass_ns(self, batches: Sequence[Batch | None]) -> int:
        tokens = [num_tokens(batch) for batch in batches]
        decodes = not any(batch is not None and batch.chunks for batch in batches)
        at = bisect_left(self._sizes, max(tokens))
        size = self._sizes[at] if decodes and at < len(self._sizes) else 0
        self.shares = [self._share(batch, max(size - count, 0)) for batch, count in zip(batches, tokens, strict=True)]
        if self._experts_ns is not None:
            rows = [-(-count // self._tp) * self._tp for count in tokens]
            asked = sum(rows)
            most = -(-max(size, *tokens) // self._tp) * self._tp
            padded = most * len(rows) if size or (decodes and 2 * asked >= most * len(rows)) else asked
            self._add_experts(asked, padded, decodes=decodes)
        return max(share.own_ns for share in self.shares)

    def _share(self, batch: Batch | None, padding: int) -> Share:
        if batch is not None:
            return super()._share(batch, padding)
        own_ns = self._step_ns(dummy(padding)) if padding else 0
        return Share(own_ns, own_ns, padding)


def dummy(rows: int) -> Batch:
    """A batch of `rows` tokens of no request, and without context."""
    return Batch(None, [], 0, pad_decode_rows=rows)
