"""What a calibration has to measure, as it follows from its options, the model and the memory of the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from batchsim.calibrate.engine.identity import catalog_gpu
from batchsim.calibrate.profile import schedules
from batchsim.calibrate.profile.engine_runs import RunSpec, run_specs
from batchsim.calibrate.profile.options import Options
from batchsim.calibrate.profile.point_plan import StepRange, StepShape, plan
from batchsim.calibrate.profile.raw import Raw
from batchsim.deployment.model import ModelSpec

_ROUNDS = {"cuda": 3, "cpu": 4}
_HELD_OUT = {"cuda": 150, "cpu": 40}


@dataclass(frozen=True)
class Job:
    """All of a calibration but its measurements: model, sizes of CUDA graphs, steps and engine runs to measure."""

    name: str
    model: ModelSpec
    block_size: int
    buckets: tuple[int, ...]
    device: str
    points: tuple[StepShape, ...]  # steps to measure, of all blocks
    rounds: int
    runs: tuple[RunSpec, ...]


def job_of(options: Options, model: ModelSpec, limits: StepRange, buckets: Sequence[int], raw: Raw) -> Job:
    """The job of `options`; `limits` hold the size of the KV pool, `buckets` the sizes of graphs, `raw` the machine."""
    device, hardware = options.device, raw.key["hardware"]
    steps = plan(limits, block_size=options.block_size, buckets=tuple(buckets), fine=device == "cuda")
    held_out = schedules.held_out_batches(limits, options.block_size, _HELD_OUT[device], options.seed)
    shown = catalog_gpu(hardware) or str(hardware.get("gpu", "cpu")).replace(" ", "-").lower()
    return Job(
        name=options.name or f"{shown}-{Path(model.name).stem if '/' in model.name else model.name}",
        model=model,
        block_size=options.block_size,
        buckets=tuple(buckets),
        device=device,
        points=(*steps, *held_out),
        rounds=_ROUNDS[device],
        runs=tuple(run_specs(limits, _ROUNDS[device], options.seed)),
    )
