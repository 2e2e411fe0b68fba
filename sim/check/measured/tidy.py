"""Tables with named columns, as CSV or JSON lines: a row a request, or a row a run with its aggregates.

A column is named by what it is and its unit, `ttft_ms`, `sent_s`; several names are known for each (REQUEST, FIGURE).
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from batchsim.base.errors import nearest, shown
from batchsim.check.measured.build import Row, check_row, requests_of
from batchsim.check.measured.run import LATENCIES, MISSING, OF, Client, MeasuredRun
from batchsim.check.measured.values import Node
from batchsim.workload.traces.trace_rows import HashIds, Ints
from batchsim.workload.traces.values import clock_reader

FORM = "tidy table"
_UNIT_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_BLOCKS = (16, 32, 64, 128, 256, 512)

REQUEST = {
    "intended": ("intended", "intended_at"),
    "sent": (
        "sent",
        "sent_at",
        "arrival",
        "arrival_time",
        "timestamp",
        "TIMESTAMP",
        "start",
        "start_time",
        "request_start",
    ),
    "first": ("first_token", "first_token_at", "first_token_time", "first_token_ts"),
    "last": ("last_token", "last_token_at", "last_token_time", "last_token_ts", "end", "end_time"),
    "ttft": ("ttft", "time_to_first_token"),
    "e2e": ("e2e", "e2el", "latency", "request_latency", "e2e_latency"),
    "prompt_tokens": (
        "prompt_tokens",
        "input_tokens",
        "prompt",
        "input_length",
        "input_len",
        "prompt_len",
        "ContextTokens",
    ),
    "output_tokens": ("output_tokens", "output", "output_length", "output_len", "completion_tokens", "GeneratedTokens"),
    "status": ("status", "success", "ok"),
    "error": ("error", "error_message"),
    "chunks": ("chunks", "num_chunks"),
    "hash_ids": ("hash_ids",),
    "users": ("users",),
}
"""The columns of a request, each with the names that it goes by; those of times end with a unit besides. `users`, the
same in every row, says that the client was a closed loop of so many."""

_TIMES = ("intended", "sent", "first", "last", "ttft", "e2e")
_GOOD = {"", "ok", "true", "1", "success", "successful", "completed", "200", "finished"}
_BAD = {"false", "0", "error", "errored", "failed", "timeout", "cancelled", "canceled", "incomplete", "aborted"}
_RATES = {
    "throughput_rps": ("completed_rps", "throughput_rps", "request_throughput"),
    "output_tokens_per_s": ("output_tokens_per_s", "output_throughput"),
}
_MEANS = {
    "requests": ("requests", "completed", "num_requests"),
    "prompt_tokens": ("prompt_tokens_mean", "prompt_tokens", "input_tokens_mean", "input_tokens"),
    "output_tokens": ("output_tokens_mean", "output_tokens"),
    "sent_rps": ("sent_rps", "requested_rate", "request_rate", "requested_rps"),
}
_NAMES = ("config", "part", "name", "stage", "run")


def is_tidy(names: Sequence[str]) -> bool:
    """Whether columns of these names are of requests or of runs."""
    columns = _columns(names)
    return "prompt_tokens" in columns or any(_figure(name) for name in names)


def read_tidy(
    rows: list[Node], names: Sequence[str], source: str, hash_ids: list[Node] | None = None
) -> list[MeasuredRun]:
    """The runs of a table with columns `names`, each row an object of `rows`.

    One run of all rows where these are requests, else a run a row. `hash_ids`: of each request, from another file.
    """
    if not rows:
        Node(None, source).bad("has a header and no rows", "Give a table with rows.")
    if any(_figure(name) for name in names):
        return [_aggregates(row, source) for row in rows]
    columns = _columns(names)
    node = Node(None, source)
    for name in ("prompt_tokens", "output_tokens"):
        if name not in columns:
            node.bad(f"has no column {name}; it has {', '.join(map(shown, list(names)[:12]))}", _advice(names, name))
    if not {"first", "ttft", "last", "e2e"} & columns.keys():
        node.bad("has no column of a measured time", "Add ttft_s and e2e_s, or first_token_s and last_token_s.")
    if {"first", "last"} & columns.keys() and "sent" not in columns:
        node.bad("has times of tokens, and no time of sending", "Add a column sent_s, or ttft_s and e2e_s.")
    made = [_request(row, columns) for row in rows]
    lists = hash_ids
    if lists is None and "hash_ids" in columns:
        lists = [row.of(columns["hash_ids"][0]) for row in rows]
    shared = None if lists is None else _hash_ids(lists, made)
    requests = requests_of(node, made, None if shared is None else shared.picked)
    notes = () if hash_ids is None else ("what its prompts share is told by trace.jsonl beside it",)
    client = _loop_of(rows) if "users" in columns else Client()
    return [MeasuredRun(source, FORM, "", client, requests.figures(), requests, notes=notes)]


def csv_rows(text: str, source: str) -> tuple[list[Node], list[str]]:
    """The rows of a CSV text as objects of texts, and the names of its columns."""
    reader = csv.reader(io.StringIO(text), strict=True)
    try:
        table = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        Node(None, f"{source}:{reader.line_num}").bad(f"not CSV ({error})")
    if not table:
        Node(None, source).bad("is empty", "Give a file with a measured run.")
    names = [name.strip() for name in table[0][1]]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        Node(None, source).bad(f"has two columns {shown(twice)}")
    for line, row in table[1:]:
        if len(row) != len(names):
            Node(None, f"{source}:{line}").bad(f"{len(row)} fields where the header has {len(names)}")
    rows = [Node(dict(zip(names, map(_value, row), strict=True)), f"{source}:{line}") for line, row in table[1:]]
    return rows, names


def _value(text: str) -> Any:
    """A field of a CSV as JSON has it: a number, a list, None where empty, else the text."""
    text = text.strip()
    if not text:
        return None
    if text[0] == "[":
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?", text, re.ASCII):
        return text
    return int(text) if len(text) < 20 and text.lstrip("+-").isdigit() else float(text)


def _columns(names: Sequence[str]) -> dict[str, tuple[str, float]]:
    """By column of REQUEST the name that it has in the file and the seconds of its unit, 0 where it has none."""
    found: dict[str, tuple[str, float]] = {}
    for column, known in REQUEST.items():
        for name in names:
            stem, _, unit = name.rpartition("_")
            timed = column in _TIMES and stem in known and unit in _UNIT_S
            if column not in found and (timed or name in known):
                found[column] = (name, _UNIT_S[unit] if timed else 0.0)
    return found


def _advice(names: Sequence[str], column: str) -> str:
    others = [name for name in names if name not in {known for all_ in REQUEST.values() for known in all_}]
    near = nearest(column, others, " ")
    return f"{near} Name it {column}." if near.strip() else f"Add a column {column}."


def _loop_of(rows: list[Node]) -> Client:
    """The closed loop that a column `users` tells. MeasuredError where its rows differ."""
    users = rows[0].of("users").count()
    for row in rows:
        if (other := row.of("users").count()) != users:
            row.bad(f"users is {other} after {users} before it", "Give each run a file of its own.")
    return Client("closed", max_concurrency=users)


def _request(row: Node, columns: Mapping[str, tuple[str, float]]) -> Row:
    def ns(column: str) -> int | None:
        name, unit_s = columns.get(column, ("", 0.0))
        return row.maybe(name, lambda x: x.ns(unit_s) if unit_s else _date_ns(x, name)) if name else None

    ok = _ended_well(row, columns)
    tokens = [row.maybe(columns[name][0], Node.tokens) for name in ("prompt_tokens", "output_tokens")]
    sent, first, last = ns("sent"), ns("first"), ns("last")
    begun = 0 if sent is None else sent
    if first is None and (ttft := ns("ttft")) is not None:
        first = begun + ttft
    if last is None and (e2e := ns("e2e")) is not None:
        last = begun + e2e
    if ok:
        for name, value in zip(("prompt_tokens", "output_tokens"), tokens, strict=True):
            if value is None:
                row.bad(f"{columns[name][0]} is missing")
        if first is None and last is None:
            row.bad("has no measured time of a request that did not fail", "Say so in a column status.")
    pieces = row.maybe(columns["chunks"][0], lambda x: x.count(low=0)) if "chunks" in columns else None
    times = [MISSING if ns_ is None else ns_ for ns_ in (ns("intended"), sent, first, last)]
    return check_row(row, Row(tokens[0] or 0, tokens[1] or 0, ok, *times, chunks=pieces or MISSING))


def _date_ns(node: Node, name: str) -> int:
    """A date and time as ns since 1970. MeasuredError for a number, as nobody says in which unit it is."""
    if not isinstance(node.value, str):
        node.bad(f"{shown(node.value)} has no unit", f"Name the column {name}_s or {name}_ms.")
    try:
        return clock_reader(name, "iso")(node.value)
    except ValueError as error:
        node.bad(str(error), "Correct it.")


def _ended_well(row: Node, columns: Mapping[str, tuple[str, float]]) -> bool:
    if "error" in columns and row.has(columns["error"][0]):
        return False
    if "status" not in columns:
        return True
    word = str(row.value.get(columns["status"][0]) or "").lower()
    if re.fullmatch(r"[45]\d\d", word):  # of HTTP
        return False
    if word not in _GOOD | _BAD:
        row.bad(f"{columns['status'][0]} is {shown(word)}", "Write ok or error.")
    return word in _GOOD


def _hash_ids(lists: list[Node], rows: list[Row]) -> HashIds:
    """What the prompts share. The tokens of an id are told by how many ids prompts have."""
    ids: list[list[int]] = []
    for node in lists:
        node.items()
        if not all(type(one) is int and 0 <= one < 2**63 for one in node.value):
            node.bad(f"{shown(node.value)} are no whole numbers from 0 to 2^63 - 1")
        ids.append(node.value)
    fits = [
        size
        for size in _BLOCKS
        if all(
            row.prompt_tokens // size <= len(mine) <= -(-row.prompt_tokens // size)
            for mine, row in zip(ids, rows, strict=True)
        )
    ]
    if len(fits) != 1:
        lists[0].bad(
            f"an id could be of {' or '.join(map(str, fits)) or 'no known number of'} tokens"
            f" (known: {', '.join(map(str, _BLOCKS))})",
            "Leave the column hash_ids out.",
        )
    ends: Ints = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    return HashIds.of(fits[0], np.array([one for mine in ids for one in mine], np.int64), ends)


# ---- aggregates


def _figure(name: str) -> tuple[str, float] | None:
    """The figure that column `name` has, and the seconds of its unit; None for another column."""
    match = re.fullmatch(r"(ttft|tpot|e2e|e2el)_(mean|p50|median|p90|p99)_(s|ms|us|ns)", name)
    match = match or re.fullmatch(r"(ttft|tpot|e2e|e2el)_(mean|p50|median|p90|p99)()", name)  # refused when read
    if match is None:
        return None
    latency, of, unit = match.groups()
    return f"{latency.removesuffix('l')}_{'p50' if of == 'median' else of}_s", _UNIT_S.get(unit, 0.0)


def _aggregates(row: Node, source: str) -> MeasuredRun:
    """The run of one row."""
    found: dict[str, float] = {}
    for name in row.object():
        figure = _figure(name)
        if figure is not None and not figure[1]:
            row.bad(f"{name} has no unit", f"Name the column {name}_s or {name}_ms.")
        if figure is not None and row.has(name):
            found[figure[0]] = row.of(name).number() * figure[1]
    for latency in LATENCIES:
        ordered = [found[f"{latency}_{of}_s"] for of in OF if of != "mean" and f"{latency}_{of}_s" in found]
        if ordered != sorted(ordered):
            row.bad(f"percentiles of {latency} fall: {', '.join(f'{x:g}' for x in ordered)} s")
    means = _known(row, _MEANS)
    for name in ("prompt_tokens", "output_tokens"):
        if name not in means:
            row.bad(f"has no column of {name}", f"Add {name}_mean.")
    found |= _known(row, _RATES)
    words = [
        str(row.value[name]) if name != "stage" else f"stage {row.value[name]}" for name in _NAMES if row.has(name)
    ]
    client = _client(row, means)
    version = row.maybe("image", Node.text) or row.maybe("version", lambda x: str(x.value)) or ""
    return MeasuredRun(source, FORM, version, client, found, None, means, ", ".join(words))


def _known(row: Node, names: Mapping[str, Sequence[str]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, known in names.items():
        column = next((column for column in known if row.has(column)), None)
        if column is not None:
            found[name] = row.of(column).number()
    return found


def _client(row: Node, means: Mapping[str, float]) -> Client:
    most, users = (row.maybe(name, Node.count) for name in ("max_concurrency", "users"))
    if users is not None:
        return Client("closed", max_concurrency=users)
    asked = next((row.of(name).number() for name in _MEANS["sent_rps"][1:] if row.has(name)), means.get("sent_rps"))
    return Client("open" if asked else "unknown", asked or None, poisson=True, max_concurrency=most)
