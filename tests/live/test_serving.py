"""The endpoint answered by a model: its tokens are the model's, and what is given up or ends leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("h11", reason="batchsim serve needs h11")
torch = pytest.importorskip("torch", reason="the executor runs on torch: pip install 'batchsim[live]'")

from batchsim.base.errors import ExecutorError
from batchsim.calibrate.engine.prompts import ModelTexts, TextPrompts
from batchsim.calibrate.engine.runner import ModelRunner, build_runner
from batchsim.calibrate.engine.serving import ServingEngine
from batchsim.cli import app
from batchsim.cli.serve_live import live_engine, model_folder, text_line
from batchsim.kernel.record import CANCELLED, FINISHED, UNFINISHED
from batchsim.kernel.types import Request
from batchsim.scenario import load_scenario
from batchsim.scenario.setup import Setup
from batchsim.serve.keep_served import keep_served
from batchsim.serve.live_engine import LiveEngine, SentPrompts
from batchsim.serve.metrics import Metrics
from batchsim.serve.served_workload import unplayed
from batchsim.serve.server import Server
from tests.live.checkpoints import checkpoint, expected
from tests.unit.serve.test_server import CHAT, COMPLETIONS, Client

SMALL = "max_num_seqs: 4, max_num_batched_tokens: 16"
POLICIES = {
    "vllm": f"vllm: {{{SMALL}, enable_prefix_caching: true, async_scheduling: true}}",
    "continuous": f"continuous: {{{SMALL}}}",
    "preemptive": f"preemptive: {{{SMALL}, by: recompute}}",
    "static": "static: {batch_size: 2, max_wait: 20ms}",
}
SCENARIO = """\
model: {model}
cost: {{kind: constant, step: 2ms}}
kv: {{tokens: 192}}
max_model_len: 96
workload:
  arrivals: {{kind: poisson, mean_rate: 20/s}}
  lengths:
    prompt: {{kind: fixed, tokens: 10}}
    output: {{kind: fixed, tokens: 4}}
  output_cap: 16
  requests: 40
policies:
  {policy}
slo: ttft<1s @ 99%
seeds: 1
"""


@dataclass
class Model:
    """A checkpoint in a folder, and the model of transformers that wrote it."""

    folder: Path
    model: Any

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        return expected(self.model, prompt, num_tokens)

    def setup(self, policy: str = "continuous") -> Setup:
        path = self.folder / "mine.yaml"
        path.write_text(SCENARIO.format(model=self.folder, policy=POLICIES[policy]))
        return Setup.of(load_scenario(str(path)))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("llama")
    return Model(folder, checkpoint("llama", folder))


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name == "engine"] == []


def built(llama: Model, policy: str = "continuous") -> LiveEngine:
    setup = llama.setup(policy)
    metrics = Metrics("vllm", "m", setup.max_model_len)
    return live_engine(setup, setup.scenario.specs[0], metrics, device="cpu", weights=None, seed=0)[0]


def ask(engine: LiveEngine, use: Callable[[Client], Awaitable[Any]]) -> Any:
    """What `use` returns of a client of a server over `engine`, which is closed then."""

    async def run() -> Any:
        server = Server(engine)
        port = await server.start("127.0.0.1", 0)
        try:
            return await asyncio.wait_for(use(Client(server, port)), 60)
        finally:
            server.close()
            engine.close(server.now_ns)

    return asyncio.run(run())


def _prompt(number: int) -> list[int]:
    return [(7 * number + 3 * i * i) % 499 for i in range(5 + 3 * number)]


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_those_of_the_model(llama: Model, policy: str) -> None:
    """Of several requests at a time, whole and streamed, each answer has the tokens that transformers generates; a
    prompt sent again, too, whose beginning a prefix cache holds."""

    async def use(client: Client) -> tuple[list[list[int]], list[int]]:
        body = {"ignore_eos": True, "max_tokens": 12, "return_token_ids": True}
        answers = await asyncio.gather(
            *(client.json(COMPLETIONS, body | {"prompt": _prompt(n)}) for n in range(6)),
            client.json(COMPLETIONS, body | {"prompt": [_prompt(6), _prompt(7)]}),
        )
        found = [choice["token_ids"] for answer in answers for choice in answer["choices"]]
        pieces = await client.events(COMPLETIONS, body | {"prompt": _prompt(7)})
        return found, [id_ for piece in pieces for id_ in piece["choices"][0]["token_ids"]]

    found, streamed = ask(built(llama, policy), use)
    assert found == [llama.greedy(_prompt(n), 12) for n in range(8)]
    assert streamed == found[-1]


def test_text_is_words_that_stand_for_tokens(llama: Model) -> None:
    """Without a tokenizer the text of an answer is its tokens as words, and a text of such words is these tokens."""

    async def use(client: Client) -> tuple[Any, Any]:
        body = {"ignore_eos": True, "max_tokens": 3}
        first = await client.json(COMPLETIONS, body | {"prompt": "4 5 6"})
        return first, await client.json(CHAT, body | {"messages": [{"role": "user", "content": "7 8"}]})

    first, chat = ask(built(llama), use)
    assert first["choices"][0]["text"] == "".join(f" {id_}" for id_ in llama.greedy([4, 5, 6], 3))
    assert chat["usage"]["prompt_tokens"] == 4 and len(chat["choices"][0]["message"]["content"].split()) == 3


def _bytes_tokenizer(folder: Path) -> Any:
    """Writes a tokenizer whose tokens are bytes, so that a letter may take several."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    return made


