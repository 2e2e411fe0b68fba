"""Reading a run's results for pictures and tables: which points count, which load to show, how loads are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchsim.base.errors import ScenarioError
from batchsim.base.units import counted
from batchsim.metrics.latencies import holds_queue
from batchsim.policies.evidence import FOLLOWED
from batchsim.policies.registry import POLICIES
from batchsim.results.decision import JudgedLoad
from batchsim.results.knobs import knobs, speculation
from batchsim.results.read import Results, check_number, scenario_of, varied

SAME_COSTS = "same step costs for all: this compares schedulers, not engines"

AXIS_LABELS = {
    "mean_rate": "offered load (requests/s)",
    "users": "users in a closed loop",
    "rate_scale": "offered load (times the trace's rate)",
    "": "the scenario's load",
}
"""What the axis of loads is called, by the name of the load."""

USER, GPU = "user_tokens_per_s_p50", "output_tokens_per_s_per_gpu"
"""The columns of what a GPU delivers against what its users get."""

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class PolicyCurve:
    """One policy's results over the tested loads, from the lowest load up; arrays have an entry for each load.

    `name` is the policy's label, or says that its best variant changes with the load; `labels` are the variants' labels
    by load. `label` is the policy's name in the scenario, without the varied key's `value`; that is None where the
    policy lacks the key. `meets_slo`: stable, and the SLO margin, averaged over seeds, is not below 0. `failed` is the
    number of seeds that failed; metrics are missing where it is not 0.
    """

    policy: str
    kind: str
    name: str
    labels: list[str]
    loads: Floats
    unstable: Flags
    failed: Floats
    meets_slo: Flags
    rows: pd.DataFrame
    label: str
    value: Any

    def values(self, metric: str) -> Floats:
        """The metric's mean over seeds at each load, NaN where it is not defined."""
        return column(self.rows, metric)

    def stable(self, metric: str) -> Floats:
        """The metric's mean over seeds at each load, NaN also where it is no point of a curve: the load is unstable, or
        lies within the cost's error of saturation and the metric holds time in the queue."""
        return np.where(self.unstable | (self.within_error & holds_queue(metric)), np.nan, self.values(metric))

    def half_width(self, metric: str) -> Floats:
        """Half the 95 % interval of the metric over seeds at each load, NaN with one seed."""
        return column(self.rows, f"{metric}_ci")

    def weak(self, metric: str) -> Flags:
        """For each load, whether fewer than 20 observations lie beyond the percentile that `metric` names."""
        return np.array([metric in names.split() for names in texts(self.rows, "few")], dtype=bool)

    def index(self, load: float) -> int:
        """Index of `load`, one of this policy's tested loads, in the arrays."""
        return int(np.flatnonzero(self.loads == load)[0])

    def tested(self, load: float) -> bool:
        """Whether this policy was run at `load`: where the run finds loads for each policy, they differ."""
        return bool((self.loads == load).any())

    def ends(self, metric: str) -> tuple[Floats, Floats]:
        """The metric with the shortest and the longest steps that the cost's error allows, at each load: NaN where it
        is not defined or these were not simulated; of what holds time in a queue that grows, infinite."""
        fast, slow = (
            np.where((self._end(f"unstable_{end}") == 1) & holds_queue(metric), np.inf, self._end(f"{metric}_{end}"))
            for end in ("fast", "slow")
        )
        return fast, slow

    @property
    def within_error(self) -> Flags:
        """For each load, whether it lies within the cost's error of saturation: what holds time in the queue is an
        interval there, and no number."""
        return self._end("within_cost_error") == 1

    @property
    def untold(self) -> Flags:
        """For each load, whether the SLO is met at one end of the cost's error alone."""
        return self._end("meets_slo_fast") + self._end("meets_slo_slow") == 1

    @property
    def judged(self) -> list[JudgedLoad]:
        """Each load, judged by the interval of the SLO's margin over seeds."""
        margins, halves = self.values("slo_margin"), self.half_width("slo_margin")
        loads = []
        for i, load in enumerate(self.loads.tolist()):
            ends = (margins[i] - halves[i], margins[i] + halves[i]) if np.isfinite(halves[i]) else (None, None)
            grows, failed, by_cost = bool(self.unstable[i]), bool(self.failed[i]), bool(self.untold[i])
            loads.append(JudgedLoad(load, float(margins[i]), *ends, grows=grows, failed=failed, by_cost=by_cost))
        return loads

    @property
    def shown_at(self) -> int:
        """Index of the load that a table shows where each policy has loads of its own: the highest that surely meets
        the SLO, else the highest that does on average, else the lowest."""
        sure = [i for i, each in enumerate(self.judged) if each.verdict == "met"]
        return (sure or [0, *np.flatnonzero(self.meets_slo).tolist()])[-1]

    def _end(self, name: str) -> Floats:
        return column(self.rows, name) if name in self.rows else np.full(len(self.loads), np.nan)

    @property
    def grows(self) -> Flags:
        """For each load, whether the queue grows without end whatever the cost's error."""
        return self.unstable & ~self.within_error

    @property
    def unstable_from(self) -> float | None:
        """The lowest load at which the queue `grows`; None if there is none."""
        return float(self.loads[self.grows][0]) if self.grows.any() else None


