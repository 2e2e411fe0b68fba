"""Runs the engines of a recording of prefill and decode, and the proxy between them, and compares them step by step."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from batchsim.base.errors import PolicyError, SchedulerStalled
from batchsim.base.units import NS_PER_S
from batchsim.check.conform.compare_steps import Comparing, FactDifference, StepComparison, shown_fact
from batchsim.check.conform.prefill_decode import EnginesRecording, Handed
from batchsim.check.conform.recording import Recording, to_ns
from batchsim.check.conform.replay import Replay
from batchsim.drive.instant import LAND, Busy, Launch, crank
from batchsim.kernel.batch import Idle
from batchsim.kernel.events import EngineEvent, Finished
from batchsim.kernel.kv_transfer import Noticed
from batchsim.kernel.types import Arrival, Request, Sequence


def compare_engines(path: Path, recording: EnginesRecording) -> StepComparison:
    """Replays `recording` and returns its verdict: the first difference in time, of a step or of a hand-over."""
    return _Engines(path, recording).compare()


@dataclass
class _Transfers:
    """The transfers of one engine that are under way, with their ends, ns: pulls by it, and what it keeps."""

    pulls: dict[Sequence, int] = field(default_factory=dict[Sequence, int])
    kept: dict[int, Sequence] = field(default_factory=dict[int, Sequence])  # by request, until a pull of it begins
    sends: list[tuple[int, int, Sequence]] = field(default_factory=list[tuple[int, int, Sequence]])


class _Link:
    """What passes between one engine and the others, in the recording's law of times."""

    def __init__(self, engines: _Engines, name: str) -> None:
        self._engines = engines
        self._name = name
        self._own = engines.transfers[name]

    def pulls(self, request: Request) -> bool:
        return self._name[0] == "D"

    def keeps(self, request: Request) -> bool:
        return self._name[0] == "P"

    def begin(self, seq: Sequence, num_blocks: int, now_ns: int) -> None:
        law = self._engines.recording
        self._own.pulls[seq] = end_ns = now_ns + law.fixed_ns + num_blocks * law.per_block_ns
        self._engines.blocks_pulled += num_blocks
        fails = seq.request.id in law.fails
        self._engines.sent(seq.request.id, end_ns + (law.fail_hold_ns if fails else law.hop_ns))

    def keep(self, seq: Sequence, num_blocks: int, now_ns: int) -> None:
        self._own.kept[seq.request.id] = seq

    def over(self, now_ns: int) -> Noticed:
        own = self._own
        loaded = [seq for seq, end_ns in own.pulls.items() if end_ns <= now_ns]
        for seq in loaded:
            del own.pulls[seq]
        sent: list[Sequence] = []
        while own.sends and own.sends[0][0] <= now_ns:
            sent.append(heappop(own.sends)[2])
        return Noticed(loaded, [seq for seq in loaded if seq.request.id in self._engines.recording.fails], sent)


