"""Reads what `run_scenario` left: a run's tables as DataFrames.

results/<scenario>/points/<hash>/   requests, steps and states as Parquet; point.json: what it was and its metrics
results/<scenario>/<hash>/          summary.csv, points.csv, scenario.yaml, manifest.json, pictures
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sim.errors import ScenarioError
from sim.frames import read_table, to_records
from sim.record import Records

POINTS = "points"
_HEAD = ("scenario_name", "heading", "kv", "workload", "slo", "objective", "measured_at")
_HEAD += ("machine", "packages", "commit", "code")
_TEXT = {"policy", "kind", "label", "variant", "few", "load_name", "point", "bound_by"}


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

    def requests(self, policy: str, load: float, seed: int) -> pd.DataFrame:
        """A row a request; see `sim.frames.COLUMN_DOCS` for columns and units."""
        return self._table("requests", policy, load, seed)

    def steps(self, policy: str, load: float, seed: int) -> pd.DataFrame:
        """A row an engine step."""
        return self._table("steps", policy, load, seed)

    def states(self, policy: str, load: float, seed: int) -> pd.DataFrame:
        """A row a change of a request's state, or of what blocks the head of the queue."""
        return self._table("states", policy, load, seed)

    def records(self, policy: str, load: float, seed: int) -> Records:
        """All three tables as the arrays that `sim.attribution` reads. ScenarioError if one lacks a column."""
        tables = [self._table(name, policy, load, seed) for name in ("requests", "steps", "states")]
        try:
            return to_records(*tables)
        except KeyError as error:
            raise ScenarioError(
                f"{self.path}: the tables of {policy} at load {load:g}, seed {seed} have no column {error.args[0]}:"
                " another version of batchsim wrote them. Run the scenario again."
            ) from None

    def as_json(self) -> dict[str, Any]:
        """By policy: how its requests ended, summed over loads and seeds and at each; and its metrics at every load."""
        policies: dict[str, Any] = {}
        for row in self.points.to_dict("records"):
            counted = self.manifest["outcomes"][str(row["label"])]
            entry = next(e for e in counted if e["load"] == row["load"] and e["seed"] == row["seed"])
            policy = policies.setdefault(str(row["policy"]), {"outcomes": [], "loads": []})
            policy["outcomes"].append(entry)
        for policy in policies.values():
            policy |= _totals(policy["outcomes"])
        for row in self.summary.to_dict("records"):
            metrics = {name: None if isinstance(x, float) and np.isnan(x) else x for name, x in row.items()}
            policies[str(row["policy"])]["loads"].append(metrics)
        return {key: self.manifest[key] for key in _HEAD} | {"path": str(self.path), "policies": policies}

    def _table(self, table: str, policy: str, load: float, seed: int) -> pd.DataFrame:
        points = self.points
        found = points[(points["policy"] == policy) & (points["load"] == load) & (points["seed"] == seed)]
        if found.empty:
            listed = {
                name: ", ".join(f"{x:g}" if name == "load" else str(x) for x in points[name].unique())
                for name in ("policy", "load", "seed")
            }
            known = f"policies {listed['policy']}; loads {listed['load']}; seeds {listed['seed']}"
            raise ScenarioError(f"{self.path}: no point {policy} at load {load:g} with seed {seed}. There are {known}.")
        folder = self.path.parent / POINTS / str(next(iter(found["point"])))
        try:
            return read_table(folder, table)
        except (OSError, ValueError) as error:  # Arrow's errors are either
            raise ScenarioError(f"{folder}: {table} cannot be read: {error}. Run the scenario again.") from None


def load_results(path: Path | str) -> Results:
    """The results in a run's folder `results/<scenario>/<hash>`; of the scenario's folder, the newest run."""
    folder = Path(path)
    if not (folder / "manifest.json").is_file():
        runs = sorted(folder.glob("*/manifest.json"), key=lambda file: file.stat().st_mtime)
        if not runs:
            raise ScenarioError(f"{folder}: holds no results. Give the folder that `batchsim run` printed.")
        folder = runs[-1].parent
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        dtypes: Any = dict.fromkeys(_TEXT, "str")
        frames = [
            _numbers(pd.read_csv(folder / f"{name}.csv", dtype=dtypes, keep_default_na=False))
            for name in ("summary", "points")
        ]
        if not all({"policy", "load"} <= set(frame) for frame in frames):
            raise ValueError("summary.csv or points.csv is another table")
        return Results(folder, frames[0], frames[1], manifest, manifest["scenario"])
    except OSError as error:
        file = error.filename or folder
        raise ScenarioError(f"{file}: cannot be read: {error.strerror}. Run the scenario again.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ScenarioError(f"{folder}: cannot be read: {error!r}. Run the scenario again.") from None


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


def _numbers(frame: pd.DataFrame) -> pd.DataFrame:
    """Metric columns as float with NaN where the file has nothing."""
    for column in frame.columns:
        if column == "unstable":
            frame[column] = frame[column].astype(str) == "True"
        elif column not in _TEXT:
            frame[column] = pd.to_numeric(frame[column].replace("", np.nan))
    return frame
