"""FasterTransformer's batching as Vidur has it, its leak of blocks fixed: `faster_transformer` of commit 7d47513a.

Rule: request-level batching. When the last batch is over, what waits comes in, oldest first, up to `batch_size_cap` and
while KV slots of `max_tokens_per_request` tokens are free. One step computes all prompts, then all decode until the
last has ended; sequences that end earlier leave the compute, their KV is held to the end of the batch. Tokens stream.
Source: vidur/scheduler/replica_scheduler/faster_transformer_replica_scheduler.py, whose `on_batch_end` frees only the
last members: without the fix one request a batch is left to run. Equal to a recording of it (`batchsim conform`).
This is `static` with `wait_for_full: false, padding: none, finished_rows: drop, respond: row_end` and fixed slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from batchsim.base.errors import ScenarioError
from batchsim.base.ranges import PositiveInt
from batchsim.kernel.policy_config import PolicyConfig, Traits
from batchsim.kernel.protocols import PolicyContext
from batchsim.policies.families.static import Static, StaticConfig


@dataclass(frozen=True)
class FasterTransformerConfig(PolicyConfig):
    """Knobs by Vidur's names, with its defaults."""

    batch_size_cap: PositiveInt = 128
    """The most requests of a micro-batch."""
    max_tokens_per_request: PositiveInt | None = None
    """Tokens of KV that each request reserves; max_model_len unless given, as in Vidur."""

    @property
    def traits(self) -> Traits:
        return Traits(max_num_seqs=self.batch_size_cap)


class FasterTransformer(Static):
    """The scheduler: static batching with every knob but two fixed, and nothing overridden."""

    evidence = "recorded"
    deviations: ClassVar[dict[str, str]] = {}  # it waits for nothing, as Static may

    def __init__(self, config: FasterTransformerConfig, context: PolicyContext) -> None:
        slot, kv = config.max_tokens_per_request or context.max_model_len, context.kv
        if kv.blocks_for(slot) > kv.num_blocks:
            raise ScenarioError(
                f"faster_transformer: max_tokens_per_request {slot} takes {kv.blocks_for(slot)} KV blocks,"
                f" {kv.num_blocks} are in the pool. Lower it (or max_model_len) or give the engine more KV."
            )
        knobs = StaticConfig(
            config.batch_size_cap,
            wait_for_full=False,
            padding="none",
            finished_rows="drop",
            respond="row_end",
            reserve_tokens=slot,
        )
        super().__init__(knobs, context)
