"""The traffic that a plan is for: its busiest window as a scenario to simulate, and how busy the rest is against it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from batchsim.base.errors import ScenarioError
from batchsim.base.units import NS_PER_S, format_duration
from batchsim.metrics.slo import parse_slo
from batchsim.scenario import Scenario
from batchsim.scenario.plan_config import HOURS, PlanConfig
from batchsim.workload.processes import (
    ConstantArrivals,
    GammaArrivals,
    MmppArrivals,
    OnOffArrivals,
    OwnArrivals,
    PoissonArrivals,
    ProfiledArrivals,
    WeibullArrivals,
)
from batchsim.workload.traces.read_trace import read_trace
from batchsim.workload.traces.trace_rows import Ints, TraceRows

HOUR_S = 3600.0
_PART_S = (60.0, 300.0, 900.0, HOUR_S)  # of which the shortest that makes at most MAX_PARTS is taken
MAX_PARTS = 24
_MINUTE_NS = 60 * NS_PER_S
ONE_COPY = 2.0  # with fewer copies of a trace the seeds hardly differ
_STEADY = PoissonArrivals | ConstantArrivals | GammaArrivals | WeibullArrivals


@dataclass(frozen=True)
class Variation:
    """A change of the planned traffic: factors on its rate (`traffic`), the dispersion of arrivals, the prompt lengths.

    `classes` keeps these request classes alone. `cost_factor` makes every step take that many times as long. `slo` is a
    factor on every limit of the objectives. `window` is the part of the busiest window, from its start, that is
    simulated: of drawn arrivals alone.
    """

    traffic: float = 1.0
    dispersion: int = 1
    prompts: float = 1.0
    classes: tuple[str, ...] = ()
    cost_factor: float = 1.0
    slo: float = 1.0
    window: float = 1.0


@dataclass(frozen=True)
class Part:
    """A stretch of the traffic: its name, length, and requests a second over those of the busiest window."""

    name: str
    seconds: float
    share_of_peak: float


@dataclass(frozen=True)
class Demand:
    """The traffic of a scenario's plan.

    `peak` is the load of its busiest window on the load axis, growth included; `window` names that window, `about` says
    more of it. `parts` make up one round of the traffic, which the month repeats; one part where all hours are alike.
    `output_tokens` is the mean of a request where a trace has it before anything is run.
    """

    scenario: Scenario
    plan: PlanConfig
    peak: float
    window: str
    parts: tuple[Part, ...]
    about: str = ""
    slice_ns: tuple[int, int] | None = None
    output_tokens: float | None = None

    @property
    def is_flat(self) -> bool:
        return len(self.parts) == 1

    @property
    def counted(self) -> str:
        """What objectives judge: `requests`, `tasks` where all of them bound these, or `tasks and requests`."""
        file = self.scenario.file
        texts = [each.slo or file.slo for each in file.workload.classes.values()] or [file.slo]
        of_tasks = [parse_slo(text).of_tasks for text in texts]
        return "tasks" if all(of_tasks) else "tasks and requests" if any(of_tasks) else "requests"

    @property
    def judges_tasks(self) -> bool:
        """Whether any objective bounds tasks."""
        return self.counted != "requests"

    @property
    def is_steady(self) -> bool:
        """Whether requests come at one rate throughout the busiest window: a queue that grows then says that they are
        too many, and not that the rate does. Bursts that last have a rate of their own."""
        workload = self.scenario.file.workload
        return self.slice_ns is None and workload.sessions is None and isinstance(workload.arrivals, _STEADY)

    @property
    def mean_share(self) -> float:
        """The mean rate over the busiest window's."""
        seconds = sum(part.seconds for part in self.parts)
        return sum(part.seconds * part.share_of_peak for part in self.parts) / seconds

    def copies(self, change: Variation) -> float | None:
        """How many copies of a trace a change of the traffic lays over each other; None for drawn arrivals."""
        return self.load(change) / change.dispersion if self.slice_ns is not None else None

    def load(self, change: Variation) -> float:
        """The load, on the load axis, of the busiest window under a change."""
        shares = {name: traffic.share or 0.0 for name, traffic in self.scenario.file.workload.classes.items()}
        kept = sum(shares[name] for name in change.classes) if change.classes else 1.0
        return self.peak * change.traffic * kept

    def stated_rps(self, change: Variation) -> float | None:
        """Requests a second of the busiest window as the target says; None where they are those of a recording."""
        return None if self.slice_ns is not None else self.load(change)

    def judged_per_s(self, change: Variation) -> float | None:
        """Lower bound on the judged units (requests or tasks) that begin per second in the busiest window; None where a
        recording determines it."""
        rps, tasks = self.stated_rps(change), self.scenario.file.workload.tasks
        return rps if rps is None or tasks is None or not self.judges_tasks else rps / tasks.num_requests

    def overrides(self, change: Variation) -> list[str]:
        """The overrides that leave the scenario the busiest window. ScenarioError where the change is not possible."""
        workload = self.scenario.file.workload
        texts = ["workload.requests=null"]
        if self.slice_ns is not None:
            target = self.plan.target.trace
            assert target is not None, "traces have a slice"
            start, end = self.slice_ns
            scale = f"{{factor: 1, by: copies, shift: {target.shift}ns, together: {change.dispersion}}}"
            texts += [f"workload.trace.time=[{start}ns, {end}ns]", f"workload.trace.rate_scale={scale}"]
            texts += ["workload.duration=null", f"load={{rate_scale: [{self.load(change)!r}]}}"]
        else:
            texts += [f"workload.duration={workload.warmup + round(self.plan.window * change.window)}ns"]
            texts += [f"load={{mean_rate: [{self.load(change)!r}/s]}}", *_dispersed(workload.arrivals, change)]
        if change.prompts != 1:
            texts.append(f"workload.prompt_scale={workload.prompt_scale * change.prompts!r}")
        if change.classes:
            texts.append(f"workload.classes={_classes(self.scenario, change.classes)}")
        if change.cost_factor != 1:
            texts.append(f"cost_factor={change.cost_factor!r}")
        return [*texts, *(_limits(self.scenario, change.slo) if change.slo != 1 else [])]


