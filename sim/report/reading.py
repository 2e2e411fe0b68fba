"""What pictures and tables read off a run's results: which points count, which load to show, how loads are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchsim.base.errors import ScenarioError
from batchsim.policies.evidence import FOLLOWED
from batchsim.policies.registry import POLICIES
from batchsim.results.read import varied

if TYPE_CHECKING:
    from batchsim.results.read import Results

SAME_COSTS = "same step costs for all: this compares schedulers, not engines"

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Sweep:
    """One policy over the tested loads, from the lowest up; arrays have an entry a load.

    `name` is the policy's label, or says that its best variant changes with the load; `labels` has the label by load.
    `label` is the policy's in the scenario, without the `value` of the varied key; None where it has none.
    `meets_slo`: stable, and the mean margin of the SLO over the seeds is not below 0. `failed`: how many seeds failed;
    where any did, there is no metric.
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
        """The mean over seeds, NaN where it is not defined."""
        return column(self.rows, metric)

    def stable(self, metric: str) -> Floats:
        """The mean over seeds, NaN also where the point is unstable: such a point is no point of a curve."""
        return np.where(self.unstable, np.nan, self.values(metric))

    def half_width(self, metric: str) -> Floats:
        """Half the 95 % interval over seeds, NaN with one seed."""
        return column(self.rows, f"{metric}_ci")

    def few(self, metric: str) -> Flags:
        """Whether fewer than 20 observations lie beyond this percentile."""
        return np.array([metric in few.split() for few in texts(self.rows, "few")], dtype=bool)

    def index(self, load: float) -> int:
        """Where `load`, one of those tested with this policy, stands in the arrays."""
        return int(np.flatnonzero(self.loads == load)[0])

    def tested(self, load: float) -> bool:
        """Whether this policy was run at `load`: where loads were found for each, not all have all."""
        return bool((self.loads == load).any())

    @property
    def unstable_from(self) -> float | None:
        """The lowest load at which the queue grows without end; None if there is none."""
        return float(self.loads[self.unstable][0]) if self.unstable.any() else None


def sweeps(results: Results) -> list[Sweep]:
    """A Sweep a policy, in the scenario's order."""
    summary = results.summary
    owners, loads = np.array(texts(summary, "policy")), column(summary, "load")
    found = []
    for policy in dict.fromkeys(owners.tolist()):
        mine = np.flatnonzero(owners == policy)
        rows = summary.take(mine[np.argsort(loads[mine], kind="stable")])
        labels = texts(rows, "label")
        its = varied(results, policy)
        unstable = np.asarray(rows["unstable"], dtype=bool)
        found.append(
            Sweep(
                policy=policy,
                kind=texts(rows, "kind")[0],
                name=labels[0] if len(set(labels)) == 1 else f"{policy} (best at each load)",
                labels=labels,
                loads=column(rows, "load"),
                unstable=unstable,
                failed=column(rows, "failed"),
                meets_slo=~unstable & (column(rows, "slo_margin") >= 0),
                rows=rows,
                label=policy if its is None else its["policy"],
                value=None if its is None else its["value"],
            )
        )
    return found


def systems_note(results: Results) -> str:
    """What must stand beside two or more real systems, and beside one that is not as its engine is shipped; empty for
    other runs."""
    kinds = set(texts(results.summary, "kind"))
    systems = {kind: FOLLOWED[kind] for kind in POLICIES if kind in kinds and kind in FOLLOWED}
    differing = [f"{kind} {followed.differs}" for kind, followed in systems.items() if followed.differs]
    notes = [SAME_COSTS] if len(systems) > 1 else []
    notes += [f"{', '.join(differing)}: not the engine's default"] if differing else []
    return " · ".join(notes)


