"""A group of replicas over time: traffic, replicas held and taking requests, and the share within the SLO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from batchsim.base.units import NS_PER_S, format_duration, parse_price_per_h
from batchsim.drive.fleet.fleet_plan import HELD, UP, ReplicaSpan
from batchsim.explain.causes import Objectives
from batchsim.report.pictures.palette import policy_styles
from batchsim.report.pictures.style import GREY, figure, frame, house_style, remark, save
from batchsim.report.reading import Floats, at_load, check_load, load_name, sweeps, sweeps_at
from batchsim.report.traffic_over_time import counted, traffic_over_time
from batchsim.results.read import Results, scenario_of

_TRAFFIC = "#B9B9B9"


def fleet_picture(results: Results, path: Path | str, load: float, seed: int) -> None:
    """Writes, for each policy at one load and seed, traffic and replicas over time, and below it the share of requests
    within the SLO by when they were sent; in the title what replicas cost against as many all the time as there were at
    most."""
    check_load(results, load)
    policies = [sweep for sweep in sweeps_at(results, load) if not sweep.failed[sweep.index(load)]]
    with house_style():
        fig = figure(11.0, 1.6 + 3.0 * len(policies))
        heights = [2, 1] * len(policies)
        axes = fig.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        styles = policy_styles(sweeps(results))
        for i, sweep in enumerate(policies):
            spans, color = results.spans(sweep.policy, load, seed), styles[sweep.policy].color
            edges_ns, sent, shares = traffic_over_time(results, sweep.policy, load, seed)
            edges, unit = edges_of(edges_ns)
            top, bottom = axes[2 * i : 2 * i + 2]
            top.stairs(sent / np.diff(edges_ns) * NS_PER_S, edges, fill=True, color=_TRAFFIC)
            top.set_ylabel("requests/s")
            right = top.twinx()
            draw_replicas(right, spans, edges_ns, edges, color)
            right.spines["right"].set_visible(True)
            price = (scenario_of(results, sweep.policy).get("replicas") or {}).get("price")
            top.set_title(f"{sweep.labels[sweep.index(load)]}: {cost_text(spans, price)}", color=color, weight="bold")
            draw_kept(bottom, shares, scenario_of(results, sweep.policy), edges_ns, color)
            bottom.set_xlabel(f"time since the start of the run ({unit})" if i == len(policies) - 1 else "")
        handles = [
            Patch(color=_TRAFFIC, label="requests sent (left axis)"),
            *replica_handles(),
        ]
        frame(
            fig,
            results,
            f"Traffic, replicas and the SLO {at_load(load_name(results), load)}, seed {seed}",
            f"SLO: {results.manifest['objective']} · averages over"
            f" {format_duration(float(f'{edges_ns[1]:.2g}'))} · warm-up not judged · dashed: the share asked for",
            handles,
        )
        save(fig, path)


def replica_handles() -> list[Line2D]:
    """What the lines of `draw_replicas` are, for a legend."""
    return [
        Line2D([], [], color=GREY, linewidth=1.8, label="replicas that take requests (policy's colour)"),
        Line2D([], [], color=GREY, linewidth=1.2, linestyle=":", label="replicas held, which cost"),
    ]


def draw_replicas(ax: Axes, spans: Sequence[ReplicaSpan], edges_ns: Floats, edges: Floats, color: str) -> None:
    """Draws how many replicas took requests and how many were held, averages over the intervals of `edges_ns`, which
    stand at `edges` of the axis."""
    ax.stairs(counted(spans, (UP,), edges_ns), edges, baseline=None, color=color, linewidth=1.8)
    ax.stairs(counted(spans, HELD, edges_ns), edges, baseline=None, color=color, linewidth=1.2, linestyle=":")
    ax.set_ylim(bottom=0)
    ax.set_ylabel("replicas")
    ax.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    ax.grid(visible=False)


def draw_kept(ax: Axes, share: Floats | None, scenario: Mapping[str, Any], edges_ns: Floats, color: str) -> None:
    """Draws the `share` of the judged requests of each interval that kept the SLO; None where it bounds none alone."""
    if share is None:
        remark(ax, "the SLO bounds no single request")
        return
    if np.isnan(share).all():
        remark(ax, "no request after the warm-up")
    edges, _ = edges_of(edges_ns)
    objectives = Objectives.of(scenario)
    ax.stairs(share, edges, baseline=None, color=color, linewidth=1.6)
    if objectives.slo.share is not None and not objectives.class_slos:
        ax.axhline(objectives.slo.share, color="black", linewidth=1, linestyle=(0, (6, 3)))
    ax.set_ylim(-0.04, 1.04)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))
    ax.set_ylabel("within SLO")


def cost_text(spans: Sequence[ReplicaSpan], price: str | None) -> str:
    """How long replicas were held, and what that costs at `price` each, against the most at once all the time."""
    end_ns = max(span.end_ns for span in spans)
    held_h = sum(span.end_ns - span.start_ns for span in spans if span.state in HELD) / NS_PER_S / 3600
    starts = {span.start_ns for span in spans}
    most = max(sum(s.start_ns <= at < s.end_ns and s.state in HELD for s in spans) for at in starts)
    static_h = most * end_ns / NS_PER_S / 3600
    less = f"{100 * (1 - held_h / static_h):.0f} % less than {most} all the time"
    if price is None:
        return f"{held_h:,.3g} replica hours, {less}"
    each = parse_price_per_h(price)
    return f"{each * held_h:,.4g} for {held_h:,.3g} replica hours, {less} ({each * static_h:,.4g})"


def edges_of(edges_ns: Floats) -> tuple[Floats, str]:
    """`edges_ns` in the unit of the axis, and that unit."""
    units = {"h": 3600 * NS_PER_S, "min": 60 * NS_PER_S, "s": NS_PER_S}
    unit = next((unit for unit, ns in units.items() if edges_ns[-1] >= 3 * ns), "s")
    return edges_ns / units[unit], unit
