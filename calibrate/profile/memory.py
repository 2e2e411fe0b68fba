"""How many KV blocks a device has room for beside the model and its largest step, and what moving blocks costs."""

from __future__ import annotations

import gc
import statistics

import numpy as np
import torch

from batchsim.base.errors import CalibrationError
from batchsim.calibrate.engine.backend import SPARE_BLOCKS
from batchsim.calibrate.engine.runner import ModelRunner
from batchsim.calibrate.profile.fit import robust_nnls, short
from batchsim.calibrate.profile.point_plan import StepRange, StepShape, even_chunks
from batchsim.cost.profile import SwapCost

UTILISATION = 0.90
"""Share of the card's memory that an engine takes; vLLM's default."""
_SWAP_REPEATS = 7


def largest_steps(limits: StepRange) -> list[StepShape]:
    """The steps that need most memory beside KV: the most tokens, and the most rows of logits with as many tokens."""
    count = -(-limits.max_tokens // limits.max_context)
    decodes = limits.max_seqs - 1
    steps = [StepShape("C", (), even_chunks(limits.max_tokens, count))]
    if 0 < decodes < limits.max_tokens:
        n = min(limits.max_tokens - decodes, limits.max_context)
        steps.append(StepShape("E", (1,) * decodes, ((0, n),)))
    return steps


def blocks_of_largest_steps(limits: StepRange, block_size: int) -> int:
    """KV blocks enough for `largest_steps` and for one sequence of the longest context."""
    most = max(sum(-(-n // block_size) for n in point.lengths()) for point in largest_steps(limits))
    return max(most, -(-limits.max_context // block_size))


def give_back() -> None:
    """Returns to the device the memory of runners that no longer exist."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measured_blocks(runner: ModelRunner, limits: StepRange) -> tuple[int, str]:
    """KV blocks that fill UTILISATION of the card's memory, and the sum they come from in words.

    `runner` is on CUDA and has a small pool. Counted beside KV: all that the process holds now but the small pool,
    graphs included, what its largest step takes on top, and what lies outside torch. CalibrationError, saying what is
    missing, if not one sequence fits.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    block_bytes = runner.block_size * runner.spec.kv_bytes_per_token
    pool_bytes = (runner.num_blocks + SPARE_BLOCKS) * block_bytes
    torch.cuda.reset_peak_memory_stats()
    for point in largest_steps(limits):
        run_once(runner, point)
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    outside_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved()
    peak_bytes = torch.cuda.max_memory_reserved() - pool_bytes
    room = int(total_bytes * UTILISATION) - peak_bytes - outside_bytes
    terms = (
        f"{total_bytes / 1e9:.1f} GB × {UTILISATION:.2f} − {peak_bytes / 1e9:.1f} weights, graphs and largest step"
        f" − {outside_bytes / 1e9:.1f} outside torch"
    )
    needed = -(-limits.max_context // runner.block_size)
    if room // block_bytes < needed:
        short = (needed * block_bytes - room) / 1e9
        raise CalibrationError(
            f"{runner.spec.name}: {short:.1f} GB short of one sequence's KV: {terms}. Lower the hull."
        )
    return room // block_bytes - 1, terms  # one block more is the padding's


def run_full(runner: ModelRunner, limits: StepRange) -> None:
    """Runs the largest steps, and decodes that fill every KV block. ExecutorError if the device has no room."""
    for point in largest_steps(limits):
        run_once(runner, point)
    each = min(limits.max_context // runner.block_size, max(1, runner.num_blocks // limits.max_seqs))
    decodes = min(limits.max_seqs, runner.num_blocks // each)
    run_once(runner, StepShape("A", (each * runner.block_size - 1,) * decodes))


def run_once(runner: ModelRunner, point: StepShape) -> None:
    """Runs one whole step of `point`."""
    runner.step(runner.synthetic(point.decode, point.chunks))


def measured_swap(runner: ModelRunner) -> SwapCost | None:
    """The measured cost of moving KV blocks over the host link, both ways; None without swap slots.

    Blocks are scattered in the device's pool, as they are after some time of running.
    """
    most = min(runner.num_swap_blocks, runner.num_blocks)
    if most < 1:
        return None
    blocks = np.random.default_rng(0).permutation(runner.num_blocks)[:most] + 1
    pairs = [(int(block), slot) for slot, block in enumerate(blocks)]
    sizes = sorted({n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if n <= most} | {most})
    counts: list[float] = []
    times: list[float] = []
    for n in sizes:
        out, back = pairs[:n], [(slot, block) for block, slot in pairs[:n]]
        runner.swap(out, [])
        runner.swap([], back)
        for moved in ((out, []), ([], back)):
            counts.append(n)
            times.append(statistics.median(runner.swap(*moved) for _ in range(_SWAP_REPEATS)))
    a = np.stack([np.ones(len(counts)), np.array(counts)], axis=1)
    base, per_block = robust_nnls(a, np.array(times))
    return SwapCost(base=short(base), per_block=short(per_block), assumed=False)
