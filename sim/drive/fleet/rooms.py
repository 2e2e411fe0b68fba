"""Prefill and decode apart as SGLang has them: a request is sent to an engine of either kind at once, its prompt is
computed only once there are blocks for it where it decodes, and its KV goes there part by part.

The life of a request begins at its prefill engine, which is asked for one token. Its decode engine knows it from its
arrival on, by a room that both share, and takes it over as the last of its KV is sent, with its first token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from batchsim.drive.fleet.clients import Clients
from batchsim.drive.fleet.pools import (
    PULLED,
    TRANSFER,
    TRANSFER_QUEUE,
    PooledClients,
    PooledFleet,
    PrefillCore,
    Transit,
)
from batchsim.drive.fleet.routers.router import Router, routed
from batchsim.drive.fleet.transfer import Links, TransferConfig
from batchsim.kernel.events import AnyWorkload
from batchsim.kernel.kv_rooms import Room, RoomConnector
from batchsim.kernel.record import Recorder
from batchsim.kernel.types import MISSING, Arrival, Request, Resume, Sequence


class Rooms:
    """The engines of both kinds by number, prefill first, and the rooms of their requests. A block of either has
    `block_bytes` bytes; `fails`: the ids of requests whose transfer fails, as it ends."""

    def __init__(
        self,
        num_prefill: int,
        num_decode: int,
        transfer: TransferConfig,
        block_bytes: int,
        fails: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self.prefill = range(num_prefill)
        self.decode = range(num_prefill, num_prefill + num_decode)
        self._links = Links(transfer)
        self._block_bytes = block_bytes
        self._fails = fails
        self._connectors: dict[int, RoomConnector] = {}
        self._recorders: dict[int, Recorder] = {}
        self._parts: dict[int, list[tuple[int, int]]] = {}  # by request, when each part sent is on its link and there
        self._transits: dict[int, Transit] = {}
        self._fleet: PooledFleet | None = None

    def connector(self, number: int) -> RoomConnector:
        """The connector of engine `number`, which is about to be made."""
        self._connectors[number] = connector = RoomConnector(self)
        return connector

    def records(self, number: int, recorder: Recorder) -> None:
        """Says where the states of requests at engine `number` are written."""
        self._recorders[number] = recorder
        for reason in (TRANSFER_QUEUE, TRANSFER, PULLED) if number in self.decode else ():
            recorder.text(reason)  # they have their numbers whatever is written first

    def attach(self, fleet: PooledFleet) -> None:
        """Says in which fleet these engines are."""
        self._fleet = fleet

    def new_clients(self, fleet: PooledFleet, router: Router, workload: AnyWorkload) -> Clients:
        """The clients of these engines."""
        return RoomClients(fleet, router, workload, self)

    def assign(self, request: Request, prefill: int, decode: int, *, ends: bool, now_ns: int) -> None:
        """Sends `request` to a decode engine, which may take it once a prefill engine has computed its prompt; with
        `ends` its first token is its last."""
        room = Room(request, prefill, decode, ends=ends, fails=self._fails(request.id))
        for number in (prefill, decode):
            self._connectors[number].rooms[request.id] = room
        self._connectors[decode].asked.append(room)
        self._connectors[decode].pending.add(request.id)
        self._wake(decode, now_ns)

    def decodes_at(self, request_id: int, prefill: int) -> int:
        """The number of the engine at which a request that engine `prefill` has computed goes on."""
        return self._connectors[prefill].rooms[request_id].decode

    def decode_of(self, request_id: int) -> int:
        """The number of the decode engine of a request that is at its prefill engine."""
        rooms = (self._connectors[number].rooms for number in self.prefill)
        return next(each[request_id].decode for each in rooms if request_id in each)

    def ended(self, request_id: int, number: int, now_ns: int) -> None:
        """Takes note that the request ended at engine `number`: the other one gives up what it holds for it."""
        other = self._connectors
        if number in self.prefill:
            room = other[number].rooms.pop(request_id)
            decode = other[room.decode]
            del decode.rooms[request_id]
            if request_id in decode.pending:
                decode.closed.append(room)
                self._wake(room.decode, now_ns)
        else:
            room = other[number].rooms.pop(request_id)
            self._transits.pop(request_id).give_up(self._recorders[number], now_ns)
            if request_id in other[room.prefill].rooms and room.over_ns > now_ns:
                # Later than now, so that it does not depend on which of two engines acts first at an instant.
                room.over_ns = now_ns + 1
                self._wake(room.prefill, now_ns)
        self._parts.pop(request_id, None)

    # ---- what connectors say

    def address(self, room: Room, now_ns: int) -> None:
        room.addressed = True
        self._wake(room.prefill, now_ns)

    def refuse(self, room: Room, detail: str, now_ns: int) -> None:
        room.refused = detail
        self._wake(room.prefill, now_ns)

    def send(self, room: Room, num_blocks: int, ready_ns: int, *, last: bool) -> None:
        number, num_bytes = room.request.id, num_blocks * self._block_bytes
        parts = self._parts.setdefault(number, [])
        parts.append(self._links.take(room.prefill, room.decode, num_bytes, ready_ns))
        if last:
            room.over_ns = parts[-1][1]
            under_way = min((start for start, end in parts if end > ready_ns), default=ready_ns)
            self._transits[number] = Transit(number, ready_ns, max(under_way, ready_ns), room.over_ns)

    def take_in(self, room: Room, now_ns: int) -> None:
        self._transits[room.request.id].write(self._recorders[room.decode], now_ns)

    def _wake(self, number: int, now_ns: int) -> None:
        if self._fleet is not None:
            engine = self._fleet.engine(number)
            engine.cut(now_ns)
            engine.rouse(now_ns)


class SendingCore(PrefillCore):
    """An engine whose ended requests go on at another, which has all of their KV and their first token."""

    def _resume(self, seq: Sequence) -> Resume:
        tokens = seq.request.prompt_tokens
        resume = replace(self.journal.resume(seq), computed_tokens=tokens, output_tokens=0, first_token_ns=MISSING)
        return replace(resume, computed_once=tokens, prefilled=True)


class RoomClients(PooledClients):
    """Clients whose requests go to engines of both kinds of `rooms` at once."""

    def __init__(self, fleet: PooledFleet, router: Router, workload: AnyWorkload, rooms: Rooms) -> None:
        super().__init__(fleet, router, workload, rooms)
        self._rooms = rooms

    def _begin(self, arrival: Arrival, prefill: int, now_ns: int) -> None:
        decode = routed(self.router, arrival.request, "decode", self._rooms.decode)
        ends = arrival.output_tokens is not None and arrival.output_tokens <= 1
        self._rooms.assign(arrival.request, prefill, decode, ends=ends, now_ns=now_ns)

    def _next(self, request: Request, prefill: int) -> int:
        return self._rooms.decodes_at(request.id, prefill)

    def _ended_early(self, request: Request) -> None:
        self.router.answered(request, "decode", self._rooms.decode_of(request.id))
