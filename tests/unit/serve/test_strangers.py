"""Who is let in: who shows the key, and asks for this machine by its name."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("h11", reason="batchsim serve needs h11")

from batchsim.serve.api_error import ApiError
from batchsim.serve.guard import Guard
from batchsim.serve.incoming import HttpRequest
from tests.unit.serve.test_abuse import is_whole, request
from tests.unit.serve.test_server import Client, ask

KEY = "schl\u00fcssel 1"


def status_of(answer: bytes) -> int:
    return int(answer.split()[1])


def test_everything_but_health_asks_for_the_key() -> None:
    """Each path, one that there is not, and one with a body that never comes: 401 on its head, and nothing is done."""

    async def use(client: Client) -> tuple[dict[str, int], bool, bool]:
        paths = [each for each in client.server._routes if each[1] != "/health"]
        paths += [("GET", "/docs"), ("OPTIONS", "/v1/models"), ("GET", "/health/"), ("GET", "//health")]
        found = {}
        for method, path in paths:
            head = request(f"{method} {path}".encode(), b"content-length: 9")
            found[path] = status_of(await client.raw(head))
        asleep = client.server._sleep.level is not None
        key = f"authorization: Bearer {KEY}".encode()
        slept = status_of(await client.raw(request(b"POST /sleep", key, b"connection: close")))
        return found, asleep, slept == 200 and client.server._sleep.level is not None

    found, asleep, can_sleep = ask(use, api_key=KEY)
    assert set(found.values()) == {401} and not asleep and can_sleep


@pytest.mark.parametrize(
    ("shown", "status"),
    [
        (None, 401),
        (f"Bearer {KEY}", 200),
        (f"bearer {KEY}", 200),
        (f"Bearer  {KEY} ", 200),
        (f"Basic {KEY}", 401),
        (KEY, 401),
        ("Bearer ", 401),
        (f"Bearer {KEY}1", 401),
        (f"Bearer {KEY[:-1]}", 401),
        (f"Bearer {KEY}, Bearer {KEY}", 401),
    ],
)
def test_a_key_is_asked_for_byte_by_byte(shown: str | None, status: int) -> None:
    """It may have any letters, the scheme either case; parts and more of it do not do, and it is asked for by name."""
    guard, headers = Guard(KEY, "192.0.2.1"), {} if shown is None else {"authorization": shown}
    if status == 200:
        guard.check(HttpRequest("GET", "/metrics", "", headers))
        return
    with pytest.raises(ApiError, match="Unauthorized") as caught:
        guard.check(HttpRequest("GET", "/metrics", "", headers))
    assert caught.value.status == 401 and ("www-authenticate", "Bearer") in caught.value.headers


HOSTS: dict[bytes, int] = {
    b"localhost": 200, b"LOCALHOST:8000": 200, b"localhost.:1": 200, b"127.0.0.1:8000": 200, b"127.8.9.1": 200,
    b"[::1]:8000": 200, b"attacker.example": 403, b"attacker.example:8000": 403, b"localhost.attacker.example": 403,
    b"127.0.0.1.attacker.example": 403, b"attacker.example@localhost": 403, b"0.0.0.0:8000": 403, b"": 403,
    b"localhost:8000:1": 403, b"[::]:8000": 403, b"192.168.0.7": 403,
}  # fmt: skip
ORIGINS: dict[bytes, int] = {
    b"http://localhost": 200, b"http://LOCALHOST": 200, b"https://localhost": 403, b"http://localhost:3000": 403,
    b"http://attacker.example": 403, b"null": 403, b"": 403, b"http://127.0.0.1": 403,
}  # fmt: skip


def test_at_a_loopback_address_hosts_and_origins_are_this_machine() -> None:
    """Other hosts, as of a site whose name points here, and other pages get 403, /health too; HTTP/1.0 needs none."""

    async def use(client: Client) -> tuple[list[Any], bytes, bool]:
        heads = [b"GET /health HTTP/1.1\r\nconnection: close\r\nhost: " + host for host in HOSTS]
        heads += [
            b"GET /health HTTP/1.1\r\nconnection: close\r\nhost: localhost\r\norigin: " + each for each in ORIGINS
        ]
        found = [status_of(await client.raw(head + b"\r\n\r\n")) for head in heads]
        return found, await client.raw(b"GET /health HTTP/1.0\r\n\r\n"), await is_whole(client)

    found, old, whole = ask(use)
    assert dict(zip([*HOSTS, *ORIGINS], found, strict=True)) == HOSTS | ORIGINS
    assert status_of(old) == 200 and whole


@pytest.mark.parametrize(
    ("host", "asks"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False)]
)
def test_at_other_addresses_a_server_has_any_name(host: str, asks: bool) -> None:
    """There it is the key that keeps pages of others out, and its clients ask for its real name."""
    guard = Guard("k", host)
    asked = HttpRequest("GET", "/v1/models", "", {"host": "gpu-7.example:8000", "authorization": "Bearer k"})
    if asks:
        with pytest.raises(ApiError, match=r"Host 'gpu-7\.example:8000' is not this machine"):
            guard.check(asked)
    else:
        guard.check(asked)
