"""The floors of the house, enforced by reading the imports: a file imports only lower floors, and few outsiders.

Every rule is a function from parsed source to complaints, and is shown to complain by a small wrong source.
A file that is in no row fails, so that a new one must be given its floor here.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 450  # the target is 300; a file beyond this is missing a noun
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "sim/DESIGN.md")


@dataclass(frozen=True)
class Row:
    """Some modules of one floor. `name.*` covers a package and all in it; rows of one floor know nothing of each other.

    `anywhere` are third-party packages it may import, `inside` those only inside functions.
    """

    floor: float
    modules: tuple[str, ...]
    anywhere: frozenset[str] = frozenset()
    inside: frozenset[str] = frozenset()
    pure: bool = False
    lazy: bool = False  # at module level only its own packages, floors below 1 and the standard library

    def covers(self, module: str) -> bool:
        return any(
            module == pattern or (pattern.endswith(".*") and f"{module}.".startswith(pattern[:-1]))
            for pattern in self.modules
        )


def _row(floor: float, modules: str, anywhere: str = "", inside: str = "", **rules: bool) -> Row:
    return Row(floor, tuple(modules.split()), frozenset(anywhere.split()), frozenset(inside.split()), **rules)


SIDE = 9
ROWS = (
    _row(0, "sim.errors sim.ranges sim.policy_config sim.units sim.types sim.tokens sim.decode sim.plain", pure=True),
    _row(0, "scenarios"),  # data only
    _row(0.5, "sim.files"),
    _row(1, "sim.layers sim.config_json sim.model sim.catalog sim.deployment sim.kv.*", pure=True),
    _row(2, "sim.policies.*", pure=True),
    _row(2, "sim.cost.*", "numpy"),
    _row(2, "sim.workload.*", "numpy", inside="pyarrow"),  # Parquet traces
    _row(2, "sim.fleet sim.fleet.routing sim.fleet.plan", pure=True),
    _row(2, "sim.record", "numpy", pure=True),  # of floor 3, but below core, which writes it
    _row(2.2, "sim.fleet.records", "numpy", pure=True),
    _row(2.2, "sim.events", pure=True),
    _row(2.5, "sim.journal", pure=True),
    _row(3, "sim.core", pure=True),
    _row(3.1, "sim.instant", pure=True),
    _row(3.2, "sim.resolved sim.named_policy", "numpy", pure=True),  # a scenario without pydantic and yaml
    _row(3.4, "sim.capacity sim.capacity.saturation sim.validation sim.validation.periods", "numpy", pure=True),
    _row(4, "sim.simulate sim.fleet.drive sim.fleet.clients sim.fleet.engine", "simpy", pure=True),
    _row(4, "sim.live sim.load"),
    _row(
        5,
        "sim.metrics.* sim.explain sim.explain.lives sim.explain.attribution sim.explain.causes sim.explain.audit"
        " sim.explain.story sim.curves sim.curves.landmarks sim.capacity.search sim.fleet.table",
        "numpy pandas scipy",
    ),
    _row(5, "sim.results sim.results.frames", "numpy pandas pyarrow"),
    _row(5, "sim.scenario.*", "numpy pydantic pydantic_core yaml"),
    _row(
        6,
        "sim.point sim.reach sim.run sim.results.* sim.sweep.* sim.curves.* sim.capacity.* sim.validation.*"
        " sim.explain.counterfactual sim.fleet.inputs",
        "numpy pandas pyarrow",
        inside="ray",  # sim.sweep.ray_pool
    ),
    _row(6, "sim.conform.*", "pydantic"),
    _row(6.5, "sim.claims.* sim.planning.*", "numpy pandas"),
    _row(7, "sim.report.*", "numpy pandas matplotlib jinja2"),
    _row(8, "sim", lazy=True),  # the public names, fetched when asked for: a GPU box has neither pandas nor simpy
    _row(8, "sim.cli.*", "typer rich", lazy=True),
    _row(  # not for a GPU box
        SIDE,
        "calibrate.import_aiconfigurator tools.fit_roofline tools.import_profiles",
        "numpy scipy pandas",
    ),
    _row(
        SIDE,
        "calibrate.* tools.campaign.*",
        "torch triton numpy yaml typer rich",
        inside="safetensors tokenizers pynvml",
    ),
)
CALIBRATE_MAY_IMPORT = 3.4  # the highest floor of ours that a GPU box can load, and live besides
IMPURE = frozenset(
    {"time", "datetime", "random", "secrets", "logging", "os", "threading", "asyncio", "socket", "subprocess"}
)


@dataclass(frozen=True)
class Import:
    module: str
    line: int
    inside: bool  # a function


def row_of(module: str) -> Row | None:
    return next((row for row in ROWS if row.covers(module)), None)


def module_of(path: Path) -> str:
    """`sim/kv/blocks.py` as `sim.kv.blocks`, `sim/cost/__init__.py` as `sim.cost`."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(node: ast.AST, known: frozenset[str], inside: bool = False) -> Iterator[Import]:
    """Every import but those for type checkers. `from sim import kv` counts as `sim.kv` where that is a module."""
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, node.lineno, inside) for alias in node.names)
        return
    if isinstance(node, ast.ImportFrom):
        base = "." * node.level + (node.module or "")
        for alias in node.names:
            full = f"{base}.{alias.name}"
            yield Import(full if full in known else base, node.lineno, inside)
        return
    inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        children = list(node.orelse)
    for child in children:
        yield from imports(child, known, inside)


