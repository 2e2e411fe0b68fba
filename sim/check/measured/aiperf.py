"""Records of aiperf, `profile_export.jsonl`: a line a request. The settings of the client stand in another file."""

from __future__ import annotations

from batchsim.check.measured.build import Row, check_row, requests_of
from batchsim.check.measured.run import MISSING, Client, MeasuredRun
from batchsim.check.measured.values import Node

FORM = "aiperf"
_OUTPUT = ("usage_completion_tokens", "output_sequence_length")
_UNIT_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}


def is_aiperf(data: dict[str, object]) -> bool:
    return "metadata" in data and "metrics" in data


def read_aiperf(nodes: list[Node], source: str, settings: Node | None) -> MeasuredRun:
    """The run of all records of the profiling phase. `settings`: `profile_export_aiperf.json`, where it was found."""
    rows: list[Row] = []
    warm = turns = 0
    for node in nodes:
        about = node.of("metadata")
        if about.value.get("benchmark_phase", "profiling") != "profiling":
            warm += 1
            continue
        turns += bool(about.value.get("turn_index"))
        rows.append(_row(node, about))
    notes = [f"{warm:,} requests of the warm-up left out"] if warm else []
    if turns:
        notes.append(f"{turns:,} are later turns of conversations, which waited for answers: sent at their own times")
    client, version = (Client(), "") if settings is None else _settings(settings)
    if settings is None:
        notes.append("profile_export_aiperf.json is not beside it: how the client was set is not known")
    requests = requests_of(Node(None, source), rows)
    notes += _miscounted(nodes)
    return MeasuredRun(source, FORM, version, client, requests.figures(), requests, notes=tuple(notes))


def _miscounted(nodes: list[Node]) -> list[str]:
    """A line where the tool's own number of output tokens is not the server's: its ITL is wrong by as much."""
    pairs = [[node.of("metrics").maybe(name, _tokens) for name in _OUTPUT] for node in nodes]
    known = [(server, client) for server, client in pairs if server is not None and client is not None]
    unlike = sum(server != client for server, client in known)
    if not unlike:
        return []
    server, client = (sum(column) for column in zip(*known, strict=True))
    return [f"{unlike:,} answers are longer or shorter by the client: {client:,} tokens, {server:,} by the server"]


def _row(node: Node, about: Node) -> Row:
    metrics = node.of("metrics")
    sent = about.of("request_start_ns").ns(1e-9)
    issued = about.maybe("credit_issued_ns", lambda x: x.ns(1e-9))
    intended = MISSING if issued is None else issued
    prompt = _counted(metrics, "usage_prompt_tokens", "input_sequence_length")
    if node.has("error") or about.value.get("was_cancelled") is True:
        return Row(0 if prompt is None else _tokens(prompt), 0, ok=False, intended=intended, sent=sent)
    first = metrics.maybe("time_to_first_token", _duration)
    gaps = metrics.maybe("inter_chunk_latency", lambda x: x.of("value").items())
    row = Row(
        _tokens(prompt or metrics.of("input_sequence_length")),
        _tokens(_counted(metrics, *_OUTPUT) or metrics.of(_OUTPUT[1])),
        intended=intended,
        sent=sent,
        first=MISSING if first is None else sent + first,
        last=sent + _duration(metrics.of("request_latency")),
        chunks=MISSING if gaps is None else len(gaps) + 1,
    )
    return check_row(node, row)


def _counted(metrics: Node, by_server: str, by_client: str) -> Node | None:
    """A number of tokens by the server, or by the client, who counts the text anew; None without."""
    names = [name for name in (by_server, by_client) if metrics.has(name)]
    return metrics.of(names[0]) if names else None


def _tokens(node: Node) -> int:
    return node.of("value").tokens()


def _duration(node: Node) -> int:
    """A duration in ns; MeasuredError where its unit is none of a time."""
    unit = node.of("unit").text()
    if unit not in _UNIT_S:
        node.bad(f"unit {unit!r} is none of {', '.join(_UNIT_S)}")
    return node.of("value").ns(_UNIT_S[unit])


def _settings(node: Node) -> tuple[Client, str]:
    """How the client was told to send, and aiperf's version."""
    version = node.maybe("aiperf_version", Node.text) or ""
    config = node.of("input_config")
    if config.has("phases"):  # from 0.12 on
        phases = [one for one in config.of("phases").items() if one.value.get("kind", "profiling") == "profiling"]
        if len(phases) != 1:
            config.bad(f"{len(phases)} profiling phases, one is read", "Give the file of a run with one.")
        load, pattern = phases[0], phases[0].maybe("type", Node.text)
        rate = load.maybe("rate", Node.number)
    else:
        load = config.of("loadgen")
        rate, pattern = load.maybe("request_rate", Node.number), load.maybe("request_rate_mode", Node.text)
    most = load.maybe("concurrency", Node.count)
    if rate:
        return Client("open", rate, pattern == "poisson", most), version
    return (Client("closed", max_concurrency=most) if most else Client()), version
