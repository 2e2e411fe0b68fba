"""Events of an engine: what happened to requests. EngineCore returns them to its driver in the order they happened.

A driver passes them on: to closed-loop clients, who answer with their next request; to a router; to an HTTP stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol, cast

from batchsim.kernel.protocols import Workload
from batchsim.kernel.record import CANCELLED, FINISHED, HANDED_OVER, PRUNED, REJECTED, UNFINISHED
from batchsim.kernel.types import Arrival, Request


@dataclass(frozen=True, slots=True)
class Tokens:
    """`request` has `count` more output tokens, emitted when the step ended. Only for drivers with `tells_tokens`."""

    request: Request
    count: int


class Left:
    """The engine is done with `request`, of which it has made `output_tokens`; `reason` is why, "" where it simply
    finished."""

    __slots__ = ("output_tokens", "reason", "request")
    outcome: ClassVar[int]

    def __init__(self, request: Request, reason: str, output_tokens: int = 0) -> None:
        self.request = request
        self.reason = reason
        self.output_tokens = output_tokens

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


@dataclass(frozen=True, slots=True)
class Reaction:
    """What clients do at one instant: requests that they send, and the ids of requests that they give up.

    `call_ns`: when the workload is to be called, without an answer; None: not. `pause_until_ns`: until when engines
    begin no step; None: they go on. A pause begins in a call, never with an answer.
    """

    arrivals: tuple[Arrival, ...] = ()
    given_up: tuple[int, ...] = ()
    call_ns: int | None = None
    pause_until_ns: int | None = None


NO_REACTION = Reaction()
FIRST_CALL = Reaction(call_ns=0)


class Reacts(Protocol):
    """A workload that hears how requests ended and acts between answers too, as a trainer does whose data they are. It
    is called first at the start, once it was asked for its arrivals.

    An engine may tell of a step's end before a call that was due during the step: what was due before `now_ns` comes
    first.
    """

    def arrivals(self) -> Iterator[Arrival]:
        """As of `Workload`."""
        ...

    def ended(self, event: Ended, now_ns: int) -> Reaction:
        """What follows on `event`; in the place of `pruned_by` and `responded`."""
        ...

    def called(self, now_ns: int) -> Reaction:
        """What is due by now, as was asked for by `call_ns`."""
        ...


AnyWorkload = Workload | Reacts
"""What drivers send: a workload of either protocol."""


def at_start(workload: AnyWorkload) -> Reaction:
    """What the clients of `workload` do as it begins, beside its first arrivals: they are called, if they react."""
    return FIRST_CALL if hasattr(workload, "called") else NO_REACTION


def reaction(workload: AnyWorkload, event: Ended, now_ns: int) -> Reaction:
    """What the clients of `workload` do at `event`."""
    if hasattr(workload, "ended"):
        return cast(Reacts, workload).ended(event, now_ns)
    given_up: tuple[int, ...] = ()
    if type(event) is Finished and hasattr(workload, "pruned_by"):
        given_up = cast(Prunes, workload).pruned_by(event.request)
    following = cast("Workload", workload).responded(event.request, now_ns)
    if following is None and not given_up:
        return NO_REACTION
    each = () if following is None else following if isinstance(following, tuple) else (following,)
    return Reaction(each, given_up)


def called(workload: AnyWorkload, now_ns: int) -> Reaction:
    """What a workload does at the time for which it asked to be called."""
    return cast(Reacts, workload).called(now_ns)
