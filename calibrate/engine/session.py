"""Runs one point of a scenario on the real model.

A result is kept as one .npz file, so that a machine with little more than a GPU can leave it and any other read it.
"""

from __future__ import annotations

import gc
import hashlib
import json
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import ScenarioError
from batchsim.base.files import TABLE_BYTES, open_file, parse_json, reason_text, replacing, writing
from batchsim.base.plain import to_plain
from batchsim.drive.live import WallClock, live
from batchsim.kernel.core import EngineCore
from batchsim.kernel.protocols import StepEstimator
from batchsim.kernel.record import Records
from batchsim.kv.choice import new_kv
from batchsim.workload.build import BuiltWorkload, known_requests

if TYPE_CHECKING:
    from batchsim.calibrate.engine.executor import TorchExecutor
    from batchsim.calibrate.engine.prompts import Prompts
    from batchsim.calibrate.engine.runner import ModelRunner
    from batchsim.calibrate.engine.sampling import Sampling
    from batchsim.scenario.config import PolicySpec
    from batchsim.scenario.setup import Setup

E = TypeVar("E", bound="TorchExecutor")

FORMAT = "batchsim-live"
VERSION = 3
EXECUTOR = "batchsim"
"""Name of the executor of every live run, and of every profile measured by batchsim."""

Int = NDArray[np.int64]


@dataclass(frozen=True)
class LiveResult:
    """A run of one policy at one load: its records, the ns of each step's kernels and host, and how the run ended.

    `kernel_ns` and `host_ns` have an entry for each step. `rested` are the steps before which the engine was idle.
    `window_ns` is (end of warm-up, end of arrivals), `num_offered` the number of requests the workload offered, None
    where that is open. `reason` is "" unless the run was cut; `error` is what cut it, which is not saved. `made` says
    on what it ran.
    """

    policy: str
    load: float
    seed: int
    repeat: int
    records: Records
    kernel_ns: Int
    host_ns: Int
    rested: Int
    end_ns: int
    window_ns: tuple[int, int]
    num_offered: int | None
    streams: bool
    reason: str
    num_blocks: int
    made: dict[str, Any]
    error: Exception | None = None

    def save(self, path: Path) -> None:
        """Writes the result to `path`, whole or not at all."""
        head = {name: getattr(self, name) for name in _HEAD}
        words = json.dumps({"format": FORMAT, "version": VERSION} | head, ensure_ascii=False)
        columns = {name: getattr(self, name) for name in _COLUMNS}
        with writing(path), replacing(path) as file:
            arrays: dict[str, Any] = {"head": np.array(words), **columns, **self.records.arrays()}
            np.savez_compressed(file, **arrays)


_COLUMNS = ("kernel_ns", "host_ns", "rested")
_HEAD = ("policy", "load", "seed", "repeat", "end_ns", "window_ns", "num_offered", "streams", "reason")
_HEAD += ("num_blocks", "made")


class DriftGauge(Protocol):
    """A step of known time, which a machine is timed by before and after a run."""

    def drift(self, runner: ModelRunner) -> tuple[float, float] | None:
        """(by median, by mean) the share by which the step takes longer now than it did; None if it cannot be run."""
        ...


UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    EOFError,
    MemoryError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What NumPy raises for a file that is not its archive, and reading raises for one that holds something else."""


def digest_of(path: Path) -> str:
    """A digest of the file at `path`, which identifies live runs whatever they are called."""
    with open_file(path, TABLE_BYTES) as file:
        return hashlib.sha256(file.read()).hexdigest()[:12]


def load_result(path: Path) -> LiveResult:
    """The result that `LiveResult.save` wrote to `path`. ScenarioError for any other file."""
    try:
        with open_file(path, TABLE_BYTES) as file, np.load(file, allow_pickle=False) as arrays:
            head = parse_json(str(arrays["head"]))
            if (head.pop("format"), head.pop("version")) != (FORMAT, VERSION):
                raise ValueError(f"not {FORMAT} of version {VERSION}")
            head["window_ns"] = tuple(head["window_ns"])
            columns = {name: arrays[name] for name in _COLUMNS}
            return LiveResult(records=Records.from_arrays(arrays), **columns, **head)
    except FileNotFoundError:
        raise ScenarioError(f"{path}: no such file. Give a result of a live run.") from None
    except UNREADABLE as error:
        raise ScenarioError(f"{path}: cannot be read as a live result: {reason_text(error)}. Run it again.") from None


def run_live(
    setup: Setup,
    policy: PolicySpec,
    load: float,
    seed: int,
    runner: ModelRunner,
    *,
    repeat: int = 0,
    estimator: StepEstimator | None = None,
    sampling: Sampling | None = None,
    prompts: Prompts | None = None,
    sentinel: DriftGauge | None = None,
) -> LiveResult:
    """Replays one point in real time on the model of `runner`; by default greedy and on random prompts.

    KV memory is that of `setup`. A run that was cut, by Ctrl-C or by any error, returns as well, with its `reason`.
    `made` has the counts of drafts, where a policy verifies them, and with a `sentinel` the machine's drift before and
    after the run, by medians and by means. ScenarioError if the runner's model is another one or its memory too
    small.
    """
    from batchsim.calibrate.engine.executor import TorchExecutor
    from batchsim.calibrate.engine.sampling import GREEDY

    sampling = sampling or GREEDY
    _check_runner(setup, runner)
    made = made_on(runner) | _made_of(setup, policy, sampling)
    workload = setup.workload(load, seed)
    executor, core = new_core(
        TorchExecutor, setup, policy, runner, workload, sampling=sampling, prompts=prompts, estimator=estimator
    )
    warm_up(runner)
    drifts = [] if sentinel is None else [sentinel.drift(runner)]
    with settled_memory():
        run = live(core, workload, WallClock())
    if sentinel is not None and not run.reason:
        drifts.append(sentinel.drift(runner))
    known = [drift for drift in drifts if drift is not None]
    names = ("drift", "drift_of_means") if known else ()
    times = executor.times[: core.recorder.num_steps]
    if executor.draft_counts is not None:
        made |= {"drafts": asdict(executor.draft_counts)}
    return LiveResult(
        policy=policy.name,
        load=load,
        seed=seed,
        repeat=repeat,
        records=core.recorder.records(),
        kernel_ns=np.array([step.kernel_ns for step in times], np.int64),
        host_ns=np.array([step.host_ns for step in times], np.int64),
        rested=np.array(run.rested, np.int64),
        end_ns=run.end_ns,
        window_ns=workload.window_ns,
        num_offered=workload.num_offered,
        streams=core.scheduler.streams,
        reason=run.reason,
        num_blocks=core.scheduler.kv.num_blocks,
        made=made | {name: [drift[i] for drift in known] for i, name in enumerate(names)},
        error=run.error,
    )


def new_core(
    make: type[E],
    setup: Setup,
    policy: PolicySpec,
    runner: ModelRunner,
    workload: BuiltWorkload,
    *,
    sampling: Sampling,
    prompts: Prompts | None,
    estimator: StepEstimator | None,
) -> tuple[E, EngineCore]:
    """A new executor of the class `make` on `runner`, and an engine of `policy` on it, for a run of `workload`.

    ScenarioError if the runner's model is another one or its memory too small.
    """
    _check_runner(setup, runner)
    kv = new_kv(policy.config, setup.kv.num_blocks, setup.kv.block_size, setup.num_swap_blocks, ids=True)
    traits = policy.config.traits
    executor = make(
        runner,
        kv,
        max_model_len=setup.max_model_len,
        sampling=sampling,
        prompts=prompts,
        loop=traits.loop,
        lookup=None if traits.speculation is None else traits.speculation.lookup,
    )
    return executor, setup.engine_on(executor, policy, workload, kv, estimator)


def step_limits(setup: Setup, policies: tuple[PolicySpec, ...], load: float, seed: int) -> tuple[int, int]:
    """(sequences, tokens) of the largest step that these policies can make, padding included; a draft token counts as a
    sequence, since it has logits of its own.

    ScenarioError for a policy that states no `max_num_seqs`, or can only be simulated.
    """
    workload = setup.workload(load, seed)
    longest = setup.max_model_len
    if (listed := known_requests(workload)) is not None:
        requests = listed.requests
        longest = min(longest, int((requests.prompt_tokens + requests.max_output_tokens).max()))
    return step_limits_up_to(policies, longest)


def step_limits_up_to(policies: tuple[PolicySpec, ...], longest: int) -> tuple[int, int]:
    """As `step_limits`, for requests of up to `longest` tokens of prompt and answer."""
    sequences = tokens = 1
    for policy in policies:
        policy.check_can_be_real()
        traits = policy.config.traits
        slots, budget = traits.max_num_seqs, traits.max_num_batched_tokens
        if slots is None:
            raise ScenarioError(
                f"{policy.name}: its config states no max_num_seqs, which sizes the model's buffers. Give it one."
            )
        most = slots * longest if budget is None else budget
        lookup = None if traits.speculation is None else traits.speculation.lookup
        sequences = max(sequences, slots, 0 if lookup is None else min(slots * (1 + lookup.num_drafts), most))
        tokens = max(tokens, slots, most)
    return sequences, tokens


@contextmanager
def settled_memory() -> Iterator[None]:
    """Keeps what exists now out of garbage collection: a pass over all of torch would delay a step."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def warm_up(runner: ModelRunner) -> None:
    """Runs a few decode and chunk steps, so that no run pays for first touches of memory. Overwrites the KV cache."""
    rows = min(runner.max_num_seqs, runner.num_blocks, 4)
    tokens = min(runner.max_num_batched_tokens, runner.max_model_len, runner.block_size)
    for contexts, chunks in (([1] * rows, []), ([], [(0, tokens)])):
        inputs = runner.synthetic(contexts, chunks)
        for _ in range(3):
            runner.step(inputs)


