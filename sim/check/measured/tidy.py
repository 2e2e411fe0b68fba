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
from batchsim.check.measured.aggregates import FORM, MODEL, UNIT_S, USERS, figure_of, most_in_flight, runs_of_rows
from batchsim.check.measured.build import Row, check_row, requests_of
from batchsim.check.measured.counts import failure_kind
from batchsim.check.measured.run import MISSING, Client, MeasuredRun
from batchsim.check.measured.values import Node
from batchsim.workload.traces.trace_rows import HashIds, Ints
from batchsim.workload.traces.values import clock_reader

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
        "input_sequence_length",
        "ContextTokens",
    ),
    "output_tokens": (
        "output_tokens",
        "output",
        "output_length",
        "output_len",
        "output_sequence_length",
        "GeneratedTokens",
    ),
    "engine_tokens": ("completion_tokens", "usage_completion_tokens", "server_output_tokens"),
    "status": ("status", "success", "ok"),
    "error": ("error", "error_message"),
    "chunks": ("chunks", "num_chunks"),
    "hash_ids": ("hash_ids",),
    "users": USERS,
    "model": MODEL,
}
"""The columns of a request, each with the names that it goes by; those of times end with a unit besides.
`engine_tokens` are the output tokens by the engine's own count, which is taken before `output_tokens`. `users`, the
same in every row, is the number of users of a closed-loop client."""

_TIMES = ("intended", "sent", "first", "last", "ttft", "e2e")
_GOOD = {"", "ok", "true", "1", "success", "successful", "completed", "200", "finished"}
_SAYS_NOTHING = {"", "ok", "false", "0", "error", "errored", "failed"}
_BAD = {"false", "0", "error", "errored", "failed", "timeout", "cancelled", "canceled", "incomplete", "aborted"}


def is_tidy(names: Sequence[str]) -> bool:
    """Whether columns of these names are of requests or of runs."""
    columns = _columns(names)
    return "prompt_tokens" in columns or any(figure_of(name) for name in names)


def read_tidy(
    rows: list[Node], names: Sequence[str], source: str, hash_ids: list[Node] | None = None
) -> list[MeasuredRun]:
    """The runs of a table with columns `names`, each row an object of `rows`.

    One run of all rows where these are requests, else a run a row. `hash_ids`: of each request, from another file.
    """
    if not rows:
        Node(None, source).bad("has a header and no rows", "Give a table with rows.")
    if any(figure_of(name) for name in names):
        return runs_of_rows(rows, source)
    columns = _columns(names)
    node = Node(None, source)
    for name, others in (("prompt_tokens", {"prompt_tokens"}), ("output_tokens", {"output_tokens", "engine_tokens"})):
        if not others & columns.keys():
            node.bad(f"has no column {name}; it has {', '.join(map(shown, list(names)[:12]))}", _advice(names, name))
    if not {"first", "ttft", "last", "e2e"} & columns.keys():
        node.bad("has no column of a measured time", "Add ttft_s and e2e_s, or first_token_s and last_token_s.")
    if {"first", "last"} & columns.keys() and "sent" not in columns:
        node.bad("has times of tokens, and no time of sending", "Add a column sent_s, or ttft_s and e2e_s.")
    lists = hash_ids
    if lists is None and "hash_ids" in columns:
        lists = [row.of(columns["hash_ids"][0]) for row in rows]
    note = [] if hash_ids is None else ["what its prompts share is told by trace.jsonl beside it"]
    return _runs_of_models(node, rows, columns, lists, note)


def _runs_of_models(
    node: Node, rows: list[Node], columns: Mapping[str, tuple[str, float]], lists: list[Node] | None, notes: list[str]
) -> list[MeasuredRun]:
    """A run for each model of the requests `rows` of which any ended well; `lists`: their hash ids."""
    by_model: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        model = row.value.get(columns["model"][0]) if "model" in columns else ""
        by_model.setdefault(str(model or ""), []).append(number)
    made = {name: [_request(rows[number], columns) for number in model_rows] for name, model_rows in by_model.items()}
    good = {name for name, model_rows in made.items() if any(row.ok for row in model_rows)} or {*by_model}
    notes += [
        f"all {len(model_rows):,} requests of {name} failed: left out"
        for name, model_rows in made.items()
        if name not in good
    ]
    runs: list[MeasuredRun] = []
    for name, model_rows in by_model.items():
        if name in good:
            shared = None if lists is None else _hash_ids([lists[number] for number in model_rows], made[name])
            requests = requests_of(node, made[name], None if shared is None else shared.picked)
            client = _loop_of([rows[number] for number in model_rows]) if "users" in columns else Client()
            part = (name or "no model told") if len(by_model) > 1 else ""
            figures = requests.figures()
            runs.append(
                MeasuredRun(node.where, FORM, "", client, figures, requests, part=part, model=name, notes=tuple(notes))
            )
    return runs


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
    columns: dict[str, tuple[str, float]] = {}
    for column, known in REQUEST.items():
        for name in names:
            stem, _, unit = name.rpartition("_")
            timed = column in _TIMES and stem in known and unit in UNIT_S
            if column not in columns and (timed or name in known):
                columns[column] = (name, UNIT_S[unit] if timed else 0.0)
    return columns


