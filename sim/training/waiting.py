"""How ranks wait for each other: data parallel a step or a micro-batch long, pipelines one forward one backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

FORWARD_SHARE = 1 / 3
"""Part of a micro-batch's time that is its forward pass."""


def ddp(times: Sequence[Sequence[float]]) -> float:
    """The time of a step of which `times` has the micro-batches of each rank: ranks meet once, at its end."""
    return max(sum(rank) for rank in times)


def fsdp(times: Sequence[Sequence[float]]) -> float:
    """The same where ranks meet at every micro-batch, since each gathers all weights from the others.

    ValueError where ranks have unequally many: the real ones would wait for ever.
    """
    return sum(max(each) for each in zip(*times, strict=True))


@dataclass(frozen=True)
class Asynchronous:
    """Workers that update the weights without waiting for each other: the time until all are done, and of each update
    its staleness, in the order of updates: how many others came between its reading of the weights and itself."""

    end: float
    staleness: list[int]


def asynchronous(times: Sequence[Sequence[float]], bound: int | None = None) -> Asynchronous:
    """Workers with updates that take these `times`, one after another; with a `bound` a worker that many updates ahead
    of the slowest waits for it before it begins another."""
    done = [0] * len(times)
    read = [0] * len(times)
    version, now = 0, 0.0
    running: list[tuple[float, int]] = []
    waiting = [worker for worker, own in enumerate(times) if own]
    staleness: list[int] = []
    while running or waiting:
        slowest = min((done[worker] for worker, own in enumerate(times) if done[worker] < len(own)), default=0)
        still: list[int] = []
        for worker in waiting:
            if bound is not None and done[worker] - slowest > bound:
                still.append(worker)
                continue
            read[worker] = version
            heappush(running, (now + times[worker][done[worker]], worker))
        waiting = still
        now, worker = heappop(running)
        staleness.append(version - read[worker])
        version += 1
        done[worker] += 1
        if done[worker] < len(times[worker]):
            waiting.append(worker)
    return Asynchronous(now, staleness)


def one_forward_one_backward(times: Sequence[float], stages: int, send: float = 0.0) -> float:
    """The time until all stages of a pipeline have run micro-batches, each of which takes every stage its own of
    `times`.

    Stage s runs min(stages - s - 1, m) forwards first, then one forward and one backward by turns, then the rest. An
    operation starts when the stage is free and what it needs of its neighbour has been sent.
    """
    count = len(times)
    orders: list[list[tuple[bool, int]]] = []
    for stage in range(stages):
        early = min(stages - stage - 1, count)
        order = [(True, j) for j in range(early)]
        for j in range(count - early):
            order += [(True, early + j), (False, j)]
        orders.append(order + [(False, j) for j in range(count - early, count)])
    ends: dict[tuple[int, bool, int], float] = {}
    free, at = [0.0] * stages, [0] * stages
    while any(at[stage] < len(orders[stage]) for stage in range(stages)):
        for stage in range(stages):
            while at[stage] < len(orders[stage]):
                forward, j = orders[stage][at[stage]]
                last = stage == (0 if forward else stages - 1)
                before = (stage, True, j) if last else (stage + (-1 if forward else 1), forward, j)
                if not (last and forward) and before not in ends:
                    break
                ready = 0.0 if last and forward else ends[before] + (0.0 if last else send)
                share = FORWARD_SHARE if forward else 1 - FORWARD_SHARE
                free[stage] = ends[stage, forward, j] = max(free[stage], ready) + share * times[j]
                at[stage] += 1
    return max(free)
