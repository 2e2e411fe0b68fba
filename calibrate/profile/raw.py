"""The measurements of a calibration so far, and their file, which lies beside the profile until all is done."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from batchsim.base.errors import CalibrationError
from batchsim.base.files import read_json, reason_text, write_text
from batchsim.base.plain import from_plain
from batchsim.calibrate.profile.bench import MeasuredStep
from batchsim.calibrate.profile.engine_runs import EngineSteps
from batchsim.calibrate.profile.point_plan import StepShape
from batchsim.cost.profile import SwapCost

_FORMAT = "batchsim-calibration-partial 3"


@dataclass
class Raw:
    """Measurements of one device, model and set of options; `key` identifies these."""

    key: dict[str, Any]
    num_blocks: int | None = None  # measured; None if memory was not measured
    memory: str = ""  # in words, the sum that num_blocks comes from
    samples: dict[StepShape, MeasuredStep] = field(default_factory=dict)
    runs: list[EngineSteps] = field(default_factory=list)
    swap: SwapCost | None = None
    energy: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    telemetry: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0  # spent in all calls
    sentinel: dict[str, Any] | None = None
    """The sentinel of the first call: its step, usual ns and mean ns."""

    def save(self, path: Path) -> None:
        """Writes the measurements to `path`, whole or not at all."""
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
        """The measurements in the file at `path`, none if there is no file.

        CalibrationError if it cannot be read, or is of another machine, model or set of options than `key`.
        """
        advice = f"Delete {path} to start anew, or write to another file."
        try:
            value = read_json(path)
        except FileNotFoundError:
            return cls(key)
        except (OSError, ValueError) as error:
            raise CalibrationError(f"{path}: cannot be read: {reason_text(error)}. {advice}") from None
        try:
            if value["format"] != _FORMAT:
                raise ValueError
            check_key(value["key"], key, str(path), advice)
            return cls._of(key, value)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            raise CalibrationError(f"{path}: is no calibration that was cut short. {advice}") from None

    @classmethod
    def _of(cls, key: dict[str, Any], value: dict[str, Any]) -> Raw:
        """The measurements in a file's JSON value; raises any of the errors that wrong types and missing keys make."""
        samples = [MeasuredStep.from_row(row) for row in value["samples"]]
        sentinel = value["sentinel"]
        if sentinel is not None and not (
            StepShape.from_row(sentinel["step"]).decode and sentinel["ns"] > 0 and sentinel.get("mean_ns", 1) > 0
        ):
            raise ValueError
        return cls(
            key=key,
            num_blocks=None if value["num_blocks"] is None else int(value["num_blocks"]),
            memory=str(value["memory"]),
            samples={sample.point: sample for sample in samples},
            runs=[EngineSteps.from_row(row) for row in value["runs"]],
            swap=None if value["swap"] is None else from_plain(SwapCost, value["swap"], "swap"),
            energy=None if value["energy"] is None else dict(value["energy"]),
            notes=[str(note) for note in value["notes"]],
            telemetry=[dict(row) for row in value["telemetry"]],
            seconds=float(value["seconds"]),
            sentinel=sentinel,
        )


def check_key(former: dict[str, Any], asked: dict[str, Any], where: str, advice: str) -> None:
    """CalibrationError, naming the first difference, unless the keys `former` and `asked` are equal."""
    for part in asked:
        there, here = former.get(part, {}), asked[part]
        for name in {**there, **here}:
            if there.get(name) != here.get(name):
                raise CalibrationError(
                    f"{where}: was begun with {part} {name} {there.get(name)}, now it is {here.get(name)}. {advice}"
                )
