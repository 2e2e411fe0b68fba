"""Sessions of a trace as a law: how many turns, what each adds, and how long clients think between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchsim.workload.laws import EmpiricalTokens
from batchsim.workload.replayed_sessions import links_of
from batchsim.workload.sharing import Sessions
from batchsim.workload.traces.labels import NOT_TOLD
from batchsim.workload.traces.trace_rows import Ints, TraceRows

MOST_WITHOUT = 0.5
"""Share of later turns whose prompt is too short to hold what came before, from which on prompts do not grow."""


@dataclass(frozen=True)
class SessionFit:
    """The law of sessions, the rows that begin one, and the tokens that each row's prompt adds to those before it."""

    sessions: Sessions
    first: Ints
    own_tokens: Ints
    notes: tuple[str, ...]


def fit_sessions(rows: TraceRows) -> tuple[SessionFit | None, list[str]]:
    """The law of the sessions of rows that have them; None, with a note why, where turns are no conversations that
    grow."""
    links = links_of(rows)
    later = np.array([len(parents) == 1 for parents in links.parents])
    joins = sum(len(parents) > 1 for parents in links.parents)
    children = np.bincount([parents[0] for parents in links.parents if parents], minlength=len(rows))
    if joins or (children > 1).any():
        forks = int(np.count_nonzero(children > 1))
        return None, [
            f"{forks:,} answers have several next turns and {joins:,} turns several parents: no line of turns,"
            " so requests are taken as independent"
        ]
    if not later.any():
        return None, ["no row waits for another: requests are taken as independent"]
    parent = np.array([parents[0] if parents else -1 for parents in links.parents])
    held = rows.prompt_tokens[parent] + rows.output_tokens[parent]
    own = np.where(later, rows.prompt_tokens - held, rows.prompt_tokens)
    short = later & (own < 1)
    if short.sum() > MOST_WITHOUT * later.sum():
        return None, [
            f"{short.sum():,} of {later.sum():,} later turns are too short to hold what came before: requests"
            " are taken as independent"
        ]
    notes = list(links.notes)
    if short.any():
        notes.append(
            f"{short.sum():,} of {later.sum():,} later turns are too short to hold what came before: each is"
            " taken to add 1 token"
        )
    waits_ns, think_notes = _think_ns(rows, links.wait_ns, parent, later)
    turns = np.bincount(np.unique(links.root, return_inverse=True)[1])
    values, counts = np.unique(turns, return_counts=True)
    law = EmpiricalTokens(tuple(values.tolist()), tuple(counts.tolist()))
    spread = waits_ns.std() > 0.5 * waits_ns.mean()
    sessions = Sessions(law, round(float(waits_ns.mean())), "exponential" if spread else "constant")
    return SessionFit(sessions, np.flatnonzero(~later), np.maximum(own, 1), (*notes, *think_notes)), []


def _think_ns(rows: TraceRows, wait_ns: Ints, parent: Ints, later: np.ndarray) -> tuple[Ints, list[str]]:
    """Think time in ns before each later turn, and notes; it includes the engine's time where no row has the time of
    its answer."""
    known = later & (wait_ns != NOT_TOLD)
    if known.any():
        return wait_ns[known], []
    sent_ns = rows.labels["recorded"]
    return (sent_ns - sent_ns[parent])[later], [
        "no row tells when its answer came (columns.e2e): think times hold what the recorded engine took"
    ]