def _advice(names: Sequence[str], column: str) -> str:
    others = [name for name in names if name not in {known for all_ in REQUEST.values() for known in all_}]
    near = nearest(column, others, " ")
    return f"{near} Name it {column}." if near.strip() else f"Add a column {column}."


def _loop_of(rows: list[Node]) -> Client:
    """The closed loop given by a column of USERS; the default client without one. MeasuredError where its rows
    differ."""
    users = most_in_flight(rows[0])
    for row in rows:
        if (other := most_in_flight(row)) != users:
            name = next(name for name in USERS if name in row.value)
            row.bad(f"{name} is {other} after {users} before it", "Give each run a file of its own.")
    return Client() if users is None else Client("closed", max_concurrency=users)


def _request(row: Node, columns: Mapping[str, tuple[str, float]]) -> Row:
    def ns(column: str) -> int | None:
        name, unit_s = columns.get(column, ("", 0.0))
        return row.maybe(name, lambda x: x.ns(unit_s) if unit_s else _date_ns(x, name)) if name else None

    why = _failure(row, columns)
    ok = why is None
    prompt, output, engine = (
        row.maybe(columns[name][0], Node.tokens) if name in columns else None
        for name in ("prompt_tokens", "output_tokens", "engine_tokens")
    )
    sent, first, last = ns("sent"), ns("first"), ns("last")
    begun = 0 if sent is None else sent
    if first is None and (ttft := ns("ttft")) is not None:
        first = begun + ttft
    if last is None and (e2e := ns("e2e")) is not None:
        last = begun + e2e
    if ok:
        for name, value in (("prompt_tokens", prompt), ("output_tokens", output if engine is None else engine)):
            if value is None:
                row.bad(f"{columns.get(name, columns.get('engine_tokens', (name, 0)))[0]} is missing")
        if first is None and last is None:
            row.bad("has no measured time of a request that did not fail", "Say so in a column status.")
    pieces = row.maybe(columns["chunks"][0], lambda x: x.count(low=0)) if "chunks" in columns else None
    times = [MISSING if ns_ is None else ns_ for ns_ in (ns("intended"), sent, first, last)]
    counts = {"counted": MISSING if None in (output, engine) else output or 0, "by_engine": engine is not None}
    tokens = (output if engine is None else engine) or 0
    return check_row(row, Row(prompt or 0, tokens, ok, *times, chunks=pieces or MISSING, **counts, why=why or ""))


def _date_ns(node: Node, name: str) -> int:
    """A date and time as ns since 1970. MeasuredError for a number, whose unit is unknown."""
    if not isinstance(node.value, str):
        node.bad(f"{shown(node.value)} has no unit", f"Name the column {name}_s or {name}_ms.")
    try:
        return clock_reader(name, "iso")(node.value)
    except ValueError as error:
        node.bad(str(error), "Correct it.")


def _failure(row: Node, columns: Mapping[str, tuple[str, float]]) -> str | None:
    """The kind of its failure; None for a request that ended well."""
    text = str(row.value[columns["error"][0]]) if "error" in columns and row.has(columns["error"][0]) else ""
    if "status" not in columns:
        return failure_kind(text) if text else None
    word = str(row.value.get(columns["status"][0]) or "").lower()
    status = re.fullmatch(r"[45]\d\d", word)  # of HTTP
    if not status and word not in _GOOD | _BAD:
        row.bad(f"{columns['status'][0]} is {shown(word)}", "Write ok or error.")
    if word in _GOOD and not text:
        return None
    return failure_kind(text or ("" if word in _SAYS_NOTHING else word))


def _hash_ids(lists: list[Node], rows: list[Row]) -> HashIds:
    """The shared prefixes of the prompts. The tokens per id are inferred from the numbers of ids of the prompts."""
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
            row.prompt_tokens // size <= len(of_prompt) <= -(-row.prompt_tokens // size)
            for of_prompt, row in zip(ids, rows, strict=True)
        )
    ]
    if len(fits) != 1:
        lists[0].bad(
            f"an id could be of {' or '.join(map(str, fits)) or 'no known number of'} tokens"
            f" (known: {', '.join(map(str, _BLOCKS))})",
            "Leave the column hash_ids out.",
        )
    ends: Ints = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    return HashIds.of(fits[0], np.array([one for of_prompt in ids for one in of_prompt], np.int64), ends)
