"""Replicas that have nothing to do with each other, each simulated by itself.

Where a router looks at requests alone and nothing becomes of replicas, an engine's steps depend on nothing but its own
arrivals. So the engines take turns of thousands of arrivals, in which one's state stays in the processor's caches and
waits for no event of the others. The records are those of all engines in one environment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import simpy

from batchsim.drive.fleet.routers.router import Router
from batchsim.drive.simulate import EngineRun, Pulse
from batchsim.kernel.core import EngineCore
from batchsim.kernel.protocols import Workload
from batchsim.kernel.types import Arrival

TURN = 4096
"""Arrivals of all replicas in a turn: what bounds how many are in memory."""


def simulate_apart(
    cores: list[EngineCore], router: Router, workload: Workload, pulse: Pulse | None = None, turn: int = TURN
) -> int:
    """Runs `workload`, whose answers cause no arrivals, through `cores`, by the numbers of their replicas, to its end;
    returns the time in ns at which the last engine was through. They take turns of `turn` arrivals; `pulse` hears of
    those of the last one, since by then the others were as far."""
    runs = [EngineRun(simpy.Environment(), core, workload, True, None) for core in cores]
    runs[-1].pulse = pulse
    ends = [run.env.process(run.engine()) for run in runs]
    for run in runs:
        run.streams += 1  # of the turns to come
    up = range(len(runs))
    for arrivals in _turns(workload.arrivals(), turn):
        its: list[list[Arrival]] = [[] for _ in runs]
        for arrival in arrivals:
            number = router.route(arrival.request, "both", up)
            assert number in up, "a router answers with one of the replicas that are up"
            its[number].append(arrival)
        until_ns = arrivals[-1].request.arrival_ns
        for run, sent in zip(runs, its, strict=True):
            run.send(sent, until_ns)
            if until_ns > run.env.now:
                run.env.run(until=until_ns)
    for run, end in zip(runs, ends, strict=True):
        run.streams -= 1
        run.env.run(until=end)
    return max(run.end_ns for run in runs)


def _turns(arrivals: Iterable[Arrival], size: int) -> Iterator[list[Arrival]]:
    """`arrivals` by time and id, so many at once and what else arrives at the instant of the last."""
    turn: list[Arrival] = []
    for arrival in arrivals:
        if len(turn) >= size and arrival.request.arrival_ns > turn[-1].request.arrival_ns:
            yield sorted(turn, key=_by_time)
            turn = []
        turn.append(arrival)
    if turn:
        yield sorted(turn, key=_by_time)


def _by_time(arrival: Arrival) -> tuple[int, int]:
    return arrival.request.arrival_ns, arrival.request.id
