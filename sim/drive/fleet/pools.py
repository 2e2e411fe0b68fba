"""Prefill and decode on different engines: requests go from one to the other, and their KV over links in between.

The life of a request, as of vLLM with NixlPullConnector and a proxy that takes engines in turn: the router sends it to
a prefill engine, which is asked for one token. Once that is there the request is handed over and its blocks are kept;
the token is thrown away. The decode engine takes blocks for the whole prompt and pulls the KV, which waits for its
link. When the engine has noticed that the KV is there it computes the last token of the prompt again and samples the
first one. The prefill engine frees the blocks once it has noticed that they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from heapq import heappop, heappush
from math import inf
from typing import Any, Protocol

from batchsim.drive.fleet.clients import Clients, Replicas
from batchsim.drive.fleet.engine import Engine
from batchsim.drive.fleet.fleet_plan import FleetPlan
from batchsim.drive.fleet.routers.local_prefill import LocalPrefill
from batchsim.drive.fleet.routers.router import Router, Stage, routed
from batchsim.drive.fleet.simulate_fleet import Fleet, FleetRun, run_fleet
from batchsim.drive.fleet.transfer import Links, TransferConfig
from batchsim.drive.simulate import Pulse
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import AnyWorkload, Ended, EngineEvent, HandedOver
from batchsim.kernel.kv_transfer import NOTHING, KvConnector, Noticed
from batchsim.kernel.record import WAITING, Recorder
from batchsim.kernel.types import MISSING, Arrival, Request, Resume, Sequence

TRANSFER_QUEUE, TRANSFER, PULLED = "transfer_queue", "transfer", "pulled"
"""Why a request waits at its decode engine: for the link, for its KV, and for the engine to notice and go on."""


class Transit:
    """A transfer under way, for which a request waits at its decode engine from `began_ns` on: on its link from
    `start_ns` to `end_ns`; `written` counts the states of it that are on record."""

    __slots__ = ("began_ns", "end_ns", "request_id", "start_ns", "written")

    def __init__(self, request_id: int, began_ns: int, start_ns: int, end_ns: int) -> None:
        self.request_id = request_id
        self.began_ns, self.start_ns, self.end_ns = began_ns, start_ns, end_ns
        self.written = 0

    def write(self, recorder: Recorder, now_ns: int) -> None:
        """Writes the states that the request has come to by now."""
        stages = (TRANSFER_QUEUE, self.began_ns), (TRANSFER, self.start_ns), (PULLED, self.end_ns)
        for reason, at_ns in stages[self.written :]:
            if at_ns > now_ns:
                return
            self.written += 1
            recorder.state(at_ns, self.request_id, WAITING, reason, None)

    def give_up(self, recorder: Recorder, now_ns: int) -> None:
        """Ends the record of it, as the request has ended."""
        self.write(recorder, now_ns)
        self.written = 3


class _Pull(Transit):
    """A pull of `seq`, which may be one that `fails`."""

    __slots__ = ("fails", "seq")

    def __init__(self, seq: Sequence, began_ns: int, start_ns: int, end_ns: int, fails: bool) -> None:
        super().__init__(seq.request.id, began_ns, start_ns, end_ns)
        self.seq, self.fails = seq, fails


class Pools:
    """The engines of both kinds by number, prefill first, the links between them, and what is on these."""

    def __init__(
        self,
        num_prefill: int,
        num_decode: int,
        transfer: TransferConfig,
        block_bytes: int,
        decider: LocalPrefill | None = None,
        fails: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self.fails = fails
        self._transfer = transfer
        self.prefill = range(num_prefill)
        self.decider = decider
        self.decode = range(num_prefill, num_prefill + num_decode)
        self._links = Links(transfer)
        self.block_bytes = block_bytes
        self.local: set[int] = set()  # requests that a decode engine computes alone
        self.kept_at: dict[int, tuple[int, int]] = {}  # by request whose KV is kept, not pulled: at which engine, since
        self._ends: dict[int, PoolLink] = {}
        self._fleet: PooledFleet | None = None

    def attach(self, fleet: PooledFleet) -> None:
        """Says in which fleet these engines are."""
        self._fleet = fleet

    def new_clients(self, fleet: PooledFleet, router: Router, workload: AnyWorkload) -> Clients:
        """The clients of these engines."""
        return (
            PooledClients(fleet, router, workload, self)
            if self.decider is None
            else DecodeFirst(fleet, router, workload, self, self.decider)
        )

    def connector(self, number: int) -> KvConnector:
        """The connector of engine `number`, which is about to be made."""
        self._ends[number] = link = PoolLink(self, number)
        return KvConnector(link)

    def records(self, number: int, recorder: Recorder) -> None:
        """Says where the states of requests at engine `number` are written."""
        self._ends[number].recorder = recorder

    def begin(self, request_id: int, number: int, num_blocks: int, now_ns: int) -> tuple[int, int]:
        """Sends the KV of the request to decode engine `number`; returns when it is on its link and when it is
        there."""
        prefill, kept_ns = self.kept_at.pop(request_id)
        start_ns, end_ns = self._links.take(prefill, number, num_blocks * self.block_bytes, now_ns)
        freed_ns = self._transfer.lapses_ns(kept_ns, end_ns) if self.fails(request_id) else end_ns
        self._sent(request_id, prefill, max(freed_ns, now_ns + 1))
        return start_ns, end_ns

    def ended(self, request_id: int, number: int, now_ns: int) -> None:
        """Takes note that the request ended at engine `number`: what is kept for it and was not asked for is free."""
        self.local.discard(request_id)
        self._ends[number].give_up(request_id, now_ns)
        if (kept := self.kept_at.pop(request_id, None)) is not None:
            self._sent(request_id, kept[0], now_ns + 1)

    def _sent(self, request_id: int, prefill: int, told_ns: int) -> None:
        """Notes that the prefill engine may free the KV of the request from `told_ns` on: later than now, so that it
        does not depend on which of two engines acts first at an instant."""
        self._ends[prefill].sent(request_id, told_ns)
        if self._fleet is not None:
            self._fleet.engine(prefill).sent(told_ns)


class PoolLink:
    """The transfers of one engine of `pools`, as its connector sees them."""

    recorder: Recorder

    def __init__(self, pools: Pools, number: int) -> None:
        self._pools = pools
        self._number = number
        self._is_prefill = number in pools.prefill
        self._kept: dict[int, Sequence] = {}
        self._sends: list[tuple[int, int, Sequence]] = []
        self._pulls: list[_Pull] = []
        self._loaded_ns: float = inf  # when the first of the pulls is over

    def pulls(self, request: Request) -> bool:
        return not self._is_prefill and request.id not in self._pools.local

    def keeps(self, request: Request) -> bool:
        return self._is_prefill

    def keep(self, seq: Sequence, num_blocks: int, now_ns: int) -> None:
        self._kept[seq.request.id] = seq
        self._pools.kept_at[seq.request.id] = self._number, now_ns

    def sent(self, request_id: int, told_ns: int) -> None:
        """Takes note that what is kept for the request may go from `told_ns` on."""
        heappush(self._sends, (told_ns, request_id, self._kept.pop(request_id)))

    def begin(self, seq: Sequence, num_blocks: int, now_ns: int) -> None:
        start_ns, end_ns = self._pools.begin(seq.request.id, self._number, num_blocks, now_ns)
        self._pulls.append(_Pull(seq, now_ns, start_ns, end_ns, self._pools.fails(seq.request.id)))
        for reason in (TRANSFER_QUEUE, TRANSFER):  # texts get their numbers now, whenever the states are written
            self.recorder.text(reason)
        self._loaded_ns = min(self._loaded_ns, end_ns)

    def due_ns(self) -> float:
        return min(self._loaded_ns, self._sends[0][0]) if self._sends else self._loaded_ns

    def over(self, now_ns: int) -> Noticed:
        for pull in self._pulls:
            pull.write(self.recorder, now_ns)
        if now_ns < self.due_ns():
            return NOTHING
        over = [pull.seq for pull in self._pulls if pull.end_ns <= now_ns]
        failed = [pull.seq for pull in self._pulls if pull.end_ns <= now_ns and pull.fails]
        self._pulls = [pull for pull in self._pulls if pull.end_ns > now_ns]
        self._loaded_ns = min([pull.end_ns for pull in self._pulls], default=inf)
        sent: list[Sequence] = []
        while self._sends and self._sends[0][0] <= now_ns:
            sent.append(heappop(self._sends)[2])
        return Noticed(loaded=over, failed=failed, sent=sent)

    def give_up(self, request_id: int, now_ns: int) -> None:
        """Ends the record of a pull of the request, which has ended; the transfer goes on."""
        for pull in self._pulls:
            if pull.request_id == request_id:
                pull.give_up(self.recorder, now_ns)


class PrefillCore(EngineCore):
    """An engine whose ended requests go on at another: `handed` has what they take along, by id."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # pyright: ignore[reportArgumentType]
        self.handed: dict[int, Resume] = {}

    def _respond(self, responses: list[Sequence], now_ns: int) -> None:
        for seq in responses:
            if seq in self.journal.lives:
                self.handed[seq.request.id] = self._resume(seq)
                self._end(seq, now_ns, HandedOver, "handed_over")

    def _resume(self, seq: Sequence) -> Resume:
        """What `seq` takes along: its token is thrown away, and what is computed again is one token."""
        resume = replace(self.journal.resume(seq), computed_tokens=0, output_tokens=0, first_token_ns=MISSING)
        return replace(resume, computed_once=seq.request.prompt_tokens - 1)


