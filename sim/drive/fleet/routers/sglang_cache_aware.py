"""SGLang's cache-aware router: where outstanding requests are balanced, the replica that was sent the longest beginning
of the prompt, else the one with the fewest.

Unbalanced is: most − least outstanding above `balance_abs_threshold`, and most above `balance_rel_threshold` × least.
In balance, if the longest match is more than `cache_threshold` of the prompt, its replica takes it, else the one that
was sent the least text. Every `eviction_interval` the text longest not sent is forgotten beyond `max_tree_size` a
replica.

Source: sgl-project/sglang, sgl-router/src/policies/cache_aware.rs (026f853b); defaults of its command line
(bindings/python/sglang_router/router_args.py). There the tree is of characters; here text is counted in tokens and
matched by blocks of `block_tokens`, and of equals the lowest number is taken where the original takes any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from batchsim.base.ranges import Config, NonNegativeInt, PositiveInt, Range, ShareBelowOne
from batchsim.base.units import NS_PER_S, PositiveDuration
from batchsim.drive.fleet.routers.routed_blocks import RoutedBlocks, prompt_keys
from batchsim.drive.fleet.routers.router import Outstanding, Stage
from batchsim.kernel.types import Request
from batchsim.kv.block_keys import own_key


@dataclass(frozen=True, kw_only=True)
class SglangCacheAwareConfig(Config):
    """The replica that was sent the prompt's beginning, while outstanding requests are balanced."""

    cache_threshold: ShareBelowOne = 0.3
    """Part of the prompt that must match for its replica to be taken."""
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
    kind: Literal["sglang_cache_aware"] = "sglang_cache_aware"

    def build(self, seed: int) -> SglangCacheAware:
        return SglangCacheAware(self)


class SglangCacheAware:
    """See the module's text."""

    def __init__(self, config: SglangCacheAwareConfig) -> None:
        self._config = config
        self._requests = Outstanding()
        self._sent = RoutedBlocks()
        self._evict_ns = config.eviction_interval

    def route(self, request: Request, stage: Stage, up: Sequence[int]) -> int:
        config, now_ns = self._config, request.arrival_ns
        while self._evict_ns <= now_ns:
            for replica in up:
                self._sent.keep(replica, config.max_tree_size)
            self._evict_ns += config.eviction_interval * ((now_ns - self._evict_ns) // config.eviction_interval + 1)
        keys = prompt_keys(request, config.block_tokens)
        replica = self._choose(request, keys, up)
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
        matched = {replica: self._sent.matched(keys, replica) for replica in up}
        best = max(up, key=lambda replica: (matched[replica], -replica))
        if matched[best] * config.block_tokens > config.cache_threshold * request.prompt_tokens:
            return best
        return min(up, key=lambda replica: (self._sent.weight(replica), replica))

    def answered(self, request: Request, stage: Stage, replica: int) -> None:
        self._requests.add(replica, -1)

    def removed(self, replica: int) -> None:
        """Forgets what was sent there."""
        self._sent.remove(replica)
