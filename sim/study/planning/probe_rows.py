"""The row of a simulated group in a plan's table of probes, with the percentiles that stand beside its objectives."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchsim.base.units import NS_PER_S
from batchsim.cost.cost_error import Unknown
from batchsim.metrics.latencies import LATENCIES, TASK_E2E, holds_queue
from batchsim.metrics.measure import PERCENTILES
from batchsim.metrics.slo import parse_slo
from batchsim.metrics.stability import JUDGED, is_within_error
from batchsim.study.planning.configurations import Row, goodput_rps, interval_row, offered_rps
from batchsim.study.planning.make import Planned
from batchsim.study.planning.money import cost_per_month
from batchsim.study.planning.probe import Ask, GroupProbe


@dataclass(frozen=True)
class AskedLatency:
    """A bound of an objective: `limit_s`, which `share` of the requests must keep, and the column of the probes, called
    `title`, that has this percentile."""

    column: str
    title: str
    limit_s: float
    share: float


def asked_latencies(objective: str, request_class: str = "") -> list[AskedLatency]:
    """The bounds of an objective of the per-request form, the least of each latency, in the order of LATENCIES.

    Where results have no percentile of its share it is the P99.
    """
    slo = parse_slo(objective)
    assert slo.share is not None, "plans take objectives of the per-request form"
    percent = next((p for p in PERCENTILES if abs(p - 100 * slo.share) < 1e-9), 99)
    of = f"[{request_class}]" if request_class else ""
    asked = []
    titles = {metric: latency.title for metric, latency in LATENCIES.items()} | {TASK_E2E: "task E2E"}
    for metric, name in titles.items():
        limits = [bound.limit_ns / NS_PER_S for bound in slo.bounds if bound.metric == metric]
        if limits:
            column, title = f"{metric}_p{percent}_s{of}", f"{name} p{percent}"
            asked.append(AskedLatency(column, title, min(limits), slo.share))
    return asked


def probe_row(planned: Planned, probe: GroupProbe) -> Row:
    """What was asked of a group, with what it showed, costs and which points these are."""
    group, change = probe.ask.group, probe.ask.change
    offer = planned.book.offer(group)
    return {
        "gpu": group.gpu,
        "policy": group.name,
        "replicas": group.replicas,
        "traffic": change.traffic,
        "dispersion": change.dispersion,
        "prompts": change.prompts,
        "classes": " ".join(change.classes),
        "cost_factor": change.cost_factor,
        "slo_factor": change.slo,
        "window_share": change.window,
        "seeds": probe.seeds,
        probe.counted: probe.num_judged,
        "holds": probe.verdict,
        **interval_row("attainment", probe),
        "margin_low": probe.margin.low,
        "failed": probe.failed,
        "offered_rps": offered_rps(planned, probe),
        "drawn_rps": probe.mean("offered_rps"),
        "goodput_rps": goodput_rps(planned, probe),
        "energy_j_per_output_token": probe.mean("energy_j_per_output_token"),
        "engine_busy_share": probe.mean("engine_busy_share"),
        **_latencies(planned, probe),
        "cost_per_month": cost_per_month(offer, group.replicas),
        "points": " ".join(result["point"] for result in probe.results),
    }


def _latencies(planned: Planned, probe: GroupProbe) -> Row:
    """The P99 of TTFT and TPOT, and of every class, or of all requests where there are none, the percentiles that its
    objective is beside. None of what holds time in the queue within the cost's error of saturation."""
    file = planned.demand.scenario.file
    objectives = {name: each.slo or file.slo for name, each in file.workload.classes.items()} or {"": file.slo}
    names = ["ttft_p99_s", "tpot_p99_s"]
    names += [asked.column for name, slo in objectives.items() for asked in asked_latencies(slo, name)]
    is_open = open_ends(planned, probe) is not None
    return {name: None if is_open and holds_queue(name) else probe.mean(name) for name in names}


def open_ends(planned: Planned, probe: GroupProbe) -> tuple[GroupProbe, GroupProbe] | None:
    """The probes with the shortest and the longest steps, where these were simulated and the load lies within the
    cost's error of saturation; else None."""
    book, change = planned.book, replace(probe.ask.change, slo=1.0)
    error = book.setup(Ask(probe.ask.group)).cost.error
    if isinstance(error, Unknown) or change.cost_factor != 1:
        return None
    asks = [Ask(probe.ask.group, replace(change, cost_factor=factor)) for factor in error.factors]
    if not all(ask in book.results for ask in asks):
        return None
    fast, slow = map(book.probe, asks)
    means = [{name: end.mean(name) for name in JUDGED} for end in (fast, slow)]
    within = is_within_error(error, *means, fast_grows=fast.is_overloaded, slow_grows=slow.is_overloaded)
    return (fast, slow) if within else None
