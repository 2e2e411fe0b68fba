"""A load of requests through a gateway, each of which must be answered as it was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

TOKENS = 12
LIMIT_S = 60


@dataclass(frozen=True)
class Reply:
    """What became of request `number`: whether it was streamed, the tokens that came, and in words what was wrong with
    it, "" if nothing was."""

    number: int
    streams: bool
    num_tokens: int
    wrong: str


def prompt(number: int) -> str:
    """A prompt of `prompt_tokens` with the marks of a chat. Every second begins as others."""
    words = [str(100 + place) if number % 2 else str((number * 7919 + place * 31) % 90_000) for place in range(16)]
    return " ".join([*words, *(str(number + place) for place in range(number + (2 if _is_chat(number) else 4)))])


def body(number: int) -> tuple[str, dict[str, Any]]:
    """Path and body of request `number`: every third a chat, two of three streamed."""
    asked: dict[str, Any] = {"model": "m", "max_tokens": TOKENS, "ignore_eos": True, "stream": number % 3 != 0}
    if _is_chat(number):
        return "/v1/chat/completions", asked | {"messages": [{"role": "user", "content": prompt(number)}]}
    return "/v1/completions", asked | {"prompt": prompt(number)}


def prompt_tokens(number: int) -> int:
    """The tokens of the prompt of request `number`, by which it is known: each has another number."""
    return 20 + number


def _is_chat(number: int) -> bool:
    """Whether it is a chat, whose prompt has a mark before each message and one before the answer."""
    return number % 3 == 1


async def ask(session: aiohttp.ClientSession, url: str, number: int) -> Reply:
    """The reply to request `number`."""
    path, asked = body(number)
    streams, pieces = bool(asked["stream"]), list[str]()
    try:
        async with session.post(url + path, json=asked) as response:
            if response.status != 200:
                return Reply(number, streams, 0, f"{response.status}: {(await response.text())[:200]}")
            if not streams:
                answer = await response.json()
                (choice,) = answer["choices"]
                text = choice["message"]["content"] if "message" in choice else choice["text"]
                return Reply(number, streams, len(text.split()), _complete(len(text.split()), choice["finish_reason"]))
            finish = None
            async for line in response.content:
                data = line.decode().strip()
                if not data or data == "data: [DONE]":
                    pieces.append(data)
                    continue
                for choice in json.loads(data.removeprefix("data: "))["choices"]:
                    finish = choice.get("finish_reason") or finish
                    pieces += ((choice.get("delta") or {}).get("content") or choice.get("text") or "").split()
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
        return Reply(number, streams, 0, f"{type(error).__name__}: {error}")
    said = [piece for piece in pieces if piece and not piece.startswith("data:")]
    wrong = _complete(len(said), finish)
    return Reply(number, streams, len(said), wrong or ("" if "data: [DONE]" in pieces else "no end of the stream"))


def _complete(num_tokens: int, finish: str | None) -> str:
    if num_tokens != TOKENS:
        return f"{num_tokens} tokens of {TOKENS}"
    return "" if finish == "length" else f"ended by {finish}"


async def load(
    url: str,
    headers: dict[str, str],
    numbers: Sequence[int],
    rate: float,
    at: Callable[[int], None] = lambda number: None,
) -> list[Reply]:
    """The replies to requests sent at `rate` a second; `at` is called with each number as it is sent."""
    loop, limit = asyncio.get_running_loop(), aiohttp.ClientTimeout(LIMIT_S)
    async with aiohttp.ClientSession(
        headers=headers, timeout=limit, connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        start_s, sent = loop.time(), list[asyncio.Task[Reply]]()
        for place, number in enumerate(numbers):
            await asyncio.sleep(start_s + place / rate - loop.time())
            at(number)
            sent.append(asyncio.ensure_future(ask(session, url, number)))
        return list(await asyncio.gather(*sent))
