"""The engines behind an endpoint: the simulation of `run`, advanced by the owner of a clock.

Simulated time is never later than the clock, and an event that is handled late keeps its own time: lateness shows to
clients and not in the records, which are those of a simulation of the same arrivals. One engine is a fleet of one.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import simpy

from batchsim.base.errors import ScenarioError
from batchsim.base.units import NS_PER_S
from batchsim.drive.fleet.clients import Clients, InFlight
from batchsim.drive.fleet.engine import Engine, Steps
from batchsim.drive.fleet.fleet_plan import FleetPlan, ReplicaSpan
from batchsim.drive.fleet.fleet_records import merged
from batchsim.drive.fleet.routing import RoundRobinConfig
from batchsim.drive.fleet.simulate_fleet import Fleet
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import Cancelled, Ended, EngineEvent, Tokens
from batchsim.kernel.record import UNFINISHED, Records
from batchsim.kernel.types import Arrival, Request
from batchsim.scenario import PolicySpec
from batchsim.scenario.setup import Setup
from batchsim.scenario.tiered import check_no_tiers
from batchsim.serve.answers import SPILL_BYTES, STOPPED, Answer, Answers, Asked, Update
from batchsim.serve.kv_events import KvEvents
from batchsim.serve.metrics import Metrics
from batchsim.serve.served_workload import unplayed

_TURN_S = 0.002
"""Seconds that engines take at a time: where they cost more than the clock allows, clients are served all the same."""


class _Door(Clients):
    """The clients of an endpoint: arrivals are not known in advance, and events go back to the open answers."""

    def __init__(self, simulation: RealtimeSimulation, fleet: Fleet) -> None:
        super().__init__(fleet, fleet.clients.router, simulation)
        self._simulation = simulation
        self.cancelled: set[int] = set()  # given up, and not ended yet

    def begin(self) -> None:
        """Keeps the arrival stream open until `close`, so that schedulers never drain."""
        self.streams += 1

    def close(self) -> None:
        self.streams -= 1
        self.fleet.rouse_undrained()

    def send(self, arrival: Arrival) -> None:
        self.streams += 1
        self.fleet.env.process(self._following(arrival))

    def give_up(self, request_id: int, now_ns: int) -> None:
        self.fleet.env.process(self._given_up(request_id, now_ns))

    def _given_up(self, request_id: int, now_ns: int) -> Steps:
        env = self.fleet.env
        if now_ns > env.now:
            yield env.timeout(now_ns - env.now)
        if request_id in self.held:
            self._give_up(self.in_flight[request_id], Cancelled, "client_cancel")
            return
        if request_id not in self._simulation.answers:
            return
        self.cancelled.add(request_id)  # for one that is on its way to an engine yet
        for engine in self._simulation.engines():
            engine.core.cancel(request_id, int(env.now))
            engine.rouse()

    def _give_up(self, sent: InFlight, ended: type[Ended], reason: str) -> None:
        super()._give_up(sent, ended, reason)
        request_id = sent.arrival.request.id
        if request_id not in self.in_flight:
            self._simulation.ended_at_router(request_id, ended.outcome, reason)

    def _up(self, request_id: int) -> Sequence[int]:
        answer = self._simulation.answers.get(request_id)
        up, rank = super()._up(request_id), None if answer is None else answer.asked.rank
        return up if rank is None else [replica for replica in up if replica == rank]

    def _dispatch(self, request_id: int, now_ns: int) -> None:
        super()._dispatch(request_id, now_ns)
        if request_id in self.cancelled:
            self.give_up(request_id, now_ns)

    def retry(self, engine: Engine, lost: list[Request], now_ns: int) -> None:
        for request in lost:
            self._simulation.sent_anew(request.id)
        super().retry(engine, lost, now_ns)

    def tell(self, engine: Engine, events: Iterable[EngineEvent], now_ns: int) -> None:
        events = list(events)
        self._simulation.pass_events(engine, events, now_ns)
        super().tell(engine, events, now_ns)


class RealtimeSimulation(Answers):
    """The engines of `setup` under `spec`, run as far as `run_to` says. Rows beyond `spill_bytes` each are on disk.

    ScenarioError where the policy needs to know of its requests what only a simulation knows.
    """

    def __init__(
        self, setup: Setup, spec: PolicySpec, metrics: Metrics, seed: int = 0, spill_bytes: int = SPILL_BYTES
    ) -> None:
        super().__init__(setup, spec, metrics, seed, spill_bytes)
        playing = unplayed(setup)
        self._frontend = playing.traffic.frontend
        workload = playing.workload(1.0, 0)

        def new_engine(replica: int) -> EngineCore:
            group = playing.group_of(replica).setup if playing.groups else playing
            core = group.engine(spec, workload)
            core.tells_tokens = True
            core.journal.adapter_names = self.adapter_names
            return core

        replicas = setup.scenario.file.replicas
        if replicas is not None and replicas.transfer is not None:
            raise ScenarioError(f"{setup.scenario.name}: prefill and decode apart are not served. Drop pools.")
        if setup.are_ranks:
            raise ScenarioError(f"{setup.scenario.name}: ranks that step together are not served. Drop dp_attention.")
        check_no_tiers(setup.scenario, "are not served")
        if setup.scenario.file.structured_cost is not None:
            raise ScenarioError(f"{setup.scenario.name}: constrained answers are not served. Drop structured_cost.")
        if replicas is not None and replicas.are_models:
            key = "share" if replicas.sleep is None else "sleep"
            raise ScenarioError(f"{setup.scenario.name}: models that share a GPU are not served. Drop {key}.")
        plan = FleetPlan(1) if replicas is None else replicas.plan
        router = (RoundRobinConfig() if replicas is None else replicas.chosen_router).build(seed)
        self.kv_events: KvEvents | None = None
        self.adapter_names: tuple[str, ...] = ()  # of all that were ever loaded, by number
        self._env = simpy.Environment()
        self.fleet = Fleet(self._env, new_engine, router, plan, self, feeds_back=True, stop_ns=None, leap=False)
        self.fleet.clients = self.door = _Door(self, self.fleet)
        self.door.begin()
        self.fleet.start()
        self.run_to(0)

    def engines(self) -> list[Engine]:
        """The engines of the replicas that are there."""
        return [slot.engine for slot in self.fleet.slots if slot.engine is not None]

    def cores(self) -> dict[int, EngineCore]:
        """The engines of the replicas that are there, by number."""
        return {engine.slot.number: engine.core for engine in self.engines()}

    # ---- what a server calls

    def pacer(self, speed: float, failed: Callable[[Exception], None]) -> Pacer:
        """The `Pacer` that keeps the engines at the pace of the clock; `failed` is called with an error of theirs."""
        return Pacer(self, speed, failed)

    @property
    def next_ns(self) -> float:
        """The time in ns of the next event; infinite where none is due until a request arrives."""
        return self._env.peek()

    def run_to(self, now_ns: int, within_s: float = math.inf) -> bool:
        """Handles what is due by `now_ns`, as far as that goes `within_s` of this machine's time; whether that is all.

        Raises what a policy or a cost raises: the engines are lost then.
        """
        env, end_s = self._env, time.perf_counter() + within_s
        while env.peek() <= now_ns:
            env.step()
            if time.perf_counter() > end_s and env.peek() <= now_ns:
                self.now_ns = max(self.now_ns, int(env.now))
                self._look_at_caches()
                return False
        self.now_ns = max(self.now_ns, now_ns)
        self._look_at_caches()
        return True

    def name_adapters(self, names: tuple[str, ...]) -> None:
        """Has LoRA adapters known under `names`, by number, to all engines, also later ones."""
        self.adapter_names = names
        for core in self.cores().values():
            core.journal.adapter_names = names

    def publish_kv_events(self, events: KvEvents) -> None:
        """Has `events` look at the engines' caches from now on. ScenarioError where they have none that it can."""
        self.kv_events = events
        self._look_at_caches()

    def _look_at_caches(self) -> None:
        if self.kv_events is not None:
            self.kv_events.look(self.cores())

    def send(self, asked: Asked, now_ns: int, listener: Callable[[Answer], None], came_ns: int | None = None) -> Answer:
        """Sends a request at `now_ns`, or right after the instant handled last.

        `listener` is called after each delivery. `came_ns`: when its client sent it, if it has waited for the engines
        to wake.
        """
        now_ns = max(now_ns, self.now_ns + 1)
        sent_ns = now_ns if came_ns is None else min(came_ns, now_ns)
        frontend = self._frontend
        arrival_ns = now_ns + frontend.request + frontend.per_prompt_token * asked.prompt_tokens
        answer = self.begin(asked, arrival_ns, sent_ns, listener)
        if self.kv_events is not None:
            self.kv_events.sent(answer.number, asked.ids)
        self.door.send(answer.arrival)
        return answer

    def cancel(self, answer: Answer, now_ns: int) -> None:
        """Gives up a request at `now_ns`; one that has ended is left alone."""
        if answer.outcome is None:
            self.door.give_up(answer.number, max(now_ns, self.now_ns + 1))

    def drain(self) -> None:
        """Closes the arrivals: the engines may drain."""
        self.door.close()

    def close(self, now_ns: int) -> tuple[Records, tuple[ReplicaSpan, ...]]:
        """Ends what is open as unfinished; returns the records and what each replica was doing when."""
        while not self.answers and any(engine.core.in_flight.steps for engine in self.engines()):
            self.run_to(int(self.next_ns))  # what is in flight is in vain, and ends
        now_ns = self.now_ns = max(now_ns, self.now_ns)
        ended: set[int] = set()
        for engine in (engines := self.engines()):
            engine.core.fail(now_ns, STOPPED)
            ended |= {event.request.id for event in engine.core.take_events()}
        # or at the router
        on_their_way = [answer for n, answer in self.answers.items() if n not in ended and not answer.has_row]
        for arrival in (answer.arrival for answer in on_their_way):
            if self.setup.groups:
                self.door.recorder.unserved(arrival, now_ns, UNFINISHED, STOPPED)
            else:
                engines[0].core.submit(arrival)
                engines[0].core.close(now_ns, STOPPED)
        self.fleet.close_spans(now_ns)
        return self.records(), tuple(self.fleet.spans)

    def records(self) -> Records:
        """What was recorded so far: requests that have ended, and steps."""
        lives = self.fleet.lives()
        return merged(lives) if self.setup.groups else lives[0].records

    # ---- what the engines call

    def arrivals(self) -> Iterator[Arrival]:
        return iter(())

    def responded(self, request: Request, now_ns: int) -> Arrival | None:
        return None

    def ended_at_router(self, request_id: int, outcome: int, reason: str) -> None:
        """Notes the end of a request that no replica was up for."""
        if (answer := self.answers.get(request_id)) is not None:
            self.deliver([Update(request_id, 0, outcome, reason, answer=answer, attempt=answer.attempt)])

    def sent_anew(self, request_id: int) -> None:
        """Notes that a request begins from the start elsewhere: tokens that the client has are not delivered again."""
        if (answer := self.answers.get(request_id)) is not None:
            answer.attempt += 1
            answer.num_made = answer.held = 0

    def pass_events(self, engine: Engine, events: list[EngineEvent], now_ns: int) -> None:
        """Counts what an engine did at `now_ns`, and delivers it."""
        per_chunk_ns, streams = self._frontend.per_chunk, engine.core.scheduler.streams
        tokens = [event for event in events if type(event) is Tokens]
        if streams and self._frontend.is_immediate and len(tokens) == len(events):
            self.pass_on(engine.slot.number, tokens, now_ns)
            return
        heard = self.hear(engine.core, events)
        updates = self.count(engine.slot.number, *heard, now_ns, streams)
        late_ns = self._frontend.per_stream * engine.core.journal.streams_told if streams else 0
        by_time: dict[int, list[Update]] = {}
        for update in updates:
            answer = update.answer
            assert answer is not None, "noted before"
            if update.outcome is None and not answer.not_before_ns:  # its first piece, as a rule
                answer.not_before_ns = now_ns + per_chunk_ns + late_ns
            by_time.setdefault(max(now_ns + per_chunk_ns, answer.not_before_ns), []).append(update)
        for due_ns, some in by_time.items():
            self._deliver_at(due_ns, some, now_ns)

    def _deliver_at(self, due_ns: int, updates: list[Update], now_ns: int) -> None:
        if due_ns == now_ns:
            self.deliver(updates)
            return
        later = self._env.timeout(due_ns - now_ns)
        assert later.callbacks is not None
        later.callbacks.append(lambda _: self.deliver(updates))

    def _forget(self, answer: Answer) -> None:
        super()._forget(answer)
        self.door.cancelled.discard(answer.number)
        if self.kv_events is not None:
            self.kv_events.ended(answer.number)


