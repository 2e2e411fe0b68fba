"""One client's connection: HTTP/1.1 by h11, bounded in all that a client can make long, and never waited for.

What a client does not read is not written: a stream asks `is_open_for` and sends later what has come together since.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import h11

Headers = list[tuple[str, str]]
_REASONS = {
    200: b"OK", 400: b"Bad Request", 401: b"Unauthorized", 404: b"Not Found", 405: b"Method Not Allowed",
    408: b"Request Timeout", 413: b"Content Too Large", 429: b"Too Many Requests", 431: b"Header Fields Too Large",
    500: b"Internal Server Error", 501: b"Not Implemented", 503: b"Service Unavailable",
}  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What a client may ask of the server itself: bytes of a body and of all headers, seconds to send a request and to
    keep an idle connection, connections at a time, bytes of an answer that wait to be read."""

    body_bytes: int = 16 << 20
    header_bytes: int = 32 << 10
    request_s: float = 30.0
    idle_s: float = 300.0
    connections: int = 20_000
    unread_bytes: int = 64 << 10


@dataclass(frozen=True)
class HttpRequest:
    """A request whole: method, path without the query, headers by lower-case name, body; when the last of it came, by
    this machine's monotonic clock in ns: reading it takes time that is not the engines'; and the query."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    came_ns: int
    query: str = ""


class App(Protocol):
    """Who answers requests."""

    limits: Limits
    connections: set[Connection]

    def handle(self, request: HttpRequest, reply: Connection) -> None:
        """Answers now, or keeps `reply` and answers later. Raises nothing."""
        ...

    def failed(self, status: int, message: str) -> bytes:
        """The body of an error that HTTP itself brings."""
        ...


class Connection(asyncio.Protocol):
    """A connection, and the way to answer the request at hand: `answer` whole, or `begin`, `write` and `end`.

    `hung_up` is called if the client leaves before the end, `readable` when it reads again after `is_open_for` was
    False.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._limits = app.limits
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=app.limits.header_bytes)
        self._transport: Any = None
        self._request: h11.Request | None = None
        self._is_head = False  # a HEAD request, whose answer has no body
        self._body = bytearray()
        self._busy = False  # a request is with the app
        self._has_begun = False  # part of a request has come
        self._unread = 0  # bytes received while busy
        self._came_ns = 0  # when the last bytes came that were not received while busy
        self._timer: asyncio.TimerHandle | None = None
        self._chunked = False
        self._head = b""
        self.is_paused = False
        self.hung_up: Callable[[], None] | None = None
        self.readable: Callable[[], None] | None = None

    # ---- what asyncio calls

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(high=self._limits.unread_bytes)
        if len(self._app.connections) >= self._limits.connections:
            self._refuse(503, f"{self._limits.connections} connections are open already")
            return
        self._app.connections.add(self)
        self._wait_for_request(self._limits.idle_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._app.connections.discard(self)
        self._stop_timer()
        hung_up, self.hung_up, self.readable, self._busy = self.hung_up, None, None, True
        self._transport = None
        if hung_up is not None:
            hung_up()

    def data_received(self, data: bytes) -> None:
        if not self._busy:
            self._came_ns = time.monotonic_ns()
        try:
            self._http.receive_data(data)
        except RuntimeError:  # after the end of a request that asked to close
            return
        if self._busy:
            self._unread += len(data)
            if self._unread > self._limits.unread_bytes:
                self._transport.pause_reading()
            return
        self._advance()

    def eof_received(self) -> None:
        """A client that will send no more is taken for one that has left, as servers in front of engines take it."""

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        if self.readable is not None:
            self.readable()

    # ---- what the app calls

    @property
    def is_gone(self) -> bool:
        """Whether the client has left: what is written then goes nowhere."""
        return self._transport is None or self._transport.is_closing()

    def answer(self, status: int, body: bytes, content_type: str = "application/json", headers: Headers = []) -> None:  # noqa: B006
        """Answers the request whole."""
        if self.is_gone:
            return
        its: list[tuple[str, str]] = [("content-type", content_type), ("content-length", str(len(body))), *headers]
        head = self._http.send(h11.Response(status_code=status, headers=its, reason=_REASONS.get(status, b"")))
        content = b"" if self._is_head else self._http.send(h11.Data(data=body))
        parts = [head or b"", content or b"", self._http.send(h11.EndOfMessage()) or b""]
        self._transport.write(b"".join(parts))
        self._next()

    def begin(self, content_type: str) -> None:
        """Begins an answer that is written in pieces, at least one; its head goes out with the first."""
        if self.is_gone:
            return
        headers = [("content-type", content_type), ("cache-control", "no-cache")]
        self._chunked = self._http.their_http_version == b"1.1"
        if self._chunked:
            headers.append(("transfer-encoding", "chunked"))
        self._head = self._http.send(h11.Response(status_code=200, headers=headers, reason=b"OK")) or b""

    def write(self, data: bytes) -> None:
        """Writes a piece, not empty, of what was begun. What HTTP puts around it is put here: a token is a piece."""
        if self._transport is None:
            return
        if self._chunked:
            data = b"%b%x\r\n%b\r\n" % (self._head, len(data), data)
        elif self._head:
            data = self._head + data
        self._head = b""
        self._transport.write(data)

    def end(self) -> None:
        """Ends what was begun."""
        if not self.is_gone:
            self._transport.write(self._http.send(h11.EndOfMessage()) or b"")
            self._next()

    def drop(self) -> None:
        """Breaks the connection off, in the middle of an answer if there is one."""
        if self._transport is not None:
            self._transport.abort()

    def close_idle(self) -> None:
        """Closes the connection unless a request is with the app."""
        if not self._busy and self._transport is not None:
            self._transport.close()

    # ---- HTTP

    def _next(self) -> None:
        """Goes on to the next request, or closes."""
        self.hung_up = self.readable = None
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            self._transport.close()
            return
        self._http.start_next_cycle()
        self._busy, self._unread = False, 0
        self._transport.resume_reading()
        self._wait_for_request(self._limits.idle_s)
        if self._http.trailing_data[0]:
            self._came_ns = time.monotonic_ns()  # one sent ahead is taken up now
            asyncio.get_running_loop().call_soon(self._advance)

    def _advance(self) -> None:
        """Takes what has come; hands a whole request to the app."""
        if self._busy or self._transport is None:
            return
        try:
            while True:
                event = self._http.next_event()
                if event is h11.NEED_DATA:
                    if self._http.they_are_waiting_for_100_continue:
                        go_on = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
                        self._transport.write(self._http.send(go_on))
                    if self._http.trailing_data[0] and not self._has_begun:
                        self._has_begun = True
                        self._wait_for_request(self._limits.request_s)
                    return
                if isinstance(event, h11.Request):
                    self._request, self._body = event, bytearray()
                    if not self._has_begun:
                        self._has_begun = True
                        self._wait_for_request(self._limits.request_s)
                    if sum(len(name) + len(value) for name, value in event.headers) > self._limits.header_bytes:
                        self._refuse(431, f"the headers have more than {self._limits.header_bytes:,} bytes")
                        return
                    if _content_length(event) > self._limits.body_bytes:
                        self._too_long()
                        return
                elif isinstance(event, h11.Data):
                    self._body += event.data
                    if len(self._body) > self._limits.body_bytes:
                        self._too_long()
                        return
                elif isinstance(event, h11.EndOfMessage):
                    self._hand_over()
                    return
                else:
                    return
        except h11.RemoteProtocolError as error:
            self._refuse(error.error_status_hint, f"not HTTP/1.1 as it should be: {error}")

    def _too_long(self) -> None:
        self._refuse(413, f"the body has more than the {self._limits.body_bytes:,} bytes that the server takes")

    def _hand_over(self) -> None:
        request, self._request = self._request, None
        assert request is not None
        self._stop_timer()
        self._busy, self._has_begun, self._is_head = True, False, request.method == b"HEAD"
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers}
        path, _, query = request.target.decode("latin-1").partition("?")
        body, self._body = bytes(self._body), bytearray()
        self._app.handle(HttpRequest(request.method.decode("latin-1"), path, headers, body, self._came_ns, query), self)

    def _refuse(self, status: int, message: str) -> None:
        """Answers with an error of HTTP and closes."""
        self._busy = True
        body = self._app.failed(status, message)
        head = f"HTTP/1.1 {status} {_REASONS.get(status, b'Error').decode()}\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)
        self._transport.close()

    # ---- patience

    def _wait_for_request(self, seconds: float) -> None:
        """Closes the connection unless a request is whole in so many seconds."""
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._out_of_patience)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _out_of_patience(self) -> None:
        self._timer = None
        if self._transport is None or self._busy:
            return
        if self._has_begun:
            self._refuse(408, f"no whole request came in {self._limits.request_s:g} s")
        else:
            self._transport.close()


def _content_length(request: h11.Request) -> int:
    return next((int(value) for name, value in request.headers if name == b"content-length"), 0)
