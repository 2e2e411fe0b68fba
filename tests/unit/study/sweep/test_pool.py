"""Tasks in other processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.study.sweep.pool import Killed, run_all


def double(number: int) -> int:
    return 2 * number


def die_at_three(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * number


def die_once(mark: Path) -> str:
    if not mark.exists():
        mark.touch()
        os._exit(9)
    return mark.name


def refuse_two(number: int) -> int:
    if number == 2:
        raise ScenarioError("two: is wrong. Write three.")
    return number


def end_at_two(number: int) -> int:
    if number == 2:
        raise SystemExit(0)
    return number


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_task_gives_its_own_result(jobs: int) -> None:
    """Results come with the index of their task, whatever the order in which they end."""
    assert dict(run_all(double, [5, 6, 7], jobs)) == {0: 10, 1: 12, 2: 14}


def test_a_task_that_kills_its_worker_takes_no_other_with_it() -> None:
    """The killed task is tried once more alone, then is Killed, which says how; all others have their results."""
    found = dict(run_all(die_at_three, [1, 2, 3, 4, 5, 6], 2))
    assert found == {0: 2, 1: 4, 2: Killed("was killed by SIGKILL, alone too"), 3: 8, 4: 10, 5: 12}


def test_a_task_killed_for_others_memory_succeeds_alone(tmp_path: Path) -> None:
    """One death is not the task's fault as long as it does its work alone."""
    assert dict(run_all(die_once, [tmp_path / "a", tmp_path / "b"], 2)) == {0: "a", 1: "b"}


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_a_task_raises_is_raised_here(jobs: int) -> None:
    """An error ends the whole, as itself, from a worker too; what is wrong with the input comes without a traceback."""
    with pytest.raises(ScenarioError, match="two: is wrong") as caught:
        list(run_all(refuse_two, [1, 2, 3, 4], jobs))
    assert not getattr(caught.value, "__notes__", [])


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_task_that_ends_the_program_ends_it_here(jobs: int) -> None:
    """From a worker too, instead of the worker alone."""
    with pytest.raises(SystemExit):
        list(run_all(end_at_two, [1, 2, 3, 4], jobs))
