"""The endpoint by HTTP, in this process, a hundred times faster than the clock."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("h11", reason="batchsim serve needs h11")

from batchsim.scenario.setup import Setup
from batchsim.serve.connection import Connection
from batchsim.serve.incoming import HttpRequest, Limits
from batchsim.serve.server import Server
from tests.support.serving.served import setup_of, simulation_of

CONTINUOUS = "continuous: {max_num_seqs: 8, max_num_batched_tokens: 512}"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class Client:
    """Talks to a server, raw."""

    def __init__(self, server: Server, port: int) -> None:
        self.server = server
        self.port = port

    async def raw(self, data: bytes, *, eof: bool = False) -> bytes:
        """All that the server says to `data` until it closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        if eof:
            writer.write_eof()
        try:
            return await asyncio.wait_for(reader.read(), 10)
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer to one request."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", "host: localhost", "connection: close", f"content-length: {len(data)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head, _, rest = (await self.raw("\r\n".join([*lines, "", ""]).encode() + data)).partition(b"\r\n\r\n")
        first, *others = head.decode().split("\r\n")
        found = {name.lower(): value for name, _, value in (line.partition(": ") for line in others)}
        return int(first.split()[1]), found, _unchunked(rest) if "transfer-encoding" in found else rest

    async def json(self, path: str, body: Any = None) -> Any:
        """The JSON of a 200."""
        status, _, text = await self.call("GET" if body is None else "POST", path, body)
        assert status == 200, text
        return json.loads(text)

    async def events(self, path: str, body: Any) -> list[Any]:
        """The events of a stream, which must end as streams end."""
        status, headers, text = await self.call("POST", path, body | {"stream": True})
        assert (status, headers["content-type"].partition(";")[0]) == (200, "text/event-stream"), text
        *pieces, done, rest = text.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(piece.removeprefix("data: ")) for piece in pieces]


def _unchunked(data: bytes) -> bytes:
    found = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        found, data = found + data[: int(size, 16)], data[int(size, 16) + 2 :]
    return found


def ask(
    use: Callable[[Client], Awaitable[Any]],
    policy: str = CONTINUOUS,
    more: str = "",
    *,
    speed: float = 100,
    limits: Limits | None = None,
    api_key: str = "",
) -> Any:
    """What `use` returns of a client of a new server."""
    return ask_of(use, setup_of(policy, more), speed=speed, limits=limits, api_key=api_key)


def ask_of(
    use: Callable[[Client], Awaitable[Any]],
    setup: Setup,
    *,
    speed: float = 100,
    limits: Limits | None = None,
    api_key: str = "",
) -> Any:
    """What `use` returns of a client of a new server of `setup`."""

    async def run() -> Any:
        server = Server(simulation_of(setup), speed, api_key, limits or Limits())
        port = await server.start("127.0.0.1", 0)
        try:
            return await asyncio.wait_for(use(Client(server, port)), 30)
        finally:
            server.close()

    return asyncio.run(run())


def test_a_completion_has_the_tokens_asked_for() -> None:
    """With ignore_eos there are max_tokens tokens, and usage counts them and those of the prompt."""
    found = ask(lambda c: c.json(COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 7, "ignore_eos": True}))
    assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (3, 7)
    assert found["choices"][0]["finish_reason"] == "length"
    assert len(found["choices"][0]["text"].split()) == 7
    assert (found["object"], found["model"]) == ("text_completion", "m")


