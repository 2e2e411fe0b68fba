"""The commands of the README and of the pages in docs run as printed, page by page in the order of the site.

Every ```console block stands under a comment that says what the tests do with it:

    <!-- test: run -->           its commands succeed
    <!-- test: output -->        and print what the block shows, times and paths of temporary folders aside
    <!-- test: slow -->          they succeed; left to `make test-all`
    <!-- test: slow output -->   both of the last two
    <!-- test: not run: why -->  for what needs a GPU, a network or a clone; the reason is for the reader of the source

Commands are the lines that begin with `$ `; a line that ends in a backslash goes on. They run in order, in a folder
that looks like the clone but keeps its own results, with this interpreter's programs first on the PATH.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.tiny_scenario import batchsim

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [
    README,
    *(DOCS / name for name in re.findall(r"[\w/-]+\.md", (ROOT / "zensical.toml").read_text(encoding="utf-8"))),
]
PAGES = [page for page in PAGES if "reference" not in page.parts and page.exists()]
LIMIT_S = 300
_SHELL = "|&;<>$`~#"  # what a shell does to words but for finding files, and between commands
OWN = frozenset({"results", ".git", ".venv"})  # not linked into the folder in which commands run

_BLOCK = re.compile(
    r"(?:^<!-- test: (?P<mark>[^\n]*?) -->\n+)?^```console\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
_MARKS = re.compile(r"run|output|slow|slow output|not run: .+")


@dataclass(frozen=True)
class Block:
    """A console block: its mark, "" if it has none, its commands, and the output shown below each."""

    line: int
    mark: str
    commands: tuple[str, ...]
    outputs: tuple[str, ...]


def blocks(text: str) -> list[Block]:
    """The console blocks of a Markdown text, in order."""
    found = []
    for match in _BLOCK.finditer(text):
        commands: list[str] = []
        outputs: list[str] = []
        goes_on = False
        for line in match["body"].splitlines():
            if goes_on:
                commands[-1] += "\n" + line
            elif line.startswith("$ "):
                commands.append(line[2:])
                outputs.append("")
            elif commands:
                outputs[-1] += line + "\n"
            goes_on = bool(commands) and commands[-1].endswith("\\") and (goes_on or line.startswith("$ "))
        line = text.count("\n", 0, match.start("body")) + 1
        found.append(Block(line, match["mark"] or "", tuple(commands), tuple(outputs)))
    return found


def unmarked(text: str) -> list[str]:
    """Blocks that a reader might copy and no one tries, one line each."""
    return [
        f"line {block.line}: {'mark ' + repr(block.mark) + ' is unknown' if block.mark else 'no mark'}"
        for block in blocks(text)
        if not _MARKS.fullmatch(block.mark) or not block.commands
    ]


def _plain(output: str) -> list[str]:
    """Lines of an output without what differs from run to run: durations and point hashes."""
    text = re.sub(r"\d+(?:[.,]\d+)*\s?(?:s|ms|min)\b", "<time>", output)
    text = re.sub(r"\b[0-9a-f]{12,64}\b", "<hash>", text)
    return [line.rstrip() for line in text.strip().splitlines()]


def _tried(page: Path) -> list[Block]:
    """The blocks of a page that tests run, in order."""
    return [block for block in blocks(page.read_text(encoding="utf-8")) if not block.mark.startswith("not run")]


def _parameters() -> list[object]:
    return [
        pytest.param(
            page,
            block,
            id=f"{page.stem}-line{block.line}",
            marks=[pytest.mark.slow] if block.mark.startswith("slow") else [],
        )
        for page in PAGES
        for block in _tried(page)
    ]


@dataclass
class Clone:
    """A folder that looks like the clone, and the blocks that ran in it."""

    folder: Path
    ran: set[tuple[Path, int]] = field(default_factory=set)

    def before(self, page: Path, block: Block) -> list[Block]:
        """Blocks above a block on its page that did not run here, since others or none of them were asked for: quick
        ones, and before a slow one slow ones too."""
        slow = block.mark.startswith("slow")
        above = (other for other in _tried(page) if other.line < block.line)
        return [o for o in above if (slow or not o.mark.startswith("slow")) and (page, o.line) not in self.ran]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    folder = tmp_path_factory.mktemp("clone")
    for entry in ROOT.iterdir():
        if entry.name not in OWN:
            (folder / entry.name).symlink_to(entry)
    return Clone(folder)


def _run(command: str) -> tuple[int, str, str]:
    """The exit code, the output and the errors of a command: inside this process where it is one call of batchsim,
    since to start a Python and import pandas costs more than many a call."""
    if command.startswith("batchsim ") and not set(_SHELL) & set(command):
        words = shlex.split(command.replace("\\\n", "\n"))[1:]
        done = batchsim(*(path for word in words for path in sorted(glob.glob(word)) or [word]))
        return done.exit_code, done.stdout, done.stderr
    done = subprocess.run(
        ["bash", "-c", command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("page", "block"), _parameters())
def test_a_block_runs(page: Path, block: Block, clone: Clone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command of a marked block succeeds, and prints what it is shown to print where the mark says so."""
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(clone.folder)
    for tried in [*clone.before(page, block), block]:
        clone.ran.add((page, tried.line))
        for command, shown in zip(tried.commands, tried.outputs, strict=True):
            code, output, errors = _run(command)
            assert code == 0, f"{command}\n{output}{errors}"
            if tried.mark.endswith("output"):
                assert _plain(output) == _plain(shown), command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_says_how_it_is_tested(page: Path) -> None:
    """No console block of a page escapes."""
    assert unmarked(page.read_text(encoding="utf-8")) == []


def test_every_page_is_in_the_site() -> None:
    """Pages of docs are those that zensical.toml names, so that no command escapes; the README is short."""
    assert set(DOCS.rglob("*.md")) == set(PAGES) - {README}
    assert README.read_text(encoding="utf-8").count("\n") <= 200


SAMPLE = """
<!-- test: output -->
```console
$ echo one \\
    two
one two
$ true
```

```console
$ make demo
```

<!-- test: often -->
```console
$ false
```
"""


def test_blocks_are_read_with_their_outputs() -> None:
    """Marks, continued commands and outputs are told apart; what has no known mark is named by its line."""
    first, second, _ = blocks(SAMPLE)
    assert (first.mark, first.commands, first.outputs) == (
        "output",
        ("echo one \\\n    two", "true"),
        ("one two\n", ""),
    )
    assert (second.mark, second.commands) == ("", ("make demo",))
    assert unmarked(SAMPLE) == ["line 11: no mark", "line 16: mark 'often' is unknown"]


def test_outputs_are_compared_but_for_times_and_hashes() -> None:
    """A changed number is a difference; a changed duration or hash is not."""
    assert _plain("8 runs in 1.5 s at 0123456789ab\n") == _plain("8 runs in 27 s at ba9876543210  ")
    assert _plain("8 runs in 1.5 s") != _plain("9 runs in 1.5 s")
