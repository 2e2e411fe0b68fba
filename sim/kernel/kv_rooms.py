"""KV that one engine sends to another which has made room for it: a `Room` for each request that is known to both.

The engine that decodes says, request by request, that it has blocks for the prompt; only then does the other one
compute it, and sends its KV part by part as these are computed. Schedulers ask at each of their calls what has become
of their rooms; how long a part takes is the affair of a `Carrier`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from batchsim.kernel.kv_transfer import KvConnector
from batchsim.kernel.offload import NoPeers
from batchsim.kernel.types import MISSING, Request


@dataclass(slots=True, eq=False)
class Room:
    """One request on its way from engine `prefill` to engine `decode`, both by number.

    `addressed`: there are blocks for its prompt, and the engine that computes it knows. `refused`: why there never will
    be, "" where there may. `over_ns`: when all of its KV is there, or its transfer has failed (`fails`); MISSING before
    all is sent. `ends`: its first token is its last.
    """

    request: Request
    prefill: int
    decode: int
    ends: bool = False
    fails: bool = False
    addressed: bool = False
    refused: str = ""
    over_ns: int = MISSING


class Carrier(Protocol):
    """What lies between the engines. Times in ns."""

    def address(self, room: Room, now_ns: int) -> None:
        """Takes note that the decode engine has blocks for the prompt, which the prefill engine learns at once."""
        ...

    def refuse(self, room: Room, detail: str, now_ns: int) -> None:
        """Takes note that the decode engine will never have blocks for it, as `detail` says."""
        ...

    def send(self, room: Room, num_blocks: int, ready_ns: int, *, last: bool) -> None:
        """Sends `num_blocks` KV blocks, computed at `ready_ns`; with the `last` ones all is sent."""
        ...

    def take_in(self, room: Room, now_ns: int) -> None:
        """Takes note that the decode engine has noticed the end of the transfer."""
        ...


class RoomConnector(KvConnector):
    """What passes between the scheduler of one engine and others.

    `rooms`: of the requests that this engine knows, by their ids. `asked`: those among them that its scheduler has not
    looked at; `pending`: those without a sequence of their own here as yet; `closed`: those of these that have ended
    elsewhere. `pulling`: what is sent as the next step is launched.
    """

    def __init__(self, carrier: Carrier) -> None:
        super().__init__(NoPeers())
        self.carrier = carrier
        self.rooms: dict[int, Room] = {}
        self.asked: list[Room] = []
        self.closed: list[Room] = []
        self.pending: set[int] = set()
        self._computed_ns = 0

    @property
    def is_busy(self) -> bool:
        """Whether there are blocks for requests whose sequence is elsewhere, or may be."""
        return bool(self.kept or self.pending)

    def launched(self, now_ns: int, computed_ns: int = 0) -> None:
        """A step is launched at `now_ns`, and the device computes until `computed_ns`: what is sent early goes once
        what was launched before is computed."""
        ready_ns = max(now_ns, self._computed_ns)
        for seq, _, num_blocks in self.pulling:
            self.carrier.send(self.rooms[seq.request.id], num_blocks, ready_ns, last=False)
        self.pulling, self._computed_ns = [], computed_ns
