"""What the page asks for, as JSON values: curves, a point's steps and requests, a request's life, two points compared,
one knob changed. Times are in seconds since the run began; a point is a number, that of its row in points.csv."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import BatchsimError, ScenarioError
from batchsim.base.files import parse_json
from batchsim.base.units import NS_PER_S, parse_duration_ns
from batchsim.drive.fleet.fleet_records import by_engine
from batchsim.kernel.record import FINISHED, Records
from batchsim.metrics.latencies import LATENCIES
from batchsim.metrics.table import METRICS
from batchsim.report.decisions import decided
from batchsim.report.numbers import percent_text, rate_text, time_text
from batchsim.report.page.run_decision import decision
from batchsim.report.page.run_page import latency_charts, share_charts
from batchsim.report.pictures.palette import OKABE_ITO, policy_styles
from batchsim.report.reading import at_load, load_name, load_to_show, num_seeds, seeds_text, short_load, sweeps
from batchsim.report.sheet import sentence_text
from batchsim.report.text.counterfactual_text import counterfactual_data
from batchsim.report.text.story_text import story
from batchsim.results.read import Results, blocks_by_replica, scenario_of
from batchsim.view.comparison import compared
from batchsim.view.downsampling import downsampled_rows
from batchsim.view.lanes import KINDS, Lanes
from batchsim.view.partial_runs import lacks, minutes_length, minutes_series
from batchsim.view.timelines import timeline_rows, timeline_series
from batchsim.view.what_if import changed, knobs

MOST_ROWS = 3000
"""Rows of one answer at most: a chart has about 1,000 pixels across, and each may show a lowest and a highest value."""
BY = tuple(name for name, latency in LATENCIES.items() if latency.of is not None)
"""The latencies that requests are shown by."""
KIND_COLORS = {
    **dict(zip(("decode", "queued", "prefill", "recompute", "preempted", "sat_out"), OKABE_ITO, strict=False)),
    "swapped": OKABE_ITO[4],
    "response_held": OKABE_ITO[6],
}
"""Colours of the chapters of a life; what is not in here is grey."""
_TABLE = 12  # requests that a table lists
_KEPT = 3  # points whose records are held in memory
_SHOWN = ("ttft_p50_s", "ttft_p99_s", "tpot_p99_s", "e2e_p99_s", "in_slo", "throughput_rps")
_SHOWN += ("task_e2e_p50_s", "task_e2e_p99_s")


class Point(NamedTuple):
    policy: str
    load: float
    seed: int


@dataclass
class PageData:
    """The answers about one run. Safe to ask from several threads; `folders` are where traces are looked for too.

    `allow_code`: whether a counterfactual may import a policy of the user's own.
    """

    results: Results
    folders: Sequence[Path] = ()
    allow_code: bool = False
    _records: dict[int, Records] = field(default_factory=dict[int, Records])
    _lanes: dict[tuple[int, int], Lanes] = field(default_factory=dict[tuple[int, int], Lanes])
    _reading: Lock = field(default_factory=Lock)
    _simulating: Lock = field(default_factory=Lock)

    def points(self) -> list[Point]:
        rows = self.results.points
        points = zip(rows["policy"], rows["load"], rows["seed"], strict=True)
        return [Point(str(policy), float(load), int(seed)) for policy, load, seed in points]

    def curves(self) -> dict[str, Any]:
        """Charts against load with, for each value of a line, the number of its point; all points with what their
        tables show; and `first`, the point to begin with. Of several seeds a line's point is the first."""
        results, points = self.results, self.points()
        number = {(point.policy, point.load): k for k, point in reversed(list(enumerate(points)))}
        first = number[_best(results, points)]
        names = {sweep.name: sweep.policy for sweep in sweeps(results)}
        charts = [asdict(chart) for chart in (*share_charts(results), *latency_charts(results))]
        for chart in charts:
            for line in chart["series"]:
                line["points"] = [number.get((names[line["label"]], load)) for load in line["x"]]
        colors = {policy: style.color for policy, style in policy_styles(sweeps(results)).items()}
        answer, how_sure = decision(results)
        return {
            "name": results.manifest["scenario_name"],
            "heading": results.manifest["heading"],
            "objective": results.manifest["objective"],
            "decision": [sentence_text(each) for each in answer],
            "sure": [sentence_text(each) for each in how_sure],
            "seeds": seeds_text(results),
            "one_seed": num_seeds(results) == 1,
            "charts": charts,
            "points": [self._listed(k, point, colors) for k, point in enumerate(points)],
            "first": first,
            "by": [[name, LATENCIES[name].title] for name in BY],
            "colors": list(OKABE_ITO),
            "kinds": KIND_COLORS,
            "lanes": KINDS,
            "words": _words(),
        }

    def point(self, number: int) -> dict[str, Any]:
        """What is known of a point before its records are read closer: its metrics, its engines, its length, and which
        panels it `lacks`. `steps` is None where they were not kept."""
        point, length = self._known(number), self._length(number)
        row, lacking = self.results.points.iloc[number], lacks(self.results, point.policy)
        if not length["replicas"] and length["steps"] is not None:
            lacking |= dict.fromkeys(("timeline", "lanes"), "Not shown: no step ran, since no request was let in.")
        return {
            "point": number,
            "title": self._title(point),
            "keep": self.results.keeps(point.policy),
            "lacks": lacking,
            **length,
            "unstable": bool(row["unstable"]),
            "bound_by": str(row["bound_by"]),
            "measured": int(row["cohort"]),
            "warmup": scenario_of(self.results, point.policy)["workload"].get("warmup", ""),
            "metrics": [_metric(name, float(row[name])) for name in _SHOWN if name in row.index],
        }

    def _length(self, number: int) -> dict[str, Any]:
        point = self._known(number)
        if self.results.keeps(point.policy) == "minutes":
            return minutes_length(self.results, *point)
        records = self.records(number)
        return {
            "end_s": _end_ns(records) / NS_PER_S,
            "requests": len(records.requests),
            "steps": int(records.num_steps) if self.results.keeps(point.policy) == "all" else None,
            "replicas": sorted({replica for replica, _ in _engines(records)}),
        }

    def minutes(self, number: int, replica: int, window_s: tuple[float, float] | None) -> dict[str, Any]:
        """The minutes of an engine, of a point of which these were kept: see `minutes_series`."""
        if window_s is not None:
            _window_ns(window_s, 0)
        return minutes_series(self.results, self._known(number), replica, window_s, MOST_ROWS)

    def timeline(self, number: int, replica: int, window_s: tuple[float, float] | None) -> dict[str, Any]:
        """The steps of an engine that overlap a window, the whole run without one, as `timeline_series` has them."""
        self._check(number, "timeline")
        records = self.records(number)
        start_ns, end_ns = _window_ns(window_s, _end_ns(records))
        parts, blocks = _parts(records, replica), blocks_by_replica(self.results, self._known(number).policy)
        rows = timeline_rows(parts, blocks[replica], _end_ns(records))
        return {
            "from_s": start_ns / NS_PER_S,
            "to_s": end_ns / NS_PER_S,
            **timeline_series(rows, (start_ns, end_ns), MOST_ROWS),
        }

    def lanes(self, number: int, replica: int, window_s: tuple[float, float] | None, picked: int) -> dict[str, Any]:
        """The requests that were at an engine in a window, as `Lanes.window` has them; `picked` -1: none."""
        self._check(number, "lanes")
        records = self.records(number)
        start_ns, end_ns = _window_ns(window_s, _end_ns(records))
        with self._reading:
            lanes = self._lanes.get((number, replica))
            if lanes is None:
                lanes = Lanes(_parts(records, replica), self._per_chunk_ns(self._known(number)))
                self._lanes = {key: of_replica for key, of_replica in self._lanes.items() if key[0] in self._records}
                self._lanes[number, replica] = lanes
        return lanes.window(start_ns, end_ns, picked) | {"from_s": start_ns / NS_PER_S, "to_s": end_ns / NS_PER_S}

    def requests(self, number: int, by: str, window_s: tuple[float, float] | None) -> dict[str, Any]:
        """Requests sent in a window by one of their latencies: a point each, and the slowest as a list. Unfinished ones
        have none and are counted as `others`."""
        self._check(number, "requests")
        records = self.records(number)
        start_ns, end_ns = _window_ns(window_s, _end_ns(records))
        rows = records.requests
        rows = rows[(rows["sent_ns"] >= start_ns) & (rows["sent_ns"] <= end_ns)]
        done = rows[rows["outcome"] == FINISHED]
        done = done[np.argsort(done["sent_ns"], kind="stable")]
        values = self._latency_s(number, by, done)
        done, values = done[~np.isnan(values)], values[~np.isnan(values)]
        kept = downsampled_rows([values], MOST_ROWS)
        slowest = np.argsort(-values, kind="stable")[:_TABLE]
        names = ("request_id", "prompt_tokens", "output_tokens", "num_preemptions")
        return {
            "by": LATENCIES[by].title,
            "exact": len(kept) == len(done),
            "of": len(done),
            "others": len(rows) - len(done),
            "id": done["request_id"][kept].tolist(),
            "sent_s": (done["sent_ns"][kept] / NS_PER_S).tolist(),
            "value_s": values[kept].tolist(),
            "slowest": [
                {name: int(done[name][i]) for name in names}
                | {"sent_s": float(done["sent_ns"][i] / NS_PER_S), "value_s": float(values[i])}
                for i in slowest.tolist()
            ],
        }

    def request(self, number: int, request: int) -> dict[str, Any]:
        """The life of one request, as `batchsim explain --request` has it."""
        self._check(number, "life")
        point = self._known(number)
        return story(self.results, *point, request, self.records(number))

    def compare(self, number: int, other: int, by: str) -> dict[str, Any]:
        """One latency of every request at two points, as `compared` has it; `titles` names the points.

        ScenarioError where their seeds differ, or no request was sent at both.
        """
        for each in (number, other):
            self._check(each, "compare")
        seeds = [self._known(each).seed for each in (number, other)]
        if seeds[0] != seeds[1]:
            raise ScenarioError(
                f"compare: seeds {seeds[0]} and {seeds[1]} draw other requests. Choose one of the same."
            )
        ours, theirs = (self.records(each).requests for each in (number, other))
        sides = (ours, self._latency_s(number, by, ours)), (theirs, self._latency_s(other, by, theirs))
        titles = [self._title(self._known(each)) for each in (number, other)]
        return {"by": LATENCIES[by].title, "titles": titles, **compared(*sides, MOST_ROWS, _TABLE)}

    def knobs(self, number: int) -> dict[str, Any]:
        """The knobs of a point, or in `why` why it cannot be simulated here."""
        point = self._known(number)
        try:
            self._check(number, "change")
            return {"knobs": knobs(self.results, point, self.folders, self.allow_code), "why": ""}
        except BatchsimError as error:
            return {"knobs": [], "why": str(error)}

    def changed(self, number: int, factors: Mapping[str, float]) -> dict[str, Any]:
        """A point simulated again with `factors` times its knobs, by key: what `counterfactual_data` has, and both
        sides' queues. ScenarioError while another is simulated, and as `batchsim.view.what_if.changed` raises it.
        """
        self._check(number, "change")
        if not self._simulating.acquire(blocking=False):
            raise ScenarioError("a simulation runs already. Wait for its end.")
        try:
            comparison, said = changed(self.results, self._known(number), factors, self.folders, self.allow_code)
        finally:
            self._simulating.release()
        data = counterfactual_data(comparison)
        texts = {name: [_text(name, _number(x)) for x in both] for name, both in data["metrics"].items()}
        return data | {
            "knobs": said,
            "texts": [
                [METRICS[name].heading, *both, METRICS[name].doc] for name, both in texts.items() if both != ["–", "–"]
            ],
            "queues": [_queue(side.records) for side in (comparison.base, comparison.changed)],
        }

    def _check(self, number: int, panel: str) -> None:
        """ScenarioError where the point's run kept too little for a panel."""
        line = lacks(self.results, self._known(number).policy).get(panel)
        if line:
            raise ScenarioError(line)

    def _latency_s(self, number: int, by: str, rows: NDArray[np.void]) -> NDArray[np.float64]:
        """A latency of requests of a point in seconds, NaN where undefined: of unfinished ones, and of all for a
        latency between tokens where answers are sent whole."""
        latency = LATENCIES[by]
        assert latency.of is not None, "the page asks for those of BY"
        is_there = rows["outcome"] == FINISHED
        if latency.streamed:
            is_there &= not np.isnan(self.results.points[f"{by}_p50_s"].iloc[number])
        return np.where(is_there, latency.of(rows) / NS_PER_S, np.nan)

    def records(self, number: int) -> Records:
        """The records of a point, those asked for last being held in memory."""
        point = self._known(number)
        with self._reading:
            records = self._records.pop(number, None)
            if records is None:
                only = self.results.keeps(point.policy) == "requests"
                records = self.results.records(*point, requests_only=only)
            self._records[number] = records
            while len(self._records) > _KEPT:
                del self._records[next(iter(self._records))]
            return self._records[number]

    def _known(self, number: int) -> Point:
        points = self.points()
        if not 0 <= number < len(points):
            raise ScenarioError(f"point {number}: there are {len(points)}, from 0 on. Choose one of them.")
        return points[number]

    def _per_chunk_ns(self, point: Point) -> int:
        frontend = scenario_of(self.results, point.policy)["workload"].get("frontend") or {}
        return parse_duration_ns(frontend.get("per_chunk", "0s"))

    def _title(self, point: Point) -> str:
        return f"{point.policy} {at_load(load_name(self.results), point.load)}, seed {point.seed}"

    def _listed(self, number: int, point: Point, colors: dict[str, str]) -> dict[str, Any]:
        load = short_load(load_name(self.results), point.load)
        return {
            "point": number,
            "title": self._title(point),
            "policy": point.policy,
            "load": load,
            "seed": point.seed,
            "color": colors[point.policy],
        }


