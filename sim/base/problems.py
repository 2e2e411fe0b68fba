"""What a validator's errors say of a value: where in it they are, and in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchsim.base.errors import cut

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

OTHER = "other"
"""What a validator calls, in the places of its errors, all that `OrWord` marks but the word."""
UNKNOWN = "unexpected_keyword_argument"
"""What a validator calls a key that is no field."""
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
    """A number outside its range, at `keys` of its dataclass. Its text follows the name of what the number is of."""

    keys: tuple[int | str, ...] = ()


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
    advice = str(problem["msg"]).removeprefix("Input should be ").partition(", unable")[0].removesuffix(" type")
    return _WORDS.get(advice, advice)


def first_problem(error: ValidationError, value: Any, where: str, skip: int = 0) -> str:
    """The first problem of a `value` that stands at `where`, in a line that begins with the place; a number outside its
    range goes first. `skip`: how many keys of the validator's places are above the value."""
    problem = min(error.errors(include_url=False), key=lambda each: range_error(each) is None)
    said = problem.get("ctx", {})
    name = name_of((where, *path_of(problem["loc"][skip:], value))).removeprefix(".") or "the value"
    match problem["type"]:
        case "value_error" if isinstance(said["error"], RangeError):
            return f"{name} {said['error']}"
        case "value_error":
            return f"{name}: {said['error']}"
        case "missing" | "missing_argument":
            return f"{name} is missing."
        case _ if problem["type"] == UNKNOWN:
            owner = name.rpartition(".")[0]
            return f"{name} is not a field of {owner}." if owner else f"{name} is not a field."
        case "union_tag_invalid":
            return f"{name}.kind is {cut(repr(said['tag']), 60)}, expected one of {said['expected_tags']}."
        case _:
            return f"{name} is {cut(repr(problem['input']), 60)}, expected {type_wanted(problem)}."