def column(frame: pd.DataFrame, name: str) -> Floats:
    """A numeric column as floats. ScenarioError if there is none."""
    if name not in frame:
        raise ScenarioError(
            f"summary.csv, points.csv or a table has no column {name}: another version of batchsim wrote it. Run the"
            " scenario again."
        )
    return frame[name].to_numpy(dtype=np.float64, na_value=np.nan)


def texts(frame: pd.DataFrame, name: str) -> list[str]:
    """A column as strings."""
    return [str(value) for value in frame[name]]


def num_seeds(results: Results) -> int:
    """Over how many seeds the summary's means are taken."""
    return int(column(results.summary, "num_seeds").max())


def seeds_text(results: Results, load: float | None = None) -> str:
    """`3 seeds`, or `5–11 seeds` where points have different numbers; of one load where it is given."""
    counts = column(results.summary, "num_seeds")
    counts = counts if load is None else counts[column(results.summary, "load") == load]
    counts = counts[counts > 0] if counts.any() else counts  # points that failed have none
    fewest, most = int(counts.min()), int(counts.max())
    return f"{fewest}–{most} seeds" if fewest < most else f"{most} seed{'s' if most != 1 else ''}"


def tested_loads(results: Results) -> Floats:
    """The loads of the run, from the lowest up."""
    return np.unique(column(results.summary, "load"))


def sweeps_at(results: Results, load: float) -> list[Sweep]:
    """A Sweep a policy that was run at `load`, in the scenario's order."""
    return [sweep for sweep in sweeps(results) if sweep.tested(load)]


def load_to_show(results: Results, policy: str | None = None) -> float:
    """The highest load at which at least one policy meets the SLO; without any, the middle one (the lower of two).

    Where policies have loads of their own, it is one that at least half of them have, or else as many as can be; and
    where `policy` does not have it, the one that this rule gives for that policy alone. Loads at which every policy
    failed do not count.
    """
    if policy is not None:
        everyones = load_to_show(results)
        chosen = [sweep for sweep in sweeps(results) if sweep.policy == policy]
        if all(sweep.tested(everyones) for sweep in chosen):
            return everyones
    else:
        chosen = sweeps(results)
    met = {float(load) for sweep in chosen for load in sweep.loads[sweep.meets_slo]}
    known = {float(load) for sweep in chosen for load in sweep.loads[sweep.failed == 0]}
    loads = met or known or {float(load) for load in tested_loads(results)}
    shared = {load: sum(sweep.tested(load) for sweep in chosen) for load in loads}
    enough = min((len(chosen) + 1) // 2, max(shared.values()))
    best = sorted(load for load in loads if shared[load] >= enough)
    return best[-1] if met else best[(len(best) - 1) // 2]


def check_load(results: Results, load: float, policy: str | None = None) -> None:
    """ScenarioError unless the run has points at `load`, of `policy` where one is named."""
    loads = tested_loads(results)
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
    """Whether the loads were found by the run, for each policy its own."""
    return "saturation_rps" in results.manifest


def load_name(results: Results) -> str:
    """What the loads are: `mean_rate` (requests/s), `users`, `rate_scale` (of a trace), or empty for a single load."""
    return texts(results.summary, "load_name")[0]


def load_text(name: str, load: float) -> str:
    """A load as people say it: `8 req/s`, `64 users`, `2× the trace's rate`; for a single nameless load, words."""
    units = {"mean_rate": f"{load:g} req/s", "users": f"{load:g} users", "rate_scale": f"{load:g}× the trace's rate"}
    return units.get(name, "the scenario's load")


def at_load(name: str, load: float) -> str:
    """The load as a place: `at 8 req/s offered`, `with 64 users`."""
    places = {"mean_rate": f"at {load_text(name, load)} offered", "users": f"with {load_text(name, load)}"}
    return places.get(name, f"at {load_text(name, load)}")


def short_load(name: str, load: float) -> str:
    """A load as the label of a point: `8`, `2×`; empty for a single nameless load."""
    return f"{load:g}×" if name == "rate_scale" else f"{load:g}" if name else ""
