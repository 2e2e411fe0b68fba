"""One run as a Chrome trace, which ui.perfetto.dev and Speedscope open: steps, requests, queue and KV memory.

Format: "Trace Event Format" (Chromium), JSON object form: slices as their begin `B` and end `E`, with `ts` in
microseconds, counters `C`, names `M`. A slice that begins where another ends has the same number for it: with durations
viewers would add in floating point, and draw steps inside each other. Process 1 is the engine: its steps on one thread,
its counters beside them. Of an engine that is ahead of results it has the host's calls of the scheduler and processing
on a thread, and its steps on one for the device, or on one for each stage of a pipeline; a step before which the device
stood still for the host has that before it. Process 2 has the requests: a thread is a lane that one request after
another lives in, so there are as many lanes as requests were there at a time. A life is a slice with its states nested
inside. Nothing is written per token: the size is about 400 bytes a step, 700 with a host, and 1,000 a request.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchsim.base.files import Kind, replacing_text
from batchsim.kernel.record import FINISHED, MISSING, OUTCOME_NAMES, STATE_NAMES, Records
from batchsim.metrics.attribution import attribute
from batchsim.metrics.host_lane import host_spans_ns, host_waits_ns
from batchsim.metrics.lives import Intervals, given_up, queueing, state_intervals

ENGINE, REQUESTS = 1, 2
"""Process ids."""
HOST, STEPS = 1, 2
"""The engine's threads: its host's, if it is ahead of results, and the first one of its steps; lanes of requests are
numbered from 1."""
_HEAD = '{"displayTimeUnit":"ms","otherData":'
KIND = Kind("trace of a run", re.escape(_HEAD).encode())

Event = dict[str, Any]
Window = tuple[int, int]
_STEP_ARGS = (
    "num_prefill_tokens",
    "num_chunks",
    "num_decode",
    "num_accepted_tokens",
    "context_tokens",
    "pad_prefill_tokens",
    "pad_prefill_rows",
    "pad_decode_rows",
    "swap_blocks",
    "num_preempted",
    "cached_tokens",
    "num_passes",
)


def timeline_events(
    records: Records,
    num_blocks: int,
    window_ns: Window | None = None,
    terms: Mapping[str, NDArray[np.float64]] | None = None,
    *,
    rows: Mapping[str, NDArray[np.int64]] | None = None,
    per_chunk_ns: int = 0,
    first_lane: int = 1,
) -> Iterator[Event]:
    """The Chrome trace events of a run, or of the part within `window_ns`; slices across its edges are cut there.

    `num_blocks` is the size of the KV pool; `terms` are the parts of each step's time in ns, if known; `rows`, by name,
    when each step ran on what (`step_terms.device_rows`), by default as few rows as hold all steps. `per_chunk_ns` is
    the front end's time to deliver one piece of a response. Lanes of requests are numbered from `first_lane` on.
    """
    window = window_ns if window_ns is not None else (0, _end_ns(records))
    yield _name("process_name", ENGINE, 0, "engine")
    yield _name("process_name", REQUESTS, 0, "requests")
    if len(records.lanes):
        yield from _host(records, window)
    steps = records.steps
    seen = (steps["start_ns"] < window[1]) & (steps["start_ns"] + steps["duration_ns"] > window[0])
    args = _step_args(steps[seen], {name: ns[seen] for name, ns in (terms or {}).items()})
    waits_ns = host_waits_ns(records)[seen].tolist()
    for thread, (name, spans) in enumerate((rows or _rows(steps)).items(), STEPS):
        yield _name("thread_name", ENGINE, thread, name)
        yield from _steps(thread, spans[seen].tolist(), waits_ns, args, window)
    yield from _counters(steps[seen], num_blocks, window)
    yield from _requests(records, window, per_chunk_ns, first_lane)


def write_timeline(events: Iterable[Event], path: Path, facts: dict[str, Any]) -> dict[str, int]:
    """Writes the trace, whole or not at all, gzipped if `path` ends in .gz; returns the number of events by phase.

    `facts` go to the trace's `otherData`. OSError where `path` cannot be written.
    """
    counts: dict[str, int] = {}
    with replacing_text(path, KIND, packed=path.suffix == ".gz") as file:
        file.write(f'{_HEAD}{json.dumps(facts)},"traceEvents":[')
        separator = "\n"
        for event in events:
            file.write(separator + json.dumps(event, separators=(",", ":"), ensure_ascii=False))
            separator = ",\n"
            counts[event["ph"]] = counts.get(event["ph"], 0) + 1
        file.write("\n]}\n")
    return counts


def _end_ns(records: Records) -> int:
    """Time of the run's last event, ns: a step's end, a request's end or a delivery."""
    ends = [int(records.requests[name].max()) for name in ("ended_ns", "delivered_ns") if len(records.requests)]
    if records.num_steps:
        ends.append(int(records.steps["start_ns"][-1] + records.steps["duration_ns"][-1]))
    return max(ends, default=0)


