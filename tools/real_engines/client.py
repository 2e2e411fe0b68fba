"""The judge's own client: streaming completions of exact lengths, sent at times of their own or by users in turn.

It shares no code with what calibrates, so that a fault of either shows. Prompts are token ids, no two alike. A chunk of
an answer may hold several tokens: how many there were is what the server counts at the end, and only the times of
the first and the last chunk are kept.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from itertools import chain
from typing import Any

import aiohttp
import numpy as np

from batchsim.base.errors import CalibrationError, shown
from tools.real_engines.server import HOST

_TICK_S = 0.002
_LIMIT_S = 120.0  # the longest that one answer may take
_HEADER = "intended_s,sent_s,first_token_s,last_token_s,prompt_tokens,output_tokens,chunks"


@dataclass(frozen=True)
class Load:
    """So many `requests` of lengths drawn evenly from `prompt` and `output`, both ends included, in tokens.

    They come at random with a mean rate of `rate_rps`; without one from `users` in turn, each sending its next when it
    has its answer. The same `seed` draws the same requests at the same times.
    """

    name: str
    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    rate_rps: float | None = None
    users: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Ask:
    """A request to send `at_s` after the start, None: as soon as a user is free."""

    at_s: float | None
    prompt: list[int]
    output_tokens: int


@dataclass(frozen=True)
class Answer:
    """What became of an ask; times in seconds from the start, `intended_s` None of a user's. `chunks` held tokens."""

    intended_s: float | None
    sent_s: float
    first_s: float
    last_s: float
    prompt_tokens: int
    output_tokens: int
    chunks: int

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / (self.output_tokens - 1)


@dataclass(frozen=True)
class Sent:
    """The answers to a load in the order of sending, and the share of its time in which the client got no core: what
    came meanwhile was seen too late, and the server had to share a core too."""

    answers: list[Answer]
    stalled: float


def asks(load: Load, vocabulary: range) -> list[Ask]:
    """The requests of a load, prompts of ids from `vocabulary`."""
    draw = np.random.default_rng([load.seed, load.requests])
    gaps_s = draw.exponential(1.0, load.requests)
    prompts, outputs = (draw.integers(low, high + 1, load.requests) for low, high in (load.prompt, load.output))
    at_s: list[float | None] = [None] * load.requests
    if load.rate_rps is not None:
        at_s = list((np.cumsum(gaps_s) - gaps_s[0]) / load.rate_rps)
    ids = (draw.integers(vocabulary.start, vocabulary.stop, length).tolist() for length in prompts.tolist())
    return [Ask(*one) for one in zip(at_s, ids, outputs.tolist(), strict=True)]


def send(port: int, model: str, load: Load, vocabulary: range) -> Sent:
    """What the server on `port` of HOST answers to a load.

    CalibrationError where an answer is refused, cut, late by _LIMIT_S, or not of the lengths asked for.
    """
    return asyncio.run(_watched(_send(port, model, asks(load, vocabulary), load.users)))


def tidy(load: Load, answers: list[Answer]) -> str:
    """The answers to a load as a CSV that `batchsim validate --against` reads, users as the closed loop they are."""
    lines = [_HEADER if load.rate_rps is not None else f"{_HEADER},users"]
    for one in answers:
        times = (one.intended_s, one.sent_s, one.first_s, one.last_s)
        row = ["" if time_s is None else f"{time_s:.6f}" for time_s in times]
        row += map(str, (one.prompt_tokens, one.output_tokens, one.chunks))
        lines.append(",".join(row if load.rate_rps is not None else [*row, str(load.users)]))
    return "\n".join(lines) + "\n"


async def _watched(sending: Coroutine[Any, Any, list[Answer]]) -> Sent:
    """The answers that `sending` returns, while a task that wants to run every _TICK_S sees when it may not."""
    start_s, lost_s = time.monotonic(), 0.0

    async def tick() -> None:
        nonlocal lost_s
        while True:
            due_s = time.monotonic() + _TICK_S
            await asyncio.sleep(_TICK_S)
            late_s = time.monotonic() - due_s
            lost_s += late_s if late_s > _TICK_S else 0.0

    ticks = asyncio.create_task(tick())
    answers = await sending
    ticks.cancel()
    return Sent(sorted(answers, key=lambda one: one.sent_s), lost_s / (time.monotonic() - start_s))


async def _send(port: int, model: str, todo: list[Ask], users: int) -> list[Answer]:
    timeout, connector = aiohttp.ClientTimeout(_LIMIT_S), aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(f"http://{HOST}:{port}", timeout=timeout, connector=connector) as session:
        start_s = time.monotonic()
        if todo[0].at_s is None:
            left = iter(todo)

            async def user() -> list[Answer]:
                return [await _answer(session, model, ask, start_s) for ask in left]

            return list(chain.from_iterable(await asyncio.gather(*(user() for _ in range(users)))))

        async def at_its_time(ask: Ask) -> Answer:
            assert ask.at_s is not None, "of an open load"
            await asyncio.sleep(start_s + ask.at_s - time.monotonic())
            return await _answer(session, model, ask, start_s)

        return list(await asyncio.gather(*map(at_its_time, todo)))


async def _answer(session: aiohttp.ClientSession, model: str, ask: Ask, start_s: float) -> Answer:
    body = {
        "model": model,
        "prompt": ask.prompt,
        "max_tokens": ask.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    times_s: list[float] = []
    usage: dict[str, Any] = {}
    sent_s = time.monotonic() - start_s
    try:
        async with session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                said = (await response.content.read(300)).decode(errors="replace")
                raise CalibrationError(f"the server refused a completion: {response.status}, {shown(said)}.")
            async for line in response.content:
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                event, now_s = json.loads(data), time.monotonic() - start_s
                if any(choice.get("text") or choice.get("token_ids") for choice in event.get("choices", ())):
                    times_s.append(now_s)
                usage = event.get("usage") or usage
    except (OSError, TimeoutError, aiohttp.ClientError, ValueError) as error:
        raise CalibrationError(f"an answer of {ask.output_tokens} tokens broke off: {error!r}.") from error
    counted = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if not times_s or counted != (len(ask.prompt), ask.output_tokens):
        raise CalibrationError(
            f"asked for {len(ask.prompt)} + {ask.output_tokens} tokens, prompt and answer; the server counts"
            f" {counted[0]} + {counted[1]} in {len(times_s)} chunks."
        )
    return Answer(ask.at_s, sent_s, times_s[0], times_s[-1], len(ask.prompt), ask.output_tokens, len(times_s))
