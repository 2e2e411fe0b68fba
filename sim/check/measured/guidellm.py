"""Reports of guidellm from 0.4 on: several benchmarks a file, each with its requests."""

from __future__ import annotations

from batchsim.check.measured.build import Row, check_row, requests_of
from batchsim.check.measured.counts import failure_kind
from batchsim.check.measured.run import MISSING, Client, MeasuredRun
from batchsim.check.measured.values import Node

FORM = "guidellm"


def is_guidellm(data: dict[str, object]) -> bool:
    return isinstance(data.get("benchmarks"), list) and "metadata" in data


def read_guidellm(node: Node, source: str) -> list[MeasuredRun]:
    """A run for each benchmark of the report."""
    version = node.of("metadata").maybe("guidellm_version", Node.text) or ""
    benchmarks = node.of("benchmarks").items()
    if not benchmarks:
        node.bad("holds no benchmarks", "Give the report of a run that ended.")
    return [_run(one, source, version, number, len(benchmarks)) for number, one in enumerate(benchmarks, 1)]


def _run(node: Node, source: str, version: str, number: int, count: int) -> MeasuredRun:
    client, name = _client(node)
    lists = node.of("requests", "Only reports of guidellm from 0.4 on are read.")
    rows: list[Row | None] = []
    for status in ("successful", "errored", "incomplete"):
        entries = lists.maybe(status, Node.items) or []
        rows += [_row(one, status) for one in entries]
        _check_complete(node, status, len(entries))
    unsent = sum(row is None for row in rows)
    notes = (f"{unsent:,} requests were cancelled before they were sent: left out",) if unsent else ()
    requests = requests_of(node, [row for row in rows if row is not None])
    part = f"{name}, {number} of {count}" if count > 1 else ""
    return MeasuredRun(source, FORM, version, client, requests.figures(), requests, part=part, notes=notes)


def _check_complete(node: Node, status: str, kept: int) -> None:
    """MeasuredError where the report kept a sample of the requests alone: others cannot be replayed."""
    if not node.has("scheduler_metrics") or not node.of("scheduler_metrics").has("requests_made"):
        return
    made = node.of("scheduler_metrics").of("requests_made").maybe(status, lambda x: x.count(low=0))
    if made is not None and kept < made:
        node.bad(f"keeps {kept:,} of {made:,} {status} requests", "Run guidellm without a sample size.")


def _row(node: Node, status: str) -> Row | None:
    """The request; None for one that was cancelled before it was sent."""
    timings = node.of("info").of("timings")
    ns = {
        name: time_ns if (time_ns := timings.maybe(name, Node.ns)) is not None else MISSING
        for name in ("targeted_start", "request_start", "first_token_iteration", "last_token_iteration", "request_end")
    }
    pieces = timings.maybe("token_iterations", lambda x: x.count(low=0))
    if status != "successful":
        tokens = [node.maybe(name, Node.tokens) or 0 for name in ("prompt_tokens", "output_tokens")]
        begun = timings.maybe("request_start", Node.ns) or timings.maybe("resolve_start", Node.ns)
        if not begun:
            return None
        why = failure_kind(node.of("info").maybe("error", lambda x: str(x.value)) or status)
        last = max(ns["request_end"], ns["last_token_iteration"])
        tokens[1] = max(tokens[1], pieces or 0)
        return Row(*tokens, ok=False, intended=ns["targeted_start"], sent=begun, last=last, why=why)
    last = ns["last_token_iteration"]
    row = Row(
        node.of("prompt_tokens").tokens(),
        node.of("output_tokens").tokens(),
        intended=ns["targeted_start"],
        sent=timings.of("request_start").ns(),
        first=ns["first_token_iteration"],
        last=ns["request_end"] if last == MISSING else last,
        chunks=pieces or MISSING,
        by_engine=True,
    )
    return check_row(node, row)


def _client(node: Node) -> tuple[Client, str]:
    """How the requests were sent, and the strategy's name."""
    strategy = node.of("config").of("strategy")
    kind = strategy.of("type_").text()
    rate = strategy.maybe("rate", Node.number)
    if kind in ("poisson", "constant", "async"):
        return Client("open", rate, kind == "poisson"), kind if rate is None else f"{kind} {rate:g}/s"
    if kind in ("concurrent", "synchronous"):
        streams = 1 if kind == "synchronous" else strategy.of("streams").count()
        return Client("closed", max_concurrency=streams), f"{kind} {streams}"
    if kind == "throughput":
        return Client("closed", max_concurrency=strategy.maybe("max_concurrency", Node.count)), kind
    return Client("open"), kind
