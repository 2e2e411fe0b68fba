"""Leaps of a simulation over steps alike, into which nothing can fall: the same rows as stepping would write."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, cycle
from math import inf

from batchsim.base.units import MAX_TIME_NS
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import EngineEvent
from batchsim.kernel.record import pack_decodes, pack_lane, pack_step
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Batch, Sequence

Tell = Callable[[list[EngineEvent], int], None]
"""Passes on what happened, at a time in ns."""


def leap(core: EngineCore, executor: SimExecutor, batch: Batch, end_ns: int, horizon_ns: float) -> int:
    """Repeats `batch`, the step just executed, which ends at `end_ns`, while the next would start before `horizon_ns`
    and ends nobody.

    Writes the same rows as stepping would. Returns the end of the last step in ns.
    """
    group, scheduler = batch.decodes, core.scheduler
    if group is None or batch.chunks or core.in_flight.steps[-1].finished or not batch.num_decode:
        return end_ns
    quiet = executor.quiet_steps(batch)
    horizon_ns = min(horizon_ns, MAX_TIME_NS)
    if not quiet or end_ns >= horizon_ns:
        return end_ns
    kv, repeat, step_ns, advance = scheduler.kv, scheduler.repeat, executor.duration_ns, group.advance
    rows, pack = core.recorder.step_rows, pack_step
    num_decode, pad_rows = batch.num_decode, batch.pad_decode_rows
    passes, wide = batch.num_passes, batch.num_wide_passes
    waiting, running = scheduler.num_waiting, scheduler.num_running
    while quiet and end_ns < horizon_ns and repeat(batch, end_ns):
        quiet -= 1
        duration_ns = step_ns(batch)
        advance()
        # Columns in the order of STEP_COLUMNS; unrolled here because a leap is little else than this line.
        rows += pack(
            end_ns, duration_ns, batch.context_tokens, 0, batch.pad_context_tokens, num_decode,
            num_decode, 0, 0, 0, 0, 0, 0, pad_rows, 0, 0, kv.num_free, waiting, running, 0, passes, wide,
        )  # fmt: skip
        end_ns += duration_ns
    return end_ns


def quiet_until_ns(core: EngineCore, executor: SimExecutor, now_ns: int) -> int | None:
    """A time in ns before which nobody outside hears of the engine, if nobody comes to it: its steps repeat the latest,
    and nobody ends. None if that is not known. `now_ns`: the end of the latest step, or of its launch by an engine that
    is ahead.

    It is as late as can be told without simulating the steps, by the line on which the cost model says that they lie.
    """
    steps, foreseeing = core.in_flight.steps, core.foreseeing
    if foreseeing is None or core.has_arrivals or core.tells_tokens:
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
    """How many steps like `batch` are certain: up to the first one that ends somebody, while the total context in
    tokens is no more than `last`, and as long as there are KV blocks."""
    foreseeing, count = core.foreseeing, executor.quiet_steps(batch) + 1
    if foreseeing is None or (due := foreseeing.foreseen(batch)) is None:
        return 0
    if (last - batch.context_tokens) / batch.num_decode < count:
        count = int((last - batch.context_tokens) // batch.num_decode)
    free = core.scheduler.kv.num_free
    if free < count * batch.num_decode and (taken := sum(map(len, due))):  # KV blocks in a turn of all
        count = min(count, free // taken * len(due))
    return count


def _is_quiet(core: EngineCore) -> bool:
    """Whether two steps are in flight, and the older one ends nobody and gives nobody a token who waits for it."""
    steps = core.in_flight.steps
    if len(steps) != 2 or steps[1].landing is not None:
        return False
    oldest, latest = steps
    if oldest.finished:
        return False
    if oldest.batch.chunks or latest.batch.chunks:
        return not core.scheduler.num_waiting and core.journal.first_tokens is None
    return oldest.batch.decodes is latest.batch.decodes


def leap_ahead(
    core: EngineCore,
    executor: SimExecutor,
    batch: Batch,
    now_ns: int,
    horizon: Callable[[], float],
    tell: Tell | None,
    drains: Callable[[], bool] | None,
) -> int:
    """As `leap`, of an engine that has just launched `batch` at `now_ns` while the step before it is in flight: as
    long as the host is through with launches before the `horizon`, in ns.

    Where nobody waits, the oldest step may have prompts, or end somebody and `tell` of it (None: it may not): it lands,
    even if the scheduler then has to be asked, so that one step is in flight. Where the last prompts end with `batch`
    the scheduler is asked for the decodes that follow; `drains`: whether to drain then (None: it is not to).
    Returns until when the host was at work, in ns.
    """
    flight, group, scheduler = core.in_flight, batch.decodes, core.scheduler
    steps = flight.steps
    if len(steps) != 2 or group is None or core.tells_tokens:
        return now_ns
    # What came during the launch enters next.
    if core.has_arrivals or steps[1].landing is not None:
        return now_ns
    if batch.chunks:
        now_ns = _decode_on(core, executor, batch, now_ns, horizon, tell, drains)
        if steps[-1].batch is batch:
            return now_ns
        batch = steps[-1].batch
    elif not batch.num_decode:
        return now_ns
    horizon_ns = _last_call_ns(executor, batch, horizon)
    while True:
        oldest, latest = steps
        called_ns = max(now_ns, oldest.end_ns) + oldest.process_ns
        if called_ns >= horizon_ns or (latest.finished and _ends_by_length(core, latest.finished)):
            return now_ns
        finished = oldest.finished
        if finished or oldest.batch.chunks:
            if scheduler.num_waiting or (finished and tell is None):
                return now_ns
            if all(map(finished.__contains__, group.members)):  # nobody is left to go on
                return now_ns
            now_ns = called_ns
            events = core.complete(now_ns)
            if events:
                assert tell is not None, events
                tell(events, now_ns)
                horizon_ns = _last_call_ns(executor, batch, horizon)
                if now_ns >= horizon_ns or core.has_arrivals:
                    return now_ns
            batch.regroup()
            if not scheduler.repeat(batch, now_ns):
                return now_ns
            flight.stand_in(oldest, group)
        elif oldest.batch.decodes is not group or not scheduler.repeat(batch, called_ns):
            return now_ns
        now_ns = _launch_on(core, executor, batch, called_ns, horizon_ns)
        if not oldest.finished:
            return now_ns


def _last_call_ns(executor: SimExecutor, batch: Batch, horizon: Callable[[], float]) -> float:
    """The time in ns before which the scheduler must be called for the host to be through with the launch of `batch`
    before the `horizon`: an engine that fails in between has not launched it."""
    return min(horizon(), MAX_TIME_NS) - executor.host_ns(batch)[0]


def _decode_on(
    core: EngineCore,
    executor: SimExecutor,
    batch: Batch,
    now_ns: int,
    horizon: Callable[[], float],
    tell: Tell | None,
    drains: Callable[[], bool] | None,
) -> int:
    """Lands the step before `batch`, with which the last prompts end, and launches the decodes that follow, where they
    surely do. Returns until when the host was at work, in ns; `batch` is then still the latest step if they do not, or
    something comes before."""
    (oldest, latest), steady = core.in_flight.steps, core.steady
    called_ns = max(now_ns, oldest.end_ns) + oldest.process_ns
    if called_ns >= horizon() or steady is None or not steady.is_followed_by_decodes(batch):
        return now_ns
    if (latest.finished and _ends_by_length(core, latest.finished)) or (oldest.finished and tell is None):
        return now_ns
    events = core.complete(called_ns)
    if events:
        assert tell is not None, events
        tell(events, called_ns)
        if core.has_arrivals or called_ns >= horizon():
            return called_ns
    decodes = core.schedule(called_ns, drains is not None and drains())
    assert type(decodes) is Batch, decodes
    now_ns = called_ns + executor.host_ns(decodes)[0]
    core.execute(decodes, now_ns)
    return now_ns


def _launch_on(core: EngineCore, executor: SimExecutor, batch: Batch, called_ns: int, horizon_ns: float) -> int:
    """Launches `batch` once more as the oldest of two steps has landed at `called_ns`, and on, until one is the oldest
    that ends somebody, the scheduler has to be asked or the `horizon_ns` is reached. Returns when it did so last."""
    (oldest, latest), group, recorder, scheduler = core.in_flight.steps, batch.decodes, core.recorder, core.scheduler
    assert group is not None
    repeat, kv, step_ns, advance = scheduler.repeat, scheduler.kv, executor.duration_ns, group.advance
    launch_ns, process_ns = executor.host_ns(batch)
    num_decode, pad_rows, rows, pack = batch.num_decode, batch.pad_decode_rows, recorder.step_rows, pack_step
    waiting, running, quiet = scheduler.num_waiting, scheduler.num_running, executor.quiet_steps(batch)
    # ns to process the oldest step in flight, and the one behind it
    latest_ns, through_ns, next_through_ns = latest.end_ns, oldest.process_ns, latest.process_ns
    ends, ended = _NOBODY, latest.finished  # by the oldest, by the latest step
    # The row of the host's part of a step is written as the step has landed: where the next but one is launched.
    lanes, wasted_tokens, next_wasted_tokens = recorder.lane_rows, oldest.wasted_tokens, latest.wasted_tokens
    asked_ns, launched_ns, last_asked_ns, now_ns = recorder.take_last_lanes()
    oldest_ns, steady, line = latest_ns, core.steady, None
    if quiet and not ended and steady is not None and steady.is_steady(batch):
        line = executor.decode_line(batch)  # which holds the step that `repeat` has granted
    if line is not None and steady is not None:
        alone_ns, token_ns, last = line
        context, free, count = batch.context_tokens - num_decode, kv.num_free, 0
        most = quiet if last == inf else min(quiet, int((last - context) // num_decode))
        taken: list[Sequence] = []
        turns = cycle(group.due_in_turn())
        next(turns)  # whose blocks `repeat` has taken
        for due in chain(_NOBODY_DUE, turns):
            if called_ns >= horizon_ns or count == most:
                break
            if due:
                if len(due) > free:
                    break
                free -= len(due)
                taken += due
            count += 1
            lanes += pack_lane(asked_ns, launched_ns, called_ns, wasted_tokens)
            wasted_tokens, next_wasted_tokens = next_wasted_tokens, 0
            asked_ns, launched_ns, last_asked_ns = last_asked_ns, now_ns, called_ns
            now_ns = called_ns + launch_ns
            start_ns = now_ns if now_ns > latest_ns else latest_ns
            through_ns, next_through_ns = next_through_ns, process_ns
            called_ns = start_ns + through_ns
            context += num_decode
            duration_ns = int(alone_ns + token_ns * context)
            rows += pack_decodes(start_ns, duration_ns, context, num_decode, num_decode, free, waiting, running)
            oldest_ns, latest_ns = latest_ns, start_ns + duration_ns
        steady.repeat_by(batch, count - 1, taken)
        group.advance_by(count)
        quiet -= count
    granted = line is None  # the first launch, by who has asked for it
    while granted or (called_ns < horizon_ns and repeat(batch, called_ns)):
        granted = False
        lanes += pack_lane(asked_ns, launched_ns, called_ns, wasted_tokens)
        asked_ns, launched_ns, last_asked_ns = last_asked_ns, now_ns, called_ns
        now_ns = called_ns + launch_ns
        start_ns = now_ns if now_ns > latest_ns else latest_ns
        through_ns, next_through_ns = next_through_ns, process_ns
        called_ns = start_ns + through_ns
        wasted_tokens, next_wasted_tokens = next_wasted_tokens, 0
        if ended:
            ends, ended = ended, _NOBODY
        if quiet:
            quiet -= 1
            duration_ns = step_ns(batch)
            advance()
        else:
            result = executor.execute(batch)
            duration_ns, ended = result.duration_ns, result.finished
            advance()
            core.in_flight.note_last(ended)
            quiet = executor.quiet_steps(batch)
        # Columns in the order of STEP_COLUMNS; unrolled here as in `leap`.
        rows += pack(
            start_ns, duration_ns, batch.context_tokens, 0, batch.pad_context_tokens, num_decode,
            num_decode, 0, 0, 0, 0, 0, 0, pad_rows, 0, 0, kv.num_free, waiting, running, 0, 0, 0,
        )  # fmt: skip
        oldest_ns, latest_ns = latest_ns, start_ns + duration_ns
        if ends or (ended and _ends_by_length(core, ended)):
            break
    recorder.put_last_lanes((asked_ns, launched_ns), (last_asked_ns, now_ns))
    oldest.end_ns, oldest.process_ns, oldest.finished = oldest_ns, through_ns, ends
    oldest.wasted_tokens, latest.wasted_tokens = wasted_tokens, 0
    latest.end_ns, latest.process_ns, latest.finished = latest_ns, process_ns, ended
    core.in_flight.leapt(group.step)
    return now_ns


_NOBODY: list[Sequence] = []
_NOBODY_DUE: tuple[tuple[Sequence, ...], ...] = ((),)


def _ends_by_length(core: EngineCore, finished: list[Sequence]) -> bool:
    """Whether the last token of any of `finished` is the last it may have, which a scheduler knows beforehand."""
    for seq in finished:
        request = seq.request
        if seq.num_output_tokens >= min(seq.max_output_tokens, core.max_model_len - request.prompt_tokens):
            return True
    return False
