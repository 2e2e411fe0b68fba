"""What records of engines with KV in the memory of their host say of requests: tokens moved, and parts of lives."""

from __future__ import annotations

import numpy as np

from batchsim.explain.story import Stories
from batchsim.kernel.record import FINISHED, Records
from batchsim.metrics.attribution import attribute


def moved(records: Records, what: int) -> dict[int, int]:
    """By request the tokens that were loaded or stored of it."""
    moved: dict[int, int] = {}
    for row in records.states[records.states["state"] == what]:
        moved[int(row["request_id"])] = moved.get(int(row["request_id"]), 0) + int(row["blocker"])
    return moved


def parts_of(records: Records, number: int) -> dict[str, int]:
    """The ns of each part of a request's life."""
    parts = attribute(records)
    mine = parts[parts["request_id"] == number]
    ns: dict[str, int] = {}
    for part, each in zip(mine["part"].tolist(), mine["ns"].tolist(), strict=True):
        ns[part] = ns.get(part, 0) + each
    return ns


def check_sums(records: Records) -> None:
    """The parts of every request's life sum to its length, and its chapters are without gaps and of the same parts."""
    requests = records.requests
    whole_ns = np.where(requests["outcome"] == FINISHED, requests["delivered_ns"], requests["ended_ns"])
    stories = Stories(records)
    for row, end_ns in zip(requests, whole_ns, strict=True):
        number, life_ns = int(row["request_id"]), int(end_ns - row["sent_ns"])
        mine = parts_of(records, number)
        assert min(mine.values(), default=1) > 0
        assert sum(mine.values()) == life_ns, number
        story = stories.tell(number)
        assert story.parts() == mine
        ends = [chapter.end_ns for chapter in story.chapters]
        assert [chapter.start_ns for chapter in story.chapters] == [row["sent_ns"], *ends[:-1]][: len(ends)]
