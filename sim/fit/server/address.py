"""The address of a server that loads are sent to."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from batchsim.base.errors import MeasuredError, shown

_LIKE = "Write one like http://127.0.0.1:8000."


@dataclass(frozen=True)
class Address:
    """A server: `url` without a slash or /v1 at its end; `private` if it is loopback or of a private network."""

    url: str
    private: bool

    @classmethod
    def of(cls, url: str) -> Address:
        """The address that a user wrote. MeasuredError where it is no http or https URL of a host that is known."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            raise MeasuredError(f"--url {shown(url)}: its port is none. {_LIKE}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise MeasuredError(f"--url {shown(url)}: is no http or https URL. {_LIKE}")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise MeasuredError(
                f"--url {shown(parts.hostname)}: has a user, a query or a fragment. Write host, port and path alone;"
                " a key goes into --api-key."
            )
        try:
            resolved = socket.getaddrinfo(parts.hostname, port or 80, type=socket.SOCK_STREAM)
        except OSError as error:
            raise MeasuredError(f"--url {shown(url)}: host {parts.hostname} is not known ({error.strerror}).") from None
        ips = [ip_address(str(one[4][0]).partition("%")[0]) for one in resolved]
        private = all(ip.is_loopback or ip.is_private or ip.is_link_local for ip in ips)
        path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        return cls(f"{parts.scheme}://{parts.netloc}{path}", private)
