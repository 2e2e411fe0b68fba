"""The work of a campaign's stages, inside one process: results are files, the value returned is a summary."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from batchsim.base.errors import CalibrationError, ExecutorError
from batchsim.calibrate.calibration import Options, calibrate
from batchsim.calibrate.identity import identity, set_cpu_threads
from batchsim.calibrate.memory import give_back
from batchsim.calibrate.options import limits_of
from batchsim.calibrate.runner import ModelRunner, build_runner
from batchsim.calibrate.sentinel import Sentinel
from batchsim.calibrate.session import graphs_of, predict, run_live
from batchsim.cost.calibrated import Calibrated
from batchsim.cost.profile import Profile, load_profile
from batchsim.drive.live import INTERRUPTED, lag_verdict
from batchsim.drive.resolved import Resolved
from batchsim.drive.resolved_policy import ResolvedPolicy
from batchsim.drive.saturation import overloaded, saturation_rps
from tools.campaign.plan import Known, LivePoint, Plan, Stage, profile_name
from tools.campaign.probe import probe
from tools.campaign.selfcheck import selfcheck

_TALK_S = 20.0  # seconds between two lines of progress
_SMALLER_POOL = 0.97  # share of the measured KV blocks, where all do not fit


class Stages:
    """Runs stages one after another and keeps the model of live runs between them."""

    def __init__(self, plan: Plan, out: Path, device: str) -> None:
        self.plan = plan
        self.out = out
        self.device = device
        if device == "cpu":
            set_cpu_threads(1)  # with more, small steps scatter widely
        self.identity = identity(device)
        self._runner: ModelRunner | None = None

    def run(self, stage: Stage, minutes: float, known: Known) -> dict[str, Any]:
        """The stage's result as JSON values. KeyboardInterrupt if it was stopped; any other error if it failed."""
        if stage.point is not None:
            return self._live(stage.point, known)
        if stage.model:
            return self._profile(stage, minutes)
        return {"probe": probe, "selfcheck": selfcheck}[stage.name](self.device)

    def _profile(self, stage: Stage, minutes: float) -> dict[str, Any]:
        options = Options(model=stage.model, device=self.device, minutes=minutes, **self.plan.options)
        profile = calibrate(options, self.out / f"{stage.name}.json", _talk(stage.name))
        held_out = {name: value for name, value in (profile.held_out or {}).items() if isinstance(value, float)}
        return {"num_blocks": profile.num_blocks, "held_out": held_out, "missing": list(profile.missing)}

    def _live(self, point: LivePoint, known: Known) -> dict[str, Any]:
        """Replays one point on the model and saves the run; the result says also what the new profile predicts."""
        profile = load_profile(str(self.out / f"{profile_name(self.plan.model)}.json"))
        resolved, policy = self.plan.scenarios[point.scenario], self.plan.policy(point)
        cost = Calibrated(profile, extrapolate=True, max_model_len=resolved.max_model_len)
        runner = self._runner_for(profile, resolved, known.num_blocks)
        num_blocks = runner.num_blocks
        saturation = known.saturation_rps or _saturation(resolved, policy, cost, num_blocks)
        load = point.share * saturation
        sentinel = Sentinel.of(profile)
        live = run_live(resolved, policy, load, 0, runner, repeat=point.repeat, estimator=cost, sentinel=sentinel)
        folder = self.out / point.scenario
        folder.mkdir(exist_ok=True)
        live.save(folder / f"{point.name}.npz")
        if live.reason == INTERRUPTED:
            raise KeyboardInterrupt
        if live.error is not None:
            raise live.error
        predicted = predict(resolved, policy, load, 0, cost, num_blocks=num_blocks)
        measured_s, predicted_s = (float(run.records.steps["duration_ns"].sum()) / 1e9 for run in (live, predicted))
        return {
            "saturation_rps": saturation,
            "load_rps": load,
            "num_blocks": num_blocks,
            "steps": live.records.num_steps,
            "busy_s": measured_s,
            "predicted_busy_s": predicted_s,
            "void": lag_verdict(live.records),
        }

    def _runner_for(self, profile: Profile, resolved: Resolved, known_blocks: int | None) -> ModelRunner:
        """A runner with the plan's model and the scenario's KV memory, else that of earlier runs, else the profile's.

        A runner that exists is kept if it has just that. Where the measured memory does not fit, a little less is
        tried, which the run then says.
        """
        num_blocks = resolved.num_blocks or known_blocks or profile.num_blocks
        if num_blocks is None:
            raise CalibrationError(f"{profile.name}: holds no num_blocks. State kv.tokens in the scenario.")
        wanted = (num_blocks, resolved.num_swap_blocks)
        if self._runner is None or (self._runner.num_blocks, self._runner.num_swap_blocks) != wanted:
            self._runner = None
            give_back()
            try:
                self._runner = self._built(profile, *wanted)
                return self._runner
            except (CalibrationError, ExecutorError):
                if resolved.num_blocks is not None or known_blocks is not None:
                    raise
            give_back()  # after the handler: until then the error keeps the half-built runner alive
            self._runner = self._built(profile, int(_SMALLER_POOL * num_blocks), resolved.num_swap_blocks)
        return self._runner

    def _built(self, profile: Profile, num_blocks: int, num_swap_blocks: int) -> ModelRunner:
        options = Options(model=self.plan.model, device=self.device, **self.plan.options)
        limits = limits_of(options, profile.model)
        return build_runner(
            self.plan.model,
            device=self.device,
            num_blocks=num_blocks,
            block_size=profile.block_size,
            num_swap_blocks=num_swap_blocks,
            max_num_seqs=limits.max_seqs,
            max_num_batched_tokens=limits.max_tokens,
            max_model_len=limits.max_context,
            graphs=graphs_of(profile, self.device),
            seed=options.seed,
        )


def _saturation(resolved: Resolved, policy: ResolvedPolicy, cost: Calibrated, num_blocks: int) -> float:
    """The saturation of `policy` in requests/s, simulated by `cost`."""
    many = overloaded(resolved)
    return saturation_rps(predict(many, policy, many.loads[0], 0, cost, num_blocks=num_blocks).records)


def _talk(name: str) -> Callable[[str, float], None]:
    """A progress callback that prints a line now and then, so that an unattended run's log shows how far it came."""
    began_s = time.monotonic()
    next_s = began_s

    def talk(what: str, share: float) -> None:
        nonlocal next_s
        now_s = time.monotonic()
        if now_s >= next_s:
            next_s = now_s + _TALK_S
            print(f"  {now_s - began_s:5.0f} s  {name}  {share:4.0%}  {what}", file=sys.stderr, flush=True)

    return talk
