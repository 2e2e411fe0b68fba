"""Requests on their way: from the client by the router to a replica, back to the router where that fails, and home."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import inf
from typing import Protocol

import simpy

from batchsim.drive.fleet.admission import Gate
from batchsim.drive.fleet.engine import ROUTE, Engine, Home, Slot, Steps
from batchsim.drive.fleet.routers.router import ReadsLoads, Router, SeesFirstTokens, Stage, routed
from batchsim.drive.fleet.scaling.autoscaler import EngineLoad
from batchsim.drive.simulate import Phase, Pulse
from batchsim.kernel.events import (
    AnyWorkload,
    Cancelled,
    Ended,
    EngineEvent,
    Finished,
    Pruned,
    Reaction,
    Rejected,
    Unfinished,
    at_start,
    called,
    reaction,
)
from batchsim.kernel.record import Recorder
from batchsim.kernel.types import Arrival, Request


class InFlight:
    """A client's request in flight: its first arrival, and its time at the router and on failed replicas so far."""

    __slots__ = ("admitted", "arrival", "failover_ns", "num_retries", "router_ns", "since_ns")

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self.since_ns = arrival.request.arrival_ns  # of the life or the wait at hand
        self.router_ns = self.failover_ns = self.num_retries = 0
        self.admitted = False  # by the gate, if there is one: a retry is not asked again

    def now(self, now_ns: int) -> Arrival:
        """The request as it arrives at a replica, or ends at the router, at `now_ns`, with all its times so far."""
        first = self.arrival
        if not self.num_retries and not self.router_ns and now_ns == first.request.arrival_ns:
            return first
        return replace(
            first,
            request=replace(first.request, arrival_ns=now_ns),
            sent_ns=first.request.arrival_ns if first.sent_ns is None else first.sent_ns,
            router_ns=self.router_ns,
            failover_ns=self.failover_ns,
            num_retries=self.num_retries,
        )


class Replicas(Home, Protocol):
    """A fleet as the router and its clients see it: the numbers of the replicas that are `up`, and the `slots` of all.
    At `stop_ns` what waits at the router ends unfinished."""

    pulse: Pulse | None
    stop_ns: int | None
    up: list[int]
    slots: list[Slot]

    def at(self, time_ns: int, act: Callable[[], None]) -> None:
        """Has `act` called at `time_ns`, between the ends of steps and the dispatch of arrivals."""
        ...

    def engines(self) -> Iterator[Engine]:
        """The engines of the replicas that take requests, by number."""
        ...

    def loads(self) -> dict[int, EngineLoad]:
        """What the engines of the replicas that take requests report now, by number."""
        ...

    def prune(self, request_id: int, now_ns: int) -> None:
        """Prunes a request at every engine, since another of its task has succeeded."""
        ...

    def pause(self, until_ns: int) -> None:
        """Has no engine begin a step before `until_ns`."""
        ...


