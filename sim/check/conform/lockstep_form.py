"""Reads and compares recordings of ranks that step together: vLLM's data parallelism of models with experts.

One JSON object with the ranks' `meta` and `requests` as of one engine, and what they did together:

    meta        also `data_parallel_size`, `hop` (of a message, seconds), `dp_sync_interval`. `step_time`: "... t_end =
                t_gpu_start + 0.005 + 0.00002*max(1, largest number of tokens of a rank); ...". `totals`: requests,
                passes, waves, preemptions, makespan, by rank steps, dummies and per_rank (requests), and sums of all.
    requests    `rank`, if the caller named one.
    routed      [time, id, rank, the client's copy of [waiting, running, kv usage] by rank, its requests in flight by
                rank, the first rank that it looked at]; the copy and the counts are those before the choice.
    published   [time at the client, such loads or null, wave, whether it runs].
    waves       [time, "wave_started_by", wave, rank], [time, "start_wave", wave, rank left out], [time,
                "wave_complete", wave, 0], and of an all-reduce [time, "sync", pass before it, unfinished ranks].
    passes      [number, when the last rank had launched it, t_gpu_start, t_end, [tokens by rank, 0 for a dummy]].
    ranks       by rank `dummies` [[pass, when launched]...] and `steps` as of an engine with its host's times, and with
                `step_counter`, `wave`, `throttled` if prompts had to wait, `pass` if it had anything to run.
    per_request also `taken`, when its rank took it in.

All of it is compared; reported is what differs first in time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from batchsim.base.errors import shown
from batchsim.check.conform import vllm_v1
from batchsim.check.conform.fields import (
    COUNT,
    FLAG,
    IDS,
    LIST,
    OBJECT,
    SECONDS,
    SHARE,
    TEXT,
    BadRecording,
    Fields,
    Kind,
    check_row,
    columns,
    whole,
)
from batchsim.check.conform.recording import Recording, to_ns
from batchsim.check.conform.times import SAID
from batchsim.drive.fleet.lockstep.passes import num_tokens
from batchsim.drive.fleet.lockstep.simulate_ranks import LockstepPlan
from batchsim.kernel.batch import Batch

RANKS = whole(2, 1000)
TIES = {"data_parallel_size": RANKS, "hop": SECONDS, "dp_sync_interval": whole(1, 10**6)}
NOTES = {"engine": TEXT, "coordinator": TEXT, "client": TEXT}
SUMMED = ("tokens", "cached_tokens", "empty_steps", "victim_in_flight", "wasted_tokens", "stale_outputs", "sleeps")
"""Totals of an engine that are summed over the ranks."""
LAW = re.compile(
    r"t_end = t_gpu_start \+ (?P<base>\d{1,9}(?:\.\d{1,12})?) \+ (?P<per_token>\d{1,9}(?:\.\d{1,12})?)"
    r"\*max\(1, largest number of tokens of a rank\)"
)
SAID_OF_PASSES = SAID | {
    "a pass: all ranks launch (a rank's host waits) until the last has launched, at T",
    "t_gpu_start = max(T, end of the pass before)",
    "a rank's host goes on at T",
    "results: t_processed = max(host clock, t_end) + host_update",
}
Row = dict[str, Any]
Columns = tuple[str, ...]
TABLES: dict[str, Columns] = {
    "routed": ("time_ns", "id", "rank", "loads", "in_flight", "first"),
    "published": ("time_ns", "loads", "wave", "is_running"),
    "waves": ("time_ns", "what", "number", "count"),
    "passes": ("number", "launched_ns", "start_ns", "end_ns", "tokens"),
}
DUMMIES: Columns = ("pass", "time_ns")
_LOAD = columns("[waiting, running, kv usage]", COUNT, COUNT, SHARE)
_LOADS = Kind("loads by rank", lambda value: isinstance(value, list) and all(_LOAD.fits(one) for one in value))
_COUNTS = IDS  # by rank
KINDS: Fields = {
    "time_ns": SECONDS,
    "launched_ns": SECONDS,
    "start_ns": SECONDS,
    "end_ns": SECONDS,
    "loads": _LOADS.or_null,
    "in_flight": _COUNTS,
    "tokens": _COUNTS,
    "what": TEXT,
    "is_running": FLAG,
}
TOTALS: Fields = {
    **dict.fromkeys(("requests", "passes", "waves", "preemptions", *SUMMED), COUNT),
    **dict.fromkeys(("steps", "dummies", "per_rank"), _COUNTS),
    "makespan": SECONDS,
}


def is_lockstep(data: Any) -> bool:
    """Whether the JSON value `data` is a recording of ranks that step together."""
    return isinstance(data, dict) and {"meta", "ranks"} <= data.keys()


@dataclass(frozen=True)
class PassLaw:
    """`base_ns`, and `per_token_ns` for each token of the rank that has the most, a dummy's one among them."""

    base_ns: int
    per_token_ns: int

    def pass_ns(self, batches: Sequence[Batch | None]) -> int:
        return self.base_ns + self.per_token_ns * max(1, *(num_tokens(batch) for batch in batches))


