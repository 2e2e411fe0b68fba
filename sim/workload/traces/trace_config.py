"""How a scenario names a trace and what it wants done with it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from batchsim.base.plain import LEFT_OUT
from batchsim.base.ranges import Config, Factor, NonNegativeInt, PositiveInt, Range, check_ranges
from batchsim.base.units import Duration, TraceDuration

TimeUnit = Literal["ns", "us", "ms", "s", "iso"]
FormatName = Literal["auto", "azure", "mooncake", "burstgpt", "vidur", "guidellm", "qwen", "mapping"]

WAITS = ("session", "turn", "id", "parent", "delay")
"""Those of LABELS that say what a row waits for, and how long after the answer it is sent."""
LABELS = (
    *("request_class", "priority", "tenant", *WAITS, "deadline", "status", "ttft", "e2e", "task", "lora", "items"),
    "structured",
)
"""What a row of a log may tell beside its arrival and its lengths."""
MAX_ITEMS = 1000
"""Images, audios and videos of one request; a draw of more is an error, not cut."""
DURATIONS = ("delay", "deadline", "ttft", "e2e")


_SHA256 = re.compile(r"[0-9a-fA-F]{64}", re.ASCII)


@dataclass(frozen=True)
class Columns(Config):
    """The columns (CSV, Parquet) or keys (JSON) that hold what is known of a request.

    A row waits for the turn before it of its session, or for the rows whose `id` its `parent` holds.
    """

    prompt: str
    """The column of prompt tokens."""
    output: str
    """The column of output tokens."""
    arrival: str | None = None
    """The column of arrival times."""
    hash_ids: str | None = None
    """The column that lists the blocks of the prompt, equal ids for equal text after equal text."""
    acceptance: str | None = field(default=None, metadata=LEFT_OUT)
    """The column of the probability, from 0 to 1, that a draft token is right where those before it are."""
    request_class: str | None = field(default=None, metadata=LEFT_OUT)
    """The column of the class, a text."""
    priority: str | None = field(default=None, metadata=LEFT_OUT)
    """The column of the priority, a whole number."""
    tenant: str | None = field(default=None, metadata=LEFT_OUT)
    """The column of the tenant, a text."""
    session: str | None = field(default=None, metadata=LEFT_OUT)
    """The column of the conversation, a text."""
    turn: str | None = field(default=None, metadata=LEFT_OUT)
    """The column of the turn's number in its conversation."""
    id: str | None = field(default=None, metadata=LEFT_OUT)
    """The column of ids that `parent` refers to."""
    parent: str | None = field(default=None, metadata=LEFT_OUT)
    """The column of the `id` that a row waits for, or of several as a JSON list; empty or -1: for none."""
    delay: str | None = field(default=None, metadata=LEFT_OUT)
    """The column of how long after those answers a row is sent."""
    deadline: str | None = field(default=None, metadata=LEFT_OUT)
    """The column of the time after sending at which the client is gone, in `duration_unit`; empty or 0: unknown."""
    status: str | None = field(default=None, metadata=LEFT_OUT)
    """The column of how the request ended."""
    ttft: str | None = field(default=None, metadata=LEFT_OUT)
    """The column of the TTFT that the recorded engine took, in `duration_unit`; empty or 0: unknown."""
    e2e: str | None = field(default=None, metadata=LEFT_OUT)
    """The column of the E2E latency that the recorded engine took, in `duration_unit`; empty or 0: unknown."""
    task: str | None = field(default=None, metadata=LEFT_OUT)
    """The column of the task, done when its last request is; empty: of none. It may be that of the session too."""
    lora: str | None = field(default=None, metadata=LEFT_OUT)
    """The column of the LoRA adapter that a request asks for, a text; empty: the base model."""
    items: str | None = field(default=None, metadata=LEFT_OUT)
    """The column of the number of images, audios and videos, whose sizes `workload.items` says."""
    structured: str | None = field(default=None, metadata=LEFT_OUT)
    """The column that says whether a grammar constrains the answer: 1 or true; 0, false or empty: it does not."""

    def __post_init__(self) -> None:
        names = [name for each in fields(self) if (name := getattr(self, each.name)) is not None]
        if self.task is not None and self.task == self.session:
            names.remove(self.task)
        if len(set(names)) < len(names):
            raise ValueError(f"columns {', '.join(names)} name one column twice. Each needs its own.")
        if (self.id is None) != (self.parent is None):
            raise ValueError("columns.id and columns.parent go together: which row waits for which. Name both.")
        if self.id is not None and self.session is not None:
            raise ValueError("columns.parent and columns.session both say what a row waits for. Keep one.")
        if self.turn is not None and self.session is None:
            raise ValueError(f"columns.turn {self.turn!r}: of which session is not said. Name columns.session too.")

    @property
    def labels(self) -> dict[str, str]:
        """The columns named beside arrival, lengths, hash ids and acceptance, by what they hold (see LABELS)."""
        return {role: name for role in LABELS if (name := getattr(self, role)) is not None}

    @property
    def durations(self) -> dict[str, str]:
        """Those of `labels` that hold a duration."""
        return {role: name for role, name in self.labels.items() if role in DURATIONS}


