"""What `calibrate --url` says of servers that do not do what is asked of them, and what it keeps."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="pip install 'batchsim[server]'")

from batchsim.base.errors import MeasuredError, ScenarioError
from batchsim.check.measured.read import read_measured
from batchsim.fit.server.address import Address
from batchsim.fit.server.client import Client, Dialect, Loaded
from batchsim.fit.server.design import Design, spread
from batchsim.fit.server.experiment import Runner, moved_by
from batchsim.fit.server.loads import Ask, Load
from batchsim.fit.server.offers import GAUGES, Metrics, Offer, read_metrics
from batchsim.fit.server.prompts import Prompts
from batchsim.fit.server.refusals import Patience, RequestError
from tests.support.hostile_server import good, server, stream, tokens, usage, whole

ASK = Ask(None, 8, 4)
Behave = Callable[[dict[str, Any]], bytes]


def asked(behave: Behave, ids: bool = True) -> str:
    """What a failed request says."""

    async def run() -> str:
        dialect = Dialect("m", Prompts(1, 9, ids=ids))
        async with server(behave) as url, Client(url, 2) as client:
            with pytest.raises(RequestError) as caught:
                await client.answer(ASK, dialect, 0, 0, time.monotonic())
            return caught.value.what

    return asyncio.run(run())


FOUR = tokens(4)
BAD: dict[str, tuple[Behave, str]] = {
    "429": (lambda _: whole(b'{"error": {"message": "slow down"}}', "429 Too Many Requests"), "429 .*: slow down"),
    "500": (lambda _: whole(b"oh no", "500 Internal Server Error"), "500 .*: oh no"),
    "nothing said": (lambda _: whole(b"", "503 Service Unavailable"), "503 .*: nothing"),
    "redirect": (lambda _: whole(b"", "302 Found", more="Location: http://example.org/\r\n"), "answers 302 Found"),
    "a page": (lambda _: whole(b"<html>", kind="text/html"), "text/html, not with a stream"),
    "whole JSON": (lambda _: whole(b'{"choices": []}'), "application/json, not with a stream"),
    "hangs up": (lambda _: b"", "hung up without an answer"),
    "no HTTP": (lambda _: b"SSH-2.0-OpenSSH\r\n\r\n", "does not speak HTTP"),
    "cut": (lambda _: stream(*FOUR[:2], end=False), r"broke off before \[DONE\]"),
    "cut amid": (lambda _: whole(b"data: {", kind="text/event-stream")[:-3], "broke off in the middle"),
    "bad JSON": (lambda _: stream("{nope"), "is no JSON: '{nope'"),
    "a list": (lambda _: stream([1]), "is no object"),
    "choices": (lambda _: stream({"choices": 3}), "no list of objects: 3"),
    "error amid": (lambda _: stream(*FOUR[:1], {"error": {"message": "out of memory"}}), "amid its stream: out of mem"),
    "no usage": (lambda _: stream(*FOUR), "does not count tokens"),
    "odd usage": (lambda _: stream(*FOUR, {"usage": {"prompt_tokens": "8", "completion_tokens": 4}}), "counts no tok"),
    "stops early": (lambda _: stream(*FOUR[:3], usage(8, 3)), "3 of the 4 tokens asked for: ignore_eos is not kept"),
    "never stops": (lambda _: stream(*tokens(50), usage(8, 50)), "more than the 4 tokens"),
    "ids past the end": (lambda _: stream(*tokens(1, token_ids=[1] * 9), usage(8, 4)), "more than the 4 tokens"),
    "counts too many": (lambda _: stream(*FOUR, usage(8, 7)), "usage says 7 tokens, 4 were asked for"),
    "counts other ids": (lambda _: stream(*tokens(3, token_ids=[5]), usage(8, 4)), "3 ids came"),
    "counts the prompt": (lambda _: stream(*FOUR, usage(80, 4)), "a prompt of 8 ids has 80 tokens"),
    "no text": (lambda _: stream(usage(8, 4)), "no token with a text"),
    "a long line": (lambda _: stream("x" * (3 << 20)), "does not speak HTTP"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_server_that_misbehaves_is_told_in_words(case: str) -> None:
    behave, message = BAD[case]
    found = asked(behave)
    assert re.search(message, found), found
    assert "\n" not in found and len(found) < 300


@pytest.mark.parametrize(
    ("trickle", "patience", "message"),
    [
        (b"", Patience(silent_s=0.05), "it sent nothing for 0.05 s"),
        (b": still there\n\n", Patience(answer_s=0.05), "its answer did not end within 0.05 s"),
    ],
)
def test_a_stream_that_goes_on_for_ever_is_left(trickle: bytes, patience: Patience, message: str) -> None:
    """After two of four tokens there is silence, or there are comments that keep the connection busy."""

    async def run() -> None:
        half = stream(*FOUR[:2], end=False)
        async with server(lambda _: half, trickle=trickle) as url, Client(url, 2, patience=patience) as client:
            with pytest.raises(RequestError, match=f"^{message}$"):
                await client.answer(ASK, Dialect("m", Prompts(1, 9)), 0, 0, time.monotonic())

    asyncio.run(run())


def test_https_asked_of_a_server_that_speaks_http_is_told() -> None:
    async def run() -> None:
        async with server(good) as url, Client(url.replace("http:", "https:"), 1) as client:
            with pytest.raises(RequestError, match=r"models: cannot be reached by TLS .*speak http://"):
                await client.get("/v1/models")

    asyncio.run(run())


def test_a_silent_port_and_an_unknown_host() -> None:
    async def run() -> None:
        async with Client("http://127.0.0.1:9", 1) as client:
            with pytest.raises(RequestError, match="cannot be reached"):
                await client.get("/v1/models")

    asyncio.run(run())
    with pytest.raises(MeasuredError, match=r"nowhere\.invalid is not known"):
        Address.of("http://nowhere.invalid")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:8000", "no http or https URL"),
        ("ftp://127.0.0.1", "no http or https URL"),
        ("http://127.0.0.1:99999", "its port is none"),
        ("http://u:p@127.0.0.1", "a user, a query"),
    ],
)
def test_addresses_that_are_none(url: str, message: str) -> None:
    with pytest.raises(MeasuredError, match=message):
        Address.of(url)


def test_public_addresses_are_told_from_private_ones() -> None:
    """And the path that the OpenAI package is given is taken too."""
    assert Address.of("http://127.0.0.1:8000/v1/") == Address("http://127.0.0.1:8000", True)
    assert Address.of("http://10.1.2.3").private and not Address.of("http://1.1.1.1").private


def test_no_more_are_in_flight_than_may_be() -> None:
    """An open load that could have 40 in flight has 3; a request that waited for a place was not due before."""
    running, most = 0, 0

    async def run() -> Loaded:
        nonlocal most

        class Counting(Client):
            async def answer(self, *args: Any, **kwargs: Any) -> Any:
                nonlocal running, most
                running += 1
                most = max(most, running)
                try:
                    return await super().answer(*args, **kwargs)
                finally:
                    running -= 1

        load = Load("l", (8, 8), (4, 4), 1.0, rate_rps=4000.0, most=40)
        loaded = Loaded(load)
        async with server(good) as url, Counting(url, 3) as client:
            await client.send(load, Dialect("m", Prompts(1, 9)), loaded)
        return loaded

    loaded = asyncio.run(run())
    assert (len(loaded.answers), most, loaded.failure) == (40, 3, None)
    assert sum(one.due_s is not None and one.due_s > one.ask.at_s for one in loaded.answers) == loaded.held > 30


def test_who_fails_ends_the_load_and_what_came_is_kept() -> None:
    async def run() -> Loaded:
        count = 0

        def third_fails(body: dict[str, Any]) -> bytes:
            nonlocal count
            count += 1
            return good(body) if count < 3 else whole(b"", "500 Internal Server Error")

        loaded = Loaded(Load("l", (8, 8), (4, 4), 60.0))
        async with server(third_fails) as url, Client(url, 1) as client:
            await client.send(loaded.load, Dialect("m", Prompts(1, 9)), loaded)
        return loaded

    loaded = asyncio.run(run())
    assert len(loaded.answers) == 2 and loaded.failure is not None and loaded.failure.status == 500


def test_the_same_command_goes_on(tmp_path: Path) -> None:
    """An experiment whose server fails amid keeps its files, and is taken up where it stopped."""
    asked: list[int] = []

    async def run(behave: Behave, port: int) -> tuple[Any, int]:
        async with server(behave, port=port) as url, Client(url, 2) as client:
            port = int(url.rpartition(":")[2])
            try:
                return await Runner(client, tmp_path, 2.0, 10**6, 64, lambda *_: None).run(None), port
            except MeasuredError as error:
                return error, port

    def fails_later(body: dict[str, Any]) -> bytes:
        asked.append(1)
        return good(body) if len(asked) < 60 else whole(b"full", "503 Service Unavailable")

    failed, port = asyncio.run(run(fails_later, 0))
    assert re.search(r"answers came, then: it answers 503.*full\. It is overloaded", str(failed)), failed
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*.csv") if path.parent.name != "failed"}
    assert kept
    found, _ = asyncio.run(run(good, port))
    assert {path.stem for path in found.held} | set(found.void) >= {"short-50", "long-50", "between-50"}
    assert all(path.stat().st_mtime_ns == ns for path, ns in kept.items())
    for path in (*found.given, *found.held):
        (one,) = read_measured(path)
        assert one.requests is not None and one.requests.ok.all()
    journal = json.loads((tmp_path / "experiment.json").read_text())
    assert journal["model"] == "m" and journal["version"] == "1.2"
    loads = {name for name, row in journal["loads"].items() if row["kind"] != "sentinel"}
    assert set(journal["loads"]) - loads == {f"sentinel-{name}" for name in loads | {"end"}}


def test_a_machine_has_moved_by_what_the_later_half_is_slower() -> None:
    """Medians of the halves in order of time, so that a disturbance of a few answers moves nothing."""
    assert moved_by([1.0, 9.0, 1.0, 1.1, 1.1, 7.0]) == pytest.approx(0.1)
    assert moved_by([2.0, 2.0, 2.0, 1.0, 1.0]) == pytest.approx(-0.5)


def test_another_server_is_not_measured_into_the_same_folder(tmp_path: Path) -> None:
    async def run(seconds: float) -> None:
        async with server(lambda _: whole(b"", "500 Internal Server Error"), port=0) as url, Client(url, 2) as client:
            runner = Runner(client, tmp_path, seconds, 10, 64, lambda *_: None)
            runner.client.url = url
            await runner.run(None)

    (tmp_path / "experiment.json").write_text(
        '{"url": "http://127.0.0.1:1", "model": "m", "version": "1.2", '
        '"max_concurrency": 2, "seconds": 2.0, "sent": 0, "loads": {}}'
    )
    with pytest.raises(MeasuredError, match=r"experiment with url .*:1', now it is"):
        asyncio.run(run(2.0))
    (tmp_path / "experiment.json").write_text("[]")
    with pytest.raises(MeasuredError, match=r"is no experiment.*Remove its folder"):
        asyncio.run(run(2.0))


@pytest.mark.parametrize(
    ("models", "model", "message"),
    [
        (whole(b"<html>"), None, "no list of models"),
        (whole(b'{"data": []}'), None, "serves no model"),
        (whole(b"", "401 Unauthorized"), None, "answers 401. Give the key with --api-key"),
        (None, "other", "serves m, not 'other'"),
        (whole(b'{"data": [{"id": "a"}, {"id": "b"}]}'), None, "serves a, b. Say which one"),
        (whole(b'{"data": [{"id": "a"}]}'), None, "does not say how long requests may be"),
    ],
)
def test_what_a_server_does_not_offer(models: bytes | None, model: str | None, message: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with server(good, models) as url, Client(url, 2) as client:
            await Runner(client, tmp_path, 2.0, 10, None, lambda *_: None).run(model)

    with pytest.raises(MeasuredError, match=message):
        asyncio.run(run())


def test_ids_that_a_server_refuses_in_its_stream_are_out_of_its_vocabulary(tmp_path: Path) -> None:
    """A status of 200 and then an error of code 400: prompts are drawn from a smaller vocabulary; code 500 ends it."""

    def vocabulary(code: int) -> Behave:
        refusal = stream({"error": {"message": "Token id 29796 is out of vocabulary", "code": code}})
        return lambda body: good(body) if max(body["prompt"]) < 2048 else refusal

    async def run(code: int) -> None:
        async with server(vocabulary(code)) as url, Client(url, 2) as client:
            await Runner(client, tmp_path / str(code), 2.0, 20, 64, lambda *_: None).run(None)

    with pytest.raises(MeasuredError, match=r"20 requests were sent"):
        asyncio.run(run(400))
    with pytest.raises(MeasuredError, match=r"a first request: .* out of vocabulary"):
        asyncio.run(run(500))


def test_the_budget_of_requests_ends_an_experiment(tmp_path: Path) -> None:
    async def run() -> None:
        async with server(good) as url, Client(url, 2) as client:
            await Runner(client, tmp_path, 2.0, 20, 64, lambda *_: None).run(None)

    with pytest.raises(MeasuredError, match=r"20 requests were sent, and --max-requests is 20"):
        asyncio.run(run())
    journal = json.loads((tmp_path / "experiment.json").read_text())
    whole = sum(row["requests"] for row in journal["loads"].values())
    assert whole < journal["sent"] == 20  # the load that was cut is none


def test_the_same_prompts_are_drawn_again_and_no_two_are_alike() -> None:
    """But for those of a group, which begin alike: what is shared is told in hash_ids."""
    prompts = Prompts(1, 10**6)
    first, again, other = (prompts.write(Ask(None, 40, 1), number, 7) for number in (0, 0, 1))
    assert first == again and first != other and len(first) == 40
    one, two = (prompts.write(Ask(None, 48, 1, 0), number, 7) for number in (0, 1))
    assert one[:32] == two[:32] and one[32:] != two[32:]
    load = Load("l", (48, 48), (4, 4), 0.0, shared=2)
    requests = load.requests()
    groups = [ask.group for _ in range(4) if (ask := requests.following()) is not None]
    assert groups == [0, 1, 0, 1]


def test_no_load_finds_the_prompts_of_another_in_a_cache() -> None:
    """Not even its own, sent again: lengths are the same, texts are not."""
    sent: list[list[int]] = []

    def kept(body: dict[str, Any]) -> bytes:
        sent.append(body["prompt"])
        return good(body)

    async def run() -> None:
        load = Load("l", (8, 30), (2, 2), 60.0, most=5)
        async with server(kept) as url, Client(url, 1) as client:
            for _ in range(2):
                await client.send(load, Dialect("m", Prompts(1, 10**6)), Loaded(load))

    asyncio.run(run())
    assert [len(prompt) for prompt in sent[:5]] == [len(prompt) for prompt in sent[5:]]
    assert not {tuple(prompt[:4]) for prompt in sent[:5]} & {tuple(prompt[:4]) for prompt in sent[5:]}


def test_a_long_text_is_read_whole() -> None:
    """Of as many pieces as it comes in."""
    long = "# comment\n" * 200_000 + "vllm:num_requests_running 3\n"

    async def run() -> Metrics | None:
        async with server(good, metrics=long) as url, Client(url, 1) as client:
            return await read_metrics(client)

    found = asyncio.run(run())
    assert found is not None and found.known(GAUGES) == {"running": 3.0}


def test_who_is_stopped_waits_for_no_answer() -> None:
    """Ctrl-C amid an open load: what is in flight is given up at once."""

    class Silent(Client):
        async def answer(self, *args: Any, **kwargs: Any) -> Any:
            await asyncio.Event().wait()

    async def run() -> bool:
        load = Load("l", (8, 8), (4, 4), 60.0, rate_rps=100.0)
        async with asyncio.timeout(10) as limit, Silent("http://127.0.0.1:1", 50) as client:
            sending = asyncio.create_task(client.send(load, Dialect("m", Prompts(1, 9)), Loaded(load)))
            await asyncio.wait([sending], timeout=0.2)
            sending.cancel()
            await asyncio.wait([sending])
        return limit.expired()

    assert not asyncio.run(run())


def test_what_contradicts_the_server_is_told_before_it_is_asked_for_anything(tmp_path: Path) -> None:
    asked: list[int] = []

    def refuse(offer: Offer) -> None:
        raise ScenarioError(f"KV blocks 3, but the server says {offer.metrics.cache['num_gpu_blocks']}")  # type: ignore[union-attr]

    async def run() -> None:
        text = 'vllm:cache_config_info{num_gpu_blocks="2588"} 1.0'
        async with server(lambda body: asked.append(1) or good(body), metrics=text) as url, Client(url, 2) as client:
            await Runner(client, tmp_path, 2.0, 10, 64, lambda *_: None).run(None, refuse)

    with pytest.raises(ScenarioError, match="the server says 2588"):
        asyncio.run(run())
    assert not asked and not (tmp_path / "experiment.json").exists()


def test_metrics_of_three_engines_by_one_name() -> None:
    text = """# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_running{engine="1"} 2.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="2588",enable_prefix_caching="True"} 1.0
