"""Where the time of a point's requests went: the mean and the slowest, as text and as data. See `batchsim.explain`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pandas as pd

from batchsim.base.units import counted, format_duration, parse_duration_ns
from batchsim.drive.fleet.fleet_records import by_engine
from batchsim.kernel.record import OUTCOME_NAMES, Records
from batchsim.metrics.attribution import attribute
from batchsim.metrics.host_lane import device_spans_ns, host_spans_ns, host_waits_ns
from batchsim.metrics.latencies import LATENCIES, Ns
from batchsim.report.layout import filled
from batchsim.report.reading import point_text
from batchsim.report.text.shapes_text import shape_line, use_of
from batchsim.results.read import Results, scenario_of

_LEAST_SHARE = 0.005  # of a request's life; smaller parts are added up as the rest
_UNBROKEN = "\u00a0"  # a no-break space: no line ends inside a term


def overview(
    results: Results, policy: str, load: float, seed: int, *, slowest: int = 5, by: str | None = None
) -> dict[str, Any]:
    """Where the time of one point's requests went, as JSON values: the mean over all requests, and the `slowest`, those
    with the longest lives or, where `by` names one of LATENCIES, with the largest: of a request that did not finish it
    has no end, so such come first.

    A request's life is from sending to delivery, or to its end if nothing was delivered. Parts are in ns, largest
    first; `blocker` is the id of the request that took its place, or None.
    """
    records = results.records(policy, load, seed)
    frontend = scenario_of(results, policy)["workload"].get("frontend") or {}
    parts = attribute(records, parse_duration_ns(frontend.get("per_chunk", "0s")))
    known = records.requests["request_id"]
    ns = parts["ns"].to_numpy()
    lives = np.zeros(len(known), dtype=np.int64)
    np.add.at(lives, np.searchsorted(known, parts["request_id"].to_numpy()), ns)
    values = _values(records, by) if by is not None else np.zeros(len(known))
    longest = np.lexsort((-lives, -np.nan_to_num(values, nan=-1.0, posinf=np.inf)))[:slowest]
    names = np.asarray(parts["part"].astype(str), dtype=str)
    means = {str(name): float(ns[names == name].sum() / len(known)) for name in np.unique(names)}
    return {
        "policy": policy,
        "load": load,
        "seed": seed,
        "lanes": _lanes(records),
        "shapes": "" if (use := use_of(results, policy, load, seed)) is None else shape_line(use),
        "requests": len(known),
        "mean_ns": sum(means.values()),
        "mean_parts": [{"part": part, "ns": means[part]} for part in sorted(means, key=lambda part: -means[part])],
        "by": by,
        "slowest": [
            _one(records, parts, int(known[i])) | ({} if by is None else {f"{by}_ns": _finite(float(values[i]))})
            for i in longest
        ],
    }


def overview_text(results: Results, facts: dict[str, Any]) -> str:
    """`facts`, which `overview` returned, as text: a paragraph for the mean, one for each slow request."""
    mean = _sum_text(facts["mean_ns"], facts["mean_parts"])
    lines = [point_text(results, facts), _paragraph(f"  mean of {facts['requests']:,}: {mean}")]
    lines += [_paragraph(_lanes_text(facts["lanes"]))] if facts["lanes"] else []
    lines += [_paragraph(f"  {facts['shapes']}")] if facts["shapes"] else []
    for one in facts["slowest"]:
        end = "" if one["outcome"] == "finished" else f", {one['outcome']} ({one['reason']})"
        by = facts["by"] or ""
        value = one.get(f"{by}_ns")
        of = f", {LATENCIES[by].title} {format_duration(value)}" if value is not None else ""
        head = f"  request {one['request_id']} ({one['prompt_tokens']:,} + {one['output_tokens']:,} tokens{end}{of})"
        lines.append(_paragraph(f"{head}: {_sum_text(one['life_ns'], one['parts'])}"))
    return "\n".join(lines)


def _values(records: Records, name: str) -> Ns:
    """The latency `name` of each request in ns; inf for unfinished ones, NaN where it does not apply."""
    finished = np.array([OUTCOME_NAMES[int(code)] == "finished" for code in records.requests["outcome"]])
    of = LATENCIES[name].of
    assert of is not None, "one value a request"
    return np.where(finished, of(records.requests), np.inf)


def _finite(ns: float) -> float | None:
    return ns if np.isfinite(ns) else None


def _lanes(records: Records) -> dict[str, Any] | None:
    """Of engines ahead of results: the shares of the time between their first and last step in which the host was at
    work, the device ran a step, and it stood still for the host; before how many of its `steps`. None without any."""
    totals: Counter[str] = Counter()
    for engine_records in (engine.records for engine in by_engine(records) if len(engine.records.lanes)):
        device, waits_ns = device_spans_ns(engine_records), host_waits_ns(engine_records)
        host = np.clip(np.concatenate(host_spans_ns(engine_records)), device[0, 0], device[-1, 1])
        totals.update(host=int(np.diff(host).sum()), device=int(np.diff(device).sum()), waits=int(waits_ns.sum()))
        totals.update(steps=len(device), host_bound=int((waits_ns > 0).sum()), ns=int(device[-1, 1] - device[0, 0]))
    if not totals["ns"]:
        return None
    shares = {name: totals[name] / totals["ns"] for name in ("host", "device", "waits")}
    return shares | {"host_bound_steps": totals["host_bound"], "steps": totals["steps"]}


def _lanes_text(lanes: dict[str, Any]) -> str:
    shares = {name: f"{100 * lanes[name]:.3g} %" for name in ("host", "device", "waits")}
    text = f"  host at work {shares['host']} of the time, device {shares['device']}"
    if not lanes["host_bound_steps"]:
        return f"{text}; no step waited for the host"
    of = f"{lanes['host_bound_steps']:,} of {counted(lanes['steps'], 'step')}"
    return f"{text}; it stood still for the host {shares['waits']} of it, before {of}"


def _one(records: Records, parts: pd.DataFrame, request_id: int) -> dict[str, Any]:
    (row,) = records.requests[records.requests["request_id"] == request_id]
    of_request = parts.loc[parts["request_id"] == request_id]
    rows = sorted(
        zip(of_request["part"], of_request["ns"], of_request["blocker"], strict=True), key=lambda item: -item[1]
    )
    return {
        "request_id": request_id,
        "prompt_tokens": int(row["prompt_tokens"]),
        "output_tokens": int(row["output_tokens"]),
        "outcome": OUTCOME_NAMES[int(row["outcome"])],
        "reason": records.texts[row["reason"]],
        "life_ns": sum(int(ns) for _, ns, _ in rows),
        "parts": [
            {"part": str(part), "ns": int(ns), "blocker": None if pd.isna(blocker) else int(blocker)}
            for part, ns, blocker in rows
        ],
    }


def _sum_text(life_ns: float, parts: list[dict[str, Any]]) -> str:
    """`3.2 s = 2 s decode_alone (62 %) + 1.2 s preempted:kv_blocks by request 7 (38 %)`."""
    if not life_ns:
        return "no time at all"
    shown, rest_ns = [], 0.0
    for part in parts:
        share = part["ns"] / life_ns
        if share < _LEAST_SHARE:
            rest_ns += part["ns"]
            continue
        by = f" by request {part['blocker']}" if part.get("blocker") is not None else ""
        term = f"{format_duration(part['ns'])} {part['part']}{by} ({100 * share:.0f} %)"
        shown.append(term.replace(" ", _UNBROKEN))
    rest = [f"{format_duration(rest_ns)} in smaller parts".replace(" ", _UNBROKEN)] if rest_ns else []
    return f"{format_duration(life_ns)} = " + " + ".join(shown + rest)


def _paragraph(text: str) -> str:
    return "\n".join(filled(text, "      ")).replace(_UNBROKEN, " ")