def test_text_is_the_tokenizers_where_there_is_one(tmp_path: Path) -> None:
    """With a tokenizer.json beside the weights a text is its tokens, and an answer's text is that of its tokens, the
    same streamed, where half a letter waits for the rest; a stop string ends it."""
    model = Model(tmp_path, checkpoint("llama", tmp_path, vocab_size=256))
    tokenizer = _bytes_tokenizer(tmp_path)
    for number in range(20):  # to an answer with whole letters and halves
        prompt = f"caf\u00e9 \u4e2d {number}"
        expects = tokenizer.decode(model.greedy(tokenizer.encode(prompt).ids, 60))
        letter = next((letter for letter in expects[5:] if letter not in expects[:5]), "\ufffd")
        if letter != "\ufffd" and "\ufffd" in expects:
            break

    async def use(client: Client) -> Any:
        body = {"prompt": prompt, "max_tokens": 60, "ignore_eos": True}
        whole = await client.json(COMPLETIONS, body)
        pieces = await client.events(COMPLETIONS, body)
        cut = await client.json(COMPLETIONS, body | {"stop": letter})
        back = await client.json("/tokenize", {"prompt": prompt})
        return (
            whole,
            "".join(piece["choices"][0]["text"] for piece in pieces),
            cut["choices"][0],
            letter,
            back["tokens"],
        )

    whole, streamed, cut, letter, tokens = ask(built(model), use)
    assert whole["usage"]["prompt_tokens"] == len(prompt.encode()) and tokens == tokenizer.encode(prompt).ids
    assert whole["choices"][0]["text"] == streamed == expects
    assert cut["text"] == expects.partition(letter)[0] and cut["stop_reason"] == letter


def test_the_start_says_where_words_stand_for_tokens(llama: Model, tmp_path: Path) -> None:
    """Without a tokenizer.json beside the weights that are read, which may be others than the model's own."""
    setup = llama.setup()
    metrics = Metrics("vllm", "m", setup.max_model_len)
    told: list[str] = []
    for weights in (None, tmp_path, tmp_path):
        engine, _ = live_engine(setup, setup.scenario.specs[0], metrics, device="cpu", weights=weights, seed=0)
        told.append(text_line(engine, model_folder(setup, weights)))
        if weights is None:
            checkpoint("llama", tmp_path)
        else:
            _bytes_tokenizer(tmp_path)
    words = "; text: words stand for tokens (no tokenizer.json in "
    assert told == [f"{words}{llama.folder})", f"{words}{tmp_path})", ""]


def test_a_port_in_use_is_told_before_the_model_is_built(llama: Model, tmp_path: Path) -> None:
    """Weights that are not there would be told, too, but later."""
    llama.setup()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        options = ["--engine", "live", "--port", str(port), "--weights", str(tmp_path / "none"), "--out", str(tmp_path)]
        done = CliRunner().invoke(app, ["serve", str(llama.folder / "mine.yaml"), *options])
    assert (done.exit_code, done.stderr) == (2, f"--port {port}: Address already in use at 127.0.0.1. Give another.\n")