def sweeps(results: Results) -> list[PolicyCurve]:
    """The PolicyCurve of each policy, in the scenario's order."""
    summary = results.summary
    owners, loads = np.array(texts(summary, "policy")), column(summary, "load")
    curves = []
    for policy in dict.fromkeys(owners.tolist()):
        of_policy = np.flatnonzero(owners == policy)
        rows = summary.take(of_policy[np.argsort(loads[of_policy], kind="stable")])
        labels = texts(rows, "label")
        variant = varied(results, policy)
        unstable = np.asarray(rows["unstable"], dtype=bool)
        curves.append(
            PolicyCurve(
                policy=policy,
                kind=texts(rows, "kind")[0],
                name=labels[0] if len(set(labels)) == 1 else f"{policy} (best at each load)",
                labels=labels,
                loads=column(rows, "load"),
                unstable=unstable,
                failed=column(rows, "failed"),
                meets_slo=~unstable & (column(rows, "slo_margin") >= 0),
                rows=rows,
                label=policy if variant is None else variant["policy"],
                value=None if variant is None else variant["value"],
            )
        )
    return curves


STATED_DRAFTS = "how many drafts are accepted is stated, not measured"
FREE_DRAFTS = f"drafting takes no time here, and {STATED_DRAFTS}"


def systems_note(results: Results) -> str:
    """The caveats for a run of several real serving systems, of one not configured as shipped, of draft tokens; else
    empty. A system goes by its kind, unless its policies in the run differ from each other: then by their names."""
    owners = dict(zip(texts(results.summary, "policy"), texts(results.summary, "kind"), strict=True))
    systems = [kind for kind in POLICIES if kind in owners.values() and kind in FOLLOWED]
    differing: list[str] = []
    for kind in systems:
        differences = {n: FOLLOWED[kind].difference(knobs(results, n)) for n in owners if owners[n] == kind}
        named = differences if len(set(differences.values())) > 1 else {kind: next(iter(differences.values()))}
        differing += [f"{name} {words}" for name, words in named.items() if words]
    notes = [SAME_COSTS] if len(systems) > 1 else []
    notes += [f"{', '.join(differing)}: not the engine's default"] if differing else []
    drafting = {n: speculation(results, n) for n, kind in owners.items() if kind in systems}
    drafting = {} if "live" in results.manifest else drafting  # there drafts and their time are real
    for words, free in ((FREE_DRAFTS, True), (STATED_DRAFTS, False)):
        named = [n for n, drafter in drafting.items() if drafter and _is_free(results, n, drafter) is free]
        notes += [f"{', '.join(named)}: {words}"] if named else []
    return " · ".join(notes)


def _is_free(results: Results, policy: str, drafter: Mapping[str, Any]) -> bool:
    """Whether a cost of the scenario of `policy` says nothing of its drafter, by the `speculative_config` `drafter`."""
    plain = scenario_of(results, policy)
    groups = (plain.get("replicas") or {}).get("groups") or {"": {}}
    costs = [group.get("cost") or plain["cost"] for group in groups.values()]
    choices = drafter.get("best_of") or [drafter]
    return any(choice.get("method") not in (cost.get("draft") or {}) for cost in costs for choice in choices)


def column(frame: pd.DataFrame, name: str) -> Floats:
    """Column `name` of `frame` as float64, NaN for missing values. ScenarioError if there is no such column."""
    if name not in frame:
        raise ScenarioError(
            f"summary.csv, points.csv or a table has no column {name}: another version of batchsim wrote it. Run the"
            " scenario again."
        )
    return frame[name].to_numpy(dtype=np.float64, na_value=np.nan)


def rows_of(table: pd.DataFrame, sweep: PolicyCurve, i: int) -> pd.DataFrame:
    """The rows of a run's table, such as that of replicas, of the variant that a curve has at its `i`-th load."""
    of_policy = np.array(texts(table, "policy")) == sweep.policy
    of_variant = np.array(texts(table, "variant")) == texts(sweep.rows, "variant")[i]
    return table.take(np.flatnonzero(of_policy & of_variant & (column(table, "load") == sweep.loads[i])))


def texts(frame: pd.DataFrame, name: str) -> list[str]:
    """Column `name` of `frame` as strings."""
    return [str(value) for value in frame[name]]


def num_seeds(results: Results) -> int:
    """How many seeds the means in the summary are taken over, at most."""
    return int(column(results.summary, "num_seeds").max())


