"""One engine among others behind a router: its process, in the phases of an instant that all of them share."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any

import simpy

from batchsim.drive.fleet.fleet_plan import DRAINING, UP
from batchsim.drive.fleet.fleet_records import work_of_steps
from batchsim.drive.fleet.scaling.autoscaler import EngineLoad, EngineWork
from batchsim.drive.instant import ENTER, LAND, SETTLE, Busy, Launch, crank
from batchsim.drive.simulate import Phase
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import EngineEvent
from batchsim.kernel.leaps import leap, leap_ahead
from batchsim.kernel.planned_leap import PlannedAhead, PlannedLeap, plan_ahead, plan_leap
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Batch, Idle

if TYPE_CHECKING:
    from batchsim.drive.fleet.simulate_fleet import Fleet

# Phases of an instant, after all events of SimPy's own priorities; replicas follow each other inside one.
END, CONTROL, ROUTE, ENTER_PHASE, SCHEDULE = (k << 32 for k in range(1, 6))
Steps = Generator[simpy.Event, Any, None]


class Slot:
    """The place of a replica by its number: its `state` since `since_ns`; "" while there is no replica."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.state = ""
        self.since_ns = 0
        self.engine: Engine | None = None
        self.is_noticed = False  # to be taken away


class Engine:
    """One engine from the start of its replica to its end or failure."""

    def __init__(self, fleet: Fleet, slot: Slot, core: EngineCore) -> None:
        if not isinstance(core.executor, SimExecutor):
            raise TypeError(f"simulate_fleet needs a SimExecutor, not {type(core.executor).__name__}")
        self.fleet = fleet
        self.slot = slot
        self.core = core
        self.executor = core.executor
        self.alive = True
        self.wake: simpy.Event | None = None
        self.asked_to_drain = False
        self._counted_steps = 0  # whose work was told
        self._plan: PlannedLeap | PlannedAhead | None = None  # of steps not done yet, though their end is waited for
        self._end: simpy.Event | None = None  # of the steps it waits for
        self._reached_ns = 0  # when the steps that were planned are over, or launched
        self._phase = END  # of the instant at which it acts

    def load(self) -> EngineLoad:
        """What the engine's metrics say now."""
        scheduler, kv = self.core.scheduler, self.core.scheduler.kv
        return EngineLoad(self.core.num_waiting, scheduler.num_running, 1 - kv.num_free / kv.num_blocks)

    def demand(self) -> float:
        """The KV in use, and the tokens of the prompts that wait, as a share of what the KV memory holds."""
        kv = self.core.scheduler.kv
        return 1 - kv.num_free / kv.num_blocks + self.core.queued_prompt_tokens / (kv.num_blocks * kv.block_size)

    def work(self, now_ns: int) -> EngineWork:
        """What the steps did that have ended since this was last asked."""
        count, output_tokens, busy_ns = work_of_steps(self.core.recorder, self._counted_steps, now_ns)
        self._counted_steps += count
        return EngineWork(output_tokens, busy_ns)

    def rouse(self) -> None:
        """Wakes the engine if it sleeps."""
        if self.wake is not None:
            wake, self.wake = self.wake, None
            wake.succeed()

    def carry_out(self) -> None:
        """Does the steps that are planned, all of which have begun by now."""
        if self._plan is not None:
            self._reached_ns = self._plan.carry_out()
            self._plan = None

    def cut(self, now_ns: int) -> None:
        """Does the steps that are planned and would have begun before `now_ns`, and no others."""
        plan, old, env = self._plan, self._end, self.fleet.env
        if plan is None or old is None:
            return
        self._plan, self._reached_ns = None, plan.carry_out(now_ns)
        if self._reached_ns < plan.end_ns:
            self._end = env.timeout(max(self._reached_ns - now_ns, 0))
            self._end.callbacks, old.callbacks = old.callbacks, []  # who waited for the old one waits for this

    def is_over(self) -> bool:
        """Whether no arrival will come unless some engine answers something."""
        return self.slot.state == DRAINING or not self.fleet.clients.streams

    def drains(self) -> bool:
        """Whether no arrival will come until this engine acts."""
        self.asked_to_drain = self.fleet.drain(self)
        return self.asked_to_drain

    def tell(self, events: Iterable[EngineEvent], now_ns: int) -> None:
        """Tells router and clients what happened in this engine, where they may be behind when they are at it."""
        self.fleet.clients.tell(self, events, now_ns, self._phase)

    def process(self) -> Steps:
        """Waits for what the loop names, in the phases of the instant, until the replica is gone.

        The engine's own time, `now_ns`, may be ahead of all others' while nobody can come to it before.
        """
        env, number = self.fleet.env, self.slot.number
        loop = crank(self.core, self, drains=self.drains, settles=True)
        wait, now_ns, alone_ns = next(loop), int(env.now), self._alone_until_ns
        while True:
            if isinstance(wait, Batch):
                end_ns = self._execute(wait, now_ns)
                if end_ns >= alone_ns:
                    self._end = env.timeout(end_ns - int(env.now))
                    yield self._end
                    self.carry_out()
                    end_ns = int(env.now)
                    if env.peek() <= end_ns:
                        yield Phase(env, END + number)
                    alone_ns = self._alone_until_ns
                self.carry_out()
                now_ns, self._phase = end_ns, END
            elif isinstance(wait, Launch):
                if wait.batch is not None:
                    self._reached_ns = self._launch(wait.batch, now_ns)
                    if self._reached_ns > now_ns and self._reached_ns >= alone_ns:
                        self._end = env.timeout(self._reached_ns - int(env.now))
                        yield self._end
                        alone_ns = self._alone_until_ns
                    self.carry_out()
                    now_ns = self._reached_ns
            elif isinstance(wait, Busy):
                now_ns = wait.until_ns
                if now_ns >= alone_ns:
                    yield env.timeout(now_ns - int(env.now))
                    if wait.work == "process" and env.peek() <= now_ns:
                        yield Phase(env, END + number)
                    alone_ns = self._alone_until_ns
                self._phase = END
            elif wait is LAND:
                now_ns = max(now_ns, self.core.in_flight.steps[0].end_ns)
                if now_ns >= alone_ns and now_ns > env.now:
                    yield env.timeout(now_ns - int(env.now))
                    alone_ns = self._alone_until_ns
            elif wait is ENTER or wait is SETTLE:
                self._phase = ENTER_PHASE if wait is ENTER else SCHEDULE
                if now_ns >= alone_ns and env.peek() <= now_ns:
                    yield Phase(env, self._phase + number)
                    alone_ns = self._alone_until_ns
            else:
                if not isinstance(wait, Idle):
                    self._through()
                if self.alive:
                    yield from self._rest(wait if isinstance(wait, Idle) else None)
                    now_ns, alone_ns = max(now_ns, int(env.now)), self._alone_until_ns
            if not self.alive:
                return
            wait = loop.send(now_ns)

    @property
    def _alone_until_ns(self) -> int:
        """The time in ns before which nobody comes to this engine, and what it tells is not asked for: its own time may
        run ahead of all others' up to there."""
        fleet = self.fleet
        return fleet.foreseen_ns if self.slot.state == UP else int(fleet.env.now)

    def _execute(self, batch: Batch, now_ns: int) -> int:
        """Runs the step, and after it identical ones up to the next event; returns the end of the last in ns."""
        core, fleet = self.core, self.fleet
        end_ns = core.execute(batch, now_ns)
        if not fleet.leap:
            return end_ns
        if fleet.plans:
            self._plan = plan_leap(core, self.executor, batch, end_ns, self._own_horizon_ns())
            if self._plan is not None:
                return self._plan.end_ns
        return leap(core, self.executor, batch, end_ns, self._horizon_ns())

    def _launch(self, batch: Batch, now_ns: int) -> int:
        """Launches the step, and after it identical ones; returns when the host is through with that, in ns."""
        core, fleet = self.core, self.fleet
        core.execute(batch, now_ns)
        if not fleet.leap or core.loop.stages > 1:
            return now_ns
        if fleet.plans:
            self._plan = plan_ahead(core, self.executor, batch, now_ns, self._own_horizon_ns())
            if self._plan is not None:
                return self._plan.end_ns
        # Who is answered is told when it is time: other engines and routers are not ahead of it.
        return leap_ahead(core, self.executor, batch, now_ns, self._horizon_ns, None, None)

    def _horizon_ns(self) -> float:
        """When something next happens besides what this engine does, in ns."""
        timer_ns, horizon_ns = self.core.next_timer_ns, self.fleet.horizon_ns()
        return horizon_ns if timer_ns is None else min(horizon_ns, timer_ns)

    def _own_horizon_ns(self) -> float:
        """When something next happens that this engine must know of, but for arrivals sent to it, in ns."""
        timer_ns, horizon_ns = self.core.next_timer_ns, self.fleet.next_control_ns
        return horizon_ns if timer_ns is None else min(horizon_ns, timer_ns)

    def _through(self) -> None:
        """Retires the replica if it drains, and ends the run if all is done: this engine has nothing left to do."""
        if self.slot.state == DRAINING:
            self.fleet.retire(self.slot)
        self.fleet.check_done()

    def _rest(self, idle: Idle | None) -> Steps:
        """Waits until the next arrival, or the time of `idle`."""
        self.wake = self.fleet.env.event()
        self.fleet.rouse_undrained()
        if self.wake is None:
            return
        if idle is None or idle.until_ns is None:
            yield self.wake
        else:
            yield self.wake | self.fleet.env.timeout(max(idle.until_ns - int(self.fleet.env.now), 0))
            self.wake = None
