"""Which replica a request goes to: routers, each with the config that asks for it.

A router is pure: it has no clock, no randomness and no I/O. It sees what a proxy before real engines could see: the
request without its true output length, which replicas take requests, and the answers. The random one draws by the
request's id, so that policies and loads do not change the draws.

    round_robin      the next one by number
    random           any, all equally likely
    shortest_queue   the one with the fewest requests dispatched and not yet answered; ties by number
    least_tokens     the one with the fewest tokens outstanding: prompts and, but for `prefill`, output caps; ties by
                     number
    prefix_affinity  the same one for prompts with the same first `prefix_tokens` tokens, unless it already holds
                     `load_factor` times its share of the outstanding requests; then the next one in the prefix's order

Those of `routers` are of real systems, with their own rules, names and sources: power_of_two, session_affinity, llm_d,
dynamo_kv, sglang_cache_aware, vllm_cache_aware.

A request whose prompt and output are computed by different engines is routed twice, once for each stage, among the
replicas of that stage.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Annotated, Literal, get_args

from batchsim.base.ranges import Config, PositiveInt, Range
from batchsim.drive.fleet.routers.dynamo_kv import DynamoKvConfig
from batchsim.drive.fleet.routers.llm_d import LlmDConfig
from batchsim.drive.fleet.routers.power_of_two import PowerOfTwoConfig
from batchsim.drive.fleet.routers.router import Outstanding, Router, Stage, drawn
from batchsim.drive.fleet.routers.session_affinity import SessionAffinityConfig
from batchsim.drive.fleet.routers.sglang_cache_aware import SglangCacheAwareConfig, VllmCacheAwareConfig
from batchsim.kernel.types import Request

__all__ = ["ROUTERS", "Router", "RouterConfig", "Stage"]


@dataclass(frozen=True)
class RoundRobinConfig(Config):
    """The next replica by number."""

    kind: Literal["round_robin"] = "round_robin"

    def build(self, seed: int) -> RoundRobin:
        return RoundRobin(self, seed)


@dataclass(frozen=True)
class RandomConfig(Config):
    """Any replica, all equally likely."""

    kind: Literal["random"] = "random"

    def build(self, seed: int) -> Random:
        return Random(self, seed)


@dataclass(frozen=True)
class ShortestQueueConfig(Config):
    """The replica with the fewest outstanding requests."""

    kind: Literal["shortest_queue"] = "shortest_queue"

    def build(self, seed: int) -> ShortestQueue:
        return ShortestQueue(self, seed)


@dataclass(frozen=True)
class LeastTokensConfig(Config):
    """The replica with the fewest outstanding tokens, prompts and output caps."""

    kind: Literal["least_tokens"] = "least_tokens"

    def build(self, seed: int) -> LeastTokens:
        return LeastTokens(self, seed)


@dataclass(frozen=True)
class PrefixAffinityConfig(Config):
    """One replica for each beginning of `prefix_tokens` tokens, within `load_factor` times the mean load.

    A shorter prompt counts as a beginning of its own length. Prompts that share nothing are spread by their ids.
    """

    prefix_tokens: PositiveInt
    """Tokens of a prompt that choose its replica."""
    load_factor: Annotated[float, Range(1, 1e6, above=True)]  # at 1 no replica holds more than its share
    """How many times the mean load a replica takes at most."""
    kind: Literal["prefix_affinity"] = "prefix_affinity"

    def build(self, seed: int) -> PrefixAffinity:
        return PrefixAffinity(self, seed)


class RoundRobin:
    """See the module's text."""

    looks_at_no_replica = True

    def __init__(self, config: RoundRobinConfig, seed: int) -> None:
        self._last: dict[Stage, int] = {}

    def route(self, request: Request, stage: Stage, up: Sequence[int]) -> int:
        following = bisect_right(up, self._last.get(stage, -1))
        replica = self._last[stage] = up[following % len(up)]
        return replica

    def answered(self, request: Request, stage: Stage, replica: int) -> None: ...


class Random:
    """See the module's text."""

    looks_at_no_replica = True

    def __init__(self, config: RandomConfig, seed: int) -> None:
        self._seed = seed

    def route(self, request: Request, stage: Stage, up: Sequence[int]) -> int:
        key = "random router" if stage == "both" else f"random router, {stage}"
        return up[drawn(self._seed, key, request.id) * len(up) >> 64]

    def answered(self, request: Request, stage: Stage, replica: int) -> None: ...


class ShortestQueue:
    """See the module's text."""

    def __init__(self, config: ShortestQueueConfig, seed: int) -> None:
        self._requests = Outstanding()

    def route(self, request: Request, stage: Stage, up: Sequence[int]) -> int:
        replica = self._requests.least(up)
        self._requests.add(replica, 1)
        return replica

    def answered(self, request: Request, stage: Stage, replica: int) -> None:
        self._requests.add(replica, -1)


class LeastTokens:
    """See the module's text."""

    def __init__(self, config: LeastTokensConfig, seed: int) -> None:
        self._tokens = Outstanding()

    def route(self, request: Request, stage: Stage, up: Sequence[int]) -> int:
        replica = self._tokens.least(up)
        self._tokens.add(replica, self._asked(request, stage))
        return replica

    def answered(self, request: Request, stage: Stage, replica: int) -> None:
        self._tokens.add(replica, -self._asked(request, stage))

    def _asked(self, request: Request, stage: Stage) -> int:
        return request.prompt_tokens + (request.max_output_tokens if stage != "prefill" else 0)


class PrefixAffinity:
    """See the module's text. Each prefix has an order of all replicas of its own; where one leaves or comes back, only
    the prefixes that are its own move (rendezvous hashing).

    Source: the bound is that of V. Mirrokni, M. Thorup and M. Zadimoghaddam, Consistent hashing with bounded loads,
    arXiv 1608.01350: no replica holds more than ceil(load_factor * outstanding requests / replicas), the new one among
    them.
    """

    def __init__(self, config: PrefixAffinityConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._requests = Outstanding()

    def route(self, request: Request, stage: Stage, up: Sequence[int]) -> int:
        held = self._requests.by_replica
        most = ceil(self._config.load_factor * (sum(held.get(replica, 0) for replica in up) + 1) / len(up))
        key = self._key(request)
        order = sorted(up, key=lambda replica: (drawn(self._seed, key, replica), replica))
        replica = next(replica for replica in order if held.get(replica, 0) < most)
        self._requests.add(replica, 1)
        return replica

    def answered(self, request: Request, stage: Stage, replica: int) -> None:
        self._requests.add(replica, -1)

    def _key(self, request: Request) -> str:
        """A text that is equal for prompts with equal first `prefix_tokens` tokens; unique where none are shared."""
        if request.tokens is None:
            return f"request {request.id}"
        left, segments = self._config.prefix_tokens, []
        for stream, start, length in request.tokens.segments:
            if left:
                segments.append((stream, start, min(length, left)))
                left -= min(length, left)
        return str(segments)


RouterConfig = (
    RoundRobinConfig
    | RandomConfig
    | ShortestQueueConfig
    | LeastTokensConfig
    | PrefixAffinityConfig
    | PowerOfTwoConfig
    | SessionAffinityConfig
    | LlmDConfig
    | DynamoKvConfig
    | SglangCacheAwareConfig
    | VllmCacheAwareConfig
)

ROUTERS: dict[str, type[RouterConfig]] = {config.kind: config for config in get_args(RouterConfig)}
"""The config class of every `kind`."""
