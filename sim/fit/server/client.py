"""One client: streaming completions of one server, sent at times of their own or by users in turn, timed and counted.

Tokens are counted as the server says them (`usage`, and ids where it sends them), never as chunks: a chunk may hold
several. Only the times of the first and the last chunk are kept.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp

from batchsim.base.errors import shown
from batchsim.fit.server.loads import Ask, Load
from batchsim.fit.server.prompts import Prompts
from batchsim.fit.server.refusals import BROKEN, Patience, RequestError, reason, words_of

LINE_BYTES, TEXT_BYTES = 1 << 20, 64 << 20
RAMP = 0.25
"""Share of a load's time over which its users begin: together they would go on in lockstep."""
LATE_S, LATE_GAPS, LATE_SHARE = 0.010, 0.1, 0.01
"""A load is void where more than LATE_SHARE of its requests are sent LATE_S and LATE_GAPS of a mean gap too late."""


@dataclass(frozen=True)
class Dialect:
    """What a server was found to understand: its model's name, how prompts are written, whether it sends token ids."""

    model: str
    prompts: Prompts
    token_ids: bool = True


@dataclass(frozen=True)
class Answer:
    """An ask that was answered in full; times in seconds from the start of its load. `due_s`: when it was to be sent,
    which is later than the load's own time where as many as may be were in flight; None of a user's."""

    number: int
    ask: Ask
    due_s: float | None
    sent_s: float
    first_s: float
    last_s: float
    prompt_tokens: int
    output_tokens: int
    chunks: int


