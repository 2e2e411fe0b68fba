"""The rooms of the house, enforced by reading the imports: one package, one floor; a file imports only lower floors.

Imports for type checkers count: what cannot be read without another room, or another file of its own, stands above it.
Every rule is a function from
parsed source to complaints, and is shown to complain by a small wrong source. A package that is in no row fails, so
that a new one must be given its floor here.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 450  # the target is 300; a file beyond this is missing a noun
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "sim/DESIGN.md"]
DOCUMENTS += [
    f"{folder}/{page.name}" for folder in ("docs", "sim/decisions") for page in sorted((ROOT / folder).glob("*.md"))
]


@dataclass(frozen=True)
class Room:
    """A package with its floor; a package inside it that has no room of its own belongs to it.

    `outsiders` are third-party packages it may import, `inside` those only inside functions, `of_file` those of single
    files. `pure`: no clock, chance, log or environment, but in the files `impure`. `lazy`: at module level only its own
    files, the lowest floor and outsiders. `guests`: the only rooms that may import it.
    """

    floor: int
    outsiders: frozenset[str] = frozenset()
    inside: frozenset[str] = frozenset()
    of_file: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    pure: bool = False
    impure: frozenset[str] = frozenset()
    lazy: bool = False
    guests: tuple[str, ...] = ()


def _room(
    floor: int, outsiders: str = "", inside: str = "", of_file: str = "", impure: str = "", **rules: bool
) -> Room:
    """`of_file` is "file:outsider file:outsider"."""
    single: dict[str, frozenset[str]] = {}
    for name, _, outsider in (one.partition(":") for one in of_file.split()):
        single[name] = single.get(name, frozenset()) | {outsider}
    sets = (frozenset(words.split()) for words in (outsiders, inside))
    return Room(floor, *sets, single, impure=frozenset(impure.split()), **rules)


ROOMS = {
    "base": _room(0, "pydantic pydantic_core", of_file="later:numpy", pure=True, impure="files"),
    "kernel": _room(
        1, of_file="record:numpy acceptance:numpy draft_group:numpy packed_rows:numpy lane_rows:numpy", pure=True
    ),
    "deployment": _room(1, inside="huggingface_hub", pure=True),  # which looks config.json files up
    "workload.traces": _room(1, "numpy", inside="pyarrow"),
    "training.packers": _room(1, pure=True),
    "check.measured": _room(2, "numpy", pure=True),
    "check.steps": _room(3, "numpy", pure=True),
    "kv": _room(2, pure=True),
    "cost": _room(2, "numpy"),
    "workload": _room(2, "numpy"),
    "tables": _room(3, "numpy", inside="aiconfigurator_core"),
    "policies.families": _room(3, pure=True),
    "policies.systems": _room(4, pure=True),
    "policies": _room(5, pure=True),
    "engines": _room(  # the worker runs where vLLM is installed
        6, of_file="vllm_worker:vllm vllm_worker:torch vllm_worker:numpy", pure=True, impure="worker vllm_worker"
    ),
    "drive": _room(6, of_file="simulate:simpy", pure=True, impure="live source"),
    "check.conform": _room(8, "pydantic", of_file="recorded_drafts:numpy"),
    "drive.fleet": _room(7, of_file="fleet_records:numpy clients:simpy engine:simpy simulate_fleet:simpy", pure=True),
    "metrics": _room(8, "numpy pandas scipy"),
    "scenario": _room(8, "numpy pydantic pydantic_core yaml", of_file="anchor:scipy"),
    "training": _room(9, "numpy pydantic"),
    "check.record": _room(9),
    "check.validation": _room(9, "numpy", of_file="load_shift:scipy"),
    "fit": _room(10, "numpy", of_file="solve:scipy"),
    "fit.server": _room(11, "numpy", of_file="client:aiohttp refusals:aiohttp"),
    "fit.traffic": _room(11, "numpy scipy"),
    "results": _room(10, "numpy pandas pyarrow"),
    "serve": _room(
        11, "numpy", of_file="connection:h11 incoming:h11 kv_publisher:msgpack kv_publisher:zmq realtime:simpy"
    ),
    "explain": _room(11, "numpy pandas"),
    "gym": _room(11, "numpy gymnasium"),
    "testing": _room(12, "numpy hypothesis", of_file="extension:pydantic"),
    "study.sweep": _room(11, inside="ray"),
    "study.curves": _room(12, "numpy"),
    "study.planning": _room(12, "numpy pandas yaml"),
    "study.capacity": _room(13, "numpy"),
    "report": _room(14, "numpy pandas"),
    "report.text": _room(15, "numpy pandas"),
    "report.pictures": _room(16, "numpy pandas matplotlib"),
    "report.page": _room(17, "numpy matplotlib jinja2"),
    "view": _room(18, "numpy"),
    "api": _room(18, "numpy pandas matplotlib"),
    "cli": _room(19, "typer rich packaging", lazy=True),
    "": _room(20, lazy=True),  # the public names, fetched when asked for: a GPU box has neither pandas nor simpy
    "scenarios": _room(0),  # data only
    "check": _room(0),  # this and the next hold rooms, no files
    "study": _room(0),
    "calibrate.engine": Room(
        9,
        frozenset({"torch", "triton", "numpy", "jinja2"}),
        frozenset({"safetensors", "tokenizers"}),
        guests=("calibrate.profile", "cli", "testing", "tools"),
    ),
    "calibrate.profile": Room(10, frozenset({"torch", "numpy"}), frozenset({"pynvml"}), guests=("cli", "tools")),
    "calibrate": Room(10),
    "tools": Room(  # not installed, beside the package
        21,
        frozenset({"torch", "numpy", "scipy", "pandas", "aiohttp", "yaml", "typer"}),
        frozenset({"safetensors", "tokenizers", "pynvml"}),
        {
            "accelerated_wheel": frozenset({"mypy", "mypyc", "setuptools"}),
            "kv_memory": frozenset({"aiconfigurator_core"}),
            "models": frozenset({"gguf"}),
            "llama_server": frozenset({"xllamacpp"}),
        },
        guests=("tools",),
    ),
}
"""The rooms of batchsim by package, "" being batchsim itself."""

BOX = frozenset(
    {"torch", "triton", "numpy", "pydantic", "yaml", "typer", "rich", "jinja2"}
)  # the last comes with torch
LATER = "batchsim.base.later"  # numpy by another way
BODIES = ("body", "orelse", "handlers", "finalbody", "cases")
"""The fields of a statement that hold statements: an import stands in no expression."""
LEAPS = frozenset(f"batchsim.kernel.{kind}" for kind in ("leaps", "leaps_ahead", "pipeline_leaps"))
IMPURE = frozenset(
    {"time", "datetime", "random", "secrets", "logging", "os", "threading", "asyncio", "socket", "subprocess"}
)


@dataclass(frozen=True)
class Import:
    module: str
    line: int
    inside: bool  # a function
    checking: bool  # for type checkers only


def room_of(module: str) -> str | None:
    """The name of the room that a module of batchsim is in; None if no row has it."""
    if module in ("batchsim", "batchsim.__main__"):
        return "" if module == "batchsim" else "cli"
    if module.partition(".")[0] == "tools":
        return "tools"
    words = module.split(".")[1:]
    if module in PACKAGES_KNOWN and ".".join(words) in ROOMS:
        return ".".join(words)
    for cut in range(len(words) - 1, 0, -1):
        if ".".join(words[:cut]) in ROOMS:
            return ".".join(words[:cut])
    return None


def module_of(path: Path) -> str:
    """`sim/kv/blocks.py` as `batchsim.kv.blocks`, `calibrate/__init__.py` as `batchsim.calibrate`."""
    parts = path.with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join({"sim": ("batchsim", *parts[1:]), "tools": parts}.get(parts[0], ("batchsim", *parts)))


def _sources() -> dict[str, Path]:
    files = [path for folder in ("sim", "calibrate", "scenarios", "tools") for path in (ROOT / folder).rglob("*.py")]
    return {module_of(path.relative_to(ROOT)): path for path in sorted(files)}


SOURCES = _sources()
PACKAGES_KNOWN = frozenset(module for module, path in SOURCES.items() if path.name == "__init__.py")


def imports(node: ast.AST, known: frozenset[str], inside: bool = False, checking: bool = False) -> Iterator[Import]:
    """Every import. `from batchsim import kv` counts as `batchsim.kv` where that is a module."""
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, node.lineno, inside, checking) for alias in node.names)
        return
    if isinstance(node, ast.ImportFrom):
        base = "." * node.level + (node.module or "")
        for alias in node.names:
            full = f"{base}.{alias.name}"
            yield Import(full if full in known else base, node.lineno, inside, checking)
        return
    inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        for child in node.body:
            yield from imports(child, known, inside, True)
        for child in node.orelse:
            yield from imports(child, known, inside, checking)
        return
    for name in BODIES:
        for child in getattr(node, name, ()):
            yield from imports(child, known, inside, checking)


@cache
def imports_of(source: str, known: frozenset[str]) -> tuple[Import, ...]:
    """Every import of a source."""
    return tuple(imports(ast.parse(source), known))


def complaints(module: str, source: str, known: frozenset[str] = frozenset(SOURCES)) -> list[str]:
    """What is wrong with the imports of `module`, one line each."""
    name = room_of(module)
    if name is None:
        return [f"{module} is in no room of tests/test_architecture.py. Add its package to the floor it belongs to."]
    found = []
    for item in imports_of(source, known):
        wrong = _wrong(module, name, item)
        if wrong:
            found.append(f"{module}:{item.line}: imports {item.module}: {wrong}")
    return found


def _wrong(module: str, name: str, item: Import) -> str:
    top = "numpy" if item.module == LATER else item.module.partition(".")[0]
    room, file = ROOMS[name], module.rpartition(".")[2]
    if item.module.startswith("."):
        return "write the module's full name"
    if top in sys.stdlib_module_names:
        pure = room.pure and file not in room.impure
        return f"{top} is not for a pure file, which has no clock, chance, log or environment" * (
            pure and top in IMPURE
        )
    if top in ("sim", "calibrate", "scenarios"):
        return "write batchsim and what is inside it"
    if top in ("batchsim", "tools"):
        return _wrong_own(module, name, item)
    if top in room.inside and not item.inside:
        return f"{top} is allowed here only inside a function"
    if top not in room.outsiders | room.inside | room.of_file.get(file, frozenset()):
        return f"{top} is not allowed in {name or 'batchsim'}"
    return ""


def _wrong_own(module: str, name: str, item: Import) -> str:
    room, target = ROOMS[name], room_of(item.module)
    if target is None:
        return "this module is in no room of tests/test_architecture.py"
    if item.module in LEAPS and name != "kernel":
        return "leaps are made through batchsim.kernel.leaping"
    if target == name:
        return ""
    if _holds_lower_rooms(module, name):
        return "what is imported with a lower room imports nothing"
    other = ROOMS[target]
    if other.guests and name not in other.guests:
        return f"only {' and '.join(other.guests)} may import {target}"
    if other.floor >= room.floor:
        return f"{target or 'batchsim'}, floor {other.floor}, is not below {name}, floor {room.floor}"
    if room.lazy and not item.inside and not item.checking and other.floor > 0:
        return "heavy imports stand inside the functions that need them"
    return ""


def _holds_lower_rooms(module: str, name: str) -> bool:
    """Whether `module` is the __init__ of a package with rooms of lower floors inside, which Python runs before
    them."""
    inner = [ROOMS[other].floor for other in ROOMS if name and other.startswith(f"{name}.")]
    return module in PACKAGES_KNOWN and bool(inner) and min(inner) < ROOMS[name].floor


def outsiders_loaded(module: str, sources: Mapping[str, str]) -> dict[str, str]:
    """Third-party packages that importing `module` loads, each with the module of ours that imports it."""
    found: dict[str, str] = {}
    seen: set[str] = set()
    todo, known = [module], frozenset(sources)
    while todo:
        one = todo.pop()
        if one in seen or one not in sources:
            continue
        seen.add(one)
        todo += [one.rpartition(".")[0]]
        for item in imports_of(sources[one], known):
            if item.inside or item.checking:
                continue
            top = item.module.partition(".")[0]
            if top in ("batchsim", "tools"):
                todo.append(item.module)
            elif top not in sys.stdlib_module_names:
                found.setdefault(top, one)
    return found


def test_imports_keep_to_the_floors() -> None:
    """A file imports only lower floors, its own room, and the outsiders its room may."""
    found = [line for module, path in SOURCES.items() for line in complaints(module, path.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


def test_a_room_has_its_package_and_rooms_of_one_floor_are_apart() -> None:
    """No row is left over from a package that is gone; the floors make the packages' graph free of circles."""
    assert [name for name in ROOMS if f"batchsim.{name}".rstrip(".") not in PACKAGES_KNOWN] == ["tools"]


