"""Leaps of an engine that schedules a step ahead, over steps alike: the same rows as stepping would write.

1. A leap begins once the latest step is of decodes alone: the prompts of the step before land within it, and so do ends
   by stop tokens while the queue is empty.
2. Where the last prompts end with the latest step and the scheduler says that decodes follow (`protocols.Steady`), it
   is called for them within the leap.
3. Where it says that a batch is steady and the cost is a line in the context (`decode_line`), steps are launched
   without calling it, up to the one that finishes a sequence and the one behind it. Once the device no longer waits
   for the host, which stays so as steps grow no shorter, their times are one sum.
4. The host's part of a step then follows from when the steps beside it began, and is filled in by column as records are
   read. Rows of steps are written one by one: leaps are some twenty steps long, too short to save by columns.

A leaped step costs what a synchronous one does, but the same requests make more steps, since these are shorter and
fewer share one: `make bench` prints both.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, cycle, islice
from math import floor, inf

from batchsim.base.units import MAX_TIME_NS
from batchsim.kernel.batch import Batch
from batchsim.kernel.core import EngineCore
from batchsim.kernel.lane_rows import pack_lane
from batchsim.kernel.leaps import ROW_BYTES, Tell
from batchsim.kernel.protocols import DecodeLine
from batchsim.kernel.record import pack_decodes, pack_step, pack_two, put_windows, unpack_starts
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Sequence

_NO_SEQUENCES: list[Sequence] = []


def leap_ahead(
    core: EngineCore,
    executor: SimExecutor,
    batch: Batch,
    now_ns: int,
    horizon: Callable[[], float],
    tell: Tell | None = None,
    drains: Callable[[], bool] | None = None,
) -> int:
    """Launches `batch` again and again, which the engine has just launched at `now_ns` while the step before it is in
    flight: as long as the host is through with launches before the `horizon`, in ns.

    With an empty queue the oldest step may have prompts, or finish sequences, whose events go to `tell` (None: it may
    not): it lands even if the scheduler then has to be called, which leaves one step in flight. Where the last prompts
    end with `batch` the scheduler is called for the decodes that follow; `drains` returns whether to drain then (None:
    never). Returns the end of the host's last work in ns.
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
    host_ns = batch.host_ns or executor.host_ns(batch)
    horizon_ns = _last_call_ns(host_ns[0], horizon())
    while True:
        oldest, latest = steps
        called_ns = (now_ns if now_ns > oldest.end_ns else oldest.end_ns) + oldest.process_ns
        if called_ns >= horizon_ns or (latest.finished and _ends_by_length(core, latest.finished)):
            return now_ns
        finished = oldest.finished
        if finished or oldest.batch.chunks:
            if scheduler.num_waiting or (finished and tell is None):
                return now_ns
            if len(finished) >= len(group.members) and all(map(finished.__contains__, group.members)):
                return now_ns  # no sequence is left to go on
            now_ns = called_ns
            events = core.deliver(core.land(), now_ns)
            goes_on = True
            if events:
                assert tell is not None, events
                tell(events, now_ns)
                horizon_ns = _last_call_ns(host_ns[0], horizon())
                goes_on = now_ns < horizon_ns and not core.has_arrivals
            if goes_on:
                batch.regroup()
                host_ns = batch.host_ns = executor.host_ns(batch)
                goes_on = scheduler.repeat(batch, now_ns)
            if not goes_on:
                core.recorder.lanes.processed(now_ns, oldest.wasted_tokens)
                return now_ns
            flight.stand_in(oldest, group)
        elif oldest.batch.decodes is not group or not scheduler.repeat(batch, called_ns):
            return now_ns
        now_ns = launch_on(core, executor, batch, called_ns, host_ns, horizon_ns)
        if core.connected is not None:
            core.connected.leapt([step.batch for step in steps])
        if not oldest.finished:
            return now_ns


def _last_call_ns(launch_ns: int, horizon_ns: float) -> float:
    """The time in ns before which the scheduler must be called for the host to be through with a launch, which takes it
    so long, before the horizon: an engine that fails in between has not launched it."""
    return (horizon_ns if horizon_ns < MAX_TIME_NS else MAX_TIME_NS) - launch_ns


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
    (oldest, latest), steady, group = core.in_flight.steps, core.steady, batch.decodes
    called_ns = max(now_ns, oldest.end_ns) + oldest.process_ns
    horizon_ns = horizon()
    if called_ns >= horizon_ns or group is None or steady is None or not steady.is_followed_by_decodes(batch):
        return now_ns
    if (latest.finished and _ends_by_length(core, latest.finished)) or (oldest.finished and tell is None):
        return now_ns
    events = core.complete(called_ns)
    if events:
        assert tell is not None, events
        tell(events, called_ns)
        horizon_ns = horizon()
    launch_ns = executor.launch_ns(len(group.members) + len(batch.sampled))
    if core.has_arrivals or called_ns >= _last_call_ns(launch_ns, horizon_ns):
        return called_ns
    decodes = core.schedule(called_ns, drains is not None and drains())
    assert type(decodes) is Batch, decodes
    decodes.host_ns = executor.host_ns(decodes)
    now_ns = called_ns + decodes.host_ns[0]
    core.execute(decodes, now_ns)
    return now_ns