def test_a_stream_brings_a_piece_a_token_and_usage_last() -> None:
    """Each token is an event, the last of which says why it ended; usage comes after, if asked for."""
    asked = {"prompt": "one two", "max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
    events = ask(lambda c: c.events(COMPLETIONS, asked | {"stream_options": {"include_usage": True}}))
    *pieces, usage = events
    assert [len(piece["choices"][0]["token_ids"]) for piece in pieces] == [1] * 5
    assert [piece["choices"][0]["finish_reason"] for piece in pieces] == [None] * 4 + ["length"]
    assert usage["choices"] == [] and usage["usage"]["total_tokens"] == 7
    assert len(pieces[0]["choices"][0]["prompt_token_ids"]) == 2
    texts = "".join(piece["choices"][0]["text"] for piece in pieces)
    assert texts.split() == [str(id_) for piece in pieces for id_ in piece["choices"][0]["token_ids"]]


def test_without_ignore_eos_answers_end_as_the_scenario_has_it() -> None:
    """Lengths are the scenario's, 2 to 12 tokens, and an answer that ended by itself says `stop`."""

    async def use(client: Client) -> list[Any]:
        return [await client.json(COMPLETIONS, {"prompt": [1], "max_tokens": 100}) for _ in range(10)]

    found = ask(use)
    lengths = [each["usage"]["completion_tokens"] for each in found]
    assert all(2 <= length <= 12 for length in lengths) and len(set(lengths)) > 1
    assert {each["choices"][0]["finish_reason"] for each in found} == {"stop"}


def test_chat_streams_deltas_with_a_role_first() -> None:
    """A chat answer is told in deltas, the first of which says who speaks."""
    asked = {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 2, "ignore_eos": True}
    first, last = ask(lambda c: c.events(CHAT, asked))
    assert first["choices"][0]["delta"]["role"] == "assistant" and "role" not in last["choices"][0]["delta"]
    assert first["object"] == "chat.completion.chunk"


def test_what_is_no_request_is_refused_with_a_reason() -> None:
    """Every refused request gets 400 or 404 and a message in the form of OpenAI's errors."""
    bad: list[tuple[Any, str]] = [
        (b"{", "JSON"),
        (b"\xff\xfe", "JSON"),
        (b"[" * 100_000, "JSON"),
        ([], "object"),
        ({"prompt": []}, "empty"),
        ({"prompt": [1, -1]}, "vocabulary"),
        ({"prompt": [1, 10**9]}, "vocabulary"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [1], "max_tokens": 0}, "at least 1"),
        ({"prompt": [1], "max_tokens": -5}, "at least 1"),
        ({"prompt": [1], "max_tokens": 1.5}, "whole"),
        ({"prompt": [1], "max_tokens": True}, "whole"),
        ({"prompt": [1], "max_tokens": 5000}, "maximum context length is 4096"),
        ({"prompt": [1] * 4096}, "maximum context length is 4096"),
        ({"prompt": [1], "n": 0}, "at least 1"),
        ({"prompt": [1], "n": 10**6}, "at most"),
        ({"prompt": [1], "stop": [""]}, "empty"),
        ({"prompt": [1], "stop": 3}, "stop"),
        ({"prompt": [1], "temperature": -1}, "temperature"),
        ({"prompt": [1], "temperature": "hot"}, "temperature"),
        ({"prompt": [1], "stream": "yes"}, "stream"),
        ({"prompt": [1], "stream_options": {}}, "stream=True"),
        ({"prompt": [1], "priority": 1 << 40}, "priority"),
        ({"prompt": [1], "model": "other"}, "does not exist"),
        ({"prompt": [1], "user": 7}, "user"),
        ({"prompt": [1], "logprobs": 0}, "no logits"),
        ({"prompt": [1], "tools": [{}]}, "tools is not served"),
        ({"prompt": [1], "best_of": 4, "n": 2}, "best_of"),
        ({"prompt": [1], "response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt": [1], "stop_token_ids": [3]}, "stop takes texts"),
    ]

    async def use(client: Client) -> list[tuple[int, Any]]:
        found = [await client.call("POST", COMPLETIONS, body) for body, _ in bad]
        assert not client.server.backend.num_sent
        return [(status, json.loads(text)) for status, _, text in found]

    for (body, word), (status, text) in zip(bad, ask(use), strict=True):
        assert status == (404 if word == "does not exist" else 400), (body, text)
        assert word in text["error"]["message"] and text["error"]["code"] == status


