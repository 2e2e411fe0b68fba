"""How long each step of a rank in lockstep waited for other ranks, or computed padding to the fullest of them; and how
long a step waited for those of other engines on the same GPU."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchsim.kernel.record import GPU_WAITED, RANKS_PADDED, RANKS_WAITED, Records

Int = NDArray[np.int64]
WAITING, PADDING = "waiting_for_ranks", "padding_of_ranks"
"""The parts of a request's life in which its rank waited for others, and computed padding."""

FOR_GPU = "waiting_for_gpu"
"""The part of a request's life in steps that waited for those of other models on their GPU."""

RANK_METRICS: tuple[tuple[str, Literal["share"], Literal["lower"], str], ...] = (
    (
        "idle_rank_share",
        "share",
        "lower",
        "share of dummies among the steps of ranks that step together: of ranks without a batch of their own",
    ),
)
"""Rows of the table of metrics: name, unit, which is better, what it is."""


class RankWaits(NamedTuple):
    """A row for each step of one rank: its start, from which on it waits, for how long, and then its padding; in ns."""

    start_ns: Int
    wait_ns: Int
    padding_ns: Int


def rank_waits(records: Records) -> RankWaits | None:
    """The waits of the steps of one engine; None where it is no rank of several in lockstep."""
    states = records.states
    known = np.isin(states["state"], (RANKS_WAITED, RANKS_PADDED))
    if not known.any():
        return None
    start_ns = np.ascontiguousarray(records.step_columns["start_ns"])
    return RankWaits(start_ns, *(_by_step(records, start_ns, state) for state in (RANKS_WAITED, RANKS_PADDED)))


def gpu_waits(records: Records) -> tuple[Int, Int] | None:
    """The start of each step of one engine, from which on it waits for the GPU, and for how long, in ns; None where
    none waited."""
    if not (records.states["state"] == GPU_WAITED).any():
        return None
    start_ns = np.ascontiguousarray(records.step_columns["start_ns"])
    return start_ns, _by_step(records, start_ns, GPU_WAITED)


def _by_step(records: Records, start_ns: Int, state: int) -> Int:
    """The ns in rows of `state`, by the step that starts at their time; `start_ns` has those of all steps."""
    rows = records.states[records.states["state"] == state]
    ns = np.zeros(len(start_ns), np.int64)
    ns[np.searchsorted(start_ns, rows["time_ns"])] = rows["blocker"]
    return ns


def outside(start_ns: Int, length_ns: Int, held_start_ns: Int, held_end_ns: Int) -> tuple[Int, Int]:
    """The parts of disjoint spans, by start, that no held one covers: (starts, lengths) by start."""
    end_ns = start_ns + length_ns
    cuts = np.unique(np.concatenate((start_ns, end_ns, held_start_ns, held_end_ns)))
    low, high = cuts[:-1], cuts[1:]
    kept = _covered(low, start_ns, end_ns) & ~_covered(low, held_start_ns, held_end_ns)
    return low[kept], (high - low)[kept]


def _covered(at_ns: Int, start_ns: Int, end_ns: Int) -> NDArray[np.bool_]:
    """Whether each time lies in one of the spans, which are disjoint."""
    begun, ended = np.sort(start_ns), np.sort(end_ns)
    return np.searchsorted(begun, at_ns, "right") > np.searchsorted(ended, at_ns, "right")
