"""From a trace file to `TraceRows`: recognised, converted, sorted, sliced, with a note on everything that was done."""

from __future__ import annotations

from array import array
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from pathlib import Path

import numpy as np

from batchsim.base.errors import TraceError
from batchsim.base.units import MAX_TIME_NS, NS_PER_S, format_duration
from batchsim.workload.traces.formats import UNUSED, Layout, lay_out
from batchsim.workload.traces.labels import NOT_TOLD, Labels
from batchsim.workload.traces.nested import flattened
from batchsim.workload.traces.outliers import time_outliers
from batchsim.workload.traces.scale import spread
from batchsim.workload.traces.trace_config import TraceConfig
from batchsim.workload.traces.trace_file import TraceSource, open_source, reading, rows
from batchsim.workload.traces.trace_rows import HashIds, Ints, TraceRows, cut_note, cut_tasks, has_tasks
from batchsim.workload.traces.values import UNIT_NS, clock_reader, hash_id_reader, share_reader, token_reader


@dataclass
class _Loaded:
    """The usable rows in file order, 8 bytes a value, and what became of the others."""

    arrival_ns: array[int] = field(default_factory=lambda: array("q"))
    prompt_tokens: array[int] = field(default_factory=lambda: array("q"))
    output_tokens: array[int] = field(default_factory=lambda: array("q"))
    hash_ids: array[int] = field(default_factory=lambda: array("q"))
    hash_starts: array[int] = field(default_factory=lambda: array("q", [0]))
    acceptance: array[float] = field(default_factory=lambda: array("d"))
    labels: Labels = field(default_factory=Labels)
    numbers: array[int] = field(default_factory=lambda: array("q"))  # of the rows in the file
    seen: int = 0
    broken: int = 0
    first_broken: str = ""
    zeros: Counter[str] = field(default_factory=Counter[str])  # rows dropped for a length of 0, by kind
    prefill_only: int = 0


def read_trace(config: TraceConfig, base: Path, seed: int = 0, *, tolerant: bool = False) -> TraceRows:
    """The rows of a trace, sliced, and spread by `jitter` (the only use of `seed`); `rate_scale` is left to `rescale`.

    `base` is the folder of relative paths. A row has at least 1 prompt and 1 output token. TraceError where the file
    is missing, of unknown format or broken, or no row is left. A row a year or more from the others is broken like one
    that cannot be read; for a `tolerant` reader it is a note, as long as times fit 64 bits.
    """
    with reading(base / config.path):
        source = open_source(config, base)
        layout = lay_out(source, config)
        loaded = _load(source, layout, config)
    _check_not_empty(source, config, loaded)
    notes = [f"read as {layout.format}: {layout.reason}", *_load_notes(source, layout, loaded, config)]
    if config.rows is not None and loaded.seen < config.rows[1] - config.rows[0]:
        notes.append(f"rows [{config.rows[0]}, {config.rows[1]}] asked, the file ends after {loaded.seen:,} of them")
    trace = _in_file_order(loaded, layout, config)
    notes += _cut_by_rows(source, layout, config, trace)
    if layout.columns.arrival is None:
        if config.time is not None or config.jitter:
            raise TraceError(f"{source.path}: has no arrival times to slice or to jitter. Drop trace.time and jitter.")
        notes.append("no arrival times: lengths only")
        return replace(trace, arrival_ns=None, notes=(*notes, *_hash_notes(trace)))

    arrival_ns = np.array(loaded.arrival_ns, dtype=np.int64)
    _check_unit(source, layout, arrival_ns)
    order, sort_notes = _time_order(arrival_ns)
    arrival_ns, numbers = arrival_ns[order], np.array(loaded.numbers, dtype=np.int64)[order]
    notes += sort_notes
    near, apart_notes = _near(source, config, arrival_ns, numbers, tolerant)
    trace = trace.picked(order, None).picked(near, None)
    arrival_ns, numbers = arrival_ns[near] - arrival_ns[near][0], numbers[near]
    kept, slice_notes = _time_slice(source, config, arrival_ns)
    arrival_ns = arrival_ns[kept] - arrival_ns[kept.start]
    if config.time is not None:
        apart_notes += _near(source, replace(config, time=None), arrival_ns, numbers[kept], tolerant)[1]
    notes = [*apart_notes, *notes, *slice_notes]
    if layout.unit != "iso":
        notes.append(f"{layout.columns.arrival} taken as {layout.unit}{_rate_text(arrival_ns)}")
    whole, trace = trace, trace.picked(kept, arrival_ns)
    if trace.linked:
        trace = replace(trace, labels={**trace.labels, "recorded": arrival_ns})
    notes += cut_tasks(whole, len(trace), "trace.time", kept.start)
    hash_ids = None if trace.hash_ids is None else trace.hash_ids.compact()
    trace = replace(trace, hash_ids=hash_ids, notes=(*notes, *_hash_notes(trace)))
    return spread(trace, config.jitter, seed) if config.jitter else trace


