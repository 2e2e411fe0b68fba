"""How a scenario writes ranks of one model that step together, and the replicas that they are.

    dp_attention: 8
    dp_attention: {ranks: 8, sync_interval: 16, message: 50us, api_servers: 1, eager: true}
    deployment: {engine: vllm, dp_attention: 8, ...}

Each is `replicas: {count: 8, lockstep: {...}}`. The KV memory and the limits of a policy are a rank's,
and so is a stated cost.
"""

from __future__ import annotations

from typing import Any

from batchsim.base.errors import ScenarioError, shown
from batchsim.base.plain import value_at
from batchsim.scenario.document import Document, Path

KEY = "dp_attention"
_LOCKSTEP = ("replicas", "lockstep")
ENGINES = ("vllm", "sglang", "tensorrt_llm")
"""Engines whose attention groups are simulated as ranks that step together."""
_NAMES: dict[Path, str] = {("replicas",): KEY, _LOCKSTEP: "", ("replicas", "count"): "ranks"}
"""What messages call the keys of replicas that are ranks."""
_EXAMPLE = "dp_attention: 8, or {ranks: 8, sync_interval: 16}"


def take_ranks(document: Document) -> None:
    """Writes `dp_attention` as the replicas that it is. ScenarioError where it is none, or there are others."""
    plain = document.value
    block, groups = plain.pop(KEY, None), _groups_of(plain)
    if block is None:
        if groups is None and _is_changed(document):
            plain.pop("replicas", None)
        if groups is None or (plain.get("replicas") is not None and value_at(plain, _LOCKSTEP) is None):
            return
        plain.setdefault("replicas", {}).update({"count": groups})
        plain["replicas"].setdefault("lockstep", {})
        document.named |= _NAMES
        return
    if isinstance(block, int) and not isinstance(block, bool):
        block = {"ranks": block}
    where = document.where((KEY,))
    if not isinstance(block, dict):
        raise ScenarioError(f"{where}: {KEY} is {shown(block)}. Write {_EXAMPLE}.")
    there, own = plain.get("replicas"), value_at(plain, _LOCKSTEP)
    is_change = any(path[:1] == (KEY,) for path in document.overrides)  # of ranks that the file has
    if there is not None and not (is_change and isinstance(own, dict)):
        raise ScenarioError(f"{where}: ranks are replicas, and {KEY} and replicas are both given. Keep one of them.")
    count = block.get("ranks", value_at(plain, ("replicas", "count")) if groups is None else groups)
    if groups is not None and count != groups:
        raise ScenarioError(
            f"{where}: {KEY} has {shown(count)} ranks, and deployment.{KEY} {groups} groups, which are the same. Write"
            " their number in the deployment alone."
        )
    options = (own or {}) | {key: value for key, value in block.items() if key != "ranks"}
    if count is None:
        raise ScenarioError(f"{where}: {KEY} has no ranks. Write {_EXAMPLE}.")
    if count == 1 and not options:
        plain.pop("replicas", None)
        return
    plain["replicas"] = (there or {}) | {"count": count, "lockstep": options}
    document.moved((KEY,), ("replicas",))
    document.moved((KEY,), ("replicas", "lockstep"))
    document.moved((KEY, "ranks"), ("replicas", "count"))
    document.named |= _NAMES


def _is_changed(document: Document) -> bool:
    """Whether a deployment's groups were changed since they were written as ranks."""
    changed = any(path[1:] in ((KEY,), ("engine",)) for path in document.overrides)
    return changed and value_at(document.value, _LOCKSTEP) is not None


def _groups_of(plain: dict[str, Any]) -> int | None:
    """The attention groups of a deployment whose engine has ranks; None where it has one, or there is none."""
    stated = next((block for key in ("deployment", "cost") if isinstance(block := plain.get(key), dict)), {})
    groups = stated.get(KEY)
    return groups if stated.get("engine") in ENGINES and isinstance(groups, int) and groups > 1 else None
