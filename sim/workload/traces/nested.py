"""Logs of which a record is no row: sessions with their calls, spans with attributes, later turns without a time.

Source: the field names of aiperf's and LLMServingSim's own loaders, of OpenTelemetry's semantic conventions for
generative AI with OTLP's JSON, and of LiteLLM's request log; of WEKA's see `weka.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from batchsim.base.ranges import INT32_MAX
from batchsim.workload.traces import weka
from batchsim.workload.traces.trace_config import Columns
from batchsim.workload.traces.trace_file import Row, record_of
from batchsim.workload.traces.values import clock_reader, shown, token_reader

FLAT = Columns(
    arrival="arrival_ns",
    prompt="prompt_tokens",
    output="output_tokens",
    session="session",
    delay="delay_ns",
    status="status",
    ttft="ttft_ns",
    e2e="e2e_ns",
    task="task",
)
"""The columns of rows that `Flatten` makes; times in ns."""

Flat = dict[str, object]
Flatten = Callable[[Mapping[str, Any]], Iterator[Flat]]
_INPUT, _OUTPUT = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"


@dataclass(frozen=True)
class Form:
    """A nested form: its name, its distinguishing keys (`told_by`), and what makes its `Flatten`, anew for every
    reading of a file.

    `columns` are those of its rows, with times in ns; `block_tokens` the tokens of a hash id, None where it has none.
    """

    name: str
    told_by: str
    flatten: Callable[[], Flatten]
    columns: Columns = FLAT
    block_tokens: int | None = None


def form_of(first: Mapping[str, object], names: set[str]) -> Form | None:
    """The form of a file whose first record is `first`; None for records that are rows. ValueError where it lacks what
    its form needs."""
    if "arrival_time_ns" in names and ("sub_requests" in names or {"input_toks", "output_toks"} <= names):
        return Form("LLMServingSim", "arrival_time_ns, sub_requests or input_toks", lambda: _llm_serving_sim)
    if (
        {"session_id", "input_length"} <= names
        and "hash_ids" not in names
        and ("timestamp" in names or "delay" in names)
    ):
        return Form("aiperf", "session_id, input_length; times in ms, input_length without earlier turns", _Aiperf)
    if "resourceSpans" in names or {"startTimeUnixNano", "attributes"} <= names:
        return Form("OpenTelemetry", "gen_ai spans", lambda: _spans)
    if {"startTime", "endTime", "prompt_tokens", "completion_tokens"} <= names:
        return Form("LiteLLM", "startTime, endTime, prompt_tokens, completion_tokens", _LiteLlm)
    if weka.is_weka(first):
        size = first.get("block_size")
        if type(size) is not int or not 0 < size <= INT32_MAX:
            raise ValueError(f"block_size {shown(size)} is no number of tokens")
        reason = "requests with t, in, out; seconds, each conversation from 0, since nothing tells when it began"
        return Form("WEKA", reason, lambda: weka.Weka(size), weka.COLUMNS, size)
    return None


def flattened(lines: Iterable[Row], flatten: Flatten, *, as_recorded: bool = False) -> Iterator[Row]:
    """The rows of records; a record that cannot be read stays as its error, for the reader to report with its place.

    With `as_recorded` so does one with a row without a time of its own, which came after an answer.
    """
    for number, raw in lines:
        try:
            rows = list(flatten(record_of(raw)))
            if as_recorded and not all(row.get("timed", True) for row in rows):
                raise ValueError(
                    "its time is told by the answer before it alone; it has none as_recorded, so leave trace.replay out"
                )
        except ValueError as error:
            yield number, error
            continue
        for row in rows:
            yield number, row


def _flat(arrival_ns: int, prompt: object, output: object, session: object = None, **more: object) -> Flat:
    row: Flat = {"arrival_ns": arrival_ns, "prompt_tokens": prompt, "output_tokens": output, "session": session}
    row |= {"delay_ns": None, "status": None, "ttft_ns": None, "e2e_ns": None, "task": None}
    return row | more


def _needed(record: Mapping[str, Any], name: str) -> Any:
    if name not in record:
        raise ValueError(f"{name} is missing")
    return record[name]


def _llm_serving_sim(record: Mapping[str, Any]) -> Iterator[Flat]:
    """The calls of a session, which is an agent's task, each its tool's time after the answer before; or a request of
    its own."""
    start_ns = clock_reader("arrival_time_ns", "ns")(_needed(record, "arrival_time_ns"))
    if "sub_requests" not in record:
        yield _flat(start_ns, _needed(record, "input_toks"), _needed(record, "output_toks"))
        return
    calls, delay = record["sub_requests"], None
    if not isinstance(calls, list) or not all(isinstance(each, dict) for each in calls):
        raise ValueError(f"sub_requests {shown(calls)} is no list of calls")
    for call in calls:
        session = _needed(record, "session_id")
        lengths = _needed(call, "input_toks"), _needed(call, "output_toks")
        yield _flat(start_ns, *lengths, session, delay_ns=delay, task=session, timed=delay is None)
        delay = call.get("tool_duration_ns", 0)


class _Aiperf:
    """Turns of sessions, line by line: each adds its text to the turns and answers before it."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[int, int]] = {}  # by session: arrival in ns and tokens so far
        self._clock, self._delay = clock_reader("timestamp", "ms"), clock_reader("delay", "ms")
        self._input, self._output = token_reader("input_length"), token_reader("output_length")

    def __call__(self, record: Mapping[str, Any]) -> Iterator[Flat]:
        if "text_input" in record and "input_length" not in record:
            raise ValueError("gives its prompt as text (text_input), not as a number of tokens")
        own, output = self._input(_needed(record, "input_length")), self._output(_needed(record, "output_length"))
        session = record.get("session_id")
        before = self._before.get(str(session)) if session is not None else None
        arrival_ns, tokens = (0, 0) if before is None else before
        delay_ns = None if record.get("delay") is None or before is None else self._delay(record["delay"])
        if record.get("timestamp") is not None:
            arrival_ns = self._clock(record["timestamp"])
        elif delay_ns is None:
            raise ValueError("timestamp is missing, and it is no later turn of a session with a delay")
        if session is not None:
            self._before[str(session)] = arrival_ns, tokens + own + output
        timed = record.get("timestamp") is not None
        yield _flat(arrival_ns, tokens + own, output, session, delay_ns=delay_ns, timed=timed)