def _in_file_order(loaded: _Loaded, layout: Layout, config: TraceConfig) -> TraceRows:
    """The rows as columns, without times and notes."""
    hash_ids, tokens = None, layout.hash_block_tokens
    if tokens is not None:
        hash_ids = HashIds.of(tokens, np.array(loaded.hash_ids, np.int64), np.array(loaded.hash_starts, np.int64))
    prompt, output = np.array(loaded.prompt_tokens, np.int64), np.array(loaded.output_tokens, np.int64)
    acceptance = None if layout.columns.acceptance is None else np.array(loaded.acceptance, np.float64)
    trace = TraceRows(None, prompt, output, config.path, layout.format, hash_ids=hash_ids, acceptance=acceptance)
    labels = loaded.labels.columns()
    if "task" in labels and not has_tasks(labels["task"], several=layout.flatten is not None):
        del labels["task"]
    return replace(trace, labels=labels, texts=loaded.labels.texts())


def _cut_by_rows(source: TraceSource, layout: Layout, config: TraceConfig, trace: TraceRows) -> list[str]:
    """A note on the tasks of which `trace.rows` leaves out some rows, found in another reading of the file."""
    if config.rows is None or layout.columns.task is None or "task" not in trace.labels:
        return []
    kept = {trace.texts["task"][code] for code in np.unique(trace.labels["task"]).tolist() if code != NOT_TOLD}
    left_out: set[str] = set()
    with reading(source.path):
        lines, decode = rows(source, [layout.columns.prompt, layout.columns.task])
        if layout.flatten is not None:
            lines = flattened(lines, layout.flatten())
        for index, (_, raw) in enumerate(lines):
            if config.rows[0] <= index < config.rows[1]:
                continue
            with suppress(ValueError):  # a row that cannot be read has no task, and need not have one
                left_out.add(str(decode(raw)[1]).strip())
    return cut_note(len(kept & left_out), "trace.rows")


def _hash_notes(trace: TraceRows) -> list[str]:
    """A note on how much of their prompts the rows share, where the trace has hash ids."""
    if trace.hash_ids is None:
        return []
    return [
        f"prompts share beginnings by hash_ids, in units of {trace.hash_ids.block_tokens} tokens:"
        f" {100 * trace.hash_ids.reused_share:.1f} % of the units stand in an earlier row; answers have no ids, so what"
        " a model generated is found in no later prompt"
    ]


