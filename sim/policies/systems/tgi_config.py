"""The knobs of HF TGI's scheduler; see `tgi.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar


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
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20
    max_batch_size: int | None = None
    max_batch_prefill_tokens: int = 4096
    max_batch_total_tokens: int | None = None
    max_concurrent_requests: int = 128

    def __post_init__(self) -> None:
        if self.requires_padding and (self.support_chunking or self.use_prefix_caching):
            raise ValueError(
                "requires_padding: true needs support_chunking: false and use_prefix_caching: false;"
                " chunks and the prefix cache need paged attention"
            )
        counts = {
            "max_batch_prefill_tokens": self.max_batch_prefill_tokens,
            "max_concurrent_requests": self.max_concurrent_requests,
            "max_batch_size": 1 if self.max_batch_size is None else self.max_batch_size,
            "max_batch_total_tokens": 1 if self.max_batch_total_tokens is None else self.max_batch_total_tokens,
        }
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"{name} {count} must be at least 1")
        if self.max_waiting_tokens < 0 or self.waiting_served_ratio < 0:
            raise ValueError(
                f"waiting_served_ratio {self.waiting_served_ratio} and max_waiting_tokens {self.max_waiting_tokens}"
                " must be 0 or more"
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
