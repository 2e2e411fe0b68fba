"""Everything a GPU machine should do in one visit, unattended, the most valuable first.

    python -m tools.campaign --out DIR --minutes 9

Needs torch, numpy, pyyaml, typer and rich, nothing else. Stages: ceilings of the device; correctness of the executor;
the profile of the plan's model; live runs at shares of saturation; the profile of a second model. What a stage found
is in DIR as soon as it ends, and DIR/campaign.json says how each ended. Called again with the same DIR it goes on where
it stopped: what is done is kept; what failed, was cut or is void is tried again. The exit code is 0 when all is done,
1 when something is left, 2 when it cannot run here, 130 after Ctrl-C. A profile that lacks nothing but rounds serves
as it is: later calls complete it after their live runs. On CUDA the report says which speeds are as they should be.

On any machine `batchsim validate SCENARIO --set cost=DIR/profile-MODEL.json --from DIR/SCENARIO` judges the live runs.
"""

from __future__ import annotations

import json
import math
import re
import signal
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from batchsim.base.errors import BatchsimError, CalibrationError
from batchsim.base.files import check_folder, read_json, reason_text, write_text
from batchsim.cost.profile import load_profile
from tools.campaign.plan import SHIPPED, Known, Plan, Stage, profile_name
from tools.campaign.targets import line, targets
from tools.campaign.worker import CUT, DONE, FAILED, Reply, Worker

_FORMAT = "batchsim-campaign 1"
_MARGIN_S = 20.0  # kept free at the end of the time given, so that what runs then can be stopped
_LEAST_MINUTES = 0.5
_LAST_S = 8.0  # seconds kept for a profile's last fit
_BEGIN_S = 20.0  # what a new process is expected to take until its model stands
_START_S = 120.0  # in which it has to say that it is there
_GIVE_UP = 2  # stages in a row that did not end well, after which the rest of their group is left for another call
_FEWEST_ROUNDS = 2  # of a profile that live runs can do with
_PARTIAL, _VOID, _NOT_RUN = "partial", "void", "not run"