class AnyPools(Protocol):
    """Engines of two kinds by number, and what lies between them."""

    prefill: range
    decode: range

    def attach(self, fleet: PooledFleet) -> None:
        """Says in which fleet these engines are."""
        ...

    def new_clients(self, fleet: PooledFleet, router: Router, workload: AnyWorkload) -> Clients:
        """The clients of these engines."""
        ...

    def ended(self, request_id: int, number: int, now_ns: int) -> None:
        """Takes note that the request ended at engine `number`."""
        ...


class PooledClients(Clients):
    """Clients whose requests are computed by two engines of `pools` one after the other."""

    def __init__(self, fleet: Replicas, router: Router, workload: AnyWorkload, pools: AnyPools) -> None:
        super().__init__(fleet, router, workload)
        self.pools = pools

    def _dispatch(self, request_id: int, now_ns: int) -> None:
        sent = self.in_flight[request_id]
        arrival = sent.now(now_ns)
        asked = replace(arrival.request, max_output_tokens=1)
        number = routed(self.router, asked, "prefill", self.pools.prefill)
        sent.since_ns = now_ns
        self.num_outstanding += 1
        self._begin(arrival, number, now_ns)
        self._submit_to(number, replace(arrival, request=asked, output_tokens=1), now_ns)

    def _begin(self, arrival: Arrival, prefill: int, now_ns: int) -> None:
        """Does what is done beside sending the request to a prefill engine."""

    def tell(self, engine: Engine, events: Iterable[EngineEvent], now_ns: int) -> None:
        for event in events:
            if isinstance(event, HandedOver):
                self._hand_over(event.request, engine, now_ns)
            elif isinstance(event, Ended):
                if engine.slot.number in self.pools.prefill:
                    self._ended_early(event.request)
                self.pools.ended(event.request.id, engine.slot.number, now_ns)
                super().tell(engine, [event], now_ns)

    def _stage(self, engine: Engine) -> Stage:
        return "prefill" if engine.slot.number in self.pools.prefill else "decode"

    def _ended_early(self, request: Request) -> None:
        """Does what is done where a request ends before it is at a decode engine."""

    def _hand_over(self, request: Request, engine: Engine, now_ns: int) -> None:
        self.router.answered(request, "prefill", engine.slot.number)
        core = engine.core
        assert isinstance(core, PrefillCore), "decode engines hand nothing over"
        arrival = replace(self.in_flight[request.id].now(now_ns), resume=core.handed.pop(request.id))
        self._submit_to(self._next(arrival.request, engine.slot.number), arrival, now_ns)

    def _next(self, request: Request, prefill: int) -> int:
        """The decode engine at which a request goes on that engine `prefill` has computed, by its number."""
        return routed(self.router, request, "decode", self.pools.decode)

    def _submit_to(self, number: int, arrival: Arrival, now_ns: int) -> None:
        engine = self.fleet.slots[number].engine
        assert engine is not None, "engines of pools are always up"
        engine.cut(now_ns)
        engine.core.submit(arrival)
        engine.rouse(now_ns)


