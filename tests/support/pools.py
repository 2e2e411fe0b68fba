"""Two engines in one virtual time: prompts on one, the tokens after the first on the other, KV on its way between."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import count

from batchsim.drive.instant import ENTER, crank
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import EngineEvent
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.types import Arrival, Handover, Sequence
from tests.support.engine import Outcome, arrival, engine, outcomes, vllm

TRANSFER_NS = 7
PREFILL_ENGINE, DECODE_ENGINE = 0, 1


class Pair:
    """Two engines in one virtual time: who has its first token at the first goes on at the second, its KV pulled."""

    def __init__(self, prefill: EngineCore, decode: EngineCore, *, keep_kv: bool = True) -> None:
        self.cores = (prefill, decode)
        self.keep_kv = keep_kv
        self.message: list[tuple[int, EngineEvent]] = []
        self._due: list[tuple[int, int, Callable[[int], None]]] = []
        self._serial = count()
        self._loops = [crank(core, self) for core in self.cores]
        self._waits = [next(loop) for loop in self._loops]

    def is_over(self) -> bool:
        return False

    def tell(self, events: Iterable[EngineEvent], now_ns: int) -> None:
        self.message += ((now_ns, event) for event in events)

    def run(self, *arrivals: Arrival) -> list[list[Outcome]]:
        """Runs all to the end; returns the outcomes at each engine. At one instant steps end, then transfers, then all
        that is due is scheduled."""
        for one in arrivals:
            self._at(one.request.arrival_ns, lambda now_ns, one=one: self.cores[PREFILL_ENGINE].submit(one))
        while self._due:
            now_ns = self._due[0][0]
            while self._due and self._due[0][0] == now_ns:
                heappop(self._due)[2](now_ns)
            for k in range(2):
                if not isinstance(self._waits[k], Batch):
                    self._turn(k, now_ns)
        for core in self.cores:
            core.check_returned()
        return [outcomes(core.recorder.records()) for core in self.cores]

    def _at(self, time_ns: int, act: Callable[[int], None]) -> None:
        heappush(self._due, (time_ns, next(self._serial), act))

    def _turn(self, k: int, now_ns: int) -> None:
        """Lets engine `k` go on until it runs a step or rests."""
        wait = self._loops[k].send(now_ns)
        while wait is ENTER:
            wait = self._loops[k].send(now_ns)
        self._waits[k] = wait
        if isinstance(wait, Batch):
            self._at(self.cores[k].execute(wait, now_ns), lambda end_ns: self._end(k, wait, end_ns))
        elif isinstance(wait, Idle) and wait.until_ns is not None:
            self._at(wait.until_ns, lambda now_ns: None)

    def _end(self, k: int, batch: Batch, end_ns: int) -> None:
        self._waits[k] = self._loops[k].send(end_ns)
        core = self.cores[k]
        for seq in batch.sampled if k == PREFILL_ENGINE else ():
            if seq in core.journal.lives:
                handover = core.release(seq, end_ns, keep_kv=self.keep_kv)
                self.tell(core.take_events(), end_ns)
                self._at(end_ns + TRANSFER_NS, lambda now_ns, it=handover: self._through(it, now_ns))

    def _through(self, handover: Handover, now_ns: int) -> None:
        if self.keep_kv:
            self.cores[PREFILL_ENGINE].sent(handover)
        self.cores[DECODE_ENGINE].submit(handover.arrives(now_ns))


def pair(*, blocks: int = 100, keep_kv: bool = True) -> Pair:
    return Pair(*(engine(vllm(CountingKV(blocks, 4))) for _ in range(2)), keep_kv=keep_kv)


def row_of(core: EngineCore, request_id: int) -> dict[str, int]:
    requests = core.recorder.records().requests
    (row,) = requests[requests["request_id"] == request_id]
    return {name: int(row[name]) for name in requests.dtype.names or ()}


def start(core: EngineCore, now_ns: int) -> int:
    work = core.schedule(now_ns, True)
    assert isinstance(work, Batch)
    return core.execute(work, now_ns)


def step(core: EngineCore, now_ns: int) -> int:
    end_ns = start(core, now_ns)
    core.complete(end_ns)
    return end_ns


def handed_over(core: EngineCore) -> Handover:
    """What leaves as `core` hands over, at 10, a request that arrived at 0."""
    core.submit(arrival(0, 0))
    return core.release(*open_at(core, step(core, 0)))


def open_at(core: EngineCore, now_ns: int) -> tuple[Sequence, int]:
    """The first request that is open in `core`, and `now_ns`."""
    return next(iter(core.journal.lives)), now_ns
