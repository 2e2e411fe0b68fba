"""Values of a measured file by name, checked one by one: each failure is one line with the place and the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NoReturn, TypeVar

from batchsim.base.errors import MeasuredError, shown
from batchsim.base.units import NS_PER_S

MAX_TOKENS = 2**31 - 1
MAX_SECONDS = 4e9
"""Of a time: epoch times lie below until 2096, a float holds them to 1 us, and two of them in ns fit 64 bits."""
MAX_REQUESTS = 20_000_000

T = TypeVar("T")


class Node:
    """A JSON value of a file with its place, `where`, from which values are asked by name."""

    def __init__(self, value: Any, where: str) -> None:
        self.value = value
        self.where = where

    def bad(self, what: str, advice: str = "Correct the file, or write it anew.") -> NoReturn:
        raise MeasuredError(f"{self.where}: {what}. {advice}")

    def has(self, name: str) -> bool:
        """Whether this object has `name`, and not as null."""
        return isinstance(self.value, Mapping) and self.value.get(name) is not None

    def of(self, name: str, advice: str = "") -> Node:
        """The value `name` of this object. MeasuredError where it is missing or null, or this is no object."""
        self.object()
        if self.value.get(name) is None:
            self.bad(f"{name} is missing", advice or "Correct the file, or write it anew.")
        return Node(self.value[name], f"{self.where}: {name}")

    def at(self, index: int) -> Node:
        """Item `index` of this list."""
        return Node(self.value[index], f"{self.where} item {index + 1}")

    def object(self) -> Mapping[str, Any]:
        """This value as a JSON object."""
        if not isinstance(self.value, Mapping):
            self.bad(f"{shown(self.value)} is no object")
        return self.value

    def items(self) -> list[Node]:
        """The items of this list."""
        if not isinstance(self.value, Sequence) or isinstance(self.value, str):
            self.bad(f"{shown(self.value)} is no list")
        if len(self.value) > MAX_REQUESTS:
            self.bad(f"has {len(self.value):,} items, at most {MAX_REQUESTS:,} are read")
        return [self.at(index) for index in range(len(self.value))]

    def text(self) -> str:
        if not isinstance(self.value, str):
            self.bad(f"{shown(self.value)} is no text")
        return self.value

    def number(self, low: float = 0.0, high: float = math.inf) -> float:
        """This value as a finite number from `low` to `high`."""
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
            self.bad(f"{shown(self.value)} is no number")
        try:
            number = float(self.value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            self.bad(f"{shown(self.value)} is not finite")
        if number < low:
            self.bad(f"{shown(self.value)} is {'negative' if low == 0 else f'below {low:g}'}")
        if number > high:
            self.bad(f"{shown(self.value)} is above {high:g}")
        return number

    def tokens(self) -> int:
        """This value as a number of tokens."""
        number = self.number(high=MAX_TOKENS)
        if number != int(number):
            self.bad(f"{shown(self.value)} is no whole number of tokens")
        return int(number)

    def count(self, low: int = 1) -> int:
        """This value as a whole number from `low` on."""
        number = self.number(low=low, high=MAX_TOKENS)
        if number != int(number):
            self.bad(f"{shown(self.value)} is no whole number")
        return int(number)

    def ns(self, unit_s: float = 1.0, low: float = 0.0) -> int:
        """This time or duration, in units of `unit_s` seconds, as ns."""
        return round(self.number(low, MAX_SECONDS / unit_s) * unit_s * NS_PER_S)

    def maybe(self, name: str, read: Callable[[Node], T]) -> T | None:
        """What `read` makes of the value `name`; None where it is missing or null."""
        return read(self.of(name)) if self.has(name) else None


def same_lengths(node: Node, columns: Mapping[str, Sequence[Any]]) -> int:
    """The length that all of `columns` have. MeasuredError names the first that differs from the one before."""
    sizes = {name: len(column) for name, column in columns.items()}
    names = list(sizes)
    for one, other in pairwise(names):
        if sizes[one] != sizes[other]:
            node.bad(f"{sizes[one]:,} {one} and {sizes[other]:,} {other}", "Both are one a request: write it anew.")
    return sizes[names[0]]
