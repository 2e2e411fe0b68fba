"""Pictures of one point of a run, one load and one seed: batch, queue and KV use over time, and spread of latencies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import NDArray

from batchsim.base.units import NS_PER_S, parse_duration_ns
from batchsim.metrics.latencies import LATENCIES
from batchsim.report.pictures.curve_lines import hidden_under, widened
from batchsim.report.pictures.engine_lanes import ROW_INCH, WAITS, draw_lane_shares, lane_shares
from batchsim.report.pictures.fleet_picture import draw_replicas, replica_handles
from batchsim.report.pictures.palette import policy_styles
from batchsim.report.pictures.style import (
    GREY,
    figure,
    frame,
    house_style,
    nines_axis,
    policy_legend,
    remark,
    save,
    time_axis_log,
)
from batchsim.report.reading import Floats, at_load, check_load, column, load_name, sweeps, sweeps_at, texts
from batchsim.results.knobs import asks_for_no_tokens
from batchsim.results.read import Results, blocks_by_replica, scenario_of

# Averages over 1/400 of the time shown: two pixels of the picture.
_BINS = 400
# Time shown at most, as a multiple of the time of the last arrival: an overloaded run may drain for hours.
_DRAIN_SHOWN = 1.2
_REPLICAS_INCH = 0.7  # the row of how many replicas there were
_TALL_PANELS = 6  # of more policies the panels are lower, so that a screen holds them
_KV_COLOR = "#B9B9B9"
_READ = ("sent_ns", "first_delivery_ns", "delivered_ns", "output_tokens")  # by the latencies that are spread
_WITHOUT_TOKENS = {"e2e": LATENCIES["e2e"].title}
_SPREADS = {"ttft": LATENCIES["ttft"].title, "norm_latency": "Normalised latency (E2E / output tokens)"}


def timeline(results: Results, path: Path | str, load: float, seed: int) -> None:
    """Writes running and waiting sequences and KV use over time, one panel for each policy, at one load and seed; below
    it, of engines ahead of results, how busy host and device were, and where it changed how many replicas there were.

    >>> batchsim.timeline(results, "timeline.png", load=20, seed=0)
    """
    with house_style():
        save(timeline_figure(results, load, seed), path)


def timeline_figure(results: Results, load: float, seed: int) -> Figure:
    """The figure that `timeline` writes."""
    check_load(results, load)
    policies = [sweep for sweep in sweeps_at(results, load) if not sweep.failed[sweep.index(load)]]
    tables = [(results.steps(s.policy, load, seed), results.requests(s.policy, load, seed)) for s in policies]
    ended_ns = max(_ended_ns(steps) for steps, _ in tables)
    last_arrival_ns = max(column(requests, "arrival_ns").max() for _, requests in tables)
    # Work that arrives all at once has nothing but a drain: it is shown whole.
    until_ns = min(ended_ns, _DRAIN_SHOWN * last_arrival_ns) if last_arrival_ns > 0 else ended_ns
    edges_ns = np.linspace(0, until_ns, _BINS + 1)
    lanes = [lane_shares(results, sweep.policy, load, seed, edges_ns) for sweep in policies]
    with house_style():
        panel_inch = 1.75 if len(policies) <= _TALL_PANELS else 1.15
        spans = [results.spans(sweep.policy, load, seed) for sweep in policies]
        scaled = [len({span.start_ns for span in of_policy}) > 1 for of_policy in spans]  # replicas came or went
        heights = [
            inch
            for of_policy, changed in zip(lanes, scaled, strict=True)
            for inch in (panel_inch, ROW_INCH * len(of_policy), _REPLICAS_INCH * changed)
            if inch
        ]
        fig = figure(11.0, 1.6 + sum(heights))
        axes = list(fig.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0])
        styles = policy_styles(sweeps(results))
        panels = iter(axes)
        each = zip(policies, tables, lanes, spans, scaled, strict=True)
        for sweep, (steps, requests), shares, replicas, changed in each:
            ax, color = next(panels), styles[sweep.policy].color
            ax.sharey(axes[0]) if ax is not axes[0] else None
            blocks = blocks_by_replica(results, sweep.policy)
            draw_timeline(ax, steps, requests, edges_ns, blocks, color, ahead=bool(shares))
            ax.set_title(sweep.labels[sweep.index(load)], color=color, weight="bold")
            if shares:
                draw_lane_shares(next(panels), shares, edges_ns / _scale(edges_ns[-1]), color)
            if changed:
                draw_replicas(next(panels), replicas, edges_ns, edges_ns / _scale(edges_ns[-1]), color)
        axes[-1].set_xlabel("time since the start of the run (min)" if _in_minutes(until_ns) else "time (s)")
        handles = [
            Line2D([], [], color=GREY, label="running (policy's colour)"),
            Line2D([], [], color="black", linewidth=1.1, label="waiting"),
            Patch(color=_KV_COLOR, alpha=0.55, label="KV blocks in use (right axis)"),
        ]
        if any(lanes):
            handles.append(Patch(color=GREY, label="host, device: share of the time at work"))
            handles.append(Patch(**WAITS, label="device stands still for the host"))
        if any(scaled):
            handles += replica_handles()
        frame(
            fig,
            results,
            f"What ran and what waited {at_load(load_name(results), load)}, seed {seed}",
            f"measured at: {results.manifest['measured_at']} · averages over {until_ns / _BINS / NS_PER_S:.2g} s"
            " · sequences: linear to 1, "
            "then logarithmic · dotted: the last arrival",
            handles,
        )
    return fig


def draw_timeline(
    ax: Axes,
    steps: pd.DataFrame,
    requests: pd.DataFrame,
    edges_ns: Floats,
    num_blocks: Sequence[int],
    color: str,
    *,
    ahead: bool = False,
) -> None:
    """Draws running and waiting sequences and KV use, each averaged over every interval of `edges_ns`.

    During a step the counts are those its scheduler left; between steps nothing counts as running, and every request in
    the system as waiting; but in an engine `ahead` of results, whose steps follow each other as the host allows, those
    of the step before go on. `num_blocks` are the KV blocks of each replica; the replicas' counts are added up.
    """
    if steps.empty:
        remark(ax, "no step was made")
        return
    replicas = np.unique(column(steps, "replica"))
    curves = []
    for replica in replicas:
        own = [table.take(np.flatnonzero(column(table, "replica") == replica)) for table in (steps, requests)]
        curves.append(_replica_curves(own[0], own[1], edges_ns, num_blocks[int(replica)], ahead=ahead))
    running, waiting, used = np.sum(curves, axis=0)
    scale = _scale(edges_ns[-1])
    edges = edges_ns / scale
    ax.set_yscale("symlog", linthresh=1, linscale=0.5)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_ylabel("sequences")
    ax.set_xlim(0, edges[-1])
    _draw_kv(ax, used / sum(num_blocks[int(replica)] for replica in replicas), edges)
    ax.stairs(running, edges, baseline=None, color=color, linewidth=1.6)
    ax.stairs(waiting, edges, baseline=None, color="black", linewidth=1.1)
    ax.axvline(column(requests, "arrival_ns").max() / scale, color=GREY, linewidth=1, linestyle=":")
    ended_ns = _ended_ns(steps)
    if ended_ns > edges_ns[-1]:
        remark(ax, f"drains until {ended_ns / scale:,.0f} {'min' if scale > NS_PER_S else 's'} →")


def _draw_kv(ax: Axes, share: Floats, edges: Floats) -> None:
    """Draws `share`, the used part of the KV pool (0 to 1), as an area behind the lines, on its own axis in percent."""
    right = ax.twinx()
    right.stairs(share, edges, fill=True, color=_KV_COLOR, alpha=0.55)
    right.set_ylim(0, 1)
    right.yaxis.set_major_locator(FixedLocator([0, 0.5, 1]))
    right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))
    right.set_ylabel("KV", color=GREY)
    right.grid(visible=False)
    right.spines["right"].set_visible(True)
    ax.set_zorder(right.get_zorder() + 1)
    ax.patch.set_visible(False)


def _replica_curves(
    steps: pd.DataFrame, requests: pd.DataFrame, edges_ns: Floats, num_blocks: int, *, ahead: bool = False
) -> tuple[Floats, Floats, Floats]:
    """One replica's running and waiting sequences and used KV blocks, averaged over the intervals of `edges_ns`;
    `ahead` as in `draw_timeline`.

    Exact: the integral of each step function is interpolated at the edges.
    """
    starts = column(steps, "start_ns")
    ends = starts + column(steps, "duration_ns")
    arrived, gone = np.sort(column(requests, "arrival_ns")), np.sort(column(requests, "ended_ns"))
    times = np.unique(np.concatenate([starts, ends, arrived, gone, edges_ns[[0, -1]]]))
    step = np.searchsorted(starts, times, side="right") - 1
    busy = (step >= 0) & (times < ends[step])
    in_system = np.searchsorted(arrived, times, side="right") - np.searchsorted(gone, times, side="right")

    running, used = column(steps, "num_running"), num_blocks - column(steps, "free_blocks")
    stay = np.where(ahead & (step >= 0), np.minimum(running[step], in_system), 0)  # between steps

    def average(by_step: Floats, between: Floats | NDArray[np.int64]) -> Floats:
        value = np.where(busy, by_step[step], between)
        integral = np.concatenate([[0.0], np.cumsum(value[:-1] * np.diff(times))])
        return np.diff(np.interp(edges_ns, times, integral)) / np.diff(edges_ns)

    return (
        average(running, stay),
        average(column(steps, "num_waiting"), in_system - stay),
        average(used, np.where(stay > 0, used[step], 0)),
    )


def _ended_ns(steps: pd.DataFrame) -> float:
    return float((column(steps, "start_ns") + column(steps, "duration_ns")).max()) if len(steps) else 0.0


def _scale(until_ns: float) -> int:
    """ns of the unit of the time axis."""
    return 60 * NS_PER_S if _in_minutes(until_ns) else NS_PER_S


def _in_minutes(span_ns: float) -> bool:
    return span_ns > 300 * NS_PER_S  # five minutes: seconds on an axis beyond that are hard to read


def latency_cdf(results: Results, path: Path | str, load: float, seed: int) -> None:
    """Writes the distributions of TTFT and normalised latency over finished requests, at one load and seed.

    >>> batchsim.latency_cdf(results, "latency.png", load=20, seed=0)
    """
    with house_style():
        save(latency_cdf_figure(results, load, seed), path)


def latency_cdf_figure(results: Results, load: float, seed: int) -> Figure:
    """The figure that `latency_cdf` writes."""
    check_load(results, load)
    notes, drawn = {}, []
    for sweep in sweeps(results):
        if not sweep.tested(load):
            notes[sweep.policy] = "not run at this load"
            continue
        i = sweep.index(load)
        uncompleted = sweep.values("uncompleted_share")[i]
        if sweep.failed[i]:
            notes[sweep.policy] = "failed: not drawn"
            continue
        if sweep.unstable[i]:
            notes[sweep.policy] = "× its queue grows: not drawn"
            continue
        drawn.append(sweep.policy)
        if uncompleted > 0:
            notes[sweep.policy] = f"{uncompleted:.1%} not completed"
    spreads = _WITHOUT_TOKENS if asks_for_no_tokens(results.scenario) else _SPREADS
    with house_style():
        fig = figure(11.0, 5.4)
        axes = fig.subplots(1, len(spreads), sharey=True, squeeze=False)[0]
        for ax, (name, title) in zip(axes, spreads.items(), strict=True):
            draw_cdf(ax, results, {policy: _latency_s(results, policy, load, seed, name) for policy in drawn})
            ax.set_title(title)
        axes[0].set_ylabel("share of completed requests at most this slow")
        frame(
            fig,
            results,
            f"How latencies spread {at_load(load_name(results), load)}, seed {seed}",
            f"measured at: {results.manifest['measured_at']} · completed requests sent after the warm-up"
            " · share axis: from 90 to 99 % is as far as from 99 to 99.9 %",
            policy_legend(results, notes),
        )
    return fig


def draw_cdf(ax: Axes, results: Results, values_s: dict[str, Floats]) -> None:
    """Draws the empirical distribution of each policy's latencies (seconds) on an axis that spreads the tail.

    y is the number of nines, -log10(1 - share), so 90 %, 99 % and 99.9 % are equally far apart.
    """
    styles = policy_styles(sweeps(results))
    curves = [np.sort(values) for values in values_s.values()]
    for policy, values, depth in zip(values_s, curves, hidden_under(curves), strict=True):
        # The slowest of n requests stands at a share of 1 - 1/(2n): its nines must be finite.
        nines = -np.log10(1 - (np.arange(len(values)) + 0.5) / max(len(values), 1))
        style, width = styles[policy], widened(depth)["linewidth"]
        ax.plot(values, nines, color=style.color, linestyle=style.linestyle, linewidth=width, drawstyle="steps-post")
    nines_axis(ax.yaxis)
    ax.set_ylim(0, 3.3)
    ax.set_xscale("log")
    drawn = np.concatenate(curves) if curves else np.empty(0)
    if len(drawn):
        low = float(np.quantile(drawn, 0.001))
        high = float(drawn.max())
        ax.set_xlim(low / 1.2, high * 1.2)
        time_axis_log(ax.xaxis, low, high)
    else:
        ax.xaxis.set_major_locator(NullLocator())
        ax.xaxis.set_minor_locator(NullLocator())
        remark(ax, "nothing to draw")


def _latency_s(results: Results, policy: str, load: float, seed: int, name: str) -> Floats:
    """Seconds of a latency of `_READ`, as `metrics` defines it, of finished requests sent after the warm-up."""
    requests = results.requests(policy, load, seed)
    warmup_ns = parse_duration_ns(scenario_of(results, policy)["workload"].get("warmup", "0s"))
    done = (np.array(texts(requests, "outcome")) == "finished") & (column(requests, "sent_ns") >= warmup_ns)
    requests = requests.take(np.flatnonzero(done))
    values_ns = LATENCIES[name].of
    assert values_ns is not None, "one value a request"
    return values_ns({each: column(requests, each) for each in _READ}) / NS_PER_S
