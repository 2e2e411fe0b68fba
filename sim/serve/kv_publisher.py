"""The thread that sends KV cache events to subscribers, over ZMQ as vLLM does it.

Each replica has a PUB socket, whose messages are (topic, number of the batch in 8 bytes, the batch), and if asked a
ROUTER socket: who sends it a number gets all kept batches from that on, and last one whose number is -1. No subscriber
holds up another or the server: what a slow one cannot take is lost to it, which the numbers show.
Source: ZmqEventPublisher in vllm/distributed/kv_events.py of vLLM 0.32.0.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import msgpack
import zmq

from batchsim.base.errors import ScenarioError
from batchsim.serve.kv_event_batches import BlockHashes, Removed, Stored
from batchsim.serve.kv_events_config import OPTION, KvEventsConfig, of_replica

_LAST = (-1).to_bytes(8, "big", signed=True)
_POLL_MS = 100
"""How long the thread sleeps at most, as vLLM's."""
_SLICE, _REPLAYS = 256, 64
"""Kept batches sent in a row before new ones have their turn; replays that wait, beyond which requests wait unread."""
_ALIVE_S = 60
"""Idle seconds after which TCP asks whether a subscriber is still there."""
_MOST_BYTES = 1 << 10
"""Bytes of a topic that is subscribed to, and of a request for old batches: who sends more is let go."""
_LOWER = 10
"""By how much the priority of the thread that serves subscribers is lower."""
_STOP_S = 1.0


def packed(unix_s: float, events: list[dict[str, Any]], replica: int) -> bytes:
    """The bytes of a batch."""
    return msgpack.Packer().pack([unix_s, events, replica])


@dataclass
class _Replica:
    """What a replica publishes: its sockets, the number of its next batch, the batches kept and their bytes."""

    pub: Any
    replay: Any
    hashes: BlockHashes
    next_number: int = 0
    kept: deque[tuple[int, bytes]] = field(default_factory=deque[tuple[int, bytes]])
    num_bytes: int = 0


@dataclass(frozen=True)
class Batch:
    """What became of a replica's cache at `unix_s`, numbered; None: it was emptied."""

    replica: int
    number: int
    unix_s: float
    changes: Sequence[Stored | Removed] | None


