"""What a calibration has measured so far, and its file: beside the profile until everything is there."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from calibrate.engine_runs import EngineSteps
from calibrate.measure import Sample
from calibrate.plan import Point
from sim.cost.profile import SwapCost
from sim.errors import CalibrationError

_FORMAT = "batchsim-calibration-partial 1"


@dataclass
class Raw:
    """Measurements of one device, model and set of options, which `key` holds."""

    key: dict[str, Any]
    num_blocks: int | None = None  # measured; None where the device's memory was not
    memory: str = ""  # the sum that num_blocks comes from
    samples: dict[Point, Sample] = field(default_factory=dict)
    runs: list[EngineSteps] = field(default_factory=list)
    swap: SwapCost | None = None
    energy: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    telemetry: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0  # spent in all
    sentinel: dict[str, Any] | None = None  # the step that shows drift, and its usual ns

    def save(self, path: Path) -> None:
        """Writes the file, whole or not at all."""
        value = {
            "format": _FORMAT,
            "key": self.key,
            "num_blocks": self.num_blocks,
            "memory": self.memory,
            "samples": [sample.to_row() for sample in self.samples.values() if sample.rounds],
            "runs": [run.to_row() for run in self.runs],
            "swap": None if self.swap is None else asdict(self.swap),
            "energy": self.energy,
            "notes": self.notes,
            "telemetry": self.telemetry,
            "seconds": self.seconds,
            "sentinel": self.sentinel,
        }
        write_text(path, json.dumps(value))

    @classmethod
    def load(cls, path: Path, key: dict[str, Any]) -> Raw:
        """What the file at `path` holds, or nothing if there is none.

        CalibrationError if it cannot be read, or is of another machine, model or set of options than `key`.
        """
        advice = f"Delete {path} to start anew, or write to another file."
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls(key)
        except (OSError, ValueError) as error:
            raise CalibrationError(f"{path}: cannot be read: {error}. {advice}") from None
        if not isinstance(value, dict) or value.get("format") != _FORMAT:
            raise CalibrationError(f"{path}: is no calibration that was cut short. {advice}")
        check_key(value["key"], key, str(path), advice)
        samples = [Sample.from_row(row) for row in value["samples"]]
        return cls(
            key=key,
            num_blocks=value["num_blocks"],
            memory=value["memory"],
            samples={sample.point: sample for sample in samples},
            runs=[EngineSteps.from_row(row) for row in value["runs"]],
            swap=None if value["swap"] is None else SwapCost(**value["swap"]),
            energy=value["energy"],
            notes=value["notes"],
            telemetry=value["telemetry"],
            seconds=value["seconds"],
            sentinel=value["sentinel"],
        )


def check_key(found: dict[str, Any], asked: dict[str, Any], where: str, advice: str) -> None:
    """CalibrationError, naming the first difference, unless `found` and `asked` are equal."""
    for part in asked:
        there, here = found.get(part, {}), asked[part]
        for name in {**there, **here}:
            if there.get(name) != here.get(name):
                raise CalibrationError(
                    f"{where}: was begun with {part} {name} {there.get(name)}, now it is {here.get(name)}. {advice}"
                )


def write_text(path: Path, text: str) -> None:
    """Writes the file, whole or not at all."""
    unfinished = path.with_name(f".{path.name}-{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
