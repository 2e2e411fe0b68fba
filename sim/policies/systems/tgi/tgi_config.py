"""The knobs of HF TGI's scheduler; see `tgi.py`."""

from __future__ import annotations

from dataclasses import dataclass

from batchsim.base.ranges import NonNegative, NonNegativeInt, PositiveInt
from batchsim.kernel.policy_config import PolicyConfig, Traits


@dataclass(frozen=True)
class TgiConfig(PolicyConfig):
    """Knobs by TGI's names, with the defaults of its launcher.

    `support_chunking` and `requires_padding` are what the model's backend reports to the router: paged attention with
    chunks, paged without, or padded.
    """

    support_chunking: bool = True
    """Whether the model's backend computes a prompt over several steps, by paged attention."""
    requires_padding: bool = False
    """Whether the model's backend pads batches, without paged attention."""
    use_prefix_caching: bool = True
    """Whether prompts' beginnings are found again; needs paged attention."""
    waiting_served_ratio: NonNegative = 0.3
    """Waiting over running requests from which on prompts interrupt decodes."""
    max_waiting_tokens: NonNegativeInt = 20
    """Decode steps after which prompts interrupt in any case."""
    max_batch_size: PositiveInt | None = None
    """Requests of a batch at most; null: no limit."""
    max_batch_prefill_tokens: PositiveInt = 4096
    """Prompt tokens of a step at most; 4096 where the launcher cannot estimate it from the GPU."""
    max_batch_total_tokens: PositiveInt | None = None
    """Tokens of all running requests at most; null: what the KV memory holds, as TGI measures it at warm-up."""
    max_concurrent_requests: PositiveInt = 128
    """Open requests beyond which others are turned away."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.requires_padding and (self.support_chunking or self.use_prefix_caching):
            raise ValueError(
                "requires_padding: true needs support_chunking: false and use_prefix_caching: false;"
                " chunks and the prefix cache need paged attention"
            )
        total = self.max_batch_total_tokens
        if total is not None and total < self.max_batch_prefill_tokens:
            raise ValueError(
                f"max_batch_prefill_tokens {self.max_batch_prefill_tokens} must be <= max_batch_total_tokens {total}"
            )

    @property
    def traits(self) -> Traits:
        return Traits(
            max_num_seqs=None if self.support_chunking else self.max_batch_size,
            prefix_cache="radix" if self.use_prefix_caching else "",
            knobs=("max_batch_size", "max_batch_prefill_tokens", "max_batch_total_tokens"),
        )
