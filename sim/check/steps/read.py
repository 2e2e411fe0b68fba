"""Reads the steps in an engine's log, whatever else stands in it: lines of other processes, colours, ends cut off."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from batchsim.base.errors import MeasuredError
from batchsim.base.files import TABLE_BYTES, open_file, reason_text
from batchsim.check.steps.fpm import ForwardPassLog
from batchsim.check.steps.recorded import Engine, RecordedSteps, StepLog
from batchsim.check.steps.sglang import SglangLog
from batchsim.check.steps.vllm import VllmLog

MOST_STEPS = 1_000_000
LINE_BYTES = 1 << 20
"""Of one line; what is longer is read in pieces."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_FORMS = (
    "vLLM prints them with --enable-logging-iteration-details, SGLang as 'Prefill batch' and 'Decode batch', Dynamo"
    " writes them with DYN_FPM_TRACE=1"
)


def read_steps(path: Path | str, engine: Engine) -> StepLog:
    """The steps of a log of `engine`, which may be packed by gzip. MeasuredError where it has none, cannot be read, or
    has steps of two forms."""
    path, readers, cut = Path(path), (VllmLog(engine), SglangLog(engine), ForwardPassLog(engine)), ""
    try:
        with open_file(path, TABLE_BYTES) as file:
            for line in _lines(file):
                text = _COLOUR.sub("", line.decode("utf-8", "replace"))
                for reader in readers:
                    if any(mark in text for mark in reader.marks):
                        reader.line(text)
                        if reader.num_records > MOST_STEPS:
                            raise MeasuredError(f"{path}: holds more than {MOST_STEPS:,} steps. Give a part of it.")
    except (EOFError, zlib.error) as error:
        cut = f"packed by gzip and cut off ({reason_text(error)}): what came before is read"
    except OSError as error:
        raise MeasuredError(f"{path}: cannot be read: {reason_text(error)}. Give an engine's log.") from None
    used = [reader for reader in readers if reader.num_records]
    if not used:
        raise MeasuredError(f"{path}: has no line of a step. {_FORMS}. Give such a log.")
    if len(used) > 1:
        forms = " and ".join(reader.form for reader in used)
        raise MeasuredError(f"{path}: has steps as {forms}, which would count twice. Keep the lines of one.")
    (reader,) = used
    num_records = reader.num_records
    steps = RecordedSteps.of(reader.steps(), engine.max_model_len)
    notes = [cut] * bool(cut) + reader.notes()
    if reader.left_out:
        counts = ", ".join(f"{count:,} {why}" for why, count in reader.left_out.most_common())
        notes.append(f"{reader.left_out.total():,} of {num_records:,} records are left out: {counts}")
    if not len(steps):
        raise MeasuredError(f"{path}: tells the time of no step: {'; '.join(notes[1:])}. Give a longer log.")
    cores = int(steps.core.max()) + 1
    if cores > 1:
        notes.append(
            f"{cores} engine cores: each step is that of one, as it recorded it; ranks may wait for each other"
        )
    return StepLog(str(path), reader.form, steps, tuple(notes), reader.left_out, reader.doubt)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    opened = gzip.GzipFile(fileobj=file) if packed else file
    size = 0
    while line := opened.readline(LINE_BYTES):
        size += len(line)
        if size > TABLE_BYTES:
            raise OSError(0, f"has more than {TABLE_BYTES:,} bytes when unpacked")
        yield line
