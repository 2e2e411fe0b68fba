"""Tests of one part lie in the folder of `tests/unit` that the part has in `sim/`: either leads to the other."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
WHOLE_COMMANDS = "cli"
"""Tests of commands are called by what a command does, which a file elsewhere may be called too."""


def misplaced(sources: Iterable[str], tests: Iterable[str]) -> list[str]:
    """A line for each folder of sources that no folder of tests mirrors, the other way round, and for each test that is
    called like sources of other folders alone. Paths, with `/`, from `sim/` and from `tests/unit`."""
    modules, files = [*map(PurePosixPath, sources)], [*map(PurePosixPath, tests)]
    folders = {module.parent for module in modules if module.name != "__init__.py"}
    of_tests = {file.parent for file in files}
    complaints = [
        f"tests/unit/{folder} is not there: put a test of sim/{folder} into it" for folder in folders - of_tests
    ]
    complaints += [f"sim/{folder} is not there, and tests/unit/{folder} is" for folder in of_tests - folders]
    for file in files:
        name = file.stem.removeprefix("test_")
        homes = {module.parent for module in modules if module.stem == name}
        homes |= {folder for folder in folders if folder.name == name}
        if homes and file.parent not in homes and file.parent.name != WHOLE_COMMANDS:
            complaints.append(
                f"tests/unit/{file} is called like {', '.join(sorted(map(str, homes)))}. Move or rename it."
            )
    return sorted(complaints)


def test_tests_mirror_the_source() -> None:
    """Every folder of sources has its folder of tests, and no test is called like a file that it is not about."""
    sim, unit = ROOT / "sim", ROOT / "tests/unit"
    linked = {"calibrate": ROOT / "calibrate"}
    sources = [path.relative_to(sim).as_posix() for path in sim.rglob("*.py") if path.parent != sim]
    for name, folder in linked.items():
        sources += [f"{name}/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*.py")]
    sources = [path for path in set(sources) if not path.startswith(("calibrate/engine", "scenarios"))]  # tests/live
    tests = [path.relative_to(unit).as_posix() for path in unit.rglob("test_*.py")]
    complaints = misplaced(sources, tests)
    assert not complaints, "\n".join(complaints)


def test_what_is_misplaced_is_named() -> None:
    """A folder without tests, tests of no folder and a test under another part's name are noticed."""
    sources = ["kv/choice.py", "kv/__init__.py", "cost/lanes.py", "view/page.py"]
    assert misplaced(sources, ["kv/test_choice.py", "cost/test_sums.py", "cli/test_page.py", "view/test_lanes.py"]) == [
        "sim/cli is not there, and tests/unit/cli is",
        "tests/unit/view/test_lanes.py is called like cost. Move or rename it.",
    ]
    assert misplaced(sources, ["kv/test_kv.py", "view/test_page.py"]) == [
        "tests/unit/cost is not there: put a test of sim/cost into it"
    ]