class _EngineReplay(Replay):
    """The replay of one engine, which goes on by `advance`. `due_ns`: when that is due; None: at an arrival."""

    def __init__(self, engines: _Engines, name: str, recording: Recording) -> None:
        self._engines, self._name = engines, name
        self._coming: list[int] = []  # when requests arrive that were sent
        super().__init__(recording)
        self._waits = self._run()
        self.due_ns = next(self._waits)

    def advance(self, now_ns: int) -> None:
        """Goes on at `now_ns`, which is `due_ns`, or an arrival's time."""
        self.due_ns = self._waits.send(now_ns)

    def submit(self, arrival: Arrival) -> None:
        """Sends a request, which enters when the engine next looks."""
        self._core.submit(arrival)
        heappush(self._coming, arrival.request.arrival_ns)
        if self.due_ns is None:
            self.due_ns = arrival.request.arrival_ns

    def _run(self) -> Generator[int | None, int, None]:
        clock, core = self._clock, self._core
        loop = crank(core, self)
        wait, now_ns = next(loop), 0
        while True:
            core.completed = False
            if isinstance(wait, Launch | Busy):
                due_ns: int | None = wait.until_ns
            elif wait is LAND:
                due_ns = core.in_flight.landing_ns(now_ns)
            elif isinstance(wait, Idle):
                due_ns = self._coming[0] if self._coming else None
            else:
                due_ns = now_ns
            now_ns = yield due_ns
            clock.sleep_until(now_ns)
            while self._coming and self._coming[0] <= now_ns:
                heappop(self._coming)
            if isinstance(wait, Launch):
                self._launch(wait.batch)
            elif isinstance(wait, Busy):
                self._work(wait)
            wait = loop.send(now_ns)
            if core.completed:
                self._processed()

    def is_over(self) -> bool:
        return False

    def tell(self, events: Iterable[EngineEvent], now_ns: int) -> None:
        events = list(events)
        super().tell(events, now_ns)
        for event in events:
            if isinstance(event, Finished) and self._name[0] == "P":
                self._engines.answered(event.request.id, self._name, now_ns)

    def kept_blocks(self, seq: Sequence) -> int:
        """KV blocks kept for another engine."""
        transfers = self.observer.transfers
        assert transfers is not None, "all engines have connectors"
        return transfers.connector.kept[seq]


