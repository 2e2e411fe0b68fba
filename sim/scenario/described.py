"""A description for every key of the JSON schema, from the docstrings of the classes that hold the keys.

The sentences of a docstring that name a field as `field` are its description; where none does, `KEY_WORDS` has one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from batchsim.base.plain import to_plain
from batchsim.scenario.key_words import KEY_WORDS

_SENTENCE = re.compile(r"(?<=[.;])\s+(?=[A-Z`])")


class Described(GenerateJsonSchema):
    """pydantic's schema, in which every key of a dataclass says what it is, followed by what its type says, its range;
    and what its default is where that is made anew each time. KeyError for a key that neither its class nor `KEY_WORDS`
    says anything of."""

    def dataclass_schema(self, schema: Any) -> dict[str, Any]:
        node = super().dataclass_schema(schema)
        for field in fields(schema["cls"]):
            key = node["properties"].get(field.name)
            if key is None:
                continue
            key["description"] = "; ".join(filter(None, (words_for(schema["cls"], field.name), key.get("description"))))
            if "default" not in key and field.default_factory is not MISSING:
                default = field.default_factory()
                key["default"] = {} if isinstance(default, dict) or default == _bare(default) else to_plain(default)
        return node


def _bare(default: Any) -> Any:
    """Such a config as `{}` gives; None where some of its fields are required."""
    try:
        return type(default)()
    except TypeError:
        return None


def words_for(kind: type, name: str) -> str:
    """What the field `name` of a config is."""
    if (own := f"{kind.__name__}.{name}") in KEY_WORDS:
        return KEY_WORDS[own]
    text = " ".join((kind.__doc__ or "").partition(">>>")[0].split())  # without its example
    sentences = _SENTENCE.split(text)
    if name == "kind":
        return f"The kind: {sentences[0].rstrip('.;')}"
    said = [sentence.rstrip(".;") for sentence in sentences if f"`{name}`" in sentence]
    if not said and name not in KEY_WORDS:
        raise KeyError(
            f"{kind.__name__}.{name} has no words for the schema: name it in the docstring or in key_words.py"
        )
    return ". ".join(said) if said else KEY_WORDS[name]


def mappings(node: Any) -> Iterator[dict[str, Any]]:
    """Every mapping with properties, however deep."""
    if isinstance(node, dict):
        if isinstance(node.get("properties"), dict):
            yield node
        for part in node.values():
            yield from mappings(part)
    elif isinstance(node, list):
        for part in node:
            yield from mappings(part)
