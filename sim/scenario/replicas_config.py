"""What a scenario says of several engines behind a router."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any

from batchsim.base.plain import LEFT_OUT
from batchsim.base.ranges import Config, check_ranges
from batchsim.base.units import PricePerHour, format_duration
from batchsim.drive.fleet.admission import AdmissionConfig
from batchsim.drive.fleet.fleet_plan import Failure, FleetPlan, Lost
from batchsim.drive.fleet.lockstep.lockstep_config import MAX_RANKS, LockstepConfig
from batchsim.drive.fleet.routers.dynamo_kv import DynamoKvConfig
from batchsim.drive.fleet.routers.local_prefill import LocalPrefillConfig
from batchsim.drive.fleet.routers.router import Router, hears_answers_only
from batchsim.drive.fleet.routing import ROUTERS, RoundRobinConfig, RouterConfig
from batchsim.drive.fleet.scaling.autoscaler import Replicas
from batchsim.drive.fleet.scaling.kinds import Scaler
from batchsim.drive.fleet.sleeping import ShareConfig, SleepConfig
from batchsim.drive.fleet.transfer import TransferConfig
from batchsim.scenario.kv_config import KvConfig
from batchsim.scenario.scenario_cost import ScenarioCost
from batchsim.workload.tagged import ByKind

SOONEST_LOOK_NS = 1_000_000  # between an autoscaler's looks: shorter than nearly every step


@dataclass(frozen=True)
class ReplicaGroup(Config):
    """Replicas of one kind."""

    count: Replicas
    """Number of replicas."""
    cost: Annotated[ScenarioCost, ByKind()] | None = None
    """What steps cost on them; the scenario's unless given."""
    kv: KvConfig | None = None
    """Their KV memory; the scenario's unless given."""
    knobs: dict[str, Any] | None = None
    """With `transfer`, knobs of the policy that these replicas have; the scenario's unless given."""
    model: str | None = field(default=None, metadata=LEFT_OUT)
    """With `sleep` or `share`, their model; the scenario's unless given."""
    own_gpu: bool = field(default=False, metadata=LEFT_OUT)
    """With `sleep` or `share`, whether the model has a GPU of its own."""


@dataclass(frozen=True)
class PoolsConfig(Config):
    """Prefill and decode on different engines, the KV going from one to the other: a short form of `replicas`."""

    prefill: ReplicaGroup
    """The engines that compute prompts."""
    decode: ReplicaGroup
    """The engines that compute all tokens of the answers."""
    transfer: TransferConfig
    """How KV gets from the first to the second."""
    router: Annotated[RouterConfig, ByKind()] | None = None
    """Which engine of each side a request is sent to; round_robin unless given."""
    local_prefill: Annotated[LocalPrefillConfig, ByKind()] | None = None
    """Which requests a decode engine computes alone; none unless given."""


