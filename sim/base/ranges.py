"""Which numbers a config takes. Every numeric field of a `Config` is annotated with its range: a type of this module,
a quantity of `batchsim.base.units`, or a `Range` of its own. Numbers outside are refused.

Ranges end where an engine, a column of the records or the arithmetic of 64-bit times ends, not where taste does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from decimal import Decimal
from functools import cache
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, cast, get_args, get_origin, get_type_hints

INT32_MAX = 2**31 - 1
"""The largest count that engines, and columns of the records, can hold."""
MAX_POINTS = 100_000
"""The most simulations that a sweep runs unless more are allowed by the user: days of them."""
MAX_JOBS = 1_024
"""The most worker processes of a sweep: more than machines have cores."""
MAX_CHOICES = 1_000
"""The most combinations of a policy's `best_of`, and values of `vary`: each is a scenario to read and check."""
_DIGITS = 20  # of a whole number that is shown as it is: all of 64 bits


def number_text(value: float) -> str:
    """A number for people: whole ones digit by digit unless they are longer than 64 bits, others to 6 digits."""
    if isinstance(value, int):
        return str(value) if abs(value) < 10**_DIGITS else f"{Decimal(value):.3e}"
    return f"{value:g}"


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from `low` to `high`: without `low` where they lie `above` it, without `high` where `below`.

    `show` writes a number as a scenario does. Not a number is in no range.
    """

    low: float
    high: float
    above: bool = False
    below: bool = False
    show: Callable[[float], str] = number_text

    def __contains__(self, value: float) -> bool:
        low = self.low < value if self.above else self.low <= value
        return low and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        """`from 1 to 1000`, or `above 0 and below 1`."""
        high = f"below {self.show(self.high)}" if self.below else f"at most {self.show(self.high)}"
        if self.above:
            return f"above {self.show(self.low)} and {high}"
        low = self.show(self.low)
        return f"at least {low} and {high}" if self.below else f"from {low} to {self.show(self.high)}"

    def check(self, name: str, value: float) -> None:
        """ValueError, which begins with `name`, unless `value` is within."""
        if value not in self:
            raise ValueError(f"{name} is {self.show(value)}. It must be {self}.")

    def __get_pydantic_json_schema__(self, schema: object, handler: Callable[[object], dict[str, Any]]) -> Any:
        """What the schema of a scenario says of the field: numbers without a unit as JSON Schema does, others in words.

        The protocol by which a validator picks the range up, so that configs on the lowest floors need not import one.
        """
        found = handler(schema)
        if found.get("type") not in ("integer", "number"):
            return found | {"description": str(self)}
        ends = {"exclusiveMinimum" if self.above else "minimum": self.low}
        return found | ends | {"exclusiveMaximum" if self.below else "maximum": self.high}


PositiveInt = Annotated[int, Range(1, INT32_MAX)]
"""A number of requests, tokens, blocks and the like, of which there is at least one."""
NonNegativeInt = Annotated[int, Range(0, INT32_MAX)]
"""A number of requests, tokens, blocks and the like, where 0 means none, or off."""
Priority = Annotated[int, Range(-(2**31), INT32_MAX)]
"""The priority of a request, or a difference of two."""
Levels = Annotated[int, Range(1, 1000)]
"""A number of priority levels, the queue of each of which is looked at in every step."""
LevelsOrNone = Annotated[int, Range(0, 1000)]
ShareBelowOne = Annotated[float, Range(0, 1, below=True)]
"""A fraction written as a bare number, not a percentage: a part of the KV pool to keep free, which cannot be all."""
NonNegative = Annotated[float, Range(0, 1e6)]
"""A factor that may be 0."""


def check_ranges(config: Any) -> None:
    """ValueError, which begins with the field's name, unless every number of the dataclass is one in its range.

    Numbers in lists and keys and values of mappings are checked as well; a dataclass among them checks its own. A
    quantity that is given as a scenario writes it, `"8/s"`, becomes its number first, and a list a tuple.
    """
    for name, hint in _hints(type(config)):
        given = getattr(config, name)
        if isinstance(given, str | list) and (number := _read(hint, given, name)) is not given:
            object.__setattr__(config, name, number)
            given = number
        _check(hint, given, name)


class Config:
    """What a scenario is read into: a frozen dataclass that derives from this class.

    This class refuses keys that are no fields, values of another type and numbers outside their ranges. A
    `__post_init__` of a derived class calls `check_ranges` first.
    """

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    def __post_init__(self) -> None:
        check_ranges(self)


@cache
def _hints(kind: type) -> tuple[tuple[str, Any], ...]:
    hints = get_type_hints(kind, include_extras=True)
    return tuple((field.name, hints[field.name]) for field in fields(kind) if field.init)


def numbers_of(kind: type) -> Iterator[tuple[str, Any, Range | None]]:
    """(field, int or float, its range if it states one) of every number that the dataclass `kind` may hold."""
    for name, hint in _hints(kind):
        for number, within in _numbers(hint, None):
            yield name, number, within


def _numbers(hint: Any, within: Range | None) -> Iterator[tuple[Any, Range | None]]:
    if hint in (int, float):
        yield hint, within
    elif get_origin(hint) is Annotated:
        inner, *marks = get_args(hint)
        own = [mark for mark in marks if isinstance(mark, Range)]
        yield from _numbers(inner, own[-1] if own else within)
    else:  # a union, a list, a mapping; a Literal has no types inside
        for part in get_args(hint):
            yield from _numbers(part, within)


def quantity_of(hint: Any) -> Any:
    """What marks `hint`, or a type within its unions, as a number that is written with a unit; None if nothing does."""
    if get_origin(hint) is Annotated:
        inner, *marks = get_args(hint)
        return next((mark for mark in marks if hasattr(mark, "parse")), None) or quantity_of(inner)
    if get_origin(hint) in (Union, UnionType):
        return next(filter(None, map(quantity_of, get_args(hint))), None)
    return None


def item_of(hint: Any) -> Any:
    """The type of the items of a list of type `hint`, or of the list within its unions; Any where there is none."""
    if get_origin(hint) is Annotated:
        return item_of(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return next((item for item in map(item_of, get_args(hint)) if item is not Any), Any)
    return get_args(hint)[0] if get_origin(hint) in (tuple, list) else Any


def _read(hint: Any, value: Any, name: str) -> Any:
    """`value` with the texts of quantities as numbers and lists as tuples; itself where there are none."""
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return tuple(_read(item_of(hint), item, f"{name}[{i}]") for i, item in enumerate(items))
    mark = quantity_of(hint) if isinstance(value, str) and not _may_be_word(hint) else None
    if mark is None:
        return value
    try:
        return mark.parse(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _check(hint: Any, value: Any, name: str) -> None:
    if isinstance(value, tuple | list):
        for i, item in enumerate(cast("list[Any]", value)):
            _check(hint, item, f"{name}[{i}]")
    elif isinstance(value, dict):
        for key, item in cast("dict[Any, Any]", value).items():
            _check(hint, key, name)
            _check(hint, item, f"{name}.{key}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        for _, within in _numbers(hint, None):
            if within is not None:
                within.check(name, value)
    elif isinstance(value, str) and not _may_be_word(hint):
        for _, within in _numbers(hint, None):
            raise ValueError(f"{name} is {value[:40]!r}, which is no number. It must be {within}.")


def _may_be_word(hint: Any) -> bool:
    return hint is str or get_origin(hint) is Literal or any(map(_may_be_word, get_args(hint)))
