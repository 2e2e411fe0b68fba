"""Dataclasses to plain JSON values and back. Strict: what does not fit is refused, never adapted."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from functools import cache
from types import GenericAlias
from typing import TYPE_CHECKING, Any, cast

from batchsim.base.problems import first_problem
from batchsim.base.units import AS_HELD

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Plain = None | bool | int | float | str | list[Any] | dict[str, Any]

LEFT_OUT = {"left_out": True}
"""Metadata of a field that stands in plain values only where it has another value than its default."""


def to_plain(value: object) -> Plain:
    """`value` as JSON holds it: tuples become lists, dict keys strings. TypeError for what JSON cannot hold."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value) if _stands(field, value)}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in cast("list[object]", value)]
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in cast("Mapping[object, object]", value).items()}
    raise TypeError(f"{value!r} of type {type(value).__name__} has no plain form")


def _stands(field: Field[Any], record: object) -> bool:
    """Whether `field` stands in the plain value of `record`: all do but those LEFT_OUT at their default."""
    return field.init and not (field.metadata == LEFT_OUT and getattr(record, field.name) == field.default)


def from_plain(hint: Any, value: object, where: str = "") -> Any:
    """The reverse of `to_plain` for a value of type `hint`: quantities are numbers as they are held.

    Fields with defaults may lack. ValueError, in words that begin with the path below `where`, for the first thing that
    does not fit, keys that are no fields among them.
    """
    from pydantic import ValidationError

    try:
        return _adapter(hint).validate_json(json.dumps([value]), context=AS_HELD)[0]
    except ValidationError as error:
        raise ValueError(first_problem(error, value, where, skip=1).rstrip(".")) from None


@cache
def _adapter(hint: Any) -> TypeAdapter[list[Any]]:
    """The validator of lists of `hint`, since a dataclass itself would take none of these rules."""
    from pydantic import TypeAdapter

    listed: Any = GenericAlias(list, (hint,))
    return TypeAdapter(listed, config={"strict": True, "extra": "forbid", "allow_inf_nan": False})


def value_at(plain: object, path: Iterable[object]) -> Any:
    """What stands at the keys of `path`, places of lists among them, each below the one before; None where nothing
    does."""
    for key in path:
        if isinstance(plain, list) and str(key).isdecimal():
            values = cast("list[object]", plain)
            plain = values[int(str(key))] if int(str(key)) < len(values) else None
        else:
            plain = plain.get(key) if isinstance(plain, Mapping) else None
    return plain


def texts_in(value: object) -> Iterator[str]:
    """Every text in plain values, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        plain = cast("dict[object, object]", value)
        yield from texts_in([*plain, *plain.values()])
    elif isinstance(value, list | tuple):
        for item in cast("list[object]", value):
            yield from texts_in(item)
