"""The trace formats read, those known but not readable, and how a file is recognised by its columns.

Source: the column names and units of each tool's own documentation and code, 2023 to 2026.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from batchsim.base.errors import TraceError
from batchsim.workload.traces import nested
from batchsim.workload.traces.nested import Flatten
from batchsim.workload.traces.trace_config import WAITS, Columns, TimeUnit, TraceConfig
from batchsim.workload.traces.trace_file import TraceSource
from batchsim.workload.traces.weka import is_weka


@dataclass(frozen=True)
class Layout:
    """How a file is read: format, columns, unit of its times, and why (the reason is part of the notes).

    `unit` is None where there are no times, or where nothing says their unit (`ambiguous`). `whole_units`: the unit was
    inferred from a time that is an integer, so all of them have to be. `hash_block_tokens` is how many tokens each
    id in `columns.hash_ids` stands for; None: no ids are read. `duration_unit` is that of the columns of durations.
    `flatten` makes what turns a record of the file into rows with `columns`; None: a record is a row.
    """

    format: str
    columns: Columns
    unit: TimeUnit | None
    reason: str
    whole_units: bool = False
    hash_block_tokens: int | None = None
    duration_unit: str | None = None
    flatten: Callable[[], Flatten] | None = None

    @property
    def ambiguous(self) -> bool:
        return self.unit is None and self.columns.arrival is not None


# Mooncake and aiperf write milliseconds, guidellm seconds, under the same names.
_TIMESTAMP_FAMILY = Columns(arrival="timestamp", prompt="input_length", output="output_length")

_MOONCAKE_BLOCK_TOKENS = 512  # the Mooncake paper's blocks, which guidellm and aiperf kept


@dataclass(frozen=True)
class _Format:
    """The columns of a format and the unit of its times. `hash_block_tokens`: the tokens that an id of its column
    `hash_ids` stands for; None: it has no such column."""

    columns: Columns
    unit: TimeUnit
    hash_block_tokens: int | None = None


# A file is of the first format whose three columns it has, except formats that share their names.
_FORMATS: dict[str, _Format] = {
    "azure": _Format(Columns(arrival="TIMESTAMP", prompt="ContextTokens", output="GeneratedTokens"), "iso"),
    "burstgpt": _Format(Columns(arrival="Timestamp", prompt="Request tokens", output="Response tokens"), "s"),
    "vidur": _Format(Columns(arrival="arrived_at", prompt="num_prefill_tokens", output="num_decode_tokens"), "s"),
    "mooncake": _Format(_TIMESTAMP_FAMILY, "ms", _MOONCAKE_BLOCK_TOKENS),
    "guidellm": _Format(_TIMESTAMP_FAMILY, "s", _MOONCAKE_BLOCK_TOKENS),
    "qwen": _Format(_TIMESTAMP_FAMILY, "s", 16),  # Qwen-Bailian's README
}

# What rows of a format wait for: a chat names the one it goes on with; a session's turns follow each other.
_WAITS: dict[str, dict[str, str]] = {
    "qwen": {"id": "chat_id", "parent": "parent_chat_id"},
    "burstgpt": {"session": "Session ID", "e2e": "Elapsed time"},
}

# Columns that carry meaning, are not used, and are worth a note.
UNUSED = {
    "hash_ids": "prompts are taken as sharing nothing",
    "session_id": "turns of a session are taken as independent requests",
    "Session ID": "turns of a session are taken as independent requests",
    "chat_id": "turns of a chat are taken as independent requests",
    "NumImages": "the cost of images is taken to be in ContextTokens",
}


def _mapping_advice(arrival: str, prompt: str, output: str, unit: str) -> str:
    return (
        f"Read it by mapping: columns: {{arrival: {arrival}, prompt: {prompt}, output: {output}}}, time_unit: {unit}."
    )


_TEXTS = "It holds texts: count their tokens first and write prompt and output lengths as columns."
_HASHES = "It tells no output lengths, so nothing says how long an answer takes: add output_length to its rows."
_RATES = "It holds rates, not requests: write arrivals: {kind: gamma, ...} with its rate and CV instead."

# Known formats without a reader: name, the columns that tell them, and what to do instead.
_KNOWN: tuple[tuple[str, set[str], str], ...] = (
    (
        "LLMServingSim",
        {"arrival_time_ns", "input_toks", "output_toks"},
        _mapping_advice("arrival_time_ns", "input_toks", "output_toks", "ns"),
    ),
    (
        "BLIS TraceV2",
        {"arrival_time_us", "input_tokens", "output_tokens"},
        _mapping_advice("arrival_time_us", "input_tokens", "output_tokens", "us"),
    ),
    (
        "splitwise-sim",
        {"arrival_timestamp", "prompt_size", "token_size"},
        _mapping_advice("arrival_timestamp", "prompt_size", "token_size", "s"),
    ),
    ("ShareGPT", {"conversations"}, _TEXTS),
    ("ShareGPT", {"conversation"}, _TEXTS),
)


def lay_out(source: TraceSource, config: TraceConfig) -> Layout:
    """How `source` is to be read under `config`. TraceError where its format is unknown, or a column is missing."""
    if config.columns is not None:
        layout = Layout("mapping", config.columns, config.time_unit, "columns given")
    elif config.format == "auto":
        layout = _recognised(source, config)
    else:
        columns, unit = _FORMATS[config.format].columns, _FORMATS[config.format].unit
        if config.format == "vidur" and "arrived_at" not in source.names:
            columns, unit = Columns(prompt=columns.prompt, output=columns.output), None
        layout = Layout(config.format, columns, _unit(source, config, config.format, unit), "format given")
    layout = _with_waits(source, config, layout)
    layout = _with_hash_ids(source, config, layout)
    _check_names(source, layout)
    return layout


def _with_waits(source: TraceSource, config: TraceConfig, layout: Layout) -> Layout:
    """`layout` with the columns that say what waits for what, where its format has them and they are to be used."""
    columns = layout.columns
    if config.replay == "as_recorded":
        return replace(layout, columns=replace(columns, **dict.fromkeys(WAITS)))
    waits, names = _WAITS.get(layout.format, {}), set(source.names)
    if config.columns is not None or not waits or not set(waits.values()) <= names or layout.columns.arrival is None:
        return layout
    return replace(layout, columns=replace(columns, **waits), duration_unit="s")


def _with_hash_ids(source: TraceSource, config: TraceConfig, layout: Layout) -> Layout:
    """`layout` with the column of hash_ids, where the trace has one and it is not to be ignored."""
    columns, size = layout.columns, config.hash_id_block_size
    if config.prefix == "ignore":
        return replace(layout, columns=replace(columns, hash_ids=None))
    if columns.hash_ids is not None:
        return replace(layout, hash_block_tokens=size or layout.hash_block_tokens)
    format_ = _FORMATS.get("mooncake" if layout.format == "timestamp" else layout.format)
    usual = None if format_ is None else format_.hash_block_tokens
    if config.columns is None and usual is not None and "hash_ids" in source.names:
        return replace(layout, columns=replace(columns, hash_ids="hash_ids"), hash_block_tokens=size or usual)
    if config.prefix == "hash_ids" or size is not None:
        raise TraceError(
            f"{source.path}: has no hash_ids that format {layout.format} knows; it has {source.listing()}. Name the"
            " column by columns.hash_ids, or write prefix: ignore."
        )
    return layout


def _check_names(source: TraceSource, layout: Layout) -> None:
    if source.container not in ("CSV", "Parquet"):
        return  # JSON objects differ line by line; a missing key is reported with its line
    columns = layout.columns
    if layout.flatten is not None:
        return
    for name in (columns.arrival, *(getattr(columns, each.name) for each in fields(columns))):
        if name is not None and name not in source.names:
            asked = "" if layout.format == "mapping" else f", which format {layout.format} needs"
            raise TraceError(f"{source.path}: no column {name!r}{asked}; it has {source.listing()}. Name one of these.")
        if name is not None and source.names.count(name) > 1:
            raise TraceError(f"{source.path}: column {name!r} stands there twice. Rename one.")


def _unit(source: TraceSource, config: TraceConfig, name: str, unit: TimeUnit | None) -> TimeUnit | None:
    """The unit of a format's times; the user's word counts where formats share column names, else it must agree."""
    asked = config.time_unit
    if asked is None or asked == unit:
        return unit
    if unit is None:
        raise TraceError(f"{source.path}: time_unit {asked} is given, the file has no times. Drop time_unit.")
    if _FORMATS[name].columns != _TIMESTAMP_FAMILY or name == "qwen":
        raise TraceError(f"{source.path}: times of format {name} are {unit}, not {asked}. Drop time_unit.")
    return asked


def _recognised(source: TraceSource, config: TraceConfig) -> Layout:
    names = set(source.names)
    listed = f"{source.container} with the columns"
    for name, format_ in _FORMATS.items():
        columns, unit = format_.columns, format_.unit
        if columns == _TIMESTAMP_FAMILY:  # several formats have these names
            continue
        if {columns.prompt, columns.output} <= names and columns.arrival in names:
            reason = f"{listed} {columns.arrival}, {columns.prompt}, {columns.output}"
            return Layout(name, columns, _unit(source, config, name, unit), reason)
    columns = _FORMATS["vidur"].columns
    if {columns.prompt, columns.output} <= names:
        reason = f"{listed} {columns.prompt}, {columns.output} and no arrived_at"
        lengths = Columns(prompt=columns.prompt, output=columns.output)
        return Layout("vidur", lengths, _unit(source, config, "vidur", None), reason)
    if (form := _nested_form(source, names)) is not None and config.time_unit in (None, "ns"):
        reason, size = f"{listed} {form.told_by}", form.block_tokens
        return Layout(form.name, form.columns, "ns", reason, False, size, duration_unit="ns", flatten=form.flatten)
    if {"request_id", "input_length", "output_length", "duration"} <= names and "timestamp" not in names:
        reason = f"{listed} request_id, input_length, output_length, duration; a batch job, which has no arrivals"
        return Layout("ServeGen offline", Columns(prompt="input_length", output="output_length"), None, reason)
    _refuse_known(source)
    if {"chat_id", "parent_chat_id", "timestamp", "input_length"} <= names:
        unit = _unit(source, config, "qwen", "s")
        return Layout("qwen", _TIMESTAMP_FAMILY, unit, f"{listed} chat_id, parent_chat_id, input_length")
    if {"timestamp", "input_length"} <= names:
        return _timestamp_family(source, config)
    raise _unknown(source)


def _nested_form(source: TraceSource, names: set[str]) -> nested.Form | None:
    try:
        return nested.form_of(source.first, names) if source.container.startswith("JSON") else None
    except ValueError as error:
        raise TraceError(f"{source.path}: {error}. Correct its first record.") from None


def _timestamp_family(source: TraceSource, config: TraceConfig) -> Layout:
    """Mooncake or guidellm: the names are the same, the units differ by 1000. Integers with hash_ids are Mooncake."""
    columns = _TIMESTAMP_FAMILY
    if config.time_unit is not None:
        name = {"ms": "mooncake", "s": "guidellm"}.get(config.time_unit, "timestamp")
        return Layout(name, columns, config.time_unit, f"timestamp in {config.time_unit} as stated")
    if "hash_ids" in source.first and type(source.first["timestamp"]) is int:
        return Layout("mooncake", columns, "ms", "integer timestamp beside hash_ids", whole_units=True)
    return Layout("timestamp", columns, None, "timestamp, input_length")


def _refuse_known(source: TraceSource) -> None:
    """TraceError if `source` is of a known format that holds no requests with lengths, or needs a mapping."""
    names, first = set(source.names), source.first
    known = next(((name, advice) for name, needed, advice in _KNOWN if needed <= names), None)
    if is_weka(first):
        known = ("WEKA in another unit", "Its times are seconds: drop time_unit.")
    elif {"request_id", "input_length", "hash_ids"} <= names and not {"timestamp", "output_length"} & names:
        known = ("a content-hash trace of ServeGen", _HASHES)
    elif isinstance(first.get("prompt"), str):
        known = ("a vLLM custom data set", _TEXTS)
    elif "text_input" in names and "input_length" not in names:
        known = ("aiperf with prompts as text", _TEXTS)
    elif source.container == "CSV" and len(source.names) == 6 and source.names[3] in ("", "Gamma", "Weibull"):
        known = ("a ServeGen client", _RATES)
    if known is not None:
        raise TraceError(f"{source.path}: looks like {known[0]}, which has no reader. {known[1]}")


def _unknown(source: TraceSource) -> TraceError:
    if not source.names:
        return TraceError(
            f"{source.path}: the first record is not a JSON object, so the format cannot be told. Correct it, or state"
            " format, or columns."
        )
    if source.container == "CSV" and (complaint := _no_table_of_ours(source.names)):
        return TraceError(f"{source.path}: {complaint}")
    return TraceError(
        f"{source.path}: no known format: {source.container} with the columns {source.listing()}. Write columns:"
        " {arrival: ..., prompt: ..., output: ...} and time_unit, to a command"
        " --columns arrival=...,prompt=...,output=... and --time-unit."
    )


def _no_table_of_ours(names: tuple[str, ...]) -> str:
    """What a text of which the first line has the fields `names` is instead of CSV, and what to do; "" where it may be
    CSV."""
    head = names[0].lower()
    if head.startswith(("<!doctype", "<html")):
        return "an HTML page, as servers send in place of a file that they refuse. Fetch the file itself."
    if head.startswith("version https://git-lfs"):
        return "a Git LFS pointer, not the file that it stands for. Fetch that: git lfs pull."
    for separator, name in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if len(names) == 1 and separator in names[0]:
            return f"its fields stand apart by {name}. Write it as CSV, with commas."
    if all(name.replace(".", "", 1).isdecimal() for name in names):
        return "the first line has numbers where the names of the columns should stand. Write a header above it."
    return ""