def test_a_tokenizer_takes_texts_whole(tmp_path: Path) -> None:
    """A length to which its file would have texts cut or filled up is no matter."""
    tokenizer = _bytes_tokenizer(tmp_path)
    texts, whole = ["a b", "a longer text"], [[*tokenizer.encode(text).ids] for text in ("a b", "a longer text")]
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=20)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    made = ModelTexts(tmp_path, 256)
    assert [made.encode(text) for text in texts] == whole
    (tmp_path / "texts").write_text("\n".join(texts))
    prompts = TextPrompts(tmp_path / "texts", tmp_path)
    lengths = [len(ids) for ids in whole]
    asked = [Request(id=i, arrival_ns=0, prompt_tokens=n, max_output_tokens=1) for i, n in enumerate(lengths)]
    assert [prompts.ids(request, {}).tolist() for request in asked] == whole


def test_what_a_tokenizer_cannot_take(tmp_path: Path) -> None:
    """Half a letter is a 400, and so are ids outside the vocabulary, which have no text."""
    model = Model(tmp_path, checkpoint("llama", tmp_path, vocab_size=256))
    _bytes_tokenizer(tmp_path)

    async def use(client: Client) -> list[tuple[int, bytes]]:
        calls = [await client.call("POST", path, {"prompt": "a\udc01"}) for path in ("/tokenize", COMPLETIONS)]
        calls += [await client.call("POST", "/detokenize", {"tokens": [3, id_]}) for id_ in (-1, 256, 1 << 40, 1 << 70)]
        return [(status, text) for status, _, text in calls]

    refused = ask(built(model), use)
    assert [status for status, _ in refused] == [400] * 6
    assert all(b"is half of a letter" in text for _, text in refused[:2])
    assert b"Token id -1 is out of vocabulary" in refused[2][1] and b"Token id 256 " in refused[3][1]


def test_a_text_that_is_surely_too_long_is_not_tokenised_whole(tmp_path: Path) -> None:
    """Of it at least one token more than asked is told; one that only might be too long is read to its end."""
    tokenizer = _bytes_tokenizer(tmp_path)
    made = ModelTexts(tmp_path, 256)
    long = made.encode("ab" * 50_000, 10)
    assert 10 < len(long) < 1000 and long == tokenizer.encode("ab" * 50_000).ids[: len(long)]
    text = "a b c" * 3
    assert made.encode(text, len(text)) == tokenizer.encode(text).ids