class Campaign:
    """One call of a campaign: runs stages until all are done or the time is up."""

    def __init__(self, plan: Path, out: Path, device: str, minutes: float, *, allow_code: bool = False) -> None:
        self._end_s = time.monotonic() + 60 * minutes - _MARGIN_S
        self.plan = Plan.read(plan, allow_code=allow_code)
        self._allow_code = allow_code
        self.out = out
        self.device = device
        self._plan_file = plan
        self._state_file = out / "campaign.json"
        self.state = self._read()
        self._checked = False  # that this is the machine of earlier calls
        self._worker: Worker | None = None
        self._group = ""
        self._failures = 0  # in a row, in this group

    def _read(self) -> dict[str, Any]:
        """The state that earlier calls left, or a fresh one. CalibrationError if it is of another plan or device."""
        advice = "Delete it, or give another --out."
        _check_writable(self.out)
        new = {"format": _FORMAT, "plan": self.plan.digest, "device": self.device}
        try:
            found = read_json(self._state_file)
            if found["format"] != _FORMAT or not all({"state", "seconds"} <= set(s) for s in found["stages"].values()):
                raise ValueError("not a campaign's state")
        except FileNotFoundError:
            new |= {"model": self.plan.model, "calls": 0, "stages": {}, "saturation_rps": {}, "num_blocks": None}
            return new
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CalibrationError(f"{self._state_file}: cannot be read: {reason_text(error)}. {advice}") from None
        for what, ours in (("device", self.device), ("model", self.plan.model), ("plan", self.plan.digest)):
            if found[what] != ours:
                raise CalibrationError(
                    f"{self._state_file}: was begun with {what} {found[what]}, now it is {ours}. {advice}"
                )
        return found

    def run(self) -> None:
        """Runs all stages in order; after one that fails comes the next. CalibrationError on another machine."""
        try:
            for stage in self.stages():
                if self._record(stage).get("state") == DONE:
                    continue
                if stage.group != self._group:
                    self._leave()
                    self._group, self._failures = stage.group, 0
                why_not = self._why_not(stage)
                if not why_not:
                    self._do(stage)
                elif "call" not in self._record(stage):  # else it says how an earlier call fared
                    self.state["stages"][stage.name] = {"state": _NOT_RUN, "seconds": 0.0, "reason": why_not}
                    self._save()
        finally:
            self._leave()

    def stages(self) -> list[Stage]:
        """The plan's stages in this call's order: a profile that is good enough is completed after the live runs."""
        stages = self.plan.stages()
        late = [s for s in stages if s.model == self.plan.model and _good_enough(self._record(s))]
        second = [s for s in stages if s.model not in ("", self.plan.model)]
        return [s for s in stages if s not in late + second] + late + second

    def report(self) -> str:
        """A line for each stage: how it ended, in which call, how long it took, its result; then the targets."""
        lines = []
        for stage in self.plan.stages():
            record = self._record(stage) or {"state": _NOT_RUN, "seconds": 0.0}
            found = record.get("reason") or _short(record.get("result", {}))
            call = f"call {record['call']}" if "call" in record else ""
            lines.append(
                f"{stage.name:<32} {record['state']:<8} {call:<7} {record['seconds']:>6.1f} s  {found}".rstrip()
            )
        lines += [line(row) for row in self.state.get("targets", ())]
        stages = self.plan.stages()
        done = sum(self._record(stage).get("state") == DONE for stage in stages)
        last = "" if self.is_done else " The same command goes on."
        return "\n".join([*lines, f"{done} of {len(stages)} stages done.{last}"])

    @property
    def is_done(self) -> bool:
        """Whether nothing is left for another call."""
        return all(self._record(stage).get("state") == DONE for stage in self.plan.stages())

    # ---- one stage

    def _record(self, stage: Stage) -> dict[str, Any]:
        return self.state["stages"].get(stage.name, {})

    def _left_s(self) -> float:
        return self._end_s - time.monotonic()

    def _why_not(self, stage: Stage) -> str:
        """Why the stage cannot begin now; "" if it can."""
        if self._failures >= _GIVE_UP:
            return f"the {_GIVE_UP} before it failed or were cut"
        if stage.point is not None and not (self.out / f"{profile_name(self.plan.model)}.json").is_file():
            return "there is no profile yet"
        needs_s = stage.needs_s + (_BEGIN_S if self._worker is None else 0.0)
        left_s = max(0.0, self._left_s())
        return f"needs {needs_s:.0f} s, {left_s:.0f} s were left" if left_s < needs_s else ""

    def _do(self, stage: Stage) -> None:
        """Runs one stage; from its beginning until its end is known the state says that it was cut."""
        again = "call" in self._record(stage)
        started_s = time.monotonic()
        reply = Reply(CUT, {}, "killed", lost=True)
        try:
            worker = self._ready_worker()
            self._note(stage, reply, started_s)
            typer.echo(f"{stage.name} ... ({self._left_s():.0f} s left)", err=True)
            minutes = self._minutes(again) if stage.model else 0.0
            reply = worker.run(stage, minutes, self._known(stage), min(stage.most_s, max(1.0, self._left_s())))
        except KeyboardInterrupt:
            if self._worker is not None:
                reply = self._worker.stop("interrupted")
                self._worker = None
                self._note(stage, reply, started_s)
            raise
        except _NoWorkerError as error:
            reply = Reply(FAILED, {}, str(error), lost=True)
        self._note(stage, reply, started_s)
        if reply.lost:
            self._leave()
        self._failures = 0 if reply.state == DONE else self._failures + 1

    def _ready_worker(self) -> Worker:
        """The process for this group of stages. CalibrationError if it cannot start, or is of another machine."""
        if self._worker is None:
            most_s = min(_START_S, max(1.0, self._left_s()))
            self._worker = Worker(self._plan_file, self.out, self.device, most_s, allow_code=self._allow_code)
            ready = self._worker.ready
            if ready.state != DONE:
                self._leave()
                raise _NoWorkerError(ready.reason) if self._checked else CalibrationError(ready.reason)
            if not self._checked:
                self._check_machine(ready.result)
        return self._worker

    def _check_machine(self, identity: dict[str, Any]) -> None:
        """Notes the machine, and counts the call. CalibrationError if earlier calls ran on another device or torch."""
        before = self.state.setdefault("identity", identity)
        for part, what in (("hardware", "gpu" if self.device == "cuda" else "cpu"), ("software", "torch")):
            if before[part].get(what) != identity[part].get(what):
                raise CalibrationError(
                    f"{self._state_file}: was begun with {what} {before[part].get(what)}, this is"
                    f" {identity[part].get(what)}. Give another --out."
                )
        self._checked = True
        self.state["calls"] += 1

    def _minutes(self, again: bool) -> float:
        """Minutes for a profile at most; `again`, to complete that of an earlier call, half of the time left."""
        left_s = (self._left_s() - _LAST_S) * (0.5 if again else 1.0)
        return min(self.plan.profile_minutes, left_s / 60)

    def _known(self, stage: Stage) -> Known:
        if stage.point is None:
            return Known(None, None)
        return Known(self.state["saturation_rps"].get(_served(stage)), self.state["num_blocks"])

    def _note(self, stage: Stage, reply: Reply, started_s: float) -> None:
        """Records how a stage ended, and what later stages should know of it."""
        state, found = reply.state, reply.result
        if any(what.startswith(("block", "rounds")) for what in found.get("missing", ())):
            state = _PARTIAL
        elif found.get("void"):
            state = _VOID
        record = {"state": state, "call": self.state["calls"], "seconds": round(time.monotonic() - started_s, 1)}
        record |= {"reason": reply.reason} if reply.reason else {"result": found}
        self.state["stages"][stage.name] = record
        if found and stage.point is not None:
            self.state["saturation_rps"][_served(stage)] = found["saturation_rps"]
            if self.plan.scenarios[stage.point.scenario].num_blocks is None:
                self.state["num_blocks"] = found["num_blocks"]
        if stage.point is None:
            self._hold_against_targets()
        self._save()

    def _hold_against_targets(self) -> None:
        """Records whether profile and ceilings meet the executor's speed targets; nothing without both or a GPU."""
        ceilings = self.state["stages"].get("probe", {}).get("result")
        profile = self.out / f"{profile_name(self.plan.model)}.json"
        if self.device == "cuda" and ceilings and profile.is_file():
            self.state["targets"] = targets(load_profile(profile), ceilings)

    def _leave(self) -> None:
        """Ends the worker process, and with it whatever it holds of the device."""
        if self._worker is not None:
            self._worker.stop("")
            self._worker = None

    def _save(self) -> None:
        try:
            write_text(self._state_file, json.dumps(self.state, indent=1))
        except OSError as error:  # what is running may still be written
            typer.echo(f"{self._state_file}: cannot be written: {error.strerror}.", err=True)


