"""Reads what `run_scenario` left: a run's tables as DataFrames.

results/<scenario>/points/<hash>/   requests, steps and states as Parquet; point.json: what it was and its metrics;
                                    of several replicas also stays.parquet: requests at engines before their last;
                                    of an engine ahead of results also lanes.parquet: the host's part of steps;
                                    with keep: minutes, minutes, engine_minutes and histograms in place of all these
results/<scenario>/<hash>/          summary.csv, points.csv, scenario.yaml, manifest.json, pictures; of several
                                    replicas also replicas.csv
"""

from __future__ import annotations

import csv
import io
import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from batchsim.base.errors import ScenarioError
from batchsim.base.files import read_json, reason_text
from batchsim.drive.fleet.fleet_plan import ReplicaSpan
from batchsim.kernel.record import Records
from batchsim.metrics.intervals import Difference, paired
from batchsim.metrics.latencies import LATENCIES, TASK_E2E
from batchsim.metrics.slo import parse_slo
from batchsim.results.checksums import check_seal, read_checked
from batchsim.results.frames import LANES, STAYS, no_steps, to_records
from batchsim.results.landmarks import Landmarks, curve, marks
from batchsim.results.minute_frames import ENGINE_MINUTES, MINUTES
from batchsim.results.point_files import has_table, read_point, read_table
from batchsim.results.provenance import other_version

POINTS = "points"
MANIFEST, SCENARIO = "manifest.json", "scenario.yaml"
SUMMARY, POINTS_TABLE, REPLICAS, TRAININGS = "summary.csv", "points.csv", "replicas.csv", "trainings.csv"
ADAPTERS = "adapters.csv"
COMPARED = ("ttft_p99_s", "tpot_p99_s", "norm_latency_mean_s", "in_slo")
"""The metrics whose differences between policies are in the JSON of a run."""
_HEAD = ("scenario_name", "heading", "kv", "workload", "slo", "objective", "measured_at")
_HEAD += ("machine", "packages", "commit", "code")
_NEEDED = (*_HEAD, "scenario", "outcomes", "details", "num_blocks", "identical_seeds", "points_run", "points_reused")
_NEEDED += ("files", "sha256")
_KEYS = ("policy", "load")  # of every table
_COLUMNS = {
    SUMMARY: (*_KEYS, "kind", "label", "variant", "num_seeds", "failed", "unstable", "bound_by", "few"),
    POINTS_TABLE: (*_KEYS, "kind", "label", "variant", "seed", "point", "unstable", "bound_by", "few", "cohort"),
}
"""What is read of the tables that every run has, whatever metrics its version knew."""
_MAY_BE = ("vary", "precision")
_TEXT = {"policy", "kind", "label", "variant", "few", "load_name", "point", "bound_by", "vary_key", "group", "adapter"}


