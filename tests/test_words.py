"""The subject of a docstring is a noun of the domain: words that stand for none are in no docstring of the package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.test_architecture import SOURCES

VAGUE = re.compile(
    r"\b(nobody|somebody|anybody|told|tells|telling|what of|whom|so many|becomes? of|those (?:that|who|which)"
    r"|(?:of|by|to|for|with|as|if) who|who (?:is|has|was|are|were|have))\b",
    re.IGNORECASE,
)
"""Words in place of a noun: of a sequence, a client, a number that has a name, an outcome."""
QUOTED = re.compile(r"`[^`]*`")


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
    return [
        f"line {line}: {found}"
        for line, text in docstrings(ast.parse(source))
        for found in VAGUE.findall(QUOTED.sub("", text))
    ]


@pytest.mark.parametrize("module", [name for name in SOURCES if not name.startswith("tools")])
def test_docstrings_name_their_subject(module: str) -> None:
    """No docstring of the package has a word of VAGUE."""
    assert vague_words(SOURCES[module].read_text(encoding="utf-8")) == []


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