class _NoWorkerError(Exception):
    """A stage's process did not start, though one did before."""


def _check_writable(out: Path) -> None:
    """CalibrationError unless files can be written in the folder `out`, which is made."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        check_folder(out)
    except OSError as error:
        raise CalibrationError(f"--out {out}: cannot be written: {reason_text(error)}. Give another folder.") from None


def _check_call(device: str, minutes: float) -> None:
    """CalibrationError for `minutes` that are no time, and for a device that is not there."""
    if not _LEAST_MINUTES <= minutes < math.inf:
        raise CalibrationError(f"--minutes {minutes:g}: is no time for a call. Give at least {_LEAST_MINUTES:g}.")
    try:
        from batchsim.calibrate.engine.identity import check_device
    except ImportError as error:
        raise CalibrationError(f"a campaign needs torch: {error}. Install it.") from None
    check_device(device)


def _good_enough(record: dict[str, Any]) -> bool:
    """Whether a stage left a profile that lacks nothing but rounds, and has enough of them for live runs."""
    lacking = [m for m in record.get("result", {}).get("missing", ()) if m.startswith(("block", "rounds"))]
    rounds = re.match(r"rounds: (\d+) of", lacking[0]) if len(lacking) == 1 else None
    return rounds is not None and int(rounds[1]) >= _FEWEST_ROUNDS


def _served(stage: Stage) -> str:
    """The scenario and policy of a live run, as a key: its load is a share of their saturation."""
    assert stage.point is not None, "asked of live runs"
    return f"{stage.point.scenario} {stage.point.policy}"


def _short(result: dict[str, Any]) -> str:
    """A stage's result in one line."""
    words = []
    for name, value in result.items():
        if isinstance(value, dict):
            words.append(f"{name} ({_short(value)})")
        elif isinstance(value, list):
            words += [f"{name}: {'; '.join(map(str, value))}"] if value else []
        elif value not in ("", None):
            words.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return ", ".join(words)


def _terminate(*_: object) -> None:
    raise KeyboardInterrupt


def main(
    out: Annotated[Path, typer.Option(help="Folder for all that is found; the same again goes on there.")],
    minutes: Annotated[float, typer.Option(help="Time for this call.")] = 9.0,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try it out.")] = "cuda",
    plan: Annotated[Path, typer.Option(help="What to do, as JSON.")] = SHIPPED / "gpu.json",
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Let scenarios import and run policies of their own, module:Class.")
    ] = False,
) -> None:
    """Measure, check and replay on this machine until the time is up; print how every stage ended."""
    code = 1
    try:
        _check_call(device, minutes)
        campaign = Campaign(plan, out, device, minutes, allow_code=allow_code)
        signal.signal(signal.SIGTERM, _terminate)  # as Ctrl-C
        try:
            campaign.run()
        except KeyboardInterrupt:
            code = 130
        typer.echo(campaign.report())
    except BatchsimError as error:
        typer.echo(" ".join(str(error).split()), err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(0 if campaign.is_done else code)


if __name__ == "__main__":
    typer.run(main)
