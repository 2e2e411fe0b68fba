"""One client's connection by HTTP/1.1: what it asks is answered, and it is never waited for.

What a client does not read is not written: a stream asks `is_paused` and sends later what has come together since.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import h11

from batchsim.serve.api_error import ApiError
from batchsim.serve.incoming import HttpRequest, Incoming, Limits

Headers = list[tuple[str, str]]
_REASONS = {
    200: b"OK", 400: b"Bad Request", 401: b"Unauthorized", 403: b"Forbidden", 404: b"Not Found",
    405: b"Method Not Allowed", 408: b"Request Timeout", 413: b"Content Too Large", 429: b"Too Many Requests",
    431: b"Header Fields Too Large", 500: b"Internal Server Error", 501: b"Not Implemented",
    503: b"Service Unavailable",
}  # fmt: skip
_LINGER_S, _LINGER_BYTES = 2.0, 64 << 20
"""Limits in seconds and bytes for reading and dropping what a refused client still sends: closing with unread bytes
would discard the answer before the client has read it."""


class App(Protocol):
    """The application that answers requests."""

    limits: Limits
    connections: set[Connection]

    def check(self, request: HttpRequest) -> None:
        """ApiError for a request that is refused whatever its body, which has not come yet."""
        ...

    def handle(self, request: HttpRequest, reply: Connection) -> None:
        """Answers now, or keeps `reply` and answers later. Raises nothing."""
        ...


class Connection(asyncio.Protocol):
    """A connection, and the way to answer the request at hand: `answer` whole, or `begin`, `write` and `end`.

    `hung_up` is called if the client leaves before the end, `readable` when it reads again after `is_paused` was
    True.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._limits = app.limits
        self._incoming = Incoming(app.limits, app.check)
        self._transport: Any = None
        self._busy = False  # a request is with the app, or was refused
        self._has_begun = False  # part of a request has come
        self._dropped: int | None = None  # bytes dropped of what came after a refusal
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
            self._refuse(ApiError(503, f"{self._limits.connections} connections are open already"), lingers=False)
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
        if self._dropped is not None:
            self._dropped += len(data)
            if self._dropped > _LINGER_BYTES:
                self.drop()
            return
        self._incoming.put(data)
        self._advance()
        most = self._limits.header_bytes + self._limits.body_bytes
        if self._busy and self._incoming.num_ahead > most and not self.is_gone:
            # What comes is read all the while, up to a limit, so that a client that leaves is noticed.
            if self._http.our_state is h11.SEND_RESPONSE:
                self._refuse(ApiError(413, f"{self._incoming.num_ahead:,} bytes were sent ahead of the answer"))
            else:
                self.drop()

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
        return self._transport is None or self._dropped is not None or self._transport.is_closing()

    def answer(self, status: int, body: bytes, content_type: str = "application/json", headers: Headers = []) -> None:  # noqa: B006
        """Answers the request whole."""
        if self.is_gone:
            return
        fields: list[tuple[str, str]] = [("content-type", content_type), ("content-length", str(len(body))), *headers]
        head = self._http.send(h11.Response(status_code=status, headers=fields, reason=_REASONS.get(status, b"")))
        content = b"" if self._incoming.is_head else self._http.send(h11.Data(data=body))
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
        """Writes a nonempty piece of the body begun, framed as HTTP needs it: a token is a piece."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._chunked:
            data = b"%b%x\r\n%b\r\n" % (self._head, len(data), data)
        elif self._head:
            data = self._head + data
        self._head = b""
        transport.write(data)

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

    @property
    def _http(self) -> h11.Connection:
        return self._incoming.http

    def _next(self) -> None:
        """Goes on to the next request, or closes."""
        self.hung_up = self.readable = None
        if not self._incoming.begin_next():
            self._transport.close()
            return
        self._busy = False
        self._wait_for_request(self._limits.idle_s)
        if self._incoming.num_ahead:
            asyncio.get_running_loop().call_soon(self._advance)

    def _advance(self) -> None:
        """Takes what has come; hands a whole request to the app."""
        if self._busy or self._transport is None:
            return
        try:
            request = self._incoming.next()
        except ApiError as error:
            self._refuse(error)
            return
        if request is not None:
            self._stop_timer()
            self._busy, self._has_begun = True, False
            self._app.handle(request, self)
            return
        if self._http.they_are_waiting_for_100_continue:
            go_on = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self._transport.write(self._http.send(go_on))
        if self._incoming.has_begun and not self._has_begun:
            self._has_begun = True
            self._wait_for_request(self._limits.request_s)

    def _refuse(self, error: ApiError, *, lingers: bool = True) -> None:
        """Answers with an error and closes, once the client has read it if it `lingers`."""
        self._busy = True
        self._stop_timer()
        if self.hung_up is not None:
            self.hung_up()
            self.hung_up = None
        body = error.body()
        head = f"HTTP/1.1 {error.status} {_REASONS.get(error.status, b'Error').decode()}\r\nconnection: close\r\n"
        fields = [("content-type", "application/json"), ("content-length", str(len(body))), *error.headers]
        head += "".join(f"{name}: {value}\r\n" for name, value in fields)
        self._transport.write(head.encode() + b"\r\n" + (b"" if self._incoming.is_head else body))
        if not lingers:
            self._transport.close()
            return
        self._dropped = 0
        with suppress(OSError):  # the client has left
            self._transport.write_eof()
        self._timer = asyncio.get_running_loop().call_later(_LINGER_S, self.drop)

    # ---- patience

    def _wait_for_request(self, seconds: float) -> None:
        """Closes the connection unless a request is complete within `seconds`."""
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
            self._refuse(ApiError(408, f"no whole request came in {self._limits.request_s:g} s"))
        else:
            self._transport.close()
