"""Tasks in other processes."""

from __future__ import annotations

import os

import pytest

from sim.errors import BatchsimError
from sim.pool import is_running, run_all


def double(number: int) -> int:
    return 2 * number


def die(number: int) -> int:
    os._exit(number)


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_task_gives_its_own_result(jobs: int) -> None:
    """Results come with the index of their task, whatever the order in which they end."""
    assert dict(run_all(double, [5, 6, 7], jobs)) == {0: 10, 1: 12, 2: 14}


def test_a_worker_that_dies_is_one_error_that_says_what_to_do() -> None:
    """A killed worker is no traceback of the pool's."""
    with pytest.raises(BatchsimError, match=r"--jobs 2: a worker process was killed.*fewer jobs"):
        list(run_all(die, [1, 1], 2))


def test_a_process_that_never_was_is_not_running() -> None:
    """This process is; one with an id beyond the system's largest is not."""
    assert is_running(os.getpid())
    assert not is_running(2**22 + 1)
