"""Runs a function over tasks in other processes, so that Ctrl-C, a kill or a dead worker leaves nothing behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from sim.errors import BatchsimError

T = TypeVar("T")
R = TypeVar("R")


def run_all(function: Callable[[T], R], tasks: Sequence[T], jobs: int) -> Iterator[tuple[int, R]]:
    """Yields (index of the task, result) as tasks end; in this process with one job or one task.

    BatchsimError if a worker is killed, as the system does where memory is short.
    """
    if jobs == 1 or len(tasks) <= 1:
        for i, task in enumerate(tasks):
            yield i, function(task)
        return
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    with ProcessPoolExecutor(min(jobs, len(tasks)), context, initializer=_live_with_the_parent) as pool, _stop(pool):
        futures = {pool.submit(function, task): i for i, task in enumerate(tasks)}
        for future in as_completed(futures):
            try:
                result = future.result()
            except BrokenProcessPool:
                raise BatchsimError(
                    f"--jobs {jobs}: a worker process was killed, perhaps for want of memory. Points that were done are"
                    " kept: run again with fewer jobs."
                ) from None
            yield futures[future], result


@contextmanager
def _stop(pool: ProcessPoolExecutor) -> Iterator[None]:
    """Leaving early, on Ctrl-C or an error, does not wait for results that nobody will read."""
    try:
        yield
    except BaseException:
        for process in list((pool._processes or {}).values()):  # no public way to end a running task
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def _live_with_the_parent() -> None:
    """Leaves Ctrl-C to the parent, and makes this worker end with it even where it was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def is_running(pid: int) -> bool:
    """Whether there is such a process; one that has ended and that nobody waited for does not count."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:  # not ours, or a system without /proc
        return True
