"""What hostile and careless clients do to a server: it answers or hangs up, loses nothing, and goes on."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("h11", reason="batchsim serve needs h11")

from batchsim.serve.incoming import Limits
from tests.unit.serve.test_server import COMPLETIONS, Client, ask

SMALL = Limits(body_bytes=4096, header_bytes=2048, request_s=0.05, idle_s=60.0, connections=20, unread_bytes=4096)


def request(head: bytes, *headers: bytes, body: bytes = b"") -> bytes:
    return b"\r\n".join([head + b" HTTP/1.1", b"host: localhost", *headers, b"", b""]) + body


def post(body: bytes, *headers: bytes) -> bytes:
    return request(b"POST /v1/completions", b"content-length: %d" % len(body), *headers, body=body)


def chunked(body: bytes, *headers: bytes) -> bytes:
    return request(b"POST /v1/completions", b"transfer-encoding: chunked", *headers, body=body)


GOOD = post(b'{"prompt": [1], "max_tokens": 2}', b"connection: close")
LAST = b"0\r\n\r\n"

HOSTILE: dict[str, tuple[bytes, bytes]] = {
    "no http": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40), b"400"),
    "an empty line first": (b"\r\n" + GOOD, b"400"),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", b"400"),
    "header without colon": (request(b"GET /health", b"x"), b"400"),
    "header not UTF-8": (request(b"GET /health", b"x-request-id: \xed\xa0\x80"), b"400"),
    "negative length": (request(b"POST /v1/completions", b"content-length: -1"), b"400"),
    "length of 5,000 digits": (request(b"GET /health", b"content-length: " + b"9" * 1900), b"400"),
    "two lengths": (request(b"POST /v1/completions", b"content-length: 1", b"content-length: 2"), b"400"),
    "length and chunks": (chunked(LAST, b"content-length: 5"), b"400"),
    "chunks by HTTP/1.0": (chunked(LAST).replace(b"HTTP/1.1", b"HTTP/1.0"), b"400"),
    "bad chunk": (chunked(b"zz\r\n"), b"400"),
    "chunk with another end": (chunked(b"1\r\nxyz"), b"400"),
    "gzip transfer": (request(b"POST /v1/completions", b"transfer-encoding: gzip"), b"501"),
    "long header": (request(b"GET /health", b"x: " + b"a" * 9000), b"431"),
    "endless header": (b"GET /health HTTP/1.1\r\nx: " + b"a" * 9000, b"431"),
    "long address": (request(b"GET /health?" + b"a" * 9000), b"431"),
    "many headers": (request(b"GET /health", *[b"a:b"] * 300), b"431"),
    "many trailers": (chunked(b"0\r\n" + b"a:b\r\n" * 300 + b"\r\n"), b"431"),
    "long trailer": (chunked(b"0\r\na: " + b"b" * 9000), b"431"),
    "long chunk extension": (chunked(b"1;" + b"b" * 9000), b"431"),
    "chunks of a byte": (chunked(b"1\r\n \r\n" * 2000), b"413"),
    "long body by its length": (request(b"POST /v1/completions", b"content-length: 99999"), b"413"),
    "long body": (chunked(b"400\r\n" + b"a" * 1024 + b"\r\nf00\r\n" + b"a" * 3840 + b"\r\n"), b"413"),
    "bad UTF-8": (post(b'{"prompt": "\xff\xfe"}', b"connection: close"), b"400"),
    "deep JSON": (post(b"[" * 4000, b"connection: close"), b"400"),
    "big number": (post(b'{"prompt": [1], "max_tokens": ' + b"9" * 3000 + b"}", b"connection: close"), b"400"),
    "not a number": (post(b'{"prompt": [1], "temperature": NaN}', b"connection: close"), b"400"),
    "unknown path": (request(b"GET /../../etc/passwd"), b"404"),
    "unknown path with a body": (request(b"POST /v2", b"content-length: 9"), b"404"),
    "wrong method": (request(b"DELETE /v1/completions"), b"405"),
    "half a request": (GOOD[:40], b"408"),
    "half a body": (GOOD[:-5], b"408"),
}


async def is_whole(client: Client) -> bool:
    """Whether a good request is answered, and nothing of others is left in server and engine."""
    found = await client.json(COMPLETIONS, {"prompt": [1], "max_tokens": 2, "ignore_eos": True})
    (core,) = client.server.backend.cores().values()
    kv = core.scheduler.kv
    while client.server.exchanges or kv.num_free < kv.num_blocks:
        await asyncio.sleep(0)
    return found["usage"]["completion_tokens"] == 2 and not client.server.backend.answers


def test_hostile_requests_get_a_status_and_no_traceback() -> None:
    """Each gets the status for what is wrong with it, in JSON, and the server goes on."""

    async def use(client: Client) -> tuple[dict[str, bytes], bool]:
        return {name: await client.raw(data) for name, (data, _) in HOSTILE.items()}, await is_whole(client)

    found, whole = ask(use, limits=SMALL)
    for name, answer in found.items():
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.split()[1] == HOSTILE[name][1], (name, answer)
        assert "message" in json.loads(body)["error"] and b"Traceback" not in answer, name
    assert whole


def test_a_head_has_no_body() -> None:
    """A probe of a load balancer."""
    head = ask(lambda client: client.raw(request(b"HEAD /health")), limits=SMALL)
    assert head.split()[1] == b"405" and head.endswith(b"\r\n\r\n")


HALVES = ({"user": "%s"}, {"model": "%s"}, {"stop": ["x", "%s"]}, {"stop": "%s"}, {"prompt": "a%s"}, {"prompt": ["%s"]})
HALVES += ({"tools": [{"function": {"name": "%s"}}]}, {"request_id": "%s"}, {"metadata": {"a": {"%s": 1}}}, {"%s": 0})


@pytest.mark.parametrize("half", [b"\\ud800", b"\\uDFFF", b"\\ud83d\\ud83d\\ude00", b"\xed\xa0\x80"])
def test_half_a_letter_is_refused_in_every_field(half: bytes) -> None:
    """Half a surrogate pair anywhere in a body, escaped or not, is a 400 that names the field; a whole one is text."""

    async def use(client: Client) -> tuple[list[Any], Any, bool]:
        good = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        bodies = [json.dumps(good | field).encode() for field in HALVES]
        found = [await client.call("POST", COMPLETIONS, body.replace(b"%s", half)) for body in bodies]
        chat = json.dumps(good | {"messages": [{"role": "user", "content": "%s"}]}).encode().replace(b"%s", half)
        found += [await client.call("POST", path, chat) for path in ("/v1/chat/completions", "/tokenize")]
        whole = await client.call(
            "POST", COMPLETIONS, b'{"prompt": "\\ud83d\\ude00 \\\\ud800", "user": "\\ud83d\\ude00"}'
        )
        return found, whole, await is_whole(client)

    found, whole, is_left_whole = ask(use)
    assert [status for status, _, _ in found] == [400] * len(found)
    if half.startswith(b"\\"):
        said = [json.loads(text)["error"]["message"] for _, _, text in found]
        assert all("half of a letter" in each and "\n" not in each for each in said)
        assert said[0].startswith("user: \\ud")
    assert whole[0] == 200 and is_left_whole


def test_three_hundred_damaged_requests_leave_nothing_behind() -> None:
    """A good request with bytes changed, cut out, doubled or cut off at any place is answered or hung up on."""
    rng = random.Random(18)
    damaged = []
    for _ in range(300):
        data = bytearray(GOOD)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data))
            kind = rng.randrange(4)
            if kind == 0:
                data[at] = rng.randrange(256)
            elif kind == 1:
                del data[at : at + rng.randrange(1, 9)]
            elif kind == 2:
                data[at:at] = data[at : at + rng.randrange(1, 30)]
            else:
                data = data[: at + 1]
        damaged.append(bytes(data))

    async def use(client: Client) -> tuple[list[bytes], bool]:
        found = []
        for start in range(0, len(damaged), 15):
            found += await asyncio.gather(*(client.raw(data, eof=True) for data in damaged[start : start + 15]))
        return found, await is_whole(client)

    found, whole = ask(use, limits=SMALL)
    assert whole and not any(b"500" in answer[:20] or b"Traceback" in answer for answer in found)


def test_requests_behind_one_another_are_answered_in_order() -> None:
    """Pipelined requests get their answers one after another, on the one connection."""

    async def use(client: Client) -> list[int]:
        first = [post(b'{"prompt": [1], "ignore_eos": true, "max_tokens": %d}' % n) for n in (3, 5)]
        text = await client.raw(b"".join([*first, GOOD]))
        return [int(part.split(b",")[0].strip(b"} ")) for part in text.split(b'"completion_tokens": ')[1:]]

    assert ask(use)[:2] == [3, 5]


@pytest.mark.parametrize(("ahead", "status"), [(0, None), (100_000, None), (2_000_000, b"413")])
def test_who_leaves_with_bytes_sent_ahead_is_noticed(ahead: int, status: bytes | None) -> None:
    """Whatever waits behind a request, its client's end cancels it; more than a request may have ends it at once."""

    async def use(client: Client) -> tuple[bytes, bool, list[int]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(post(b'{"prompt": [1], "max_tokens": 900, "ignore_eos": true}') + b"x" * ahead)
        while not client.server.backend.num_sent:
            await asyncio.sleep(0)
        told = b"" if status is None else await reader.read()
        writer.close()
        whole = await is_whole(client)
        return told, whole, client.server.backend.records().requests["output_tokens"].tolist()

    told, whole, tokens = ask(use, limits=replace(SMALL, body_bytes=1 << 20), speed=1)
    assert whole and tokens[0] < 900 and (status is None or told.split()[1] == status)


def test_the_answer_to_what_is_refused_comes_though_its_body_is_long() -> None:
    """Refused on its head, a request of ten megabytes that are on their way has its answer, and they are read."""
    head = request(b"POST /v1/completions", b"content-length: 10000000")
    assert ask(lambda client: client.raw(head + b"x" * 10_000_000), limits=SMALL).split()[1] == b"413"


def test_a_body_in_chunks_and_what_is_behind_it() -> None:
    """A chunked body with trailers is whole, and the request sent behind it is answered, too."""
    body = b'{"prompt": [1], "ignore_eos": true, "max_tokens": 3}'
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(body[at : at + 9]), body[at : at + 9]) for at in range(0, len(body), 9))
    text = ask(lambda client: client.raw(chunked(pieces + b"0\r\nx: y\r\n\r\n") + GOOD))
    assert text.count(b"HTTP/1.1 200 OK") == 2 and b'"completion_tokens": 3' in text


