"""Engines that sleep: what is open is aborted or waited for, what comes waits, and metrics say so."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("h11", reason="batchsim serve needs h11")

from tests.unit.serve.test_metrics import samples
from tests.unit.serve.test_server import COMPLETIONS, Client, ask

BODY: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True}
LONG = BODY | {"max_tokens": 3000}


async def _is_sleeping(client: Client) -> bool:
    return (await client.json("/is_sleeping"))["is_sleeping"]


async def _states(client: Client) -> tuple[dict[str, float], float]:
    """The engine's sleep state by name, and how many requests wait."""
    text = (await client.call("GET", "/metrics"))[2].decode()
    found = samples(text)
    states = {
        labels.partition('sleep_state="')[2].partition('"')[0]: value
        for (name, labels), value in found.items()
        if name == "vllm:engine_sleep_state"
    }
    (waiting,) = (value for (name, _), value in found.items() if name == "vllm:num_requests_waiting")
    return states, waiting


async def _open(client: Client, count: int) -> None:
    while len(client.server.exchanges) < count:
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("level", "state"), [("0", None), ("1", "weights_offloaded"), ("2", "discard_all"), ("", "weights_offloaded")]
)
def test_what_comes_waits_until_engines_wake(level: str, state: str | None) -> None:
    """Asleep, a request waits and counts as waiting; woken, it is answered, and has waited from its coming on."""

    async def use(client: Client) -> Any:
        query = f"?level={level}" if level else ""
        assert (await client.call("POST", f"/sleep{query}"))[0] == 200
        waits = asyncio.ensure_future(client.json(COMPLETIONS, BODY))
        await _open(client, 1)
        asleep = await _is_sleeping(client), *(await _states(client))
        came_ns = client.server.now_ns
        while client.server.now_ns < came_ns + 300_000_000:
            await asyncio.sleep(0)
        assert (await client.call("POST", "/wake_up"))[0] == 200
        answer = await waits
        row = client.server.backend.records().requests[0]
        return asleep, answer["usage"]["completion_tokens"], await _is_sleeping(client), await _states(client), row

    (sleeps, states, waiting), tokens, still, (awake, none), row = ask(use)
    assert sleeps and waiting == 1 and tokens == 5 and not still and none == 0
    assert states == {name: float(name == state) for name in ("awake", "weights_offloaded", "discard_all")}
    assert awake == {"awake": 1.0, "weights_offloaded": 0.0, "discard_all": 0.0}
    assert row["arrival_ns"] - row["sent_ns"] >= 300_000_000 and row["first_token_ns"] > row["arrival_ns"]


def test_what_is_open_is_aborted() -> None:
    """By default an answer at hand ends at once, with `abort` as its reason, streamed and whole; its KV is free."""

    async def use(client: Client) -> Any:
        stream = asyncio.ensure_future(client.events(COMPLETIONS, LONG))
        whole = asyncio.ensure_future(client.json(COMPLETIONS, LONG))
        await _open(client, 2)
        while any(answer.num_tokens == 0 for answer in client.server.backend.answers.values()):
            await asyncio.sleep(0)
        await client.call("POST", "/sleep")
        found = (await stream)[-1]["choices"][0]["finish_reason"], await whole
        (core,) = client.server.backend.cores().values()
        while client.server.backend.answers:
            await asyncio.sleep(0)
        return *found, core.scheduler.kv.num_blocks - core.scheduler.kv.num_free

    reason, whole, used = ask(use, speed=10)
    assert reason == "abort" and whole["choices"][0]["finish_reason"] == "abort" and used == 0
    assert 0 < whole["usage"]["completion_tokens"] < 3000


def test_a_sleep_may_wait_for_what_is_open() -> None:
    """With mode=wait /sleep is answered after the answer at hand is whole; what came meanwhile waits for the waking."""

    async def use(client: Client) -> Any:
        first = asyncio.ensure_future(client.json(COMPLETIONS, BODY | {"max_tokens": 40}))
        await _open(client, 1)
        sleep = asyncio.ensure_future(client.call("POST", "/sleep?mode=wait"))
        while not await _is_sleeping(client):
            await asyncio.sleep(0)
        second = asyncio.ensure_future(client.json(COMPLETIONS, BODY))
        found = (await first)["usage"]["completion_tokens"], (await sleep)[0], second.done()
        await client.call("POST", "/wake_up")
        return *found, (await second)["usage"]["completion_tokens"]

    assert ask(use) == (40, 200, False, 5)


def test_engines_wake_when_all_memory_is_back() -> None:
    """Woken by tags they sleep on until weights and KV cache are both back; an unknown tag is refused."""

    async def use(client: Client) -> list[Any]:
        await client.call("POST", "/sleep?level=2")
        refused = (await client.call("POST", "/wake_up?tags=wieghts"))[0]
        await client.call("POST", "/wake_up?tags=weights")
        first = await _is_sleeping(client)
        await client.call("POST", "/wake_up?tags=kv_cache")
        return [refused, first, await _is_sleeping(client)]

    assert ask(use) == [400, True, False]


def test_a_sleep_empties_the_prefix_cache() -> None:
    """After a sleep of level 1 a prompt sent again finds nothing of itself; one of level 0 leaves the cache alone."""

    async def use(client: Client) -> list[int]:
        found = list[int]()
        for level in (None, 0, 1):
            if level is not None:
                await client.call("POST", f"/sleep?level={level}")
                await client.call("POST", "/wake_up")
            usage = (await client.json(COMPLETIONS, BODY | {"prompt": [9] * 64}))["usage"]
            found.append(usage["prompt_tokens_details"]["cached_tokens"])
        return found

    assert ask(use, "vllm: {max_num_seqs: 8, max_num_batched_tokens: 512}") == [0, 48, 0]


@pytest.mark.parametrize(
    ("query", "message"),
    [("level=3", "level must be 0, 1 or 2"), ("mode=keep", "mode keep is not served"), ("mode=x", "mode must be")],
)
def test_no_other_sleep(query: str, message: str) -> None:
    """A level or a mode that is not served gets a 400, and the engines stay awake."""

    async def use(client: Client) -> Any:
        status, _, text = await client.call("POST", f"/sleep?{query}")
        return status, json.loads(text)["error"]["message"], await _is_sleeping(client)

    status, told, sleeps = ask(use)
    assert status == 400 and message in told and not sleeps


def test_a_client_that_leaves_waits_no_longer() -> None:
    """Whose client has gone before the waking is not sent to an engine; draining wakes the engines for the others."""

    async def use(client: Client) -> Any:
        await client.call("POST", "/sleep")
        _, writer = await asyncio.open_connection("127.0.0.1", client.port)
        body = json.dumps(BODY).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        await _open(client, 1)
        writer.close()
        while client.server.exchanges:
            await asyncio.sleep(0)
        stays = asyncio.ensure_future(client.json(COMPLETIONS, BODY))
        await _open(client, 1)
        waiting = (await _states(client))[1]
        client.server.drain()
        return waiting, (await stays)["usage"]["completion_tokens"], client.server.backend.num_sent

    assert ask(use) == (1, 5, 1)
