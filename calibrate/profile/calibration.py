"""`calibrate`: measures the step costs of one model on one device within a time budget and writes a cost profile.

Work is done in order of value, and results are on disk every few seconds: the profile as soon as a fit is possible,
with a list of missing measurements, and the raw measurements beside it until all is done. The same call again goes on
from there and measures nothing twice.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from batchsim.base.errors import CalibrationError
from batchsim.base.files import check_writable, write_text, writing
from batchsim.calibrate.engine.identity import check_device, identity, set_cpu_threads
from batchsim.calibrate.engine.runner import ModelRunner, build_runner
from batchsim.calibrate.engine.session import settled_memory
from batchsim.calibrate.profile import memory
from batchsim.calibrate.profile.assemble import assemble
from batchsim.calibrate.profile.bench import Bench, MeasuredStep
from batchsim.calibrate.profile.engine_runs import EngineSteps, RunSpec, run_engine
from batchsim.calibrate.profile.job import job_of
from batchsim.calibrate.profile.options import LEAST_MINUTES, Options, limits_of
from batchsim.calibrate.profile.point_plan import StepRange, StepShape
from batchsim.calibrate.profile.raw import Raw, check_key
from batchsim.calibrate.profile.schedules import Pace
from batchsim.calibrate.profile.telemetry import Telemetry
from batchsim.cost.profile import KIND, Profile, load_profile
from batchsim.deployment.catalog import load_model
from batchsim.deployment.model import ModelSpec

__all__ = ["Options", "Progress", "calibrate"]

Progress = Callable[[str, float], None]
"""Called with what is being done, and the share of all work that is done."""

_RUN_S = {"cuda": 3.0, "cpu": 1.0}  # seconds of an engine run
_SAVE_S = 10.0
_MARGIN_S = 3.0  # seconds kept for the last fit and files
_SWAP_BLOCKS = 64
_ENERGY_S = 6.0


def calibrate(options: Options, out: Path, progress: Progress = lambda what, share: None) -> Profile:
    """Measures, and returns the profile, which is also in `out`. CalibrationError in one line for whatever fails.

    Where the time is short, and on Ctrl-C (which is raised again), `out` is a profile that lists what is `missing`, if
    there is enough for one. The same call then goes on; on a finished profile it measures nothing.
    """
    end_s = time.monotonic() + 60 * options.minutes - _MARGIN_S
    if options.minutes < LEAST_MINUTES:
        raise CalibrationError(f"--minutes {options.minutes:g} is too short. Give it at least {LEAST_MINUTES:g}.")
    check_device(options.device)
    if options.device == "cpu":
        set_cpu_threads(1)  # with more, the steps of a small model scatter by an order of magnitude
    model = load_model(options.model)
    limits = limits_of(options, model)
    asked = {key: value for key, value in asdict(options).items() if key not in ("minutes", "name")}
    key = identity(options.device) | {"options": asked}
    _check_out(out)
    partial = out.with_name(f"{out.name.removesuffix('.json')}.partial.json")
    if out.exists() and not partial.exists():
        return _finished(out, key)
    raw = Raw.load(partial, key)
    progress("loading the model", 0.0)
    with Telemetry(options.device) as telemetry:
        run = CalibrationRun(options, model, limits, raw, out, partial, progress, end_s, telemetry)
        return run.all()


def _check_out(out: Path) -> None:
    """CalibrationError unless a file can be written at `out`."""
    with writing(out, "Give -o another path.", CalibrationError):
        out.parent.mkdir(parents=True, exist_ok=True)
        check_writable(out, KIND)


def _finished(out: Path, key: dict[str, Any]) -> Profile:
    """The finished profile in `out`. CalibrationError unless its machine, software and options are those of `key`."""
    profile = load_profile(str(out))
    advice = f"Delete {out} to measure anew, or write to another file."
    if profile.origin != "measured":
        raise CalibrationError(f"{out}: is an imported profile. Write to another file.")
    finished = {
        "hardware": profile.hardware,
        "software": profile.software,
        "options": profile.made.get("options", {}),
    }
    check_key(finished, key, str(out), advice)
    return profile


class CalibrationRun:
    """One call of a calibration: does the work that is left, in order of value, until the time is up."""

    def __init__(
        self,
        options: Options,
        model: ModelSpec,
        limits: StepRange,
        raw: Raw,
        out: Path,
        partial: Path,
        progress: Progress,
        end_s: float,
        telemetry: Telemetry,
    ) -> None:
        self.options = options
        self.raw = raw
        self.out = out
        self.partial = partial
        self.progress = progress
        self.telemetry = telemetry
        self._began_s = self._saved_s = time.monotonic()
        self._end_s = end_s
        self._spent_s = raw.seconds
        self._notes, self._telemetry = raw.notes, raw.telemetry  # what earlier calls left
        self.runner, self.limits = self._load(model, limits)
        runner = self.runner
        self.job = job_of(options, runner.spec, self.limits, runner.graph_buckets, raw)
        decodes = [p for p in self.job.points if p.block == "A"]
        short = [p for p in decodes if p.decode[0] == min(q.decode[0] for q in decodes)]  # fits into most pools
        first_ns = None if raw.sentinel is None else float(raw.sentinel["ns"])
        self.bench = Bench(runner, short[len(short) // 2], options.seed, first_ns)
        self._before = {point: list(sample.rounds) for point, sample in raw.samples.items()}
        self._runs_before = raw.runs
        self._runs: list[tuple[float, EngineSteps]] = []
        self._visits: dict[StepShape, list[tuple[float, float]]] = {}

    # ---- the device

    def _load(self, model: ModelSpec, limits: StepRange) -> tuple[ModelRunner, StepRange]:
        """The runner, and the limits with the size of its KV pool, which on CUDA is measured unless it is stated."""
        options, raw = self.options, self.raw
        if limits.kv_tokens:
            return self._build(limits, limits.kv_tokens // options.block_size), limits
        if raw.num_blocks is None:
            runner = self._build(limits, memory.blocks_of_largest_steps(limits, options.block_size))
            raw.num_blocks, raw.memory = memory.measured_blocks(runner, limits)
            del runner
            memory.give_back()
        limits = replace(limits, kv_tokens=raw.num_blocks * options.block_size)
        runner = self._build(limits, raw.num_blocks)
        self.progress("filling every KV block", 0.02)
        memory.run_full(runner, limits)
        return runner, limits

    def _build(self, limits: StepRange, num_blocks: int) -> ModelRunner:
        options = self.options
        return build_runner(
            options.model,
            device=options.device,
            num_blocks=num_blocks,
            block_size=options.block_size,
            num_swap_blocks=min(_SWAP_BLOCKS, num_blocks),
            max_num_seqs=limits.max_seqs,
            max_num_batched_tokens=limits.max_tokens,
            max_model_len=limits.max_context,
            graphs=options.graphs and options.device == "cuda",
            seed=options.seed,
        )

    # ---- the work

    def all(self) -> Profile:
        """Does all work that is left and that there is time for; returns the profile."""
        try:
            for i in range(self.job.rounds):
                self._round(i)
            self._energy()
        except _OutOfTimeError:
            pass
        except BaseException:  # Ctrl-C too: what is there is kept
            self._save()
            raise
        profile = self._save()
        if profile is None:
            raise CalibrationError(
                f"{self.out.name}: {self.options.minutes:g} minutes were too short for a first fit. What was measured"
                " is kept: run the same command again."
            )
        return profile

    def _round(self, number: int) -> None:
        """Round `number` (from 0): visits every point once more, and makes the round's engine runs."""
        held_out = [p for p in self.job.points if p.block == "H"]
        half = len(held_out) // 2
        first = [p for p in self.job.points if p.block in "ACD"] + held_out[:half]
        then = [p for p in self.job.points if p.block in "BE"] + held_out[half:]
        per_round = len(self.job.runs) // self.job.rounds
        specs = self.job.runs[number * per_round : (number + 1) * per_round]
        self._visit(first, number)
        self._engine([spec for spec in specs if spec.training])
        self._visit(then, number)
        self._engine([spec for spec in specs if not spec.training])
        if self.raw.swap is None:
            self._check_time(1.0)
            self.raw.swap = memory.measured_swap(self.runner)

    def _visit(self, points: list[StepShape], number: int) -> None:
        """Visits each of `points` that has had at most `number` visits, once, in random order."""
        todo = [p for p in points if self._count(p) <= number]
        with settled_memory():  # else a pass over all of torch lands amid launches now and then
            for i in np.random.default_rng(self.options.seed + number).permutation(len(todo)):
                point = todo[i]
                self._check_time(0.5)
                self._tell(f"round {number + 1} of {self.job.rounds}: block {point.block}")
                self.bench.watch()
                self._visits.setdefault(point, []).append((time.monotonic(), self.bench.visit(point)))
                if time.monotonic() - self._saved_s > _SAVE_S:
                    self._save()
        self._save()

    def _count(self, point: StepShape) -> int:
        return len(self._before.get(point, ())) + len(self._visits.get(point, ()))

    def _engine(self, specs: list[RunSpec]) -> None:
        """Makes the engine runs `specs` that are not made yet, each between visits of the sentinel."""
        done = [run.spec for run in (*self._runs_before, *(run for _, run in self._runs))]
        seconds = min(_RUN_S[self.options.device], 60 * self.options.minutes / 30)

        def run(spec: RunSpec, seconds: float) -> EngineSteps:
            return run_engine(self.runner, self.limits, spec, seconds, self._pace())

        for spec in specs:
            if spec not in done:
                self._check_time(seconds + 1.0)
                self._tell(f"engine run, {spec.name}")
                for _ in range(2):
                    self.bench.watch(now=True)
                if not self._runs:
                    run(spec, seconds / 4)  # warms up what only engine runs touch
                self._runs.append(self.bench.calmest(lambda spec=spec: run(spec, seconds), lambda steps: steps.rest_s))
                for _ in range(2):
                    self.bench.watch(now=True)
                self._save()

    def _pace(self) -> Pace:
        """The pace of decodes by the sentinel, and of prompts by the longest ones visited so far."""
        step_ns = self.bench.usual_ns()
        assert step_ns is not None  # the sentinel was looked at just before
        visited = [p for p in self.job.points if p.block == "C" and self._count(p)]
        longest = max(visited, key=lambda p: p.tokens)
        times = self._before.get(longest, []) + [ns for _, ns in self._visits.get(longest, [])]
        return Pace(step_ns / 1e9, statistics.median(times) / longest.tokens / 1e9)

    def _energy(self) -> None:
        """Measures joules a step under steady load for two steps: the most decodes, and the most prefill tokens."""
        chosen = {}
        for block, name in (("A", "decode"), ("C", "prefill")):
            chosen[name] = max((p for p in self.job.points if p.block == block), key=lambda p: (p.tokens, p.context))
        if self.raw.energy is not None or self.telemetry.joules(lambda: 1) is None:
            return
        energy = {}
        for name, point in chosen.items():
            self._check_time(_ENERGY_S + 1)
            self._tell(f"energy of {name}")
            once = self.bench.visit(point)
            steps = max(1, round(_ENERGY_S * 1e9 / once))
            energy[name] = {
                "step": point.to_row(),
                "joules": self.telemetry.joules(lambda n=steps: len(self.runner.replay(n))),
            }
        self.raw.energy = energy

    # ---- bookkeeping

    def _check_time(self, needed_s: float) -> None:
        if time.monotonic() + needed_s > self._end_s:
            raise _OutOfTimeError

    def _tell(self, what: str) -> None:
        visits = sum(min(self._count(p), self.job.rounds) for p in self.job.points)
        runs = 10 * (len(self._runs_before) + len(self._runs))
        self.progress(what, (visits + runs) / (self.job.rounds * len(self.job.points) + 10 * len(self.job.runs)))

    def _save(self) -> Profile | None:
        """Writes and returns the profile, and until all is done the raw measurements; None without enough for a fit."""
        raw = self.raw
        for point, visits in self._visits.items():
            new = [ns / self.bench.factor(seconds) for seconds, ns in visits]
            raw.samples[point] = MeasuredStep(point, self._before.get(point, []) + new)
        raw.runs = [*self._runs_before, *(run.divided(self.bench.factor(seconds)) for seconds, run in self._runs)]
        raw.seconds = self._spent_s + time.monotonic() - self._began_s
        raw.notes = [*self._notes, *self.bench.notes()]
        usual_ns, mean_ns = self.bench.usual_ns(), self.bench.mean_ns()
        if self.bench.first_ns is None and usual_ns and mean_ns:
            step = self.bench.sentinel.to_row()
            raw.sentinel = {"step": step, "ns": round(usual_ns), "mean_ns": round(mean_ns)}
        raw.telemetry = [*self._telemetry, *filter(None, [self.telemetry.summary()])]
        raw.save(self.partial)
        self._saved_s = time.monotonic()
        try:
            profile = assemble(self.job, raw)
        except CalibrationError:
            return None
        write_text(self.out, profile.to_json(), KIND)
        if not [m for m in profile.missing if m.startswith(("block", "rounds"))]:
            self.partial.unlink()
        return profile


class _OutOfTimeError(Exception):
    """The call's time budget is used up."""
