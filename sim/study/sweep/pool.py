"""Runs a function over tasks in other processes, so that Ctrl-C, a kill or a dead worker leaves nothing behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from batchsim.base.errors import BatchsimError

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Killed:
    """A task whose worker process ended under it, twice. `how`, in words that follow `its worker process`."""

    how: str


def run_all(
    function: Callable[[T], R], tasks: Sequence[T], jobs: int, *, here: Callable[[T], R] | None = None
) -> Iterator[tuple[int, R | Killed]]:
    """Yields (index of the task, result) as tasks end; in this process with one job or one task, by `here` if given.

    A task whose worker is killed, as the system does where memory is short, runs once more alone after all others.
    What `function` raises ends everything and is raised here.
    """
    if jobs == 1 or len(tasks) <= 1:
        for i, task in enumerate(tasks):
            yield i, (here or function)(task)
        return
    suspects: list[int] = []
    for i, result in _run(function, dict(enumerate(tasks)), jobs):
        if isinstance(result, Killed):
            suspects.append(i)
        else:
            yield i, result
    for suspect in suspects:
        for i, result in _run(function, {suspect: tasks[suspect]}, 1):
            yield i, Killed(f"{result.how}, alone too") if isinstance(result, Killed) else result


def start_early(module: str) -> None:
    """Begins to import what the workers of a later `run_all` need for functions of `module`; returns at once."""
    if sys.platform == "linux":
        multiprocessing.get_context("forkserver").set_forkserver_preload([module])
        # Ctrl-C is for this process, which ends the others; one that is importing would say where it was.
        resource_tracker.ensure_running()  # by itself, since that ends with signals let through
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(function: Callable[[T], R], tasks: dict[int, T], jobs: int) -> Iterator[tuple[int, R | Killed]]:
    """Yields results, and Killed for each task whose worker ended under it."""
    waiting = deque(tasks.items())
    workers = {worker.pipe: worker for worker in (_Worker(function) for _ in range(min(jobs, len(waiting))))}
    try:
        for worker in workers.values():
            worker.give(*waiting.popleft())
        while workers:
            for pipe in wait(list(workers)):
                worker = workers.pop(pipe)  # pyright: ignore[reportArgumentType]
                done, result = worker.task, worker.result()
                if isinstance(result, Killed) and waiting:
                    worker = _Worker(function)
                if waiting:
                    workers[worker.pipe] = worker
                    worker.give(*waiting.popleft())
                else:
                    worker.end()
                yield done, result
    finally:
        for worker in workers.values():
            worker.end()


class _Worker:
    """A process that runs one task at a time."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        start_early(function.__module__)  # what the function needs is then imported once, not by every worker
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, function), daemon=True)
        self.process.start()
        theirs.close()
        self.task = -1

    def give(self, number: int, task: Any) -> None:
        self.task = number
        with contextlib.suppress(BrokenPipeError):  # it has ended already, which `result` will tell
            self.pipe.send(task)

    def result(self) -> Any:
        """What the task returned; Killed if the process ended under it. Raises what the task raised."""
        try:
            error, result = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            return Killed(_how_it_ended(self.process.exitcode))
        if error is not None:
            raise error
        return result

    def end(self) -> None:
        self.process.terminate()
        self.process.join()
        self.pipe.close()


def _work(pipe: Connection, function: Callable[[Any], Any]) -> None:
    """The loop of a worker process: takes a task, sends its result, until no task comes."""
    _live_with_the_parent()
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            outcome = None, function(task)
        except (Exception, SystemExit) as error:  # an own policy may end the program
            if not isinstance(error, BatchsimError):  # those say in a line what is wrong with the input
                error.add_note(f"in a worker process:\n{traceback.format_exc()}")
            outcome = error, None
        pipe.send(outcome)


def _live_with_the_parent() -> None:
    """Leaves Ctrl-C to the parent, and makes this worker end with it even where it was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _how_it_ended(code: int | None) -> str:
    if code is None or code >= 0:
        return f"ended with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
