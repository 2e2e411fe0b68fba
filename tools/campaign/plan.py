"""The plan of a campaign, read from its file, and the stages that follow from it, the most valuable first."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from batchsim.base.errors import CalibrationError, ScenarioError
from batchsim.base.files import TABLE_BYTES, parse_json, read_text, reason_text
from batchsim.calibrate.options import LEAST_MINUTES, Options
from batchsim.deployment.catalog import load_model
from batchsim.drive.resolved import Resolved
from batchsim.drive.resolved_policy import ResolvedPolicy

SHIPPED = Path(__file__).parent

_PROBE_S, _SELFCHECK_S, _PROFILE_S = 20.0, 60.0, 60.0  # a stage is begun only with this much time left
_CHECKS_MOST_S = 240.0  # kernels are compiled at their first use
_LIVE_S = 15.0  # seconds that a live run takes beyond its arrivals: warming up, draining, predicting
_OVERRUN = 2.0  # a live run is stopped at this many times what was expected of it


@dataclass(frozen=True)
class LivePoint:
    """One live run: a scenario of the plan, a policy's name, the share of that policy's saturation, the repetition."""

    scenario: str
    policy: str
    share: float
    repeat: int

    @property
    def name(self) -> str:
        policy = re.sub(r"[^\w.]+", "-", self.policy).strip("-")
        return f"live-{self.scenario}-{policy}-{round(100 * self.share)}-{self.repeat}"


@dataclass(frozen=True)
class Stage:
    """One piece of a campaign's work. It begins only if `needs_s` seconds are left, and is stopped after `most_s`.

    Stages of one `group` run in one process, so that live runs share a model and a profile finds an empty device.
    """

    name: str
    group: str
    needs_s: float
    most_s: float
    model: str = ""
    point: LivePoint | None = None


@dataclass(frozen=True)
class Known:
    """Values that earlier live runs have settled, so that repetitions are of the same point; None where none has."""

    saturation_rps: float | None
    num_blocks: int | None


@dataclass(frozen=True)
class Plan:
    """A campaign's plan. `options` are a calibration's, without device, output and time; `digest` is of all of it."""

    model: str
    second_model: str | None
    profile_minutes: float
    options: dict[str, Any]
    scenarios: dict[str, Resolved]
    points: tuple[LivePoint, ...]
    digest: str

    @classmethod
    def read(cls, path: Path, *, allow_code: bool = False) -> Plan:
        """The plan in a JSON file; its scenarios are files beside it. CalibrationError if it cannot be read.

        Users' own policies, `module:Class`, are imported with `allow_code` alone.
        """
        try:
            text = read_text(path)
            plain = parse_json(text)
            files = {name: _text(path, name, path.parent / file) for name, file in plain["scenarios"].items()}
            plan = cls(
                model=plain["model"],
                second_model=plain["second_model"],
                profile_minutes=float(plain["profile_minutes"]),
                options=dict(plain["options"]),
                scenarios={
                    name: Resolved.from_json(
                        file,
                        f"{path}: scenario {name}, {path.parent / plain['scenarios'][name]}",
                        allow_code=allow_code,
                    )
                    for name, file in files.items()
                },
                points=tuple(LivePoint(*point) for point in plain["points"]),
                digest=hashlib.sha256("\0".join([text, *files.values()]).encode()).hexdigest()[:12],
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            example = SHIPPED / "gpu.json"
            raise CalibrationError(f"{path}: cannot be read as a plan: {reason_text(error)}. Copy {example}.") from None
        plan._check(path)
        return plan

    def _check(self, path: Path) -> None:
        for model in filter(None, (self.model, self.second_model)):
            try:
                load_model(model)
            except ScenarioError as error:
                raise CalibrationError(f"{path}: {error}") from None
        known = [field.name for field in fields(Options) if field.name not in ("model", "device", "minutes")]
        for name in self.options:
            if name not in known:
                raise CalibrationError(f"{path}: options: {name} is not known. Known are {', '.join(known)}.")
        if not LEAST_MINUTES <= self.profile_minutes < math.inf:
            raise CalibrationError(
                f"{path}: profile_minutes is {self.profile_minutes:g}. Write at least {LEAST_MINUTES:g}."
            )
        for point in self.points:
            share = point.share
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < math.inf:
                raise CalibrationError(
                    f"{path}: a point of {point.scenario} under {point.policy} has the share {json.dumps(share)}. Write"
                    " a number above 0."
                )
            if point.scenario not in self.scenarios:
                raise CalibrationError(f"{path}: {point.name} names no scenario of the plan. Add it to scenarios.")
            self.policy(point)
            axis = self.scenarios[point.scenario].load_name
            if axis != "mean_rate":
                raise CalibrationError(
                    f"{path}: {point.scenario} has the load axis {axis or 'none'}, and shares of saturation are of"
                    " mean_rate. Take another scenario."
                )
        names = [stage.name for stage in self.stages()]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise CalibrationError(f"{path}: {', '.join(twice)} is there twice. Give points other repetitions.")

    def policy(self, point: LivePoint) -> ResolvedPolicy:
        """The policy of `point`. ScenarioError if its scenario does not have it."""
        return self.scenarios[point.scenario].find(point.policy)

    def stages(self) -> list[Stage]:
        """All stages in order of value: a profile that is wrong spoils all, a second one only adds."""
        found = [
            Stage("probe", "checks", _PROBE_S, _CHECKS_MOST_S),
            Stage("selfcheck", "checks", _SELFCHECK_S, _CHECKS_MOST_S),
            self._profile(self.model),
        ]
        for point in self.points:
            resolved = self.scenarios[point.scenario]
            seconds = resolved.built_workload(resolved.loads[0], 0).window_ns[1] / 1e9 + _LIVE_S
            found.append(Stage(point.name, "live", seconds, _OVERRUN * seconds, point=point))
        return found + ([] if self.second_model is None else [self._profile(self.second_model)])

    def _profile(self, model: str) -> Stage:
        name = profile_name(model)
        return Stage(name, name, _PROFILE_S, 60 * self.profile_minutes + 60, model)


def _text(plan: Path, name: str, file: Path) -> str:
    """The text of a plan's scenario file. CalibrationError if it cannot be read."""
    try:
        return read_text(file, TABLE_BYTES)
    except (OSError, ValueError) as error:
        raise CalibrationError(
            f"{plan}: scenario {name}: {file} cannot be read: {reason_text(error)}. Write it with batchsim resolve."
        ) from None


def profile_name(model: str) -> str:
    """The name of a model's profile in the campaign's folder: `profile-` and the last part of its path."""
    path = Path(model)
    return f"profile-{path.stem if model.endswith('.json') else path.name}"