def seeds_text(results: Results, load: float | None = None) -> str:
    """`3 seeds`, or `5–11 seeds` where points have different numbers; with `load`, of the points at that load."""
    counts = column(results.summary, "num_seeds")
    counts = counts if load is None else counts[column(results.summary, "load") == load]
    counts = counts[counts > 0] if counts.any() else counts  # a point that failed has 0 seeds
    fewest, most = int(counts.min()), int(counts.max())
    return f"{fewest}–{most} seeds" if fewest < most else counted(most, "seed")


def tested_loads(results: Results) -> Floats:
    """The distinct loads of the run, from the lowest up."""
    return np.unique(column(results.summary, "load"))


def sweeps_at(results: Results, load: float) -> list[PolicyCurve]:
    """The PolicyCurve of each policy that was run at `load`, in the scenario's order."""
    return [sweep for sweep in sweeps(results) if sweep.tested(load)]


def load_to_show(results: Results, policy: str | None = None) -> float:
    """The highest load at which at least one policy surely meets the SLO, if none does one that meets it on average; if
    none does, the middle load (the lower of two).

    Where each policy has loads of its own, only loads count that at least half of the policies have, or as many as
    possible; if `policy` lacks the chosen load, the rule is applied to that policy alone. Loads at which every policy
    failed do not count.
    """
    if policy is not None:
        everyones = load_to_show(results)
        chosen = [sweep for sweep in sweeps(results) if sweep.policy == policy]
        if all(sweep.tested(everyones) for sweep in chosen):
            return everyones
    else:
        chosen = sweeps(results)
    met = {each.load for sweep in chosen for each in sweep.judged if each.verdict == "met"}
    met = met or {float(load) for sweep in chosen for load in sweep.loads[sweep.meets_slo]}
    known = {float(load) for sweep in chosen for load in sweep.loads[sweep.failed == 0]}
    loads = met or known or {float(load) for load in tested_loads(results)}
    shared = {load: sum(sweep.tested(load) for sweep in chosen) for load in loads}
    enough = min((len(chosen) + 1) // 2, max(shared.values()))
    best = sorted(load for load in loads if shared[load] >= enough)
    return best[-1] if met else best[(len(best) - 1) // 2]


def check_load(results: Results, load: float, policy: str | None = None) -> None:
    """Raises ScenarioError unless the run has points at `load`, of `policy` where one is named."""
    loads = tested_loads(results)
    check_number(results.path, load, loads)
    own = next((sweep for sweep in sweeps(results) if sweep.policy == policy), None)
    if own is not None and load in loads and not own.tested(load):
        raise ScenarioError(
            f"{results.path}: {policy} was not tested at load {load:g}, only others were. It was at"
            f" {', '.join(f'{x:g}' for x in own.loads)}."
        )
    if load not in loads:
        raise ScenarioError(
            f"{results.path}: load {load:g} was not tested. Tested are {', '.join(f'{x:g}' for x in loads)}."
        )
    if all(sweep.failed[sweep.index(load)] for sweep in sweeps_at(results, load)):
        reasons = {failed["reason"].rstrip(".") for failed in results.manifest["failed"] if failed["load"] == load}
        raise ScenarioError(f"{results.path}: all policies failed at load {load:g}: {'; '.join(sorted(reasons))}.")


def is_auto(results: Results) -> bool:
    """Whether the run itself found the loads, for each policy its own."""
    return "saturation_rps" in results.manifest


def load_name(results: Results) -> str:
    """The load axis: `mean_rate` (requests/s), `users`, `rate_scale` (of a trace), or empty for a single load."""
    return texts(results.summary, "load_name")[0]


def load_text(name: str, load: float) -> str:
    """A load in words: `8 req/s`, `64 users`, `2× the trace's rate`; `the scenario's load` if the axis has no name."""
    units = {"mean_rate": f"{load:g} req/s", "users": f"{load:g} users", "rate_scale": f"{load:g}× the trace's rate"}
    return units.get(name, "the scenario's load")


def at_load(name: str, load: float) -> str:
    """A load as an adverbial: `at 8 req/s offered`, `with 64 users`."""
    places = {"mean_rate": f"at {load_text(name, load)} offered", "users": f"with {load_text(name, load)}"}
    return places.get(name, f"at {load_text(name, load)}")


def point_text(results: Results, point: Mapping[str, Any]) -> str:
    """`vllm at 8 req/s offered, seed 0`: the point whose `policy`, `load` and `seed` are in `point`."""
    return f"{point['policy']} {at_load(load_name(results), point['load'])}, seed {point['seed']}"


def short_load(name: str, load: float) -> str:
    """A load as the label of a point: `8`, `2×`; empty if the axis has no name."""
    return f"{load:g}×" if name == "rate_scale" else f"{load:g}" if name else ""


def log_ends(y: Floats, half: Floats) -> tuple[Floats, Floats]:
    """(low, high) of intervals on a logarithmic axis: up to `y` + `half`, and down by the same factor, since one that
    reached 0 or below would have no lower end there."""
    return y - half * (y / (y + half)), y + half  # in this form rounding puts no lower end above `y`