def complaints(module: str, source: str, known: frozenset[str] = frozenset()) -> list[str]:
    """What is wrong with the imports of `module`, one line each."""
    row = row_of(module)
    if row is None:
        return [f"{module} is in no row of tests/test_architecture.py. Add it to the floor it belongs to."]
    found = []
    for item in imports(ast.parse(source), known):
        wrong = _wrong(module, row, item)
        if wrong:
            found.append(f"{module}:{item.line}: imports {item.module}: {wrong}")
    return found


def _wrong(module: str, row: Row, item: Import) -> str:
    top = item.module.partition(".")[0]
    if item.module.startswith("."):
        return "write the module's full name"
    if top in sys.stdlib_module_names:
        return (
            f"{top} is not for a pure file, which has no clock, chance, log or environment"
            if (row.pure and top in IMPURE)
            else ""
        )
    if top in ("sim", "scenarios", "calibrate", "tools"):
        return _wrong_own(module, row, item)
    if top in row.inside and not item.inside:
        return f"{top} is allowed here only inside a function"
    if top not in row.anywhere | row.inside:
        return f"{top} is not allowed on floor {row.floor} in {' '.join(row.modules)}"
    return ""


def _wrong_own(module: str, row: Row, item: Import) -> str:
    target = row_of(item.module)
    if target is None:
        return "this module is in no row of tests/test_architecture.py"
    if item.module.startswith("tools.") and not module.startswith("tools."):
        return "tools are not installed"
    if target is row:
        return ""
    if target.floor == row.floor == SIDE:
        return ""
    if target.floor == SIDE:
        fine = module.startswith("sim.cli") and item.inside
        return "" if fine else "only cli may import calibrate, and only inside a command"
    if row.floor == SIDE:
        fine = target.floor <= CALIBRATE_MAY_IMPORT or item.module == "sim.live"
        return "" if fine else f"calibrate may import floors 0 to {CALIBRATE_MAY_IMPORT} and live"
    if target.floor >= row.floor:
        return f"floor {target.floor} is not below floor {row.floor}"
    if row.lazy and not item.inside and target.floor >= 1:
        return "heavy imports stand inside the functions that need them"
    return ""


def _sources() -> dict[str, Path]:
    files = [path for package in ("sim", "calibrate", "scenarios", "tools") for path in (ROOT / package).rglob("*.py")]
    return {module_of(path.relative_to(ROOT)): path for path in sorted(files)}


SOURCES = _sources()


@pytest.mark.parametrize("module", SOURCES)
def test_imports_keep_to_the_floors(module: str) -> None:
    """A file imports only lower floors, its own row, and the outsiders its row may."""
    found = complaints(module, SOURCES[module].read_text(encoding="utf-8"), frozenset(SOURCES))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("module", SOURCES)
def test_no_file_outgrows_the_limit(module: str) -> None:
    """No file is longer than MAX_LINES."""
    assert _too_long(SOURCES[module].read_text(encoding="utf-8")) == 0


def _too_long(source: str) -> int:
    return max(source.count("\n") - MAX_LINES, 0)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_name_files_that_exist(document: str) -> None:
    """Every path of ours that a document names is in the tree; an example may be named beside `policies/gated`."""
    text = (ROOT / document).read_text(encoding="utf-8")
    assert not _missing(text)


_PATH = re.compile(r"(?<![\w/.-])((?:sim|calibrate|scenarios|tests|tools|notebooks|\.ci)/[\w./-]*\w)")
EXAMPLES = frozenset({"sim/policies/gated.py", "tests/policies/test_gated.py"})  # the recipe for a policy of your own


def _missing(text: str) -> list[str]:
    return [path for path in _PATH.findall(text) if path not in EXAMPLES and not (ROOT / path).exists()]


