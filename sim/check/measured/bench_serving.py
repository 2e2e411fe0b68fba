"""Results of `vllm bench serve` and of SGLang's `bench_serving`: one object a run, lists with an entry a request."""

from __future__ import annotations

from functools import partial

from batchsim.check.measured.aggregates import is_endless, spreads_of, with_failures
from batchsim.check.measured.build import Row, check_row, requests_of
from batchsim.check.measured.counts import UNLIKE, failure_kind, mean_tokens
from batchsim.check.measured.run import LATENCIES, MISSING, OF, Client, MeasuredRun
from batchsim.check.measured.values import Node, same_lengths

VLLM, SGLANG = "vllm bench serve", "SGLang bench_serving"
_LISTS = ("input_lens", "output_lens", "ttfts", "itls", "errors")
_HOW = {VLLM: "--save-result --save-detailed", SGLANG: "--output-details"}


def is_vllm(data: dict[str, object]) -> bool:
    return {"backend", "request_throughput", "model_id"} <= data.keys()


def is_sglang(data: dict[str, object]) -> bool:
    return {"backend", "request_throughput", "dataset_name"} <= data.keys() and "model_id" not in data


def read_bench(node: Node, source: str, part: str, form: str) -> MeasuredRun:
    """The run of one result, with its requests where the lists of them are there."""
    client = _client(node)
    version = node.maybe("label", Node.text) or ""
    model = node.maybe("model_id", Node.text) or ""
    make = partial(MeasuredRun, source, form, version, client, part=part, model=model)
    if not any(node.has(name) for name in _LISTS):
        figures, means = _aggregates(node), _means(node, client)
        lengths = dict(means)
        itl_s = node.maybe("mean_itl_ms", Node.number) if form == VLLM else None  # SGLang's is of tokens
        notes = mean_tokens(node, figures, means, itl_s=None if itl_s is None else itl_s / 1e3)
        notes += with_failures(node, means, _failed(node))
        means |= spreads_of(node, means, lengths)
        return make(figures, means=means, notes=(f"no requests one by one: {_HOW[form]}", *notes, *_retokenised(node)))
    lists = {name: node.of(name, f"Write the file with {_HOW[form]}.").items() for name in _LISTS}
    starts = node.maybe("start_times", Node.items)
    count = same_lengths(node, lists | ({} if starts is None else {"start_times": starts}))
    rows = [
        _row(i, {name: items[i] for name, items in lists.items()}, None if starts is None else starts[i], form)
        for i in range(count)
    ]
    requests = requests_of(node, rows)
    duration_s = node.maybe("duration", Node.number)
    notes = _retokenised(node)
    return make(requests.figures(duration_s), requests=requests, means=_means(node, client), notes=tuple(notes))


def _failed(node: Node) -> float:
    """The number of failed requests: the file's own, or `num_prompts` less the ones that completed."""
    failed, asked = (node.maybe(name, lambda x: x.count(low=0)) for name in ("failed", "num_prompts"))
    return failed or max((asked or 0) - node.of("completed").count(low=0), 0)


def _retokenised(node: Node) -> list[str]:
    """A note where SGLang's client, which tokenises the text anew, counts other output tokens than the engine reported;
    else []."""
    ours, theirs = (node.maybe(f"total_output_tokens{end}", Node.number) for end in ("", "_retokenized"))
    if not ours or theirs is None or abs(theirs / ours - 1) <= UNLIKE:
        return []
    return [f"the client counted {theirs:,.0f} output tokens anew, the engine {ours:,.0f}, which are taken"]


def _row(number: int, values: dict[str, Node], start: Node | None, form: str) -> Row:
    error = values["errors"].value
    if not isinstance(error, str) and error is not None:
        values["errors"].text()
    gaps = [gap.ns() for gap in values["itls"].items()]
    sent = MISSING if start is None else start.ns()
    prompt, output = values["input_lens"].tokens(), values["output_lens"].tokens()
    base = 0 if start is None else sent
    first = base + values["ttfts"].ns()
    if error or (not output and not gaps and first == base):
        came = len(gaps) + (first > base)  # an answer that broke off has its times, and no length
        return Row(prompt, output or came, ok=False, sent=sent, last=first + sum(gaps), why=failure_kind(error or ""))
    chunks = len(gaps) + 1 if form == VLLM else MISSING  # SGLang's client shares a chunk's gap among its tokens
    row = Row(prompt, output, sent=sent, first=first, last=first + sum(gaps), chunks=chunks)
    return check_row(
        Node(values["output_lens"].value, f"{values['output_lens'].where.partition(': ')[0]}: request {number + 1}"),
        row,
    )


def _client(node: Node) -> Client:
    most = node.maybe("max_concurrency", Node.count)
    asked = node.value.get("request_rate")
    if asked in (None, "trace"):
        return Client("open" if asked else "unknown", max_concurrency=most)
    if is_endless(asked):
        return Client("at_once" if most is None else "closed", max_concurrency=most)
    rate = node.of("request_rate").number()
    if not rate:
        node.bad("request_rate is 0")
    burstiness = node.maybe("burstiness", Node.number)
    return Client("open", rate, burstiness in (None, 1.0) and not node.has("ramp_up_strategy"), most)


def _aggregates(node: Node) -> dict[str, float]:
    """The figures of a result without its requests."""
    names = {"ttft": ("ttft",), "tpot": ("tpot",), "e2e": ("e2el", "e2e_latency")}
    figures: dict[str, float] = {}
    for latency in LATENCIES:
        for of in OF:
            words = ("median", "p50") if of == "p50" else (of,)
            for key in (f"{word}_{name}_ms" for word in words for name in names[latency]):
                if node.has(key):
                    figures[f"{latency}_{of}_s"] = node.of(key).number() / 1e3
    for name, key in (("throughput_rps", "request_throughput"), ("output_tokens_per_s", "output_throughput")):
        if node.has(key):
            figures[name] = node.of(key).number()
    if "ttft_mean_s" not in figures:
        node.bad("has neither requests nor mean_ttft_ms", "Write the file with the tool's details of requests.")
    return figures


def _means(node: Node, client: Client) -> dict[str, float]:
    """Number and mean lengths of the requests that ended well, and the rate asked for."""
    completed = node.of("completed").count(low=0)
    if not completed:
        node.bad("completed is 0: no request ended well", "Look at its errors.")
    totals = {"prompt_tokens": "total_input_tokens", "output_tokens": "total_output_tokens"}
    means = {name: node.of(key).number() / completed for name, key in totals.items()}
    rate = {} if client.rate_rps is None else {"sent_rps": client.rate_rps}
    return {"requests": float(completed)} | means | rate