def test_one_too_many_connections_is_refused() -> None:
    """Beyond the bound a connection gets 503 at once; when others have left, there is room."""

    async def use(client: Client) -> tuple[bytes, bool]:
        idle = [await asyncio.open_connection("127.0.0.1", client.port) for _ in range(20)]
        while len(client.server.connections) < 20:
            await asyncio.sleep(0)
        refused = await client.raw(b"")
        for _, writer in idle:
            writer.close()
        while client.server.connections:
            await asyncio.sleep(0)
        return refused, await is_whole(client)

    refused, whole = ask(use, limits=SMALL)
    assert refused.startswith(b"HTTP/1.1 503 ") and whole


def test_who_does_not_read_holds_nobody_up_and_loses_nothing() -> None:
    """While a client does not read, others are answered; when it reads again it has all its tokens, in one piece."""

    async def use(client: Client) -> tuple[int, bytes]:
        body = json.dumps({"prompt": [1], "max_tokens": 900, "ignore_eos": True, "stream": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(post(body, b"connection: close"))
        while not client.server.exchanges:
            await asyncio.sleep(0)
        (exchange,) = client.server.exchanges.values()
        exchange.reply.pause_writing()  # what asyncio calls when as much waits as may wait
        other = await client.json(COMPLETIONS, {"prompt": [1], "max_tokens": 50, "ignore_eos": True})
        while client.server.backend.answers:
            await asyncio.sleep(0)
        exchange.reply.resume_writing()
        text = await reader.read()
        writer.close()
        return other["usage"]["completion_tokens"], text

    tokens, text = ask(use, speed=1000)
    pieces = [json.loads(part.partition(b"\n\n")[0])["choices"][0] for part in text.split(b"data: ")[1:-1]]
    assert tokens == 50
    assert sum(len(piece["text"].split()) for piece in pieces) == 900 and len(pieces) < 100
    assert pieces[-1]["finish_reason"] == "length" and b"data: [DONE]" in text


def test_a_bounded_queue_says_when_to_try_again() -> None:
    """Beyond `max_waiting` a request gets 429 with Retry-After, and those before it are answered."""

    async def use(client: Client) -> list[tuple[int, dict[str, str], bytes]]:
        body = {"prompt": [1] * 400, "max_tokens": 40, "ignore_eos": True}
        return await asyncio.gather(*(client.call("POST", COMPLETIONS, body) for _ in range(30)))

    found = ask(use, more="max_waiting: 4", speed=5)
    statuses = [status for status, _, _ in found]
    assert set(statuses) == {200, 429}
    refused = next(headers for status, headers, _ in found if status == 429)
    assert refused["retry-after"] == "1"


def test_draining_answers_what_is_open_and_refuses_the_rest() -> None:
    """After `drain` the requests at hand are answered whole, new ones on kept connections get 503, and it stops."""

    async def use(client: Client) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(post(b'{"prompt": [1], "max_tokens": 30, "ignore_eos": true}') + GOOD)
        while not client.server.exchanges:
            await asyncio.sleep(0)
        client.server.drain()
        text = await reader.read()
        writer.close()
        await client.server.stopped.wait()
        return text.count(b'"completion_tokens": 30'), text

    count, text = ask(use)
    assert count == 1 and b"HTTP/1.1 503 " in text