def test_who_hangs_up_frees_the_engine() -> None:
    """A client that leaves amid a stream ends its request, and its KV is free."""

    async def use(client: Client) -> tuple[int, bool]:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        body = json.dumps({"prompt": [1] * 50, "max_tokens": 4000, "ignore_eos": True, "stream": True}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        await reader.readuntil(b'"finish_reason"')
        writer.close()
        (core,) = client.server.backend.cores().values()
        kv = core.scheduler.kv
        while client.server.exchanges or kv.num_free < kv.num_blocks:
            await asyncio.sleep(0)
        return len(client.server.backend.answers), kv.num_free == kv.num_blocks

    assert ask(use, speed=10) == (0, True)


def test_usage_tells_what_the_prefix_cache_held() -> None:
    """A prompt sent again finds its full blocks, an answer sent back too; a reset empties the cache."""
    vllm = "vllm: {max_num_seqs: 8, max_num_batched_tokens: 512}"

    async def use(client: Client) -> list[int]:
        async def cached(prompt: list[int]) -> int:
            body = {"prompt": prompt, "max_tokens": 30, "ignore_eos": True, "return_token_ids": True}
            found = await client.json(COMPLETIONS, body)
            answers.append(found["choices"][0]["token_ids"])
            return found["usage"]["prompt_tokens_details"]["cached_tokens"]

        answers: list[list[int]] = []
        prompt = list(range(100))
        counts = [await cached(prompt), await cached(prompt)]
        counts.append(await cached([*prompt, *answers[1], 5]))
        status, _, _ = await client.call("POST", "/reset_prefix_cache")
        assert status == 200
        return [*counts, await cached(prompt)]

    assert ask(use, vllm) == [0, 96, 128, 0]


@pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, {"prompt": [1]}), (CHAT, {"messages": [{"role": "user"}]})])
def test_pieces_read_the_same_with_ids_and_without(path: str, prompt: dict[str, Any]) -> None:
    """What is around a token does not depend on what else was asked for, and each token is told once."""

    async def use(client: Client) -> list[list[Any]]:
        asked = prompt | {"max_tokens": 6, "ignore_eos": True, "n": 2}
        found = [await client.events(path, asked | {"return_token_ids": ids}) for ids in (True, False)]
        # The two answers may begin a step apart: those of one are compared with each other.
        return [sorted(events, key=lambda event: event["choices"][0]["index"]) for events in found]

    with_ids, without = ask(use)
    assert len(with_ids) == len(without) == 12
    for one, other in zip(with_ids, without, strict=True):
        (mine,), (its,) = one["choices"], other["choices"]
        assert mine.keys() - {"prompt_token_ids", "token_ids"} == its.keys()
        assert (mine["index"], mine["finish_reason"]) == (its["index"], its["finish_reason"])
        text = its["text"] if path == COMPLETIONS else its["delta"]["content"]
        assert text.split()[0].isdigit() and text.startswith(" ") and len(text.split()) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_within_min_tokens_does_not_end_the_answer(stream: bool) -> None:
    """One that stands there is left there; the answer ends at the first that ends behind them."""

    async def use(client: Client) -> tuple[str, str]:
        words = client.server.words
        texts = [words.decode([id_]) for id_ in client.server.words.generated(0, 0, 60)]
        digit = texts[0][1]
        last = next(place for place in range(5, 60) if digit in texts[place])
        asked = {"prompt": [1], "max_tokens": 60, "ignore_eos": True, "min_tokens": 5, "stop": [digit]}
        if stream:
            pieces = await client.events(COMPLETIONS, asked)
            found = "".join(piece["choices"][0]["text"] for piece in pieces)
        else:
            found = (await client.json(COMPLETIONS, asked))["choices"][0]["text"]
        return found, "".join(texts[:last]) + texts[last].partition(digit)[0]

    found, expects = ask(use)
    assert found == expects and len(found.split()) >= 5


def test_a_stop_string_ends_the_answer_before_it() -> None:
    """The text ends where the string begins, the reason is `stop` and the engine makes no more tokens."""

    async def use(client: Client) -> tuple[Any, Any]:
        whole = await client.json(COMPLETIONS, {"prompt": [1], "max_tokens": 40, "ignore_eos": True})
        # The next answer's third token, whose number is known: an answer's text depends on its number alone.
        third = client.server.words.decode(client.server.words.generated(1, 2, 3))
        asked = {"prompt": [1], "max_tokens": 40, "ignore_eos": True, "stop": [third.strip()]}
        return whole, await client.json(COMPLETIONS, asked)

    whole, cut = ask(use)
    assert whole["usage"]["completion_tokens"] == 40
    (choice,) = cut["choices"]
    assert (choice["finish_reason"], cut["usage"]["completion_tokens"]) == ("stop", 3)
    assert len(choice["text"].split()) == 2 and choice["stop_reason"] not in choice["text"]


@pytest.mark.parametrize("is_found", [True, False])
def test_no_piece_has_the_beginning_of_a_stop_string_that_ends_in_a_later_one(is_found: bool) -> None:
    """Letters with which one may have begun wait; they come once the next ones say that it has not."""

    async def use(client: Client) -> tuple[list[str], list[str]]:
        words = [client.server.words.decode([id_]) for id_ in client.server.words.generated(0, 0, 5)]
        stop = words[2][2:] + words[3][:2] + ("" if is_found else "x")
        asked = {"prompt": [1], "max_tokens": 5, "ignore_eos": True, "stop": [stop]}
        pieces = [event["choices"][0] for event in await client.events(COMPLETIONS, asked)]
        assert pieces[-1]["finish_reason"] == ("stop" if is_found else "length")
        return [piece["text"] for piece in pieces], words

    pieces, words = ask(use)
    expects = "".join(words[:2]) + words[2][:2] if is_found else "".join(words)
    assert "".join(pieces) == expects
    assert all(expects.startswith("".join(pieces[: count + 1])) for count in range(len(pieces)))


def test_what_is_switched_off_is_not_refused() -> None:
    """Clients send all fields with null, false or nothing in them; such a request is answered."""
    off = {"logprobs": False, "top_logprobs": 0, "tools": [], "best_of": 1, "response_format": {"type": "text"}}
    found = ask(
        lambda c: c.json(COMPLETIONS, off | {"prompt": [1], "max_tokens": 2, "ignore_eos": True, "suffix": None})
    )
    assert found["usage"]["completion_tokens"] == 2