def _spans(record: Mapping[str, Any]) -> Iterator[Flat]:
    """The spans of a record that generate tokens; others are no requests. A trace of several such is a task."""
    if "resourceSpans" not in record:
        yield from _span(record)
        return
    for resource in _items(record, "resourceSpans"):
        for scope in _items(resource, "scopeSpans"):
            for span in _items(scope, "spans"):
                yield from _span(span)


def _items(record: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    items = _needed(record, name)
    if not isinstance(items, list) or not all(isinstance(each, dict) for each in items):
        raise ValueError(f"{name} {shown(items)} is no list of objects")
    return items


def _span(span: Mapping[str, Any]) -> Iterator[Flat]:
    attributes = span.get("attributes") or {}
    if isinstance(attributes, list):
        pairs = {str(each.get("key")): each.get("value") for each in _items(span, "attributes")}
        attributes = {key: next(iter(value.values()), None) for key, value in pairs.items() if isinstance(value, dict)}
    if not isinstance(attributes, dict):
        raise ValueError(f"attributes {shown(attributes)} are no attributes")
    if _INPUT not in attributes:
        return
    start, end = (clock_reader(name, "ns")(_needed(span, name)) for name in ("startTimeUnixNano", "endTimeUnixNano"))
    if end < start:
        raise ValueError(f"endTimeUnixNano {end} is before startTimeUnixNano {start}")
    status = span.get("status")
    code = status.get("code") if isinstance(status, dict) else None
    failed = code in (2, "2", "ERROR", "STATUS_CODE_ERROR")
    session = attributes.get("gen_ai.conversation.id")
    output = attributes.get(_OUTPUT, 0)
    labels: Flat = {"e2e_ns": end - start, "status": "error" if failed else "ok", "task": span.get("traceId")}
    yield _flat(start, attributes[_INPUT], output, session, **labels)


class _LiteLlm:
    """Requests with the times of their beginning, first token and end as dates."""

    def __init__(self) -> None:
        names = ("startTime", "completionStartTime", "endTime")
        self._start, self._first, self._end = (clock_reader(name, "iso") for name in names)

    def __call__(self, record: Mapping[str, Any]) -> Iterator[Flat]:
        start, end = self._start(_needed(record, "startTime")), self._end(_needed(record, "endTime"))
        first = record.get("completionStartTime")
        if end < start:
            raise ValueError("endTime is before startTime")
        yield _flat(
            start,
            _needed(record, "prompt_tokens"),
            _needed(record, "completion_tokens"),
            record.get("session_id"),
            status=record.get("status"),
            e2e_ns=end - start,
            ttft_ns=None if first is None else max(self._first(first) - start, 0),
        )
