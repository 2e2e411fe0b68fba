"""Every way out that a message names is one: its options, commands, keys and modules exist."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from typer.main import get_command

from batchsim.cli import app
from batchsim.scenario.described import mappings
from batchsim.scenario.load import shipped_scenarios
from batchsim.scenario.schema import scenario_schema
from batchsim.training.config import TrainingConfig, TrainingFile
from batchsim.training.stream import StreamConfig
from tests.support.paths import ROOT

SIM = ROOT / "sim"
_OF_ENGINES = ("scenario/command_lines", "check/measured", "check/steps")
"""Where flags of engines and benchmark tools are named, which are no options of ours."""
_THEIRS = {"--max-concurrency", "--save-detailed", "--cuda-graph-max-bs", "--burstiness", "--head"} | {
    "--kv-transfer-config",
    "--revision",
}
_OPTION = re.compile(r"(?<![\w`-])--[a-z][a-z0-9-]+")
_COMMAND = re.compile(r"\bbatchsim ((?:trace |calibrate )?[a-z-]+)((?:(?! batchsim)[^.;])*)")
_DOTTED = re.compile(r"(?<![\w./{}])[a-z_]+(?:\.[a-z_]+)+(?![\w./(}])")
_SET = re.compile(r"--set '?([a-z_]+(?:\.[a-z_]+)*)=")
_WRITTEN = re.compile(r"\b(?:[Ww]rite|[Aa]dd) ([a-z_]+): (?=[a-z{\[<])")
_PATTERNS = {"key", "it"}
"""What stands for any key, and words before a colon."""
_OTHERS = {"terms.further_pass"}
"""Of fits, which are no scenarios."""
_FILES = ("json", "csv", "yaml", "yml", "md", "py", "parquet", "html", "png", "toml", "log", "npz", "so", "jsonl", "gz")


def _text(node: ast.AST) -> str:
    """A literal text, `{}` in the place of what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(each) if isinstance(each, ast.Constant) else "{}" for each in node.values)
    return ""


@cache
def messages() -> tuple[tuple[str, str], ...]:
    """(file:line, text) of every text in words of ours that is no docstring: of errors, notes and helps."""
    found: list[tuple[str, str]] = []
    for path in sorted(SIM.rglob("*.py")):
        name = path.relative_to(SIM).as_posix()
        if name.startswith(_OF_ENGINES):
            continue
        kinds = ast.Constant | ast.JoinedStr | ast.Expr
        nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]
        inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        found += [
            (f"sim/{name}:{node.lineno}", text)
            for node in nodes
            if id(node) not in inside | alone and " " in (text := _text(node))
        ]
    return tuple(found)


@cache
def options() -> dict[str, frozenset[str]]:
    """The options of every command, and of a group that is one, by its name."""
    found: dict[str, frozenset[str]] = {}

    def walk(command: Any, name: str) -> None:
        own = frozenset(o for p in command.params for o in (*p.opts, *p.secondary_opts)) | {"--help"}
        found[name] = own
        for part, inner in getattr(command, "commands", {}).items():
            walk(inner, f"{name} {part}".strip())

    walk(get_command(app), "")
    return found


@cache
def _keys() -> dict[str, set[str]]:
    """By key of a scenario, the keys of the mappings that may stand under it; `` has those of all."""
    schema = scenario_schema()
    found: dict[str, set[str]] = {"": set()}

    def under(node: Any, depth: int = 0) -> Iterator[str]:
        if not isinstance(node, dict) or depth > 8:
            return
        yield from node.get("properties", ())
        for key in ("anyOf", "oneOf", "items", "additionalProperties"):
            inner = node.get(key)
            for each in inner if isinstance(inner, list) else [inner]:
                yield from under(each, depth + 1)
        if "$ref" in node:
            yield from under(schema["$defs"][node["$ref"].removeprefix("#/$defs/")], depth + 1)

    for owner in mappings(schema):
        for name, its in owner["properties"].items():
            found[""].add(name)
            found.setdefault(name, set()).update(under(its))
    return found


_TRAINING = {each.name for config in (TrainingFile, TrainingConfig, StreamConfig) for each in fields(config)}
"""Keys of a scenario of training, which is read by itself."""


def test_options_that_messages_name_exist() -> None:
    """Of some command of ours, or of an engine or a tool that is named beside them."""
    every = frozenset().union(*options().values())
    wrong = [(place, o) for place, text in messages() for o in _OPTION.findall(text) if o not in every | _THEIRS]
    assert not wrong


def test_commands_that_messages_name_exist_and_have_their_options() -> None:
    """`batchsim NAME --option`: the command is there and takes it; scenarios that it names are shipped or yours."""
    wrong = []
    for place, text in messages():
        for name, rest in _COMMAND.findall(text):
            known = name if name in options() else name.partition(" ")[0]
            verb = re.search(rf"(with|[Rr]un|[Uu]se|[Ww]rite|`|:|, |\() ?`?batchsim {name}", text)
            if known not in options():
                wrong += [(place, name)] if verb else []
                continue
            wrong += [(place, name, o) for o in _OPTION.findall(rest) if o not in options()[known] | _THEIRS]
    assert not wrong


def test_keys_that_messages_name_exist() -> None:
    """`kv.tokens`, `--set a.b=`, `write a: ...`: keys of a scenario, each under one that may hold it."""
    keys, wrong = _keys(), []
    for place, text in messages():
        for dotted in [*_DOTTED.findall(text), *_SET.findall(text)]:
            parts = dotted.split(".")
            if parts[-1] in _FILES or not keys.get(parts[0]) or dotted in _OTHERS:
                continue
            for owner, part in pairwise(parts):
                if keys.get(owner) and part not in keys[owner]:
                    wrong.append((place, dotted))
        wrong += [(place, f"{key}:") for key in _WRITTEN.findall(text) if key not in keys[""] | _PATTERNS | _TRAINING]
    assert not wrong


def test_places_that_messages_name_are_there_where_batchsim_is_installed() -> None:
    """Modules can be imported; no file of the clone is named, which an installed package lacks."""
    wrong = []
    for place, text in messages():
        wrong += [(place, each) for each in re.findall(r"\b(?:docs|sim|tests|scenarios)/[\w/.]+\b", text)]
        for module in re.findall(r"(?<![\w.])batchsim(?:\.[a-z_]+)+", text):
            try:
                importlib.import_module(module)
            except ImportError:
                owner, _, attribute = module.rpartition(".")
                if not hasattr(importlib.import_module(owner), attribute):
                    wrong.append((place, module))
    assert not wrong


@pytest.mark.parametrize("name", ["plan"])
def test_scenarios_that_messages_name_are_shipped(name: str) -> None:
    """The one that a scenario without a plan is sent to."""
    assert name in shipped_scenarios()
