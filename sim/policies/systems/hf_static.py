"""Naive Transformers: Hugging Face `generate` on fixed batches, as in pipelines/base.py of transformers 5.23.0.

Rule: requests in order of arrival, `batch_size` to a batch. Prompts are padded on the left to the longest of the batch;
one step computes them, then every row decodes, ended ones on as padding, until the last row has its end-of-sequence
token or its cap. No request joins, nothing streams: all answers return when the batch is over. With `wait_for_full` a
batch is filled first, as a pipeline's data loader does it, the last one flushed; without, `generate` gets what waits.
Simplifies: `generate` has one `max_new_tokens` a batch, here each row stops at its own cap; its cache grows and the
process dies when memory is out, here KV for the padded batch is reserved and a batch that does not fit is cut.
This is `static` with its default padding, rows and responses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from batchsim.base.ranges import PositiveInt
from batchsim.kernel.policy_config import PolicyConfig, Traits
from batchsim.kernel.protocols import PolicyContext
from batchsim.policies.families.static import Static, StaticConfig


@dataclass(frozen=True)
class HfStaticConfig(PolicyConfig):
    """Knobs."""

    batch_size: PositiveInt = 1
    """Requests of a batch, as in `pipeline(batch_size=...)`, whose default is 1."""
    wait_for_full: bool = True
    """Whether a batch waits until it is full."""

    @property
    def traits(self) -> Traits:
        return Traits(
            max_num_seqs=self.batch_size,
            waits_for=self.batch_size if self.wait_for_full else None,
            knobs=("batch_size",),
        )


class HfStatic(Static):
    """The scheduler: static batching with every knob but two fixed, and nothing overridden."""

    evidence = "hand-derived"
    deviations: ClassVar[dict[str, str]] = {"no_idling": "waits for a full batch"}

    def __init__(self, config: HfStaticConfig, context: PolicyContext) -> None:
        super().__init__(StaticConfig(config.batch_size, wait_for_full=config.wait_for_full), context)