class DecodeFirst(PooledClients):
    """Clients for whose requests the decode engine is chosen first; some of them it computes alone, as `decider`
    says."""

    def __init__(
        self, fleet: Replicas, router: Router, workload: AnyWorkload, pools: Pools, decider: LocalPrefill
    ) -> None:
        super().__init__(fleet, router, workload, pools)
        self._local, self._decider = pools.local, decider
        self._decodes_at: dict[int, int] = {}  # by request at a prefill engine

    def _dispatch(self, request_id: int, now_ns: int) -> None:
        sent = self.in_flight[request_id]
        arrival = sent.now(now_ns)
        number = routed(self.router, arrival.request, "decode", self.pools.decode)
        if not self._decider.keeps(arrival.request, number):
            self._decodes_at[request_id] = number
            super()._dispatch(request_id, now_ns)
            return
        sent.since_ns = now_ns
        self.num_outstanding += 1
        self._local.add(request_id)
        self._submit_to(number, arrival, now_ns)

    def _next(self, request: Request, prefill: int) -> int:
        return self._decodes_at.pop(request.id)

    def _ended_early(self, request: Request) -> None:
        if (number := self._decodes_at.pop(request.id, None)) is not None:
            self.router.answered(request, "decode", number)


class PooledFleet(Fleet):
    """The engines of `pools`, made by `new_engine` by number, and what they share in one environment."""

    def __init__(
        self,
        env: Any,
        new_engine: Callable[[int], EngineCore],
        router: Router,
        workload: AnyWorkload,
        pools: AnyPools,
        stop_ns: int | None = None,
        leap: bool = True,
        pulse: Pulse | None = None,
    ) -> None:
        self.pools = pools
        plan = FleetPlan(pools.decode.stop)
        super().__init__(env, new_engine, router, plan, workload, True, stop_ns, leap, pulse)
        # An engine sleeps until something arrives, of which others tell it in time; so it may where answers cause
        # arrivals too.
        self.plans = self.tells_ahead = leap
        pools.attach(self)

    def engine(self, number: int) -> Engine:
        """The engine of a number."""
        engine = self.slots[number].engine
        assert engine is not None, "engines of pools are always up"
        return engine

    def _new_clients(self, router: Router, workload: AnyWorkload) -> Clients:
        return self.pools.new_clients(self, router, workload)

    def check_done(self) -> bool:
        return not any(engine.core.has_work for engine in self._living) and super().check_done()


def simulate_pools(
    new_engine: Callable[[int], EngineCore],
    router: Router,
    pools: AnyPools,
    workload: AnyWorkload,
    *,
    stop_ns: int | None = None,
    until_ns: int = 0,
    leap: bool = True,
    join: bool = True,
    pulse: Pulse | None = None,
) -> FleetRun:
    """Runs `workload` through the engines of `pools`, each a `new_engine(number)`, to its end; as `simulate_fleet`."""

    def new_fleet(env: Any) -> Fleet:
        return PooledFleet(env, new_engine, router, workload, pools, stop_ns, leap, pulse)

    return run_fleet(new_fleet, until_ns, join=join)
