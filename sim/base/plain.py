"""Dataclasses to plain JSON values and back, by their type hints. Strict: what does not fit is refused, never adapted.

Understood are numbers, strings, booleans, None, Literal, tuples, lists, dicts, dataclasses, `Any` (kept as it is) and
unions of these; a union of dataclasses is told apart by their `kind`. Annotations of a hint are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from batchsim.base.errors import cut

Plain = None | bool | int | float | str | list[Any] | dict[str, Any]

LEFT_OUT = {"left_out": True}
"""Metadata of a field that stands in plain values only where it has another value than its default."""

_SCALARS: dict[Any, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (float, int), str: (str,)}


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
    """The reverse of `to_plain` for a value of type `hint`. ValueError begins with the path below `where`."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, UnionType):
        return _one_of(arguments, value, where)
    if origin is Literal:
        fits = any(value == choice and type(value) is type(choice) for choice in arguments)
        return value if fits else _refuse(value, where, "one of " + ", ".join(map(repr, arguments)))
    if is_dataclass(hint):
        return _record(hint, value, where)
    if origin in (tuple, list):
        return _sequence(origin, arguments, value, where)
    if origin is dict:
        return _mapping(arguments, value, where)
    if hint in (None, NoneType):
        return value if value is None else _refuse(value, where, "null")
    allowed = _SCALARS.get(hint)
    if allowed is None:
        raise ValueError(f"{where}: values of type {hint} cannot be read")
    fits = isinstance(value, allowed) and (hint is bool or not isinstance(value, bool))
    return value if fits else _refuse(value, where, hint.__name__)


def _refuse(value: object, where: str, expected: str) -> Any:
    raise ValueError(f"{where or 'the value'} is {cut(repr(value), 60)}, expected {expected}")


def fields_from_plain(
    kind: Any, value: object, where: str = "", hints: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The arguments of the dataclass `kind` by name, from an object with exactly these keys.

    `hints` replaces the types of some. ValueError as `from_plain`.
    """
    if not isinstance(value, dict):
        return _refuse(value, where, f"the keys of {kind.__name__}")
    given = cast("dict[str, object]", value)
    all_hints = get_type_hints(kind, include_extras=True) | dict(hints or {})
    left_out = {field.name for field in fields(kind) if field.metadata == LEFT_OUT} - given.keys()
    names = [field.name for field in fields(kind) if field.init and field.name not in left_out]
    for name in names:
        if name not in given:
            raise ValueError(f"{_below(where, name)} is missing")
    for name in given:
        if name not in names:
            raise ValueError(f"{_below(where, name)} is not a field of {kind.__name__}")
    return {name: from_plain(all_hints[name], given[name], _below(where, name)) for name in names}


def _record(hint: Any, value: object, where: str) -> Any:
    """The dataclass `hint` from its plain value. A ValueError of its own checks is headed by the path."""
    values = fields_from_plain(hint, value, where)
    try:
        return hint(**values)
    except ValueError as error:
        raise ValueError(f"{where or hint.__name__}: {error}") from None


def _sequence(origin: Any, arguments: tuple[Any, ...], value: object, where: str) -> Any:
    if not isinstance(value, list):
        return _refuse(value, where, "a list")
    items = cast("list[object]", value)
    if origin is list or arguments[-1] is Ellipsis:
        hints = [arguments[0]] * len(items)
    elif len(items) != len(arguments):
        return _refuse(items, where, f"a list of {len(arguments)}")
    else:
        hints = list(arguments)
    pairs = enumerate(zip(hints, items, strict=True))
    return origin(from_plain(hint, item, f"{where}[{i}]") for i, (hint, item) in pairs)


def _mapping(arguments: tuple[Any, ...], value: object, where: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        return _refuse(value, where, "keys and values")
    key_hint, item_hint = arguments
    pairs: dict[Any, Any] = {}
    for key, item in cast("dict[str, object]", value).items():
        try:
            name = key if key_hint is str else key_hint(key)
        except ValueError:
            return _refuse(key, where, f"keys of type {key_hint.__name__}")
        pairs[name] = from_plain(item_hint, item, _below(where, key))
    return pairs


def _one_of(members: tuple[Any, ...], value: object, where: str) -> Any:
    """The member that `value` is: None, the dataclass of its kind, or the first whose type it has."""
    if value is None and NoneType in members:
        return None
    flat: list[Any] = []
    for member in members:
        while get_origin(member) is Annotated:
            member = get_args(member)[0]
        flat += get_args(member) if get_origin(member) in (Union, UnionType) else [member]
    records = [member for member in flat if is_dataclass(member)]
    if records and isinstance(value, dict):
        kind = cast("dict[str, object]", value).get("kind")
        kinds = {kind_of(member): member for member in records}
        if len(records) > 1 and kind not in kinds:
            return _refuse(kind, _below(where, "kind"), "one of " + ", ".join(map(str, kinds)))
        return from_plain(records[0] if len(records) == 1 else kinds[kind], value, where)
    problems: list[str] = []
    for member in flat:
        if member is not NoneType and member not in records:
            try:
                return from_plain(member, value, where)
            except ValueError as error:
                problems.append(str(error))
    raise ValueError(problems[0] if len(problems) == 1 else f"{where} is {value!r}, which none of its types is")


def kind_of(record: Any) -> object:
    """The `kind` that tells this dataclass from others: the default of its field; None if it has none."""
    return next((field.default for field in fields(record) if field.name == "kind"), None)


def _below(where: str, name: object) -> str:
    return f"{where}.{name}" if where else str(name)


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
