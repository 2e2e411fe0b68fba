"""Two points compared request by request: a request that one of them never answered is the slower there."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import ScenarioError
from batchsim.base.units import NS_PER_S
from batchsim.kernel.record import FINISHED
from batchsim.metrics.latencies import LATENCIES
from batchsim.view.downsampling import downsampled_rows


def compared(ours: NDArray[np.void], theirs: NDArray[np.void], by: str, most: int, listed: int) -> dict[str, Any]:
    """One latency, in seconds, of every request that two points were sent: `here_s`, `there_s` where both have it.

    An id is the same request where its prompt is as long at both: `unlike` counts other ids, `only` [here, there] ids
    that the other point was not sent. `of` are the requests that are the same. A request that finished at one point
    alone is counted as slower at the other, and in `unanswered` [here, there] of the point that did not finish it;
    `neither`: finished at none; `undefined`: finished, but without this latency where they did. `slower` and `faster`
    are there; `median_change_s` is of the `both` that have the latency twice, None without any. Lists have at most
    `most` requests; `largest` are the `listed` largest changes. ScenarioError where no request is the same.
    """
    ids, i, j = np.intersect1d(ours["request_id"], theirs["request_id"], return_indices=True)
    same = ours["prompt_tokens"][i] == theirs["prompt_tokens"][j]
    if not same.any():
        raise ScenarioError("compare: no request was sent with the same prompt at both points. Choose another.")
    only = [len(ours) - len(ids), len(theirs) - len(ids)]
    ids, sides = ids[same], (ours[i[same]], theirs[j[same]])
    done = [side["outcome"] == FINISHED for side in sides]
    latency = LATENCIES[by].of
    assert latency is not None, "the page asks for latencies that a request has one of"
    here, there = (np.where(done[k], latency(side) / NS_PER_S, np.nan) for k, side in enumerate(sides))
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
