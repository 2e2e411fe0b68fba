"""A worker of Dynamo that has a simulated replica answer, run by the interpreter that Dynamo is installed for.

    python dynamo_worker.py REPLICA_URL MODEL_FOLDER [KV_EVENTS_ENDPOINT]

Dynamo's frontend does not speak to engines over HTTP: it hands token ids to workers, each an engine's own process. This
one passes them on, relays the replica's KV events if asked, and ends with its replica, as Dynamo's own do with theirs.
Who relays events listens at all addresses: Dynamo's event plane does not let one choose.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import uvloop
from dynamo.llm import KvEventPublisher, ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
from dynamo.runtime import DistributedRuntime

BLOCK = 16


async def serve(url: str, folder: str, events: str = "") -> None:
    """Serves until it is ended."""
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    endpoint = runtime.endpoint("tried.backend.generate")
    session = aiohttp.ClientSession()

    async def generate(request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        """The tokens of an answer, one by one."""
        stops = request.get("stop_conditions") or {}
        asked = {"prompt": request["token_ids"], "max_tokens": stops.get("max_tokens") or 16, "stream": True}
        asked |= {"ignore_eos": True, "return_token_ids": True}
        try:
            async with session.post(f"{url}/v1/completions", json=asked) as response:
                response.raise_for_status()
                async for line in response.content:
                    data = line.decode().strip().removeprefix("data: ")
                    if not data or data == "[DONE]":
                        continue
                    (choice,) = json.loads(data)["choices"]
                    yield {"token_ids": choice["token_ids"], "finish_reason": choice["finish_reason"]}
        except aiohttp.ClientError:
            os._exit(1)

    config = ModelRuntimeConfig()
    config.total_kv_blocks, config.max_num_seqs, config.max_num_batched_tokens = 6250, 64, 2048
    publisher = KvEventPublisher(endpoint, kv_block_size=BLOCK, zmq_endpoint=events, zmq_topic="") if events else None
    await register_model(
        ModelInput.Tokens,
        ModelType.Chat | ModelType.Completions,
        endpoint,
        folder,
        "m",
        worker_type=WorkerType.Aggregated,
        kv_cache_block_size=BLOCK,
        runtime_config=config,
    )
    await endpoint.serve_endpoint(generate)
    if publisher is not None:
        publisher.shutdown()


if __name__ == "__main__":
    uvloop.run(serve(*sys.argv[1:]))
