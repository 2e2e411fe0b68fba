"""Leaps of an engine that waits for each step, over steps alike: the same rows as stepping would write.

1. A leap begins behind a step of decodes alone, and repeats it as long as the scheduler does. Where all running
   sequences decode once the prompts of a step are computed, the scheduler is called for them within the leap.
2. Where the scheduler foresees its steps (`protocols.Foreseeing`) and the cost is a line in the context, they are
   written without asking either (`_leap_along`), up to the one that finishes a sequence.
3. The results of that one are delivered within the leap if the queue is empty and every running sequence decodes: the
   next step is of the others. A leap that can go no further then has left no step in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, cycle, islice
from math import floor, inf

from batchsim.base.units import MAX_TIME_NS
from batchsim.kernel.acceptance import outcome
from batchsim.kernel.batch import Batch, check_end
from batchsim.kernel.core import EngineCore
from batchsim.kernel.draft_group import DraftGroup
from batchsim.kernel.events import EngineEvent
from batchsim.kernel.in_flight import LaunchedStep
from batchsim.kernel.protocols import Pads
from batchsim.kernel.record import PACK_BYTES, STEP_DTYPE, pack_decodes, pack_step, pack_two, put_windows
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import DecodeGroup

Tell = Callable[[list[EngineEvent], int], None]
"""Passes on what happened, at a time in ns."""

ROW_BYTES = STEP_DTYPE.itemsize


def leap(
    core: EngineCore,
    executor: SimExecutor,
    batch: Batch,
    end_ns: int,
    horizon: Callable[[], float],
    tell: Tell | None = None,
    drains: Callable[[], bool] | None = None,
) -> int:
    """Repeats `batch`, the step just executed, which ends at `end_ns`, while the next would start before the `horizon`,
    in ns. Returns the end of the last step in ns.

    `tell` passes on the events of steps that finish sequences or prompts; None: the leap ends before such a step.
    `drains` returns whether to drain as the scheduler is called behind prompts (None: never).
    """
    step, group = core.in_flight.steps[-1], batch.decodes
    if group is None or end_ns >= (horizon_ns := min(horizon(), MAX_TIME_NS)):
        return end_ns
    if batch.chunks:
        decodes = _decodes_behind(core, step, end_ns, horizon, tell, drains)
        if decodes is None:
            return end_ns
        batch, step, horizon_ns = decodes, LaunchedStep(decodes, [], end_ns), min(horizon(), MAX_TIME_NS)
        count, end_ns = _leap_along(core, executor, step, group, end_ns, horizon_ns, to_ends=True, is_next=True)
        if not count:
            return leap(core, executor, batch, core.execute(batch, end_ns), horizon, tell, drains)
        core.in_flight.steps.append(step)
    elif step.finished or not batch.num_decode:
        return end_ns
    elif isinstance(group, DraftGroup):
        return _leap_drafts(core, executor, batch, group, end_ns, horizon_ns)
    else:
        _, end_ns = _leap_along(core, executor, step, group, end_ns, horizon_ns, to_ends=tell is not None)
    end_ns = _leap_on(core, executor, step, group, end_ns, horizon_ns, to_ends=tell is not None)
    while step.finished:
        if tell is None or end_ns >= horizon_ns or not _leaves_decodes(core, step):
            return end_ns
        events = core.complete(end_ns)
        tell(events, end_ns)
        horizon_ns = min(horizon(), MAX_TIME_NS)
        if core.has_arrivals:
            return end_ns
        if len(core.recorder.step_rows) > PACK_BYTES:
            core.recorder.pack_steps()
        batch.regroup()
        count, end_ns = _leap_along(core, executor, step, group, end_ns, horizon_ns, to_ends=True)
        if not count:
            return end_ns
        core.in_flight.steps.append(step)
        end_ns = _leap_on(core, executor, step, group, end_ns, horizon_ns, to_ends=True)
    if end_ns < horizon_ns:
        return _leap_one_by_one(core, executor, batch, group, end_ns, horizon_ns)
    return end_ns


def _decodes_behind(
    core: EngineCore,
    step: LaunchedStep,
    end_ns: int,
    horizon: Callable[[], float],
    tell: Tell | None,
    drains: Callable[[], bool] | None,
) -> Batch | None:
    """Delivers `step`, with which prompts end, and returns the decodes that follow, scheduled and not executed; None if
    something else may come before, in which case `step` may be delivered."""
    if tell is None or not _leaves_decodes(core, step):
        return None
    events = core.complete(end_ns)
    if events:
        tell(events, end_ns)
        if core.has_arrivals or end_ns >= horizon() or not core.scheduler.num_running:
            return None  # all that were left may have been handed over
    decodes = core.schedule(end_ns, drains is not None and drains())
    assert type(decodes) is Batch, decodes
    return decodes


def _leaves_decodes(core: EngineCore, step: LaunchedStep) -> bool:
    """Whether the sequences that `step` does not finish all decode in the next step, once `step` is delivered."""
    scheduler, batch = core.scheduler, step.batch
    if not core.foresees_ends or scheduler.num_waiting or core.tells_tokens:
        return False
    return len(step.finished) < batch.num_decode + len(batch.sampled) == scheduler.num_running


def _leap_along(
    core: EngineCore,
    executor: SimExecutor,
    step: LaunchedStep,
    group: DecodeGroup,
    end_ns: int,
    horizon_ns: float,
    *,
    to_ends: bool,
    is_next: bool = False,
) -> tuple[int, int]:
    """As `leap`, of steps like `step` that the scheduler foresees and whose costs are on a line; with `to_ends` up to
    the first one that finishes sequences, which `step` has then. Returns (number of steps, end of the last in ns).

    `is_next`: `step` was only scheduled, and is the first of them."""
    batch, foreseeing, scheduler, rows = step.batch, core.foreseeing, core.scheduler, core.recorder.step_rows
    line = None if foreseeing is None else executor.decode_line(batch)
    if foreseeing is None or line is None or (due := foreseeing.foreseen(batch)) is None:
        return 0, end_ns
    alone_ns, token_ns, last = line
    windowed = None if group.windowed is None else (group.windowed.tokens, group.windowed.below)
    num_decode, context, free = batch.num_decode, batch.context_tokens, scheduler.kv.num_free
    turns: Iterator[int] = cycle(due)
    if is_next:
        executor.join(batch)
        next(turns)
        context, turns = context - num_decode, chain((0,), turns)  # the KV blocks of the first one are taken
    decodes, queues = pack_two(num_decode, num_decode), pack_two(scheduler.num_waiting, scheduler.num_running)
    quiet, begun, begun_ns, free_before = executor.quiet_steps(batch), len(rows), end_ns, free
    most = quiet + to_ends
    if last != inf:
        most = min(most, int((last - context) // num_decode))
    for blocks in islice(turns, most):
        if end_ns >= horizon_ns or blocks > free:
            break
        free -= blocks
        context += num_decode
        begun_ns, duration_ns = end_ns, floor(alone_ns + token_ns * context)
        rows += pack_decodes(begun_ns, duration_ns, context, decodes, free, queues)
        end_ns = begun_ns + duration_ns
    count = (len(rows) - begun) // ROW_BYTES
    if windowed is not None and count:
        put_windows(rows, begun, *windowed)
    repeats = count - is_next
    foreseeing.repeat_by(batch, repeats, group.members_due_over(repeats, int(is_next)) if free < free_before else [])
    group.advance_by(count)
    batch.group_step = group.step
    step.finished = []
    if count > quiet:
        check_end(end_ns, end_ns - begun_ns)
        step.finished = executor.finish(batch)
    return count, end_ns


def _leap_on(
    core: EngineCore,
    executor: SimExecutor,
    step: LaunchedStep,
    group: DecodeGroup,
    end_ns: int,
    horizon_ns: float,
    *,
    to_ends: bool,
) -> int:
    """Repeats `_leap_along` where layers with a window are timed: with each member whose context fills the window,
    steps cost by another line, and another run of them begins."""
    count = int(group.windowed is not None)
    while count and not step.finished and end_ns < horizon_ns:
        count, end_ns = _leap_along(core, executor, step, group, end_ns, horizon_ns, to_ends=to_ends)
    return end_ns


def _leap_one_by_one(
    core: EngineCore, executor: SimExecutor, batch: Batch, group: DecodeGroup, end_ns: int, horizon_ns: float
) -> int:
    """As `leap`, of any scheduler's steps, up to the first one that finishes a sequence."""
    quiet, scheduler = executor.quiet_steps(batch), core.scheduler
    repeat: Callable[[Batch, int], bool] = scheduler.repeat
    step_ns: Callable[[Batch], int] = executor.duration_ns
    kv, advance, rows, pack = scheduler.kv, group.advance, core.recorder.step_rows, pack_step
    num_decode, pads = batch.num_decode, executor.pads
    if pads is not None:
        repeat, step_ns = _padding(executor, pads, repeat)
    waiting, running = scheduler.num_waiting, scheduler.num_running
    decodes, queues = pack_two(num_decode, num_decode), pack_two(waiting, running)
    has_padding = pads is not None or batch.pad_decode_rows or batch.pad_context_tokens
    is_plain = group.windowed is None and not (has_padding or batch.num_passes)
    while quiet and end_ns < horizon_ns and repeat(batch, end_ns):
        quiet -= 1
        duration_ns = step_ns(batch)
        advance()
        # Unrolled here, without the columns that are 0, because a leap is little else than these lines.
        if is_plain:
            rows += pack_decodes(end_ns, duration_ns, batch.context_tokens, decodes, kv.num_free, queues)
        else:
            rows += pack(
                end_ns, duration_ns, batch.context_tokens, 0, batch.pad_context_tokens, num_decode,
                num_decode, 0, 0, 0, 0, 0, 0, batch.pad_decode_rows, 0, 0, kv.num_free, waiting, running, 0,
                batch.num_passes, batch.num_wide_passes, batch.window_tokens, 0,
            )  # fmt: skip
        end_ns += duration_ns
    return end_ns


