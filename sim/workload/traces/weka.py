"""WEKA's agentic traces: a record is a conversation, its calls in seconds after its beginning, sub-agents within it.

Source: the fields, units and meanings of aiperf's loader of them (ai-dynamo/aiperf, adapters/weka/trace_models.py). A
call waits for the answer before it in its list, and for those sub-agents in between that were not launched to run
beside it; a sub-agent's first call waits for the call before its marker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from batchsim.workload.traces.trace_config import Columns
from batchsim.workload.traces.values import clock_reader, shown

COLUMNS = Columns(
    arrival="t_ns",
    prompt="prompt_tokens",
    output="output_tokens",
    hash_ids="hash_ids",
    id="id",
    parent="parent",
    delay="delay_ns",
    ttft="ttft_ns",
    e2e="e2e_ns",
    task="task",
)
"""The columns of the rows of a conversation; times in ns."""
_DEEPEST = 20  # levels of sub-agents
_BLOCKS = 2**63 - 1

Row = dict[str, object]


def is_weka(first: Mapping[str, object]) -> bool:
    """Whether a record is a conversation of calls with `t`, `in` and `out`, or of sub-agents."""
    calls = first.get("requests")
    if not isinstance(calls, list) or not calls or not isinstance(calls[0], dict):
        return False
    return {"t", "in", "out"} <= set(calls[0]) or calls[0].get("type") == "subagent"


class Weka:
    """The calls of conversations as rows, of which each is a task. Ids of blocks are numbered anew: those of scope
    `local` mean another block in every conversation. ValueError for a conversation that cannot be read."""

    def __init__(self, block_size: object) -> None:
        self._block_size = block_size
        self._known: set[str] = set()
        self._numbers: dict[tuple[str, int], int] = {}
        self._clock = {name: clock_reader(name, "s") for name in ("t", "api_time", "think_time", "ttft")}

    def __call__(self, record: Mapping[str, Any]) -> Iterator[Row]:
        name, scope = record.get("id"), record.get("hash_id_scope")
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"id {shown(name)} is no name of a conversation")
        if name in self._known:
            raise ValueError(f"id {shown(name)} is that of an earlier conversation")
        if scope not in ("local", "global"):
            raise ValueError(f"hash_id_scope {shown(scope)} is neither local nor global")
        if record.get("block_size") != self._block_size:
            raise ValueError(f"block_size {shown(record.get('block_size'))} is not the first's, {self._block_size}")
        self._known.add(name)
        rows: list[Row] = []
        self._calls(record.get("requests"), name, [], rows, 1)
        for row in rows:
            yield row | {"task": name, "hash_ids": self._ids(row["hash_ids"], name if scope == "local" else "")}

    def _calls(self, calls: object, task: str, before: list[str], rows: list[Row], depth: int) -> list[str]:
        """Adds the rows of a list of calls that begins after `before`; returns the ids to wait for after it."""
        if not isinstance(calls, list) or not all(isinstance(each, dict) for each in calls):
            raise ValueError(f"requests {shown(calls)} is no list of calls")
        if depth > _DEEPEST:
            raise ValueError(f"sub-agents stand in each other more than {_DEEPEST} deep")
        last, joined = before, list[str]()
        for call in calls:
            kind = call.get("type", "n")
            if kind == "subagent":
                ends = self._calls(call.get("requests"), task, last, rows, depth + 1)
                if call.get("status") != "async_launched":
                    joined += [each for each in ends if each not in last]
            elif kind in ("n", "s"):
                rows.append(self._row(call, f"{task}#{len(rows)}", [*last, *joined]))
                last, joined = [str(rows[-1]["id"])], []
            else:
                raise ValueError(f"type {shown(kind)} is none of n, s and subagent")
        return [*last, *joined]

    def _row(self, call: Mapping[str, Any], name: str, parents: list[str]) -> Row:
        if missing := [each for each in ("t", "in", "out") if each not in call]:
            raise ValueError(f"{missing[0]} is missing in a call")
        times = {each: None if call.get(each) is None else clock(call[each]) for each, clock in self._clock.items()}
        return {
            "t_ns": times["t"],
            "prompt_tokens": call["in"],
            "output_tokens": call["out"],
            "hash_ids": call.get("hash_ids", []),
            "id": name,
            "parent": parents,
            "delay_ns": times["think_time"] if times["api_time"] is None else None,
            "ttft_ns": times["ttft"],
            "e2e_ns": times["api_time"],
        }

    def _ids(self, ids: object, scope: str) -> object:
        if not isinstance(ids, list) or not all(type(each) is int and 0 <= each <= _BLOCKS for each in ids):
            return ids  # which the reader of the column refuses
        return [self._numbers.setdefault((scope, each), len(self._numbers)) for each in ids]
