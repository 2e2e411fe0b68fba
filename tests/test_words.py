"""Words that stand for no noun of the domain are neither in docstrings of the package nor names of values."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.test_architecture import SOURCES

PACKAGE = [name for name in SOURCES if not name.startswith("tools")]
VAGUE = re.compile(
    r"\b(nobody|somebody|anybody|told|tells|telling|what of|whom|so many|becomes? of|those (?:that|who|which)"
    r"|(?:of|by|to|for|with|as|if) who|who (?:is|has|was|are|were|have))\b",
    re.IGNORECASE,
)
"""Words in place of a noun: of a sequence, a client, a number that has a name, an outcome."""
QUOTED = re.compile(r"`[^`]*`")
EMPTY = frozenset({"found", "mine", "its", "told"})
"""Names that say nothing of a value. The columns of a class may have them: they are what users read."""
CANDIDATE = re.compile(rf"\b_*(?:{'|'.join(sorted(EMPTY))})\b(?!\s+(?!(?:in|if|as)\b)[A-Za-z(`])")
"""Such a word where a name may be bound: no word of a sentence follows it. Most files need not be parsed for it."""


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring, those of assigned names included."""
    for node in ast.walk(tree):
        body = node.body if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else []
        for statement in body:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


def vague_words(source: str) -> list[str]:
    """ "line 3: nobody" for each word of VAGUE in a docstring of `source`, but for quoted code."""
    if not VAGUE.search(source):
        return []
    return [
        f"line {line}: {word}"
        for line, text in docstrings(ast.parse(source))
        for word in VAGUE.findall(QUOTED.sub("", text))
    ]


def test_docstrings_name_their_subject() -> None:
    """No docstring of the package has a word of VAGUE."""
    words = {module: vague_words(SOURCES[module].read_text(encoding="utf-8")) for module in PACKAGE}
    assert {module: vague for module, vague in words.items() if vague} == {}


def test_a_vague_word_is_noticed() -> None:
    """In the docstring of a module, a class, a function or a name; not in code, comments, messages or quoted names."""
    source = '''"""What of it."""
LIMIT = 3
"""Of so many."""
class A:
    """Those that
    wait."""
    told: int = 0  # nobody asks
    def f(self) -> str:
        """Whether it is Told, as `told` says."""
        return "nobody is told"
'''
    assert sorted(vague_words(source)) == ["line 1: What of", "line 3: so many", "line 5: Those that", "line 9: Told"]


def empty_names(source: str) -> list[str]:
    """ "line 3: found" for each variable, loop variable, parameter and function of `source` called by a word of EMPTY,
    underscores before it or not."""
    if not CANDIDATE.search(source):
        return []
    nodes = [*ast.walk(ast.parse(source))]
    columns = {
        statement.target
        for node in nodes
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
    }
    names: list[tuple[int, str]] = []
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in columns:
            names.append((node.lineno, node.id))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.append((node.lineno, node.name))
        elif isinstance(node, ast.arg):
            names.append((node.lineno, node.arg))
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            names.append((node.lineno, node.name))
    return [f"line {line}: {name}" for line, name in sorted(names) if name.lstrip("_") in EMPTY]


def test_values_have_the_names_of_what_they_are() -> None:
    """No variable, parameter or function is called by a word of EMPTY."""
    names = {module: empty_names(SOURCES[module].read_text(encoding="utf-8")) for module in PACKAGE}
    assert {module: empty for module, empty in names.items() if empty} == {}


def test_an_empty_name_is_noticed() -> None:
    """Of a variable, a loop, a parameter, a walrus, an error, a function; not of a column, an attribute, a keyword."""
    source = """class A:
    found: str
    told = 1
def f(its, *mine):
    for found in its:
        told: int = 3
    return [1 for mine in its], (found := 2), lambda told: 4
try:
    g(found=1).told = h.its
except Error as its:
    pass
def _told(): ...
"""
    lines = "3: told,4: its,4: mine,5: found,6: told,7: found,7: mine,7: told,10: its,12: _told"
    assert empty_names(source) == [f"line {line}" for line in lines.split(",")]
