"""Keeps what a capacity search found, beside the runs of its scenario: `results/<scenario>/capacity/<hash>`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from batchsim.base.files import write_text
from batchsim.results.provenance import as_json, identity, provenance, short_hash, write_csv
from batchsim.study.capacity.find import CapacityStudy, found_points
from batchsim.study.sweep.points import Sweep, keeping

FOLDER = "capacity"


def keep_capacity(study: CapacityStudy, sweep: Sweep, text: str, plain: dict[str, Any]) -> Path:
    """Writes capacity.csv (a row a policy), probes.csv (a row a probe, with its points), capacity.json and
    capacity.txt; returns their folder. ScenarioError where it cannot be written."""
    points = found_points(study)
    name = short_hash([identity(study.setup), [row["points"] for row in points], plain["changes"]])
    folder = sweep.home / FOLDER / name
    with keeping(sweep.home):
        folder.mkdir(parents=True, exist_ok=True)
        flat = [
            {key: value for key, value in row.items() if not isinstance(value, list | dict)}
            for row in plain["capacities"]
        ]
        write_csv(folder / "capacity.csv", flat)
        write_csv(folder / "probes.csv", points)
        write_text(folder / "capacity.json", as_json(plain | {"made": provenance()}, indent=1))
        write_text(folder / "capacity.txt", text + "\n")
        write_text(folder / "scenario.yaml", study.scenario.text)
    return folder