WRONG = {
    "upwards": ("sim.kv.blocks", "from sim.core import EngineCore", "floor 3 is not below floor 1"),
    "upwards_by_name": ("sim.kv.blocks", "from sim import core", "floor 3 is not below floor 1"),
    "upwards_inside": ("sim.kv.blocks", "def f():\n    import sim.run", "floor 6 is not below floor 1"),
    "sideways": ("sim.policies.static", "import sim.cost.roofline", "floor 2 is not below floor 2"),
    "drivers": ("sim.live", "from sim.simulate import simulate", "floor 4 is not below floor 4"),
    "package_root": ("sim.metrics.measure", "import sim", "floor 8 is not below floor 5"),
    "numpy_below": ("sim.decode", "import numpy as np", "numpy is not allowed on floor 0"),
    "numpy_in_core": ("sim.core", "import numpy", "numpy is not allowed on floor 3"),
    "pydantic": ("sim.metrics.measure", "from pydantic import BaseModel", "pydantic is not allowed on floor 5"),
    "yaml": ("sim.run", "import yaml", "yaml is not allowed on floor 6"),
    "plots": ("sim.metrics.measure", "import matplotlib.pyplot", "matplotlib is not allowed"),
    "unknown": ("sim.cost.roofline", "import sklearn", "sklearn is not allowed"),
    "clock": ("sim.policies.dynamic", "import time", "time is not for a pure file"),
    "chance": ("sim.policies.systems.vllm", "from random import Random", "random is not for a pure file"),
    "log": ("sim.core", "def f():\n    import logging", "logging is not for a pure file"),
    "environment": ("sim.core", "from os import environ", "os is not for a pure file"),
    "torch": ("sim.live", "import torch", "torch is not allowed"),
    "torch_in_cli": ("sim.cli", "def f():\n    import torch", "torch is not allowed"),
    "calibrate": ("sim.run", "def f():\n    import calibrate.fit", "only cli may import calibrate"),
    "calibrate_early": ("sim.cli", "from calibrate import fit", "only inside a command"),
    "tools": ("calibrate.fit", "from tools.campaign.probe import probe", "tools are not installed"),
    "heavy_cli": ("sim.cli", "from sim.run import run", "heavy imports stand inside"),
    "heavy_root": ("sim", "from sim.metrics.measure import summary", "heavy imports stand inside"),
    "heavy_parquet": ("sim.workload.traces.read", "import pyarrow", "only inside a function"),
    "box": ("calibrate.measure", "from sim.scenario import load", "calibrate may import floors 0 to 3"),
    "relative": ("sim.kv.blocks", "from .types import Sequence", "full name"),
    "stranger": ("sim.helpers", "", "is in no row"),
    "to_stranger": ("sim.run", "import sim.helpers", "is in no row"),
    "in_a_branch": ("sim.kv.blocks", "try:\n    import numpy\nexcept ImportError:\n    pass", "numpy is not allowed"),
    "not_for_checkers": ("sim.model", "if TYPE_CHECKING:\n    pass\nelse:\n    import numpy", "numpy is not allowed"),
}


@pytest.mark.parametrize(("module", "source", "complaint"), WRONG.values(), ids=WRONG)
def test_each_rule_can_complain(module: str, source: str, complaint: str) -> None:
    """A source that breaks one rule draws exactly the complaint of that rule."""
    (found,) = complaints(module, source, frozenset({"sim.core", "calibrate.fit"}))
    assert complaint in found


RIGHT = {
    "downwards": ("sim.core", "from sim.errors import SchedulerStalled\nimport heapq"),
    "for_checkers": ("sim.types", "if TYPE_CHECKING:\n    from sim.kv.blocks import CountingKV"),
    "own_row": ("sim.policies.dynamic", "from sim.policies.rectangle import pad"),
    "live_clock": ("sim.live", "import time"),
    "command": ("sim.cli", "import typer\ndef f():\n    from sim.run import run\n    import calibrate.fit"),
    "box": ("calibrate.measure", "import torch\nfrom sim.core import EngineCore\nfrom sim.live import live"),
}


@pytest.mark.parametrize(("module", "source"), RIGHT.values(), ids=RIGHT)
def test_what_is_allowed_draws_no_complaint(module: str, source: str) -> None:
    """The rules leave alone what the floors allow."""
    assert complaints(module, source) == []


def test_a_long_file_and_a_missing_path_are_noticed() -> None:
    """The two rules that do not look at imports can fail as well."""
    assert _too_long("x\n" * (MAX_LINES + 1)) == 1
    assert _missing("see `sim/nowhere.py`, sim/kv/blocks.py and tests/unit.") == ["sim/nowhere.py"]
