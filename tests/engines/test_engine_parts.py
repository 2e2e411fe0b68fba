"""The parts that run real engines: requests of exact lengths, servers that are awaited and ended. Nothing is timed."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path

import pytest

from batchsim.base.errors import CalibrationError, MeasuredError
from batchsim.check.measured.read import read_measured
from batchsim.check.measured.run import Client
from batchsim.fit.server.loads import Load
from tools.real_engines.engines import engine_of
from tools.real_engines.experiment import Asker
from tools.real_engines.models import Shape
from tools.real_engines.server import Server, free_port, running

ENGINE = engine_of("llama_cpp")
LOAD = Load("three", (4, 9), (2, 5), 60.0, rate_rps=200.0, most=3)
USERS = Load("users", (4, 9), (2, 5), 4.0, users=2, most=5)


class _Completions(BaseHTTPRequestHandler):
    """Streams an answer two tokens a chunk, in HTTP chunks that cut its lines; `short` of so many tokens."""

    protocol_version = "HTTP/1.1"
    short = 0
    asked: list[dict[str, object]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked.append(body)
        count = body["max_tokens"] - type(self).short
        pieces = [{"choices": [{"text": " w" * min(2, count - at)}]} for at in range(0, count, 2)]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        lines = [f"data: {json.dumps(piece)}\n\n" for piece in (*pieces, {"choices": [], "usage": usage})]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        text = "".join([*lines, "data: [DONE]\n\n"]).encode()
        for piece in (text[:10], text[10:]):
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def _endpoint(short: int = 0) -> Iterator[tuple[int, list[dict[str, object]]]]:
    handler = type("Handler", (_Completions,), {"short": short, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_address[1], handler.asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("load", [LOAD, USERS], ids=lambda load: load.name)
def test_what_was_asked_for_is_what_the_file_has(load: Load, tmp_path: Path) -> None:
    """Prompts go out as ids of words; the file of the answers is read with their lengths and numbers of chunks."""
    with _endpoint() as (port, asked):
        ask = Asker(ENGINE, Server(port, 0, tmp_path / "log"), tmp_path / "measured")
        (run,) = read_measured(ask.measure(load, "-1"))
    asked = asked[-5 if load is USERS else -3 :]  # of the last try: a machine that is busy has more
    assert all(body["ignore_eos"] and body["model"] == "tiny" for body in asked)
    prompts = [prompt for body in asked if isinstance(prompt := body["prompt"], list)]
    assert len(prompts) == load.most and {*chain.from_iterable(prompts)} <= {*ENGINE.shape.words}
    assert run.requests is not None
    assert sorted(run.requests.prompt_tokens) == sorted(map(len, prompts))
    assert sorted(run.requests.output_tokens) == sorted(int(str(body["max_tokens"])) for body in asked)
    assert list(run.requests.chunks) == [-(-n // 2) for n in run.requests.output_tokens]
    assert run.client == (Client("open") if load.rate_rps else Client("closed", max_concurrency=2))


def test_an_answer_of_another_length_is_refused(tmp_path: Path) -> None:
    """A server that counts one token less than asked for ends the load with both numbers."""
    with _endpoint(short=1) as (port, _), pytest.raises(MeasuredError, match="has 1 of the 2 tokens asked for"):
        Asker(ENGINE, Server(port, 0, tmp_path), tmp_path).measure(replace(LOAD, output=(2, 2)))


SERVER = """
import http.server, os, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
print("pid", os.getpid(), flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


def test_a_server_is_there_inside_the_block_and_gone_after_it(tmp_path: Path) -> None:
    """The block begins when the server answers; however it ends the process has been waited for."""
    port = free_port()
    command = [sys.executable, "-c", SERVER, str(port)]
    with (
        pytest.raises(KeyError),
        running(command, port, tmp_path / "log", environment={}, start_s=30.0) as server,
    ):
        assert (tmp_path / "log").read_text().startswith(f"pid {server.pid}\n")
        assert server.url == f"http://127.0.0.1:{port}"
        raise KeyError
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


@pytest.mark.parametrize(
    ("code", "start_s", "says"),
    [
        ("print('no such model'); raise SystemExit(3)", 30.0, "ended by itself, exit code 3: no such model"),
        ("import time; time.sleep(60)", 0.0, "did not answer within 0 s: it printed nothing"),
    ],
    ids=["ends", "hangs"],
)
def test_a_server_that_does_not_come_is_one_line(code: str, start_s: float, says: str, tmp_path: Path) -> None:
    """The line says what the server printed last."""
    with (
        pytest.raises(CalibrationError, match=says),
        running([sys.executable, "-c", code], free_port(), tmp_path / "log", environment={}, start_s=start_s),
    ):
        pass


def test_every_word_is_one_token() -> None:
    """Ids of the vocabulary are distinct texts, words from the first word on; the model's config says as many."""
    tokens = Shape().tokens()
    assert len(set(tokens)) == len(tokens) == Shape().vocab_size
    assert [i for i, text in enumerate(tokens) if text.startswith(" w")] == list(range(259, 2048))


def test_an_unknown_engine_is_one_line() -> None:
    """The line names one that is like it."""
    with pytest.raises(CalibrationError, match=r"vlm: not an engine that runs here\. Did you mean vllm"):
        engine_of("vlm")
