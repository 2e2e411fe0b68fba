"""Searches along numbers: brackets of a verdict, and several searches side by side, whose wishes of a round are run
together while each goes on when its own are there."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from batchsim.study.sweep.search import Bracket, Counts, side_by_side


def tried(bracket: Bracket[int], start: int, need: int) -> list[int]:
    """The numbers that a search from `start` tries, where `need` and more have the other verdict."""
    numbers: list[int] = []
    number: int | None = start
    while number is not None:
        numbers.append(number)
        bracket.tell(number, is_high=number >= need)
        number = bracket.following()
    return numbers


@pytest.mark.parametrize(
    ("axis", "low", "start", "need", "numbers", "ends"),
    [
        (Counts(1, 100), None, 10, 30, [10, 11, 13, 17, 25, 41, 33, 29, 31, 30], (29, 30)),
        (Counts(1, 100, 4), None, 20, 3, [20, 16, 8, 1, 4, 2, 3], (2, 3)),
        (Counts(1, 8), None, 5, 9, [5, 6, 8], (8, None)),
        (Counts(3, 8), None, 5, 1, [5, 4, 3], (None, 3)),
        (Counts(1, 64, 4), 0, 4, 13, [4, 8, 16, 12, 14, 13], (12, 13)),
        (Counts(1, 64, 64), 5, 64, 6, [64, 34, 19, 12, 8, 6], (5, 6)),
    ],
    ids=["up", "down", "none up to the highest", "all from the lowest", "a known end", "from the highest"],
)
def test_a_bracket_goes_outward_in_growing_strides_and_halves_what_is_between(
    axis: Counts, low: int | None, start: int, need: int, numbers: list[int], ends: tuple[int | None, int | None]
) -> None:
    """It ends with two neighbours, or with one verdict at the axis's end."""
    bracket = Bracket[int](axis, low)
    assert tried(bracket, start, need) == numbers
    assert (bracket.low, bracket.high) == ends


def test_strides_begin_anew_once_a_bracket_had_both_ends() -> None:
    """Verdicts change when more is known, and with them the ends."""
    bracket = Bracket[int](Counts(1, 100))
    bracket.put(10, None)
    assert [bracket.following(), bracket.following(), bracket.following()] == [11, 12, 14]
    bracket.put(10, 14)
    bracket.put(14, None)
    assert bracket.following() == 15


def counting(steps: list[list[int]], made: list[int]) -> Generator[list[int], None, int]:
    yield from steps
    return len(made)


def test_a_round_has_the_wishes_of_all_that_go_on() -> None:
    """Two searches of two rounds and one: the answers come back by number, as soon as each has ended."""
    made: list[int] = []
    rounds: list[list[tuple[int, list[int]]]] = []

    def run(wanted: list[tuple[int, list[int]]]) -> None:
        rounds.append(wanted)
        made.extend(trial for _, trials in wanted for trial in trials)

    found = side_by_side([counting([[1], [2, 3]], made), counting([[4]], made)], run)
    assert rounds == [[(0, [1]), (1, [4])], [(0, [2, 3])]]
    assert found == {0: 4, 1: 2}


def test_a_round_in_which_nobody_wants_anything_is_the_last() -> None:
    """One that wants nothing waits for what others find; when all do, none is asked again, and none has an answer."""
    rounds: list[list[tuple[int, list[int]]]] = []
    found = side_by_side([counting([[], [1], [], [2]], []), counting([[3], [], []], [])], rounds.append)
    assert rounds == [[(0, []), (1, [3])], [(0, [1]), (1, [])]]
    assert found == {}