def demand_of(scenario: Scenario) -> Demand:
    """The traffic of the scenario's plan. ScenarioError without a plan, or where no window can be cut out."""
    plan = scenario.file.plan
    if plan is None:
        raise ScenarioError(
            f"{scenario.source}: has no plan. Write plan: {{target: ..., gpus: ..., ...}}; batchsim init --plan writes"
            " a scenario with one, and the shipped scenario plan has one too."
        )
    grown = plan.growth.factor
    with scenario.at("plan"):
        if plan.target.trace is not None:
            return _traced(scenario, plan, plan.target.trace.factor * grown)
    length = minutes(plan.window)
    if plan.target.diurnal is None:
        assert plan.target.rate is not None, "checked by the config"
        flat = Part("every hour", HOUR_S, 1.0)
        return Demand(scenario, plan, plan.target.rate * grown, f"any {length}: all hours are alike", (flat,))
    day = plan.target.diurnal
    busiest = day.hours.index(max(day.hours))
    parts = tuple(Part(_hour(hour), HOUR_S, share) for hour, share in enumerate(day.hours))
    return Demand(scenario, plan, day.peak * grown, f"{length} of the hour {_hour(busiest)}", parts)


def minutes(ns: int) -> str:
    """A time in words: `20 min` where it is whole minutes."""
    return f"{ns // _MINUTE_NS} min" if ns and ns % _MINUTE_NS == 0 else format_duration(ns)


def _hour(hour: int) -> str:
    return f"{hour:02d}:00-{(hour + 1) % HOURS:02d}:00"


