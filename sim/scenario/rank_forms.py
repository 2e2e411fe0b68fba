"""How a scenario writes ranks of one model that step together, and the replicas that they are.

    dp_attention: 8
    dp_attention: {ranks: 8, sync_interval: 16, message: 50us, api_servers: 1, eager: true}

Either is `replicas: {count: 8, lockstep: {...}}`. The cost, the KV memory and the limits of a policy are a rank's.
"""

from __future__ import annotations

from batchsim.base.errors import ScenarioError, shown
from batchsim.base.plain import value_at
from batchsim.scenario.document import Document

KEY = "dp_attention"
_EXAMPLE = "dp_attention: 8, or {ranks: 8, sync_interval: 16}"


def take_ranks(document: Document) -> None:
    """Writes `dp_attention` as the replicas that it is. ScenarioError where it is none, or there are others."""
    plain = document.value
    block = plain.pop(KEY, None)
    if block is None:
        return
    if isinstance(block, int) and not isinstance(block, bool):
        block = {"ranks": block}
    where = document.where((KEY,))
    if not isinstance(block, dict):
        raise ScenarioError(f"{where}: {KEY} is {shown(block)}. Write {_EXAMPLE}.")
    there, own = plain.get("replicas"), value_at(plain, ("replicas", "lockstep"))
    is_change = any(path[:1] == (KEY,) for path in document.overrides)  # of ranks that the file has
    if there is not None and not (is_change and isinstance(own, dict)):
        raise ScenarioError(f"{where}: ranks are replicas, and {KEY} and replicas are both given. Keep one of them.")
    count = block.get("ranks", value_at(plain, ("replicas", "count")))
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
