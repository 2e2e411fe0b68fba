"""Writes the sources of the accelerated wheel: batchsim with its hot packages compiled by mypyc.

    python tools/accelerated_wheel.py [FOLDER]      (as `make accelerated` does; build/accelerated without FOLDER)
    python tools/accelerated_wheel.py --check       (as `make lint` does: only whether mypyc would take the sources)

FOLDER, anew, is a project of its own from which pip makes the wheel for one version of Python and kind of machine, and
cibuildwheel those of a release: `setup.py` there is this file. What is compiled is a copy of the sources in which mypyc
is told more of classes (see `message`); the wheel holds the sources as they are beside it.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import sys
import tomllib
from pathlib import Path

from mypy.api import run  # pyright: ignore[reportMissingImports, reportUnknownVariableType]
from mypyc.build import mypycify  # pyright: ignore[reportMissingImports, reportUnknownVariableType]
from setuptools import find_packages, setup

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
FOLDERS = {"batchsim": "sim", "batchsim/calibrate": "calibrate", "batchsim/scenarios": "scenarios"}
COMPILED = (
    "kernel/*.py",
    "kv/*.py",
    "policies/families/**/*.py",
    "policies/systems/**/*.py",
    "cost/roofline.py",
    "cost/calibrated.py",
    "cost/segments.py",
    "drive/instant.py",
)
"""What every step runs through, as patterns of the package's files."""
LEFT = "kernel/policy_config.py"
"""A setup takes objects of its classes to other processes; compiled, a frozen one with slots cannot be unpickled."""

MYPY_INI = """[mypy]
follow_imports = skip
[mypy-batchsim.*,numpy.*]
follow_imports = silent
"""
"""Types of other libraries are none that mypyc knows; to check those of transformers and Ray takes minutes."""

PRELUDE = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
def _of_python(hints, protocol=None):  # type: ignore
    def with_hints(kind):  # type: ignore
        if protocol is not None:
            kept = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
            bases = [base for base in kind.__bases__ if base is not object]
            kind = type(protocol)(kind.__name__, (*bases, protocol), kept)
        kind.__annotations__ = hints
        for field in getattr(kind, "__dataclass_fields__", {}).values():
            field.type = hints.get(field.name, field.type)
        return kind
    return with_hints
"""
"""Known to every compiled file. A class with a decorator that mypyc does not know stays a class of Python, of whose
annotations mypyc keeps the outermost type alone: `_of_python` gives it the whole texts again. Nor does mypyc keep that
it is a protocol."""

MANY = 3
"""Of a class of Python with fewer subclasses mypyc takes no other ones, such as a config of a user's own policy."""


def message(source: str) -> str:
    """`source` with a decorator on each class, and its code unchanged.

    Python's classes may derive from all of them. They are native ones but for protocols; costs, which derive from a
    class that is not compiled; configs, whose fields pydantic and the checks of ranges read; and dataclasses with a
    field of a type imported for type checkers only, which may not exist yet when the class is made.
    """
    lines, tree = source.splitlines(keepends=True), ast.parse(source)
    checked = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    late = {name.name for node in checked for one in node.body for name in getattr(one, "names", ())}
    for node in tree.body:
        bases = {ast.unparse(base) for base in node.bases} if isinstance(node, ast.ClassDef) else set[str]()
        if not isinstance(node, ast.ClassDef) or bases & {"Enum", "NamedTuple"}:
            continue
        fields = [inner for inner in node.body if isinstance(inner, ast.AnnAssign)]
        hints = {ast.unparse(field.target): ast.unparse(field.annotation) for field in fields}
        has_late = bool(node.decorator_list) and not late.isdisjoint(hints.values())
        first = min(part.lineno for part in (node, *node.decorator_list)) - 1
        if not (has_late or bases & {"Protocol", "Cost"} or any(base.endswith("Config") for base in bases)):
            lines[first] = f"@mypyc_attr(allow_interpreted_subclasses=True)\n{lines[first]}"
            continue
        if any("ClassVar" in hint for hint in hints.values()):
            sys.exit(f"{node.name} has a ClassVar, which mypyc makes a field of. Make it a property.")
        for field in fields:
            if (hint := ast.unparse(field.annotation)) in late:
                lines[field.lineno - 1] = lines[field.lineno - 1].replace(f": {hint}", f': "{hint}"')
        protocol = ", Protocol" if "Protocol" in bases else ""
        lines[first] = f"@_of_python({hints!r}{protocol})\n{lines[first]}"
        if any(base.endswith("Config") for base in bases):
            more = [f"@_of_python({{}})\nclass _{node.name}{number}({node.name}): pass\n" for number in range(MANY)]
            lines[(node.end_lineno or node.lineno) - 1] += "".join(more)
    future = "from __future__ import annotations\n"
    return "".join(lines).replace(future, future + PRELUDE, 1)


def hot_sources() -> dict[Path, str]:
    """Text by file of what is compiled, in the working folder.

    mypyc would compute a cached property anew each time, and has no classes that make objects of another.
    """
    files = sorted({path for pattern in COMPILED for path in Path("batchsim").glob(pattern)})
    files = [path for path in files if path.name != "__init__.py" and path != Path("batchsim", LEFT)]
    sources = {path: path.read_text(encoding="utf-8") for path in files}
    left = ("cached_property", "def __new__")
    return {path: source for path, source in sources.items() if not any(word in source for word in left)}


def write_tree(tree: Path) -> None:
    """Writes the project from which the wheel is made."""
    shutil.rmtree(tree, ignore_errors=True)
    for inside, folder in FOLDERS.items():
        links = ("calibrate", "scenarios") if inside == "batchsim" else ()
        shutil.copytree(ROOT / folder, tree / inside, ignore=shutil.ignore_patterns("__pycache__", *links))
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copy(HERE, tree / "setup.py")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    needed = tomllib.loads(project)["project"]["optional-dependencies"]["accelerated"]
    with_mypy = project.replace('requires = ["setuptools>=77"]', f"requires = {json.dumps(needed)}", 1)
    assert with_mypy != project, "what builds the package is stated otherwise"
    (tree / "pyproject.toml").write_text(with_mypy, encoding="utf-8")
    (tree / "mypy.ini").write_text(MYPY_INI, encoding="utf-8")


def check(tree: Path) -> None:
    """Ends with what mypy says against the sources that would be compiled, if it does."""
    write_tree(tree)
    os.chdir(tree)
    sources = hot_sources()
    for path, source in sources.items():
        path.write_text(message(source), encoding="utf-8")
    said, errors, code = run(["--config-file=mypy.ini", *map(str, sources)])
    sys.exit(said + errors if code else None)


def build() -> None:
    """What pip runs as `setup.py`, in the tree."""
    sources = {} if sys.argv[1] in ("dist_info", "egg_info") else hot_sources()
    for path, source in sources.items():
        path.write_text(message(source), encoding="utf-8")
    # A file of C for each source: of one for all, gcc makes nothing in a quarter of an hour.
    options = {"opt_level": "1", "debug_level": "0", "group_name": "batchsim", "multi_file": True}
    compiled = mypycify(["--config-file=mypy.ini", *map(str, sources)], **options) if sources else []
    for path, source in sources.items():
        path.write_text(source, encoding="utf-8")
    setup(
        packages=find_packages(include=["batchsim", "batchsim.*"]),
        ext_modules=compiled,  # pyright: ignore[reportArgumentType]  distutils has two classes of that name
    )


if HERE.name == "setup.py":
    build()
elif __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        check(ROOT / "build" / "checked")
    else:
        write_tree(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "accelerated").resolve())