@dataclass(frozen=True)
class RateScale(Config):
    """A multiple of a trace's load, and how it is made: there is no neutral way, so `by` has no default.

    `compress` divides all gaps (bursts get sharper in time), `overlay` adds shifted copies of the trace (bursts are
    smoothed, rows repeat), `thin` keeps a random share of the rows. `copies` lays copies over each other, each moved by
    its own random time and wrapped around, other times in every seed: the shape that is longer than `shift` stays,
    bursts do not line up. Of the last copy a random share is kept where `factor` is no whole number.
    """

    factor: Factor
    """How many times the trace's load."""
    by: Literal["compress", "overlay", "thin", "copies"]
    """How: gaps divided, shifted copies added, rows left out at random, or copies moved at random."""
    shift: Duration | None = None
    """How far each of `copies` is moved at most, either way."""
    together: Annotated[int, Range(1, 1_000_000)] = 1
    """As many of `copies` move in step, so that bursts are as many times as dense."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if (self.by == "copies") != (self.shift is not None):
            raise ValueError(
                "rate_scale by copies needs shift, how far each is moved at most: shift: 2min, say."
                if self.by == "copies"
                else f"rate_scale.shift is for by: copies, not {self.by}. Drop it."
            )
        if self.together > 1 and self.by != "copies":
            raise ValueError(f"rate_scale.together {self.together}: a number of copies, and only by copies.")
        if self.by == "overlay" and not float(self.factor).is_integer():
            raise ValueError(
                f"rate_scale.factor {self.factor:g} by overlay: copies come whole. Write an integer, or by: compress."
            )
        if self.by == "thin" and self.factor > 1:
            raise ValueError(
                f"rate_scale.factor {self.factor:g} by thin: thinning cannot add requests. Write a factor of at most 1,"
                " or by: compress or overlay."
            )


@dataclass(frozen=True)
class TraceConfig(Config):
    """A trace file and what is done to its rows."""

    path: str
    """The trace file; relative to the scenario, or to a folder of --traces."""
    format: FormatName = "auto"
    """The file's form; found by itself unless given."""
    columns: Columns | None = None
    """What the columns of a file of no known form hold."""
    time_unit: TimeUnit | None = None
    """The unit of times: needed with `columns.arrival` and where a file's unit cannot be recognised."""
    rows: tuple[NonNegativeInt, NonNegativeInt] | None = None
    """The data rows that are read, `[start, stop)`."""
    time: tuple[TraceDuration, TraceDuration] | None = None
    """The time that is read, `[from, to)` after the earliest arrival."""
    rate_scale: RateScale | None = None
    """How many times the trace's rate, and by which way."""
    jitter: Duration = 0
    """The arrivals of a coarse clock are spread over this interval."""
    zero_lengths: Literal["drop", "prefill_only", "error"] = "drop"
    """Rows with 0 tokens are dropped, refused, or, with a prompt, given one output token (`prefill_only`)."""
    on_broken: Literal["error", "drop"] = "error"
    """Broken rows are refused or dropped; also those whose times lie a year or more from most others."""
    prefix: Literal["auto", "hash_ids", "ignore"] = "auto"
    """Whether equal `hash_ids` make prompts share their beginnings: `auto` where the trace has them, `hash_ids` demands
    them, with `ignore` no prompt shares anything."""
    hash_id_block_size: PositiveInt | None = None
    """Tokens an id stands for, by default the format's: 512 of mooncake and guidellm, 16 of qwen."""
    duration_unit: Literal["ns", "us", "ms", "s"] | None = field(default=None, metadata=LEFT_OUT)
    """The unit of the columns deadline, ttft and e2e, by default that of the times."""
    failed: Literal["drop", "keep"] = field(default="drop", metadata=LEFT_OUT)
    """Whether rows whose `status` is no success are left out or kept."""
    replay: Literal["response_driven", "as_recorded"] | None = field(default=None, metadata=LEFT_OUT)
    """response_driven: a row that waits for answers is sent when the simulated ones have come, as long after them as in
    the log; as_recorded: all at the log's times."""
    reader: str | None = field(default=None, metadata=LEFT_OUT)
    """A class of the user's own, `module:Class`, whose records (`own_reader.py`) have the keys that `columns` names."""
    sha256: str | None = None
    """SHA-256 of the uncompressed content."""
    fetch: str | None = None
    """Where the file is to be had."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.path or "\0" in self.path:
            raise ValueError("trace.path is empty or holds a zero byte. Write the path of a file.")
        if self.reader is not None and (":" not in self.reader or self.columns is None):
            raise ValueError(
                f"trace.reader {self.reader!r}: name a class as module:Class, and by columns what its records hold."
            )
        self._check_columns()
        if self.rows is not None and self.time is not None:
            raise ValueError("trace: both rows and time are given. Slice by one of them.")
        for name, window in (("rows", self.rows), ("time", self.time)):
            if window is not None and not window[0] < window[1]:
                unit = "" if name == "rows" else " ns"
                raise ValueError(
                    f"trace.{name} [{window[0]}, {window[1]}]{unit} holds nothing. End it after its start."
                )
        if self.sha256 is not None and not _SHA256.fullmatch(self.sha256):
            raise ValueError(f"trace.sha256 {self.sha256!r} is not a SHA-256: 64 hexadecimal digits.")
        self._check_prefix()
        self._check_labels()

    def _check_labels(self) -> None:
        durations = {} if self.columns is None else self.columns.durations
        if durations and self.duration_unit is None and self.time_unit in (None, "iso"):
            role, name = next(iter(durations.items()))
            raise ValueError(f"trace.columns.{role} {name!r} has no unit. Write duration_unit: ns, us, ms or s.")
        if self.duration_unit is not None and not durations:
            raise ValueError(
                f"trace.duration_unit {self.duration_unit} goes with no column. Name columns.deadline, ttft or e2e, or"
                " drop it."
            )
        if self.failed == "keep" and (self.columns is None or self.columns.status is None):
            raise ValueError("trace.failed keep: no column says what failed. Name columns.status, or drop it.")

    def _check_columns(self) -> None:
        if self.columns is None:
            if self.format == "mapping":
                raise ValueError("trace.format mapping needs columns: {arrival: ..., prompt: ..., output: ...}.")
            return
        if self.format not in ("auto", "mapping"):
            raise ValueError(f"trace.columns cannot go with format {self.format}, which knows its columns. Drop one.")
        if self.columns.arrival is not None and self.time_unit is None:
            raise ValueError(
                f"trace.columns.arrival {self.columns.arrival!r} has no unit. Write time_unit: ns, us, ms, s or iso."
            )
        if self.columns.arrival is None and self.time_unit is not None:
            raise ValueError(f"trace.time_unit {self.time_unit} goes with no column. Write columns.arrival or drop it.")

    def _check_prefix(self) -> None:
        size, named = self.hash_id_block_size, self.columns is not None and self.columns.hash_ids is not None
        if size is not None and (self.prefix == "ignore" or (self.columns is not None and not named)):
            raise ValueError("trace.hash_id_block_size is given and no hash_ids are read. Drop it, or read them.")
        if named and size is None and self.prefix != "ignore":
            raise ValueError(
                "trace.columns.hash_ids does not say how many tokens an id stands for. Write hash_id_block_size: 512"
                " (Mooncake), 64 (WEKA), 16 (Qwen) or what it is."
            )
        if self.prefix == "hash_ids" and self.columns is not None and not named:
            raise ValueError("trace.prefix hash_ids needs columns.hash_ids, the name of the column that lists them.")
