"""A server for completions that does what it should not, on 127.0.0.1 for as long as a test runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

Writer = asyncio.StreamWriter
Behave = Callable[[dict[str, Any], Writer], Awaitable[None]]
MODELS = {"data": [{"id": "m", "max_model_len": 2048}]}


def whole(body: bytes, status: str = "200 OK", kind: str = "application/json", more: str = "") -> bytes:
    """An answer with its length."""
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{more}\r\n"
    )
    return head.encode() + body


def stream(*events: Any, end: bool = True) -> bytes:
    """A stream of events that the hang-up ends; text stands as it is, all else as JSON."""
    lines = [one if isinstance(one, str) else json.dumps(one) for one in events]
    lines += ["[DONE]"] if end else []
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    return (head + "".join(f"data: {line}\n\n" for line in lines)).encode()


def tokens(count: int, **more: Any) -> list[dict[str, Any]]:
    """Chunks of a token each."""
    return [{"choices": [{"index": 0, "text": " a", **more}]} for _ in range(count)]


def usage(prompt: int, output: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}}


def good(body: dict[str, Any]) -> bytes:
    return stream(*tokens(body["max_tokens"]), usage(len(body["prompt"]), body["max_tokens"]))


@asynccontextmanager
async def server(
    behave: Callable[[dict[str, Any]], bytes],
    models: bytes | None = None,
    metrics: str = "",
    port: int = 0,
    trickle: bytes | None = None,
) -> AsyncIterator[str]:
    """The URL of a server that answers each completion with the bytes of `behave`, and then hangs up; with a `trickle`
    it sends that again and again instead, or with an empty one nothing, until the client hangs up."""

    async def handle(reader: asyncio.StreamReader, writer: Writer) -> None:
        try:
            head = await reader.readexactly(1)
            if head == b"\x16":  # of a TLS greeting
                writer.write(whole(b"", "400 Bad Request"))
                return
            head += await reader.readuntil(b"\r\n\r\n")
            method, path, _ = head.split(b"\r\n")[0].decode().split()
            if method == "GET":
                found = {
                    "/v1/models": models if models is not None else whole(json.dumps(MODELS).encode()),
                    "/version": whole(b'{"version": "1.2"}'),
                    "/metrics": whole(metrics.encode(), kind="text/plain") if metrics else whole(b"", "404 Not Found"),
                }.get(path, whole(b"", "404 Not Found"))
                writer.write(found)
            else:
                size = next(
                    int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
                )
                writer.write(behave(json.loads(await reader.readexactly(size))))
            await writer.drain()
            while trickle and method == "POST":
                writer.write(trickle)
                await writer.drain()
            if trickle is not None and method == "POST":
                await reader.read()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(handle, "127.0.0.1", port)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