@dataclass(frozen=True)
class ReplicasConfig(Config):
    """Replicas like the scenario's one engine, or groups of other kinds; numbered from 0, group by group.

    >>> batchsim.Replicas(count=4, router={"kind": "round_robin"}).count
    4
    """

    count: Replicas | None = None
    """Replicas like the scenario's one engine; with an autoscaler, at the start."""
    groups: dict[str, ReplicaGroup] | None = None
    """Groups of replicas of other kinds, by name, in the place of `count`."""
    router: Annotated[RouterConfig, ByKind()] | None = None
    """Which replica a request is sent to."""
    failures: tuple[Failure, ...] = ()
    """Replicas that fail, and when."""
    lost: Lost | None = None
    """Outcome of requests in flight on a replica that fails: sent anew to another, from the start, or unfinished."""
    autoscaler: Annotated[Scaler, ByKind()] | None = None
    """When replicas are added and removed; without it their number stays."""
    price: PricePerHour | None = None
    """Price of one replica, all its GPUs, for an hour."""
    admission: AdmissionConfig | None = None
    """The gate before the router; without it every request goes to a replica at once."""
    transfer: TransferConfig | None = None
    """How KV gets from the replicas of the group prefill, which compute prompts, to those of the group decode."""
    local_prefill: Annotated[LocalPrefillConfig, ByKind()] | None = field(default=None, metadata=LEFT_OUT)
    """With `transfer`, which requests a decode engine computes alone."""
    sleep: SleepConfig | None = field(default=None, metadata=LEFT_OUT)
    """Groups are models that take turns on a GPU, each that of the requests of the class of its name."""
    share: ShareConfig | None = field(default=None, metadata=LEFT_OUT)
    """Groups are models awake side by side on a GPU, each that of the requests of the class of its name."""

    lockstep: LockstepConfig | None = field(default=None, metadata=LEFT_OUT)
    """With `count`: the replicas are ranks of one model with experts that step together, in short `dp_attention`."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if (self.count is None) == (self.groups is None):
            raise ValueError("give either count, of replicas that are alike, or groups of several kinds")
        if self.groups is not None and not self.groups:
            raise ValueError("groups is empty. Name at least one, like {h200: {count: 2}}.")
        if self.groups is not None and not all(name.strip() for name in self.groups):
            raise ValueError("groups: a group has an empty name. Name it, like {h200: {count: 2}}.")
        self._check_models()
        if self.router is None and self.plan.most > 1 and not self.are_models and self.lockstep is None:
            *others, last = ROUTERS
            raise ValueError(
                f"router is missing, and {self.plan.most} replicas need one. Add it: {', '.join(others)} or {last}."
            )
        if self.price is not None and self.groups is not None:
            raise ValueError(
                "price is that of replicas that are alike. Write count instead of groups, or leave it out."
            )
        if self.autoscaler is not None:
            self._check_autoscaler(self.autoscaler)
        self._check_failures()
        self._check_transfer()
        if self.lockstep is not None:
            self._check_lockstep(self.lockstep)

    def _check_lockstep(self, lockstep: LockstepConfig) -> None:
        if self.count is None:
            raise ValueError("lockstep is of replicas that are alike. Write count instead of groups.")
        given = [name for name in ("router", "autoscaler", "admission") if getattr(self, name) is not None]
        given += ["failures"] if self.failures else []
        if given:
            raise ValueError(
                f"{given[0]} is not simulated for ranks that step together: their engine divides requests among"
                " them. Leave it out."
            )
        if not 2 <= self.count <= MAX_RANKS:
            raise ValueError(
                f"{self.count} ranks step together. Write from 2 to {MAX_RANKS:,}, or leave out dp_attention."
            )
        if lockstep.api_servers is not None and lockstep.api_servers > self.count:
            raise ValueError(
                f"{lockstep.api_servers} api_servers for {self.count} ranks. Write at most as many as ranks."
            )

    def _check_transfer(self) -> None:
        groups = self.groups or {}
        if self.transfer is None:
            if set(groups) == {"prefill", "decode"}:
                raise ValueError("groups are prefill and decode, and transfer is missing. Add it: {bandwidth: 50GB/s}.")
            if self.local_prefill is not None:
                raise ValueError("local_prefill is of prefill and decode apart. Write pools, or leave it out.")
            if named := next((name for name, group in groups.items() if group.knobs is not None), ""):
                raise ValueError(f"groups.{named}.knobs is read with transfer only. State the policy's knobs.")
            return
        if list(groups) != ["prefill", "decode"]:
            raise ValueError(
                f"transfer is between two groups, prefill and decode in this order, and groups has {', '.join(groups)}"
            )
        if not hears_answers_only(self.new_router(0)):
            raise ValueError(
                f"router {self.chosen_router.kind} reads what engines report, which is not simulated where prefill and"
                " decode are apart. Write round_robin, random, shortest_queue, least_tokens, prefix_affinity or"
                " dynamo_kv."
            )
        if self.local_prefill is not None and isinstance(self.chosen_router, DynamoKvConfig):
            raise ValueError(
                "router dynamo_kv is not simulated with local_prefill: its costs of decode engines that compute"
                " prompts are others. Leave local_prefill out, or write another router."
            )
        if self.failures or self.admission is not None:
            what = "failures" if self.failures else "admission"
            raise ValueError(f"{what} is not simulated where prefill and decode are apart. Leave it out.")

    def _check_models(self) -> None:
        groups = self.groups or {}
        if not self.are_models:
            for name, group in groups.items():
                if group.model is not None or group.own_gpu:
                    key = "own_gpu" if group.model is None else "model"
                    raise ValueError(
                        f"groups.{name}.{key} is for models that share a GPU. Add sleep, where they take turns, or"
                        " share, where they are side by side."
                    )
            return
        which, how = "share", "are side by side on a GPU"
        if self.sleep is not None:
            which, how = "sleep", "take turns on a GPU"
        if self.sleep is not None and self.share is not None:
            raise ValueError("sleep and share both say how models share a GPU. Write one of them.")
        if self.groups is None:
            raise ValueError(f"{which} is of several models, and all replicas are alike. Write groups, a model each.")
        given = ("router", "failures", "autoscaler", "admission", "transfer")
        if key := next((key for key in given if getattr(self, key)), ""):
            raise ValueError(f"{key} is not simulated where models {how}. Drop it, or drop {which}.")
        for name, group in groups.items():
            if group.count != 1:
                raise ValueError(
                    f"groups.{name}.count is {group.count}: models that {how} have one engine each, and so"
                    " have those beside them. Write 1."
                )
        if (sharing := sum(not group.own_gpu for group in groups.values())) < 2:
            never = "sleeps" if which == "sleep" else "waits for another"
            raise ValueError(
                f"{which}: of the models {sharing} shares a GPU, so that none ever {never}. Leave two without own_gpu,"
                f" or drop {which} and write a router."
            )

    @property
    def are_models(self) -> bool:
        """Whether the groups are models that share a GPU, in turns or side by side."""
        return self.sleep is not None or self.share is not None

    @property
    def total(self) -> int:
        """The replicas at the start."""
        return self.count or sum(group.count for group in (self.groups or {}).values())

    @property
    def plan(self) -> FleetPlan:
        """The replicas over time: how many start, which fail, where their requests go, what scales them."""
        return FleetPlan(self.total, self.failures, self.lost, self.autoscaler, self.admission)

    @property
    def chosen_router(self) -> RouterConfig:
        """The router; round robin where a single replica leaves nothing to choose."""
        return RoundRobinConfig() if self.router is None else self.router

    def new_router(self, seed: int) -> Router:
        """The chosen router, by the rules that it has of its own where prefill and decode are apart."""
        chosen = self.chosen_router
        if self.transfer is not None and isinstance(chosen, DynamoKvConfig):
            return chosen.build_apart(seed)
        return chosen.build(seed)

    def _check_autoscaler(self, scaler: Scaler) -> None:
        if self.groups is not None:
            raise ValueError("autoscaler adds and removes replicas that are alike. Write count instead of groups.")
        if scaler.every < SOONEST_LOOK_NS:
            raise ValueError(
                f"autoscaler: every is {format_duration(scaler.every)}. It must be at least"
                f" {format_duration(SOONEST_LOOK_NS)}, like 10s."
            )
        if not scaler.min <= self.total <= scaler.max:
            raise ValueError(
                f"count {self.total}, the replicas at the start, must be from the autoscaler's min {scaler.min} to its"
                f" max {scaler.max}"
            )

    def _check_failures(self) -> None:
        if bool(self.failures) != (self.lost is not None):
            raise ValueError(
                "lost says what becomes of the requests in flight at failures: give both or neither, lost as retry"
                " (elsewhere, from the start) or fail"
            )
        always = self.total if self.autoscaler is None else self.autoscaler.min
        for failure in self.failures:
            if failure.replica >= always:
                there = f"there are {always}" if self.autoscaler is None else f"only {always} are always there"
                raise ValueError(f"failures: replica {failure.replica} is to fail, and {there}, numbered from 0")
        order = sorted(self.failures, key=lambda failure: (failure.replica, failure.at))
        for one, other in pairwise(order):
            if one.replica == other.replica and other.at - other.notice <= one.at + one.down_for:
                raise ValueError(
                    f"failures: replica {one.replica} is to fail at {format_duration(other.at)}, and is down until"
                    f" {format_duration(one.at + one.down_for)} from a failure before"
                )