def _load(source: TraceSource, layout: Layout, config: TraceConfig) -> _Loaded:
    columns = layout.columns
    names = [columns.prompt, columns.output] + ([columns.arrival] if columns.arrival is not None else [])
    block_tokens = layout.hash_block_tokens
    read_ids = None if columns.hash_ids is None else hash_id_reader(columns.hash_ids, block_tokens or 0)
    names += [name for name in (columns.acceptance, columns.hash_ids) if name is not None]
    first_label = len(names)
    names += columns.labels.values()
    read_acceptance = None if columns.acceptance is None else share_reader(columns.acceptance)
    at_hash_ids = first_label - 1
    at_acceptance = 2 + (columns.arrival is not None)
    read_prompt, read_output = token_reader(columns.prompt), token_reader(columns.output)
    # Where the unit is not known yet, ms will do: the rows are only read for the error that shows the rates.
    read_clock = clock_reader(columns.arrival, layout.unit or "ms") if columns.arrival is not None else None
    loaded = _Loaded(labels=Labels.of(columns, config, layout.duration_unit))
    lines, decode = rows(source, names)
    if layout.flatten is not None:
        lines = flattened(lines, layout.flatten(), as_recorded=config.replay == "as_recorded")
    start, stop = config.rows if config.rows is not None else (0, None)
    for number, raw in islice(lines, start, stop):
        loaded.seen += 1
        try:
            values = decode(raw)
            prompt, output = read_prompt(values[0]), read_output(values[1])
            arrival = read_clock(values[2]) if read_clock is not None else 0
            ids = read_ids(values[at_hash_ids], prompt) if read_ids is not None else ()
            acceptance = None if read_acceptance is None else read_acceptance(values[at_acceptance])
            labels = loaded.labels.read(values[first_label:])
        except ValueError as error:
            _note_broken(loaded, f"{source.where(number)}: {error}", config)
            continue
        if labels is None:
            continue
        if prompt == 0 or output == 0:
            if config.zero_lengths == "error":
                raise TraceError(
                    f"{source.where(number)}: {prompt} prompt and {output} output tokens. Write zero_lengths: drop, or"
                    " prefill_only where only the output is 0."
                )
            if config.zero_lengths == "drop" or prompt == 0:
                loaded.zeros[_zero_kind(prompt, output, layout) + loaded.labels.failure(labels)] += 1
                continue
            loaded.prefill_only += 1
            output = 1
        loaded.prompt_tokens.append(prompt)
        loaded.output_tokens.append(output)
        loaded.numbers.append(number)
        loaded.labels.keep(labels)
        if read_clock is not None:
            loaded.arrival_ns.append(arrival)
        if acceptance is not None:
            loaded.acceptance.append(acceptance)
        if read_ids is not None:
            loaded.hash_ids.extend(ids)
            loaded.hash_starts.append(len(loaded.hash_ids))
    return loaded


def _zero_kind(prompt: int, output: int, layout: Layout) -> str:
    kind = "0 prompt and 0 output tokens" if prompt == output else f"0 {'output' if prompt else 'prompt'} tokens"
    return f"{kind} (failed)" if layout.format == "burstgpt" and not output else kind


def _zeros_text(zeros: Counter[str]) -> str:
    """How many rows of each kind were dropped for a length of 0."""
    return ", ".join(f"{count:,} with {kind}" for kind, count in sorted(zeros.items())) or "0 with 0 tokens"


def _note_broken(loaded: _Loaded, message: str, config: TraceConfig) -> None:
    if config.on_broken == "error":
        raise TraceError(f"{message}. Correct it, or write on_broken: drop.")
    loaded.broken += 1
    loaded.first_broken = loaded.first_broken or message


def _check_not_empty(source: TraceSource, config: TraceConfig, loaded: _Loaded) -> None:
    if loaded.prompt_tokens:
        return
    if loaded.seen == 0 and config.rows is not None:
        raise TraceError(
            f"{source.path}: no row from row {config.rows[0]:,} on, the file is shorter. Lower trace.rows."
        )
    if loaded.seen == 0:
        raise TraceError(f"{source.path}: a header and no rows. A trace needs at least one row.")
    first = f", the first {loaded.first_broken}" if loaded.broken else ""
    failed = f"{loaded.labels.failed.total():,} failed, " if loaded.labels.failed else ""
    raise TraceError(
        f"{source.path}: no usable row of {loaded.seen:,}: {_zeros_text(loaded.zeros)},"
        f" {failed}{loaded.broken:,} broken{first}. Correct the file or trace.columns."
    )


def _load_notes(source: TraceSource, layout: Layout, loaded: _Loaded, config: TraceConfig) -> list[str]:
    notes = []
    if loaded.broken:
        notes.append(f"{loaded.broken:,} of {loaded.seen:,} rows dropped as broken, the first {loaded.first_broken}")
    if loaded.zeros:
        notes.append(f"{loaded.zeros.total():,} of {loaded.seen:,} rows dropped: {_zeros_text(loaded.zeros)}")
    if loaded.prefill_only:
        notes.append(f"{loaded.prefill_only:,} of {loaded.seen:,} rows with 0 output tokens given 1 (prefill only)")
    notes += loaded.labels.notes(loaded.seen)
    columns = layout.columns
    used = {getattr(columns, each.name) for each in fields(columns)}
    if layout.flatten is not None and config.replay != "as_recorded":
        used.add("session_id")  # which nested forms read as their session
    notes += [f"{name} not used: {what}" for name, what in UNUSED.items() if name in source.names and name not in used]
    return notes


