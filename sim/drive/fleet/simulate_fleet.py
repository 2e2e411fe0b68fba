"""The SimPy driver of several engines behind a router: a process for each engine, the router, the arrivals and the
lifecycle of replicas, in one environment.

At one instant, over all replicas: steps end, replica by replica, and clients receive the events; replicas fail, come
back, are added and removed; arrivals are dispatched by (time, id); every engine lets in what is due; every engine that
is free schedules. So a router knows every answer of the instant, and an engine every arrival, however many hops they
took. With one replica the records are those of `simulate`, bit for bit.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

import simpy

from batchsim.base.errors import ScenarioError, shown
from batchsim.base.units import counted, format_duration
from batchsim.drive.fleet.clients import Clients
from batchsim.drive.fleet.engine import CONTROL, Engine, Slot, Steps
from batchsim.drive.fleet.fixed_fleet import simulate_fixed
from batchsim.drive.fleet.fleet_plan import DRAINING, FAILED, LOST, STARTING, UP, FleetPlan, ReplicaSpan
from batchsim.drive.fleet.fleet_records import EngineLife, merged, without_steps
from batchsim.drive.fleet.routers.router import ForgetsReplicas, ReadsLoads, Router, SeesFirstTokens, hears_answers_only
from batchsim.drive.fleet.scaling.autoscaler import EngineLoad, EngineWork
from batchsim.drive.simulate import Phase, Pulse
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import AnyWorkload, EngineEvent
from batchsim.kernel.record import MISSING, REPLICA_FAILED, Records

MAX_IDLE_LOOKS = 10_000
"""Most consecutive looks of an autoscaler without a replica up and without events to come, other than requests held for
a replica."""


@dataclass(frozen=True)
class FleetRun:
    """The records of all replicas as one, when the last engine was through, in ns, and each replica's states.

    `lives`: what every engine recorded, where steps and states were not to be joined; `records` then has none.
    """

    records: Records
    end_ns: int
    spans: tuple[ReplicaSpan, ...]
    lives: tuple[EngineLife, ...] = ()


def simulate_fleet(
    new_engine: Callable[[int], EngineCore],
    router: Router,
    plan: FleetPlan,
    workload: AnyWorkload,
    *,
    feeds_back: bool,
    stop_ns: int | None = None,
    until_ns: int = 0,
    leap: bool = True,
    join: bool = True,
    pulse: Pulse | None = None,
) -> FleetRun:
    """Runs `workload` through the replicas of `plan`, each a `new_engine(replica)` on a SimExecutor, to its end.

    `feeds_back`: answers may cause arrivals. Where they do not, engines leap to the next arrival whatever the others
    do. `leap=False` makes every step an event of its own; the records are the same. At `stop_ns` what waits at the
    router ends unfinished, as engines do it. A scaler goes on until `until_ns`. `join=False` leaves the steps and
    states of each engine apart: joined, those of a long run are in memory several times.
    """
    if leap and not feeds_back and plan.is_fixed and hears_answers_only(router):
        cores = [new_engine(replica) for replica in range(plan.count)]
        end_ns = simulate_fixed(cores, router, workload, pulse)
        lives = [EngineLife(replica, core.recorder.records()) for replica, core in enumerate(cores)]
        until_ns = max(until_ns, end_ns)
        spans = tuple(ReplicaSpan(replica, UP, 0, until_ns) for replica in range(plan.count) if until_ns)
    else:

        def new_fleet(env: simpy.Environment) -> Fleet:
            return Fleet(env, new_engine, router, plan, workload, feeds_back, stop_ns, leap, pulse)

        return run_fleet(new_fleet, until_ns, join=join)
    return as_one(lives, end_ns, spans, join=join)


def run_fleet(new_fleet: Callable[[simpy.Environment], Fleet], until_ns: int, *, join: bool) -> FleetRun:
    """Runs a fleet, made in an environment of its own, to its end, a scaler until `until_ns`."""
    env = simpy.Environment()
    fleet = new_fleet(env)
    fleet.start()
    env.run(until=fleet.done)
    end_ns = int(env.now)
    if fleet.plan.scaler is not None and until_ns > end_ns:
        env.run(until=until_ns)
    fleet.close_spans(max(end_ns, until_ns))
    return as_one(fleet.lives(), end_ns, tuple(sorted(fleet.spans, key=_by_replica)), join=join)


def as_one(lives: list[EngineLife], end_ns: int, spans: tuple[ReplicaSpan, ...], *, join: bool) -> FleetRun:
    """The run of engines with these `lives`, their steps and states joined with `join`, which ended at `end_ns`."""
    if join:
        return FleetRun(merged(lives), end_ns, spans)
    return FleetRun(merged([without_steps(life) for life in lives]), end_ns, spans, tuple(lives))


def _by_replica(span: ReplicaSpan) -> tuple[int, int]:
    return span.replica, span.start_ns


class Fleet:
    """The processes of one simulation and what they share."""

    def __init__(
        self,
        env: simpy.Environment,
        new_engine: Callable[[int], EngineCore],
        router: Router,
        plan: FleetPlan,
        workload: AnyWorkload,
        feeds_back: bool,
        stop_ns: int | None,
        leap: bool,
        pulse: Pulse | None = None,
    ) -> None:
        self.env = env
        self.pulse = pulse
        self.new_engine = new_engine
        self.plan = plan
        self.feeds_back = feeds_back or plan.admission is not None  # an answer lets in who waits at the gate
        self.stop_ns = stop_ns
        self.leap = leap
        self.done = env.event()
        self.router = router
        self.clients = self._new_clients(router, workload)
        # Whether an engine may sleep beyond the next arrival: its load is read only as requests come to it.
        self.plans = leap and not self.feeds_back and not self.clients.shows_loads
        self.tells_ahead = False
        self.slots = [Slot(number) for number in range(plan.most)]
        self.up: list[int] = []
        self.spans: list[ReplicaSpan] = []
        self.control_ns: list[int] = []  # of changes and observations of replicas
        self._engines: list[Engine] = []  # all there ever were
        self._living: list[Engine] = []
        self._idle_looks = 0  # in a row without a replica, while requests wait and no other event will come
        self._scaler = None if plan.scaler is None else plan.scaler.build()

    def _new_clients(self, router: Router, workload: AnyWorkload) -> Clients:
        return Clients(self, router, workload, None if self.plan.admission is None else self.plan.admission.build())

    # ---- the whole run

    def start(self) -> None:
        """Starts the replicas and all processes."""
        for slot in self.slots[: self.plan.count]:
            self._put_up(slot)
        self.clients.start()
        for failure in self.plan.failures:
            slot = self.slots[failure.replica]
            if failure.notice:
                self.at(failure.at - failure.notice, lambda slot=slot: self._notice(slot))
            self.at(failure.at, self._failure(slot, failure.down_for))
        if self.plan.scaler is not None:
            self.at(self.plan.scaler.every, self._look)
        if isinstance(self.router, ReadsLoads) and self.router.metrics_interval:
            self._scrape(self.router, self.router.metrics_interval)

    def _scrape(self, router: ReadsLoads, interval_ns: int) -> None:
        """Shows the router what the engines report, now and every `interval_ns` until the run is done."""
        if not self.done.triggered:
            router.observe(self.loads())
            self.at(int(self.env.now) + interval_ns, lambda: self._scrape(router, interval_ns))

    def loads(self) -> dict[int, EngineLoad]:
        """What the engines of the replicas that take requests report now, by number."""
        return {engine.slot.number: engine.load() for engine in self.engines()}

    def lives(self) -> list[EngineLife]:
        """What every engine and the router recorded, in order of the replicas."""
        lives = [EngineLife(e.slot.number, e.core.recorder.records()) for e in self._engines]
        router = [EngineLife(MISSING, self.clients.recorder.records())] if len(self.clients.recorder) else []
        return sorted(lives, key=lambda life: life.replica) + router

    def close_spans(self, end_ns: int) -> None:
        """Ends the span of every replica's present state at `end_ns`."""
        for slot in self.slots:
            self._become(slot, "", end_ns)

    def check_done(self) -> bool:
        """Whether every request has ended, none will come and no engine is at work; if so, the run is done."""
        if self.clients.streams or self.clients.in_flight or any(engine.core.in_flight for engine in self._living):
            return False
        if not self.done.triggered:
            self.done.succeed()
        return True

    @property
    def is_streaming(self) -> bool:
        """Whether arrivals may come that no answer causes."""
        return self.clients.streams > 0

    def tell(self, engine: Engine, events: Iterable[EngineEvent], now_ns: int) -> None:
        """Passes the events of `engine` to router and clients."""
        self.clients.tell(engine, events, now_ns)

    def drain(self, engine: Engine) -> bool:
        """Whether no arrival will come to `engine` until it acts itself.

        Where answers cause arrivals, engines that have work and do not sleep may still bring some.
        """
        if engine.slot.state == DRAINING:
            return True
        clients = self.clients
        if clients.streams or clients.pending or (clients.held and clients.gate is None):
            return False
        return not self.feeds_back or not any(
            (other.wake is None or other.core.in_flight.steps) and other.core.has_work
            for other in self._living
            if other is not engine
        )

    def rouse_undrained(self) -> None:
        """Wakes engines that went to sleep waiting for arrivals, where by now none will come."""
        for engine in self._living:
            if engine.core.paused_until_ns > self.env.now:  # it asks by itself when it goes on
                continue
            if engine.wake is not None and not engine.asked_to_drain and engine.core.has_work and self.drain(engine):
                engine.rouse()

    def horizon_ns(self) -> float:
        """The time in ns up to which nothing can happen that an engine must know of at the end of a step."""
        if self.feeds_back:
            return self.env.peek()
        if self.clients.pending:
            return self.env.now  # an arrived request is dispatched within this instant
        return min(self.clients.next_known_ns, self.next_control_ns)

    @property
    def next_control_ns(self) -> float:
        """The time in ns of the next change or observation of a replica; inf if none is planned."""
        return self.control_ns[0] if self.control_ns else inf

    # ---- replicas

    def at(self, time_ns: int, act: Callable[[], None]) -> None:
        """Has `act` called at `time_ns`, between the ends of steps and the dispatch of arrivals."""
        heappush(self.control_ns, time_ns)
        self.env.process(self._control(time_ns, act))

    def _control(self, time_ns: int, act: Callable[[], None]) -> Steps:
        if time_ns > self.env.now:
            yield self.env.timeout(time_ns - self.env.now)
        for engine in self._living:
            engine.cut(int(self.env.now))
        yield Phase(self.env, CONTROL)
        heappop(self.control_ns)
        act()
        self.rouse_undrained()

    def _become(self, slot: Slot, state: str, now_ns: int) -> None:
        if slot.state and now_ns > slot.since_ns:
            self.spans.append(ReplicaSpan(slot.number, slot.state, slot.since_ns, now_ns))
        if slot.state == UP:
            self.up.remove(slot.number)
        if state in ("", FAILED, LOST) and isinstance(self.router, ForgetsReplicas):
            self.router.removed(slot.number)
        if state == UP:
            insort(self.up, slot.number)
        slot.state, slot.since_ns = state, now_ns

    def _put_up(self, slot: Slot) -> None:
        """Starts a new engine for the replica, which takes requests from now on."""
        now_ns = int(self.env.now)
        self._become(slot, UP, now_ns)
        slot.is_noticed = False
        slot.engine = self._new_engine(slot)
        if isinstance(self.router, SeesFirstTokens):
            slot.engine.core.journal.first_tokens = []
        self._engines.append(slot.engine)
        self._living.append(slot.engine)
        self.env.process(slot.engine.process())
        self.clients.release()

    def _new_engine(self, slot: Slot) -> Engine:
        return Engine(self, slot, self.new_engine(slot.number))

    def _failure(self, slot: Slot, down_ns: int) -> Callable[[], None]:
        def act() -> None:
            engine, now_ns = slot.engine, int(self.env.now)
            self.at(now_ns + down_ns, lambda: self._put_up(slot))
            if slot.state == LOST:  # empty by the end of its notice
                return
            assert engine is not None and slot.state in (UP, DRAINING), "checked by the scenario"
            self._become(slot, LOST if slot.is_noticed else FAILED, now_ns)
            self._stop(slot, engine)
            lost = engine.core.fail(now_ns, REPLICA_FAILED)
            events = engine.core.take_events()
            if self.plan.lost == "fail":
                self.clients.tell(engine, events, now_ns)
            else:
                self.clients.retry(engine, [arrival.request for arrival in lost], now_ns)
            self.check_done()

        return act

    def _notice(self, slot: Slot) -> None:
        """Lets a replica that is to be taken away drain."""
        assert slot.state == UP, "checked by the scenario"
        slot.is_noticed = True
        self._remove(slot, int(self.env.now))

    def _stop(self, slot: Slot, engine: Engine) -> None:
        engine.alive, slot.engine = False, None
        self._living.remove(engine)

    def retire(self, slot: Slot) -> None:
        """Removes a replica without work at once."""
        if slot.engine is not None:
            self._stop(slot, slot.engine)
        self._become(slot, LOST if slot.is_noticed else "", int(self.env.now))
        self.rouse_undrained()

    # ---- the scaler

    def _look(self) -> None:
        config = self.plan.scaler
        assert config is not None and self._scaler is not None, "scheduled only with one"
        now_ns = int(self.env.now)
        wanted = self._scaler.desired(Look(self), now_ns)
        if type(wanted) is not int:
            raise ScenarioError(
                f"autoscaler: {type(self._scaler).__name__}.desired gives {shown(wanted)} at"
                f" {format_duration(now_ns)}. Return a whole number of replicas."
            )
        staying = self.staying()
        for slot in [slot for slot in self.slots if not slot.state][: max(wanted - len(staying), 0)]:
            self._become(slot, STARTING, now_ns)
            self.at(now_ns + config.cold_start, lambda slot=slot: self._started(slot, now_ns))
        for slot in reversed(staying[max(wanted, 0) :]):
            self._remove(slot, now_ns)
        self._check_served(len(staying) + wanted)
        self.at(now_ns + config.every, self._look)

    def _check_served(self, num_replicas: int) -> None:
        """ScenarioError where a scaler has kept no replica for so long that the waiting requests would wait for
        ever."""
        clients = self.clients
        self._idle_looks = 0 if num_replicas or clients.streams or not clients.held else self._idle_looks + 1
        if self._idle_looks > MAX_IDLE_LOOKS:
            waiting = counted(len(clients.held), "request waits", "requests wait")
            raise ScenarioError(
                f"replicas.autoscaler: there has been no replica for {MAX_IDLE_LOOKS:,} looks, and {waiting} for one."
                " Lower its activation, or set min to 1."
            )

    def staying(self) -> list[Slot]:
        """The replicas that are there and do not drain."""
        return [slot for slot in self.slots if slot.state in (STARTING, UP, FAILED)]

    def prune(self, request_id: int, now_ns: int) -> None:
        """Prunes a request at every engine, since another of its task has succeeded."""
        for engine in self._living:
            engine.cut(now_ns)
            engine.core.prune(request_id, now_ns)
            engine.rouse()

    def pause(self, until_ns: int) -> None:
        """Has no engine begin a step before `until_ns`."""
        for engine in self._living:
            engine.core.paused_until_ns = until_ns

    def engines(self) -> Iterator[Engine]:
        """The engines of the replicas that take requests, by number."""
        for number in self.up:
            engine = self.slots[number].engine
            assert engine is not None, "a replica that is up has an engine"
            yield engine

    def num_waiting(self) -> int:
        """Requests that wait, at the router and in all engines."""
        return self.clients.num_held + sum(engine.core.num_waiting for engine in self._living)

    def _started(self, slot: Slot, since_ns: int) -> None:
        """Ends the cold start that began at `since_ns`, unless the replica was removed meanwhile."""
        if slot.state == STARTING and slot.since_ns == since_ns:
            self._put_up(slot)

    def _remove(self, slot: Slot, now_ns: int) -> None:
        """Sends no new requests to a replica and removes it when it is empty."""
        if slot.engine is None or not slot.engine.core.has_work:
            self.retire(slot)
            return
        self._become(slot, DRAINING, now_ns)
        slot.engine.rouse()


class Look:
    """What an autoscaler is shown of a fleet at one instant, as `FleetLoad` has it."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        staying = fleet.staying()
        self.num_replicas = len(staying)
        self.num_starting = sum(slot.state == STARTING for slot in staying)
        self.num_held = fleet.clients.num_held
        self.num_waiting = fleet.num_waiting()
        self.loads: dict[int, EngineLoad] = fleet.loads()

    def demands(self) -> dict[int, float]:
        """Of each engine that takes requests its KV in use, and the tokens of prompts that wait there, over its KV."""
        return {engine.slot.number: engine.demand() for engine in self._fleet.engines()}

    def work(self) -> dict[int, EngineWork]:
        """What each engine that takes requests did since the look before, or since it started."""
        now_ns = int(self._fleet.env.now)
        return {engine.slot.number: engine.work(now_ns) for engine in self._fleet.engines()}
