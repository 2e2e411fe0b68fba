"""Requests at an engine as lanes of a picture: the states that each went through, as spans of time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchsim.base.units import NS_PER_S
from batchsim.kernel.record import BLOCKED, FINISHED, MISSING, STATE_NAMES, WAITING, Records
from batchsim.metrics.lives import Int, queueing, state_intervals

QUEUED, HELD = 0, BLOCKED + 1
KINDS = ("queued", *(STATE_NAMES[code] for code in range(1, HELD)), "response_held")
"""What a span is of, by its number: states of the records between waiting before them and an answer held back."""
MOST_LANES = 150
MOST_SPANS = 12_000
"""Of one answer: some 80 a lane, where a lane has about 1,000 pixels."""


class Lanes:
    """The spans of the requests of one engine, of each time it was started: `parts` are its records then.

    `per_chunk_ns` is an answer's last way to its client, which is no time of the engine's.
    """

    def __init__(self, parts: Sequence[Records], per_chunk_ns: int = 0) -> None:
        each = [_spans(part, per_chunk_ns) for part in parts]
        self._request, self._kind, self._blocker, self._start_ns, self._end_ns = (
            np.concatenate([columns[k] for columns in each]) for k in range(5)
        )
        self._ids, self._of = np.unique(self._request, return_inverse=True)
        self._came_ns = np.full(len(self._ids), np.iinfo(np.int64).max)
        np.minimum.at(self._came_ns, self._of, self._start_ns)

    def window(self, start_ns: int, end_ns: int, picked: int = MISSING) -> dict[str, Any]:
        """The lanes of the requests that were there between two times, by when each came, as columns of spans.

        `id`: the request of each lane. `lane`, `kind` (into KINDS), `start_s`, `end_s`, `blocker` (-1: none): of each
        span. `of`: requests that were there. Where these are more than MOST_LANES those come first whose state changes
        within the window, then others, each evenly spread over when they came, and the request `picked`; of more than
        MOST_SPANS spans the longest, `shortest_s` being the least of them, else 0.
        """
        seen = np.flatnonzero((self._start_ns < end_ns) & (self._end_ns > start_ns))
        there, lane = np.unique(self._of[seen], return_inverse=True)
        ids, came_ns = self._ids[there], self._came_ns[there]
        within_ns = np.minimum(self._end_ns[seen], end_ns) - np.maximum(self._start_ns[seen], start_ns)
        of, shortest_ns = len(ids), 0
        if of > MOST_LANES:
            inside = (self._start_ns[seen] > start_ns) | (self._end_ns[seen] < end_ns)
            changes = np.zeros(of, bool)
            changes[lane[inside]] = True
            order = np.argsort(came_ns, kind="stable")
            kept = np.zeros(of, bool)
            kept[_spread(order[changes[order]], MOST_LANES)] = True
            kept[_spread(order[~changes[order]], MOST_LANES - int(kept.sum()))] = True
            kept |= ids == picked
            in_lane = kept[lane]
            seen, lane, within_ns = seen[in_lane], lane[in_lane], within_ns[in_lane]
            lane = (np.cumsum(kept) - 1)[lane]
            ids, came_ns = ids[kept], came_ns[kept]
        if len(seen) > MOST_SPANS:
            longest = np.sort(np.argsort(-within_ns, kind="stable")[:MOST_SPANS])
            shortest_ns = int(within_ns[longest].min())
            seen, lane = seen[longest], lane[longest]
        order = np.argsort(came_ns, kind="stable")  # of equals the lower id first
        place = np.empty(len(ids), np.int64)
        place[order] = np.arange(len(ids))
        return {
            "of": of,
            "id": ids[order].tolist(),
            "lane": place[lane].tolist(),
            "kind": self._kind[seen].tolist(),
            "blocker": self._blocker[seen].tolist(),
            "start_s": (self._start_ns[seen] / NS_PER_S).tolist(),
            "end_s": (self._end_ns[seen] / NS_PER_S).tolist(),
            "shortest_s": shortest_ns / NS_PER_S,
        }


def _spread(rows: Int, most: int) -> Int:
    """At most `most` of `rows`, evenly spread over them, the first and the last among them."""
    return rows if len(rows) <= most else rows[np.linspace(0, len(rows) - 1, most).astype(np.int64)]


def _kinds(states: NDArray[np.int32]) -> NDArray[np.int32]:
    """The kind of each of `states`."""
    return np.where(states == WAITING, QUEUED, states)


def _spans(records: Records, per_chunk_ns: int) -> tuple[Int, Int, Int, Int, Int]:
    """(request, kind, blocker, start, end) of every span of an engine's requests that has a length."""
    requests, states = records.requests, state_intervals(records)
    queue = queueing(records, states)
    ids, none = requests["request_id"], np.full(len(requests), MISSING)
    there_ns = np.where(requests["outcome"] == FINISHED, requests["delivered_ns"] - per_chunk_ns, requests["ended_ns"])
    last_ns = requests["last_token_ns"]
    held_ns = np.where(last_ns == MISSING, there_ns, last_ns)
    columns = (
        np.concatenate((ids, ids[states.request], ids)),
        np.concatenate((np.full(len(ids), QUEUED), _kinds(states.state), np.full(len(ids), HELD))),
        np.concatenate((none, states.blocker, none)),
        np.concatenate((queue.arrival_ns, states.start_ns, held_ns)),
        np.concatenate((queue.until_ns, states.end_ns, there_ns)),
    )
    long = columns[4] > columns[3]
    request, kind, blocker, start_ns, end_ns = (column[long].astype(np.int64) for column in columns)
    return request, kind, blocker, start_ns, end_ns
