"""Subscribers to KV events that are broken, slow, dead or many: requests are answered, events go on, none is left."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("h11", reason="batchsim serve needs h11")
pytest.importorskip("zmq", reason="KV events need pyzmq: pip install 'batchsim[gateways]'")
pytest.importorskip("msgpack", reason="KV events need msgpack: pip install 'batchsim[gateways]'")

import zmq

from batchsim.serve.kv_events_config import KvEventsConfig
from tests.unit.serve.test_kv_events import LAST, Watched, body, watch
from tests.unit.serve.test_server import COMPLETIONS

Act = Callable[[zmq.Context, str, str], Any]
"""Acts on (publisher, replay endpoint); what it returns is kept until the server has answered, then closed."""
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)

READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"


def _raw(endpoint: str, *data: bytes) -> socket.socket:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    opened = socket.create_connection((host, int(port)))
    with suppress(OSError):
        for each in data:
            opened.sendall(each)
    return opened


def _subscriber(endpoint: str, topic: bytes) -> socket.socket:
    """A subscriber by the protocol's bytes, which its own library would not survive with a long topic."""
    opened, heard = _raw(endpoint, GREETING, READY), b""
    while b"PUB" not in heard:
        heard += opened.recv(1024)
    with suppress(OSError):
        opened.sendall(b"\x02" + (1 + len(topic)).to_bytes(8, "big") + b"\x01" + topic)
    return opened


def _socket(context: zmq.Context, kind: int, endpoint: str, *frames: list[bytes], **options: int) -> zmq.Socket:
    opened = context.socket(kind)
    opened.linger = 0
    for name, value in options.items():
        setattr(opened, name, value)
    opened.connect(endpoint)
    for each in frames:
        opened.send_multipart(each, zmq.NOBLOCK if kind != zmq.DEALER else 0)
    return opened


def _asks(*frames: list[bytes]) -> Act:
    return lambda context, _, replay: _socket(context, zmq.DEALER, replay, *frames)


def _says(*data: bytes, to_replay: bool = False) -> Act:
    return lambda _, pub, replay: _raw(replay if to_replay else pub, *data)


def _subscribed(topics: list[bytes], **options: int) -> Act:
    def act(context: zmq.Context, pub: str, _: str) -> zmq.Socket:
        opened = _socket(context, zmq.SUB, pub, **options)
        for topic in topics:
            opened.subscribe(topic)
        return opened

    return act


def _comes_and_goes(context: zmq.Context, pub: str, replay: str) -> None:
    for _ in range(100):
        _raw(pub, GREETING).close()
        _raw(replay).close()


def _resets(context: zmq.Context, pub: str, replay: str) -> None:
    for _ in range(50):
        opened = _raw(pub, GREETING[:30])
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        opened.close()


def _plain(context: zmq.Context, pub: str, replay: str) -> zmq.Socket:
    opened = context.socket(zmq.SUB)
    opened.linger, opened.plain_username, opened.plain_password = 0, b"who", b"knows"
    opened.connect(pub)
    return opened


def _curve(context: zmq.Context, pub: str, replay: str) -> zmq.Socket:
    opened = context.socket(zmq.SUB)
    opened.linger = 0
    opened.curve_publickey, opened.curve_secretkey = zmq.curve_keypair()
    opened.curve_serverkey = zmq.curve_keypair()[0]
    opened.connect(pub)
    return opened


def _many(context: zmq.Context, pub: str, replay: str) -> list[socket.socket]:
    return [_subscriber(pub, b"") for _ in range(300)]