def test_a_cancelled_stream_frees_its_blocks(llama: Model) -> None:
    """Its client gone, a request leaves the engine with the step that runs; its KV is free, its row says who ended it,
    and neither prompt nor tokens are kept."""
    engine = built(llama)

    async def use(client: Client) -> tuple[int, list[int]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        body = json.dumps({"prompt": [1] * 20, "max_tokens": 70, "ignore_eos": True, "stream": True}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        await reader.readuntil(b'"finish_reason"')
        writer.close()
        (core,) = client.server.backend.cores().values()
        while client.server.backend.answers:
            await asyncio.sleep(0.001)
        kv = core.scheduler.kv
        outcomes = engine.between_steps(lambda: engine.records().requests["outcome"].tolist())
        return kv.num_blocks - kv.num_free, outcomes

    assert ask(engine, use) == (0, [CANCELLED])
    assert engine.real.outputs == {} and engine.records().requests["output_tokens"][0] < 70


async def _stream(client: Client, num_tokens: int) -> asyncio.StreamWriter:
    """The connection of a request whose first token has come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": num_tokens, "ignore_eos": True, "stream": True}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )
    await reader.readuntil(b'"finish_reason"')
    return writer


def test_an_engine_outlives_a_look_at_its_records_that_fails(llama: Model) -> None:
    """Results asked for while the only request is open are a 404; what raises with the records in hand is told to who
    asked, and holds them no longer than that: the engine goes on to the end of its answers."""
    engine = built(llama)

    def fail() -> None:
        records = engine.records()
        raise ValueError(f"{len(records.requests)} rows")

    async def use(client: Client) -> tuple[int, int, Exception | None]:
        writer = await _stream(client, 90)
        status, _, _ = await client.call("GET", "/batchsim/results")
        gc.disable()  # what only a collection frees is not freed in time
        try:
            with pytest.raises(ValueError, match="0 rows"):
                engine.between_steps(fail)
            answer = await client.json(COMPLETIONS, {"prompt": [5], "max_tokens": 6, "ignore_eos": True})
        finally:
            gc.enable()
        writer.close()
        return status, answer["usage"]["completion_tokens"], client.server.failure

    assert ask(engine, use) == (404, 6, None)


def _eos(llama: Model, prompt: list[int], folder: Path) -> tuple[Model, list[int]]:
    """The model whose 5th greedy token after `prompt` is the one that ends answers, and the answer up to it."""
    tokens = llama.greedy(prompt, 12)
    end = next(i for i in range(3, 12) if tokens[i] not in tokens[:i])
    return Model(folder, checkpoint("llama", folder, eos_token_id=tokens[end])), tokens[: end + 1]


def test_the_model_ends_its_answers(llama: Model, tmp_path: Path) -> None:
    """An end-of-sequence token ends an answer, which has it as its last token and `stop` as its reason even where it is
    the last that was asked for; with ignore_eos the answer goes on."""
    model, answer = _eos(llama, [9, 8, 7], tmp_path)

    async def use(client: Client) -> list[Any]:
        body = {"prompt": [9, 8, 7], "max_tokens": 12, "return_token_ids": True}
        changes = [{}, {"max_tokens": len(answer)}, {"ignore_eos": True}]
        return [(await client.json(COMPLETIONS, body | change))["choices"][0] for change in changes]

    ended, just, went_on = ask(built(model), use)
    assert (ended["token_ids"], ended["finish_reason"]) == (answer, "stop")
    assert (just["token_ids"], just["finish_reason"]) == (answer, "stop")
    assert (len(went_on["token_ids"]), went_on["finish_reason"]) == (12, "length")


def test_a_stop_token_of_the_client_ends_the_answer(llama: Model) -> None:
    """At one of stop_token_ids an answer ends with it; its engine is told, and frees its KV."""
    tokens = llama.greedy([9, 8, 7], 12)
    end = next(i for i in range(3, 12) if tokens[i] not in tokens[:i])

    async def use(client: Client) -> tuple[Any, int]:
        body = {"prompt": [9, 8, 7], "max_tokens": 80, "stop_token_ids": [tokens[end]], "return_token_ids": True}
        found = await client.json(COMPLETIONS, body)
        while client.server.backend.answers:
            await asyncio.sleep(0.001)
        (core,) = client.server.backend.cores().values()
        return found["choices"][0], core.scheduler.kv.num_blocks - core.scheduler.kv.num_free

    choice, used = ask(built(llama), use)
    assert (choice["token_ids"], choice["finish_reason"]) == (tokens[: end + 1], "stop")
    assert choice["stop_reason"] == tokens[end] and used == 0


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", 0.7), ("presence_penalty", 1), ("repetition_penalty", 1.1), ("min_tokens", 3)]
)
def test_what_would_be_another_token_is_refused(field: str, value: float, llama: Model) -> None:
    """Only the likeliest token is taken: what asks for another gets a 400 that says so."""

    async def use(client: Client) -> tuple[int, bytes]:
        body = {"prompt": [1], "max_tokens": 5, field: value}
        status, _, text = await client.call("POST", COMPLETIONS, body)
        return status, text

    status, text = ask(built(llama), use)
    assert status == 400 and f"{field}" in text.decode() and "is not served" in text.decode()


def test_at_the_end_what_is_open_is_unfinished_and_results_are_kept(llama: Model, tmp_path: Path) -> None:
    """A server that is closed amid an answer records it as unfinished; the results say on what the model ran."""
    setup = llama.setup()
    metrics = Metrics("vllm", "m", setup.max_model_len)
    engine, made = live_engine(setup, setup.scenario.specs[0], metrics, device="cpu", weights=None, seed=0)

    async def use(client: Client) -> None:
        await client.json(COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True})
        _, writer = await asyncio.open_connection("127.0.0.1", client.port)
        body = b'{"prompt": [1, 2, 3], "max_tokens": 90, "ignore_eos": true, "stream": true}'
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        while client.server.backend.num_sent < 2:
            await asyncio.sleep(0)
        engine.running.mail.close()

    ask(engine, use)
    records, spans = engine.close(engine.now_ns)
    results = keep_served(engine, records, spans, tmp_path, made=made)
    assert records.requests["outcome"].tolist() == [FINISHED, UNFINISHED]
    assert records.details == {} and "server_stopped" in records.texts
    assert "live on cpu" in results.manifest["heading"] and results.manifest["live"]["device"] == "cpu"


def test_what_is_open_when_the_server_closes_is_unfinished(llama: Model) -> None:
    """The server hangs up on its clients, who are not said to have left. The engine is held until it has, then takes
    what is in its mailbox and ends; the run ends no sooner than its records."""
    engine = built(llama)
    closed = threading.Event()

    async def run() -> None:
        server = Server(engine)
        port = await server.start("127.0.0.1", 0)
        engine.running.mail.call(lambda: closed.wait(30))
        body = {"prompt": [1, 2, 3], "max_tokens": 9, "ignore_eos": True, "stream": True}
        clients = [asyncio.ensure_future(Client(server, port).call("POST", COMPLETIONS, body)) for _ in range(3)]
        while server.backend.num_sent < 3:
            await asyncio.sleep(0)
        server.close()
        closed.set()
        engine.between_steps(engine.running.mail.close)
        engine.close(0)
        await asyncio.gather(*clients, return_exceptions=True)

    asyncio.run(run())
    rows = engine.records().requests
    assert rows["outcome"].tolist() == [UNFINISHED] * 3
    assert engine.now_ns >= rows["ended_ns"].max()


def test_records_are_read_once_the_engine_has_closed_them(llama: Model) -> None:
    """Between its last step and its end an engine still writes rows: whoever asks for them then waits for the end."""
    engine = built(llama)
    stopped, go = threading.Event(), threading.Event()
    close = engine.real.core.close

    def closing(*args: Any) -> None:
        stopped.set()
        go.wait(30)
        close(*args)

    def act() -> int:
        go.set()
        return len(engine.records().requests)

    async def use(client: Client) -> int:
        writer = await _stream(client, 90)
        thread, engine.real.core.close = engine.running.thread, closing
        engine.running.mail.close()
        await asyncio.to_thread(stopped.wait, 30)
        join = thread.join
        thread.join = lambda *of: (go.set(), join(*of))[1]
        found = engine.between_steps(act)
        writer.close()
        return found

    assert ask(engine, use) == 1


def test_draining_answers_what_is_open(llama: Model) -> None:
    """After `drain` the answer at hand is whole, then the server has stopped and its engine's thread is at its end."""
    engine = built(llama)

    async def use(client: Client) -> Any:
        answer = asyncio.ensure_future(client.json(COMPLETIONS, {"prompt": [1], "max_tokens": 40, "ignore_eos": True}))
        while not client.server.exchanges:
            await asyncio.sleep(0)
        client.server.drain()
        found = await answer
        await client.server.stopped.wait()
        return found["usage"]["completion_tokens"], await asyncio.to_thread(engine.running.thread.join, 30)

    assert ask(engine, use) == (40, None)


class Failing(ModelRunner):
    """Whose device fails in the fifth step."""

    num_steps = 0

    def step(self, *args: Any, **options: Any) -> Any:
        Failing.num_steps += 1
        if Failing.num_steps == 5:
            raise ExecutorError("the device has no memory left", "out_of_memory")
        return super().step(*args, **options)


def test_a_device_that_fails_ends_the_server(llama: Model) -> None:
    """Its error is the server's, clients are hung up on, and the records account for every request."""
    setup = llama.setup()
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 96}
    runner = build_runner(str(llama.folder), device="cpu", num_blocks=12, **sizes)
    prompts = SentPrompts()
    real = ServingEngine(
        replace(setup, kv=replace(setup.kv, num_blocks=12)),
        setup.scenario.specs[0],
        runner,
        unplayed(setup).workload(1.0, 0),
        prompts,
        setup.cost,
    )
    runner.__class__, Failing.num_steps = Failing, 0
    engine = LiveEngine(setup, setup.scenario.specs[0], Metrics("vllm", "m", 96), real, prompts)

    async def use(client: Client) -> tuple[bytes, Exception | None]:
        body = b'{"prompt": [1, 2, 3], "max_tokens": 50, "ignore_eos": true}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
        return await client.raw(head + body), client.server.failure

    answer, failure = ask(engine, use)
    assert answer == b"" and isinstance(failure, ExecutorError)
    records = engine.records()
    assert records.requests["outcome"].tolist() == [UNFINISHED]
    assert records.details == {"out_of_memory": "the device has no memory left"}
