"""A run's charts: the share within the SLO and latencies against load, throughput against speed, replicas over time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from batchsim.base.units import NS_PER_S
from batchsim.drive.fleet.fleet_plan import HELD, UP
from batchsim.metrics.latencies import LATENCIES, TASK_E2E, TASK_TITLE
from batchsim.report.charts import Chart, ChartAxis, Series
from batchsim.report.drawn_values import GPU, USER, counted, log_ends
from batchsim.report.pictures.palette import policy_styles
from batchsim.report.reading import AXIS_LABELS, Floats, PolicyCurve, column, load_name, sweeps, sweeps_at
from batchsim.report.slo_shares import slo_bounds, slo_shares
from batchsim.report.traffic_over_time import traffic_over_time
from batchsim.results.read import Results


def share_charts(results: Results) -> list[Chart]:
    """The share of requests within the SLO against load, of each class where classes have objectives of their own; the
    margin where the objective is of no share of the requests."""
    found = []
    for each in slo_shares(results):
        caption = f"{each.request_class}: {each.objective}" if each.request_class else each.objective
        axis = ChartAxis(f"{each.counted} within the SLO", "share", "nines")
        lines = _lines(results, each.metric, PolicyCurve.values)
        found.append(Chart(caption, _loads(results), axis, lines, each.target))
    if found or np.isnan(column(results.summary, "slo_margin")).all():
        return found
    margin = ChartAxis("margin of the SLO", "share")
    lines = _lines(results, "slo_margin", PolicyCurve.values)
    return [Chart(f"Margin of {results.manifest['objective']}", _loads(results), margin, lines, 0.0)]


def latency_charts(results: Results) -> list[Chart]:
    """P99 latencies against load, of tasks too, without loads at which the queue grows, and the SLO's bound where it
    has one."""
    found = []
    titles = {name: LATENCIES[name].title for name in ("ttft", "tpot", "norm_latency")}
    if f"{TASK_E2E}_p99_s" in results.summary:
        titles[TASK_E2E] = TASK_TITLE
    for name, title in titles.items():
        lines = _lines(results, f"{name}_p99_s", PolicyCurve.stable)
        bounds = slo_bounds(results, name, "p99")
        axis = ChartAxis(title, "seconds", "log")
        found.append(Chart(f"P99 {title}", _loads(results), axis, lines, min(bounds, default=None)))
    return found


def frontier_chart(results: Results) -> Chart:
    """Output tokens/s per GPU against the tokens/s of the median user, a line a policy through its stable loads."""
    styles = policy_styles(sweeps(results))
    lines = []
    for sweep in sweeps(results):
        x, y = sweep.stable(USER), sweep.stable(GPU)
        known = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
        if len(known):
            lines.append(Series(sweep.name, styles[sweep.policy].color, x[known].tolist(), y[known].tolist()))
    axes = ChartAxis("tokens/s of the median user"), ChartAxis("output tokens/s per GPU")
    return Chart("Upper right is better", *axes, lines)


def fleet_charts(results: Results, load: float) -> list[Chart]:
    """Requests sent, replicas that take requests and are held, and the share within the SLO over time: at `load` in
    the first seed, a line a policy."""
    seed = int(column(results.points, "seed").min())
    styles = policy_styles(sweeps(results))
    drawn: dict[str, list[Series]] = {"requests/s sent": [], "replicas": [], "within the SLO": []}
    for sweep in sweeps_at(results, load):
        if sweep.failed[sweep.index(load)]:
            continue
        spans, color = results.spans(sweep.policy, load, seed), styles[sweep.policy].color
        edges_ns, counts, shares = traffic_over_time(results, sweep.policy, load, seed)
        middles = ((edges_ns[1:] + edges_ns[:-1]) / 2 / NS_PER_S).tolist()
        sent = counts / np.diff(edges_ns) * NS_PER_S
        drawn["requests/s sent"].append(Series(sweep.name, color, middles, sent.tolist()))
        drawn["replicas"] += [
            Series(f"{sweep.name}: {words}", color, middles, counted(spans, states, edges_ns).tolist(), dashed=dashed)
            for words, states, dashed in (("taking requests", (UP,), False), ("held, which costs", HELD, True))
        ]
        if shares is not None:
            drawn["within the SLO"].append(Series(sweep.name, color, middles, _known(shares)))
    time = ChartAxis("time since the start of the run", "seconds")
    targets = [each.target for each in slo_shares(results)]
    share = ChartAxis("within the SLO", "share")
    found = []
    for caption, lines in drawn.items():
        is_share = caption == "within the SLO"
        target = targets[0] if is_share and len(targets) == 1 else None
        found.append(Chart(caption, time, share if is_share else ChartAxis(caption), lines, target))
    return [chart for chart in found if chart.series]


def _loads(results: Results) -> ChartAxis:
    name = load_name(results)
    loads = column(results.summary, "load")
    wide = loads.min() > 0 and loads.max() / loads.min() > 8
    return ChartAxis(AXIS_LABELS.get(name, name), scale="log" if wide else "linear")


def _lines(results: Results, metric: str, values: Callable[[PolicyCurve, str], Floats]) -> list[Series]:
    """A line a policy that has a value of `metric` at some load."""
    styles = policy_styles(sweeps(results))
    found = []
    for sweep in sweeps(results):
        y = values(sweep, metric)
        if np.isnan(y).all() and not sweep.unstable.any():
            continue
        half = sweep.half_width(metric)
        style = styles[sweep.policy]
        low, high = log_ends(y, half) if metric.endswith("_s") else (y - half, y + half)
        ends = (_known(low), _known(high)) if np.isfinite(half).any() else ((), ())
        crosses = [bool(each) for each in sweep.unstable]
        dashed = style.linestyle != "-"
        found.append(Series(sweep.name, style.color, sweep.loads.tolist(), _known(y), *ends, crosses, dashed=dashed))
    return found


def _known(values: Floats) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]
