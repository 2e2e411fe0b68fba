"""Runs given by aggregates alone, a row or an object each: their figures, clients, mean lengths and spreads."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from batchsim.check.measured.counts import failures_note, mean_tokens
from batchsim.check.measured.limits import check_spread
from batchsim.check.measured.run import LATENCIES, OF, Client, MeasuredRun
from batchsim.check.measured.values import Node

FORM = "tidy table"
UNIT_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
USERS = ("users", "num_users", "concurrency", "max_concurrency", "conc")
"""Names of the most requests in flight, which are one thing: a limit where a rate is asked for, else a loop's users."""
MODEL = ("model", "model_id", "model_name")
_ASKED = ("requested_rps", "requested_rate", "request_rate")
_RATES = {
    "throughput_rps": ("completed_rps", "throughput_rps", "request_throughput"),
    "output_tokens_per_s": ("output_tokens_per_s", "output_throughput"),
}
_MEANS = {
    "requests": ("requests", "completed", "num_requests"),
    "prompt_tokens": ("prompt_tokens_mean", "prompt_tokens", "input_tokens_mean", "input_tokens"),
    "output_tokens": ("output_tokens_mean", "output_tokens"),
}
_ENGINE_TOKENS = ("completion_tokens_mean", "usage_completion_tokens_mean", "server_output_tokens_mean")
SAME = 0.02
"""Share by which lengths and numbers of requests differ between repeats of one load at most."""
_FAILED = ("failed", "failures", "num_failed", "error_count")
_SPREADS = ("std", "min", "max")
_NAMES = ("config", "part", "name", "stage", "run")


def figure_of(name: str) -> tuple[str, float] | None:
    """The figure that column `name` has, and the seconds of its unit; None for another column."""
    match = re.fullmatch(r"(ttft|tpot|e2e|e2el|itl)_(mean|p50|median|p90|p99)(?:_(s|ms|us|ns))?", name)
    if match is None:
        return None
    latency, of, unit = match.groups()  # without a unit it is refused when read
    return f"{latency.removesuffix('l')}_{'p50' if of == 'median' else of}_s", UNIT_S.get(unit, 0.0)


def runs_of_rows(rows: Sequence[Node], source: str) -> list[MeasuredRun]:
    """A run for each row of a table; rows of one name that are no repeats of one load are distinguished by number."""
    models = len({str(row.value[name]) for row in rows for name in MODEL if row.has(name)}) > 1
    runs = [_run_of_row(row, source, models=models) for row in rows]
    first = {run.part: run for run in reversed(runs)}
    unlike = {run.part for run in runs if not _same_load(run, first[run.part])}
    return [
        replace(run, part=", ".join(filter(None, (run.part, f"row {number}")))) if run.part in unlike else run
        for number, run in enumerate(runs, 1)
    ]


def _same_load(one: MeasuredRun, other: MeasuredRun) -> bool:
    means = ((one.means.get(name, 0.0), other.means.get(name, 0.0)) for name in _MEANS)
    return one.client == other.client and all(math.isclose(*pair, rel_tol=SAME) for pair in means)


def _run_of_row(row: Node, source: str, *, models: bool) -> MeasuredRun:
    """The run of one row of a table; `models`: the table has several, so that its name says which it is of."""
    figures: dict[str, float] = {}
    for name in row.object():
        figure = figure_of(name)
        if figure is not None and not figure[1]:
            row.bad(f"{name} has no unit", f"Name the column {name}_s or {name}_ms.")
        if figure is not None and row.has(name):
            figures[figure[0]] = row.of(name).number() * figure[1]
    itl_s = figures.pop("it_mean_s", None)
    figures = {name: value for name, value in figures.items() if not name.startswith("it_")}
    for latency in LATENCIES:
        ordered = [figures[f"{latency}_{of}_s"] for of in OF if of != "mean" and f"{latency}_{of}_s" in figures]
        if ordered != sorted(ordered):
            row.bad(f"percentiles of {latency} fall: {', '.join(f'{x:g}' for x in ordered)} s")
    means = _known(row, _MEANS)
    client_tokens = means.get("output_tokens")
    means |= _known(row, {"output_tokens": _ENGINE_TOKENS})
    for name in ("prompt_tokens", "output_tokens"):
        if name not in means:
            row.bad(f"has no column of {name}", f"Add {name}_mean.")
    client_means = means | ({} if client_tokens is None else {"output_tokens": client_tokens})
    figures |= _known(row, _RATES)
    counted = client_tokens if any(row.has(name) for name in _ENGINE_TOKENS) else None
    notes = mean_tokens(row, figures, means, itl_s=itl_s, client=counted)
    rate = _rate(row, ("sent_rps", *_ASKED))
    if rate is not None and math.isfinite(rate):
        means["sent_rps"] = rate
    failed = next((row.of(name).count(low=0) for name in _FAILED if row.has(name)), 0)
    notes += with_failures(row, means, failed, among=not row.has("completed"))
    means |= spreads_of(row, means, client_means)
    model = next((str(row.value[name]) for name in MODEL if row.has(name)), "")
    words = [model] * models
    words += [
        str(row.value[name]) if name != "stage" else f"stage {row.value[name]}" for name in _NAMES if row.has(name)
    ]
    version = row.maybe("image", Node.text) or row.maybe("version", lambda x: str(x.value)) or ""
    return MeasuredRun(
        source, FORM, version, _client(row), figures, None, means, ", ".join(words), model, notes=tuple(notes)
    )


