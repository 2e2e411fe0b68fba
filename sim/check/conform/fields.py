"""What the fields of a recording may hold, each in its range: checked before anything is computed or made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from batchsim.base.errors import cut, shown


class BadRecording(Exception):  # noqa: N818
    """What is wrong with a recording, in one line that ends with what to do."""


@dataclass(frozen=True)
class Kind:
    """The JSON values that a field may have: those that `fits` says, in words `what`."""

    what: str
    fits: Callable[[Any], bool]

    def check(self, value: Any, where: str) -> None:
        """BadRecording, which begins with `where`, unless `value` is of this kind."""
        if not self.fits(value):
            raise BadRecording(f"{where} is {shown(value)}, not {self.what}. Record it again.")

    @property
    def or_null(self) -> Kind:
        """The same, and null."""
        return Kind(f"{self.what} or null", lambda value: value is None or self.fits(value))


@dataclass(frozen=True)
class ListOf:
    """A list, each item of one kind."""

    item: Kind

    def check(self, value: Any, where: str) -> None:
        """BadRecording, which begins with `where` and the number of the item, unless all items are of the kind."""
        LIST.check(value, where)
        for i, item in enumerate(value):
            if not self.item.fits(item):
                self.item.check(item, f"{where}[{i}]")


Fields = Mapping[str, Kind | ListOf]


def whole(low: int, high: int) -> Kind:
    """Whole numbers from `low` to `high`; true and false are none."""
    return Kind(f"a whole number from {low:,} to {high:,}", lambda value: type(value) is int and low <= value <= high)


def number(what: str, high: int) -> Kind:
    """Numbers from 0 to `high`."""
    return Kind(f"{what} from 0 to {high:,}", lambda value: type(value) in (int, float) and 0 <= value <= high)


def columns(what: str, *kinds: Kind) -> Kind:
    """Lists with one item for each of `kinds`."""

    def fits(value: Any) -> bool:
        return (
            isinstance(value, list)
            and len(value) == len(kinds)
            and all(kind.fits(item) for kind, item in zip(kinds, value, strict=True))
        )

    return Kind(what, fits)


ANY = Kind("anything", lambda value: True)
LIST = Kind("a list", lambda value: isinstance(value, list))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
TEXT = Kind("a text", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
SECONDS = number("a time in seconds", 10**9)
SHARE = number("a share", 1)
COUNT = whole(0, 10**15)
"""Also ids and token indices; beyond it readers of JSON begin to round."""
TOKENS = whole(1, 10**9)
PRIORITY = whole(-(2**31), 2**31 - 1)
BLOCK_SIZE = whole(1, 10**6)
BLOCKS = whole(1, 10**7)
"""Of a pool: a KV manager with a cache keeps a few words for each."""
MODEL_LEN = whole(1, 10**7)
IDS = ListOf(COUNT)
PAIRS = ListOf(columns(f"[id, tokens], each {COUNT.what}", COUNT, COUNT))
SEGMENTS = ListOf(columns(f"[stream, start, len], a text and whole numbers, len {TOKENS.what}", TEXT, COUNT, TOKENS))


def check_row(row: Any, where: str, required: Fields, optional: Fields | None = None) -> dict[str, Any]:
    """`row` if it is a JSON object with all `required` fields, none but these and `optional`, each of its kind."""
    OBJECT.check(row, where)
    kinds = {**required, **optional} if optional else required
    for name in required:
        if name not in row:
            raise BadRecording(f"{where} has no {name}. Record it again.")
    for name, value in row.items():
        if name not in kinds:
            raise BadRecording(f"{where} has {cut(name)}, which is not known and so cannot be compared. Leave it out.")
        kinds[name].check(value, f"{where}.{name}")
    return row
