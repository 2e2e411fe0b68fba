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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchsim.base.errors import ScenarioError
from batchsim.base.units import parse_duration_ns
from batchsim.kernel.record import FINISHED, OUTCOME_NAMES, PRUNED, REJECTED, REPLICA_FAILED, Records
from batchsim.metrics.attribution import PARTS, part_times
from batchsim.metrics.latencies import LATENCIES, MAKESPAN, TASK_E2E, judged_ns, values_ns
from batchsim.metrics.lives import Int
from batchsim.metrics.point_inputs import of_class
from batchsim.metrics.rank_waits import WAITING as FOR_RANKS
from batchsim.metrics.slo import Bound, Slo, keeps_all, parse_slo

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
        objectives = cls.stated(scenario)
        if not objectives.judges_requests:
            of_tasks = [slo for slo in (objectives.slo, *objectives.class_slos.values()) if slo.of_tasks]
            if of_tasks:
                raise ScenarioError(
                    f"slo '{of_tasks[0]}': bounds tasks, and what is looked at here are requests. Run the scenario"
                    " again with a bound on these, like --set 'slo=ttft<1s @ 95%'."
                )
            raise ScenarioError(
                f"slo '{objectives.slo}': bounds gaps between tokens, and no request misses it. Bound tpot."
            )
        return objectives

    @classmethod
    def stated(cls, scenario: Mapping[str, Any]) -> Objectives:
        """The objectives that a scenario's plain values state, whatever they bound."""
        workload = scenario["workload"]
        classes = workload.get("classes") or {}
        own = {name: parse_slo(entry["slo"]) for name, entry in classes.items() if (entry or {}).get("slo")}
        return cls(
            parse_slo(scenario["slo"]),
            own,
            tuple(classes),
            parse_duration_ns(workload.get("warmup", "0s")),
            parse_duration_ns((workload.get("frontend") or {}).get("per_chunk", "0s")),
        )

    @property
    def judges_requests(self) -> bool:
        """Whether any of them bounds single requests."""
        return any(_of_requests(slo) for slo in (self.slo, *self.class_slos.values()))

    def groups(self, records: Records) -> list[tuple[tuple[Bound, ...], Flags]]:
        """Each objective's bounds on requests, and a mask of the requests that it judges."""
        others, groups = np.ones(len(records.requests), dtype=bool), []
        for name, slo in self.class_slos.items():
            members = of_class(records, name)
            others &= ~members
            groups.append((_of_requests(slo), members))
        return [*groups, (_of_requests(self.slo), others)]

    def cohort(self, records: Records) -> Flags:
        """A mask of the requests that are judged: those sent after the warm-up and not pruned."""
        return (records.requests["sent_ns"] >= self.warmup_ns) & (records.requests["outcome"] != PRUNED)


def kept_slo(records: Records, objectives: Objectives) -> Flags:
    """A mask of the requests that finished within the bounds of their objective: the complement of `slo_misses`."""
    values, kept = _values_ns(records.requests), np.zeros(len(records.requests), dtype=bool)
    for bounds, members in objectives.groups(records):
        kept |= members & keeps_all(bounds, values)
    return kept & (records.requests["outcome"] == FINISHED)


def slo_misses(records: Records, objectives: Objectives) -> pd.DataFrame:
    """A row a miss, by request id: request_id, request_class, metric, cause, cause_ns, value_ns, limit_ns.

    `metric` is the bound's, or the outcome of a request that did not finish, which has no value and no limit.
    `cause_ns` is the time of the cause that counts; 0 for a cause that is no time.
    """
    requests = records.requests
    names, before, after = part_sides(records, objectives.per_chunk_ns)
    names.append(WHOLE_RESPONSE)
    rows: list[tuple[Any, ...]] = []
    values, whole = _values_ns(requests), _is_whole(requests)
    cohort, finished = objectives.cohort(records), requests["outcome"] == FINISHED
    for bounds, members in objectives.groups(records):
        judged = cohort & members & finished
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
    rows += [
        (i, *unfinished_cause(records, int(i), names, before[i] + after[i]), None, None)
        for i in np.flatnonzero(cohort & ~finished)
    ]
    rows.sort(key=lambda row: row[0])
    ids, texts, classes = requests["request_id"], records.texts, requests["request_class"]
    return misses_frame([(int(ids[row[0]]), texts[classes[row[0]]], *row[1:]) for row in rows])


def unfinished_cause(records: Records, row: int, names: Sequence[str], life_ns: Int) -> tuple[str, str, int]:
    """Outcome, cause and its ns of the request of a `row`, which did not finish; `life_ns` is its life by `names`."""
    request = records.requests[row]
    outcome, reason = OUTCOME_NAMES[int(request["outcome"])], records.texts[request["reason"]]
    if request["outcome"] == REJECTED or reason == REPLICA_FAILED or not life_ns.any():
        return outcome, f"{outcome}:{reason}", 0
    return outcome, names[int(life_ns.argmax())], int(life_ns.max())


def misses_frame(rows: Sequence[tuple[Any, ...]]) -> pd.DataFrame:
    """The rows of misses, as `slo_misses` returns them."""
    kinds = {"request_id": "int64", "request_class": "object", "metric": "object", "cause": "object"}
    kinds |= {"cause_ns": "int64", "value_ns": "Int64", "limit_ns": "Int64"}
    return pd.DataFrame(
        {name: pd.array([row[k] for row in rows], dtype=kind) for k, (name, kind) in enumerate(kinds.items())}
    )


def _of_requests(slo: Slo) -> tuple[Bound, ...]:
    return tuple(bound for bound in slo.bounds if bound.metric not in ("itl", TASK_E2E, MAKESPAN))


def _is_whole(requests: NDArray[np.void]) -> Flags:
    """Which requests had an answer of several tokens delivered in one piece; of a single token it cannot be known."""
    return (requests["output_tokens"] >= 2) & (requests["first_delivery_ns"] == requests["delivered_ns"])


def _values_ns(requests: NDArray[np.void]) -> dict[str, NDArray[np.float64]]:
    """By latency, the ns by which every request is judged; inf of one that did not finish, or was sent whole."""
    return judged_ns(values_ns(requests), requests["outcome"] == FINISHED, _is_whole(requests))


def part_sides(records: Records, per_chunk_ns: int) -> tuple[list[str], Int, Int]:
    """The parts' names in the order of PARTS; ns before, and ns after, the first token, both (requests, parts)."""
    by_part = sorted(
        part_times(records, per_chunk_ns), key=lambda times: (PARTS.index(times.part.split(":")[0]), times.part)
    )
    names = list(dict.fromkeys(times.part for times in by_part))
    sides = np.zeros((2, len(records.requests), len(names)), dtype=np.int64)
    for times in by_part:
        part = np.full(len(times.ns), names.index(times.part))
        np.add.at(sides, (times.after_first.astype(np.int64), times.request, part), times.ns)
    return names, sides[0], sides[1]


def _time_that_counts(metric: str, names: list[str], before: Int, after: Int, whole: bool) -> Int:
    """The ns of one request that count for `metric`, by part, and last those of `whole_response`."""
    part = LATENCIES[metric].part
    if part == "queue":
        waiting = [name.partition(":")[0] in ("queued", "waiting_step", "host_gap", FOR_RANKS) for name in names]
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
