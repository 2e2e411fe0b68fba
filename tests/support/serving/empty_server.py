"""A server that does nothing but stream pieces at the times of a run before: a client's own work shows at it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

STEADY = [{"ttft_ns": 10_500_000, "e2e_ns": 19_000_000, "output_tokens": 2}]
"""The rows of a server whose first pieces come after 10.5 ms, and each further one after 8.5 ms."""
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_ONE = b'{"object": "list", "data": [{"id": "m", "object": "model"}]}'
_MODELS = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(_ONE), _ONE)


@dataclass
class EmptyServer:
    """Where it is, whose times it keeps, and what it wrote: a row a request by its id, times in ns, in columns of
    `received/*.csv`.

    The n-th request has the first token and the mean gap of row n of `played`, from its start again after the last.
    """

    played: Sequence[dict[str, int]]
    url: str = ""
    rows: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Streams to each completion asked for on a connection as many pieces as it asks for; what else is asked has
        one model."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if not head.startswith(b"post"):
                    writer.write(_MODELS)
                    continue
                length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
                asked = json.loads(await reader.readexactly(length))
                await self._stream(writer, asked["max_tokens"])
        writer.close()

    async def _stream(self, writer: asyncio.StreamWriter, tokens: int) -> None:
        start_ns, number = time.monotonic_ns(), len(self.rows)
        name = f"empty-{number}"
        row = self.rows[name] = {"sent_ns": start_ns, "output_tokens": tokens}
        played = self.played[number % len(self.played)]
        gap_ns = (played["e2e_ns"] - played["ttft_ns"]) / max(played["output_tokens"] - 1, 1)
        writer.write(_HEAD)
        for token in range(tokens):
            due_ns = start_ns + played["ttft_ns"] + token * gap_ns
            await asyncio.sleep((due_ns - time.monotonic_ns()) / 1e9)
            choice = {"index": 0, "text": " 104729", "finish_reason": None, "logprobs": None}
            _write(writer, _event({"id": name, "choices": [choice]}))
            row["e2e_ns"] = time.monotonic_ns() - start_ns
            row.setdefault("ttft_ns", row["e2e_ns"])
        usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": 1 + tokens}
        _write(writer, _event({"id": name, "choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


def _event(data: dict[str, object]) -> bytes:
    whole = {"object": "text_completion", "created": 0, "model": "m"} | data
    return b"data: %s\n\n" % json.dumps(whole).encode()


def _write(writer: asyncio.StreamWriter, piece: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))


@contextmanager
def empty_server(played: Sequence[dict[str, int]] = STEADY) -> Iterator[EmptyServer]:
    """The server in a thread of its own, on 127.0.0.1, until the block ends."""
    found, ready = EmptyServer(played), threading.Event()
    loop, ended = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        server = await asyncio.start_server(found.answer, "127.0.0.1", 0)
        found.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await ended.wait()
        server.close()

    thread = threading.Thread(target=loop.run_until_complete, args=[serve()], daemon=True)
    thread.start()
    try:
        assert ready.wait(10), "a socket on this machine"
        yield found
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(10)
        loop.close()