@dataclass(frozen=True)
class Results:
    """A finished run as DataFrames.

    `summary`: a row a policy and load, each metric as the mean over seeds and `<metric>_ci`, the half-width of its 95 %
    interval. `points`: a row a policy, load and seed. `manifest`: how it was obtained.
    """

    path: Path
    summary: pd.DataFrame
    points: pd.DataFrame
    manifest: dict[str, Any]
    scenario: dict[str, Any]

    def requests(self, policy: str, load: float, seed: int = 0) -> pd.DataFrame:
        """A row a request; see `batchsim.results.frames.COLUMN_DOCS` for columns and units."""
        return self._table("requests", policy, load, seed)

    def steps(self, policy: str, load: float, seed: int = 0) -> pd.DataFrame:
        """A row an engine step."""
        return self._table("steps", policy, load, seed)

    def states(self, policy: str, load: float, seed: int = 0) -> pd.DataFrame:
        """A row per change of a request's state, or of the reason that blocks the head of the queue."""
        return self._table("states", policy, load, seed)

    def lanes(self, policy: str, load: float, seed: int) -> pd.DataFrame | None:
        """A row a step: the host's part of it. None where no engine was ahead of results."""
        return self._table(LANES, policy, load, seed) if has_table(self._folder(policy, load, seed), LANES) else None

    def keeps(self, policy: str) -> str:
        """What was kept of a policy's points, as the scenario says it: `all`, `requests` or `minutes`."""
        return str(scenario_of(self, policy).get("keep", "all"))

    def minutes(self, policy: str, load: float, seed: int) -> pd.DataFrame:
        """A row a minute, replica and class of traffic, of a point of which minutes were kept; see
        `batchsim.results.minute_frames` for columns and units."""
        return self._table(MINUTES, policy, load, seed)

    def engine_minutes(self, policy: str, load: float, seed: int) -> pd.DataFrame:
        """A row a minute and replica with any step, of a point of which minutes were kept; as `minutes`."""
        return self._table(ENGINE_MINUTES, policy, load, seed)

    def replicas(self) -> pd.DataFrame | None:
        """A row a policy, load, seed and replica; see `batchsim.metrics.replica_table`. None for runs of one engine."""
        if not self.scenario.get("replicas"):
            return None
        return _read_csv(self.path, REPLICAS, self.manifest)

    def trainings(self) -> pd.DataFrame | None:
        """A row a policy, load, seed and training of a rollout; see `batchsim.metrics.rollouts`. None without one."""
        if "trainings" not in self.summary:
            return None
        return _read_csv(self.path, TRAININGS, self.manifest)

    def adapters(self) -> pd.DataFrame | None:
        """A row a policy, load, seed and LoRA adapter; see `batchsim.metrics.adapter_table`. None without any asked
        for."""
        if ADAPTERS not in self.manifest["files"]:
            return None
        return _read_csv(self.path, ADAPTERS, self.manifest)

    def spans(self, policy: str, load: float, seed: int) -> tuple[ReplicaSpan, ...]:
        """What each replica was doing when, by replica and time; () for runs of one engine."""
        if not self.scenario.get("replicas"):
            return ()
        spans = (read_point(self._folder(policy, load, seed)) or {}).get("replica_spans", [])
        return tuple(ReplicaSpan(**span) for span in spans)

    def records(self, policy: str, load: float, seed: int, *, requests_only: bool = False) -> Records:
        """All tables as the arrays that `batchsim.metrics.attribution` reads, or `requests_only`. ScenarioError if one
        lacks a column."""
        names = ["requests"] if requests_only else ["steps", "states", "requests"]
        names += [STAYS] if self.scenario.get("replicas") else []
        tables: dict[str, pd.DataFrame] = {name: self._table(name, policy, load, seed) for name in names}
        if requests_only:
            tables |= no_steps()
        try:
            return to_records(**tables, lanes=None if requests_only else self.lanes(policy, load, seed))
        except KeyError as error:
            raise ScenarioError(
                f"{self.path}: the tables of {policy} at load {load:g}, seed {seed} have no column {error.args[0]}:"
                " another version of batchsim wrote them. Run the scenario again."
            ) from None

    def paired(self, policy: str, other: str, metric: str, load: float) -> Difference:
        """`metric` of `policy` minus that of `other` at `load`, over the seeds that both ran.

        Undefined where one has no value or failed, and for a latency that grows with the queue where one is unstable.
        ScenarioError if there is no such point or metric.
        """
        if metric not in self.points:
            raise ScenarioError(f"{self.path}: no metric {metric!r}. summary.csv has their names.")
        sides: list[dict[int, float | None]] = []
        for name in (policy, other):
            if load in self._failed_loads(name):
                return Difference(None, None, 0, f"{name} failed")
            rows = self._rows(name, load)
            known = zip(rows["seed"], rows[metric], strict=True)
            sides.append({int(seed): None if np.isnan(value) else float(value) for seed, value in known})
        names = [TASK_E2E, *(name for name, latency in LATENCIES.items() if latency.queues)]
        queues = any(metric.startswith(name) for name in names)
        growing = [name for name in (policy, other) if queues and self._grows(name, load)]
        if growing:
            return Difference(None, None, len(set(sides[0]) & set(sides[1])), f"{growing[0]} is unstable")
        return paired(*sides)

    def best(self, load: float) -> str:
        """The policy that is stable, meets the SLO, has most requests within it, then the lowest time per token.

        Policies that failed come last.
        """
        keys = ["policy", "unstable", "slo_margin", "in_slo", "norm_latency_mean_s"]
        rows = self.summary.loc[self.summary["load"] == load, keys].fillna({"in_slo": 0.0})
        rows["slo_margin"] = rows["slo_margin"] >= 0
        rows["failed"] = [load in self._failed_loads(str(name)) for name in rows["policy"]]
        keys[0] = "failed"
        order = rows.sort_values(keys, ascending=[True, True, False, False, True], kind="stable", na_position="last")
        return str(order["policy"].iloc[0])

    def differences(self, load: float, metrics: Sequence[str] = COMPARED) -> list[dict[str, Any]]:
        """Every other policy minus the best one at `load`, a row a policy and metric: see `Difference`."""
        best = self.best(load)
        rows = self.summary[self.summary["load"] == load]  # policies may have loads of their own
        others = [name for name in dict.fromkeys(rows["policy"]) if name != best]
        return [
            {"load": load, "policy": name, "minus": best, "metric": metric}
            | asdict(difference := self.paired(name, best, metric, load))
            | {"no_difference": difference.is_none}
            for name in map(str, others)
            for metric in metrics
        ]

    def _failed_loads(self, policy: str) -> set[float]:
        """The loads at which a seed of the policy failed; with `best_of` only where that cost the summary's row."""
        rows = self.summary[(self.summary["policy"] == policy) & (self.summary["failed"] > 0)]
        return {float(load) for load in rows["load"]}

    def _grows(self, policy: str, load: float) -> bool:
        rows = self.summary[(self.summary["policy"] == policy) & (self.summary["load"] == load)]
        return bool(rows["unstable"].any())

    def as_json(self) -> dict[str, Any]:
        """By policy: how its requests ended, summed over loads and seeds and at each; its metrics at every load; and
        what its curve shows (`batchsim.results.landmarks`).

        `differences`: at every load, the other policies minus the best one. `failed`: the points that have no metrics.
        """
        policies: dict[str, Any] = {}
        for row in self.points.to_dict("records"):
            counted = self.manifest["outcomes"][str(row["label"])]
            entry = next(e for e in counted if e["load"] == row["load"] and e["seed"] == row["seed"])
            policy = policies.setdefault(str(row["policy"]), {"outcomes": [], "loads": []})
            policy["outcomes"].append(entry)
        for policy in policies.values():
            policy |= _totals(policy["outcomes"])
        landmarks = curve_marks(self)
        for name, policy in policies.items():
            if name in self.manifest.get("saturation_rps", {}):
                policy["saturation_rps"] = self.manifest["saturation_rps"][name]
            policy["curve"] = asdict(landmarks[name]) if name in landmarks else None
        for row in self.summary.to_dict("records"):
            metrics = {name: None if isinstance(x, float) and np.isnan(x) else x for name, x in row.items()}
            policies.setdefault(str(row["policy"]), {"outcomes": [], "loads": []})["loads"].append(metrics)
        loads = [float(load) for load in self.summary["load"].unique()] if len(policies) > 1 else []
        differences = [row for load in loads for row in self.differences(load)]
        head = {key: self.manifest[key] for key in (*_HEAD, *(name for name in _MAY_BE if name in self.manifest))}
        head |= {"path": str(self.path), "failed": self.manifest.get("failed", [])}
        return head | {"policies": policies, "differences": differences}

    def _table(self, table: str, policy: str, load: float, seed: int) -> pd.DataFrame:
        folder = self._folder(policy, load, seed)
        try:
            keep = self.keeps(policy)
            if keep != "all" and not has_table(folder, table):
                enough = {"requests": "requests", STAYS: "requests", MINUTES: "minutes", ENGINE_MINUTES: "minutes"}
                raise ScenarioError(
                    f"{folder}: its {table} were not kept, since the scenario says keep: {keep}. Run it again with"
                    f" --set keep={enough.get(table, 'all')}."
                )
            return read_table(folder, table)
        except (OSError, ValueError) as error:
            raise ScenarioError(
                f"{folder}: {table} cannot be read: {reason_text(error)}. Run the scenario again."
            ) from None

    def _folder(self, policy: str, load: float, seed: int) -> Path:
        return self.path.parent / POINTS / str(next(iter(self._rows(policy, load, seed)["point"])))

    def _rows(self, policy: str, load: float, seed: int | None = None) -> pd.DataFrame:
        """The rows of `points` of a policy and load, of one seed if given. ScenarioError if there are none."""
        points = self.points
        check_number(self.path, load, points["load"].unique())
        wanted = (points["policy"] == policy) & (points["load"] == load)
        rows = points.loc[wanted if seed is None else wanted & (points["seed"] == seed)]
        if rows.empty:
            for failed in self.manifest.get("failed", []):
                if (failed["policy"], failed["load"], failed["seed"]) == (policy, load, seed):
                    raise ScenarioError(
                        f"{self.path}: {policy} failed at load {load:g}, seed {seed}: {failed['reason'].rstrip('.')}."
                        " Correct that and run the scenario again."
                    )
            own = points[points["policy"] == policy]
            candidates = own if len(own) else points  # policies may have loads of their own
            listed = {
                name: ", ".join(f"{x:g}" if name == "load" else str(x) for x in sorted(set(candidates[name])))
                for name in ("policy", "load", "seed")
            }
            listed["policy"] = ", ".join(str(x) for x in points["policy"].unique())
            known = f"policies {listed['policy']}; loads {listed['load']}; seeds {listed['seed']}"
            which = "" if seed is None else f" with seed {seed}"
            raise ScenarioError(f"{self.path}: no point {policy} at load {load:g}{which}. There are {known}.")
        return rows


