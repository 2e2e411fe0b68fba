"""Runs of the real engine, to measure what a step costs beyond its kernels run back to back.

EngineCore, a scheduler, block tables and the model work as in a live run, which is cut after some seconds. Requests are
all there at once; in `open` runs they arrive one by one as in service, in `sparse` runs so rarely that the engine
rests: then there are steps of chunks alone, and steps after a rest. Runs of `static` batches hold padding. The time
from the end of a step's kernels to the next step's start is the host's: scheduler, records, input preparation, copies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchsim.calibrate import schedules
from batchsim.calibrate.executor import TorchExecutor
from batchsim.calibrate.point_plan import StepRange
from batchsim.calibrate.runner import ModelRunner
from batchsim.calibrate.session import settled_memory
from batchsim.cost.periods import periods_ns
from batchsim.cost.work import WORK_COLUMNS, work_columns
from batchsim.drive.live import WallClock, live
from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_blocks import TableKV
from batchsim.kernel.record import Recorder

_WARM_STEPS = 5  # steps left out at the head of a run: first touches of memory


@dataclass(frozen=True)
class RunSpec:
    """One engine run: its kind (a policy, or `sparse` and `open`: continuous), `max_seqs` slots, whether the fit may
    use it (`training`), the seed of its requests.
    """

    kind: str
    max_seqs: int
    training: bool
    seed: int

    @property
    def rests(self) -> bool:
        """Whether the engine is idle at times in this run, so that steps of chunks alone find cold caches."""
        return self.kind in ("sparse", "open")

    @property
    def name(self) -> str:
        """The run in words, for progress lines and lists."""
        return f"{'fit' if self.training else 'held out'}: {self.kind}, {self.max_seqs} sequences, seed {self.seed}"


@dataclass(frozen=True)
class EngineSteps:
    """The steps of one run as arrays: work columns, and each step's kernel time and period in ns.

    `rest_s` is how many seconds the engine had nothing to run; 0 for a run of an earlier call.
    """

    spec: RunSpec
    columns: dict[str, NDArray[np.int64]]
    kernel_ns: NDArray[np.float64]
    period_ns: NDArray[np.float64]
    rest_s: float = 0.0

    def divided(self, factor: float) -> EngineSteps:
        """The same steps with all times divided by `factor`."""
        return replace(self, kernel_ns=self.kernel_ns / factor, period_ns=self.period_ns / factor)

    def to_row(self) -> dict[str, Any]:
        """The run as JSON values, to be kept for a later call."""
        spec = self.spec
        return {
            "run": [spec.kind, spec.max_seqs, spec.training, spec.seed],
            "columns": {name: values.tolist() for name, values in self.columns.items()},
            "kernel_ns": [round(x) for x in self.kernel_ns],
            "period_ns": [round(x) for x in self.period_ns],
        }

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> EngineSteps:
        """The steps that `to_row` wrote."""
        columns = {name: np.array(row["columns"][name], dtype=np.int64) for name in WORK_COLUMNS}
        kernel, period = (np.array(row[name], dtype=np.float64) for name in ("kernel_ns", "period_ns"))
        return cls(RunSpec(*row["run"]), columns, kernel, period)


def run_specs(limits: StepRange, rounds: int, seed: int) -> list[RunSpec]:
    """The engine runs of each round: those to fit the host's time on, at several numbers of slots, then the held out.

    Held out are other requests, longer ones, and another policy besides.
    """
    half, quarter, few = (max(1, limits.max_seqs // n) for n in (2, 4, 16))
    specs = []
    for i in range(rounds):
        first = seed + 10 * i
        specs += [RunSpec("continuous", level, True, first) for level in sorted({limits.max_seqs, quarter, few})[::-1]]
        specs += [RunSpec("static", quarter, True, first), RunSpec("sparse", limits.max_seqs, True, first)]
        specs += [RunSpec("open", limits.max_seqs, True, first)]
        specs += [RunSpec("vllm", limits.max_seqs, False, first + 1), RunSpec("continuous", half, False, first + 2)]
        specs += [RunSpec("static", half, False, first + 3), RunSpec("sparse", half, False, first + 4)]
        specs += [RunSpec("open", limits.max_seqs, False, first + 5)]
    return specs


def run_engine(runner: ModelRunner, limits: StepRange, spec: RunSpec, seconds: float, step_s: float) -> EngineSteps:
    """The steps of one engine run, cut after `seconds`; `step_s` is about what a step takes.

    ExecutorError if the device fails, KeyboardInterrupt on Ctrl-C.
    """
    kv = TableKV(runner.num_blocks, runner.block_size)
    executor = TorchExecutor(runner, kv, max_model_len=limits.max_context)
    scheduler = schedules.scheduler(spec.kind, spec.max_seqs, limits, kv)
    recorder = Recorder()
    core = EngineCore(scheduler, executor, recorder, max_model_len=limits.max_context, stop_ns=round(seconds * 1e9))
    requests = schedules.requests(
        spec.kind, spec.max_seqs, limits, spec.seed, seconds, step_s, longer=not spec.training
    )
    with settled_memory():
        ended = live(core, requests, WallClock())
    if ended.reason == "interrupted":
        raise KeyboardInterrupt
    if ended.error is not None:
        raise ended.error
    steps = recorder.records().steps
    kernel = np.array([times.kernel_ns for times in executor.times], dtype=np.float64)
    period = periods_ns(steps, ended.rested)[:-1]
    kept = slice(min(_WARM_STEPS, len(period) // 2), len(period))  # the last step has no next one
    columns = {name: column[:-1][kept] for name, column in work_columns(steps).items()}
    rest_s = (float(steps["start_ns"][-1] - steps["start_ns"][0]) - period.sum()) / 1e9 if len(steps) else 0.0
    return EngineSteps(spec, columns, kernel[:-1][kept], period[kept], rest_s)
