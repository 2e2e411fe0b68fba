"""The memory of a server over many requests: `python -m tests.support.serving.memory --requests 100000`.

The server runs in a process of its own, a thousand times faster than the clock; printed is its resident memory after
each tenth of the requests, and the most that it had by the end, when all rows are read again for the results folder.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from tests.support.serving.served import scenario_of
from tests.unit.serve.test_abuse import post

GOOD = post(b'{"prompt": [1, 2, 3], "ignore_eos": true, "max_tokens": 4}')


def resident_mb(pid: int) -> float:
    """The resident memory of a process, in MB of 10^6 bytes (Linux)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise SystemExit(f"/proc/{pid}/status has no VmRSS")


async def _use(port: int, count: int, clients: int) -> None:
    """So many requests, by so many clients, each on one connection."""

    async def one(its: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(its):
            writer.write(GOOD)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 "), head
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
        writer.close()

    await asyncio.gather(*(one(count // clients) for _ in range(clients)))


def main(requests: int = 100_000, clients: int = 50) -> None:
    """Prints requests answered so far and the server's resident memory in MB; then the peak, its end included."""
    with TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
        probe.close()
        path = Path(folder) / "memory.yaml"
        policy = "continuous: {max_num_seqs: 64, max_num_batched_tokens: 512}"
        path.write_text(scenario_of(policy))
        options = [f"--port={port}", "--speed=1000", f"--out={folder}"]
        command = [sys.executable, "-m", "batchsim", "serve", str(path), *options]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        try:
            assert server.stderr is not None
            server.stderr.readline()
            print(f"{0:>9,} requests {resident_mb(server.pid):8.1f} MB")
            for tenth in range(1, 11):
                asyncio.run(_use(port, requests // 10, clients))
                print(f"{requests // 10 * tenth:>9,} requests {resident_mb(server.pid):8.1f} MB", flush=True)
            server.terminate()
            _, status, used = os.wait4(server.pid, 0)
            server.returncode = os.waitstatus_to_exitcode(status)
            print(f"{'the end':>18} {used.ru_maxrss * 1024 / 1e6:8.1f} MB at most, exit code {server.returncode}")
        finally:
            if server.returncode is None:
                server.kill()
                server.wait()


if __name__ == "__main__":
    typer.run(main)
