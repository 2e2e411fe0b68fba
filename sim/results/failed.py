"""Points that could not be simulated, and how that is said."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from batchsim.base.errors import PointsFailed
from batchsim.base.units import counted
from batchsim.scenario import Point


@dataclass(frozen=True)
class Failed:
    """A point that could not be simulated, and why in one line. Nothing of it is kept, so the next run tries again.

    The names are those of point.json: `policy` its label in the scenario, `name` that with the variant, `point` the
    folder it would have had. `trace` is the traceback of an error that is not one of batchsim's own. `vary` is the
    value of the key that the scenario varies. With `is_empty` no request was sent after the warm-up.
    """

    policy: str
    name: str
    load: float
    seed: int
    point: str
    reason: str
    trace: str = ""
    kind: str = ""
    variant: str = ""
    vary: Any = None
    is_empty: bool = False

    @classmethod
    def of(cls, point: Point, folder: str, reason: str, trace: str = "", *, is_empty: bool = False) -> Failed:
        spec = point.spec
        why = " ".join(reason.split())
        named = spec.label, spec.name, point.load, point.seed, folder, why, trace
        return cls(*named, kind=spec.kind, variant=spec.variant, is_empty=is_empty)


def points_failed(failed: Sequence[Failed], total: int) -> PointsFailed:
    """The error that says which of `total` points failed and why; its notes are the tracebacks."""
    others = "" if len(failed) == total else ", the others are kept"
    reasons = "; ".join(f"{which} {reason.rstrip('.')}" for which, reason in grouped(failed))
    error = PointsFailed(f"{len(failed)} of {total} points failed{others}: {reasons}. The same command tries again.")
    for trace in dict.fromkeys(each.trace for each in failed if each.trace):
        error.add_note(trace)
    return error


def grouped(failed: Iterable[Failed]) -> list[tuple[str, str]]:
    """(which points, why) in words, one a policy and reason; of reasons that differ in numbers alone the first."""
    groups: dict[tuple[str, str], list[Failed]] = {}
    for each in failed:
        groups.setdefault((each.name, re.sub(r"\d+", "#", each.reason)), []).append(each)
    said = []
    for (name, _), members in groups.items():
        loads = ", ".join(f"{load:g}" for load in sorted({each.load for each in members}))
        said.append((f"{name}: {counted(len(members), 'point')} failed at load {loads}:", members[0].reason))
    return said
