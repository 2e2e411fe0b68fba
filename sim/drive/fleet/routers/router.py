"""Protocols of routers, by what they observe of the replicas, and state that several routers keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal, Protocol, runtime_checkable

from batchsim.base.errors import ScenarioError, shown
from batchsim.drive.fleet.scaling.autoscaler import EngineLoad
from batchsim.kernel.types import Request

Stage = Literal["prefill", "decode", "both"]
"""The part of a request that a replica computes: its prompt and first token, the tokens after that, or all of it."""


class Router(Protocol):
    """Built by its config: `config.build(seed)`."""

    def route(self, request: Request, stage: Stage, up: Sequence[int]) -> int:
        """The replica, one of `up` (not empty, by number), that `request` is dispatched to now, for `stage`."""
        ...

    def answered(self, request: Request, stage: Stage, replica: int) -> None:
        """Called, before the next dispatch, when `request`, dispatched for `stage`, is no longer at `replica`: it was
        answered, handed over, or lost with the replica. The order of calls for two replicas at one ns is the same in
        every run, and must not matter."""
        ...


@runtime_checkable
class ReadsLoads(Protocol):
    """A router that reads the engines' metrics too, every `metrics_interval` ns, or with 0 at every dispatch."""

    metrics_interval: int

    def observe(self, loads: Mapping[int, EngineLoad]) -> None:
        """Called with the engines' loads, by replica that takes requests. A missing one has not reported yet."""
        ...


@runtime_checkable
class SeesFirstTokens(Protocol):
    """A router that also receives first-token events, as one that passes tokens on does."""

    def prefilled(self, request_id: int, replica: int) -> None:
        """Called before the next dispatch when the first token of a request has come from `replica`."""
        ...


@runtime_checkable
class ForgetsReplicas(Protocol):
    """A router that keeps what it sent to each replica, and is notified when a replica loses its cache."""

    def removed(self, replica: int) -> None:
        """Called when `replica` is gone with its cache; a later one of the same number is another replica."""
        ...


@runtime_checkable
class LooksAtNoReplica(Protocol):
    """A router that, where it says True, sends a request where it would whatever the replicas have done so far. So each
    of them can be simulated by itself; `answered` is not called then."""

    looks_at_no_replica: bool


def routed(router: Router, request: Request, stage: Stage, up: Sequence[int]) -> int:
    """The replica of `up` that `router` chooses. ScenarioError where it is none of these."""
    number = router.route(request, stage, up)
    if number not in up:
        raise ScenarioError(
            f"router: {type(router).__name__}.route gives {shown(number)} for request {request.id}. Return one of the"
            f" replicas that it is given, here {', '.join(map(str, up))}."
        )
    return number


def hears_answers_only(router: Router) -> bool:
    """True if `router` needs neither load metrics nor first-token events."""
    return not isinstance(router, ReadsLoads | SeesFirstTokens)


def keeps_apart(router: Router) -> bool:
    """True if `router` declares `looks_at_no_replica` and needs no events of replicas."""
    hears = isinstance(router, ForgetsReplicas) or not hears_answers_only(router)
    return isinstance(router, LooksAtNoReplica) and router.looks_at_no_replica and not hears


@dataclass
class Outstanding:
    """How much, in requests or tokens, each replica was given and has not answered yet."""

    by_replica: dict[int, int] = field(default_factory=dict)

    def add(self, replica: int, amount: int) -> None:
        self.by_replica[replica] = self.by_replica.get(replica, 0) + amount

    def least(self, up: Sequence[int]) -> int:
        """The replica of `up` with the least outstanding; of equals the lowest number. `up` is by number."""
        held = self.by_replica.get
        return min(up, key=lambda replica: held(replica, 0))


def drawn(seed: int, key: str, number: int) -> int:
    """A number from 0 to 2^64 − 1 that depends on the arguments alone."""
    return int.from_bytes(blake2b(f"{seed}|{key}|{number}".encode(), digest_size=8).digest(), "little")


SOONEST_METRICS_NS = 1_000_000


def check_interval(metrics_interval: int) -> None:
    """ValueError for an interval between 0 and a millisecond: shorter than nearly every step."""
    if 0 < metrics_interval < SOONEST_METRICS_NS:
        raise ValueError(
            f"metrics_interval is {metrics_interval} ns. It must be 0s, at every dispatch, or at least 1ms, like 50ms."
        )
