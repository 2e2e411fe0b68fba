"""Checks that the executor computes correctly on this device: kernels against plain torch, and outputs that no
scheduling may change. It uses a small model, so that it takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from batchsim.base.errors import CalibrationError
from batchsim.calibrate.engine.backend import SdpaBackend
from batchsim.calibrate.engine.executor import TorchExecutor
from batchsim.calibrate.engine.inputs import StepInputs
from batchsim.calibrate.engine.prompts import RandomPrompts
from batchsim.calibrate.engine.runner import ModelRunner, build_runner
from batchsim.deployment.model import ModelSpec
from batchsim.drive.live import VirtualClock, live
from batchsim.kernel.batch import Batch, StepResult
from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_blocks import TableKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import Recorder
from batchsim.kernel.types import Arrival, Request
from batchsim.policies.families.preemptive import Preemptive, PreemptiveConfig
from tools.campaign.kernel_check import Heads, disagreement

SMALL = ModelSpec("selfcheck", "llama", 256, 4, 8, 2, 32, 704, 2048, 2048, dtype="float32")
HEADS = (Heads(32, 8, 128, 16), Heads(28, 4, 128, 16))  # the attention of Llama-3.1-8B and of Qwen2.5-7B
WORST_ERROR = 2e-2
"""Largest relative error of a row in bf16, whose own rounding is 4e-3 a number and adds up over a row."""

_TIE = 1e-3
"""Largest distance of the logits of tokens that tie, as a share of the spread of all.

Far above what another order of sums in fp32 changes, far below what a bug does.
"""

_REQUESTS = [(20 + 13 * i % 90, 6 + 7 * i % 40) for i in range(24)]  # prompt and output tokens
_MAX_MODEL_LEN = 160
_ROOMY, _TIGHT = 400, 26  # KV blocks that hold all requests at once, and only a few


def selfcheck(device: str) -> dict[str, Any]:
    """What was compared and the worst error found, as JSON values. CalibrationError if a check fails."""
    found: dict[str, Any] = {}
    if device == "cuda":
        found["worst_kernel_error"] = _check_kernels()
    reference, runner = _runner(device, "sdpa"), _runner(device, None)
    expected, _ = _answers(reference, {"by": "recompute"}, _ROOMY, one_by_one=True)
    for by in ("recompute", "swap"):
        answers, preempted = _answers(runner, {"by": by}, _TIGHT, one_by_one=False)
        others = [number for number in expected if answers[number] != expected[number]]
        wrong = [number for number in others if not _is_tie(reference, number, expected[number], answers[number])]
        if wrong or not preempted:
            raise CalibrationError(
                f"selfcheck on {device}: {len(wrong)} of {len(expected)} answers differ under preemption by {by}"
                f" ({preempted} preemptions). No measurement of this executor can be trusted."
            )
        found |= {f"preemptions_by_{by}": preempted, f"answers_equal_by_{by}": len(expected) - len(others)}
    return found | {"answers": len(expected), "graphs": len(runner.graph_buckets)}


def _check_kernels() -> float:
    """Largest relative error of a Triton kernel against plain torch, in bf16 at the heads of real models."""
    from batchsim.calibrate.engine.triton_backend import TritonBackend

    worst = 0.0
    for heads in HEADS:
        inputs = StepInputs.synthetic(
            [1, 17, 300, 2000] * 4,
            [(0, 700), (500, 33), (0, 1)],
            block_size=heads.block_size,
            num_blocks=2000,
            vocab_size=1000,
            seed=0,
        )
        errors = disagreement(
            TritonBackend(), SdpaBackend(), inputs, heads, device="cuda", dtype=torch.bfloat16, head_norms=True
        )
        for name, error in errors.items():
            if not error <= WORST_ERROR:  # NaN too
                raise CalibrationError(
                    f"selfcheck: kernel {name} is off by {error:.2g}, at most {WORST_ERROR:g} is rounding."
                    " No measurement of it can be trusted."
                )
            worst = max(worst, error)
    return worst


def _runner(device: str, backend: str | None) -> ModelRunner:
    return build_runner(
        SMALL,
        device=device,
        num_blocks=_ROOMY,
        num_swap_blocks=_ROOMY,
        max_num_seqs=len(_REQUESTS),
        max_num_batched_tokens=_MAX_MODEL_LEN,
        max_model_len=_MAX_MODEL_LEN,
        backend=backend,
        graphs=False if backend == "sdpa" else None,
    )


class _Keeping(TorchExecutor):
    """An executor that keeps the output of every request that finished."""

    answers: dict[int, list[int]]

    def execute(self, batch: Batch) -> StepResult:
        """Runs one step and keeps the outputs of the requests it finished."""
        result = super().execute(batch)
        self.answers |= {seq.request.id: self.tokens(seq) for seq in result.finished}
        return result


class _All:
    """A workload whose requests are all there from the start."""

    def arrivals(self) -> Iterator[Arrival]:
        """The requests in order."""
        for number in range(len(_REQUESTS)):
            yield _arrival(number)

    def responded(self, request: Request, now_ns: int) -> None:
        """None: no client waits for responses."""


def _arrival(number: int) -> Arrival:
    prompt, answer = _REQUESTS[number]
    return Arrival(Request(number, 0, prompt, answer), answer)


def _is_tie(reference: ModelRunner, number: int, expected: list[int], found: list[int]) -> bool:
    """Whether the first token of `found` that differs is as likely as the expected one, up to rounding."""
    if len(expected) != len(found):
        return False
    first = next(i for i, (ours, theirs) in enumerate(zip(expected, found, strict=True)) if ours != theirs)
    prompt = RandomPrompts(SMALL.vocab_size).ids(_arrival(number).request, {})
    ids = np.concatenate([prompt, np.array(expected[:first], np.int64)])
    positions = np.arange(len(ids))
    blocks = np.arange(1, 2 + len(ids) // reference.block_size, dtype=np.int32)
    inputs = StepInputs(
        ids=ids,
        positions=positions,
        slots=reference.block_size + positions,
        num_decode=0,
        chunk_lens=np.array([len(ids)], np.int32),
        seq_lens=np.array([len(ids)], np.int32),
        block_tables=blocks[None, :],
    )
    logits = reference.logits(inputs)[0]
    return abs(float(logits[expected[first]] - logits[found[first]])) <= _TIE * float(logits.std())


def _answers(
    runner: ModelRunner, knobs: dict[str, Any], num_blocks: int, *, one_by_one: bool
) -> tuple[dict[int, list[int]], int]:
    """(output tokens by request, preemptions) of all requests under preemptive batching with these knobs."""
    slots = 1 if one_by_one else len(_REQUESTS)
    swaps = num_blocks if knobs["by"] == "swap" else 0
    kv = TableKV(num_blocks, runner.block_size, swaps)
    executor = _Keeping(runner, kv, max_model_len=_MAX_MODEL_LEN)
    executor.answers = {}
    scheduler = Preemptive(
        PreemptiveConfig(max_num_seqs=slots, max_num_batched_tokens=64, victim="newest", watermark=0.0, **knobs),
        PolicyContext(kv, _MAX_MODEL_LEN),
    )
    core = EngineCore(scheduler, executor, Recorder(), max_model_len=_MAX_MODEL_LEN)
    if error := live(core, _All(), VirtualClock()).error:
        raise error
    return executor.answers, int(core.recorder.records().requests["num_preemptions"].sum())
