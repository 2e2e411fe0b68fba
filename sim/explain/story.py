"""One request's life on a line of time: chapters one after the other, without gaps, that sum to its E2E.

The parts of the chapters are those of `attribution`, to the nanosecond. What a chapter adds is when it was, what
stood first in the queue meanwhile, and how many steps it took.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from batchsim.drive.fleet.fleet_records import by_engine, lost_stays
from batchsim.kernel.record import (
    DECODE,
    FINISHED,
    MISSING,
    PREFILL,
    RECOMPUTE,
    STATE_NAMES,
    Records,
)
from batchsim.metrics.attribution import NO_REPLICA, UNSTATED, named
from batchsim.metrics.encoding import OTHERS, OWN, own_encoding, step_encode_ns
from batchsim.metrics.lives import (
    Holds,
    Int,
    Intervals,
    held_back,
    queue_holds,
    queue_waits,
    queueing,
    state_intervals,
    step_kinds,
    step_leads,
    step_spans,
)
from batchsim.metrics.masks import MASK_WAIT, step_mask_ns
from batchsim.metrics.rank_waits import WAITING as FOR_RANKS
from batchsim.metrics.tiers import FLUSH, flush_cover


@dataclass(frozen=True)
class Chapter:
    """A span of one request's life. `parts` maps parts of `batchsim.metrics.attribution` to ns and sums to its length.

    `what` is a part without its reason, or `decode`. `head` is the id of the first request in the queue, `blocker` of
    the one that took the place, where there is one. `steps` counts the steps that started in it; 0 where the request
    took no part.
    """

    what: str
    start_ns: int
    end_ns: int
    parts: dict[str, int]
    reason: str = ""
    head: int | None = None
    blocker: int | None = None
    steps: int = 0

    @property
    def ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class Story:
    """The chapters of a request's life in time, from `sent_ns`; none of them empty."""

    request_id: int
    sent_ns: int
    chapters: tuple[Chapter, ...]

    @property
    def ns(self) -> int:
        """The length of the life in ns: from sending to delivery, or to the end of what was not delivered."""
        return sum(chapter.ns for chapter in self.chapters)

    def parts(self) -> dict[str, int]:
        """ns by part over the whole life, in the order in which they first occur."""
        total: dict[str, int] = {}
        for chapter in self.chapters:
            for part, ns in chapter.parts.items():
                total[part] = total.get(part, 0) + ns
        return total


class Stories:
    """The lives of one run's requests, as chapters. Shared data is computed once."""

    def __init__(self, records: Records, per_chunk_ns: int = 0) -> None:
        lost = lost_stays(records)
        self._of: dict[int, list[tuple[int, _OfEngine]]] = {}  # with the time at which the part there begins
        for _, rows, engine in by_engine(records):
            stories, requests = _OfEngine(engine, per_chunk_ns, lost), engine.requests[rows >= 0]
            for request_id, begin_ns in zip(requests["request_id"].tolist(), requests["sent_ns"].tolist(), strict=True):
                self._of.setdefault(request_id, []).append((begin_ns, stories))
                self._of[request_id].sort(key=itemgetter(0))

    def tell(self, request_id: int) -> Story:
        """The story of one request; KeyError if the run has none of that id."""
        if request_id not in self._of:
            raise KeyError(f"request {request_id} is not on record")
        parts = self._of[request_id]
        message = (chapter for _, stories in parts for chapter in stories.tell(request_id))
        return Story(request_id, parts[0][0], tuple(message))

    def steps(self, request_id: int) -> NDArray[np.void]:
        """The steps of the engine that the request ended at."""
        return self._of[request_id][-1][1].records.steps


