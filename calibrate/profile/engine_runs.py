"""Runs of the real engine, to measure what a step costs beyond its kernels run back to back.

EngineCore, a scheduler, block tables and the model work as in a live run, which is cut after some seconds. Requests are
all there at once; in `open` runs they arrive one by one as in service, in `sparse` runs so rarely that the engine
rests: then there are steps of chunks alone, and steps after a rest. Runs of `static` batches hold padding. The time
from the end of a step's kernels to the next step's start is the host's: scheduler, records, input preparation, copies.
In runs `ahead` the engine schedules ahead of results: the host works while the device does, and each slows the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchsim.calibrate.engine.executor import TorchExecutor
from batchsim.calibrate.engine.runner import ModelRunner
from batchsim.calibrate.engine.session import settled_memory
from batchsim.calibrate.profile import schedules
from batchsim.calibrate.profile.point_plan import StepRange
from batchsim.cost.periods import periods_ns
from batchsim.cost.work import WORK_COLUMNS, work_columns
from batchsim.drive.live import WallClock, live
from batchsim.kernel.core import EngineCore
from batchsim.kernel.engine_loop import SYNC
from batchsim.kernel.kv_blocks import TableKV
from batchsim.kernel.record import LATER_COLUMNS, Recorder, Records
from batchsim.policies.systems.vllm.vllm_config import ASYNCHRONOUS

_MANY = 64  # slots of a run ahead, of which some requests end in every few steps
_WARM_STEPS = 5  # steps left out at the head of a run: first touches of memory
_TIMES = ("kernel_ns", "host_ns", "period_ns")  # the fields of EngineSteps that are times of steps


@dataclass(frozen=True)
class RunSpec:
    """One engine run: its kind (a policy, `ahead`: vLLM, asynchronous, or `sparse` and `open`: continuous; `live` and
    `live ahead`: a live run taken for one), `max_seqs` slots, whether the fit may use it (`training`), the seed of its
    requests.
    """

    kind: str
    max_seqs: int
    training: bool
    seed: int

    @property
    def rests(self) -> bool:
        """Whether the engine is idle at times in this run, so that steps of chunks alone find cold caches."""
        return self.kind in ("sparse", "open", "live", "live ahead")

    @property
    def is_ahead(self) -> bool:
        """Whether the engine scheduled ahead of results."""
        return self.kind in ("ahead", "live ahead")

    @property
    def name(self) -> str:
        """The run in words, for progress lines and lists."""
        return f"{'fit' if self.training else 'held out'}: {self.kind}, {self.max_seqs} sequences, seed {self.seed}"


@dataclass(frozen=True)
class EngineSteps:
    """The steps of one run as arrays: work columns, and in ns the time of each step's kernels, of the host, and the
    period from its start to the next one's.

    The period is the sum of the two, but of a run `ahead`, where `kernel_ns` is all that kept the device from the next
    step and the host's time lay beside it. `rest_s` is how many seconds the engine had nothing to run; 0 for a run of
    an earlier call.
    """

    spec: RunSpec
    columns: dict[str, NDArray[np.int64]]
    kernel_ns: NDArray[np.float64]
    host_ns: NDArray[np.float64]
    period_ns: NDArray[np.float64]
    rest_s: float = 0.0

    def divided(self, factor: float) -> EngineSteps:
        """The same steps with all times divided by `factor`."""
        return replace(self, **{name: getattr(self, name) / factor for name in _TIMES})

    def to_row(self) -> dict[str, Any]:
        """The run as JSON values, to be kept for a later call."""
        spec = self.spec
        return {
            "run": [spec.kind, spec.max_seqs, spec.training, spec.seed],
            "columns": {name: values.tolist() for name, values in self.columns.items()},
        } | {name: [round(ns) for ns in getattr(self, name)] for name in _TIMES}

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> EngineSteps:
        """The steps that `to_row` wrote; `LATER_COLUMNS` are 0 in steps written before there were any."""
        none = dict.fromkeys(LATER_COLUMNS, [0] * len(row["columns"]["num_decode"]))
        columns = {name: np.array((none | row["columns"])[name], dtype=np.int64) for name in WORK_COLUMNS}
        kernel, host, period = (np.array(row[name], dtype=np.float64) for name in _TIMES)
        return cls(RunSpec(*row["run"]), columns, kernel, host, period)


def run_specs(limits: StepRange, rounds: int, seed: int) -> list[RunSpec]:
    """The engine runs of each round: those to fit the host's time on, at several numbers of slots, then the held out.

    Held out are other requests, longer ones, and another policy besides. Of runs `ahead` there is one a round, in turn
    to fit on, with many slots and with few, and held out; many are few enough that some steps have no chunk.
    """
    half, quarter, few = (max(1, limits.max_seqs // n) for n in (2, 4, 16))
    many = min(limits.max_seqs, _MANY)
    specs: list[RunSpec] = []
    for i in range(rounds):
        first = seed + 10 * i
        specs += [RunSpec("continuous", level, True, first) for level in sorted({limits.max_seqs, quarter, few})[::-1]]
        specs += [RunSpec("static", quarter, True, first), RunSpec("sparse", limits.max_seqs, True, first)]
        specs += [RunSpec("open", limits.max_seqs, True, first)]
        specs += [RunSpec("vllm", limits.max_seqs, False, first + 1), RunSpec("continuous", half, False, first + 2)]
        specs += [RunSpec("static", half, False, first + 3), RunSpec("sparse", half, False, first + 4)]
        specs += [RunSpec("open", limits.max_seqs, False, first + 5)]
        specs.append(RunSpec("ahead", half if i % 2 else (many, few)[i // 2 % 2], i % 2 == 0, first + 6))
    return specs


def run_engine(
    runner: ModelRunner, limits: StepRange, spec: RunSpec, seconds: float, pace: schedules.Pace
) -> EngineSteps:
    """The steps of one engine run, cut after `seconds`; its requests are made for `pace`.

    ExecutorError if the device fails, KeyboardInterrupt on Ctrl-C.
    """
    kv = TableKV(runner.num_blocks, runner.block_size)
    loop = ASYNCHRONOUS if spec.is_ahead else SYNC
    executor = TorchExecutor(runner, kv, max_model_len=limits.max_context, loop=loop)
    scheduler = schedules.scheduler(spec.kind, spec.max_seqs, limits, kv, loop=loop)
    core = EngineCore(
        scheduler,
        executor,
        Recorder(),
        max_model_len=limits.max_context,
        stop_ns=round(seconds * 1e9),
        loop=loop,
    )
    requests = schedules.requests(spec.kind, spec.max_seqs, limits, spec.seed, seconds, pace, longer=not spec.training)
    with settled_memory():
        ended = live(core, requests, WallClock())
    if ended.reason == "interrupted":
        raise KeyboardInterrupt
    if ended.error is not None:
        raise ended.error
    records = core.recorder.records()
    kernel_ns = np.array([times.kernel_ns for times in executor.times[: core.recorder.num_steps]], dtype=np.float64)
    return steps_of(spec, records, ended.rested, kernel_ns)


def steps_of(
    spec: RunSpec, records: Records, rested: Sequence[int] | NDArray[np.int64], kernel_ns: NDArray[Any]
) -> EngineSteps:
    """The steps of a run with its `records`, before whose steps `rested` the engine was idle. `kernel_ns` is what each
    step's kernels took, which of a run ahead is part of its time on the device and not looked at."""
    steps = records.steps
    period = periods_ns(steps, rested)
    if spec.is_ahead:
        kernel, host = _lanes(records, period)
    else:
        kernel, host = kernel_ns.astype(np.float64), period - kernel_ns
    kept = slice(min(_WARM_STEPS, len(period) // 2), max(len(period) - 1, 0))  # the last step has no next one
    columns = {name: column[kept] for name, column in work_columns(steps).items()}
    rest_s = (float(steps["start_ns"][-1] - steps["start_ns"][0]) - period[:-1].sum()) / 1e9 if len(steps) else 0.0
    return EngineSteps(spec, columns, kernel[kept], host[kept], period[kept], rest_s)


def _lanes(records: Records, period_ns: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """ns of the device and of the host for each step of an engine ahead, from its `period_ns`.

    Where the next step was launched in time, the device is taken until that begins, with all that lies between. The
    host's are from the scheduler's call to the launch, and from the end, or the launch of the next step where that is
    later, until the results were processed.
    """
    steps, lanes = records.steps, records.lanes
    ends_ns = steps["start_ns"] + steps["duration_ns"]
    next_launch_ns = np.append(lanes["launched_ns"][1:], np.iinfo(np.int64).max)[: len(steps)]
    device = np.where(next_launch_ns <= ends_ns, period_ns, steps["duration_ns"])
    last = np.arange(len(steps)) == len(steps) - 1
    processed_from = np.where(last, ends_ns, np.maximum(ends_ns, next_launch_ns))
    host = lanes["launched_ns"] - lanes["called_ns"] + lanes["processed_ns"] - processed_from
    return device.astype(np.float64), host.astype(np.float64)
