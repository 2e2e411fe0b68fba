"""Leaps of an engine whose worker looks after transfers at each launch, while it finds nothing: the same rows as
stepping would write.

Only steps of decodes behind such steps are leapt over. Until when a look finds nothing the connector knows, and whether
the scheduler would ask for a transfer is its own `repeat`'s to say. What the worker saw as the oldest step in flight
was launched, nothing, then stands for any later one.
"""

from __future__ import annotations

from collections.abc import Callable

from batchsim.base.units import MAX_TIME_NS
from batchsim.kernel.batch import Batch
from batchsim.kernel.core import EngineCore
from batchsim.kernel.lane_rows import pack_lane
from batchsim.kernel.leaps_ahead import launch_on
from batchsim.kernel.record import pack_decodes, pack_step, pack_two
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import DecodeGroup


def leap_queue(core: EngineCore, executor: SimExecutor, batch: Batch, now_ns: int, horizon: Callable[[], float]) -> int:
    """Launches `batch`, just launched at `now_ns`, again and again, as long as the host is through with launches before
    the `horizon`, in ns, and no step finishes a sequence. Returns the time of the last launch in ns."""
    steps, group, depth = core.in_flight.steps, batch.decodes, core.loop.depth
    if len(steps) != depth or depth > 2 or group is None or core.tells_tokens or core.has_arrivals:
        return now_ns
    if batch.chunks or not batch.num_decode or batch.drafting is not None or batch.pad_decode_rows:
        return now_ns
    oldest, latest = steps[0], steps[-1]
    if oldest.finished or latest.finished or oldest.batch.chunks or oldest.batch.decodes is not group:
        return now_ns
    host_ns = batch.host_ns or executor.host_ns(batch)
    quiet_ns = 0 if core.connected is None else core.connected.connector.quiet_until_ns()
    horizon_ns = min(horizon(), quiet_ns, MAX_TIME_NS) - host_ns[0]
    if depth == 1:
        return _repeat(core, executor, batch, group, now_ns, host_ns, horizon_ns)
    called_ns = core.in_flight.landing_ns(now_ns)
    if called_ns >= horizon_ns or not core.scheduler.repeat(batch, called_ns):
        return now_ns
    return launch_on(core, executor, batch, called_ns, host_ns, horizon_ns)


def _repeat(
    core: EngineCore,
    executor: SimExecutor,
    batch: Batch,
    group: DecodeGroup,
    now_ns: int,
    host_ns: tuple[int, int],
    horizon_ns: float,
) -> int:
    """As `leap_queue`, of an engine that waits for each step."""
    step, recorder, scheduler = core.in_flight.steps[0], core.recorder, core.scheduler
    kv, repeat, step_ns, advance = scheduler.kv, scheduler.repeat, executor.duration_ns, group.advance
    launch_ns, process_ns = host_ns
    rows, lanes, lane_rows = recorder.step_rows, recorder.lanes, recorder.lanes.rows
    num_decode, quiet = batch.num_decode, executor.quiet_steps(batch)
    waiting, running = scheduler.num_waiting, scheduler.num_running
    decodes, queues = pack_two(num_decode, num_decode), pack_two(waiting, running)
    called_ns, end_ns = core.in_flight.landing_ns(now_ns), step.end_ns
    (opened,) = lanes.open
    while quiet and called_ns < horizon_ns and repeat(batch, called_ns):
        quiet -= 1
        lane_rows += pack_lane(opened[0], opened[1], called_ns, 0)
        now_ns = called_ns + launch_ns
        opened = called_ns, now_ns
        duration_ns = step_ns(batch)
        advance()
        if group.windowed is None:
            rows += pack_decodes(now_ns, duration_ns, batch.context_tokens, decodes, kv.num_free, queues)
        else:
            rows += pack_step(
                now_ns, duration_ns, batch.context_tokens, 0, 0, num_decode, num_decode, 0, 0, 0, 0, 0, 0,
                0, 0, 0, kv.num_free, waiting, running, 0, 0, 0, batch.window_tokens, 0,
            )  # fmt: skip
        end_ns = now_ns + duration_ns
        called_ns = end_ns + process_ns
    lanes.open[0] = opened
    core.in_flight.leapt_alone(group.step, end_ns, process_ns)
    return now_ns
