"""Which numbers a config takes. Every numeric field of a `Config` is annotated with its range: a type of this module,
a quantity of `batchsim.base.units`, or a `Range` of its own. Numbers outside are refused by pydantic, which reads these
annotations wherever a config comes from: a scenario's text, Python, or the JSON of another machine.

Ranges end where an engine, a column of the records or the arithmetic of 64-bit times ends, not where taste does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from decimal import Decimal
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast, get_args, get_origin, get_type_hints

from batchsim.base.problems import RangeError, first_problem
from batchsim.base.reading import later

if TYPE_CHECKING:
    from pydantic import TypeAdapter

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

    `show` writes a number as a scenario does. Not a number is in no range. Of several ranges around a number the
    outermost counts. The two dunder methods are pydantic's protocol, for which the lowest floors need not import it.
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

    def checked(self, value: float) -> float:
        """`value`; RangeError unless it is within."""
        if value not in self:
            raise RangeError(self.refusal(value))
        return value

    def refusal(self, value: float) -> str:
        """What is said of a `value` outside, after its name."""
        return f"is {self.show(value)}. It must be {self}."

    def __get_pydantic_core_schema__(self, source: object, handler: Callable[[object], dict[str, Any]]) -> Any:
        number = handler(source)
        while number["type"] == "function-after":  # a wider range, which this one replaces
            number = number["schema"]
        return {"type": "function-after", "function": {"type": "no-info", "function": self.checked}, "schema": number}

    def __get_pydantic_json_schema__(self, schema: object, handler: Callable[[object], dict[str, Any]]) -> Any:
        """Bounds of numbers without a unit as JSON Schema states them, of others in words."""
        json_schema = handler(schema)
        if json_schema.get("type") not in ("integer", "number"):
            return json_schema | {"description": str(self)}
        ends = {"exclusiveMinimum" if self.above else "minimum": self.low}
        return json_schema | ends | {"exclusiveMaximum" if self.below else "maximum": self.high}


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
Factor = Annotated[float, Range(0, 1e6, above=True)]
"""How many times a rate."""
NonNegative = Annotated[float, Range(0, 1e6)]
"""A factor that may be 0."""


class Config:
    """What a scenario is read into: a frozen dataclass that derives from this class.

    This class refuses keys that are no fields, values of another type and numbers outside their ranges. A
    `__post_init__` of a derived class calls `check_ranges` first.
    """

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: Any) -> Any:
        """pydantic's schema of the config; of a field of another config, that of its own reader, made for a value."""
        return handler.generate_schema(later(cls)) if handler.field_name else handler(source)

    def __post_init__(self) -> None:
        check_ranges(self)


def check_ranges(config: Any) -> None:
    """ValueError, which begins with the field's name, unless every number of the dataclass is one in its range.

    Numbers in lists and keys and values of mappings are checked as well; a dataclass among them checks its own. A
    quantity that is given as a scenario writes it, `"8/s"`, becomes its number first, and a list a tuple.
    """
    from pydantic import ValidationError

    for name, adapter in numeric_fields(type(config)).items():
        given = getattr(config, name)
        if given is None:
            continue
        try:
            read = adapter.validate_python(_frozen(given))
        except ValidationError as error:
            raise ValueError(first_problem(error, given, name)) from None
        if read != given:  # a text or a list; an integer stays one where a fraction may stand
            object.__setattr__(config, name, read)


def written_numbers(config: Any) -> dict[str, Any]:
    """The numeric fields of a config as a scenario writes them: with units, lists for tuples."""
    return {
        name: adapter.dump_python(getattr(config, name), mode="json", warnings=False)
        for name, adapter in numeric_fields(type(config)).items()
    }


@cache
def numeric_fields(kind: type) -> dict[str, TypeAdapter[Any]]:
    """By name the validators of those fields of the dataclass `kind` whose annotation has a range somewhere."""
    hints = get_type_hints(kind, include_extras=True)
    names = [field.name for field in fields(kind) if field.init and _is_numeric(hints[field.name])]
    return {name: _adapter(hints[name]) for name in names}


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    """The validator of a type, which many fields share."""
    from pydantic import TypeAdapter

    return TypeAdapter(hint, config={"strict": True})


def _is_numeric(hint: Any) -> bool:
    marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return any(isinstance(mark, Range) for mark in marks) or any(map(_is_numeric, get_args(hint)))


def _frozen(value: Any) -> Any:
    """`value` with tuples for lists."""
    return tuple(map(_frozen, cast("list[Any]", value))) if isinstance(value, list) else value