def made_on(runner: ModelRunner) -> dict[str, Any]:
    """Machine, software and model of a runner, as JSON values."""
    from batchsim.calibrate.engine.identity import identity

    return identity(runner.device.type) | {
        "device": runner.device.type,
        "executor": EXECUTOR,
        "model": to_plain(runner.spec),
        "block_size": runner.block_size,
        "weights": runner.weights,
        "backend": runner.backend.name,
        "graphs": bool(runner.graph_buckets),
    }


def _made_of(setup: Setup, policy: PolicySpec, sampling: Sampling) -> dict[str, Any]:
    """What the run was asked for, as JSON values. ScenarioError if the policy's knobs have no plain form."""
    try:
        knobs = policy.plain
    except TypeError as error:
        raise ScenarioError(f"{policy.name}: cannot be written as JSON: {error}. Use plain knobs.") from None
    return {
        "knobs": knobs,
        "num_swap_blocks": setup.num_swap_blocks,
        "max_model_len": setup.max_model_len,
        "sampling": to_plain(sampling),
    }


def _check_runner(setup: Setup, runner: ModelRunner) -> None:
    """ScenarioError unless the runner has the scenario's model and as much KV memory as the scenario states."""
    for field in fields(setup.model):
        ours, loaded = getattr(setup.model, field.name), getattr(runner.spec, field.name)
        if ours != loaded and field.name != "name":
            raise ScenarioError(
                f"{setup.scenario.name}: {field.name} of the model is {ours}, of the loaded one {loaded}. Load that"
                " model."
            )
    for what, ours, loaded in (
        ("num_blocks", setup.kv.num_blocks, runner.num_blocks),
        ("num_swap_blocks", setup.num_swap_blocks, runner.num_swap_blocks),
        ("max_model_len", setup.max_model_len, runner.max_model_len),
    ):
        if ours > loaded:
            raise ScenarioError(
                f"{setup.scenario.name}: {what} is {ours}, the loaded model has {loaded}. Load it with more."
            )
    if setup.kv.block_size != runner.block_size:
        raise ScenarioError(
            f"{setup.scenario.name}: KV blocks hold {setup.kv.block_size} tokens, those of the loaded model"
            f" {runner.block_size}. Load it with block_size {setup.kv.block_size}."
        )