def launch_on(
    core: EngineCore,
    executor: SimExecutor,
    batch: Batch,
    called_ns: int,
    host_ns: tuple[int, int],
    horizon_ns: float,
) -> int:
    """Relaunches `batch` from `called_ns`, when the oldest of two steps landed, until the oldest step finishes a
    sequence, the scheduler has to be called or `horizon_ns` is reached. Returns the time of the last launch in ns."""
    steady, group, goes_on = core.steady, batch.decodes, True
    while goes_on and (quiet := executor.quiet_steps(batch)) and not core.in_flight.steps[1].finished:
        line = executor.decode_line(batch) if steady is not None and steady.is_steady(batch) else None
        if line is None:
            break
        now_ns, called_ns = _launch_along(core, executor, batch, line, quiet, called_ns, host_ns, horizon_ns)
        if called_ns >= horizon_ns or not core.scheduler.repeat(batch, called_ns):
            return now_ns
        goes_on = group is not None and group.windowed is not None  # a line ends where a context fills the window
    return _launch_one_by_one(core, executor, batch, called_ns, host_ns, horizon_ns)


def _launch_along(
    core: EngineCore,
    executor: SimExecutor,
    batch: Batch,
    line: DecodeLine,
    quiet: int,
    called_ns: int,
    host_ns: tuple[int, int],
    horizon_ns: float,
) -> tuple[int, int]:
    """As `launch_on`, for a steady scheduler whose steps' costs lie on `line`; the first `quiet` of them finish no
    sequence. Returns (last launch ns, earliest next call ns; MAX_TIME_NS if the scheduler must be called)."""
    (oldest, latest), group, recorder, scheduler = core.in_flight.steps, batch.decodes, core.recorder, core.scheduler
    steady = core.steady
    assert group is not None and steady is not None
    alone_ns, token_ns, last = line
    windowed = None if group.windowed is None else (group.windowed.tokens, group.windowed.below)
    launch_ns, process_ns = host_ns
    num_decode, rows, pack = batch.num_decode, recorder.step_rows, pack_decodes
    decodes, queues = pack_two(num_decode, num_decode), pack_two(scheduler.num_waiting, scheduler.num_running)
    free = scheduler.kv.num_free
    first, first_called_ns, context = len(rows), called_ns, batch.context_tokens - num_decode
    most = MAX_TIME_NS if last == inf else int((last - context) // num_decode)
    # The host takes the results of the oldest step in flight, then launches; of the two in flight now those of the
    # latest take it a time of their own.
    start_ns, oldest_ns, latest_ns, through_ns = 0, 0, latest.end_ns, latest.process_ns
    horizon_start_ns = horizon_ns - (process_ns if process_ns > through_ns else through_ns)
    ends, ended, is_over, is_busy = _NO_SEQUENCES, _NO_SEQUENCES, False, False  # by the oldest, by the latest step
    turns = chain((0,), cycle(group.blocks_due_in_turn(1)))  # KV blocks of each step: `repeat` took those of the first
    steps = islice(turns, quiet + 1 if quiet < most else most)  # up to the one that finishes a sequence
    while True:
        if not is_busy:
            for blocks in steps:
                if called_ns >= horizon_ns or blocks > free:
                    break
                free -= blocks
                start_ns = called_ns + launch_ns
                if start_ns < latest_ns:
                    start_ns = latest_ns
                called_ns, through_ns = start_ns + through_ns, process_ns
                context += num_decode
                duration_ns = floor(alone_ns + token_ns * context)
                rows += pack(start_ns, duration_ns, context, decodes, free, queues)
                oldest_ns, latest_ns = latest_ns, start_ns + duration_ns
                if called_ns + launch_ns <= latest_ns and launch_ns + process_ns <= duration_ns:
                    is_busy = True
                    break
        if is_busy:
            # Steps grow no shorter: from here on the device does not wait for the host.
            begun = len(rows)
            for blocks in steps:
                if start_ns >= horizon_start_ns or blocks > free:
                    break
                free -= blocks
                start_ns = latest_ns
                context += num_decode
                duration_ns = floor(alone_ns + token_ns * context)
                rows += pack(start_ns, duration_ns, context, decodes, free, queues)
                latest_ns = start_ns + duration_ns
            if len(rows) > begun:
                oldest_ns, called_ns = start_ns, start_ns + process_ns
        count = (len(rows) - first) // ROW_BYTES
        if ended:
            if count > quiet + 1:
                ends, ended, is_over = ended, _NO_SEQUENCES, True
                group.advance_by(1)
            break
        group.advance_by(count)
        if count <= quiet:
            break
        ended = executor.finish(batch)
        core.in_flight.note_last(ended)
        is_over = _ends_by_length(core, ended)
        if is_over or count == most or not executor.quiet_steps(batch):
            break
        steps = islice(turns, 1)  # the one behind it
    if windowed is not None:
        put_windows(rows, first, *windowed)
    steady.repeat_by(batch, count - 1, group.members_due_over(count - 1, 1 - count))
    before_ns = now_ns = first_called_ns
    if count > 1:
        # The row before the first of this leap is that of a step in flight, which is never packed or spilled.
        third_last_ns, second_last_ns = unpack_starts(rows, -3 * ROW_BYTES)
        now_ns = second_last_ns + (latest.process_ns if count == 2 else process_ns)
        if count > 2:
            before_ns = third_last_ns + (latest.process_ns if count == 3 else process_ns)
    wasted_tokens, calls_ns = (oldest.wasted_tokens, latest.wasted_tokens), (before_ns, now_ns)
    recorder.lanes.repeated(count, first_called_ns, launch_ns, process_ns, latest.process_ns, wasted_tokens, calls_ns)
    oldest.process_ns = latest.process_ns if count == 1 else process_ns
    oldest.wasted_tokens, latest.wasted_tokens = latest.wasted_tokens if count == 1 else 0, 0
    oldest.end_ns, oldest.finished = oldest_ns, ends
    latest.end_ns, latest.process_ns, latest.finished = latest_ns, process_ns, ended
    core.in_flight.leapt(group.step)
    return now_ns + launch_ns, MAX_TIME_NS if is_over else called_ns


def _launch_one_by_one(
    core: EngineCore,
    executor: SimExecutor,
    batch: Batch,
    called_ns: int,
    host_ns: tuple[int, int],
    horizon_ns: float,
) -> int:
    """As `launch_on`, of any scheduler's steps; it has granted the first of them."""
    (oldest, latest), group, recorder, scheduler = core.in_flight.steps, batch.decodes, core.recorder, core.scheduler
    assert group is not None
    repeat, kv, step_ns, advance = scheduler.repeat, scheduler.kv, executor.duration_ns, group.advance
    launch_ns, process_ns = host_ns
    num_decode, pad_rows, rows, pack = batch.num_decode, batch.pad_decode_rows, recorder.step_rows, pack_step
    waiting, running, quiet = scheduler.num_waiting, scheduler.num_running, executor.quiet_steps(batch)
    oldest_ns, latest_ns, through_ns, next_through_ns = 0, latest.end_ns, oldest.process_ns, latest.process_ns
    ends, ended = _NO_SEQUENCES, latest.finished
    lanes, open_lanes = recorder.lanes.rows, recorder.lanes.open
    wasted_tokens, next_wasted_tokens = oldest.wasted_tokens, latest.wasted_tokens
    (asked_ns, launched_ns), (last_asked_ns, now_ns) = open_lanes
    while True:
        lanes += pack_lane(asked_ns, launched_ns, called_ns, wasted_tokens)
        wasted_tokens, next_wasted_tokens = next_wasted_tokens, 0
        asked_ns, launched_ns, last_asked_ns = last_asked_ns, now_ns, called_ns
        now_ns = called_ns + launch_ns
        start_ns = now_ns if now_ns > latest_ns else latest_ns
        through_ns, next_through_ns = next_through_ns, process_ns
        called_ns = start_ns + through_ns
        if ended:
            ends, ended = ended, _NO_SEQUENCES
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
        # Columns in the order of STEP_COLUMNS; unrolled here as in `leaps._leap_one_by_one`.
        rows += pack(
            start_ns, duration_ns, batch.context_tokens, 0, batch.pad_context_tokens, num_decode,
            num_decode, 0, 0, 0, 0, 0, 0, pad_rows, 0, 0, kv.num_free, waiting, running, 0, 0, 0,
            batch.window_tokens, 0,
        )  # fmt: skip
        oldest_ns, latest_ns = latest_ns, start_ns + duration_ns
        if ends or (ended and _ends_by_length(core, ended)):
            break
        if called_ns >= horizon_ns or not repeat(batch, called_ns):
            break
    open_lanes[0], open_lanes[1] = (asked_ns, launched_ns), (last_asked_ns, now_ns)
    oldest.end_ns, oldest.process_ns, oldest.finished = oldest_ns, through_ns, ends
    oldest.wasted_tokens, latest.wasted_tokens = wasted_tokens, next_wasted_tokens
    latest.end_ns, latest.process_ns, latest.finished = latest_ns, process_ns, ended
    core.in_flight.leapt(group.step)
    return now_ns


def _ends_by_length(core: EngineCore, finished: list[Sequence]) -> bool:
    """Whether the last token of any of `finished` is the last it may have, which a scheduler knows beforehand."""
    for seq in finished:
        request = seq.request
        if seq.num_output_tokens >= min(seq.max_output_tokens, core.max_model_len - request.prompt_tokens):
            return True
    return False
