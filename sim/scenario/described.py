"""A description for every key of the JSON schema: the docstring under its field, read from the source of its class."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from batchsim.base.plain import to_plain


class Described(GenerateJsonSchema):
    """pydantic's schema, in which every key of a dataclass says what it is, followed by what its type says, its range;
    and what its default is where that is made anew each time. KeyError for a key of which its class says nothing."""

    def dataclass_schema(self, schema: Any) -> dict[str, Any]:
        node, words = super().dataclass_schema(schema), field_words(schema["cls"])
        for field in fields(schema["cls"]):
            key = node["properties"].get(field.name)
            if key is None:
                continue
            key["description"] = "; ".join(filter(None, (words[field.name], key.get("description"))))
            if "default" not in key and field.default_factory is not MISSING:
                default = field.default_factory()
                key["default"] = {} if isinstance(default, dict) or default == _bare(default) else to_plain(default)
        return node

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Not for a config either that is read by itself: it has a title of its own."""
        reader = getattr(schema.get("function", {}).get("function"), "__self__", None)
        return not isinstance(getattr(reader, "path", None), type) and super().field_title_should_be_set(schema)


def _bare(default: Any) -> Any:
    """Such a config as `{}` gives; None where some of its fields are required."""
    try:
        return type(default)()
    except TypeError:
        return None


def field_words(kind: type) -> dict[str, str]:
    """What each field of a config is, by its name: the docstring under it, in the class or in the base that has it.

    Of `kind` it is the first sentence of the class's own docstring.
    """
    sentence = " ".join(inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0].split()).partition(". ")[0]
    words = {"kind": f"The kind: {sentence.rstrip('.')}"}
    for base in reversed(kind.__mro__):
        if hasattr(base, "__dataclass_fields__"):
            words |= _under_fields(base.__module__)[base.__name__]
    return words


@cache
def _under_fields(module: str) -> dict[str, dict[str, str]]:
    """By class of a module, and by field, the docstring under it in a line, without its full stop."""
    package, _, name = module.rpartition(".")
    source = (resources.files(package) / f"{name}.py").read_text(encoding="utf-8")  # beside a compiled module too
    words: dict[str, dict[str, str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            words[node.name] = own = {}
            for above, below in pairwise(node.body):
                match above, below:
                    case ast.AnnAssign(target=ast.Name(id=field)), ast.Expr(value=ast.Constant(value=str(text))):
                        own[field] = " ".join(text.split()).removesuffix(".")
    return words


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
