"""YAML text to plain values, remembering the line of every one.

Scalars follow YAML 1.2's core schema, so that `on:` is a word and `1:30` no number. Tags, anchors and duplicate keys
are refused: a scenario needs none, and they are how a short file becomes a large or a strange one.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import yaml

from batchsim.base.errors import ScenarioError, shown

MAX_BYTES = 1_000_000
MAX_DEPTH = 30
TEXTS = ("version", "revision")
"""Keys whose value is text though it looks like a number: 0.10 is not 0.1."""

Path = tuple[str | int, ...]

_INT = re.compile(r"[-+]?[0-9]+\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
# What plain text may resolve to; everything else is written as a tag.
_KINDS = ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "merge", "value")
_CORE = "tag:yaml.org,2002:"
_HALF = re.compile("[\ud800-\udfff]")
_TAGS = {_CORE + kind for kind in _KINDS}
_FAST = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_UNLIKE = re.compile(r"^(?! *#).*[?!|>]|[^\n -~\xa1-\u1fff]", re.MULTILINE)
"""What libyaml may read otherwise than PyYAML: tabs, rare letters, and what these four begin but in comments."""
_MOST_NESTED = 1000  # of which no more than so many are within each other: libyaml's loader knows no limit
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "~": None, "": None}


@dataclass
class Document:
    """Plain values (dict, list, str, int, float, bool, None) and the line, from 1, at which each path stands.

    `overrides` names, for messages, the option that replaced the value at a path. `renamed` holds the paths whose last
    key is written otherwise, with that: "" where it is not written. `named` has paths whose last key messages name
    otherwise, likewise.
    """

    source: str
    value: Any
    lines: dict[Path, int] = field(default_factory=dict)
    overrides: dict[Path, str] = field(default_factory=dict)
    renamed: dict[Path, str] = field(default_factory=dict)
    named: dict[Path, str] = field(default_factory=dict)

    def line(self, path: Path) -> int:
        """The line of `path`, or of its nearest parent that stands in the file."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def where(self, path: Path) -> str:
        """`file:line` of `path`, or the option that set it."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.overrides:
                return self.overrides[path[:end]]
        return f"{self.source}:{self.line(path)}"

    def rename(self, path: Path, key: str) -> None:
        """Moves what stands at `path`, with its lines, to `key` beside it."""
        value, new = self.at(path[:-1]), (*path[:-1], key)
        value[key] = value.pop(path[-1])
        self.moved(path, new)
        self.renamed.setdefault(new, str(path[-1]))

    def moved(self, path: Path, new: Path) -> None:
        """Takes note that what stood at `path` stands at `new`."""
        self.lines |= {(*new, *at[len(path) :]): line for at, line in self.lines.items() if at[: len(path)] == path}
        self.overrides |= {(*new, *at[len(path) :]): by for at, by in self.overrides.items() if at[: len(path)] == path}

    def at(self, path: Path) -> Any:
        """The value at a path that is there."""
        value = self.value
        for key in path:
            value = value[key]
        return value

    def written(self, path: Path) -> Path:
        """`path` with the keys that the scenario writes."""
        names = self.named | self.renamed
        keys = (names.get(path[: i + 1], key) for i, key in enumerate(path))
        return tuple(key for key in keys if key != "")


def read_document(text: str, source: str) -> Document:
    """The one YAML document in `text`; ScenarioError names the line that cannot be read."""
    if len(text) > MAX_BYTES:
        raise ScenarioError(f"{source}: {len(text)} characters. A scenario has at most {MAX_BYTES}.")
    if not _UNLIKE.search(text) and sum(map(text.count, ("[", "{", "- "))) <= _MOST_NESTED:
        with suppress(yaml.YAMLError, ScenarioError):  # in the words of the other loader
            return _document(text, source, _FAST)
    return _document(text, source, yaml.SafeLoader)


def _document(text: str, source: str, loader: Any) -> Document:
    try:
        node = yaml.compose(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        hint = " Write {best_of: [4, 8]} with the braces." if "best_of [" in text else ""
        raise ScenarioError(f"{source}:{line}: not valid YAML: {error.problem}.{hint}") from None
    except (yaml.YAMLError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise ScenarioError(f"{source}: not valid YAML: {what}. Write plain text.") from None
    document = Document(source, None)
    if node is not None:
        document.value = _plain(node, (), document, set())
    return document


def _plain(node: yaml.Node, path: Path, document: Document, seen: set[int]) -> Any:
    line = node.start_mark.line + 1
    document.lines.setdefault(path, line)
    where = f"{document.source}:{line}"
    if id(node) in seen:
        raise ScenarioError(f"{where}: an alias (*name) is used. Write the value out.")
    seen.add(id(node))
    if len(path) > MAX_DEPTH:
        raise ScenarioError(f"{where}: nested deeper than {MAX_DEPTH} levels. No scenario needs that.")
    if node.tag not in _TAGS:
        raise ScenarioError(f"{where}: the tag {node.tag.replace(_CORE, '!!')} is used. Write plain values.")
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, document, seen)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*path, i), document, seen) for i, item in enumerate(node.value)]
    _check_text(node.value, where)
    quoted = isinstance(node, yaml.ScalarNode) and bool(node.style)
    return node.value if quoted else scalar(node.value)


def _mapping(node: yaml.MappingNode, path: Path, document: Document, seen: set[int]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        where = f"{document.source}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise ScenarioError(f"{where}: a key is not a word. Write key: value.")
        key = key_node.value
        _check_text(key, where)
        if key in values:
            raise ScenarioError(f"{where}: {key} is given twice. Keep one.")
        document.lines[(*path, key)] = key_node.start_mark.line + 1
        values[key] = _plain(value_node, (*path, key), document, seen)
        if key in TEXTS and isinstance(values[key], int | float) and isinstance(value_node, yaml.ScalarNode):
            values[key] = value_node.value
    return values


def _check_text(text: str, where: str) -> None:
    """ScenarioError for halves of letters, which JSON may escape and no file may hold."""
    if _HALF.search(text):
        raise ScenarioError(f"{where}: {shown(text)} holds half of a letter, \\ud800 to \\udfff. Write whole ones.")


def scalar(text: str) -> Any:
    """A plain scalar by YAML 1.2's core schema; what is no number, bool or null is a string."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.match(text):
        return int(text) if len(text) < 20 else text
    if _FLOAT.match(text):
        return float(text)
    return text
