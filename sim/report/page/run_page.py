"""A run's page: which policy holds the most load within the SLO, its curves, what it assumes; all else in folds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from batchsim.base.files import read_bytes, write_text
from batchsim.base.units import NS_PER_S
from batchsim.drive.fleet.fleet_plan import HELD, UP
from batchsim.report.cost_words import HOW
from batchsim.report.decisions import decided, decision_text
from batchsim.report.page.render import HTML, data_uri, render
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
    load_text,
    load_to_show,
    log_ends,
    num_seeds,
    seeds_text,
    sweeps,
    sweeps_at,
    systems_note,
)
from batchsim.report.sheet import Cell, Chart, ChartAxis, Section, Sentence, Series, Sheet
from batchsim.report.slo_shares import latency_panels, slo_bounds, slo_shares
from batchsim.report.text.run_table import metric_cell, policy_table, usual_columns
from batchsim.report.text.summary_text import run_table, warnings
from batchsim.report.traffic_over_time import counted, traffic_over_time
from batchsim.results.decision import Decision
from batchsim.results.read import Results, curve_marks


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
    page = [Section("Decision", decision(results, load))]
    if charts := share_charts(results):
        page.append(Section("Within the SLO against load", charts=charts))
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


# ---- the sentences


def decision(results: Results, load: float) -> list[Sentence]:
    """Sentences: the policy that sustains the most within the SLO, and how sure that is; what requests get at `load`;
    the assumptions."""
    sure: Sentence = [f"That is of {seeds_text(results)}; ± is half a 95 % interval over seeds. The error of the step"]
    sure += [" costs is in no interval: the assumptions say what is known of it."]
    every = [(sweep, decided(results, sweep)) for sweep in sweeps(results)]
    most = {sweep.policy: of_policy.sure for sweep, of_policy in every if of_policy.sure is not None}
    held = sorted((sweep for sweep, _ in every if sweep.policy in most), key=lambda sweep: -most[sweep.policy])
    untold = _untold(load_name(results), [of_policy for _, of_policy in every])
    each = "; ".join(f"{of_policy.name}: {decision_text(of_policy, load_name(results))}" for _, of_policy in every)
    judged: list[Sentence] = [[f"At the lower end of the interval, {each}."]] if num_seeds(results) > 1 else []
    if not held:
        surely = " whatever the error of the step costs" if untold else ""
        none = f"No policy {'surely ' * bool(judged)}meets {results.manifest['objective']} at any load tested{surely}."
        return [[none], *(judged if any(of_policy.open for _, of_policy in every) else []), *untold, sure]
    shown = next(sweep for sweep in (*held, *sweeps(results)) if sweep.tested(load))
    gets = _what_requests_get(results, shown, shown.index(load))
    return [_who_sustains(results, held, most), *judged, *untold, gets, sure]


def _untold(name: str, every: Sequence[Decision]) -> list[Sentence]:
    """Which loads the error of the step costs decides, a sentence; [] where it decides none."""
    loads = {one.name: [load_text(name, each.load) for each in one.loads if each.by_cost] for one in every}
    each = [f"{policy} at {', '.join(texts)}" for policy, texts in loads.items() if texts]
    return [[f"Whether the SLO is met by {'; by '.join(each)} {HOW}."]] if each else []


def _who_sustains(results: Results, held: list[PolicyCurve], most: Mapping[str, float]) -> Sentence:
    """The first sentence; `held` are the policies that meet the SLO somewhere, ordered by the load that they sustain,
    `most` the highest load of each."""
    name, objective = load_name(results), results.manifest["objective"]
    level = [sweep for sweep in held if not name or most[sweep.policy] == most[held[0].policy]]
    who = " and ".join(sweep.name for sweep in level)
    if not name:
        verb = "meets" if len(level) == 1 else "meet"
        return [f"{who} {verb} {objective}; {len(sweeps(results))} policies were tried."]
    verb = "sustains" if len(level) == 1 else "sustain"
    said: Sentence = [f"{who} {verb} the most within {objective}: up to ", _highest(results, held[0], most)]
    said += [" of the loads tested"]
    crossing = curve_marks(results)[held[0].policy].crossing
    if crossing.load is not None and len(level) == 1 and not held[0].untold.any():  # of several each has its own
        said += [f", with the crossing near {load_text(name, float(f'{crossing.load:.3g}'))}"]
    if others := held[len(level) :]:
        said += [f"; next is {others[0].name}, up to ", _highest(results, others[0], most)]
    return [*said, "."]


def _highest(results: Results, sweep: PolicyCurve, most: Mapping[str, float]) -> Cell:
    load = most[sweep.policy]
    return replace(metric_cell(results, sweep, sweep.index(load), "load"), text=load_text(load_name(results), load))


def _what_requests_get(results: Results, sweep: PolicyCurve, i: int) -> Sentence:
    """The second sentence: latencies and the share within the SLO of a policy at its `i`-th load."""
    where = at_load(load_name(results), float(sweep.loads[i]))
    said: Sentence = [f"{where[0].upper()}{where[1:]}, {sweep.name} has"]
    shown = [panel for panel in latency_panels(results) if panel.latency in ("ttft", "tpot")]
    for ttft, tpot in zip(shown[::2], shown[1::2], strict=True):
        said.append("; of" if len(said) > 1 else " of" if ttft.request_class else "")
        said.append(f" {ttft.request_class}" if ttft.request_class else "")
        said += [" a TTFT p99 of ", metric_cell(results, sweep, i, ttft.metric("p99"))]
        said += [" and a TPOT p99 of ", metric_cell(results, sweep, i, tpot.metric("p99"))]
    for each in slo_shares(results):
        of = f" of {each.request_class}" if each.request_class else ""
        said += ["; ", metric_cell(results, sweep, i, each.metric), f"{of} are within the SLO"]
    return [*said, "."]


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
        charts.append(Chart(f"P99 {panel.title}", _loads(results), axis, lines, min(bounds, default=None)))
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
        if np.isnan(y).all() and not sweep.unstable.any():
            continue
        half = sweep.half_width(metric)
        style = styles[sweep.policy]
        low, high = log_ends(y, half) if metric.endswith("_s") else (y - half, y + half)
        ends = (_known(low), _known(high)) if np.isfinite(half).any() else ((), ())
        crosses = [bool(each) for each in sweep.unstable]
        dashed = style.linestyle != "-"
        lines.append(Series(sweep.name, style.color, sweep.loads.tolist(), _known(y), *ends, crosses, dashed=dashed))
    return lines


def _known(values: Floats) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]
