"""Runs recorded by LLMServingSim's bench: `requests.jsonl`, times taken at the engine, `meta.json` beside it."""

from __future__ import annotations

from batchsim.check.measured.build import Row, check_row, requests_of
from batchsim.check.measured.run import Client, MeasuredRun
from batchsim.check.measured.values import Node

FORM = "LLMServingSim bench"
_TIMES = ("queued_ts", "first_token_ts", "last_token_ts")


def is_llm_serving_sim(data: dict[str, object]) -> bool:
    return {"input_toks", "output_toks", "arrival_time", "first_token_ts"} <= data.keys()


def read_llm_serving_sim(nodes: list[Node], source: str) -> MeasuredRun:
    """The run of all records. Wall clock (`arrival_time`) and the engine's are put together where they are closest."""
    arrivals = [node.of("arrival_time").ns() for node in nodes]
    times = [{name: node.of(name).ns() for name in _TIMES} for node in nodes]
    shift = min(record["queued_ts"] - arrival for record, arrival in zip(times, arrivals, strict=True))
    rows = [
        check_row(
            node,
            Row(
                node.of("input_toks").tokens(),
                node.of("output_toks").tokens(),
                sent=arrival + shift,
                first=record["first_token_ts"],
                last=record["last_token_ts"],
                by_engine=True,
            ),
        )
        for node, record, arrival in zip(nodes, times, arrivals, strict=True)
    ]
    requests = requests_of(Node(None, source), rows)
    note = "times at the engine: neither server nor client is in them"
    return MeasuredRun(source, FORM, "", Client("open"), requests.figures(), requests, notes=(note,))
