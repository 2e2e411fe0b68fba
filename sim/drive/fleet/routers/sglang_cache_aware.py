"""The cache-aware routers of SGLang and vLLM: where outstanding requests are balanced, a replica that was sent the
beginning of the prompt, if that is long enough; else the one with the fewest.

Unbalanced is: most − least outstanding above `balance_abs_threshold`, and most above `balance_rel_threshold` × least.
In balance, if more than `cache_threshold` of the prompt was sent anywhere before, a replica that was sent all of this
takes it: by SGLang's router the one that was sent the last of it first, by vLLM's the one with the fewest outstanding.
Every `eviction_interval` the text longest not sent is forgotten beyond `max_tree_size` a replica.

Source: `cache_aware` of sglang-router 0.3.2 and of vllm-router 0.1.17, whose recorded decisions are made again with
`block_tokens: 1` (`tests/data/routes`); defaults of their command lines. There the tree is of characters; here text is
counted in tokens and matched by blocks of `block_tokens`. Of equals the first replica is taken, there the first in an
order of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from batchsim.base.ranges import Config, NonNegativeInt, PositiveInt, Range, ShareBelowOne
from batchsim.base.units import NS_PER_S, PositiveDuration
from batchsim.drive.fleet.routers.routed_blocks import RoutedBlocks, prompt_keys
from batchsim.drive.fleet.routers.router import Outstanding, Stage
from batchsim.kernel.types import Request
from batchsim.kv.block_keys import own_key


@dataclass(frozen=True, kw_only=True)
class _CacheAwareConfig(Config):
    cache_threshold: ShareBelowOne = 0.3
    """Part of the prompt that must have been sent before."""
    balance_abs_threshold: NonNegativeInt = 64
    """Difference of most and least outstanding requests beyond which replicas may be unbalanced."""
    balance_rel_threshold: Annotated[float, Range(1, 1e6)] = 1.5
    """Ratio of them beyond which they are, where the difference is exceeded too."""
    eviction_interval: PositiveDuration = 120 * NS_PER_S
    """How often text is forgotten beyond `max_tree_size`."""
    max_tree_size: PositiveInt = 2**26
    """Tokens of text remembered for each replica."""
    block_tokens: PositiveInt = 16
    """Tokens of the blocks by which prompts are compared."""


@dataclass(frozen=True, kw_only=True)
class SglangCacheAwareConfig(_CacheAwareConfig):
    """The replica that was sent the prompt's beginning first, while outstanding requests are balanced."""

    kind: Literal["sglang_cache_aware"] = "sglang_cache_aware"
    follows: ClassVar[str] = "sglang-router 0.3.2"
    recorded: ClassVar[int] = 3
    """Recordings of that gateway's decisions that it makes again."""

    def build(self, seed: int) -> CacheAware:
        return CacheAware(self, by_load=False)


@dataclass(frozen=True, kw_only=True)
class VllmCacheAwareConfig(_CacheAwareConfig):
    """Of the replicas that were sent the prompt's beginning the one with the fewest outstanding requests, while these
    are balanced."""

    kind: Literal["vllm_cache_aware"] = "vllm_cache_aware"
    follows: ClassVar[str] = "vllm-router 0.1.17"
    recorded: ClassVar[int] = 3
    """Recordings of that gateway's decisions that it makes again."""

    def build(self, seed: int) -> CacheAware:
        return CacheAware(self, by_load=True)


class CacheAware:
    """See the module's text."""

    def __init__(self, config: _CacheAwareConfig, *, by_load: bool) -> None:
        self._config = config
        self._by_load = by_load
        self._requests = Outstanding()
        self._sent = RoutedBlocks()
        self._first: dict[int, int] = {}  # the replica that each block was sent to first
        self._evict_ns = config.eviction_interval

    def route(self, request: Request, stage: Stage, up: Sequence[int]) -> int:
        config, now_ns = self._config, request.arrival_ns
        while self._evict_ns <= now_ns:
            for replica in up:
                self._sent.keep(replica, config.max_tree_size)
            self._evict_ns += config.eviction_interval * ((now_ns - self._evict_ns) // config.eviction_interval + 1)
            self._forget()
        keys = prompt_keys(request, config.block_tokens)
        replica = self._choose(request, keys, up)
        for key in keys:
            self._first.setdefault(key, replica)
        if keys:
            self._sent.send(reversed(keys), replica, now_ns, config.block_tokens)  # the leaves are forgotten first
        else:
            self._sent.send([own_key(request)], replica, now_ns, request.prompt_tokens)
        self._requests.add(replica, 1)
        return replica

    def _choose(self, request: Request, keys: Sequence[int], up: Sequence[int]) -> int:
        config = self._config
        held = [self._requests.by_replica.get(replica, 0) for replica in up]
        least, most = min(held), max(held)
        if most - least > config.balance_abs_threshold and most > config.balance_rel_threshold * least:
            return self._requests.least(up)
        matched = next((number for number, key in enumerate(keys) if key not in self._first), len(keys))
        if matched * config.block_tokens > config.cache_threshold * request.prompt_tokens:
            last = keys[matched - 1]
            owners = [self._first[last]] if not self._by_load else [each for each in up if self._sent.has(last, each)]
            owners = [each for each in owners if each in up]
            if owners:
                return self._requests.least(owners)
        return self._requests.least(up)

    def _forget(self) -> None:
        """Passes blocks that their first replica has forgotten to another that was sent them, and drops the others."""
        for key, replica in list(self._first.items()):
            if not self._sent.has(key, replica):
                other = self._sent.holder(key)
                if other is None:
                    del self._first[key]
                else:
                    self._first[key] = other

    def answered(self, request: Request, stage: Stage, replica: int) -> None:
        self._requests.add(replica, -1)

    def removed(self, replica: int) -> None:
        """Forgets what was sent there."""
        self._sent.remove(replica)
        self._forget()
