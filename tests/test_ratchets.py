"""What is won stays won: the lines of each package, and the number of small files that only one other file uses.

A number that is not needed any more fails as well, so that it is lowered in the same change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tests.test_architecture import SOURCES, imported, room_of

SLACK = 100
"""Lines that a budget may lie above what is there: work goes on, and a budget is no diary."""
LINES = {
    "gym": 1000,
    "training.packers": 1900,
    "training": 1650,
    "calibrate": 0,
    "calibrate.engine": 3850,
    "calibrate.profile": 2250,
    "batchsim": 50,
    "cli": 4600,
    "api": 550,
    "base": 1500,
    "check": 50,
    "check.conform": 4600,
    "check.measured": 2150,
    "check.record": 200,
    "check.steps": 750,
    "check.validation": 2150,
    "cost": 5650,
    "deployment": 4350,
    "drive": 1150,
    "drive.fleet": 5850,
    "engines": 700,
    "explain": 1550,
    "fit": 1300,
    "fit.server": 1150,
    "fit.traffic": 1100,
    "kernel": 6550,
    "kv": 5450,
    "metrics": 4200,
    "policies": 300,
    "policies.families": 2600,
    "policies.systems": 10300,
    "report": 1400,
    "report.page": 1850,
    "report.pictures": 3300,
    "report.text": 3300,
    "results": 3300,
    "scenario": 7200,
    "serve": 5050,
    "study": 50,
    "study.capacity": 1200,
    "study.curves": 900,
    "study.planning": 3550,
    "study.sweep": 1000,
    "tables": 1950,
    "view": 1200,
    "workload": 6150,
    "workload.traces": 2750,
    "testing": 2050,
    "tools": 2500,
}
"""The most lines of Python that each room of tests/test_architecture.py may have."""

TOO_MUCH = "Take something away, or raise it with the feature that needs it."

SMALL = 40
SMALL_FILES = 5
"""How many files of fewer than SMALL lines are imported by exactly one other: such a file seldom has a noun."""


def over_and_under(lines: Mapping[str, int], budgets: Mapping[str, int]) -> list[str]:
    """A line for each room that is larger than its budget, or so much smaller that the budget is to be lowered."""
    found = []
    for room in sorted({*lines, *budgets}):
        have, most = lines.get(room, 0), budgets.get(room, 0)
        if have > most:
            found.append(f"{room}: {have:,} lines, its budget is {most:,}. {TOO_MUCH}")
        elif have < most - SLACK:
            found.append(f"{room}: {have:,} lines, its budget is {most:,}. Lower it to {-(-have // 50) * 50}.")
    return found


def small_and_used_once(sources: Mapping[str, str]) -> list[str]:
    """The modules of fewer than SMALL lines that exactly one other imports; an `__init__` that is empty is none."""
    users = Counter(other for others in imported(sources).values() for other in others)
    return sorted(one for one, text in sources.items() if 1 < text.count("\n") < SMALL and users[one] == 1)


def _texts() -> dict[str, str]:
    return {module: path.read_text(encoding="utf-8") for module, path in SOURCES.items()}


def test_no_package_outgrows_its_budget() -> None:
    """Each room keeps to its lines, and budgets follow what was taken away."""
    lines = Counter[str]()
    for module, text in _texts().items():
        lines[room_of(module) or "batchsim"] += text.count("\n")
    complaints = over_and_under(+lines, LINES)
    assert not complaints, "\n".join(complaints)


def test_small_files_used_once_do_not_become_more() -> None:
    """A part of one file lives in it unless it has a name of its own."""
    found = small_and_used_once(_texts())
    assert len(found) == SMALL_FILES, "\n".join(found)


def test_the_ratchets_hold() -> None:
    """More lines than allowed, far fewer, a room without a budget and a small file used once are noticed."""
    lines, budgets = {"kv": 101, "cost": 100, "new": 1, "base": 200}, {"kv": 100, "cost": 350, "base": 300}
    assert over_and_under(lines, budgets) == [
        "cost: 100 lines, its budget is 350. Lower it to 100.",
        "kv: 101 lines, its budget is 100. " + TOO_MUCH,
        "new: 1 lines, its budget is 0. " + TOO_MUCH,
    ]
    long = "import b\n" * SMALL
    assert small_and_used_once({"a": long, "b": "x\n" * 2, "c": "", "d": long + "import c\nimport e", "e": long}) == []
    assert small_and_used_once({"a": long, "b": "x\n" * 2}) == ["b"]
