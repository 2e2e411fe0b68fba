"""Work for clients in turns, so that the event loop goes on between: what is short bit by bit, what is long aside."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_TURN_S = 0.001
"""Seconds of work that a round of the event loop takes on: what comes then waits for the next round, in order."""


class Turns:
    """Calls what is given to it, at once or later, in the event loop that runs."""

    def __init__(self) -> None:
        self.num_waiting = 0  # what was given and not called yet
        self._loop = asyncio.get_running_loop()
        self._left_s = _TURN_S
        self._has_begun = False
        self._queue = deque[Callable[[], None]]()
        self._aside = ThreadPoolExecutor(1, "reader")

    def take(self, act: Callable[[], None]) -> None:
        """Has `act`, which raises nothing, called when it is its turn."""
        self.num_waiting += 1
        self._queue.append(act)
        if not self._has_begun:
            self._has_begun = True
            self._loop.call_soon(self._begin)
        self._work()

    def aside(self, work: Callable[[], T], then: Callable[[Callable[[], T]], None]) -> None:
        """Has `work` done in a thread, one after another, and then, in turn, `then` called with what gives its result
        or raises its error."""
        self.num_waiting += 1

        def done(future: asyncio.Future[T]) -> None:
            self.num_waiting -= 1
            if not future.cancelled():
                future.exception()  # taken note of, should its turn never come
                self.take(lambda: then(future.result))

        self._loop.run_in_executor(self._aside, work).add_done_callback(done)

    def close(self) -> None:
        """Calls nothing any more."""
        self._queue.clear()
        self._aside.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        self._left_s, self._has_begun = _TURN_S, False
        self._work()
        if self._queue:
            self._has_begun = True
            self._loop.call_soon(self._begin)

    def _work(self) -> None:
        while self._queue and self._left_s > 0:
            began_s = time.perf_counter()
            self.num_waiting -= 1
            self._queue.popleft()()
            self._left_s -= time.perf_counter() - began_s
