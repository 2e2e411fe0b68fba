"""What a scenario says of ranks that step together: `replicas.lockstep`, or `dp_attention` in short."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from batchsim.base.ranges import Config, Range, check_ranges
from batchsim.base.units import Duration

MAX_RANKS = 1_024
Interval = Annotated[int, Range(1, 100_000)]
Servers = Annotated[int, Range(1, MAX_RANKS)]


@dataclass(frozen=True, kw_only=True)
class LockstepConfig(Config):
    """Ranks of one model with experts, each a scheduler with KV memory of its own, whose passes begin and end together:
    vLLM's data parallelism, or that of attention of SGLang, which has `eager` alone of these, and TensorRT-LLM."""

    sync_interval: Interval = 16
    """Passes from one look at whether any rank has unfinished requests to the next; ranks without requests run dummy
    batches up to it."""
    message: Duration = 0
    """Time of a message between clients, coordinator and ranks: a wave begins on the other ranks two later."""
    api_servers: Servers | None = None
    """API servers, each of which chooses ranks by its own requests in flight and the ranks' last published loads; as
    many as ranks unless given."""
    eager: bool = False
    """Whether passes run without CUDA graphs, so that no rank is padded to the fullest one."""

    def __post_init__(self) -> None:
        check_ranges(self)
