"""Searches side by side: all wishes of a round are run together, and each search goes on when its own are there."""

from __future__ import annotations

from collections.abc import Generator

from batchsim.study.sweep.searches import side_by_side


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
    """One that wants nothing waits for what others find; when all do, nobody is asked again, and none has an answer."""
    rounds: list[list[tuple[int, list[int]]]] = []
    found = side_by_side([counting([[], [1], [], [2]], []), counting([[3], [], []], [])], rounds.append)
    assert rounds == [[(0, []), (1, [3])], [(0, [1]), (1, [])]]
    assert found == {}
