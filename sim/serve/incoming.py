"""The requests that come over a connection, read by h11 and bounded in all that a client can make long.

h11 bounds nothing that comes in one piece, so it is fed a head once that is whole and short enough, a body in slices.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import h11

from batchsim.base.errors import shown
from batchsim.serve.api_error import ApiError

_HEAD_END = re.compile(rb"\n\r?\n")
_CHUNKED_SLICE, _SLICE = 1 << 12, 1 << 16
"""Bytes of a body that h11 is fed at once. A chunked one may end in trailers, which h11 parses whole."""
_CHUNKS, _CHUNK_BYTES = 256, 1 << 11
"""Chunks that a body may have, and for how many of its bytes one more: each costs some 5 µs."""


@dataclass(frozen=True)
class Limits:
    """What a client may ask of the server itself: bytes of a body and of a request's line and headers, headers, seconds
    to send a request and to keep an idle connection, connections at a time, bytes of an answer that wait to be read."""

    body_bytes: int = 4 << 20
    header_bytes: int = 32 << 10
    headers: int = 256
    request_s: float = 30.0
    idle_s: float = 300.0
    connections: int = 20_000
    unread_bytes: int = 64 << 10


@dataclass(frozen=True)
class HttpRequest:
    """A request: method, path without the query, the query, headers by lower-case name, those given twice joined by
    commas; and once it is whole its body, and when the last of it came, by this machine's monotonic clock in ns:
    reading it takes time that is not the engines'."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes = b""
    came_ns: int = 0


class Incoming:
    """The requests in the bytes that are put in. `check` sees each as its head has come, and raises ApiError for one
    that is refused whatever its body."""

    def __init__(self, limits: Limits, check: Callable[[HttpRequest], None]) -> None:
        self._limits = limits
        self._check = check
        self.http = _new_http()
        self.is_head = False  # a HEAD request, whose answer has no body
        self._buffer = bytearray()  # what has come and h11 was not fed yet
        self._searched = 0  # bytes of it in which no head ends
        self._request: HttpRequest | None = None  # whose head has come
        self._body = bytearray()
        self._left = self._num_chunks = 0  # bytes of a body of known length that have not come; chunks that have
        self._came_ns = 0

    def put(self, data: bytes | bytearray) -> None:
        """Adds what has come."""
        self._came_ns = time.monotonic_ns()
        self._buffer += data

    @property
    def num_ahead(self) -> int:
        """Bytes that have come behind the request at hand."""
        return len(self._buffer)

    @property
    def has_begun(self) -> bool:
        """Whether part of a request has come."""
        return self._request is not None or bool(self._buffer)

    def begin_next(self) -> bool:
        """Makes ready for another request, once this one is answered; False where the connection ends with it."""
        if self.http.our_state is not h11.DONE or self.http.their_state is not h11.DONE:
            return False
        ahead, _ = self.http.trailing_data
        if ahead:  # the last slice of a chunked body had more than its end
            self._buffer[:0] = ahead
            self.http = _new_http()
        else:
            self.http.start_next_cycle()
        self._came_ns, self.is_head = time.monotonic_ns(), False  # one sent ahead is taken up now
        return True

    def next(self) -> HttpRequest | None:
        """The next request, once it is whole. ApiError for one that is refused, with which the connection ends."""
        try:
            while True:
                event = self.http.next_event()
                if event is h11.NEED_DATA:
                    if not self._feed():
                        return None
                elif isinstance(event, h11.Request):
                    self._take_head(event)
                elif isinstance(event, h11.Data):
                    self._take(event)
                elif isinstance(event, h11.EndOfMessage) and self._request is not None:
                    self._check_number(len(event.headers))
                    request, self._request = self._request, None
                    body, self._body = bytes(self._body), bytearray()
                    return replace(request, body=body, came_ns=self._came_ns)
                else:
                    return None
        except h11.RemoteProtocolError as error:
            raise ApiError(error.error_status_hint, f"not HTTP/1.1 as it should be: {error}") from None

    def _feed(self) -> bool:
        """Feeds h11 the head of a request, whole, or some of a body; whether any of it has come."""
        size = self._head_size() if self._request is None else min(self._left, _SLICE) or _CHUNKED_SLICE
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        if data:
            self.http.receive_data(data)
        return bool(data)

    def _head_size(self) -> int:
        """The bytes of the head in the buffer, 0 while it is not whole. ApiError 431 where it is too long."""
        most, buffer = self._limits.header_bytes, self._buffer
        if buffer and buffer[0] <= ord(" "):
            return most  # no request begins so, which h11 says without its end
        end = _HEAD_END.search(buffer, max(self._searched - 2, 0))
        size = end.end() if end else 0
        self._searched = 0 if end else len(buffer)
        if size > most or (not end and len(buffer) > most):
            raise ApiError(431, f"the headers have more than {most:,} bytes")
        self._check_number(buffer.count(b"\n", 0, size) - 2)
        return size

    def _check_number(self, headers: int) -> None:
        if headers > self._limits.headers:
            raise ApiError(431, f"there are more than {self._limits.headers} headers")

    def _take_head(self, event: h11.Request) -> None:
        """Takes the head of a request. ApiError where the body need not be read to refuse it."""
        headers: dict[str, str] = {}
        for raw_name, raw_value in event.headers:
            name = raw_name.decode("latin-1")
            try:
                value = raw_value.decode()
            except UnicodeDecodeError:
                raise ApiError(400, f"header {shown(name)}: is not UTF-8. Send text.") from None
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        path, _, query = event.target.decode("latin-1").partition("?")
        self.is_head = event.method == b"HEAD"
        self._request = HttpRequest(event.method.decode("latin-1"), path, query, headers)
        self._left, self._num_chunks = int(headers.get("content-length", 0)), 0
        if "transfer-encoding" in headers and ("content-length" in headers or event.http_version != b"1.1"):
            other = "content-length" if "content-length" in headers else "HTTP/1.0"
            raise ApiError(400, f"transfer-encoding does not go together with {other}. Send one of them.")
        self._check(self._request)
        if self._left > self._limits.body_bytes:
            self._too_long()

    def _take(self, event: h11.Data) -> None:
        """Takes some of a body. ApiError 413 where it is too long, or in too many chunks."""
        self._body += event.data
        self._left = max(self._left - len(event.data), 0)
        self._num_chunks += event.chunk_start
        if self._num_chunks > (most := _CHUNKS + len(self._body) // _CHUNK_BYTES):
            raise ApiError(413, f"the body's first {len(self._body):,} bytes come in more than {most:,} chunks")
        if len(self._body) > self._limits.body_bytes:
            self._too_long()

    def _too_long(self) -> None:
        raise ApiError(413, f"the body has more than the {self._limits.body_bytes:,} bytes that the server takes")


def _new_http() -> h11.Connection:
    return h11.Connection(h11.SERVER, max_incomplete_event_size=_CHUNKED_SLICE)
