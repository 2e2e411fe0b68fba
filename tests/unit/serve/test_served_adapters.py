"""LoRA adapters loaded over HTTP, and requests that name them; fields of gateways that are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("h11", reason="batchsim serve needs h11")

from tests.support.serving.served import scenario_of, setup_from
from tests.unit.serve.test_server import COMPLETIONS, Client, ask, ask_of

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
VLLM = "vllm: {max_num_seqs: 8, max_num_batched_tokens: 512, max_loras: 1, max_cpu_loras: 4}"
ASKED = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}


def ask_adapters(use: Any) -> Any:
    """What `use` returns of a client of a new server with adapters, that loads them in 300 ms."""
    more = "lora_cost: {step: 100%, per_adapter: 0%, load_gpu: 100ms, load_disk: 200ms}"
    return ask_of(use, setup_from(scenario_of(VLLM, more, "loras: {count: 1, rank: 8}")))


def test_an_adapter_is_loaded_named_and_unloaded() -> None:
    """It is a model from its load to its unload; its first step reads it, and its steps take twice as long."""

    async def use(client: Client) -> Any:
        said = [(await client.call("POST", LOAD, {"lora_name": "a", "lora_path": "/p"}))[2]]
        answer = await client.json(COMPLETIONS, ASKED | {"model": "a"})
        base = await client.json(COMPLETIONS, ASKED | {"model": "m"})
        models = await client.json("/v1/models")
        said.append((await client.call("POST", UNLOAD, {"lora_name": "a"}))[2])
        gone, _, _ = await client.call("POST", COMPLETIONS, ASKED | {"model": "a"})
        return said, answer, base, models, gone, client.server.backend.records().requests

    said, answer, base, models, gone, rows = ask_adapters(use)
    assert [text.decode() for text in said] == [
        "Success: LoRA adapter 'a' added successfully.",
        "Success: LoRA adapter 'a' removed successfully.",
    ]
    assert (answer["model"], base["model"], gone) == ("a", "m", 404)
    assert [(each["id"], each["parent"], each["root"]) for each in models["data"]] == [
        ("m", None, "m"),
        ("a", "m", "/p"),
    ]
    ttft = (rows["first_token_ns"] - rows["arrival_ns"]).tolist()
    assert ttft == [320_000_000, 10_000_000]
    assert (rows["last_token_ns"] - rows["first_token_ns"]).tolist() == [60_000_000, 30_000_000]


def test_a_gateway_reads_which_adapters_are_asked_for() -> None:
    """The metric has vLLM's labels, and no name once all is answered."""

    async def use(client: Client) -> Any:
        await client.call("POST", LOAD, {"lora_name": "a", "lora_path": "/p"})
        await client.json(COMPLETIONS, ASKED | {"model": "a"})
        return (await client.call("GET", "/metrics"))[2]

    text = ask_adapters(use).decode()
    label = 'vllm:lora_requests_info{max_lora="1",waiting_lora_adapters="",running_lora_adapters=""}'
    assert sum(line.startswith(label) for line in text.splitlines()) == 1


NAMED = {"lora_name": "b", "lora_path": "/p"}
HOSTILE: list[tuple[str, Any, int, str]] = [
    (LOAD, {}, 400, "must be provided"),
    (LOAD, [], 400, "JSON object"),
    (LOAD, {"lora_name": "b"}, 400, "must be provided"),
    (LOAD, {"lora_path": "/p"}, 400, "must be provided"),
    (LOAD, NAMED | {"lora_name": ""}, 400, "must be provided"),
    (LOAD, NAMED | {"lora_name": 7}, 400, "must be a string"),
    (LOAD, NAMED | {"lora_name": ["b"]}, 400, "must be a string"),
    (LOAD, NAMED | {"lora_path": {}}, 400, "must be a string"),
    (LOAD, NAMED | {"load_inplace": "yes"}, 400, "true or false"),
    (LOAD, NAMED | {"lora_name": "x" * 257}, 400, "no name"),
    (LOAD, NAMED | {"lora_name": "x\ny"}, 400, "no name"),
    (LOAD, NAMED | {"lora_name": "x,y"}, 400, "no name"),
    (LOAD, NAMED | {"lora_name": "\ud800"}, 400, "half of a letter"),
    (LOAD, NAMED | {"lora_name": "m"}, 400, "conflicts"),
    (LOAD, NAMED | {"is_3d_lora_weight": True}, 400, "experts"),
    (UNLOAD, {}, 400, "needs to be provided"),
    (UNLOAD, {"lora_name": "b"}, 404, "cannot be found"),
    (UNLOAD, {"lora_name": None}, 400, "needs to be provided"),
    (UNLOAD, {"lora_name": "b", "lora_int_id": "1"}, 400, "whole number"),
    (COMPLETIONS, ASKED | {"model": "b"}, 404, "does not exist"),
    (COMPLETIONS, ASKED | {"kv_transfer_params": {"do_remote_decode": True}}, 400, "kv_transfer_params is not served"),
    (COMPLETIONS, ASKED | {"kv_transfer_params": {"do_remote_prefill": True}}, 400, "kv_transfer_params is not"),
    (COMPLETIONS, ASKED | {"kv_transfer_params": "x"}, 400, "kv_transfer_params is not served"),
    (COMPLETIONS, ASKED | {"kv_transfer_params": [[]]}, 400, "kv_transfer_params is not served"),
]


def test_hostile_bodies_are_errors_in_a_line() -> None:
    """Each is refused in the API's form, nothing is sent to an engine, and no adapter is left."""

    async def use(client: Client) -> Any:
        found = [await client.call("POST", path, body) for path, body, _, _ in HOSTILE]
        assert not client.server.backend.num_sent
        return found, await client.json("/v1/models")

    found, models = ask_adapters(use)
    for (path, body, status, words), (got, _, text) in zip(HOSTILE, found, strict=True):
        message = json.loads(text)["error"]["message"]
        assert got == status and words in message and "\n" not in message, (path, body, message)
    assert len(models["data"]) == 1


def test_a_policy_without_adapters_loads_none() -> None:
    """The refusal says what to serve; there is no metric of adapters."""

    async def use(client: Client) -> Any:
        status, _, text = await client.call("POST", LOAD, NAMED)
        return status, json.loads(text)["error"]["message"]

    status, message = ask(use)
    assert status == 400 and "workload.loras" in message
