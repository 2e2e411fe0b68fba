"""The server of the page: HTTP on 127.0.0.1, read-only but for a simulation that the page asks for.

It is the standard library's, so that looking needs nothing installed: one person looks, and each answer is some arrays.
Any process on this machine may ask. A page of another site may not, though the browser that shows it is here: the Host
header must name this address (a foreign name that is made to resolve to it does not), a simulation needs a JSON body,
which browsers send to other origins only where they are allowed to, and no header allows anything. No path comes from
outside: addresses are keys of tables below.
"""

from __future__ import annotations

import json
import math
import socket
import sys
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from batchsim.base.errors import BatchsimError, ScenarioError
from batchsim.base.files import parse_json
from batchsim.report.page.render import asset
from batchsim.view.page_data import BY, PageData

ADDRESS = "127.0.0.1"
MOST_BYTES = 4096
"""Of a body: that of a simulation has a number for each of some knobs."""
_IDLE_S = 30  # a connection that says nothing for so long is closed
_HTML, _SCRIPT, _STYLE = (f"text/{kind}; charset=utf-8" for kind in ("html", "javascript", "css"))
_JSON = "application/json; charset=utf-8"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def _own(name: str) -> str:
    return (files("batchsim.view") / "assets" / name).read_text(encoding="utf-8")


_FILES: dict[str, tuple[str, Callable[[], str]]] = {
    "/": (_HTML, lambda: _own("view.html")),
    "/view.css": (_STYLE, lambda: asset("uPlot.min.css") + _own("view.css")),
    "/uPlot.js": (_SCRIPT, lambda: f"/*\n{asset('uPlot.LICENSE')}*/\n{asset('uPlot.iife.min.js')}"),
    "/charts.js": (_SCRIPT, lambda: asset("charts.js")),
    "/lanes.js": (_SCRIPT, lambda: _own("lanes.js")),
    "/view.js": (_SCRIPT, lambda: _own("view.js")),
}


class RefusedError(ScenarioError):
    """What is answered with an error: `status` of HTTP, and one line."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class Asked:
    """The parameters of a request, each to be taken once by its name and kind; `done` refuses what is left."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._left = dict(values)

    def whole(self, name: str, default: int | None = None) -> int:
        value = self._left.pop(name, default)
        try:
            number = int(value)
        except (TypeError, ValueError, OverflowError):
            raise ScenarioError(f"{name}: {str(value)[:40]!r} is no whole number. Give one.") from None
        if isinstance(value, float) or abs(number) >= 2**63:
            raise ScenarioError(f"{name}: {str(value)[:40]!r} is no whole number of 64 bits. Give one.")
        return number

    def numbers(self, name: str) -> dict[str, float]:
        """An object of numbers, by name."""
        value = self._left.pop(name, None)
        if not isinstance(value, dict) or not all(key.isprintable() and len(key) <= 100 for key in value):
            raise ScenarioError(f"{name}: {str(value)[:40]!r} is no object of numbers by name. Give one.")
        return {key: Asked(value).number(key) for key in value}

    def number(self, name: str) -> float:
        value = self._left.pop(name, None)
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not abs(number) < 1e9:
            raise ScenarioError(f"{name}: {str(value)[:40]!r} is no number below 1e9. Give one.")
        return number

    def word(self, name: str, known: tuple[str, ...]) -> str:
        value = self._left.pop(name, None)
        if not isinstance(value, str) or value not in known:
            raise ScenarioError(f"{name}: {str(value)[:40]!r} is not known. Write one of {', '.join(known)}.")
        return value

    def window(self) -> tuple[float, float] | None:
        return (self.number("from"), self.number("to")) if {"from", "to"} & set(self._left) else None

    def done(self) -> None:
        if self._left:
            raise ScenarioError(f"{', '.join(sorted(self._left))[:80]}: is not asked for here. Drop it.")


Answer = Callable[[], dict[str, Any]]


def _timeline(data: PageData, asked: Asked) -> Answer:
    number, replica, window = asked.whole("point"), asked.whole("replica", 0), asked.window()
    return lambda: data.timeline(number, replica, window)


def _minutes(data: PageData, asked: Asked) -> Answer:
    number, replica, window = asked.whole("point"), asked.whole("replica", 0), asked.window()
    return lambda: data.minutes(number, replica, window)


def _lanes(data: PageData, asked: Asked) -> Answer:
    number, replica, picked = asked.whole("point"), asked.whole("replica", 0), asked.whole("request", -1)
    window = asked.window()
    return lambda: data.lanes(number, replica, window, picked)


def _requests(data: PageData, asked: Asked) -> Answer:
    number, by, window = asked.whole("point"), asked.word("by", BY), asked.window()
    return lambda: data.requests(number, by, window)


def _point(data: PageData, asked: Asked) -> Answer:
    number = asked.whole("point")
    return lambda: data.point(number)


