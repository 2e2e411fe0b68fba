"""How a scenario writes prefill and decode apart, and the replicas that this is: two groups, with KV in between.

    pools: {prefill: {count: 2}, decode: {count: 3, kv: {tokens: 200000}}, transfer: {bandwidth: 50GB/s}}
    deployment: {prefill: {engine: vllm, gpu: h100_sxm, count: 2}, decode: {...}, transfer: {...}}

In the second form the keys of each side are those of a deployment, and beside them `count`, `knobs` and, as a mapping,
`kv`, which are those of `pools`. The deployment of the decode side is then the scenario's own.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from batchsim.base.errors import ScenarioError, nearest, shown
from batchsim.base.plain import value_at
from batchsim.scenario.document import Document
from batchsim.scenario.document import Path as Keys

SIDES = ("prefill", "decode")
PARTS = (*SIDES, "transfer")
CHOICES = ("router", "local_prefill")
KEYS = (*PARTS, *CHOICES)
_OF_POOL = ("count", "knobs")
_EXAMPLE = "{prefill: {count: 1}, decode: {count: 1}, transfer: {bandwidth: 50GB/s}}"


def take_pools(document: Document) -> None:
    """Writes `pools`, and a `deployment` of two sides, as the replicas that they are. ScenarioError where a part of
    them is missing or is none."""
    plain = document.value
    deployment, form = plain.get("deployment"), "pools"
    if isinstance(deployment, dict) and not deployment.keys().isdisjoint(PARTS):
        if plain.get("pools") is not None or plain.get("cost") is not None:
            other = "pools" if plain.get("pools") is not None else "cost"
            where = document.where(("deployment",))
            raise ScenarioError(f"{where}: {other} is given beside a deployment of two sides. Keep one of them.")
        _check(document, ("deployment",), deployment)
        form = "deployment"
        document.renamed |= {("replicas", "groups", side, "cost"): "" for side in SIDES}
        pools = {side: _pool(document, side, deployment[side]) for side in SIDES}
        beside = {key: deployment[key] for key in ("transfer", *CHOICES) if key in deployment}
        plain["pools"] = pools | beside
        for key in beside:
            document.moved(("deployment", key), ("pools", key))
        plain["deployment"] = deepcopy(pools["decode"]["deployment"])
    pools = plain.get("pools")
    if pools is None:
        plain.pop("pools", None)
        return
    _check(document, ("pools",), pools)
    if plain.get("replicas") is not None:
        where = document.where(("replicas",))
        raise ScenarioError(f"{where}: pools are replicas, and both are given. Keep one of them.")
    groups = {side: pools[side] for side in SIDES}
    beside = {key: pools[key] for key in ("transfer", *CHOICES) if pools.get(key) is not None}
    plain["replicas"] = {"groups": groups, "router": {"kind": "round_robin"}} | beside
    document.moved(("pools",), ("replicas",))
    document.renamed |= {("replicas",): form, ("replicas", "groups"): ""}
    for side in SIDES:
        document.moved(("pools", side), ("replicas", "groups", side))
    for key in beside:
        document.moved(("pools", key), ("replicas", key))
    del plain["pools"]


def _check(document: Document, path: Keys, block: Any) -> None:
    name = ".".join(map(str, path))
    if not isinstance(block, dict):
        raise ScenarioError(f"{document.where(path)}: {name} is {shown(block)}. Write it like {_EXAMPLE}.")
    for key in block:
        if key not in KEYS:
            known = nearest(str(key), KEYS)
            raise ScenarioError(f"{document.where((*path, key))}: {name} has no {key}. {known}")
    if missing := next((key for key in PARTS if not isinstance(block.get(key), dict)), ""):
        raise ScenarioError(f"{document.where(path)}: {name} has no {missing}. Write it like {_EXAMPLE}.")


def _pool(document: Document, side: str, block: dict[str, Any]) -> dict[str, Any]:
    """The pool of one side of a deployment."""
    own = {key: block[key] for key in _OF_POOL if key in block}
    if isinstance(block.get("kv"), dict):
        own["kv"] = block["kv"]
    document.moved(("deployment", side), ("pools", side))
    document.moved(("deployment", side), ("pools", side, "deployment"))
    return own | {"deployment": {key: value for key, value in block.items() if key not in own}}


def rewritten(plain: dict[str, Any], path: tuple[str, ...]) -> tuple[str, ...]:
    """The path under which a key of pools, or of a deployment of two sides, stands once they are written as
    replicas."""
    if value_at(plain, ("replicas", "transfer")) is None or len(path) < 2 or path[1] not in KEYS:
        return path
    if path[0] not in ("pools", "deployment"):
        return path
    if path[1] not in SIDES:
        return ("replicas", *path[1:])
    group = ("replicas", "groups", path[1])
    is_of_pool = path[0] == "pools" or path[2:3] == () or path[2] in _OF_POOL or (path[2] == "kv" and len(path) > 3)
    return (*group, *path[2:]) if is_of_pool else (*group, "cost", *path[2:])


def decode_is_the_scenarios(plain: dict[str, Any]) -> Callable[[], None] | None:
    """What makes the scenario's own cost that of the decode side again, if it is now; None if it is not."""
    own = value_at(plain, ("replicas", "groups", "decode", "cost"))
    if value_at(plain, ("replicas", "transfer")) is None or own is None or own != plain.get("cost"):
        return None

    def again() -> None:
        plain["cost"] = deepcopy(value_at(plain, ("replicas", "groups", "decode", "cost")))

    return again
