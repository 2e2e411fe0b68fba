"""Gateways that others wrote, before three simulated replicas: every request is answered once, streams come whole, and
a replica that is killed costs no more than what it was answering.

`make real-clients` installs them, each in an environment of its own under .clients; without, these tests skip.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("h11", reason="batchsim serve needs h11")
pytest.importorskip("aiohttp", reason="the load needs aiohttp")
pytest.importorskip("zmq", reason="KV events need pyzmq: pip install 'batchsim[gateways]'")
pytest.importorskip("msgpack", reason="KV events need msgpack: pip install 'batchsim[gateways]'")

from tests.support.serving.gateways.gateways import GATEWAYS, Front, front
from tests.support.serving.gateways.load import Reply, load, prompt_tokens
from tests.support.serving.gateways.processes import Replica, replicas

NUM = 300
KILLED_AT = 60


def _wrong(replies: list[Reply]) -> list[Reply]:
    return [reply for reply in replies if reply.wrong]


def _all_answered_once(gateway: Front, engines: list[Replica]) -> None:
    """Requests that are known by their lengths: each has one row, at one replica, and no replica has all."""
    replies = asyncio.run(load(gateway.url, gateway.headers, range(NUM), gateway.rate))
    assert not _wrong(replies)
    rows = [[row["prompt_tokens"] for row in each.rows()] for each in engines]
    found = Counter(length for of_one in rows for length in of_one)
    assert found == Counter(prompt_tokens(number) for number in range(NUM))
    assert max(map(len, rows)) < NUM


def _a_death_is_survived(gateway: Front, engines: list[Replica]) -> None:
    """Requests sent after a replica was killed are all answered; of those sent before, only those at it are lost."""
    numbers = range(NUM, NUM + 200)

    def at(number: int) -> None:
        if number == NUM + KILLED_AT:
            engines[0].kill()

    replies = asyncio.run(load(gateway.url, gateway.headers, numbers, gateway.rate, at))
    lost = _wrong(replies)
    assert all(NUM + KILLED_AT - 20 <= reply.number < NUM + KILLED_AT + 40 for reply in lost), lost
    assert len(lost) <= 10, lost
    survived = Counter(row["prompt_tokens"] for each in engines[1:] for row in each.rows())
    assert all(survived[prompt_tokens(number)] == 1 for number in range(NUM + KILLED_AT + 40, NUM + 200))


@pytest.mark.slow
@pytest.mark.parametrize("name", GATEWAYS)
def test_a_gateway_has_every_request_answered_once_and_survives_a_replica(name: str, tmp_path: Path) -> None:
    """300 requests, two of three streamed, then 200 during which one of three replicas is killed."""
    with replicas(3, tmp_path) as engines, front(GATEWAYS[name], tmp_path, engines) as gateway:
        _all_answered_once(gateway, engines)
        _a_death_is_survived(gateway, engines)