class KvPublisher:
    """The publishers of an endpoint that listens at `host`. All methods are for one thread, the server's.

    `endpoints`: where batches of each replica are published, and where old ones can be asked for, "" if nowhere.
    """

    def __init__(self, config: KvEventsConfig, host: str) -> None:
        self._config = config
        self._host = host
        self._context = _context()
        self._replicas: dict[int, _Replica] = {}
        self._numbers: dict[int, int] = {}  # of each replica's next batch, as the server's thread counts
        self._queue: deque[Batch] = deque()
        self._replays: deque[tuple[_Replica, list[bytes], int]] = deque()  # who asked, and from which batch on
        self._is_closing = False
        self.num_dropped = 0
        self.endpoints: dict[int, tuple[str, str]] = {}
        self._wakes, self._woken = socket.socketpair()
        for end in (self._wakes, self._woken):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    # ---- the server's thread

    def add(self, replica: int, block_size: int) -> None:
        """Opens the sockets of a replica. ScenarioError where it cannot have them."""
        config = self._config
        pub = self._open(zmq.PUB, config.endpoint, replica, config.hwm)
        replay = self._open(zmq.ROUTER, config.replay_endpoint, replica, config.buffer_steps + 1)
        self._numbers[replica] = 0
        self.endpoints[replica] = _address(pub), _address(replay)
        self._replicas[replica] = _Replica(pub, replay, BlockHashes(block_size))
        self._wake()

    def _open(self, kind: int, endpoint: str, replica: int, hwm: int) -> Any:
        if not endpoint:
            return None
        address, listens = of_replica(endpoint, replica, self._host)
        opened = self._context.socket(kind)
        opened.setsockopt(zmq.SNDHWM, hwm)
        opened.setsockopt(zmq.LINGER, 0)
        opened.setsockopt(zmq.TCP_KEEPALIVE, 1)
        opened.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _ALIVE_S)
        opened.setsockopt(zmq.IPV6, ":" in self._host)
        opened.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
        if kind == zmq.ROUTER:
            opened.setsockopt(zmq.RCVHWM, _REPLAYS)
        try:
            (opened.bind if listens else opened.connect)(address)
        except zmq.ZMQError as error:
            opened.close()
            raise ScenarioError(f"{OPTION}: {address}: {zmq.strerror(error.errno or 0)}. Give another.") from None
        return opened

    def start(self) -> None:
        """Begins to send."""
        self._thread.start()

    def publish(self, replica: int, changes: Sequence[Stored | Removed] | None) -> None:
        """Has a batch sent. Where too many wait it is dropped: its number is, and `num_dropped` counts it."""
        number = self._numbers[replica]
        self._numbers[replica] = number + 1
        if len(self._queue) >= self._config.max_queue_size:
            self.num_dropped += 1
            return
        self._queue.append(Batch(replica, number, time.time(), changes))
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):
            self._wakes.send(b"x")

    def close(self) -> None:
        """Ends the thread, once what waits is sent, for a second at most, and closes all sockets."""
        self._is_closing = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)
        if self._thread.is_alive():
            self._queue.clear()
            self._thread.join()
        for each in self._replicas.values():
            for opened in (each.pub, each.replay):
                if opened is not None:
                    opened.close(0)
        self._context.term()
        self._wakes.close()
        self._woken.close()

    # ---- the thread that sends

    def _run(self) -> None:
        while not self._is_closing or self._queue:
            ready = self._wait()
            with suppress(BlockingIOError):
                self._woken.recv(1 << 12)
            while self._queue:
                self._send(self._queue.popleft())
                if not self._is_closing and self._replays:
                    break
            if not self._is_closing:
                for replica in ready:
                    self._take_asked(replica)
                self._replay_some()

    def _wait(self) -> list[_Replica]:
        """The replicas that are asked for old batches, once there is anything to do."""
        poller, asked = zmq.Poller(), dict[Any, _Replica]()
        poller.register(self._woken, zmq.POLLIN)
        if len(self._replays) < _REPLAYS:
            for replica in list(self._replicas.values()):
                if replica.replay is not None:
                    asked[replica.replay] = replica
                    poller.register(replica.replay, zmq.POLLIN)
        has_work = self._is_closing or self._queue or self._replays
        ready = dict(poller.poll(0 if has_work else _POLL_MS))
        return [replica for opened, replica in asked.items() if opened in ready]

    def _send(self, batch: Batch) -> None:
        replica, config = self._replicas[batch.replica], self._config
        hashes = replica.hashes
        events = [hashes.cleared()] if batch.changes is None else hashes.events(batch.changes)
        payload = packed(batch.unix_s, events, batch.replica)
        number = batch.number.to_bytes(8, "big")
        replica.pub.send_multipart((config.topic.encode(), number, payload))
        if replica.replay is None:
            return
        kept = replica.kept
        kept.append((batch.number, payload))
        replica.num_bytes += len(payload)
        while len(kept) > config.buffer_steps or replica.num_bytes > config.buffer_bytes:
            replica.num_bytes -= len(kept.popleft()[1])

    def _take_asked(self, replica: _Replica) -> None:
        """Takes requests for old batches: the subscriber's name, an empty frame, a number in 8 bytes. Others are
        ignored."""
        while len(self._replays) < _REPLAYS:
            try:
                frames = replica.replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 3 and not frames[1] and len(frames[2]) == 8:
                self._replays.append((replica, frames[:2], int.from_bytes(frames[2], "big")))

    def _replay_some(self) -> None:
        """Sends kept batches to the one whose turn it is, as many as go in a row."""
        if not self._replays:
            return
        replica, to, number = self._replays.popleft()
        kept = replica.kept
        at = bisect_left(kept, number, key=itemgetter(0))
        end = min(at + _SLICE, len(kept))
        for place in range(at, end):
            each, payload = kept[place]
            replica.replay.send_multipart((*to, each.to_bytes(8, "big"), payload))
        if end < len(kept):
            self._replays.append((replica, to, kept[end][0]))
        else:
            replica.replay.send_multipart((*to, _LAST, b""))


def _context() -> zmq.Context[Any]:
    """A context whose I/O thread, which serves all subscribers, gives way to the thread that serves clients."""

    def begin() -> None:
        with suppress(AttributeError, OSError):  # threads have no priority of their own but on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWER)
        made.socket(zmq.PUB).close(0)  # with the first socket the I/O thread begins, and inherits the priority

    made = zmq.Context()
    first = threading.Thread(target=begin)
    first.start()
    first.join()
    return made


def _address(opened: Any) -> str:
    return "" if opened is None else opened.getsockopt_string(zmq.LAST_ENDPOINT)