def test_files_with_a_rule_of_their_own_exist() -> None:
    """No rule is left over from a file that is gone."""
    there = {(room_of(module), module.rpartition(".")[2]) for module in SOURCES}
    named = {(name, file) for name, room in ROOMS.items() for file in {*room.of_file, *room.impure}}
    assert named <= there


def test_a_gpu_machine_loads_what_it_has() -> None:
    """Nothing that calibrate imports, however far down, needs more than torch and a few besides."""
    sources = {module: path.read_text(encoding="utf-8") for module, path in SOURCES.items()}
    mine = [module for module in SOURCES if module.startswith("batchsim.calibrate.")]
    wrong = {
        module: lacking
        for module in mine
        if (lacking := {k: v for k, v in outsiders_loaded(module, sources).items() if k not in BOX})
    }
    assert wrong == {}
    assert "pandas" in outsiders_loaded("batchsim.metrics.kpis", sources | {"batchsim.metrics": "import pandas"})


def test_the_page_waits_for_no_library_that_draws() -> None:
    """Loading one takes about as long as all else together until the first picture of `view`."""
    sources = {module: path.read_text(encoding="utf-8") for module, path in SOURCES.items()}
    assert "matplotlib" not in outsiders_loaded("batchsim.view.view_server", sources)
    assert "matplotlib" in outsiders_loaded("batchsim.view.lanes", sources | {"batchsim.view": "import matplotlib"})