def _padding(
    executor: SimExecutor, pads: Pads, repeat: Callable[[Batch, int], bool]
) -> tuple[Callable[[Batch, int], bool], Callable[[Batch], int]]:
    """`repeat` and the durations of steps in compiled shapes, each padded to its own program."""

    def repeat_real(batch: Batch, now_ns: int) -> bool:
        pads.unpad(batch)
        return repeat(batch, now_ns)

    def padded_ns(batch: Batch) -> int:
        waited_ns = pads.pad(batch)
        return waited_ns + executor.duration_ns(batch)

    return repeat_real, padded_ns


def _leap_drafts(
    core: EngineCore,
    executor: SimExecutor,
    batch: Batch,
    group: DraftGroup,
    end_ns: int,
    horizon_ns: float,
) -> int:
    """`leap` over steps in which the members of `group` verify drafts: alike but for what each gains."""
    quiet, scheduler = executor.quiet_steps(batch), core.scheduler
    drafting, luck = batch.drafting, executor.luck
    if drafting is None or drafting.padding or luck is None or core.tells_tokens:
        return end_ns
    kv, repeat, step_ns, verify = scheduler.kv, scheduler.repeat, executor.duration_ns, group.verify
    rows, pack = core.recorder.step_rows, pack_step
    num_decode, num_rows = batch.num_decode, batch.num_decode_tokens
    passes, wide = batch.num_passes, batch.num_wide_passes
    waiting, running = scheduler.num_waiting, scheduler.num_running
    while quiet and end_ns < horizon_ns and repeat(batch, end_ns):
        quiet -= 1
        verified, _ = outcome(luck, group)
        duration_ns = step_ns(batch)
        verify(drafting, verified, ahead=False)
        rows += pack(
            end_ns, duration_ns, batch.context_tokens, 0, batch.pad_context_tokens, num_decode, num_rows,
            verified.num_accepted, 0, 0, 0, 0, 0, 0, 0, 0, kv.num_free, waiting, running, 0, passes, wide,
            batch.window_tokens, 0,
        )  # fmt: skip
        end_ns += duration_ns
    batch.group_step = group.step
    return end_ns


