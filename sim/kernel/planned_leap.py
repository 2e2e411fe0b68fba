"""A leap of an engine that somebody may yet reach: steps alike are timed first, and done once nobody can come between.

Other engines' events then need not end it: whoever comes to this one cuts the plan at the next boundary of a step.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import cycle, islice

from batchsim.base.units import MAX_TIME_NS
from batchsim.kernel.core import EngineCore
from batchsim.kernel.record import pack_decodes
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Batch, Sequence

MOST_STEPS = 256
"""Steps of one plan: where it is cut, those behind were timed in vain."""


class PlannedLeap:
    """Steps like `batch`, which was just executed: when each starts, how long it takes; none is done yet.

    `free_blocks` are the KV blocks left beside each; `due` says who needs one, step by step, round and round.
    """

    __slots__ = ("_batch", "_core", "_due", "_durations_ns", "_free_blocks", "_starts_ns", "end_ns")

    def __init__(
        self,
        core: EngineCore,
        batch: Batch,
        due: list[dict[Sequence, None]],
        starts_ns: list[int],
        durations_ns: list[int],
        free_blocks: list[int],
    ) -> None:
        self._core = core
        self._batch = batch
        self._due = due
        self._starts_ns = starts_ns
        self._durations_ns = durations_ns
        self._free_blocks = free_blocks
        self.end_ns = starts_ns[-1] + durations_ns[-1]

    def carry_out(self, until_ns: int | None = None) -> int:
        """Does the steps that start before `until_ns`, or all; returns the end in ns of the last of them, or of the
        step that `batch` was if there are none. Nothing is left of the plan then."""
        starts_ns = self._starts_ns
        count = len(starts_ns) if until_ns is None else bisect_left(starts_ns, until_ns)
        if not count:
            return starts_ns[0]
        core, batch, scheduler = self._core, self._batch, self._core.scheduler
        group, foreseeing, rows, pack = batch.decodes, core.foreseeing, core.recorder.step_rows, pack_decodes
        assert group is not None and foreseeing is not None, "of decodes, foreseen"
        num_decode, context, free = batch.num_decode, batch.context_tokens, scheduler.kv.num_free
        waiting, running = scheduler.num_waiting, scheduler.num_running
        planned = zip(starts_ns, self._durations_ns, self._free_blocks, strict=True)
        for start_ns, duration_ns, left in islice(planned, count):
            context += num_decode
            rows += pack(start_ns, duration_ns, context, num_decode, num_decode, left, waiting, running)
        due: list[Sequence] = []
        if self._free_blocks[count - 1] < free:
            for each in islice(cycle(self._due), count):
                due += each
        foreseeing.repeat_by(batch, count, due)
        group.advance_by(count)
        return starts_ns[count - 1] + self._durations_ns[count - 1]


def plan_leap(
    core: EngineCore, executor: SimExecutor, batch: Batch, end_ns: int, horizon_ns: float
) -> PlannedLeap | None:
    """The steps that repeat `batch`, the step just executed, which ends at `end_ns`, start before `horizon_ns` and end
    nobody, as far as there are KV blocks; None if there are none, or if the scheduler does not foresee them."""
    foreseeing, group = core.foreseeing, batch.decodes
    if foreseeing is None or group is None or batch.chunks or not batch.num_decode:
        return None
    quiet, horizon_ns = executor.quiet_steps(batch), min(horizon_ns, MAX_TIME_NS)
    if not quiet or end_ns >= horizon_ns or core.in_flight.steps[-1].finished:
        return None
    if batch.pad_decode_rows or batch.num_passes or (due := foreseeing.foreseen(batch)) is None:
        return None
    line = executor.decode_line(batch)
    alone_ns, token_ns = (0.0, 0.0) if line is None else line
    free, context, num_decode = core.scheduler.kv.num_free, batch.context_tokens, batch.num_decode
    joined, left = batch.joined, batch.left
    starts_ns, durations_ns, free_blocks = list[int](), list[int](), list[int]()
    for each in islice(cycle(due), min(quiet, MOST_STEPS)):
        free -= len(each)
        if free < 0 or end_ns >= horizon_ns:
            break
        if line is None:
            batch.again()
            duration_ns = executor.duration_ns(batch)
            group.advance()
        else:
            context += num_decode
            duration_ns = int(alone_ns + token_ns * context)
        starts_ns.append(end_ns)
        durations_ns.append(duration_ns)
        free_blocks.append(free)
        end_ns += duration_ns
    if line is None:  # the cost model reads batch and group, which are set back
        batch.again_by(-len(starts_ns))
        group.advance_by(-len(starts_ns))
        batch.joined, batch.left = joined, left
    return PlannedLeap(core, batch, due, starts_ns, durations_ns, free_blocks) if starts_ns else None