def curve_marks(results: Results) -> dict[str, Landmarks]:
    """Knee, SLO crossing and instability by policy, read off the tested loads; empty where there is no load axis."""
    rows = [{str(name): value for name, value in row.items()} for row in results.summary.to_dict("records")]
    if not rows[0]["load_name"]:
        return {}
    slo = parse_slo(results.manifest["slo"]) if results.manifest["objective"] == results.manifest["slo"] else None
    policies = dict.fromkeys(str(row["policy"]) for row in rows)
    return {policy: marks(curve((row for row in rows if row["policy"] == policy), slo)) for policy in policies}


def varied(results: Results, policy: str) -> dict[str, Any] | None:
    """Of a policy in a run that varies a key: `policy`, its label in the scenario; the `value`; `kv` and `num_blocks`.

    None where the run varies no key.
    """
    return results.manifest["vary"]["policies"][policy] if "vary" in results.manifest else None


def scenario_of(results: Results, policy: str) -> dict[str, Any]:
    """The scenario's plain values as `policy` ran with them: with its value of the varied key."""
    variant = varied(results, policy)
    plain: dict[str, Any] = json.loads(json.dumps({k: x for k, x in results.scenario.items() if k != "vary"}))
    if variant is None or variant["value"] is None:
        return plain
    *path, last = results.manifest["vary"]["key"].split(".")
    at: Any = plain
    for key in path:
        if isinstance(at, list):
            at = at[int(key)]
            continue
        cost = at.get("cost")
        if key == "deployment" and isinstance(cost, dict) and cost.get("kind") == key:
            key = "cost"  # as which it stands in plain values
        at[key] = at = at.get(key) or {}
    at[int(last) if isinstance(at, list) else last] = variant["value"]
    return plain


