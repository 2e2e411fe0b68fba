"""A run's results for people: requests with their latencies in seconds, figures, and why requests were slow."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from batchsim.base.errors import ScenarioError
from batchsim.base.units import NS_PER_S
from batchsim.metrics.latencies import LATENCIES, LATENCY_COLUMNS
from batchsim.report.pictures.closeup import latency_cdf_figure, timeline_figure
from batchsim.report.pictures.plots import p99_vs_qps_figure
from batchsim.report.reading import check_load, load_to_show, sweeps_at
from batchsim.report.text.attribution_text import overview
from batchsim.report.text.causes_text import causes
from batchsim.report.text.story_text import story
from batchsim.results import read


@dataclass(frozen=True)
class Plots:
    """Pictures of a run as matplotlib figures, as `batchsim run` draws them. `load` and `seed` name a point; without
    them the load of the run's table and the first seed.

    >>> results.plot.latency_cdf(load=10).savefig("latencies.png")
    """

    results: read.Results

    def p99_vs_qps(self) -> Figure:
        """P99 and P50 of TTFT, TPOT and normalised latency, in s, against the offered load."""
        return p99_vs_qps_figure(self.results)

    def timeline(self, load: float | None = None, seed: int = 0) -> Figure:
        """Running and waiting sequences and KV use over time, a panel a policy."""
        return timeline_figure(self.results, load_to_show(self.results) if load is None else load, seed)

    def latency_cdf(self, load: float | None = None, seed: int = 0) -> Figure:
        """How TTFT and normalised latency of finished requests spread, of policies whose queue does not grow."""
        return latency_cdf_figure(self.results, load_to_show(self.results) if load is None else load, seed)


@dataclass(frozen=True)
class Results(read.Results):
    """A finished run as DataFrames.

    `summary`: a row a policy and load, each metric as the mean over seeds and `<metric>_ci`, the half-width of its 95 %
    interval. `points`: a row a policy, load and seed. Both flag as `unstable` where the queue grows: latencies there
    say how long the run was. `manifest`: how it was obtained. `plot`: its pictures.

    >>> results
    <Results results/tiny/...: 2 policies × 2 loads × 2 seeds; summary, points, requests(policy, load, seed), ...>
    >>> results.paired("vllm", "static", "ttft_p99_s", 10).mean < 0  # seconds: vllm less static, seed by seed
    True
    """

    @property
    def plot(self) -> Plots:
        return Plots(self)

    def __repr__(self) -> str:
        points = self.points
        counts = (
            (points["policy"], "policy", "policies"),
            (points["load"], "load", "loads"),
            (points["seed"], "seed", "seeds"),
        )
        size = " × ".join(f"{n} {one if n == 1 else many}" for column, one, many in counts for n in [len(set(column))])
        return f"<Results {self.path}: {size}; summary, points, requests(policy, load, seed), plot, explain()>"

    def requests(self, policy: str, load: float, seed: int = 0) -> pd.DataFrame:
        """A row a request; `batchsim.results.frames.COLUMN_DOCS` says what columns are. Beside these, in seconds, null
        unless it finished: `ttft_s`, `tpot_s`, `e2e_s`, `queue_time_s`, `norm_latency_s` (`tpot_s` also where answers
        come whole or of one token); and `unstable`, whether the queue of the point grows.

        >>> results.requests("static", load=10)["e2e_s"].head(3).round(3).tolist()
        [0.22, 0.144, 0.21]
        """
        table = super().requests(policy, load, seed)
        point = self._rows(policy, load, seed).iloc[0]
        finished = (table["outcome"] == "finished").to_numpy()
        columns = {name: table[name].to_numpy(dtype=np.float64, na_value=np.nan) for name in LATENCY_COLUMNS}
        for name, latency in LATENCIES.items():
            if latency.of is None:
                continue
            exists = finished & bool(not latency.streamed or pd.notna(point[f"{name}_p50_s"]))
            table[f"{name}_s"] = np.where(exists, latency.of(columns) / NS_PER_S, np.nan)
        table["unstable"] = bool(point["unstable"])
        return table

    def explain(
        self,
        *,
        policy: str | None = None,
        load: float | None = None,
        seed: int | None = None,
        request: int | None = None,
        slo: bool = False,
        slowest: int | None = None,
        by: str | None = None,
    ) -> list[dict[str, Any]]:
        """Why requests were slow, an entry a policy, as `batchsim explain --json` gives it; times are in ns.

        Without more, the parts of the requests' lives and the `slowest` 5, `by` a latency's name; with `request`, the
        life of that one; with `slo`, the causes of all misses, of all seeds unless one is named. ScenarioError for what
        the run does not have.

        >>> print(results.explain(policy="static", load=20, request=3)[0]["sentence"])
        arrived 932 us before the running step ended, queued 86 ms (the batch may still fill ...), prefill 10 ms ...
        """
        asked = {"slowest": slowest is not None or by is not None, "request": request is not None, "slo": slo}
        if len(modes := [name for name, is_asked in asked.items() if is_asked]) > 1:
            raise ScenarioError(f"{' and '.join(modes)}: each tells something else. Give one of them.")
        known = [name for name, latency in LATENCIES.items() if latency.of is not None]
        if by is not None and by not in known:
            raise ScenarioError(f"by {by}: is no latency of a request. Write one of {', '.join(known)}.")
        load, chosen = explained_at(self, policy, load)
        if slo:
            seeds = sorted({int(number) for number in self.points["seed"]}) if seed is None else [seed]
            return causes(self, chosen, load, seeds)
        if request is not None:
            return [story(self, name, load, seed or 0, request) for name in chosen]
        most = 5 if slowest is None else slowest
        if most < 0:
            raise ScenarioError(f"slowest {most}: is no number of requests. Write 0 or more.")
        return [overview(self, name, load, seed or 0, slowest=most, by=by) for name in chosen]


def explained_at(results: read.Results, policy: str | None, load: float | None) -> tuple[float, list[str]]:
    """The load and the policies that `explain` shows: the given ones, else the load of the table and all policies that
    ran there. ScenarioError where there is no such policy or load."""
    known = list(dict.fromkeys(str(name) for name in results.points["policy"]))
    if policy is not None and policy not in known:
        raise ScenarioError(f"{results.path}: has no policy {policy}. Write one of {', '.join(known)}.")
    load = load_to_show(results, policy) if load is None else load
    check_load(results, load, policy)
    ran = [sweep.policy for sweep in sweeps_at(results, load) if not sweep.failed[sweep.index(load)]]
    return load, ran if policy is None else [policy]


def load_results(path: Path | str) -> Results:
    """The results in a run's folder `results/<scenario>/<hash>`; of the scenario's folder, the newest run.

    Warns in one line where another version of batchsim or of a package made them. ScenarioError if they lack what this
    version needs.

    >>> list(batchsim.load_results("results/tiny").summary["policy"].unique())
    ['static', 'vllm']
    """
    return with_plots(read.load_results(path))


def with_plots(results: read.Results) -> Results:
    """`results` with all that people ask of them."""
    return Results(**{field.name: getattr(results, field.name) for field in fields(results)})
