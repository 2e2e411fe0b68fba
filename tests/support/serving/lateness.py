"""How late tokens are, at many streams: a row of `make bench`.

    python -m tests.support.serving.lateness --streams 1000 --step-ms 20 --seconds 10

The server runs in a process of its own, its clients in this one; then a server that does nothing but write as many
pieces as often, so that what machine and client add shows. A token's lateness is how long after the end of its step, by
the server's records, it came. How late the engine itself took its steps up the server's own metrics say; with `--whole`
they alone are asked, of a server on one core whose clients want their answers whole.
"""

from __future__ import annotations

import asyncio
import csv
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from urllib.request import urlopen

import numpy as np
import typer

from batchsim.serve.run_server import event_loop
from tests.support.serving.served import scenario_of

FIRSTS = "firsts.json"
PERCENTILES = (50, 90, 99, 100)
_PIECE = b'data: {"id": "cmpl-%08x", "choices": [{"index": 0, "text": " 104729"}]}\n\n'


class Reader(asyncio.Protocol):
    """Asks for one answer and notes when each of its pieces came, in ns."""

    def __init__(self, request: bytes, done: asyncio.Future[None]) -> None:
        self._request = request
        self._done = done
        self.number = 0
        self.times_ns: list[int] = []

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        count, now_ns = data.count(b'"index"'), time.time_ns()
        if not self.times_ns and count:
            self.number = int(data.partition(b"cmpl-")[2][:8], 16) - 1
        self.times_ns += [now_ns] * count
        if (b"[DONE]" in data or b'"usage"' in data) and not self._done.done():
            self._done.set_result(None)


class Writer(asyncio.Protocol):
    """Writes a piece at each of the same times to who has asked, `count` times; `firsts_s` has each one's first."""

    def __init__(self, step_s: float, count: int, others: dict[Writer, None], firsts_s: list[float]) -> None:
        self.step_s, self.left, self.others, self.firsts_s = step_s, count, others, firsts_s
        self.number = -1

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.others[self] = None
        if len(self.others) == 1:
            loop = asyncio.get_running_loop()
            loop.call_at(loop.time() + self.step_s, self._step, loop.time() + self.step_s)

    def _step(self, due_s: float) -> None:
        for each in list(self.others):
            if each.number < 0:
                each.number = len(self.firsts_s)
                self.firsts_s.append(due_s)
            each.left -= 1
            piece = _PIECE % (each.number + 1)
            each.transport.write(piece if each.left else piece + b"data: [DONE]\n\n")
            if not each.left:
                del self.others[each]
        if self.others:
            first = next(iter(self.others))
            asyncio.get_running_loop().call_at(due_s + self.step_s, first._step, due_s + self.step_s)


async def _write(port: int, step_s: float, count: int, out: Path) -> None:
    others, firsts_s = dict[Writer, None](), list[float]()
    loop = asyncio.get_running_loop()
    ahead_s = time.time() - loop.time()
    await loop.create_server(lambda: Writer(step_s, count, others, firsts_s), "127.0.0.1", port, backlog=4096)
    stopped = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    await stopped.wait()
    (out / FIRSTS).write_text(json.dumps([(first_s + ahead_s) * 1e9 for first_s in firsts_s]))


async def _read(port: int, streams: int, tokens: int, whole: bool) -> list[Reader]:
    """What each client has read, all begun within a second."""
    stream = b"false" if whole else b"true"
    body = b'{"prompt": [1, 2, 3], "ignore_eos": true, "stream": %b, "max_tokens": %d}' % (stream, tokens)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
    loop, readers = asyncio.get_running_loop(), list[Reader]()
    for _ in range(streams):
        reader = Reader(head + body, loop.create_future())
        await loop.create_connection(lambda reader=reader: reader, "127.0.0.1", port)
        readers.append(reader)
        await asyncio.sleep(1 / streams)
    await asyncio.gather(*(reader._done for reader in readers))
    return readers


def late_ms(readers: Sequence[Reader], firsts_ns: Sequence[float], step_ns: float) -> np.ndarray:
    """By how many ms each token came after the end of its step; `firsts_ns`: when those of first tokens ended."""
    due = [firsts_ns[each.number] + np.arange(len(each.times_ns)) * step_ns for each in readers]
    return (np.concatenate([np.asarray(each.times_ns) for each in readers]) - np.concatenate(due)) / 1e6


