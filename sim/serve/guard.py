"""Access to an endpoint: for clients with its key that address this machine by name."""

from __future__ import annotations

import re
from hmac import compare_digest
from ipaddress import ip_address
from typing import TYPE_CHECKING

from batchsim.base.errors import shown
from batchsim.serve.api_error import ApiError

if TYPE_CHECKING:
    from batchsim.serve.incoming import HttpRequest

OPEN = ("/health",)
"""Paths that ask for no key: probes of load balancers have none, and learn no more than whether the server is up."""
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/@\[\]]+)(:\d{0,5})?")


def is_loopback(host: str) -> bool:
    """Whether `host` can only be this machine: localhost, or an address of its own."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Guard:
    """Admits requests with `api_key`, if it is not empty; at a loopback `host` only those addressed to a name of this
    machine.

    A page of any site may have its own name point at 127.0.0.1 and so reach what listens there as if it were its own
    server: its requests then have that name as their Host. At other addresses the key is what keeps it out.
    """

    def __init__(self, api_key: str = "", host: str = "127.0.0.1") -> None:
        self._key = api_key.encode()
        self._asks_name = is_loopback(host)

    def check(self, request: HttpRequest) -> None:
        """ApiError 403 for a request to another host or from another's page, 401 for one without the key."""
        if self._asks_name:
            _check_names(request)
        if not self._key or request.path in OPEN:
            return
        scheme, _, key = request.headers.get("authorization", "").encode().partition(b" ")
        if not compare_digest(key.strip(), self._key) or scheme.lower() != b"bearer":
            raise ApiError(401, "Unauthorized: send the server's --api-key as 'Authorization: Bearer KEY'.")


def _check_names(request: HttpRequest) -> None:
    """ApiError 403 unless Host is this machine, and Origin, which browsers send, the same. HTTP/1.0 may have no Host:
    no browser sends it."""
    host, origin = request.headers.get("host"), request.headers.get("origin")
    if host is not None:
        name = _HOST.fullmatch(host)
        if name is None or not is_loopback(name[1].strip("[]").lower().removesuffix(".")):
            raise ApiError(403, f"Host {shown(host)} is not this machine: ask for localhost or 127.0.0.1.")
    if origin is not None and origin.lower() != f"http://{host}".lower():
        raise ApiError(403, f"Origin {shown(origin)} is another's page, and none of its requests are taken.")
