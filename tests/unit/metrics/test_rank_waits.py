"""The parts of waits during which nothing else held the queue, against sets of nanoseconds."""

from __future__ import annotations

import random

import numpy as np

from batchsim.metrics.rank_waits import outside


def _spans(rng: random.Random) -> list[tuple[int, int]]:
    """Disjoint spans, of which some touch each other and some are empty."""
    at, spans = rng.randrange(4), list[tuple[int, int]]()
    for _ in range(rng.randrange(5)):
        spans.append((at, at + rng.randrange(5)))
        at = spans[-1][1] + rng.randrange(3)
    return spans


def test_what_no_held_span_covers_is_outside() -> None:
    """Nanosecond by nanosecond, in spans that begin and end in order."""
    cut = 0
    for seed in range(300):
        rng = random.Random(seed)
        spans, held = _spans(rng), _spans(rng)
        ours, theirs = (np.array(rows, np.int64).reshape(-1, 2).T for rows in (spans, held))
        starts, lengths = outside(ours[0], ours[1] - ours[0], theirs[0], theirs[1])
        expected = {at for low, high in spans for at in range(low, high)}
        cut += len(expected)
        expected -= {at for low, high in held for at in range(low, high)}
        cut -= len(expected)
        kept = [at for low, ns in zip(starts.tolist(), lengths.tolist(), strict=True) for at in range(low, low + ns)]
        assert kept == sorted(expected)
    assert cut > 400
