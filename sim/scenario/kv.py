"""What a scenario says of KV memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from sim.units import Share, Size

MAX_BLOCKS = 2**31 - 1  # what a column of the records holds
STRICT: dict[str, Any] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}


@dataclass(frozen=True)
class KvConfig:
    """The KV memory. `tokens` overrides the derived budget; `swap_space` is host memory for swapped sequences."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT
    tokens: int | None = None
    block_size: int = 16
    utilisation: Share = 0.9
    swap_space: Size = 0

    def __post_init__(self) -> None:
        if self.block_size < 1 or (self.tokens is not None and self.tokens < self.block_size):
            raise ValueError(
                f"tokens {self.tokens} must hold at least one block of block_size {self.block_size}, that at least 1"
            )
        if self.tokens is not None and self.tokens // self.block_size > MAX_BLOCKS:
            raise ValueError(f"tokens {self.tokens} are more than {MAX_BLOCKS} blocks. No engine has that many")
        if not 0 < self.utilisation <= 1:
            raise ValueError(f"utilisation {self.utilisation:.6g} must be above 0% and at most 100%")