def _request(data: PageData, asked: Asked) -> Answer:
    number, request = asked.whole("point"), asked.whole("id")
    return lambda: data.request(number, request)


def _compare(data: PageData, asked: Asked) -> Answer:
    number, other, by = asked.whole("point"), asked.whole("other"), asked.word("by", BY)
    return lambda: data.compare(number, other, by)


def _knobs(data: PageData, asked: Asked) -> Answer:
    number = asked.whole("point")
    return lambda: data.knobs(number)


def _changed(data: PageData, asked: Asked) -> Answer:
    number, factors = asked.whole("point"), asked.numbers("factors")
    return lambda: data.changed(number, factors)


_ROUTES: dict[str, Callable[[PageData, Asked], Answer]] = {
    "/curves": lambda data, asked: data.curves,
    "/point": _point,
    "/timeline": _timeline,
    "/minutes": _minutes,
    "/lanes": _lanes,
    "/requests": _requests,
    "/request": _request,
    "/compare": _compare,
    "/knobs": _knobs,
}
_SIMULATIONS = {"/counterfactual": _changed}


def check_port(port: int) -> None:
    """ScenarioError where a ViewServer could not listen at `port`, asked before the work whose result it is to show."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            tried.bind((ADDRESS, port))
            tried.listen()  # one who listens there already may let others bind
        except OSError as error:
            raise _taken(port, error) from None


def _taken(port: int, error: OSError) -> ScenarioError:
    return ScenarioError(
        f"--port {port}: cannot be listened at: {error.strerror}. Give another, or 0 for any free one."
    )


class ViewServer(ThreadingHTTPServer):
    """Serves `data` at `port` of this machine, any free one for 0. ScenarioError where the port is taken."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, data: PageData, port: int) -> None:
        self.data = data
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            raise _taken(port, error) from None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing of a client that has gone, as when the page asked for something else meanwhile; else a traceback."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        return f"http://{ADDRESS}:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer
    server_version, sys_version = "batchsim", ""
    timeout = _IDLE_S

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, make: Callable[[], tuple[str, bytes]]) -> None:
        """Sends what `make` gives, or its error as one line of JSON."""
        status = HTTPStatus.OK
        try:
            self._check_host()
            kind, body = make()
        except BatchsimError as error:
            status = error.status if isinstance(error, RefusedError) else HTTPStatus.BAD_REQUEST
            kind, body = _JSON, _json({"error": str(error)})
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _check_host(self) -> None:
        port = self.server.server_address[1]
        hosts = self.headers.get_all("Host") or []
        if hosts not in ([f"{ADDRESS}:{port}"], [f"localhost:{port}"]):
            raise RefusedError(HTTPStatus.FORBIDDEN, f"Host: is not this server's. Open {self.server.address}.")
        origin = self.headers.get("Origin")
        if origin is not None and origin not in (f"http://{host}" for host in hosts):
            raise RefusedError(HTTPStatus.FORBIDDEN, f"Origin: is another page's. Open {self.server.address}.")

    def _get(self) -> tuple[str, bytes]:
        try:
            parts = urlsplit(self.path)
        except ValueError:
            raise RefusedError(HTTPStatus.BAD_REQUEST, "the address cannot be read. Open /.") from None
        if parts.path in _FILES and not parts.query:
            kind, text = _FILES[parts.path]
            return kind, text().encode()
        take = _ROUTES.get(parts.path)
        if take is None:
            raise RefusedError(HTTPStatus.NOT_FOUND, "no such address. Open /.")
        try:
            pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query), max_num_fields=16)
        except ValueError:
            raise ScenarioError("the query cannot be read. Write name=value, with & between.") from None
        if len(pairs) != len(dict(pairs)):
            raise ScenarioError("the query has a name twice. Give each once.")
        return self._routed(take, dict(pairs))

    def _post(self) -> tuple[str, bytes]:
        take = _SIMULATIONS.get(self.path)
        if take is None:
            raise RefusedError(HTTPStatus.NOT_FOUND, "no such address for POST. Open /.")
        if self.headers.get_content_type() != "application/json":
            raise RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "Content-Type: is not application/json. Send that.")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 9 and int(length) <= MOST_BYTES):
            raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"Content-Length: is not from 0 to {MOST_BYTES}.")
        try:
            body = parse_json(self.rfile.read(int(length)).decode())
        except (ValueError, TimeoutError):
            raise ScenarioError("the body is no JSON. Send an object.") from None
        if not isinstance(body, dict):
            raise ScenarioError("the body is no JSON object. Send one.")
        return self._routed(take, body)

    def _routed(self, take: Callable[[PageData, Asked], Answer], values: dict[str, Any]) -> tuple[str, bytes]:
        asked = Asked(values)
        answer = take(self.server.data, asked)
        asked.done()
        return _JSON, _json(answer())

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the page says what went wrong."""


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
