"""The parts that run real engines: requests of exact lengths, servers that are awaited and ended. Nothing is timed."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from batchsim.base.errors import CalibrationError
from batchsim.check.measured.read import read_measured
from batchsim.check.measured.run import Client
from tools.real_engines.client import Answer, Load, asks, send, tidy
from tools.real_engines.engines import engine_of
from tools.real_engines.models import Shape
from tools.real_engines.server import free_port, running

WORDS = Shape().words
LOAD = Load("three", 3, (4, 9), (2, 5), rate_rps=200.0)


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


def test_a_load_is_the_same_requests_for_the_same_seed_within_its_lengths() -> None:
    """Lengths reach both ends and go no further; times begin at 0; another seed draws others."""
    load = Load("many", 400, (4, 9), (2, 5), rate_rps=2.0)
    found = asks(load, WORDS)
    assert {len(one.prompt) for one in found} == set(range(4, 10))
    assert {one.output_tokens for one in found} == set(range(2, 6))
    assert min(min(one.prompt) for one in found) >= WORDS.start
    assert found == asks(load, WORDS)
    assert found != asks(Load("many", 400, (4, 9), (2, 5), rate_rps=2.0, seed=1), WORDS)
    times = [one.at_s for one in found if one.at_s is not None]
    assert times[0] == 0.0
    assert times[-1] == pytest.approx(400 / 2.0, rel=0.15)


@pytest.mark.parametrize("load", [LOAD, Load("users", 5, (4, 9), (2, 5), users=2)], ids=lambda load: load.name)
def test_what_was_asked_for_is_what_the_file_has(load: Load, tmp_path: Path) -> None:
    """Prompts go out as the ids drawn; the file of the answers is read with their lengths and numbers of chunks."""
    with _endpoint() as (port, asked):
        answers = send(port, "tiny", load, WORDS).answers
    drawn = asks(load, WORDS)
    assert sorted(body["prompt"] for body in asked) == sorted(one.prompt for one in drawn)
    assert all(body["ignore_eos"] and body["model"] == "tiny" for body in asked)
    (tmp_path / "three.csv").write_text(tidy(load, answers))
    (run,) = read_measured(tmp_path / "three.csv")
    assert run.requests is not None
    assert sorted(run.requests.prompt_tokens) == sorted(len(one.prompt) for one in drawn)
    assert sorted(run.requests.output_tokens) == sorted(one.output_tokens for one in drawn)
    assert list(run.requests.chunks) == [-(-n // 2) for n in run.requests.output_tokens]
    assert (run.requests.intended_ns is None) == (load.rate_rps is None)
    closed = Client("closed", max_concurrency=2)
    assert run.client == (Client("open") if load.rate_rps else closed)


def test_an_answer_of_another_length_is_refused() -> None:
    """A server that counts one token less than asked for is an error with both numbers."""
    with _endpoint(short=1) as (port, _), pytest.raises(CalibrationError, match=r"asked for 4 \+ 4 .* counts 4 \+ 3"):
        send(port, "tiny", Load("one", 1, (4, 4), (4, 4)), WORDS)


def test_times_are_written_to_the_microsecond() -> None:
    """A row holds what the client saw; TPOT is over the gaps between tokens."""
    answer = Answer(0.5, 0.5000014, 0.75, 1.75, 7, 5, 3)
    assert tidy(LOAD, [answer]).splitlines()[1] == "0.500000,0.500001,0.750000,1.750000,7,5,3"
    assert answer.tpot_s == 0.25


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
    assert len(set(tokens)) == len(tokens) == Shape().vocabulary
    assert [i for i, text in enumerate(tokens) if text.startswith(" w")] == list(range(259, 2048))


def test_an_unknown_engine_is_one_line() -> None:
    """The line names one that is like it."""
    with pytest.raises(CalibrationError, match=r"vlm: not an engine that runs here\. Did you mean vllm"):
        engine_of("vlm")