def num_blocks(results: Results, policy: str) -> int:
    """The size in blocks of the KV pool that a policy ran with."""
    variant = varied(results, policy)
    return int(results.manifest["num_blocks"] if variant is None else variant["num_blocks"])


def blocks_by_replica(results: Results, policy: str) -> list[int]:
    """The KV blocks of every replica of a policy, by its number; of the one engine where there is no router."""
    table = results.replicas()
    if table is None:
        return [num_blocks(results, policy)]
    of_policy = table[table["policy"] == policy]
    blocks = {
        int(replica): int(count) for replica, count in zip(of_policy["replica"], of_policy["num_blocks"], strict=True)
    }
    return [blocks[replica] for replica in sorted(blocks)]


def check_number(path: Path, load: object, tested: Iterable[float]) -> None:
    """Raises ScenarioError unless `load` is a number, as the loads `tested` in the results at `path` are."""
    if not isinstance(load, Real) or isinstance(load, bool):
        known = ", ".join(f"{x:g}" for x in sorted(tested))
        raise ScenarioError(f"{path}: load {load!r} is no number. Tested are {known}; write one without its unit.")


def load_results(path: Path | str) -> Results:
    """The results in a run's folder `results/<scenario>/<hash>`; of the scenario's folder, the newest run.

    Warns in one line where another version of batchsim or of a package made them. ScenarioError if they lack what this
    version needs.
    """
    folder = Path(path)
    if not (folder / MANIFEST).exists():
        runs = sorted(folder.glob(f"*/{MANIFEST}"), key=lambda file: file.stat().st_mtime)
        if not runs:
            raise ScenarioError(f"{folder}: holds no results. Give the folder that `batchsim run` printed.")
        folder = runs[-1].parent
    folder = folder.resolve() if folder.is_symlink() else folder  # its points lie beside where it really is
    manifest = _manifest(folder)
    if other := other_version(manifest):
        warnings.warn(
            f"{folder}: made by another version ({other}): run the scenario again for results of this one.",
            stacklevel=2,
        )
    summary, points = (_read_csv(folder, name, manifest) for name in (SUMMARY, POINTS_TABLE))
    return Results(folder, summary, points, manifest, manifest["scenario"])


