"""Measures how much of the host's work lies beside the running step when vLLM's scheduler runs a model asynchronously.

    python -m tools.overlap [--device cpu] [--rounds 5]

A batch of requests decodes on models of random weights, synchronously and asynchronously in turn. Medians over the
decode steps of each mode's calmest run: the period from a step's start to the next one's, the kernels in it, and what
of the period is not kernels; `beside`: the share of the host's time (scheduling, inputs, processing) that lay beside a
running step. Torch gives up the interpreter's lock inside its kernels alone: where these are short,
host and device thread wait for each other. Both need a core of their own: where other programs take it, each change of
the lock waits for the operating system, and asynchronous runs are the slower ones; hence the machine's load is printed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

import numpy as np

from batchsim.calibrate.engine.executor import TorchExecutor
from batchsim.calibrate.engine.identity import check_device, set_cpu_threads
from batchsim.calibrate.engine.runner import ModelRunner, build_runner
from batchsim.calibrate.engine.session import settled_memory, warm_up
from batchsim.cost.periods import periods_ns
from batchsim.deployment.model import ModelSpec
from batchsim.drive.live import WallClock, live
from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_blocks import TableKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import Recorder, Records
from batchsim.kernel.types import Arrival, Request
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.policies.systems.vllm.vllm_config import VllmConfig

SHAPES = ((64, 2, 8), (64, 2, 32), (256, 4, 8), (256, 4, 32))
"""Hidden size, layers, requests."""
PROMPT, OUTPUT, BLOCK = 32, 96, 16


class _Together:
    """So many requests, all there from the start."""

    def __init__(self, count: int) -> None:
        self.count = count

    def arrivals(self) -> Iterator[Arrival]:
        """The requests in order."""
        for number in range(self.count):
            yield Arrival(Request(number, 0, PROMPT, OUTPUT), OUTPUT)

    def responded(self, request: Request, now_ns: int) -> None:
        """None: no client waits for responses."""


def _runner(hidden: int, layers: int, count: int, device: str) -> ModelRunner:
    spec = ModelSpec(
        "random", "llama", hidden, layers, hidden // 32, hidden // 32, 32, 4 * hidden, 8192, PROMPT + OUTPUT,
        dtype="float32" if device == "cpu" else "bfloat16",
    )  # fmt: skip
    blocks = count * -(-(PROMPT + OUTPUT) // BLOCK)
    return build_runner(
        spec, device=device, num_blocks=blocks, block_size=BLOCK, max_num_seqs=count,
        max_num_batched_tokens=count * PROMPT, max_model_len=PROMPT + OUTPUT,
    )  # fmt: skip


def _beside(records: Records) -> float:
    """The share of the host's time that lay beside a running step: from the scheduler's call to the launch, and from a
    step's end, or the launch of the next one, until its results were processed."""
    steps, lanes = records.steps, records.lanes
    if not len(lanes):
        return 0.0
    ends = steps["start_ns"] + steps["duration_ns"]
    landed = np.maximum(ends, np.append(lanes["launched_ns"][1:], 0))
    begun, done = np.append(lanes["called_ns"], landed), np.append(lanes["launched_ns"], lanes["processed_ns"])
    times = np.stack([steps["start_ns"], ends], axis=1).ravel()
    run = np.cumsum(np.stack([np.zeros(len(steps)), steps["duration_ns"]], axis=1).ravel())  # time run until then
    return float((np.interp(done, times, run) - np.interp(begun, times, run)).sum() / (done - begun).sum())


def _decode_steps(runner: ModelRunner, count: int, *, ahead: bool) -> tuple[float, float, float]:
    """Medians in ns over the decode steps of one run, the period and the kernels; the share beside running steps."""
    config = VllmConfig(
        enable_prefix_caching=False, async_scheduling=ahead, max_num_seqs=count, max_num_batched_tokens=count * PROMPT
    )
    loop, kv = config.traits.loop, TableKV(runner.num_blocks, BLOCK)
    executor = TorchExecutor(runner, kv, max_model_len=runner.max_model_len, loop=loop)
    scheduler = Vllm(config, PolicyContext(kv, runner.max_model_len, loop=loop))
    core = EngineCore(scheduler, executor, Recorder(), max_model_len=runner.max_model_len, loop=loop)
    with settled_memory():
        run = live(core, _Together(count), WallClock())
    if run.error is not None:
        raise run.error
    records = core.recorder.records()
    steps = records.steps
    decodes = (steps["num_chunks"] == 0) & (steps["num_decode"] == count)
    kernels = np.array([times.kernel_ns for times in executor.times])[decodes]
    return float(np.median(periods_ns(steps, run.rested)[decodes])), float(np.median(kernels)), _beside(records)


def main() -> None:
    """Prints a row for each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=5, help="runs of each mode; the calmest is printed")
    asked = parser.parse_args()
    check_device(asked.device)
    if asked.device == "cpu":
        set_cpu_threads(1)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print("                          synchronous, ms           asynchronous, ms")
    print("hidden layers requests  period kernels   rest    period kernels   rest   beside   gain")
    for hidden, layers, count in SHAPES:
        runner = _runner(hidden, layers, count, asked.device)
        warm_up(runner)
        runs: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
        for _ in range(asked.rounds):
            for ahead, found in runs.items():
                found.append(_decode_steps(runner, count, ahead=ahead))
        (sync, sync_kernels, _), (ahead_ns, ahead_kernels, beside) = min(runs[False]), min(runs[True])
        cells = [ns / 1e6 for ns in (sync, sync_kernels, sync - sync_kernels)]
        cells += [ns / 1e6 for ns in (ahead_ns, ahead_kernels, ahead_ns - ahead_kernels)]
        shown = "{:8.2f}{:8.2f}{:7.2f}  {:8.2f}{:8.2f}{:7.2f}".format(*cells)
        print(f"{hidden:6}{layers:7}{count:9}{shown}{beside:9.0%}{sync / ahead_ns - 1:+7.0%}", flush=True)


if __name__ == "__main__":
    main()