# ---- the engine


def _rows(steps: NDArray[np.void]) -> dict[str, NDArray[np.int64]]:
    """When each step ran, each on the first of some rows that is free; no length on the others."""
    ends_ns: list[int] = []
    of = np.zeros(len(steps), np.int64)
    for i, (start_ns, duration_ns) in enumerate(
        zip(*(steps[n].tolist() for n in ("start_ns", "duration_ns")), strict=True)
    ):
        of[i] = next((row for row, end_ns in enumerate(ends_ns) if end_ns <= start_ns), len(ends_ns))
        ends_ns[of[i] : of[i] + 1] = [start_ns + duration_ns]
    spans = np.stack([steps["start_ns"], steps["start_ns"] + steps["duration_ns"]], axis=1)
    names = ["steps", *(f"steps {row}" for row in range(2, len(ends_ns) + 1))]
    return {name: np.where((of == row)[:, None], spans, 0) for row, name in enumerate(names)}


def _step_args(steps: NDArray[np.void], terms: Mapping[str, NDArray[np.float64]]) -> list[dict[str, Any]]:
    """What a viewer shows of each step: its numbers that are not 0."""
    columns = {name: steps[name].tolist() for name in _STEP_ARGS}
    columns["draft_tokens"] = (steps["num_decode_tokens"] - steps["num_decode"]).tolist()
    columns |= {f"{name}_us": np.round(ns / 1000, 1).tolist() for name, ns in terms.items()}
    return [{name: values[i] for name, values in columns.items() if values[i]} for i in range(len(steps))]


def _steps(
    thread: int, spans: list[tuple[int, int]], waits_ns: list[int], args: list[dict[str, Any]], window: Window
) -> Iterator[Event]:
    """A slice for each step on one thread, after one for how long the device stood still for the host before it."""
    for (start_ns, end_ns), wait_ns, work in zip(spans, waits_ns, args, strict=True):
        yield from _seen("waits for the host", thread, (start_ns - wait_ns, start_ns), window, {})
        kinds = [kind for kind, name in (("prefill", "num_chunks"), ("decode", "num_decode")) if name in work]
        yield from _seen(" + ".join(kinds) or "no tokens", thread, (start_ns, end_ns), window, work)


def _host(records: Records, window: Window) -> Iterator[Event]:
    """A slice for each call of the scheduler up to the launch, and for the processing of each step's results."""
    yield _name("thread_name", ENGINE, HOST, "host")
    calls, processing = host_spans_ns(records)
    spans = np.concatenate([calls, processing])
    for i in np.lexsort((spans[:, 1], spans[:, 0])).tolist():
        name = "schedule" if i < len(calls) else "process results"
        yield from _seen(name, HOST, (int(spans[i, 0]), int(spans[i, 1])), window, {"step": i % len(calls)})


