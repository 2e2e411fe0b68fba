"""The steps to measure, from which every coefficient of a profile can be identified within the hull asked for.

A  decodes: sequences × context, and on graphs every size of graph at a short context
B  decodes of very unequal contexts
C  tokens of a step: one chunk, or as many as are needed; and the same tokens cut into several chunks
D  a chunk after a prefix
E  decodes beside chunks
H  held out: batches of simulated schedules (see `batchsim.calibrate.profile.schedules`), in no fit
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchsim.base.errors import CalibrationError
from batchsim.cost.work import WORK_COLUMNS

BLOCKS = "ABCDEH"
SHORT_CONTEXT = 16
"""A context, in tokens, at which decodes show what they cost besides reading the KV cache."""

_FEW = 32  # sequences


@dataclass(frozen=True)
class StepRange:
    """The range of steps to cover: most sequences and tokens of a step, tokens of a sequence, tokens of the KV pool."""

    max_seqs: int
    max_tokens: int
    max_context: int
    kv_tokens: int


@dataclass(frozen=True)
class StepShape:
    """A step to measure: the computed tokens of each decode before it, and `(prefix, tokens)` of each chunk."""

    block: str
    decode: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...] = ()

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(n for _, n in self.chunks)

    @property
    def tokens(self) -> int:
        """Tokens of the whole step."""
        return len(self.decode) + self.num_prefill_tokens

    @property
    def context(self) -> int:
        """KV tokens that the decodes read in the step."""
        return sum(self.decode)

    @property
    def pairs(self) -> int:
        """Query-key pairs of the chunks' attention."""
        return sum(n * prefix + n * (n + 1) // 2 for prefix, n in self.chunks)

    def lengths(self) -> list[int]:
        """Tokens of each sequence after the step."""
        return [c + 1 for c in self.decode] + [prefix + n for prefix, n in self.chunks]

    def fits(self, limits: StepRange, block_size: int) -> bool:
        """Whether the step lies within `limits` and its KV in the pool."""
        lengths = self.lengths()
        blocks = sum(-(-n // block_size) for n in lengths)
        return (
            len(lengths) <= limits.max_seqs
            and self.tokens <= limits.max_tokens
            and max(lengths) <= limits.max_context
            and blocks <= limits.kv_tokens // block_size
        )

    def to_row(self) -> dict[str, Any]:
        """The point as JSON values; equal contexts are written once."""
        decode: Any = list(self.decode)
        if len(decode) > 1 and len(set(decode)) == 1:
            decode = {"B": len(decode), "context": decode[0]}
        return {"block": self.block, "decode": decode, "chunks": [list(chunk) for chunk in self.chunks]}

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> StepShape:
        """The point that `to_row` wrote."""
        decode = row["decode"]
        if isinstance(decode, dict):
            decode = [decode["context"]] * decode["B"]
        return cls(row["block"], tuple(decode), tuple((prefix, n) for prefix, n in row["chunks"]))


def columns(points: Sequence[StepShape]) -> dict[str, np.ndarray]:
    """`points` as work columns (of step records), which a cost model reads."""
    rows = {
        "num_decode": [len(p.decode) for p in points],
        "num_decode_tokens": [len(p.decode) for p in points],
        "num_prefill_tokens": [p.num_prefill_tokens for p in points],
        "num_chunks": [len(p.chunks) for p in points],
        "context_tokens": [p.context for p in points],
        "prefill_pairs": [p.pairs for p in points],
    }
    none = dict.fromkeys(WORK_COLUMNS, [0] * len(points))
    return {name: np.array(values, dtype=np.int64) for name, values in (none | rows).items()}


def ladder(low: int, high: int, factor: float) -> list[int]:
    """Whole numbers from `low` to `high`, both included, each about `factor` times the one before."""
    if high <= low:
        return [high]
    steps = max(1, round(np.log(high / low) / np.log(factor)))
    return sorted({round(low * (high / low) ** (i / steps)) for i in range(steps + 1)})


def contexts(limits: StepRange, *, fine: bool) -> list[int]:
    """Contexts of block A, in tokens: a short one, then the longest over powers of 2 if `fine`, else of 4."""
    longest = limits.max_context - 1
    lengths = {min(SHORT_CONTEXT, longest)}
    while longest > 4 * SHORT_CONTEXT:
        lengths.add(longest)
        longest //= 2 if fine else 4
    return sorted(lengths | {limits.max_context - 1})


def doublings(most: int) -> list[int]:
    """1, 2, 4 and so on up to `most`, and `most`."""
    return sorted({2**i for i in range(most.bit_length()) if 2**i < most} | {most})


def uneven(most: int) -> list[int]:
    """The doublings up to `most` and odd numbers between.

    A CPU's matmuls are quickest at round sizes, and the steps of an engine are of any size.
    """
    between = {round(share * size) | 1 for size in doublings(most) for share in (1.3, 1.7)}
    return sorted({n for n in between if n <= most} | set(doublings(most)))


def plan(limits: StepRange, *, block_size: int, buckets: Sequence[int] = (), fine: bool = False) -> list[StepShape]:
    """The points of blocks A to E that lie within `limits`, without repeats.

    `buckets` are the sizes of CUDA graphs, () without; `fine` is for devices that time a step in little time beside
    loading the model. CalibrationError if the pool does not hold even one sequence of the longest context.
    """
    alone = StepShape("A", (limits.max_context - 1,))
    if not alone.fits(limits, block_size):
        raise CalibrationError(
            f"a sequence of {limits.max_context} tokens does not fit: at most {limits.max_tokens} tokens a step,"
            f" {limits.max_seqs} sequences and {limits.kv_tokens} KV tokens. Lower --max-model-len."
        )
    made = (*_block_a(limits, buckets, fine), *_block_b(limits), *_block_c(limits, fine), *_block_d(limits, fine))
    return [p for p in dict.fromkeys((*made, *_block_e(limits))) if p.fits(limits, block_size)]


def _block_a(limits: StepRange, buckets: Sequence[int], fine: bool) -> Iterable[StepShape]:
    lengths = contexts(limits, fine=fine)
    for b in doublings(limits.max_seqs):
        yield from (StepShape("A", (c,) * b) for c in lengths)
    # Every size of graph; on a CPU every number of sequences while these are few, since its matmuls are uneven.
    others = buckets or (range(1, limits.max_seqs + 1) if limits.max_seqs <= _FEW else uneven(limits.max_seqs))
    for b in others:
        if b <= limits.max_seqs:
            yield from (StepShape("A", (c,) * b) for c in (lengths[:1] if buckets else (lengths[0], lengths[-1])))


def _block_b(limits: StepRange) -> Iterable[StepShape]:
    """Decodes with one long context among short ones, and with contexts that grow by equal factors."""
    longest = limits.max_context - 1
    for b in ladder(4, limits.max_seqs, 4) if limits.max_seqs >= 4 else ():
        yield StepShape("B", (longest,) + (SHORT_CONTEXT,) * (b - 1))
        yield StepShape("B", tuple(int(x) for x in np.geomspace(SHORT_CONTEXT, longest, b)))
        yield StepShape("B", tuple(int(x) for x in np.geomspace(SHORT_CONTEXT, max(longest // 4, SHORT_CONTEXT), b)))


def _token_sizes(limits: StepRange, fine: bool) -> list[int]:
    """Tokens of a step at which block C measures; `fine`: also sizes just past where a matmul needs one tile more."""
    if not fine:
        return uneven(limits.max_tokens)
    sizes = set(ladder(1, min(64, limits.max_tokens), 2.0)) | {limits.max_tokens}
    sizes |= {*range(96, 513, 32), *range(640, 2049, 128), *range(2560, 16385, 512)}
    sizes |= {n + 8 for n in (64, 128, 256, 512)}
    return sorted(n for n in sizes if n <= limits.max_tokens)


def even_chunks(tokens: int, count: int) -> tuple[tuple[int, int], ...]:
    """`tokens` cut into `count` chunks (0, tokens) without prefix, as equal as can be."""
    return tuple((0, tokens // count + (i < tokens % count)) for i in range(count))


def _block_c(limits: StepRange, fine: bool) -> Iterable[StepShape]:
    for tokens in _token_sizes(limits, fine):
        yield StepShape("C", (), even_chunks(tokens, -(-tokens // limits.max_context)))
    for tokens in sorted({max(1, limits.max_tokens // 4), limits.max_tokens}):
        for count in ladder(2, min(limits.max_seqs, tokens, 64), 3.0) if limits.max_seqs > 1 else ():
            yield StepShape("C", (), even_chunks(tokens, count))


def _block_d(limits: StepRange, fine: bool) -> Iterable[StepShape]:
    longest = min(limits.max_tokens, limits.max_context // 2)
    for n in ladder(min(16, longest), longest, 3.0 if fine else 4.0):
        for prefix in contexts(limits, fine=fine):
            yield StepShape("D", (), ((min(prefix, limits.max_context - n), n),))


def _block_e(limits: StepRange) -> Iterable[StepShape]:
    if limits.max_seqs < 2:
        return
    lengths = contexts(limits, fine=False)
    for b in sorted({max(1, limits.max_seqs // 8), limits.max_seqs // 2, limits.max_seqs - 1}):
        for c in lengths[:-1] or lengths:
            room = min(limits.max_tokens - b, limits.max_context)
            for n in sorted({max(1, room // 16), max(1, room // 4), max(1, room)}):
                yield StepShape("E", (c,) * b, ((0, n),))
            if n > 1 and b + 2 <= limits.max_seqs:
                yield StepShape("E", (c,) * b, ((min(c, limits.max_context - n), n // 2), (0, n - n // 2)))
