"""The engines behind an endpoint: the simulation of `run`, told the time by whoever owns a clock.

Simulated time is never later than the clock, and an event that is handled late keeps its own time: lateness shows to
clients and not in the records, which are those of a simulation of the same arrivals. One engine is a fleet of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields

import simpy

from batchsim.base.errors import ScenarioError
from batchsim.drive.fleet.clients import Clients, InFlight
from batchsim.drive.fleet.engine import Engine, Steps
from batchsim.drive.fleet.fleet_plan import FleetPlan, ReplicaSpan
from batchsim.drive.fleet.fleet_records import merged
from batchsim.drive.fleet.routing import RoundRobinConfig
from batchsim.drive.fleet.simulate_fleet import Fleet
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import Ended, EngineEvent, Tokens
from batchsim.kernel.record import CANCELLED, UNFINISHED, Recorder, Records
from batchsim.kernel.tokens import TokenIds
from batchsim.kernel.types import Arrival, Request
from batchsim.scenario import PolicySpec
from batchsim.scenario.point import Setup
from batchsim.serve.metrics import Life, Metrics, Tally
from batchsim.serve.received import unplayed
from batchsim.serve.spooled import Spooled

STOPPED = "server_stopped"
"""The reason of requests that were open when the server ended."""
SPILL_BYTES = 1 << 22
"""Bytes of an engine's rows beyond which they go to disk: a server's memory does not grow with what it has answered."""
_OF_LIFE = tuple(field.name for field in fields(Life) if field.name != "by_length")


@dataclass(frozen=True)
class Asked:
    """What a client asks of an engine; `output_tokens` is the length at which the answer ends by itself."""

    prompt_tokens: int
    max_output_tokens: int
    output_tokens: int
    ignore_eos: bool = False
    priority: int = 0
    tenant: str = ""
    tokens: TokenIds | None = None


class Answer:
    """What has come of a request so far: `num_tokens` delivered, and once it has ended its `outcome` and `reason`.

    `arrival` is how it was sent; `told` is called whenever more has come.
    """

    __slots__ = (
        "arrival",
        "asked",
        "attempt",
        "cached_tokens",
        "has_row",
        "held",
        "last_token_ns",
        "num_made",
        "num_tokens",
        "outcome",
        "reason",
        "sent_ns",
        "told",
    )

    def __init__(self, arrival: Arrival, asked: Asked, sent_ns: int, told: Callable[[Answer], None]) -> None:
        self.arrival = arrival
        self.asked = asked
        self.sent_ns = sent_ns
        self.told = told
        self.num_tokens = self.cached_tokens = self.held = 0
        self.attempt = self.num_made = 0  # sent anew so often after failures of replicas; tokens of this attempt
        self.outcome: int | None = None
        self.reason = ""
        self.last_token_ns = -1
        self.has_row = False  # its end is in the records, and may be on its way to who asked

    @property
    def number(self) -> int:
        """The number of the request, from 0, in the order of sending."""
        return self.arrival.request.id


@dataclass(slots=True)
class _News:
    """What an instant brought of an answer: so many tokens, and its end."""

    answer: Answer
    outcome: int | None = None
    reason: str = ""
    num_tokens: int = 0
    attempt: int = 0


class _Door(Clients):
    """The clients of an endpoint: arrivals come when they come, and who asked is told what has become of it."""

    def __init__(self, paced: Paced, fleet: Fleet) -> None:
        super().__init__(fleet, fleet.clients.router, paced)
        self._paced = paced
        self.cancelled: set[int] = set()  # given up, and not ended yet

    def begin(self) -> None:
        """Lets no engine believe that nobody will come, until `close`."""
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
            self._give_up(self.in_flight[request_id], CANCELLED, "client_cancel")
            return
        if request_id not in self._paced.answers:
            return
        self.cancelled.add(request_id)  # for one that is on its way to an engine yet
        for engine in self._paced.engines():
            engine.core.cancel(request_id, int(env.now))
            engine.rouse()

    def _give_up(self, sent: InFlight, outcome: int, reason: str) -> None:
        super()._give_up(sent, outcome, reason)
        request_id = sent.arrival.request.id
        if request_id not in self.in_flight:
            self._paced.ended_at_router(request_id, outcome, reason)

    def _dispatch(self, request_id: int, now_ns: int) -> None:
        super()._dispatch(request_id, now_ns)
        if request_id in self.cancelled:
            self.give_up(request_id, now_ns)

    def retry(self, engine: Engine, lost: list[Request], now_ns: int) -> None:
        for request in lost:
            self._paced.sent_anew(request.id)
        super().retry(engine, lost, now_ns)

    def tell(self, engine: Engine, events: Iterable[EngineEvent], now_ns: int) -> None:
        events = list(events)
        self._paced.told(engine, events, now_ns)
        super().tell(engine, events, now_ns)


class Paced:
    """The engines of `setup` under `spec`, run as far as `run_to` says. Rows beyond `spill_bytes` each are on disk.

    ScenarioError where the policy needs to know of its requests what only a simulation knows.
    """

    def __init__(
        self, setup: Setup, spec: PolicySpec, metrics: Metrics, seed: int = 0, spill_bytes: int = SPILL_BYTES
    ) -> None:
        if spec.predictor is not None:
            raise ScenarioError(
                f"{spec.name}: predicts lengths, and nobody knows those of an endpoint's answers. Choose another."
            )
        self.setup = setup
        self.spec = spec
        self.metrics = metrics
        self.caches = bool(spec.config.traits.prefix_cache)
        self._num_rows: dict[Recorder, int] = {}  # rows of requests of each engine that were read
        self.seed = seed
        self._spill_bytes = spill_bytes
        self.now_ns = -1
        self.answers: dict[int, Answer] = {}  # that were not told their end yet
        self.num_sent = 0
        self._spools: dict[Recorder, Spooled] = {}
        playing = unplayed(setup)
        self._frontend = playing.resolved.workload.frontend
        workload = playing.workload(1.0, 0)

        def new_engine(replica: int) -> EngineCore:
            group = playing.group_of(replica).setup if playing.groups else playing
            core = group.engine(spec, workload)
            core.tells_tokens = True
            return core

        replicas = setup.scenario.file.replicas
        plan = FleetPlan(1) if replicas is None else replicas.plan
        router = (RoundRobinConfig() if replicas is None else replicas.chosen_router).build(seed)
        self._env = simpy.Environment()
        self.fleet = Fleet(self._env, new_engine, router, plan, self, feeds_back=True, stop_ns=None, leap=False)
        self.fleet.clients = self.door = _Door(self, self.fleet)
        self.door.begin()
        self.fleet.start()
        self.run_to(0)

    def engines(self) -> list[Engine]:
        """The engines of the replicas that are there."""
        return [slot.engine for slot in self.fleet.slots if slot.engine is not None]

    # ---- what a server calls

    @property
    def next_ns(self) -> float:
        """When something is due, in ns; infinite where nothing is until somebody asks."""
        return self._env.peek()

    def run_to(self, now_ns: int) -> None:
        """Handles all that is due by `now_ns`. Raises what a policy or a cost raises: the engines are lost then."""
        env = self._env
        while env.peek() <= now_ns:
            env.step()
        self.now_ns = max(self.now_ns, now_ns)

    def send(self, asked: Asked, now_ns: int, told: Callable[[Answer], None]) -> Answer:
        """Sends a request at `now_ns`, or right after the instant handled last; `told` hears what becomes of it."""
        sent_ns = max(now_ns, self.now_ns + 1)
        number, frontend = self.num_sent, self._frontend
        request = Request(
            id=number,
            arrival_ns=sent_ns + frontend.request + frontend.per_prompt_token * asked.prompt_tokens,
            prompt_tokens=asked.prompt_tokens,
            max_output_tokens=asked.max_output_tokens,
            priority=asked.priority,
            tenant=asked.tenant,
            tokens=asked.tokens,
            ignore_eos=asked.ignore_eos,
        )
        arrival = Arrival(request, asked.output_tokens, None, None if request.arrival_ns == sent_ns else sent_ns)
        self.num_sent += 1
        answer = self.answers[number] = Answer(arrival, asked, sent_ns, told)
        self.door.send(arrival)
        return answer

    def cancel(self, answer: Answer, now_ns: int) -> None:
        """Gives up a request at `now_ns`; one that has ended is left alone."""
        if answer.outcome is None:
            self.door.give_up(answer.number, max(now_ns, self.now_ns + 1))

    def drain(self) -> None:
        """Tells the engines that nobody will come any more."""
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
        if request_id in self.answers:
            self._deliver([_News(self.answers[request_id], outcome, reason)])

    def sent_anew(self, request_id: int) -> None:
        """Notes that a request begins from the start elsewhere: what the client has of it is not told again."""
        if (answer := self.answers.get(request_id)) is not None:
            answer.attempt += 1
            answer.num_made = answer.held = 0

    def told(self, engine: Engine, events: list[EngineEvent], now_ns: int) -> None:
        """Counts what an engine did at `now_ns`, and passes it on to who asked."""
        streams = engine.core.scheduler.streams
        news: dict[int, _News] = {}
        for event in events:
            answer = self.answers.get(event.request.id)
            if answer is None:
                continue
            its = news.get(answer.number)
            if its is None:
                its = news[answer.number] = _News(answer, attempt=answer.attempt)
            if isinstance(event, Tokens):
                its.num_tokens += event.count
            elif isinstance(event, Ended):
                its.outcome, its.reason = event.outcome, event.reason
        tally = self.metrics.of(engine.slot.number)
        self._count(tally, news.values(), now_ns)
        if any(its.outcome is not None for its in news.values()):
            self._count_ends(tally, engine.core.recorder, now_ns)
            self._spill(engine.core)
        if not streams:  # a whole response at its end
            for its in news.values():
                its.answer.held += its.num_tokens
                its.num_tokens = 0 if its.outcome is None else its.answer.held
        per_chunk_ns = self._frontend.per_chunk
        if not per_chunk_ns:
            self._deliver(news.values())
        elif news:
            later = self._env.timeout(per_chunk_ns)
            assert later.callbacks is not None
            later.callbacks.append(lambda _: self._deliver(news.values()))

    def _count(self, tally: Tally, news: Iterable[_News], now_ns: int) -> None:
        output = prompts = 0
        for its in news:
            if not its.num_tokens:
                continue
            answer = its.answer
            output += its.num_tokens
            if answer.last_token_ns < 0:
                tally.first_token(now_ns - answer.sent_ns, answer.asked.prompt_tokens)
                prompts += answer.asked.prompt_tokens
            else:
                tally.next_token(now_ns - answer.last_token_ns)
            answer.last_token_ns = now_ns
        if output:
            tally.step(prompts + output, output)

    def _count_ends(self, tally: Tally, recorder: Recorder, now_ns: int) -> None:
        """Counts the requests whose rows an engine has written since it was last asked."""
        rows = recorder.requests_from(self._num_rows.get(recorder, 0))
        self._num_rows[recorder] = len(recorder)
        for row in rows:
            life = Life(
                by_length=bool(row["output_tokens"] >= row["max_output_tokens"]),
                **{name: int(row[name]) for name in _OF_LIFE},
            )
            tally.end(life, now_ns - int(row["sent_ns"]), self.caches)
            if (answer := self.answers.get(int(row["request_id"]))) is not None:
                answer.cached_tokens, answer.has_row = life.cached_tokens, True

    def _spill(self, core: EngineCore) -> None:
        """Puts an engine's rows on disk where they are many."""
        recorder = core.recorder
        if recorder.num_bytes > self._spill_bytes:
            if recorder not in self._spools:
                self._spools[recorder] = Spooled()
            recorder.spill(self._spools[recorder], len(core.in_flight.steps))

    def _deliver(self, news: Iterable[_News]) -> None:
        for its in news:
            answer = its.answer
            if its.attempt == answer.attempt:  # else lost with its replica
                answer.num_made += its.num_tokens
                answer.num_tokens = max(answer.num_tokens, answer.num_made)
            if its.outcome is not None:
                answer.outcome, answer.reason = its.outcome, its.reason
                del self.answers[answer.number]
                self.door.cancelled.discard(answer.number)
            if its.num_tokens or its.outcome is not None:
                answer.told(answer)
