"""Skips scheduler calls in a pipeline while the decode group of each turn stays the same.

While no sequence joins, leaves or ends, each call of vLLM's queue decodes the cohort whose turn it is or finds it
empty, so the scheduler need not be called for batches, only for KV blocks (`protocols.Turning`). A period is not a
number of steps: a call that has nothing to run takes its place in the queue, and a nap, and leaves no step. So a leap
goes from call to call as `batchsim.drive.instant` does. Vidur's pipelines are stepped: there the order of the ready
sequences makes every micro-batch anew.
"""

from __future__ import annotations

from collections import deque
from itertools import cycle

from batchsim.base.units import MAX_TIME_NS
from batchsim.kernel.batch import Batch
from batchsim.kernel.core import EngineCore
from batchsim.kernel.in_flight import LaunchedStep
from batchsim.kernel.lane_rows import pack_lane
from batchsim.kernel.record import pack_decodes, pack_two
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import DecodeGroup

_Flying = tuple[int, int, int, int, DecodeGroup, int, int]
"""A step launched in a leap and not landed: its end, its host's ns for the results, when the scheduler was asked and
when it was launched, and its group with the context in tokens and the count of steps that it had then."""


class _Turns:
    """The repeated step of one decode group: its `batch`, how many more steps finish no sequence (`quiet`), and the
    host's ns."""

    __slots__ = ("batch", "launch_ns", "process_ns", "quiet")

    def __init__(self, group: DecodeGroup, executor: SimExecutor) -> None:
        self.batch = Batch(group, [], 0)
        self.quiet = executor.quiet_steps(self.batch)
        self.launch_ns, self.process_ns = executor.host_ns(self.batch)


def leap_calls(core: EngineCore, executor: SimExecutor, now_ns: int, horizon_ns: float) -> int:
    """Makes the calls that begin at `now_ns` and are over before `horizon_ns`, in ns, for as long as each repeats the
    decodes of its group and finishes no sequence. Returns the start of the next call in ns.

    Writes the same rows as stepping would.
    """
    turning, flight, recorder = core.turning, core.in_flight, core.recorder
    if turning is None or not _may_leap(core) or not turning.is_turning():
        return now_ns
    steps, calls, loop, kv = flight.steps, flight.calls, core.loop, core.scheduler.kv
    horizon_ns, depth, count = min(horizon_ns, MAX_TIME_NS), loop.depth, 0
    empty_ns, emptied_ns = executor.host_ns(None)
    known: dict[DecodeGroup, _Turns] = {}
    flying: deque[_Flying] = deque()
    queues = pack_two(core.scheduler.num_waiting, core.scheduler.num_running)
    turn, stages_ns, through_stages = turning.turn, executor.stages_ns, flight.through_stages
    for group in cycle(turning.next_groups()):
        launched_ns, turns = now_ns + empty_ns, None
        if group.members:
            turns = known.get(group)
            if turns is None:
                if group.joined or group.left:
                    break
                turns = known[group] = _Turns(group, executor)
            if not turns.quiet:
                break
            launched_ns = now_ns + turns.launch_ns
        through_ns, lands = launched_ns, len(calls) + 1 >= depth
        if lands and not calls[0]:
            through_ns += emptied_ns
        elif lands and steps:
            if steps[0].finished:
                break
            through_ns = max(launched_ns, steps[0].end_ns) + steps[0].process_ns
        elif lands:
            end_ns, process_ns, *_ = flying[0]
            through_ns = (launched_ns if launched_ns > end_ns else end_ns) + process_ns
        next_ns = through_ns if turns is not None else through_ns + loop.nap_ns
        if next_ns >= horizon_ns or not turn(group):
            break
        calls.append(turns is not None)
        if turns is not None:
            turns.quiet -= 1
            batch = turns.batch
            batch.context_tokens = context = group.total_context_tokens
            start_ns, end_ns = through_stages(launched_ns, stages_ns(batch))
            group.advance()
            flying.append((end_ns, turns.process_ns, now_ns, launched_ns, group, context, group.step))
            num_decode, ns = batch.num_decode, end_ns - start_ns
            recorder.step_rows += pack_decodes(
                start_ns, ns, context, pack_two(num_decode, num_decode), kv.num_free, queues
            )
            if batch.window_tokens:
                recorder.amend(1, "window_tokens", batch.window_tokens)
        if lands and calls.popleft():
            if steps:
                events = core.complete(through_ns)
                assert not events, events
            else:
                _, _, asked_ns, ready_ns, *_ = flying.popleft()
                recorder.lanes.rows += pack_lane(asked_ns, ready_ns, through_ns, 0)
        count += 1
        now_ns = next_ns
    if count:
        launched = [_launched(core, one) for one in flying]
        steps += launched
        turning.turned(count, [step.batch for step in launched])
    return now_ns


def _may_leap(core: EngineCore) -> bool:
    """Whether the engine has requests, none is about to enter, and no driver or client waits for tokens that a leap
    would skip."""
    if core.has_arrivals or not core.has_entered or core.tells_tokens:
        return False
    return core.journal.first_tokens is None or not any(step.batch.sampled for step in core.in_flight.steps)


def _launched(core: EngineCore, flying: _Flying) -> LaunchedStep:
    """The step as it lies in flight, the row of its host's part written."""
    end_ns, process_ns, asked_ns, launched_ns, group, context_tokens, group_step = flying
    core.recorder.lanes.launched(asked_ns, launched_ns)
    batch = Batch(group, [], 0)
    batch.context_tokens, batch.group_step = context_tokens, group_step
    return LaunchedStep(batch, [], end_ns, process_ns)
