"""Why requests missed their objective: one cause for each miss.

The rule. Of the bounds that a request missed, the one it exceeds by the largest factor is judged. What counts for it is
the time before the first delivery (ttft), of that what it waited (queue_time), the time after it (tpot), or all of it
(e2e, norm_latency). The cause is the largest part of that time, parts as in `attribution`; but the request's own
work, `prefill` and `decode_alone`, is blamed only where it is too long by itself, since else the request would have
kept its bound had it only worked. Beyond that:

    whole_response     ttft: the time from the first token on, of an answer delivered whole. tpot: such an answer has
                       no pace; named where no other bound was missed
    rejected:REASON    turned away; and `unfinished:replica_failed`, lost with its replica
    other unfinished   cancelled, timed out, cut: the largest part of the life it had; `never_let_in` without one

With objectives on percentiles and means no single request misses; those beyond a bound's limit are taken, whatever
the percentile. A bound on itl is of gaps, not of requests, and has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchsim.base.errors import ScenarioError
from batchsim.base.units import parse_duration_ns
from batchsim.kernel.record import FINISHED, OUTCOME_NAMES, PRUNED, REJECTED, REPLICA_FAILED, Records
from batchsim.metrics.attribution import PARTS, part_times
from batchsim.metrics.latencies import LATENCIES, STREAMED, values_ns
from batchsim.metrics.lives import Int
from batchsim.metrics.point_inputs import of_class
from batchsim.metrics.slo import Bound, Slo, parse_slo

OWN_WORK = ("prefill", "decode_alone")
WHOLE_RESPONSE = "whole_response"
NEVER_LET_IN = "never_let_in"
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Objectives:
    """The objectives of a scenario's requests. Only requests sent at or after `warmup_ns` are judged.

    Requests of a class in `class_slos` are judged by its own objective, all others by `slo`.
    """

    slo: Slo
    class_slos: Mapping[str, Slo] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()
    warmup_ns: int = 0
    per_chunk_ns: int = 0

    @classmethod
    def of(cls, scenario: Mapping[str, Any]) -> Objectives:
        """The objectives that a scenario's plain values state. ScenarioError if none of them bounds single requests."""
        workload = scenario["workload"]
        classes = workload.get("classes") or {}
        own = {name: parse_slo(entry["slo"]) for name, entry in classes.items() if (entry or {}).get("slo")}
        found = cls(
            parse_slo(scenario["slo"]),
            own,
            tuple(classes),
            parse_duration_ns(workload.get("warmup", "0s")),
            parse_duration_ns((workload.get("frontend") or {}).get("per_chunk", "0s")),
        )
        if of_tasks := [slo for slo in (found.slo, *own.values()) if slo.of_tasks]:
            raise ScenarioError(
                f"slo '{of_tasks[0]}': bounds tasks, and what is explained are misses of requests. Bound ttft, say."
            )
        if not any(_of_requests(slo) for slo in (found.slo, *own.values())):
            raise ScenarioError(f"slo '{found.slo}': bounds gaps between tokens, and no request misses it. Bound tpot.")
        return found

    def groups(self, records: Records) -> list[tuple[tuple[Bound, ...], Flags]]:
        """Each objective's bounds on requests, and a mask of the requests that it judges."""
        others, found = np.ones(len(records.requests), dtype=bool), []
        for name, slo in self.class_slos.items():
            mine = of_class(records, name)
            others &= ~mine
            found.append((_of_requests(slo), mine))
        return [*found, (_of_requests(self.slo), others)]

    def cohort(self, records: Records) -> Flags:
        """A mask of the requests that are judged: those sent after the warm-up and not pruned."""
        return (records.requests["sent_ns"] >= self.warmup_ns) & (records.requests["outcome"] != PRUNED)


def kept_slo(records: Records, objectives: Objectives) -> Flags:
    """A mask of the requests that finished within the bounds of their objective: those that are no `slo_misses`."""
    values, found = _values_ns(records.requests), np.zeros(len(records.requests), dtype=bool)
    for bounds, mine in objectives.groups(records):
        found |= mine & np.logical_and.reduce([bound.passes(values[bound.metric]) for bound in bounds])
    return found & (records.requests["outcome"] == FINISHED)


