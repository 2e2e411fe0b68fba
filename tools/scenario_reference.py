"""The reference of a scenario's keys as Markdown, in the order in which a file has them.

It is made of the JSON schema, so of the types that scenarios are read into. Each kind of mapping has a section under
the first place where it may stand, `workload.arrivals: on_off`, with a row a key: what it may be, in which unit, its
default, an example, and what it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from batchsim.base.files import read_text
from batchsim.scenario.schema import scenario_schema

Node = dict[str, Any]
_WHOLE = "A scenario"
_KEYS = """model deployment cost cost_factor kv max_model_len max_waiting workload lora_cost structured_cost policies
    replicas pools dp_attention vary load slo seeds keep plan"""
ORDER = {
    _WHOLE: tuple(_KEYS.split()),
    "workload": ("arrivals", "lengths", "trace", "classes", "output_cap", "requests", "duration", "warmup", "drain"),
}
"""Keys in the order of the shipped scenarios; others follow as their class has them, after their `kind`."""
UNITS = {
    "time": ("50ms", "ns us ms s min h"),
    "rate": ("8/s", "/s /min /h"),
    "share": ("99%", "%"),
    "size": ("32GB", "B kB MB GB TB KiB MiB GiB"),
    "bandwidth": ("55GB/s", "B/s kB/s MB/s GB/s TB/s KiB/s MiB/s GiB/s"),
    "speed of arithmetic": ("989TFLOP/s", "GFLOP/s TFLOP/s PFLOP/s"),
    "power": ("500W", "W kW"),
    "price": ("3.50/h", "/h"),
    "price of energy": ("0.10/kWh", "/kWh"),
    "price of memory": ("1.50/GB/month", "/GB/month"),
}
"""By the word for a quantity: an example, and its units."""
_RANGE = re.compile(
    r"(?:^|; )(?:from|above|at least) [^;]*?\d(ns|us|ms|s|/s|%|B|B/s|FLOP/s|W|/h|/kWh|/GB/month) (?:to|and) .*"
)
_OF_UNIT = {unit: word for word, (_, units) in UNITS.items() for unit in units.split()}
_OF_UNIT["FLOP/s"] = "speed of arithmetic"
_NUMBERS = {"integer": "whole number", "number": "number"}
_UNBOUNDED = 1e6  # ends of ranges from here on are limits of the program, and are not worth a reader's time
_SHOWN = {"deployment": "chat", "cost": "speculative", "kv": "systems", "replicas": "replicas", "plan": "plan"}
_SHOWN |= dict.fromkeys(("workload", "policies", "load"), "bursty")
"""The shipped scenario whose lines stand as an example above the keys of a block."""
_ANYWHERE = {"best_of": "Several values of a knob", "own": "A class of your own"}
_LONGEST = 60  # letters of an example
_HEAD = ("| key | what it is | value | default | example |", "|---|---|---|---|---|")
_INTRO = """# Scenario keys

Every key, in the order in which a scenario has them. A heading is the place where a mapping stands, and after a colon
its `kind`. What is **required** has no default; "–" is none. `batchsim schema` prints the same for editors, and
[Write a scenario](../scenarios.md) says what to do with it.