def _engines(records: Records) -> list[tuple[int, Records]]:
    """The replicas that ran steps, with the records of each time they were started, in the order of time."""
    engines = [(engine.replica, engine.records) for engine in by_engine(records) if engine.records.num_steps]
    return sorted(engines, key=lambda each: (each[0], int(each[1].steps["start_ns"][0])))


def _parts(records: Records, replica: int) -> list[Records]:
    """The records of a replica, one of each time it was started. ScenarioError where no step ran there."""
    parts = [part for number, part in _engines(records) if number == replica]
    if not parts:
        raise ScenarioError(f"replica {replica}: no step ran there. Choose another.")
    return parts


def _end_ns(records: Records) -> int:
    """When the run's last step or request ended."""
    ends = [int((part.steps["start_ns"] + part.steps["duration_ns"]).max()) for _, part in _engines(records)]
    return max([*ends, int(records.requests["ended_ns"].max())])


def _window_ns(window_s: tuple[float, float] | None, end_ns: int) -> tuple[int, int]:
    if window_s is None:
        return 0, end_ns
    if not window_s[0] < window_s[1]:
        raise ScenarioError(f"window {window_s[0]:g} to {window_s[1]:g} s: ends no later than it begins. Swap them.")
    return round(window_s[0] * NS_PER_S), round(window_s[1] * NS_PER_S)


