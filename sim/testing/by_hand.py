"""Engines cranked by hand, step by step, and the records of two runs compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from batchsim.drive.instant import ENTER, LAND, THROUGH, Busy, Launch, crank
from batchsim.drive.source import Inline, VirtualClock
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import EngineEvent, Tokens
from batchsim.kernel.record import Records
from batchsim.testing.random_engines import Case


def same(one: Records, other: Records) -> None:
    """AssertionError unless the two have equal bytes."""
    for table in ("requests", "steps", "states", "lanes"):
        a, b = getattr(one, table), getattr(other, table)
        assert len(a) == len(b) and a.tobytes() == b.tobytes(), f"{table} differ"
    assert one.texts == other.texts, "texts differ"


class _Telling(Inline):
    """A source that notes when each token of a request came."""

    def __init__(self, case: Case, clock: VirtualClock, times: dict[int, list[int]]) -> None:
        super().__init__(case.workload, clock)
        passed_on = self.tell

        def tell(events: Iterable[EngineEvent], now_ns: int) -> None:
            for event in events:
                if isinstance(event, Tokens):
                    times.setdefault(event.request.id, []).extend([now_ns] * event.count)
            passed_on(events, now_ns)

        self.tell = tell


def steps(
    case: Case,
    core: EngineCore,
    times: dict[int, list[int]] | None = None,
    idles: Callable[[int], None] = lambda now_ns: None,
) -> Iterator[Batch]:
    """Each batch of the case's run on `core`, before it runs. `times` is filled with the time of every token, by
    request id; `idles` is called with the time where the policy waits."""
    clock = VirtualClock()
    core.tells_tokens = True
    source = _Telling(case, clock, {} if times is None else times)
    loop = crank(core, source)
    wait = next(loop)
    while wait is not THROUGH:
        if wait is ENTER:
            source.hand_over(core)
        elif isinstance(wait, Idle):
            idles(clock.now_ns())
            source.wait(wait.until_ns)
        elif isinstance(wait, Batch):
            yield wait
            clock.sleep_until(core.execute(wait, clock.now_ns()))
        elif isinstance(wait, Launch):
            clock.sleep_until(wait.until_ns)
            if wait.batch is not None:
                yield wait.batch
                core.execute(wait.batch, clock.now_ns())
        elif wait is LAND:
            oldest = core.in_flight.steps[0]
            clock.sleep_until(max(clock.now_ns(), oldest.end_ns) + oldest.process_ns)
        else:
            assert isinstance(wait, Busy)
            clock.sleep_until(wait.until_ns)
        wait = loop.send(clock.now_ns())
