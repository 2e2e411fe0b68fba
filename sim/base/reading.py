"""Configs read from plain values: each by itself, with a validator that is made when a value of it is there, so that
what is wrong in a scenario is said sooner, and known to be of that config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args

from batchsim.base.problems import UNKNOWN, path_of, range_error

if TYPE_CHECKING:
    from pydantic import TypeAdapter


@dataclass(frozen=True)
class Later:
    """Marks `Annotated[Any, Later("module:Class")]`: that dataclass, whose module is imported for a value of it; of a
    class that is there, `Later(Class)`, a validator is made for a value.

    Of a union's member `kind` is its kind. The two dunder methods are pydantic's protocol.
    """

    path: str | type
    kind: str = ""

    def config(self) -> Any:
        """The dataclass."""
        if isinstance(self.path, type):
            return self.path
        module, _, name = self.path.partition(":")
        return getattr(import_module(module), name)

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> dict[str, Any]:
        return {"type": "function-plain", "function": {"type": "with-info", "function": self._read}}

    def __get_pydantic_json_schema__(self, schema: object, handler: Any) -> Any:
        config = self.config()
        ref = f"{config.__module__}.{config.__qualname__}:{id(config)}"  # as pydantic has it, so that "$defs" has one
        named = {**adapter(config).core_schema, "ref": ref}
        return handler({"type": "definitions", "schema": named, "definitions": []})

    def _read(self, value: object, info: Any) -> Any:
        """`value` as the dataclass. A ValidationError of it stays one of the key that it stands at."""
        return read(self.config(), value, info.context)


def read(kind: Any, value: object, context: Any = None) -> Any:
    """`value`, as JSON holds it, as the dataclass `kind`. In the ValidationError the innermost dataclass that a problem
    is of is known: an unknown key has it as `owner`, a number outside its range has its `keys` there."""
    from pydantic import ValidationError
    from pydantic_core import PydanticCustomError

    try:
        return adapter(kind).validate_json(json.dumps(value), context=context)
    except ValidationError as error:
        problems: list[Any] = error.errors(include_url=False)
        for problem in problems:
            if problem["type"] == UNKNOWN:
                owner = problem.get("ctx", {"owner": kind})
                problem["type"] = PydanticCustomError(UNKNOWN, problem["msg"], owner)
            elif number := range_error(problem):
                number.keys = number.keys or path_of(problem["loc"], value)
        raise ValidationError.from_exception_data(error.title, problems, "json") from None


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """The pydantic adapter that validates JSON as the dataclass `kind`, made once."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def later(path: str | type, kind: str = "") -> Any:
    """The type of the dataclass at `module:Class`, or that is given, as `Later` has it."""
    return Annotated[Any, Later(path, kind)]


def one_of(kinds: Mapping[str, str]) -> Any:
    """The union of the dataclasses at `module:Class` by their kinds."""
    return Union[tuple(later(path, kind) for kind, path in kinds.items())]  # noqa: UP007 - of types not yet there


def kind_named(member: Any) -> object:
    """The `kind` of a union's member: of a dataclass, or of one that is yet to be imported."""
    mark = next((mark for mark in get_args(member) if isinstance(mark, Later)), None)
    return next(field.default for field in fields(member) if field.name == "kind") if mark is None else mark.kind