class Pacer:
    """Keeps a simulation at the pace of a monotonic clock, `speed` simulated seconds to each of its own."""

    def __init__(self, simulation: RealtimeSimulation, speed: float, failed: Callable[[Exception], None]) -> None:
        self.simulation = simulation
        self.speed = speed
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._start_ns = time.monotonic_ns()
        self.started_unix_ns = time.time_ns()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = self._due_ns = 0.0
        self.is_broken = False

    def now_ns(self) -> int:
        """The simulated time that it should be."""
        return self.at(time.monotonic_ns())

    def at(self, monotonic_ns: int) -> int:
        """The simulated time at a time of the clock."""
        return int((monotonic_ns - self._start_ns) * self.speed)

    def arm(self) -> None:
        """Has the engines run on when they next have something to do. After every change to them."""
        next_ns = self.simulation.next_ns
        if self._timer is not None:
            if next_ns == self._timer_ns:
                return
            self._timer.cancel()
            self._timer = None
        if next_ns == float("inf") or self.is_broken:
            return
        self._timer_ns = next_ns
        now_ns = self.now_ns()
        # What an arrival starts stands at the instant handled last, long ago if engines were idle: it is due now.
        self._due_ns = max(next_ns, now_ns)
        left_s = (self._due_ns - now_ns) / self.speed / NS_PER_S
        self._timer = self._loop.call_later(left_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now_ns = self.now_ns()
        self.simulation.metrics.late.observe((now_ns - self._due_ns) / self.speed / NS_PER_S)
        try:
            is_up_to_date = self.simulation.run_to(now_ns, _TURN_S)
        except Exception as error:
            self.is_broken = True
            self._failed(error)
            return
        self.arm()
        if not is_up_to_date:
            self._due_ns = self._timer_ns
