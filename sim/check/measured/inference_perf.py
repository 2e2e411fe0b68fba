"""Lifecycle reports of inference-perf: a list of requests, or the aggregates of a stage or of the whole run."""

from __future__ import annotations

from batchsim.check.measured.aggregates import with_failures
from batchsim.check.measured.build import Row, check_row, requests_of
from batchsim.check.measured.counts import failure_kind
from batchsim.check.measured.run import MISSING, OF, Client, MeasuredRun
from batchsim.check.measured.values import Node

FORM = "inference-perf"
_LATE_S = 0.01
_HALVED = (
    "TPOT from the means of E2E, TTFT and output length, which the tool counts anew from the text: off by as much as"
    " that is"
)


def is_requests(items: list[object]) -> bool:
    return bool(items) and isinstance(items[0], dict) and {"start_time", "end_time", "info"} <= items[0].keys()


def is_aggregates(data: dict[str, object]) -> bool:
    return "load_summary" in data and "successes" in data


def read_requests(node: Node, source: str) -> MeasuredRun:
    """The run of `per_request_lifecycle_metrics.json`."""
    requests = requests_of(node, [_row(one) for one in node.items()])
    note = "when the client meant to send is not in the file"
    return MeasuredRun(source, FORM, "", Client(), requests.figures(), requests, notes=(note,))


def _row(node: Node) -> Row:
    sent, ended = node.of("start_time").ns(), node.of("end_time").ns()
    failed = node.has("error")
    if failed and not node.has("info"):
        return Row(0, 0, ok=False, sent=sent, last=ended, why=failure_kind(str(node.of("error").value)))
    info = node.of("info")
    asked, answer = info, info
    if info.has("response_metrics"):  # from 0.5 on
        asked, answer = info.of("request_metrics").of("text"), info.of("response_metrics")
    if failed:
        tokens = [asked.maybe("input_tokens", Node.tokens) or 0, answer.maybe("output_tokens", Node.tokens) or 0]
        return Row(*tokens, ok=False, sent=sent, last=ended, why=failure_kind(str(node.of("error").value)))
    usage = answer.of("server_usage") if answer.has("server_usage") else answer
    counted = usage.maybe("completion_tokens", Node.tokens)
    times = [time.ns() for time in answer.maybe("output_token_times", Node.items) or []]
    client = answer.maybe("output_tokens", Node.tokens)
    row = Row(
        asked.of("input_tokens").tokens(),
        answer.of("output_tokens").tokens() if counted is None else counted,
        sent=sent,
        first=times[0] if times else MISSING,
        last=ended,
        chunks=len(set(times)) if times else MISSING,
        counted=MISSING if counted is None or client is None else client,
        by_engine=counted is not None,
    )
    return check_row(node, row)


def read_aggregates(node: Node, source: str) -> MeasuredRun:
    """The run of `stage_N_lifecycle_metrics.json` or `summary_lifecycle_metrics.json`."""
    load, good = node.of("load_summary"), node.of("successes")
    if not good.of("count").count(low=0):
        node.bad("successes.count is 0: no request ended well", "Look at its failures.")
    latency = good.of("latency")
    figures: dict[str, float] = {}
    for name, key in (("ttft", "time_to_first_token"), ("e2e", "request_latency")):
        for of in OF:
            word = "median" if of == "p50" else of
            value = latency.of(key).maybe(word, Node.number) if latency.has(key) else None
            if value is not None:
                figures[f"{name}_{of}_s"] = value
    output = good.of("output_tokens" if good.has("output_tokens") else "output_len").of("mean").number()
    prompt = good.of("prompt_tokens" if good.has("prompt_tokens") else "prompt_len").of("mean").number()
    if {"ttft_mean_s", "e2e_mean_s"} <= figures.keys() and output > 1:
        if figures["e2e_mean_s"] < figures["ttft_mean_s"]:
            node.bad(
                f"mean request_latency {figures['e2e_mean_s']:g} s is below mean TTFT {figures['ttft_mean_s']:g} s"
            )
        figures["tpot_mean_s"] = (figures["e2e_mean_s"] - figures["ttft_mean_s"]) / (output - 1)
    if good.has("throughput"):
        rates = {"throughput_rps": "requests_per_sec", "output_tokens_per_s": "output_tokens_per_sec"}
        figures |= {name: good.of("throughput").of(key).number() for name, key in rates.items()}
    most, rate = load.maybe("concurrency", Node.count), load.maybe("requested_rate", Node.number)
    client = Client("closed", max_concurrency=most) if most else Client("open" if rate else "unknown", rate or None)
    means = {"requests": good.of("count").number(), "prompt_tokens": prompt, "output_tokens": output}
    sent = load.maybe("achieved_rate", Node.number) or rate
    means |= {"sent_rps": sent} if sent else {}
    notes = [_HALVED, *_failures(node, means, figures.get("ttft_mean_s", 0.0)), *_late(load)]
    for side in ("prompt", "output"):
        lengths = next((good.of(f"{side}_{end}") for end in ("tokens", "len") if good.has(f"{side}_{end}")), good)
        for of in ("std", "min", "max"):
            value = lengths.maybe(of, Node.number)
            means |= {} if value is None else {f"{side}_tokens_{of}": value}
    return MeasuredRun(source, FORM, "", client, figures, means=means, notes=tuple(notes))


def _failures(node: Node, means: dict[str, float], first_s: float) -> list[str]:
    """Notes on failures. Failed requests that lasted longer than the others' mean TTFT count as admitted."""
    if not node.has("failures"):
        return []
    bad = node.of("failures")
    lasted_s = bad.of("request_latency").maybe("mean", Node.number) if bad.has("request_latency") else None
    held_s = lasted_s if lasted_s and lasted_s > first_s else 0.0
    return with_failures(node, means, bad.maybe("count", lambda x: x.count(low=0)) or 0, lasted_s=held_s)


def _late(load: Node) -> list[str]:
    """A line where the client sent late on average."""
    delay = load.of("schedule_delay").maybe("mean", lambda x: x.number(low=-1e9)) if load.has("schedule_delay") else 0.0
    return [f"the client was late: by {delay:.3g} s on average"] if delay and delay > _LATE_S else []