def _counters(steps: NDArray[np.void], num_blocks: int, window: Window) -> Iterator[Event]:
    """Counter events where a value changes: at a step's start; tokens also at its end, if the engine rests after it.

    A rest is a gap longer than the step: in a live run the host takes some time between any two.
    """
    starts, ends = steps["start_ns"].tolist(), (steps["start_ns"] + steps["duration_ns"]).tolist()
    tracks = {
        "KV blocks used": {"blocks": (num_blocks - steps["free_blocks"]).tolist()},
        "requests": {"waiting": steps["num_waiting"].tolist(), "running": steps["num_running"].tolist()},
        "tokens of the step": {
            "prefill": steps["num_prefill_tokens"].tolist(),
            "decode": steps["num_decode_tokens"].tolist(),
            "padding": (steps["pad_prefill_tokens"] + steps["pad_decode_rows"]).tolist(),
        },
    }
    for name, series in tracks.items():
        rests = name == "tokens of the step"
        before: dict[str, int] = {}
        for i, start_ns in enumerate(starts):
            now = {key: values[i] for key, values in series.items()}
            if now != before:
                yield _counter(name, max(start_ns, window[0]), now)
                before = now
            is_followed = i + 1 < len(starts) and starts[i + 1] - ends[i] <= ends[i] - start_ns
            if rests and not is_followed and ends[i] <= window[1]:
                before = dict.fromkeys(series, 0)
                yield _counter(name, ends[i], before)


# ---- the requests


def _requests(records: Records, window: Window, per_chunk_ns: int, first_lane: int) -> Iterator[Event]:
    requests = records.requests
    ends = np.where(requests["outcome"] == FINISHED, requests["delivered_ns"], requests["ended_ns"])
    seen = np.flatnonzero((requests["sent_ns"] <= window[1]) & (ends >= window[0]))
    order = seen[np.argsort(requests["sent_ns"][seen], kind="stable")]
    inner = _States(records, per_chunk_ns)
    lanes = _Lanes(first_lane)
    for i in order.tolist():
        life = (int(requests["sent_ns"][i]), int(ends[i]))
        lane, is_new = lanes.take(*life)
        if is_new:
            yield _name("thread_name", REQUESTS, lane, f"lane {lane}")
            yield _event("M", REQUESTS, lane, name="thread_sort_index", args={"sort_index": lane})
        begin, end = _slice(f"request {requests['request_id'][i]}", REQUESTS, lane, life, window, _facts(records, i))
        yield begin
        for name, span, args in inner.of(i):
            within = (max(span[0], life[0]), min(span[1], life[1]))
            if within[1] > within[0] and within[1] > window[0] and within[0] < window[1]:
                yield from _slice(name, REQUESTS, lane, within, window, args)
        yield end


def _facts(records: Records, i: int) -> dict[str, Any]:
    """The request's facts that the viewer shows on a click on its slice."""
    row = records.requests[i]
    facts: dict[str, Any] = {"outcome": OUTCOME_NAMES[int(row["outcome"])]}
    facts |= {
        name: records.texts[row[name]] for name in ("reason", "request_class", "tenant") if records.texts[row[name]]
    }
    facts |= {name: int(row[name]) for name in ("prompt_tokens", "output_tokens")}
    if row["outcome"] == FINISHED:
        facts["ttft_ms"] = int(row["first_delivery_ns"] - row["sent_ns"]) / 1e6
    counted = ("priority", "num_preemptions", "recomputed_tokens", "cached_tokens")
    return facts | {name: int(row[name]) for name in counted if row[name]}


class _Lanes:
    """Assigns each request the lowest lane free for its whole life; requests must come in order of their start."""

    def __init__(self, first: int) -> None:
        self._free: list[int] = []
        self._busy: list[tuple[int, int]] = []
        self._count = first - 1

    def take(self, start_ns: int, end_ns: int) -> tuple[int, bool]:
        """(lane, whether it was never used before) for a life from `start_ns` to `end_ns`."""
        while self._busy and self._busy[0][0] <= start_ns:
            heappush(self._free, heappop(self._busy)[1])
        is_new = not self._free
        if is_new:
            self._count += 1
            heappush(self._free, self._count)
        lane = heappop(self._free)
        heappush(self._busy, (end_ns, lane))
        return lane, is_new


