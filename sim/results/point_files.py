"""Writes and reads the folder of one point. It is there whole or not at all, and says of each table how it must look.

No file is forced to the disk: what a power cut leaves half-written does not match its checksum and is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.results.provenance import as_json

RESULT = "point.json"
_KEYS = frozenset(("seed", "values", "workload", "files"))


@dataclass(frozen=True)
class PackedPoint:
    """A measured point as it will lie on the disk: what point.json holds, and the tables' bytes by file name."""

    result: dict[str, Any]
    tables: dict[str, bytes]

    @classmethod
    def of(cls, result: dict[str, Any], tables: dict[str, bytes]) -> PackedPoint:
        """`result` with size and checksum of every table."""
        files = {name: {"bytes": len(data), "sha256": _sha256(data)} for name, data in tables.items()}
        return cls(result | {"files": files}, tables)


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
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        if not isinstance(result, dict) or not set(result) >= _KEYS:
            return None
        for name, said in result["files"].items():
            data = (folder / name).read_bytes()
            if len(data) != said["bytes"] or _sha256(data) != said["sha256"]:
                return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return result


def remove_unfinished(points: Path) -> None:
    """Removes what a killed run left half-written. The caller has the folder's lock, so nobody is at work on it."""
    for folder in points.glob(".*-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
