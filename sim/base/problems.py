"""What a validator's errors say of a value: where in it they are, and in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchsim.base.errors import cut

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

OTHER = "other"
"""What a validator calls, in the places of its errors, all that `OrWord` marks but the word."""
_WORDS = {  # what a validator calls them, and how a scenario writes them
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "a word",
    "a valid boolean": "true or false",
    "a valid array": "a list, like [a, b]",
    "a valid tuple": "a list, like [a, b]",
    "a valid dictionary": "keys and values, like {key: value}",
    "an object": "keys and values, like {key: value}",
}


class RangeError(ValueError):
    """A number outside its range. Its text follows the name of what the number is of."""


def path_of(loc: tuple[int | str, ...], value: Any) -> tuple[int | str, ...]:
    """The keys of `loc`, a place in `value`, without the names of union members that a validator puts between them."""
    keys: list[int | str] = []
    named = False  # the union member of the mapping at hand
    for i, part in enumerate(loc):
        last = i == len(loc) - 1
        if isinstance(value, dict) and value.get("kind") == part and not named:
            named = True
        elif isinstance(value, dict) and part in value:
            value, named = value[part], False
            keys.append(part)
        elif isinstance(value, list | tuple) and isinstance(part, int):
            value, named = value[part] if part < len(value) else None, False
            keys.append(part)
        elif last and isinstance(value, dict) and part not in (OTHER, "[key]"):
            keys.append(part)
    return tuple(keys)


def range_error(problem: ErrorDetails) -> RangeError | None:
    """The number outside its range that the problem is; None for another problem."""
    error = problem.get("ctx", {}).get("error")
    return error if isinstance(error, RangeError) else None


def name_of(keys: tuple[int | str, ...]) -> str:
    """A place below a config, its field first: `mean_rate[0]`, `prices.h100`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")


def type_wanted(problem: ErrorDetails) -> str:
    """What should stand in the place of a value of the wrong type."""
    advice = str(problem["msg"]).removeprefix("Input should be ").removesuffix(" type")
    return _WORDS.get(advice, advice)


def first_problem(error: ValidationError, field: str, value: Any) -> str:
    """The first problem of a `field` with this value, in a line that begins with its place; a number outside its range
    goes first."""
    problem = min(error.errors(include_url=False), key=lambda each: range_error(each) is None)
    name, cause = name_of((field, *path_of(problem["loc"], value))), problem.get("ctx", {}).get("error")
    if isinstance(cause, RangeError):
        return f"{name} {cause}"
    if cause is not None:
        return f"{name}: {cause}"
    return f"{name} is {cut(repr(problem['input']), 60)}. Write {type_wanted(problem)}."
