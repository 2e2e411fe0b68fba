"""A run's page: which policy holds the most load within the SLO, its curves, what it assumes; all else in folds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from batchsim.base.files import read_bytes, write_text
from batchsim.base.units import NS_PER_S
from batchsim.drive.fleet.fleet_plan import HELD, UP
from batchsim.metrics.latencies import holds_queue
from batchsim.report.page.render import HTML, data_uri, render
from batchsim.report.page.run_decision import decision
from batchsim.report.pictures.palette import policy_styles
from batchsim.report.reading import (
    AXIS_LABELS,
    GPU,
    USER,
    Floats,
    PolicyCurve,
    at_load,
    column,
    load_name,
    load_to_show,
    log_ends,
    num_seeds,
    sweeps,
    sweeps_at,
    systems_note,
)
from batchsim.report.sheet import Chart, ChartAxis, Section, Sentence, Series, Sheet
from batchsim.report.slo_shares import latency_panels, slo_bounds, slo_shares
from batchsim.report.text.run_table import policy_table, usual_columns
from batchsim.report.text.summary_text import run_table, warnings
from batchsim.report.traffic_over_time import counted, traffic_over_time
from batchsim.results.read import Results


def write_run_page(results: Results, pictures: Sequence[Path], load: float | None = None) -> Path:
    """Writes the page of a run into its folder and returns its path. Tables of one load are at `load`, by default that
    which `load_to_show` gives; `pictures`, PNG files, stand in a fold."""
    load = load_to_show(results) if load is None else load
    images = {path.name: data_uri(read_bytes(path), "png") for path in pictures}
    sections = run_sections(results, load, list(images))
    said = "Simulated by batchsim. Every number of the tables is a cell of summary.csv beside this page."
    files = ["Beside this page: summary.csv", "points.csv", "manifest.json", "scenario.yaml"]
    sheet = Sheet("Policies against load", results.manifest["scenario_name"], sections, files)
    path = results.path / HTML
    write_text(path, render(sheet, said, images))
    return path


def run_sections(results: Results, load: float, pictures: Sequence[str] = ()) -> list[Section]:
    """The sections of a run's page in their order."""
    answer, how_sure = decision(results)
    page = [Section("Decision", [*answer, *how_sure])]
    if charts := share_charts(results):
        page.append(Section("Within the SLO against load", _marks(results), charts=charts))
    page.append(Section("Latency against load", charts=latency_charts(results)))
    if (results.scenario.get("replicas") or {}).get("autoscaler"):
        page.append(Section("Replicas over time", charts=fleet_charts(results, load)))
    at = f"Policies {at_load(load_name(results), load)}"
    page.append(Section(at, views=[run_table(results, load)]))
    if classes := list(results.scenario["workload"].get("classes", {})):
        columns = [f"{metric}[{name}]" for name in classes for metric in ("in_slo", "ttft_p99_s")]
        shown = [(sweep, sweep.index(load)) for sweep in sweeps_at(results, load)]
        page.append(Section("What each class gets", views=[policy_table(results, shown, columns)]))
    page.append(Section("Assumptions", _assumptions(results, load)))
    page.append(Section("Throughput against what a user gets", charts=[frontier_chart(results)], folded=True))
    every = [(sweep, i) for sweep in sweeps(results) for i in range(len(sweep.loads))]
    columns = ["load", *usual_columns(results, every)]
    page.append(Section("Every load", views=[policy_table(results, every, columns, brief=True)], folded=True))
    if pictures:
        page.append(Section("Pictures", pictures=[(name, name) for name in pictures], folded=True))
    return page


def _marks(results: Results) -> list[Sentence]:
    """What shades, crosses and wide lines of the charts mean."""
    shades = ["Shaded: 95 % intervals over seeds."] if num_seeds(results) > 1 else []
    crosses = ["A cross: the queue grows."] if any(sweep.grows.any() for sweep in sweeps(results)) else []
    lines = ["A wide line: another with the same values lies on it."] if len(sweeps(results)) > 1 else []
    return [[" ".join(said)]] if (said := shades + crosses + lines) else []


def _assumptions(results: Results, load: float) -> list[Sentence]:
    """What a run rests on, a line each: costs, KV memory, the workload, and every warning that its table has."""
    manifest = results.manifest
    drawn = next((each for each in manifest["workload"] if each["load"] == load), manifest["workload"][0])
    lines = [manifest["heading"], manifest["kv"], drawn["text"], *drawn["notes"], systems_note(results)]
    return [[line] for line in (*lines, *warnings(results, load)) if line]


# ---- the charts


def share_charts(results: Results) -> list[Chart]:
    """The share of requests within the SLO against load, of each class where classes have objectives of their own; the
    margin where the objective is of no share of the requests."""
    charts = []
    for each in slo_shares(results):
        caption = f"{each.request_class}: {each.objective}" if each.request_class else each.objective
        axis = ChartAxis(f"{each.counted} within the SLO", "share", "nines")
        lines = _lines(results, each.metric, PolicyCurve.values)
        charts.append(Chart(caption, _loads(results), axis, lines, each.target))
    if charts or np.isnan(column(results.summary, "slo_margin")).all():
        return charts
    margin = ChartAxis("margin of the SLO", "share")
    lines = _lines(results, "slo_margin", PolicyCurve.values)
    return [Chart(f"Margin of {results.manifest['objective']}", _loads(results), margin, lines, 0.0)]


def latency_charts(results: Results) -> list[Chart]:
    """P99 latencies against load, of tasks too, without loads at which the queue grows, and the SLO's bound where it
    has one."""
    charts = []
    for panel in latency_panels(results):
        lines = _lines(results, panel.metric("p99"), PolicyCurve.stable)
        bounds = slo_bounds(results, panel, "p99")
        axis = ChartAxis(panel.title, "seconds", "log")
        untold = holds_queue(panel.metric("p99")) and any(sweep.within_error.any() for sweep in sweeps(results))
        note = "Within the cost's error of saturation there is no number, and no mark." if untold else ""
        asked = min(bounds, default=None)
        charts.append(Chart(f"P99 {panel.title}", _loads(results), axis, lines, asked, note=note))
    return charts


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
    charts = []
    for caption, lines in drawn.items():
        is_share = caption == "within the SLO"
        target = targets[0] if is_share and len(targets) == 1 else None
        charts.append(Chart(caption, time, share if is_share else ChartAxis(caption), lines, target))
    return [chart for chart in charts if chart.series]


def _loads(results: Results) -> ChartAxis:
    name = load_name(results)
    loads = column(results.summary, "load")
    wide = loads.min() > 0 and loads.max() / loads.min() > 8
    return ChartAxis(AXIS_LABELS.get(name, name), scale="log" if wide else "linear")


def _lines(results: Results, metric: str, values: Callable[[PolicyCurve, str], Floats]) -> list[Series]:
    """A line a policy that has a value of `metric` at some load."""
    styles = policy_styles(sweeps(results))
    lines = []
    for sweep in sweeps(results):
        y = values(sweep, metric)
        if np.isnan(y).all() and not sweep.grows.any():
            continue
        half = sweep.half_width(metric)
        style = styles[sweep.policy]
        low, high = log_ends(y, half) if metric.endswith("_s") else (y - half, y + half)
        ends = (_known(low), _known(high)) if np.isfinite(half).any() else ((), ())
        crosses = [bool(each) for each in sweep.grows]
        dashed = style.linestyle != "-"
        lines.append(Series(sweep.name, style.color, sweep.loads.tolist(), _known(y), *ends, crosses, dashed=dashed))
    return lines


def _known(values: Floats) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]
