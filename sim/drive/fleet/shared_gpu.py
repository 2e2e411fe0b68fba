"""Models that take turns on a GPU: an engine for each, of which one is awake, and a router that knows which.

A request is of the model that its class names. One of the model that is awake goes to its engine at once; one of
another waits at the router. When some wait,

1. the model that is awake has no request, or has been awake for `min_awake`: it takes no new ones, which wait at the
   router from then on, and ends those it has. That is vLLM's `sleep` with mode `wait`, but that the router keeps what
   the engine would reject.
2. It goes to sleep: its KV, cached prefixes included, is dropped, its weights leave the GPU.
3. The model of the request that has waited longest wakes up. Its requests go to its engine at once, and wait there
   until the weights are on the GPU.

If by the end of 1 no request of another model waits any more, or the oldest is of the same one, it stays awake. At the
start the first of the models is awake. Models with a GPU of their own are always awake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchsim.drive.fleet.clients import Clients, Replicas
from batchsim.drive.fleet.engine import Engine, Slot
from batchsim.drive.fleet.fleet_plan import DRAINING, OFFLOADING, STARTING, UP, FleetPlan
from batchsim.drive.fleet.fleet_records import EngineLife
from batchsim.drive.fleet.routers.router import Stage
from batchsim.drive.fleet.simulate_fleet import Fleet, FleetRun, run_fleet
from batchsim.drive.fleet.sleeping import Moves
from batchsim.drive.simulate import Pulse
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import AnyWorkload
from batchsim.kernel.record import HELD_BACK
from batchsim.kernel.types import Request

WAKING = "waking"
"""Why a request waits at an engine whose weights are on their way to the GPU."""


@dataclass(frozen=True)
class Models:
    """The models by number: `homes` has the one of each class of requests, `moves` each that shares the GPU; the others
    have their own."""

    homes: Mapping[str, int]
    moves: Mapping[int, Moves]
    min_awake_ns: int = 0


class ByModel:
    """The router: a request goes to the model of its class."""

    def __init__(self, homes: Mapping[str, int]) -> None:
        self._homes = homes

    def route(self, request: Request, stage: Stage, up: Sequence[int]) -> int:
        return self._homes[request.request_class]

    def answered(self, request: Request, stage: Stage, replica: int) -> None: ...


class ModelClients(Clients):
    """Clients whose requests are each for one of several `models`, and wait at the router while it sleeps."""

    def __init__(self, fleet: Replicas, workload: AnyWorkload, models: Models, look: Callable[[], None]) -> None:
        super().__init__(fleet, ByModel(models.homes), workload)
        self._models = models
        self._look = look
        self.waking: list[int] = []  # ids of the requests at the engine that is waking up

    def model_of(self, request_id: int) -> int:
        """The number of the request's model."""
        return self._models.homes[self.in_flight[request_id].arrival.request.request_class]

    @property
    def wanted(self) -> int | None:
        """The model of the request that has waited longest at the router; None where none waits."""
        return next((self.model_of(request_id) for request_id in self.held), None)

    def _dispatch(self, request_id: int, now_ns: int) -> None:
        sent, slot = self.in_flight[request_id], self.fleet.slots[self.model_of(request_id)]
        if self.num_released:
            self._look()
        if slot.engine is None or slot.state == DRAINING:
            self._hold(request_id, sent, now_ns)
            self._look()
            return
        if slot.state == STARTING:
            slot.engine.core.recorder.state(now_ns, request_id, HELD_BACK, WAKING)
            self.waking.append(request_id)
        self._send(slot.engine, sent.now(now_ns), sent, now_ns)

    def release(self) -> None:
        """Nothing: a model that is up has its own requests released."""

    def release_to(self, number: int) -> None:
        """Dispatches at this instant the requests of a model that waited for it."""
        now_ns = int(self.fleet.env.now)
        for request_id in [each for each in self.held if self.model_of(each) == number]:
            del self.held[request_id]
            sent = self.in_flight[request_id]
            sent.router_ns += now_ns - sent.since_ns
            self.num_released += 1
            self._submit(now_ns, request_id)

    def woken(self, engine: Engine, now_ns: int) -> None:
        """Takes note that the weights of `engine` are on the GPU: what its requests wait for now is its own affair."""
        for request_id in self.waking:
            if request_id in self.in_flight:
                engine.core.recorder.state(now_ns, request_id, HELD_BACK)
        self.waking = []