def _manifest(folder: Path) -> dict[str, Any]:
    """What manifest.json of a run holds, as it was written. ScenarioError for anything else."""
    path = folder / MANIFEST
    try:
        manifest = read_json(path)
        if not isinstance(manifest, dict):
            raise ValueError("it holds no keys")
        if missing := [
            name for name in _NEEDED if name not in manifest or (manifest[name] is None and name != "commit")
        ]:
            made = other_version(manifest)
            raise ScenarioError(
                f"{folder}: manifest.json has no {', '.join(missing)}: another version of batchsim wrote it"
                f"{f' ({made})' if made else ''}. Run the scenario again."
            )
        code, packages = manifest["code"], manifest["packages"]
        if not isinstance(packages, dict) or not all(isinstance(text, str) for text in (code, *packages.values())):
            raise ValueError("code or packages are not what a run writes")
        check_seal(manifest)
    except (OSError, ValueError) as error:
        raise ScenarioError(f"{path}: cannot be read: {reason_text(error)}. Run the scenario again.") from None
    return manifest


def _read_csv(folder: Path, name: str, manifest: dict[str, Any]) -> pd.DataFrame:
    """A table of a run. ScenarioError if it is not the one that the manifest lists, or cannot be read."""
    try:
        if name not in manifest["files"]:
            raise ValueError("the manifest lists no such table")
        frame = _frame(read_checked(folder / name, manifest["files"][name]))
        if missing := [column for column in _COLUMNS.get(name, _KEYS) if column not in frame]:
            raise ValueError(f"it has no column {', '.join(missing)}, so another version of batchsim wrote it")
        return frame
    except (OSError, ValueError) as error:
        raise ScenarioError(f"{folder / name}: cannot be read: {reason_text(error)}. Run the scenario again.") from None


def _totals(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """The counts of several points added up, those by reason too."""
    totals: dict[str, Any] = {}
    for entry in outcomes:
        for name, value in entry.items():
            if isinstance(value, dict):
                by_reason = totals.setdefault(name, {})
                for reason, count in value.items():
                    by_reason[reason] = by_reason.get(reason, 0) + count
            elif name not in ("load", "seed"):
                totals[name] = totals.get(name, 0) + value
    return totals


def _frame(data: bytes) -> pd.DataFrame:
    """The table in CSV `data`, of few rows and hundreds of columns, which pandas takes ten times as long to read."""
    header, *rows = csv.reader(io.StringIO(data.decode(), newline=""))
    if not rows:
        raise ValueError("it has no rows")
    return pd.DataFrame({name: _column(name, texts) for name, *texts in zip(header, *rows, strict=True)})


def _column(name: str, texts: list[str]) -> Any:
    """The values of a column: texts, booleans, or numbers with NaN where the file has nothing."""
    if name == "unstable" or (name not in _TEXT and {*texts} <= {"True", "False"}):
        return np.array([text == "True" for text in texts])
    if name == "vary":  # numbers if all are; the policies that the key is not of have none
        numbers = pd.Series(pd.to_numeric(pd.Series(texts).replace("", np.nan), errors="coerce"))
        return numbers if [text == "" for text in texts] == numbers.isna().tolist() else pd.array(texts, dtype="str")
    if name in _TEXT:
        return pd.array(texts, dtype="str")
    return np.array([*map(int, texts)] if all(map(str.isdecimal, texts)) else [float(text or "nan") for text in texts])
