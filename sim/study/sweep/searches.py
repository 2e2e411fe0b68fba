"""Searches that learn what their trials showed before they ask for more, side by side."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

Trials = TypeVar("Trials", bound=Sequence[Any])
T = TypeVar("T")


def side_by_side(
    searches: Sequence[Generator[Trials, None, T]], run: Callable[[list[tuple[int, Trials]]], object]
) -> dict[int, T]:
    """What the searches return, by their index in `searches`.

    A search yields the trials that it wants and goes on when they were made. `run` makes those of all searches at a
    time, so that processes do not wait for one another; a round in which nobody wants any is the last.
    """
    found: dict[int, T] = {}
    going_on = dict(enumerate(searches))
    while True:
        wanted: list[tuple[int, Trials]] = []
        for number, search in list(going_on.items()):
            try:
                wanted.append((number, next(search)))
            except StopIteration as end:
                found[number] = end.value
                del going_on[number]
        if not any(trials for _, trials in wanted):
            return found
        run(wanted)