class SharedFleet(Fleet):
    """The engines of `models`, made by `new_engine` by number each time that one wakes up."""

    clients: ModelClients

    def __init__(
        self,
        env: Any,
        new_engine: Callable[[int], EngineCore],
        workload: AnyWorkload,
        models: Models,
        stop_ns: int | None = None,
        leap: bool = True,
        pulse: Pulse | None = None,
    ) -> None:
        self.models = models
        self._awake: Slot | None = None  # or about to be, or to go to sleep
        self._due_ns = 0  # from when on it may go to sleep with requests waiting for it
        self._ended: list[EngineLife] = []  # of engines that went to sleep
        plan, router = FleetPlan(len(models.homes)), ByModel(models.homes)
        # Answers bring others to sleep and to wake up: no engine goes ahead of another event.
        super().__init__(env, new_engine, router, plan, workload, True, stop_ns, leap, pulse)

    def _new_clients(self, router: Any, workload: AnyWorkload) -> ModelClients:
        return ModelClients(self, workload, self.models, self._look_now)

    def start(self) -> None:
        for slot in self.slots:
            if slot.number not in self.models.moves:
                self._put_up(slot)
        self._awake = self.slots[next(iter(self.models.moves))]
        self._put_up(self._awake)
        self._stay_awake(0)
        self.clients.start()

    def lives(self) -> list[EngineLife]:
        return sorted([*self._ended, *super().lives()], key=_by_replica)

    def tell(self, engine: Engine, events: Any, now_ns: int) -> None:
        super().tell(engine, events, now_ns)
        if self.clients.held and engine.slot is self._awake and not engine.core.has_work:
            self._look_now()

    def _look_now(self) -> None:
        """Has the turn looked at within this instant, before requests are dispatched."""
        self.at(int(self.env.now), self._turn)

    def _turn(self) -> None:
        """Begins to put the model that is awake to sleep, if another is asked for and its time is over."""
        slot, now_ns = self._awake, int(self.env.now)
        assert slot is not None, "one of the models is always awake, or about to be"
        if slot.state != UP or slot.engine is None or self.clients.wanted is None:
            return
        if self.clients.num_released:  # else a model that wakes at once would go to sleep before it has them, for ever
            return
        if slot.engine.core.has_work and now_ns < self._due_ns:
            return
        self._become(slot, DRAINING, now_ns)
        slot.engine.rouse()

    def retire(self, slot: Slot) -> None:
        """Puts a model without requests to sleep, for another that is asked for."""
        now_ns, wanted, engine = int(self.env.now), self.clients.wanted, slot.engine
        assert engine is not None, "a model that ends its requests has an engine"
        if wanted is None or wanted == slot.number:
            self._become(slot, UP, now_ns)
            self.clients.release_to(slot.number)
            return
        self._stop(slot, engine)
        self._engines.remove(engine)
        engine.core.check_returned()
        self._ended.append(EngineLife(slot.number, engine.core.recorder.records()))
        self._become(slot, OFFLOADING, now_ns)
        self._awake = following = self.slots[wanted]
        self.at(now_ns + self.models.moves[slot.number].sleep_ns, lambda: self._wake(slot, following))

    def _wake(self, asleep: Slot, slot: Slot) -> None:
        """Begins to wake a model up, now that another is asleep."""
        now_ns = int(self.env.now)
        self._become(asleep, "", now_ns)
        self._put_up(slot)
        self._become(slot, STARTING, now_ns)
        assert slot.engine is not None, "just put up"
        awake_ns = slot.engine.core.paused_until_ns = now_ns + self.models.moves[slot.number].wake_ns
        self.clients.release_to(slot.number)
        self.at(awake_ns, lambda: self._woken(slot))
        self._stay_awake(awake_ns)

    def _stay_awake(self, since_ns: int) -> None:
        """Has the model that is awake from `since_ns` on stay so for its least time, if it has requests."""
        self._due_ns = since_ns + self.models.min_awake_ns
        if self.models.min_awake_ns:
            self.at(self._due_ns, self._turn)

    def _woken(self, slot: Slot) -> None:
        """Has a model that has woken up compute."""
        now_ns = int(self.env.now)
        assert slot.engine is not None, "a model does not go to sleep before it is awake"
        self._become(slot, UP, now_ns)
        self.clients.woken(slot.engine, now_ns)
        self._turn()


def _by_replica(life: EngineLife) -> tuple[bool, int]:
    return life.replica < 0, life.replica


def simulate_shared(
    new_engine: Callable[[int], EngineCore],
    models: Models,
    workload: AnyWorkload,
    *,
    stop_ns: int | None = None,
    until_ns: int = 0,
    leap: bool = True,
    join: bool = True,
    pulse: Pulse | None = None,
) -> FleetRun:
    """Runs `workload` through the engines of `models`, each a `new_engine(number)`, to its end; as `simulate_fleet`."""

    def new_fleet(env: Any) -> Fleet:
        return SharedFleet(env, new_engine, workload, models, stop_ns, leap, pulse)

    return run_fleet(new_fleet, until_ns, join=join)
