"""Leaps that are timed first and done later: steps of decodes alike, of an engine that somebody may yet reach.

Other engines' events then need not end them: whoever comes to this one cuts the plan where it would have been let in.
The times of a plan's steps are computed at once, where the cost model can, as columns.
"""

from __future__ import annotations

from itertools import cycle, islice

import numpy as np
from numpy.typing import NDArray

from batchsim.base.units import MAX_TIME_NS
from batchsim.kernel.core import EngineCore
from batchsim.kernel.record import decode_rows
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Batch, Sequence

MOST_STEPS = 512
"""Steps of one plan: where it is cut, those behind were timed in vain."""
FEWEST_STEPS = 4
"""Steps that are worth a plan."""

Int = NDArray[np.int64]


class DecodesAhead:
    """The decode steps that repeat `batch`, the latest of its engine: what each takes, and the KV blocks left.

    `due` says who needs a block, step by step, round and round.
    """

    __slots__ = ("_batch", "_contexts", "_core", "_due", "_free_blocks", "duration_ns")

    def __init__(
        self, core: EngineCore, batch: Batch, due: list[dict[Sequence, None]], contexts: Int, duration_ns: Int
    ) -> None:
        self._core = core
        self._batch = batch
        self._due = due
        free, count = core.scheduler.kv.num_free, len(duration_ns)
        lengths = list(map(len, due))
        need = np.array(lengths * -(-count // len(lengths))).cumsum()
        if need[count - 1] > free:
            count = int(need.searchsorted(free, "right"))
        self._contexts = contexts[:count]
        self._free_blocks = free - need[:count]
        self.duration_ns = duration_ns[:count]

    def do(self, starts_ns: Int) -> None:
        """Does the first of the steps, those of which `starts_ns` says when they start."""
        core, batch, count, scheduler = self._core, self._batch, len(starts_ns), self._core.scheduler
        group, foreseeing = batch.decodes, core.foreseeing
        assert group is not None and foreseeing is not None, "of decodes, foreseen"
        due: list[Sequence] = []
        if int(self._free_blocks[count - 1]) < scheduler.kv.num_free:
            for each in islice(cycle(self._due), count):
                due += each
        core.recorder.step_rows += decode_rows(
            starts_ns,
            self.duration_ns[:count],
            self._contexts[:count],
            batch.num_decode,
            self._free_blocks[:count],
            scheduler.num_waiting,
            scheduler.num_running,
        )
        foreseeing.repeat_by(batch, count, due)
        group.advance_by(count)


def decodes_ahead(
    core: EngineCore, executor: SimExecutor, batch: Batch, at_most: int = MOST_STEPS
) -> DecodesAhead | None:
    """The steps that repeat `batch`, just executed or launched, and end nobody, as far as there are KV blocks and the
    cost model times them as one; None if there are but a few, or the scheduler does not foresee them."""
    foreseeing, group = core.foreseeing, batch.decodes
    if foreseeing is None or group is None or batch.chunks or not batch.num_decode or batch.num_passes:
        return None
    count = min(executor.quiet_steps(batch), at_most)
    if count < FEWEST_STEPS or batch.pad_decode_rows or (due := foreseeing.foreseen(batch)) is None:
        return None
    first, each = batch.context_tokens + batch.num_decode, batch.num_decode
    contexts = np.arange(first, first + count * each, each)
    duration_ns = executor.decode_times(batch, contexts)
    if duration_ns is None or len(duration_ns) < FEWEST_STEPS:
        return None
    found = DecodesAhead(core, batch, due, contexts[: len(duration_ns)], duration_ns)
    return found if len(found.duration_ns) else None


def _at_most(within_ns: float, step_ns: int) -> int:
    """How many steps of `step_ns`, and no shorter ones, may begin within so many ns."""
    return MOST_STEPS if within_ns > MOST_STEPS * step_ns else int(within_ns // step_ns) + 2


class PlannedLeap:
    """Steps that follow each other, the first of them at `start_ns`; none is done yet. `end_ns`: that of the last."""

    __slots__ = ("_starts_ns", "_steps", "end_ns")

    def __init__(self, steps: DecodesAhead, starts_ns: Int) -> None:
        self._steps = steps
        self._starts_ns = starts_ns
        self.end_ns = int(starts_ns[-1] + steps.duration_ns[len(starts_ns) - 1])

    def carry_out(self, until_ns: int | None = None) -> int:
        """Does the steps that start before `until_ns`, or all; returns the end in ns of the last of them, or of the
        step before them if there are none. Nothing is left of the plan then."""
        starts_ns = self._starts_ns
        count = len(starts_ns) if until_ns is None else int(np.searchsorted(starts_ns, until_ns))
        if not count:
            return int(starts_ns[0])
        self._steps.do(starts_ns[:count])
        return int(starts_ns[count - 1] + self._steps.duration_ns[count - 1])


def plan_leap(
    core: EngineCore, executor: SimExecutor, batch: Batch, end_ns: int, horizon_ns: float
) -> PlannedLeap | None:
    """The steps that repeat `batch`, the step just executed, which ends at `end_ns`, start before `horizon_ns` and end
    nobody; None if there are none, or too few to plan."""
    horizon_ns = min(horizon_ns, MAX_TIME_NS)
    if end_ns >= horizon_ns or core.in_flight.steps[-1].finished:
        return None
    steps = decodes_ahead(core, executor, batch, _at_most(horizon_ns - end_ns, executor.duration_ns(batch)))
    if steps is None:
        return None
    starts_ns = np.empty_like(steps.duration_ns)
    starts_ns[0] = 0
    np.cumsum(steps.duration_ns[:-1], out=starts_ns[1:])
    starts_ns += end_ns
    return PlannedLeap(steps, starts_ns[: np.searchsorted(starts_ns, int(horizon_ns))])


class PlannedAhead:
    """Steps of an engine that launches each while the one before it runs; none is launched yet.

    `called_ns`: when the step before the last has been processed and the scheduler is called. `end_ns`: when the host
    is through with the last launch.
    """

    __slots__ = ("_called_ns", "_core", "_launch_ns", "_now_ns", "_process_ns", "_starts_ns", "_steps", "end_ns")

    def __init__(
        self,
        core: EngineCore,
        steps: DecodesAhead,
        now_ns: int,
        called_ns: Int,
        starts_ns: Int,
        host_ns: tuple[int, int],
    ) -> None:
        self._core = core
        self._steps = steps
        self._now_ns = now_ns
        self._called_ns = called_ns
        self._starts_ns = starts_ns
        self._launch_ns, self._process_ns = host_ns
        self.end_ns = int(called_ns[-1]) + self._launch_ns

    def carry_out(self, until_ns: int | None = None) -> int:
        """Launches the steps whose scheduler is called before `until_ns`, or all; returns when the host is through with
        the last of these launches, or with that before them if there are none. Nothing is left of the plan then."""
        called_ns = self._called_ns
        count = len(called_ns) if until_ns is None else int(np.searchsorted(called_ns, until_ns))
        if not count:
            return self._now_ns
        core, called_ns, starts_ns = self._core, called_ns[:count], self._starts_ns[:count]
        oldest, latest = core.in_flight.steps
        before_ns, group = latest.end_ns, latest.batch.decodes
        assert group is not None, "of decodes"
        core.recorder.launched_on(called_ns, called_ns + self._launch_ns, (oldest.wasted_tokens, latest.wasted_tokens))
        self._steps.do(starts_ns)
        ends_ns = starts_ns[-2:] + self._steps.duration_ns[max(count - 2, 0) : count]
        oldest.end_ns = int(ends_ns[0]) if count > 1 else before_ns
        oldest.process_ns = self._process_ns if count > 1 else latest.process_ns
        oldest.wasted_tokens = latest.wasted_tokens if count == 1 else 0
        latest.end_ns, latest.process_ns, latest.wasted_tokens = int(ends_ns[-1]), self._process_ns, 0
        core.in_flight.leapt(group.step)
        return int(called_ns[-1]) + self._launch_ns


def plan_ahead(
    core: EngineCore, executor: SimExecutor, batch: Batch, now_ns: int, horizon_ns: float
) -> PlannedAhead | None:
    """The steps that repeat `batch`, which an engine that is ahead has launched, the host through with it at `now_ns`,
    while the one before it is in flight, as far as they are launched before `horizon_ns` and end nobody; None if there
    are none, or too few to plan."""
    flight, recorder = core.in_flight.steps, core.recorder
    if len(flight) != 2 or core.tells_tokens or recorder.num_processed < 0 or core.has_arrivals:
        return None
    oldest, latest = flight
    if oldest.finished or latest.finished or oldest.batch.chunks or oldest.batch.decodes is not batch.decodes:
        return None
    first_ns = max(now_ns, oldest.end_ns) + oldest.process_ns
    host_ns = launch_ns, process_ns = executor.host_ns(batch)
    last_ns = int(min(horizon_ns, MAX_TIME_NS)) - launch_ns
    if first_ns >= last_ns or latest.landing is not None:
        return None
    steps = decodes_ahead(core, executor, batch, _at_most(last_ns - first_ns, executor.duration_ns(batch)))
    if steps is None:
        return None
    duration_ns = steps.duration_ns
    starts_ns, called_ns = np.empty_like(duration_ns), np.empty_like(duration_ns)
    called_ns[0] = first_ns
    starts_ns[0] = start_ns = max(first_ns + launch_ns, latest.end_ns)
    if len(starts_ns) > 1:
        called_ns[1] = start_ns + latest.process_ns
        starts_ns[1] = max(start_ns + latest.process_ns + launch_ns, start_ns + int(duration_ns[0]))
        # A step is launched as the results of the one before the last are processed, and begins behind the last one.
        starts_ns[2:] = np.maximum(duration_ns[1:-1], launch_ns + process_ns)
        np.cumsum(starts_ns[1:], out=starts_ns[1:])
        called_ns[2:] = starts_ns[1:-1] + process_ns
    count = int(np.searchsorted(called_ns, last_ns))
    return PlannedAhead(core, steps, now_ns, called_ns[:count], starts_ns[:count], host_ns)
