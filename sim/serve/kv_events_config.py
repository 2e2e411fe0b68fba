"""Where KV cache events go, under the names of vLLM's `--kv-events-config`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from batchsim.base.errors import ScenarioError, shown
from batchsim.base.ranges import INT32_MAX

OPTION = "--kv-events-config"
_EXAMPLE = f"""{OPTION} '{{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}}'"""
_TCP = re.compile(r"tcp://(\*|[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})")
_IPC = re.compile(r"ipc://[^\s]{1,100}")


@dataclass(frozen=True)
class KvEventsConfig:
    """Endpoints and bounds of the publishers, one for each replica; as vLLM has them, but for `buffer_bytes`.

    `endpoint`: tcp://*:PORT listens where the server does, ipc:// at a file; of another tcp:// address a subscriber
    listens there. `replay_endpoint`: the same, for what subscribers ask for again; "" for none. Replica r has the port
    PORT + r. `buffer_steps`, `buffer_bytes`: the batches kept for that, per replica. `hwm`: the batches that wait for a
    subscriber, beyond which later ones are lost to it. `max_queue_size`: the batches that wait to be sent at all.
    """

    endpoint: str = "tcp://*:5557"
    replay_endpoint: str = ""
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    buffer_bytes: int = 64 << 20


def read_config(text: str) -> KvEventsConfig | None:
    """The config in the JSON `text`; None where it enables no events. ScenarioError for what is none."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise ScenarioError(f"{OPTION} {shown(text)}: is not JSON. Write {_EXAMPLE}.") from None
    if not isinstance(values, dict):
        raise ScenarioError(f"{OPTION} {shown(text)}: is no JSON object. Write {_EXAMPLE}.")
    known = {"enable_kv_cache_events", "publisher", *KvEventsConfig.__dataclass_fields__} - {"buffer_bytes"}
    for name in values:
        if name not in known:
            raise ScenarioError(f"{OPTION}: {shown(name)} is none of its fields. These are {', '.join(sorted(known))}.")
    given = {name: value for name, value in values.items() if value is not None}
    enabled = _typed(given, "enable_kv_cache_events", bool, "true or false", default=False)
    publisher = _typed(given, "publisher", str, "zmq or null", default="zmq" if enabled else "null")
    if publisher not in ("zmq", "null"):
        raise ScenarioError(f"{OPTION}: publisher is {shown(publisher)}. Write zmq or null.")
    plain = KvEventsConfig()
    bounds = {
        name: _whole(given, name, getattr(plain, name), least)
        for name, least in (("buffer_steps", 0), ("hwm", 1), ("max_queue_size", 1))
    }
    topic = _typed(given, "topic", str, "a text", default="")
    endpoint = _endpoint(given, "endpoint", plain.endpoint)
    replay = _endpoint(given, "replay_endpoint", "")
    if _port(endpoint) and endpoint == replay:
        raise ScenarioError(f"{OPTION}: endpoint and replay_endpoint are both {endpoint}. Give them two ports.")
    if not enabled or publisher == "null":
        return None
    return KvEventsConfig(endpoint, replay, topic=topic, **bounds)


def _typed(given: dict[str, Any], name: str, kind: type, words: str, *, default: Any) -> Any:
    value = given.get(name, default)
    if not isinstance(value, kind):
        raise ScenarioError(f"{OPTION}: {name} is {shown(value)}. Write {words}.")
    return value


def _whole(given: dict[str, Any], name: str, default: int, least: int) -> int:
    value = given.get(name, default)
    if type(value) is not int or not least <= value <= INT32_MAX:
        raise ScenarioError(f"{OPTION}: {name} is {shown(value)}. Write a whole number from {least} to {INT32_MAX}.")
    return value


def _endpoint(given: dict[str, Any], name: str, default: str) -> str:
    value = given.get(name, default)
    if value == "" and name == "replay_endpoint":
        return ""
    if isinstance(value, str) and (_IPC.fullmatch(value) or ((tcp := _TCP.fullmatch(value)) and int(tcp[2]) < 1 << 16)):
        return value
    raise ScenarioError(f"{OPTION}: {name} is {shown(value)}. Write tcp://*:PORT, tcp://ADDRESS:PORT or ipc://FILE.")


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2]) if endpoint.startswith("tcp://") else 1


def of_replica(endpoint: str, replica: int, host: str) -> tuple[str, bool]:
    """(The endpoint of a replica, whether it listens there): ports count up from that of replica 0, unless that is 0,
    which stands for any free one; `*` is `host`. ScenarioError where there is no such port."""
    if endpoint.startswith("ipc://"):
        return f"{endpoint}_dp{replica}" if replica else endpoint, True
    address, _, port = endpoint.rpartition(":")
    number = int(port) + replica if int(port) else 0
    if number >= 1 << 16:
        raise ScenarioError(f"{OPTION}: replica {replica} would have port {number} of {endpoint}. Give a lower port.")
    if address == "tcp://*":
        name = f"[{host}]" if ":" in host else host
        return f"tcp://{'127.0.0.1' if name == 'localhost' else name}:{number}", True
    return f"{address}:{number}", False
