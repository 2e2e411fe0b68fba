"""What gateways ask of an engine, and requests for one rank of several."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("h11", reason="batchsim serve needs h11")

from tests.support.serving.served import scenario_of, setup_from
from tests.unit.serve.test_server import COMPLETIONS, CONTINUOUS, Client, ask, ask_of

TWO = "replicas: {count: 2, router: {kind: round_robin}}"
BODY: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 3, "ignore_eos": True}


def test_a_gateway_learns_the_model_and_the_ranks() -> None:
    """/model_info and /server_info, under old names too, have the served name and ranks; /get_load has a row each."""

    async def use(client: Client) -> Any:
        names = ("/model_info", "/get_model_info", "/server_info", "/get_server_info", "/get_load")
        return [await client.json(name) for name in names]

    model, old_model, server, old_server, loads = ask(use, more=TWO)
    assert model == old_model and server == old_server
    assert model["served_model_name"] == server["served_model_name"] == "m" and model["is_generation"]
    assert (server["dp_size"], server["context_length"], server["max_total_num_tokens"]) == (2, 4096, 16000)
    idle = {"num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}
    assert loads == [{"dp_rank": 0} | idle, {"dp_rank": 1} | idle]


def test_a_gateway_learns_over_how_many_gpus_a_replica_is_split() -> None:
    """tp_size is that of the step costs; 1 of a cost that has none."""
    split = scenario_of(CONTINUOUS).replace(
        "cost: {kind: constant, step: 10ms}", "cost: {kind: roofline, gpu: h100, tp: 2}"
    )
    assert ask_of(lambda client: client.json("/server_info"), setup_from(split))["tp_size"] == 2
    assert ask(lambda client: client.json("/server_info"))["tp_size"] == 1


@pytest.mark.parametrize("by_header", [True, False])
def test_a_rank_that_is_asked_for_answers(by_header: bool) -> None:
    """Six requests for rank 1 are all answered by it, whatever the router; the next two without one by both in turn."""

    async def use(client: Client) -> Any:
        for _ in range(6):
            headers = {"X-data-parallel-rank": "1"} if by_header else {}
            body = BODY if by_header else BODY | {"data_parallel_rank": 1}
            status, _, text = await client.call("POST", COMPLETIONS, body, **headers)
            assert status == 200, text
        pinned = [len(core.recorder) for _, core in sorted(client.server.backend.cores().items())]
        for _ in range(2):
            await client.json(COMPLETIONS, BODY)
        return pinned, [len(core.recorder) for _, core in sorted(client.server.backend.cores().items())]

    assert ask(use, more=TWO) == ([0, 6], [1, 7])


@pytest.mark.parametrize(
    ("headers", "body", "says"),
    [
        ({"X-data-parallel-rank": "2"}, {}, "data_parallel_rank 2 is out of range [0, 2)."),
        ({"X-data-parallel-rank": "-1"}, {}, "X-data-parallel-rank is '-1', no number from 0 on."),
        ({"X-data-parallel-rank": "1, 0"}, {}, "X-data-parallel-rank is '1, 0'"),
        ({"X-data-parallel-rank": ""}, {}, "X-data-parallel-rank is ''"),
        ({}, {"data_parallel_rank": 7}, "data_parallel_rank 7 is out of range"),
        ({}, {"data_parallel_rank": -1}, "data_parallel_rank must be at least 0"),
        ({}, {"data_parallel_rank": "0"}, "data_parallel_rank must be a whole number"),
    ],
)
def test_a_rank_that_is_none_is_refused(headers: dict[str, str], body: dict[str, Any], says: str) -> None:
    """A 400 says which, and nothing is sent to an engine."""

    async def use(client: Client) -> Any:
        status, _, text = await client.call("POST", COMPLETIONS, BODY | body, **headers)
        return status, json.loads(text)["error"]["message"], client.server.backend.num_sent

    status, message, num_sent = ask(use, more=TWO)
    assert (status, num_sent) == (400, 0) and says in message and "\n" not in message
