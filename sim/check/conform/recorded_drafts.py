"""The draft tokens of a recording: what each step verified, and how many the drafter proposed after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from batchsim.kernel.batch import Batch
from batchsim.kernel.draft_group import DraftGroup, Ints
from batchsim.kernel.types import Sequence


class RecordedDrafts:
    """What drafts were worth in each of `steps`, rows of a recording; `at` says which of them is being run.

    `most` drafts a sequence follow where the drafter always has as many as it is asked for; None: as recorded.
    """

    def __init__(self, steps: list[dict[str, Any]], most: int | None, at: Callable[[], int]) -> None:
        self._accepted = [{i: accepted for i, _, accepted, _ in step["spec"]} for step in steps]
        self._drafts = [dict(step.get("drafts", ())) for step in steps]
        self._most = most
        self._at = at

    def key(self, seq: Sequence) -> int:
        return 0  # a recording distinguishes sequences by their ids

    def accepted(self, group: DraftGroup, drafts: Ints) -> Ints:
        rows = self._accepted[self._at()] if self._at() < len(self._accepted) else {}
        recorded = np.array([rows.get(seq.request.id, 0) for seq in group.sequences], drafts.dtype)
        return np.minimum(recorded, drafts)

    def foreseen(self, group: DraftGroup) -> None:
        return None

    def proposed(
        self, group: DraftGroup, gained: Ints, seqs: list[Sequence]
    ) -> tuple[Ints, dict[Sequence, int]] | None:
        if self._most is not None:
            return None
        rows = self._drafts[self._at()] if self._at() < len(self._drafts) else {}
        members = np.array([rows.get(seq.request.id, 0) for seq in group.sequences], gained.dtype)
        return members, {seq: rows.get(seq.request.id, 0) for seq in seqs}

    def given_back(self, ids: list[int]) -> list[list[int]]:
        """How many drafts each of the requests `ids` of the step is given back after it."""
        rows = self._drafts[self._at()] if self._at() < len(self._drafts) else {}
        return [[i, rows.get(i, 0) if self._most is None else self._most] for i in ids]


def verified(batch: Batch) -> dict[Sequence, tuple[int, int, int]]:
    """By sequence of the launched `batch`, if it verified any: drafts scheduled, drafts accepted, output tokens got."""
    drafting = batch.drafting
    if drafting is None:
        return {}
    counts = {seq: (padding, 0, 1) for seq, padding in drafting.padding.items()}
    if drafting.verified is not None:
        accepted, gained = drafting.verified.accepted.tolist(), drafting.verified.gained.tolist()
        for seq, rows, right, got in zip(drafting.sequences, drafting.rows.tolist(), accepted, gained, strict=True):
            if rows > 1:
                counts[seq] = rows - 1, right, got
    return counts
