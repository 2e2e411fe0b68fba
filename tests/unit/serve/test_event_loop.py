"""The server's event loop: timers are not early, and what is ready is not kept waiting for them."""

from __future__ import annotations

import asyncio
import socket

import pytest

pytest.importorskip("h11", reason="batchsim serve needs h11")

from batchsim.serve.run_server import event_loop


@pytest.mark.parametrize("wait_s", [0.0001, 0.0003, 0.002])
def test_no_timer_is_early(wait_s: float) -> None:
    """A timer's callback finds the clock at its time or after it, shorter than the time of looking or longer."""

    async def run() -> list[float]:
        loop = asyncio.get_running_loop()
        ahead_s = list[float]()
        for _ in range(20):
            due_s, done = loop.time() + wait_s, loop.create_future()
            loop.call_at(due_s, done.set_result, None)
            await done
            ahead_s.append(due_s - loop.time())
        return ahead_s

    with asyncio.Runner(loop_factory=event_loop) as runner:
        assert max(runner.run(run())) <= 1e-9  # the clock's resolution


@pytest.mark.parametrize("wait_s", [0.0002, 3600])
def test_what_can_be_read_does_not_wait_for_a_timer(wait_s: float) -> None:
    """With a timer far off, or so near that the loop looks for it, bytes are read as they come."""

    async def run() -> bytes:
        loop = asyncio.get_running_loop()
        here, there = socket.socketpair()
        here.setblocking(False)
        with here, there:
            timer = loop.call_later(wait_s, lambda: None)
            loop.call_soon(there.send, b"x")
            try:
                return await loop.sock_recv(here, 1)
            finally:
                timer.cancel()

    with asyncio.Runner(loop_factory=event_loop) as runner:
        assert runner.run(run()) == b"x"
