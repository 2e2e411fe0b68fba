"""The driver of ranks in lockstep: they, their coordinator and their clients in simulated time, message by message.

A message takes `hop_ns` between any two of them. At one instant the client acts first, then the coordinator, then the
ranks by number. Devices of all ranks begin and end a pass together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from batchsim.base.errors import ScenarioError
from batchsim.drive.fleet.lockstep.agenda import CLIENT, COORDINATOR, MESSAGE, OWN, Agenda
from batchsim.drive.fleet.lockstep.balancer import Balancer, Choice
from batchsim.drive.fleet.lockstep.coordinator import Coordinator, RankLoad
from batchsim.drive.fleet.lockstep.passes import Launched, LockstepCost, Met, Pass, PassCost, num_tokens
from batchsim.drive.fleet.lockstep.rank import Rank, ToRank, Turn
from batchsim.drive.source import Traffic
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import AnyWorkload, Ended, EngineEvent
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Arrival
from batchsim.policies.systems.vllm.vllm_drafts import VllmWithDrafts


@dataclass(frozen=True)
class LockstepPlan:
    """How ranks are tied together: ns of a message, passes between two all-reduces of unfinished requests, the API
    servers among which clients fall in turn, and the rank of requests that name one, by id."""

    hop_ns: int = 0
    sync_interval: int = 16
    num_clients: int = 1
    given: Mapping[int, int] = field(default_factory=dict[int, int])


class Lockstep:
    """One simulation of `workload` on ranks, each an engine of `cores` with a LockstepCost; `pass_cost` says how long
    their passes take. ScenarioError for drafts, and for clients that act between answers or give requests up."""

    def __init__(
        self,
        cores: Sequence[EngineCore],
        pass_cost: PassCost,
        plan: LockstepPlan,
        workload: AnyWorkload,
        new_rank: Callable[[int, EngineCore, Lockstep], Rank] = Rank,
    ) -> None:
        _check_simulated(cores, workload)
        self.plan = plan
        self.sync_interval = plan.sync_interval
        self.agenda = Agenda()
        self.coordinator = Coordinator(self.agenda, len(cores), self)
        self.balancers = [Balancer(len(cores), plan.num_clients, i) for i in range(plan.num_clients)]
        self.ranks = [new_rank(number, core, self) for number, core in enumerate(cores)]
        self._costs, self._pass_cost = [_cost_of(core) for core in cores], pass_cost
        self._processes = [rank.process() for rank in self.ranks]
        self._idle = [False] * len(cores)
        self._met: dict[int, Launched | Met] = {}  # by rank, who waits for the others
        self._free_ns = 0  # when the devices are through with the latest pass
        self._num_passes = 0
        self._traffic = Traffic(workload)
        self._planned_ns: int | None = None  # of the next arrival
        self._num_sent = 0
        self._sent: dict[int, tuple[int, Balancer]] = {}  # requests in flight: their rank, and who sent them
        self._wave = 0  # as the clients know it
        self._to_clients = 0  # messages under way to them

    def run(self) -> int:
        """Runs the workload to its end; returns that time in ns."""
        for rank, process in zip(self.ranks, self._processes, strict=True):
            self._turn(rank, next(process))
        self._plan_arrivals()
        return self.agenda.run()

    # ---- ranks

    def _resume(self, rank: Rank, value: Any) -> None:
        self._turn(rank, self._processes[rank.number].send(value))

    def _turn(self, rank: Rank, turn: Turn) -> None:
        if isinstance(turn, int):
            self.agenda.plan(turn, rank.actor, OWN, partial(self._resume, rank, turn))
        elif turn is None:
            self._idle[rank.number] = True
            self._wake(rank)
        else:
            self._met[rank.number] = turn
            if len(self._met) == len(self.ranks):
                self._meet()

    def _wake(self, rank: Rank) -> None:
        """Has an idle rank go on when the first message to it is there."""
        if self._idle[rank.number] and rank.inbox:
            self._idle[rank.number] = False
            due_ns = max(rank.inbox[0][0], rank.free_ns)
            self.agenda.plan(due_ns, rank.actor, OWN, partial(self._resume, rank, due_ns))

    def _meet(self) -> None:
        """All ranks have launched a pass, or are at an all-reduce."""
        turns = [self._met[number] for number in range(len(self.ranks))]
        self._met = {}
        launched = [turn for turn in turns if isinstance(turn, Launched)]
        if launched:
            assert len(launched) == len(turns), "ranks count the same passes"
            until_ns = max(turn.launch_ns for turn in launched)
            self._pass(launched, until_ns)
            value: Any = until_ns
        else:
            met = [turn for turn in turns if isinstance(turn, Met)]
            until_ns, unfinished = max(turn.now_ns for turn in met), sum(turn.has_unfinished for turn in met)
            self.reduced(until_ns, self._num_passes - 1, unfinished)
            value = until_ns, unfinished > 0
        for rank in self.ranks:
            self.agenda.plan(until_ns, rank.actor, OWN, partial(self._resume, rank, value))

    def _pass(self, launched: Sequence[Launched], now_ns: int) -> None:
        batches = [turn.batch for turn in launched]
        tokens = tuple(num_tokens(batch) for batch in batches)
        start_ns, pass_ns = max(now_ns, self._free_ns), self._pass_cost.pass_ns(batches)
        self._free_ns = start_ns + pass_ns
        made = Pass(self._num_passes, now_ns, start_ns, self._free_ns, tokens)
        self._num_passes += 1
        for rank, cost, (batch, launch_ns) in zip(self.ranks, self._costs, launched, strict=True):
            if batch is not None:
                cost.pass_ns = pass_ns
                rank.launch(batch, launch_ns, made)
        self.passed(made, launched)

    def drains(self, rank: Rank) -> bool:
        """Whether no request will come until `rank` acts."""
        if self._traffic.next_ns is not None or self._to_clients or any(other.inbox for other in self.ranks):
            return False
        return not any(other.core.has_work for other in self.ranks if other is not rank)

    # ---- messages

    def reported(self, rank: Rank, load: RankLoad, now_ns: int) -> None:
        """Sends the coordinator the load of a rank."""
        due_ns = now_ns + self.plan.hop_ns
        act = partial(self.coordinator.reported, due_ns, rank.number, load, rank.wave, rank.counter)
        self.agenda.plan(due_ns, COORDINATOR, MESSAGE, act)

    def started(self, rank: Rank, now_ns: int) -> None:
        """Sends the coordinator that a rank is in a wave that has begun."""
        due_ns = now_ns + self.plan.hop_ns
        self.waved(now_ns, "wave_started_by", rank.wave, rank.number)
        self._to_coordinator(due_ns, partial(self.coordinator.started, due_ns, rank.number, rank.wave))

    def completed(self, wave: int, now_ns: int) -> None:
        """Sends the coordinator that a wave is over."""
        due_ns = now_ns + self.plan.hop_ns
        self.waved(now_ns, "wave_complete", wave, 0)
        self._to_coordinator(due_ns, partial(self.coordinator.completed, due_ns, wave))

    def _to_coordinator(self, due_ns: int, act: Callable[[], None]) -> None:
        self.agenda.plan(due_ns, COORDINATOR, MESSAGE, act)

    def woken(self, wave: int, but: int) -> None:
        """Sends all ranks that a wave begins."""
        now_ns = self.agenda.now_ns
        self.waved(now_ns, "start_wave", wave, but)
        for rank in self.ranks:
            self._post(rank, now_ns + self.plan.hop_ns, ToRank(None, wave, but))

    def published(self, loads: list[RankLoad] | None, wave: int, is_running: bool) -> None:
        """Sends the clients the loads of the ranks, or of the wave alone."""
        due_ns = self.agenda.now_ns + self.plan.hop_ns
        self.agenda.plan(due_ns, CLIENT, MESSAGE, partial(self._hear, due_ns, loads, wave, is_running))

    def _hear(self, now_ns: int, loads: list[RankLoad] | None, wave: int, is_running: bool) -> None:
        self._wave = wave
        if loads is not None:
            for balancer in self.balancers:
                balancer.loads = list(loads)
        self.heard(now_ns, loads, wave, is_running)

    def _post(self, rank: Rank, due_ns: int, message: ToRank) -> None:
        rank.post(due_ns, message)
        self._wake(rank)

    # ---- clients

    def ended(self, rank: Rank, events: Sequence[EngineEvent], now_ns: int) -> None:
        """Sends the clients which requests have ended."""
        due_ns = now_ns + self.plan.hop_ns
        over = [event for event in events if isinstance(event, Ended)]
        if over:
            self._to_clients += 1
            self.agenda.plan(due_ns, CLIENT, MESSAGE, partial(self._answered, over, due_ns))

    def _answered(self, events: list[Ended], now_ns: int) -> None:
        self._to_clients -= 1
        for event in events:
            rank, balancer = self._sent.pop(event.request.id)
            balancer.in_flight[rank] -= 1
        self._traffic.tell(events, now_ns)
        self._plan_arrivals()

    def _plan_arrivals(self) -> None:
        """Plans to send what arrives next."""
        next_ns = self._traffic.next_ns
        if next_ns is not None and (self._planned_ns is None or next_ns < self._planned_ns):
            self._planned_ns = next_ns
            self.agenda.plan(next_ns, CLIENT, OWN, partial(self._arrive, next_ns))

    def _arrive(self, now_ns: int) -> None:
        if now_ns == self._planned_ns:
            self._planned_ns = None
        self._traffic.submit_due(self, now_ns)
        self._plan_arrivals()

    def submit(self, arrival: Arrival) -> None:
        """Sends a request that arrives now to a rank."""
        now_ns, request_id = arrival.request.arrival_ns, arrival.request.id
        balancer = self.balancers[self._num_sent % len(self.balancers)]
        self._num_sent += 1
        choice = balancer.choose(self.plan.given.get(request_id))
        self._sent[request_id] = choice.rank, balancer
        self.routed(now_ns, request_id, choice)
        self._post(self.ranks[choice.rank], now_ns + self.plan.hop_ns, ToRank(arrival, self._wave))

    # ---- for a simulation that is watched

    def routed(self, now_ns: int, request_id: int, choice: Choice) -> None:
        """A request was sent to a rank."""

    def heard(self, now_ns: int, loads: list[RankLoad] | None, wave: int, is_running: bool) -> None:
        """A message of the coordinator is with the clients."""

    def waved(self, now_ns: int, what: str, wave: int, rank: int) -> None:
        """A message of a wave was sent."""

    def reduced(self, now_ns: int, number: int, unfinished: int) -> None:
        """All ranks know how many of them have unfinished requests, after pass `number`."""

    def passed(self, made: Pass, launched: Sequence[Launched]) -> None:
        """A pass was launched."""


def _check_simulated(cores: Sequence[EngineCore], workload: AnyWorkload) -> None:
    if hasattr(workload, "called") or hasattr(workload, "pruned_by"):
        raise ScenarioError(
            "ranks in lockstep: clients that give requests up, or act between answers, are not simulated. Send requests"
            " of another kind."
        )
    if any(isinstance(core.scheduler, VllmWithDrafts) for core in cores):
        raise ScenarioError("ranks in lockstep: drafts are not simulated. Leave out speculative_config.")


def _cost_of(core: EngineCore) -> LockstepCost:
    """The cost model of a rank's executor."""
    executor = core.executor
    assert isinstance(executor, SimExecutor) and isinstance(executor.cost, LockstepCost), executor
    return executor.cost
