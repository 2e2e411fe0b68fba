"""Two points compared request by request: a request that one of them never answered is the slower there."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import ScenarioError
from batchsim.kernel.record import FINISHED
from batchsim.view.downsampling import downsampled_rows

Side = tuple[NDArray[np.void], NDArray[np.float64]]
"""A point's requests, and the latency of each in seconds, NaN where a request has none."""


def compared(ours: Side, theirs: Side, most: int, listed: int) -> dict[str, Any]:
    """One latency, in seconds, of every request that two points were sent: `here_s`, `there_s` where both have it.

    An id is the same request where its prompt is as long at both: `unlike` counts other ids, `only` [here, there] ids
    that the other point was not sent. `of` are the requests that are the same. A request that has the latency at one
    point and did not finish at the other is slower there, and counted in that point's `unanswered` [here, there];
    `neither`: finished at none; `undefined`: finished, but without this latency where they did. `slower` and `faster`
    are there; `median_change_s` is of the `both` that have the latency twice, None without any. Lists have at most
    `most` requests; `largest` are the `listed` largest changes. ScenarioError where no request is the same.
    """
    rows, latencies_s = (ours[0], theirs[0]), (ours[1], theirs[1])
    ids, *places = np.intersect1d(rows[0]["request_id"], rows[1]["request_id"], return_indices=True)
    tokens = [side["prompt_tokens"][place] for side, place in zip(rows, places, strict=True)]
    same = tokens[0] == tokens[1]
    if not same.any():
        raise ScenarioError("compare: no request was sent with the same prompt at both points. Choose another.")
    only = [len(side) - len(ids) for side in rows]
    ids, places = ids[same], [place[same] for place in places]
    done = [side["outcome"][place] == FINISHED for side, place in zip(rows, places, strict=True)]
    here, there = (values[place] for values, place in zip(latencies_s, places, strict=True))
    known = [~np.isnan(here), ~np.isnan(there)]
    alone = known[1] & ~done[0], known[0] & ~done[1]
    unanswered = [int(each.sum()) for each in alone]
    both = known[0] & known[1]
    ids, here, there = ids[both], here[both], there[both]
    order = np.argsort(here, kind="stable")
    ids, here, there = ids[order], here[order], there[order]
    kept = downsampled_rows([here, there, there - here], most)
    largest = np.argsort(-np.abs(there - here), kind="stable")[:listed]
    return {
        "of": int(same.sum()),
        "both": len(ids),
        "only": only,
        "unlike": int((~same).sum()),
        "unanswered": unanswered,
        "neither": int((~done[0] & ~done[1]).sum()),
        "undefined": int(((done[0] | done[1]) & ~(both | alone[0] | alone[1])).sum()),
        "slower": int((there > here).sum()) + unanswered[1],
        "faster": int((there < here).sum()) + unanswered[0],
        "median_change_s": float(np.median(there - here)) if len(ids) else None,
        "id": ids[kept].tolist(),
        "here_s": here[kept].tolist(),
        "there_s": there[kept].tolist(),
        "largest": [[int(ids[k]), float(here[k]), float(there[k])] for k in largest.tolist()],
    }