class _OfEngine:
    """The lives of requests at one engine, where they ended or which handed them over; `lost` has the stays that
    requests lost elsewhere."""

    def __init__(self, records: Records, per_chunk_ns: int, lost: NDArray[np.void]) -> None:
        self.records = records
        self._lost = lost
        self._per_chunk_ns = per_chunk_ns
        self._intervals = state_intervals(records)
        self._queueing = queueing(records, self._intervals)
        self._holds: Holds = queue_holds(records, self._intervals)
        self._held_back = held_back(records, self._queueing)
        self._leads = step_leads(records)
        self._of_ranks = queue_waits(records, self._holds)
        self._kinds = step_kinds(records)
        self._encode_ns, self._own_encoding = step_encode_ns(records), own_encoding(records)
        self._mask_ns = step_mask_ns(records)
        self._spans = step_spans(records)
        self._flushes = flush_cover(records)

    def tell(self, request_id: int) -> list[Chapter]:
        requests = self.records.requests
        i = int(np.searchsorted(requests["request_id"], request_id))
        row = requests[i]
        chapters = [*self._before(i), *self._queued(i), *self._states(i), *self._after(row)]
        return [chapter for chapter in chapters if chapter.ns]

    def _before(self, i: int) -> list[Chapter]:
        """The chapters before the queue: on the way, on replicas that failed, beside the step that ran on arrival."""
        row, (arrival, entered, _, _) = self.records.requests[i], self._queueing
        handed_ns = min(int(arrival[i]), int(row["ended_ns"]))
        sent_ns = min(int(row["sent_ns"]), handed_ns)
        now_ns = max(handed_ns - int(row["router_ns"]) - int(row["failover_ns"]), sent_ns)
        chapters = [_plain("frontend", sent_ns, now_ns)]
        before = (self._lost["request_id"] == row["request_id"]) & (self._lost["start_ns"] >= sent_ns)
        for stay in np.sort(self._lost[before], order="start_ns"):
            start_ns, end_ns = int(stay["start_ns"]), int(stay["end_ns"])
            chapters += [_at_router(now_ns, start_ns), _plain("failover", start_ns, end_ns)]
            now_ns = end_ns
        return [
            *chapters,
            _at_router(now_ns, handed_ns),
            self._waiting("waiting_step", int(arrival[i]), int(entered[i]), 0),
        ]

    def _queued(self, i: int) -> list[Chapter]:
        """The chapters in the queue: one for each reason that held it, and for the time between."""
        queue, holds = self._queueing, self._holds
        now_ns, until_ns = int(queue.entered_ns[i]), int(queue.until_ns[i])
        free = "host_gap" if queue.soon[i] else named("queued", "")
        me, chapters = int(self.records.requests["request_id"][i]), []
        for k in np.flatnonzero((holds.end_ns > now_ns) & (holds.start_ns < until_ns)):
            start_ns, end_ns = max(now_ns, int(holds.start_ns[k])), min(int(holds.end_ns[k]), until_ns)
            reason = self.records.texts[holds.reason[k]]
            head = int(holds.head[k])
            chapters.append(self._waiting(free, now_ns, start_ns, 1))
            chapters.append(
                Chapter(
                    "queued",
                    start_ns,
                    end_ns,
                    {named("queued", reason): end_ns - start_ns},
                    reason or UNSTATED,
                    None if head == me else head,
                    _optional(int(holds.blocker[k])),
                )
            )
            now_ns = end_ns
        return self._without_held_back(i, [*chapters, self._waiting(free, now_ns, until_ns, 1)])

    def _waiting(self, part: str, start_ns: int, end_ns: int, cover: int) -> Chapter:
        """A chapter of `part`, of which the time is another's in which a rank waited for others, by one of its covers:
        in all, or while nothing held its queue."""
        chapter = _plain(part, start_ns, end_ns)
        if self._of_ranks is None or start_ns == end_ns:
            return chapter
        times = np.array([start_ns, end_ns])
        ns = int(np.diff(self._of_ranks[cover].until(times))[0])
        if not ns:
            return chapter
        what = FOR_RANKS if ns == chapter.ns else chapter.what
        parts = {part: chapter.ns - ns, FOR_RANKS: ns}
        return replace(chapter, what=what, parts={name: value for name, value in parts.items() if value})

    def _without_held_back(self, i: int, chapters: list[Chapter]) -> list[Chapter]:
        """The `chapters` in the queue with those in which the request itself was passed over in their place."""
        for k in np.flatnonzero(self._held_back.request == i):
            start_ns, end_ns = int(self._held_back.start_ns[k]), int(self._held_back.end_ns[k])
            cut = [
                replace(each, start_ns=low, end_ns=high, parts=dict.fromkeys(each.parts, high - low))
                for each in chapters
                for low, high in (
                    (each.start_ns, min(each.end_ns, start_ns)),
                    (max(each.start_ns, end_ns), each.end_ns),
                )
                if low < high
            ]
            reason = self.records.texts[self._held_back.reason[k]]
            held = Chapter("queued", start_ns, end_ns, {named("queued", reason): end_ns - start_ns}, reason)
            chapters = sorted([*cut, held], key=lambda each: each.start_ns)
        return chapters

    def _states(self, i: int) -> list[Chapter]:
        intervals: Intervals = self._intervals
        first, last = np.searchsorted(intervals.request, [i, i + 1])
        return [self._state(int(intervals.state[k]), k) for k in range(first, last)]

    def _state(self, state: int, k: int) -> Chapter:
        intervals, texts = self._intervals, self.records.texts
        start_ns, end_ns = int(intervals.start_ns[k]), int(intervals.end_ns[k])
        name = STATE_NAMES[state]
        if state not in (PREFILL, RECOMPUTE, DECODE):
            reason = texts[intervals.reason[k]]
            part = named(name, reason)
            blocker = _optional(int(intervals.blocker[k]))
            return Chapter(name, start_ns, end_ns, {part: end_ns - start_ns}, reason or UNSTATED, None, blocker)
        steps = self.records.steps
        low, high = np.searchsorted(steps["start_ns"], [start_ns, end_ns], "left")
        starts, lengths = self._spans
        ends = starts + lengths
        among = slice(np.searchsorted(ends, start_ns, "right"), high)  # one that ran as the state began, too
        length_ns: Int = np.minimum(ends[among], end_ns) - np.maximum(starts[among], start_ns)
        length_ns = np.maximum(length_ns, 0)
        leads: dict[str, int] = {}
        for lead in self._leads:
            lead_end_ns = np.minimum(lead.start_ns[among] + lead.length_ns[among], end_ns)
            lead_ns = np.maximum(lead_end_ns - np.maximum(lead.start_ns[among], start_ns), 0)
            length_ns, leads[lead.part] = length_ns - lead_ns, int(lead_ns.sum())
        encoding: dict[str, int] = {}
        if len(self._encode_ns):
            length_ns, encoding = self._encoding(k, among, length_ns)
        if len(self._mask_ns):
            # The end of a step, as far as it lies in this state.
            wait_ns = np.clip(
                np.minimum(ends[among], end_ns) - np.maximum(ends[among] - self._mask_ns[among], start_ns), 0, length_ns
            )
            length_ns, encoding = length_ns - wait_ns, encoding | {MASK_WAIT: int(wait_ns.sum())}
        if state == DECODE:
            parts = {part: int(length_ns[kind[among]].sum()) for part, kind in self._kinds.items()}
            taken = self._count(("decode_alone", "decode_beside_prefill"), low, high)
        else:
            parts, taken = {name: int(length_ns.sum())}, int(high - low)
        parts |= leads | encoding
        if self._flushes is not None:
            parts[FLUSH] = int(self._flushes.between(np.array([start_ns]), np.array([end_ns]))[0])
        parts["host_gap"] = end_ns - start_ns - sum(parts.values())
        return Chapter(name, start_ns, end_ns, {part: ns for part, ns in parts.items() if ns}, steps=taken)

    def _encoding(self, k: int, among: slice, length_ns: Int) -> tuple[Int, dict[str, int]]:
        """The ns of the steps `among` in the state `k` without those of encoding, and the parts that are encoding."""
        intervals, own = self._intervals, self._own_encoding
        start_ns, end_ns, starts = int(intervals.start_ns[k]), int(intervals.end_ns[k]), self._spans[0][among]
        encode_ns = np.minimum(starts + self._encode_ns[among], end_ns) - np.maximum(starts, start_ns)
        encode_ns = np.clip(encode_ns, 0, length_ns)
        mine_at = (own.request == intervals.request[k]) & (start_ns <= own.start_ns) & (own.start_ns < end_ns)
        own_ns = int(own.ns[mine_at].sum())
        return length_ns - encode_ns, {OWN: own_ns, OTHERS: int(encode_ns.sum()) - own_ns}

    def _count(self, parts: tuple[str, ...], low: int, high: int) -> int:
        return sum(int(self._kinds[part][low:high].sum()) for part in parts)

    def _after(self, row: NDArray[np.void]) -> list[Chapter]:
        """The chapters from the last token on: the answer held back, and its last piece on the way."""
        if row["outcome"] == FINISHED:
            there_ns = int(row["delivered_ns"]) - self._per_chunk_ns
            held = _plain("response_held", int(row["ended_ns"]), there_ns)
            return [held, _plain("frontend", there_ns, int(row["delivered_ns"]))]
        if row["last_token_ns"] != MISSING:
            return [_plain("response_held", int(row["last_token_ns"]), int(row["ended_ns"]))]
        return []


def _at_router(start_ns: int, end_ns: int) -> Chapter:
    return Chapter("queued", start_ns, end_ns, {named("queued", NO_REPLICA): end_ns - start_ns}, NO_REPLICA)


def _plain(part: str, start_ns: int, end_ns: int) -> Chapter:
    """A chapter of one part, whose reason is in its name."""
    what, _, reason = part.partition(":")
    return Chapter(what, start_ns, end_ns, {part: end_ns - start_ns}, reason)


def _optional(id_: int) -> int | None:
    return None if id_ == MISSING else id_
