"""How rollouts went: the time that trainer and engines waited, the age of groups when trained on, tokens in vain.

Only answers that were trained on count. A training's *generation* is from when the first of its groups was sent to its
last answer, the *tail* of it the part after 90 % of its answers. Staleness is in versions of the weights, between an
answer's first token and its use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchsim.base.units import NS_PER_S
from batchsim.kernel.record import FINISHED
from batchsim.metrics.point_inputs import PointInputs
from batchsim.workload.rollout_log import Answer, Group, Outcome, RolloutLog

TAIL_FROM = 0.9
"""The share of a training's answers after which its tail begins, as rollout systems count it."""
WASTE: tuple[Outcome, ...] = ("aborted", "filtered", "stale", "left", "failed")
TRAINING_COLUMNS = (
    "training",
    "version",
    "start_s",
    "wait_s",
    "training_s",
    "drain_s",
    "loading_s",
    "generation_s",
    "tail_s",
    "answers",
    "output_tokens",
    "longest",
    "staleness_mean",
    "staleness_max",
    "bound_s",
    "slowest",
    "with_longest",
    "with_most",
)
"""Columns of a training. `wait_s` is how long the trainer waited for its groups, `drain_s` how long after it until
engines were ready for other weights, `loading_s` how long they were loaded; `longest` the tokens of the longest answer.
Of several replicas `slowest` is the one with the last answer, `with_longest` that with the longest one, `with_most`
that with most tokens."""


class Generation(NamedTuple):
    """When the answers of a training came, in ns: its first group sent, 90 % of its answers done, the last one."""

    sent_ns: int
    tail_ns: int
    done_ns: int


def generation_of(groups: Sequence[Group]) -> Generation:
    """The generation of the groups of a training."""
    done = sorted(answer.done_ns for group in groups for answer in group.used)
    at = max(int(np.ceil(TAIL_FROM * len(done))) - 1, 0)
    return Generation(min(group.sent_ns for group in groups), done[at], done[-1])


def by_training(log: RolloutLog) -> list[list[Group]]:
    """The groups of each training."""
    taken: list[list[Group]] = [[] for _ in log.updates]
    for group in log.used:
        taken[group.update].append(group)
    return taken


def training_rows(inputs: PointInputs) -> list[dict[str, Any]]:
    """A row of TRAINING_COLUMNS for each training that ended; [] without rollouts."""
    log = inputs.rollout
    if log is None:
        return []
    replica_of = _replicas(inputs)
    rows = []
    for number, (update, groups) in enumerate(zip(log.updates, by_training(log), strict=True)):
        answers = [answer for group in groups for answer in group.used]
        times = generation_of(groups)
        ages = [update.version - answer.first_version for answer in answers]
        bound_ns = None if inputs.rollout_bounds_ns is None else float(inputs.rollout_bounds_ns[number])
        row: dict[str, Any] = {
            "training": number,
            "version": update.version,
            "start_s": update.start_ns / NS_PER_S,
            "wait_s": update.wait_ns / NS_PER_S,
            "training_s": (update.end_ns - update.start_ns) / NS_PER_S,
            "drain_s": None if update.loading_ns < 0 else (update.loading_ns - update.end_ns) / NS_PER_S,
            "loading_s": None if update.loaded_ns < 0 else (update.loaded_ns - update.loading_ns) / NS_PER_S,
            "generation_s": (times.done_ns - times.sent_ns) / NS_PER_S,
            "tail_s": (times.done_ns - times.tail_ns) / NS_PER_S,
            "answers": len(answers),
            "output_tokens": sum(answer.made for answer in answers),
            "longest": max(answer.made for answer in answers),
            "staleness_mean": float(np.mean(ages)),
            "staleness_max": max(ages),
            "bound_s": None if bound_ns is None else bound_ns / NS_PER_S,
        }
        rows.append(row | _slowest(answers, replica_of))
    return rows


def _replicas(inputs: PointInputs) -> dict[int, int] | None:
    """The replica of each request by its id; None for one engine."""
    records = inputs.records
    if records.replicas is None:
        return None
    ids, replicas = records.requests["request_id"].tolist(), records.replicas.requests.tolist()
    return dict(zip(ids, replicas, strict=True))


def _slowest(answers: Sequence[Answer], replica_of: dict[int, int] | None) -> dict[str, int | None]:
    """Which replica had the last answer, which the longest one, which most tokens; None for one engine."""
    if replica_of is None:
        return dict.fromkeys(("slowest", "with_longest", "with_most"))
    tokens: dict[int, int] = {}
    for answer in answers:
        for request_id, made in answer.parts:
            tokens[replica_of[request_id]] = tokens.get(replica_of[request_id], 0) + made
    last = max(answers, key=lambda each: (each.done_ns, each.made))
    longest = max(answers, key=lambda each: each.made)
    return {
        "slowest": replica_of[last.parts[-1][0]],
        "with_longest": replica_of[longest.parts[-1][0]],
        "with_most": max(tokens, key=lambda replica: (tokens[replica], -replica)),
    }