def with_failures(
    node: Node,
    means: dict[str, float],
    failed: float,
    kinds: Mapping[str, int] | None = None,
    *,
    among: bool = False,
    lasted_s: float = 0.0,
) -> list[str]:
    """Takes `failed` requests out of `means` where they are `among` its requests; returns notes on them. With a known
    mean duration `lasted_s` they are replayed; else the rate of sending is scaled to the others. MeasuredError where no
    other request is left."""
    if not failed or not (requests := means.get("requests")):
        return []
    total = requests if among else requests + failed
    if total <= failed:
        node.bad(f"{failed:,.0f} of its {total:,.0f} requests failed", "Look at their errors.")
    means |= {"requests": total - failed, "ended_well": (total - failed) / total}
    (note,) = failures_note(kinds or {"": round(failed)}, total)
    if lasted_s:
        means |= {"given_up": failed, "given_up_s": lasted_s}
        return [f"{note}; they lasted {lasted_s:.3g} s on average, and are played until then"]
    if "sent_rps" in means:
        means["sent_rps"] *= means["ended_well"]
    return [f"{note}, and they are not played: the file does not tell whether they held the engine"]


def _known(row: Node, names: Mapping[str, Sequence[str]]) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, known in names.items():
        column = next((column for column in known if row.has(column)), None)
        if column is not None:
            numbers[name] = row.of(column).number()
    return numbers


def is_endless(value: Any) -> bool:
    """Whether a rate is infinite, as benchmark clients write that all is sent at once."""
    return value == math.inf or (isinstance(value, str) and value.strip().lower() in ("inf", "infinity", "+inf"))


def _rate(row: Node, names: Sequence[str]) -> float | None:
    name = next((name for name in names if row.has(name)), None)
    if name is None:
        return None
    return math.inf if is_endless(row.value[name]) else row.of(name).number()


def most_in_flight(row: Node) -> int | None:
    """The most requests in flight in a row of a table, by any name of USERS; None if it has none. MeasuredError where
    two differ."""
    limits = {name: row.of(name).count() for name in USERS if row.has(name)}
    if len({*limits.values()}) > 1:
        row.bad(f"{' and '.join(f'{name} {most}' for name, most in limits.items())} are one thing", "Keep one of them.")
    return next(iter(limits.values()), None)


def _client(row: Node) -> Client:
    most = most_in_flight(row)
    asked = _rate(row, _ASKED if most is not None else (*_ASKED, "sent_rps"))
    if asked == math.inf or (most is not None and not asked):
        return Client("at_once" if most is None else "closed", max_concurrency=most)
    return Client("open" if asked else "unknown", asked or None, poisson=True, max_concurrency=most)


def spreads_of(node: Node, means: Mapping[str, float], client_means: Mapping[str, float]) -> dict[str, float]:
    """Spreads of the lengths in the file: `prompt_tokens_std`, `_min`, `_max` and those of output; or, by the options
    of `random` data sets, equally likely from `_min` to `_max`. {} where it has none. `client_means`: the mean lengths
    by the same count. MeasuredError where these are not between the shortest and the longest."""
    spreads: dict[str, float] = {}
    drawn = node.has("random_range_ratio") and str(node.value.get("dataset_name") or "random").startswith("random")
    for side, asked in (
        ("prompt_tokens", ("random_input_len", "isl")),
        ("output_tokens", ("random_output_len", "osl")),
    ):
        for of in _SPREADS:
            if node.has(f"{side}_{of}"):
                spreads[f"{side}_{of}"] = node.of(f"{side}_{of}").number()
        check_spread(node, side, client_means[side], spreads)
        if drawn and means[side] and f"{side}_std" not in spreads:
            ratio = node.of("random_range_ratio").number(high=1.0)
            full = next((node.of(name).number(low=1) for name in asked if node.has(name)), None)
            spreads |= dict(zip((f"{side}_min", f"{side}_max"), _range(ratio, full, means[side]), strict=True))
    return spreads


def _range(ratio: float, full: float | None, mean: float) -> tuple[float, float]:
    """The lengths between which `--random-range-ratio` draws: `ratio` × the length to the length (SGLang, InferenceMAX,
    vLLM to 0.8) or 1 ± `ratio` times it (vLLM from 0.9 on), whichever has the mean that was measured."""
    full = 2 * mean / (1 + ratio) if full is None else full
    around = abs(mean / full - 1) < abs(mean / full - (1 + ratio) / 2)
    return ((1 - ratio) * full, (1 + ratio) * full) if around else (ratio * full, full)