FROM_0 = (0).to_bytes(8, "big")
CASES: dict[str, Act] = {
    "http": _says(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"),
    "http to the replay port": _says(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n", to_replay=True),
    "zeros": _says(bytes(10_000)),
    "noise": _says(bytes(range(256)) * 40),
    "half a greeting": _says(GREETING[:40]),
    "a greeting and silence": _says(GREETING),
    "a greeting and noise": _says(GREETING, bytes(range(256)) * 40),
    "a frame of 2^63 bytes": _says(GREETING, b"\x02" + (2**63 - 1).to_bytes(8, "big") + b"x"),
    "a frame of 2^63 bytes to the replay port": _says(
        GREETING, b"\x02" + (2**63 - 1).to_bytes(8, "big") + b"x", to_replay=True
    ),
    "hundreds that come and go": _comes_and_goes,
    "hundreds that reset": _resets,
    "hundreds that stay": _many,
    "another security": _plain,
    "encryption": _curve,
    "a dealer at the publisher": lambda context, pub, _: _socket(context, zmq.DEALER, pub, [b"", FROM_0]),
    "a subscriber at the replay port": lambda context, _, replay: _socket(context, zmq.SUB, replay),
    "a pusher at the replay port": lambda context, _, replay: _socket(context, zmq.PUSH, replay),
    "a topic of a megabyte": lambda _, pub, __: _subscriber(pub, b"t" * 1_000_000),
    "ten thousand topics": _subscribed([b"%d" % number for number in range(10_000)]),
    "the same topic a thousand times": _subscribed([b""] * 1000),
    "a subscriber that does not read": _subscribed([b""], rcvhwm=1, rcvbuf=1024),
    "no number": _asks([b"", b""]),
    "a number of 7 bytes": _asks([b"", b"1234567"]),
    "a number of 9 bytes": _asks([b"", b"123456789"]),
    "a number too long to be read": _asks([b"", b"1" * 100_000]),
    "no empty frame": _asks([FROM_0]),
    "a full empty frame": _asks([b"x", FROM_0]),
    "seven frames": _asks([b"", *[FROM_0] * 6]),
    "empty frames": _asks([b""] * 50),
    "the highest number": _asks([b"", b"\xff" * 8]),
    "five hundred replays that are not read": _asks(*[[b"", FROM_0]] * 500),
}


def _num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files are counted by /proc")
@pytest.mark.parametrize("case", CASES)
def test_a_hostile_subscriber_changes_nothing_for_others(case: str) -> None:
    """While it is there requests are answered, all their batches are kept and replayed in order, and nothing is logged;
    when it has gone as many files are open as before."""

    async def use(client: Watched) -> Any:
        logged: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        await client.json(COMPLETIONS, body(1, 64))
        await client.asked(FROM_0)  # whose context opens files of its own
        before, context = _num_files(), zmq.Context()
        held = await asyncio.get_running_loop().run_in_executor(None, CASES[case], context, *client.endpoint())
        for start in (100, 200, 300):
            await client.json(COMPLETIONS, body(start, 64))
        numbers = [number for _, number, _ in await client.asked(FROM_0)]
        for each in held if isinstance(held, list) else [held]:
            if each is not None:
                each.close()
        context.destroy(0)
        while _num_files() > before:  # the io thread of the publisher closes its ends in its own time
            await asyncio.sleep(0)
        return numbers, logged, client.events.publisher._thread.is_alive()

    numbers, logged, lives = watch(use)
    assert numbers == [*(number.to_bytes(8, "big") for number in range(4)), LAST]
    assert logged == [] and lives


@pytest.mark.slow
def test_a_subscriber_that_does_not_read_loses_what_is_beyond_its_mark() -> None:
    """Of thousands of batches no more than `hwm` wait for it; when it reads, their numbers show what it has lost."""

    async def use(client: Watched) -> Any:
        with client.context.socket(zmq.SUB) as slow:
            slow.rcvhwm = 1
            slow.rcvbuf = 4096
            slow.subscribe(b"")
            slow.connect(client.endpoint()[0])
            start = 0
            while not slow.poll(0):
                start += 100
                await client.json(COMPLETIONS, body(start, 64))
            for _ in range(300):
                start += 3000
                await client.json(COMPLETIONS, body(start % 90_000, 2000))
            while client.events.publisher._queue:
                await asyncio.sleep(0)
            numbers: list[int] = []
            while slow.poll(100):
                numbers.append(int.from_bytes(slow.recv_multipart()[1], "big"))
            return numbers, client.events.publisher._numbers[0]

    numbers, num_sent = watch(use, config=KvEventsConfig("tcp://*:0", "tcp://*:0", hwm=4), tokens=40_000)
    assert numbers == sorted(set(numbers)) and 0 < len(numbers) < num_sent - 50
