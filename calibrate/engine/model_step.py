"""One step on its way through the device: the prepared inputs, the sampled tokens, and their sequences.

Where the engine's loop is ahead, steps run in a thread of their own, one after another in order of launch, while the
host schedules and prepares the next one: torch gives up the interpreter's lock inside its kernels and while it waits
for a GPU. A row whose input token the step before samples is given it there, and one computed in vain, or whose blocks
were given to others since, is harmless by that order.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from batchsim.base.errors import CalibrationError
from batchsim.calibrate.engine.drafts import DraftedRows
from batchsim.calibrate.engine.inputs import StepInputs
from batchsim.calibrate.engine.runner import ModelRunner
from batchsim.calibrate.engine.sampling import Sampling
from batchsim.calibrate.engine.sequences import NONE, DecodeRows, Int64s, LiveSequence
from batchsim.calibrate.engine.swap import Moves
from batchsim.kernel.batch import Batch
from batchsim.kernel.engine_loop import EngineLoop
from batchsim.kernel.types import Sequence


@dataclass(slots=True)
class ModelStep:
    """The step `batch`, as it was when it was launched.

    `inputs` None: nothing to compute. `out` and `into` are KV blocks that move first. `decodes` are its decode rows,
    of which `full` reach their target; `samples` the sequences whose chunk samples, with their row of logits. `fed` are
    the rows of `inputs.ids` whose tokens the step before samples, and their rows of logits there. `stored` is the
    same of this step's tokens, once the next one stores them: their slots, and their rows. Where drafts are verified
    `decodes` is empty, and the decodes are in `drafted`. `tokens` and `kernel_ns` are there when it has run.
    """

    batch: Batch
    inputs: StepInputs | None
    sampling: Sampling
    out: Moves
    into: Moves
    decodes: DecodeRows
    full: NDArray[np.bool_]
    samples: list[tuple[Sequence, LiveSequence, int]]
    fed: tuple[Int64s, Int64s] = (NONE, NONE)
    stored: tuple[Int64s, Int64s] = (NONE, NONE)
    drafted: DraftedRows | None = None
    tokens: Int64s = field(default_factory=lambda: NONE)
    kernel_ns: int = 0

    def row_of(self) -> dict[Sequence, int]:
        """The row of logits of each sequence that gets a token in this step."""
        return {seq: i for i, seq in enumerate(self.decodes.members)} | {seq: row for seq, _, row in self.samples}

    def run(self, runner: ModelRunner, before: ModelStep | None) -> None:
        """Runs the step on the device, after the step `before`. ExecutorError if the device fails."""
        if self.out or self.into:
            runner.swap(self.out, self.into)
        if self.inputs is None:
            return
        if before is not None:
            rows, sources = self.fed
            self.inputs.ids[rows] = before.tokens[sources]
        if self.drafted is not None:
            self.drafted.begin(self.inputs, runner.block_size)
        tokens, times = runner.step(self.inputs, self.sampling)
        self.tokens, self.kernel_ns = np.array(tokens, dtype=np.int64), times.kernel_ns
        if self.drafted is not None:
            self.drafted.judge(self.inputs, self.tokens)

    def emit(self, eos: Int64s) -> list[Sequence]:
        """Appends the sampled tokens to their sequences, except ended ones; returns the sequences that are done, in
        batch order. `eos` are the end-of-sequence tokens."""
        decodes = self.decodes
        sampled, done = self.tokens[: len(decodes.members)], self.full
        for live, token in zip(decodes.lives, sampled.tolist(), strict=True):
            if not live.ended:
                live.generated.append(token)
        if decodes.listens.any():
            done = done | (decodes.listens & np.isin(sampled, eos))
        rows = np.flatnonzero(done).tolist()
        finished = [decodes.members[i] for i in rows if not decodes.lives[i].ended]
        if self.drafted is not None:
            finished += self.drafted.emit()
        for seq, live, row in self.samples:
            if live.ended:
                continue
            token = int(self.tokens[row])
            live.generated.append(token)
            if len(live.generated) >= live.target or (live.listens and token in eos):
                finished.append(seq)
        return self.batch.in_order(finished)


class DeviceThread:
    """The thread that runs steps behind the host, for a loop with at most one in flight while the next is launched."""

    def __init__(self, runner: ModelRunner, loop: EngineLoop) -> None:
        if (loop.kind, loop.depth, loop.stages) != ("batch_queue", 2, 1):
            raise CalibrationError(
                f"a loop {loop.kind} of {loop.depth} steps over {loop.stages} stages is only simulated: a model runs on"
                " one device, synchronously or by a batch_queue of 2. Choose another policy or mode."
            )
        self._runner = runner
        self._pool = ThreadPoolExecutor(1, "device", self._begin)

    def _begin(self) -> None:
        device = self._runner.device
        if device.index is not None:
            torch.cuda.set_device(device)  # each thread has a device of its own

    def launch(self, step: ModelStep, before: LaunchedModelStep | None) -> LaunchedModelStep:
        """Lets `step` run after `before`, if that is not over; returns at once."""
        return LaunchedModelStep(step, self._pool.submit(self._run, step, before))

    def _run(self, step: ModelStep, before: LaunchedModelStep | None) -> tuple[int, int]:
        start_ns = time.monotonic_ns()
        if before is not None:
            before.times.result()  # where that failed, this one fails
        step.run(self._runner, None if before is None else before.step)
        return start_ns, time.monotonic_ns()


@dataclass(frozen=True, slots=True)
class LaunchedModelStep:
    """A step that runs behind the host. `times`: its start and end by `time.monotonic_ns`, once it is over."""

    step: ModelStep
    times: Future[tuple[int, int]]
