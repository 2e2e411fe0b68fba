"""Faults on demand meet the requests that they should, and are counted."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("h11", reason="batchsim serve needs h11")

from batchsim.base.errors import ScenarioError
from batchsim.kernel.record import CANCELLED, FINISHED
from batchsim.serve.answers import Asked
from batchsim.serve.faults import Faults, read_faults
from batchsim.serve.server import Server
from tests.support.serving.served import setup_of, simulation_of
from tests.unit.serve.test_server import COMPLETIONS, CONTINUOUS, Client


def test_faults_are_read_as_written() -> None:
    """Each form is read; a replica without an end stays down."""
    found = read_faults(["error p=0.02", "stall p=0.5 for=5s", "replica=1 at=30s", "replica=0 at=1s for=2s"], 7)
    assert (found.seed, found.error, found.stall, found.stall_ns) == (7, 0.02, 0.5, 5_000_000_000)
    assert [list(failure.values()) for failure in found.failures] == [[1, "30s", "8760h"], [0, "1s", "2s"]]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is none"),
        ("fire p=0.1", "is none"),
        ("error", "is none"),
        ("error p=0.1 for=5s", "is none"),
        ("error p=0.1 p=0.2", "is none"),
        ("error p=2", "at most 1"),
        ("error p=0", "above 0"),
        ("error p=nan", "above 0"),
        ("error p=x", "no number"),
        ("stall p=0.1 for=5", "unit"),
        ("stall p=0.1 for=0s", "above 0"),
        ("replica=1", "is none"),
        ("replica=-1 at=3s", "no number"),
        ("replica=1 at=soon", "soon"),
    ],
)
def test_what_is_no_fault_is_refused(text: str, why: str) -> None:
    """The error names the text and what is wrong with it."""
    with pytest.raises(ScenarioError, match=f"--fault .*{why}"):
        read_faults([text], 0)


def test_one_kind_twice_is_refused() -> None:
    """Two shares of errors would leave open which of them counts."""
    with pytest.raises(ScenarioError, match="twice"):
        read_faults(["error p=0.1", "error p=0.2"], 0)


def test_which_requests_err_depends_on_seed_and_number_alone() -> None:
    """The same ones each time and with stalls beside; others with another seed; as many as asked for, about."""
    both = Faults(3, error=0.2, stall=0.5)
    chosen = [number for number in range(1000) if both.errs(number)]
    assert chosen == [number for number in reversed(range(1000)) if Faults(3, error=0.2).errs(number)][::-1]
    assert chosen != [number for number in range(1000) if Faults(4, error=0.2).errs(number)]
    assert both.num_errors == len(chosen) and 150 < len(chosen) < 250


def served(faults: Faults, count: int) -> tuple[Server, list[Any]]:
    """A server with `faults` after `count` streams, each read for some simulated seconds, and what came."""

    async def one(client: Client) -> bytes:
        body = json.dumps({"prompt": [1], "max_tokens": 5, "ignore_eos": True, "stream": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        head = b"POST %b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % (COMPLETIONS.encode(), len(body)) + body)
        text = b""
        while piece := await reader.read(1 << 16):
            text += piece
            while client.server.backend.answers:
                await asyncio.sleep(0)
            if faults.stall_ns is None and client.server.exchanges:
                break  # the engine has ended it, and nothing more will come
        writer.close()
        return text

    async def run() -> tuple[Server, list[Any]]:
        server = Server(simulation_of(setup_of(CONTINUOUS)), 100, faults=faults)
        client = Client(server, await server.start("127.0.0.1", 0))
        found = [await asyncio.wait_for(one(client), 20) for _ in range(count)]
        while server.exchanges:
            await asyncio.sleep(0)
        server.close()
        return server, found

    return asyncio.run(run())


def test_errors_reach_no_engine() -> None:
    """A request that is to err gets a 500 at once, and the engines never hear of it."""
    server, found = served(Faults(1, error=0.5), 20)
    errors = sum(text.startswith(b"HTTP/1.1 500 ") and b"on demand" in text for text in found)
    assert 0 < errors < 20
    assert server.faults.num_errors == errors
    assert server.backend.num_sent == 20 - errors


def test_a_stalled_stream_has_its_first_piece_and_no_more() -> None:
    """Its engine finishes it all the same; who leaves leaves nothing behind."""
    server, (text,) = served(Faults(1, stall=1.0), 1)
    assert text.count(b"data: ") == 1 and b"[DONE]" not in text
    assert server.faults.num_stalls == 1
    assert server.backend.records().requests["outcome"].tolist() == [FINISHED]


def test_a_stall_of_some_time_ends_with_all_that_has_come() -> None:
    """After `for` the rest comes in one piece."""
    _, (text,) = served(Faults(1, stall=1.0, stall_ns=10_000_000_000), 1)
    assert text.count(b"data: ") == 3 and b"[DONE]" in text


@pytest.mark.parametrize("frontend", ["", "frontend: {per_chunk: 2ms}"])
def test_one_sent_anew_tells_no_token_twice(frontend: str) -> None:
    """A request whose replica fails amid its answer begins anew elsewhere; its client has each token once."""
    more = "replicas: {count: 2, router: round_robin, lost: retry, failures: [{replica: 0, at: 35ms, down_for: 1s}]}"
    simulation = simulation_of(setup_of(CONTINUOUS, more, frontend))
    heard: list[int] = []
    answer = simulation.send(Asked(10, 6, 6), 0, lambda answer: heard.append(answer.num_tokens))
    simulation.run_to(500_000_000)
    assert answer.outcome == FINISHED and answer.num_tokens == 6
    assert heard == sorted(heard) and heard[:3] == [1, 2, 3]


def test_one_cancelled_while_no_replica_is_up_ends_there() -> None:
    """A request that waits at the router, and whose client hangs up, is cancelled: its client hears of it at once."""
    more = "replicas: {count: 1, router: round_robin, lost: retry, failures: [{replica: 0, at: 35ms, down_for: 1s}]}"
    simulation = simulation_of(setup_of(CONTINUOUS, more))
    simulation.run_to(50_000_000)
    answer = simulation.send(Asked(10, 6, 6), 50_000_000, lambda answer: None)
    simulation.run_to(60_000_000)
    simulation.cancel(answer, 60_000_000)
    simulation.run_to(70_000_000)
    assert (answer.outcome, answer.reason, answer.num_tokens) == (CANCELLED, "client_cancel", 0)


def test_a_replica_fails_beside_the_scenarios_own_failures() -> None:
    """The failure is the scenario's from then on, so that results say and replay it."""
    more = "replicas: {count: 2, router: round_robin, lost: retry, failures: [{replica: 0, at: 35ms, down_for: 1s}]}"
    scenario = setup_of(CONTINUOUS, more).scenario
    replicas = read_faults(["replica=1 at=30s for=10s"], 0).failing(scenario).file.replicas
    assert replicas is not None and replicas.lost == "retry"
    assert [(f.replica, f.at, f.down_for) for f in replicas.failures][1] == (1, 30_000_000_000, 10_000_000_000)


def test_an_engine_alone_cannot_lose_a_replica() -> None:
    """Without replicas there is none to fail, which is said."""
    with pytest.raises(ScenarioError, match="no replicas"):
        read_faults(["replica=0 at=1s"], 0).failing(setup_of(CONTINUOUS).scenario)