class Loaded:
    """The answers to a load so far, in the order of their ends. `held`: requests that waited for one in flight to end.
    `failure`: what the first that failed said, which ends the load; None so far."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.answers: list[Answer] = []
        self.held = 0
        self.failure: RequestError | None = None

    @property
    def late(self) -> int:
        """Requests that the client sent too late."""
        rate = self.load.rate_rps
        least = LATE_S + LATE_GAPS * (1 / rate if rate else 0.0)
        return sum(one.due_s is not None and one.sent_s - one.due_s > least for one in self.answers)

    @property
    def void(self) -> bool:
        return self.late > LATE_SHARE * len(self.answers)


class Client:
    """Asks the server at `url`, with at most `max_concurrency` requests in flight. To be used `async with`."""

    def __init__(self, url: str, max_concurrency: int, api_key: str = "", patience: Patience | None = None) -> None:
        self.url, self.max_concurrency, self.patience = url, max_concurrency, patience or Patience()
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def __aenter__(self) -> Client:
        patience = self.patience
        timeout = aiohttp.ClientTimeout(
            total=patience.answer_s, sock_connect=patience.connect_s, sock_read=patience.silent_s
        )
        # A server may close a connection just when the next request is written to it: each has its own
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=self._headers, read_bufsize=LINE_BYTES, trust_env=False
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, path: str) -> tuple[int, str]:
        """(status, text) of a GET. RequestError where there is no answer."""
        try:
            async with self._session.get(self.url + path, allow_redirects=False) as reply:
                body = b""
                async for piece in reply.content.iter_any():
                    body += piece
                    if len(body) > TEXT_BYTES:
                        raise RequestError(f"GET {path}: it answers with more than {TEXT_BYTES:,} bytes")
                return reply.status, body.decode(errors="replace")
        except BROKEN as error:
            raise RequestError(f"GET {path}: {reason(error, self.patience)}") from error

    async def send(self, load: Load, dialect: Dialect, loaded: Loaded) -> None:
        """Sends a load and waits for all its answers; they are added to `loaded` as they end."""
        start_s = time.monotonic()
        requests, free = load.requests(), asyncio.Semaphore(self.max_concurrency)
        texts = time.time_ns()  # what was sent before, by a former call too, may be in the server's prefix cache
        number = 0

        async def one(ask: Ask, number: int, due_s: float | None) -> None:
            try:
                loaded.answers.append(await self.answer(ask, dialect, number, texts, start_s, due_s))
            except RequestError as failed:
                loaded.failure = loaded.failure or failed
            finally:
                free.release()

        async def user(begins_s: float) -> None:
            nonlocal number
            first = True
            await _until(start_s + begins_s)
            while loaded.failure is None and (first or time.monotonic() - start_s < load.seconds):
                if (ask := requests.following()) is None:
                    return
                request_number, number, first = number, number + 1, False
                await free.acquire()
                await one(ask, request_number, None)

        if load.rate_rps is None:
            users = min(load.users, self.max_concurrency)
            apart_s = RAMP * load.seconds / users
            await _all([asyncio.create_task(user(i * apart_s)) for i in range(users)])
            return
        tasks: list[asyncio.Task[None]] = []
        freed_s = 0.0  # when a request in flight ended for which one waited
        stop = True  # a stopped client, as by Ctrl-C, does not wait for answers
        try:
            while loaded.failure is None and (ask := requests.following()) is not None:
                assert ask.at_s is not None, "of an open load"
                await _until(start_s + ask.at_s)
                full = free.locked()
                await free.acquire()
                if full:
                    freed_s = time.monotonic() - start_s
                due_s = max(ask.at_s, freed_s)
                loaded.held += due_s > ask.at_s
                tasks.append(asyncio.create_task(one(ask, number, due_s)))
                number += 1
            stop = loaded.failure is not None
        finally:
            await _all(tasks, stop=stop)

    async def answer(
        self, ask: Ask, dialect: Dialect, number: int, seed: int, start_s: float, due_s: float | None = None
    ) -> Answer:
        """The answer to one ask. RequestError where it is not a whole one of the lengths asked for."""
        body: dict[str, Any] = {
            "model": dialect.model,
            "prompt": dialect.prompts.write(ask, number, seed),
            "max_tokens": ask.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if dialect.token_ids:
            body["return_token_ids"] = True
        data = json.dumps(body).encode()
        counted = _Counted(ask, dialect)
        try:
            sent_s = time.monotonic() - start_s
            async for event in self._events(data):
                counted.event(event, time.monotonic() - start_s)
        except BROKEN as error:
            raise RequestError(reason(error, self.patience)) from error
        counted.check()
        return Answer(
            number,
            ask,
            due_s,
            sent_s,
            counted.first_s,
            counted.last_s,
            counted.usage["prompt_tokens"],
            counted.usage["completion_tokens"],
            counted.chunks,
        )

    async def _events(self, data: bytes) -> AsyncIterator[dict[str, Any]]:
        """The objects of the stream of server-sent events that answers `data`."""
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        async with self._session.post(
            self.url + "/v1/completions", data=data, headers=headers, allow_redirects=False
        ) as reply:
            if reply.status != 200:
                said = (await reply.content.read(2000)).decode(errors="replace")
                raise RequestError(f"it answers {reply.status} {reply.reason}: {words_of(said)}", reply.status)
            if (kind := reply.content_type) != "text/event-stream":
                raise RequestError(
                    f"it answers with {kind}, not with a stream of events: is this its completions address?"
                )
            ended = False
            async for line in reply.content:
                if not line.startswith(b"data:"):
                    continue
                text = line[5:].strip()
                if text == b"[DONE]":
                    ended = True
                    break
                try:
                    event = json.loads(text)
                except ValueError:
                    raise RequestError(
                        f"an event of its stream is no JSON: {shown(text.decode(errors='replace'))}"
                    ) from None
                if not isinstance(event, dict):
                    raise RequestError(f"an event of its stream is no object: {shown(event)}")
                yield event
            if not ended:
                raise RequestError("its stream broke off before [DONE]")


class _Counted:
    """What an answer's events add up to."""

    def __init__(self, ask: Ask, dialect: Dialect) -> None:
        self._ask, self._dialect = ask, dialect
        self.usage: dict[str, int] = {}
        self.chunks = self._ids = 0
        self.first_s = self.last_s = -1.0

    def event(self, event: dict[str, Any], now_s: float) -> None:
        if error := event.get("error"):
            code = error.get("code") if isinstance(error, dict) else None  # vLLM refuses some requests in their stream
            said = f"an error amid its stream: {words_of(json.dumps(event))}"
            raise RequestError(said, code if type(code) is int else 0)
        if isinstance(usage := event.get("usage"), dict):
            counts = {name: usage.get(name) for name in ("prompt_tokens", "completion_tokens")}
            if not all(type(n) is int and n >= 0 for n in counts.values()):
                raise RequestError(f"its usage counts no tokens: {shown(usage)}")
            self.usage = counts  # type: ignore[assignment]
        choices = event.get("choices") or []
        if not isinstance(choices, list) or not all(isinstance(one, dict) for one in choices):
            raise RequestError(f"an event's choices are no list of objects: {shown(choices)}")
        ids = sum(len(one["token_ids"]) for one in choices if isinstance(one.get("token_ids"), list))
        if ids or any(one.get("text") for one in choices):
            self.chunks += 1
            self._ids += ids
            self.first_s = now_s if self.first_s < 0 else self.first_s
            self.last_s = now_s
        if max(self.chunks, self._ids) > self._ask.output_tokens:
            raise RequestError(
                f"it sends more than the {self._ask.output_tokens} tokens asked for: max_tokens is not kept"
            )

    def check(self) -> None:
        """RequestError where what was counted is not what was asked for."""
        asked = self._ask.output_tokens
        if not self.usage:
            raise RequestError(
                "it does not count tokens: no usage at the end, which stream_options.include_usage asks for"
            )
        if not self.chunks:
            raise RequestError("its answer has no token with a text")
        said = self.usage["completion_tokens"]
        if said < asked:
            raise RequestError(
                f"an answer has {said} of the {asked} tokens asked for: ignore_eos is not kept, so that lengths are not"
                " known beforehand"
            )
        if said > asked or (self._ids and self._ids != said) or self.chunks > said:
            raise RequestError(
                f"its counts differ: usage says {said} tokens, {asked} were asked for, {self._ids or 'no'} ids came in"
                f" {self.chunks} chunks"
            )
        prompt = self.usage["prompt_tokens"]
        if self._dialect.prompts.ids and not 0 <= prompt - self._ask.prompt_tokens <= 2:  # some add marks at the ends
            raise RequestError(
                f"its counts differ: a prompt of {self._ask.prompt_tokens} ids has {prompt} tokens by its usage"
            )
        if not prompt:
            raise RequestError("its usage says that a prompt had no token")


async def _until(at_s: float) -> None:
    while (left_s := at_s - time.monotonic()) > 0:
        await asyncio.sleep(left_s)


async def _all(tasks: list[asyncio.Task[None]], *, stop: bool = False) -> None:
    """Waits for the tasks; cancels them first with `stop`, or if the waiting is itself cancelled."""
    try:
        if not stop:
            await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