def imported(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """For each module the modules of `sources` that it imports, for type checkers and inside functions too."""
    known = frozenset(sources)
    return {one: {i.module for i in imports_of(text, known)} & known - {one} for one, text in sources.items()}


def circles(graph: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """The largest groups of modules in which each imports, directly or not, every other."""
    left, found = {one: set(others) for one, others in graph.items()}, set[frozenset[str]]()
    while True:
        try:
            TopologicalSorter(left).prepare()
        except CycleError as error:
            start = error.args[1][0]
        else:
            return found
        circle = _reached(left, start) & _reached(_turned(left), start)
        found.add(frozenset(circle))
        left = {one: others - circle for one, others in left.items() if one not in circle}


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen, todo = set[str](), [start]
    while todo:
        for one in graph.get(todo.pop(), set()) - seen:
            seen.add(one)
            todo.append(one)
    return seen


def _turned(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    return {one: {other for other, others in graph.items() if one in others} for one in graph}


def test_no_files_import_each_other_in_a_circle() -> None:
    """Files of one room have floors as well."""
    texts = {module: path.read_text(encoding="utf-8") for module, path in SOURCES.items()}
    assert circles(imported(texts)) == set()


def test_a_circle_is_found_however_long_and_however_hidden() -> None:
    """Two that know each other for a type checker or inside a function, and three in a row, are circles; a diamond is
    none."""
    sources = {
        "a": "import b\nimport c",
        "b": "import d",
        "c": "import d",
        "d": "if TYPE_CHECKING:\n    import e",
        "e": "def f():\n    import d",
        "f": "import g",
        "g": "import h\nimport a",
        "h": "import f",
    }
    assert circles(imported(sources)) == {frozenset("de"), frozenset("fgh")}


def test_no_file_outgrows_the_limit() -> None:
    """No file is longer than MAX_LINES."""
    too_long = {module: _too_long(path.read_text(encoding="utf-8")) for module, path in SOURCES.items()}
    assert {module: lines for module, lines in too_long.items() if lines} == {}


def _too_long(source: str) -> int:
    return max(source.count("\n") - MAX_LINES, 0)


def test_documents_name_files_that_exist() -> None:
    """Every path of ours that a document names is in the tree; an example may be named beside `gated`."""
    missing = {document: _missing((ROOT / document).read_text(encoding="utf-8")) for document in DOCUMENTS}
    assert {document: paths for document, paths in missing.items() if paths} == {}


def test_the_recipes_name_what_files_have() -> None:
    """Where CONTRIBUTING says `name` of `file`, or in it, the file has that name."""
    assert not _absent((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))


_PATH = re.compile(r"(?<![\w/.-])((?:sim|calibrate|scenarios|tests|tools|notebooks|\.ci)/[\w./-]*\w)")


_NAME_OF = re.compile(r"`(\w+)`\s(?:of|in)\s`([\w./-]+\.py)`")


def _absent(text: str) -> list[str]:
    named = [(name, ROOT / path) for name, path in _NAME_OF.findall(text) if (ROOT / path).exists()]
    return [name for name, path in named if not re.search(rf"\b{name}\b", path.read_text(encoding="utf-8"))]


def _missing(text: str) -> list[str]:
    return [path for path in _PATH.findall(text) if not (ROOT / path).exists()]


WRONG = {
    "upwards": ("batchsim.kv.choice", "from batchsim.cli import app", "cli, floor 19, is not below kv, floor 2"),
    "upwards_by_name": ("batchsim.kernel.core", "from batchsim.kv import choice", "kv, floor 2, is not below kernel"),
    "upwards_inside": ("batchsim.kv.choice", "def f():\n    import batchsim.study.curves.run", "is not below kv"),
    "later": ("batchsim.kv.choice", "from batchsim.base.later import np", "numpy is not allowed in kv"),
    "sideways": ("batchsim.kv.choice", "import batchsim.cost.roofline", "cost, floor 2, is not below kv, floor 2"),
    "for_checkers": (
        "batchsim.kernel.types",
        "if TYPE_CHECKING:\n    from batchsim.kv.choice import new_kv",
        "kv, floor 2, is not below kernel, floor 1",
    ),
    "families": (
        "batchsim.policies.families.static",
        "from batchsim.policies.registry import POLICIES",
        "policies, floor 5, is not below policies.families, floor 3",
    ),
    "init": ("batchsim.policies", "from batchsim.policies.families import static", "imports nothing"),
    "package_root": ("batchsim.metrics.measure", "import batchsim", "batchsim, floor 20, is not below metrics"),
    "old_name": ("batchsim.metrics.measure", "import sim", "write batchsim"),
    "numpy_below": ("batchsim.kernel.types", "import numpy as np", "numpy is not allowed in kernel"),
    "numpy_in_core": ("batchsim.kernel.core", "import numpy", "numpy is not allowed in kernel"),
    "pydantic": ("batchsim.metrics.measure", "from pydantic import BaseModel", "pydantic is not allowed in metrics"),
    "yaml": ("batchsim.study.curves.run", "import yaml", "yaml is not allowed in study.curves"),
    "plots": ("batchsim.report.text.summary_text", "import matplotlib.pyplot", "matplotlib is not allowed"),
    "unknown": ("batchsim.cost.roofline", "import sklearn", "sklearn is not allowed"),
    "clock": ("batchsim.policies.families.dynamic", "import time", "time is not for a pure file"),
    "chance": ("batchsim.policies.systems.vllm.vllm", "from random import Random", "random is not for a pure file"),
    "leaps": (
        "batchsim.drive.stepping",
        "from batchsim.kernel.leaps_ahead import leap_ahead",
        "batchsim.kernel.leaping",
    ),
    "log": ("batchsim.kernel.core", "def f():\n    import logging", "logging is not for a pure file"),
    "environment": ("batchsim.kernel.core", "from os import environ", "os is not for a pure file"),
    "torch": ("batchsim.drive.live", "import torch", "torch is not allowed"),
    "torch_in_cli": ("batchsim.cli", "def f():\n    import torch", "torch is not allowed"),
    "calibrate": (
        "batchsim.report",
        "def f():\n    import batchsim.calibrate.profile.fit",
        "only cli and tools may import calibrate.profile",
    ),
    "calibrate_early": ("batchsim.cli", "from batchsim.calibrate.profile import fit", "heavy imports stand inside"),
    "engine_looks_back": (
        "batchsim.calibrate.engine.session",
        "if TYPE_CHECKING:\n    from batchsim.calibrate.profile.this_machine import Sentinel",
        "only cli and tools may import calibrate.profile",
    ),
    "tools": ("batchsim.calibrate.profile.fit", "from tools.campaign import stages", "only tools may import tools"),
    "heavy_cli": ("batchsim.cli", "from batchsim.study.curves.run import run", "heavy imports stand inside"),
    "heavy_root": ("batchsim", "from batchsim.metrics.measure import summary", "heavy imports stand inside"),
    "heavy_parquet": ("batchsim.workload.traces.read_trace", "import pyarrow", "only inside a function"),
    "box": (
        "batchsim.calibrate.profile.bench",
        "from batchsim.results import read",
        "results, floor 10, is not below",
    ),
    "relative": ("batchsim.kv.choice", "from .types import Sequence", "full name"),
    "stranger": ("batchsim.helpers", "", "is in no room"),
    "to_stranger": ("batchsim.study.curves.run", "import batchsim.helpers", "is in no room"),
    "in_a_branch": (
        "batchsim.kv.choice",
        "try:\n    import numpy\nexcept ImportError:\n    pass",
        "numpy is not allowed",
    ),
    "not_for_checkers": (
        "batchsim.kernel.core",
        "if TYPE_CHECKING:\n    pass\nelse:\n    import numpy",
        "numpy is not",
    ),
}


@pytest.mark.parametrize(("module", "source", "complaint"), WRONG.values(), ids=WRONG)
def test_each_rule_can_complain(module: str, source: str, complaint: str) -> None:
    """A source that breaks one rule draws exactly the complaint of that rule."""
    (found,) = complaints(module, source)
    assert complaint in found


RIGHT = {
    "downwards": ("batchsim.kernel.core", "from batchsim.base.errors import SchedulerStalled\nimport heapq"),
    "for_checkers": (
        "batchsim.kernel.types",
        "if TYPE_CHECKING:\n    from batchsim.kernel.kv_blocks import CountingKV",
    ),
    "own_room": ("batchsim.policies.families.dynamic", "from batchsim.policies.families.padded_batch import pad"),
    "inner_package": ("batchsim.policies.systems.vllm.vllm", "from batchsim.policies.systems.vidur.orca import Orca"),
    "lazily_for_checkers": ("batchsim.cli", "if TYPE_CHECKING:\n    from batchsim.results.read import Results"),
    "numpy_of_one_file": ("batchsim.kernel.record", "import numpy"),
    "live_clock": ("batchsim.drive.live", "import time"),
    "command": (
        "batchsim.cli",
        "import typer\ndef f():\n    import batchsim.study.curves.run\n    import batchsim.calibrate.profile.fit",
    ),
    "box": (
        "batchsim.calibrate.profile.bench",
        "import torch\nfrom batchsim.kernel.core import EngineCore\nfrom batchsim.drive.live import live",
    ),
}


@pytest.mark.parametrize(("module", "source"), RIGHT.values(), ids=RIGHT)
def test_what_is_allowed_draws_no_complaint(module: str, source: str) -> None:
    """The rules leave alone what the floors allow."""
    assert complaints(module, source) == []


def test_a_long_file_a_missing_path_and_a_missing_name_are_noticed() -> None:
    """The rules that do not look at imports can fail as well."""
    assert _too_long("x\n" * (MAX_LINES + 1)) == 1
    assert _absent("`POLICIES` in `sim/policies/registry.py`, `POLICY` of\n`sim/policies/registry.py`") == ["POLICY"]
    assert _missing("see `sim/nowhere.py`, sim/kv/choice.py and tests/unit.") == ["sim/nowhere.py"]
