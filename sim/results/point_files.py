"""Writes and reads the folder of one point. It is there whole or not at all, and has size and checksum of each file.

No file is forced to the disk: what a power cut leaves half-written does not match its checksum and is made again.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from batchsim.results.checksums import file_facts, read_checked, read_sealed, sealed
from batchsim.results.frames import to_frame
from batchsim.results.provenance import as_json

RESULT = "point.json"
_UNFINISHED = re.compile(r"\.(?:old\.)?[0-9a-f]+-\d+")


@dataclass(frozen=True)
class PackedPoint:
    """A measured point as it will lie on the disk: what point.json holds, and the tables' bytes by file name."""

    result: dict[str, Any]
    tables: dict[str, bytes]

    @classmethod
    def of(cls, result: dict[str, Any], tables: dict[str, bytes]) -> PackedPoint:
        """The point whose point.json is `result` with size and checksum of every table, and its own checksum."""
        return cls(sealed(result | {"files": {name: file_facts(data) for name, data in tables.items()}}), tables)


def write_point(packed: PackedPoint, folder: Path) -> None:
    """Writes a point in place of what is in `folder`. OSError leaves what was there."""
    unfinished = folder.with_name(f".{folder.name}-{os.getpid()}")
    aside = unfinished.with_name(f".old{unfinished.name}")
    try:
        unfinished.mkdir(parents=True)
        for name, data in packed.tables.items():
            (unfinished / name).write_bytes(data)
        (unfinished / RESULT).write_text(as_json(packed.result), encoding="utf-8")
        if folder.exists():
            folder.rename(aside)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.rmtree(aside, ignore_errors=True)


def read_point(folder: Path) -> dict[str, Any] | None:
    """What point.json of a point holds; None if the point is not there whole, byte for byte."""
    try:
        result = _result(folder)
        for name, said in result["files"].items():
            read_checked(folder / name, said)
    except (OSError, ValueError):
        return None
    return result


def has_table(folder: Path, name: str) -> bool:
    """Whether a point has the table `name`. OSError or ValueError as `read_table`."""
    return f"{name}.parquet" in _result(folder)["files"]


def read_table(folder: Path, name: str) -> pd.DataFrame:
    """The table `requests`, `steps`, `states`, `stays` or `lanes` of a point.

    OSError if it cannot be read; ValueError if it, or what lists it, was changed since, or is of another point.
    """
    file = f"{name}.parquet"
    files = _result(folder)["files"]
    if file not in files:
        raise ValueError(f"{RESULT} lists no {file}")
    return to_frame(read_checked(folder / file, files[file]))


def _result(folder: Path) -> dict[str, Any]:
    """What point.json holds. OSError or ValueError as `read_table`."""
    try:
        result = read_sealed(folder / RESULT)
    except ValueError as error:
        raise ValueError(f"{RESULT}: {error}") from None
    if result["point"] != folder.name:
        raise ValueError(f"{RESULT} is of another point, {result['point']}")
    return result


def remove_unfinished(points: Path) -> None:
    """Removes what a killed run left half-written. The caller has the folder's lock, so no process is at work on it."""
    for folder in points.iterdir():
        if _UNFINISHED.fullmatch(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
