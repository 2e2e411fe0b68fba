"""What a GPU machine should do in one visit, unattended, the most valuable first.

    python -m tools.campaign --out DIR --minutes 9

Stages, each a command of its own: the executor's tests on the device; the profile of the scenario's model; live runs
beside their simulation, one stage for each share of saturation; what the profile still lacks; all live runs judged
together. Each leaves what it printed in DIR/STAGE.log, and DIR/campaign.json says what was run, how long it took and
how it ended. A stage whose result is there is not run again, so that the same command goes on where it stopped: where
the time was up, and where a stage failed, which ends the call.

Needs batchsim with its dependencies, pytest and torch. The exit code is 0 when all is done, 1 when something is left,
2 when it cannot run here, 130 after Ctrl-C. The last stage needs no GPU: `batchsim validate SCENARIO --from DIR/runs
--set cost=DIR/profile.json` does the same on any machine.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from batchsim.base.errors import CalibrationError
from batchsim.base.files import check_folder, read_json, reason_text, write_text
from batchsim.cli.common import one_line_errors

_FORMAT = "batchsim-campaign 2"
_MARGIN_S = 10.0  # of a calibration's time, in which its process starts and ends
_LEAST_S = 60.0  # a stage that is no live run begins only with this much time left
_BATCHSIM = (sys.executable, "-m", "batchsim")
_TESTS = (sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-q", "-k", "not calibration")


@dataclass(frozen=True)
class Visit:
    """What a campaign is asked for. `at` are shares of saturation, in the order of their stages; `policies` empty are
    all of the scenario."""

    out: Path
    device: str
    scenario: str
    model: str
    policies: tuple[str, ...]
    at: tuple[str, ...]
    changes: tuple[str, ...]

    @property
    def profile(self) -> Path:
        return self.out / "profile.json"

    def validate(self, name: str, *words: str) -> tuple[str, ...]:
        """The command that compares live runs with their simulation, and writes DIR/validation-NAME.json last."""
        given = [word for change in (f"cost={self.profile}", *self.changes) for word in ("--set", change)]
        given += [word for policy in self.policies for word in ("--policy", policy)]
        return (*_BATCHSIM, "validate", self.scenario, *words, *given, "--name", name, "--out", str(self.out))


@dataclass(frozen=True)
class Stage:
    """A command of a campaign. It is done once `result` is there, and `lacking` is not, and begins only if `needs_s`
    seconds are left; a calibration is told its `minutes`, what is left at most."""

    name: str
    command: tuple[str, ...]
    result: Path
    needs_s: float = _LEAST_S
    lacking: Path | None = None
    minutes: float | None = None

    @property
    def is_done(self) -> bool:
        return self.result.is_file() and not (self.lacking and self.lacking.exists())


def stages(visit: Visit, profile_minutes: float, live_minutes: float) -> list[Stage]:
    """All stages in order of value: a profile that is wrong spoils all that follows."""
    profile, partial = visit.profile, visit.out / "profile.partial.json"
    calibrate = (*_BATCHSIM, "calibrate", "--model", visit.model, "--device", visit.device, "-o", str(profile))
    found = [Stage("tests", _TESTS, visit.out / "tests.log")] if visit.device == "cuda" else []
    lacking = None if _serves(profile) else partial
    found.append(Stage("profile", calibrate, profile, lacking=lacking, minutes=profile_minutes))
    for number, share in enumerate(visit.at):
        name = f"live-{number + 1}-{share.removesuffix('%')}"
        command = visit.validate(name, "--device", visit.device, "--at", share, "--repeats", "1")
        found.append(Stage(name, command, visit.out / f"validation-{name}.json", 60 * live_minutes))
    found.append(Stage("rest-of-profile", calibrate, profile, lacking=partial, minutes=math.inf))
    judged = visit.validate("all", "--from", str(visit.out / "runs"))
    return [*found, Stage("judged", judged, visit.out / "validation-all.json")]


def _serves(profile: Path) -> bool:
    """Whether a profile lacks nothing but rounds, so that live runs come before what it lacks."""
    if not profile.is_file():
        return False
    try:
        return not any(lack.startswith("block") for lack in read_json(profile)["missing"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CalibrationError(f"{profile}: cannot be read: {reason_text(error)}. Delete it.") from None


class Campaign:
    """One call of a campaign: runs what is left of its stages until one fails or the time is up."""

    def __init__(self, visit: Visit, minutes: float) -> None:
        """CalibrationError if files cannot be written in its folder, or the folder is of another campaign."""
        self._end_s, self._out = time.monotonic() + 60 * minutes, visit.out
        self._file = visit.out / "campaign.json"
        words = {name: value for name, value in vars(visit).items() if name != "out"}
        asked = {name: list(value) if isinstance(value, tuple) else value for name, value in words.items()}
        try:
            visit.out.mkdir(parents=True, exist_ok=True)
            check_folder(visit.out)
        except OSError as error:
            raise CalibrationError(f"--out {visit.out}: cannot be written: {reason_text(error)}.") from None
        self._state: dict[str, Any] = {"format": _FORMAT, "asked": asked, "runs": []}
        if self._file.exists():
            self._state = _earlier(self._file, asked)

    def run(self, planned: Sequence[Stage]) -> str:
        """Runs the stages that are not done, in order; why it ended before the last one, "" if it did not."""
        for stage in planned:
            if stage.is_done:
                continue
            left_s = self._end_s - time.monotonic()
            if left_s < stage.needs_s:
                return f"{stage.name} needs {stage.needs_s:.0f} s, {max(0.0, left_s):.0f} s are left."
            if why := self._run(stage, left_s):
                return why
        return ""

    def _run(self, stage: Stage, left_s: float) -> str:
        """Runs one stage and notes how it ended; "" if it went well, else why it did not."""
        command = list(stage.command)
        if stage.minutes is not None:
            command += ["--minutes", f"{min(stage.minutes, (left_s - _MARGIN_S) / 60):.3g}"]
        typer.echo(f"{stage.name} ... ({left_s:.0f} s left)", err=True)
        began, began_s = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
        code = None
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=left_s
            )
            code, printed = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired as late:
            printed = b"".join(filter(None, (late.stdout, late.stderr))).decode(errors="replace")
        finally:
            seconds = round(time.monotonic() - began_s, 1)
            self._state["runs"].append({"stage": stage.name, "command": command, "began": began, "seconds": seconds})
            self._state["runs"][-1]["exit_code"] = code
            write_text(self._file, json.dumps(self._state, indent=1))
        log = self._out / f"{stage.name}{'' if code == 0 else '.failed'}.log"
        write_text(log, printed)
        if code is None:
            return f"{stage.name} was stopped after {seconds:.0f} s: the time was up."
        if code or not stage.result.is_file():
            last = printed.strip().rpartition("\n")[2] or "it printed nothing"
            return f"{stage.name} failed with exit code {code}: {last} (all of it in {log})"
        for run in sorted((self._out / f"validation-{stage.name}-runs").glob("*.npz")):
            (self._out / "runs").mkdir(exist_ok=True)
            shutil.copyfile(run, self._out / "runs" / f"{stage.name}-{run.name}")
        return ""


def _earlier(file: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """What earlier calls wrote. CalibrationError if it cannot be read, or something else was asked for."""
    advice = "Delete it, or give another --out."
    try:
        state = read_json(file)
        if state["format"] != _FORMAT or not isinstance(state["runs"], list):
            raise ValueError("not a campaign's state")
        before = dict(state["asked"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CalibrationError(f"{file}: cannot be read: {reason_text(error)}. {advice}") from None
    for name in (name for name, value in asked.items() if before.get(name) != value):
        raise CalibrationError(f"{file}: was begun with {name} {before.get(name)}, now it is {asked[name]}. {advice}")
    return state


@one_line_errors
def main(
    out: Annotated[Path, typer.Option(help="Folder for all that is found; the same again goes on there.")],
    minutes: Annotated[float, typer.Option(min=0.5, max=10_000, help="Time for this call.")] = 9.0,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try it out.")] = "cuda",
    scenario: Annotated[str, typer.Option(help="What runs live.")] = "live-gpu",
    model: Annotated[str, typer.Option(help="The scenario's model, to be measured.")] = "llama-3.1-8b",
    policy: Annotated[list[str] | None, typer.Option(help="Of the scenario; all by default. Repeatable.")] = None,
    at: Annotated[str, typer.Option(help="Shares of saturation, the most valuable first.")] = "80%,50%,80%,110%",
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Of the scenario.")] = None,
    profile_minutes: Annotated[float, typer.Option(min=0.25, help="For the profile before live runs.")] = 5.5,
    live_minutes: Annotated[float, typer.Option(min=0.1, help="Without so much time no live runs begin.")] = 3.0,
) -> None:
    """Calibrate, run live and validate within the minutes given; called again, go on."""
    shares = tuple(share.strip() for share in at.split(","))
    visit = Visit(out, device, scenario, model, tuple(policy or ()), shares, tuple(set_ or ()))
    planned = stages(visit, profile_minutes, live_minutes)
    why = Campaign(visit, minutes).run(planned)
    done = sum(stage.is_done for stage in planned)
    typer.echo(f"{done} of {len(planned)} stages done. {f'{why} The same command goes on.' if why else ''}".rstrip())
    if why:
        raise typer.Exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    typer.run(main)
