"""What documents state of the tree is so: decisions, folders of tests, the mutants drawn, verdicts, names of code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.test_architecture import DOCUMENTS, SOURCES

ROOT = Path(__file__).parents[2]
JUDGED = ("vllm", "llama_cpp")
"""Engines whose judgement is kept in results/reference/engines."""


def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def misnumbered(index: str, headings: Mapping[str, str]) -> list[str]:
    """The decisions that are not number 1, 2, 3 and so on alike in their files' names, `headings` and the `index`."""
    rows = re.findall(r"^\| \[(\d+)\]\(decisions/(.+?)\) \| (.+) \|$", index, re.M)
    listed = {f"{int(number):02}": (name, title) for number, name, title in rows}
    wrong = [
        name
        for number, (name, heading) in enumerate(sorted(headings.items()), 1)
        if not name.startswith(f"{number:02}-")
        or listed.get(f"{number:02}") != (name, heading.removeprefix(f"# {number}. "))
    ]
    return wrong + ["the index"] * (len(rows) != len(headings))


def unknown_names(text: str) -> list[str]:
    """The dotted names in `text` that begin with batchsim and are neither a module nor in the module they name."""
    found = []
    for name in sorted(set(re.findall(r"\bbatchsim(?:\.\w+)+", text)) - {"batchsim.schema.json"}):  # editors' file
        words = name.split(".")
        cut = next(n for n in range(len(words), 0, -1) if ".".join(words[:n]) in SOURCES)
        source = SOURCES[".".join(words[:cut])]
        stub = source.with_suffix(".pyi")  # which has the names that a package fetches when asked for
        module = "".join(path.read_text(encoding="utf-8") for path in (source, stub) if path.exists())
        if words[cut:] and not re.search(rf"\b{words[cut]}\b", module):
            found.append(name)
    return found


def test_decisions_are_numbered_once() -> None:
    """A number names one decision: in the name and the heading of its file, and in the index of DESIGN.md."""
    headings = {path.name: path.read_text().partition("\n")[0] for path in (ROOT / "sim/decisions").iterdir()}
    assert misnumbered(_text("sim/DESIGN.md"), headings) == [] and headings


def test_every_folder_of_tests_is_in_the_table() -> None:
    """CONTRIBUTING.md says what each folder of tests holds, and names no other."""
    rows = re.findall(r"^\| `tests/(\w+)` \|", _text("CONTRIBUTING.md"), re.M)
    files = (path for path in (ROOT / "tests").glob("*/**/*.*") if path.suffix != ".pyc")
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in files}
    assert sorted(rows) == sorted(folders)


def test_the_sample_of_mutants_is_as_stated() -> None:
    """As many mutants as CONTRIBUTING.md says are drawn, and the check fails below the share it says."""
    drawn = re.search(r"--sample (\d+) .*--least (\d+)", _text("Makefile"))
    stated = re.search(r"draws (\d+) by the commit's hash[^:]*: below (\d+) %", _text("CONTRIBUTING.md"))
    assert drawn and stated and drawn.groups() == stated.groups()


@pytest.mark.parametrize("engine", JUDGED)
def test_the_verdict_on_an_engine_is_as_judged(engine: str) -> None:
    """docs/validation.md says of each judged engine, beside its folder, that its bounds were met or not."""
    folder = f"results/reference/engines/{engine}"
    verdicts = set(re.findall(r'"verdict": "([^"]+)"', _text(f"{folder}/judgement.json")))
    stated = re.search(
        rf"^- \*\*[^*]+\*\*: .*?, and (met|\*\*not met\*\*)[^-]*?`{folder}`", _text("docs/validation.md"), re.M
    )
    assert verdicts and stated and (stated[1] == "met") == (verdicts == {"met"})


def test_sources_and_documents_name_what_exists() -> None:
    """A dotted name of ours, in a docstring, a comment or a document, is of a module or of something in it."""
    texts = {module: path.read_text(encoding="utf-8") for module, path in SOURCES.items()}
    texts |= {document: _text(document) for document in DOCUMENTS if document != "CHANGELOG.md"}  # which has a past
    assert {where: names for where, text in texts.items() if (names := unknown_names(text))} == {}


def test_what_is_not_so_is_noticed() -> None:
    """Decisions of a wrong number or title, and names that are gone, are found."""
    index = "| [1](decisions/01-a.md) | A |\n| [2](decisions/02-b.md) | B |"
    assert misnumbered(index, {"01-a.md": "# 1. A", "02-b.md": "# 2. B"}) == []
    assert misnumbered(index, {"01-a.md": "# 1. A", "02-b.md": "# 1. B"}) == ["02-b.md"]
    assert misnumbered(index, {"01-a.md": "# 1. A", "01-b.md": "# 2. B"}) == ["01-b.md"]
    assert misnumbered(index, {"01-a.md": "# 1. A"}) == ["the index"]
    text = "`batchsim.kernel.core.EngineCore`, `batchsim.kernel.core.SimExecutor`, batchsim.kernel.decode"
    assert unknown_names(text) == ["batchsim.kernel.core.SimExecutor", "batchsim.kernel.decode"]