odd line
vllm:num_preemptions_total NaNa
"""
    found = Metrics.parse(text)
    assert found.known(GAUGES) == {"running": 5.0} and found.cache["num_gpu_blocks"] == "2588"
    assert Metrics.parse("llamacpp:requests_deferred 4").known(GAUGES) == {"waiting": 4.0}


def test_loads_of_each_kind_come_all_through_the_experiment() -> None:
    """Of closed and open loads, and of the open ones of each mix, the mean place is within an eighth of the middle."""
    design = Design(300.0, 16, 1024, 0.002)
    numbered = [*(("given", load) for load in design.closed()), *design.rates({"short": 10.0, "long": 2.0})]
    order = [load.name for _, load in spread(numbered)]
    assert sorted(order) == sorted(load.name for _, load in numbered)
    opened = [load.name for _, load in numbered if load.rate_rps is not None]
    kinds = [
        opened,
        [n for n in order if n not in opened],
        *([n for n in opened if mix in n] for mix in ("short", "long")),
    ]
    for names in kinds:
        middle = sum(map(order.index, names)) / len(names) / (len(order) - 1)
        assert abs(middle - 0.5) <= 0.125, (names, middle)


def test_a_design_has_loads_below_and_above_saturation_and_three_held_out() -> None:
    design = Design(60.0, 16, 2048, 0.01)
    loads = list(design.rates({"short": 10.0, "long": 2.0}))
    assert [
        round(load.rate_rps / (10 if "short" in load.name else 2), 2)
        for kind, load in loads
        if kind == "given"
        if load.rate_rps is not None
    ] == [0.3, 0.75, 1.3] * 2
    assert [load.name for kind, load in loads if kind == "held"] == ["short-50", "long-50", "between-50"]
    longest = max(load.prompt[1] + load.output[1] for load in (*design.singles(), *design.closed(), *design.full()))
    assert longest <= 2048
    assert [load.users for load in design.closed() if load.name.startswith("users")] == [2, 3, 4, 6, 8, 16]
    ladders = {users: [load.users for load in Design(60.0, users, 64, 0.01).closed()][:-3] for users in (1, 2, 3, 40)}
    assert ladders == {1: [], 2: [2], 3: [2, 3], 40: [2, 3, 4, 6, 8, 16, 32, 40]}
    of_slots = {most: [load.users for load in Design(60.0, most, 2048, 0.01, 8).closed()] for most in (4, 12, 16)}
    assert of_slots == {4: [4, 4, 1], 12: [8, 12, 8, 8, 1], 16: [8, 16, 8, 8, 1]}
