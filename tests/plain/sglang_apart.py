"""SGLang whose prefill and decode are apart, told again as plain loops over lists, without overlap.

Slow on purpose: to compare with the policies on random workloads. Nobody cancels and no transfer fails. Steps take
10 ns, 1 more a prompt token, 2 a decode. Batches of prompts are those of `tests/plain/sglang.py` with no decodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from batchsim.kernel.types import Arrival
from batchsim.policies.systems.sglang.pd_config import SglangPdConfig
from tests.plain.sglang import CLIP, Group, Naive, Row

Line = tuple[int, int, int, int, int]
"""Start, prompt tokens, decodes, retracted, free blocks."""


@dataclass(eq=False)
class Trip:
    """One request: what the engines know of it, and when it got where."""

    id: int
    arrival: Arrival
    cap: int
    prefill: int = 0
    decode: int = 0
    addressed: bool = False
    refused: bool = False
    sent: int = 0
    over: int = -1
    generated: int = 0
    began: int = -1
    first: int = -1
    last: int = -1
    retractions: int = 0

    @property
    def prompt(self) -> int:
        return self.arrival.request.prompt_tokens

    @property
    def known(self) -> int:
        return self.prompt + self.generated

    @property
    def done(self) -> bool:
        return self.generated >= min(self.arrival.output_tokens or 1, max(self.cap, 1))


class Links:
    """When each link is free again."""

    def __init__(self, page_ns: int, latency_ns: int, *, shared: bool) -> None:
        self.page_ns, self.latency_ns, self.shared = page_ns, latency_ns, shared
        self.free: dict[tuple[int, int], int] = {}

    def send(self, trip: Trip, pages: int, now: int) -> int:
        link = (-1, -1) if self.shared else (trip.prefill, trip.decode)
        self.free[link] = max(now, self.free.get(link, 0)) + pages * self.page_ns
        return self.free[link] + self.latency_ns


class Prefill(Naive):
    """A prefill engine."""

    def __init__(self, config: SglangPdConfig, blocks: int, page: int, limit: int, links: Links) -> None:
        super().__init__(config, [], blocks, page, limit)
        self.most, self.links = self.slots, links
        self.bootstrap: list[Trip] = []
        self.inflight: list[tuple[Row, Trip]] = []
        self.trips: dict[int, Trip] = {}
        self.until: int | None = None
        self.doing: list[tuple[Row, int]] = []
        self.lines: list[Line] = []

    def arrive(self, trip: Trip) -> bool:
        """Whether the request may ever run here."""
        arrival = trip.arrival
        row = self.row(arrival)
        before = len(self.waiting)
        row.cap = 1
        self.enter(row)
        if len(self.waiting) == before:
            return False
        self.waiting.pop()
        row.cap = 1
        self.trips[row.id] = trip
        self.bootstrap.append(trip)
        return True

    def iterate(self, now: int) -> list[Trip]:
        """One turn of the loop of an engine that is free; returns whom the other side refused."""
        for row, trip in [pair for pair in self.inflight if pair[1].over <= now]:
            self.inflight.remove((row, trip))
            self.memory.insert(row)
            self.memory.drop(row)
        refused = [trip for trip in self.bootstrap if trip.refused]
        held = [row for row, _ in self.inflight]
        busy = len(held) + len(self.waiting) + (self.chunked is not None)
        for trip in list(self.bootstrap):
            if trip.refused:
                self.bootstrap.remove(trip)
            elif trip.addressed and busy < 2 * self.most:
                self.bootstrap.remove(trip)
                row = self.row(trip.arrival)
                row.cap = 1
                self.push(row)
                busy += 1
        self.slots = self.most - len(held)
        self.running, self.retracted = Group(), []
        work = self.prefill()
        if work:
            for row, _ in work:
                trip = self.trips[row.id]
                trip.began = now if trip.began < 0 else trip.began
                self.send(row, row.computed, now, last=False)
            tokens = sum(n for _, n in work)
            self.lines.append((now, tokens, 0, 0, self.memory.available() // self.page))
            self.doing, self.until = work, now + 10 + tokens
        return refused

    def end(self, now: int) -> list[Trip]:
        """The end of a step; returns those that go on elsewhere."""
        handed: list[Trip] = []
        for row, n in self.doing:
            row.computed += n
            if row is not self.chunked:
                self.memory.insert(row)
                self.send(row, row.computed, now, last=True)
                self.inflight.append((row, self.trips[row.id]))
                handed.append(self.trips[row.id])
        if self.chunked is not None:
            self.memory.insert(self.chunked)
            self.send(self.chunked, self.chunked.computed, now, last=False)
        self.doing, self.until = [], None
        return handed

    def send(self, row: Row, tokens: int, now: int, *, last: bool) -> None:
        trip, page = self.trips[row.id], self.page
        if not last:
            tokens -= tokens % page
        if tokens > trip.sent:
            over = self.links.send(trip, -(-tokens // page) - trip.sent // page, now)
            trip.sent = tokens
            if last:
                trip.over = over


class Decode:
    """A decode engine."""

    def __init__(self, config: SglangPdConfig, blocks: int, page: int, limit: int) -> None:
        self.config, self.page, self.blocks, self.pool = config, page, blocks, blocks * page
        self.limit = min(limit, self.pool)
        asked = config.max_running_requests or max(min(self.pool * 512 // limit, 4096), 2048)
        self.most = min(asked, self.pool // 2)
        self.reserve = config.num_reserved_decode_tokens
        self.asked: list[Trip] = []
        self.coming: list[Trip] = []
        self.waiting: list[Trip] = []
        self.running: list[Trip] = []
        self.retracted: list[Trip] = []
        self.pages: dict[Trip, int] = {}
        self.polls = 0
        self.until: int | None = None
        self.freed = False
        self.lines: list[Line] = []

    @property
    def free(self) -> int:
        return self.blocks - sum(self.pages.values())

    def ceil(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def arrive(self, trip: Trip) -> None:
        """Takes in a request, or says that it never can."""
        prompt, page = trip.prompt, self.page
        fits = prompt < self.limit - 6
        trip.cap = max(min(trip.cap, self.limit - 2 - prompt, self.pool - self.ceil(prompt) * page - page - 1), 0)
        fits = fits and prompt + trip.cap + page < self.pool
        need = max(self.ceil(prompt) * page + self.reserve, prompt + min(trip.cap, CLIP))
        if fits and need <= self.pool:
            self.asked.append(trip)
        else:
            trip.refused = True

    def slots_free(self) -> int:
        extra = self.config.extra_slots
        held = [trip for trip in self.running if not trip.done]
        return self.most + extra - len(held) - len(self.coming) - len(self.waiting)

    def resume(self, *, hungry: bool) -> None:
        active, back = len(self.running) + len(self.coming) + len(self.waiting), list[Trip]()
        while self.retracted and self.slots_free() - len(back) > 0:
            trip = self.retracted[0]
            pages = self.ceil(trip.known - 1)
            budget = self.free * self.page - self.reserve * (active + len(back))
            fits = pages * self.page + self.reserve <= budget
            if not fits and not (hungry and self.ceil(trip.known) <= self.free):
                break
            self.pages[trip] = pages
            back.append(self.retracted.pop(0))
        self.waiting += back

    def preallocate(self) -> list[Trip]:
        if self.config.enable_priority_scheduling:
            sign = 1 if self.config.schedule_low_priority_values_first else -1
            self.asked.sort(key=lambda trip: sign * trip.arrival.request.priority)
        retractable = sum(trip.known for trip in self.running)
        single = max([min(t.cap, CLIP) + t.prompt - retractable for t in self.running], default=0)
        active, taken = len(self.running) + len(self.coming) + len(self.waiting), list[Trip]()
        for trip in self.asked:
            if 2 * self.most - len(self.coming) - len(taken) <= 0 or self.slots_free() - len(taken) <= 0:
                break
            budget = self.free * self.page - max(self.reserve * (active + len(taken)), single)
            pages = self.ceil(trip.prompt)
            need = max(pages * self.page + self.reserve, trip.prompt + min(trip.cap, CLIP) - retractable)
            if need > budget:
                break
            self.pages[trip] = pages
            taken.append(trip)
        for trip in taken:
            self.asked.remove(trip)
            trip.addressed = True
        self.coming += taken
        return taken

    def iterate(self, now: int) -> list[Trip]:
        """One turn of the loop, or as many as an engine at rest takes; returns who got blocks."""
        told, preempted, hungry = list[Trip](), list[Trip](), False
        while True:
            stale, self.freed = any(trip.done for trip in self.running), False
            self.resume(hungry=hungry)
            polled = True
            if not self.retracted or hungry:
                self.polls = (self.polls + 1) % self.config.disaggregation_decode_polling_interval
                polled = self.polls == 0
                if polled or hungry:
                    told += [] if self.retracted else self.preallocate()
                    over = [trip for trip in self.coming if 0 <= trip.over <= now]
                    self.coming = [trip for trip in self.coming if trip not in over]
                    self.waiting += over
            self.prebuild(now)
            self.running = [trip for trip in self.running if not trip.done]
            if self.running and self.fit(preempted):
                self.lines.append((now, 0, len(self.running), len(preempted), self.free))
                self.until = now + 10 + 2 * len(self.running)
                return told
            if preempted:
                self.lines.append((now, 0, 0, len(preempted), self.free))
                self.until = now + 10
                return told
            if hungry:
                return told
            if polled and not stale and not self.freed:
                if not self.retracted:
                    return told
                hungry = True

    def prebuild(self, now: int) -> None:
        if self.config.enable_priority_scheduling:
            sign = 1 if self.config.schedule_low_priority_values_first else -1
            self.waiting.sort(key=lambda trip: sign * trip.arrival.request.priority)
        places = max(self.most - len(self.running), 0)
        batch, self.waiting = self.waiting[:places], self.waiting[places:]
        for trip in batch:
            if not trip.generated:
                trip.generated, trip.first = 1, now
            if trip.done:
                trip.last, self.freed = now, True
                del self.pages[trip]
            else:
                self.running.append(trip)

    def lacking(self, trips: list[Trip]) -> int:
        return sum(self.ceil(trip.known) - self.pages[trip] for trip in trips)

    def fit(self, preempted: list[Trip]) -> bool:
        sign = -1 if self.config.schedule_low_priority_values_first else 1

        def worth(trip: Trip) -> tuple[int, int, int]:
            by_priority = self.config.retraction_policy == "priority"
            return sign * trip.arrival.request.priority if by_priority else 0, trip.generated, -trip.prompt

        if self.lacking(self.running) > self.free:
            stay = sorted(self.running, key=worth, reverse=True)
            while len(stay) > 1 and self.lacking(stay) > self.free:
                trip = stay.pop()
                trip.retractions += 1
                del self.pages[trip]
                self.retracted.append(trip)
                preempted.append(trip)
            self.running = stay
            if self.lacking(stay) > self.free:  # it ends with an error
                del self.pages[stay[0]]
                self.running, self.freed = [], True
                return False
        for trip in self.running:
            self.pages[trip] = self.ceil(trip.known)
        return True

    def end(self, now: int) -> None:
        self.until = None
        for trip in self.running:
            trip.generated += 1
            if trip.done:
                trip.last = now
                del self.pages[trip]


@dataclass
class Apart:
    """Engines of both kinds, taken in turn, and what became of each request."""

    prefill: list[Prefill]
    decode: list[Decode]
    trips: list[Trip] = field(default_factory=list[Trip])

    def run(self, arrivals: list[Arrival]) -> None:
        engines: list[Prefill | Decode] = [*self.prefill, *self.decode]
        to_come = [Trip(a.request.id, a, a.request.max_output_tokens) for a in arrivals]
        self.trips, sent = list(to_come), 0
        while True:
            times = [trip.arrival.request.arrival_ns for trip in to_come]
            times += [engine.until for engine in engines if engine.until is not None]
            times += [trip.over for trip in self.trips if trip.over > getattr(self, "now", -1)]
            if not times:
                return
            self.now = now = min(times)
            woken = {i for i, engine in enumerate(engines) if engine.until == now}
            for engine in engines:
                if engine.until == now:
                    handed = engine.end(now) or []
                    woken |= {len(self.prefill) + trip.decode for trip in handed}
            for trip in [trip for trip in to_come if trip.arrival.request.arrival_ns == now]:
                to_come.remove(trip)
                trip.prefill, trip.decode = sent % len(self.prefill), sent % len(self.decode)
                sent += 1
                if self.prefill[trip.prefill].arrive(trip):
                    self.decode[trip.decode].arrive(trip)
                    woken |= {trip.prefill, len(self.prefill) + trip.decode}
            woken |= {trip.prefill for trip in self.trips if trip.over == now}
            woken |= {len(self.prefill) + trip.decode for trip in self.trips if trip.over == now}
            while woken := {i for i in woken if engines[i].until is None}:
                number = min(woken)
                woken.remove(number)
                told = engines[number].iterate(now)
                if number >= len(self.prefill):
                    woken |= {trip.prefill for trip in told}
