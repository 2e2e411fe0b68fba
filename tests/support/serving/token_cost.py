"""What a server spends on a token of many streams, up to the socket: a row of `make bench`.

    python -m tests.support.serving.token_cost

Beside it a write to a socket takes as long as it takes on the machine: `python -m tests.support.serving.lateness`.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from typing import Annotated

import typer

from batchsim.serve.connection import Connection
from batchsim.serve.server import Server
from tests.bench import bare_simpy
from tests.support.serving import served

STREAMS, TOKENS = 300, 400
STEP_NS = 10_000_000
REPEATS = 3


class Sink(asyncio.Transport):
    """A connection whose client reads all at once; counts the writes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_writes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.num_writes += 1

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def abort(self) -> None: ...


async def repeat() -> dict[str, float]:
    """µs of CPU a token, and tokens in the time of a bare SimPy timeout."""
    policy = f"continuous: {{max_num_seqs: {STREAMS}, max_num_batched_tokens: 8192}}"
    setup = served.setup_of(policy, tokens=STREAMS * (TOKENS + 64))
    simulation = served.simulation_of(setup)
    server, sinks = Server(simulation), [Sink() for _ in range(STREAMS)]
    body = b'{"prompt": [1, 2, 3], "ignore_eos": true, "stream": true, "max_tokens": %d}' % TOKENS
    for sink in sinks:
        connection = Connection(server)
        connection.connection_made(sink)
        connection.data_received(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
        )
        connection.data_received(body)
    simulation.run_to(10 * STEP_NS)  # first tokens, whose pieces are longer
    written, before = sum(sink.num_writes for sink in sinks), bare_simpy()
    start_s = time.process_time()
    simulation.run_to((TOKENS - 10) * STEP_NS)
    spent_s = time.process_time() - start_s
    tokens = sum(sink.num_writes for sink in sinks) - written
    simpy_per_s = (before + bare_simpy()) / 2
    server.close()
    return {
        "us_per_token": spent_s / tokens * 1e6,
        "share_of_simpy": tokens / spent_s / simpy_per_s,
        "simpy_per_s": simpy_per_s,
    }


def main(as_json: Annotated[bool, typer.Option("--json", help="Print the repeats as JSON.")] = False) -> None:
    """Prints the median of three repeats."""
    found = [asyncio.run(repeat()) for _ in range(REPEATS)]
    if as_json:
        print(json.dumps(found))
        return
    cost, share = (statistics.median(each[name] for each in found) for name in ("us_per_token", "share_of_simpy"))
    print(f"{cost:.2f} µs of CPU a token of {STREAMS} streams, {share:.4f} tokens per bare timeout")


if __name__ == "__main__":
    typer.run(main)
