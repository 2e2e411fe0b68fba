"""A description for every key of the JSON schema, from the docstrings of the classes that hold the keys.

The sentences of a docstring that name a field as `field` are its description; where none does, `KEY_WORDS` has one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

from batchsim.scenario.key_words import KEY_WORDS

_SENTENCE = re.compile(r"(?<=[.;])\s+(?=[A-Z`])")


def describe(schema: dict[str, Any], roots: list[type]) -> None:
    """Adds to the keys of `schema`, made of the dataclasses `roots`, what they are; where a key's type has a
    description, its range, that follows. KeyError for a key that neither its class nor `KEY_WORDS` says anything of."""
    classes = {found.__name__: found for root in roots for found in classes_in(root)}
    for owner in mappings(schema):
        kind = classes.get(str(owner.get("title")))
        names = [field.name for field in fields(kind)] if kind is not None else []
        for name, its in owner["properties"].items():
            if kind is not None and name in names:
                its["description"] = "; ".join(filter(None, (words_for(kind, name), its.get("description"))))


def words_for(kind: type, name: str) -> str:
    """What the field `name` of a config is."""
    if (own := f"{kind.__name__}.{name}") in KEY_WORDS:
        return KEY_WORDS[own]
    text = " ".join((kind.__doc__ or "").split())
    sentences = _SENTENCE.split(text)
    if name == "kind":
        return f"The kind: {sentences[0].rstrip('.;')}"
    said = [sentence.rstrip(".;") for sentence in sentences if f"`{name}`" in sentence]
    return ". ".join(said) if said else KEY_WORDS[name]


def classes_in(kind: Any, seen: dict[type, None] | None = None) -> dict[type, None]:
    """The dataclasses that `kind` holds, itself among them, in the order in which they are met."""
    seen = {} if seen is None else seen
    if isinstance(kind, type) and is_dataclass(kind):
        if kind not in seen:
            seen[kind] = None
            for hint in get_type_hints(kind, include_extras=True).values():
                classes_in(hint, seen)
        return seen
    for part in get_args(kind):
        classes_in(part, seen)
    return seen


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
