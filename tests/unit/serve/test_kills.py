"""Clients and servers that end at any instant: nothing is lost, nothing is left behind, and no traceback is seen."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("h11", reason="batchsim serve needs h11")

from batchsim.kernel.record import CANCELLED, FINISHED
from batchsim.serve.incoming import Limits
from tests.support.serving.served import scenario_of
from tests.unit.serve.test_abuse import HOSTILE, SMALL, is_whole, post
from tests.unit.serve.test_server import Client, ask

STREAM = post(b'{"prompt": [1, 2, 3], "max_tokens": 400, "ignore_eos": true, "stream": true}')
"""Four seconds of answer: a loop that is late by less sees that its client is gone before it ends."""


async def _leaves(port: int, sent: int, pieces: int, reset: bool) -> None:
    """A client that sends so many bytes of a request, reads so many pieces and is gone, by FIN or by RST."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(STREAM[:sent])
    if sent == len(STREAM):
        for _ in range(pieces):
            await reader.readuntil(b"\n\n")
    if reset:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()
    writer.close()


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_clients_that_are_gone_at_any_instant_leave_nothing(count: int) -> None:
    """Killed amid its request, before its answer or amid it, each is recorded as cancelled or finished; KV is free."""

    async def use(client: Client) -> tuple[bool, list[int]]:
        for start in range(0, count, 20):
            each = range(start, min(start + 20, count))
            sent = [len(STREAM) if i % 4 else i * 7 % len(STREAM) for i in each]
            await asyncio.gather(*(_leaves(client.port, sent[i - start], i % 9, i % 2 == 0) for i in each))
        whole = await is_whole(client)
        return whole, client.server.backend.records().requests["outcome"].tolist()

    whole, outcomes = ask(use)
    assert whole and set(outcomes) == {CANCELLED, FINISHED}
    assert len(outcomes) == sum(1 for i in range(count) if i % 4) + 1


@pytest.mark.slow
def test_a_thousand_hostile_requests_leave_nothing() -> None:
    """Fifty and more rounds of all of them, slow ones among them, twenty at a time, each with its status."""
    rounds = -(-1000 // len(HOSTILE))

    async def use(client: Client) -> tuple[list[tuple[str, bytes]], bool]:
        names = list(HOSTILE) * rounds
        found: list[tuple[str, bytes]] = []
        for start in range(0, len(names), 15):
            some = names[start : start + 15]
            found += zip(some, await asyncio.gather(*(client.raw(HOSTILE[name][0]) for name in some)), strict=True)
        return found, await is_whole(client)

    found, whole = ask(use, limits=SMALL)
    assert len(found) >= 1000 and whole
    for name, answer in found:
        assert answer.split()[1] == HOSTILE[name][1] and b"Traceback" not in answer, (name, answer)


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_idle_connections_keep_nobody_out(count: int) -> None:
    """With so many open, as far as this process' descriptors go (both ends are in it), a request is answered."""
    count = min(count, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200) // 2)
    print(f"{count} idle connections")

    async def use(client: Client) -> tuple[int, bool]:
        idle = list[socket.socket]()
        for _ in range(count):
            idle.append(socket.create_connection(("127.0.0.1", client.port)))
            await asyncio.sleep(0)
        while len(client.server.connections) < count:
            await asyncio.sleep(0)
        found = len(client.server.connections), await is_whole(client)
        for each in idle:
            each.close()
        while client.server.connections:
            await asyncio.sleep(0)
        return found

    assert ask(use, limits=Limits()) == (count, True)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("pieces", [0, 1, 7])
def test_a_server_killed_amid_streams_tells_no_traceback(number: signal.Signals, pieces: int, tmp_path: Path) -> None:
    """SIGTERM and SIGINT answer what is open and leave results and 0; after SIGKILL clients see the end at once."""
    scenario = tmp_path / "killed.yaml"
    policy = "continuous: {max_num_seqs: 8, max_num_batched_tokens: 512}"
    scenario.write_text(scenario_of(policy))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "batchsim", "serve", str(scenario), f"--port={port}", f"--out={tmp_path}"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stderr is not None
    try:
        assert server.stderr.readline().startswith(b"http://127.0.0.1:")
        clients = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(5)]
        for client in clients:
            client.sendall(STREAM)
        seen = [b"" for _ in clients]
        for i, client in enumerate(clients):
            while seen[i].count(b"\n\n") < pieces:
                seen[i] += client.recv(65536)
        server.send_signal(number)
        for i, client in enumerate(clients):
            try:
                while data := client.recv(65536):
                    seen[i] += data
                    if b"[DONE]" in seen[i]:
                        break
            except ConnectionError:
                pass
            client.close()
        _, told = server.communicate(timeout=60)
    finally:
        server.kill()
        server.wait()
    assert b"Traceback" not in told and not any(b"Traceback" in text for text in seen)
    if number == signal.SIGKILL:
        assert server.returncode == -signal.SIGKILL
    else:
        assert server.returncode == 0, told
        # without a piece seen, a request may have come after the signal and is refused
        assert all(b"[DONE]" in text or not pieces for text in seen)
        assert not pieces or list(tmp_path.glob("killed-served/received/*.csv"))
