"""Simulated replicas, each in a process of its own, and a gateway before them: all at 127.0.0.1, ended by their ids."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

HOST = "127.0.0.1"
READY_S = 120
SCENARIO = """\
model: llama-3.1-8b
cost: {kind: linear, base: 8ms, per_token: 20us, per_sequence: 50us}
kv: {tokens: 100000}
max_model_len: 4096
workload:
  arrivals: {kind: poisson, mean_rate: 1/s}
  lengths: {prompt: {kind: fixed, tokens: 100}, output: {kind: fixed, tokens: 20}}
  output_cap: exact
  requests: 50
policies:
  vllm: {max_num_seqs: 64, max_num_batched_tokens: 2048, enable_prefix_caching: true}
slo: ttft<1s @ 99%
seeds: 1
"""


def free_ports(count: int) -> list[int]:
    """Ports at which nothing listens now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]


@dataclass
class Replica:
    """A simulated engine behind HTTP: its process, where it is, and where it publishes KV events and replays them."""

    process: subprocess.Popen[bytes]
    port: int
    events: str
    replays: str

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def kill(self) -> None:
        """Ends it at once, as a machine that fails."""
        self.process.kill()
        self.process.wait(30)

    def rows(self) -> list[dict[str, int]]:
        """The requests that it has answered so far, those that it did not answer left out."""
        with (
            suppress(urllib.error.HTTPError),
            urllib.request.urlopen(f"{self.url}/batchsim/results", timeout=20) as got,
        ):
            head, *lines = got.read().decode().splitlines()
            names = head.split(",")[:-1]
            rows = [line.rsplit(",", 1) for line in lines]
            return [dict(zip(names, map(int, row.split(",")), strict=True)) for row, status in rows if status == "ok"]
        return []


@contextmanager
def process(
    command: Sequence[str | Path], folder: Path, log: Path, env: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A process under way, whose output is in `log`, and which ends with the block."""
    with log.open("wb") as output:
        started = subprocess.Popen(
            command,
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **env},
        )
    try:
        yield started
    finally:
        started.send_signal(signal.SIGTERM)
        try:
            started.wait(20)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def await_url(url: str, ends_with: subprocess.Popen[bytes], log: Path, *, key: str = "") -> None:
    """Returns once `url` answers with 200; AssertionError with the end of `log` where its process ends before, or it
    takes too long."""
    end_s = time.monotonic() + READY_S
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"} if key else {})
    while True:
        with suppress(OSError), urllib.request.urlopen(request, timeout=5):
            return
        said = log.read_text(errors="replace")[-3000:]
        assert ends_with.poll() is None, f"{url}: its process has ended\n{said}"
        assert time.monotonic() < end_s, f"{url}: does not answer\n{said}"
        time.sleep(0.2)


@contextmanager
def replicas(count: int, folder: Path, scenario: str = SCENARIO, *more: str) -> Iterator[list[Replica]]:
    """`count` replicas that are up, which publish KV events and end with the block; `more` are options of serve."""
    ports = free_ports(3 * count)
    with ExitStack() as stack:
        found: list[Replica] = []
        for number in range(count):
            own = folder / f"replica-{number}"
            own.mkdir()
            (own / "served.yaml").write_text(scenario)
            port, events, replays = ports[number::count]
            config = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{events}"}
            config |= {"replay_endpoint": f"tcp://*:{replays}"}
            command = [sys.executable, "-m", "batchsim", "serve", "served.yaml", "--port", str(port)]
            command += ["--served-model-name", "m", "--kv-events-config", json.dumps(config), "--drain", "1", *more]
            started = stack.enter_context(process(command, own, own / "log.txt", {"PYTHONPATH": str(ROOT)}))
            found.append(Replica(started, port, f"tcp://{HOST}:{events}", f"tcp://{HOST}:{replays}"))
        for number, each in enumerate(found):
            await_url(f"{each.url}/health", each.process, folder / f"replica-{number}" / "log.txt")
        yield found