@dataclass(frozen=True)
class RecordedRanks:
    """A recording: each rank as one of an engine of its own, how they are tied together, and the tables."""

    ranks: list[Recording]
    plan: LockstepPlan
    law: PassLaw
    tables: dict[str, list[Row]]
    taken_ns: dict[int, int]
    totals: dict[str, Any]


def recorded_ranks(data: dict[str, Any], policy: str | None) -> RecordedRanks:
    check_row(data, "the recording", dict.fromkeys(("requests", "ranks", *TABLES), LIST) | {"meta": OBJECT}, _MAYBE)
    meta = data["meta"]
    check_row({name: meta[name] for name in (TIES | NOTES) if name in meta}, "meta", TIES, NOTES)
    if meta.get("spec_decode"):
        raise BadRecording("has drafts, which are not simulated of ranks that step together. Record without them.")
    for name in ("kv_role", "tier", "order"):
        if name in meta:
            raise BadRecording(
                f"meta has {name}, which is not simulated of ranks that step together. Record without it."
            )
    count = meta["data_parallel_size"]
    if len(data["ranks"]) != count:
        raise BadRecording(f"meta.data_parallel_size is {count}, and there are {len(data['ranks'])} ranks.")
    others = {name: value for name, value in meta.items() if name not in TIES | NOTES | {"totals": 0, "step_time": 0}}
    requests: list[Any] = []
    given: dict[int, int] = {}
    for i, row in enumerate(data["requests"]):
        OBJECT.check(row, f"requests[{i}]")
        requests.append({name: value for name, value in row.items() if name != "rank"})
        if "rank" in row:
            COUNT.check(row.get("id"), f"requests[{i}].id")
            whole(0, count - 1).check(row["rank"], f"requests[{i}].rank")
            given[row["id"]] = row["rank"]
    tables = {name: _rows(data[name], name, columns) for name, columns in TABLES.items()}
    ranks: list[Recording | None] = []
    for i, row in enumerate(data["ranks"]):
        where = f"ranks[{i}]"
        check_row(row, where, {"rank": whole(i, i), "dummies": LIST, "steps": LIST})
        for k, step in enumerate(row["steps"]):
            OBJECT.check(step, f"{where}.steps[{k}]")
        tables[f"{where}.dummies"] = _rows(row["dummies"], f"{where}.dummies", DUMMIES)
        alone = {"meta": others, "requests": requests, "steps": row["steps"], "per_request": data.get("per_request")}
        alone = {name: value for name, value in alone.items() if value is not None}
        ranks.append(vllm_v1.recording(alone, policy, lockstep=True) if row["steps"] else None)
    like = next((rank for rank in ranks if rank is not None), None)
    if like is None:
        raise BadRecording("has no steps of any rank. Record it again.")
    all_ranks = [like.without_steps() if rank is None else rank for rank in ranks]
    taken = {i: facts["taken"][1] for i, facts in like.requests.items() if "taken" in facts}
    plan = LockstepPlan(to_ns(meta["hop"]), meta["dp_sync_interval"], given=given)
    return RecordedRanks(all_ranks, plan, _law(meta), tables, taken, _totals(meta))


_MAYBE = {"per_request": OBJECT}


def _rows(rows: list[Any], where: str, columns: Columns) -> list[Row]:
    """The rows of a table, whose times are in seconds, as facts by column."""
    read: list[Row] = []
    for i, row in enumerate(rows):
        at = f"{where}[{i}]"
        LIST.check(row, at)
        if len(row) != len(columns):
            raise BadRecording(f"{at} has {len(row)} columns, not {len(columns)}. Record it again.")
        for name, value in zip(columns, row, strict=True):
            KINDS.get(name, COUNT).check(value, f"{at}, {name.removesuffix('_ns')}")
        read.append({n: to_ns(v) if n.endswith("_ns") else v for n, v in zip(columns, row, strict=True)})
    return read


def _law(meta: dict[str, Any]) -> PassLaw:
    text = str(meta.get("step_time", ""))
    laws = [clause for clause in text.split("; ") if clause not in SAID_OF_PASSES]
    match = LAW.fullmatch(laws[0]) if len(laws) == 1 else None
    if match is None:
        like = "t_end = t_gpu_start + 0.005 + 0.00002*max(1, largest number of tokens of a rank)"
        raise BadRecording(f"meta.step_time is {shown(text)}, not like {like}. Write it so.")
    return PassLaw(to_ns(float(match["base"])), to_ns(float(match["per_token"])))


def _totals(meta: dict[str, Any]) -> dict[str, Any]:
    totals = check_row(meta.get("totals", {}), "meta.totals", {}, TOTALS)
    return totals | ({"makespan": to_ns(totals["makespan"])} if "makespan" in totals else {})
