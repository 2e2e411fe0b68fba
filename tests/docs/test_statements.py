"""What documents state of the tree is so: decisions, folders of tests, the mutants drawn, verdicts, names of code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_architecture import DOCUMENTS, SOURCES

ROOT = Path(__file__).parents[2]
JUDGED = ("vllm", "llama_cpp")
"""Engines whose judgement is kept in results/reference/engines."""


def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def numbers_of_decisions(text: str) -> list[int]:
    """The numbers of the decisions of a document, as they follow each other."""
    return [int(number) for number in re.findall(r"^(\d+)\. \*\*", text, re.M)]


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
    """The decisions of DESIGN.md are 1, 2, 3 and so on, so that a number names one."""
    numbers = numbers_of_decisions(_text("sim/DESIGN.md"))
    assert numbers == list(range(1, len(numbers) + 1)) and numbers


def test_every_folder_of_tests_is_in_the_table() -> None:
    """CONTRIBUTING.md says what each folder of tests holds, and names no other."""
    rows = re.findall(r"^\| `tests/(\w+)` \|", _text("CONTRIBUTING.md"), re.M)
    files = (path for path in (ROOT / "tests").glob("*/**/*.*") if path.suffix != ".pyc")
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in files}
    assert sorted(rows) == sorted(folders)


def test_the_sample_of_mutants_is_as_stated() -> None:
    """As many mutants as CONTRIBUTING.md says are drawn, and the check fails below the share it says."""
    drawn = re.search(r"--sample (\d+) .*--least (\d+)", _text("Makefile"))
    stated = re.search(r"draws (\d+) by the commit's hash: below (\d+) %", _text("CONTRIBUTING.md"))
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
    """Two decisions of one number, and names that are gone, are found."""
    assert numbers_of_decisions("1. **A.** b\n11. **C.** d\n11. **E.** f") == [1, 11, 11]
    text = "`batchsim.kernel.core.EngineCore`, `batchsim.kernel.core.SimExecutor`, batchsim.kernel.decode"
    assert unknown_names(text) == ["batchsim.kernel.core.SimExecutor", "batchsim.kernel.decode"]
