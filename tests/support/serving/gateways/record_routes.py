"""Records which replica a real gateway sends each request to, as `batchsim conform` reads it.

    python -m tests.support.serving.gateways.record_routes "sglang-router cache_aware" -o FOLDER

Requests are sent one at a time, each once the one before it has a token; some are held open meanwhile, so that replicas
have loads. Which replica has one the replicas' own counts say. Prompts are words of six letters, so that a share of the
text is the same share of the tokens.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer

from tests.support.paths import ROOT
from tests.support.serving.gateways.gateways import GATEWAYS, Front, front
from tests.support.serving.gateways.processes import Replica, replicas

HELD_TOKENS = 3500
REPLICAS = 3
Segment = tuple[int, int, int]


def word(stream: int, place: int) -> str:
    """Token `place` of a stream of prompts, with the space behind it: words of two streams differ in their first
    letter, so that text is equal by whole tokens."""
    return f"{chr(0x4E00 + stream)}{place:04d} "


def text(segments: Sequence[Segment]) -> str:
    return "".join(word(stream, start + i) for stream, start, length in segments for i in range(length))


@dataclass(frozen=True)
class Send:
    """A request with a prompt of `segments`; `held`: it stays open until it is ended."""

    id: int
    segments: tuple[Segment, ...]
    held: bool


def script(seed: int, count: int, most_held: int) -> list[Send | int]:
    """Requests, and the ids of held ones where they end: prompts of few families, which share some of their beginning,
    so that all rules of a router bite. The first, one for each replica, are held together and share nothing: they show
    in which order the router takes replicas that are equal."""
    draw = random.Random(seed)
    events: list[Send | int] = [Send(number, ((1000 + number, 0, 20),), True) for number in range(REPLICAS)]
    events += range(REPLICAS)
    open_ids: list[int] = []
    for number in range(REPLICAS, REPLICAS + count):
        while open_ids and (len(open_ids) >= most_held or draw.random() < 0.3):
            events.append(open_ids.pop(draw.randrange(len(open_ids))))
        family, length = draw.randrange(6), draw.choice([40, 80, 120, 160])
        shared = draw.choice([0, 4, length // 5, length // 2, length - 8, length])
        segments: list[Segment] = [(family, 0, shared)] if shared else []
        if shared < length:
            segments.append((100 + number, 0, length - shared))
        held = draw.random() < 0.6 and most_held > 0
        if held:
            open_ids.append(number)
        events.append(Send(number, tuple(segments), held))
    return [*events, *open_ids]


async def _loads(session: aiohttp.ClientSession, engines: Sequence[Replica]) -> list[int]:
    """The requests at each replica, by its own count."""
    found: list[int] = []
    for each in engines:
        async with session.get(f"{each.url}/get_load") as response:
            found.append(sum(row["num_reqs"] for row in await response.json()))
    return found


async def _finished(session: aiohttp.ClientSession, engines: Sequence[Replica]) -> list[float]:
    """The requests that each replica has answered."""
    found: list[float] = []
    for each in engines:
        async with session.get(f"{each.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        found.append(sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total")))
    return found


async def record(gateway: Front, engines: Sequence[Replica], events: Sequence[Send | int]) -> list[dict[str, Any]]:
    """The events as they went: {"send": id, "replica": number} or {"end": id}."""
    rows: list[dict[str, Any]] = []
    opened: dict[int, aiohttp.ClientResponse] = {}
    async with aiohttp.ClientSession(headers=gateway.headers) as session:
        for event in events:
            before = await _loads(session, engines)
            if isinstance(event, int):
                opened.pop(event).close()
                while sum(await _loads(session, engines)) == sum(before):
                    await asyncio.sleep(0.01)
                rows.append({"end": event})
                continue
            ended = await _finished(session, engines)
            asked = {"model": "m", "prompt": text(event.segments), "ignore_eos": True, "stream": event.held}
            asked["max_tokens"] = HELD_TOKENS if event.held else 1
            response = await session.post(f"{gateway.url}/v1/completions", json=asked)
            assert response.status == 200, await response.text()
            if event.held:
                await response.content.readline()
                opened[event.id] = response
                after = await _loads(session, engines)
            else:
                await response.read()
                before, after = ended, await _finished(session, engines)
            (replica,) = (number for number, (one, two) in enumerate(zip(before, after, strict=True)) if two > one)
            rows.append({"send": event.id, "replica": replica})
            if not event.held:
                rows.append({"end": event.id})
    return rows


def main(
    name: Annotated[str, typer.Argument()],
    out: Annotated[Path, typer.Option("-o")],
    seed: int = 1,
    count: int = 100,
    held: int = 6,
    balance_abs_threshold: int = 64,
) -> None:
    """Writes the recording, replicas numbered in the router's own order."""
    gateway = GATEWAYS[name]
    events = script(seed, count, held)
    more = ["--balance-abs-threshold", str(balance_abs_threshold)]
    asked = replace(gateway, options=lambda *given: [*gateway.options(*given), *more])
    with (
        tempfile.TemporaryDirectory() as folder,
        replicas(REPLICAS, Path(folder)) as engines,
        front(asked, Path(folder), engines) as opened,
    ):
        rows = asyncio.run(record(opened, engines, events))
    order = [row["replica"] for row in rows if row.get("send", REPLICAS) < REPLICAS]
    assert sorted(order) == list(range(REPLICAS)), f"the first requests went to {order}"
    for row in rows:
        if "replica" in row:
            row["replica"] = order.index(row["replica"])
    recording = {
        "router": f"{gateway.client.removesuffix('-router')}_{name.partition(' ')[2]}",
        "options": {"block_tokens": 1, "balance_abs_threshold": balance_abs_threshold},
        "gateway": gateway.client,
        "version": _version(gateway.client),
        "policy": name.partition(" ")[2],
        "command": f"record_routes {name!r} --seed {seed} --count {count} --held {held} {' '.join(more)}",
        "replicas": REPLICAS,
        "prompts": [each.segments for each in events if isinstance(each, Send)],
        "events": rows,
    }
    out.write_text(json.dumps(recording, separators=(",", ":")) + "\n")
    print([row["replica"] for row in rows if "send" in row])


def _version(client: str) -> str:
    """The installed version of a gateway."""
    python = ROOT / ".clients" / client / "bin" / "python"
    code = f"from importlib.metadata import version; print(version({client!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    typer.run(main)