class Clients:
    """The processes of the arrivals and of the router; `in_flight` are the requests sent and not ended."""

    def __init__(self, fleet: Replicas, router: Router, workload: AnyWorkload, gate: Gate | None = None) -> None:
        self.fleet = fleet
        self.router = router
        self._told_first_tokens = router if isinstance(router, SeesFirstTokens) else None
        self._told_loads = router if isinstance(router, ReadsLoads) and not router.metrics_interval else None
        self.shows_loads = self._told_loads is not None
        self.workload = workload
        self.streams = 0  # arrival streams not at their end
        self.next_known_ns: float = inf  # the next of the arrivals known in advance
        self.in_flight: dict[int, InFlight] = {}
        self.pending: list[tuple[int, int]] = []  # (time, id) of what is dispatched at this instant
        self.held: dict[int, None] = {}  # ids of what waits because no replica is up, or the gate holds it
        self.num_released = 0  # of `pending`: waited for a replica, which came up at this instant
        self.gate = gate
        self.num_outstanding = 0  # dispatched and not answered
        self.pruned: set[int] = set()  # ids of requests given up for others
        self.recorder = Recorder()  # of requests that end at the router
        self._knock: simpy.Event | None = None

    def start(self) -> None:
        """Starts the router and the arrivals known in advance."""
        self.fleet.env.process(self._route())
        self.streams += 1
        self.fleet.env.process(self._known(self.workload.arrivals()))
        self._react(at_start(self.workload), 0)

    def _known(self, arrivals: Iterator[Arrival]) -> Steps:
        arrival = next(arrivals, None)
        while arrival is not None:
            self.next_known_ns = arrival.request.arrival_ns
            yield from self._wait_for(arrival)
            following = next(arrivals, None)
            if following is not None and self._is_alone(following):
                self.next_known_ns = following.request.arrival_ns
                self._dispatch(arrival.request.id, arrival.request.arrival_ns)
            else:
                self._submit(arrival.request.arrival_ns, arrival.request.id)
            arrival = following
        self.next_known_ns = inf
        self.streams -= 1

    def _is_alone(self, following: Arrival) -> bool:
        """True if no other event is due now, with `following` the next arrival, so that the arrival can be dispatched
        at once."""
        env = self.fleet.env
        alone = self.gate is None and not self.pending and self._knock is not None
        return alone and following.request.arrival_ns > env.now and env.peek() > env.now

    def _following(self, arrival: Arrival) -> Steps:
        yield from self._wait_for(arrival)
        self._submit(arrival.request.arrival_ns, arrival.request.id)
        self.streams -= 1

    def _wait_for(self, arrival: Arrival) -> Steps:
        delay_ns = arrival.request.arrival_ns - self.fleet.env.now
        if delay_ns > 0:
            yield self.fleet.env.timeout(delay_ns)
        self.in_flight[arrival.request.id] = InFlight(arrival)
        if self.fleet.pulse is not None:
            self.fleet.pulse(arrival.request.arrival_ns)

    def _submit(self, since_ns: int, request_id: int) -> None:
        heappush(self.pending, (since_ns, request_id))
        if self._knock is not None:
            knock, self._knock = self._knock, None
            knock.succeed()

    def tell(self, engine: Engine, events: Iterable[EngineEvent], now_ns: int) -> None:
        """Passes the requests that `engine` has ended to router and clients."""
        for event in events:
            if isinstance(event, Ended):
                self.router.answered(event.request, self._stage(engine), engine.slot.number)
                self._left(event.request, self._output_tokens(event))
                self._respond(event, now_ns)

    def _stage(self, engine: Engine) -> Stage:
        """The stage of requests for which the router chooses `engine`."""
        return "both"

    def _prune(self, request_id: int, now_ns: int) -> None:
        """Gives a request up, wherever it is; one on its way to a replica ends as it gets there."""
        self.pruned.add(request_id)
        if request_id in self.held:
            self._give_up(self.in_flight[request_id], Pruned, "another_succeeded")
            return
        self.fleet.prune(request_id, now_ns)

    def _respond(self, event: Ended, now_ns: int) -> None:
        """Passes the end of a request to its client."""
        answered = self.in_flight.pop(event.request.id).arrival.request
        self._react(reaction(self.workload, type(event)(answered, event.reason, event.output_tokens), now_ns), now_ns)

    def _react(self, reaction: Reaction, now_ns: int) -> None:
        for request_id in reaction.given_up:
            self._prune(request_id, now_ns)
        for following in reaction.arrivals:
            self.streams += 1
            self.fleet.env.process(self._following(following))
        if reaction.pause_until_ns is not None:
            self.fleet.pause(reaction.pause_until_ns)
        if reaction.call_ns is not None:
            self.streams += 1
            self.fleet.at(reaction.call_ns, lambda at_ns=reaction.call_ns: self._call(at_ns))

    def _call(self, at_ns: int) -> None:
        """Calls the workload, which asked for it."""
        self._react(called(self.workload, at_ns), at_ns)
        self.streams -= 1
        self.fleet.rouse_undrained()
        self.fleet.check_done()

    def _route(self) -> Steps:
        while True:
            self._knock = self.fleet.env.event()
            if not self.pending:
                yield self._knock
            yield Phase(self.fleet.env, ROUTE)
            now_ns = int(self.fleet.env.now)
            while self.pending:
                request_id = heappop(self.pending)[1]
                if self.gate is None:
                    self._dispatch(request_id, now_ns)
                else:
                    self._ask(self.gate, request_id, now_ns)
            self.num_released = 0
            if self.gate is not None:
                self._let_in(self.gate, now_ns)
            self.fleet.rouse_undrained()
            self.fleet.check_done()

    def _knock_at_gate(self) -> None:
        """Has the router look at its gate at this instant, if requests wait there."""
        if self.gate and self._knock is not None:
            knock, self._knock = self._knock, None
            knock.succeed()

    def _ask(self, gate: Gate, request_id: int, now_ns: int) -> None:
        """Lets a request wait at the gate, or turns it away."""
        sent = self.in_flight[request_id]
        refused = "" if sent.admitted else gate.refuses(sent.arrival.request, now_ns)
        if refused:
            self.recorder.unserved(sent.now(now_ns), now_ns, Rejected.outcome, refused)
            self._respond(Rejected(sent.arrival.request, refused), now_ns)
        else:
            sent.admitted = True
            gate.put(sent.arrival.request)

    def _let_in(self, gate: Gate, now_ns: int) -> None:
        """Dispatches those whose turn it is; the others wait, no longer than their own timers allow."""
        while gate and self.num_outstanding < gate.capacity(len(self.fleet.up)):
            request_id = gate.pop().id
            if request_id in self.held:
                del self.held[request_id]
                sent = self.in_flight[request_id]
                sent.router_ns += now_ns - sent.since_ns
            self._dispatch(request_id, now_ns)
        for request in gate.newcomers():
            self._hold(request.id, self.in_flight[request.id], now_ns)

    def _left(self, request: Request, output_tokens: int) -> None:
        """Notes that a request that was dispatched is at no replica any more."""
        self.num_outstanding -= 1
        if self.gate is not None:
            self.gate.answered(request, output_tokens)
            self._knock_at_gate()

    def _output_tokens(self, event: Ended) -> int:
        """Output tokens of a finished request; 0 for any other outcome."""
        output_tokens = self.in_flight[event.request.id].arrival.output_tokens if isinstance(event, Finished) else 0
        return min(output_tokens or 0, event.request.max_output_tokens)

    def _dispatch(self, request_id: int, now_ns: int) -> None:
        """Sends a request to a replica, or lets it wait at the router where none is up."""
        sent, up = self.in_flight[request_id], self._up(request_id)
        if not up:
            self._hold(request_id, sent, now_ns)
            return
        arrival = sent.now(now_ns)
        self._show()
        engine = self.fleet.slots[routed(self.router, arrival.request, "both", up)].engine
        assert engine is not None, "one that is up"
        self._send(engine, arrival, sent, now_ns)

    def _up(self, request_id: int) -> Sequence[int]:
        """The replicas that a request may be dispatched to now, by number."""
        return self.fleet.up

    def _send(self, engine: Engine, arrival: Arrival, sent: InFlight, now_ns: int) -> None:
        """Puts a request into the inbox of `engine`."""
        sent.since_ns = now_ns
        self.num_outstanding += 1
        engine.cut(now_ns)
        engine.core.submit(arrival)
        if arrival.request.id in self.pruned:
            engine.core.prune(arrival.request.id, now_ns)
        engine.rouse()

    def _show(self) -> None:
        """Shows a router that wants to know which prompts are computed by now, and what the engines report."""
        if (router := self._told_first_tokens) is not None:
            for engine in self.fleet.engines():
                request_ids, engine.core.journal.first_tokens = engine.core.journal.first_tokens, []
                for request_id in request_ids or ():
                    router.prefilled(request_id, engine.slot.number)
        if self._told_loads is not None:
            self._told_loads.observe(self.fleet.loads())

    def _hold(self, request_id: int, sent: InFlight, now_ns: int) -> None:
        """Lets a request wait at the router, no longer than its own timers and the run's end allow."""
        sent.since_ns = now_ns
        self.held[request_id] = None
        request, cancel_ns = sent.arrival.request, sent.arrival.cancel_ns
        if request_id in self.pruned:
            self._give_up(sent, Pruned, "another_succeeded")
            return
        timers = [(request.deadline_ns, Cancelled, "deadline"), (cancel_ns, Cancelled, "client_cancel")]
        for due_ns, ended, reason in [*timers, (self.fleet.stop_ns, Unfinished, "drain_limit")]:
            if due_ns is not None and due_ns <= now_ns:
                self._give_up(sent, ended, reason)
            elif due_ns is not None:
                self.fleet.at(due_ns, lambda e=ended, r=reason: self._give_up(sent, e, r))

    @property
    def num_held(self) -> int:
        """Requests that wait at the router, those included that are sent on at this very instant."""
        return len(self.held) + self.num_released

    def release(self) -> None:
        """Dispatches at this instant the requests that waited for a replica, since one is up."""
        if self.gate is not None:
            self._knock_at_gate()
            return
        now_ns, held, self.held = int(self.fleet.env.now), self.held, {}
        self.num_released += len(held)
        for request_id in held:
            sent = self.in_flight[request_id]
            sent.router_ns += now_ns - sent.since_ns
            self._submit(now_ns, request_id)

    def _give_up(self, sent: InFlight, ended: type[Ended], reason: str) -> None:
        """Ends a request that still waits at the router."""
        request_id, now_ns = sent.arrival.request.id, int(self.fleet.env.now)
        if request_id not in self.held or self.in_flight.get(request_id) is not sent:
            return
        del self.held[request_id]
        if self.gate is not None:
            self.gate.remove(sent.arrival.request)
        sent.router_ns += now_ns - sent.since_ns
        self.recorder.unserved(sent.now(now_ns), now_ns, ended.outcome, reason)
        self._respond(ended(sent.arrival.request, reason), now_ns)
        self.fleet.check_done()

    def retry(self, engine: Engine, lost: list[Request], now_ns: int) -> None:
        """Sends `lost`, the requests that the failed `engine` held, back to the router."""
        for request in lost:
            self.router.answered(request, "both", engine.slot.number)
            self._left(request, 0)
            sent = self.in_flight[request.id]
            sent.failover_ns += now_ns - sent.since_ns
            sent.num_retries += 1
            sent.since_ns = now_ns
            self._submit(now_ns, request.id)
