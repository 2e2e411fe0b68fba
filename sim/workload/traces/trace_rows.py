"""Requests as columns, before they become arrivals one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from batchsim.base.later import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Ints: TypeAlias = "NDArray[np.int64]"
UNUSED_HASH_IDS = "hash_ids not used: prompts that are not the trace's own, in its order, share nothing"


@dataclass(frozen=True)
class HashIds:
    """The blocks of `block_tokens` tokens that make up the prompts of a trace's rows; equal ids are equal text.

    Row i has `ids[starts[k]:starts[k + 1]]` with k = `rows[i]`. `copies[i]` numbers the copies of a trace laid over
    itself: their ids are raised by as many times `span`, so that copies share nothing.
    """

    block_tokens: int
    ids: Ints
    starts: Ints
    rows: Ints
    copies: Ints
    span: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "span", int(self.ids.max(initial=-1)) + 1)

    @classmethod
    def of(cls, block_tokens: int, ids: Ints, starts: Ints) -> HashIds:
        """The hash ids of len(starts) - 1 rows, in order; ids are renumbered from 0, the lowest first."""
        rows = np.arange(len(starts) - 1)
        dense = np.unique(ids, return_inverse=True)[1].astype(np.int64)
        return cls(block_tokens, dense, starts, rows, np.zeros(len(rows), np.int64))

    def row(self, i: int) -> list[int]:
        """The ids of row `i` from the prompt's beginning on."""
        k = self.rows[i]
        return (self.ids[self.starts[k] : self.starts[k + 1]] + self.copies[i] * self.span).tolist()

    def picked(self, index: Ints | slice, copies: Ints | None = None) -> HashIds:
        """The rows at `index`. `copies` numbers the copy that each belongs to; copies of copies stay distinct."""
        numbers = self.copies[index]
        if copies is not None:
            numbers = numbers + copies * (int(self.copies.max(initial=0)) + 1)
        return replace(self, rows=self.rows[index], copies=numbers)

    def compact(self) -> HashIds:
        """The same rows without the ids of others."""
        flat, lengths = self._flat()
        return HashIds.of(self.block_tokens, flat, np.concatenate(([0], np.cumsum(lengths))))

    @property
    def reused_share(self) -> float:
        """The share of the rows' blocks that an earlier row has: hits of a cache that never forgets."""
        flat, _ = self._flat()
        return 1 - len(np.unique(flat)) / len(flat) if len(flat) else 0.0

    def _flat(self) -> tuple[Ints, Ints]:
        """The ids of all rows in order, and how many each row has."""
        lengths = self.starts[self.rows + 1] - self.starts[self.rows]
        offsets = self.starts[self.rows] - (np.cumsum(lengths) - lengths)
        at = np.repeat(offsets, lengths) + np.arange(lengths.sum())
        return self.ids[at] + np.repeat(self.copies, lengths) * self.span, lengths


@dataclass(frozen=True)
class TraceRows:
    """The usable rows of a trace, in arrival order; all columns of one length.

    `arrival_ns` counts from the first row, or is None where the trace has no times. `hash_ids` is None where the trace
    does not have the blocks of its prompts, or they were not read; `acceptance` is the probability that a draft token
    for the request is right where those before it are, None likewise. `notes` says, a line each, what was dropped,
    changed or left unused, with counts. `labels` has the other columns, by role (`trace_config.LABELS`): texts as
    indexes into `texts[role]`, durations in ns with -1 where unknown, and -1 for the `task` of a row without one;
    `recorded` is `arrival_ns` as the log has it, of rows that wait for others.
    """

    arrival_ns: Ints | None
    prompt_tokens: Ints
    output_tokens: Ints
    source: str
    format: str
    notes: tuple[str, ...] = ()
    hash_ids: HashIds | None = None
    acceptance: NDArray[np.float64] | None = None
    labels: Mapping[str, Ints] = field(default_factory=dict[str, Ints])
    texts: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def picked(self, index: Ints | slice, arrival_ns: Ints | None, copies: Ints | None = None) -> TraceRows:
        """The rows at `index`, arriving at `arrival_ns`. `copies`: see `HashIds.picked`."""
        return replace(
            self,
            arrival_ns=arrival_ns,
            prompt_tokens=self.prompt_tokens[index],
            output_tokens=self.output_tokens[index],
            hash_ids=None if self.hash_ids is None else self.hash_ids.picked(index, copies),
            acceptance=None if self.acceptance is None else self.acceptance[index],
            labels={role: column[index] for role, column in self.labels.items()},
        )

    @property
    def linked(self) -> bool:
        """Whether the rows say what waits for what."""
        return "session" in self.labels or "parent" in self.labels

    @property
    def class_counts(self) -> dict[str, int]:
        """{class name: number of its rows, if any}; {} where the rows have no classes."""
        if "request_class" not in self.labels:
            return {}
        names = self.texts["request_class"]
        counts = np.bincount(self.labels["request_class"], minlength=len(names)).tolist()
        return {name: count for name, count in zip(names, counts, strict=True) if count}


def has_tasks(task: Ints, *, several: bool) -> bool:
    """Whether any row is of a task; with `several`, of one that has another row too."""
    return bool(np.bincount(task[task >= 0]).max(initial=0) > several)


def cut_tasks(rows: TraceRows, count: int, by: str, start: int = 0) -> list[str]:
    """A note on the tasks of `rows` that lose some of their rows where `count` from `start` on are kept."""
    task = rows.labels.get("task")
    if task is None or count == len(rows):
        return []
    kept = np.isin(np.arange(len(rows)), np.arange(start, start + count))
    cut = len(np.intersect1d(task[kept & (task >= 0)], task[~kept]))
    return cut_note(cut, by)


def cut_note(cut: int, by: str) -> list[str]:
    """A note on `cut` tasks of which a cut by `by` keeps some rows and not others; none of none."""
    return [f"{cut:,} tasks have rows on both sides of the cut by {by}: measured by those that are kept"] if cut else []
