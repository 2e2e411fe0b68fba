"""A trace reader of a user's own, by its import path `module:Class`: from a file to records, a mapping a row."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from batchsim.base.errors import TraceError


class TraceReader(Protocol):
    """What `trace.reader` names; made without arguments."""

    def records(self, path: Path) -> Iterator[Mapping[str, object]]:
        """The rows of the file at `path`, each with the keys that `trace.columns` names."""
        ...


def reader_class(kind: str) -> type[TraceReader]:
    """The class named `kind`; importing its module runs it, so whoever read the name has allowed that.

    TraceError where it has no `records`; whatever the import raises.
    """
    module, _, name = kind.partition(":")
    reader = getattr(importlib.import_module(module), name)
    if not callable(getattr(reader, "records", None)):
        raise TraceError(f"{kind} has no records. Write def records(self, path) for it, which yields a mapping a row.")
    return reader


def own_records(kind: str, path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """The records of `path`, numbered from 1, as the reader `kind` gives them. TraceError for whatever it raises."""
    yield from records_of(reader_class(kind)(), kind, path)


def records_of(reader: TraceReader, kind: str, path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """As `own_records`, of a `reader` that is there already and is named `kind`."""
    number = 0
    try:
        for number, record in enumerate(reader.records(path), 1):
            yield number, dict(record)
    except (TraceError, OSError):
        raise
    except Exception as error:  # a user's code may raise anything
        said = f"{type(error).__name__}: {error}"
        raise TraceError(f"{path}: its reader {kind} fails after {number:,} rows: {said}. Correct either.") from error