def _dispersed(arrivals: Any, change: Variation) -> list[str]:
    """The overrides for arrivals of the same rate whose counts vary `dispersion` times as much, over long times."""
    times = change.dispersion
    if times == 1:
        return []
    rate = f"mean_rate: {arrivals.mean_rate!r}/s"
    match arrivals:
        case PoissonArrivals():
            return [f"workload.arrivals={{kind: gamma, {rate}, cv: {math.sqrt(times)!r}}}"]
        case WeibullArrivals():
            return [f"workload.arrivals={{kind: gamma, {rate}, cv: {arrivals.cv * math.sqrt(times)!r}}}"]
        case GammaArrivals() | ProfiledArrivals(states=None):
            return [f"workload.arrivals.cv={arrivals.cv * math.sqrt(times)!r}"]
        case OnOffArrivals():
            return [f"workload.arrivals.{name}={getattr(arrivals, name) * times}ns" for name in ("on", "off")]
        case MmppArrivals() | ProfiledArrivals():
            longer = [
                {"rate": s.rate, "stay": f"{s.stay * times}ns", "weight": s.weight} for s in arrivals.states or ()
            ]
            return [f"workload.arrivals.states={json.dumps(longer)}"]
    raise ScenarioError(f"{arrivals.kind} arrivals have no bursts to make denser.")


def can_disperse(demand: Demand) -> bool:
    """Whether the arrivals have any dispersion to multiply."""
    return not isinstance(demand.scenario.file.workload.arrivals, ConstantArrivals | OwnArrivals)


def _limits(scenario: Scenario, factor: float) -> list[str]:
    """The overrides for objectives of the per-request form whose limits are `factor` times as long."""
    own = {f"workload.classes.{name}.slo": each.slo for name, each in scenario.file.workload.classes.items()}
    limits = []
    for key, text in {"slo": scenario.file.slo, **own}.items():
        if text is not None:
            slo = parse_slo(text)
            assert slo.share is not None, "plans take objectives of the per-request form"
            bounds = [f"{b.metric}{'<=' if b.inclusive else '<'}{round(b.limit_ns * factor)}ns" for b in slo.bounds]
            limits.append(f"{key}={' & '.join(bounds)} @ {100 * slo.share!r}%")
    return limits


def _classes(scenario: Scenario, kept: tuple[str, ...]) -> str:
    """The classes `kept`, with shares that make up the whole, as the text of an override."""
    written, shares = scenario.plain["workload"]["classes"], scenario.file.workload.classes
    whole = sum(shares[name].share or 0.0 for name in kept)
    percents = [100 * (shares[name].share or 0.0) / whole for name in kept]
    percents[-1] = 100 - sum(percents[:-1])
    entries = {name: written[name] | {"share": f"{share!r}%"} for name, share in zip(kept, percents, strict=True)}
    return json.dumps(entries, ensure_ascii=False)


# ---- traces


def _traced(scenario: Scenario, plan: PlanConfig, factor: float) -> Demand:
    workload = scenario.file.workload
    trace = workload.trace
    assert trace is not None, "a workload that replays has a trace"
    if trace.rate_scale is not None and trace.rate_scale.factor != 1:
        raise ScenarioError(
            f"workload.trace.rate_scale.factor is {trace.rate_scale.factor:g} and plan.target.trace.factor scales too."
            " Keep the plan's."
        )
    start_ns = trace.time[0] if trace.time is not None else 0
    rows = read_trace(replace(trace, rate_scale=None, time=None), scenario.base, tolerant=trace.time is not None)
    times = rows.arrival_ns
    if times is None:
        raise ScenarioError(f"{rows.source}: this trace has no times, so that nothing says how busy it was when.")
    end_ns = min(_end_ns(scenario, times), trace.time[1] if trace.time is not None else times[-1] + 1)
    inside = (times >= start_ns) & (times < end_ns)
    times, tokens = times[inside], (rows.prompt_tokens + rows.output_tokens)[inside]
    if len(times) < 2 or times[-1] - times[0] < plan.window + workload.warmup:
        before = f" and {minutes(workload.warmup)} of warm-up before it" if workload.warmup else ""
        raise ScenarioError(
            f"plan.window {minutes(plan.window)}{before} are longer than the traffic, which lasts"
            f" {format_duration(int(times[-1] - times[0]) if len(times) else 0)}. Shorten the window."
        )
    start = _busiest(times, tokens, plan.window, workload.warmup)
    ends = (start, start + plan.window)
    parts = _parts(times, ends)
    copies = f"{factor:.4g} × {len(times):,} requests in {round((times[-1] - times[0]) / _MINUTE_NS)} min"
    return Demand(
        scenario=scenario,
        plan=plan,
        peak=factor,
        window=f"{_clock(ends[0])} to {_clock(ends[1])} after the trace's start",
        about=f", which has the most tokens; {copies}",
        parts=parts,
        slice_ns=(ends[0] - workload.warmup, ends[1]),
        output_tokens=_mean_output(rows, inside, workload.output_cap),
    )


