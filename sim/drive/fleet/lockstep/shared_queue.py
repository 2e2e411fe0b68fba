"""Ranks that make every iteration together and take requests from one queue: TensorRT-LLM's attention parallelism.

1. Requests wait in one queue. At the beginning of an iteration all ranks gather how many requests and prompt tokens are
   active on each; the oldest of the queue are taken, as many as all ranks together may still have.
2. Of these the longest prompt goes first, each to the rank with the fewest active tokens, then requests, by number; a
   rank has enough once it has its even share of all that are active then, or of the fullest rank if that is more.
3. A rank without a request that it can compute runs a dummy of one token; the passes are otherwise those of
   `iterations.py`, and no rank is padded.
Source: tensorrt_llm/_torch/pyexecutor/scheduler/adp_router.py (02385f29), `DefaultADPRouter`, and py_executor.py.
Simplifies: a rank whose requests all wait for KV runs a dummy too, where the engine runs nothing on any rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from batchsim.drive.fleet.lockstep.iterations import Iterations
from batchsim.drive.fleet.lockstep.rank_costs import RankCosts
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import AnyWorkload
from batchsim.kernel.record import WAITING
from batchsim.kernel.types import Arrival


class SharedQueue(Iterations):
    """One simulation of `workload` on ranks of which each has at most `most_active` requests."""

    def __init__(
        self,
        cores: Sequence[EngineCore],
        costs: RankCosts,
        workload: AnyWorkload,
        most_active: int,
        *,
        logs: bool = False,
    ) -> None:
        super().__init__(cores, costs, workload, logs=logs)
        self._most = most_active
        self._queue: list[tuple[int, int, Arrival]] = []
        self._looked_at: dict[int, int] = {}  # by request in the queue: from when on it found no place
        self._new: list[int] = []  # of these, what no iteration has looked at

    def submit(self, arrival: Arrival) -> None:
        heappush(self._queue, (arrival.request.arrival_ns, arrival.request.id, arrival))
        self._new.append(arrival.request.id)

    def _take_in(self) -> None:
        now_ns = max(self._hosts_ns)
        self._hosts_ns = [now_ns] * len(self._cores)
        super()._take_in()
        self._share_out(now_ns)
        super()._take_in()

    @property
    def _waits(self) -> bool:
        return bool(self._queue)

    def _share_out(self, now_ns: int) -> None:
        """Sends what is taken from the queue to the ranks."""
        loads = [self._active(core) for core in self._cores]
        active = sum(count for _, count in loads)
        taken: list[Arrival] = []
        while self._queue and self._queue[0][0] <= now_ns and len(taken) < len(loads) * self._most - active:
            taken.append(heappop(self._queue)[2])
        self._looked_at |= dict.fromkeys(self._new, now_ns)
        self._new = []
        even = -(-(active + len(taken)) // len(loads))
        enough = min(max(even, *(count for _, count in loads)), self._most)
        places = [(tokens, count, rank) for rank, (tokens, count) in enumerate(loads) if count < enough]
        for arrival in sorted(taken, key=lambda each: -each.request.prompt_tokens):
            tokens, count, rank = min(places)
            places.remove((tokens, count, rank))
            if count + 1 < enough:
                places.append((tokens + arrival.request.prompt_tokens, count + 1, rank))
            if self._logs:
                self.routes.append((arrival.request.id, rank))
            core = self._cores[rank]
            if (since_ns := self._looked_at.pop(arrival.request.id)) < now_ns:
                core.recorder.state(since_ns, arrival.request.id, WAITING, "no_slot")
            core.submit(arrival)

    def _active(self, core: EngineCore) -> tuple[int, int]:
        """The prompt tokens of a rank's active requests, and their number."""
        lives = core.journal.lives
        return sum(seq.request.prompt_tokens for seq in lives), len(lives)
