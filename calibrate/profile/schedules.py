"""Batches as schedulers make them, to hold out of the fit: sampled from simulated runs of lognormal requests.

The step costs in these runs are rough, in proportion to the work. They decide only which batches come about, and many
mixtures of decodes and chunks do under any cost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np

from batchsim.calibrate.profile.point_plan import StepRange, StepShape
from batchsim.cost.constant import Linear
from batchsim.drive.live import VirtualClock, live
from batchsim.kernel.batch import Batch, StepResult
from batchsim.kernel.core import EngineCore
from batchsim.kernel.engine_loop import SYNC, EngineLoop
from batchsim.kernel.kv_blocks import TableKV
from batchsim.kernel.protocols import PolicyContext, Scheduler
from batchsim.kernel.record import Recorder
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.policies.families.continuous import Continuous, ContinuousConfig
from batchsim.policies.families.static import Static, StaticConfig
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from batchsim.workload.build import BuiltWorkload, build_workload
from batchsim.workload.laws import LognormalTokens
from batchsim.workload.lengths import Lengths
from batchsim.workload.processes import PoissonArrivals
from batchsim.workload.workload_config import AllAtOnce, WorkloadConfig

_ROUGH = Linear(base=1_000_000, per_token=20_000, per_sequence=20_000, per_context_token=50)
_LOADS = (0.5, 1.0, 2.0)  # loads as shares of what the rough costs sustain, about
_SPARSE_BUSY, _SPARSE_OUTPUT = 0.3, 4  # share of an engine run in which it does not rest, about; tokens of an answer
_OPEN_SHARE = 0.25  # of the slots of an `open` run in use, about
_FIRST_PROMPTS_SHARE = 0.25  # most of an engine run that the prompts of its first requests take
_GENERATIONS = 3  # requests that end one after the other in a slot in an engine run, at the pace of short decodes
_LEAST_PROMPT, _LEAST_OUTPUT = 16, 8  # mean tokens where steps are so slow that no run is long enough
_LONGER = 1.5  # mean lengths of the runs held out over those of the others, where the run's time bounds them


@dataclass(frozen=True)
class Pace:
    """About how many seconds a step of decodes takes, and a token of a long prompt."""

    step_s: float
    token_s: float


class _Tap(SimExecutor):
    """A simulated executor that records the work of each batch."""

    def __init__(self, max_model_len: int) -> None:
        super().__init__(_ROUGH, max_model_len)
        self.seen: list[StepShape] = []

    def execute(self, batch: Batch) -> StepResult:
        """Records the batch and runs it."""
        decode = [seq.num_computed_tokens for seq in batch.decodes.members] if batch.decodes is not None else []
        chunks = [(seq.settled_computed_tokens, n) for seq, n in batch.chunks]
        self.seen.append(StepShape("H", tuple(decode), tuple(chunks)))
        return super().execute(batch)


def lengths(
    limits: StepRange, *, longer: bool = False, most_prompt: int | None = None, prompt: int = 512, output: int = 256
) -> Lengths:
    """Lengths that fit `limits`, with prompts of at most `most_prompt` tokens, and means of at most `prompt` and
    `output`.

    `longer` takes other means, for runs held out.
    """
    share = 5 if longer else 8
    most = limits.max_context // 2
    longest = max(min(most - 1, most_prompt or most), 2)
    prompt, output = min(prompt, limits.max_context // share, longest), min(output, limits.max_context // (share + 2))
    return Lengths(
        prompt=LognormalTokens(mean=max(prompt, 2), cv=1.0, max=longest),
        output=LognormalTokens(mean=max(output, 2), cv=0.8, max=max(limits.max_context - most - 1, 2)),
    )


def workload(config: WorkloadConfig, limits: StepRange, seed: int) -> BuiltWorkload:
    """The requests that `config` describes."""
    return build_workload(config, load={}, seed=seed, max_model_len=limits.max_context, base=Path())


def requests(
    kind: str, max_seqs: int, limits: StepRange, seed: int, seconds: float, pace: Pace, *, longer: bool
) -> BuiltWorkload:
    """Enough requests for an engine run of `kind` and `seconds` at about `pace`; caps are exact lengths.

    All arrive at time 0, so short that their prompts leave most of the run to decodes, and that they end and others
    take their place, as in service: what comes and goes costs the host time. Of kind `open` they come one by one over
    about `seconds`, such that a quarter of the slots are in use; of kind `sparse` too, with short outputs, so that the
    engine rests between them. Of kind `static` a batch of prompts, padded to one length, fits into a step.
    """
    if kind == "sparse":
        shape = lengths(limits, longer=longer, output=_SPARSE_OUTPUT)
        rate = _SPARSE_BUSY / (pace.step_s * (1 + _SPARSE_OUTPUT))
        arrivals, count = PoissonArrivals(mean_rate=rate), math.ceil(rate * seconds)
    elif kind == "open":
        shape = lengths(limits, longer=longer)
        rate = _OPEN_SHARE * max_seqs / (pace.step_s * shape.output.mean_tokens)
        arrivals, count = PoissonArrivals(mean_rate=rate), math.ceil(rate * seconds) + 1
    else:
        most_prompt = limits.max_tokens // max_seqs if kind == "static" else None
        part = seconds * (_LONGER if longer else 1.0)
        prompt = min(512, max(_LEAST_PROMPT, int(_FIRST_PROMPTS_SHARE * part / (max_seqs * pace.token_s))))
        output = min(256, max(_LEAST_OUTPUT, int(part / (_GENERATIONS * pace.step_s))))
        shape = lengths(limits, longer=longer, most_prompt=most_prompt, prompt=prompt, output=output)
        arrivals, count = AllAtOnce(), 8 * max_seqs + 32
    config = WorkloadConfig(arrivals=arrivals, output_cap="exact", lengths=shape, requests=count)
    return workload(config, limits, seed)


def scheduler(kind: str, max_seqs: int, limits: StepRange, kv: TableKV, *, loop: EngineLoop = SYNC) -> Scheduler:
    """The scheduler of a run of `kind`, `vllm` or `ahead` (vLLM too), `static` or else `continuous`, for an engine of
    `loop`, with the token budget of `limits`."""
    context = PolicyContext(kv, limits.max_context, loop=loop)
    if kind == "static":
        return Static(StaticConfig(max_seqs, wait_for_full=False), context)
    if kind in ("vllm", "ahead"):
        config = VllmConfig(
            enable_prefix_caching=False,
            async_scheduling=loop.is_ahead,
            max_num_seqs=max_seqs,
            max_num_batched_tokens=limits.max_tokens,
        )
        return Vllm(config, context)
    return Continuous(ContinuousConfig(max_seqs, limits.max_tokens), context)


def held_out_batches(limits: StepRange, block_size: int, count: int, seed: int) -> list[StepShape]:
    """Up to `count` different batches from simulated runs at low, high and too high load, in random order.

    Half of them, if there are that many, hold a chunk.
    """
    shape = lengths(limits)
    tokens = shape.prompt.mean_tokens + shape.output.mean_tokens
    service_s = tokens * (_ROUGH.per_token + _ROUGH.base / max(limits.max_seqs / 2, 1)) / 1e9
    seen: list[StepShape] = []
    for i, load in enumerate(_LOADS):
        config = WorkloadConfig(
            arrivals=PoissonArrivals(mean_rate=load / service_s),
            output_cap="exact",
            lengths=shape,
            requests=max(40, 3 * limits.max_seqs),
        )
        kv = TableKV(limits.kv_tokens // block_size, block_size)
        tap = _Tap(limits.max_context)
        core = EngineCore(
            scheduler("continuous", limits.max_seqs, limits, kv), tap, Recorder(), max_model_len=limits.max_context
        )
        live(core, workload(config, limits, seed + i), VirtualClock())
        seen += tap.seen
    return _spread([p for p in dict.fromkeys(seen) if p.fits(limits, block_size)], count, seed)


def _spread(batches: list[StepShape], count: int, seed: int) -> list[StepShape]:
    """`count` of `batches` in random order: half with chunks, and of all sizes alike, by doublings of their decodes."""
    random = np.random.default_rng(seed)
    shuffled = [batches[i] for i in random.permutation(len(batches))]
    chosen: list[StepShape] = []
    for with_chunks, most in ((True, count // 2), (False, count - count // 2)):
        by_size: dict[int, list[StepShape]] = {}
        for point in shuffled:
            if bool(point.chunks) is with_chunks:
                by_size.setdefault(len(point.decode).bit_length(), []).append(point)
        turns = zip_longest(*(by_size[size] for size in sorted(by_size)))
        chosen += [point for turn in turns for point in turn if point is not None][:most]
    return [chosen[i] for i in random.permutation(len(chosen))]