def test_usage_comes_with_every_piece_if_asked_for() -> None:
    """With `continuous_usage_stats` each piece counts the tokens so far; without `include_usage` none does."""
    asked = {"prompt": [1, 2], "max_tokens": 3, "ignore_eos": True}
    both = {"include_usage": True, "continuous_usage_stats": True}
    *pieces, last = ask(lambda c: c.events(COMPLETIONS, asked | {"stream_options": both}))
    assert [piece["usage"]["completion_tokens"] for piece in pieces] == [1, 2, 3]
    assert last["usage"] == pieces[-1]["usage"]
    alone = ask(lambda c: c.events(COMPLETIONS, asked | {"stream_options": {"continuous_usage_stats": True}}))
    assert len(alone) == 3 and not any("usage" in piece for piece in alone)


@pytest.mark.parametrize("more", ["", "replicas: {count: 2, router: round_robin}"])
def test_results_so_far_hold_the_requests_that_have_ended(more: str) -> None:
    """/batchsim/results has a row for each request that has ended, in the columns of the results folder's table."""

    async def use(client: Client) -> tuple[int, list[str]]:
        before, _, _ = await client.call("GET", "/batchsim/results")
        for prompt in (3, 5):
            await client.json(COMPLETIONS, {"prompt": [1] * prompt, "max_tokens": 4, "ignore_eos": True})
        status, headers, text = await client.call("GET", "/batchsim/results")
        assert (status, headers["content-type"].partition(";")[0]) == (200, "text/csv")
        return before, text.decode().splitlines()

    before, (head, *rows) = ask(use, more=more)
    assert before == 404 and head.startswith("sent_ns,ttft_ns,e2e_ns,")
    assert [row.split(",")[3:] for row in rows] == [["3", "4", "4", "ok"], ["5", "4", "4", "ok"]]


def test_a_request_is_sent_when_it_came() -> None:
    """The time to read a request is none of its latency: it is sent when its last bytes came, however long ago."""

    async def use(client: Client) -> tuple[int, int]:
        came_ns, then_ns = time.monotonic_ns(), client.server.now_ns
        body = b'{"prompt": [1], "max_tokens": 2}'
        request = HttpRequest("POST", COMPLETIONS, "", {}, body, came_ns)
        ours, _theirs = socket.socketpair()
        _, reply = await asyncio.get_running_loop().create_connection(lambda: Connection(client.server), sock=ours)
        client.server.handle(request, reply)
        (answer,) = client.server.backend.answers.values()
        return answer.arrival.request.arrival_ns, then_ns

    sent_ns, then_ns = ask(use)
    assert 0 < sent_ns <= then_ns


def test_results_are_made_for_all_who_wait_while_the_engines_go_on() -> None:
    """Asked for ten times at once, amid a long answer, each table has the rows of what had ended; nothing breaks."""

    async def use(client: Client) -> tuple[list[int], int]:
        body, found = {"prompt": [1], "max_tokens": 2, "ignore_eos": True}, list[int]()
        long = asyncio.ensure_future(client.json(COMPLETIONS, body | {"max_tokens": 3000}))
        for _ in range(3):
            await client.json(COMPLETIONS, body)
            tables = await asyncio.gather(*(client.call("GET", "/batchsim/results") for _ in range(10)))
            assert {status for status, _, _ in tables} == {200}
            found.append(min(text.count(b",ok\n") for _, _, text in tables))
        return found, (await long)["usage"]["completion_tokens"]

    assert ask(use, speed=20) == ([1, 2, 3], 3000)


def test_results_before_any_request_has_ended() -> None:
    """While the only request is open there is no row, which is a 404 that says so."""

    async def use(client: Client) -> tuple[int, bytes]:
        body = {"prompt": [1], "max_tokens": 3000, "ignore_eos": True}
        answer = asyncio.ensure_future(client.json(COMPLETIONS, body))
        while not client.server.backend.num_sent:
            await asyncio.sleep(0)
        status, _, text = await client.call("GET", "/batchsim/results")
        answer.cancel()
        return status, text

    status, text = ask(use, speed=1)
    assert status == 404 and b"no request has ended yet" in text


def test_the_root_lists_every_address() -> None:
    """Each line is a method and a path that the server takes; completions and metrics are among them."""

    async def use(client: Client) -> tuple[int, bytes, set[str]]:
        status, _, text = await client.call("GET", "/")
        return status, text, {f"{method} {path}" for method, path in client.server._routes}

    status, text, routes = ask(use)
    assert status == 200 and set(text.decode().splitlines()) == routes
    assert {"POST /v1/completions", "GET /metrics"} <= routes
