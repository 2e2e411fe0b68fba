"""Dynamo's KV-aware router: the replica with the lowest cost, of equals any.

    cost = prefill_load_scale × max(0, prefill blocks − overlap_score_credit × cached blocks) + decode blocks

Prefill blocks are those of the prompt and of the prompts there that have no first token yet, less what was cached of
these when they were sent; decode blocks those of all prompts outstanding there with this one, each shared block once.
Which blocks a replica has cached is guessed: all that were sent there within `ttl`, as Dynamo does without KV events.
With a `router_temperature` above 0 a replica is drawn with probabilities by the softmax of −cost over the costs' range.

Where prefill and decode are apart there are two such routers: that of prefill engines counts no decode blocks, that of
decode engines nothing else, and there no two prompts share a block.

Source: ai-dynamo/dynamo, lib/kv-router/src/scheduling/selector/default.rs (07a6c9ce) and the sequence tracking beside
it; defaults of KvRouterConfig; of two routers the prefill router's config and what it overrides for decode
(`router_track_active_blocks` off; `overlap_score_credit` 0, `assume_kv_reuse` and `track_prefill_tokens` off). Not as
there: no tiers of cache beyond the GPU's, no weights by the number of requests, no queue, and outputs are not counted
(`router_track_output_blocks` is off by default there too).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from typing import Annotated, Literal

from batchsim.base.ranges import Config, NonNegative, PositiveInt, Range
from batchsim.base.units import NS_PER_S, PositiveDuration
from batchsim.drive.fleet.routers.routed_blocks import RoutedBlocks, prompt_keys
from batchsim.drive.fleet.routers.router import Stage, drawn
from batchsim.kernel.types import Request


@dataclass(frozen=True, kw_only=True)
class DynamoKvConfig(Config):
    """The replica with the least work left: of prompts, less what is cached, and of KV blocks in use."""

    overlap_score_credit: NonNegative = 1.0
    """How much a cached block takes off the prompt's cost."""
    prefill_load_scale: NonNegative = 1.0
    """Weight of prompt blocks against those of decodes."""
    router_temperature: Annotated[float, Range(0, 1e6)] = 0.0
    """0: the cheapest replica; above, drawn by the softmax of costs."""
    block_tokens: PositiveInt = 16
    """Tokens of the blocks by which prompts are compared."""
    ttl: PositiveDuration = 120 * NS_PER_S
    """How long a block that was sent counts as cached."""
    kind: Literal["dynamo_kv"] = "dynamo_kv"

    def build(self, seed: int) -> DynamoKv:
        return DynamoKv(self, seed)

    def build_apart(self, seed: int) -> DynamoApart:
        """The routers of both sides where prefill and decode are apart."""
        return DynamoApart(self, seed)


@dataclass(slots=True)
class _Sent:
    """A request outstanding at a replica: the keys of its blocks, how many it has, prompt tokens not known cached."""

    keys: Sequence[int]
    num_blocks: int
    prefill_tokens: int


class _Replica:
    """What is outstanding at a replica."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int, Stage], _Sent] = {}
        self.users: Counter[int] = Counter()  # of each block that may be shared
        self.own_blocks = 0  # of prompts that share nothing
        self.prefill_tokens = 0

    @property
    def blocks(self) -> int:
        return len(self.users) + self.own_blocks

    def begin(self, key: tuple[int, Stage], sent: _Sent) -> None:
        self.sent[key] = sent
        self.users.update(sent.keys)
        self.own_blocks += 0 if sent.keys else sent.num_blocks
        self.prefill_tokens += sent.prefill_tokens

    def prefilled(self, key: tuple[int, Stage]) -> None:
        if (sent := self.sent.get(key)) is not None:
            self.prefill_tokens -= sent.prefill_tokens
            sent.prefill_tokens = 0

    def end(self, key: tuple[int, Stage]) -> None:
        self.prefilled(key)
        if (sent := self.sent.pop(key, None)) is None:
            return
        self.own_blocks -= 0 if sent.keys else sent.num_blocks
        for block in sent.keys:
            if self.users[block] == 1:
                del self.users[block]
            else:
                self.users[block] -= 1


class DynamoKv:
    """See the module's text."""

    def __init__(self, config: DynamoKvConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._cached = RoutedBlocks()
        self._replicas: dict[int, _Replica] = {}

    def route(self, request: Request, stage: Stage, up: Sequence[int]) -> int:
        config, now_ns = self._config, request.arrival_ns
        self._cached.keep_since(now_ns - config.ttl)
        keys = () if stage == "decode" else prompt_keys(request, config.block_tokens)
        num_blocks = request.prompt_tokens // config.block_tokens
        overlaps = {replica: self._cached.matched(keys, replica) for replica in up}
        costs = [self._cost(request, stage, replica, keys, num_blocks, overlaps[replica]) for replica in up]
        replica = up[self._pick(costs, request, stage)]
        uncached = 0 if stage == "decode" else request.prompt_tokens - overlaps[replica] * config.block_tokens
        sent = _Sent(keys, num_blocks, uncached)
        self._replicas.setdefault(replica, _Replica()).begin((request.id, stage), sent)
        self._cached.send(keys, replica, now_ns)
        return replica

    def _cost(
        self, request: Request, stage: Stage, replica: int, keys: Sequence[int], num_blocks: int, overlap: int
    ) -> float:
        config, there = self._config, self._replicas.get(replica, _NOTHING)
        if stage == "decode":  # its prompt comes with it, whatever is there
            return float(there.blocks + num_blocks)
        prefill = (there.prefill_tokens + request.prompt_tokens) / config.block_tokens
        left = config.prefill_load_scale * max(prefill - config.overlap_score_credit * overlap, 0.0)
        if stage == "prefill":
            return left
        shared = next((i for i, key in enumerate(keys) if key not in there.users), len(keys))
        return left + (there.blocks + num_blocks - shared)

    def _pick(self, costs: Sequence[float], request: Request, stage: Stage) -> int:
        """The place of the chosen cost."""
        least, most = min(costs), max(costs)
        share = drawn(self._seed, f"dynamo, {stage}", request.id) / (1 << 64)
        heat = self._config.router_temperature
        if heat == 0:
            weights = [float(cost == least) for cost in costs]
        else:
            weights = [exp(-(cost - least) / ((most - least) * heat)) if most > least else 1.0 for cost in costs]
        left = share * sum(weights)
        for place, weight in enumerate(weights):
            left -= weight
            if left < 0:
                return place
        return weights.index(max(weights))

    def answered(self, request: Request, stage: Stage, replica: int) -> None:
        self._replicas[replica].end((request.id, stage))

    def prefilled(self, request_id: int, replica: int) -> None:
        """Takes the prompt off the replica's work."""
        if (there := self._replicas.get(replica)) is not None:
            for stage in ("prefill", "both"):
                there.prefilled((request_id, stage))

    def removed(self, replica: int) -> None:
        """Forgets what was sent there; what is outstanding is answered one by one."""
        self._cached.remove(replica)


class DynamoApart:
    """The routers of both sides where prefill and decode are apart. A prompt is taken off the work of its prefill
    engine as it is answered, with its first token: no other events are needed."""

    def __init__(self, config: DynamoKvConfig, seed: int) -> None:
        self._costs = DynamoKv(config, seed)

    def route(self, request: Request, stage: Stage, up: Sequence[int]) -> int:
        return self._costs.route(request, stage, up)

    def answered(self, request: Request, stage: Stage, replica: int) -> None:
        self._costs.answered(request, stage, replica)


_NOTHING = _Replica()