def _queue(records: Records) -> dict[str, list[float]]:
    """Requests waiting, over all engines' steps in the order of time, thinned."""
    steps = np.concatenate([records.steps[:0], *(part.steps for _, part in _engines(records))])
    steps = steps[np.argsort(steps["start_ns"], kind="stable")]
    kept = downsampled_rows([steps["num_waiting"]], MOST_ROWS // 2)
    return {
        "start_s": (steps["start_ns"][kept] / NS_PER_S).tolist(),
        "waiting": steps["num_waiting"][kept].tolist(),
    }


def _best(results: Results, points: Sequence[Point]) -> tuple[str, float]:
    """(policy, load) of the policy that is sure to meet its objective at the highest load, at that load, of equals the
    one with the most margin there; where none is sure on average, and where none meets it the load that tables show."""
    known = {(point.policy, point.load) for point in points}
    judged = [(sweep.policy, each) for sweep in sweeps(results) for each in [decided(results, sweep)]]
    for held in ([(p, d, d.sure) for p, d in judged], [(p, d, d.highest) for p, d in judged]):
        margins = [
            (load, next(each.margin for each in of_policy.loads if each.load == load), policy)
            for policy, of_policy, load in held
            if load is not None and (policy, load) in known
        ]
        if margins:
            load, _, policy = max(margins, key=lambda each: each[:2])  # the first of equals
            return policy, load
    shown = load_to_show(results)
    return next(((point.policy, point.load) for point in points if point.load == shown), points[0][:2])


@cache
def _words() -> dict[str, str]:
    """What the page's words mean, by word, as it shows them where one is pointed at."""
    return parse_json((files("batchsim.view") / "assets" / "words.json").read_text(encoding="utf-8"))


def _metric(name: str, value: float) -> list[str]:
    """Heading, value and meaning of a metric."""
    return [METRICS[name].heading, _text(name, value), METRICS[name].doc]


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _text(metric: str, value: float) -> str:
    """A metric as tables show it: a time, a share, a rate, or yes or no."""
    if metric.endswith("_s"):
        return time_text(value, float("nan"))
    if METRICS[metric].unit == "yes or no" and not np.isnan(value):
        return "yes" if value else "no"
    return rate_text(value) if metric.endswith("_rps") else percent_text(value)