def slo_misses(records: Records, objectives: Objectives) -> pd.DataFrame:
    """A row a miss, by request id: request_id, request_class, metric, cause, cause_ns, value_ns, limit_ns.

    `metric` is the bound's, or the outcome of a request that did not finish, which has no value and no limit.
    `cause_ns` is the time of the cause that counts; 0 for a cause that is no time.
    """
    requests = records.requests
    names, before, after = _parts(records, objectives.per_chunk_ns)
    names.append(WHOLE_RESPONSE)
    rows: list[tuple[Any, ...]] = []
    values, whole = _values_ns(requests), _is_whole(requests)
    cohort, finished = objectives.cohort(records), requests["outcome"] == FINISHED
    for bounds, mine in objectives.groups(records):
        judged = cohort & mine & finished
        excess = np.zeros((len(bounds), len(requests)))
        for k, bound in enumerate(bounds):
            value = values[bound.metric]
            # Without a pace there is no factor either: any other miss says more.
            factor = np.where(np.isinf(value), np.finfo(np.float64).tiny, value / bound.limit_ns)
            excess[k] = np.where(judged & ~bound.passes(value), factor, 0.0)
        for i in np.flatnonzero(excess.max(axis=0, initial=0.0) > 0):
            bound = bounds[int(excess[:, i].argmax())]
            value = float(values[bound.metric][i])
            if np.isinf(value):
                rows.append((i, bound.metric, WHOLE_RESPONSE, 0, None, bound.limit_ns))
                continue
            time_ns = _time_that_counts(bound.metric, names, before[i], after[i], bool(whole[i]))
            cause, ns = _cause(names, time_ns, bound, int(requests["output_tokens"][i]))
            rows.append((i, bound.metric, cause, ns, round(value), bound.limit_ns))
    for i in np.flatnonzero(cohort & ~finished):
        outcome, reason = OUTCOME_NAMES[int(requests["outcome"][i])], records.texts[requests["reason"][i]]
        life_ns = before[i] + after[i]
        if requests["outcome"][i] == REJECTED or reason == REPLICA_FAILED or not life_ns.any():
            rows.append((i, outcome, f"{outcome}:{reason}", 0, None, None))
        else:
            rows.append((i, outcome, names[int(life_ns.argmax())], int(life_ns.max()), None, None))
    rows.sort(key=lambda row: row[0])
    at = np.array([row[0] for row in rows], dtype=np.int64)
    frame = pd.DataFrame(
        {
            "request_id": requests["request_id"][at],
            "request_class": [records.texts[code] for code in requests["request_class"][at]],
            **{name: [row[k] for row in rows] for k, name in ((1, "metric"), (2, "cause"), (3, "cause_ns"))},
        }
    )
    for k, name in ((4, "value_ns"), (5, "limit_ns")):
        frame[name] = pd.array([row[k] for row in rows], dtype="Int64")
    return frame


def _of_requests(slo: Slo) -> tuple[Bound, ...]:
    return tuple(bound for bound in slo.bounds if bound.metric != "itl")


def _is_whole(requests: NDArray[np.void]) -> Flags:
    """Which requests had an answer of several tokens delivered in one piece; of a single token it cannot be known."""
    return (requests["output_tokens"] >= 2) & (requests["first_delivery_ns"] == requests["delivered_ns"])


def _values_ns(requests: NDArray[np.void]) -> dict[str, NDArray[np.float64]]:
    """By latency, the ns of every request; NaN where no bound applies, inf where none can be kept.

    Only values of finished requests mean anything.
    """
    values = values_ns(requests)
    for name in STREAMED:
        values[name][_is_whole(requests)] = np.inf
    return values


def _parts(records: Records, per_chunk_ns: int) -> tuple[list[str], Int, Int]:
    """The parts' names in the order of PARTS; ns before, and ns after, the first token, both (requests, parts)."""
    found = sorted(
        part_times(records, per_chunk_ns), key=lambda times: (PARTS.index(times.part.split(":")[0]), times.part)
    )
    names = list(dict.fromkeys(times.part for times in found))
    sides = np.zeros((2, len(records.requests), len(names)), dtype=np.int64)
    for times in found:
        part = np.full(len(times.ns), names.index(times.part))
        np.add.at(sides, (times.after_first.astype(np.int64), times.request, part), times.ns)
    return names, sides[0], sides[1]


def _time_that_counts(metric: str, names: list[str], before: Int, after: Int, whole: bool) -> Int:
    """The ns of one request that count for `metric`, by part, and last those of `whole_response`."""
    part = LATENCIES[metric].part
    if part == "queue":
        waiting = [name.partition(":")[0] in ("queued", "waiting_step", "host_gap") for name in names]
        return np.where(waiting, np.append(before, 0), 0)
    if part == "to first token":
        return np.append(before, after.sum() if whole else 0)
    return np.append(after if part == "after first token" else before + after, 0)


def _cause(names: list[str], time_ns: Int, bound: Bound, output_tokens: int) -> tuple[str, int]:
    """The part to blame and its ns, by the rule of the module."""
    times = {"tpot": max(output_tokens - 1, 1), "norm_latency": max(output_tokens, 1)}.get(bound.metric, 1)
    own = np.array([name in OWN_WORK for name in names])
    work_keeps_it = bound.passes(np.array([time_ns[own].sum() / times], dtype=np.float64))[0]
    i = int(np.where(own & work_keeps_it, -1, time_ns).argmax())
    return names[i], int(time_ns[i])
