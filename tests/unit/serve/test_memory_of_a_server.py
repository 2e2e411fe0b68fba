"""What a server keeps of requests that have ended: their rows, and nothing else."""

from __future__ import annotations

import asyncio
import gc
import json
from types import FunctionType, ModuleType
from typing import Any

import pytest

pytest.importorskip("h11", reason="batchsim serve needs h11")

from tests.unit.serve.test_abuse import post
from tests.unit.serve.test_server import COMPLETIONS, Client, ask


def entries(root: object) -> dict[str, int]:
    """The entries of all dicts and sets that can be reached from `root`, by kind."""
    seen: set[int] = set()
    found, ahead = {"dict": 0, "set": 0}, [root]
    while ahead:
        one: Any = ahead.pop()
        if id(one) in seen or isinstance(one, type | ModuleType):
            continue
        seen.add(id(one))
        if type(one).__name__ in found:
            found[type(one).__name__] += len(one)
        if isinstance(one, FunctionType):  # but for the module that it stands in
            ahead += [cell.cell_contents for cell in one.__closure__ or ()]
        else:
            ahead += gc.get_referents(one)
    return found


async def _use(client: Client, count: int) -> None:
    """Requests one after another, every third a stream whose client leaves."""
    body = {"prompt": [1, 2, 3], "ignore_eos": True, "max_tokens": 4, "user": "someone"}
    for number in range(count):
        if number % 3:
            await client.json(COMPLETIONS, body)
            continue
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(post(json.dumps(body | {"stream": True, "max_tokens": 4000}).encode()))
        await reader.readuntil(b"\n\n")
        writer.close()
    while client.server.exchanges or client.server.backend.answers or client.server.connections:
        await asyncio.sleep(0)


def test_what_has_ended_leaves_rows_alone() -> None:
    """After 9 requests and after 27, finished and given up, no dict or set of the engines has an entry more or less."""

    async def use(client: Client) -> list[dict[str, int]]:
        found = list[dict[str, int]]()
        for count in (9, 18):
            await _use(client, count)
            gc.collect()
            found.append(entries(client.server.backend))
        return found

    few, many = ask(use)
    assert few == many and few["dict"] > 10