class _States:
    """The spans inside a request's life: on the way, waiting for a step, queued, in each state, response held back."""

    def __init__(self, records: Records, per_chunk_ns: int) -> None:
        self.records = records
        self.per_chunk_ns = per_chunk_ns
        self.intervals: Intervals = state_intervals(records)
        queue = queueing(records, self.intervals)
        self.arrival_ns, self.entered_ns, self.until_ns = queue.arrival_ns, queue.entered_ns, queue.until_ns
        self.first = np.searchsorted(self.intervals.request, np.arange(len(records.requests) + 1)).tolist()
        self.given_up = given_up(records.requests)
        self.queued: dict[int, dict[str, float]] = {}
        parts = attribute(records)
        queued = parts[parts["part"].astype(str).str.startswith("queued:")]
        for id_, part, ns in zip(queued["request_id"], queued["part"].astype(str), queued["ns"], strict=True):
            self.queued.setdefault(int(id_), {})[part.partition(":")[2]] = int(ns) / 1e6

    def of(self, i: int) -> Iterator[tuple[str, Window, dict[str, Any]]]:
        """(name, span in ns, arguments) of each state of the request in row `i`, in order of time."""
        row, intervals, texts = self.records.requests[i], self.intervals, self.records.texts
        before = "elsewhere" if row["num_retries"] or row["router_ns"] else "frontend"
        args = {name.replace("_ns", "_ms"): int(row[name]) / 1e6 for name in ("router_ns", "failover_ns") if row[name]}
        yield before, (int(row["sent_ns"]), int(self.arrival_ns[i])), args
        yield "waiting for the running step", (int(self.arrival_ns[i]), int(self.entered_ns[i])), {}
        reasons = self.queued.get(int(row["request_id"]), {})
        most = max(reasons, key=lambda reason: reasons[reason], default="")
        name = f"queued: {most}" if most else "queued"
        args = {f"{reason}_ms": ms for reason, ms in reasons.items()}
        yield name, (int(self.entered_ns[i]), int(self.until_ns[i])), args
        for k in range(self.first[i], self.first[i + 1]):
            reason, name = texts[intervals.reason[k]], STATE_NAMES[int(intervals.state[k])].replace("_", " ")
            blocker = int(intervals.blocker[k])
            args = {} if blocker == MISSING else {"for_request": blocker}
            yield f"{name}: {reason}" if reason else name, (int(intervals.start_ns[k]), int(intervals.end_ns[k])), args
        if row["outcome"] == FINISHED:
            back_ns = int(row["delivered_ns"]) - self.per_chunk_ns
            yield "response held", (int(row["ended_ns"]), back_ns), {}
            yield "frontend", (back_ns, int(row["delivered_ns"])), {}
        elif self.given_up[i]:
            yield "response held", (int(row["last_token_ns"]), int(row["ended_ns"])), {}


# ---- events


def _seen(name: str, thread: int, span: Window, window: Window, args: dict[str, Any]) -> tuple[Event, ...]:
    """The slice of the engine, cut to the window; nothing where it has no length in there."""
    if span[0] >= span[1] or span[0] >= window[1] or span[1] <= window[0]:
        return ()
    return _slice(name, ENGINE, thread, span, window, args)


def _event(phase: str, pid: int, tid: int, **more: Any) -> Event:
    return {"ph": phase, "pid": pid, "tid": tid, **more}


def _name(kind: str, pid: int, tid: int, name: str) -> Event:
    return _event("M", pid, tid, name=kind, args={"name": name})


def _us(ns: int) -> float:
    """Microseconds of `ns` as a float from which a reader that multiplies by 1000 and truncates gets `ns` again."""
    us = ns / 1000
    return us if int(us * 1000.0) == ns else math.nextafter(us, math.inf)


def _counter(name: str, at_ns: int, values: dict[str, int]) -> Event:
    return _event("C", ENGINE, 0, name=name, ts=_us(at_ns), args=values)


def _slice(name: str, pid: int, tid: int, span: Window, window: Window, args: dict[str, Any]) -> tuple[Event, Event]:
    """Begin and end of a slice, cut to the window; a cut one has its true span as arguments. Nested ones go between."""
    start_ns, end_ns = max(span[0], window[0]), min(span[1], window[1])
    if (start_ns, end_ns) != span:
        args = args | {"from_us": _us(span[0]), "to_us": _us(span[1])}
    begin = _event("B", pid, tid, name=name, ts=_us(start_ns))
    return begin | ({"args": args} if args else {}), _event("E", pid, tid, name=name, ts=_us(end_ns))
