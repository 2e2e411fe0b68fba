"""Every public name has an example in its docstring, and what the example prints is so."""

from __future__ import annotations

import doctest
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import batchsim
from batchsim.api.results import Plots, Results

PUBLIC: dict[str, Any] = {name: getattr(batchsim, name) for name in batchsim.__all__}
PUBLIC |= {"Results.requests": Results.requests, "Results.explain": Results.explain, "Results.plot": Plots}
MAKERS = {"scenario": "Scenario", "results": "run", "study": "capacity", "planned": "plan"}
"""Names that examples use without making them: the public name whose own example does."""
SEARCHES = ("capacity", "plan", "find_capacities", "plan_tables", "capacity_text", "capacity_picture")  # take seconds
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def examples_of(text: str) -> list[doctest.Example]:
    """The examples in a docstring, with what each is to print."""
    return doctest.DocTestParser().get_examples(text)


def used(name: str) -> list[str]:
    """The MAKERS whose names the example of a public name needs, those of these included."""
    words = {word for example in examples_of(PUBLIC[name].__doc__) for word in re.findall(r"\w+", example.source)}
    direct = [made for made, maker in MAKERS.items() if made in words and maker != name]
    return list(dict.fromkeys(each for made in direct for each in (*used(MAKERS[made]), made)))


def failures(name: str, text: str, names: dict[str, Any]) -> str:
    """Runs the examples in `text` on `names`, which it adds to; what is not as it says, "" if all is."""
    said: list[str] = []
    found = doctest.DocTest(examples_of(text), names, name, None, None, text)
    doctest.DocTestRunner(verbose=False, optionflags=FLAGS).run(found, out=said.append, clear_globs=False)
    names |= found.globs  # a copy of `names`
    return "".join(said)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@cache
def _made(name: str, folder: Path) -> dict[str, Any]:
    """The names that the example of a public name leaves, after those that it uses; `folder` is the current one."""
    names: dict[str, Any] = {"batchsim": batchsim, "Path": Path}
    for made in used(name):
        names |= _made(MAKERS[made], folder)
    assert failures(name, PUBLIC[name].__doc__, names) == ""
    return names


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SEARCHES else ()) for name in PUBLIC],
)
def test_the_example_of_a_public_name_is_so(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It prints what the docstring says, in a folder in which the examples that it builds on have run."""
    monkeypatch.chdir(folder)
    assert examples_of(PUBLIC[name].__doc__), "has no example"
    _made(name, folder)


def test_an_example_that_is_not_so_is_noticed() -> None:
    """Another value and an error are; what is left out by an ellipsis is not."""
    assert failures("x", ">>> 1 + 1\n2\n>>> print('abc')\na...\n", {}) == ""
    assert "Expected:\n    3\nGot:\n    2" in failures("x", ">>> 1 + 1\n3\n", {})
    assert "NameError" in failures("x", ">>> unknown\n", {})
