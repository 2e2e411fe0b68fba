"""Events of an engine: what happened to requests. EngineCore returns them to its driver in the order they happened.

A driver passes them on: to closed-loop clients, who answer with their next request; to a router; to an HTTP stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, cast

from batchsim.kernel.record import CANCELLED, FINISHED, HANDED_OVER, PRUNED, REJECTED, UNFINISHED
from batchsim.kernel.types import Arrival, Request


@dataclass(frozen=True, slots=True)
class Tokens:
    """`request` has `count` more output tokens, emitted when the step ended. Only for drivers with `tells_tokens`."""

    request: Request
    count: int


class Left:
    """The engine is done with `request`; `reason` is why, "" where it simply finished."""

    __slots__ = ("reason", "request")
    outcome: ClassVar[int]

    def __init__(self, request: Request, reason: str) -> None:
        self.request = request
        self.reason = reason

    def __repr__(self) -> str:
        return f"{type(self).__name__}(request {self.request.id}, {self.reason!r})"


class Ended(Left):
    """The request is over, at this engine and for its client."""

    __slots__ = ()


class HandedOver(Left):
    """The request goes on at another engine, so that its client has nothing to answer yet."""

    __slots__ = ()
    outcome = HANDED_OVER


class Finished(Ended):
    """All tokens of the request are out, and delivered as far as the engine goes."""

    __slots__ = ()
    outcome = FINISHED


class Rejected(Ended):
    """The request never ran: it was too long, or the queue was full."""

    __slots__ = ()
    outcome = REJECTED


class Cancelled(Ended):
    """The request's client gave up, or its deadline passed."""

    __slots__ = ()
    outcome = CANCELLED


class Pruned(Cancelled):
    """The request's client gave it up, since another request of its task had succeeded."""

    __slots__ = ()
    outcome = PRUNED


class Unfinished(Ended):
    """The run, or the replica, ended before the request did."""

    __slots__ = ()
    outcome = UNFINISHED


EngineEvent = Tokens | Ended | HandedOver


class Prunes(Protocol):
    """A workload that gives requests up once another has succeeded."""

    def pruned_by(self, request: Request) -> tuple[int, ...]:
        """The ids of requests, sent and not ended, that are given up since `request` has finished. Asked once of each
        that finishes, before `responded`."""
        ...


def pruned_by(workload: object, event: EngineEvent) -> tuple[int, ...]:
    """The ids of requests that the clients of `workload` give up at `event`."""
    if type(event) is not Finished or not hasattr(workload, "pruned_by"):
        return ()
    return cast(Prunes, workload).pruned_by(event.request)


def each_arrival(following: Arrival | tuple[Arrival, ...] | None) -> tuple[Arrival, ...]:
    """What `Workload.responded` gave, none, one or several requests, as a tuple."""
    if following is None:
        return ()
    return following if isinstance(following, tuple) else (following,)
