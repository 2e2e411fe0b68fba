"""Checksums by which readers notice changed files: of every file of a run or point, and of the lists of these files.

A JSON object of facts carries its own checksum under the key `sha256`: that of all its other keys but null ones and
PROVENANCE, which says only how it was made.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from batchsim.base.files import check_regular, read_bytes, read_json
from batchsim.results.provenance import PROVENANCE, as_json

SEAL = "sha256"
_CHANGED = "it is not as it was written"


def sealed(facts: dict[str, Any]) -> dict[str, Any]:
    """`facts`, which JSON can hold, with their own SHA-256 added under the key `sha256`."""
    return facts | {SEAL: _seal(json.loads(as_json(facts)))}


def read_sealed(path: Path) -> dict[str, Any]:
    """The facts in a JSON file that `sealed` made. OSError if it cannot be read, ValueError if it was changed since."""
    facts = read_json(path)
    check_seal(facts)
    return facts


def check_seal(facts: Any) -> None:
    """ValueError unless the checksum in `facts` is that of the rest, as `sealed` added it."""
    if not isinstance(facts, dict) or facts.get(SEAL) != _seal(facts):
        raise ValueError(_CHANGED)


def file_facts(data: bytes) -> dict[str, Any]:
    """`bytes` and `sha256` of the file with the content `data`."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def read_checked(path: Path, said: dict[str, Any]) -> bytes:
    """The bytes of a file of which `file_facts` said `said`. OSError if it cannot be read, ValueError if changed."""
    check_regular(path)
    size = path.stat().st_size
    if size == said["bytes"] and file_facts(data := read_bytes(path, size)) == said:
        return data
    raise ValueError(f"{_CHANGED} ({size:,} bytes, then {said['bytes']:,})")


def _seal(facts: dict[str, Any]) -> str:
    own = {name: value for name, value in facts.items() if value is not None and name not in (SEAL, *PROVENANCE)}
    try:
        return hashlib.sha256(as_json(own, sort_keys=True).encode(errors="backslashreplace")).hexdigest()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
