"""Makes a Python process as bare as a GPU machine: with its folder on PYTHONPATH, nothing else can be imported.

Allowed are the packages in ALLOWED, what these need themselves, and the standard library; our own code may import only
the former, and ours.
"""

from __future__ import annotations

import functools
import re
import sys
from importlib import metadata
from importlib.abc import MetaPathFinder

ALLOWED = {
    "torch": "torch",
    "triton": "triton",
    "numpy": "numpy",
    "yaml": "pyyaml",
    "typer": "typer",
    "rich": "rich",
    "jinja2": "jinja2",  # comes with torch
}
OURS = ("batchsim", "tools")


class Bare(MetaPathFinder):
    """Finds nothing, and refuses what a bare machine does not have."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        top = fullname.partition(".")[0]
        if top in sys.stdlib_module_names or top in OURS or top in ALLOWED:
            return
        if top in (_installed() if _importer().partition(".")[0] in OURS else _others()):
            raise ModuleNotFoundError(f"No module named {fullname!r}: this process is bare", name=fullname)


def _importer() -> str:
    """The module that is importing."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("importlib"):
        frame = frame.f_back
    return "" if frame is None else frame.f_globals.get("__name__", "")


@functools.cache
def _installed() -> dict[str, set[str]]:
    """The top modules of all that is installed, with the packages that they come from."""
    return {top: {_plain(name) for name in names} for top, names in metadata.packages_distributions().items()}


@functools.cache
def _others() -> frozenset[str]:
    """The top modules of all that is installed besides what ALLOWED needs."""
    needed: set[str] = set()
    todo = list(ALLOWED.values())
    while todo:
        name = todo.pop()
        if name not in needed:
            needed.add(name)
            todo += _requirements(name)
    return frozenset(top for top, names in _installed().items() if not needed & names)


def _requirements(name: str) -> list[str]:
    """What a package needs without its extras; nothing if it is not installed."""
    try:
        wanted = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []
    return [_plain(re.split(r"[^\w.-]", one)[0]) for one in wanted if "extra ==" not in one]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


sys.meta_path.insert(0, Bare())
