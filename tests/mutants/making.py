"""The mutants of a file, made by mutmut: all in one source, the one to run chosen by name.

Properties are mutated like other functions. What mutmut leaves alone: other decorated functions, what stands outside of
functions, texts of errors (`do_not_mutate_patterns` in pyproject.toml). Left alone here: the None that an ordered set,
a dict, has for values; None for False, which is as false; `strict` of zip; the type that `cast` names, which nothing
reads; `>=` for `>` where the larger of two values is chosen.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from mutmut.configuration import config
from mutmut.mutation.file_mutation import mutate_file_contents

ROOT = Path(__file__).parents[2]
_SET_ITEM = re.compile(r"\w\] = None$")  # a dict whose values are None is an ordered set
_FLAG = re.compile(r"= False\b")
# Which of two equal values is the smaller or larger one.
_EITHER = re.compile(r"([\w.\[\]]+) if \1 ([<>])=? ([\w.\[\]]+) else \3(?![\w.\[(])")
# What zip checks of the program itself, and the type that cast names.
_UNREAD = re.compile(r", (strict=\w+)?(?=\))|(?<=\bcast\()[\w.\[\]]+, ")


@dataclass(frozen=True)
class Mutant:
    """One change: `name` is mutmut's, `where` the dotted name of the function."""

    name: str
    path: str
    where: str
    was: str
    now: str


def mutated_files() -> list[str]:
    """The files that pyproject.toml names, relative to the project."""
    paths = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "sim").rglob("*.py"))]
    return [path for path in paths if config().should_mutate(path)]


def mutate(path: str) -> tuple[str, list[Mutant]]:
    """The source of `path` with all its mutants, and these."""
    made = mutate_file_contents(path, _undecorated((ROOT / path).read_text(encoding="utf-8")))
    lines, module = made.code.splitlines(), "batchsim" + path.removeprefix("sim").removesuffix(".py").replace("/", ".")
    mutants = []
    for name in made.mutant_names:
        function = name.partition("__mutmut_")[0]
        original = f"{function}__mutmut_orig"
        was, now = (
            [line.strip() for line in lines[span.start - 1 : span.end]]
            for span in (made.line_span_by_function_name[n] for n in (original, name))
        )
        where = ".".join([module, *function.removeprefix("xǁ").removeprefix("x_").split("ǁ")])
        was, now = (
            [line.replace(made_name, where.rpartition(".")[2]) for line in text]
            for made_name, text in ((original, was), (name, now))
        )
        mutant = Mutant(f"{module}.{name}", path, where, *_difference(was, now))
        unnoticed = _SET_ITEM.search(mutant.was) or _FLAG.sub("= None", mutant.was) == mutant.now
        if not unnoticed and _essence(mutant.was) != _essence(mutant.now):
            mutants.append(mutant)
    return made.code, mutants


def _essence(line: str) -> str:
    """`line` without what no test can notice."""
    return _UNREAD.sub("", _EITHER.sub(r"\1 if \1 \2 \3 else \3", line))


def _undecorated(source: str) -> str:
    """`@property` as an assignment behind the function, since mutmut leaves decorated functions alone."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and [ast.unparse(d) for d in node.decorator_list] == ["property"]:
            at = node.decorator_list[0].lineno - 1
            last = (node.end_lineno or 0) - 1
            lines[last] += f"\n{' ' * node.col_offset}{node.name} = property({node.name})"
            lines[at] = ""
    return "\n".join(lines) + "\n"


def _difference(was: list[str], now: list[str]) -> tuple[str, str]:
    """The lines in which two texts differ, as one line each."""
    first = next((i for i, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now)))
    last = 0
    while last < min(len(was), len(now)) - first and was[-1 - last] == now[-1 - last]:
        last += 1
    return tuple(" ".join(lines[first : len(lines) - last]) for lines in (was, now))  # type: ignore[return-value]
