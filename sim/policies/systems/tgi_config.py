"""The knobs of HF TGI's scheduler; see `tgi.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from sim.ranges import NonNegative, NonNegativeInt, PositiveInt, check_ranges


@dataclass(frozen=True)
class TgiConfig:
    """Knobs by TGI's names; defaults are its launcher's.

    `support_chunking` and `requires_padding` are what the model's backend tells the router: paged attention with
    chunks, paged without, or padded. `max_batch_prefill_tokens` is 4096 where the launcher cannot estimate it from the
    GPU. `max_batch_total_tokens` null: what the KV memory holds, as TGI measures it at warm-up. `max_batch_size` null:
    no limit. `use_prefix_caching` needs paged attention.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    support_chunking: bool = True
    requires_padding: bool = False
    use_prefix_caching: bool = True
    waiting_served_ratio: NonNegative = 0.3
    max_waiting_tokens: NonNegativeInt = 20
    max_batch_size: PositiveInt | None = None
    max_batch_prefill_tokens: PositiveInt = 4096
    max_batch_total_tokens: PositiveInt | None = None
    max_concurrent_requests: PositiveInt = 128

    def __post_init__(self) -> None:
        check_ranges(self)
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
    def prefix_cache(self) -> str:
        """The kind of KV manager that goes with this config."""
        return "radix" if self.use_prefix_caching else ""

    @property
    def max_num_seqs(self) -> int | None:
        """Slots, for the occupancy that is reported; none with chunking, which ignores max_batch_size."""
        return None if self.support_chunking else self.max_batch_size