A knob of a policy may be [several values](#several-values-of-a-knob), of which the best at each load is kept.

## Units { #units }

Quantities have a unit; a bare number is refused, but for a share.

| quantity | example | units |
|---|---|---|"""


@dataclass(frozen=True)
class Section:
    """A mapping of a scenario: where it stands, as its heading has it, and its part of the schema."""

    title: str
    node: Node

    @property
    def anchor(self) -> str:
        """Its address on the page."""
        return re.sub(r"[^a-z0-9_]+", "-", self.title.lower()).strip("-")


class Reference:
    """The sections of all mappings of a scenario. KeyError where the schema refers to what is none."""

    def __init__(self) -> None:
        self._schema = scenario_schema()
        self._sections: dict[str, Section] = {}
        self._walk(self._schema, "")
        for name, title in _ANYWHERE.items():
            self._sections[name] = Section(title, self._schema["$defs"][name])

    @property
    def sections(self) -> list[Section]:
        """All sections, in the order of the page."""
        return [Section(_WHOLE, self._schema), *self._sections.values()]

    def page(self) -> Iterator[str]:
        """Lines of the page."""
        yield _INTRO
        for name, (example, units) in UNITS.items():
            yield f"| {name} | `{example}` | {', '.join(f'`{unit}`' for unit in units.split())} |"
        top = ""
        for section in self.sections:
            place = section.title.partition(":")[0]
            if place.partition(".")[0] in _SHOWN and (block := place.partition(".")[0]) != top:
                top = block
                yield from self._block(top)
            if section.title != top:
                level = min(max(place.count("."), 1), 2) if place.startswith(top or " ") else 0
                yield f"\n##{'#' * level} {section.title} {{ #{section.anchor} }}\n"
            if section.title != _WHOLE:  # what its description says stands beside its keys
                yield _one_line(str(section.node.get("description", "")).partition(">>>")[0]) + "\n"
            yield from self.table(section.node, section.title)

    def _block(self, key: str) -> Iterator[str]:
        """The heading of a top key, and the lines that a shipped scenario has for it."""
        yield f"\n## {key} {{ #{key} }}\n"
        name = _SHOWN[key]
        text = read_text(Path(__file__).parents[1] / f"scenarios/{name}.yaml")
        lines = re.search(rf"^{key}:.*\n(?:[ ].*\n)*", text, re.M)
        assert lines is not None, f"scenarios/{name}.yaml has no {key}"
        yield f"As `{name}` has it:\n\n```yaml\n{lines[0]}```\n"

    def knobs(self, kind: str) -> Iterator[str]:
        """Lines of a table of a policy's knobs; none where it has none."""
        node = self._schema["$defs"][f"policy_{kind}"]
        yield from self.table(node | {"properties": {k: v for k, v in node["properties"].items() if k != "kind"}})

    def table(self, node: Node, title: str = "") -> Iterator[str]:
        """Lines of a table of the keys of a mapping."""
        keys = in_order(node.get("properties", {}), title)
        if keys:
            yield from ('<div class="keys" markdown>\n', *_HEAD)
        required = set(node.get("required", ()))
        either = [name for each in node.get("oneOf", ()) for name in each.get("required", ())]
        for key, value in keys:
            default = "**required**" if key in required else _default(value)
            if key in either:
                default = f"one of {', '.join(f'`{name}`' for name in either)}"
            words = "its kind" if "const" in value else _described(value)
            yield f"| `{key}` | {words} | {self._value(value)} | {default} | {self._example(value)} |"
        if keys:
            yield "\n</div>\n"

    def _walk(self, node: Node, path: str) -> None:
        """Notes the sections below `node`, each where it may stand first."""
        for key, value in in_order(node.get("properties", {}), path or _WHOLE):
            here = f"{path}.{key}".lstrip(".")
            places = value["properties"] if here == "policies" else {"": value}
            for label, part in places.items():
                for name, many in _references(part):
                    if name in self._sections or name in _ANYWHERE:
                        continue
                    of = self._schema["$defs"][name]
                    kind = of.get("properties", {}).get("kind", {}).get("const", "")
                    where = f"{here}.{label}".rstrip(".") + many
                    title = f"{where}: {kind}" if kind and here != "deployment" else where
                    self._sections[name] = Section(title, of)
                    self._walk(of, where)

    def _value(self, node: Node) -> str:
        """What a key may be, in Markdown."""
        if "$ref" in node:
            section = self._sections[node["$ref"].rpartition("/")[2]]
            return f"[{section.title.rpartition(': ')[2]}](scenario.md#{section.anchor})"
        for several in ("anyOf", "oneOf"):
            if several in node:
                parts = [each for each in node[several] if each.get("$ref") != "#/$defs/best_of"]
                words = {"description": node.get("description", "")}  # which has the range
                return ", ".join(dict.fromkeys(filter(None, (self._value(words | part) for part in parts))))
        if "enum" in node or "const" in node:
            return ", ".join(f"`{each}`" for each in node.get("enum", [node.get("const")]))
        kind = node.get("type", "")
        if kind == "null":
            return ""
        if kind == "array":
            return f"list: {self._value(node['items'])}" if node.get("items") else "list"
        if kind == "object":
            more = node.get("additionalProperties")
            return f"by name: {self._value(more)}" if isinstance(more, dict) and more else "mapping"
        if kind == "boolean":
            return "`true`, `false`"
        if isinstance(kind, str) and kind in _NUMBERS:
            return _NUMBERS[kind] + _bounds(node)
        quantity = _RANGE.search(node.get("description", ""))
        return f"[{_OF_UNIT[quantity[1]]}](scenario.md#units)" if quantity else "text"

    def _example(self, node: Node) -> str:
        """The shortest of a key's examples, or where a long one stands."""
        if "const" in node:
            return f"`{node['const']}`"
        text = min((_written(_cut(each)) for each in node["examples"]), key=len)
        if len(text) <= _LONGEST:
            return f"`{text}`".replace("|", "\\|")
        for name, _ in _references(node):
            return f"[below](scenario.md#{self._sections[name].anchor})"
        return f"`{text[:_LONGEST]}…`".replace("|", "\\|")


def in_order(properties: Mapping[str, Node], title: str) -> list[tuple[str, Node]]:
    """The keys of the mapping `title` as a scenario has them: its kind, those of ORDER, then the others."""
    first = [key for key in ("kind", *ORDER.get(title, ())) if key in properties]
    return [(key, properties[key]) for key in dict.fromkeys([*first, *properties])]


def _references(node: Any, many: str = "") -> Iterator[tuple[str, str]]:
    """The mappings of the schema that a key's value may be, each with `[]` in a list and `.NAME` under a name."""
    if isinstance(node, Mapping):
        if "$ref" in node:
            yield node["$ref"].rpartition("/")[2], many
        for several in ("anyOf", "oneOf"):
            for each in node.get(several, ()):
                yield from _references(each, many)
        yield from _references(node.get("items"), f"{many}[]")
        yield from _references(node.get("additionalProperties"), f"{many}.NAME")


def _bounds(node: Node) -> str:
    """The ends of a number's range that a scenario may come near: ` from 1`, ` from 0 to 1`."""
    low, above, high = (node.get(key) for key in ("minimum", "exclusiveMinimum", "maximum"))
    text = f" from {low:g}" if low is not None else f" above {above:g}" if above is not None else ""
    text = "" if low is not None and low <= -_UNBOUNDED else text
    high = node.get("exclusiveMaximum", high)
    if high is None or high >= _UNBOUNDED:
        return text
    return f"{text} to {'below ' * ('exclusiveMaximum' in node)}{high:g}"


def _described(node: Node) -> str:
    """What a key is, without a range that ends where no scenario comes near."""
    words = node.get("description", "")
    found = _RANGE.search(words)
    if found and re.search(r"e\+|0{9}", found[0]):
        words = words[: found.start()]
    return _one_line(words).replace("|", "\\|")


def _default(node: Node) -> str:
    value = None if "const" in node else node.get("default")
    return "–" if value is None else f"`{_written(_cut(value))}`".replace("|", "\\|")


def _cut(value: Any) -> Any:
    """`value` with the first three of a list of plain values."""
    if isinstance(value, Mapping):
        return {key: _cut(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        plain = not any(isinstance(part, Mapping) for part in value)
        return [*map(_cut, value[:3]), "..."] if plain and len(value) > 4 else [*map(_cut, value)]
    return value


def _written(value: Any) -> str:
    """`value` as a scenario has it, in one line."""
    text = yaml.safe_dump([value], default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
    return text.strip()[1:-1].replace("'...'", "...")


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
