"""The scorers of llm-d's inference scheduler, weighted: the replica with the highest sum, of equals any.

    queue            (most waiting − waiting) / (most − least waiting) over replicas; 1 for all where they are equal
    kv_utilisation   the share of KV blocks that are free
    prefix           the share of the prompt's full blocks, of at most `max_prefix_blocks`, that are among the
                     `lru_capacity` blocks last sent to that replica

What engines report is read every `metrics_interval`: requests sent since are not seen. Of equals one is drawn by the
request's id.

Source: queue-scorer, kv-cache-utilization-scorer, prefix-cache-scorer and max-score-picker of
kubernetes-sigs/gateway-api-inference-extension (pkg/epp/scheduling/framework/plugins, 02308be3 and 00913f92), which
llm-d builds on; there blocks are 64 characters, here `block_tokens` tokens. Prompts that share no tokens take no place
among the blocks. Weights are those of its default configuration; metrics are refreshed every 50 ms by default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from batchsim.base.ranges import Config, PositiveInt, Range, check_ranges
from batchsim.base.units import Duration
from batchsim.drive.fleet.routers.routed_blocks import RoutedBlocks, prompt_keys
from batchsim.drive.fleet.routers.router import Stage, check_interval, drawn
from batchsim.drive.fleet.scaling.autoscaler import EngineLoad
from batchsim.kernel.types import Request

Weight = Annotated[float, Range(0, 1e6)]
_IDLE = EngineLoad(0, 0, 0.0)  # of a replica that has reported nothing yet


@dataclass(frozen=True, kw_only=True)
class ScorerWeights(Config):
    """What each score counts; 0: not at all."""

    queue: Weight = 2.0
    """Weight of the score for few waiting requests."""
    kv_utilisation: Weight = 2.0
    """Weight of the score for free KV blocks."""
    prefix: Weight = 3.0
    """Weight of the score for a prompt whose beginning was sent there before."""


@dataclass(frozen=True, kw_only=True)
class LlmDConfig(Config):
    """The replica that llm-d's scorers, by their weights, find best."""

    weights: ScorerWeights = field(default_factory=ScorerWeights)
    """Weights of the scorers."""
    metrics_interval: Duration = 50_000_000
    """How often the router reads what engines report; what was sent since it does not see."""
    block_tokens: PositiveInt = 16
    """Tokens of the blocks by which prompts are compared."""
    max_prefix_blocks: PositiveInt = 256
    """Blocks of a prompt that are compared at most."""
    lru_capacity: PositiveInt = 31_250
    """Blocks remembered for each replica, those last sent."""
    kind: Literal["llm_d"] = "llm_d"

    def __post_init__(self) -> None:
        check_ranges(self)
        check_interval(self.metrics_interval)

    def build(self, seed: int) -> LlmD:
        return LlmD(self, seed)


class LlmD:
    """See the module's text."""

    def __init__(self, config: LlmDConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._loads: Mapping[int, EngineLoad] = {}
        self._sent = RoutedBlocks()
        self.metrics_interval = config.metrics_interval

    def observe(self, loads: Mapping[int, EngineLoad]) -> None:
        """Takes note of what the engines report."""
        self._loads = loads

    def route(self, request: Request, stage: Stage, up: Sequence[int]) -> int:
        config, weights = self._config, self._config.weights
        keys = prompt_keys(request, config.block_tokens, config.max_prefix_blocks) if weights.prefix else ()
        loads = {replica: self._loads.get(replica, _IDLE) for replica in up}
        waiting = [load.num_waiting for load in loads.values()]
        least, most = min(waiting), max(waiting)

        def score(replica: int) -> tuple[float, int]:
            load = loads[replica]
            queue = 1.0 if least == most else (most - load.num_waiting) / (most - least)
            prefix = self._sent.matched(keys, replica) / len(keys) if keys else 0.0
            free = 1 - load.kv_utilisation
            whole = weights.queue * queue + weights.kv_utilisation * free + weights.prefix * prefix
            return whole, drawn(self._seed, f"llm-d, {stage}, {replica}", request.id)

        chosen = max(up, key=score)
        if keys:
            self._sent.send(keys, chosen, request.arrival_ns)
            self._sent.keep(chosen, config.lru_capacity)
        return chosen

    def answered(self, request: Request, stage: Stage, replica: int) -> None: ...

    def removed(self, replica: int) -> None:
        """Forgets what was sent there."""
        self._sent.remove(replica)
