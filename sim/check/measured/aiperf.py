"""Files of aiperf: its records, `profile_export.jsonl`, a line a request; and its aggregates with the settings of the
client, `profile_export_aiperf.json`, which genai-perf writes alike."""

from __future__ import annotations

from batchsim.check.measured.aggregates import with_failures
from batchsim.check.measured.build import Row, check_row, requests_of
from batchsim.check.measured.counts import failure_kind, mean_tokens
from batchsim.check.measured.limits import check_spread
from batchsim.check.measured.run import LATENCIES, MISSING, OF, Client, MeasuredRun
from batchsim.check.measured.values import Node

FORM = "aiperf"
_INPUT = ("usage_prompt_tokens", "input_sequence_length")
_OUTPUT = ("usage_completion_tokens", "output_sequence_length")
_UNIT_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}


def is_aiperf(data: dict[str, object]) -> bool:
    return "metadata" in data and "metrics" in data


def is_aggregates(data: dict[str, object]) -> bool:
    return "input_config" in data and bool({"time_to_first_token", "request_latency"} & data.keys())


def read_aiperf(nodes: list[Node], source: str, settings: Node | None) -> MeasuredRun:
    """The run of all records of the profiling phase. `settings`: `profile_export_aiperf.json`, where it was found."""
    rows: list[Row] = []
    warm = turns = 0
    for node in nodes:
        about = node.of("metadata")
        if about.object().get("benchmark_phase", "profiling") != "profiling":
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
    return MeasuredRun(source, FORM, version, client, requests.figures(), requests, notes=tuple(notes))


def _row(node: Node, about: Node) -> Row:
    metrics = node.of("metrics")
    sent = about.of("request_start_ns").ns(1e-9)
    issued = about.maybe("credit_issued_ns", lambda x: x.ns(1e-9))
    intended = MISSING if issued is None else issued
    prompt = _counted(metrics, *_INPUT)
    server, client = (metrics.maybe(name, _tokens) for name in _OUTPUT)
    if node.has("error") or about.value.get("was_cancelled") is True:
        tokens = [0 if prompt is None else _tokens(prompt), server or client or 0]
        ended = about.maybe("request_end_ns", lambda x: x.ns(1e-9))
        error = node.maybe("error", lambda x: str(x.value)) or "cancelled"
        last = MISSING if ended is None else ended
        return Row(*tokens, ok=False, intended=intended, sent=sent, last=last, why=failure_kind(error))
    first = metrics.maybe("time_to_first_token", _duration)
    gaps = metrics.maybe("inter_chunk_latency", lambda x: x.of("value").items())
    row = Row(
        _tokens(prompt or metrics.of("input_sequence_length")),
        _tokens(metrics.of(_OUTPUT[1])) if server is None else server,
        intended=intended,
        sent=sent,
        first=MISSING if first is None else sent + first,
        last=sent + _duration(metrics.of("request_latency")),
        chunks=MISSING if gaps is None else len(gaps) + 1,
        counted=MISSING if server is None or client is None else client,
        by_engine=server is not None,
    )
    return check_row(node, row)


def _counted(metrics: Node, by_server: str, by_client: str) -> Node | None:
    """A number of tokens by the server, or by the client, who counts the text anew; None without."""
    names = [name for name in (by_server, by_client) if metrics.has(name)]
    return metrics.of(names[0]) if names else None


def _tokens(node: Node) -> int:
    return node.of("value").tokens()


def _duration(node: Node, name: str = "value") -> int:
    """The duration `name` in ns; MeasuredError where its unit is none of a time."""
    unit = node.of("unit").text()
    if unit not in _UNIT_S:
        node.bad(f"unit {unit!r} is none of {', '.join(_UNIT_S)}")
    return node.of(name).ns(_UNIT_S[unit])


def read_aggregates(node: Node, source: str) -> MeasuredRun:
    """The run of `profile_export_aiperf.json` or `profile_export_genai_perf.json`."""
    client, version = _settings(node)
    count = _average(node, "request_count")
    sides = {"prompt_tokens": _INPUT, "output_tokens": _OUTPUT}
    known = {side: [name for name in names if node.has(name)] for side, names in sides.items()}
    if count is None or not all(known.values()):
        missing = (
            "request_count"
            if count is None
            else next(f"{names[-1]}" for side, names in sides.items() if not known[side])
        )
        node.bad(f"aggregates of aiperf without {missing}", "Give profile_export.jsonl, which has the requests.")
    if not count:
        node.bad("request_count is 0: no request ended well", "Look at its error_summary.")
    figures: dict[str, float] = {}
    for latency, key in zip(LATENCIES, ("time_to_first_token", "inter_token_latency", "request_latency"), strict=True):
        for of in OF:
            word = "avg" if of == "mean" else of
            if node.has(key) and node.of(key).has(word):
                figures[f"{latency}_{of}_s"] = _duration(node.of(key), word) / 1e9
    for figure, key in (("throughput_rps", "request_throughput"), ("output_tokens_per_s", "output_token_throughput")):
        rate = _average(node, key)
        figures |= {} if rate is None else {figure: rate}
    means = {"requests": count, **{side: node.of(names[0]).of("avg").number() for side, names in known.items()}}
    means |= {} if client.rate_rps is None else {"sent_rps": client.rate_rps}
    for side, names in known.items():
        for of in ("std", "min", "max"):
            value = node.of(names[0]).maybe(of, Node.number)
            means |= {} if value is None else {f"{side}_{of}": value}
        check_spread(node, side, means[side], means)
    if known["output_tokens"][0] == _OUTPUT[0]:
        notes = mean_tokens(node, figures, means, client=_average(node, _OUTPUT[1]))
    else:
        notes = ["its output tokens are the client's, who counts the text anew: TPOT is off by as much as they are"]
    kinds: dict[str, int] = {}
    for one in node.maybe("error_summary", Node.items) or []:
        kind = failure_kind(str(one.of("error_details").value))
        kinds[kind] = kinds.get(kind, 0) + one.of("count").count(low=0)
    failed = sum(kinds.values()) or _average(node, "error_request_count") or 0
    notes += with_failures(node, means, failed, kinds)
    notes.insert(0, "no requests one by one: profile_export.jsonl has them")
    return MeasuredRun(source, FORM, version, client, figures, None, means, notes=tuple(notes))


def _average(node: Node, name: str) -> float | None:
    return node.of(name).maybe("avg", Node.number) if node.has(name) else None


def _settings(node: Node) -> tuple[Client, str]:
    """The client's configuration, and aiperf's version."""
    version = node.maybe("aiperf_version", Node.text) or ""
    config = node.of("input_config")
    if config.has("phases"):  # from 0.12 on
        phases = [one for one in config.of("phases").items() if one.object().get("kind", "profiling") == "profiling"]
        if len(phases) != 1:
            config.bad(f"{len(phases)} profiling phases, one is read", "Give the file of a run with one.")
        load, pattern = phases[0], phases[0].maybe("type", Node.text)
        rate = load.maybe("rate", Node.number)
    else:
        load = config.of("loadgen") if config.has("loadgen") else config
        if config.has("perf_analyzer"):  # of genai-perf
            load = config.of("perf_analyzer").of("stimulus")
        rate, pattern = load.maybe("request_rate", Node.number), load.maybe("request_rate_mode", Node.text)
    most = load.maybe("concurrency", Node.count)
    if rate:
        return Client("open", rate, pattern == "poisson", most), version
    return (Client("closed", max_concurrency=most) if most else Client()), version