class _Engines:
    """The engines, their proxy and what is on the way between them."""

    def __init__(self, path: Path, recording: EnginesRecording) -> None:
        self.path = path
        self.recording = recording
        self.blocks_pulled = 0
        self.transfers = {name: _Transfers() for name in recording.engines}
        self._prefill = [name for name in recording.engines if name[0] == "P"]
        self._decode = [name for name in recording.engines if name[0] == "D"]
        self._prefilled_at: dict[int, str] = {}
        self._to_proxy: list[tuple[int, int, int]] = []  # answers: time, number, request
        self._arrivals = iter(recording.arrivals)
        self._arrival = next(self._arrivals, None)
        self._num_prefill = self._num_handed = self._num_answers = self._num_sent = 0
        self._replays: dict[str, _EngineReplay] = {}
        self._comparing: dict[str, Comparing] = {}
        for name, own in recording.engines.items():
            with_link = replace(own, new_link=lambda name=name: _Link(self, name))
            replay = self._replays[name] = _EngineReplay(self, name, with_link)
            self._comparing[name] = Comparing(path, own, replay, name)

    # ---- what engines bring about

    def answered(self, request_id: int, name: str, now_ns: int) -> None:
        """A prefill engine has ended the request."""
        self._num_answers += 1
        heappush(self._to_proxy, (now_ns + self.recording.hop_ns, self._num_answers, request_id))

    def sent(self, request_id: int, told_ns: int) -> None:
        """The prefill engine that keeps the KV of the request hears at `told_ns` that it may let go of it."""
        transfers = self.transfers[self._prefilled_at[request_id]]
        self._num_sent += 1
        heappush(transfers.sends, (told_ns, self._num_sent, transfers.kept.pop(request_id)))

    # ---- the run

    def compare(self) -> StepComparison:
        """Runs all engines in order of time, to the first difference."""
        while True:
            name = min(self._replays, key=self._due_ns)
            due_ns = self._due_ns(name)
            proxy_ns = self._proxy_ns()
            if proxy_ns is not None and proxy_ns <= due_ns:
                verdict = self._proxy_acts(proxy_ns)
            elif self._replays[name].due_ns is None:
                break
            else:
                verdict = self._advance(name, int(due_ns))
            if verdict is not None:
                return verdict
        return self._end()

    def _due_ns(self, name: str) -> float:
        due_ns = self._replays[name].due_ns
        return float("inf") if due_ns is None else due_ns

    def _advance(self, name: str, now_ns: int) -> StepComparison | None:
        replay, comparing = self._replays[name], self._comparing[name]
        try:
            replay.advance(now_ns)
        except (PolicyError, SchedulerStalled) as error:
            return comparing.stopped(error)
        while replay.observer.done:
            verdict = comparing.step(replay.observer.done.popleft())
            if verdict is not None:
                return verdict
        return None

    def _proxy_ns(self) -> int | None:
        """When the proxy next has something to send on."""
        times = [self._to_proxy[0][0]] if self._to_proxy else []
        if self._arrival is not None:
            times.append(self._arrival.request.arrival_ns)
        return min(times, default=None)

    def _proxy_acts(self, now_ns: int) -> StepComparison | None:
        if self._arrival is not None and self._arrival.request.arrival_ns == now_ns:
            request_id = self._arrival.request.id
            name = self._prefill[self._num_prefill % len(self._prefill)]
            self._num_prefill += 1
            self._prefilled_at[request_id] = name
            self._arrival = next(self._arrivals, None)
            self._send(request_id, name, now_ns)
            return None
        _, _, request_id = heappop(self._to_proxy)
        name = self._decode[self._num_handed % len(self._decode)]
        prefill = self._prefilled_at[request_id]
        blocks = self._replays[prefill].kept_blocks(self.transfers[prefill].kept[request_id])
        self._send(request_id, name, now_ns)
        self._num_handed += 1
        return self._compare_handed(Handed(now_ns, request_id, prefill, name, blocks))

    def _send(self, request_id: int, name: str, now_ns: int) -> None:
        """Sends the request from the proxy to an engine."""
        arrival = self.recording.at[name][request_id]
        request = replace(arrival.request, arrival_ns=now_ns + self.recording.hop_ns)
        self._replays[name].submit(replace(arrival, request=request))

    # ---- what is equal

    def _compare_handed(self, here: Handed) -> StepComparison | None:
        handed, number = self.recording.handed, self._num_handed
        if number > len(handed):
            return self._unequal(f"hand-over {number} is made where the recording has ended after {number - 1}")
        recorded = handed[number - 1]
        if here == recorded:
            return None
        names = {"at_ns": "t", "request": "id", "prefill": "prefill", "decode": "decode", "blocks": "blocks"}
        differences = [
            FactDifference(name, shown_fact(key, ours), shown_fact(key, theirs))
            for key, name in names.items()
            if (ours := getattr(here, key)) != (theirs := getattr(recorded, key))
        ]
        what = ", ".join(each.name for each in differences)
        at = f"(handed[{number - 1}], {here.at_ns / NS_PER_S:.6f} s)"
        return self._unequal(f"hand-over {number} differs in {what} {at}", tuple(differences))

    def _unequal(self, what: str, differences: tuple[FactDifference, ...] = ()) -> StepComparison:
        first = self._comparing[self._prefill[0]]
        return StepComparison(self.path, first.recording.policy, self._num_steps(), what, differences)

    def _num_steps(self) -> int:
        return sum(comparing.count for comparing in self._comparing.values())

    def _end(self) -> StepComparison:
        """The verdict once nothing is left to do."""
        for comparing in self._comparing.values():
            if (verdict := comparing.end() or comparing.totals()) is not None:
                return verdict
        if self._num_handed < len(self.recording.handed):
            recorded = len(self.recording.handed)
            return self._unequal(f"ends after {self._num_handed} hand-overs, the recording has {recorded}")
        ours, recorded = self._totals(), self.recording.totals
        differences = tuple(
            FactDifference(name, str(ours[name]), str(value)) for name, value in recorded.items() if ours[name] != value
        )
        if differences:
            names = ", ".join(difference.name for difference in differences)
            return self._unequal(f"all {self._num_steps()} steps are equal, the totals differ in {names}", differences)
        return self._unequal("")

    def _totals(self) -> dict[str, Any]:
        observed = {name: replay.observer.totals for name, replay in self._replays.items()}
        end_ns = max(totals.end_ns for totals in observed.values())
        makespan = self.recording.totals.get("makespan", 0)
        return {
            "requests": len(self.recording.arrivals),
            "steps": {name: totals.steps for name, totals in observed.items()},
            "preemptions": sum(totals.preemptions for totals in observed.values()),
            "blocks_pulled": self.blocks_pulled,
            "makespan": makespan if to_ns(makespan) == end_ns else end_ns / NS_PER_S,
        }
