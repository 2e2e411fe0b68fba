"""Recorded steps of real engines: the contents of each, as far as its log has them, and its duration."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import ExtrapolationError
from batchsim.cost.work import WORK_COLUMNS, Columns

Floats = NDArray[np.float64]
MAX_TOKENS = 2**31 - 1
"""The most tokens, sequences or tokens of context that one step may have."""
MAX_MS = 3.6e6
NEAR = 1.25
"""Ratio of the most to the least possible contents up to which a step's contents count as nearly known."""


@dataclass(frozen=True)
class Engine:
    """Properties of an engine that its log may lack: tokens of its KV pool (None: unknown, or different by layer) and
    of a block, whether prompts of the same beginning share KV, its longest sequence, whether it schedules `ahead`."""

    kv_tokens: int | None
    block_size: int
    shares: bool
    max_model_len: int
    ahead: bool = False


class Step(NamedTuple):
    """One step of the engine core `core`: its time in ns, decoding sequences and their tokens (drafts included), chunks
    of prompts and their tokens; the least and the most of what the log leaves open: context tokens that the decodes
    read, query-key pairs of the chunks. The most is inf where the log sets no bound."""

    core: str
    ns: float
    decodes: int
    decode_tokens: int
    chunks: int
    prompt_tokens: int
    least_context: float
    most_context: float
    least_pairs: float
    most_pairs: float


@dataclass(frozen=True)
class RecordedSteps:
    """The columns of Step, an element a step, in the order of the log; `core` counts cores from 0."""

    core: NDArray[np.int64]
    ns: Floats
    decodes: NDArray[np.int64]
    decode_tokens: NDArray[np.int64]
    chunks: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    least_context: Floats
    most_context: Floats
    least_pairs: Floats
    most_pairs: Floats

    @classmethod
    def of(cls, steps: Sequence[Step], longest: int) -> RecordedSteps:
        """The columns of `steps`; no sequence is longer than `longest` tokens."""
        cores = {core: number for number, core in enumerate(dict.fromkeys(step.core for step in steps))}
        table = np.array([(cores[step.core], *step[1:]) for step in steps], dtype=np.float64).reshape(-1, 10)
        core, ns, decodes, decoded, chunks, prompt, *bounds = table.T
        for least, most, rows in ((0, 1, decodes), (2, 3, prompt)):
            bounds[most] = np.maximum(bounds[least], np.minimum(bounds[most], rows * float(longest)))
        whole = [one.astype(np.int64) for one in (core, decodes, decoded, chunks, prompt)]
        return cls(whole[0], ns, *whole[1:], *bounds)  # type: ignore[arg-type]

    @classmethod
    def join(cls, several: Sequence[RecordedSteps]) -> RecordedSteps:
        """The steps of several logs in one, the cores of each apart."""
        columns = {each.name: np.concatenate([getattr(one, each.name) for one in several]) for each in fields(cls)}
        counts = [int(one.core.max(initial=-1)) + 1 for one in several]
        before = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)
        columns["core"] = columns["core"] + np.repeat(before, [len(one) for one in several])
        return cls(**columns)

    def __len__(self) -> int:
        return len(self.ns)

    def picked(self, rows: NDArray[np.bool_]) -> RecordedSteps:
        """The steps of `rows`."""
        return RecordedSteps(**{each.name: getattr(self, each.name)[rows] for each in fields(self)})

    def columns(self, most: float) -> Columns:
        """The work columns for a cost model; of what is left open the least (`most` 0), the most (1) or between."""
        context, pairs = (
            np.rint((1 - most) * getattr(self, f"least_{name}") + most * getattr(self, f"most_{name}"))
            for name in ("context", "pairs")
        )
        work = {
            "num_decode": self.decodes,
            "num_decode_tokens": self.decode_tokens,
            "num_prefill_tokens": self.prompt_tokens,
            "num_chunks": self.chunks,
            "context_tokens": context.astype(np.int64),
            "prefill_pairs": pairs.astype(np.int64),
        }
        return dict.fromkeys(WORK_COLUMNS, np.zeros(len(self), np.int64)) | work


@dataclass(frozen=True)
class StepLog:
    """The steps of one log; of which `form` it is, what is to be known of its times and contents (`notes`), how many of
    its records were left out, by reason; `doubt`: why its times cannot be durations of steps, "" where they can."""

    source: str
    form: str
    steps: RecordedSteps
    notes: tuple[str, ...]
    left_out: Counter[str]
    doubt: str = ""


def least_and_most(steps: RecordedSteps, ask: Callable[[Columns], Floats]) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Lower and upper bounds of `ask` for each step over the contents that the log leaves open, and a mask of the steps
    with bounds: where the upper ones exceed a cost's range, only steps whose contents are nearly known."""
    rows = np.ones(len(steps), bool)
    try:
        ends = [ask(steps.columns(most)) for most in (0.0, 1.0)]
    except ExtrapolationError:
        rows = (steps.most_context <= NEAR * steps.least_context) & (steps.most_pairs <= NEAR * steps.least_pairs)
        if not rows.any():
            raise
        ends = [ask(steps.picked(rows).columns(most)) for most in (0.0, 1.0)]
    return np.minimum(*ends), np.maximum(*ends), rows


def pairs_between(tokens: int, chunks: int, least: float, most: float) -> tuple[float, float]:
    """The least and the most query-key pairs of `chunks` chunks that have `tokens` tokens together and begin after
    `least` to `most` computed ones, together. Of one chunk that begins at a known place they are the same."""
    if not tokens:
        return 0.0, 0.0
    longest = tokens - chunks + 1  # each chunk has a token at least
    low = tokens**2 / (2 * chunks) + tokens / 2 + (tokens if chunks == 1 else 1) * least
    return low, longest * most + (longest**2 + chunks - 1 + tokens) / 2


def time_ns(ms: float) -> float | None:
    """A recorded time in ns; None where no step can have taken it."""
    return ms * 1e6 if math.isfinite(ms) and 0 < ms <= MAX_MS else None


def number_of(text: str) -> float:
    """The number that `text` says; NaN where it says none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
