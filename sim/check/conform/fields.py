"""The kinds of values that fields of a recording may hold, each with its range: checked before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from batchsim.base.errors import cut, shown


class BadRecording(Exception):  # noqa: N818
    """A fault of a recording, in one line that ends with what to do."""


@dataclass(frozen=True)
class Kind:
    """A kind of JSON values: those for which `fits` is true, described in words by `what`."""

    what: str
    fits: Callable[[Any], bool]

    def check(self, value: Any, where: str) -> None:
        """Raises BadRecording, its text beginning with `where`, unless `value` is of this kind."""
        if not self.fits(value):
            raise BadRecording(f"{where} is {shown(value)}, not {self.what}. Record it again.")

    @property
    def or_null(self) -> Kind:
        """This kind extended by null."""
        return Kind(f"{self.what} or null", lambda value: value is None or self.fits(value))


@dataclass(frozen=True)
class ListOf:
    """Lists whose items are all of one kind."""

    item: Kind

    def check(self, value: Any, where: str) -> None:
        """Raises BadRecording, its text beginning with `where` and the item's index, unless all are of the kind."""
        LIST.check(value, where)
        for i, item in enumerate(value):
            if not self.item.fits(item):
                self.item.check(item, f"{where}[{i}]")


Fields = Mapping[str, Kind | ListOf]


def whole(low: int, high: int) -> Kind:
    """The kind of whole numbers from `low` to `high`, true and false excluded."""
    return Kind(f"a whole number from {low:,} to {high:,}", lambda value: type(value) is int and low <= value <= high)


def number(what: str, high: int) -> Kind:
    """The kind of numbers from 0 to `high`."""
    return Kind(f"{what} from 0 to {high:,}", lambda value: type(value) in (int, float) and 0 <= value <= high)


def columns(what: str, *kinds: Kind) -> Kind:
    """The kind of lists with exactly one item of each of `kinds`, in order."""

    def fits(value: Any) -> bool:
        return (
            isinstance(value, list)
            and len(value) == len(kinds)
            and all(kind.fits(item) for kind, item in zip(kinds, value, strict=True))
        )

    return Kind(what, fits)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(COUNT.fits(one) for one in value)


ANY = Kind("anything", lambda value: True)
LIST = Kind("a list", lambda value: isinstance(value, list))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
TEXT = Kind("a text", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
SECONDS = number("a time in seconds", 10**9)
HOST_SECONDS = Kind(
    f"{SECONDS.what}, or a list of such, one a step",
    lambda value: SECONDS.fits(value) or (isinstance(value, list) and all(map(SECONDS.fits, value))),
)
SHARE = number("a share", 1)
COUNT = whole(0, 10**15)
"""Counts, ids and token indices; JSON readers begin to round numbers beyond it."""
TOKENS = whole(1, 10**9)
PRIORITY = whole(-(2**31), 2**31 - 1)
BLOCK_SIZE = whole(1, 10**6)
BLOCKS = whole(1, 10**7)
"""KV blocks of a pool; a KV manager with a prefix cache keeps a few words for each."""
MODEL_LEN = whole(1, 10**7)
IDS = ListOf(COUNT)
PAIRS = ListOf(columns(f"[id, tokens], each {COUNT.what}", COUNT, COUNT))
SPEC = ListOf(columns("[id, drafts, accepted, tokens], all whole numbers from 0", COUNT, COUNT, COUNT, COUNT))
ITEMS = ListOf(columns("[identifier, first token, length], a text and whole numbers", TEXT, COUNT, TOKENS))
ENCODE = ListOf(
    Kind(
        "[id, [place of an item...]], whole numbers from 0",
        lambda row: isinstance(row, list) and len(row) == 2 and COUNT.fits(row[0]) and _are_counts(row[1]),
    )
)
NAMES = ListOf(TEXT)
SEGMENTS = ListOf(columns(f"[stream, start, len], a text and whole numbers, len {TOKENS.what}", TEXT, COUNT, TOKENS))


def check_row(row: Any, where: str, required: Fields, optional: Fields | None = None) -> dict[str, Any]:
    """`row`, an object with all `required` fields, only those and `optional`, each of its kind; else BadRecording."""
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