def rollout_kpis(inputs: PointInputs, log: RolloutLog) -> dict[str, float | None]:
    """The metrics of rollouts by name; None where no training was."""
    rows = training_rows(inputs)
    seconds = log.end_ns / NS_PER_S
    answers = [answer for group in log.used for answer in group.used]
    used = log.tokens_of("used")
    values: dict[str, float | None] = {
        "trainings": float(len(rows)),
        "training_cycle_mean_s": seconds / len(rows) if rows else None,
        "trainer_wait_mean_s": _mean(rows, "wait_s"),
        "trainer_idle_share": sum(row["wait_s"] + (row["drain_s"] or 0) for row in rows) / seconds if seconds else None,
        "generation_mean_s": _mean(rows, "generation_s"),
        "generation_bound_share": _ratio_of(rows, "bound_s", "generation_s"),
        "tail_mean_s": _mean(rows, "tail_s"),
        "drain_mean_s": _mean([row for row in rows if row["drain_s"] is not None], "drain_s"),
        "loading_mean_s": _mean([row for row in rows if row["loading_s"] is not None], "loading_s"),
        "loading_share": _share(sum(row["loading_s"] or 0 for row in rows), seconds),
        "generated_tokens": float(log.generated_tokens),
        "used_tokens": float(used),
        "waste_share": _share(log.generated_tokens - used, log.generated_tokens),
        **{f"{name}_share": _share(log.tokens_of(name), log.generated_tokens) for name in WASTE},
        "prefilled_again_tokens": float(log.prefilled_again_tokens),
        "useful_answers_per_s": len(answers) / seconds if seconds else None,
        "gpu_hours_per_1000_answers": _gpu_hours(inputs, log, len(answers)),
        "prompts_per_used_group": _share(len(log.groups), len(log.used)),
        "answers_at_cap_share": _share(sum(answer.is_cut for answer in answers), len(answers)),
        "group_spread_mean_s": _spread_s(log),
    }
    values |= _staleness(log)
    values |= _who_is_slow(rows)
    return values


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    return float(np.mean([row[name] for row in rows])) if rows else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _ratio_of(rows: Sequence[dict[str, Any]], part: str, whole: str) -> float | None:
    if not rows or any(row[part] is None for row in rows):
        return None
    return _share(sum(row[part] for row in rows), sum(row[whole] for row in rows))


def _gpu_hours(inputs: PointInputs, log: RolloutLog, answers: int) -> float | None:
    """Hours of the engines' GPUs; the trainer's own are not known here."""
    if not answers or not log.end_ns:
        return None
    return inputs.mean_num_gpus((0, log.end_ns)) * log.end_ns / NS_PER_S / 3600 / (answers / 1000)


def _spread_s(log: RolloutLog) -> float | None:
    spans = []
    for group in log.used:
        done = [answer.done_ns for answer in group.used]
        spans.append(max(done) - min(done))
    return float(np.mean(spans)) / NS_PER_S if spans else None


def _staleness(log: RolloutLog) -> dict[str, float | None]:
    ages = np.sort(log.staleness())
    names = ("staleness_mean", "staleness_p99", "staleness_max", "beyond_limit_share", "mixed_version_share")
    if not len(ages):
        return dict.fromkeys(names)
    at = int(np.ceil(0.99 * len(ages) - 1e-9)) - 1
    beyond = None if log.limit is None else float((ages > log.limit).mean())
    mixed = float(log.is_mixed().mean())
    return dict(zip(names, (float(ages.mean()), float(ages[at]), float(ages[-1]), beyond, mixed), strict=True))


def _who_is_slow(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """How often the slowest replica of a training is the one with the longest answer, and with most tokens."""
    known = [row for row in rows if row["slowest"] is not None]
    return {
        f"slowest_has_{name}_share": _share(sum(row["slowest"] == row[f"with_{name}"] for row in known), len(known))
        for name in ("longest", "most")
    }


def makespan_ns(inputs: PointInputs, cohort: NDArray[np.bool_], span_ns: tuple[int, int]) -> float:
    """How long the run's work took, in ns: of a rollout to the end of its last training, else to the last answer; inf
    where a request of the cohort did not finish."""
    if inputs.rollout is not None:
        return float(inputs.rollout.end_ns)
    done = inputs.records.requests["outcome"][cohort] == FINISHED
    if inputs.num_missing or not done.all():
        return float("inf")
    return float(span_ns[1] - span_ns[0])