def _check_unit(source: TraceSource, layout: Layout, arrival_ns: Ints) -> None:
    """TraceError where the unit of the times is unknown; its text has the load that either unit would mean."""
    arrival = layout.columns.arrival
    if layout.whole_units and layout.unit in UNIT_NS and np.any(arrival_ns % UNIT_NS[layout.unit]):
        raise TraceError(
            f"{source.path}: {arrival} looks like {layout.unit} from the first row, but not all are integers. Write"
            " time_unit: ms or s."
        )
    if not layout.ambiguous:
        return
    span_ns = int(arrival_ns.max() - arrival_ns.min())
    rates = ""
    if span_ns:
        rate_rps = (len(arrival_ns) - 1) * NS_PER_S / span_ns
        rates = f": ms would mean {rate_rps:.4g} requests/s, s {rate_rps / 1000:.4g}"
    raise TraceError(
        f"{source.path}: the unit of {arrival} cannot be told{rates}. Write time_unit: ms or s, or format: mooncake"
        " (ms) or guidellm (s)."
    )


def _near(
    source: TraceSource, config: TraceConfig, arrival_ns: Ints, numbers: Ints, tolerant: bool
) -> tuple[slice, list[str]]:
    """The rows less than a year from each other, or all rows where `trace.time` may cut the others off; and notes."""
    whole = slice(0, len(arrival_ns))
    outliers = time_outliers(arrival_ns, numbers)
    if outliers is None:
        return whole, []
    complaint = f"{source.where(int(numbers[outliers.first]))}: {outliers}"
    if config.on_broken == "drop":
        return outliers.keep, [f"{outliers.count:,} of {len(numbers):,} rows dropped for their times: {complaint}"]
    fits = int(arrival_ns[-1]) - int(arrival_ns[0]) < MAX_TIME_NS
    if fits and config.time is not None:
        return whole, []
    if fits and tolerant:
        return whole, [f"{complaint}. A run asks to correct it, or for on_broken: drop"]
    raise TraceError(f"{complaint}. Correct it, or write trace.on_broken: drop, which leaves such rows out.")


def _time_order(arrival_ns: Ints) -> tuple[Ints | slice, list[str]]:
    """The indices that sort the rows by time, stably, and notes on rows out of order and on equal times."""
    notes = []
    order: Ints | slice = slice(None)
    backward = int(np.count_nonzero(arrival_ns[1:] < arrival_ns[:-1]))
    if backward:
        order = np.argsort(arrival_ns, kind="stable")
        arrival_ns = arrival_ns[order]
        notes.append(f"not in time order ({backward:,} steps back): sorted, equal times in file order")
    equal = int(np.count_nonzero(arrival_ns[1:] == arrival_ns[:-1]))
    if equal:
        notes.append(
            f"{equal:,} of {len(arrival_ns):,} rows arrive at the same time as the row before, kept in file order"
        )
    return order, notes


def _time_slice(source: TraceSource, config: TraceConfig, arrival_ns: Ints) -> tuple[slice, list[str]]:
    """The rows inside `config.time`, and a note on its span."""
    if config.time is None:
        return slice(0, len(arrival_ns)), []
    start_ns, stop_ns = config.time
    asked = f"time [{format_duration(start_ns)}, {format_duration(stop_ns)}]"
    first, last = (int(index) for index in np.searchsorted(arrival_ns, [start_ns, stop_ns]))
    span = format_duration(int(arrival_ns[-1]))
    if first == last:
        raise TraceError(f"{source.path}: no row in {asked}; the trace lasts {span}. Widen trace.time.")
    ended = f"; the trace lasts {span} only" if stop_ns > arrival_ns[-1] else ""
    return slice(first, last), [f"{asked}: {last - first:,} of {len(arrival_ns):,} rows{ended}"]


def _rate_text(arrival_ns: Ints) -> str:
    span_ns = int(arrival_ns[-1])
    return f": {(len(arrival_ns) - 1) * NS_PER_S / span_ns:.4g} requests/s on average" if span_ns else ""
