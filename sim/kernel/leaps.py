"""Leaps of a simulation over steps alike, into which nothing can fall: the same rows as stepping would write."""

from __future__ import annotations

from batchsim.base.units import MAX_TIME_NS
from batchsim.kernel.core import EngineCore
from batchsim.kernel.record import LANE_BYTES, MISSING, PROCESSED_AT, pack_lane, pack_processed, pack_step
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Batch


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
    waiting, running = scheduler.num_waiting, scheduler.num_running
    while quiet and end_ns < horizon_ns and repeat(batch, end_ns):
        quiet -= 1
        duration_ns = step_ns(batch)
        advance()
        # Columns in the order of STEP_COLUMNS; unrolled here because a leap is little else than this line.
        rows += pack(
            end_ns, duration_ns, batch.context_tokens, 0, batch.pad_context_tokens, num_decode,
            num_decode, 0, 0, 0, 0, 0, 0, pad_rows, 0, 0, kv.num_free, waiting, running, 0,
        )  # fmt: skip
        end_ns += duration_ns
    return end_ns


def leap_ahead(core: EngineCore, executor: SimExecutor, batch: Batch, now_ns: int, horizon_ns: float) -> int:
    """As `leap`, of an engine that has just launched `batch` at `now_ns` while the step before it is in flight: as
    long as the host would be through with the oldest step before `horizon_ns`, and neither it nor the next ends
    anybody. Returns when the host launched the last step, in ns.
    """
    steps, group, scheduler = core.in_flight.steps, batch.decodes, core.scheduler
    if len(steps) != 2 or group is None or batch.chunks or steps[0].batch.chunks or not batch.num_decode:
        return now_ns
    if core.has_arrivals:  # came while the host was at work, and enters next
        return now_ns
    oldest, latest, recorder = *steps, core.recorder
    if oldest.finished or latest.finished or latest.landing is not None or oldest.batch.decodes is not group:
        return now_ns
    if recorder.num_processed < 0:  # the row of the oldest is drained
        return now_ns
    quiet = executor.quiet_steps(batch)
    launch_ns, process_ns = executor.host_ns(batch)
    kv, repeat, step_ns, advance = scheduler.kv, scheduler.repeat, executor.duration_ns, group.advance
    rows, lanes, num_decode, pad_rows = recorder.step_rows, recorder.lane_rows, batch.num_decode, batch.pad_decode_rows
    waiting, running = scheduler.num_waiting, scheduler.num_running
    horizon_ns = min(horizon_ns, MAX_TIME_NS)
    oldest_ns, through_ns, wasted_tokens = oldest.end_ns, oldest.process_ns, oldest.wasted_tokens
    latest_ns = latest.end_ns
    at = recorder.num_processed * LANE_BYTES + PROCESSED_AT
    while quiet:
        called_ns = (now_ns if now_ns > oldest_ns else oldest_ns) + through_ns
        if called_ns >= horizon_ns or not repeat(batch, called_ns):
            break
        quiet -= 1
        now_ns = called_ns + launch_ns
        start_ns = now_ns if now_ns > latest_ns else latest_ns
        duration_ns = step_ns(batch)
        advance()
        pack_processed(lanes, at, called_ns, wasted_tokens)
        at += LANE_BYTES
        lanes += pack_lane(called_ns, now_ns, MISSING, 0)
        rows += pack_step(
            start_ns, duration_ns, batch.context_tokens, 0, batch.pad_context_tokens, num_decode,
            num_decode, 0, 0, 0, 0, 0, 0, pad_rows, 0, 0, kv.num_free, waiting, running, 0,
        )  # fmt: skip
        oldest_ns, latest_ns = latest_ns, start_ns + duration_ns
        through_ns, wasted_tokens = process_ns, 0
    recorder.num_processed = (at - PROCESSED_AT) // LANE_BYTES
    oldest.end_ns, oldest.process_ns, oldest.wasted_tokens = oldest_ns, through_ns, wasted_tokens
    latest.end_ns = latest_ns
    core.in_flight.leapt(group.step)
    return now_ns