def quiet_until_ns(core: EngineCore, executor: SimExecutor, now_ns: int) -> int | None:
    """Lower bound in ns on the next event that other processes can observe, assuming no new arrival; None if unknown.
    `now_ns`: the end of the latest step, or of its launch for an engine ahead of results.

    The bound is as late as the cost model's `decode_line` allows without simulating the steps.
    """
    steps, foreseeing = core.in_flight.steps, core.foreseeing
    if not steps or foreseeing is None or core.has_arrivals or core.tells_tokens:
        return None
    latest, timer_ns, is_ahead = steps[-1], core.next_timer_ns, core.loop.is_ahead
    batch, latest_ns = latest.batch, now_ns
    if latest.finished or batch.decodes is None:
        return None
    if is_ahead:
        if not _is_quiet(core):
            return None
        latest_ns = latest.end_ns
    if batch.chunks:
        steady = core.steady
        if not is_ahead or steady is None or not steady.is_followed_by_decodes(batch):
            return None
        until_ns = latest_ns
    else:
        line = executor.decode_line(batch)
        if line is None or (count := _most_steps(core, executor, batch, line[2])) <= 0:
            return None
        alone_ns, token_ns, _ = line
        context, num_decode = batch.context_tokens, batch.num_decode
        work_ns = count * (alone_ns + token_ns * context) + token_ns * num_decode * (count * (count + 1) // 2)
        if alone_ns != int(alone_ns) or token_ns != int(token_ns):
            work_ns -= count  # each step is rounded down
        until_ns = latest_ns + int(work_ns)
        if is_ahead:
            until_ns = max(until_ns, now_ns + (count - 1) * sum(executor.host_ns(batch)))
    return min(until_ns, MAX_TIME_NS if timer_ns is None else timer_ns)


def _most_steps(core: EngineCore, executor: SimExecutor, batch: Batch, last: float) -> int:
    """Number of steps like `batch` that are certain: up to the first one that finishes a sequence, while the total
    context is at most `last` tokens, and as long as there are KV blocks."""
    foreseeing, count = core.foreseeing, executor.quiet_steps(batch) + 1
    if foreseeing is None or (due := foreseeing.foreseen(batch)) is None:
        return 0
    if (last - batch.context_tokens) / batch.num_decode < count:
        count = int((last - batch.context_tokens) // batch.num_decode)
    free = core.scheduler.kv.num_free
    if free < count * batch.num_decode and (taken := sum(due)):  # KV blocks in a turn of all
        count = min(count, free // taken * len(due))
    return count


def _is_quiet(core: EngineCore) -> bool:
    """Whether two steps are in flight and the older one finishes no sequence and delivers no token that a client or a
    driver waits for."""
    steps = core.in_flight.steps
    if len(steps) != 2 or steps[1].landing is not None:
        return False
    oldest, latest = steps
    if oldest.finished:
        return False
    if oldest.batch.chunks or latest.batch.chunks:
        return not core.scheduler.num_waiting and core.journal.first_tokens is None
    return oldest.batch.decodes is latest.batch.decodes
