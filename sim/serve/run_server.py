"""A server from its start to SIGTERM, with an event loop that keeps time to tens of microseconds."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import resource
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from batchsim.base.errors import ScenarioError
from batchsim.drive.source import SWITCH_S
from batchsim.serve.faults import Faults
from batchsim.serve.incoming import Limits
from batchsim.serve.kv_events import KvEvents
from batchsim.serve.kv_events_config import KvEventsConfig
from batchsim.serve.live_engine import LiveEngine
from batchsim.serve.realtime import RealtimeSimulation
from batchsim.serve.server import Server
from batchsim.serve.words import Words

_AWAKE_S = 0.0003
"""For so long before a timer is due the loop looks instead of sleeping: a sleeper wakes some 0.2 ms late on virtual
machines. It is spent once a timer, so a server without requests, which has none but those of patience, uses no CPU."""


_TOKEN_BYTES = 16
"""Bytes of a body that a prompt's token may take, where a model's length makes the usual limit too low."""
_OTHER_FILES = 64
"""Files that a server has open beside its connections."""


def event_loop() -> asyncio.AbstractEventLoop:
    """An event loop whose timers come within some 10 µs where the selector rounds to milliseconds."""
    epoll = getattr(selectors, "EpollSelector", None)
    if epoll is None:
        return asyncio.new_event_loop()

    class Exact(epoll):
        """Waits for the epoll object itself by `select`, which counts microseconds, and for the rest by looking."""

        def select(self, timeout: float | None = None) -> list[Any]:
            if timeout is None or timeout <= 0:
                return super().select(timeout)
            due_s = time.monotonic() + timeout
            if timeout > _AWAKE_S:
                select.select([self.fileno()], [], [], timeout - _AWAKE_S)
            while not (ready := super().select(0)) and time.monotonic() < due_s:
                pass
            return ready

    return asyncio.SelectorEventLoop(Exact())


def _unbound(host: str, port: int, error: OSError) -> ScenarioError:
    """The error that nothing can listen there, by what is wrong: the address or the port."""
    if isinstance(error, socket.gaierror):
        return ScenarioError(f"--host {host}: {error.strerror}. Give an address of this machine.")
    what = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        return ScenarioError(f"--host {host}: {what}. Give an address of this machine.")
    return ScenarioError(f"--port {port}: {what} at {host}. Give another.")


def check_address(host: str, port: int) -> None:
    """ScenarioError where nothing can listen at `port` of `host`, as `run_server` would raise it, but sooner."""

    async def bind() -> None:
        loop = asyncio.get_running_loop()
        (await loop.create_server(asyncio.Protocol, host, port, start_serving=False)).close()

    try:
        asyncio.run(bind())
    except OSError as error:
        raise _unbound(host, port, error) from None


def _limits(max_model_len: int) -> Limits:
    """The usual limits, as far as this process may have files open, which it has raised as far as it may; a body may
    hold a prompt of `max_model_len` tokens."""
    usual = Limits()
    wanted = usual.connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        wanted = soft
    body_bytes = max(usual.body_bytes, _TOKEN_BYTES * max_model_len)
    return replace(usual, body_bytes=body_bytes, connections=max(wanted - _OTHER_FILES, 1))


@contextmanager
def publishing(backend: RealtimeSimulation | LiveEngine, config: KvEventsConfig | None, host: str) -> Iterator[None]:
    """KV events of `backend` are published as `config` says, unless that is None, while the block runs.

    ScenarioError where an endpoint cannot be had, or the engines have no cache of blocks.
    """
    if config is None or not isinstance(backend, RealtimeSimulation):
        yield
        return
    from batchsim.serve.kv_publisher import KvPublisher  # whose packages are an extra

    publisher = KvPublisher(config, host)
    try:
        backend.publish_kv_events(KvEvents(publisher, Words(backend.setup.model.vocab_size).generated))
        publisher.start()
        yield
    finally:
        backend.kv_events = None
        publisher.close()


def run_server(
    backend: RealtimeSimulation | LiveEngine,
    *,
    host: str,
    port: int,
    speed: float,
    api_key: str,
    faults: Faults,
    drain_s: float,
    ready: Callable[[int], None],
    kv_events: KvEventsConfig | None = None,
) -> tuple[int, int]:
    """Serves until SIGTERM or Ctrl-C, and then until what is open is answered, at most `drain_s`; a second signal ends
    that. `ready` is called with the port. `kv_events`: where simulated engines publish what
    their caches hold. Returns the simulated time at the end, in ns, and when it began, in ns since 1970.

    ScenarioError where address or port cannot be had. Raises what the engines raise.
    """

    async def serve() -> tuple[int, int]:
        server = Server(backend, speed, api_key, _limits(backend.setup.max_model_len), faults)
        loop = asyncio.get_running_loop()
        try:
            bound = await server.start(host, port)
        except OSError as error:
            raise _unbound(host, port, error) from None
        signalled = asyncio.Event()

        def on_signal() -> None:
            if signalled.is_set():
                server.stopped.set()
            signalled.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        ready(bound)
        waits = [asyncio.ensure_future(event.wait()) for event in (signalled, server.stopped)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        server.drain()
        with suppress(TimeoutError):
            await asyncio.wait_for(server.stopped.wait(), drain_s)
        server.close()
        for wait in waits:
            wait.cancel()
        await asyncio.sleep(0)
        if server.failure is not None:
            raise server.failure
        return server.now_ns, server.started_unix_ns

    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)  # who reads a long request beside the loop lets it go on
    gc.collect()
    gc.freeze()  # a pass over all that is there by now would make tokens late
    try:
        with publishing(backend, kv_events, host), asyncio.Runner(loop_factory=event_loop) as runner:
            return runner.run(serve())
    finally:
        gc.unfreeze()
        sys.setswitchinterval(switch_s)