def _end_ns(scenario: Scenario, times: Ints) -> int:
    """The time in ns at which the workload's `duration` or number of `requests` ends the trace."""
    workload = scenario.file.workload
    first = workload.trace.time[0] if workload.trace is not None and workload.trace.time is not None else 0
    if workload.duration is not None:
        return first + workload.duration
    if workload.requests is not None:
        index = int(np.searchsorted(times, first)) + workload.requests
        return int(times[index]) if index < len(times) else int(times[-1]) + 1
    return int(times[-1]) + 1


def _busiest(times: Ints, tokens: Ints, window_ns: int, warmup_ns: int) -> int:
    """The start in ns of the window with the most tokens: an arrival late enough for the warm-up before it."""
    last = times[-1] + 1 - window_ns
    starts = times[(times >= times[0] + warmup_ns) & (times <= last)]
    if not len(starts):
        starts = np.array([last])
    sums = np.concatenate(([0], np.cumsum(tokens)))
    inside = sums[np.searchsorted(times, starts + window_ns)] - sums[np.searchsorted(times, starts)]
    return int(starts[np.argmax(inside)])


def _parts(times: Ints, window_ns: tuple[int, int]) -> tuple[Part, ...]:
    """The trace in equal parts, the last one shorter, each with its rate over the window's."""
    span_s = float(times[-1] - times[0]) / NS_PER_S
    length_s = next((s for s in _PART_S if span_s / s <= MAX_PARTS), None)
    if length_s is None:
        length_s = HOUR_S * math.ceil(span_s / HOUR_S / MAX_PARTS)
    peak_rps = _count(times, window_ns) / ((window_ns[1] - window_ns[0]) / NS_PER_S)
    edges = [int(times[0] + i * length_s * NS_PER_S) for i in range(math.ceil(span_s / length_s))]
    if len(edges) > 1 and times[-1] - edges[-1] < length_s * NS_PER_S / 10:
        edges.pop()  # a sliver at the end has no rate to speak of: it goes to the part before it
    parts = []
    for start, end in pairwise([*edges, int(times[-1]) + 1]):
        rate_rps = _count(times, (start, end)) / ((end - start) / NS_PER_S)
        parts.append(Part(f"{_clock(start)}-{_clock(end)}", (end - start) / NS_PER_S, rate_rps / peak_rps))
    return tuple(parts)


def _count(times: Ints, window_ns: tuple[int, int]) -> int:
    first, last = np.searchsorted(times, np.array(window_ns))
    return int(last - first)


def _mean_output(rows: TraceRows, inside: np.ndarray, cap: int | str) -> float:
    output = rows.output_tokens[inside]
    return float((np.minimum(output, cap) if isinstance(cap, int) else output).mean())


def _clock(ns: int) -> str:
    """A time of the trace as `01:02:03`, hours beyond a day going on."""
    seconds = round(ns / NS_PER_S)
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