def _firsts_ns(folder: Path) -> list[float]:
    """When the steps of first tokens ended, in ns since 1970, by the number of the request."""
    if (folder / FIRSTS).exists():
        return json.loads((folder / FIRSTS).read_text())
    (manifest,) = folder.glob("*-served/*/manifest.json")
    (received,) = folder.glob("*-served/received/*.csv")
    start_ns = json.loads(manifest.read_text())["served"]["started_unix_ns"]
    with received.open() as file:
        return [start_ns + int(row["sent_ns"]) + int(row["ttft_ns"]) for row in csv.DictReader(file)]


def measured(streams: int, step_ms: float, seconds: float, port: int, whole: bool) -> dict[str, float]:
    """Percentiles of the lateness of both servers in ms, `serve_p99` and so on, and how late the engine's steps were:
    `steps` in all, `mean_ms`, and the shares within 1 and 5 ms."""
    tokens = round(seconds * 1000 / step_ms)
    gc.collect()
    gc.freeze()  # a pass over all that is loaded here would be 100 ms of the first server's tokens
    found: dict[str, float] = {}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "late.yaml"
        policy = f"continuous: {{max_num_seqs: {streams}, max_num_batched_tokens: 8192}}"
        text = scenario_of(policy, tokens=streams * (tokens + 64))
        path.write_text(text.replace("step: 10ms", f"step: {step_ms}ms"))
        serve = [sys.executable, "-m", "batchsim", "serve", str(path), "--port", str(port), f"--out={folder}/serve"]
        again = [sys.executable, "-m", "tests.support.serving.lateness", f"--step-ms={step_ms}", f"--seconds={seconds}"]
        commands = {"serve": serve, "empty": [*again, f"--port={port}", "--role=writer", f"--out={folder}/empty"]}
        for name, command in commands.items():
            its = Path(folder) / name
            its.mkdir()
            process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            if whole:
                os.sched_setaffinity(process.pid, {0})
            try:
                _wait_for(port)
                with asyncio.Runner(loop_factory=event_loop) as runner:
                    readers = runner.run(_read(port, streams, tokens, whole))
                if name == "serve":
                    found |= _steps_late(port)
            finally:
                process.terminate()
                process.wait()
            if whole:
                return found
            percentiles = np.percentile(late_ms(readers, _firsts_ns(its), step_ms * 1e6), PERCENTILES)
            found |= {f"{name}_p{p}": float(x) for p, x in zip(PERCENTILES, percentiles, strict=True)}
    return found


def main(
    streams: int = 1000,
    step_ms: float = 20.0,
    seconds: float = 10.0,
    port: int = 8790,
    whole: bool = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    role: Annotated[str, typer.Option(hidden=True)] = "",
    out: Annotated[Path, typer.Option(hidden=True)] = Path(),
) -> None:
    """Prints the percentiles of the lateness of both servers, in ms, and how late the steps were, or JSON."""
    if role == "writer":
        asyncio.run(_write(port, step_ms / 1000, round(seconds * 1000 / step_ms), out))
        return
    found = measured(streams, step_ms, seconds, port, whole)
    if as_json:
        print(json.dumps(found))
        return
    print(steps(found))
    if not whole:
        for name in ("serve", "empty"):
            print(f"{name:6s}", " ".join(f"p{p} {found[f'{name}_p{p}']:.2f}" for p in PERCENTILES))
        print(f"ratio of p99: {found['serve_p99'] / found['empty_p99']:.2f}")


def steps(found: dict[str, float]) -> str:
    """How late the engine's steps were, of `measured`, in words."""
    return (
        f"{found['steps']:.0f} steps, late by {found['mean_ms']:.2f} ms in the mean, {found['within_1ms']:.1%} by no"
        f" more than 1 ms, {found['within_5ms']:.1%} by 5 ms"
    )


def _steps_late(port: int) -> dict[str, float]:
    """How late the server has taken its steps up so far."""
    prefix = "batchsim:lateness_seconds_"
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = [line.removeprefix(prefix).split() for line in answer.read().decode().splitlines() if prefix in line]
    said = {name: float(value) for name, value in (line for line in lines if len(line) == 2)}
    count = said["count"]
    within = {f"within_{ms}ms": said[f'bucket{{le="{ms / 1000}"}}'] / count for ms in (1, 5)}
    return {"steps": count, "mean_ms": 1e3 * said["sum"] / count, **within}


def _wait_for(port: int) -> None:
    import socket

    for _ in range(200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise SystemExit(f"nothing listens at port {port}")


if __name__ == "__main__":
    typer.run(main)
